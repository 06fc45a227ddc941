"""From wanted boxes to stored boxes, to the byte spans they take, to the blocks these touch, to the reads of them.

Spans are half-open, as two int64 columns of starts and stops. Never enumerates elements, and never looks at more than
one tensor at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast._values.box import Box

_Int64s = npt.NDArray[np.int64]


def byte_spans(
    shape: Sequence[int], box: Box, itemsize: int, *, max_gap: int, most: int = 65536
) -> tuple[_Int64s, _Int64s]:
    """The starts and stops, in bytes of the row-major array of ``shape``, of the spans that cover ``box``.

    They are ascending and disjoint. Runs no more than ``max_gap`` bytes apart become one span; with 0 the spans are
    exactly the box. Where that would make more than ``most`` spans, runs further apart are joined too.
    """
    if box.volume == 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    strides = [itemsize * math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    # Going outwards, one span at a time grows over a whole dimension. The gaps never shrink on the way (a box reaches
    # at most over its whole row), so the first dimension with too large a gap ends it, unless there are too many spans.
    split = box.ndim
    extent = itemsize
    while split > 0:
        gap = strides[split - 1] - extent
        length = box.lengths[split - 1]
        if gap > max_gap and math.prod(box.lengths[:split]) <= most:
            break
        split -= 1
        extent += (length - 1) * strides[split]
    base = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    starts = np.full(1, base, dtype=np.int64)
    for length, stride in zip(box.lengths[:split], strides[:split], strict=True):
        starts = np.add.outer(starts, np.arange(length, dtype=np.int64) * stride).ravel()
    return starts, starts + extent


def touched_blocks(starts: _Int64s, stops: _Int64s, block: int) -> _Int64s:
    """The numbers, ascending and each once, of the blocks of ``block`` bytes that the spans touch."""
    return _distinct(cut_at_blocks(starts, stops, block)[0] // block)


def cut_at_blocks(starts: _Int64s, stops: _Int64s, block: int) -> tuple[_Int64s, _Int64s]:
    """The spans cut where a block of ``block`` bytes ends, so that each lies within one."""
    filled = stops > starts
    starts, stops = starts[filled], stops[filled]
    first = starts // block
    counts = (stops - 1) // block - first + 1
    before = np.cumsum(counts) - counts
    number = np.repeat(first, counts) + np.arange(counts.sum(), dtype=np.int64) - np.repeat(before, counts)
    begins = np.maximum(np.repeat(starts, counts), number * block)
    return begins, np.minimum(np.repeat(stops, counts), (number + 1) * block)


def coalesce(file: npt.NDArray[np.integer], offset: _Int64s, nbytes: _Int64s, *, most: int, alignment: int) -> _Int64s:
    """The indexes at which groups start, then the number of rows; one group is one read.

    The rows are sorted by (file, offset). A group is a run of rows of one file, in which each row begins at or before
    the end that the rows before it reach, and which, rounded out to ``alignment``, spans at most ``most`` bytes. A row
    that is larger on its own is a group on its own.
    """
    count = len(offset)
    end = offset + nbytes
    reach = _reached(file, end)
    starts_run = np.ones(count, dtype=bool)
    starts_run[1:] = (file[1:] != file[:-1]) | (offset[1:] > reach[:-1])
    runs = np.append(np.flatnonzero(starts_run), count).astype(np.int64)
    run_first, run_stop = runs[:-1], runs[1:]
    begin = offset[run_first] - offset[run_first] % alignment
    span = reach[run_stop - 1] + -reach[run_stop - 1] % alignment - begin
    too_long = (span > most) & (run_stop - run_first > 1)
    splits = [
        first + _groups_within(offset[first:stop], end[first:stop], most, alignment)
        for first, stop in zip(run_first[too_long].tolist(), run_stop[too_long].tolist(), strict=True)
    ]
    return _distinct(np.concatenate([runs, *splits]))


def _reached(file: npt.NDArray[np.integer], end: _Int64s) -> _Int64s:
    """For each row the largest ``end`` of the rows of its file up to it."""
    falls = np.flatnonzero((file[1:] == file[:-1]) & (end[1:] < end[:-1]))
    if len(falls) == 0:
        return end
    # Only where rows lie within others, which is rare, does a file need work of its own.
    reach: _Int64s = end.copy()
    for number in _distinct(file[falls].astype(np.int64)):
        rows = slice(np.searchsorted(file, number), np.searchsorted(file, number, side="right"))
        reach[rows] = np.maximum.accumulate(end[rows])
    return reach


def _distinct(values: _Int64s) -> _Int64s:
    """The values, sorted, each once. np.unique does it too, but first imports numpy.ma, which takes a load's time."""
    values = np.sort(values)
    keep = np.ones(len(values), dtype=bool)
    keep[1:] = values[1:] != values[:-1]
    return values[keep]


def _groups_within(offset: _Int64s, end: _Int64s, most: int, alignment: int) -> _Int64s:
    """The rows of one run at which groups start, each group taking as many rows as ``most`` allows."""
    # Rounded up, an end is within the limit exactly when it is within the limit rounded down.
    limit = offset - offset % alignment + (most - most % alignment)
    if bool((end[1:] < end[:-1]).any()):
        return _groups_of_nested(offset.tolist(), end.tolist(), limit.tolist())
    own_group = np.arange(1, len(offset) + 1)
    following = np.maximum(np.searchsorted(end, limit, side="right"), own_group).tolist()
    starts = []
    row = 0
    while row < len(following):
        starts.append(row)
        row = following[row]
    return np.array(starts, dtype=np.int64)


def _groups_of_nested(offset: Sequence[int], end: Sequence[int], limit: Sequence[int]) -> _Int64s:
    """The same where rows lie within others: what a group reaches is then not the end of its last row."""
    starts = [0]
    reach = end[0]
    for row, (row_offset, row_end) in enumerate(itertools.islice(zip(offset, end, strict=True), 1, None), start=1):
        if row_offset > reach or max(reach, row_end) > limit[starts[-1]]:
            starts.append(row)
            reach = row_end
        else:
            reach = max(reach, row_end)
    return np.array(starts, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Overlap:
    """The non-empty intersections of stored boxes with one wanted box.

    Row ``rows[i]`` of the stored boxes holds the box ``lo[i]``, ``length[i]``, in coordinates of the tensor.
    """

    rows: _Int64s
    lo: _Int64s
    length: _Int64s


def overlap(lo: _Int64s, length: _Int64s, box_lo: _Int64s, box_length: _Int64s) -> Overlap:
    """The parts of the stored boxes ``lo``, ``length`` (both [n, D]) that lie in one box (both [D]), in row order.

    In zero dimensions every stored box is the one element, so all rows overlap.
    """
    start = np.maximum(lo, box_lo)
    extent = np.minimum(lo + length, box_lo + box_length) - start
    rows = np.flatnonzero((extent > 0).all(axis=1)).astype(np.int64, copy=False)
    return Overlap(rows=rows, lo=start[rows], length=extent[rows])
