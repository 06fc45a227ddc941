"""The planning protocol: items, plans, and the two planner classes, under torch's names.

A plan's ``items`` is a list to everyone; while nobody has touched its elements this library works on the columns
behind it (``write_columns``, ``read_columns``), and makes objects one at a time for the planner's hooks.
"""

from __future__ import annotations

import abc
import io
import math
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast._values.lazy import LazyList, cached_property
from holdfast._values.records import Record, rebuilt
from holdfast.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    Versions,
)

__all__ = [
    "BytesIOWriteData",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
]


class WriteItemType(Enum):
    """What a write item is: a whole tensor, a piece of one, or a value."""

    TENSOR = auto()
    SHARD = auto()
    BYTE_IO = auto()


class LoadItemType(Enum):
    """What a read item is: (a piece of) a tensor, or a value."""

    TENSOR = auto()
    BYTE_IO = auto()


@dataclass(frozen=True)
class BytesIOWriteData:
    """The size of a value that is already bytes."""

    nbytes: int


@dataclass(frozen=True)
class TensorWriteData:
    """What is written of a tensor: the box, the properties, the global size.

    ``alias_of`` names the key whose memory this tensor shares whole; ``kind`` says how a value that is kept as a
    tensor is handed back.
    """

    chunk: ChunkStorageMetadata
    properties: TensorProperties
    size: torch.Size
    alias_of: str | None = None
    kind: str | None = None


@dataclass(frozen=True)
class WriteItem:
    """One thing that one rank writes."""

    index: MetadataIndex
    type: WriteItemType
    bytes_io_data: BytesIOWriteData | None = None
    tensor_data: TensorWriteData | None = None

    def tensor_storage_size(self) -> int | None:
        """Bytes of the whole tensor (not of the piece), or None for a value."""
        if self.tensor_data is None:
            return None
        return math.prod(self.tensor_data.size) * self.tensor_data.properties.dtype.itemsize


@dataclass(frozen=True)
class ReadItem:
    """One box to be read: from a stored chunk (offsets within it) into a target piece (offsets within it)."""

    type: LoadItemType
    dest_index: MetadataIndex
    dest_offsets: torch.Size
    storage_index: MetadataIndex
    storage_offsets: torch.Size
    lengths: torch.Size


class TensorHead(NamedTuple):
    """What all items of one key share; None stands for a value."""

    properties: TensorProperties
    size: torch.Size
    alias_of: str | None = None
    kind: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class WriteColumns:
    """Write items as columns: ``key`` picks from ``keys`` and ``heads``; ``lo`` and ``length`` are (items, most
    dimensions) and padded with 0 and 1; ``hint`` is MetadataIndex.index, -1 for none; ``fingerprint`` tells contents
    apart, 0 where nobody looked. ``planning`` names the planning by which the coordinator knows these very rows, and
    ``planned`` has the number that each of them has for it. ``lenient`` are keys whose contents may
    differ between ranks.
    """

    keys: list[str]
    heads: list[TensorHead | None]
    key: np.ndarray
    lo: np.ndarray
    length: np.ndarray
    hint: np.ndarray
    is_shard: np.ndarray
    fingerprint: np.ndarray | None = None
    planning: bytes = b""
    planned: np.ndarray | None = None
    lenient: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.key)

    def __getstate__(self) -> dict[str, Any]:
        return _without_caches(self)

    @cached_property
    def rows(self) -> list[tuple[int, list[int], list[int], int, bool]]:
        """Every row as Python numbers, made all at once: one by one they cost more than what is made of them."""
        lows, lengths = self.lo.tolist(), self.length.tolist()
        return list(zip(self.key.tolist(), lows, lengths, self.hint.tolist(), self.is_shard.tolist(), strict=True))

    def item(self, row: int) -> WriteItem:
        """The item of ``row`` as an object that nobody else holds."""
        which, lo, length, hint, is_shard = self.rows[row]
        key, head = self.keys[which], self.heads[which]
        if head is None:
            return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
        dimensions = len(head.size)
        offsets, lengths = torch.Size(lo[:dimensions]), torch.Size(length[:dimensions])
        return WriteItem(
            MetadataIndex(key, offsets, None if hint < 0 else hint),
            WriteItemType.SHARD if is_shard else WriteItemType.TENSOR,
            None,
            TensorWriteData(
                ChunkStorageMetadata(offsets, lengths),
                replace(head.properties),
                head.size,
                head.alias_of,
                head.kind,
            ),
        )


def _without_caches(columns: WriteColumns | ReadColumns) -> dict[str, Any]:
    """What to pickle: the columns, not what was made of them."""
    return {each.name: getattr(columns, each.name) for each in fields(columns)}


def _head_of(data: TensorWriteData) -> TensorHead:
    return TensorHead(data.properties, torch.Size(data.size), data.alias_of, data.kind)


def padded(rows: Sequence[Sequence[int]], *, fill: int) -> np.ndarray:
    """``rows`` of different lengths as one int64 array, the short ones filled up with ``fill``."""
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    table = np.full((len(rows), int(counts.max(initial=0))), fill, dtype=np.int64)
    table[np.arange(table.shape[1]) < counts[:, None]] = np.fromiter(chain.from_iterable(rows), np.int64, counts.sum())
    return table


def write_columns(items: Sequence[WriteItem]) -> WriteColumns:
    """``items`` as columns, without a copy while nobody has touched them."""
    if isinstance(items, LazyList) and isinstance(items.columns, WriteColumns):
        return items.columns
    ids: dict[str, int] = {}
    heads: list[TensorHead | None] = []
    for item in items:
        if ids.setdefault(item.index.fqn, len(heads)) == len(heads):
            data = item.tensor_data
            heads.append(None if data is None else _head_of(data))
    chunks = [None if item.tensor_data is None else item.tensor_data.chunk for item in items]
    hints = [item.index.index for item in items]
    return WriteColumns(
        keys=list(ids),
        heads=heads,
        key=np.array([ids[item.index.fqn] for item in items], dtype=np.int64),
        lo=padded([() if chunk is None else tuple(chunk.offsets) for chunk in chunks], fill=0),
        length=padded([() if chunk is None else tuple(chunk.sizes) for chunk in chunks], fill=1),
        hint=np.array([-1 if hint is None else hint for hint in hints], dtype=np.int64),
        is_shard=np.array([item.type is WriteItemType.SHARD for item in items], dtype=bool),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadColumns:
    """Read items as columns.

    ``key`` picks from ``keys`` (target key), ``storage_keys`` and ``dimensions`` (-1: a value). ``hint`` is the chunk's
    position among its tensor's chunks and ``chunk_lo`` its offset; ``target_lo`` is the offset of the target's piece.
    The box itself: ``dest_lo`` within the piece, ``storage_lo`` within the chunk, ``length``.
    """

    keys: list[str]
    storage_keys: list[str]
    dimensions: list[int]
    key: np.ndarray
    hint: np.ndarray
    chunk_lo: np.ndarray
    target_lo: np.ndarray
    dest_lo: np.ndarray
    storage_lo: np.ndarray
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.key)

    def __getstate__(self) -> dict[str, Any]:
        return _without_caches(self)

    def take(self, chosen: np.ndarray) -> ReadColumns:
        """Only these rows; all keys stay."""
        names = ("key", "hint", "chunk_lo", "target_lo", "dest_lo", "storage_lo", "length")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    @cached_property
    def boxes(self) -> list[tuple[int, tuple[int, ...]]]:
        """The key and the lengths of every row (none for a value) as Python numbers, made all at once."""
        keys, dimensions = self.key.tolist(), self.dimensions
        lengths = self.length.tolist()
        return [
            (which, tuple(length[: max(0, dimensions[which])])) for which, length in zip(keys, lengths, strict=True)
        ]

    @cached_property
    def _rows(self) -> list[tuple[int, list[int], list[int], list[int], list[int]]]:
        columns = (self.hint, self.chunk_lo, self.target_lo, self.dest_lo, self.storage_lo)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def item(self, row: int) -> ReadItem:
        """The item of ``row`` as an object."""
        which, lengths = self.boxes[row]
        hint, *offsets = self._rows[row]
        dimensions = self.dimensions[which]
        if dimensions < 0:
            none = torch.Size((0,))
            target, stored = MetadataIndex(self.keys[which]), MetadataIndex(self.storage_keys[which])
            return ReadItem(LoadItemType.BYTE_IO, target, none, stored, none, none)
        chunk_lo, target_lo, dest_lo, storage_lo = (torch.Size(low[:dimensions]) for low in offsets)
        return ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex(self.keys[which], target_lo),
            dest_lo,
            MetadataIndex(self.storage_keys[which], chunk_lo, hint),
            storage_lo,
            torch.Size(lengths),
        )


def read_columns(items: Sequence[ReadItem]) -> ReadColumns:
    """``items`` as columns, without a copy while nobody has touched them."""
    if isinstance(items, LazyList) and isinstance(items.columns, ReadColumns):
        return items.columns
    ids: dict[tuple[str, str, int], int] = {}
    key = []
    for item in items:
        dimensions = len(item.lengths) if item.type is LoadItemType.TENSOR else -1
        key.append(ids.setdefault((item.dest_index.fqn, item.storage_index.fqn, dimensions), len(ids)))
    tensors = [item.type is LoadItemType.TENSOR for item in items]

    def column(pick: Callable[[ReadItem], Sequence[int] | None], fill: int) -> np.ndarray:
        return padded(
            [
                (pick(item) or (0,) * len(item.lengths)) if is_tensor else ()
                for item, is_tensor in zip(items, tensors, strict=True)
            ],
            fill=fill,
        )

    return ReadColumns(
        keys=[target for target, _, _ in ids],
        storage_keys=[stored for _, stored, _ in ids],
        dimensions=[dimensions for _, _, dimensions in ids],
        key=np.array(key, dtype=np.int64),
        hint=np.array([-1 if (i := item.storage_index.index) is None else i for item in items], dtype=np.int64),
        chunk_lo=column(lambda item: item.storage_index.offset, 0),
        target_lo=column(lambda item: item.dest_index.offset, 0),
        dest_lo=column(lambda item: item.dest_offsets, 0),
        storage_lo=column(lambda item: item.storage_offsets, 0),
        length=column(lambda item: item.lengths, 1),
    )


@dataclass(frozen=True)
class SavePlan:
    """What one rank writes; ``usable=False`` says that the plan of the save before still holds."""

    items: MutableSequence[WriteItem]
    storage_data: Any = None
    planner_data: Any = None
    usable: bool = True

    def __repr__(self) -> str:
        return f"SavePlan({len(self.items):,} items{'' if self.usable else ', not usable'})"


@dataclass
class LoadPlan:
    """What one rank reads."""

    items: MutableSequence[ReadItem]
    storage_data: Any = None
    planner_data: Any = None

    def __repr__(self) -> str:
        return f"LoadPlan({len(self.items):,} items)"


Memory = tuple[torch.Tensor, int]
"""A tensor and its address, where all its bytes lie row by row: in this process's memory or on a GPU."""


class SavePlanner(abc.ABC):
    """Decides what a save writes. Subclass ``DefaultSavePlanner`` rather than this.

    The calls, in order: set_up_planner and create_local_plan on every rank, create_global_plan on the coordinator,
    finish_plan on every rank, then resolve_data for each item, from any thread, any number of times.
    """

    containers: Mapping[tuple[str | int, ...], object] = {}  # classes that a checkpoint keeps

    @abc.abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state that is about to be saved."""

    @abc.abstractmethod
    def create_local_plan(self) -> SavePlan:
        """What this rank has to write."""

    @abc.abstractmethod
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plan of each rank, and the metadata of the whole."""

    @abc.abstractmethod
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The final plan of this rank, from what the coordinator decided."""

    @abc.abstractmethod
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of ``write_item``: idempotent and safe to call from several threads."""

    def resolve_row(self, columns: WriteColumns, row: int) -> torch.Tensor | io.BytesIO:
        """The data of a row: how storage of this library asks. It makes the item only for planners that look at it."""
        return self.resolve_data(columns.item(row))

    def versions(self) -> Versions:
        """What a checkpoint keeps of the modules whose state_dicts are saved, where the storage has a place for it."""
        return {}

    def plain_memory(self) -> Mapping[str, Memory]:
        """Keys whose whole tensor is written byte for byte: storage may take it without asking ``resolve_row``."""
        return {}


class LoadPlanner(abc.ABC):
    """Decides what a load reads, and where to. Subclass ``DefaultLoadPlanner`` rather than this.

    The calls, in order: set_up_planner and create_local_plan on every rank, create_global_plan on the coordinator,
    finish_plan on every rank, then for each item either load_bytes, or resolve_tensor and commit_tensor.
    """

    @abc.abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the target, and the metadata of the checkpoint."""

    @abc.abstractmethod
    def create_local_plan(self) -> LoadPlan:
        """What this rank wants to read."""

    @abc.abstractmethod
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plan of each rank."""

    @abc.abstractmethod
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The final plan of this rank, from what the coordinator decided."""

    @abc.abstractmethod
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take a value; ``value`` is a ``ValueBuffer`` where the storage kept it typed."""

    def rebuilt(self, key: str, record: Record) -> object:
        """What ``record``, in the value of ``key``, is loaded as: an instance where its class is known."""
        return rebuilt(record, key=key)

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """The buffer that a storage may fill instead of calling load_bytes."""
        raise NotImplementedError("LoadPlanner.resolve_bytes is not implemented")

    @abc.abstractmethod
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The tensor, of the item's lengths, that is to be filled."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:  # noqa: B027, as in torch it may be left out
        """Take note that ``tensor``, from resolve_tensor, has been filled."""

    def resolve_row(self, columns: ReadColumns, row: int) -> torch.Tensor:
        """The tensor for a row: how storage of this library asks. It makes the item only for planners that look."""
        return self.resolve_tensor(columns.item(row))

    def commit_row(self, columns: ReadColumns, row: int, tensor: torch.Tensor) -> None:
        """Take note that ``tensor``, from resolve_row, has been filled."""
        self.commit_tensor(columns.item(row), tensor)

    def plain_memory(self) -> Mapping[str, Memory]:
        """Keys whose whole target is in this process's memory and takes what is stored byte for byte.

        Storage may copy there, and then neither asks ``resolve_row`` nor tells ``commit_row``.
        """
        return {}


def is_overridden(thing: object, base: type, *names: str) -> bool:
    """Whether a subclass of ``base``, or somebody else, has put something in the place of one of these methods."""
    return any(getattr(getattr(thing, name), "__func__", None) is not vars(base)[name] for name in names)
