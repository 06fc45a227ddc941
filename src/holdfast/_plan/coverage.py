"""Which ranks hold which boxes of a tensor; and coverage: whether boxes tile its shape exactly, without gap or overlap.

What ranks hold is found in columns, and for one holding at a time, so that the cost follows what differs between
tensors. What a mesh holds is found for all members at once; only splits that leave a member several runs of indices
take a Python loop over the members.

The check of coverage is exact and takes hostile numbers. No element is ever looked at:

1. boxes out of bounds are reported, empty ones dropped;
2. neighbours that make up one larger box are merged. Rows in the order of their lower corners, as stored ones are, need
   no sorting for it, and of a grid, however fine, one box remains: the whole;
3. of what is left, no two boxes may overlap, and together they must have as many elements as the whole.

A tensor with too many boxes for that counts as faulty: no way to shard makes ten thousand boxes of which no two merge.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast._plan.balance import Parts
from holdfast._values.box import MeshSplit, runs_of

_Int64s = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]

_MAX_PAIRS = 1 << 26
"""A tensor with more pairs is refused, so that no checkpoint can make a reader compare for hours."""

_BOXES_AT_ONCE = 1 << 17
"""Tensors are checked together up to so many boxes, where boxes are sorted by tensor: enough to be vectorised."""

_PAIRS_AT_ONCE = 1 << 20
"""Pairs are compared in slices of so many, to bound the memory."""


_Problem = Literal["out of bounds", "gap or overlap"]
_Fault = tuple[_Problem, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageFault:
    """What is wrong with the boxes of tensor number ``tensor``; ``detail`` says where."""

    tensor: int
    problem: _Problem
    detail: str


class _Boxes(NamedTuple):
    """Boxes as columns: ``tensor`` is [n], ``lo`` and ``length`` are [n, D]."""

    tensor: _Int64s
    lo: _Int64s
    length: _Int64s

    def take(self, rows: _Int64s | _Bools) -> _Boxes:
        return _Boxes(self.tensor[rows], self.lo[rows], self.length[rows])


def check_coverage(
    tensor: npt.NDArray[np.integer],
    lo: npt.NDArray[np.integer],
    length: npt.NDArray[np.integer],
    shapes: npt.NDArray[np.integer],
) -> list[CoverageFault]:
    """Every tensor that its boxes do not tile exactly, in the order of their numbers, each with its first fault.

    Box ``i`` is of tensor ``tensor[i]``, at ``lo[i]`` with ``length[i]``, both [n, D]; ``shapes`` is [T, D]. Dimensions
    beyond the rank of a tensor have lo 0, length 1 and size 1. Empty boxes are allowed anywhere within the shape.
    """
    sizes = np.asarray(shapes, dtype=np.int64)
    boxes = _Boxes(np.asarray(tensor, np.int64), np.asarray(lo, np.int64), np.asarray(length, np.int64))
    if len(boxes.tensor) and not 0 <= boxes.tensor.min() <= boxes.tensor.max() < len(sizes):
        raise ValueError(f"boxes name tensors outside of the {len(sizes)} that there are")
    is_sorted = not bool((boxes.tensor[1:] < boxes.tensor[:-1]).any())
    ends = np.searchsorted(boxes.tensor, np.arange(len(sizes)), side="right") if is_sorted else np.zeros(0, np.int64)
    faults: list[CoverageFault] = []
    first = begin = 0
    while first < len(sizes):
        stop, end = len(sizes), len(boxes.tensor)
        if is_sorted and end - begin > _BOXES_AT_ONCE:
            stop = max(first + 1, int(np.searchsorted(ends, begin + _BOXES_AT_ONCE, side="right")))
            end = int(ends[stop - 1])
        part = _Boxes(boxes.tensor[begin:end] - first, boxes.lo[begin:end], boxes.length[begin:end])
        for number, fault in sorted(_faults(part, sizes[first:stop]).items()):
            faults.append(CoverageFault(tensor=first + number, problem=fault[0], detail=fault[1]))
        first, begin = stop, end
    return faults


def _faults(boxes: _Boxes, sizes: _Int64s) -> dict[int, _Fault]:
    """What is wrong, by tensor."""
    faults = _bounds_faults(boxes, sizes)
    unchecked: _Bools = np.all(sizes > 0, axis=1)
    unchecked[list(faults)] = False
    boxes = boxes.take((boxes.length > 0).all(axis=1) & unchecked[boxes.tensor])
    boxes = _merge_neighbours(boxes)
    tiled = (np.bincount(boxes.tensor, minlength=len(sizes)) == 1)[boxes.tensor]
    tiled &= (boxes.length == sizes[boxes.tensor]).all(axis=1)
    unchecked[boxes.tensor[tiled]] = False
    numbers = np.flatnonzero(unchecked)
    boxes = boxes.take(unchecked[boxes.tensor])
    bounds = np.searchsorted(boxes.tensor, np.append(numbers, len(sizes))).tolist()
    for number, start, stop in zip(numbers.tolist(), bounds, bounds[1:], strict=False):
        detail = _tiling_detail(boxes.lo[start:stop], boxes.length[start:stop], sizes[number])
        if detail is not None:
            faults[number] = "gap or overlap", detail
    return faults


def _bounds_faults(boxes: _Boxes, sizes: _Int64s) -> dict[int, _Fault]:
    """The faults of negative sizes and of boxes that are not within their tensor, by tensor."""
    faults: dict[int, _Fault] = {}
    for number in np.flatnonzero((sizes < 0).any(axis=1)).tolist():
        shape = _shown(sizes[number], sizes[number])
        faults[number] = "out of bounds", f"the shape {shape} has a negative size"
    size = sizes[boxes.tensor]
    # With lo and size not negative the difference cannot overflow; with one that is, the box is a fault whatever it is.
    inside = (boxes.lo >= 0) & (boxes.length >= 0) & (boxes.length <= size - boxes.lo)
    outside = np.flatnonzero(~inside.all(axis=1))
    numbers, first = np.unique(boxes.tensor[outside], return_index=True)
    for row, number in zip(outside[first].tolist(), numbers.tolist(), strict=True):
        shape = sizes[number]
        where = f"{_shown(boxes.lo[row], shape)} with lengths {_shown(boxes.length[row], shape)}"
        detail = f"the box at {where} is not within the shape {_shown(shape, shape)}"
        faults.setdefault(number, ("out of bounds", detail))
    return faults


def _shown(coordinates: _Int64s, shape: _Int64s) -> str:
    """The coordinates as a list, without those of trailing dimensions of size 1, which may be padding."""
    split = np.flatnonzero(shape != 1)
    rank = int(split[-1]) + 1 if len(split) else 0
    return str(coordinates[:rank].tolist())


def _merge_neighbours(boxes: _Boxes) -> _Boxes:
    """Boxes with the same sum, by tensor and lower corner: those that follow each other and make up one box are one."""
    words, _ = packed([boxes.tensor, *boxes.lo.T])
    if len(words) > 1 or bool((words[0][1:] < words[0][:-1]).any()):
        boxes = boxes.take(np.lexsort(words[::-1]) if len(words) > 1 else np.argsort(words[0], kind="stable"))
    stale = True
    for dimension in reversed(range(boxes.lo.shape[1])):
        if stale:
            differs = (boxes.lo[1:] != boxes.lo[:-1]) | (boxes.length[1:] != boxes.length[:-1])
            single = (differs.sum(axis=1) == 1) & (boxes.tensor[1:] == boxes.tensor[:-1])
        lo, length = boxes.lo[:, dimension], boxes.length[:, dimension]
        differing = np.flatnonzero(single & differs[:, dimension])
        joined = differing[lo[differing + 1] == lo[differing] + length[differing]]
        stale = len(joined) > 0
        if stale:
            starts = np.delete(np.arange(len(lo)), joined + 1)
            merged = boxes.take(starts)
            merged.length[:, dimension] = np.add.reduceat(length, starts)
            boxes = merged
    return boxes


def _tiling_detail(lo: _Int64s, length: _Int64s, shape: _Int64s) -> str | None:
    """What is wrong with the boxes of one tensor, by comparing each with each; None where they tile it."""
    count = len(lo)
    if count * (count - 1) // 2 > _MAX_PAIRS:
        return f"{count} boxes that do not merge are too many to check"
    hi = lo + length
    height = 1 + _PAIRS_AT_ONCE // (count + 1)
    for first in range(0, count, height):
        rows = slice(first, first + height)
        meets = np.arange(count) > np.arange(count)[rows, None]
        for dimension in range(len(shape)):
            meets &= lo[rows, None, dimension] < hi[:, dimension]
            meets &= lo[:, dimension] < hi[rows, None, dimension]
        pairs = np.argwhere(meets)
        if len(pairs):
            corner = np.maximum(lo[first + pairs[0, 0]], lo[pairs[0, 1]])
            return f"overlap at {_shown(corner, shape)}"
    gap = _first_gap(lo, hi, shape.tolist())
    return None if gap is None else f"gap at {_shown(np.array(gap, dtype=np.int64), shape)}"


def _first_gap(lo: _Int64s, hi: _Int64s, shape: list[int]) -> list[int] | None:
    """The first place that none of the boxes holds, which do not overlap; None where there is none."""
    if sum(math.prod(lengths) for lengths in (hi - lo).tolist()) == math.prod(shape):
        return None
    if not shape:
        return []
    # A gap begins where the tensor does, or where a box ends.
    for edge in sorted({0, *hi[:, 0].tolist()} - {shape[0]}):
        there = (lo[:, 0] <= edge) & (edge < hi[:, 0])
        rest = _first_gap(lo[there, 1:], hi[there, 1:], shape[1:])
        if rest is not None:
            return [edge, *rest]
    return None


def packed(columns: Sequence[_Int64s]) -> tuple[list[_Int64s], int]:
    """Words that sort rows as the columns do, the first one first, and how many low bits the last column takes.

    Few words sort several times faster than a key per column.
    """
    count = len(columns[0])
    words = [np.zeros(count, dtype=np.int64)]
    used = width = 0
    for column in columns if count else ():
        lowest = int(column.min())
        width = (int(column.max()) - lowest).bit_length()
        if width == 0:
            continue
        if used + width > 63:
            words.append(np.zeros(count, dtype=np.int64))
            used = 0
        words[-1] <<= width
        words[-1] |= column - lowest
        used += width
    return words, width


def widened(table: np.ndarray, width: int, fill: int) -> np.ndarray:
    """``table`` with as many columns as ``width``, the new ones filled with ``fill``."""
    missing = width - table.shape[1]
    return np.pad(table, ((0, 0), (0, missing)), constant_values=fill) if missing else table


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


def boxes_on_mesh(size: Sequence[int], mesh: Sequence[int], splits: Sequence[Sequence[MeshSplit]]) -> HeldRows:
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


def _in_runs(size: Sequence[int], mesh: Sequence[int], splits: Sequence[Sequence[MeshSplit]]) -> HeldRows:
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
