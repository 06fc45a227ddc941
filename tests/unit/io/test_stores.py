"""Requests to object stores, and who waits for them. What stores do is in tests/stores."""

from __future__ import annotations

import threading

import pytest

from holdfast._io.pipeline import in_other_thread, run_bounded


def test_nobody_waits_for_a_silent_store_once_other_work_has_failed() -> None:
    answers: list[bool] = []
    asked, never = threading.Event(), threading.Event()

    def request() -> bool:
        asked.set()
        return never.wait(100)

    def fail() -> None:
        asked.wait()
        raise ValueError("the other thread")

    with pytest.raises(ValueError, match="the other thread"):
        run_bounded([lambda: answers.append(in_other_thread(request)), fail, fail], workers=2)
    assert answers == []
    never.set()


def test_what_a_request_raises_is_raised_where_it_was_asked() -> None:
    def request() -> None:
        raise LookupError("not there")

    with pytest.raises(LookupError, match="not there"):
        in_other_thread(request)
    assert in_other_thread(lambda: 7) == 7
