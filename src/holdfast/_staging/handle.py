"""What the caller of an asynchronous save holds: a future that also tells how far the save is."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from holdfast._values.event import Event
from holdfast._values.forks import forget_in_child
from holdfast.errors import CheckpointError
from holdfast.metadata import Metadata

logger = logging.getLogger("holdfast")

Phase = Literal["planned", "staging", "staged", "writing", "published", "failed"]
Progress = Callable[["AsyncSave"], None]

_PARENTS = "this save is made by the process that this one was forked from; ask for it there"


@dataclass(eq=False)
class AsyncSaveResponse:
    """Two futures of an asynchronous save: the state has been copied, and the checkpoint has been published."""

    staging_completion: Future[None]
    upload_completion: Future[Any]


class AsyncSave(Future[Metadata], AsyncSaveResponse):
    """A save in the background: a future of the checkpoint's metadata, done when that is published and durable.

    ``phase`` is the last one reached: "planned" (all ranks know what they write), "staging", "staged" (the snapshot is
    complete, everything may be changed), "writing", and "published" or "failed". ``bytes_done`` counts what is on disk
    of this rank's ``bytes_total``. ``unchanged`` lists chosen tensors that are just as they were at the save before,
    known once the checkpoint is written.

    An error that nobody asks for with ``result`` or ``exception`` is raised by the next save.
    """

    def __init__(self) -> None:
        Future.__init__(self)
        self.staging_completion: Future[None] = Future()
        self.upload_completion: Future[Any] = self
        self.phase: Phase = "planned"
        self.bytes_total = 0
        self.unchanged: tuple[str, ...] = ()
        self._count: Callable[[], int] = lambda: 0
        self._fence: Callable[[], None] = lambda: None
        self._progress: Progress | None = None
        self._told = threading.Lock()
        self._is_observed = False
        self.is_given_up = False
        self._threads: list[int] = []
        self._metadata: Metadata | None = None
        self._error: BaseException | None = None
        self._staging_error: BaseException | None = None
        # A future waits with a condition, which does not bear interrupts.
        self.is_staged, self.is_past, self.is_over = Event(), Event(), Event()
        # A future that runs cannot be cancelled: what others have begun to write with us is not ours to take back.
        self.set_running_or_notify_cancel()
        self.staging_completion.set_running_or_notify_cancel()
        forget_in_child(self)

    def forget_parent(self) -> None:
        """Be over, with what is known, or an error: nothing will ever be heard of the rest."""
        self._told, self._progress, self._threads = threading.Lock(), None, []
        self._fence, self._is_observed = (lambda: None), True
        error = CheckpointError(_PARENTS)
        self._error = self._error if self.is_over.is_set() else error
        self._staging_error = self._staging_error if self.is_staged.is_set() else error
        self.is_staged, self.is_past, self.is_over = events = Event(), Event(), Event()
        for event in events:
            event.set()
        futures: tuple[Future[Any], ...] = (self, self.staging_completion)
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
        return self.bytes_total if self.phase == "published" else min(self.bytes_total, self._count())

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when the snapshot is complete and every tensor may be changed, by the host or by any stream.

        Raises what went wrong if it could not be completed, and TimeoutError after ``timeout`` seconds.
        """
        if not self.is_staged.wait(timeout):
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
        if not self.is_over.wait(timeout):
            raise concurrent.futures.TimeoutError
        self._is_observed = True
        return self._error

    def done(self) -> bool:
        """Whether the save is over."""
        return self.is_over.is_set()

    # What follows is for the save itself.

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Know the thread, for the length of the block, as one that the save cannot do without."""
        thread = threading.get_ident()
        self._threads.append(thread)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # in a child that was forked in between
                self._threads.remove(thread)

    @property
    def is_within(self) -> bool:
        """Whether the save waits for the calling thread, which cannot wait for it in turn."""
        return threading.get_ident() in self._threads

    def show(self, progress: Progress | None) -> None:
        """Have ``progress`` called when something has changed."""
        self._progress = progress

    def expect(self, nbytes: int, count: Callable[[], int]) -> None:
        """Have ``nbytes`` to write, of which ``count`` tells how many are."""
        self.bytes_total, self._count = nbytes, count

    def enter(self, phase: Phase) -> None:
        """Reach ``phase``."""
        self.phase = phase
        if phase == "staged" and not self.is_staged.is_set():
            self.is_staged.set()
            self.staging_completion.set_result(None)
        self.tell()

    def tell(self) -> None:
        """Have the progress shown; an error of the callback is logged and ends the showing."""
        if self._progress is None:
            return
        with self._told:
            try:
                with self.working():
                    self._progress(self)
            except Exception:
                logger.exception("the progress callback of a save failed and is not called again")
                self._progress = None

    def guard_with(self, fence: Callable[[], None]) -> None:
        """Use ``fence`` to keep what is still being copied from being changed."""
        self._fence = fence

    def succeed(self, metadata: Metadata) -> None:
        """End with a published checkpoint."""
        self.enter("published")
        self._metadata = metadata
        self.is_over.set()
        self.set_result(metadata)

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        self.phase = "failed"
        logger.error("a save in the background failed: %s", error)
        if not self.is_staged.is_set():
            self._staging_error = error
            self.is_staged.set()
            self.staging_completion.set_exception(error)
        self.tell()
        self._error = error
        self.is_over.set()
        self.set_exception(error)

    def take_unobserved(self) -> BaseException | None:
        """The error that nobody has asked for, if there is one: from now on somebody has."""
        if self._is_observed or self.is_given_up:
            return None
        self._is_observed = True
        return self._error
