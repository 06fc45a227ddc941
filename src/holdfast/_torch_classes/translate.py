"""Items, plans and metadata in torch's classes and in ours: the same names and fields twice; and ``.metadata`` as torch
writes it.

torch's code asks for its own enums and classes, ours for its own. What came from torch travels with its original, so
that torch's side gets back the very objects it made, fields of its own subclasses included; what was changed on the way
is made anew. Reading torch's objects goes by names alone: nothing of torch is imported for it.

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
from typing import Any

import torch

from holdfast._torch_codec.metadata_file import StorageInfo
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

_PROPERTIES = operator.attrgetter("dtype", "layout", "requires_grad", "memory_format", "pin_memory")

# ``theirs`` of an item is no parameter: what dataclasses.replace makes has none, for it says something else.


@dataclass(frozen=True)
class _TorchWriteItem(WriteItem):
    theirs: Any = field(init=False, default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.theirs is None:
            return WriteItem, (self.index, self.type, self.bytes_io_data, self.tensor_data)
        return write_item_from_torch, (self.theirs,)


@dataclass(frozen=True)
class _TorchReadItem(ReadItem):
    theirs: Any = field(init=False, default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.theirs is None:
            places = self.dest_index, self.dest_offsets, self.storage_index, self.storage_offsets
            return ReadItem, (self.type, *places, self.lengths)
        return read_item_from_torch, (self.theirs,)


@dataclass(frozen=True)
class _TorchSavePlan(SavePlan):
    theirs: Any = field(default=None, compare=False, repr=False)


@dataclass
class _TorchLoadPlan(LoadPlan):
    theirs: Any = field(default=None, compare=False, repr=False)


@dataclass
class _TorchMetadata(Metadata):
    theirs: Any = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # Other ranks are told once, and in our words.
        return Metadata, tuple(getattr(self, each.name) for each in dataclasses.fields(Metadata))


# From torch.


def write_item_from_torch(item: Any) -> WriteItem:
    """``item`` as ours."""
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


def read_item_from_torch(item: Any) -> ReadItem:
    """``item`` as ours."""
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


def save_plan_from_torch(plan: Any) -> SavePlan:
    """``plan`` as ours, with the same storage_data and planner_data."""
    if isinstance(plan, SavePlan):
        return plan
    items = [write_item_from_torch(item) for item in plan.items]
    return _TorchSavePlan(items, plan.storage_data, plan.planner_data, plan.usable, theirs=plan)


def load_plan_from_torch(plan: Any) -> LoadPlan:
    """``plan`` as ours, with the same storage_data and planner_data."""
    if isinstance(plan, LoadPlan):
        return plan
    items = [read_item_from_torch(item) for item in plan.items]
    return _TorchLoadPlan(items, plan.storage_data, plan.planner_data, theirs=plan)


def index_from_torch(index: Any) -> MetadataIndex:
    """``index`` as ours."""
    return MetadataIndex(index.fqn, index.offset, index.index)


def storage_meta_from_torch(meta: Any) -> StorageMeta | None:
    """``meta`` as ours."""
    if meta is None or isinstance(meta, StorageMeta):
        return meta
    return StorageMeta(meta.checkpoint_id, meta.save_id, meta.load_id, list(meta.modules))


def metadata_from_torch(metadata: Any) -> Metadata:
    """``metadata`` as ours; storages and planners of torch that are given it get the original."""
    if isinstance(metadata, Metadata):
        return metadata
    return _TorchMetadata(
        {key: _stored(each) for key, each in metadata.state_dict_metadata.items()},
        metadata.planner_data,
        metadata.storage_data,
        # Checkpoints of older versions of torch lack these two.
        storage_meta_from_torch(getattr(metadata, "storage_meta", None)),
        getattr(metadata, "version", None),
        theirs=metadata,
    )


def _stored(stored: Any) -> STORAGE_TYPES:
    if not hasattr(stored, "chunks"):
        return BytesStorageMetadata()
    chunks = [_chunk(chunk) for chunk in stored.chunks]
    return TensorStorageMetadata(_properties(stored.properties), torch.Size(stored.size), chunks)


def _chunk(chunk: Any) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))


def _properties(properties: Any) -> TensorProperties:
    return TensorProperties(*_PROPERTIES(properties))


# To torch.


def write_item_to_torch(item: WriteItem) -> Any:
    """``item`` as torch's: the one that it was made from, if it was."""
    if isinstance(item, _TorchWriteItem) and item.theirs is not None:
        return item.theirs
    from torch.distributed.checkpoint import planner

    nbytes, data = item.bytes_io_data, item.tensor_data
    return planner.WriteItem(
        index_to_torch(item.index),
        planner.WriteItemType[item.type.name],
        None if nbytes is None else planner.BytesIOWriteData(nbytes.nbytes),
        None
        if data is None
        else planner.TensorWriteData(_chunk_to_torch(data.chunk), _properties_to_torch(data.properties), data.size),
    )


def read_item_to_torch(item: ReadItem) -> Any:
    """``item`` as torch's: the one that it was made from, if it was."""
    if isinstance(item, _TorchReadItem) and item.theirs is not None:
        return item.theirs
    from torch.distributed.checkpoint import planner

    return planner.ReadItem(
        planner.LoadItemType[item.type.name],
        index_to_torch(item.dest_index),
        item.dest_offsets,
        index_to_torch(item.storage_index),
        item.storage_offsets,
        item.lengths,
    )


def save_plan_to_torch(plan: SavePlan) -> Any:
    """``plan`` as torch's; where it came from torch, of the class it had there."""
    items = [write_item_to_torch(item) for item in plan.items]
    fields = {"storage_data": plan.storage_data, "planner_data": plan.planner_data, "usable": plan.usable}
    if isinstance(plan, _TorchSavePlan):
        return dataclasses.replace(plan.theirs, items=items, **fields)
    from torch.distributed.checkpoint import planner

    return planner.SavePlan(items, **fields)


def load_plan_to_torch(plan: LoadPlan) -> Any:
    """``plan`` as torch's; where it came from torch, of the class it had there."""
    items = [read_item_to_torch(item) for item in plan.items]
    fields = {"storage_data": plan.storage_data, "planner_data": plan.planner_data}
    if isinstance(plan, _TorchLoadPlan):
        return dataclasses.replace(plan.theirs, items=items, **fields)
    from torch.distributed.checkpoint import planner

    return planner.LoadPlan(items, **fields)


def index_to_torch(index: MetadataIndex) -> Any:
    """``index`` as torch's."""
    from torch.distributed.checkpoint import metadata

    return metadata.MetadataIndex(index.fqn, index.offset, index.index)


def storage_meta_to_torch(meta: StorageMeta | None) -> Any:
    """``meta`` as torch's."""
    from torch.distributed.checkpoint import metadata

    if meta is None:
        return None
    return metadata.StorageMeta(meta.checkpoint_id, meta.save_id, meta.load_id, list(meta.modules))


def metadata_to_torch(metadata: Metadata) -> Any:
    """``metadata`` in torch's own classes all the way down, fit to be pickled into a file of torch's."""
    if isinstance(metadata, _TorchMetadata):
        return metadata.theirs
    from torch.distributed.checkpoint import metadata as theirs

    return theirs.Metadata(
        {key: _stored_to_torch(each) for key, each in metadata.state_dict_metadata.items()},
        plain_planner_data(metadata.planner_data),
        metadata.storage_data,
        storage_meta_to_torch(metadata.storage_meta),
        metadata.version,
    )


def plain_planner_data(data: Any) -> Any:
    """``data``; the elements of paths are plain str and int, as torch has them, where ours remember more."""
    if not isinstance(data, dict) or not all(isinstance(path, tuple) for path in data.values()):
        return data
    return {
        key: tuple(
            str(each) if isinstance(each, str) else int(each) if isinstance(each, int) else each for each in path
        )
        for key, path in data.items()
    }


def _stored_to_torch(stored: STORAGE_TYPES) -> Any:
    from torch.distributed.checkpoint import metadata

    if isinstance(stored, BytesStorageMetadata):
        return metadata.BytesStorageMetadata()
    chunks = [_chunk_to_torch(chunk) for chunk in stored.chunks]
    return metadata.TensorStorageMetadata(_properties_to_torch(stored.properties), stored.size, chunks)


def _chunk_to_torch(chunk: ChunkStorageMetadata) -> Any:
    from torch.distributed.checkpoint import metadata

    return metadata.ChunkStorageMetadata(chunk.offsets, chunk.sizes)


def _properties_to_torch(properties: TensorProperties) -> Any:
    from torch.distributed.checkpoint import metadata

    return metadata.TensorProperties(*_PROPERTIES(properties))


# Both at once.


def speak_torch(metadata: Metadata) -> Metadata:
    """``metadata``, itself; to isinstance, all in it is torch's as well as ours from now on.

    torch's planners look at nothing else of it, and chunks stay columns. Where nobody has imported torch's checkpoints,
    nobody will ask.
    """
    if isinstance(metadata, _TorchMetadata) or "torch.distributed.checkpoint.metadata" not in sys.modules:
        return metadata
    whole, tensor, value = _bilingual()
    metadata.__class__ = whole
    for stored in metadata.state_dict_metadata.values():
        stored.__class__ = tensor if isinstance(stored, TensorStorageMetadata) else value
    return metadata


@functools.cache
def _bilingual() -> tuple[type[Any], type[Any], type[Any]]:
    from torch.distributed.checkpoint import metadata

    def both(ours: type[Any], theirs: type[Any]) -> type[Any]:
        def equals(self: Any, other: object) -> Any:
            return vars(self) == vars(other) if isinstance(other, ours) else NotImplemented

        def reduce(self: Any) -> tuple[Any, ...]:
            return ours, tuple(vars(self).values())

        # A name of its own could not be found by pickle: as ours it travels well.
        namespace = {"__eq__": equals, "__hash__": None, "__reduce__": reduce, "__module__": ours.__module__}
        return type(ours.__name__, (ours, theirs), namespace)

    return (
        both(Metadata, metadata.Metadata),
        both(TensorStorageMetadata, metadata.TensorStorageMetadata),
        both(BytesStorageMetadata, metadata.BytesStorageMetadata),
    )


CURRENT_DCP_VERSION = "1.0.0"


def encode_metadata(metadata: Metadata) -> bytes:
    """``metadata`` as the contents of a ``.metadata`` file; ``storage_data`` maps each index to a StorageInfo."""
    meta = metadata.storage_meta
    if meta is not None and meta.checkpoint_id is not None:
        # A plain string: a Path could be read only by the Python and on the system that wrote it.
        meta = dataclasses.replace(meta, checkpoint_id=os.fspath(meta.checkpoint_id))
    places = {index_to_torch(index): _place(info) for index, info in (metadata.storage_data or {}).items()}
    whole = dataclasses.replace(
        metadata_to_torch(metadata),
        storage_data=places,
        storage_meta=storage_meta_to_torch(meta),
        version=metadata.version,
    )
    return pickle.dumps(whole)


def _place(info: StorageInfo) -> Any:
    from torch.distributed.checkpoint import filesystem as theirs

    descriptors = None if info.transform_descriptors is None else list(info.transform_descriptors)
    return theirs._StorageInfo(info.relative_path, info.offset, info.length, descriptors)
