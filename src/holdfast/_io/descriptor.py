"""Descriptors that are closed when nobody holds them any more, whatever became of who opened them.

An interrupt may come after any call: the system has opened something, and Python has not kept the number yet. So the
number becomes an object that closes it by steps of C alone, between which no interrupt comes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial


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
    """What comes of ``opening``, a ``map`` of ``os.open``, say, over one set of arguments."""
    return next(map(OpenDescriptor, opening))
