"""What a checkpoint holds, key by key and in total, as plain values for ``holdfast show`` to print.

Made from manifest and index, from torch's metadata, or from the headers of a folder, alone; never reads data.
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from holdfast._checkpoint import is_hugging_face, is_torch_format, torch_reader, verify
from holdfast._huggingface.folder import decode_folder, read_folder
from holdfast._io import posix
from holdfast._native.catalog import Catalog, read_catalog
from holdfast._native.manifest import TensorEntry, ValueEntry
from holdfast._native.paths import decode_path, split_planner_data
from holdfast._native.publish import MANIFEST_NAME, format_at
from holdfast._native.values import decode_value, encode_value
from holdfast._torch_codec.metadata_file import StorageInfo, find_place
from holdfast._torch_format.file_systems import RemoteFileSystem
from holdfast._torch_format.reader import FileSystemReader
from holdfast._values.dtypes import DTYPES
from holdfast.errors import CheckpointError
from holdfast.metadata import STORAGE_TYPES, Metadata, MetadataIndex, Path, TensorStorageMetadata, restorable_paths
from holdfast.planner_helpers import check_tiling

_Places = dict[MetadataIndex, StorageInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """What is stored under one key.

    ``kind`` is "tensor" or what else is stored as numbers, in the index ``rows``; "value" for typed JSON that the
    manifest itself holds; or "object" for a pickle in a data file, of which nothing more is known.
    """

    key: str
    path: Path
    kind: str
    bytes: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    alias_of: str | None = None
    rows: range = range(0)
    value: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """A chunk: which box of its tensor, and which bytes of which file."""

    lo: tuple[int, ...]
    length: tuple[int, ...]
    file: str
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The checkpoint as a whole; ``tied`` of the ``tensors`` share the data of others. None: the format has no such."""

    tensors: int
    tied: int
    values: int
    bytes: int
    files: int
    format_version: int | str | None = None
    holdfast: str | None = None
    torch: str | None = None
    python: str | None = None
    world_size: int | None = None
    attempt: str | None = None
    saved_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All that is shown of a checkpoint; ``user_metadata`` is typed JSON, None where the format has none."""

    leaves: list[Leaf]
    totals: Totals
    chunks_of: Callable[[Leaf], list[StoredChunk]]
    user_metadata: object = None


def contents_of(path: str | os.PathLike[str], pattern: str | None = None) -> Contents:
    """What the checkpoint at ``path`` holds, in the order of the state: all keys, or those that ``pattern`` matches."""
    if is_torch_format(path):
        return _torch_contents(torch_reader(path), pattern)
    is_folder = is_hugging_face(path)
    catalog = decode_folder(path, read_folder(path)) if is_folder else read_catalog(path)
    user_metadata, _, _ = split_planner_data(decode_value(catalog.manifest.metadata, key="user_metadata"), {})
    return Contents(
        leaves=[_leaf(catalog, entry) for entry in catalog.entries() if _matches(entry.key, pattern)],
        totals=_folder_totals(catalog) if is_folder else _totals(catalog),
        chunks_of=partial(_chunks, catalog),
        user_metadata=encode_value(user_metadata, key="user_metadata"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCheckpoint:
    """One checkpoint below a directory, by its name; ``problem`` says what is wrong with it, None that it is whole."""

    name: str
    problem: str | None
    bytes: int = 0
    saved_at: str | None = None


def steps_below(root: str) -> list[ListedCheckpoint]:
    """The checkpoints right below the directory ``root``, by the numbers in their names; [] where it is none.

    Sizes of files are looked at; no data is read.
    """
    try:
        names = posix.list_names(root)
    except CheckpointError:
        return []
    numbered = sorted(names, key=lambda name: [(part.isdigit(), part.zfill(20)) for part in re.split("([0-9]+)", name)])
    return [step for step in map(partial(_step, root), numbered) if step is not None]


def _step(root: str, name: str) -> ListedCheckpoint | None:
    path = os.path.join(root, name)
    try:
        if format_at(path) is None:
            return None
        report, totals = verify(path, level="sizes"), contents_of(path).totals
    except CheckpointError as error:
        return ListedCheckpoint(name=name, problem=error.message)
    damaged = ", ".join(report.damaged_files[:3])
    return ListedCheckpoint(
        name=name,
        problem=None if report.ok else f"damaged: {damaged}",
        bytes=totals.bytes,
        saved_at=totals.saved_at,
    )


def _matches(key: str, pattern: str | None) -> bool:
    return pattern is None or fnmatch.fnmatchcase(key, pattern)


def _leaf(catalog: Catalog, entry: TensorEntry | ValueEntry) -> Leaf:
    path = decode_path(entry.key, entry.path)
    if isinstance(entry, ValueEntry):
        return Leaf(key=entry.key, path=path, kind="value", value=entry.value)
    return Leaf(
        key=entry.key,
        path=path,
        kind=entry.kind or "tensor",
        bytes=math.prod(entry.shape) * DTYPES[entry.dtype].itemsize,
        dtype=entry.dtype,
        shape=entry.shape,
        alias_of=entry.alias_of,
        rows=catalog.rows_of(entry.key),
    )


def _chunks(catalog: Catalog, leaf: Leaf) -> list[StoredChunk]:
    index, dimensions = catalog.index, len(leaf.shape)
    return [
        StoredChunk(
            lo=tuple(index.lo[row, :dimensions].tolist()),
            length=tuple(index.length[row, :dimensions].tolist()),
            file=catalog.manifest.files[int(index.file[row])].name,
            offset=int(index.offset[row]),
            bytes=int(index.bytes[row]),
        )
        for row in leaf.rows
    ]


def _totals(catalog: Catalog) -> Totals:
    manifest, writer = catalog.manifest, catalog.manifest.writer
    status = posix.file_status(os.path.join(catalog.directory, MANIFEST_NAME))
    manifest_bytes = 0 if status is None else status.st_size
    return Totals(
        tensors=len(manifest.tensors),
        tied=sum(entry.alias_of is not None for entry in manifest.tensors),
        values=len(manifest.values),
        bytes=sum(file.bytes for file in manifest.files) + manifest.index.bytes + manifest_bytes,
        files=len(manifest.files) + 2,
        format_version=manifest.version,
        holdfast=writer.holdfast,
        torch=writer.torch,
        python=writer.python,
        world_size=writer.world_size,
        attempt=manifest.attempt,
        saved_at=writer.saved_at,
    )


def _folder_totals(catalog: Catalog) -> Totals:
    manifest = catalog.manifest
    return Totals(
        tensors=len(manifest.tensors),
        tied=0,
        values=0,
        bytes=sum(file.bytes for file in manifest.files) + manifest.index.bytes,
        files=len(manifest.files) + bool(manifest.index.name) + catalog.has_digests,
        format_version=f"safetensors {'with' if catalog.has_digests else 'without'} digests",
    )


def _torch_contents(reader: FileSystemReader, pattern: str | None) -> Contents:
    metadata = reader.read_metadata()
    check_tiling(metadata)
    paths, stored = restorable_paths(metadata), metadata.state_dict_metadata
    places: _Places = {
        index: place for index, place in (metadata.storage_data or {}).items() if isinstance(place, StorageInfo)
    }
    keys = [key for key in stored if _matches(key, pattern)]
    return Contents(
        leaves=[_torch_leaf(key, paths.get(key, (key,)), stored[key], places) for key in keys],
        totals=_torch_totals(reader, metadata, places),
        chunks_of=lambda leaf: _torch_chunks(leaf.key, stored[leaf.key], places),
    )


def _torch_leaf(key: str, path: Path, stored: STORAGE_TYPES, places: _Places) -> Leaf:
    if not isinstance(stored, TensorStorageMetadata):
        place = places.get(MetadataIndex(key))
        return Leaf(key=key, path=path, kind="object", bytes=0 if place is None else place.length)
    dtype = stored.properties.dtype
    return Leaf(
        key=key,
        path=path,
        kind="tensor",
        bytes=math.prod(stored.size) * dtype.itemsize,
        dtype=str(dtype).removeprefix("torch."),
        shape=tuple(stored.size),
        rows=range(len(stored.chunks)),
    )


def _torch_chunks(key: str, stored: STORAGE_TYPES, places: _Places) -> list[StoredChunk]:
    chunks = stored.chunks if isinstance(stored, TensorStorageMetadata) else []
    return [
        StoredChunk(
            lo=tuple(chunk.offsets),
            length=tuple(chunk.sizes),
            file=place.relative_path,
            offset=place.offset,
            bytes=place.length,
        )
        for chunk in chunks
        if (place := find_place(places, key, chunk.offsets)) is not None
    ]


def _torch_totals(reader: FileSystemReader, metadata: Metadata, places: _Places) -> Totals:
    names = {place.relative_path for place in places.values()} | set(reader.metadata_names())
    tensors = sum(isinstance(stored, TensorStorageMetadata) for stored in metadata.state_dict_metadata.values())
    meta = metadata.storage_meta
    return Totals(
        tensors=tensors,
        tied=0,
        values=len(metadata.state_dict_metadata) - tensors,
        bytes=sum(_size(reader, name) for name in names),
        files=len(names),
        format_version=f"torch {metadata.version or 'unknown'}",
        attempt=None if meta is None else meta.save_id,
    )


def _size(reader: FileSystemReader, name: str) -> int:
    path = reader.fs.concat_path(reader.path, name)
    if isinstance(reader.fs, RemoteFileSystem):
        return reader.fs.size(path) if reader.fs.exists(path) else 0
    status = posix.file_status(path)
    return 0 if status is None else status.st_size
