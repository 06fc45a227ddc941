"""How much processor time the keys of a checkpoint may take.

Python salts the hashes of text and of nothing else. So whoever writes a checkpoint can choose numbers, tuples and sets
that meet in Python's tables, by equal hashes or by the places that are probed after them, and n of them take n * n
steps. No property of keys tells all of these; the time that they take does. What is allowed is many times what other
keys take, and is time of this thread on the processor, so that a busy machine does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from holdfast._values.deadline import Clock

FLOOR_S = 0.1
KEY_S = 5e-6

_FEW = 64  # So few are told apart in some microseconds each, whatever they are.
_STEP = 512

Table = TypeVar("Table", dict[Any, Any], set[Any])


class TooMuchEffort(Exception):
    """Telling keys apart takes so long that they must have been made for it."""

    def __str__(self) -> str:
        return "it has keys that were chosen to make reading slow"


class Effort:
    """The processor time that one decoding may still spend on keys."""

    def __init__(self, clock: Clock = time.thread_time) -> None:
        self._clock = clock
        self._since = 0.0
        self._left_s = FLOOR_S

    def begin(self) -> None:
        """What happens from now on counts."""
        self._since = self._clock()

    def count(self, allowed_s: float) -> None:
        """Count what happened since the last call, for which ``allowed_s`` more is allowed; or TooMuchEffort."""
        since, self._since = self._since, self._clock()
        self._left_s += allowed_s - (self._since - since)
        if self._left_s < 0:
            raise TooMuchEffort

    def fill(self, table: Table, entries: Sequence[Any], keys: Iterable[object]) -> Table:
        """``table``, updated with ``entries``, whose keys are ``keys``; or TooMuchEffort."""
        kinds = set(map(type, keys))
        is_nested = any(issubclass(kind, (tuple, frozenset)) for kind in kinds)
        if kinds <= {str} or (len(table) + len(entries) <= _FEW and not is_nested):
            table.update(entries)
            return table
        self.begin()
        # One that holds others may take long alone.
        step = 1 if is_nested else _STEP
        for start in range(0, len(entries), step):
            some = entries[start : start + step]
            table.update(some)
            self.count(len(some) * KEY_S)
        return table
