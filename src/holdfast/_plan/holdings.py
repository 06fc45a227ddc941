"""Which ranks hold which boxes of a tensor, and what becomes of these boxes when they are shared out.

Works on columns, and on one holding at a time, so that the cost follows what differs between tensors. Never decides
who writes what.

What a mesh holds is found for all members at once; only splits that leave a member several runs of indices take a
Python loop over the members.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from holdfast._plan.balance import Parts
from holdfast._plan.coverage import packed
from holdfast._values.box import Split, runs_of

_Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holding:
    """The distinct boxes of a tensor, by lower corner, and who holds them.

    The holders of box b are ``holder[starts[b]:starts[b + 1]]``, ascending; ``lowest`` has the first of each.
    ``shared`` are the boxes that have elements and several holders. ``box_of`` has for each part the number of the box
    of each of its rows.
    """

    parts: tuple[HeldRows, ...]
    lo: _Int64s
    length: _Int64s
    volume: _Int64s
    holder: _Int64s
    starts: _Int64s
    lowest: _Int64s
    shared: _Int64s
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


def holding_of(parts: Sequence[HeldRows]) -> Holding:
    """What the ranks of all parts hold together."""
    rank, lo, length = parts[0].rank, parts[0].lo, parts[0].length
    if len(parts) > 1:
        rank = np.concatenate([part.rank for part in parts])
        lo = np.concatenate([part.lo for part in parts])
        length = np.concatenate([part.length for part in parts])
    words, rank_bits = packed([*lo.T, *length.T, rank])
    order = np.argsort(words[0], kind="stable") if len(words) == 1 else np.lexsort(words[::-1])
    begins = np.zeros(len(order), dtype=bool)  # the rows, by box and rank, at which there is another box
    begins[:1] = True
    for word in words:
        key = (word >> rank_bits if word is words[-1] else word)[order]
        begins[1:] |= key[1:] != key[:-1]
    if begins.all() and bool((order[1:] > order[:-1]).all()):
        # Every box has one holder, and ranks have them in order, as most do: then boxes are rows.
        ends = _numbers(len(order) + 1)
        box, lowest, volume, shared = ends[:-1], rank, length.prod(axis=1, dtype=np.int64), _numbers(0)
    else:
        starts = np.flatnonzero(begins)
        ends = np.append(starts, len(order))
        box = np.empty(len(order), dtype=np.int64)
        box[order] = np.repeat(np.arange(len(starts)), np.diff(ends))
        rank, lo, length = rank[order], lo[order[starts]], length[order[starts]]
        lowest, volume = rank[starts], length.prod(axis=1, dtype=np.int64)
        shared = np.flatnonzero((np.diff(ends) > 1) & (volume > 0))
    bounds = np.cumsum([len(part.rank) for part in parts])[:-1]
    return Holding(
        parts=tuple(parts),
        lo=lo,
        length=length,
        volume=volume,
        holder=rank,
        starts=ends,
        lowest=lowest,
        shared=shared,
        box_of=tuple(np.split(box, bounds)),
    )


@lru_cache(maxsize=8)
def _numbers(count: int) -> _Int64s:
    """The numbers below ``count``, in an array that many share."""
    numbers = np.arange(count)
    numbers.flags.writeable = False
    return numbers


def boxes_on_mesh(size: Sequence[int], mesh: Sequence[int], splits: Sequence[Sequence[Split]]) -> HeldRows:
    """What each member of a mesh of that shape, counted row by row, holds of a tensor of ``size``.

    A member without elements has no box, except that a tensor which has none at all is one empty box on all of them.
    """
    members = int(np.prod(mesh, dtype=np.int64))
    dimensions = len(size)
    lo = np.zeros((members, dimensions), dtype=np.int64)
    length = np.empty((members, dimensions), dtype=np.int64)
    length[:] = size
    everyone = np.arange(members)
    if 0 in size:
        return HeldRows(rank=everyone, lo=lo, length=length)
    place = np.unravel_index(everyone, tuple(mesh)) if len(mesh) else ()
    for dimension, of_dim in enumerate(splits):
        for split in of_dim:
            if split.blocks > 1:
                return _in_runs(size, mesh, splits)
            whole = length[:, dimension]
            step = -(-whole // split.parts)
            start = np.minimum(step * place[split.mesh_dim], whole)
            lo[:, dimension] += start
            length[:, dimension] = np.minimum(step, whole - start)
    held = np.flatnonzero((length > 0).all(axis=1))
    return HeldRows(rank=held, lo=lo[held], length=length[held])


def _in_runs(size: Sequence[int], mesh: Sequence[int], splits: Sequence[Sequence[Split]]) -> HeldRows:
    """The same where a member may hold several runs of a dimension, and the boxes that they make together."""
    known: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    members: list[int] = []
    boxes: list[tuple[tuple[int, int], ...]] = []
    for member, place in enumerate(itertools.product(*map(range, mesh))):
        runs = []
        for dimension, of_dim in enumerate(splits):
            where = (dimension, *(place[split.mesh_dim] for split in of_dim))
            if where not in known:
                known[where] = runs_of(size[dimension], zip(of_dim, where[1:], strict=True))
            runs.append(known[where])
        held = list(itertools.product(*runs))
        boxes += held
        members += [member] * len(held)
    table = np.array(boxes, dtype=np.int64).reshape(len(boxes), len(size), 2)
    return HeldRows(
        rank=np.array(members, dtype=np.int64),
        lo=np.ascontiguousarray(table[:, :, 0]),
        length=np.ascontiguousarray(table[:, :, 1]),
    )


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


def chunks_of(holding: Holding, parts: Parts, writer: np.ndarray) -> KeyChunks:
    """The chunks of one key: ``parts`` of its shared boxes, and the others whole."""
    alone = np.delete(np.arange(len(holding.lo)), holding.shared)
    box = np.concatenate([alone, parts.box])
    writer = np.concatenate([holding.lowest[alone], writer])
    cut = np.flatnonzero(parts.dimension >= 0)
    if not len(cut):
        order = np.argsort(box, kind="stable")
        return KeyChunks(lo=holding.lo, length=holding.length, box=box[order], writer=writer[order])
    lo, length = holding.lo[box], holding.length[box]
    rows, along = len(alone) + cut, parts.dimension[cut]
    lo[rows, along] += parts.begin[cut]
    length[rows, along] = (parts.stop - parts.begin)[cut]
    order = np.lexsort((*length.T[::-1], *lo.T[::-1]))
    return KeyChunks(lo=lo[order], length=length[order], box=box[order], writer=writer[order])
