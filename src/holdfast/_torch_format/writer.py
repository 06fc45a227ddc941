"""Writers of torch's own on-disk format: ``.metadata`` and ``__<rank>_<n>.distcp`` files, over any file system.

What torch's writer promises, this one keeps: its options, its names, files that torch reads on any number of ranks.
And what it does not: a save is whole or invisible, the checkpoint that it replaces stays until then, a failure of any
thread is the failure of the save, and what is visible is durable.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import MutableSequence, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.futures import Future

from holdfast._io import posix
from holdfast._process import forget_in_child
from holdfast._torch_classes.adapt import final_save_plan, is_torchs
from holdfast._torch_classes.translate import CURRENT_DCP_VERSION, metadata_from_torch, save_plan_from_torch
from holdfast._torch_codec.metadata_file import DATA_SUFFIX, StorageInfo, StoragePrefix, metadata_name
from holdfast._torch_format.file_systems import (
    FileSystem,
    Located,
    PathLike,
    RemoteFileSystem,
    check_replaceable,
    file_prefixes,
    is_local,
    may_be_published,
    publish,
)
from holdfast._torch_format.items import ChangedInfo, PlannedItems
from holdfast._torch_format.packing import FilePacker, StreamPacker, StreamTransform, _StorageWriterTransforms
from holdfast._values.dtypes import MAX_KEY_BYTES
from holdfast._values.lazy import LazyList
from holdfast.errors import InternalError, InvalidStateError
from holdfast.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from holdfast.planner import SavePlan, SavePlanner, write_columns
from holdfast.staging import BlockingAsyncStager
from holdfast.storage import StorageWriter, WriteResult, finished


class SerializationFormat(Enum):
    """How items are kept; SAFETENSORS is for Hugging Face storage only."""

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"


def _generate_uuid() -> str:
    return str(uuid.uuid4())


class _FileSystemWriter(Located, StorageWriter):
    """Writes a checkpoint in torch's format to the directory ``path``; FileSystemWriter stages it as well.

    Args:
        path: the directory; made when it does not exist.
        single_file_per_rank: one file for each thread; else one for each item.
        sync_files: what is visible is durable. Streams without a file number are synced by syncing the whole system.
        thread_count: into how many files a rank's items are split by size. Local files are written by several threads
            whatever it says; other file systems, and transforms, get one thread for each file.
        per_thread_copy_ahead: bytes to copy from an accelerator ahead of a stream, where one thread writes. Local files
            need none: their slabs overlap copying and writing.
        overwrite: replace a checkpoint, in one step at the end; False makes that AlreadyPublishedError.
        _extensions: stream transforms, such as compression.
        serialization_format: TORCH_SAVE.
    """

    def __init__(
        self,
        path: PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransform] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if thread_count < 1:
            raise ValueError(f"thread_count must be at least 1, not {thread_count}")
        if getattr(serialization_format, "name", None) != SerializationFormat.TORCH_SAVE.name:
            raise ValueError("only Hugging Face storage keeps items as safetensors; use SerializationFormat.TORCH_SAVE")
        self.place_at(path, FileSystem())
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.overwrite = overwrite
        self.transforms = _StorageWriterTransforms(_extensions)
        self.serialization_format = SerializationFormat.TORCH_SAVE
        self.save_id = _generate_uuid()
        self.rank: int | None = None
        self.use_collectives = True
        self._files: FilePacker | StreamPacker | None = None
        self._not_there: Sequence[str] = ()
        forget_in_child(self)

    def forget_parent(self) -> None:
        self._files = None

    @property
    def file_at_work(self) -> str:  # type: ignore[override]
        return posix.file_at_work(self.path)

    @property
    def metadata_path(self) -> PathLike:
        """The file whose presence is the checkpoint, or this rank's part of it where ranks save on their own."""
        return self.fs.concat_path(self.path, self._metadata_name)

    @property
    def _metadata_name(self) -> str:
        return metadata_name(None if self.use_collectives else self.rank)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = self.fs.init_path(checkpoint_id)
        self.save_id = _generate_uuid()
        self._files = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take note of ``rank`` and ``use_collectives``; without collectives each rank has metadata of its own."""
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True) or self.rank is None
        self._not_there = ()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """``plan`` with numpy arrays as the values that torch takes them for; refuses what could not be published."""
        for key in write_columns(save_plan_from_torch(plan).items).keys:
            if len(key) > MAX_KEY_BYTES:
                raise InvalidStateError(f"the key {key[:200]!r}... is longer than {MAX_KEY_BYTES}; shorten it", key=key)
        if not is_local(self.fs):
            self.fs.mkdir(self.path)
        check_replaceable(self.fs, self.path, self._metadata_name, overwrite=self.overwrite)
        if not is_torchs(plan):
            plan = _with_arrays_as_values(plan)
        if not self.use_collectives and self.rank is not None:
            plan = dataclasses.replace(plan, storage_data=self._prefixes([self.rank])[0])
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [
            plan if plan.storage_data is not None else dataclasses.replace(plan, storage_data=prefix)
            for plan, prefix in zip(plans, self._prefixes(range(len(plans))), strict=True)
        ]

    def _prefixes(self, ranks: Sequence[int]) -> list[StoragePrefix]:
        # By now every rank has cleaned up after the save before, and none has begun to write.
        not_there = tuple(posix.missing_directories(self.path)) if is_local(self.fs) else ()
        prefixes = file_prefixes(self.fs, self.path, ranks, save_id=self.save_id)
        return [StoragePrefix(prefix, not_there) for prefix in prefixes]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[MutableSequence[WriteResult]]:
        """Write the items of ``plan`` to files of this rank, durably where ``sync_files`` says so."""
        prefix = getattr(plan.storage_data, "prefix", None)
        if not isinstance(prefix, str):
            raise InternalError("the plan did not pass through prepare_global_plan of this storage")
        plan, planner = final_save_plan(plan, planner)
        items = PlannedItems(plan, planner)
        rows = items.files(single_file=self.single_file_per_rank, thread_count=self.thread_count)
        if is_local(self.fs):
            self._not_there = getattr(plan.storage_data, "not_there", ())
            self.fs.mkdir(self.path)
        self._files = files = self._new_files(items)
        results: MutableSequence[WriteResult] = files.write(
            [(f"{prefix}{number}{DATA_SUFFIX}", each) for number, each in enumerate(rows)]
        )
        if self.sync_files and is_local(self.fs):
            posix.sync_directory(self.path)
        return finished(results)

    def _new_files(self, items: PlannedItems) -> FilePacker | StreamPacker:
        if is_local(self.fs) and not self.transforms.extensions:
            return FilePacker(self.path, items, sync=self.sync_files, progress=self.progress)
        return StreamPacker(
            self.fs,
            self.path,
            items,
            transforms=self.transforms,
            thread_count=self.thread_count,
            copy_ahead=self.per_thread_copy_ahead,
            sync=self.sync_files,
            progress=self.progress,
        )

    def finish(self, metadata: Metadata, results: list[MutableSequence[WriteResult]]) -> None:
        """Publish ``metadata``, with where everything is; then remove the files of the checkpoint that it replaces."""
        metadata = metadata_from_torch(metadata)
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = _places(metadata, results)
        publish(
            self.fs,
            self.path,
            metadata,
            name=self._metadata_name,
            save_id=self.save_id,
            overwrite=self.overwrite,
            sync=self.sync_files,
        )
        self._files = None

    def abandon(self) -> None:
        """Remove the files of a save that failed, unless it failed after it was published."""
        files, self._files = self._files, None
        if files is not None and not may_be_published(self.fs, self.metadata_path, files.names):
            files.abandon()
        posix.remove_empty_directories(self._not_there)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": None}


def _with_arrays_as_values(plan: SavePlan) -> SavePlan:
    """``plan`` where numpy arrays, which are tensors to the default planner, are values: torch has it so."""
    columns = write_columns(plan.items)
    is_array = np.array([head is not None and head.kind == "numpy" for head in columns.heads], dtype=bool)
    if not is_array.any():
        return plan
    rows = is_array[columns.key]
    lo, length = columns.lo.copy(), columns.length.copy()
    lo[rows], length[rows] = 0, 1
    heads = [None if array else head for head, array in zip(columns.heads, is_array.tolist(), strict=True)]
    values = dataclasses.replace(columns, heads=heads, lo=lo, length=length)
    return dataclasses.replace(plan, items=LazyList(values))


def _places(metadata: Metadata, results: list[MutableSequence[WriteResult]]) -> dict[MetadataIndex, StorageInfo]:
    """Where every item is; ``metadata`` learns of tensors that the planner changed on their way."""
    places: dict[MetadataIndex, StorageInfo] = {}
    for result in (result for one_rank in results for result in one_rank):
        info = result.storage_data
        if isinstance(info, ChangedInfo):
            _change(metadata, result.index, info)
            info = StorageInfo(info.relative_path, info.offset, info.length, info.transform_descriptors)
        places[result.index] = info
    return places


def _change(metadata: Metadata, index: MetadataIndex, info: ChangedInfo) -> None:
    entry: Any = metadata.state_dict_metadata[index.fqn]
    properties = dataclasses.replace(entry.properties, dtype=info.dtype)
    chunks = entry.chunks
    if info.size != entry.size:
        chunks = [ChunkStorageMetadata(torch.Size([0] * len(info.size)), info.size)]
    metadata.state_dict_metadata[index.fqn] = dataclasses.replace(
        entry, properties=properties, size=info.size, chunks=chunks
    )


class FileSystemWriter(_FileSystemWriter, BlockingAsyncStager):
    """Writes a checkpoint in torch's format to the directory ``path``, and stages asynchronous saves by host copies.

    The arguments are those of ``_FileSystemWriter``, and ``cache_staged_state_dict``: keep the copies for the next.
    """

    def __init__(
        self,
        path: PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransform] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
    ) -> None:
        files = path, single_file_per_rank, sync_files, thread_count, per_thread_copy_ahead
        _FileSystemWriter.__init__(self, *files, overwrite, _extensions, serialization_format)
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """A copy of ``state_dict`` on the CPU; nothing is copied ahead any more, because nothing is left to copy."""
        self.per_thread_copy_ahead = 0
        return super().stage(state_dict)


class FsspecWriter(FileSystemWriter):
    """Writes a checkpoint in torch's format to the URL ``path``; ``options`` go to the file system of its scheme."""

    kind = RemoteFileSystem

    def __init__(
        self,
        path: PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransform] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        **options: object,
    ) -> None:
        files = path, single_file_per_rank, sync_files, thread_count, per_thread_copy_ahead
        super().__init__(*files, False, overwrite, _extensions, serialization_format)
        self.place_at(path, RemoteFileSystem(**options))
