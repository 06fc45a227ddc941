"""What a checkpoint holds, key by key and in total, as plain values for the commands to print.

Made from manifest and index alone; never reads a data file.
"""

from __future__ import annotations

import fnmatch
import math
import os
from dataclasses import dataclass

from holdfast._io import posix
from holdfast._native.catalog import Catalog
from holdfast._native.manifest import TensorEntry, ValueEntry
from holdfast._native.publish import MANIFEST_NAME
from holdfast._native.tree import decode_path
from holdfast._state.paths import Path
from holdfast._values.dtypes import DTYPES


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
class StoredChunk:
    """A chunk: which box of its tensor, and which bytes of which file."""

    lo: tuple[int, ...]
    length: tuple[int, ...]
    file: str
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The checkpoint as a whole; ``tied`` of the ``tensors`` share the data of others."""

    tensors: int
    tied: int
    values: int
    bytes: int
    files: int
    format_version: int
    holdfast: str
    torch: str
    python: str
    world_size: int
    attempt: str


Leaf = StoredLeaf | ValueLeaf


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
