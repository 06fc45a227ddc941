"""From wanted boxes and stored chunks to read items, as columns; and torch's helpers for planners, under its names."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch

from holdfast._plan.coverage import check_coverage
from holdfast._plan.reads import Overlap, overlap
from holdfast._save_plan.plans import local_leaves
from holdfast._state.nested import flatten, set_element
from holdfast._state.pieces import is_meta, pieces_of
from holdfast._state.tensors import quantizer_of
from holdfast._torch_classes.translate import metadata_from_torch, stored_from_torch
from holdfast._values.box import Box, whole
from holdfast._values.dtypes import DTYPES
from holdfast.errors import CorruptError, Difference, InternalError, InvalidStateError, MismatchError
from holdfast.metadata import (
    STATE_DICT_TYPE,
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    chunk_columns,
)
from holdfast.planner import (
    LoadItemType,
    LoadPlanner,
    ReadColumns,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    padded,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["create_read_items_for_chunk_list"]

Piece = TypeVar("Piece", ChunkStorageMetadata, WriteItem)


def tiling_faults(metadata: Metadata) -> list[tuple[str, str]]:
    """The keys whose chunks do not make up the tensor exactly, each with what is wrong."""
    entries = metadata_from_torch(metadata).state_dict_metadata
    tensors = [(key, each) for key, each in entries.items() if isinstance(each, TensorStorageMetadata)]
    tables = [chunk_columns(stored.chunks, len(stored.size)) for _, stored in tensors]
    sizes = padded([stored.size for _, stored in tensors], fill=1)
    # The last row, left out again, makes all tables as wide as the sizes, though the widest tensor may have no chunks.
    widest = [1] * sizes.shape[1]
    faults = check_coverage(
        np.repeat(np.arange(len(tables)), [len(table) for table in tables]),
        padded([*(row for table in tables for row in table.lo.tolist()), widest], fill=0)[:-1],
        padded([*(row for table in tables for row in table.length.tolist()), widest], fill=1)[:-1],
        sizes,
    )
    return [(tensors[fault.tensor][0], fault.detail) for fault in faults]


def check_tiling(metadata: Metadata) -> None:
    """CorruptError unless the chunks of every tensor make it up exactly: what they leave out would be left unfilled."""
    for key, detail in tiling_faults(metadata):
        raise CorruptError(f"the chunks of {key!r} do not make up the tensor: {detail}", key=key)


def dtype_difference(key: str, stored: torch.dtype, wanted: torch.dtype) -> Difference:
    names = (str(dtype).removeprefix("torch.") for dtype in (stored, wanted))
    return Difference(key=key, kind="dtype", stored=next(names), wanted=next(names))


def cast_advice(faults: Iterable[Difference], *, cast: bool) -> str:
    """What to say of casts at the end of an advice about ``faults``, where ``cast`` says whether they are allowed."""
    dtypes = [each for each in faults if each.kind == "dtype"]
    if cast and dtypes:
        return "; cast=True converts floating types only."
    return ", or pass LoadOptions(cast=True) to convert between floating types." if any(map(can_cast, dtypes)) else "."


def can_cast(difference: Difference) -> bool:
    """Whether both dtypes are floating types."""
    return all(name in DTYPES and DTYPES[name].is_floating for name in (difference.stored, difference.wanted))


def quantizer_difference(key: str, leaf: torch.Tensor, stored: TensorStorageMetadata) -> Difference | None:
    """A target takes over the stored scales and zero points, but its scheme cannot be changed."""
    if stored.quantizer is None:
        return None
    was, wanted = stored.quantizer["scheme"], (quantizer_of(leaf) or {}).get("scheme")
    return None if was == wanted else Difference(key=key, kind="context", stored=was, wanted=str(wanted))


def context_difference(key: str, stored: object, wanted: object) -> Difference:
    """That the context of a tensor subclass is another one."""
    shown = reprlib.Repr()
    shown.maxstring = shown.maxother = 200
    return Difference(key=key, kind="context", stored=shown.repr(stored), wanted=shown.repr(wanted))


def kind_of(leaf: object) -> str:
    """What ``leaf``, of a target or a checkpoint, is in a message."""
    if isinstance(leaf, (torch.Tensor, np.ndarray, TensorStorageMetadata)):
        return "a tensor"
    return "a value" if isinstance(leaf, BytesStorageMetadata) else f"a {type(leaf).__name__}"


def raise_for_dtypes(dtypes: Mapping[str, tuple[torch.dtype, torch.dtype]], *, cast: bool) -> None:
    """MismatchError with every key of which the stored dtype cannot be loaded into the wanted one."""
    differences = [dtype_difference(key, was, wanted) for key, (was, wanted) in dtypes.items() if was != wanted]
    faults = [difference for difference in differences if not (cast and can_cast(difference))]
    if faults:
        raise MismatchError.of(faults, advice="Fix the target" + cast_advice(faults, cast=cast))


def check_dtypes(planner: LoadPlanner, columns: ReadColumns, stored: Mapping[str, torch.dtype], *, cast: bool) -> None:
    """The same for all that ``columns`` want, by the tensors of a planner that has compared nothing itself."""
    rows = {which: row for row, which in reversed(list(enumerate(columns.key.tolist())))}
    wanted = {
        columns.keys[which]: (stored[columns.storage_keys[which]], planner.resolve_row(columns, row).dtype)
        for which, row in sorted(rows.items())
        if columns.storage_keys[which] in stored
    }
    raise_for_dtypes(wanted, cast=cast)


def check_resolved(columns: ReadColumns, row: int, tensor: torch.Tensor, dtype: torch.dtype, *, cast: bool) -> None:
    """Raise unless ``tensor``, which the planner gave for ``row``, has its shape and can take elements of ``dtype``."""
    which, lengths = columns.boxes[row]
    key = columns.keys[which]
    if lengths != tensor.shape:
        raise InternalError(
            f"the planner gave a tensor of shape {list(tensor.shape)} for a box of {list(lengths)} of {key!r}"
        )
    raise_for_dtypes({key: (dtype, tensor.dtype)}, cast=cast)


class _Part(NamedTuple):
    """What was found of the box at ``low``, of key ``number``, in chunks at ``chunk_lo``."""

    number: int
    found: Overlap
    chunk_lo: np.ndarray
    low: np.ndarray


class ReadRows:
    """Read items under construction; ``columns`` gives them all, in the order of the calls."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._dimensions: list[int] = []
        self._count = 0
        # Values, and tensors of one chunk that are wanted whole, as most are: key number and lengths.
        self._wholes: list[tuple[int, tuple[int, ...]]] = []
        # All else, by the number of dimensions.
        self._parts: dict[int, list[_Part]] = {}

    def __len__(self) -> int:
        return self._count

    def add_value(self, key: str) -> None:
        self._wholes.append((len(self._keys), ()))
        self._keys.append(key)
        self._dimensions.append(-1)
        self._count += 1

    def add_tensor(self, key: str, stored: TensorStorageMetadata, box: Box | None = None) -> None:
        """Want ``box`` of the tensor ``key`` (all of it by default), for a target piece that is just that box."""
        size, chunks = tuple(stored.size), stored.chunks
        if box is None and len(chunks) == 1 and 0 not in size:
            # The chunk is all of the tensor, since chunks tile it.
            self._wholes.append((len(self._keys), size))
            self._keys.append(key)
            self._dimensions.append(len(size))
            self._count += 1
            return
        columns = chunk_columns(chunks, len(size))
        box = whole(size) if box is None else box
        low = np.array(box.offsets, dtype=np.int64)
        found = overlap(columns.lo, columns.length, low, np.array(box.lengths, dtype=np.int64))
        self._parts.setdefault(len(size), []).append(_Part(len(self._keys), found, columns.lo[found.rows], low))
        self._keys.append(key)
        self._dimensions.append(len(size))
        self._count += len(found.rows)

    def columns(self) -> ReadColumns:
        lengths = padded([lengths for _, lengths in self._wholes], fill=1)
        shape = self._count, max(lengths.shape[1], *self._parts, 0)
        key, hint = np.zeros(self._count, np.int64), np.zeros(self._count, np.int64)
        chunk_lo, target_lo, lo = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        length = np.ones(shape, np.int64)
        stop = len(self._wholes)
        key[:stop], length[:stop, : lengths.shape[1]] = [number for number, _ in self._wholes], lengths
        for dimensions, parts in self._parts.items():
            counts = [len(part.found.rows) for part in parts]
            start, stop = stop, stop + sum(counts)
            key[start:stop] = np.repeat([part.number for part in parts], counts)
            hint[start:stop] = np.concatenate([part.found.rows for part in parts])
            chunk_lo[start:stop, :dimensions] = np.concatenate([part.chunk_lo for part in parts])
            target_lo[start:stop, :dimensions] = np.repeat([part.low for part in parts], counts, axis=0)
            lo[start:stop, :dimensions] = np.concatenate([part.found.lo for part in parts])
            length[start:stop, :dimensions] = np.concatenate([part.found.length for part in parts])
        order = np.argsort(key, kind="stable")
        return ReadColumns(
            keys=self._keys,
            storage_keys=self._keys,
            dimensions=self._dimensions,
            key=key[order],
            hint=hint[order],
            chunk_lo=chunk_lo[order],
            target_lo=target_lo[order],
            dest_lo=(lo - target_lo)[order],
            storage_lo=(lo - chunk_lo)[order],
            length=length[order],
        )


def create_read_items_for_chunk_list(
    fqn: str, checkpoint_md: TensorStorageMetadata, local_chunks: Sequence[ChunkStorageMetadata]
) -> list[ReadItem]:
    """What to read of the tensor ``fqn`` to fill ``local_chunks`` of it; empty where a chunk meets nothing stored."""
    rows = ReadRows()
    owners: list[int] = []
    for number, chunk in enumerate(local_chunks):
        rows.add_tensor(fqn, checkpoint_md, Box(tuple(chunk.offsets), tuple(chunk.sizes)))
        owners.extend([number] * (len(rows) - len(owners)))
    columns = rows.columns()
    items = [columns.item(row) for row in range(len(columns))]
    return [
        dataclasses.replace(item, dest_index=dataclasses.replace(item.dest_index, index=owner))
        for item, owner in zip(items, owners, strict=True)
    ]


def _create_read_items(fqn: str, md: STORAGE_TYPES, obj: object) -> list[ReadItem]:
    """What to read for ``obj`` under ``fqn``; MismatchError where one is a tensor and the other is not."""
    md = stored_from_torch(md)
    if isinstance(md, BytesStorageMetadata):
        rows = ReadRows()
        rows.add_value(fqn)
        return [rows.columns().item(0)]
    if not isinstance(obj, torch.Tensor):
        raise MismatchError.of(
            [Difference(key=fqn, kind="kind", stored="a tensor", wanted=f"a {type(obj).__name__}")],
            advice="Make the target a tensor.",
        )
    return create_read_items_for_chunk_list(fqn, md, _create_chunk_list(obj))


def _create_chunk_list(tensor: torch.Tensor) -> list[ChunkStorageMetadata]:
    """The boxes of ``tensor`` that this process holds."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"a {type(tensor).__name__} has no chunks; only tensors have")
    boxes = [piece.box for piece in pieces_of("the tensor", tensor).pieces]
    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths)) for box in boxes]


def _create_chunk_from_tensor(tensor: torch.Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())


def _create_chunk_from_dtensor(tensor: DTensor) -> ChunkStorageMetadata:
    """What this rank holds of ``tensor``; InvalidStateError where that is not one box."""
    return _only_piece("the tensor", _create_chunk_list(tensor))


def _only_piece(key: str, pieces: list[Piece]) -> Piece:
    if len(pieces) != 1:
        raise InvalidStateError(
            f"this rank holds {len(pieces)} separate pieces of {key!r}; use the function that gives a list of them",
            key=key,
        )
    return pieces[0]


def _create_read_item_for_tensor(
    dest_index: MetadataIndex,
    dest_offsets: Sequence[int],
    storage_index: MetadataIndex,
    storage_offsets: Sequence[int],
    lengths: Sequence[int],
) -> ReadItem:
    """The item that reads a box of a stored chunk into a box of the same lengths of a target's piece."""
    offsets = torch.Size(dest_offsets), torch.Size(storage_offsets)
    return ReadItem(LoadItemType.TENSOR, dest_index, offsets[0], storage_index, offsets[1], torch.Size(lengths))


def _create_read_item_for_byteio(
    dest_index: MetadataIndex, dest_offset: int, storage_index: MetadataIndex, storage_offset: int, length: int
) -> ReadItem:
    offsets = torch.Size([dest_offset]), torch.Size([storage_offset])
    return ReadItem(LoadItemType.BYTE_IO, dest_index, offsets[0], storage_index, offsets[1], torch.Size([length]))


def _create_write_items(fqn: str, object: Any) -> list[WriteItem]:
    """What this rank has to write of ``object``: a piece, several of them, none, or a value."""
    columns = local_leaves({fqn: object}).columns
    return [columns.item(row) for row in range(len(columns))]


def _create_write_item_for_tensor(fqn: str, tensor: torch.Tensor) -> WriteItem:
    return WriteItem(
        MetadataIndex(fqn, [0] * tensor.dim()),
        WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            _create_chunk_from_tensor(tensor), TensorProperties.create_from_tensor(tensor), tensor.size()
        ),
    )


def _create_write_item_for_bytesio(fqn: str, bytes: object) -> WriteItem:
    return WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)


def _create_write_items_for_dtensor(fqn: str, tensor: DTensor) -> WriteItem:
    """The item that writes what this rank holds of ``tensor``; InvalidStateError where that is not one box."""
    return _only_piece(fqn, _create_write_items(fqn, tensor))


def _init_state_dict(state_dict: STATE_DICT_TYPE) -> None:
    """Replace the meta tensors in ``state_dict``, at any depth, by CPU tensors that are to be filled."""
    leaves, paths = flatten(state_dict)
    for key, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor) and is_meta(leaf):
            set_element(state_dict, paths[key], torch.empty_like(leaf, device="cpu"))


def _contains_usable_plan(delta_plans: Sequence[SavePlan]) -> bool:
    """Whether any plan is a plan, and not a word that it has not changed."""
    return any(plan.usable for plan in delta_plans)


def _merge_delta_local_plans(cached_plans: Sequence[SavePlan], delta_plans: Sequence[SavePlan]) -> list[SavePlan]:
    """The plans of ``delta_plans``, those of ``cached_plans`` where they have not changed."""
    return [new if new.usable else old for old, new in zip(cached_plans, delta_plans, strict=True)]


def _compare_save_plans(plan: SavePlan, other_plan: SavePlan) -> bool:
    """Whether two plans are the same: the same items, dtypes and all else that is said of them, and planner_data."""
    return (
        plan.usable == other_plan.usable
        and plan.planner_data == other_plan.planner_data
        and [_with_hint(item) for item in plan.items] == [_with_hint(item) for item in other_plan.items]
    )


def _with_hint(item: WriteItem) -> tuple[WriteItem, int | None]:
    return item, item.index.index
