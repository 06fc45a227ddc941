"""Descriptors that are closed once, what a forked child forgets, and events."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from holdfast import _process as forks
from holdfast._process import CLOSED, Descriptor, Once, opened

# --- descriptors ------------------------------------------------------------------------------------------------------


def is_open(number: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{number}")


def open_one(path: Path) -> Descriptor:
    path.write_bytes(b"abc")
    return opened(map(os.open, (path,), (os.O_RDONLY,)))


def test_it_is_closed_with_the_last_reference(tmp_path: Path) -> None:
    descriptor = open_one(tmp_path / "file")
    number = int(descriptor)
    assert os.read(descriptor, 3) == b"abc"
    del descriptor
    assert not is_open(number)


def test_it_is_closed_once(tmp_path: Path) -> None:
    descriptor = open_one(tmp_path / "file")
    descriptor.close()
    again = open_one(tmp_path / "file")
    assert again == descriptor  # the system gives the number to the next one
    descriptor.close()
    del descriptor
    assert is_open(again)


def test_closed_is_not_open() -> None:
    CLOSED.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(CLOSED)


def test_what_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        opened(map(os.open, (tmp_path / "none",), (os.O_RDONLY,)))


# --- forks ------------------------------------------------------------------------------------------------------------


class Holder:
    def __init__(self) -> None:
        self.is_forgotten = False
        forks.forget_in_child(self)

    def forget_parent(self) -> None:
        self.is_forgotten = True


def in_child(ask) -> bool:
    """What ``ask`` returns in a forked child."""
    child = os.fork()
    if child == 0:
        os._exit(0 if ask() else 1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def test_a_child_forgets_what_objects_hold_and_its_parent_does_not():
    holder = Holder()
    assert in_child(lambda: holder.is_forgotten)
    assert not holder.is_forgotten


def test_a_child_resets_what_modules_hold(monkeypatch):
    monkeypatch.setattr(forks, "_resets", [])
    calls = []
    forks.reset_in_child(lambda: calls.append("reset"))
    assert in_child(lambda: calls == ["reset"])
    assert calls == []


def test_an_object_that_is_gone_is_not_asked():
    Holder()
    assert in_child(lambda: True)


# --- events -----------------------------------------------------------------------------------------------------------


def test_it_happens_once_and_for_all() -> None:
    event = Once()
    assert not event.is_set()
    assert not event.wait(0.0)
    event.set()
    event.set()
    assert event.is_set()
    assert event.wait()


def test_all_who_wait_are_woken() -> None:
    event, woken = Once(), []
    threads = [threading.Thread(target=lambda: woken.append(event.wait(300))) for _ in range(5)]
    for thread in threads:
        thread.start()
    event.set()
    for thread in threads:
        thread.join(300)
    assert woken == [True] * 5
