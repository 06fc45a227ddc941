from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._plan.reads import byte_spans, coalesce, touched_blocks
from holdfast._values.box import Box


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
