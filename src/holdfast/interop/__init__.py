"""Living together with torch.distributed.checkpoint: native storage under torch's names, and conversions.

Checkpoints go from one format to another (native, torch's, Hugging Face folders, ``.pt`` files) without being loaded.
Bytes pass in pieces of at most one slab. So memory does not grow with the checkpoint or its largest tensor, but for
quantised tensors and for ``.pt`` files of the time before torch 1.6. What is read is verified as far as the source's
format goes. The target appears whole or not at all. Values keep their types; what only a pickle could keep is refused
unless the caller allows pickles.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from holdfast import events
from holdfast._checkpoint import Checkpoint, QuantizedSource, StoredSource, StoredTensor, is_torch_format
from holdfast._checkpoint import open as open_checkpoint
from holdfast._huggingface.folder import is_folder
from holdfast._io import posix
from holdfast._io.folders import check_free
from holdfast._native.publish import formats_at
from holdfast._native.writer import NativeWriter
from holdfast._saver import save
from holdfast._state.nested import empty_dicts, unflatten
from holdfast._state.stateful_values import add_versions
from holdfast._state.tensor_bytes import Buffer, LazyTensor, Source, source_of
from holdfast._torch_codec.archive_writing import write_pt
from holdfast._torch_codec.pickles import deserialize_object, read_pt, serialize_object
from holdfast._torch_format.file_systems import is_remote
from holdfast._torch_format.reader import verify_torch_checkpoint
from holdfast._torch_format.writer import _FileSystemWriter
from holdfast._values.deadline import Progress
from holdfast._values.lazy import LazyList
from holdfast.default_planner import DefaultSavePlanner
from holdfast.errors import AlreadyPublishedError, CorruptError, InvalidStateError, UnsafeError
from holdfast.events.progress import OnBytes, following_bytes
from holdfast.hf import FolderForm
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

if TYPE_CHECKING:
    from holdfast.interop.replacing import Replacement, use_in_torch

__all__ = ["Conversion", "Replacement", "convert", "use_in_torch"]

_Path = str | os.PathLike[str]
Format = Literal["native", "torch", "pt", "hf"]

_MOST_GROWTH = 16
_ALWAYS_BYTES = 64 << 20


def __getattr__(name: str) -> object:
    # Late, because it imports torch's checkpoint classes, which conversions do not need.
    if name not in ("Replacement", "use_in_torch"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from holdfast.interop import replacing

    return getattr(replacing, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What was converted: how many tensors (tied ones count once each) and values, and the bytes of the tensors."""

    tensors: int
    values: int
    bytes: int
    seconds: float


def convert(
    source: _Path,
    target: _Path,
    *,
    to: Format | FolderForm,
    allow_pickle: bool = False,
    overwrite: bool = False,
    verify: bool = True,
    max_bytes: int | None = None,
    progress: bool | OnBytes = False,
) -> Conversion:
    """Write ``source`` (a checkpoint, Hugging Face folder or ``.pt`` file) to ``target``, in the format ``to``.

    Args:
        source: what it is, is found out by looking at it.
        target: a directory, or for ``pt`` a file.
        to: "native", "torch" (the format of torch.distributed.checkpoint), "pt" (torch.save) or "hf" (a Hugging Face
            folder); or a ``holdfast.hf.FolderForm``, which says what the folder is to look like.
        allow_pickle: read and write values that only a pickle can keep; reading them runs code from the source.
        overwrite: replace what is at ``target``, at the end and at once, if it is of the same format; in a directory
            that holds no checkpoint, all that is there stays.
        verify: check the source's digests or checksums, where it has any.
        max_bytes: the most bytes of tensors to write. A file of a few kilobytes can hold an expanded tensor of any
            size; by default, what is 16 times as large as the source, and more than 64 MiB, is refused.
        progress: True for a bar on the terminal; a function is called with the bytes that are done and all that there
            are, from any thread.
    """
    if not isinstance(to, FolderForm) and to not in get_args(Format):
        raise ValueError(f"there is no format {to!r}; it is one of {', '.join(get_args(Format))}")
    for place in (source, target):
        if is_remote(place):
            raise ValueError(
                f"{os.fspath(place)!r} is a URL, and only local files can be converted; copy them from or to it"
            )
    if os.path.realpath(source) == os.path.realpath(target):
        raise ValueError(f"source and target are both {os.fspath(source)!r}; give the result another name")
    source, target = posix.absolute(source), posix.absolute(target)
    name = f"converting {os.path.basename(source)}"
    with events.Operation("convert", target) as operation, following_bytes(progress, name) as on_progress:
        count = _ByteCount(on_progress, source, max_bytes)
        done = _convert(source, target, to, count, allow_pickle=allow_pickle, overwrite=overwrite, verify=verify)
        operation.tell("published", nbytes=done.bytes)
        return done


def _convert(
    source: str,
    target: str,
    to: Format | FolderForm,
    progress: _ByteCount,
    *,
    allow_pickle: bool,
    overwrite: bool,
    verify: bool,
) -> Conversion:
    started = time.monotonic()
    _check_target(target, to, overwrite=overwrite)
    if os.path.isfile(source) and not is_folder(source):
        if to == "pt":
            raise ValueError(f"{source!r} is a .pt file already; copy it")
        writer = _writer(target, to, allow_pickle=allow_pickle, overwrite=overwrite)
        state = read_pt(source, allow_pickle=allow_pickle, verify=verify)
        metadata = save(state, storage_writer=writer, planner=_CountingPlanner(progress), no_dist=True)
    else:
        if verify and is_torch_format(source):
            _check_torch(source)
        with open_checkpoint(source, verify=verify, allow_pickle=allow_pickle) as checkpoint:
            leaves = _Leaves(checkpoint, progress, plain_only=to in ("torch", "pt") and not allow_pickle)
            if to == "pt":
                write_pt(leaves.state(), target, overwrite=overwrite)
            else:
                user_metadata = checkpoint.user_metadata if to == "native" else None
                writer = _writer(
                    target, to, allow_pickle=allow_pickle, overwrite=overwrite, user_metadata=user_metadata
                )
                save({}, storage_writer=writer, planner=_CopyPlanner(leaves), no_dist=True)
            metadata = checkpoint.metadata
    entries = metadata.state_dict_metadata.values()
    tensors = sum(isinstance(entry, TensorStorageMetadata) for entry in entries)
    seconds = time.monotonic() - started
    return Conversion(tensors=tensors, values=len(entries) - tensors, bytes=progress.done, seconds=seconds)


class _ByteCount(Progress):
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
    if os.path.isfile(path):
        return os.path.getsize(path)
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names)


def _check_target(target: str, to: Format | FolderForm, *, overwrite: bool) -> None:
    """AlreadyPublishedError for a target that must not be replaced."""
    if isinstance(to, FolderForm) or to == "hf":
        check_free(target, overwrite=overwrite)
        return
    existed = posix.exists(target)
    if existed and not overwrite:
        raise AlreadyPublishedError(f"{target!r} exists already; use another name or overwrite=True")
    if existed and not _holds(target, to):
        raise AlreadyPublishedError(
            f"{target!r} is there, and a checkpoint of the {to} format cannot take its place; remove it first"
        )


def _holds(target: str, to: Format) -> bool:
    """Whether ``target`` is what a conversion to ``to`` would make; a directory without a checkpoint takes one too."""
    if to == "pt":
        return os.path.isfile(target)
    return os.path.isdir(target) and ("torch" if to == "native" else "native") not in formats_at(target)


def _writer(
    target: _Path, to: Format | FolderForm, *, allow_pickle: bool, overwrite: bool, user_metadata: Any = None
) -> StorageWriter:
    if to == "hf" or isinstance(to, FolderForm):
        return (FolderForm() if to == "hf" else to).writer(target, overwrite=overwrite)
    if to == "native":
        return NativeWriter(target, overwrite=overwrite, allow_pickle=allow_pickle, user_metadata=user_metadata)
    return _FileSystemWriter(target, overwrite=overwrite)


def _check_torch(source: _Path) -> None:
    """CorruptError where a checksum is wrong: they are of whole chunks, and a conversion reads parts."""
    damage = next(iter(verify_torch_checkpoint(source).damage), None)
    if damage is not None:
        raise CorruptError.of_part(os.path.join(source, damage.file), damage.key, damage.span, damage.problem)


class _Leaves:
    """The leaves of a checkpoint: tensors that are read when they are written, values as they are.

    ``plain_only`` refuses values that could only be loaded again by running code.
    """

    def __init__(self, checkpoint: Checkpoint, progress: _ByteCount, *, plain_only: bool) -> None:
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


class _CopyPlanner(DefaultSavePlanner):
    """Saves the leaves of a checkpoint, each tensor as one chunk."""

    def __init__(self, leaves: _Leaves) -> None:
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
    def __init__(self, source: Source, progress: _ByteCount) -> None:
        self.nbytes = source.nbytes
        self._source = source
        self._progress = progress

    def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        self._source.copy_out(start, stop, buffer, at)
        self._progress.moved(stop - start)


class _CountingPlanner(DefaultSavePlanner):
    """The default planner, its tensors counted."""

    def __init__(self, progress: _ByteCount) -> None:
        super().__init__()
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
