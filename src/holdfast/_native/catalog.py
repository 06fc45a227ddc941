"""A published checkpoint as its manifest and index say it is: every key, every chunk, nothing read yet.

Whatever comes out of ``read_catalog`` has been checked: digests, bounds, tiling, names. Data files are opened when they
are needed, and their sizes compared then.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from holdfast._io import files, posix
from holdfast._io.direct import check_size, missing
from holdfast._io.files import FilesToRead
from holdfast._io.urls import is_store_url
from holdfast._native.index import ChunkIndex, check_index, decode_index
from holdfast._native.leftovers import METRICS_NAME, PINNED_NAME
from holdfast._native.manifest import BYTE_KINDS, IndexEntry, Manifest, TensorEntry, ValueEntry, decode_manifest
from holdfast._native.paths import decode_path, split_planner_data, stored_containers
from holdfast._native.publish import MANIFEST_NAME, read_manifest, read_manifest_bytes
from holdfast._native.statistics import KeptStatistics, most_bytes, statistics_entry
from holdfast._native.values import decode_value
from holdfast._state.tensors import torch_dtype
from holdfast._torch_classes.translate import CURRENT_DCP_VERSION
from holdfast._torch_codec.metadata_file import is_of_a_save
from holdfast._values.digest import digest, to_hex
from holdfast._values.dtypes import MAX_HEADER_BYTES
from holdfast._values.lazy import LazyList, cached_property
from holdfast._values.records import rebuilt
from holdfast.errors import CorruptError, NotACheckpointError, NotFoundError, StorageError
from holdfast.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkColumns,
    Metadata,
    Path,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Catalog:
    """Manifest and index of one checkpoint, and ways to look things up in them.

    Without ``has_digests`` nothing tells whether the data is what was written; the index has zeros for digests then.
    ``links`` says where files lie that are not under their names.
    """

    directory: str
    manifest: Manifest
    index: ChunkIndex
    has_digests: bool = True
    links: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def tensor_ids(self) -> dict[str, int]:
        return {entry.key: number for number, entry in enumerate(self.manifest.tensors)}

    @cached_property
    def row_bounds(self) -> np.ndarray:
        """Tensor t has the index rows from [t] to [t + 1]."""
        return np.searchsorted(self.index.tensor, np.arange(len(self.manifest.tensors) + 1))

    @cached_property
    def first_block(self) -> np.ndarray:
        """Where in the digests of the index each chunk's begin; one more entry at the end."""
        return self.index.first_block()

    @cached_property
    def storing_ids(self) -> np.ndarray:
        """``storing_id`` of each tensor by its number; one more entry at the end, -1."""
        ids, entries = self.tensor_ids, self.manifest.tensors
        return np.array(
            [ids[entry.alias_of] if entry.alias_of else number for number, entry in enumerate(entries)] + [-1]
        )

    @cached_property
    def values(self) -> dict[str, object]:
        """The typed JSON of each value that the manifest itself holds."""
        return {entry.key: entry.value for entry in self.manifest.values}

    def entry(self, key: str) -> TensorEntry | None:
        """The tensor entry of ``key``, or None for a value or an unknown key."""
        number = self.tensor_ids.get(key)
        return None if number is None else self.manifest.tensors[number]

    def storing_id(self, key: str) -> int:
        """The number of the tensor that holds the bytes of ``key``: its own, or that of the one it is tied to."""
        number = self.tensor_ids[key]
        alias_of = self.manifest.tensors[number].alias_of
        return number if alias_of is None else self.tensor_ids[alias_of]

    def first_rows(self, keys: Sequence[str]) -> np.ndarray:
        """The index row of the first chunk of each of ``keys``; -1 for what is no tensor."""
        ids = self.tensor_ids
        numbers = np.array([ids.get(key, -1) for key in keys], dtype=np.int64)
        firsts: np.ndarray = np.append(self.row_bounds[:-1], -1)[self.storing_ids[numbers]]
        return firsts

    def rows_of(self, key: str) -> range:
        """The index rows of the chunks that hold ``key``."""
        number = self.storing_id(key)
        return range(int(self.row_bounds[number]), int(self.row_bounds[number + 1]))

    def same_bytes(self, key: str, other: str) -> bool | None:
        """Whether two tensors are stored as the same bytes; None where their chunks do not compare."""
        first, second = self.rows_of(key), self.rows_of(other)
        if first == second:
            return True
        index, tensors = self.index, self.manifest.tensors
        entries = tensors[self.storing_id(key)], tensors[self.storing_id(other)]
        if not self.has_digests or len({(each.dtype, each.shape, each.quantizer) for each in entries}) > 1:
            return None
        rows = slice(first.start, first.stop), slice(second.start, second.stop)
        if not all(np.array_equal(column[rows[0]], column[rows[1]]) for column in (index.lo, index.length)):
            return None
        blocks = self.first_block
        mine, its = (index.digests[blocks[each.start] : blocks[each.stop]] for each in (first, second))
        return np.array_equal(mine, its)

    def quantizer(self, entry: TensorEntry) -> dict[str, Any]:
        return {} if entry.quantizer is None else msgspec.to_builtins(entry.quantizer)

    def file_path(self, file: int) -> str:
        name = self.manifest.files[file].name
        return os.path.join(self.directory, self.links.get(name, name))

    def data_files(self) -> FilesToRead:
        """The data files, to be read from; the caller closes them."""
        entries = self.manifest.files
        return files.data_files(list(map(self.file_path, range(len(entries)))), [entry.bytes for entry in entries])

    def check_files(self) -> None:
        """CorruptError unless all data files are there in their sizes."""
        for number, file in enumerate(self.manifest.files):
            path = self.file_path(number)
            size = files.size_of(path)
            if size is None:
                raise missing(path)
            check_size(path, size, file.bytes)

    def paths(self) -> dict[str, Path]:
        paths = {entry.key: decode_path(entry.key, entry.path) for entry in self.manifest.tensors}
        paths.update({entry.key: decode_path(entry.key, entry.path) for entry in self.manifest.values})
        return paths

    @cached_property
    def statistics_entry(self) -> IndexEntry | None:
        """The file with the statistics that the save kept, if it did."""
        return statistics_entry(self.manifest, self.manifest.metadata)

    def statistics(self) -> KeptStatistics | None:
        """What is in that file, checked; CorruptError if it is missing, or not what was written."""
        entry, tensors = self.statistics_entry, self.manifest.tensors
        if entry is None:
            return None
        path = os.path.join(self.directory, self.links.get(entry.name, entry.name))
        if entry.bytes > most_bytes(len(tensors)):
            raise CorruptError(f"the statistics in {path!r} are too large for {len(tensors)} tensors", path=path)
        return KeptStatistics(_read_table(path, entry), entry, tensors, path)

    def entries(self) -> Iterator[TensorEntry | ValueEntry]:
        """All entries in the order of the state."""
        values = deque(self.manifest.values)
        for number, entry in enumerate(self.manifest.tensors):
            # As many values as have been taken, and tensors, come before the next one.
            while values and values[0].position == number + len(self.manifest.values) - len(values):
                yield values.popleft()
            yield entry
        yield from values

    def metadata(self) -> Metadata:
        """The checkpoint in the words of the protocol; chunks are views of the index."""
        entries: dict[str, STORAGE_TYPES] = {}
        bounds, all_lo, all_length = self.row_bounds.tolist(), self.index.lo, self.index.length
        tensor_ids = self.tensor_ids
        for entry in self.entries():
            if isinstance(entry, ValueEntry) or entry.kind in BYTE_KINDS:
                entries[entry.key] = BytesStorageMetadata()
                continue
            storing = tensor_ids[entry.key if entry.alias_of is None else entry.alias_of]
            chunks = ChunkColumns(all_lo, all_length, bounds[storing], bounds[storing + 1], len(entry.shape))
            entries[entry.key] = TensorStorageMetadata(
                TensorProperties(torch_dtype(entry.dtype), torch.strided, entry.requires_grad),
                torch.Size(entry.shape),
                LazyList(chunks),
                entry.alias_of,
                entry.kind,
                None if entry.quantizer is None else self.quantizer(entry),
            )
        paths = self.paths()
        kept = decode_value(self.manifest.metadata, key="user_metadata", rebuild=rebuilt)
        user_metadata, planner_data, versions = split_planner_data(kept, paths)
        return Metadata(
            entries,
            planner_data=planner_data,
            storage_meta=StorageMeta(checkpoint_id=self.directory, save_id=self.manifest.attempt),
            version=CURRENT_DCP_VERSION,
            user_metadata=user_metadata,
            paths=paths,
            versions=versions,
            containers=stored_containers(kept),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CatalogBytes:
    """What a catalog is made of, as it is in its files: manifest and index, or what stands for them in another format.

    ``most_blocks`` is at least the number of all blocks: for who makes room. ``decoded`` is the manifest where somebody
    had to look into it.
    """

    manifest: bytes
    index: bytes
    most_blocks: int = 0
    decoded: Manifest | None = None


def read_catalog(path: str | os.PathLike[str]) -> Catalog:
    """The checkpoint published at ``path``.

    NotFoundError when there is none, CorruptError when manifest or index are not what was written. Where a saver
    replaced the checkpoint between reading the one and the other, the new one is read.
    """
    return decode_catalog(path, read_catalog_bytes(path))


def read_catalog_bytes(path: str | os.PathLike[str]) -> CatalogBytes:
    """The two files of the checkpoint that is published at ``path``, which belong together."""
    directory = posix.absolute(path)
    while True:
        data = _read_manifest_bytes(directory)
        manifest = decode_manifest(data, path=os.path.join(directory, MANIFEST_NAME))
        try:
            index = _read_index_bytes(directory, manifest)
            # The index has a byte or more for every block.
            return CatalogBytes(manifest=data, index=index, most_blocks=len(index), decoded=manifest)
        except CorruptError:
            if not was_replaced(directory, manifest.attempt):
                raise


def decode_catalog(path: str | os.PathLike[str], data: CatalogBytes) -> Catalog:
    """The checkpoint at ``path``, of which these are manifest and index; CorruptError for what nobody wrote."""
    directory = posix.absolute(path)
    manifest = data.decoded or decode_manifest(data.manifest, path=os.path.join(directory, MANIFEST_NAME))
    index_path = os.path.join(directory, manifest.index.name)
    index = decode_index(data.index, path=index_path)
    check_index(index, files=manifest.files, tensors=manifest.tensors, path=index_path)
    return Catalog(directory=directory, manifest=manifest, index=index)


def was_replaced(directory: str, attempt: str) -> bool:
    """Whether what is published in ``directory`` now is another checkpoint than that of ``attempt``, or nothing."""
    try:
        return read_manifest(directory).attempt != attempt
    except (CorruptError, StorageError) as error:
        return isinstance(error, StorageError) and error.errno == errno.ENOENT


def read_published(directory: str) -> Manifest:
    """The manifest of the checkpoint in ``directory``, checked; NotFoundError when there is none."""
    return decode_manifest(_read_manifest_bytes(directory), path=os.path.join(directory, MANIFEST_NAME))


def _read_manifest_bytes(directory: str) -> bytes:
    try:
        return read_manifest_bytes(directory)
    except StorageError as error:
        if error.errno == errno.ENOTDIR and posix.exists(directory):
            raise NotACheckpointError(_is_a_file(directory)) from error
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        raise _nothing_there(directory) from error


_REMAINS = {MANIFEST_NAME, METRICS_NAME, PINNED_NAME}
"""What a deletion in a store leaves, or leaves when it is cut off: a manifest that says so, and what was added."""

_AS_IT_IS = "holdfast.load, open and convert find that out from the path and read it as it is"


def _nothing_there(directory: str) -> NotFoundError:
    try:
        names = set(files.list_names(directory))
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR) and is_store_url(directory):
            raise
        nothing = "nothing is there" if is_store_url(directory) else "no such directory"
        if is_store_url(directory) and files.size_of(directory) is not None:
            return NotACheckpointError(f"{directory!r} is one object; a checkpoint is a folder of them")
        return NotFoundError(f"there is no checkpoint at {directory!r}: {nothing}")
    if MANIFEST_NAME in names and not names - _REMAINS:
        return NotFoundError(f"there is no checkpoint at {directory!r}: it was deleted")
    # What a killed save has left does not make it something else: whoever resumes starts fresh.
    if all(name.startswith(("data-", "index-", "manifest-")) or is_of_a_save(name) for name in names - _REMAINS):
        return NotFoundError(f"{directory!r} holds no finished checkpoint: no save to it was published")
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return NotACheckpointError(f"{directory!r} is a Hugging Face folder, not a native checkpoint; {_AS_IT_IS}")
    below = next((name for name in sorted(names) if files.exists(os.path.join(directory, name, MANIFEST_NAME))), None)
    advice = "" if below is None else f"; there are checkpoints below it, such as {os.path.join(directory, below)!r}"
    return NotACheckpointError(f"{directory!r} is not a checkpoint: it has no {MANIFEST_NAME}{advice}")


def _is_a_file(path: str) -> str:
    kind = kind_of_file(path)
    if kind is None:
        return f"{path!r} is a file; a checkpoint is a directory"
    conversion = f"make one of it: holdfast convert {shlex.quote(path)} DST --to native"
    return f"{path!r} is a {kind} file, not a checkpoint; {conversion if kind == '.pt' else _AS_IT_IS}"


def kind_of_file(path: str) -> Literal[".pt", ".safetensors"] | None:
    """What the file ``path`` seems to be, by its first bytes: what torch.save wrote, or safetensors."""
    status = posix.file_status(path)
    if status is None or not stat.S_ISREG(status.st_mode):
        return None  # to open a pipe might take for ever
    with posix.open_stream(path, "rb") as stream, posix.reporting("read", path):
        start: bytes = stream.read(9)
    if start.startswith((b"PK\x03\x04", b"\x80\x02")):  # an archive, or before torch 1.6 a pickle
        return ".pt"
    is_header = start[8:] == b"{" and int.from_bytes(start[:8], "little") <= MAX_HEADER_BYTES
    return ".safetensors" if is_header else None


def _read_table(path: str, entry: IndexEntry) -> bytes:
    """The bytes of the file of ``entry``, no more than there should be."""
    try:
        return files.read_whole(path, limit=entry.bytes)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        raise missing(path) from error


def _read_index_bytes(directory: str, manifest: Manifest) -> bytes:
    entry = manifest.index
    path = os.path.join(directory, entry.name)
    data = _read_table(path, entry)
    if len(data) != entry.bytes or to_hex(digest(data)) != entry.digest:
        raise CorruptError(f"{path!r} is damaged: not the index that was written; use another checkpoint", path=path)
    return data
