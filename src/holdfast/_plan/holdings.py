"""Holdings: which ranks hold which boxes of one tensor. Tensors that are held alike share one, however many they are.

Works on columns; never on more than one holding at a time, so that the cost follows what differs between tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from holdfast._plan.balance import Held, by_box

_Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldRows:
    """What some ranks hold, by rank and then in their local order: ``rank`` is [n], ``lo`` and ``length`` [n, D]."""

    rank: _Int64s
    lo: _Int64s
    length: _Int64s

    @cached_property
    def within(self) -> _Int64s:
        """The number of each row among those of its rank."""
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

    @cached_property
    def volume(self) -> _Int64s:
        """How many elements each box has."""
        volume: _Int64s = self.length.prod(axis=1, dtype=np.int64)
        return volume

    @cached_property
    def holders(self) -> _Int64s:
        """How many ranks hold each box."""
        return np.diff(self.starts)

    @cached_property
    def shared(self) -> _Int64s:
        """The boxes that have elements and several holders."""
        return np.flatnonzero((self.holders > 1) & (self.volume > 0))

    @cached_property
    def lowest(self) -> _Int64s:
        """The lowest holder of each box."""
        return self.holder[self.starts[:-1]]

    @cached_property
    def is_single(self) -> bool:
        """Whether every box has one holder."""
        return len(self.holder) == len(self.volume)


def holding_of(parts: Sequence[HeldRows]) -> Holding:
    """What the ranks of all parts hold together."""
    rank, lo, length = (np.concatenate([getattr(part, name) for part in parts]) for name in ("rank", "lo", "length"))
    nothing = np.zeros(len(rank), dtype=np.int64)
    order, starts = by_box(Held(rank=rank, tensor=nothing, lo=lo, length=length, nbytes=nothing, itemsize=nothing))
    ends = np.append(starts, len(order))
    box = np.empty(len(order), dtype=np.int64)
    box[order] = np.repeat(np.arange(len(starts)), np.diff(ends))
    bounds = np.cumsum([0, *(len(part.rank) for part in parts)])
    return Holding(
        parts=tuple(parts),
        lo=lo[order[starts]],
        length=length[order[starts]],
        holder=rank[order],
        starts=ends,
        box_of=tuple(box[bounds[number] : bounds[number + 1]] for number in range(len(parts))),
    )
