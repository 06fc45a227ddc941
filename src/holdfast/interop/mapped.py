"""A checkpoint as a mapping has it on the other side: its tensors are made of parts of stored ones as they are read.

Nothing is read before it is asked for, but what tied tensors hold, which must be equal. Never more is held at a time
than a part of bounded size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from holdfast._checkpoint import Checkpoint, StoredTensor
from holdfast._huggingface.layout import flat_start
from holdfast._mapping.mappings import Mapping as Rules
from holdfast._mapping.matching import Fault, Group
from holdfast._mapping.relations import Patch
from holdfast._mapping.views import view_of
from holdfast._state.pieces import Piece
from holdfast._state.tensors import empty_tensor, word_dtype
from holdfast._values.box import Box, flat_range_boxes
from holdfast.default_planner.other_keys import metadata_inside, metadata_made, shapes_of
from holdfast.errors import InvalidStateError
from holdfast.metadata import TensorStorageMetadata

# So much is held of what a part is made of, or compared.
_HELD_BYTES = 64 << 20
# So much of stored tensors is kept for the next parts, where these begin and end within rows, as transposed ones do.
_KEPT_BYTES = 128 << 20


class MappedCheckpoint(Checkpoint):
    """``checkpoint`` as ``mapping`` has it outside, for an export, or else inside.

    InvalidStateError or MismatchError with every fault of the mapping.
    """

    def __init__(self, checkpoint: Checkpoint, mapping: Rules, *, is_export: bool) -> None:
        self._source = checkpoint
        self._added = mapping.offset_of if mapping.has_offsets and not is_export else lambda key: 0.0
        faults: list[Fault] = []
        if is_export:
            self._matched = mapping.matched(shapes_of(checkpoint.metadata))
            self.metadata, faults = metadata_made(checkpoint.metadata, self._matched)
            faults += [*mapping.rules_twice(self._matched), *self._untied()]
        else:
            self.metadata, self._matched = metadata_inside(checkpoint.metadata, mapping)
        outside = (self if is_export else checkpoint).metadata.state_dict_metadata
        for key, entry in outside.items() if mapping.has_offsets else ():
            is_floating = isinstance(entry, TensorStorageMetadata) and entry.properties.dtype.is_floating_point
            if mapping.offset_of(key) and not is_floating:
                problem = "gets an offset, and is no floating tensor; leave it out"
                faults.append(Fault(key=key, side="outside", kind="dtype", problem=problem))
        if faults:
            raise InvalidStateError.of([InvalidStateError(str(fault), key=fault.key) for fault in faults])
        groups = self._matched.groups
        self._kept: dict[str, Piece] = {}  # that was used last is last
        self._made = {key: (group, number) for group in groups for number, key in enumerate(group.outside)}

    def __getitem__(self, key: str) -> Any:
        """A ``StoredTensor``, or the value if it is not a tensor."""
        stored = self.metadata.state_dict_metadata[key]
        if isinstance(stored, TensorStorageMetadata):
            return StoredTensor(self, key, stored)
        return self._source[self._matched.same[key]]

    def _read_into(self, key: str, stored: TensorStorageMetadata, box: Box, tensor: torch.Tensor) -> None:
        if key in self._made:
            group, number = self._made[key]
            self._assemble(group, group.relation.patches[number], box, tensor)
        else:
            self._read_source(self._matched.same[self._matched.ties.get(key, key)], box, tensor)

    def _read_source(self, key: str, box: Box, tensor: torch.Tensor) -> None:
        self._source[key].read_into(tensor, box)
        if self._added(key):
            tensor.add_(self._added(key))

    def _assemble(self, group: Group, patches: Sequence[Patch], box: Box, tensor: torch.Tensor) -> None:
        """Fill ``tensor`` with ``box`` of what ``patches`` make; in halves where more would have to be held for it."""
        wanted: dict[str, list[tuple[Patch, Box]]] = {}
        for patch in patches:
            around = patch.around(box)
            if around is not None:
                wanted.setdefault(group.inside[patch.inside], []).append((patch, around))
        held = {key: _joined([around for _, around in found]) for key, found in wanted.items()}
        if sum(each.volume for each in held.values()) * tensor.itemsize > _HELD_BYTES and box.volume > 1:
            half = box.volume // 2
            for part in (*flat_range_boxes(box.lengths, 0, half), *flat_range_boxes(box.lengths, half, box.volume)):
                offsets = tuple(map(int.__add__, part.offsets, box.offsets))
                self._assemble(group, patches, Box(offsets, part.lengths), tensor[part.slices()])
            return
        words = word_dtype(tensor.itemsize)
        for key, found in wanted.items():
            piece = self._piece(key, held[key], tensor.dtype)
            for patch, _ in found:
                view = view_of(patch, piece)
                common = None if view is None else view.box.intersect(box)
                if view is not None and common is not None:
                    place = tensor[common.relative_to(box).slices()].view(words)
                    place.copy_(view.tensor[common.relative_to(view.box).slices()].view(words))

    def _piece(self, key: str, box: Box, dtype: torch.dtype) -> Piece:
        """``box`` of a stored tensor, in memory, or more of it, so that what follows in its rows is not read again."""
        piece, room = self._kept.pop(key, None), 0
        if piece is None or not piece.box.contains(box):
            wide = _widened(box, self._source[key].shape, _KEPT_BYTES // dtype.itemsize)
            piece, room = None, wide.volume * dtype.itemsize
        while self._kept and room + sum(each.tensor.nbytes for each in self._kept.values()) > _KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
        if piece is None:
            piece = Piece(wide, empty_tensor(wide.lengths, dtype))
            self._read_source(key, wide, piece.tensor)
        if piece.box != box:
            self._kept[key] = piece
        return piece

    def _untied(self) -> Iterator[Fault]:
        """What a rule ties, and is not equal, or has no tensor outside that it could be equal to."""
        same = {*self._matched.same.values()}
        for key, other in self._matched.ties.items():
            problem = f"is tied to {other!r}, "
            if other not in same:
                problem += "which is dropped, tied or made by operations; tie it to another"
            elif not _is_equal(self._source[key], self._source[other]):
                problem += "but has other contents; drop the rule"
            else:
                continue
            yield Fault(key=key, side="inside", kind="tie", problem=problem)


def _joined(boxes: Sequence[Box]) -> Box:
    """The smallest box that has all of ``boxes``."""
    lows = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
    ends = tuple(map(max, zip(*(map(int.__add__, box.offsets, box.lengths) for box in boxes), strict=True)))
    return Box(lows, tuple(map(int.__sub__, ends, lows)))


def _widened(box: Box, shape: Sequence[int], most: int) -> Box:
    """``box``, and what comes after it in the rows that it cuts, as far as that is ``most`` elements together."""
    lengths = list(box.lengths)
    for dim in range(box.ndim - 1, 0, -1):
        if flat_start(Box(box.offsets, tuple(lengths)), shape) is None:
            step = lengths[dim]  # what comes next is as long, most likely
            fitting = most * step // math.prod(lengths) // step * step
            lengths[dim] = max(step, min(shape[dim] - box.offsets[dim], fitting))
    return Box(box.offsets, tuple(lengths))


def _is_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether both have the same elements, bit for bit."""
    if (one.alias_of or one.key) == (other.alias_of or other.key):
        return True
    total, step, words = one.shape.numel(), _HELD_BYTES // one.dtype.itemsize, word_dtype(one.dtype.itemsize)
    boxes = (
        box.slices()
        for start in range(0, total, step)
        for box in flat_range_boxes(one.shape, start, min(start + step, total))
    )
    return one.dtype == other.dtype and all(torch.equal(one[box].view(words), other[box].view(words)) for box in boxes)
