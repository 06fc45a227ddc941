from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._plan.reads import overlap
from holdfast._values.box import Box


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
