"""What asks a run to stop: signals, in children of the test; a file; the end of the allocation, by the test's clock."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from forked_children import end_of, in_child, start_child
from outside_views import writer_processes

from holdfast import AsyncCheckpointerType, StopOn, async_save, ignore_stop_signals, release
from holdfast._ranks.agreement import Agreement
from holdfast._ranks.ranks import Ranks
from holdfast._steps import stopping
from holdfast._steps.stopping import StopWatch

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


def watch_on(stop: StopOn | None = None, **options: Any) -> StopWatch:
    return StopWatch(stop or StopOn(), Agreement(Ranks(), "t"), **options)


def until(happened: Callable[[], object]) -> None:
    while not happened():
        time.sleep(0.001)


def send(number: signal.Signals) -> None:
    """Send this process a signal, which it has dealt with when this returns."""
    os.kill(os.getpid(), number)


class Later:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.now

    def wait_for_looks(self) -> None:
        """Return when it has been looked at, after everything that was done before."""
        enough = self.looks + 3
        until(lambda: self.looks >= enough)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Later:
    monkeypatch.setattr(stopping, "_LOOK_S", 0.001)
    return Later()


@pytest.fixture
def watches() -> Iterator[Callable[..., StopWatch]]:
    """Makes watches without signals, which are closed in the end."""
    made = []

    def make(**stop: Any) -> StopWatch:
        clock = stop.pop("clock", time.time)
        made.append(watch_on(StopOn(signals=(), **stop), clock=clock))
        return made[-1]

    yield make
    for each in made:
        each.close()


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [TERM, USR1])
def test_a_signal_asks_all_ranks_to_stop(number: signal.Signals) -> None:
    def child() -> None:
        agreement, steps = Agreement(Ranks(), "t"), itertools.count()
        watch = StopWatch(StopOn(), agreement)
        assert not watch.reason
        send(number)
        assert watch.reason
        until(lambda: agreement.begin_step(next(steps)) == {"stop"})
        assert watch.reason == f"{number.name} to rank 0"

    assert in_child(child) == 0


def test_what_handled_a_signal_before_is_called_and_put_back() -> None:
    def child() -> None:
        seen: list[int] = []
        before = lambda number, frame: seen.append(number)  # noqa: E731
        signal.signal(TERM, before)
        watch = watch_on()
        send(TERM)
        assert seen == [TERM]
        assert watch.reason
        watch.close()
        watch.close()
        assert signal.getsignal(TERM) is before
        assert signal.getsignal(USR1) == signal.SIG_DFL

    assert in_child(child) == 0


@pytest.mark.parametrize(
    ("before", "after_s", "end"),
    [
        (signal.SIG_DFL, 4.0, 0),  # agent and scheduler may both tell
        (signal.SIG_DFL, 6.0, -TERM),
        (signal.SIG_IGN, 6.0, 0),
    ],
)
def test_a_second_signal_has_its_old_effect(before: signal.Handlers, after_s: float, end: int) -> None:
    def child() -> None:
        signal.signal(TERM, before)
        watch = watch_on()
        send(USR1)
        now = time.monotonic()
        with mock.patch.object(time, "monotonic", return_value=now):
            send(TERM)
            assert watch.reason
        with mock.patch.object(time, "monotonic", return_value=now + after_s):
            send(TERM)

    assert in_child(child) == end


def test_a_second_interrupt_is_one() -> None:
    def child() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        watch = watch_on(StopOn(signals=("SIGINT",)))
        send(signal.SIGINT)
        assert watch.reason
        later = time.monotonic() + 6
        with mock.patch.object(time, "monotonic", return_value=later), pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)

    assert in_child(child) == 0


def test_a_forked_child_dies_of_the_signal_as_before() -> None:
    def child() -> None:
        ready, told = os.pipe()
        watch = watch_on()

        def wait_for_end() -> None:
            os.write(told, b"!")
            threading.Event().wait(300)

        grandchild = start_child(wait_for_end)
        assert os.read(ready, 1)
        os.kill(grandchild, TERM)
        assert end_of(grandchild) == -TERM
        assert not watch.reason
        send(TERM)
        assert watch.reason

    assert in_child(child) == 0


def test_two_watches_hear_a_signal_and_may_end_in_any_order() -> None:
    def child() -> None:
        seen: list[int] = []
        signal.signal(TERM, lambda number, frame: seen.append(number))
        first, second = watch_on(), watch_on()
        send(TERM)
        assert first.reason
        assert second.reason
        first.close()  # its handler is still called by the second one
        send(TERM)
        second.close()
        send(TERM)
        assert seen == [TERM] * 3

    assert in_child(child) == 0


def test_only_the_main_thread_can_handle_signals() -> None:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            watch_on()
        except ValueError as error:
            raised.append(error)

    before = [signal.getsignal(number) for number in (TERM, USR1)]
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(300)
    assert "make the CheckpointManager there, or with StopOn(signals=())" in str(raised[0])
    assert [signal.getsignal(number) for number in (TERM, USR1)] == before


def test_a_worker_of_a_loader_ends_by_its_rank_alone() -> None:
    asked, ask = os.pipe()
    answered, answer = os.pipe()

    def worker() -> None:
        ignore_stop_signals(0)
        while os.read(asked, 1):
            os.write(answer, b"!")

    child = start_child(worker)

    def is_alive() -> bool:
        os.write(ask, b"?")
        return os.read(answered, 1) == b"!"

    assert is_alive()
    for number in (TERM, USR1):
        assert in_child(lambda number=number: os.kill(child, number)) == 0  # as the agent, which is not its parent
        assert is_alive()
    os.kill(child, USR1)
    assert is_alive()
    os.kill(child, TERM)
    assert end_of(child) == 0


def test_the_process_that_writes_survives_the_stop_of_all_that_belongs_to_a_job(tmp_path: Path) -> None:
    kind = AsyncCheckpointerType.PROCESS
    async_save({"a": torch.ones(3)}, tmp_path / "a", async_checkpointer_type=kind).result()
    before = writer_processes()
    assert before
    for writer in before:
        os.kill(writer, TERM)
        os.kill(writer, USR1)
    async_save({"a": torch.ones(3)}, tmp_path / "b", async_checkpointer_type=kind).result()
    assert writer_processes() == before
    release()


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_file_that_is_made_asks_to_stop(tmp_path: Path, clock: Later, watches: Callable[..., StopWatch]) -> None:
    watch = watches(file=tmp_path / "runs" / "STOP", end=1e9, clock=clock)
    clock.wait_for_looks()
    assert not watch.reason
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "STOP").touch()
    until(lambda: watch.reason)
    assert watch.reason == f"the file {str(tmp_path / 'runs' / 'STOP')!r}"


def test_a_file_of_an_earlier_run_counts_when_it_is_touched(
    tmp_path: Path, clock: Later, watches: Callable[..., StopWatch], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "STOP"
    file.touch()
    watch = watches(file=file, end=1e9, clock=clock)
    assert "was there before this run" in caplog.text
    clock.wait_for_looks()
    assert not watch.reason
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))
    until(lambda: watch.reason)


# --- the end of the allocation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [1000.0, datetime(1970, 1, 1, 1, 16, 40, tzinfo=timezone(timedelta(hours=1)))])
def test_a_run_stops_in_time_before_its_allocation_ends(
    end: Any, clock: Later, watches: Callable[..., StopWatch]
) -> None:
    clock.now = 899.9
    watch = watches(end=end, margin_s=100, clock=clock)
    clock.wait_for_looks()
    assert not watch.reason
    clock.now = 900.0
    until(lambda: watch.reason)
    assert watch.reason.startswith("the allocation ends at 1970-01-01 ")


def test_slurm_says_when_the_allocation_ends(
    clock: Later, watches: Callable[..., StopWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "5000")
    watch = watches(margin_s=10, clock=clock)
    clock.wait_for_looks()
    assert not watch.reason
    clock.now = 4990.0
    until(lambda: watch.reason)
    assert StopOn(end=7.0).end_s == 7.0


def test_an_end_that_is_no_time_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "soon")
    assert StopOn().end_s is None
    assert "SLURM_JOB_END_TIME is 'soon', which is no time" in caplog.text


def test_the_margin_follows_what_was_measured(watches: Callable[..., StopWatch]) -> None:
    watch = watches()
    assert watch.margin_s == 130
    watch.measured(step_s=3.0)
    assert watch.margin_s == 136
    watch.measured(durable_s=20.0)
    watch.measured(step_s=1.0, durable_s=4.0)
    assert watch.margin_s == 56
    assert watches(margin_s=7).margin_s == 7


def test_only_the_coordinator_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_LOOK_S", 0.001)
    looks = itertools.count()
    agreement = Agreement(Ranks(rank=1, is_coordinator=False), "t")
    watch = StopWatch(StopOn(signals=(), file=tmp_path, end=0), agreement, clock=lambda: float(next(looks)))
    watch.close()
    assert next(looks) == 0
    assert not watch.reason


# --- words ------------------------------------------------------------------------------------------------------------


def test_a_loader_worker_that_died_of_the_stop_is_explained(
    tmp_path: Path, clock: Later, watches: Callable[..., StopWatch], caplog: pytest.LogCaptureFixture
) -> None:
    died = RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")
    watches().close(died)
    watch = watches(end=0, clock=clock)
    until(lambda: watch.reason)
    watch.close(ValueError("something else"))
    assert not caplog.records
    watch.close(died)
    assert "pass worker_init_fn=holdfast.ignore_stop_signals" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"signals": "SIGTERM"}, "as ('SIGTERM',), not 'SIGTERM'"),
        ({"signals": ("SIGKILL",)}, "can be caught"),
        ({"signals": (15,)}, "not (15,)"),
        ({"end": datetime(2030, 1, 1)}, "end is a datetime with a time zone, or seconds since the epoch, not"),
        ({"end": "tomorrow"}, "seconds since the epoch, not 'tomorrow'"),
        ({"end": float("nan")}, "not nan"),
        ({"margin_s": -1}, "margin_s is a number of seconds or 'auto', not -1"),
        ({"margin_s": "automatic"}, "not 'automatic'"),
        ({"margin_s": True}, "not True"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        StopOn(**arguments)
