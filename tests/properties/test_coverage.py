from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._plan.coverage import CoverageFault, check_coverage
from holdfast._values.box import Box, whole

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


def check(tensors: list[Tensor], order: npt.NDArray[np.int64] | slice = slice(None)) -> list[CoverageFault]:
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
    assert check(tensors) == []


@settings(max_examples=300, deadline=None)
@given(st.lists(near_tilings(), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_faults_are_those_that_counting_finds(tensors: list[Tensor], seed: int) -> None:
    rows = sum(len(boxes) for _, boxes in tensors)
    faults = check(tensors, np.random.default_rng(seed).permutation(rows))
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
    faults = check([(tuple(shape), boxes)])
    if min(shape) < 0 or not all(box.fits(shape) for box in boxes):
        assert [fault.problem for fault in faults] == ["out of bounds"]
        return
    # Few enough boxes to compare each with each, in Python's integers.
    meet = any(one.intersect(other) for index, one in enumerate(boxes) for other in boxes[:index])
    tiles = sum(box.volume for box in boxes) == whole(shape).volume and not meet
    assert (faults == []) == tiles
