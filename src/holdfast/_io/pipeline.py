"""Jobs on a bounded number of threads, fed by the caller: the shape of every transfer.

Invariant: every job that was taken from the iterable is run, even after a failure, so that what it holds (a slab, say)
is always given back and the iterable cannot wait for it for ever. No thread outlives the call. It never drops the first
error and never retries.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, NoReturn, TypeVar

from holdfast._values.forks import forget_in_child
from holdfast.errors import CheckpointError

Result = TypeVar("Result")


def default_workers(sharers: int = 1, *, least: int = 4) -> int:
    """How many threads keep a disk busy on this machine, in each of ``sharers`` processes that do it together."""
    cores = os.cpu_count() or 4
    alone = max(4, min(8, cores))
    return alone if sharers == 1 else max(least, min(alone, 2 * cores // sharers))


def run_bounded(jobs: Iterable[Callable[[], None]], *, workers: int, ahead: int = 2, at_once: bool = False) -> None:
    """Returns once all ``jobs`` are done; the first exception, of a job or of the iterable, is raised.

    The calling thread iterates ``jobs``, which may do work of its own, while at most ``workers + ahead`` of them are
    taken and not done; where that is one, it is a plain loop. After an exception no more are taken. A single job runs
    in the calling thread; to know that it is the only one, a second is taken before the first is begun, so that what
    jobs hold from the moment they are taken (slabs) must exist twice. With ``at_once`` every job is begun without that,
    for an iterable that waits for what comes of it.
    """
    iterator = iter(jobs)
    crew = _Crew(workers=max(1, workers), limit=max(1, workers + ahead))
    try:
        with contextlib.closing(iterator) if isinstance(iterator, Generator) else contextlib.nullcontext():
            _feed(crew, iterator, least=1 if at_once else 2)
    except BaseException as error:
        crew.fail(error)
    finally:
        crew.finish()
    failure = crew.take_failure()
    if failure is not None:
        try:
            raise failure
        finally:
            # Otherwise the error, its traceback and this frame hold each other, and the buffers with them.
            del failure


def run_ahead(tasks: Iterable[Callable[[], Result]], *, workers: int, ahead: int) -> Generator[Result, None, None]:
    """The results of ``tasks`` in their order, with up to ``ahead`` of them begun, or done, before the caller asks.

    The caller's own work between results runs beside them; where that work is Python's, it then has the interpreter to
    itself. Close the iterator to give up: what is under way is waited for.
    """
    todo: SimpleQueue[tuple[int, Callable[[], Result]] | None] = SimpleQueue()
    done: SimpleQueue[tuple[int, Callable[[], Result]]] = SimpleQueue()
    threads: list[threading.Thread] = []
    results = _InOrder(done)
    given = 0
    try:
        for task in tasks:
            todo.put((given, task))
            if given < workers:
                threads.append(_start_thread(partial(_work_ahead, todo, done), given))
            given += 1
            if given - results.taken == ahead:
                yield results.take()
        while results.taken < given:
            yield results.take()
    finally:
        with contextlib.suppress(Empty):
            while True:
                todo.get_nowait()
        for _ in threads:
            todo.put(None)
        if (interrupt := _wait_for_end(threads)) is not None:
            raise interrupt


def _work_ahead(
    todo: SimpleQueue[tuple[int, Callable[[], Result]] | None], done: SimpleQueue[tuple[int, Callable[[], Result]]]
) -> None:
    """Puts what comes of each task into ``done``, as something that returns it or raises."""
    while (entry := todo.get()) is not None:
        number, task = entry
        outcome: Callable[[], Result]
        try:
            outcome = partial(_same, task())
        except BaseException as error:
            outcome = partial(_raise, error)
        done.put((number, outcome))
        # Whatever the task and its result hold goes with them, not with the next.
        del entry, task, outcome


def _same(result: Result) -> Result:
    return result


def _raise(error: BaseException) -> NoReturn:
    raise error


def _left_behind() -> CheckpointError:
    return CheckpointError(
        "this process was forked in the middle of a save or load, which is its parent's; call it here anew"
    )


class _InOrder(Generic[Result]):
    """What comes from ``done`` in any order, in the order of its numbers."""

    def __init__(self, done: SimpleQueue[tuple[int, Callable[[], Result]]]) -> None:
        self._done = done
        self._early: dict[int, Callable[[], Result]] = {}
        self._failure: CheckpointError | None = None
        self.taken = 0
        forget_in_child(self)

    def forget_parent(self) -> None:
        """Have an error to tell: nobody works here."""
        self._failure = _left_behind()

    def take(self) -> Result:
        """The next one, waited for."""
        if self._failure is not None:
            raise self._failure
        while self.taken not in self._early:
            number, outcome = self._done.get()
            self._early[number] = outcome
        self.taken += 1
        return self._early.pop(self.taken - 1)()


def _wait_for_end(threads: list[threading.Thread]) -> BaseException | None:
    """Returns when all have ended, with what interrupted the wait, if something did.

    Else an interrupt would leave threads behind that use descriptors about to be closed.
    """
    interrupt = None
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:
                interrupt = interrupt or error
    return interrupt


def _start_thread(work: Callable[[], None], number: int) -> threading.Thread:
    thread = threading.Thread(target=work, name=f"holdfast-io-{number}", daemon=True)
    thread.start()
    return thread


def _feed(crew: _Crew, iterator: Iterator[Callable[[], None]], *, least: int) -> None:
    """Hands the jobs to the crew's threads, the first one not before there are ``least``."""
    for job in iterator:
        crew.queue(job)
        del job
        if crew.limit == 1:
            crew.drain()
        elif crew.taken >= least:
            crew.reinforce()
        if not crew.wait_for_room():
            return


class _Crew:
    """Threads, started when there is work for them, and the jobs they have not done yet."""

    def __init__(self, *, workers: int, limit: int) -> None:
        self._workers = workers
        self.limit = limit
        self._failure: BaseException | None = None
        self._begin()
        forget_in_child(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        # Apart, so that a job wakes one thread and its end none but the one that feeds.
        self._to_do = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._queue: deque[Callable[[], None]] = deque()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._finishing = False
        self.taken = 0

    def forget_parent(self) -> None:
        """Have nobody and nothing to do, and an error to tell."""
        self._begin()
        self._failure = _left_behind()

    def queue(self, job: Callable[[], None]) -> None:
        """Puts ``job`` where the next free thread finds it."""
        with self._lock:
            self._queue.append(job)
            self._unfinished += 1
            self.taken += 1
            self._to_do.notify()

    def reinforce(self) -> None:
        """Starts another thread while there are fewer than wanted and jobs wait; without any, works itself."""
        with self._lock:
            wanted = min(self._workers, self._unfinished) - len(self._threads)
        try:
            for _ in range(wanted):
                self._threads.append(_start_thread(self._work, len(self._threads)))
        except RuntimeError:
            # An interpreter that shuts down starts no threads, and a save at exit still has to work.
            if not self._threads:
                self.drain()

    def wait_for_room(self) -> bool:
        """True once another job may be taken; False when none may be, because something failed."""
        with self._lock:
            self._done.wait_for(lambda: self._failure is not None or self._unfinished < self.limit)
            return self._failure is None

    def fail(self, error: BaseException) -> None:
        """Records ``error`` unless there was one before."""
        with self._lock:
            if self._failure is None:
                self._failure = error
            self._done.notify_all()

    def take_failure(self) -> BaseException | None:
        """The first error, which is the caller's from now on."""
        failure, self._failure = self._failure, None
        return failure

    def finish(self) -> None:
        """Returns once all queued jobs are done (the calling thread takes its share) and all threads have ended."""
        with self._lock:
            self._finishing = True
            self._to_do.notify_all()
        self.drain()
        if (interrupt := _wait_for_end(self._threads)) is not None:
            self.fail(interrupt)

    def drain(self) -> None:
        """Runs queued jobs until none is left."""
        while True:
            with self._lock:
                if not self._queue:
                    return
                job = self._queue.popleft()
            try:
                job()
            except BaseException as error:
                self.fail(error)
            finally:
                # Whatever the job holds goes before the next one is waited for.
                del job
                with self._lock:
                    self._unfinished -= 1
                    self._done.notify_all()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._to_do.wait_for(lambda: self._finishing or self._queue)
                if not self._queue:
                    return
            self.drain()
