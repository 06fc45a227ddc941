"""An event for threads that may be interrupted: waiting for it holds no lock that an interrupt could leave held.

What the standard library has waits with a condition, whose lock is given up and taken back in several steps.
"""

from __future__ import annotations

import contextlib
from queue import Empty, SimpleQueue


class Event:
    """Something that happens once."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[SimpleQueue[None]] = []

    def is_set(self) -> bool:
        """Whether it has happened."""
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
                with contextlib.suppress(Empty):
                    woken.get(timeout=timeout)
        return self._is_set
