"""Splits: which indices of one tensor dimension a member of a mesh holds.

Equal parts, the last ones short or empty, as torch cuts them; a strided split cuts each of several equal blocks. Pure
arithmetic on Python integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

Run = tuple[int, int]
"""The first index, and how many follow each other."""


class Split(NamedTuple):
    """A mesh dimension that cuts a tensor dimension: into ``parts``, in each of ``blocks`` equal blocks."""

    mesh_dim: int
    parts: int
    blocks: int = 1


def runs_of(size: int, splits: Iterable[tuple[Split, int]]) -> list[Run]:
    """The runs of ``range(size)`` that are left after each split in turn, to the part of its number, in local order."""
    runs = [(0, size)]
    for split, index in splits:
        length = length_of(runs)
        kept: list[Run] = []
        for block in range(split.blocks):
            block_start, block_length = _part(length, split.blocks, block)
            start, part_length = _part(block_length, split.parts, index)
            for run in _within(runs, block_start + start, part_length):
                if kept and sum(kept[-1]) == run[0]:
                    run = (kept[-1][0], kept.pop()[1] + run[1])
                kept.append(run)
        runs = kept
    return runs


def length_of(runs: Iterable[Run]) -> int:
    """How many indices the runs have together."""
    return sum(count for _, count in runs)


def _part(length: int, parts: int, index: int) -> Run:
    """Where part ``index`` of ``parts`` begins and how long it is: equal parts, the last ones short or empty."""
    step = -(-length // parts)
    start = min(step * index, length)
    return start, min(step, length - start)


def _within(runs: list[Run], start: int, length: int) -> Iterator[Run]:
    """The runs that positions [start, start + length) of ``runs``, one after the other, are."""
    position = 0
    for first, count in runs:
        low, high = max(start, position), min(start + length, position + count)
        if low < high:
            yield first + low - position, high - low
        position += count
