"""A checkpoint as columns, one row for each tensor, whatever its format: made once, then asked many times.

Of millions of chunks there are columns too, as narrow as their numbers allow, so that they stay in memory. A part with
one tensor can be opened to read from it; what is read is verified as far as the format goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from holdfast._checkpoint import Checkpoint, open, reader_for
from holdfast._huggingface.reader import HuggingFaceReader
from holdfast._io import files, posix
from holdfast._io.urls import is_store_url
from holdfast._native.catalog import Catalog
from holdfast._native.index import ChunkIndex
from holdfast._native.manifest import BYTE_KINDS, FileEntry, IndexEntry, Manifest, TensorEntry, WriterEntry
from holdfast._native.publish import MANIFEST_NAME
from holdfast._native.reader import CatalogReader
from holdfast._process import collector_paused
from holdfast._torch_codec.metadata_file import METADATA_NAME, StorageInfo, find_place
from holdfast._values.digest import block_counts
from holdfast._values.dtypes import DTYPES
from holdfast._values.lazy import cached_property
from holdfast._values.statistics import TensorStatistics
from holdfast.errors import CheckpointError, CorruptError
from holdfast.metadata import Metadata, MetadataIndex, TensorStorageMetadata, chunk_columns
from holdfast.planner import padded

_RANK = re.compile(r"data-[0-9a-zA-Z_-]{1,64}-([0-9]{1,9})-[0-9]{1,9}\.safetensors|__([0-9]{1,9})_[0-9]{1,9}\.distcp")


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
        format = "huggingface" if isinstance(reader, HuggingFaceReader) else "native"
        table = Table(reader.path, format, reader.catalog, lambda part: Checkpoint(reader.part(part)))
        reader.close()  # which forgets the wide columns
        return table
    with open(path) as checkpoint:
        return Table(path, "torch", _torch_catalog(path, checkpoint.metadata), lambda part: open(path))


def give_memory_back() -> None:
    """Let the system have what was freed: reading took much more than stays, and a server lives long."""
    with contextlib.suppress(OSError, AttributeError):  # not every C library can
        ctypes.CDLL(None).malloc_trim(0)


def _narrow(column: np.ndarray) -> np.ndarray:
    return column.astype(np.min_scalar_type(int(column.max()) if column.size else 0))


def _rank_of(name: str) -> int:
    match = _RANK.fullmatch(name)
    return -1 if match is None else int(match[1] or match[2])


def _kept(catalog: Catalog) -> tuple[Mapping[str, TensorStatistics] | None, str]:
    """The numbers of tensors that the save kept, if it did; and what is wrong with them, which harms nothing else."""
    try:
        return catalog.statistics(), ""
    except CheckpointError as error:
        return None, error.message


class Table:
    """The tensors of the checkpoint at ``path``, in the order of the state; made of its catalog, which need not stay.

    ``keys``, ``dtype`` (a number in ``dtypes``), ``nbytes``, ``elements`` and ``chunks`` have an entry for each row. So
    has ``storing``: the row that holds the bytes, its own or that of the tensor that it is tied to.
    """

    def __init__(self, path: str, format: str, catalog: Catalog, open_part: Callable[[Catalog], Checkpoint]) -> None:
        self.path, self.format = path, format
        self.manifest, index = catalog.manifest, catalog.index
        self.has_digests = catalog.has_digests
        is_row = np.array([entry.kind not in BYTE_KINDS for entry in self.manifest.tensors], dtype=bool)
        numbers = np.flatnonzero(is_row)
        storing = catalog.storing_ids[:-1][numbers]
        self.entries = [entry for entry in self.manifest.tensors if entry.kind not in BYTE_KINDS]
        self._first, self._stop = catalog.row_bounds[storing], catalog.row_bounds[storing + 1]
        self.storing = np.cumsum(is_row)[storing] - 1
        self.keys = [entry.key for entry in self.entries]
        self.dtypes = list(dict.fromkeys(entry.dtype for entry in self.entries))
        of = {name: number for number, name in enumerate(self.dtypes)}
        self.dtype = np.array([of[entry.dtype] for entry in self.entries], dtype=np.int64)
        ends = np.concatenate([[0], np.cumsum(index.bytes)])
        self.nbytes = ends[self._stop] - ends[self._first]
        self.elements = self.nbytes // np.array([DTYPES[name].itemsize for name in self.dtypes] or [1])[self.dtype]
        self.chunks = self._stop - self._first
        runs = (
            (each.key, each.kind, catalog.rows_of(each.key))
            for each in self.manifest.tensors
            if each.kind in BYTE_KINDS
        )
        self.runs = [(key, f"{kind}, {ends[rows.stop] - ends[rows.start]:,} bytes") for key, kind, rows in runs]
        self.file_ranks = np.array([_rank_of(file.name) for file in self.manifest.files], dtype=np.int64)
        self.bytes = sum(file.bytes for file in self.manifest.files) + self.manifest.index.bytes
        self.statistics, self.statistics_problem = _kept(catalog)
        self._first_block = catalog.first_block[self._first]
        columns = {name: getattr(index, name) for name in ("file", "offset", "bytes", "lo", "length")}
        self._columns = {name: _narrow(column) for name, column in columns.items()}
        # A copy, because it may be a view of the whole file; zeros without digests take no memory.
        self._digests = index.digests.copy() if catalog.has_digests else index.digests
        self._directory, self._links, self._open_part = catalog.directory, catalog.links, open_part

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

    def chunk_table(self, row: int) -> ChunkIndex:
        """The chunks of one tensor, as if it were the only one."""
        rows, dimensions = slice(int(self._first[row]), int(self._stop[row])), len(self.entries[row].shape)
        columns = {name: column[rows].astype(np.int64) for name, column in self._columns.items()}
        for name in ("lo", "length"):
            columns[name] = columns[name][:, :dimensions]
        first = int(self._first_block[row])
        digests = self._digests[first : first + int(block_counts(columns["bytes"]).sum())]
        return ChunkIndex(tensor=np.zeros(len(columns["file"]), dtype=np.int64), digests=digests, **columns)

    def opened(self, row: int) -> Checkpoint:
        """A checkpoint with this tensor, under its key; in torch's format with all others too. The caller closes it."""
        alone = msgspec.structs.replace(self.entries[row], alias_of=None, path=None)
        part = Catalog(
            directory=self._directory,
            manifest=msgspec.structs.replace(self.manifest, tensors=(alone,), values=(), metadata=None),
            index=self.chunk_table(row),
            has_digests=self.has_digests,
            links=self._links,
        )
        return self._open_part(part)


def _torch_catalog(path: str, metadata: Metadata) -> Catalog:
    """What torch's metadata says, as a catalog to look at. Bytes are those of elements, and values are runs."""
    places = {index: place for index, place in (metadata.storage_data or {}).items() if isinstance(place, StorageInfo)}
    sizes: dict[str, int] = {}
    for place in places.values():
        sizes[place.relative_path] = sizes.get(place.relative_path, 0) + place.length
    numbers = {name: number for number, name in enumerate(sizes)}
    entries: list[TensorEntry] = []
    chunks: list[tuple[int, int, int, int, list[int], list[int]]] = []
    for number, (key, stored) in enumerate(metadata.state_dict_metadata.items()):
        boxes: list[tuple[list[int], list[int]]] = [([], [])]
        entry = TensorEntry(key=key, dtype="uint8", shape=(), kind="opaque")
        if isinstance(stored, TensorStorageMetadata):
            columns, dtype = chunk_columns(stored.chunks, len(stored.size)), str(stored.properties.dtype)
            boxes = list(zip(columns.lo.tolist(), columns.length.tolist(), strict=True))
            shape, has_gradient = tuple(stored.size), stored.properties.requires_grad
            entry = TensorEntry(key=key, dtype=dtype.removeprefix("torch."), shape=shape, requires_grad=has_gradient)
        entries.append(entry)
        for lo, length in boxes:
            at = find_place(places, key, lo) if entry.kind is None else places.get(MetadataIndex(key))
            if at is None:
                raise CorruptError(f"the metadata of {path!r} does not say where all of {key[:200]!r} is", key=key)
            nbytes = at.length if entry.kind else math.prod(length) * DTYPES[entry.dtype].itemsize
            chunks.append((number, numbers[at.relative_path], at.offset, nbytes, lo, length))
    tensor, file, offset, size = np.array([row[:4] for row in chunks], dtype=np.int64).reshape(-1, 4).T
    index = ChunkIndex(
        tensor=tensor,
        file=file,
        offset=offset,
        bytes=size,
        lo=padded([row[4] for row in chunks], fill=0),
        length=padded([row[5] for row in chunks], fill=1),
        digests=np.zeros(0, dtype=np.uint64),
    )
    manifest = Manifest(
        attempt=(metadata.storage_meta.save_id if metadata.storage_meta else None) or "",
        writer=WriterEntry(holdfast="", torch=metadata.version or "unknown", python="", world_size=0),
        files=tuple(FileEntry(name=name, bytes=nbytes, header=0, digest="") for name, nbytes in sizes.items()),
        index=IndexEntry(name="", bytes=0, digest=""),
        tensors=tuple(entries),
        values=(),
    )
    return Catalog(directory=path, manifest=manifest, index=index, has_digests=False)
