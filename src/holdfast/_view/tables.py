"""A checkpoint as columns, one row for each tensor, whatever its format: made once, then asked many times.

Of millions of chunks there are columns too, as narrow as their numbers allow, so that they stay in memory. A part with
one tensor can be opened to read from it; what is read is verified as far as the format goes.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import math
import os
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from holdfast._checkpoint import Checkpoint, open, reader_for
from holdfast._huggingface.reader import HuggingFaceReader
from holdfast._io import files, posix
from holdfast._io.urls import is_store_url
from holdfast._look.statistics import TensorStatistics
from holdfast._native.catalog import Catalog
from holdfast._native.index import ChunkIndex
from holdfast._native.manifest import BYTE_KINDS
from holdfast._native.publish import MANIFEST_NAME
from holdfast._native.reader import CatalogReader
from holdfast._process import collector_paused
from holdfast._torch_codec.metadata_file import METADATA_NAME, StorageInfo, find_place
from holdfast._values.digest import block_counts
from holdfast._values.dtypes import DTYPES
from holdfast._values.lazy import cached_property
from holdfast.errors import CorruptError
from holdfast.metadata import Metadata, MetadataIndex, TensorStorageMetadata, chunk_columns

_RANK = re.compile(r"data-[0-9a-zA-Z_-]{1,64}-([0-9]{1,9})-[0-9]{1,9}\.safetensors|__([0-9]{1,9})_[0-9]{1,9}\.distcp")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkTable:
    """The chunks of one tensor: ``lo`` and ``length`` are [n, dimensions], the rest [n]; ``file`` counts all files."""

    lo: np.ndarray
    length: np.ndarray
    file: np.ndarray
    offset: np.ndarray
    bytes: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A data file, the rank that wrote it (-1: its name does not tell), and its bytes."""

    name: str
    rank: int
    bytes: int


class Table(abc.ABC):
    """The tensors of the checkpoint at ``path``, in the order of the state, as columns."""

    path: str
    format: str
    attempt: str
    keys: list[str]
    dtypes: list[str]
    """The names of all dtypes; ``dtype`` has their numbers."""
    dtype: np.ndarray
    nbytes: np.ndarray
    elements: np.ndarray
    chunks: np.ndarray
    storing: np.ndarray
    """The row that holds the bytes of each row: its own, or that of the tensor that it is tied to."""
    files: list[StoredFile]
    bytes: int
    saved_at: str | None = None
    written_by: str | None = None
    ranks: int | None = None
    has_digests: bool = False
    statistics: Mapping[str, TensorStatistics] | None = None
    """Those that were stored when it was saved."""

    @abc.abstractmethod
    def shape(self, row: int) -> tuple[int, ...]: ...

    @abc.abstractmethod
    def kind(self, row: int) -> str:
        """What it was: "tensor", or "numpy"."""

    @abc.abstractmethod
    def requires_grad(self, row: int) -> bool | None: ...

    @abc.abstractmethod
    def chunk_table(self, row: int) -> ChunkTable: ...

    @abc.abstractmethod
    def values(self) -> Sequence[tuple[str, str, object]]:
        """Key, kind and typed JSON of each value; the kind is "" where there is JSON, else says what it is."""

    @abc.abstractmethod
    def user_metadata(self) -> object:
        """The typed JSON, or for torch's format a dict, of what the user kept beside the state."""

    @abc.abstractmethod
    def opened(self, row: int) -> Checkpoint:
        """A checkpoint that holds this tensor, under its key; the caller closes it."""

    def is_tied(self, row: int) -> bool:
        return int(self.storing[row]) != row

    @cached_property
    def rows(self) -> dict[str, int]:
        """The row of each key."""
        return {key: row for row, key in enumerate(self.keys)}

    @cached_property
    def levels(self) -> Levels:
        """The tensors as a tree, by the dots in their keys."""
        order = sorted(range(len(self.keys)), key=self.keys.__getitem__)
        own = np.where(self.storing == np.arange(len(self.keys)), self.nbytes, 0)
        return Levels(keys=[self.keys[row] for row in order], bytes=own[order], rows=np.array(order, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """What is below one name of a level: ``first`` to ``stop`` of the sorted keys, and maybe the one key ``leaf``."""

    name: str
    leaf: int | None
    first: int
    stop: int
    bytes: int

    @property
    def tensors(self) -> int:
        return self.stop - self.first + (self.leaf is not None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Levels:
    """Sorted keys as a tree. ``bytes`` of each, and the ``rows`` that they have elsewhere."""

    keys: list[str]
    bytes: np.ndarray
    rows: np.ndarray
    _sums: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sums", np.concatenate([[0], np.cumsum(self.bytes)]))

    def below(self, under: str) -> list[Branch]:
        """What is right below ``under``, a text that ends with a dot, or is empty: the largest first."""
        first, stop = self._range(under)
        leaves: dict[str, int] = {}
        ranges: dict[str, tuple[int, int]] = {}
        while first < stop:
            name, dot, _ = self.keys[first][len(under) :].partition(".")
            if dot:
                ranges[name] = first, bisect_left(self.keys, f"{under}{name}/", first, stop)
                first = ranges[name][1]
            else:
                leaves[name] = first
                first += 1
        found = [self._branch(name, leaves.get(name), *ranges.get(name, (0, 0))) for name in {**leaves, **ranges}]
        return sorted(found, key=lambda each: (-each.bytes, each.name.zfill(20) if each.name.isdigit() else each.name))

    def _range(self, under: str) -> tuple[int, int]:
        # A slash is the character after the dot.
        return (
            (bisect_left(self.keys, under), bisect_left(self.keys, f"{under[:-1]}/")) if under else (0, len(self.keys))
        )

    def _branch(self, name: str, leaf: int | None, first: int, stop: int) -> Branch:
        nbytes = int(self._sums[stop] - self._sums[first]) + (0 if leaf is None else int(self.bytes[leaf]))
        return Branch(name=name, leaf=leaf, first=first, stop=stop, bytes=nbytes)


def identity_at(path: str) -> tuple[int, ...]:
    """What the checkpoint that is at ``path`` now has, and no other one; () where there is none.

    A link that a reader makes to its files changes nothing.
    """
    if is_store_url(path):
        return files.identity_of(path)
    if "://" in path:
        return (0,)  # nobody tells, until it is read
    for name in (MANIFEST_NAME, METADATA_NAME):
        status = posix.file_status(os.path.join(path, name))
        if status is not None:
            return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
    return files.identity_of(path)


@collector_paused
def read_table(path: str) -> Table:
    """The checkpoint at ``path``, of any format, read and checked; errors are those of ``holdfast.open``."""
    reader = reader_for(path)
    if isinstance(reader, CatalogReader):
        return CatalogTable(reader)
    with open(path) as checkpoint:
        return TorchTable(path, checkpoint.metadata)


def give_memory_back() -> None:
    """Let the system have what was freed: reading took much more than stays, and a server lives long."""
    with contextlib.suppress(OSError, AttributeError):  # not every C library can
        ctypes.CDLL(None).malloc_trim(0)


def stored_statistics(path: str) -> Mapping[str, TensorStatistics] | None:
    """Those that were stored when the checkpoint at ``path`` was saved; None where nobody did."""
    return None


def _narrow(column: np.ndarray) -> np.ndarray:
    return column.astype(np.min_scalar_type(int(column.max()) if column.size else 0))


def _numbered(names: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """The different ``names``, and which of them each is."""
    numbers: dict[str, int] = {}
    of = np.fromiter((numbers.setdefault(name, len(numbers)) for name in names), dtype=np.int64, count=len(names))
    return list(numbers), of


def _rank_of(name: str) -> int:
    match = _RANK.fullmatch(name)
    return -1 if match is None else int(match[1] or match[2])


class CatalogTable(Table):
    """Made from manifest and index, or from the headers of a Hugging Face folder; no object for each chunk."""

    def __init__(self, reader: CatalogReader) -> None:
        catalog = reader.catalog
        manifest, index = catalog.manifest, catalog.index
        self.path, self.attempt = reader.path, manifest.attempt
        self.format = "huggingface" if isinstance(reader, HuggingFaceReader) else "native"
        self._entries = [entry for entry in manifest.tensors if entry.kind not in BYTE_KINDS]
        self._blobs = [entry for entry in manifest.tensors if entry.kind in BYTE_KINDS]
        self._links, self._manifest, self._directory = catalog.links, manifest, catalog.directory
        is_row = np.fromiter((entry.kind not in BYTE_KINDS for entry in manifest.tensors), bool, len(manifest.tensors))
        numbers = np.flatnonzero(is_row)
        storing = catalog.storing_ids[:-1][numbers]
        self._first, self._stop = catalog.row_bounds[storing], catalog.row_bounds[storing + 1]
        self.keys = [entry.key for entry in self._entries]
        self.dtypes, self.dtype = _numbered([entry.dtype for entry in self._entries])
        self.storing = np.cumsum(is_row)[storing] - 1
        ends = np.concatenate([[0], np.cumsum(index.bytes)])
        self.nbytes = ends[self._stop] - ends[self._first]
        itemsizes = np.array([DTYPES[name].itemsize for name in self.dtypes] or [1], dtype=np.int64)
        self.elements = self.nbytes // itemsizes[self.dtype]
        self.chunks = self._stop - self._first
        self.files = [StoredFile(name=each.name, rank=_rank_of(each.name), bytes=each.bytes) for each in manifest.files]
        self.bytes = sum(each.bytes for each in manifest.files) + manifest.index.bytes
        self.has_digests = catalog.has_digests
        writer = manifest.writer
        self.saved_at = writer.saved_at
        if writer.holdfast:
            self.written_by = f"holdfast {writer.holdfast} / torch {writer.torch}"
            self.ranks = writer.world_size
        self._blob_bytes = [
            int(ends[catalog.rows_of(each.key).stop] - ends[catalog.rows_of(each.key).start]) for each in self._blobs
        ]
        self._first_block = catalog.first_block[self._first]
        columns = {name: getattr(index, name) for name in ("file", "offset", "bytes", "lo", "length")}
        self._columns: Mapping[str, np.ndarray] = {name: _narrow(column) for name, column in columns.items()}
        # A copy, because it may be a view of the whole file; zeros without digests take no memory.
        self._digests = index.digests.copy() if catalog.has_digests else index.digests
        self._reader = reader
        reader.close()  # which forgets the wide columns

    def shape(self, row: int) -> tuple[int, ...]:
        return self._entries[row].shape

    def kind(self, row: int) -> str:
        return self._entries[row].kind or "tensor"

    def requires_grad(self, row: int) -> bool | None:
        return None if self.format == "huggingface" else self._entries[row].requires_grad

    def chunk_table(self, row: int) -> ChunkTable:
        rows, dimensions = slice(int(self._first[row]), int(self._stop[row])), len(self._entries[row].shape)
        columns = {name: column[rows].astype(np.int64) for name, column in self._columns.items()}
        for name in ("lo", "length"):
            columns[name] = columns[name][:, :dimensions]
        return ChunkTable(**columns)

    def values(self) -> Sequence[tuple[str, str, object]]:
        runs = (
            (each.key, f"{each.kind}, {size:,} bytes", None)
            for each, size in zip(self._blobs, self._blob_bytes, strict=True)
        )
        return [*((each.key, "", each.value) for each in self._manifest.values), *runs]

    def user_metadata(self) -> object:
        return self._manifest.metadata

    def opened(self, row: int) -> Checkpoint:
        entry, chunks = self._entries[row], self.chunk_table(row)
        blocks = block_counts(chunks.bytes)
        first = int(self._first_block[row])
        index = ChunkIndex(
            tensor=np.zeros(len(chunks.file), dtype=np.int64),
            digests=self._digests[first : first + int(blocks.sum())],
            **{name: getattr(chunks, name) for name in ("file", "offset", "bytes", "lo", "length")},
        )
        alone = msgspec.structs.replace(entry, alias_of=None, path=None)
        manifest = msgspec.structs.replace(self._manifest, tensors=(alone,), values=(), metadata=None)
        part = Catalog(
            directory=self._directory, manifest=manifest, index=index, has_digests=self.has_digests, links=self._links
        )
        return Checkpoint(self._reader.part(part))


class TorchTable(Table):
    """Made from torch's metadata, which has an object for each chunk anyway."""

    format = "torch"

    def __init__(self, path: str, metadata: Metadata) -> None:
        self.path = path
        self.attempt = (metadata.storage_meta.save_id if metadata.storage_meta else None) or ""
        self._places = {
            index: place for index, place in (metadata.storage_data or {}).items() if isinstance(place, StorageInfo)
        }
        stored = metadata.state_dict_metadata
        self._entries = {key: each for key, each in stored.items() if isinstance(each, TensorStorageMetadata)}
        self._values = [key for key in stored if key not in self._entries]
        entries = list(self._entries.values())
        self.keys = list(self._entries)
        self.dtypes, self.dtype = _numbered([str(each.properties.dtype).removeprefix("torch.") for each in entries])
        count = len(entries)
        self.elements = np.fromiter((math.prod(each.size) for each in entries), np.int64, count)
        self.nbytes = self.elements * np.fromiter((each.properties.dtype.itemsize for each in entries), np.int64, count)
        self.chunks = np.fromiter((len(each.chunks) for each in entries), np.int64, count)
        self.storing = np.arange(count)
        sizes: dict[str, int] = {}
        for place in self._places.values():
            sizes[place.relative_path] = sizes.get(place.relative_path, 0) + place.length
        self.files = [StoredFile(name=name, rank=_rank_of(name), bytes=size) for name, size in sizes.items()]
        self._file_numbers = {name: number for number, name in enumerate(sizes)}
        self.bytes = sum(sizes.values())
        self.written_by = f"torch.distributed.checkpoint {metadata.version or 'of an unknown version'}"
        self.ranks = len({each.rank for each in self.files}) if all(each.rank >= 0 for each in self.files) else None

    def shape(self, row: int) -> tuple[int, ...]:
        return tuple(self._entries[self.keys[row]].size)

    def kind(self, row: int) -> str:
        return self._entries[self.keys[row]].kind or "tensor"

    def requires_grad(self, row: int) -> bool | None:
        return self._entries[self.keys[row]].properties.requires_grad

    def chunk_table(self, row: int) -> ChunkTable:
        entry, key = self._entries[self.keys[row]], self.keys[row]
        columns = chunk_columns(entry.chunks, len(entry.size))
        found = [find_place(self._places, key, lo) for lo in columns.lo.tolist()]
        places = [(self._file_numbers[each.relative_path], each.offset, each.length) for each in found if each]
        if len(places) < len(found):
            raise CorruptError(f"the metadata of {self.path!r} does not say where all of {key[:200]!r} is", key=key)
        file, offset, nbytes = np.array(places, dtype=np.int64).reshape(-1, 3).T
        return ChunkTable(lo=columns.lo, length=columns.length, file=file, offset=offset, bytes=nbytes)

    def values(self) -> Sequence[tuple[str, str, object]]:
        places = ((key, self._places.get(MetadataIndex(key))) for key in self._values)
        return [(key, "object" if place is None else f"object, {place.length:,} bytes", None) for key, place in places]

    def user_metadata(self) -> object:
        return None

    def opened(self, row: int) -> Checkpoint:
        return open(self.path)
