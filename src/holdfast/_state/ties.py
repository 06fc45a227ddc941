"""Targets that share memory, so that what is loaded for one key changes what was loaded for another.

Known from addresses, before anything is read. Honest models tie weights: two keys with just the same memory. Views that
overlap in part are found too; those that only lie between each other's elements, such as two columns, are not tied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from holdfast._values.box import Box

# Steps that numpy may take to see whether two strided tensors meet; where that is not enough, they count as tied.
_MOST_WORK = 10_000


class Place(NamedTuple):
    """Memory that is filled with ``box`` of the tensor ``key``, or with all of it."""

    key: str
    tensor: torch.Tensor
    box: Box | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Keys that share memory, each with another one, in the order of the target.

    ``is_exact`` where each has just the memory of each other, for the same part of the stored tensor.
    """

    keys: tuple[str, ...]
    is_exact: bool


def ties_of(plain: Mapping[str, tuple[torch.Tensor, int]], others: Sequence[Place], order: Iterable[str]) -> list[Tie]:
    """The ties among ``plain`` tensors, which are whole, contiguous and come with their addresses, and ``others``."""
    others = [place for place in others if place.tensor.numel()]
    start = np.array([address for _, address in plain.values()] + [each.tensor.data_ptr() for each in others], np.int64)
    nbytes = [tensor.nbytes for tensor, _ in plain.values()] + [_extent(each.tensor) for each in others]
    end = start + np.array(nbytes, dtype=np.int64)
    by_start = np.argsort(start, kind="stable")
    meets = start[by_start[1:]] < np.maximum.accumulate(end[by_start])[:-1]
    if not meets.any():
        return []
    places = [*(Place(key, tensor, None) for key, (tensor, _) in plain.items()), *others]
    groups = _Groups()
    bounds = np.flatnonzero(~np.concatenate([[False], meets, [False]]))
    for first, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if stop - first > 1:
            _tie(groups, [(places[number], int(end[number])) for number in by_start[first:stop].tolist()])
    layouts: dict[str, list[object]] = {}
    for place in places:
        if place.key in groups.parents:
            layouts.setdefault(place.key, []).append((_layout(place.tensor), place.box))
    tied: dict[str, list[str]] = {}
    for key in order:
        if key in groups.parents:
            tied.setdefault(groups.root(key), []).append(key)
    return [
        Tie(keys=tuple(keys), is_exact=all(layouts[key] == layouts[keys[0]] for key in keys)) for keys in tied.values()
    ]


class _Groups:
    """Keys that belong together, by one of them."""

    def __init__(self) -> None:
        self.parents: dict[str, str] = {}

    def root(self, key: str) -> str:
        while self.parents.setdefault(key, key) != key:
            self.parents[key] = key = self.parents[self.parents[key]]
        return key

    def join(self, first: str, second: str) -> None:
        if first != second:
            self.parents[self.root(second)] = self.root(first)


def _tie(groups: _Groups, run: list[tuple[Place, int]]) -> None:
    """Join keys that have elements in common; ``run`` has places by address, each with its end."""
    firsts: dict[object, Place] = {}
    open_places: list[tuple[Place, int]] = []
    for place, end in run:
        same = firsts.setdefault(_layout(place.tensor), place)
        groups.join(same.key, place.key)
        if same is not place:
            continue
        start = place.tensor.data_ptr()
        open_places = [(each, its_end) for each, its_end in open_places if its_end > start]
        for each, _ in open_places:
            if each.key != place.key and _meet(each.tensor, place.tensor):
                groups.join(each.key, place.key)
        open_places.append((place, end))


def _layout(tensor: torch.Tensor) -> object:
    """Equal for tensors that have the same elements in the same memory, now and later."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _meet(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors, neither of them empty, have bytes in common."""
    try:
        outlines = np.asarray(_Outline(first)), np.asarray(_Outline(second))
        return np.shares_memory(*outlines, max_work=_MOST_WORK)  # type: ignore[arg-type]  # the stub knows two values
    except (np.exceptions.TooHardError, ValueError):  # numpy has not always had as many dimensions as torch
        return True


class _Outline:
    """Where the elements of a tensor lie, in the words of numpy, which never looks at them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__: dict[str, object] = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
        }
