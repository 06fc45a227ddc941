"""Jobs on a few threads: bounded, in order where that counts, and ended by the first error."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from holdfast._io.pipeline import default_workers, run_ahead, run_bounded
from holdfast._io.slabs import Slab, SlabRing

PATIENCE_S = 300


class Planned(Exception):
    """The failure that a test asks for."""


def io_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-io")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert io_threads() == []


def test_an_iterable_that_waits_for_its_first_job_gets_what_it_waits_for() -> None:
    first, second = threading.Event(), threading.Event()

    def jobs() -> Iterator[Callable[[], None]]:
        yield first.set
        assert first.wait(PATIENCE_S)
        yield second.set

    run_bounded(jobs(), workers=2, at_once=True)
    assert second.is_set()


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_every_job_runs_once(workers: int, ahead: int, count: int) -> None:
    done: list[int] = []
    run_bounded([partial(done.append, number) for number in range(count)], workers=workers, ahead=ahead)
    assert sorted(done) == list(range(count))


def test_a_single_job_runs_in_the_calling_thread() -> None:
    ran: list[threading.Thread] = []
    run_bounded([lambda: ran.append(threading.current_thread())], workers=4)
    assert ran == [threading.current_thread()]


def test_a_bound_of_one_is_a_plain_loop() -> None:
    events: list[str] = []

    def jobs() -> Iterator[Callable[[], None]]:
        for number in range(3):
            events.append(f"take {number}")
            yield partial(events.append, f"run {number}")

    run_bounded(jobs(), workers=1, ahead=0)
    assert events == ["take 0", "run 0", "take 1", "run 1", "take 2", "run 2"]


def test_jobs_run_side_by_side_on_named_threads() -> None:
    barrier = threading.Barrier(5)
    names: set[str] = set()

    def job() -> None:
        barrier.wait(PATIENCE_S)
        names.add(threading.current_thread().name)

    def jobs() -> Iterator[Callable[[], None]]:
        yield from [job] * 4
        # Four jobs and this thread wait for each other, so four more threads must be at work.
        barrier.wait(PATIENCE_S)

    run_bounded(jobs(), workers=4, ahead=2)
    assert names == {"holdfast-io-0", "holdfast-io-1", "holdfast-io-2", "holdfast-io-3"}


def test_the_iterable_runs_in_the_calling_thread() -> None:
    threads: set[threading.Thread] = set()

    def jobs() -> Iterator[Callable[[], None]]:
        for _ in range(10):
            threads.add(threading.current_thread())
            yield lambda: None

    run_bounded(jobs(), workers=2)
    assert threads == {threading.current_thread()}


@pytest.mark.parametrize(("workers", "ahead"), [(1, 1), (2, 0), (2, 2), (4, 1)])
def test_no_more_jobs_are_taken_than_allowed(workers: int, ahead: int) -> None:
    lock = threading.Lock()
    unfinished = 0
    most = 0
    running = 0
    most_running = 0

    def job() -> None:
        nonlocal unfinished, running, most_running
        with lock:
            running += 1
            most_running = max(most_running, running)
        with lock:
            running -= 1
            unfinished -= 1

    def jobs() -> Iterator[Callable[[], None]]:
        nonlocal unfinished, most
        for _ in range(300):
            with lock:
                unfinished += 1
                most = max(most, unfinished)
            yield job

    run_bounded(jobs(), workers=workers, ahead=ahead)
    assert unfinished == 0
    assert most <= workers + ahead
    assert most_running <= workers + 1


def test_the_first_failure_of_a_job_is_raised_and_stops_the_taking() -> None:
    failed = threading.Event()
    taken = 0

    def failing() -> None:
        failed.set()
        raise Planned("first")

    def jobs() -> Iterator[Callable[[], None]]:
        nonlocal taken
        taken += 1
        yield failing
        for _ in range(10_000):
            taken += 1
            yield lambda: None
            assert failed.wait(PATIENCE_S)

    with pytest.raises(Planned, match="first"):
        run_bounded(jobs(), workers=2, ahead=1)
    assert taken < 10_000


def test_later_failures_are_dropped() -> None:
    first_failed = threading.Event()

    def first() -> None:
        try:
            raise Planned("first")
        finally:
            first_failed.set()

    def second() -> None:
        first_failed.wait(PATIENCE_S)
        raise ValueError("second")

    # One worker keeps the order; the second job was taken, so it runs, and what it raises is not heard of.
    with pytest.raises(Planned, match="first"):
        run_bounded([first, second], workers=1, ahead=1)
    assert first_failed.is_set()


def test_every_job_that_was_taken_runs_even_after_a_failure() -> None:
    taken: list[int] = []
    ran: list[int] = []

    def job(number: int) -> Callable[[], None]:
        def run() -> None:
            ran.append(number)
            if number == 3:
                raise Planned

        return run

    def jobs() -> Iterator[Callable[[], None]]:
        for number in range(1000):
            taken.append(number)
            yield job(number)

    with pytest.raises(Planned):
        run_bounded(jobs(), workers=3, ahead=3)
    assert sorted(ran) == taken
    assert len(taken) <= 1000


def test_a_failing_iterable_lets_the_taken_jobs_end() -> None:
    ran: list[int] = []

    def jobs() -> Iterator[Callable[[], None]]:
        for number in range(5):
            yield partial(ran.append, number)
        raise Planned("iterable")

    with pytest.raises(Planned, match="iterable"):
        run_bounded(jobs(), workers=2)
    assert sorted(ran) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("before", [0, 1])
def test_an_iterable_that_fails_early_is_raised(before: int) -> None:
    ran: list[int] = []

    def jobs() -> Iterator[Callable[[], None]]:
        for number in range(before):
            yield partial(ran.append, number)
        raise Planned

    with pytest.raises(Planned):
        run_bounded(jobs(), workers=2)
    assert ran == list(range(before))


def test_a_generator_is_closed_after_a_failure() -> None:
    closed: list[bool] = []

    def jobs() -> Iterator[Callable[[], None]]:
        try:
            while True:
                yield failing
        finally:
            closed.append(True)

    def failing() -> None:
        raise Planned

    # Held here, so that only an explicit close can end it.
    generator = jobs()
    with pytest.raises(Planned):
        run_bounded(generator, workers=2)
    assert closed == [True]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit])
def test_interrupts_end_the_run_too(failure: type[BaseException]) -> None:
    ran: list[int] = []

    def jobs() -> Iterator[Callable[[], None]]:
        yield lambda: ran.append(0)
        yield lambda: ran.append(1)
        raise failure

    with pytest.raises(failure):
        run_bounded(jobs(), workers=2)
    assert sorted(ran) == [0, 1]


def test_an_interrupt_while_waiting_for_threads_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    join = threading.Thread.join
    release = threading.Event()
    interrupts: list[str] = []

    def interrupted_once(thread: threading.Thread, timeout: float | None = None) -> None:
        if not interrupts:
            interrupts.append(thread.name)
            release.set()
            raise KeyboardInterrupt
        join(thread, timeout)

    started = threading.Semaphore(0)

    def job() -> None:
        started.release()
        assert release.wait(PATIENCE_S)

    def jobs() -> Iterator[Callable[[], None]]:
        yield job
        yield job
        # Both are on threads now, so that the calling thread finds nothing left to do but to join them.
        assert started.acquire(timeout=PATIENCE_S)
        assert started.acquire(timeout=PATIENCE_S)

    monkeypatch.setattr(threading.Thread, "join", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        run_bounded(jobs(), workers=2)
    assert len(interrupts) == 1


def test_a_failure_does_not_keep_the_buffers_of_its_job_alive() -> None:
    class Buffer:
        pass

    alive: list[weakref.ref[Buffer]] = []

    def jobs() -> Iterator[Callable[[], None]]:
        for _ in range(4):
            buffer = Buffer()
            alive.append(weakref.ref(buffer))

            def run(buffer: Buffer = buffer) -> None:
                raise Planned

            yield run
            del run, buffer

    gc.disable()
    try:
        with pytest.raises(Planned):
            run_bounded(jobs(), workers=2)
        assert [reference() for reference in alive] == [None] * len(alive)
    finally:
        gc.enable()


def test_a_failure_with_all_slabs_lent_does_not_block_the_iterable() -> None:
    ring = SlabRing(2)

    def job(slab: Slab) -> Callable[[], None]:
        def run() -> None:
            try:
                raise Planned
            finally:
                ring.release(slab)

        return run

    with pytest.raises(Planned):
        run_bounded((job(ring.acquire()) for _ in range(100)), workers=4, ahead=2)
    # All came back: both can be borrowed at once.
    with ring.lend(), ring.lend():
        assert ring.allocated == 2


def test_without_new_threads_the_caller_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []

    def refusing(thread: threading.Thread) -> None:
        refused.append(thread.name)
        raise RuntimeError("can't create new thread at interpreter shutdown")

    ran: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", refusing)
    run_bounded([lambda: ran.append(threading.current_thread())] * 20, workers=3, ahead=1)
    assert ran == [threading.current_thread()] * 20
    assert refused


def test_fewer_threads_than_wanted_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    refused: list[str] = []

    def one_only(thread: threading.Thread) -> None:
        if not thread.name.endswith("-0"):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    ran: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", one_only)
    run_bounded([partial(ran.append, number) for number in range(20)], workers=3)
    assert sorted(ran) == list(range(20))
    assert refused


@pytest.mark.parametrize(("cores", "workers"), [(1, 4), (4, 4), (6, 6), (64, 8), (None, 4)])
def test_default_workers_follow_the_machine(monkeypatch: pytest.MonkeyPatch, cores: int | None, workers: int) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert default_workers() == workers
    assert default_workers(1, least=2) == workers


def test_processes_that_work_together_have_fewer_threads_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert [default_workers(sharers, least=2) for sharers in (2, 4, 8)] == [2, 2, 2]
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert [default_workers(sharers, least=3) for sharers in (2, 16, 32, 64)] == [8, 8, 4, 3]


def test_results_of_run_ahead_come_in_order_while_others_are_under_way() -> None:
    started: list[int] = []
    gates = [threading.Event() for _ in range(6)]

    def task(number: int) -> int:
        started.append(number)
        assert gates[number].wait(300)
        return number * 10

    results = run_ahead((partial(task, number) for number in range(6)), workers=3, ahead=3)
    for number in (2, 1, 0):  # finished in another order than begun
        gates[number].set()
    assert next(results) == 0
    assert max(started) <= 2
    for gate in gates:
        gate.set()
    assert list(results) == [10, 20, 30, 40, 50]


def test_run_ahead_raises_the_error_of_a_task_and_leaves_no_thread() -> None:
    def fail() -> int:
        raise ValueError("no")

    before = threading.active_count()
    results = run_ahead([lambda: 1, fail, lambda: 3], workers=2, ahead=2)
    assert next(results) == 1
    with pytest.raises(ValueError, match="no"):
        list(results)
    assert threading.active_count() == before


def test_a_run_ahead_that_is_given_up_waits_for_what_is_under_way() -> None:
    begun, ended = threading.Event(), threading.Event()

    def slow() -> int:
        begun.set()
        ended.wait(0.05)
        ended.set()
        return 2

    results = run_ahead([lambda: 1, slow, lambda: 3], workers=2, ahead=2)
    assert next(results) == 1
    assert begun.wait(300)
    results.close()
    assert ended.is_set()


def test_run_ahead_has_more_done_than_it_has_threads() -> None:
    done: list[int] = []
    enough = threading.Event()

    def task(number: int) -> int:
        done.append(number)
        if len(done) == 4:
            enough.set()
        return number

    results = run_ahead((partial(task, number) for number in range(9)), workers=1, ahead=4)
    assert next(results) == 0
    assert enough.wait(300)
    assert list(results) == list(range(1, 9))
