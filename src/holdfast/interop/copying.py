"""A checkpoint that is saved again, in another format: its leaves are read as they are written, and counted.

Bytes pass in pieces of at most one slab. Tensors are asked for by key, and tied keys stay tied. What only running code
could load again is refused where the caller wants plain values. How many bytes a few can become is bounded.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from holdfast._checkpoint import Checkpoint, StoredTensor
from holdfast._checkpoint import open as open_checkpoint
from holdfast._io import files
from holdfast._io.stores import store_of
from holdfast._io.urls import is_store_url
from holdfast._mapping.mappings import Mapping as Rules
from holdfast._saver import save
from holdfast._state.nested import empty_dicts, unflatten
from holdfast._state.stateful_values import add_versions
from holdfast._state.tensor_bytes import Buffer, DistantSource, LazyTensor, Source, source_of
from holdfast._torch_codec.pickles import deserialize_object, serialize_object
from holdfast._values.box import flat_range_boxes
from holdfast._values.deadline import Progress
from holdfast._values.lazy import LazyList
from holdfast.default_planner import DefaultSavePlanner
from holdfast.errors import InvalidStateError, UnsafeError
from holdfast.events.progress import OnBytes
from holdfast.interop.mapped import MappedCheckpoint
from holdfast.metadata import (
    STATE_DICT_TYPE,
    STORAGE_TYPES,
    BytesStorageMetadata,
    Containers,
    StorageMeta,
    TensorStorageMetadata,
    Versions,
    path_key,
    restorable_paths,
)
from holdfast.planner import SavePlan, TensorHead, WriteColumns, WriteItem, WriteItemType, padded, write_columns
from holdfast.storage import StorageWriter

_Path = str | os.PathLike[str]

_MOST_GROWTH = 16
_ALWAYS_BYTES = 64 << 20


class ByteCount(Progress):
    """How many bytes are converted; in all no more than ``max_bytes``, or what is in proportion to the source."""

    def __init__(self, on_progress: OnBytes | None, source: str, max_bytes: int | None) -> None:
        super().__init__(self._tell)
        self._on_progress = on_progress
        self._source = source
        self._source_bytes = _bytes_at(source)
        self._most = max(_ALWAYS_BYTES, _MOST_GROWTH * self._source_bytes) if max_bytes is None else max_bytes
        self.total = 0

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self.done, max(self.total, self.done))

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Take the bytes of all tensors that will be written, by key; InvalidStateError when they are too many."""
        self.total = sum(sizes.values())
        if self.total > self._most:
            key = max(sizes, key=sizes.__getitem__)
            raise InvalidStateError(
                f"{self._source!r} has {self._source_bytes} bytes, but the result would have {self.total}, "
                f"{sizes[key]} of them for {key[:200]!r}; pass max_bytes={self.total} to allow more than {self._most}",
                key=key,
            )


def _bytes_at(path: str) -> int:
    if is_store_url(path):
        return sum(found.bytes for found in store_of(path).listed(path)) or files.size_of(path) or 0
    if os.path.isfile(path):
        return os.path.getsize(path)
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names)


class StoredSource(DistantSource):
    """The row-major bytes of a stored tensor, whatever chunks it is in; one read at a time, each in parallel itself."""

    def __init__(self, stored: StoredTensor, lock: threading.Lock, progress: Progress) -> None:
        self.nbytes = stored.nbytes
        self._stored = stored
        self._lock = lock
        self._progress = progress

    def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        dtype = self._stored.dtype
        for box in flat_range_boxes(self._stored.shape, start // dtype.itemsize, stop // dtype.itemsize):
            nbytes = box.volume * dtype.itemsize
            # One at a time, because each has buffers of its own; it is read by several threads anyway.
            with self._lock:
                if at % dtype.itemsize:
                    source_of(self._stored[box.slices()]).copy_out(0, nbytes, buffer, at)
                else:
                    self._stored.read_into(buffer.tensor[at : at + nbytes].view(dtype).view(box.lengths), box)
            at += nbytes
        self._progress.moved(stop - start)


class QuantizedSource:
    """The integers of a stored quantised tensor: all are read at the first byte, and dropped after the last."""

    def __init__(self, stored: StoredTensor, progress: Progress) -> None:
        self.nbytes = stored.nbytes
        self._stored = stored
        self._progress = progress
        self._whole: Source | None = None

    def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        if self._whole is None:
            self._whole = source_of(self._stored[...])
        self._whole.copy_out(start, stop, buffer, at)
        if stop == self.nbytes:
            self._whole = None
        self._progress.moved(stop - start)


class Leaves:
    """The leaves of a checkpoint: tensors that are read when they are written, values as they are.

    ``plain_only`` refuses values that could only be loaded again by running code.
    """

    def __init__(self, checkpoint: Checkpoint | MappedCheckpoint, progress: ByteCount, *, plain_only: bool) -> None:
        self.checkpoint = checkpoint
        self.metadata = checkpoint.metadata
        self._progress = progress
        self._plain_only = plain_only
        self._lock = threading.Lock()
        self._tensors: dict[str, LazyTensor] = {}
        entries = self.metadata.state_dict_metadata
        progress.expect(
            {
                key: checkpoint[key].nbytes
                for key, entry in entries.items()
                if isinstance(entry, TensorStorageMetadata) and entry.alias_of not in entries
            }
        )

    def tensor(self, key: str) -> LazyTensor:
        """The tensor of ``key``, to be read when its bytes are asked for; tied keys give one object."""
        if key not in self._tensors:
            self._tensors[key] = self._new_tensor(key)
        return self._tensors[key]

    def _new_tensor(self, key: str) -> LazyTensor:
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        requires_grad = entry.properties.requires_grad
        source: Source
        if entry.alias_of is not None and entry.alias_of in self.metadata.state_dict_metadata:
            tied = self.tensor(entry.alias_of)
            if tied.requires_grad == requires_grad:
                return tied
            source = tied.source
        elif entry.quantizer is None:
            source = StoredSource(self.checkpoint[key], self._lock, self._progress)
        else:
            source = QuantizedSource(self.checkpoint[key], self._progress)
        return LazyTensor(source, entry.size, entry.properties.dtype, requires_grad, quantizer=entry.quantizer)

    def value(self, key: str) -> object:
        """The value of ``key``; an array where it is kept like a tensor."""
        found = self.checkpoint[key]
        if isinstance(found, StoredTensor):
            self._progress.moved(found.nbytes)
            found = found[...].numpy()
        if self._plain_only:
            _check_plain(key, found)
        return found

    def is_quantized(self, key: str) -> bool:
        """Whether ``key`` is a quantised tensor, which storage takes only as it is."""
        entry = self.metadata.state_dict_metadata[key]
        return (
            isinstance(entry, TensorStorageMetadata)
            and torch.empty(0, dtype=entry.properties.dtype, device="cpu").is_quantized
        )

    def real_tensor(self, key: str) -> torch.Tensor:
        stored: StoredTensor = self.checkpoint[key]
        self._progress.moved(stored.nbytes)
        return stored[...]

    def state(self) -> dict[Any, Any]:
        metadata = self.metadata
        leaves = {key: self._leaf(key, entry) for key, entry in metadata.state_dict_metadata.items()}
        return add_versions(unflatten(leaves, restorable_paths(metadata), self.containers()), metadata.versions)

    def containers(self, *, as_dicts: bool = False) -> Containers:
        """The classes of containers, dicts apart where these become plain; torch has to load all without code."""
        for path, like in self.metadata.containers.items() if self._plain_only else ():
            if not (as_dicts and isinstance(like, dict)):
                _check_plain(path_key(path), like)
        return self.metadata.containers

    def _leaf(self, key: str, entry: STORAGE_TYPES) -> object:
        if not isinstance(entry, TensorStorageMetadata) or entry.kind == "numpy":
            return self.value(key)
        # The scales of torch's format are in its data files: only the tensor itself has them.
        knows_scales = entry.quantizer is not None or not self.is_quantized(key)
        return self.tensor(key) if knows_scales else self.real_tensor(key)


def _check_plain(key: str, value: object) -> None:
    """InvalidStateError unless torch.load takes the value without running code."""
    try:
        deserialize_object(io.BytesIO(serialize_object(value)), key=key, allow_pickle=False)
    except UnsafeError:
        raise InvalidStateError(
            f"{key!r} is a {type(value).__name__}, which torch loads only by running code; convert it, or pass "
            "allow_pickle=True",
            key=key,
        ) from None


class CopyPlanner(DefaultSavePlanner):
    """Saves the leaves of a checkpoint, each tensor as one chunk."""

    def __init__(self, leaves: Leaves) -> None:
        super().__init__()
        self._leaves = leaves

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the paths of the checkpoint; the state that is given is empty."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.mappings, self.containers = restorable_paths(self._leaves.metadata), self._leaves.containers(as_dicts=True)

    def create_local_plan(self) -> SavePlan:
        entries = dict(self._leaves.metadata.state_dict_metadata)
        if not self.keeps_empty_dicts:
            values = (key for key, entry in entries.items() if isinstance(entry, BytesStorageMetadata))
            for key in empty_dicts({key: self._leaves.value(key) for key in values}):
                del entries[key]
                self.mappings.pop(key, None)
        heads = [
            TensorHead(entry.properties, entry.size, entry.alias_of, entry.kind)
            if isinstance(entry, TensorStorageMetadata)
            else None
            for entry in entries.values()
        ]
        sizes = [() if head is None else tuple(head.size) for head in heads]
        columns = WriteColumns(
            keys=list(entries),
            heads=heads,
            key=np.arange(len(heads)),
            lo=padded([(0,) * len(size) for size in sizes], fill=0),
            length=padded(sizes, fill=1),
            hint=np.zeros(len(heads), dtype=np.int64),
            is_shard=np.zeros(len(heads), dtype=bool),
        )
        self.plan = SavePlan(LazyList(columns), planner_data=self.mappings)
        return self.plan

    def versions(self) -> Versions:
        return self._leaves.metadata.versions

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key, leaves = write_item.index.fqn, self._leaves
        if write_item.type is WriteItemType.BYTE_IO:
            return self.transform_object(write_item, leaves.value(key))
        return self.transform_object(
            write_item, leaves.real_tensor(key) if leaves.is_quantized(key) else leaves.tensor(key)
        )


class _CountedSource:
    def __init__(self, source: Source, progress: ByteCount) -> None:
        self.nbytes = source.nbytes
        self._source = source
        self._progress = progress

    def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        self._source.copy_out(start, stop, buffer, at)
        self._progress.moved(stop - start)


class CountingPlanner(DefaultSavePlanner):
    """The default planner, its tensors counted."""

    def __init__(self, progress: ByteCount, mapping: Rules | None) -> None:
        super().__init__(mapping=mapping)
        self._progress = progress

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        columns = write_columns(plan.items)
        self._progress.expect(
            {
                key: head.size.numel() * head.properties.dtype.itemsize
                for key, head in zip(columns.keys, columns.heads, strict=True)
                if head is not None and head.alias_of is None
            }
        )
        return plan

    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        data = super().transform_object(write_item, object)
        if not isinstance(data, torch.Tensor) or data.is_quantized:
            return data
        return LazyTensor(_CountedSource(source_of(data), self._progress), data.shape, data.dtype)


def copy_checkpoint(source: _Path, writer: StorageWriter) -> None:
    """Have ``writer`` write all that is in the checkpoint or folder ``source``, in pieces."""
    with open_checkpoint(source) as checkpoint:
        count = ByteCount(None, os.fspath(source), None)
        save({}, storage_writer=writer, planner=CopyPlanner(Leaves(checkpoint, count, plain_only=True)), no_dist=True)
