"""Which host reads what several want: each block once, by one that wants it, evenly, and cut alike on every host."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._plan import reads as job_reads
from holdfast._plan.reads import (
    Blocks,
    CommonReads,
    locate,
    own_loads,
    read_numbers,
    share_between_hosts,
    share_out_beside,
)

BLOCK = 64
PAGE = 16
MOST = 4 * BLOCK


class Chunks:
    """Chunks of given sizes, one after the other in files of a few chunks each."""

    def __init__(self, sizes: list[int], *, per_file: int = 3) -> None:
        self.nbytes = np.array(sizes, dtype=np.int64)
        self.file = np.arange(len(sizes), dtype=np.int64) // per_file
        self.offset = np.array(
            [32 + sum(sizes[chunk - chunk % per_file : chunk]) for chunk in range(len(sizes))], dtype=np.int64
        )
        self.first_block = np.concatenate([[0], np.cumsum(-(-self.nbytes // BLOCK))]).astype(np.int64)
        self.blocks = int(self.first_block[-1])

    def locate(self, numbers: np.ndarray) -> Blocks:
        columns = {name: getattr(self, name) for name in ("first_block", "file", "offset", "nbytes")}
        return locate(numbers, **columns, block_bytes=BLOCK)

    def between(self, wanted: np.ndarray) -> CommonReads:
        return share_between_hosts(wanted, self.locate, most=MOST, alignment=PAGE)

    def on_host(self, job: CommonReads, host: int, wanted: np.ndarray) -> tuple[CommonReads, np.ndarray]:
        loads = partial(own_loads, first_block=self.first_block, nbytes=self.nbytes, block_bytes=BLOCK)
        is_own = read_numbers(job, host, self.blocks) < 0
        return share_out_beside(
            job, host, wanted, loads(wanted & is_own), self.locate, most=2 * MOST, alignment=PAGE, most_readers=16
        )


def blocks_of(reads: CommonReads, read: int) -> list[int]:
    return list(map(int, reads.blocks.number[int(reads.bounds[read]) : int(reads.bounds[read + 1])]))


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_every_block_reaches_every_rank_that_wants_it_and_is_read_as_often_as_the_rule_says(
    data: st.DataObject,
) -> None:
    chunks = Chunks(data.draw(st.lists(st.integers(0, 5 * BLOCK), min_size=1, max_size=8)))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))  # ranks of each host
    seed, share = data.draw(st.integers(0, 1 << 16)), data.draw(st.sampled_from([0.3, 0.8, 1.0]))
    draw = np.random.default_rng(seed)
    # Whole chunks are wanted or not, mostly, as by layouts.
    of_chunk = np.repeat(np.arange(len(chunks.nbytes)), np.diff(chunks.first_block))
    wanted = [(draw.random((size, len(chunks.nbytes))) < share)[:, of_chunk] for size in sizes]
    if data.draw(st.booleans()):
        wanted = [each ^ (draw.random(each.shape) < 0.1) for each in wanted]
    by_host = np.stack([each.any(axis=0) for each in wanted])
    job = chunks.between(by_host)

    counts = by_host.sum(axis=0)
    common = np.flatnonzero(counts >= job_reads.LEAST_HOSTS)
    assert sorted(job.blocks.number.tolist()) == common.tolist()
    for read in range(len(job)):
        for block in blocks_of(job, read):
            assert job.takers[read].tolist() == by_host[:, block].tolist(), "nobody gets what it does not want"
        assert job.takers[read, job.reader[read]]

    times_read = np.zeros(chunks.blocks, dtype=int)
    frames: dict[int, tuple[int, ...]] = {}
    for host, size in enumerate(sizes):
        reads, number = chunks.on_host(job, host, wanted[host])
        carrier = size
        got = np.zeros((size, chunks.blocks), dtype=bool)
        for read in range(len(reads)):
            blocks = blocks_of(reads, read)
            got[:, blocks] |= reads.takers[read, :size, None]
            if number[read] < 0:
                assert reads.reader[read] < carrier
                assert not reads.takers[read, carrier]
            else:
                assert blocks == blocks_of(job, int(number[read])), "cut alike everywhere"
                assert frames.setdefault(int(number[read]), tuple(blocks)) == tuple(blocks)
                is_mine = job.reader[number[read]] == host
                assert (reads.reader[read] == carrier) != is_mine
                assert reads.takers[read, carrier] == is_mine
            assert reads.takers[read].sum() > (reads.reader[read] != carrier) * reads.takers[read, reads.reader[read]]
            times_read[blocks] += reads.reader[read] != carrier
        assert not (got & ~wanted[host]).any() or len(reads)
        alone = wanted[host] & ~got
        assert (wanted[host].sum(axis=0)[alone.any(axis=0)] == 1).all(), "what two want is shared"
        times_read += alone.sum(axis=0)
    expected = np.where(counts >= job_reads.LEAST_HOSTS, 1, counts)
    assert times_read.tolist() == expected.tolist()


def test_what_all_hosts_want_is_read_by_each_in_equal_parts() -> None:
    chunks = Chunks([MOST - 2 * PAGE] * 42, per_file=42)
    job = chunks.between(np.ones((5, chunks.blocks), dtype=bool))
    nbytes = np.add.reduceat(job.blocks.nbytes, job.bounds[:-1])
    read_by = [int(nbytes[job.reader == host].sum()) for host in range(5)]
    assert sum(read_by) == chunks.nbytes.sum()
    assert max(read_by) - min(read_by) <= MOST


def test_replica_groups_share_evenly_within_themselves() -> None:
    chunks = Chunks([MOST - 2 * PAGE] * 80, per_file=80)
    wanted = np.zeros((8, chunks.blocks), dtype=bool)
    half = chunks.blocks // 2
    wanted[::2, :half] = True
    wanted[1::2, half:] = True
    job = chunks.between(wanted)
    nbytes = np.add.reduceat(job.blocks.nbytes, job.bounds[:-1])
    read_by = [int(nbytes[job.reader == host].sum()) for host in range(8)]
    assert max(read_by) - min(read_by) <= MOST
    assert all(job.takers[read, job.reader[read]] for read in range(len(job)))


@pytest.mark.parametrize("hosts", [0, 1, 3, 4])
def test_below_the_least_number_of_hosts_nothing_is_sent(hosts: int) -> None:
    chunks = Chunks([3 * BLOCK, 0, 10])
    wanted = np.zeros((6, chunks.blocks), dtype=bool)
    wanted[:hosts] = True
    job = chunks.between(wanted)
    assert len(job) == (0 if hosts < job_reads.LEAST_HOSTS else len(job.bounds) - 1)
    assert len(job.blocks.number) == (chunks.blocks if hosts >= 4 else 0)
    reads, number = chunks.on_host(job, 0, np.ones((2, chunks.blocks), dtype=bool))
    assert len(reads) > 0
    assert (number >= 0).all() == (hosts >= 4)


def test_sets_of_hosts_have_numbers_of_their_own() -> None:
    takers = np.array(list(itertools.product([False, True], repeat=10)), dtype=bool).T
    assert len(set(job_reads._groups(takers).tolist())) == 1 << 10
