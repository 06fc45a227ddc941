"""From wanted boxes to stored boxes, to byte spans, to blocks, to reads; and who reads what several ranks want.

Spans are half-open, as two int64 columns of starts and stops. Never enumerates elements, and never looks at more than
one tensor at a time.

Every rank of every host computes the same from the same table of wishes, in time that is linear in the blocks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast._values.box import Box
from holdfast._values.digest import scrambled

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
    limits = (offset - offset % alignment + (most - most % alignment)).tolist()
    starts: list[int] = []
    reach = limit = -1
    for row, (row_offset, row_end) in enumerate(zip(offset.tolist(), end.tolist(), strict=True)):
        # Rows may lie within others: what a group reaches is then not the end of its last row.
        if row_offset > reach or max(reach, row_end) > limit:
            starts.append(row)
            reach, limit = row_end, limits[row]
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


_Bools = npt.NDArray[np.bool_]

_MOST_TURNS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """Blocks of chunks in file order: number, chunk (both of the index), place in the file."""

    number: _Int64s
    chunk: _Int64s
    file: _Int64s
    offset: _Int64s
    nbytes: _Int64s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommonReads:
    """The reads of blocks that several ranks or hosts want: read j is of blocks [bounds[j], bounds[j + 1]), neighbours.

    ``reader`` is who reads them, ``takers`` ([reads, ranks]) who wants one or more of them; the reader may be none of
    those.
    """

    blocks: Blocks
    bounds: _Int64s
    reader: _Int64s
    takers: _Bools

    def __len__(self) -> int:
        return len(self.reader)


def locate(
    number: _Int64s, *, first_block: _Int64s, file: _Int64s, offset: _Int64s, nbytes: _Int64s, block_bytes: int
) -> Blocks:
    """Where blocks lie; ``first_block`` is the number of each chunk's first one, the rest are columns of the chunks."""
    chunk = np.searchsorted(first_block, number, side="right") - 1
    order = np.lexsort((offset[chunk] + (number - first_block[chunk]) * block_bytes, file[chunk]))
    number, chunk = number[order], chunk[order]
    start = (number - first_block[chunk]) * block_bytes
    return Blocks(
        number=number,
        chunk=chunk,
        file=file[chunk],
        offset=offset[chunk] + start,
        nbytes=np.minimum(nbytes[chunk] - start, block_bytes),
    )


def common_numbers(wanted: _Bools, least: int = 2) -> _Int64s:
    """The numbers of the blocks that ``least`` or more ranks want; ``wanted`` is [ranks, blocks]."""
    return np.flatnonzero(wanted.sum(axis=0) >= least)


def own_loads(wanted: _Bools, *, first_block: _Int64s, nbytes: _Int64s, block_bytes: int) -> _Int64s:
    """How many bytes of blocks that nobody else wants each rank wants."""
    counts = np.diff(first_block)
    filled = counts > 0
    sizes = np.full(wanted.shape[1], block_bytes, dtype=np.int64)
    sizes[first_block[1:][filled] - 1] = nbytes[filled] - (counts[filled] - 1) * block_bytes
    alone = np.where(wanted.sum(axis=0) == 1, sizes, 0)
    return np.array([int(alone[row].sum()) for row in wanted], dtype=np.int64)


def choose_readers(
    blocks: Blocks,
    takers: _Bools,
    loads: _Int64s,
    *,
    most: int,
    alignment: int,
    most_readers: int,
    together: _Int64s | None = None,
    arrives: _Bools | None = None,
) -> CommonReads:
    """The reads, of at most ``most`` bytes each, given to the ranks so that all have about the same to read.

    ``takers`` is [ranks, blocks] for the blocks at hand; ``loads`` is what each rank reads beside them. No more than
    ``most_readers`` ranks read. Blocks of which ``together`` differs are not read at once. What ``arrives``, in whole
    reads, is nobody's to read: its reader is the last of the takers.
    """
    run = blocks.file if together is None else runs(blocks.file, together)
    bounds = coalesce(run, blocks.offset, blocks.nbytes, most=most, alignment=alignment)
    first = bounds[:-1]
    if len(first) == 0:
        nobody = np.zeros((0, len(takers)), dtype=bool)
        return CommonReads(blocks=blocks, bounds=bounds, reader=np.zeros(0, np.int64), takers=nobody)
    nbytes = np.add.reduceat(blocks.nbytes, first)
    reader = np.full(len(first), len(takers) - 1, dtype=np.int64)
    here = np.ones(len(first), dtype=bool) if arrives is None else ~arrives[first]
    reader[here] = level(nbytes[here], loads, most_readers)
    return CommonReads(
        blocks=blocks,
        bounds=bounds,
        reader=reader,
        takers=np.ascontiguousarray(np.logical_or.reduceat(takers, first, axis=1).T),
    )


def runs(file: _Int64s, group: npt.NDArray[np.generic]) -> _Int64s:
    """A number for each run of rows of one file and one group, ascending."""
    starts = np.ones(len(file), dtype=np.int64)
    starts[1:] = (file[1:] != file[:-1]) | (group[1:] != group[:-1])
    return np.cumsum(starts)


def level(nbytes: _Int64s, loads: _Int64s, most_readers: int) -> _Int64s:
    """A reader for each read, in turn the one that has the least to read so far."""
    if len(nbytes) == 0:
        return np.zeros(0, dtype=np.int64)
    # Of very many reads several are given away at a time.
    stride = -(-len(nbytes) // _MOST_TURNS)
    turns = np.add.reduceat(nbytes, np.arange(0, len(nbytes), stride)).tolist()
    least = sorted((load, rank) for rank, load in enumerate(loads.tolist()))[:most_readers]
    heapq.heapify(least)
    readers = []
    for size in turns:
        load, rank = least[0]
        readers.append(rank)
        heapq.heapreplace(least, (load + size, rank))
    return np.repeat(np.array(readers, dtype=np.int64), stride)[: len(nbytes)]


LEAST_HOSTS = 4
"""How many hosts must want a block for one of them to send it to the others.

A host sends what it has read to all others, so that each sends and receives about as much as every host would read
without. That pays where the storage serves many readers of the same bytes more slowly than the network passes them on,
which two or three readers seldom bring about.
"""


def share_between_hosts(
    wanted: _Bools, locate: Callable[[_Int64s], Blocks], *, most: int, alignment: int
) -> CommonReads:
    """The reads of blocks that at least ``LEAST_HOSTS`` want, with hosts in the place of ranks.

    ``wanted`` is [hosts, blocks], ``locate`` says where blocks of given numbers lie. All blocks of a read are wanted by
    the same hosts, one of which reads it: of those who want the same each about as much.
    """
    blocks = locate(common_numbers(wanted, LEAST_HOSTS))
    takers = wanted[:, blocks.number]
    group = _groups(takers)
    # A read ends where other hosts want what follows, so that nobody gets what it does not want.
    bounds = coalesce(runs(blocks.file, group), blocks.offset, blocks.nbytes, most=most, alignment=alignment)
    first = bounds[:-1]
    by_read = np.ascontiguousarray(takers[:, first].T)
    nbytes = np.diff(np.append(0, np.cumsum(blocks.nbytes))[bounds])
    return CommonReads(blocks=blocks, bounds=bounds, reader=_give_out(group[first], by_read, nbytes), takers=by_read)


def read_numbers(reads: CommonReads, host: int, blocks: int) -> _Int64s:
    """For each of all ``blocks`` the number of the read that brings it to ``host``; -1 for none."""
    number = np.repeat(np.arange(len(reads), dtype=np.int64), np.diff(reads.bounds))
    found = np.full(blocks, -1, dtype=np.int64)
    found[reads.blocks.number] = np.where(reads.takers[number, host], number, -1)
    return found


def choose_readers_beside(
    job: CommonReads,
    host: int,
    wanted: _Bools,
    loads: _Int64s,
    locate: Callable[[_Int64s], Blocks],
    *,
    most: int,
    alignment: int,
    most_readers: int,
) -> tuple[CommonReads, _Int64s]:
    """The common reads of the ranks of ``host``, and the number in ``job`` of each; -1 for one that is no other host's.

    ``wanted`` is [ranks, blocks] of this host, ``loads`` what each of them reads alone. Beside the ranks there is a
    carrier, whose number is the one after the last: it takes what is to be sent, and is the reader of what is received.
    """
    number = read_numbers(job, host, wanted.shape[1])
    is_common = number >= 0
    is_common[common_numbers(wanted)] = True
    blocks = locate(np.flatnonzero(is_common))
    number = number[blocks.number]
    # With one more, so that -1 is a read too: one that nobody sends.
    arrives = np.append(job.reader != host, False)[number]
    leaves = (number >= 0) & ~arrives
    reads = choose_readers(
        blocks,
        np.concatenate([wanted[:, blocks.number], leaves[None]]),
        loads,
        most=most,
        alignment=alignment,
        most_readers=most_readers,
        together=number,
        arrives=arrives,
    )
    return reads, number[reads.bounds[:-1]]


def _groups(takers: _Bools) -> npt.NDArray[np.uint64]:
    """A number for each column; equal columns have equal numbers."""
    group = np.zeros(takers.shape[1], dtype=np.uint64)
    for row, word in zip(takers, scrambled(np.arange(len(takers), dtype=np.uint64)), strict=True):
        group += row * word
    return group


def _give_out(group: npt.NDArray[np.uint64], takers: _Bools, nbytes: _Int64s) -> _Int64s:
    """A reader for each read, group by group: one of those who want it, so that all have about the same to read."""
    reader = np.zeros(len(group), dtype=np.int64)
    loads = np.zeros(takers.shape[1], dtype=np.int64)
    order = np.argsort(group, kind="stable")
    for reads in np.split(order, np.flatnonzero(np.diff(group[order])) + 1) if len(order) else ():
        hosts = np.flatnonzero(takers[reads[0]])
        reader[reads] = hosts[level(nbytes[reads], loads[hosts], len(hosts))]
        np.add.at(loads, reader[reads], nbytes[reads])
    return reader
