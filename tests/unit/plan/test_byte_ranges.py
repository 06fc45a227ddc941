from __future__ import annotations

import numpy as np
import pytest

from holdfast._plan.reads import byte_spans, coalesce, cut_at_blocks, touched_blocks
from holdfast._values.box import Box, whole


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
