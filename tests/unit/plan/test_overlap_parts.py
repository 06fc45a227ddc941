from __future__ import annotations

import numpy as np

from holdfast._plan.reads import overlap


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
