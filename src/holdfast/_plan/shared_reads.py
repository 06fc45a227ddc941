"""Who reads the blocks that several ranks want: one rank of a host, one host of a job, so that each block is read once.

Every rank of every host computes the same from the same table of wishes, in time that is linear in the blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast._plan.reads import coalesce
from holdfast._plan.shares import scrambled

_Int64s = npt.NDArray[np.int64]
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


def share_out(
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


def share_out_beside(
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
    reads = share_out(
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
