"""One save at a time in this process, what goes from one to the next, and what the caller of one holds.

Invariant: who has the turn owns the memory; it passes on only when the save is over, so that no save ever writes what
another has staged. Waiting for it cannot deadlock, because a save in the background needs only other saves in the
background of the same number.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Literal

from holdfast._process import Ending, Once, forget_in_child
from holdfast._staging.memory import HostMemory
from holdfast._staging.process import WriterProcess
from holdfast._values.deadline import Progress
from holdfast.errors import BusyError, CheckpointError
from holdfast.events import SaveReport
from holdfast.metadata import Metadata

logger = logging.getLogger("holdfast")

Phase = Literal["planned", "staging", "staged", "writing", "published", "failed"]
OnProgress = Callable[["AsyncSave"], object]

_PARENTS = "this save belongs to the parent of this process; ask for its result there"


@dataclass(eq=False)
class AsyncSaveResponse:
    """Two futures of an asynchronous save: the state has been copied, and the checkpoint has been published."""

    staging_completion: Future[None]
    upload_completion: Future[Metadata]


class AsyncSave(Future[Metadata], AsyncSaveResponse):
    """A save in the background: a future of the checkpoint's metadata, done when that is published and durable.

    ``phase`` is the last one reached: "planned" (all ranks know what they write), "staging", "staged" (the snapshot is
    complete, everything may be changed), "writing", and "published" or "failed". ``bytes_done`` counts what is on disk
    of this rank's ``bytes_total``. ``unchanged`` lists chosen tensors that are just as they were at the save before,
    known once the checkpoint is written. ``report`` tells, on the coordinator once it is published, how long that took.
    ``path`` is where the checkpoint is written; "" with a storage of the caller's.

    An error that nobody asks for with ``result`` or ``exception`` is raised by the next save.
    """

    def __init__(self) -> None:
        Future.__init__(self)
        self.staging_completion: Future[None] = Future()
        self.upload_completion: Future[Metadata] = self
        self.phase: Phase = "planned"
        self.path = ""
        self.bytes_total = 0
        self.unchanged: tuple[str, ...] = ()
        self.report: SaveReport | None = None
        self._written = Progress()
        self._fence: Callable[[], object] = lambda: None
        self._on_progress: OnProgress | None = None
        self._told = threading.Lock()
        self._is_observed = False
        self._is_given_up = False
        self._threads: list[int] = []
        self._metadata: Metadata | None = None
        self._error: BaseException | None = None
        self._staging_error: BaseException | None = None
        # A future waits with a condition, which does not bear interrupts.
        self._is_staged, self._is_past, self._is_over = Once(), Once(), Once()
        # A future that runs cannot be cancelled: what others have begun to write with us is not ours to take back.
        self.set_running_or_notify_cancel()
        self.staging_completion.set_running_or_notify_cancel()
        forget_in_child(self)

    def forget_parent(self) -> None:
        """End with what is known, or with an error: a child never hears of the rest."""
        self._told, self._on_progress, self._threads = threading.Lock(), None, []
        self._fence, self._is_observed = (lambda: None), True
        error = CheckpointError(_PARENTS)
        self._error = self._error if self._is_over.is_set() else error
        self._staging_error = self._staging_error if self._is_staged.is_set() else error
        self._is_staged, self._is_past, self._is_over = events = Once(), Once(), Once()
        for event in events:
            event.set()
        futures: tuple[Future[Metadata] | Future[None], ...] = (self, self.staging_completion)
        for future in futures:  # whose locks may be held by the threads that end them
            if future._state == "FINISHED":
                future._condition = threading.Condition()
                continue
            self.phase = "failed"
            Future.__init__(future)
            future.set_exception(error)

    @property
    def bytes_done(self) -> int:
        """Bytes of this rank that the system has taken."""
        return self.bytes_total if self.phase == "published" else min(self.bytes_total, self._written.done)

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when the snapshot is complete and every tensor may be changed, by the host or by any stream.

        Raises what went wrong if it could not be completed, and TimeoutError after ``timeout`` seconds.
        """
        if not self._ends_staging(timeout):
            raise concurrent.futures.TimeoutError
        if self._staging_error is not None:
            raise self._staging_error

    def fence(self) -> None:
        """Let whatever the current streams are given from here on run after the copies; blocks as little as it can.

        Memory of the host has been copied when this returns. It never raises: a failed snapshot needs no protection.
        """
        self._fence()

    def result(self, timeout: float | None = None) -> Metadata:
        """The metadata of the published checkpoint, or the error that the save ended with."""
        error = self.exception(timeout)
        if error is not None:
            try:
                raise error
            finally:
                del error  # otherwise it, its traceback and this frame hold each other
        assert self._metadata is not None
        return self._metadata

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error that the save ended with; None when the checkpoint is published."""
        if not self._is_over.wait(timeout):
            raise concurrent.futures.TimeoutError
        self._is_observed = True
        return self._error

    def done(self) -> bool:
        return self._is_over.is_set()

    def __repr__(self) -> str:
        return f"<AsyncSave {self.phase}, {self.bytes_done:,} of {self.bytes_total:,} bytes of this rank>"

    def __dir__(self) -> list[str]:
        """What is the caller's; what ends a future is for who runs it."""
        return [name for name in super().__dir__() if not name.startswith("set_") and name != "forget_parent"]

    # What follows is for the save itself.

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Know the thread, for the length of the block, as one that the save cannot do without."""
        thread = threading.get_ident()
        self._threads.append(thread)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # in a child that was forked in between
                self._threads.remove(thread)

    @property
    def _is_within(self) -> bool:
        """Whether the save waits for the calling thread, which cannot wait for it in turn."""
        return threading.get_ident() in self._threads

    def _ends_staging(self, timeout: float | None = None) -> bool:
        """Wait until the snapshot is complete or has failed; whether it is, or has."""
        if self._is_staged.wait(timeout):
            concurrent.futures.wait([self.staging_completion])  # which is told a moment later
        return self._is_staged.is_set()

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        if phase == "staged" and not self._is_staged.is_set():
            self._is_staged.set()
            self.staging_completion.set_result(None)
        self._tell()

    def _tell(self) -> None:
        """Have the progress shown; an error of the callback is logged and ends the showing."""
        if self._on_progress is None:
            return
        with self._told:
            try:
                with self._working():
                    self._on_progress(self)
            except Exception:
                logger.exception("the progress callback of a save failed and is not called again")
                self._on_progress = None

    def _guard_with(self, fence: Callable[[], object]) -> None:
        """Use ``fence`` to keep what is still being copied from being changed."""
        self._fence = fence

    def _succeed(self, metadata: Metadata) -> None:
        self._enter("published")
        self._metadata = metadata
        self._is_over.set()
        self.set_result(metadata)

    def _fail(self, error: BaseException) -> None:
        self.phase = "failed"
        logger.error("a save in the background failed: %s", error)
        if not self._is_staged.is_set():
            self._staging_error = error
            self._is_staged.set()
            self.staging_completion.set_exception(error)
        self._tell()
        self._error = error
        self._is_over.set()
        self.set_exception(error)

    def _take_unobserved(self) -> BaseException | None:
        """The error that nobody has asked for, if there is one: from now on somebody has."""
        if self._is_observed or self._is_given_up:
            return None
        self._is_observed = True
        return self._error


def interpreter_ends() -> bool:
    """Whether the interpreter shuts down: it waits for no new thread, and from Python 3.12 on it starts none."""
    return not threading.main_thread().is_alive()


class Turns:
    """Who saves now, and what they use."""

    def __init__(self) -> None:
        self.forget_parent()
        forget_in_child(self)

    def forget_parent(self) -> None:
        self._lock = threading.Lock()
        self._current: AsyncSave | None = None
        self._last: AsyncSave | None = None
        self.memory = HostMemory()
        self.process: WriterProcess | None = None

    def take(self, handle: AsyncSave, *, wait: bool) -> None:
        """Make it the turn of ``handle``, once the save before it is over; BusyError at once if it is not to wait.

        Whatever comes of it, an interrupt too, ``end`` undoes it.
        """
        while True:
            with self._lock:
                current = self._current
                if current is None:
                    self._current = handle
                    return
            if not wait:
                raise BusyError(
                    f"the last save is still {current.phase}; wait for its result, save less often, "
                    'or pass when_busy="wait"'
                )
            _wait_for(current)

    def end(self, handle: AsyncSave, *, is_begun: bool = True) -> None:
        """End the turn of ``handle``; may be called again. If ``is_begun``, its save is over in a moment."""
        with self._lock:
            if self._current is handle:
                self._current = None
                self._last = handle if is_begun else self._last
        handle._is_past.set()

    def ending(self, handle: AsyncSave) -> Ending:
        """The end of a turn of ``handle`` that is no save."""
        return Ending(partial(self.end, handle, is_begun=False))

    def finish(self) -> None:
        """Return when no save is under way in the background; raises the error of one that nobody has asked for.

        A save within another one, in its ``state_dict()`` or its progress, does not wait for that.
        """
        while (current := self._current) is not None:
            if current._is_within:
                return
            _wait_for(current)
        self.raise_unobserved()

    def raise_unobserved(self) -> None:
        last = self._last
        if last is None or last._is_within:
            return
        last._is_over.wait()  # its turn is over, so this is a matter of moments
        error = last._take_unobserved()
        if error is not None:
            logger.error("the last save failed, and its result was never asked for; its error is raised now")
            raise error

    def fence(self) -> None:
        """Let the caller's streams wait for what the save under way has yet to copy."""
        current = self._current
        if current is not None:
            current.fence()

    @property
    def bytes_done(self) -> int:
        """How far the save under way is: whoever waits for a turn shows this as progress."""
        current = self._current
        return 0 if current is None else current.bytes_done

    def writer_process(self) -> WriterProcess:
        """The process that writes, started anew if there is none or it has died."""
        if self.process is None:
            self.process = WriterProcess()
        return self.process

    def release(self) -> None:
        """Give back memory and process, once the save under way is over."""
        handle = AsyncSave()
        turn = self.ending(handle)
        with turn, turn:
            self.take(handle, wait=True)
            if self.process is not None:
                self.process.close()
                self.process = None
            self.memory.close()


def _wait_for(current: AsyncSave) -> None:
    """Return when the turn of ``current`` is over."""
    if current._is_within:
        raise BusyError(
            "this was called inside an async_save, by its state_dict(), planner, storage, stager or progress callback, "
            "and would wait for ever; call it before or after, or call save instead"
        )
    current._is_past.wait()


TURNS = Turns()
"""The turns of this process."""
