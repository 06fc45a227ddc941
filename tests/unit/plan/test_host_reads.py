"""Who reads what several ranks of a host want: each block once, shared fairly, the same on every rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._plan import reads as host_reads
from holdfast._plan.reads import CommonReads, common_numbers, locate, own_loads, share_out

BLOCK = 64
PAGE = 16
MOST = 4 * BLOCK


class Chunks:
    """Chunks of given sizes, one after the other in files of a few chunks each, numbered in another order."""

    def __init__(self, sizes: list[int], *, per_file: int = 3, seed: int = 0) -> None:
        order = np.random.default_rng(seed).permutation(len(sizes))
        self.nbytes = np.array(sizes, dtype=np.int64)
        self.file = np.zeros(len(sizes), dtype=np.int64)
        self.offset = np.zeros(len(sizes), dtype=np.int64)
        end = 0
        for place, chunk in enumerate(order.tolist()):
            if place % per_file == 0:
                end = 32  # after a header
            self.file[chunk], self.offset[chunk] = place // per_file, end
            end += sizes[chunk]
        self.first_block = np.concatenate([[0], np.cumsum(-(-self.nbytes // BLOCK))]).astype(np.int64)

    @property
    def blocks(self) -> int:
        return int(self.first_block[-1])

    def share(self, wanted: np.ndarray, *, most_readers: int = 16) -> tuple[CommonReads, np.ndarray]:
        numbers = common_numbers(wanted)
        blocks = locate(
            numbers,
            first_block=self.first_block,
            file=self.file,
            offset=self.offset,
            nbytes=self.nbytes,
            block_bytes=BLOCK,
        )
        loads = own_loads(wanted, first_block=self.first_block, nbytes=self.nbytes, block_bytes=BLOCK)
        reads = share_out(blocks, wanted[:, blocks.number], loads, most=MOST, alignment=PAGE, most_readers=most_readers)
        return reads, loads


def sizes_of(chunks: Chunks) -> list[int]:
    return [min(BLOCK, int(size) - start) for size in chunks.nbytes.tolist() for start in range(0, int(size), BLOCK)]


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_every_common_block_is_read_once_by_one_rank_and_taken_by_those_who_want_it(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 5 * BLOCK), min_size=1, max_size=12))
    chunks = Chunks(sizes, seed=data.draw(st.integers(0, 5)))
    ranks = data.draw(st.integers(1, 5))
    bits = data.draw(st.lists(st.booleans(), min_size=ranks * chunks.blocks, max_size=ranks * chunks.blocks))
    wanted = np.array(bits, dtype=bool).reshape(ranks, chunks.blocks)
    most_readers = data.draw(st.integers(1, 5))
    reads, loads = chunks.share(wanted, most_readers=most_readers)

    common = {block for block in range(chunks.blocks) if wanted[:, block].sum() >= 2}
    assert sorted(reads.blocks.number.tolist()) == sorted(common)
    lengths = sizes_of(chunks)
    for rank in range(ranks):
        alone = [size for block, size in enumerate(lengths) if wanted[rank, block] and block not in common]
        assert loads[rank] == sum(alone)
    assert reads.bounds[0] == 0
    assert reads.bounds[-1] == len(common)
    assert len(set(reads.reader.tolist())) <= most_readers
    for read, (first, stop) in enumerate(zip(reads.bounds[:-1].tolist(), reads.bounds[1:].tolist(), strict=True)):
        inside = slice(first, stop)
        assert len(set(reads.blocks.file[inside].tolist())) == 1
        ends = reads.blocks.offset[inside] + reads.blocks.nbytes[inside]
        assert (reads.blocks.offset[inside][1:] == ends[:-1]).all(), "the blocks of a read are neighbours"
        span = -(-int(ends[-1]) // PAGE) * PAGE - int(reads.blocks.offset[first]) // PAGE * PAGE
        assert span <= MOST or stop - first == 1
        takers = wanted[:, reads.blocks.number[inside]].any(axis=1)
        assert reads.takers[read].tolist() == takers.tolist()
    for number, chunk, offset, nbytes in zip(
        *(column.tolist() for column in (reads.blocks.number, reads.blocks.chunk, reads.blocks.offset)),
        reads.blocks.nbytes.tolist(),
        strict=True,
    ):
        start = (number - int(chunks.first_block[chunk])) * BLOCK
        assert offset == chunks.offset[chunk] + start
        assert nbytes == min(BLOCK, int(chunks.nbytes[chunk]) - start) > 0


def test_what_all_want_is_read_by_each_in_equal_parts() -> None:
    chunks = Chunks([MOST] * 40, per_file=40)
    reads, _ = chunks.share(np.ones((4, chunks.blocks), dtype=bool))
    read_by = [int(reads.blocks.nbytes[_blocks(reads, rank)].sum()) for rank in range(4)]
    assert sum(read_by) == 40 * MOST
    assert max(read_by) - min(read_by) <= MOST


def test_who_has_much_of_its_own_to_read_reads_less_for_others() -> None:
    chunks = Chunks([MOST] * 30, per_file=30)
    wanted = np.zeros((3, chunks.blocks), dtype=bool)
    wanted[:, :60] = True
    wanted[0, 60:] = True
    reads, loads = chunks.share(wanted)
    total = [int(loads[rank] + reads.blocks.nbytes[_blocks(reads, rank)].sum()) for rank in range(3)]
    assert loads.tolist() == [60 * BLOCK, 0, 0]
    assert total[0] == loads[0]
    assert abs(total[1] - total[2]) <= MOST


def test_nothing_in_common_gives_no_reads() -> None:
    chunks = Chunks([100, 0, 300])
    wanted = np.zeros((2, chunks.blocks), dtype=bool)
    wanted[0] = True
    reads, loads = chunks.share(wanted)
    assert len(reads) == 0
    assert loads.tolist() == [400, 0]


def test_very_many_reads_are_given_away_several_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_reads, "_MOST_TURNS", 5)
    chunks = Chunks([BLOCK // 2] * 23, per_file=1)
    reads, _ = chunks.share(np.ones((3, chunks.blocks), dtype=bool))
    assert len(reads) == 23
    assert reads.reader.tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [0] * 5 + [1] * 3


def _blocks(reads: CommonReads, rank: int) -> np.ndarray:
    return np.repeat(reads.reader, np.diff(reads.bounds)) == rank
