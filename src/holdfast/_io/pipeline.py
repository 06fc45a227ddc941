"""Jobs on a bounded number of threads, fed by the caller: the shape of every transfer.

Invariant: every job that was taken from the iterable is run, even after a failure, so that what it holds (a slab, say)
is always given back and the iterable cannot wait for it for ever; only an interrupt drops those that nobody has begun.
No thread outlives the call. It never drops the first error and never retries.

An interrupt may come anywhere in the calling thread. So threads are known before they are started, nothing that they
share needs more than one step of the interpreter (a condition does), and a crew is ended twice: if the interrupt comes
into the one ending, there is the other.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator, Iterable
from functools import partial
from itertools import repeat
from queue import Empty, SimpleQueue
from typing import Generic, NoReturn, TypeVar

from holdfast._process import forget_in_child, start_thread
from holdfast.errors import CheckpointError

Result = TypeVar("Result")
_SLICE_S = 0.2


def default_workers(sharers: int = 1, *, least: int = 4, most: int = 8) -> int:
    """How many threads keep a disk busy on this machine, in each of ``sharers`` processes that do it together."""
    cores = os.cpu_count() or 4
    alone = max(4, min(most, cores))
    return alone if sharers == 1 else max(least, min(alone, 2 * cores // sharers))


def ranks_of_host(*, otherwise: int) -> int:
    """How many ranks of the job are on this host, as torchrun tells it, or else so many."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(count)) if count.isdecimal() else otherwise


def cores_each(sharers: int) -> int:
    """How many of this machine's cores there are for each of so many; at least one."""
    return max(1, (os.cpu_count() or 1) // sharers)


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
        with crew, crew, contextlib.closing(iterator) if isinstance(iterator, Generator) else contextlib.nullcontext():
            for job in iterator:
                crew.taken += 1
                crew.to_do.put(job)
                del job
                if crew.limit == 1:
                    crew.drain()
                elif crew.taken >= (1 if at_once else 2):
                    crew.reinforce(crew.unfinished())
                if not crew.wait_for_room():
                    break
    except BaseException as error:
        crew.failures.append(error)
    for failure in crew.failures:  # the first one is told
        crew.failures.clear()  # which the frames of their tracebacks know too
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
    results: _InOrder[Result] = _InOrder()
    crew = _Crew(workers=workers, limit=ahead)
    with crew, crew:
        for task in tasks:
            crew.to_do.put(partial(results.put, crew.taken, task))
            crew.taken += 1
            crew.reinforce(crew.taken)
            if crew.taken - results.taken == ahead:
                yield results.take()
        while results.taken < crew.taken:
            yield results.take()


def in_other_thread(call: Callable[[], Result]) -> Result:
    """What ``call`` returns or raises. It runs in another thread, which is left alone if this one must give up.

    A thread of a crew has one such thread for all its calls: starting one takes as long as hashing a megabyte.
    """
    is_of_crew = hasattr(_current, "failures")
    try:
        other = getattr(_current, "other", None) or _OtherThread()
    except RuntimeError:  # an interpreter that shuts down starts no threads
        return call()
    if is_of_crew:
        _current.other = other
    answer = other.begin(call)
    while True:
        with contextlib.suppress(Empty):
            return answer.get(timeout=_SLICE_S)()
        if is_given_up():
            raise CheckpointError("the request was given up, because another part of the work had failed")


class _OtherThread:
    """A thread that makes calls for another one, in turn. It ends when nobody has this any more."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        work = partial(_serve, self._calls)
        start_thread(threading.Thread(target=work, name="holdfast-request", daemon=True))

    def __del__(self) -> None:
        self._calls.put(None)

    def begin(self, call: Callable[[], Result]) -> SimpleQueue[Callable[[], Result]]:
        """Have ``call`` made; where what comes of it will be, as something that returns it or raises."""
        answer: SimpleQueue[Callable[[], Result]] = SimpleQueue()
        self._calls.put(lambda: answer.put(_outcome(call)))
        return answer


def _serve(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call


_current = threading.local()


def is_given_up() -> bool:
    """Whether this thread works for others, and they have failed: what it waits for is of no use any more."""
    return bool(getattr(_current, "failures", ()))


def _outcome(call: Callable[[], Result]) -> Callable[[], Result]:
    """What comes of ``call``, as something that returns it or raises."""
    try:
        return partial(_same, call())
    except BaseException as error:
        return partial(_raise, error)


def _same(result: Result) -> Result:
    return result


def _raise(error: BaseException) -> NoReturn:
    raise error


def _left_behind() -> CheckpointError:
    return CheckpointError(
        "this process was forked during a save or load, which belongs to its parent; call save or load again here"
    )


class _InOrder(Generic[Result]):
    """What comes of tasks that end in any order, in the order of their numbers."""

    def __init__(self) -> None:
        self._done: SimpleQueue[tuple[int, Callable[[], Result]]] = SimpleQueue()
        self._early: dict[int, Callable[[], Result]] = {}
        self.taken = 0
        forget_in_child(self)

    def forget_parent(self) -> None:
        """Have an error to tell: nobody works here."""
        self._done, self._early = SimpleQueue(), {}
        self._done.put((self.taken, partial(_raise, _left_behind())))

    def put(self, number: int, task: Callable[[], Result]) -> None:
        """Run ``task``, and keep what comes of it."""
        self._done.put((number, _outcome(task)))

    def take(self) -> Result:
        while self.taken not in self._early:
            number, outcome = self._done.get()
            self._early[number] = outcome
        self.taken += 1
        return self._early.pop(self.taken - 1)()


class _Crew:
    """Threads, started when there is work for them, and the jobs they have not done yet; ended by leaving its block."""

    def __init__(self, *, workers: int, limit: int) -> None:
        self._workers = workers
        self.limit = limit
        self.to_do: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done: SimpleQueue[None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._finished = 0
        self.failures: list[BaseException] = []
        self.taken = 0
        forget_in_child(self)

    def forget_parent(self) -> None:
        """Have nobody and nothing to do, and an error to tell."""
        self.__init__(workers=self._workers, limit=self.limit)  # type: ignore[misc]
        self.failures.append(_left_behind())

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Returns once nothing runs any more: what is queued is done (this thread takes its share) or, after an
        interrupt, dropped. A thread that reads or writes is waited for, whatever interrupts the wait: else it would use
        descriptors that are about to be closed.
        """
        if error is not None:
            self.failures.append(error)
        self.drain()
        for _ in self._threads:
            self.to_do.put(None)
        interrupt: BaseException | None = None
        for thread in self._threads:
            # One whose start was interrupted may begin later, and then finds that there is nothing to do.
            while thread.is_alive():
                try:
                    thread.join()
                except BaseException as reason:
                    interrupt = reason
        if interrupt is not None:
            raise interrupt

    def reinforce(self, wanted: int) -> None:
        """Starts threads while there are fewer than ``wanted``, or may be; without any, works itself."""
        while len(self._threads) < min(self._workers, wanted):
            work, name = partial(_work, self.to_do, self._done, self.failures), f"holdfast-io-{len(self._threads)}"
            self._threads.append(threading.Thread(target=work, name=name, daemon=True))
            try:
                start_thread(self._threads[-1])
            except RuntimeError:
                # An interpreter that shuts down starts no threads, and a save at exit still has to work.
                self._threads.pop()
                self._workers = len(self._threads)
        if not self._threads:
            self.drain()

    def unfinished(self) -> int:
        with contextlib.suppress(Empty):
            while True:
                self._done.get_nowait()
                self._finished += 1
        return self.taken - self._finished

    def wait_for_room(self) -> bool:
        """True once another job may be taken; False when none may be, because something failed."""
        while not self.failures and self.unfinished() >= self.limit:
            self._done.get()
            self._finished += 1
        return not self.failures

    def drain(self) -> None:
        """Runs queued jobs until none is left; after an interrupt drops them."""
        with contextlib.suppress(Empty):
            while True:
                job = self.to_do.get_nowait()
                if job is not None and all(map(isinstance, self.failures, repeat(Exception))):
                    _do(job, self.failures)
                del job
                self._done.put(None)


def _work(
    to_do: SimpleQueue[Callable[[], None] | None], done: SimpleQueue[None], failures: list[BaseException]
) -> None:
    _current.failures = failures
    while (job := to_do.get()) is not None:
        _do(job, failures)
        # Whatever the job holds goes before the next one is waited for.
        del job
        done.put(None)


def _do(job: Callable[[], None], failures: list[BaseException]) -> None:
    try:
        job()
    except BaseException as error:
        failures.append(error)
    finally:
        del job  # which the traceback would keep, and all that the job holds with it
