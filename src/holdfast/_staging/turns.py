"""One save at a time in this process, and what goes from one to the next: host memory, writer process, last failure.

Invariant: who has the turn owns the memory; it passes on only when the save is over, so that no save ever writes what
another has staged. Waiting for it cannot deadlock, because a save in the background needs only other saves in the
background of the same number.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from holdfast._staging.handle import AsyncSave
from holdfast._staging.memory import HostMemory
from holdfast._staging.process import WriterProcess
from holdfast._values.forks import forget_in_child
from holdfast.errors import BusyError

logger = logging.getLogger("holdfast")


def interpreter_ends() -> bool:
    """Whether nobody would wait for a new thread any more, and from Python 3.12 on none, nor a process, is started."""
    return not threading.main_thread().is_alive()


class Background:
    """A thread that waits for its work, which the interpreter does not end before; made ahead, because starting one
    takes as long as it takes another thread to give the interpreter back.
    """

    def __init__(self) -> None:
        self._work: Future[Callable[[], None]] = Future()
        self._is_started = not interpreter_ends()
        if self._is_started:
            threading.Thread(target=self._run, name="holdfast-save", daemon=False).start()

    def _run(self) -> None:
        self._work.result()()

    def start(self, work: Callable[[], None]) -> None:
        """Have ``work`` done."""
        if self._is_started:
            self._work.set_result(work)
        else:
            work()

    def call_off(self) -> None:
        """Have nothing done, unless it is too late for that."""
        if not self._work.done():
            self._work.set_result(lambda: None)


class Turns:
    """Who saves now, and what they use."""

    def __init__(self) -> None:
        self.forget_parent()
        forget_in_child(self)

    def forget_parent(self) -> None:
        """Have nobody's turn, and nothing to use."""
        self._changed = threading.Condition()
        self._current: AsyncSave | None = None
        self._last: AsyncSave | None = None
        self.memory = HostMemory()
        self.process: WriterProcess | None = None

    def take(self, handle: AsyncSave, *, wait: bool) -> None:
        """Make it the turn of ``handle``, once the save before it is over; BusyError at once if it is not to wait."""
        with self._changed:
            if self._current is not None and not wait:
                raise BusyError(
                    f"the save before this one is still {self._current.phase}; wait for its result, save less often, "
                    'or pass when_busy="wait"'
                )
            self._wait()
            self._current = handle

    def pass_on(self, handle: AsyncSave, *, is_begun: bool = True) -> None:
        """End the turn of ``handle``, which is done right after if the save was ``is_begun``."""
        with self._changed:
            if self._current is handle:
                self._current = None
                self._last = handle if is_begun else self._last
                self._changed.notify_all()

    def settle(self) -> None:
        """Return when no save is under way in the background; raises the error of one that nobody has asked for.

        A save within another one, in its ``state_dict()`` or its progress, does not wait for that.
        """
        with self._changed:
            if self._current is not None and self._current.is_within:
                return
            self._wait()
        self.raise_unobserved()

    def raise_unobserved(self) -> None:
        """Raise the error of the last save, if nobody has asked for it."""
        last = self._last
        if last is None or last.is_within:
            return
        concurrent.futures.wait([last])  # its turn is over, so this is a matter of moments
        error = last.take_unobserved()
        if error is not None:
            logger.error("nobody has asked what became of the last save, which failed; its error is raised now")
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
        with self._changed:
            self._wait()
            process, self.process = self.process, None
            with contextlib.ExitStack() as stack:
                stack.callback(self.memory.close)
                if process is not None:
                    stack.callback(process.stop)

    def _wait(self) -> None:
        """Return when it is nobody's turn; the caller has the lock."""
        if self._current is not None and self._current.is_within:
            raise BusyError(
                "this was called within an async_save, by the state_dict(), planner, storage, stager or progress "
                "callback that it is at, and would wait for it for ever; call it before or after, or call save there"
            )
        self._changed.wait_for(lambda: self._current is None)


TURNS = Turns()
"""The turns of this process."""
