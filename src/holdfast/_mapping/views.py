"""The leaves of a state as a mapping has them outside: tensors whose pieces are views of the memory that is inside.

Nothing is copied, and nothing is asked of another process. Writing into a piece writes into the tensor of the state,
however that is sharded. Where all of an outside tensor is one view of a plain tensor, the leaf is that view.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import torch

from holdfast._mapping.mappings import Mapping as Rules
from holdfast._mapping.matching import Fault, Group
from holdfast._mapping.relations import Patch, Size
from holdfast._state.pieces import Piece, Pieces, pieces_of
from holdfast._state.tensors import word_dtype
from holdfast._values.box import Box, whole
from holdfast.errors import InvalidStateError

# So much is compared at a time.
_COMPARED_BYTES = 16 << 20


class _ViewedChunk(NamedTuple):
    """A box in the words of torch."""

    offsets: torch.Size
    sizes: torch.Size


class _At(Protocol):
    """Which chunk is asked for."""

    @property
    def index(self) -> int: ...


class OutsideTensor(torch.Tensor):
    """A tensor outside, of which this process holds ``pieces``: views of tensors inside. It has no memory itself."""

    pieces: tuple[Piece, ...]

    @staticmethod
    def __new__(cls, size: Size, dtype: torch.dtype, pieces: tuple[Piece, ...], requires_grad: bool) -> OutsideTensor:
        device = pieces[0].tensor.device if pieces else torch.device("cpu")
        made: OutsideTensor = torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=dtype, device=device, requires_grad=requires_grad
        )
        made.pieces = pieces
        return made

    def __create_chunk_list__(self) -> list[_ViewedChunk]:
        return [_ViewedChunk(torch.Size(each.box.offsets), torch.Size(each.box.lengths)) for each in self.pieces]

    def __get_tensor_shard__(self, index: _At) -> torch.Tensor:
        return self.pieces[index.index].tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OutsideTensor(size={list(self.size())}, dtype={self.dtype}, pieces={len(self.pieces)})"

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:  # type: ignore[override]
        raise NotImplementedError(f"{func} is not for a tensor that is made of views; use what is inside")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """A state as it is outside: ``leaves`` by their keys there, and for each the keys inside that it is made of.

    ``again`` has tied tensors that have memory of their own, by their keys inside, each with the outside key that they
    too have the contents of. ``faults`` are all that there are; what they are about is in no leaf.
    """

    leaves: dict[str, object]
    sources: dict[str, tuple[str, ...]]
    again: dict[str, str]
    faults: tuple[Fault, ...]


def outside_leaves(
    mapping: Rules, leaves: Mapping[str, object], outside_shapes: Mapping[str, Size | None] | None = None
) -> dict[str, object]:
    """``leaves`` as ``mapping`` has them outside, to be saved; InvalidStateError with every fault.

    ``outside_shapes`` are those that there should be.
    """
    inside = _Inside(leaves)
    outside = inside.outside(mapping, is_save=True)
    faults = list(outside.faults)
    if outside_shapes is not None:
        faults += mapping.differences(mapping.matched(inside.shapes), outside_shapes, inside.shapes)
    if faults:
        raise InvalidStateError.of([InvalidStateError(str(fault), key=fault.key) for fault in faults])
    return outside.leaves


def outside_of(mapping: Rules, leaves: Mapping[str, object], *, is_save: bool) -> Outside:
    """``leaves`` as ``mapping`` has them outside, and all faults."""
    return _Inside(leaves).outside(mapping, is_save=is_save)


class _Inside:
    """The leaves of a state, with what is known of those that are tensors."""

    def __init__(self, leaves: Mapping[str, object]) -> None:
        self._leaves = leaves
        self._pieces: dict[str, Pieces] = {}
        self.faults: list[Fault] = []
        self.shapes = {key: self._shape(key, leaf) for key, leaf in leaves.items()}

    def _shape(self, key: str, leaf: object) -> Size | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        if type(leaf) in (torch.Tensor, torch.nn.Parameter) and not hasattr(leaf, "global_shape"):
            return leaf.shape
        return self.pieces(key).size

    def pieces(self, key: str) -> Pieces:
        """What this process holds of the tensor ``key``."""
        if key not in self._pieces:
            leaf = self._leaves[key]
            assert isinstance(leaf, torch.Tensor)
            self._pieces[key] = pieces_of(key, leaf)
        return self._pieces[key]

    def outside(self, mapping: Rules, *, is_save: bool) -> Outside:
        """The leaves as ``mapping`` has them outside."""
        matched = mapping.matched(self.shapes)
        leaves = {outside: self._leaves[inside] for outside, inside in matched.same.items()}
        sources: dict[str, tuple[str, ...]] = {outside: (inside,) for outside, inside in matched.same.items()}
        for group in matched.groups:
            for number, key in enumerate(group.outside):
                made = self._made(key, group, number)
                if made is not None:
                    leaves[key], sources[key] = made
        outside_of = {inside: outside for outside, inside in matched.same.items()}
        again: dict[str, str] = {}
        for key, other in matched.ties.items():
            mine, its = self.pieces(key), self.pieces(other)
            if other not in outside_of:
                self._fault(
                    key, f"is tied to {other!r}, which is dropped, tied or made by operations; tie it to another"
                )
            elif mine.dtype != its.dtype:
                self._fault(key, f"is tied to {other!r}, which has another dtype; give both the same")
            elif is_save:
                self._check_tie(key, other)
            elif not _is_same_memory(mine, its):
                again[key] = outside_of[other]
        self.faults += matched.faults + mapping.rules_twice(matched)
        for key, leaf in leaves.items() if mapping.has_offsets else ():
            if mapping.offset_of(key) and not (isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point):
                self._fault(
                    sources[key][0], f"gets an offset as {key!r}, and is no floating tensor; leave it out", "dtype"
                )
        return Outside(leaves=leaves, sources=sources, again=again, faults=tuple(self.faults))

    def _fault(self, key: str, problem: str, kind: str = "tie") -> None:
        self.faults.append(Fault(key=key, side="inside", kind=kind, problem=problem))

    def _made(self, key: str, group: Group, number: int) -> tuple[torch.Tensor, tuple[str, ...]] | None:
        """The outside tensor with that number in ``group``, and what it is made of; None where that is no tensor."""
        patches, size = group.relation.patches[number], group.relation.sizes[number]
        names = tuple(dict.fromkeys(group.inside[patch.inside] for patch in patches)) or group.inside[:1]
        held = [self.pieces(name) for name in names]
        dtypes = {each.dtype for each in held}
        if len(dtypes) > 1:
            self._fault(names[0], f"and {len(names) - 1} more make {key!r}, but have different dtypes", "dtype")
            return None
        (dtype,) = dtypes
        if _is_quantized(dtype):
            self._fault(names[0], "is quantised, and only its name can be changed; dequantise it", "dtype")
            return None
        found = []
        for patch in patches:
            for piece in self.pieces(group.inside[patch.inside]).pieces:
                view = view_of(patch, piece)
                if view is not None:
                    found.append(view)
        requires_grad = any(each.requires_grad for each in held)
        if not any(each.is_sharded for each in held):
            if math.prod(size) == 0:
                found = [Piece(whole(size), torch.empty(size, dtype=dtype, device="cpu"))]
            if len(found) == 1:
                return found[0].tensor.requires_grad_(requires_grad), names
        return OutsideTensor(size, dtype, tuple(found), requires_grad), names

    def _check_tie(self, key: str, other: str) -> None:
        mine, its = self.pieces(key).pieces, self.pieces(other).pieces
        if [piece.box for piece in mine] != [piece.box for piece in its]:
            self._fault(
                key, f"is tied to {other!r}, but sharded in another way, so they cannot be compared; shard both alike"
            )
        elif not all(_is_equal(one.tensor, each.tensor) for one, each in zip(mine, its, strict=True)):
            self._fault(key, f"is tied to {other!r}, but has other contents; tie them in the model, or drop the rule")


@cache
def _is_quantized(dtype: torch.dtype) -> bool:
    return torch.empty(0, dtype=dtype, device="cpu").is_quantized


def view_of(patch: Patch, piece: Piece) -> Piece | None:
    """What ``piece`` of an inside tensor has of ``patch``, in the place that it has outside; None where it has none."""
    tensor, (lows, lengths) = piece.tensor, (piece.box.offsets, piece.box.lengths)
    strides, place = tensor.stride(), tensor.storage_offset()
    for dim, index in patch.fixed:
        local = index - lows[dim]
        if not 0 <= local < lengths[dim]:
            return None
        place += local * strides[dim]
    offsets, sizes, steps = [], [], []
    for (dim, start, step), first, count in zip(patch.axes, patch.box.offsets, patch.box.lengths, strict=True):
        if dim < 0:
            begin, end, stride = 0, count, 1
        else:
            begin = max(0, -((start - lows[dim]) // step))
            end = min(count, -((start - lows[dim] - lengths[dim]) // step))
            place += (start + step * begin - lows[dim]) * strides[dim]
            stride = step * strides[dim]
        if begin >= end:
            return None
        offsets.append(first + begin)
        sizes.append(end - begin)
        steps.append(stride)
    return Piece(Box(tuple(offsets), tuple(sizes)), tensor.as_strided(sizes, steps, place))


def _is_same_memory(first: Pieces, second: Pieces) -> bool:
    def memory(pieces: Pieces) -> list[object]:
        return [(each.box, each.tensor.data_ptr(), each.tensor.stride()) for each in pieces.pieces]

    return memory(first) == memory(second)


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether both have the same elements, bit for bit."""
    if first.is_meta or (first.data_ptr() == second.data_ptr() and first.stride() == second.stride()):
        return True
    words = word_dtype(first.element_size())
    rows = max(1, _COMPARED_BYTES * max(1, len(first) if first.dim() else 1) // max(1, first.nbytes))
    parts = zip(first.split(rows), second.split(rows), strict=True) if first.dim() else [(first, second)]
    return all(torch.equal(one.contiguous().view(words), other.contiguous().view(words)) for one, other in parts)
