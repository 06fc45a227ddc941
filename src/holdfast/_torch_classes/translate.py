"""Items, plans and metadata in torch's classes and in ours, which have the same names and fields; and ``.metadata`` as
torch writes it.

torch's code asks for its own enums and classes, ours for its own. What came from torch keeps its original, so that
torch's side gets back the very objects it made, with the fields of its own subclasses; what was changed on the way is
made anew. Reading torch's objects goes by names alone: nothing of torch is imported for it.

Nothing of this library is in the pickle, so that it can be read where there is only torch. What torch has no field for
(which keys are tied, what a key was before it became a string) is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import pickle
import sys
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

import torch

from holdfast._torch_codec.metadata_file import StorageInfo
from holdfast._values.lazy import LazyList
from holdfast.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

if TYPE_CHECKING:
    from holdfast._torch_classes import torchs

CURRENT_DCP_VERSION = "1.0.0"
"""The version of torch's format that is written."""

_PROPERTIES = operator.attrgetter("dtype", "layout", "requires_grad", "memory_format", "pin_memory")

# ``theirs`` of an item is no parameter: what dataclasses.replace makes has none, because it says something else.


@dataclass(frozen=True)
class _TorchWriteItem(WriteItem):
    theirs: torchs.planner.WriteItem | None = field(init=False, default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return write_item_from_torch, (write_item_to_torch(self),)


@dataclass(frozen=True)
class _TorchReadItem(ReadItem):
    theirs: torchs.planner.ReadItem | None = field(init=False, default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return read_item_from_torch, (read_item_to_torch(self),)


@dataclass(frozen=True)
class _TorchSavePlan(SavePlan):
    theirs: torchs.planner.SavePlan = field(kw_only=True, compare=False, repr=False)


@dataclass
class _TorchLoadPlan(LoadPlan):
    theirs: torchs.planner.LoadPlan = field(kw_only=True, compare=False, repr=False)


@dataclass
class _TorchMetadata(Metadata):
    theirs: torchs.metadata.Metadata = field(kw_only=True, compare=False, repr=False)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # Other ranks get it in our classes alone.
        return Metadata, tuple(getattr(self, each.name) for each in dataclasses.fields(Metadata))


# From torch.


def write_item_from_torch(item: WriteItem | torchs.planner.WriteItem) -> WriteItem:
    if isinstance(item, WriteItem):
        return item
    nbytes, data = item.bytes_io_data, item.tensor_data
    made = _TorchWriteItem(
        index_from_torch(item.index),
        WriteItemType[item.type.name],
        None if nbytes is None else BytesIOWriteData(nbytes.nbytes),
        None if data is None else TensorWriteData(_chunk(data.chunk), _properties(data.properties), data.size),
    )
    object.__setattr__(made, "theirs", item)
    return made


def read_item_from_torch(item: ReadItem | torchs.planner.ReadItem) -> ReadItem:
    if isinstance(item, ReadItem):
        return item
    made = _TorchReadItem(
        LoadItemType[item.type.name],
        index_from_torch(item.dest_index),
        torch.Size(item.dest_offsets),
        index_from_torch(item.storage_index),
        torch.Size(item.storage_offsets),
        torch.Size(item.lengths),
    )
    object.__setattr__(made, "theirs", item)
    return made


def save_plan_from_torch(plan: SavePlan | torchs.planner.SavePlan) -> SavePlan:
    """``plan`` as ours, with the same storage_data and planner_data."""
    if isinstance(plan, SavePlan):
        return plan
    items = [write_item_from_torch(item) for item in plan.items]
    return _TorchSavePlan(items, plan.storage_data, plan.planner_data, plan.usable, theirs=plan)


def load_plan_from_torch(plan: LoadPlan | torchs.planner.LoadPlan) -> LoadPlan:
    """``plan`` as ours, with the same storage_data and planner_data."""
    if isinstance(plan, LoadPlan):
        return plan
    items = [read_item_from_torch(item) for item in plan.items]
    return _TorchLoadPlan(items, plan.storage_data, plan.planner_data, theirs=plan)


def index_from_torch(index: torchs.metadata.MetadataIndex) -> MetadataIndex:
    return MetadataIndex(index.fqn, index.offset, index.index)


def storage_meta_from_torch(meta: StorageMeta | torchs.metadata.StorageMeta | None) -> StorageMeta | None:
    if meta is None or isinstance(meta, StorageMeta):
        return meta
    return StorageMeta(meta.checkpoint_id, meta.save_id, meta.load_id, list(meta.modules))


def metadata_from_torch(metadata: Metadata | torchs.metadata.Metadata) -> Metadata:
    """``metadata`` as ours; storages and planners of torch that are given it get the original."""
    if isinstance(metadata, Metadata):
        return metadata
    return _TorchMetadata(
        {key: stored_from_torch(each) for key, each in metadata.state_dict_metadata.items()},
        metadata.planner_data,
        metadata.storage_data,
        # Checkpoints of older versions of torch lack these two.
        storage_meta_from_torch(getattr(metadata, "storage_meta", None)),
        getattr(metadata, "version", None),
        theirs=metadata,
    )


def places_from_torch(storage_data: dict[Any, Any]) -> dict[Any, Any]:
    """Where each item of torch's file storage is, in our classes."""
    if not any(type(index).__module__.startswith("torch.") for index in storage_data):
        return storage_data  # ours, or what a damaged file has in their place
    return {
        index_from_torch(index): StorageInfo(
            place.relative_path,
            place.offset,
            place.length,
            tuple(getattr(place, "transform_descriptors", None) or ()) or None,
        )
        for index, place in storage_data.items()
    }


def stored_from_torch(stored: STORAGE_TYPES | torchs.metadata.STORAGE_TYPES) -> STORAGE_TYPES:
    if isinstance(stored, (TensorStorageMetadata, BytesStorageMetadata)):
        return stored
    if not hasattr(stored, "chunks"):
        return BytesStorageMetadata()
    tensor = cast("torchs.metadata.TensorStorageMetadata", stored)
    chunks = [_chunk(chunk) for chunk in tensor.chunks]
    return TensorStorageMetadata(_properties(tensor.properties), torch.Size(tensor.size), chunks)


def _chunk(chunk: torchs.metadata.ChunkStorageMetadata) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))


def _properties(properties: torchs.metadata.TensorProperties) -> TensorProperties:
    return TensorProperties(*_PROPERTIES(properties))


# To torch.


@functools.cache
def _counterpart(ours: type) -> tuple[type[Any], tuple[str, ...]] | None:
    """Torch's class of the same name, and its fields that ours has; None for what is no class of plans or metadata."""
    from holdfast._torch_classes.torchs import metadata, planner

    for cls in ours.__mro__:
        if cls.__module__ in ("holdfast.metadata", "holdfast.planner"):
            theirs: type[Any] = getattr(planner, cls.__name__, None) or getattr(metadata, cls.__name__)
            if not dataclasses.is_dataclass(theirs) or not dataclasses.is_dataclass(cls):
                return theirs, ()
            known = {field.name for field in dataclasses.fields(cls)}
            return theirs, tuple(field.name for field in dataclasses.fields(theirs) if field.name in known)
    return None


def _to_torch(value: object) -> Any:
    """``value`` in torch's classes all the way down; what is of no class of ours stays as it is."""
    if isinstance(value, (list, LazyList)):
        return [_to_torch(each) for each in value]
    found = _counterpart(type(value))  # type: ignore[arg-type]
    if found is None:
        return value
    theirs, fields = found
    if isinstance(value, Enum):
        return theirs[value.name]
    return theirs(**{name: _to_torch(getattr(value, name)) for name in fields})


def write_item_to_torch(item: WriteItem) -> torchs.planner.WriteItem:
    """``item`` as torch's: the one that it was made from, if it was."""
    return cast("torchs.planner.WriteItem", getattr(item, "theirs", None) or _to_torch(item))


def read_item_to_torch(item: ReadItem) -> torchs.planner.ReadItem:
    """``item`` as torch's: the one that it was made from, if it was."""
    return cast("torchs.planner.ReadItem", getattr(item, "theirs", None) or _to_torch(item))


def save_plan_to_torch(plan: SavePlan) -> torchs.planner.SavePlan:
    """``plan`` as torch's; where it came from torch, of the class it had there."""
    items = [write_item_to_torch(item) for item in plan.items]
    if isinstance(plan, _TorchSavePlan):
        return dataclasses.replace(
            plan.theirs, items=items, storage_data=plan.storage_data, planner_data=plan.planner_data, usable=plan.usable
        )
    from holdfast._torch_classes.torchs import planner

    return planner.SavePlan(items, plan.storage_data, plan.planner_data, plan.usable)


def load_plan_to_torch(plan: LoadPlan) -> torchs.planner.LoadPlan:
    """``plan`` as torch's; where it came from torch, of the class it had there."""
    items = [read_item_to_torch(item) for item in plan.items]
    if isinstance(plan, _TorchLoadPlan):
        return dataclasses.replace(
            plan.theirs, items=items, storage_data=plan.storage_data, planner_data=plan.planner_data
        )
    from holdfast._torch_classes.torchs import planner

    return planner.LoadPlan(items, plan.storage_data, plan.planner_data)


def storage_meta_to_torch(meta: StorageMeta | None) -> torchs.metadata.StorageMeta | None:
    return cast("torchs.metadata.StorageMeta | None", _to_torch(meta))


def metadata_to_torch(metadata: Metadata) -> torchs.metadata.Metadata:
    """``metadata`` in torch's own classes all the way down, fit to be pickled into a file of torch's."""
    if isinstance(metadata, _TorchMetadata):
        return metadata.theirs
    from holdfast._torch_classes import torchs

    return torchs.metadata.Metadata(
        {key: _to_torch(each) for key, each in metadata.state_dict_metadata.items()},
        _plain_planner_data(metadata.planner_data),
        metadata.storage_data,
        storage_meta_to_torch(metadata.storage_meta),
        metadata.version,
    )


def _plain_planner_data(data: object) -> object:
    """``data``; the elements of paths are plain str and int, as torch has them, where ours remember more."""
    if not isinstance(data, dict) or not all(isinstance(path, tuple) for path in data.values()):
        return data
    return {
        key: tuple(
            str(each) if isinstance(each, str) else int(each) if isinstance(each, int) else each for each in path
        )
        for key, path in data.items()
    }


def metadata_for_planner(metadata: Metadata) -> torchs.metadata.Metadata:
    return metadata.theirs if isinstance(metadata, _TorchMetadata) else cast(Any, metadata_for_both(metadata))


def metadata_for_both(metadata: Metadata) -> Metadata:
    """``metadata`` whose parts are of our classes and, to isinstance, of torch's too; chunks stay columns.

    A reader cannot tell who asks for metadata: torch, which looks at nothing else of it, or this library. Where nobody
    has imported torch's checkpoints, nobody will ask, and it is returned as it is.
    """
    if isinstance(metadata, _TorchMetadata) or "torch.distributed.checkpoint.metadata" not in sys.modules:
        return metadata
    from holdfast._torch_classes.torchs import BytesOfBoth, MetadataOfBoth, TensorOfBoth

    if isinstance(metadata, MetadataOfBoth):
        return metadata
    entries: dict[str, STORAGE_TYPES] = {
        key: TensorOfBoth(**vars(stored)) if isinstance(stored, TensorStorageMetadata) else BytesOfBoth()
        for key, stored in metadata.state_dict_metadata.items()
    }
    return MetadataOfBoth(**{**vars(metadata), "state_dict_metadata": entries})


def encode_metadata(metadata: Metadata) -> bytes:
    """``metadata`` as the contents of a ``.metadata`` file; ``storage_data`` maps each index to a StorageInfo."""
    meta = metadata.storage_meta
    if meta is not None and meta.checkpoint_id is not None:
        # A plain string: a Path could be read only by the Python and on the system that wrote it.
        meta = dataclasses.replace(meta, checkpoint_id=os.fspath(meta.checkpoint_id))
    places = {_to_torch(index): _place(info) for index, info in (metadata.storage_data or {}).items()}
    whole = dataclasses.replace(
        metadata_to_torch(metadata),
        storage_data=places,
        storage_meta=storage_meta_to_torch(meta),
        version=metadata.version,
    )
    return pickle.dumps(whole)


def _place(info: StorageInfo) -> torchs.filesystem._StorageInfo:
    from holdfast._torch_classes.torchs import filesystem

    descriptors = None if info.transform_descriptors is None else list(info.transform_descriptors)
    return filesystem._StorageInfo(info.relative_path, info.offset, info.length, descriptors)
