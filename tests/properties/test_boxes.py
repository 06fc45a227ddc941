from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast._values.box import Box, flat_range_boxes, whole

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
