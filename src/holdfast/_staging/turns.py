"""One save at a time in this process, and what goes from one to the next: host memory, writer process, last failure.

Invariant: who has the turn owns the memory; it passes on only when the save is over, so that no save ever writes what
another has staged. Waiting for it cannot deadlock, because a save in the background needs only other saves in the
background of the same number.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from holdfast._staging.handle import AsyncSave
from holdfast._staging.memory import HostMemory
from holdfast._staging.process import WriterProcess
from holdfast._values.ending import Ending
from holdfast._values.forks import forget_in_child
from holdfast._values.threads import start_thread
from holdfast.errors import BusyError

logger = logging.getLogger("holdfast")


def interpreter_ends() -> bool:
    """Whether nobody would wait for a new thread any more, and from Python 3.12 on none, nor a process, is started."""
    return not threading.main_thread().is_alive()


class Background:
    """A thread that waits for its work, which the interpreter does not end before; made ahead, because starting one
    takes as long as it takes another thread to give the interpreter back.

    It ends without work once it is called off. Whoever makes it sees to that before it is started.
    """

    def __init__(self) -> None:
        self._to_do: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._given: list[None] = []
        self._is_started = False

    def get_ready(self) -> None:
        """Start the thread."""
        if not interpreter_ends():
            start_thread(threading.Thread(target=_do_first, args=(self._to_do,), name="holdfast-save", daemon=False))
            self._is_started = True

    def start(self, work: Callable[[], None]) -> None:
        """Have ``work`` done."""
        # Given and noted in one step of the interpreter: no interrupt comes between.
        self._given.extend(map(self._to_do.put, (work,)))
        if not self._is_started:
            _do_first(self._to_do)

    @property
    def has_work(self) -> bool:
        """Whether it has been given its work: then all that this needs is its own."""
        return bool(self._given)

    def call_off(self) -> None:
        """Have nothing done, unless it has its work already."""
        self._to_do.put(None)


def _do_first(to_do: SimpleQueue[Callable[[], None] | None]) -> None:
    work = to_do.get()
    if work is not None:
        work()


class Turns:
    """Who saves now, and what they use."""

    def __init__(self) -> None:
        self.forget_parent()
        forget_in_child(self)

    def forget_parent(self) -> None:
        """Have nobody's turn, and nothing to use."""
        self._lock = threading.Lock()
        self._current: AsyncSave | None = None
        self._last: AsyncSave | None = None
        self.memory = HostMemory()
        self.process: WriterProcess | None = None

    def take(self, handle: AsyncSave, *, wait: bool) -> None:
        """Make it the turn of ``handle``, once the save before it is over; BusyError at once if it is not to wait.

        Whatever comes of it, an interrupt too, ``pass_on`` undoes it.
        """
        while True:
            with self._lock:
                current = self._current
                if current is None:
                    self._current = handle
                    return
            if not wait:
                raise BusyError(
                    f"the save before this one is still {current.phase}; wait for its result, save less often, "
                    'or pass when_busy="wait"'
                )
            _wait_for(current)

    def pass_on(self, handle: AsyncSave, *, is_begun: bool = True) -> None:
        """End the turn of ``handle``, which is done right after if the save was ``is_begun``; also again."""
        with self._lock:
            if self._current is handle:
                self._current = None
                self._last = handle if is_begun else self._last
        handle.is_past.set()

    def passing(self, handle: AsyncSave) -> Ending:
        """The end of a turn of ``handle`` that is no save."""
        return Ending(partial(self.pass_on, handle, is_begun=False))

    def settle(self) -> None:
        """Return when no save is under way in the background; raises the error of one that nobody has asked for.

        A save within another one, in its ``state_dict()`` or its progress, does not wait for that.
        """
        while (current := self._current) is not None:
            if current.is_within:
                return
            _wait_for(current)
        self.raise_unobserved()

    def raise_unobserved(self) -> None:
        """Raise the error of the last save, if nobody has asked for it."""
        last = self._last
        if last is None or last.is_within:
            return
        last.is_over.wait()  # its turn is over, so this is a matter of moments
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
        handle = AsyncSave()
        passing = self.passing(handle)
        with passing, passing:
            self.take(handle, wait=True)
            if self.process is not None:
                self.process.stop()
                self.process = None
            self.memory.close()


def _wait_for(current: AsyncSave) -> None:
    """Return when the turn of ``current`` is over."""
    if current.is_within:
        raise BusyError(
            "this was called within an async_save, by the state_dict(), planner, storage, stager or progress "
            "callback that it is at, and would wait for it for ever; call it before or after, or call save there"
        )
    current.is_past.wait()


TURNS = Turns()
"""The turns of this process."""
