"""The native storage writer: items to data files, reports to an index, the index to a published manifest."""

from __future__ import annotations

import dataclasses
import io
import os
import platform
import secrets
from collections.abc import Iterator, Mapping, MutableSequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.futures import Future

from holdfast._io import posix
from holdfast._io.direct import ALIGNMENT
from holdfast._native.header import chunk_name, header_entry_bytes, stored_dtype_name, stored_shape
from holdfast._native.manifest import encode_manifest
from holdfast._native.merge import merge_reports
from holdfast._native.packer import HEADER_FRAME_BYTES, Chunk, DataFile, Packer
from holdfast._native.planner_data import check_user_metadata, with_planner_data
from holdfast._native.publish import check_unpublished, may_be_published, publish
from holdfast._native.report import WriteReport, WrittenFile, WrittenTensor, report_of, shortened
from holdfast._native.tree import check_key, encode_path
from holdfast._native.values import Json, encode_value
from holdfast._plan.packing import pack_order
from holdfast._state.paths import TypedKey, path_mapping
from holdfast._state.raw import MemorySource, source_of
from holdfast._state.tensors import DTYPE_NAMES, check_savable, quantizer_of
from holdfast._values import dtypes
from holdfast._values.box import Box, whole
from holdfast._values.lazy import LazyList
from holdfast._values.limits import MAX_HEADER_BYTES, MAX_VALUE_INLINE_BYTES
from holdfast._values.value_buffer import ValueBuffer
from holdfast._version import __version__
from holdfast.errors import InternalError, InvalidStateError
from holdfast.metadata import Metadata, StorageMeta
from holdfast.planner import SavePlan, SavePlanner, TensorHead, padded, write_columns
from holdfast.storage import StorageWriter, WriteResult

# What one file's header may take before another file is begun; safetensors itself reads 100 MB.
_MOST_HEADER_BYTES = MAX_HEADER_BYTES // 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriterNumber:
    """What the coordinator tells each rank through ``SavePlan.storage_data``."""

    attempt: str
    writer: int


class NativeWriter(StorageWriter):
    """Writes a checkpoint in the native format to the directory ``path``.

    ``overwrite=False`` refuses to replace a published checkpoint; otherwise it is replaced atomically. ``attempt`` is
    the id in the names of this save's files (a random one by default). ``allow_pickle`` stores values that have no
    typed form as pickles, which only readers that allow it too will load. ``user_metadata`` is kept in the manifest.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        attempt: str | None = None,
        allow_pickle: bool = False,
        user_metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.overwrite = overwrite
        self.allow_pickle = allow_pickle
        self.user_metadata = dict(user_metadata or {})
        self._given_attempt = attempt
        self._attempt = attempt or secrets.token_hex(8)
        self._packer: Packer | None = None

    @property
    def bytes_written(self) -> int:  # type: ignore[override]
        """Bytes of data files that the system took from the save under way."""
        packer = self._packer
        return 0 if packer is None else sum(file.output.bytes_written for file in tuple(packer.files))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new attempt, at ``checkpoint_id`` when it is given."""
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)
        self._attempt = self._given_attempt or secrets.token_hex(8)
        self._close()

    def storage_meta(self) -> StorageMeta | None:
        """The path and the attempt."""
        return StorageMeta(checkpoint_id=self.path, save_id=self._attempt)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the directory; refuse early what could not be published."""
        if is_coordinator and not self.overwrite:
            check_unpublished(self.path)
        check_user_metadata(self.user_metadata)
        encode_value(self.user_metadata, key="user_metadata")
        posix.make_directories(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """``plan``, unchanged; InvalidStateError for a key that no manifest can hold, before anything is written."""
        paths = path_mapping(plan.planner_data) or {}
        for key in write_columns(plan.items).keys:
            check_key(key)
            path = paths.get(key, ())
            for element in path:
                if type(element) is TypedKey:
                    encode_path(key, path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, each with the attempt and the number of its writer."""
        return [
            dataclasses.replace(plan, storage_data=WriterNumber(attempt=self._attempt, writer=number))
            for number, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[MutableSequence[WriteResult]]:
        """Write the tensors of ``plan`` to data files of this writer, durably; values are encoded before that."""
        if not isinstance(plan.storage_data, WriterNumber):
            raise InternalError("the plan did not pass through prepare_global_plan of native storage")
        self._close()
        self._attempt = plan.storage_data.attempt
        work = _WriterWork(self.path, plan, planner, allow_pickle=self.allow_pickle)
        self._packer = work.packer
        done: Future[MutableSequence[WriteResult]] = Future()
        done.set_result(LazyList(work.run()))
        return done

    def finish(self, metadata: Metadata, results: list[MutableSequence[WriteResult]]) -> None:
        """Check what was written against ``metadata``, write the index, publish the manifest."""
        manifest, index = merge_reports(
            metadata,
            [report_of(result) for result in results],
            attempt=self._attempt,
            versions=(__version__, str(torch.__version__), platform.python_version()),
            user_metadata=encode_value(with_planner_data(self.user_metadata, metadata), key="planner_data"),
        )
        publish(
            self.path,
            encode_manifest(manifest),
            attempt=self._attempt,
            index_name=manifest.index.name,
            index=index,
            overwrite=self.overwrite,
        )
        self._close()

    def abandon(self) -> None:
        """Remove the files of a save that failed, unless it failed after it was published."""
        packer, self._packer = self._packer, None
        if packer is None:
            return
        if may_be_published(self.path, self._attempt):
            packer.close()
        else:
            packer.abandon()

    def _close(self) -> None:
        packer, self._packer = self._packer, None
        if packer is not None:
            packer.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packer": None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path and no URL."""
        return "://" not in os.fspath(checkpoint_id)


class _Planned(NamedTuple):
    """A chunk as planned: its row in the plan, its name and how much of the header that takes."""

    row: int
    key: str
    head: TensorHead
    box: Box
    name: str
    header_bytes: int


class _WriterWork:
    """One ``write_data``: the plan, and what became of it."""

    def __init__(self, path: str, plan: SavePlan, planner: SavePlanner, *, allow_pickle: bool) -> None:
        self._path = path
        self._number: WriterNumber = plan.storage_data
        self._planner = planner
        self._columns = write_columns(plan.items)
        self._allow_pickle = allow_pickle
        self._values: dict[str, Json] = {}
        self._blobs: dict[str, tuple[str, bytes]] = {}
        self._aliases: dict[str, WrittenTensor] = {}
        self._written: dict[str, tuple[int, WrittenTensor]] = {}
        self._rows: list[tuple[int, Box, int]] = []
        self._planned: list[_Planned] = []
        self._header_bytes: list[int] = []
        self._planned_bytes: list[int] = []
        self.packer = Packer(pinned=torch.cuda.is_available() and torch.cuda.is_initialized())

    def run(self) -> WriteReport:
        """Write everything and tell where it went."""
        for row, key in enumerate(self._columns.key.tolist()):
            if self._columns.heads[key] is None:
                self._take_value(row)
        self._plan_chunks()
        files = self.packer.write(self._chunks(), self._open_file)
        if files:
            posix.sync_directory(self._path)
        return self._report(files)

    def _take_value(self, row: int) -> None:
        """Encode the value of ``row``, before anything is written: for the manifest, or as bytes like a tensor's."""
        key = self._columns.keys[self._columns.key[row]]
        buffer = self._planner.resolve_row(self._columns, row)
        if not isinstance(buffer, io.BytesIO):
            raise InvalidStateError(f"the planner gave a {type(buffer).__name__} for the value of {key!r}", key=key)
        if not isinstance(buffer, ValueBuffer):
            self._blobs[key] = "opaque", buffer.getvalue()
        elif type(buffer.value) is bytes and len(buffer.value) > MAX_VALUE_INLINE_BYTES:
            self._blobs[key] = "bytes", buffer.value
        else:
            try:
                json = encode_value(buffer.value, key=key)
            except InvalidStateError as error:
                if not self._allow_pickle:
                    raise InvalidStateError(
                        f"{error.message}; convert it, or pass allow_pickle=True on both sides", key=key
                    ) from error
                self._blobs[key] = "pickle", buffer.getvalue()
                return
            text = msgspec.json.encode(json)
            if len(text) > MAX_VALUE_INLINE_BYTES:
                self._blobs[key] = "json", text
            else:
                self._values[key] = json

    def _plan_chunks(self) -> None:
        """Plan the chunks in file order: pages first, then by element size, so that every chunk is aligned."""
        columns, rows = self._columns, []
        for row, which in enumerate(columns.key.tolist()):
            key, head = columns.keys[which], columns.heads[which]
            if head is None:
                continue
            if head.alias_of is not None:  # whichever rank writes that one
                self._aliases[key] = _written(head, head.properties.dtype, tuple(head.size), alias_of=head.alias_of)
            else:
                rows.append(row)
        itemsizes = np.array([1 if head is None else head.properties.dtype.itemsize for head in columns.heads])
        itemsize = itemsizes[columns.key[rows]]
        nbytes = columns.length[rows].prod(axis=1, dtype=np.int64) * itemsize
        by_size = np.argsort(-itemsize, kind="stable")
        order = by_size[pack_order(nbytes[by_size], ALIGNMENT)]
        self._planned = [self._planned_chunk(row) for row in np.array(rows, dtype=np.int64)[order].tolist()]
        self._planned_bytes = nbytes[order].tolist() + [len(data) for _, data in self._blobs.values()]
        self._header_bytes = [planned.header_bytes for planned in self._planned]
        self._header_bytes += [header_entry_bytes(key, (len(data),)) for key, (_, data) in self._blobs.items()]

    def _planned_chunk(self, row: int) -> _Planned:
        which, lo, length, _, _ = self._columns.rows[row]
        key, head = self._columns.keys[which], self._columns.heads[which]
        assert head is not None
        dimensions = len(head.size)
        box = Box(tuple(lo[:dimensions]), tuple(length[:dimensions]))
        name = chunk_name(key, box, head.size)
        return _Planned(row, key, head, box, name, header_entry_bytes(name, box.lengths))

    def _open_file(self, number: int) -> DataFile:
        """The next data file, with room for as many of the chunks still to come as one header should hold."""
        start = len(self.packer.placed)
        sizes = np.cumsum(self._header_bytes[start:])
        count = max(1, int(np.searchsorted(sizes, _MOST_HEADER_BYTES, side="right")))
        name = f"data-{self._number.attempt}-{self._number.writer}-{number}.safetensors"
        return DataFile(
            os.path.join(self._path, name),
            name,
            header_bytes=HEADER_FRAME_BYTES + sum(self._header_bytes[start : start + count]),
            expected_bytes=sum(self._planned_bytes[start : start + count]),
        )

    def _chunks(self) -> Iterator[Chunk]:
        for planned in self._planned:
            yield self._chunk_of(planned)
        for key, (kind, data) in self._blobs.items():
            shape = (len(data),)
            self._enter(key, Box((0,), shape), len(data), WrittenTensor(dtype="uint8", shape=shape, kind=kind))
            owner = np.frombuffer(data, dtype=np.uint8)
            source = MemorySource(owner, owner.ctypes.data, len(data))
            yield Chunk(chunk_name(key, Box((0,), shape), shape), "U8", shape, source, header_entry_bytes(key, shape))

    def _chunk_of(self, planned: _Planned) -> Chunk:
        """The data of a planned chunk; where the planner changed dtype or size, what it gave is what counts."""
        row, key, head, box, name, header_bytes = planned
        tensor = self._planner.resolve_row(self._columns, row)
        if not isinstance(tensor, torch.Tensor):
            raise InvalidStateError(f"the planner gave a {type(tensor).__name__} for the tensor {key!r}", key=key)
        if tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided or tensor.is_meta:
            check_savable(key, tensor)
        size, shape = head.size, tensor.shape
        if shape != box.lengths:
            if size != box.lengths:
                raise InvalidStateError(
                    f"the planner gave a piece of shape {list(shape)} for a box of {list(box.lengths)} of "
                    f"{key!r}; only whole tensors may change their shape while being saved",
                    key=key,
                )
            size, box = shape, whole(shape)
            name = chunk_name(key, box, size)
            header_bytes = header_entry_bytes(name, box.lengths)
        source = source_of(tensor)
        written = _written(head, tensor.dtype, tuple(size), quantizer=quantizer_of(tensor))
        self._enter(key, box, source.nbytes, written)
        dtype = dtypes.DTYPES[written.dtype]
        return Chunk(name, stored_dtype_name(dtype), stored_shape(dtype, box.lengths), source, header_bytes)

    def _enter(self, key: str, box: Box, nbytes: int, written: WrittenTensor) -> None:
        number, known = self._written.setdefault(key, (len(self._written), written))
        if known is not written and known != written:
            raise InvalidStateError(f"the pieces of {key!r} have different dtypes or shapes", key=key)
        self._rows.append((number, box, nbytes))

    def _report(self, files: list[WrittenFile]) -> WriteReport:
        placed = self.packer.placed
        report = WriteReport(
            files=files,
            keys=list(self._written),
            tensors=[written for _, written in self._written.values()],
            key=np.array([number for number, _, _ in self._rows], dtype=np.int64),
            file=np.array([place.file for place in placed], dtype=np.int64),
            offset=np.array([place.offset for place in placed], dtype=np.int64),
            nbytes=np.array([nbytes for _, _, nbytes in self._rows], dtype=np.int64),
            lo=padded([box.offsets for _, box, _ in self._rows], fill=0),
            length=padded([box.lengths for _, box, _ in self._rows], fill=1),
            digests=np.array(self.packer.digests, dtype=np.uint64),
            aliases=self._aliases,
            values=self._values,
        )
        return shortened(report, self._columns, [planned.row for planned in self._planned])


def _written(
    head: TensorHead,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    *,
    alias_of: str | None = None,
    quantizer: dict[str, Any] | None = None,
) -> WrittenTensor:
    return WrittenTensor(
        dtype=DTYPE_NAMES[dtype],
        shape=shape,
        requires_grad=head.properties.requires_grad and (dtype.is_floating_point or dtype.is_complex),
        alias_of=alias_of,
        kind=head.kind,
        quantizer=quantizer,
    )
