"""Whether boxes tile, and which do not."""

from __future__ import annotations

import itertools
import json

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._plan import coverage
from holdfast._plan.coverage import CoverageFault, check_coverage
from holdfast._values.box import Box, whole

Boxes = list[tuple[int, tuple[int, ...], tuple[int, ...]]]

PINWHEEL: Boxes = [
    (0, (0, 0), (2, 1)),
    (0, (2, 0), (1, 2)),
    (0, (1, 2), (2, 1)),
    (0, (0, 1), (1, 2)),
    (0, (1, 1), (1, 1)),
]


def check(boxes: Boxes, *shapes: tuple[int, ...]) -> list[CoverageFault]:
    dimensions = len(shapes[0])
    return check_coverage(
        np.array([number for number, _, _ in boxes], dtype=np.int64),
        np.array([lo for _, lo, _ in boxes], dtype=np.int64).reshape(len(boxes), dimensions),
        np.array([length for _, _, length in boxes], dtype=np.int64).reshape(len(boxes), dimensions),
        np.array(shapes, dtype=np.int64).reshape(len(shapes), dimensions),
    )


def tiling(number: int, detail: str) -> CoverageFault:
    return CoverageFault(tensor=number, problem="gap or overlap", detail=detail)


def test_whole_tensors_are_covered() -> None:
    assert check([(0, (0, 0), (4, 3)), (1, (0, 0), (7, 1))], (4, 3), (7, 1)) == []


def test_no_tensors_at_all() -> None:
    empty = np.empty((0, 2), dtype=np.int64)
    assert check_coverage(np.empty(0, dtype=np.int64), empty, empty, empty) == []


def test_scalars() -> None:
    assert check([(0, (), ()), (1, (), ())], (), ()) == []
    assert check([(0, (), ())], (), ()) == [tiling(1, "gap at []")]
    assert check([(0, (), ()), (0, (), ()), (1, (), ())], (), ()) == [tiling(0, "overlap at []")]


def test_a_tensor_without_boxes_is_a_gap() -> None:
    assert check([(1, (0, 0), (4, 3))], (2, 2), (4, 3)) == [tiling(0, "gap at [0, 0]")]


def test_the_same_whole_twice_is_an_overlap() -> None:
    assert check([(0, (0, 0), (4, 3)), (0, (0, 0), (4, 3))], (4, 3)) == [tiling(0, "overlap at [0, 0]")]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_slices_in_any_order(order: tuple[int, ...]) -> None:
    slices: Boxes = [(0, (0, 0), (2, 3)), (0, (2, 0), (1, 3)), (0, (3, 0), (4, 3))]
    assert check([slices[index] for index in order], (7, 3)) == []


def test_one_row_short_and_one_row_twice() -> None:
    assert check([(0, (0, 0), (2, 3)), (0, (3, 0), (4, 3))], (7, 3)) == [tiling(0, "gap at [2, 0]")]
    assert check([(0, (0, 0), (3, 3)), (0, (2, 0), (5, 3))], (7, 3)) == [tiling(0, "overlap at [2, 0]")]
    assert check([(0, (0, 0), (6, 3))], (7, 3)) == [tiling(0, "gap at [6, 0]")]
    assert check([(0, (1, 0), (6, 3))], (7, 3)) == [tiling(0, "gap at [0, 0]")]


def test_equal_volume_is_not_coverage() -> None:
    boxes: Boxes = [(0, (0, 0), (2, 2)), (0, (2, 0), (2, 2)), (0, (0, 2), (2, 2)), (0, (2, 0), (2, 2))]
    assert check(boxes, (4, 4)) == [tiling(0, "overlap at [2, 0]")]


def test_a_tiling_in_which_nothing_merges() -> None:
    assert check(PINWHEEL, (3, 3)) == []
    assert check(PINWHEEL[:-1], (3, 3)) == [tiling(0, "gap at [1, 1]")]
    assert check([*PINWHEEL, (0, (1, 1), (1, 1))], (3, 3)) == [tiling(0, "overlap at [1, 1]")]


def test_tensors_of_the_same_coordinates_do_not_mix() -> None:
    missing_here: Boxes = [*PINWHEEL[:-1], (1, (1, 1), (1, 1))]
    twice_there: Boxes = [(1, lo, length) for _, lo, length in PINWHEEL]
    assert check([*missing_here, *twice_there], (3, 3), (3, 3)) == [
        tiling(0, "gap at [1, 1]"),
        tiling(1, "overlap at [1, 1]"),
    ]


def test_boxes_of_two_tensors_do_not_make_up_one() -> None:
    assert check([(0, (0, 0), (2, 3)), (1, (2, 0), (2, 3))], (4, 3), (4, 3)) == [
        tiling(0, "gap at [2, 0]"),
        tiling(1, "gap at [0, 0]"),
    ]


@pytest.mark.parametrize("bits", [(31, 31), (31, 32), (32, 32), (32, 33), (62, 62)])
def test_the_first_fault_is_found_whether_or_not_coordinates_fit_in_one_integer(bits: tuple[int, int]) -> None:
    size = (2 ** bits[0] - 1, 2 ** bits[1] - 1)
    assert check([(0, (1, 1), (size[0] - 1, size[1] - 1))], size) == [tiling(0, "gap at [0, 0]")]
    assert check([(0, (0, 0), (size[0] - 1, size[1] - 1))], size) == [tiling(0, f"gap at [0, {size[1] - 1}]")]


def test_padded_dimensions_are_not_shown() -> None:
    assert check([(0, (0, 0, 0), (3, 1, 1))], (4, 1, 1)) == [tiling(0, "gap at [3]")]


def test_empty_boxes_hold_nothing() -> None:
    assert check([(0, (0, 0), (4, 3)), (0, (4, 3), (0, 0)), (0, (2, 1), (0, 2))], (4, 3)) == []
    assert check([(0, (0, 0), (0, 3))], (4, 3)) == [tiling(0, "gap at [0, 0]")]


def test_tensors_without_elements() -> None:
    assert check([], (0, 3)) == []
    assert check([(0, (0, 0), (0, 3)), (0, (0, 1), (0, 2))], (0, 3)) == []
    assert [fault.problem for fault in check([(0, (0, 0), (1, 3))], (0, 3))] == ["out of bounds"]


HUGE = 2**63 - 1


@pytest.mark.parametrize(
    ("lo", "length"),
    [
        ((1, 0), (4, 3)),
        ((-1, 0), (1, 3)),
        ((-HUGE - 1, 0), (HUGE, 3)),
        ((0, 0), (-1, 3)),
        ((0, 0), (HUGE, 3)),
        ((HUGE, 0), (1, 3)),
        ((HUGE, 0), (HUGE, 3)),
        ((2, 0), (-HUGE - 1, 3)),
        ((5, 0), (0, 3)),
    ],
)
def test_boxes_out_of_bounds(lo: tuple[int, int], length: tuple[int, int]) -> None:
    faults = check([(0, (0, 0), (4, 3)), (1, (0, 0), (4, 3)), (1, lo, length)], (4, 3), (4, 3))
    assert [(fault.tensor, fault.problem) for fault in faults] == [(1, "out of bounds")]
    assert str(list(lo)) in faults[0].detail


def test_a_negative_shape_is_out_of_bounds_even_without_boxes() -> None:
    faults = check([(1, (0, 0), (-4, -3))], (2, -1), (-4, -3))
    assert [(fault.tensor, fault.problem) for fault in faults] == [(0, "out of bounds"), (1, "out of bounds")]


def test_the_largest_shapes_do_not_overflow() -> None:
    half = HUGE // 2
    boxes: Boxes = [(0, (0, 0), (half, HUGE)), (0, (half, 0), (HUGE - half, HUGE))]
    assert check(boxes, (HUGE, HUGE)) == []
    assert check(boxes[::-1], (HUGE, HUGE)) == []
    assert check(boxes[:1], (HUGE, HUGE)) == [tiling(0, f"gap at [{half}, 0]")]
    stretched: Boxes = [
        (0, tuple(value * (HUGE // 3) for value in lo), tuple(value * (HUGE // 3) for value in length))
        for _, lo, length in PINWHEEL
    ]
    size = HUGE // 3 * 3
    assert check(stretched, (size, size)) == []
    assert check(stretched[1:], (size, size)) == [tiling(0, "gap at [0, 0]")]


def test_a_box_of_an_unknown_tensor_is_a_mistake_of_the_caller() -> None:
    for number in (-1, 1):
        with pytest.raises(ValueError, match="outside of the 1"):
            check([(number, (0, 0), (4, 3))], (4, 3))


def guillotine(dimensions: int) -> Boxes:
    """Tile a cube of edge 2 by cutting dimension after dimension: dimensions + 1 boxes, all dimensions split."""
    boxes: Boxes = []
    for cut in range(dimensions):
        rest = dimensions - cut - 1
        boxes.append((0, (1,) * cut + (0,) * (rest + 1), (1,) * (cut + 1) + (2,) * rest))
    return [*boxes, (0, (1,) * dimensions, (1,) * dimensions)]


@pytest.mark.parametrize("dimensions", [1, 5, 13, 30, 64])
def test_many_split_dimensions(dimensions: int) -> None:
    boxes = guillotine(dimensions)
    shape = (2,) * dimensions
    assert check(boxes, shape) == []
    assert check(boxes[::-1], shape) == []
    [missing] = check(boxes[:-1], shape)
    assert missing.detail.startswith("gap")
    [doubled] = check([*boxes, boxes[-1]], shape)
    assert doubled.detail == f"overlap at {[1] * dimensions}"


def spread(dimensions: int) -> Boxes:
    """Tile by a product of pinwheels, in which nothing merges and every dimension is split."""
    boxes: Boxes = [(0, (), ())]
    for _ in range(dimensions // 2):
        boxes = [(0, lo + more, length + wide) for _, lo, length in boxes for _, more, wide in PINWHEEL]
    return boxes


def test_boxes_that_do_not_merge_are_compared_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "_PAIRS_AT_ONCE", 60)
    boxes = spread(4)
    shape = (3,) * 4
    assert check(boxes, shape) == []
    assert check(boxes[:-1], shape) == [tiling(0, "gap at [1, 1, 1, 1]")]
    assert check([*boxes, (0, (1, 1, 1, 1), (0, 2, 2, 2))], shape) == []
    for index, (_, lo, _) in enumerate(boxes):
        assert check([*boxes, boxes[index]], shape) == [tiling(0, f"overlap at {list(lo)}")]


def test_what_cannot_be_checked_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "_MAX_PAIRS", 299)
    [fault] = check(spread(4), (3,) * 4)
    assert fault.detail.startswith("25 boxes")
    monkeypatch.setattr(coverage, "_MAX_PAIRS", 300)
    assert check(spread(4), (3,) * 4) == []


def many_slices(tensors: int, slices: int) -> tuple[npt.NDArray[np.int64], ...]:
    tensor = np.repeat(np.arange(tensors), slices)
    lo = np.zeros((tensors * slices, 2), dtype=np.int64)
    lo[:, 0] = np.tile(np.arange(slices) * 8, tensors)
    length = np.tile(np.array([[8, 4096]]), (tensors * slices, 1))
    return tensor, lo, length, np.tile(np.array([[slices * 8, 4096]]), (tensors, 1))


def test_half_a_million_boxes_of_many_tensors() -> None:
    tensor, lo, length, shapes = many_slices(512, 1024)
    assert check_coverage(tensor, lo, length, shapes) == []
    length[70_000, 0] = 7
    assert check_coverage(tensor, lo, length, shapes) == [tiling(68, f"gap at [{(70_000 % 1024) * 8 + 7}, 0]")]


def test_many_boxes_are_checked_in_turn_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(number, lo, 2) for number in range(7) for lo in range(0, 6, 2)]
    rows = [row for row in rows if row not in ((2, 2, 2), (5, 0, 2))]
    rows.insert(10, (3, 4, 2))
    table = np.array(sorted(rows))
    tensor, lo, length = table[:, 0], table[:, 1:2], table[:, 2:3]
    shapes = np.full((8, 1), 6)
    expected = check_coverage(tensor, lo, length, shapes)
    assert [fault.tensor for fault in expected] == [2, 3, 5, 7]
    for at_once in (1, 2, 5, 9):
        monkeypatch.setattr(coverage, "_BOXES_AT_ONCE", at_once)
        assert check_coverage(tensor, lo, length, shapes) == expected


# --- against counting, at random --------------------------------------------------------------------------------------


Tensor = tuple[tuple[int, ...], list[Box]]


@st.composite
def tilings(draw: st.DrawFn) -> Tensor:
    """A shape and boxes that tile it, by cutting again and again at random, so that not all neighbours merge."""
    shape = draw(st.lists(st.integers(0, 5), min_size=3, max_size=3).map(tuple))
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 7))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dimension = draw(st.integers(0, 2))
        cut = draw(st.integers(0, box.lengths[dimension]))
        lengths = list(box.lengths)
        offsets = list(box.offsets)
        lengths[dimension] = cut
        boxes.append(Box(box.offsets, tuple(lengths)))
        lengths[dimension] = box.lengths[dimension] - cut
        offsets[dimension] += cut
        boxes.append(Box(tuple(offsets), tuple(lengths)))
    return shape, draw(st.permutations(boxes))


@st.composite
def near_tilings(draw: st.DrawFn) -> Tensor:
    """A tiling with a few boxes left out, doubled, or moved and resized by one, within the shape."""
    shape, boxes = draw(tilings())
    boxes = list(boxes)
    for _ in range(draw(st.integers(0, 2))):
        if not boxes:
            break
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        action = draw(st.sampled_from(["drop", "double", "nudge"]))
        if action == "double":
            boxes += [box, box]
        if action == "nudge":
            ends = []
            for offset, length, size in zip(box.offsets, box.lengths, shape, strict=True):
                low = min(max(offset + draw(st.integers(-1, 1)), 0), size)
                ends.append((low, min(max(offset + length + draw(st.integers(-1, 1)), low), size)))
            boxes.append(Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends)))
    return shape, boxes


def counts(tensor: Tensor) -> npt.NDArray[np.int64]:
    """How many boxes each element is in."""
    shape, boxes = tensor
    occupied = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        occupied[box.slices()] += 1
    return occupied


def check_tensors(tensors: list[Tensor], order: npt.NDArray[np.int64] | slice = slice(None)) -> list[CoverageFault]:
    rows = [(number, box) for number, (_, boxes) in enumerate(tensors) for box in boxes]
    return check_coverage(
        np.array([number for number, _ in rows], dtype=np.int64)[order],
        np.array([box.offsets for _, box in rows], dtype=np.int64).reshape(len(rows), 3)[order],
        np.array([box.lengths for _, box in rows], dtype=np.int64).reshape(len(rows), 3)[order],
        np.array([shape for shape, _ in tensors], dtype=np.int64),
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(tilings(), min_size=1, max_size=3))
def test_tilings_have_no_fault(tensors: list[Tensor]) -> None:
    assert check_tensors(tensors) == []


@settings(max_examples=300, deadline=None)
@given(st.lists(near_tilings(), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_faults_are_those_that_counting_finds(tensors: list[Tensor], seed: int) -> None:
    rows = sum(len(boxes) for _, boxes in tensors)
    faults = check_tensors(tensors, np.random.default_rng(seed).permutation(rows))
    wrong = {number: counts(tensor) for number, tensor in enumerate(tensors) if (counts(tensor) != 1).any()}
    assert [fault.tensor for fault in faults] == list(wrong)
    for fault in faults:
        occupied = wrong[fault.tensor]
        kind, _, place = fault.detail.partition(" at ")
        # Trailing dimensions of size 1 are not shown, and the coordinates there are 0.
        shown = json.loads(place)
        found = int(occupied[tuple(shown + [0] * (occupied.ndim - len(shown)))])
        assert (fault.problem, kind) == ("gap or overlap", "overlap" if found > 1 else "gap")
        assert found != 1


HOSTILE = st.one_of(
    st.integers(-3, 6), st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**62, 2**63 - 1, -(2**63), 2**31])
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(HOSTILE, min_size=6, max_size=6), max_size=4), st.lists(HOSTILE, min_size=3, max_size=3))
def test_hostile_numbers_are_judged_exactly(rows: list[list[int]], shape: list[int]) -> None:
    boxes = [Box(tuple(row[:3]), tuple(row[3:])) for row in rows]
    faults = check_tensors([(tuple(shape), boxes)])
    if min(shape) < 0 or not all(box.fits(shape) for box in boxes):
        assert [fault.problem for fault in faults] == ["out of bounds"]
        return
    # Few enough boxes to compare each with each, in Python's integers.
    meet = any(one.intersect(other) for index, one in enumerate(boxes) for other in boxes[:index])
    tiles = sum(box.volume for box in boxes) == whole(shape).volume and not meet
    assert (faults == []) == tiles
