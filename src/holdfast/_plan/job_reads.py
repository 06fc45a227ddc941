"""Which of the hosts that want a block reads it and sends it to the others, so that the job reads it once.

Every rank of every host computes the same from the same table of wishes, in time that is linear in the blocks. numpy
only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from holdfast._plan.host_reads import Blocks, CommonReads, common_numbers, level, runs, share_out
from holdfast._plan.layout import scrambled
from holdfast._plan.ranges import coalesce

_Int64s = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]

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
    """A number for each column, the same for those that are the same."""
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
