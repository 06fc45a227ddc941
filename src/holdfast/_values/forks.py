"""What a forked child forgets: everything that is its parent's.

A child of ``os.fork()`` has copies of all objects of its parent, and none of its threads. A copy of a lock may be held
for ever, a copy of a finalizer would remove the parent's files, a copy of a socket hides that the parent has died.
Whoever holds such a thing says here how the child forgets it; nothing else calls ``os.register_at_fork``.

Invariant: to forget is to drop copies and to make new locks. It never writes, removes, unlocks, sends or waits.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Protocol


class Inherited(Protocol):
    """An object that a child of this process must not use as it is."""

    def forget_parent(self) -> None:
        """Become, in the child, as if new and empty: this thread is the only one there is."""
        ...


_resets: list[Callable[[], None]] = []
_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def reset_in_child(reset: Callable[[], None]) -> Callable[[], None]:
    """Have ``reset`` called in every child, right after the fork: for what a module holds. Usable as a decorator."""
    _resets.append(reset)
    return reset


def forget_in_child(holder: Inherited) -> None:
    """Have ``holder.forget_parent()`` called in every child while ``holder`` lives: for what objects hold."""
    _inherited.add(holder)


def never_destroy(thing: object) -> None:
    """Keep ``thing`` as long as the process runs, and past its end: for objects whose destructor waits for a thread
    that this process does not have.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _forget() -> None:
    for holder in list(_inherited):
        holder.forget_parent()
    for reset in _resets:
        reset()


os.register_at_fork(after_in_child=_forget)
