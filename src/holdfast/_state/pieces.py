"""Which boxes of a global tensor this process holds, with the memory of each; and targets that share memory.

Every piece is a view of exactly its box: no element is copied, none is held by two pieces of one value, and nothing is
asked of another process. Torch's own offset helper gives one box per process even where its rows do not lie side by
side; here the index runs are computed per tensor dimension, and each run becomes a box of its own. Whether the memory
can be stored or filled is for the caller to check; nothing here plans, reads or writes.

Ties are known from addresses, before anything is read: two keys with just the same memory, or views that overlap in
part. Views that only lie between each other's elements, such as two columns, are not tied.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np
import torch

from holdfast._values.box import Box, MeshSplit, Run, length_of, runs_of, whole
from holdfast.errors import InvalidStateError

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensorBase
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_DTENSOR = "torch.distributed.tensor", "DTensor"
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api", "ShardedTensorBase"
_LABELS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A box of the global tensor and the view, detached and on its device, that holds exactly its elements."""

    box: Box
    tensor: torch.Tensor


class Spread(NamedTuple):
    """How a tensor is spread over a mesh: for each of its dimensions the splits, in the order in which they are made.

    Size, mesh and splits tell what every process of the mesh holds.
    """

    mesh: DeviceMesh
    splits: tuple[tuple[MeshSplit, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """What this process holds of one value.

    ``size`` is the global size. ``spread`` is there where a rule tells what every process holds. ``is_sharded`` says
    that the value describes its own part of a global tensor, be it all of it; False is for plain tensors, of which
    other processes know nothing. A global tensor without elements is one piece without elements, so that its key does
    not vanish; of others, empty pieces are left out.
    """

    size: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    pieces: tuple[Piece, ...]
    is_sharded: bool
    spread: Spread | None = None
    _by_offsets: dict[tuple[int, ...], Piece] = field(default_factory=dict, init=False, repr=False)


@dataclass(frozen=True, slots=True)
class _ShardIndex:
    """What ``__get_tensor_shard__`` reads of an index: the names are torch's."""

    fqn: str
    offset: torch.Size
    index: int


class _Chunk(Protocol):
    """A box as torch describes it."""

    offsets: Sequence[int]
    sizes: Sequence[int]


class _ShardHolder(Protocol):
    """A tensor that knows its chunks and hands out the memory of each."""

    requires_grad: bool
    dtype: torch.dtype

    def __create_chunk_list__(self) -> Iterable[_Chunk]: ...
    def __get_tensor_shard__(self, index: _ShardIndex) -> torch.Tensor: ...


def pieces_of(key: str, value: torch.Tensor) -> Pieces:
    """What this process holds of ``value``; InvalidStateError, naming ``key``, where that cannot be told.

    The memory stays the value's own: writing into a piece writes into the value.
    """
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return _plain(key, value)
    if _is_instance(value, *_DTENSOR):
        return _of_distributed(key, cast("DTensor", value))
    if _is_instance(value, *_SHARDED_TENSOR):
        return _of_sharded(key, cast("ShardedTensorBase", value))
    if _hands_out_shards(value):
        return _of_shard_holder(key, cast(_ShardHolder, value), value.size())
    return _plain(key, value)


def is_sharded(value: torch.Tensor) -> bool:
    """Whether ``value`` describes its own part of a global tensor; told at once of plain tensors."""
    is_of_kind = type(value) not in (torch.Tensor, torch.nn.Parameter) and (
        _is_instance(value, *_DTENSOR) or _is_instance(value, *_SHARDED_TENSOR) or _hands_out_shards(value)
    )
    return is_of_kind or is_labelled(value)


def is_labelled(value: torch.Tensor) -> bool:
    """Whether ``value`` has what torch 2.14 calls a CheckpointableTensor: which parts of a global one lie in it."""
    return hasattr(value, "global_shape") and all(hasattr(value, name) for name in _LABELS)


def is_meta(value: torch.Tensor) -> bool:
    """Whether ``value`` has no memory yet; ShardedTensors warn when they are asked, so their pieces are to tell."""
    return not _is_instance(value, *_SHARDED_TENSOR) and value.is_meta


def piece_holding(pieces: Pieces, box: Box) -> Piece | None:
    """The piece that ``box`` lies in, or None."""
    return next((piece for piece in pieces.pieces if piece.box.contains(box)), None)


def piece_at(pieces: Pieces, offsets: tuple[int, ...]) -> Piece | None:
    """The piece whose box starts at ``offsets``, or None; the first lookup pays for the others."""
    if not pieces._by_offsets:
        pieces._by_offsets.update((piece.box.offsets, piece) for piece in pieces.pieces)
    return pieces._by_offsets.get(offsets)


def _is_instance(value: torch.Tensor, module: str, name: str) -> bool:
    """Whether ``value`` is of that class; a module that nobody imported yet has no instances and stays so."""
    cls = getattr(sys.modules.get(module), name, None)
    return isinstance(cls, type) and isinstance(value, cls)


def _hands_out_shards(value: torch.Tensor) -> bool:
    return hasattr(value, "__create_chunk_list__") and hasattr(value, "__get_tensor_shard__")


def _settled(tensor: torch.Tensor) -> torch.Tensor:
    """The detached tensor, after the collective that is still filling it."""
    if _is_instance(tensor, "torch.distributed._functional_collectives", "AsyncCollectiveTensor"):
        tensor = tensor.wait()  # type: ignore[attr-defined]
    return tensor.detach()


def _plain(key: str, value: torch.Tensor) -> Pieces:
    """All of a plain tensor, or the parts of a global one that its labels say are in it."""
    tensor, requires_grad = _settled(value), value.requires_grad
    if not is_labelled(value):
        return Pieces(tensor.shape, tensor.dtype, requires_grad, (Piece(whole(tensor.shape), tensor),), False)
    shape, *labels = (getattr(value, name) for name in _LABELS)
    size = torch.Size(shape)
    if len(set(map(len, labels))) > 1:
        raise _invalid(
            key, f"has labels of different lengths: {', '.join(_LABELS[1:])}; give one of each for each part"
        )
    pieces = [
        Piece(Box(tuple(start), tuple(lengths)), tensor[tuple(map(slice, inner, map(int.__add__, inner, lengths)))])
        for start, inner, lengths in zip(*labels, strict=True)
    ]
    return Pieces(size, tensor.dtype, requires_grad, _checked(key, size, pieces, tensor.dtype), True)


def _of_sharded(key: str, value: ShardedTensorBase) -> Pieces:
    """The local shards of a ShardedTensor; a shard may itself be sharded, its pieces then count from its offsets."""
    metadata = value.metadata()
    size, properties = torch.Size(metadata.size), metadata.tensor_properties
    pieces: list[Piece] = []
    for shard in value.local_shards():
        start = tuple(shard.metadata.shard_offsets)
        for inner in pieces_of(key, shard.tensor).pieces:
            offsets = tuple(mine + its for mine, its in zip(start, inner.box.offsets, strict=True))
            pieces.append(Piece(Box(offsets, inner.box.lengths), inner.tensor))
    held = _checked(key, size, pieces, properties.dtype)
    return Pieces(size, properties.dtype, properties.requires_grad, held, True)


def _of_shard_holder(key: str, value: _ShardHolder, size: torch.Size) -> Pieces:
    """The chunks that ``value`` lists, each with the memory it hands out for it."""
    pieces: list[Piece] = []
    requires_grad = value.requires_grad
    for number, chunk in enumerate(value.__create_chunk_list__()):
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if box.volume == 0:
            continue
        shard = value.__get_tensor_shard__(_ShardIndex(key, torch.Size(box.offsets), number))
        requires_grad = requires_grad or shard.requires_grad
        pieces.append(Piece(box, _settled(shard)))
    # torch's wrapper of local shards reports float32 whatever it wraps: the memory knows better.
    dtype = pieces[0].tensor.dtype if pieces else value.dtype
    return Pieces(size, dtype, requires_grad, _checked(key, size, pieces, dtype), True)


def _checked(key: str, size: torch.Size, pieces: list[Piece], dtype: torch.dtype) -> tuple[Piece, ...]:
    """The pieces that have elements, all of them within ``size`` and of ``dtype``."""
    if math.prod(size) == 0:
        return (Piece(whole(size), torch.empty(size, dtype=dtype, device="cpu")),)
    for piece in pieces:
        if not piece.box.fits(size):
            problem = f"holds {piece.box} of a tensor of size {tuple(size)}"
            raise _invalid(key, f"{problem}; wrap local shards in a DTensor of the global size")
        if piece.tensor.shape != piece.box.lengths:
            shape = tuple(piece.tensor.shape)
            raise _invalid(key, f"hands out shape {shape} for the chunk {piece.box}; they must be the same")
        if piece.tensor.dtype != dtype:
            raise _invalid(key, f"has shards of dtype {piece.tensor.dtype} and {dtype}; convert them to one")
    return tuple(piece for piece in pieces if piece.box.volume)


def _invalid(key: str, problem: str) -> InvalidStateError:
    return InvalidStateError(f"{key!r} {problem}", key=key)


def _of_distributed(key: str, value: DTensor) -> Pieces:
    """The boxes that mesh, placements and this process's coordinate give a DTensor."""
    splits = _splits_of(key, value)
    coordinate = value.device_mesh.get_coordinate()
    local = value._local_tensor
    if coordinate is not None and _hands_out_shards(local):
        return _of_shard_holder(key, cast(_ShardHolder, local), value.shape)
    pieces: tuple[Piece, ...] = ()
    is_by_rule = True
    meant = [_in_order_of_sharding(value, dim, of_dim) or of_dim for dim, of_dim in enumerate(splits)]
    if coordinate is not None:
        local = _settled(local)
        if value.numel() == 0:
            pieces = (Piece(whole(value.shape), local.new_empty(value.shape)),)
        else:
            meant, runs = _runs_per_dimension(key, value, local.shape, splits, coordinate)
            pieces = tuple(_cut(local, runs)) if local.numel() else ()
            is_by_rule = bool(pieces) or not all(runs)
    spread = Spread(value.device_mesh, tuple(tuple(of_dim) for of_dim in meant)) if is_by_rule else None
    return Pieces(value.shape, value.dtype, value.requires_grad, pieces, True, spread)


def _splits_of(key: str, value: DTensor) -> list[list[MeshSplit]]:
    """The splits of every tensor dimension, in mesh order."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = value.device_mesh
    splits: list[list[MeshSplit]] = [[] for _ in range(value.ndim)]
    for mesh_dim, placement in enumerate(value.placements):
        if placement.is_partial():
            said = f"has the placement {placement}, which still has to be reduced; reduce it first (redistribute)"
            raise _invalid(key, said)
        if isinstance(placement, (Shard, _StridedShard)):
            blocks = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            splits[placement.dim % value.ndim].append(MeshSplit(mesh_dim, mesh.size(mesh_dim), blocks))
        elif not isinstance(placement, Replicate):
            raise _invalid(key, f"has the placement {placement}, which this version does not know; redistribute it")
    return splits


def _runs_per_dimension(
    key: str, value: DTensor, local_shape: torch.Size, splits: list[list[MeshSplit]], coordinate: Sequence[int]
) -> tuple[list[list[MeshSplit]], list[list[Run]]]:
    """The splits in the order in which they were made, and the index runs that the local tensor holds, by dimension.

    Placements with strided shards have two readings that differ where the sizes are uneven. FSDP2 over tensor
    parallelism, redistribute and full_tensor split and join in the order that the strided shards stand for;
    distribute_tensor splits by one mesh dimension after the other, from left to right. The local length tells which of
    them made the tensor. Where it fits both, the tensor is what full_tensor would make of it. A process that holds
    nothing may do so although another length is due.
    """
    made: list[list[MeshSplit]] = []
    runs: list[list[Run]] = []
    for dim, (size, length) in enumerate(zip(value.shape, local_shape, strict=True)):
        for chosen in (_in_order_of_sharding(value, dim, splits[dim]) or splits[dim], splits[dim]):
            found = runs_of(size, [(split, coordinate[split.mesh_dim]) for split in chosen])
            if length_of(found) == length:
                break
        if length_of(found) != length and 0 not in local_shape:
            mesh = f"{value.placements} on a mesh of shape {tuple(value.device_mesh.shape)}"
            held = f"holds {length} indices of dimension {dim} where {mesh} give it {length_of(found)} of {size}"
            raise _invalid(key, f"{held}; distribute it by torch's rule")
        made.append(chosen)
        runs.append(found)
    return made, runs


def _in_order_of_sharding(value: DTensor, dim: int, splits: list[MeshSplit]) -> list[MeshSplit] | None:
    """The splits as plain ones in the order in which they were made; None where strided shards stand for no order."""
    if len(splits) < 2 and all(split.blocks == 1 for split in splits):
        return splits
    for entry in value._spec.shard_order or ():
        if entry.tensor_dim == dim:
            by_mesh_dim = {split.mesh_dim: split for split in splits}
            return [by_mesh_dim[mesh_dim] for mesh_dim in entry.mesh_dims]
    if not value._spec.use_strided_shard_as_shard_order:
        return None
    # Each split comes after as many parts of the mesh dimensions to its right as it has blocks.
    order: list[MeshSplit] = []
    for split in reversed(splits):
        parts_before = itertools.accumulate((other.parts for other in order), int.__mul__, initial=1)
        place = next((at for at, parts in enumerate(parts_before) if parts == split.blocks), None)
        if place is None:
            return None
        order.insert(place, split._replace(blocks=1))
    return order


def _cut(local: torch.Tensor, runs: list[list[Run]]) -> Iterator[Piece]:
    """The boxes that the runs of all dimensions make together, each with its view of ``local``."""
    if all(len(of_dim) == 1 for of_dim in runs):
        yield Piece(Box(tuple(of_dim[0][0] for of_dim in runs), tuple(local.shape)), local)
        return
    places: list[list[tuple[Run, slice]]] = []
    for of_dim in runs:
        ends = list(itertools.accumulate(count for _, count in of_dim))
        places.append([(run, slice(end - run[1], end)) for run, end in zip(of_dim, ends, strict=True)])
    for combination in itertools.product(*places):
        offsets = tuple(run[0] for run, _ in combination)
        lengths = tuple(run[1] for run, _ in combination)
        yield Piece(Box(offsets, lengths), local[tuple(place for _, place in combination)])


class Place(NamedTuple):
    """Memory that is filled with ``box`` of the tensor ``key``, or with all of it."""

    key: str
    tensor: torch.Tensor
    box: Box | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied:
    """Keys that share memory, each with another one, in the order of the target.

    ``is_exact`` where each has just the memory of each other, for the same part of the stored tensor.
    """

    keys: tuple[str, ...]
    is_exact: bool


def ties_of(plain: Mapping[str, tuple[torch.Tensor, int]], others: Sequence[Place], order: Iterable[str]) -> list[Tied]:
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
        Tied(keys=tuple(keys), is_exact=all(layouts[key] == layouts[keys[0]] for key in keys)) for keys in tied.values()
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
    """Whether two tensors, neither of them empty, have bytes in common, or numpy would need too many steps to tell."""
    try:
        outlines = np.asarray(_Outline(first)), np.asarray(_Outline(second))
        return np.shares_memory(*outlines, max_work=10_000)  # type: ignore[arg-type]  # the stub knows two values
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
