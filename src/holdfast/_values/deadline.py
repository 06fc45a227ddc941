"""Time: progress, deadlines, how long ago a rank last made progress, and how much processor time keys may take.

Time comes only from the clock that is handed in, so every rule here is tested without waiting. Nothing here sleeps.

``Effort`` is a guard against forged keys. Python salts the hashes of text and of nothing else. So whoever writes a
checkpoint can choose numbers, tuples and sets that collide in Python's tables, and n of them take n * n steps. No
property of keys tells all of these; the time that they take does. What is allowed is many times what other keys take.
It is the time of this thread on the processor, so that a busy machine does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from holdfast._process import Lock
from holdfast._values.records import Record

Clock = Callable[[], float]

NOTICE_S = 10.0


@dataclass(slots=True, eq=False)
class Progress:
    """How many bytes of some work are ``done``, of ``total`` if that is known; it took ``sync_s`` to have them durable.

    Whoever does the work, in any thread, calls ``moved`` after each piece, and ``check`` where nothing moves. Both call
    ``told``, one call at a time, which raises to have the work given up. A copy or pickle is a new one.
    """

    told: Callable[[], None] = lambda: None
    done: int = field(default=0, init=False)
    total: int = field(default=0, init=False)
    sync_s: float = field(default=0.0, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)

    def moved(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            self.told()

    def check(self) -> None:
        with self._lock:
            self.told()

    def __reduce__(self) -> tuple[type[Progress], tuple[()]]:
        return Progress, ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long ranks wait for each other, in seconds.

    ``beat_s`` passes between two signs of life; a rank that others wait for is lost after ``progress_s`` without
    progress. ``settle_s`` lets failures that happen together be told together; ``farewell_s`` is what a failing
    coordinator gives the others to take notice before it leaves, ``handover_s`` what it gives them to take its last
    word otherwise. After ``notice_s`` the log says who has not come at all.
    """

    beat_s: float = 1.0
    progress_s: float = 120.0
    settle_s: float = 0.25
    farewell_s: float = 1.0
    handover_s: float = 10.0
    notice_s: float = NOTICE_S

    def __post_init__(self) -> None:
        if not self.progress_s > 0:
            raise ValueError(f"a deadline is a positive number of seconds, not {self.progress_s}")
        if not 0 < self.beat_s < self.progress_s:
            raise ValueError(f"a rank must beat more often than every {self.progress_s} s, not every {self.beat_s} s")

    @classmethod
    def within(cls, deadline_s: float) -> Patience:
        """The usual, with ``deadline_s`` for progress."""
        return cls(progress_s=deadline_s, beat_s=min(1.0, deadline_s / 4) if deadline_s > 0 else 1.0)


class Deadline:
    """A point in time, ``limit_s`` after this was made."""

    __slots__ = ("_clock", "_end")

    def __init__(self, limit_s: float, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + limit_s

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._end - self._clock())

    @property
    def passed(self) -> bool:
        return self._clock() >= self._end


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a rank tells of itself with each beat.

    ``progress`` counts the bytes of the phase's own work, of which there are ``total`` if that is known, ``moved`` the
    pieces of messages sent; ``file`` is the name of the one it writes or reads, if any; ``working`` is False while the
    rank waits for others.
    """

    beat: int
    phase: str
    progress: int = 0
    moved: int = 0
    file: str = ""
    working: bool = True
    total: int = 0


class Pulse:
    """The last sign of one rank, and for how long it has been silent or has made no progress."""

    __slots__ = ("_clock", "_heard_at", "_moved_at", "_sign")

    def __init__(self, sign: Sign, clock: Clock) -> None:
        self._clock = clock
        self._sign = sign
        self._heard_at = self._moved_at = clock()

    @property
    def sign(self) -> Sign:
        return self._sign

    def see(self, sign: Sign) -> None:
        """Take ``sign``: a new beat is life, anything else that differs is progress."""
        now = self._clock()
        last, self._sign = self._sign, sign
        if sign.beat != last.beat:
            self._heard_at = now
        if replace(last, beat=sign.beat) != sign:
            self._moved_at = now

    def excuse(self, pause_s: float) -> None:
        """Leave out ``pause_s`` in which nothing could be heard, because the listener itself was stopped."""
        self._heard_at += pause_s
        self._moved_at += pause_s

    @property
    def silent_s(self) -> float:
        """Seconds since the last new beat."""
        return self._clock() - self._heard_at

    @property
    def stalled_s(self) -> float:
        """Seconds since phase, progress, file or state last changed."""
        return self._clock() - self._moved_at


FLOOR_S = 0.1
KEY_S = 5e-6

_FEW = 64  # So few are told apart in some microseconds each, whatever they are.
_STEP = 512


class _Fillable(Protocol):
    """A dict or a set."""

    def __len__(self) -> int: ...
    def update(self, entries: Any, /) -> None: ...


Table = TypeVar("Table", bound=_Fillable)


class TooMuchEffort(Exception):
    """Telling keys apart takes so long that they must have been made for it."""

    def __str__(self) -> str:
        return "it has keys that were chosen to make reading slow"


@dataclass(slots=True)
class Effort:
    """The processor time that one decoding may still spend on keys."""

    clock: Clock = time.thread_time
    _since: float = 0.0
    _left_s: float = FLOOR_S

    def begin(self) -> None:
        """What happens from now on counts."""
        self._since = self.clock()

    def count(self, allowed_s: float) -> None:
        """Count what happened since the last call, for which ``allowed_s`` more is allowed; or TooMuchEffort."""
        since, self._since = self._since, self.clock()
        self._left_s += allowed_s - (self._since - since)
        if self._left_s < 0:
            raise TooMuchEffort

    def fill(self, table: Table, entries: Sequence[object], keys: Iterable[object]) -> Table:
        """``table``, updated with ``entries``, whose keys are ``keys``; or TooMuchEffort."""
        kinds = set(map(type, keys))
        is_nested = not kinds <= {str} and any(issubclass(kind, (tuple, frozenset, Record)) for kind in kinds)
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
