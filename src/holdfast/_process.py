"""This process: what a forked child forgets; threads, waits, endings and descriptors that bear interrupts; and a pause
of its cycle collector.

A child of ``os.fork()`` has copies of all objects of its parent, and none of its threads. A copy of a lock may be held
for ever, a copy of a finalizer would remove the parent's files, a copy of a socket hides that the parent has died.
Whoever holds such a thing says here how the child forgets it; nothing else calls ``os.register_at_fork``.

Invariant: to forget is to drop copies and to make new locks. It never writes, removes, unlocks, sends or waits.

A descriptor that a thread has just been given, and nobody has noted yet, cannot be forgotten. Where a copy of it would
do harm, ``begun`` tells whether a fork may have made one; then the thread gets itself another.

An interrupt may come after any call. The waits of the standard library use a condition, whose lock is given up and
taken back in several steps: here are others. Or the system has opened something, and Python has not kept the number
yet: so the number becomes an object that closes it by steps of C alone, between which no interrupt comes.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import gc
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")

_SLICE_S = 0.25


class Inherited(Protocol):
    """An object that a child of this process must not use as it is."""

    def forget_parent(self) -> None:
        """Become, in the child, as if new and empty: this thread is the only one there is."""
        ...


_resets: list[Callable[[], None]] = []
_inherited: weakref.WeakValueDictionary[int, Inherited] = weakref.WeakValueDictionary()
_begun = 0


def reset_in_child(reset: Callable[[], None]) -> Callable[[], None]:
    """Have ``reset`` called in every child, right after the fork: for what a module holds. Usable as a decorator."""
    _resets.append(reset)
    return reset


def forget_in_child(holder: Inherited) -> None:
    """Have ``holder.forget_parent()`` called in every child while ``holder`` lives: for what objects hold."""
    _inherited[id(holder)] = holder  # which may be equal to another, or have no hash


class Lock(type(threading.RLock())):  # type: ignore[misc]
    """A lock that no other thread holds in a forked child: for ``with`` blocks alone.

    The interpreter's own in all else, because an interrupt may come into whatever is written in Python.
    """

    def __init__(self) -> None:
        super().__init__()
        forget_in_child(self)

    def forget_parent(self) -> None:
        """Be free, unless it is this thread that holds it, which goes on here."""
        if not self._is_owned():
            self._at_fork_reinit()


def begun() -> int:
    """How many forks this process has begun: while it stays the same, no child has got what was made in between."""
    return _begun


def _begin() -> None:
    global _begun
    _begun += 1


def _forget() -> None:
    with contextlib.ExitStack() as stack:  # whatever one of them raises, the others are called
        for reset in reversed(_resets):
            stack.callback(reset)
        for holder in list(_inherited.values()):
            stack.callback(holder.forget_parent)


os.register_at_fork(before=_begin, after_in_child=_forget)


def start_thread(thread: threading.Thread) -> None:
    """Start ``thread``; after an interrupt it may begin all the same, a little later.

    An interrupt that comes into ``Thread.start`` may leave a lock held, for which the new thread then waits for ever.
    They come to the main thread alone: so another one starts it, which itself is started by a single step of C.
    """
    if threading.current_thread() is not threading.main_thread():
        thread.start()
        return
    outcome: SimpleQueue[BaseException | None] = SimpleQueue()

    def start() -> None:
        try:
            thread.start()
            outcome.put(None)
        except BaseException as error:
            outcome.put(error)

    _thread.start_new_thread(start, ())
    error = outcome.get()
    if error is not None:
        raise error


class Once:
    """Something that happens once."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[SimpleQueue[None]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Have it happen; also again, where doing so was interrupted."""
        self._is_set = True
        for waiting in self._waiting.copy():
            waiting.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Returns when it has happened, or after ``timeout`` seconds; whether it has."""
        if not self._is_set:
            woken: SimpleQueue[None] = SimpleQueue()
            self._waiting.append(woken)
            if not self._is_set:  # else nobody may know of this one
                until = math.inf if timeout is None else time.monotonic() + timeout
                # In slices: an interrupt that comes right before a thread sleeps is seen only when it wakes up.
                while not self._is_set and (left_s := until - time.monotonic()) > 0:
                    with contextlib.suppress(Empty):
                        woken.get(timeout=min(left_s, _SLICE_S))
        return self._is_set


class Ending:
    """Calls ``end``, which may be called again, when its block is left.

    Enter it twice, ``with ending, ending:``. An interrupt may come into the one end, and then there is the other.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        self._end()


class Descriptor(int):
    """The number of a descriptor, for calls that take one."""

    def close(self) -> None:
        """Close it; a second call does nothing."""


class OpenDescriptor(Descriptor):
    """One that is open, and closed with the last reference to it, if not before."""

    # Nothing in Python: the interpreter drops interrupts that come into a finalizer, and what is left of the finalizer.
    __del__ = property(partial(partial, os.close))

    def close(self) -> None:
        """Close it, from when on it is closed."""
        self.__class__ = Descriptor  # type: ignore[assignment]
        os.close(self)


CLOSED = Descriptor(-1)
"""What takes the place of one that is closed: whoever still uses it is told so by the system."""


def opened(opening: Iterator[int]) -> Descriptor:
    """The descriptor that ``opening`` gives (a ``map`` of ``os.open``, say, over one set of arguments), never lost."""
    return next(map(OpenDescriptor, opening))


_pausing = Lock()
_pauses: set[CollectorPause] = set()
_was_collecting = False


class CollectorPause:
    """No automatic collection within its block; ``end`` may be called again, and by any thread.

    Each burst of objects would make the collector walk the whole heap of the training job, which takes longer than to
    plan the checkpoint. Nested and concurrent pauses count: it runs again when the last one ends, if it ran before.
    """

    def __enter__(self) -> None:
        global _was_collecting
        with _pausing:
            if not _pauses:
                _was_collecting = gc.isenabled()
            _pauses.add(self)
            gc.disable()

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        global _was_collecting
        with _pausing:
            _pauses.discard(self)
            if not _pauses and _was_collecting:
                gc.enable()
                _was_collecting = False


@reset_in_child
def _end_pauses() -> None:
    for pause in tuple(_pauses):
        pause.end()


def collector_paused(function: Callable[P, Result]) -> Callable[P, Result]:
    """``function``, without automatic collections while it runs: by its end its objects are gone."""

    @functools.wraps(function)
    def paused(*args: P.args, **kwargs: P.kwargs) -> Result:
        pause = CollectorPause()
        # Ended twice: an interrupt may come into the one end, and then there is the other.
        try:
            with pause:
                return function(*args, **kwargs)
        finally:
            pause.end()

    return paused
