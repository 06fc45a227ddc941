"""Layouts: what every member of a mesh holds of a tensor, from sizes and splits alone.

Works on columns, one row per box, for all members at once; only splits that leave a member several runs of indices take
a Python loop over the members. Also digests of such rows, made so that those of all members are as cheap as one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast._values.splits import Split, runs_of

_Int64s = npt.NDArray[np.int64]
_UInt64s = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemberBoxes:
    """The boxes of all members: ``member`` is [n], ascending, ``lo`` and ``length`` are [n, D], in local order."""

    member: _Int64s
    lo: _Int64s
    length: _Int64s


def boxes_on_mesh(size: Sequence[int], mesh: Sequence[int], splits: Sequence[Sequence[Split]]) -> MemberBoxes:
    """What each member of a mesh of that shape, counted row by row, holds of a tensor of ``size``.

    A member without elements has no box, except that a tensor which has none at all is one empty box on all of them.
    """
    members = int(np.prod(mesh, dtype=np.int64))
    dimensions = len(size)
    lo = np.zeros((members, dimensions), dtype=np.int64)
    length = np.empty((members, dimensions), dtype=np.int64)
    length[:] = size
    everyone = np.arange(members)
    if 0 in size:
        return MemberBoxes(member=everyone, lo=lo, length=length)
    if any(split.blocks > 1 for of_dim in splits for split in of_dim):
        return _in_runs(size, mesh, splits)
    place = np.unravel_index(everyone, tuple(mesh)) if len(mesh) else ()
    for dimension, of_dim in enumerate(splits):
        for split in of_dim:
            whole = length[:, dimension]
            step = -(-whole // split.parts)
            start = np.minimum(step * place[split.mesh_dim], whole)
            lo[:, dimension] += start
            length[:, dimension] = np.minimum(step, whole - start)
    held = np.flatnonzero((length > 0).all(axis=1))
    return MemberBoxes(member=held, lo=lo[held], length=length[held])


def _in_runs(size: Sequence[int], mesh: Sequence[int], splits: Sequence[Sequence[Split]]) -> MemberBoxes:
    """The same where a member may hold several runs of a dimension, and the boxes that they make together."""
    known: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    members: list[int] = []
    boxes: list[tuple[tuple[int, int], ...]] = []
    for member, place in enumerate(itertools.product(*map(range, mesh))):
        runs = []
        for dimension, of_dim in enumerate(splits):
            where = (dimension, *(place[split.mesh_dim] for split in of_dim))
            if where not in known:
                known[where] = runs_of(size[dimension], zip(of_dim, where[1:], strict=True))
            runs.append(known[where])
        held = list(itertools.product(*runs))
        boxes += held
        members += [member] * len(held)
    table = np.array(boxes, dtype=np.int64).reshape(len(boxes), len(size), 2)
    return MemberBoxes(
        member=np.array(members, dtype=np.int64),
        lo=np.ascontiguousarray(table[:, :, 0]),
        length=np.ascontiguousarray(table[:, :, 1]),
    )


def scrambled(words: _UInt64s) -> _UInt64s:
    """A word for each word, as good as random (the mixing steps of splitmix64)."""
    words = (words + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    return words


def box_words(lo: _Int64s, length: _Int64s) -> _UInt64s:
    """A word for each box; padding with 0 and 1 does not change it."""
    words: _UInt64s = np.full(len(lo), 1, dtype=np.uint64)
    for dimension in range(lo.shape[1]):
        begin, size = lo[:, dimension].astype(np.uint64), length[:, dimension].astype(np.uint64)
        is_padding = (begin == 0) & (size == 1)
        mixed = scrambled(scrambled(begin + np.uint64(dimension << 56)) ^ size)
        words += np.where(is_padding, np.uint64(0), mixed)
    return words


def rows_digest(factors: _UInt64s, key: _Int64s, lo: _Int64s, length: _Int64s) -> int:
    """What tells tables of rows apart, whatever their order; ``factors`` has an odd number for each key.

    It is a sum over the rows, so that many tables which share keys and boxes are digested together.
    """
    return int((factors[key] * box_words(lo, length)).sum(dtype=np.uint64))
