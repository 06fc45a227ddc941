"""Boxes: what they hold, and where they meet."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._values.box import Box, flat_range_boxes, whole


def test_volume_and_rank() -> None:
    assert Box((1, 2), (3, 4)).volume == 12
    assert Box((1, 2), (3, 4)).ndim == 2
    assert Box((5, 0), (3, 0)).volume == 0
    assert Box((), ()).volume == 1
    assert Box((), ()).ndim == 0


def test_volume_does_not_overflow() -> None:
    assert Box((0, 0), (2**62, 2**62)).volume == 2**124


def test_whole_is_every_element() -> None:
    assert whole((2, 3)) == Box((0, 0), (2, 3))
    assert whole(()) == Box((), ())
    assert whole([4]) == Box((0,), (4,))


def test_intersect_is_what_both_hold() -> None:
    assert Box((0, 0), (4, 4)).intersect(Box((2, 3), (5, 5))) == Box((2, 3), (2, 1))
    assert Box((2, 3), (5, 5)).intersect(Box((0, 0), (4, 4))) == Box((2, 3), (2, 1))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Box((0,), (4,)), Box((4,), (2,))),
        (Box((0, 0), (4, 4)), Box((0, 4), (4, 4))),
        (Box((0,), (0,)), Box((0,), (4,))),
        (Box((2,), (0,)), Box((0,), (4,))),
    ],
)
def test_boxes_that_share_no_element_do_not_intersect(one: Box, other: Box) -> None:
    assert one.intersect(other) is None
    assert other.intersect(one) is None


def test_scalars_intersect() -> None:
    assert Box((), ()).intersect(Box((), ())) == Box((), ())


def test_boxes_of_different_rank_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        Box((0,), (4,)).intersect(Box((0, 0), (4, 4)))


def test_contains() -> None:
    outer = Box((2, 2), (4, 4))
    assert outer.contains(outer)
    assert outer.contains(Box((3, 3), (3, 3)))
    assert not outer.contains(Box((3, 3), (3, 4)))
    assert not outer.contains(Box((1, 3), (2, 2)))
    assert outer.contains(Box((6, 2), (0, 1)))
    assert not outer.contains(Box((7, 2), (0, 1)))
    assert Box((), ()).contains(Box((), ()))


def test_relative_to_counts_from_the_other_start() -> None:
    assert Box((5, 7), (2, 1)).relative_to(Box((4, 4), (9, 9))) == Box((1, 3), (2, 1))


@pytest.mark.parametrize(
    ("box", "shape", "fits"),
    [
        (Box((0, 0), (2, 3)), (2, 3), True),
        (Box((1, 3), (1, 0)), (2, 3), True),
        (Box((1, 0), (2, 3)), (2, 3), False),
        (Box((-1, 0), (1, 1)), (2, 3), False),
        (Box((1, 0), (-1, 1)), (2, 3), False),
        (Box((0,), (2,)), (2, 3), False),
        (Box((0, 0), (2,)), (2, 3), False),
        (Box((), ()), (), True),
        (Box((2**63,), (2**63,)), (2**63,), False),
    ],
)
def test_fits(box: Box, shape: tuple[int, ...], fits: bool) -> None:
    assert box.fits(shape) is fits


def test_slices_select_the_box() -> None:
    array = np.arange(24).reshape(4, 6)
    assert array[Box((1, 2), (2, 3)).slices()].tolist() == [[8, 9, 10], [14, 15, 16]]
    assert np.array(7)[Box((), ()).slices()] == 7


def test_boxes_are_values() -> None:
    box = Box((1, 2), (3, 4))
    assert pickle.loads(pickle.dumps(box)) == box
    assert len({box, Box((1, 2), (3, 4)), Box((1, 2), (3, 5))}) == 2


def test_range_over_three_dimensions_takes_five_boxes() -> None:
    assert flat_range_boxes((3, 4, 5), 3, 57) == [
        Box((0, 0, 3), (1, 1, 2)),
        Box((0, 1, 0), (1, 3, 5)),
        Box((1, 0, 0), (1, 4, 5)),
        Box((2, 0, 0), (1, 3, 5)),
        Box((2, 3, 0), (1, 1, 2)),
    ]


def test_range_of_whole_rows_is_one_box() -> None:
    assert flat_range_boxes((4, 5), 5, 15) == [Box((1, 0), (2, 5))]
    assert flat_range_boxes((4, 5), 0, 20) == [whole((4, 5))]


def test_range_of_a_scalar() -> None:
    assert flat_range_boxes((), 0, 1) == [Box((), ())]
    assert flat_range_boxes((), 0, 0) == []


def test_empty_ranges_have_no_boxes() -> None:
    assert flat_range_boxes((4, 5), 7, 7) == []
    assert flat_range_boxes((0, 5), 0, 0) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 21)])
def test_range_outside_the_tensor_is_an_error(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="is not within the 20 elements"):
        flat_range_boxes((4, 5), start, stop)


# --- against masks, at random -----------------------------------------------------------------------------------------


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_of_one_shape(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes)
    boxes = []
    for _ in range(count):
        ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
        boxes.append(Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends)))
    return shape, boxes


def mask(shape: tuple[int, ...], box: Box) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    inside = np.zeros(shape, dtype=bool)
    inside[box.slices()] = True
    return inside


@given(boxes_of_one_shape(2))
def test_intersection_is_the_elements_in_both(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (one, other) = drawn
    common = mask(shape, one) & mask(shape, other)
    found = one.intersect(other)
    if found is None:
        assert not common.any()
    else:
        assert found.volume == common.sum() > 0
        assert np.array_equal(mask(shape, found), common)
        assert one.contains(found)
        assert other.contains(found)


@given(boxes_of_one_shape(2))
def test_a_box_contains_another_when_it_has_its_elements(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (one, other) = drawn
    if other.volume:
        assert one.contains(other) == (not (mask(shape, other) & ~mask(shape, one)).any())
    if one.contains(other):
        assert one.intersect(other) == (other if other.volume else None)


@given(boxes_of_one_shape(1))
def test_boxes_fit_their_shape_and_no_smaller_one(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (box,) = drawn
    assert box.fits(shape)
    assert whole(shape).contains(box)
    assert box.volume == mask(shape, box).sum()
    tight = tuple(offset + length for offset, length in zip(box.offsets, box.lengths, strict=True))
    assert box.fits(tight)
    for dimension in range(len(shape)):
        assert not box.fits((*tight[:dimension], tight[dimension] - 1, *tight[dimension + 1 :]))


@given(boxes_of_one_shape(2))
def test_relative_slices_select_the_same_elements(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (outer, other) = drawn
    inner = outer.intersect(other)
    if inner is not None:
        array = np.arange(math.prod(shape)).reshape(shape)
        assert np.array_equal(array[outer.slices()][inner.relative_to(outer).slices()], array[inner.slices()])


@given(shapes, st.data())
def test_flat_ranges_are_few_contiguous_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    volume = math.prod(shape)
    start, stop = sorted((data.draw(st.integers(0, volume)), data.draw(st.integers(0, volume))))
    boxes = flat_range_boxes(shape, start, stop)
    array = np.arange(volume).reshape(shape)
    # The elements of each box, in its own row-major order, one box after the other, are the range itself.
    elements = [element for box in boxes for element in array[box.slices()].ravel().tolist()]
    assert elements == list(range(start, stop))
    assert all(box.volume and box.fits(shape) for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
