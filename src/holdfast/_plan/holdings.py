"""Which ranks hold which boxes of a tensor, and what becomes of these boxes when they are shared out.

Works on columns, and on one holding at a time, so that the cost follows what differs between tensors. Never decides
who writes what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from holdfast._plan.balance import Parts, by_box, cut_out
from holdfast._values.lazy import cached_property

_Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldRows:
    """What some ranks hold, by rank and then in their local order: ``rank`` is [n], ``lo`` and ``length`` [n, D]."""

    rank: _Int64s
    lo: _Int64s
    length: _Int64s

    @property
    def within(self) -> _Int64s:
        """The number of each row among those of its rank."""
        if len(self.rank) < 2 or bool((self.rank[1:] > self.rank[:-1]).all()):
            return np.zeros(len(self.rank), dtype=np.int64)
        starts = np.flatnonzero(np.diff(self.rank, prepend=-1))
        counts = np.diff(np.append(starts, len(self.rank)))
        return np.arange(len(self.rank)) - np.repeat(starts, counts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Holding:
    """The distinct boxes of a tensor, by lower corner, and who holds them.

    The holders of box b are ``holder[starts[b]:starts[b + 1]]``, ascending. ``box_of`` has for each part the number of
    the box of each of its rows.
    """

    parts: tuple[HeldRows, ...]
    lo: _Int64s
    length: _Int64s
    holder: _Int64s
    starts: _Int64s
    box_of: tuple[_Int64s, ...]

    def is_like(self, other: Holding) -> bool:
        """Whether the same ranks hold the same boxes of both."""
        return self is other or all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in ("lo", "length", "holder", "starts")
        )

    def holders_of(self, box: int) -> _Int64s:
        return self.holder[self.starts[box] : self.starts[box + 1]]

    def boxes_around(self, low: _Int64s, length: _Int64s) -> _Int64s:
        """The numbers of the boxes that contain the one at ``low``."""
        return np.flatnonzero((self.lo <= low).all(axis=1) & (low + length <= self.lo + self.length).all(axis=1))

    @property
    def volume(self) -> _Int64s:
        volume: _Int64s = self.length.prod(axis=1, dtype=np.int64)
        return volume

    @property
    def holders(self) -> _Int64s:
        return np.diff(self.starts)

    @cached_property
    def shared(self) -> _Int64s:
        """The boxes that have elements and several holders."""
        if self.is_single:
            return _numbers(0)
        return np.flatnonzero((self.holders > 1) & (self.volume > 0))

    @property
    def lowest(self) -> _Int64s:
        return self.holder if self.is_single else self.holder[self.starts[:-1]]

    @property
    def has_repetitions(self) -> bool:
        """Whether a rank holds one box twice."""
        box = np.repeat(np.arange(len(self.lo)), self.holders)
        return not self.is_single and bool(((np.diff(self.holder) == 0) & (np.diff(box) == 0)).any())

    @property
    def is_single(self) -> bool:
        return len(self.holder) == len(self.lo)


def holding_of(parts: Sequence[HeldRows]) -> Holding:
    """What the ranks of all parts hold together."""
    rank, lo, length = (_joined([getattr(part, name) for part in parts]) for name in ("rank", "lo", "length"))
    order, starts = by_box(rank, lo, length)
    if len(starts) == len(order) and bool((order[1:] > order[:-1]).all()):
        # Every box has one holder, and ranks have them in order, as most do: then boxes are rows.
        numbers = _numbers(len(order) + 1)
        ends, box = numbers, numbers[:-1]
    else:
        ends = np.append(starts, len(order))
        box = np.empty(len(order), dtype=np.int64)
        box[order] = np.repeat(np.arange(len(starts)), np.diff(ends))
        rank, lo, length = rank[order], lo[order[starts]], length[order[starts]]
    bounds = np.cumsum([0, *(len(part.rank) for part in parts)])
    return Holding(
        parts=tuple(parts),
        lo=lo,
        length=length,
        holder=rank,
        starts=ends,
        box_of=tuple(box[bounds[number] : bounds[number + 1]] for number in range(len(parts))),
    )


def _joined(tables: Sequence[_Int64s]) -> _Int64s:
    return tables[0] if len(tables) == 1 else np.concatenate(tables)


@lru_cache(maxsize=8)
def _numbers(count: int) -> _Int64s:
    """The numbers below ``count``, in an array that many share."""
    numbers = np.arange(count)
    numbers.flags.writeable = False
    return numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyChunks:
    """The chunks of one key, by place: boxes of the holding, or parts of them.

    ``box`` is the number of the box that a chunk is, or is cut from, ``writer`` its rank; None where every chunk is a
    box and its lowest holder writes it.
    """

    lo: np.ndarray
    length: np.ndarray
    box: np.ndarray | None = None
    writer: np.ndarray | None = None
    is_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ByRank:
    """Columns of all ranks, one after the other: those of rank r are the rows from ``bounds[r]`` to ``bounds[r + 1]``.

    ``row`` is a rank's local row; ``key`` and ``number`` say what of it: a chunk of its key, or its set of holders.
    """

    bounds: np.ndarray
    row: np.ndarray
    key: np.ndarray
    number: np.ndarray

    def of(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        mine = slice(int(self.bounds[rank]), int(self.bounds[rank + 1]))
        return self.row[mine], self.key[mine], self.number[mine]


def chunks_of(holding: Holding, parts: Parts, writer: np.ndarray) -> KeyChunks:
    """The chunks of one key: ``parts`` of its shared boxes, and the others whole."""
    alone = np.delete(np.arange(len(holding.lo)), holding.shared)
    box = np.concatenate([alone, parts.box])
    writer = np.concatenate([holding.lowest[alone], writer])
    if not (parts.dimension >= 0).any():
        order = np.argsort(box, kind="stable")
        return KeyChunks(lo=holding.lo, length=holding.length, box=box[order], writer=writer[order])
    lo, length = cut_out(holding.lo[parts.box], holding.length[parts.box], parts)
    lo = np.concatenate([holding.lo[alone], lo])
    length = np.concatenate([holding.length[alone], length])
    order = np.lexsort((*length.T[::-1], *lo.T[::-1]))
    return KeyChunks(lo=lo[order], length=length[order], box=box[order], writer=writer[order], is_cut=True)
