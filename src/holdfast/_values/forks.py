"""What a forked child forgets: everything that is its parent's.

A child of ``os.fork()`` has copies of all objects of its parent, and none of its threads. A copy of a lock may be held
for ever, a copy of a finalizer would remove the parent's files, a copy of a socket hides that the parent has died.
Whoever holds such a thing says here how the child forgets it; nothing else calls ``os.register_at_fork``.

Invariant: to forget is to drop copies and to make new locks. It never writes, removes, unlocks, sends or waits.

A descriptor that a thread has just been given, and nobody has noted yet, cannot be forgotten. Where a copy of it would
do harm, ``begun`` tells whether a fork may have made one; then the thread gets itself another.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol


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


def never_destroy(thing: object) -> None:
    """Keep ``thing`` as long as the process runs, and past its end: for objects whose destructor waits for a thread
    that this process does not have.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def begun() -> int:
    """How many forks this process has begun: unchanged, no child has what was made, and noted, in between."""
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
