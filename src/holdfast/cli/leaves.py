"""What a checkpoint holds, key by key and in total, as plain values for the commands to print.

Made from manifest and index, or from torch's metadata, alone; never reads a data file.
"""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from holdfast._checkpoint import reader_for
from holdfast._io import posix
from holdfast._native.catalog import Catalog, read_catalog, split_planner_data
from holdfast._native.manifest import TensorEntry, ValueEntry
from holdfast._native.paths import decode_path
from holdfast._native.publish import MANIFEST_NAME
from holdfast._native.values import decode_value, encode_value
from holdfast._state.nested import Path, restorable_paths
from holdfast._torch_codec.metadata_file import StorageInfo, find_place
from holdfast._torch_format.file_systems import RemoteFileSystem
from holdfast._torch_format.reader import FileSystemReader
from holdfast._values.dtypes import DTYPES
from holdfast.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from holdfast.planner_helpers import check_tiling


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLeaf:
    """A leaf with data: a tensor, or another ``kind`` of thing that is stored like one, in the index ``rows``."""

    key: str
    path: Path
    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    alias_of: str | None
    rows: range


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLeaf:
    """A leaf that the manifest itself holds, as typed JSON."""

    key: str
    path: Path
    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectLeaf:
    """A leaf that is pickled in a data file, in ``bytes`` bytes; what it is shows only when it is loaded."""

    key: str
    path: Path
    bytes: int


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


Leaf = StoredLeaf | ValueLeaf | ObjectLeaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All that the commands show of a checkpoint; ``user_metadata`` is typed JSON, None where the format has none."""

    leaves: list[Leaf]
    totals: Totals
    chunks_of: Callable[[StoredLeaf], list[StoredChunk]]
    user_metadata: object = None


def contents_of(path: str | os.PathLike[str], pattern: str | None = None) -> Contents:
    """What the checkpoint at ``path`` holds; with a ``pattern``, the leaves whose key it matches."""
    reader = reader_for(path)
    if isinstance(reader, FileSystemReader):
        return _torch_contents(reader, pattern)
    catalog = read_catalog(path)
    user_metadata, _, _ = split_planner_data(decode_value(catalog.manifest.metadata, key="user_metadata"), {})
    return Contents(
        leaves=leaves_of(catalog, pattern),
        totals=totals_of(catalog),
        chunks_of=partial(chunks_of, catalog),
        user_metadata=encode_value(user_metadata, key="user_metadata"),
    )


# --- native ---------------------------------------------------------------------------------------------------------


def leaves_of(catalog: Catalog, pattern: str | None = None) -> list[Leaf]:
    """The leaves in the order of the state; with a ``pattern``, those whose key it matches."""
    bounds = catalog.row_bounds.tolist()
    tensors = iter(enumerate(catalog.manifest.tensors))
    values = {entry.position: entry for entry in catalog.manifest.values}
    leaves: list[Leaf] = []
    for position in range(len(catalog.manifest.tensors) + len(values)):
        value = values.get(position)
        number, entry = (0, value) if value is not None else next(tensors)
        if pattern is not None and not fnmatch.fnmatchcase(entry.key, pattern):
            continue
        leaves.append(_value(entry) if isinstance(entry, ValueEntry) else _stored(catalog, number, entry, bounds))
    return leaves


def _value(entry: ValueEntry) -> ValueLeaf:
    return ValueLeaf(key=entry.key, path=decode_path(entry.key, entry.path), value=entry.value)


def _stored(catalog: Catalog, number: int, entry: TensorEntry, bounds: list[int]) -> StoredLeaf:
    storing = number if entry.alias_of is None else catalog.tensor_ids[entry.alias_of]
    return StoredLeaf(
        key=entry.key,
        path=decode_path(entry.key, entry.path),
        kind=entry.kind or "tensor",
        dtype=entry.dtype,
        shape=entry.shape,
        bytes=math.prod(entry.shape) * DTYPES[entry.dtype].itemsize,
        alias_of=entry.alias_of,
        rows=range(bounds[storing], bounds[storing + 1]),
    )


def chunks_of(catalog: Catalog, leaf: StoredLeaf) -> list[StoredChunk]:
    """The chunks that hold ``leaf``, in order."""
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


def totals_of(catalog: Catalog) -> Totals:
    """The checkpoint as a whole; bytes and files are all that it has on disk."""
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
    )


# --- torch's own format ---------------------------------------------------------------------------------------------


def _torch_contents(reader: FileSystemReader, pattern: str | None) -> Contents:
    metadata = reader.read_metadata()
    check_tiling(metadata)
    places: dict[MetadataIndex, StorageInfo] = {
        index: place for index, place in (metadata.storage_data or {}).items() if isinstance(place, StorageInfo)
    }
    return Contents(
        leaves=list(_torch_leaves(metadata, places, pattern)),
        totals=_torch_totals(reader, metadata, places),
        chunks_of=partial(_torch_chunks, metadata, places),
    )


def _torch_leaves(metadata: Metadata, places: dict[MetadataIndex, StorageInfo], pattern: str | None) -> Iterator[Leaf]:
    paths = restorable_paths(metadata)
    for key, stored in metadata.state_dict_metadata.items():
        if pattern is not None and not fnmatch.fnmatchcase(key, pattern):
            continue
        path = paths.get(key, (key,))
        if isinstance(stored, TensorStorageMetadata):
            dtype = stored.properties.dtype
            yield StoredLeaf(
                key=key,
                path=path,
                kind="tensor",
                dtype=str(dtype).removeprefix("torch."),
                shape=tuple(stored.size),
                bytes=math.prod(stored.size) * dtype.itemsize,
                alias_of=None,
                rows=range(len(stored.chunks)),
            )
        else:
            place = places.get(MetadataIndex(key))
            yield ObjectLeaf(key=key, path=path, bytes=0 if place is None else place.length)


def _torch_chunks(metadata: Metadata, places: dict[MetadataIndex, StorageInfo], leaf: StoredLeaf) -> list[StoredChunk]:
    stored = metadata.state_dict_metadata[leaf.key]
    assert isinstance(stored, TensorStorageMetadata)
    found = ((chunk, find_place(places, leaf.key, chunk.offsets)) for chunk in stored.chunks)
    return [
        StoredChunk(
            lo=tuple(chunk.offsets),
            length=tuple(chunk.sizes),
            file=place.relative_path,
            offset=place.offset,
            bytes=place.length,
        )
        for chunk, place in found
        if place is not None
    ]


def _torch_totals(reader: FileSystemReader, metadata: Metadata, places: dict[MetadataIndex, StorageInfo]) -> Totals:
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
