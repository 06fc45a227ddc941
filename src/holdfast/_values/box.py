"""Boxes: rectangular regions of a tensor; and how one dimension is split over the members of a mesh.

A box says which elements, never where they are stored. All arithmetic is on Python integers, so nothing overflows.
Never clips or repairs a box: what does not fit is for the caller to refuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Box:
    """The elements ``offsets[d] <= index < offsets[d] + lengths[d]`` for every dimension ``d``."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.lengths)

    @property
    def volume(self) -> int:
        """The number of elements; 1 in zero dimensions."""
        return math.prod(self.lengths)

    def intersect(self, other: Box) -> Box | None:
        """The elements in both boxes, or None when there is none."""
        offsets = []
        lengths = []
        for mine, my_length, its, its_length in zip(
            self.offsets, self.lengths, other.offsets, other.lengths, strict=True
        ):
            start = max(mine, its)
            length = min(mine + my_length, its + its_length) - start
            if length <= 0:
                return None
            offsets.append(start)
            lengths.append(length)
        return Box(tuple(offsets), tuple(lengths))

    def contains(self, other: Box) -> bool:
        """Whether ``other`` lies within this box in every dimension (an empty box too must lie within)."""
        return all(
            mine <= its and its + its_length <= mine + my_length
            for mine, my_length, its, its_length in zip(
                self.offsets, self.lengths, other.offsets, other.lengths, strict=True
            )
        )

    def relative_to(self, other: Box) -> Box:
        """This box in coordinates that count from the start of ``other``."""
        offsets = tuple(mine - its for mine, its in zip(self.offsets, other.offsets, strict=True))
        return Box(offsets, self.lengths)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether this is a box of a tensor of ``shape``: the same rank, nothing negative, nothing beyond its end."""
        return len(self.offsets) == len(self.lengths) == len(shape) and all(
            offset >= 0 and length >= 0 and offset + length <= size
            for offset, length, size in zip(self.offsets, self.lengths, shape, strict=True)
        )

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(offset, offset + length) for offset, length in zip(self.offsets, self.lengths, strict=True))


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The row-major element range ``[start, stop)`` of ``shape`` as at most ``2 * ndim - 1`` boxes.

    The elements of each box are contiguous in row-major order, and the boxes one after the other are the range.
    """
    volume = math.prod(shape)
    if not 0 <= start <= stop <= volume:
        raise ValueError(f"the range [{start}, {stop}) is not within the {volume} elements of shape {tuple(shape)}")
    boxes: list[Box] = []
    if start < stop:
        _append_range(boxes, (), tuple(shape), start, stop)
    return boxes


def _append_range(boxes: list[Box], index: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int) -> None:
    """Append the boxes of a non-empty range of what lies under ``index`` of the outer dimensions."""
    if not shape:
        boxes.append(Box(index, (1,) * len(index)))
        return
    inner = shape[1:]
    row_volume = math.prod(inner)
    first_row, from_row = divmod(start, row_volume)
    last_row, to_row = divmod(stop, row_volume)
    if first_row == last_row:
        _append_range(boxes, (*index, first_row), inner, from_row, to_row)
        return
    if from_row:
        _append_range(boxes, (*index, first_row), inner, from_row, row_volume)
        first_row += 1
    if first_row < last_row:
        offsets = (*index, first_row, *(0 for _ in inner))
        boxes.append(Box(offsets, (*(1 for _ in index), last_row - first_row, *inner)))
    if to_row:
        _append_range(boxes, (*index, last_row), inner, 0, to_row)


Run = tuple[int, int]
"""The first index, and how many follow each other."""


class MeshSplit(NamedTuple):
    """A mesh dimension that cuts a tensor dimension: into equal ``parts``, as torch cuts them; strided ones cut each of
    several equal ``blocks``.
    """

    mesh_dim: int
    parts: int
    blocks: int = 1


def runs_of(size: int, splits: Iterable[tuple[MeshSplit, int]]) -> list[Run]:
    """What one member holds of ``range(size)``, in local order: each split in turn keeps the part with that number."""
    runs = [(0, size)]
    for split, index in splits:
        length = length_of(runs)
        kept: list[Run] = []
        for block in range(split.blocks):
            block_start, block_length = _part(length, split.blocks, block)
            start, part_length = _part(block_length, split.parts, index)
            start += block_start
            position = 0  # of the runs, laid end to end
            for first, count in runs:
                low, high = max(start, position), min(start + part_length, position + count)
                if low < high:
                    run = (first + low - position, high - low)
                    if kept and sum(kept[-1]) == run[0]:
                        run = (kept[-1][0], kept.pop()[1] + run[1])
                    kept.append(run)
                position += count
        runs = kept
    return runs


def length_of(runs: Iterable[Run]) -> int:
    return sum([count for _, count in runs])


def _part(length: int, parts: int, index: int) -> Run:
    """Where part ``index`` of ``parts`` begins and how long it is: equal parts, the last ones short or empty."""
    step = -(-length // parts)
    start = min(step * index, length)
    return start, min(step, length - start)
