from __future__ import annotations

import threading

from holdfast._process import Event


def test_it_happens_once_and_for_all() -> None:
    event = Event()
    assert not event.is_set()
    assert not event.wait(0.0)
    event.set()
    event.set()
    assert event.is_set()
    assert event.wait()


def test_all_who_wait_are_woken() -> None:
    event, woken = Event(), []
    threads = [threading.Thread(target=lambda: woken.append(event.wait(300))) for _ in range(5)]
    for thread in threads:
        thread.start()
    event.set()
    for thread in threads:
        thread.join(300)
    assert woken == [True] * 5
