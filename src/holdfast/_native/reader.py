"""The native storage reader: what a plan wants, read, verified and handed to the planner.

Readers of other files that can be described by a catalog differ only in where that comes from: ``CatalogReader``.
"""

from __future__ import annotations

import abc
import copy
import io
import os
from collections.abc import Collection, Mapping
from functools import partial

import numpy as np
import torch
from torch.futures import Future

from holdfast._io import posix
from holdfast._io.files import FilesToRead
from holdfast._io.urls import is_store_url
from holdfast._native.catalog import Catalog, CatalogBytes, decode_catalog, read_catalog_bytes, was_replaced
from holdfast._native.fetch import Fetch, SharedFetch, Wanted
from holdfast._native.forms import generator_of
from holdfast._native.manifest import BYTE_KINDS
from holdfast._native.opening import open_on_ranks
from holdfast._native.values import decode_value, decode_value_bytes
from holdfast._ranks.exchange import Exchange
from holdfast._ranks.ranks import Ranks
from holdfast._state.tensor_bytes import Target
from holdfast._state.tensors import empty_quantized, empty_tensor, torch_dtype
from holdfast._torch_classes.adapt import final_load_plan, is_torchs
from holdfast._torch_classes.translate import metadata_for_both
from holdfast._torch_codec.pickles import serialize_object
from holdfast._values.box import Box
from holdfast._values.lazy import cached_property
from holdfast._values.records import Record
from holdfast.errors import CorruptError, InternalError, UnsafeError
from holdfast.metadata import Metadata
from holdfast.planner import LoadPlan, LoadPlanner, ReadColumns, ReadItem, read_columns
from holdfast.planner_helpers import check_resolved
from holdfast.storage import StorageReader, ValueBuffer, finished

_NOWHERE = None, 0


class CatalogReader(StorageReader):
    """Reads what a catalog describes from the files that it names; a subclass says where that catalog comes from."""

    reads_in_common: bool
    """To be set by a class itself where its ranks can share what they read: a subclass may read in another way."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: bool = True,
        cast: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        self.path = posix.absolute(path)
        self.verify = verify
        self.cast = cast
        self.allow_pickle = allow_pickle
        self.catalog_bytes_read = 0
        self._catalog: Catalog | None = None
        self._files: FilesToRead | None = None
        self._exchange: Exchange | None = None
        self._shares_next_read = False
        self._is_open = False  # if so, whoever asks for the metadata next gets what is there already

    is_always_whole = True

    @abc.abstractmethod
    def read_bytes(self) -> CatalogBytes:
        """What the catalog is made of, read from its files; NotFoundError where there is none."""

    @abc.abstractmethod
    def decode(self, data: CatalogBytes) -> Catalog:
        """The catalog, checked; CorruptError for what nobody wrote."""

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        """Bytes of data files that the system delivered since the last reset."""
        return 0 if self._files is None else self._files.bytes_read

    @property
    def file_at_work(self) -> str:  # type: ignore[override]
        return posix.file_at_work(self.path)

    @property
    def catalog(self) -> Catalog:
        """What the checkpoint says of itself, read when first asked for."""
        if self._catalog is None:
            data = self.read_bytes()
            self.catalog_bytes_read = len(data.manifest) + len(data.index)
            self._catalog = self.decode(data)
            self._files = self._catalog.data_files()
        return self._catalog

    def part(self, catalog: Catalog) -> CatalogReader:
        """A reader of ``catalog``, which is a part of what this one has read: it reads no metadata again."""
        reader = copy.copy(self)
        reader._catalog, reader._files, reader._exchange = catalog, catalog.data_files(), None
        reader._is_open = True
        return reader

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget what was read before; go on at ``checkpoint_id`` when it is given."""
        if checkpoint_id is not None:
            self.path = posix.absolute(checkpoint_id)
        self.close()

    def close(self) -> None:
        """Close the files, leave the other ranks, and forget the checkpoint."""
        files, exchange = self._files, self._exchange
        self._files = self._catalog = self._exchange = None
        try:
            if exchange is not None:
                exchange.close()
        finally:
            if files is not None:
                files.close()

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """The metadata of the checkpoint that is published now; torch's planners understand it too."""
        is_open, self._is_open = self._is_open, False
        if not is_open:
            self.close()
        return metadata_for_both(self.own_metadata())

    def own_metadata(self) -> Metadata:
        """The metadata in the words of this library alone."""
        return self.catalog.metadata()

    def read_metadata_once(self, ranks: Ranks, *, between_hosts: bool) -> Metadata | None:
        """The same, read once for all ranks of a host; they do the next ``read_data`` together too."""
        if "reads_in_common" not in vars(type(self)):
            return None
        self.close()
        opened = open_on_ranks(self.read_bytes, self.decode, ranks, self.progress, between_hosts=between_hosts)
        self._exchange, self._shares_next_read = opened.exchange, True
        self._catalog, self.catalog_bytes_read = opened.catalog, opened.bytes_read
        self._files = opened.catalog.data_files()
        self._is_open = True
        return self.read_metadata()

    def check_files(self) -> None:
        self.catalog.check_files()

    def stored_values(self, keys: Collection[str], *, allow_pickle: bool) -> Mapping[str, object]:
        """The values that the manifest itself holds."""
        values = self.catalog.values
        return {key: decode_value(values[key], key=key) for key in keys if key in values}

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Make sure that manifest and index are there."""
        _ = self.catalog

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of ``plan``; every byte is verified before this returns, unless ``verify`` is off."""
        is_driven_by_torch = is_torchs(planner)
        plan, planner = final_load_plan(plan, planner, allow_pickle=self.allow_pickle)
        try:
            self.deliver(read_columns(plan.items), planner)
        finally:
            if is_driven_by_torch and self._files is not None:  # which tells nobody when it is done
                self._files.close()
        return finished(None)

    def deliver(self, columns: ReadColumns, planner: LoadPlanner, *, is_alone: bool = False) -> None:
        """Read the items in ``columns`` and hand them to ``planner``; where ``is_alone``, without the other ranks."""
        catalog = self.catalog
        files = self._files
        assert files is not None
        delivery = self.delivery(columns, planner)
        # What comes after the first read is this rank's alone: others may have nothing more to read.
        exchange = self._exchange if self._shares_next_read and not is_alone else None
        self._shares_next_read &= is_alone
        make_fetch = Fetch if exchange is None else partial(SharedFetch, exchange=exchange)
        fetch = make_fetch(
            catalog,
            files,
            delivery.wanted(),
            open_targets=delivery.open_targets,
            close_target=delivery.close_target,
            verify=self.verify and catalog.has_digests,
            progress=self.progress,
        )
        fetch.run()

    def delivery(self, columns: ReadColumns, planner: LoadPlanner) -> ChunkDelivery:
        """What hands the items in ``columns`` to ``planner``."""
        return ChunkDelivery(self.catalog, columns, planner, cast=self.cast, allow_pickle=self.allow_pickle)

    def same_bytes(self, key: str, other: str) -> bool | None:
        """Known where both are the same tensor, or were stored in the same chunks: then their digests tell."""
        return self.catalog.same_bytes(key, other)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id) or is_store_url(checkpoint_id)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_files": None, "_catalog": None, "_exchange": None}


class NativeReader(CatalogReader):
    """Reads a checkpoint in the native format from the directory ``path``.

    ``verify=False`` skips the digests of the data (never those of manifest and index). ``cast`` lets a target of one
    floating type take another; ``allow_pickle`` lets pickled values through to the planner.
    """

    reads_in_common = True

    def read_bytes(self) -> CatalogBytes:
        return read_catalog_bytes(self.path)

    def decode(self, data: CatalogBytes) -> Catalog:
        return decode_catalog(self.path, data)

    def was_replaced(self) -> bool:
        """Whether another save was published at the path, or this one deleted, since its manifest was read."""
        return self._catalog is not None and was_replaced(self.path, self._catalog.manifest.attempt)


class ChunkDelivery:
    """Hands what is read to the planner: values at once, boxes through targets as they fill up."""

    def __init__(
        self, catalog: Catalog, columns: ReadColumns, planner: LoadPlanner, *, cast: bool, allow_pickle: bool
    ) -> None:
        self.catalog = catalog
        self.columns = columns
        self.planner = planner
        self.cast = cast
        self._allow_pickle = allow_pickle
        self.items: list[int] = []
        self._rows = np.zeros(0, dtype=np.int64)
        self._is_whole = np.zeros(0, dtype=bool)
        self._quantized: dict[int, torch.Tensor] = {}

    def wanted(self) -> Wanted:
        """The boxes to be fetched; values that need no fetching are delivered on the way."""
        columns, catalog = self.columns, self.catalog
        is_value = np.array(columns.dimensions)[columns.key] < 0
        tensors = np.flatnonzero(~is_value)
        rows = self._index_rows(tensors)
        width = catalog.index.lo.shape[1]
        lo, length = np.zeros((len(tensors), width), np.int64), np.ones((len(tensors), width), np.int64)
        used = min(width, columns.length.shape[1])
        lo[:, :used], length[:, :used] = columns.storage_lo[tensors, :used], columns.length[tensors, :used]
        self.items = tensors.tolist()
        blobs = [item for item in np.flatnonzero(is_value).tolist() if not self._deliver_value(item)]
        if blobs:
            blob_rows = [catalog.rows_of(columns.storage_keys[columns.key[item]]) for item in blobs]
            chunks = np.concatenate([np.arange(rows.start, rows.stop) for rows in blob_rows])
            self.items += blobs
            rows = np.concatenate([rows, chunks])
            lo = np.concatenate([lo, np.zeros((len(chunks), width), np.int64)])
            length = np.concatenate([length, catalog.index.length[chunks]])
        self._check_boxes(rows, lo, length)
        self._rows, self._is_whole = rows, (length == catalog.index.length[rows]).all(axis=1)
        return Wanted(row=rows, lo=lo, length=length, address=self.addresses())

    @cached_property
    def _chunks(self) -> list[tuple[int, tuple[int, ...], bool]]:
        """The tensor of each box, the shape of its chunk, and whether all of that is wanted: to open targets."""
        index = self.catalog.index
        shapes = map(tuple, index.length[self._rows].tolist())
        return list(zip(index.tensor[self._rows].tolist(), shapes, self._is_whole.tolist(), strict=True))

    def addresses(self) -> np.ndarray | None:
        """Where each box goes that is all of a tensor and is taken as it is; 0 for others."""
        columns, bounds = self.columns, self.catalog.row_bounds
        memory = self.planner.plain_memory()
        if not memory or columns.keys != columns.storage_keys:
            return None
        address = np.array([memory.get(key, _NOWHERE)[1] for key in columns.keys], dtype=np.int64)
        # Such memory may be written without a Target, which would tell autograd.
        torch.autograd.graph.increment_version([tensor for tensor, _ in memory.values()])
        tensor = self.catalog.index.tensor[self._rows]
        is_all = self._is_whole & (bounds[tensor + 1] - bounds[tensor] == 1)
        return np.where(is_all, address[columns.key[self.items]], 0)

    def _index_rows(self, items: np.ndarray) -> np.ndarray:
        """The index row of each item's chunk: by its hint where that is right, else by its offset."""
        columns, catalog = self.columns, self.catalog
        firsts = catalog.first_rows(columns.storage_keys)
        rows: np.ndarray = firsts[columns.key[items]] + columns.hint[items]
        used = min(columns.chunk_lo.shape[1], catalog.index.lo.shape[1])
        inside = (rows >= 0) & (rows < len(catalog.index))
        at = catalog.index.lo[np.where(inside, rows, 0), :used] if len(catalog.index) else np.zeros((len(rows), used))
        right = inside & (columns.hint[items] >= 0) & (at == columns.chunk_lo[items, :used]).all(axis=1)
        for place in np.flatnonzero(~right).tolist():
            item = int(items[place])
            key = columns.storage_keys[columns.key[item]]
            chunk_rows = catalog.rows_of(key)
            found = np.flatnonzero(
                (catalog.index.lo[chunk_rows.start : chunk_rows.stop, :used] == columns.chunk_lo[item, :used]).all(1)
            )
            if len(found) != 1:
                raise InternalError(f"the plan wants a chunk of {key!r} that the checkpoint does not have")
            rows[place] = chunk_rows.start + int(found[0])
        return rows

    def _check_boxes(self, rows: np.ndarray, lo: np.ndarray, length: np.ndarray) -> None:
        outside = ((lo < 0) | (length < 0) | (lo + length > self.catalog.index.length[rows])).any(axis=1)
        if outside.any():
            item = self.items[int(np.flatnonzero(outside)[0])]
            key = self.columns.storage_keys[self.columns.key[item]]
            raise InternalError(f"the plan wants more of a chunk of {key!r} than there is")

    def _deliver_value(self, item: int) -> bool:
        """Give a value that the manifest holds to the planner; False for one that has to be fetched."""
        read_item = self.columns.item(item)
        key = read_item.storage_index.fqn
        entry = self.catalog.entry(key)
        if entry is not None:
            if entry.kind == "pickle" and not self._allow_pickle:
                raise UnsafeError(
                    f"{key!r} is a pickle, and loading it would run code; "
                    "pass allow_pickle=True if you trust the checkpoint",
                    key=key,
                )
            return False
        if key not in self.catalog.values:
            raise InternalError(f"the plan wants the value {key!r}, which the checkpoint does not have")
        value = decode_value(self.catalog.values[key], key=key, rebuild=partial(self._rebuilt, read_item))
        self.planner.load_bytes(read_item, _value_buffer(value))
        return True

    def chunk_shape(self, number: int) -> tuple[int, ...]:
        """The shape of the chunk that box ``number`` is in."""
        tensor_id, shape, _ = self._chunks[number]
        return shape[: len(self.catalog.manifest.tensors[tensor_id].shape)]

    def open_targets(self, numbers: list[int]) -> list[Target]:
        """Where these boxes go: what the planner gives, or a buffer for a value."""
        columns, items, chunks = self.columns, self.items, self._chunks
        entries, boxes, resolve = self.catalog.manifest.tensors, columns.boxes, self.planner.resolve_row
        targets = []
        for number in numbers:
            item = items[number]
            tensor_id, shape, is_whole = chunks[number]
            entry = entries[tensor_id]
            dtype, shape = torch_dtype(entry.dtype), shape[: len(entry.shape)]
            if entry.kind in BYTE_KINDS:
                targets.append(Target(empty_tensor(shape, dtype), dtype, shape, None))
                continue
            tensor = resolve(columns, item)
            if dtype != tensor.dtype or boxes[item][1] != tensor.shape:
                check_resolved(columns, item, tensor, dtype, cast=self.cast)
            if tensor.is_quantized:
                self._quantized[number] = tensor
                tensor = empty_quantized(tensor.shape, dtype, self.catalog.quantizer(entry))
            box = None if is_whole else Box(tuple(columns.storage_lo[item, : len(shape)].tolist()), boxes[item][1])
            targets.append(Target(tensor, dtype, shape, box))
        return targets

    def close_target(self, number: int, target: Target) -> None:
        tensor, item = target.tensor, self.items[number]
        if self.catalog.manifest.tensors[self._chunks[number][0]].kind in BYTE_KINDS:
            read_item = self.columns.item(item)
            self.planner.load_bytes(read_item, self._buffer_of(read_item, tensor))
            return
        if number in self._quantized:
            # A quantised tensor takes over the quantizer of what is copied into it.
            tensor = self._quantized.pop(number).copy_(tensor)
        self.planner.commit_row(self.columns, item, tensor)

    def _buffer_of(self, read_item: ReadItem, tensor: torch.Tensor) -> io.BytesIO:
        key = read_item.storage_index.fqn
        entry = self.catalog.entry(key)
        data = tensor.numpy().tobytes()
        if entry is None:
            raise CorruptError(f"{key!r} has no entry in the manifest", key=key)
        if entry.kind == "bytes":
            return _value_buffer(data)
        if entry.kind == "json":
            return _value_buffer(decode_value_bytes(data, key=key, rebuild=partial(self._rebuilt, read_item)))
        return io.BytesIO(data)

    def _rebuilt(self, read_item: ReadItem, record: Record) -> object:
        """What ``record`` is loaded as."""
        if record.kind == "torch.Generator":
            return generator_of(record, read_item.storage_index.fqn)
        return self.planner.rebuilt(read_item.dest_index.fqn, record)


def _value_buffer(value: object) -> ValueBuffer:
    return ValueBuffer(value, serialize_object)
