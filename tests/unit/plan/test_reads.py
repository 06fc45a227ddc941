"""Which bytes a box takes, and who reads what several ranks or hosts want."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._plan import reads as module
from holdfast._plan.reads import (
    Blocks,
    CommonReads,
    byte_spans,
    choose_readers,
    choose_readers_beside,
    coalesce,
    common_numbers,
    cut_at_blocks,
    locate,
    overlap,
    own_loads,
    read_numbers,
    share_between_hosts,
    touched_blocks,
)
from holdfast._values.box import Box, whole

# --- where wanted boxes meet stored ones ------------------------------------------------------------------------------


def column(*rows: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(rows, dtype=np.int64)


def test_the_parts_are_in_coordinates_of_the_tensor() -> None:
    found = overlap(
        column((0, 0), (4, 0), (0, 4), (4, 4)),
        column((4, 4), (4, 4), (4, 4), (4, 4)),
        np.array([3, 1]),
        np.array([2, 3]),
    )
    assert found.rows.tolist() == [0, 1]
    assert found.lo.tolist() == [[3, 1], [4, 1]]
    assert found.length.tolist() == [[1, 3], [1, 3]]


def test_boxes_that_only_touch_do_not_overlap() -> None:
    found = overlap(column((0,), (4,), (8,)), column((4,), (4,), (4,)), np.array([4]), np.array([4]))
    assert found.rows.tolist() == [1]


def test_empty_boxes_overlap_nothing() -> None:
    assert len(overlap(column((2,)), column((0,)), np.array([0]), np.array([4])).rows) == 0
    assert len(overlap(column((0,)), column((4,)), np.array([2]), np.array([0])).rows) == 0


def test_in_zero_dimensions_everything_overlaps() -> None:
    nothing = np.empty((2, 0), dtype=np.int64)
    found = overlap(nothing, nothing, nothing[0], nothing[0])
    assert found.rows.tolist() == [0, 1]
    assert found.lo.shape == found.length.shape == (2, 0)


def test_no_stored_boxes() -> None:
    nothing = np.empty((0, 2), dtype=np.int64)
    found = overlap(nothing, nothing, np.array([0, 0]), np.array([1, 1]))
    assert found.rows.dtype == np.int64
    assert found.rows.shape == (0,)
    assert found.lo.shape == found.length.shape == (0, 2)


@st.composite
def rows_of_boxes(draw: st.DrawFn) -> tuple[list[Box], Box]:
    dimensions = draw(st.integers(0, 3))
    numbers = st.lists(st.integers(0, 6), min_size=dimensions, max_size=dimensions).map(tuple)
    box = st.builds(Box, numbers, numbers)
    return draw(st.lists(box, max_size=8)), draw(box)


@settings(max_examples=200, deadline=None)
@given(rows_of_boxes())
def test_overlap_is_the_intersection_of_each_row(drawn: tuple[list[Box], Box]) -> None:
    stored, wanted = drawn
    lo = np.array([box.offsets for box in stored], dtype=np.int64).reshape(len(stored), wanted.ndim)
    length = np.array([box.lengths for box in stored], dtype=np.int64).reshape(len(stored), wanted.ndim)
    found = overlap(lo, length, np.array(wanted.offsets, dtype=np.int64), np.array(wanted.lengths, dtype=np.int64))
    expected = [(row, part) for row, box in enumerate(stored) if (part := box.intersect(wanted)) is not None]
    assert found.rows.tolist() == [row for row, _ in expected]
    assert [tuple(row) for row in found.lo.tolist()] == [part.offsets for _, part in expected]
    assert [tuple(row) for row in found.length.tolist()] == [part.lengths for _, part in expected]


# --- the bytes of a box -----------------------------------------------------------------------------------------------


def spans(
    shape: tuple[int, ...], box: Box, itemsize: int, *, max_gap: int = 0, most: int = 65536
) -> list[tuple[int, int]]:
    starts, stops = byte_spans(shape, box, itemsize, max_gap=max_gap, most=most)
    assert starts.dtype == stops.dtype == np.int64
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def test_the_whole_is_one_span() -> None:
    assert spans((3, 4, 5), whole((3, 4, 5)), 4) == [(0, 240)]


def test_a_scalar_is_one_item() -> None:
    assert spans((), Box((), ()), 8) == [(0, 8)]


def test_an_empty_box_has_no_spans() -> None:
    assert spans((3, 4), Box((1, 1), (2, 0)), 4) == []


def test_rows_are_one_span_and_columns_are_one_each() -> None:
    assert spans((4, 5), Box((1, 0), (2, 5)), 2) == [(10, 30)]
    assert spans((4, 5), Box((1, 1), (3, 2)), 2) == [(12, 16), (22, 26), (32, 36)]


def test_gaps_are_read_over_up_to_the_largest_allowed() -> None:
    box = Box((1, 1), (3, 2))
    assert spans((4, 5), box, 2, max_gap=5) == [(12, 16), (22, 26), (32, 36)]
    assert spans((4, 5), box, 2, max_gap=6) == [(12, 36)]


def test_a_dimension_of_one_index_has_no_gap() -> None:
    assert spans((4, 9, 5), Box((0, 3, 1), (4, 1, 2)), 1) == [(16 + 45 * i, 18 + 45 * i) for i in range(4)]
    assert spans((4, 9, 5), Box((2, 3, 1), (1, 1, 2)), 1) == [(106, 108)]


def test_too_many_spans_are_joined_level_by_level() -> None:
    box = Box((0, 0, 0), (4, 3, 1))
    assert len(spans((4, 5, 6), box, 1, most=12)) == 12
    assert spans((4, 5, 6), box, 1, most=11) == [(0, 13), (30, 43), (60, 73), (90, 103)]
    assert spans((4, 5, 6), box, 1, most=3) == [(0, 103)]


def test_spans_of_a_huge_array_are_not_enumerated() -> None:
    assert spans((1 << 40, 2), Box((0, 0), (1 << 40, 1)), 1) == [(0, (1 << 41) - 1)]


def test_touched_blocks() -> None:
    starts = np.array([0, 15, 40, 59])
    stops = np.array([1, 17, 40, 60])
    assert touched_blocks(starts, stops, 10).tolist() == [0, 1, 5]
    assert touched_blocks(np.array([9]), np.array([31]), 10).tolist() == [0, 1, 2, 3]
    assert touched_blocks(np.array([10]), np.array([20]), 10).tolist() == [1]


def test_no_spans_touch_no_blocks() -> None:
    nothing = np.empty(0, dtype=np.int64)
    assert touched_blocks(nothing, nothing, 10).tolist() == []


def test_spans_are_cut_where_blocks_end() -> None:
    begins, ends = cut_at_blocks(np.array([0, 15, 40, 58]), np.array([1, 37, 40, 60]), 10)
    assert list(zip(begins.tolist(), ends.tolist(), strict=True)) == [(0, 1), (15, 20), (20, 30), (30, 37), (58, 60)]
    nothing = np.empty(0, dtype=np.int64)
    assert [column.tolist() for column in cut_at_blocks(nothing, nothing, 10)] == [[], []]


def groups(rows: list[tuple[int, int, int]], *, most: int = 100, alignment: int = 1) -> list[int]:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    found = coalesce(columns[0], columns[1], columns[2], most=most, alignment=alignment)
    assert found.dtype == np.int64
    return [int(index) for index in found]


def test_no_rows_make_no_groups() -> None:
    assert groups([]) == [0]


def test_adjacent_rows_are_one_group() -> None:
    assert groups([(0, 0, 10), (0, 10, 10), (0, 20, 5)]) == [0, 3]


def test_a_hole_of_one_byte_or_another_file_ends_a_group() -> None:
    assert groups([(0, 0, 10), (0, 11, 10)]) == [0, 1, 2]
    assert groups([(0, 0, 10), (1, 10, 10)]) == [0, 1, 2]


def test_duplicates_and_rows_within_others_are_one_group() -> None:
    assert groups([(0, 0, 30), (0, 0, 30), (0, 5, 5), (0, 30, 1)]) == [0, 4]


def test_what_one_file_reaches_does_not_count_for_the_next() -> None:
    assert groups([(0, 0, 90), (0, 5, 5), (1, 0, 10), (1, 20, 10), (1, 22, 2)]) == [0, 2, 3, 5]


def test_groups_are_full_before_they_are_split() -> None:
    rows = [(0, 10 * index, 10) for index in range(25)]
    assert groups(rows, most=100) == [0, 10, 20, 25]
    assert groups(rows, most=99) == [0, 9, 18, 25]


def test_both_ends_are_rounded_out() -> None:
    rows = [(0, 10 + 10 * index, 10) for index in range(4)]
    assert groups(rows, most=32, alignment=16) == [0, 2, 3, 4]
    assert groups(rows, most=48, alignment=16) == [0, 3, 4]
    assert groups(rows, most=64, alignment=16) == [0, 4]


def test_a_row_larger_than_a_group_stands_alone() -> None:
    assert groups([(0, 0, 10), (0, 10, 500), (0, 510, 10), (0, 520, 10)]) == [0, 1, 2, 4]
    assert groups([(0, 0, 500)]) == [0, 1]


def test_within_a_group_there_is_no_hole_even_where_an_earlier_row_reached_further() -> None:
    assert groups([(0, 0, 60), (0, 5, 65), (0, 10, 10), (0, 50, 12)], most=64) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("nbytes", [4096, 3_000_000, 20_000_000])
def test_a_hundred_thousand_rows(nbytes: int) -> None:
    count = 100_000
    file = np.arange(count) // 50_000
    found = coalesce(file, np.arange(count) * nbytes, np.full(count, nbytes), most=8 << 20, alignment=4096)
    assert found[-1] == count


@st.composite
def boxes_in_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = draw(st.lists(st.integers(0, 5), max_size=4).map(tuple))
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return shape, Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))


def wanted_bytes(shape: tuple[int, ...], box: Box, itemsize: int) -> npt.NDArray[np.bool_]:
    wanted = np.zeros((*shape, itemsize), dtype=bool)
    wanted[box.slices()] = True
    return wanted.ravel()


def runs(wanted: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The maximal runs of wanted bytes."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]]))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


@settings(max_examples=200, deadline=None)
@given(boxes_in_shapes(), st.sampled_from([1, 2, 8]), st.integers(0, 40))
def test_spans_are_the_runs_joined_over_small_gaps(
    drawn: tuple[tuple[int, ...], Box], itemsize: int, max_gap: int
) -> None:
    shape, box = drawn
    expected: list[tuple[int, int]] = []
    for start, stop in runs(wanted_bytes(shape, box, itemsize)):
        if expected and start - expected[-1][1] <= max_gap:
            expected[-1] = (expected[-1][0], stop)
        else:
            expected.append((start, stop))
    starts, stops = byte_spans(shape, box, itemsize, max_gap=max_gap)
    assert list(zip(starts.tolist(), stops.tolist(), strict=True)) == expected


@settings(max_examples=200, deadline=None)
@given(boxes_in_shapes(), st.sampled_from([1, 3]), st.integers(0, 20), st.integers(1, 9))
def test_no_more_spans_than_asked_still_cover_the_box(
    drawn: tuple[tuple[int, ...], Box], itemsize: int, max_gap: int, most: int
) -> None:
    shape, box = drawn
    starts, stops = byte_spans(shape, box, itemsize, max_gap=max_gap, most=most)
    assert len(starts) <= most
    assert (starts < stops).all()
    assert (stops[:-1] < starts[1:]).all()
    wanted = wanted_bytes(shape, box, itemsize)
    covered = np.zeros_like(wanted)
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        covered[start:stop] = True
        # Nothing is read before the first or after the last byte that is wanted.
        assert wanted[start]
        assert wanted[stop - 1]
    assert not (wanted & ~covered).any()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=6), st.integers(1, 12))
def test_touched_blocks_are_those_of_the_bytes(spans: list[tuple[int, int]], block: int) -> None:
    starts = np.array([start for start, _ in spans], dtype=np.int64)
    stops = np.array([start + length for start, length in spans], dtype=np.int64)
    expected = {byte // block for start, length in spans for byte in range(start, start + length)}
    assert touched_blocks(starts, stops, block).tolist() == sorted(expected)


def greedy(rows: list[tuple[int, int, int]], most: int, alignment: int) -> list[int]:
    """The groups as their definition says, row by row."""
    groups: list[int] = []
    file = start = reach = -1
    for index, (row_file, offset, nbytes) in enumerate(rows):
        end = max(reach, offset + nbytes)
        span = math.ceil(end / alignment) * alignment - start // alignment * alignment
        if not groups or row_file != file or offset > reach or span > most:
            groups.append(index)
            file, start, reach = row_file, offset, offset + nbytes
        else:
            reach = end
    return [*groups, len(rows)] if rows else [0]


@st.composite
def sorted_rows(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Rows with many that touch: each starts near where the one before it ends."""
    rows = []
    for file in range(draw(st.integers(1, 3))):
        offset = end = draw(st.integers(0, 20))
        for _ in range(draw(st.integers(0, 12))):
            nbytes = draw(st.integers(0, 25))
            rows.append((file, offset, nbytes))
            end = max(end, offset + nbytes)
            offset = draw(st.sampled_from([end, end, end + 1, offset, max(offset, end - 5)]))
    return rows


@settings(max_examples=300, deadline=None)
@given(sorted_rows(), st.integers(1, 100), st.sampled_from([1, 2, 8]))
def test_groups_are_those_of_the_definition(rows: list[tuple[int, int, int]], most: int, alignment: int) -> None:
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), 3).T
    found = coalesce(columns[0], columns[1], columns[2], most=most, alignment=alignment)
    assert found.tolist() == greedy(rows, most, alignment)


# --- ranks of a host: each block once, shared fairly, the same on every rank ------------------------------------------


BLOCK = 64
PAGE = 16
MOST = 4 * BLOCK


class Chunks:
    """Chunks of given sizes, one after the other in files of a few each; with a seed, numbered in another order."""

    def __init__(self, sizes: list[int], *, per_file: int = 3, seed: int | None = None) -> None:
        numbers = np.arange(len(sizes)) if seed is None else np.random.default_rng(seed).permutation(len(sizes))
        self.nbytes = np.array(sizes, dtype=np.int64)
        self.file = np.zeros(len(sizes), dtype=np.int64)
        self.offset = np.zeros(len(sizes), dtype=np.int64)
        end = 0
        for place, chunk in enumerate(numbers.tolist()):
            if place % per_file == 0:
                end = 32  # after a header
            self.file[chunk], self.offset[chunk] = place // per_file, end
            end += sizes[chunk]
        self.first_block = np.concatenate([[0], np.cumsum(-(-self.nbytes // BLOCK))]).astype(np.int64)
        self.blocks = int(self.first_block[-1])

    def locate(self, numbers: np.ndarray) -> Blocks:
        columns = {name: getattr(self, name) for name in ("first_block", "file", "offset", "nbytes")}
        return locate(numbers, **columns, block_bytes=BLOCK)

    def loads(self, wanted: np.ndarray) -> np.ndarray:
        return own_loads(wanted, first_block=self.first_block, nbytes=self.nbytes, block_bytes=BLOCK)

    def share(self, wanted: np.ndarray, *, most_readers: int = 16) -> tuple[CommonReads, np.ndarray]:
        """Who of a host's ranks reads what, and what each reads for itself alone."""
        blocks, loads = self.locate(common_numbers(wanted)), self.loads(wanted)
        reads = choose_readers(
            blocks, wanted[:, blocks.number], loads, most=MOST, alignment=PAGE, most_readers=most_readers
        )
        return reads, loads

    def between(self, wanted: np.ndarray) -> CommonReads:
        """Which host reads what."""
        return share_between_hosts(wanted, self.locate, most=MOST, alignment=PAGE)

    def on_host(self, job: CommonReads, host: int, wanted: np.ndarray) -> tuple[CommonReads, np.ndarray]:
        loads = self.loads(wanted & (read_numbers(job, host, self.blocks) < 0))
        return choose_readers_beside(
            job, host, wanted, loads, self.locate, most=2 * MOST, alignment=PAGE, most_readers=16
        )


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
    monkeypatch.setattr(module, "_MOST_TURNS", 5)
    chunks = Chunks([BLOCK // 2] * 23, per_file=1)
    reads, _ = chunks.share(np.ones((3, chunks.blocks), dtype=bool))
    assert len(reads) == 23
    assert reads.reader.tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [0] * 5 + [1] * 3


def _blocks(reads: CommonReads, rank: int) -> np.ndarray:
    return np.repeat(reads.reader, np.diff(reads.bounds)) == rank


# --- hosts: each block once, by one that wants it, evenly, and cut alike on every host --------------------------------


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
    common = np.flatnonzero(counts >= module.LEAST_HOSTS)
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
    expected = np.where(counts >= module.LEAST_HOSTS, 1, counts)
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
    assert len(job) == (0 if hosts < module.LEAST_HOSTS else len(job.bounds) - 1)
    assert len(job.blocks.number) == (chunks.blocks if hosts >= 4 else 0)
    reads, number = chunks.on_host(job, 0, np.ones((2, chunks.blocks), dtype=bool))
    assert len(reads) > 0
    assert (number >= 0).all() == (hosts >= 4)


def test_sets_of_hosts_have_numbers_of_their_own() -> None:
    takers = np.array(list(itertools.product([False, True], repeat=10)), dtype=bool).T
    assert len(set(module._groups(takers).tolist())) == 1 << 10
