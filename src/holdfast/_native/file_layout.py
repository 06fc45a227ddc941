"""What one rank has to write, from the plan to chunks in file order, on disk or in memory, and what became of them.

Chunks whose size is a multiple of a page come first, so that each of them starts on a page, as the file's data does,
and can be read and written without the page cache. Never leaves room between chunks.

Values are encoded before anything is written, because they may still be refused. Data is asked of the planner as late
as possible, one chunk at a time, apart from what it knows to be plain memory.

The files are the same, byte for byte, that the packer writes. They lie one after the other, each from a page on.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from holdfast._engine.images import FileImage, WrittenImage
from holdfast._io.direct import ALIGNMENT
from holdfast._native.index import chunk_name, header_entry_bytes, stored_as
from holdfast._native.packer import HEADER_FRAME_BYTES, Chunk, DataFile, Placed
from holdfast._native.publish import WriterNumber
from holdfast._native.report import WriteReport, WrittenFile, WrittenTensor, planned_tensor, shortened
from holdfast._native.values import Json, encode_value
from holdfast._state.tensor_bytes import MemorySource, ScatteredSource, Source, source_of
from holdfast._state.tensors import DTYPE_NAMES, check_savable, quantizer_of
from holdfast._values import dtypes
from holdfast._values.box import Box, whole
from holdfast._values.digest import BLOCK_BYTES
from holdfast._values.dtypes import MAX_HEADER_BYTES, MAX_VALUE_INLINE_BYTES
from holdfast._values.lazy import cached_property
from holdfast.errors import InvalidStateError
from holdfast.planner import Memory, SavePlan, SavePlanner, TensorHead, write_columns
from holdfast.storage import SavedValueBuffer, ValueBuffer


def pack_order(nbytes: npt.NDArray[np.int64], page: int) -> npt.NDArray[np.int64]:
    """The order to store chunks of sizes ``nbytes``: multiples of ``page`` (0 too), then the rest, each as given."""
    return np.argsort(np.asarray(nbytes, dtype=np.int64) % page != 0, kind="stable")


# What one file's header may take before another file is begun; safetensors itself reads 100 MB.
_MOST_HEADER_BYTES = MAX_HEADER_BYTES // 2
_NOWHERE = None, 0


class _Planned(NamedTuple):
    """A chunk as planned: its row in the plan, its name and how much of the header that takes.

    ``chunk`` is all there is to it where that is known without asking the planner.
    """

    row: int
    key: str
    head: TensorHead
    box: Box
    name: str
    header_bytes: int
    chunk: Chunk | None


class WriterWork:
    """One ``write_data``: the plan, and what became of it. Values are encoded at once, before anything is written.

    ``is_ordered`` as for the sources of chunks.
    """

    def __init__(
        self, plan: SavePlan, planner: SavePlanner, *, path: str, allow_pickle: bool, is_ordered: bool = False
    ) -> None:
        self._path = path
        self._is_ordered = is_ordered
        self._number: WriterNumber = plan.storage_data
        self._planner = planner
        self._columns = write_columns(plan.items)
        self._allow_pickle = allow_pickle
        self._values: dict[str, Json] = {}
        self._versions = planner.versions()
        self._blobs: dict[str, tuple[str, bytes]] = {}
        self._aliases: dict[str, WrittenTensor] = {}
        self._written: dict[str, tuple[int, WrittenTensor]] = {}
        self._numbers: list[int] = []
        self._unplanned: dict[int, tuple[Box, int]] = {}
        self._planned: list[_Planned] = []
        self._header_bytes: list[int] = []
        self._planned_bytes: list[int] = []
        for row, key in enumerate(self._columns.key.tolist()):
            if self._columns.heads[key] is None:
                self._take_value(row)
        self._plan_chunks()

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
                if isinstance(buffer, SavedValueBuffer):
                    self._blobs[key] = "opaque", buffer.getvalue()
                    return
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
        in_order, sizes = np.array(rows, dtype=np.int64)[order].tolist(), nbytes[order].tolist()
        memory = self._planner.plain_memory()
        self._planned = [self._planned_chunk(row, size, memory) for row, size in zip(in_order, sizes, strict=True)]
        self._planned_bytes = sizes + [len(data) for _, data in self._blobs.values()]
        self._header_bytes = [planned.header_bytes for planned in self._planned]
        self._header_bytes += [header_entry_bytes(key, (len(data),)) for key, (_, data) in self._blobs.items()]

    def _planned_chunk(self, row: int, nbytes: int, memory: Mapping[str, Memory]) -> _Planned:
        which, lo, length, _, _ = self._columns.rows[row]
        key, head = self._columns.keys[which], self._columns.heads[which]
        assert head is not None
        dimensions = len(head.size)
        box = Box(tuple(lo[:dimensions]), tuple(length[:dimensions]))
        name = chunk_name(key, box, head.size)
        header_bytes = header_entry_bytes(name, box.lengths)
        tensor, address = memory.get(key, _NOWHERE)
        chunk = None
        if tensor is not None and tensor.shape == box.lengths and tensor.dtype is head.properties.dtype:
            if tensor.is_cpu:
                source: Source = MemorySource(tensor, address, nbytes)
            else:
                source = ScatteredSource(tensor.detach(), is_ordered=self._is_ordered)
            chunk = _chunk(name, tensor.dtype, box, source, header_bytes)
        return _Planned(row, key, head, box, name, header_bytes, chunk)

    def next_file(self, number: int, start: int) -> DataFile:
        """Data file ``number``, with room for as many of the chunks from ``start`` on as one header should hold."""
        sizes = np.cumsum(self._header_bytes[start:])
        count = max(1, int(np.searchsorted(sizes, _MOST_HEADER_BYTES, side="right")))
        name = f"data-{self._number.attempt}-{self._number.writer}-{number}.safetensors"
        return DataFile(
            os.path.join(self._path, name),
            name,
            header_bytes=HEADER_FRAME_BYTES + sum(self._header_bytes[start : start + count]),
            expected_bytes=sum(self._planned_bytes[start : start + count]),
        )

    def chunks(self) -> Iterator[Chunk]:
        """Everything that has bytes, in file order."""
        for planned in self._planned:
            if planned.chunk is None:
                yield self._chunk_of(planned)
            else:
                self._enter(planned.key, planned_tensor(planned.head))
                yield planned.chunk
        for key, (kind, data) in self._blobs.items():
            shape = (len(data),)
            self._unplanned[len(self._numbers)] = Box((0,), shape), len(data)
            self._enter(key, WrittenTensor(dtype="uint8", shape=shape, kind=kind))
            owner = np.frombuffer(data, dtype=np.uint8)
            source = MemorySource(owner, owner.ctypes.data, len(data))
            yield Chunk(chunk_name(key, Box((0,), shape), shape), "U8", shape, source, header_entry_bytes(key, shape))

    def _chunk_of(self, planned: _Planned) -> Chunk:
        """The data of a planned chunk; where the planner changed dtype or size, what it gave is what counts."""
        row, key, head, box, name, header_bytes, _ = planned
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
        source = source_of(tensor, is_ordered=self._is_ordered)
        written = _written(head, tensor.dtype, tuple(size), quantizer=quantizer_of(tensor))
        if box is not planned.box or source.nbytes != self._planned_bytes[len(self._numbers)]:
            self._unplanned[len(self._numbers)] = box, source.nbytes
        self._enter(key, written)
        return _chunk(name, tensor.dtype, box, source, header_bytes)

    def _enter(self, key: str, written: WrittenTensor) -> None:
        """Take note that the next chunk is one of ``key``."""
        number, known = self._written.setdefault(key, (len(self._written), written))
        if known is not written and known != written:
            raise InvalidStateError(f"the pieces of {key!r} have different dtypes or shapes", key=key)
        self._numbers.append(number)

    @property
    def planned_bytes(self) -> int:
        """The bytes of all chunks, as planned."""
        return sum(self._planned_bytes)

    @property
    def keys(self) -> list[str]:
        """The key of each chunk that there has been."""
        keys = list(self._written)
        return [keys[number] for number in self._numbers]

    def report(self, files: list[WrittenFile], placed: Sequence[Placed], digests: Sequence[int]) -> WriteReport:
        """What was written, when chunk i of ``chunks`` went to ``placed[i]`` and all blocks have ``digests``."""
        rows = [planned.row for planned in self._planned]
        lo, length, nbytes = self._boxes(rows)
        report = WriteReport(
            files=files,
            keys=list(self._written),
            tensors=[written for _, written in self._written.values()],
            key=np.array(self._numbers, dtype=np.int64),
            file=np.array([place.file for place in placed], dtype=np.int64),
            offset=np.array([place.offset for place in placed], dtype=np.int64),
            nbytes=nbytes,
            lo=lo,
            length=length,
            digests=np.array(digests, dtype=np.uint64),
            aliases=self._aliases,
            values=self._values,
            versions=self._versions,
        )
        return shortened(report, self._columns, rows)

    def _boxes(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The boxes and sizes of all chunks: of ``rows`` in the plan and then blobs, apart from what came otherwise."""
        columns = self._columns
        width = max([columns.lo.shape[1], *(box.ndim for box, _ in self._unplanned.values())])
        lo, length = (np.full((len(self._numbers), width), fill, dtype=np.int64) for fill in (0, 1))
        lo[: len(rows), : columns.lo.shape[1]] = columns.lo[rows]
        length[: len(rows), : columns.lo.shape[1]] = columns.length[rows]
        nbytes = np.array(self._planned_bytes, dtype=np.int64)
        for number, (box, size) in self._unplanned.items():
            lo[number], length[number], nbytes[number] = 0, 1, size
            lo[number, : box.ndim], length[number, : box.ndim] = box.offsets, box.lengths
        return lo, length, nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class StagedFiles:
    """The files of one writer as they will lie in memory: ``image`` says what is to be copied where."""

    work: WriterWork
    chunks: list[Chunk]
    image: Image

    def forget_sources(self) -> None:
        """Let go of the tensors, now that they are copied."""
        self.chunks.clear()
        self.image.copies.clear()


def _chunk(name: str, dtype: torch.dtype, box: Box, source: Source, header_bytes: int) -> Chunk:
    stored = dtypes.DTYPES[DTYPE_NAMES[dtype]]
    return Chunk(name, *stored_as(stored, box.lengths), source, header_bytes)


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


class Copy(NamedTuple):
    """All bytes of ``source`` are to lie from ``at`` on; ``name`` is that of the chunk."""

    name: str
    source: Source
    at: int


class Image:
    """The files of ``chunks``: ``nbytes`` of memory, which ``copies`` and ``fill_frames`` fill together.

    Whoever has done the copies may clear them, because they hold the tensors, and may leave the digests of blocks in
    ``known``, each by its place.
    """

    def __init__(self, open_file: Callable[[int, int], DataFile], chunks: Iterable[Chunk]) -> None:
        self.placed: list[Placed] = []
        self.copies: list[Copy] = []
        self.known: dict[int, int] = {}
        self.digests: list[int] = []
        self._files: list[DataFile] = []
        self._begins: list[int] = []
        self.nbytes = 0
        for chunk in chunks:
            if not self._files or not self._files[-1].takes(chunk):
                self._end_file()
                file = open_file(len(self._files), len(self.placed))
                file.make_room(chunk)
                begin = self.nbytes
                self._begins.append(begin)
                self._files.append(file)
                number = len(self._begins) - 1
            self.placed.append(Placed(number, file.end))
            self.copies.append(Copy(chunk.name, chunk.source, begin + file.end))
            file.enter(chunk)
        self._end_file()
        self._sizes = [copy.source.nbytes for copy in self.copies]
        self.data_bytes = sum(self._sizes)

    def _end_file(self) -> None:
        if self._files:
            self.nbytes = self._begins[-1] + -(-self._files[-1].end // ALIGNMENT) * ALIGNMENT

    @cached_property
    def files(self) -> list[FileImage]:
        """What there is to write, as plain numbers; made when it is written, because there may be many blocks."""
        starts: list[list[int]] = [[] for _ in self._files]
        stops: list[list[int]] = [[] for _ in self._files]
        for (number, offset), nbytes in zip(self.placed, self._sizes, strict=True):
            begin = self._begins[number] + offset
            end = begin + nbytes
            blocks = range(begin, end, BLOCK_BYTES)
            starts[number].extend(blocks)
            stops[number].extend(min(start + BLOCK_BYTES, end) for start in blocks)
        return [
            FileImage(
                path=os.fsencode(file.output.path),
                begin=self._begins[number],
                size=file.end,
                header=file.header_bytes,
                starts=starts[number],
                stops=stops[number],
                known=[self.known.get(start) for start in starts[number]],
            )
            for number, file in enumerate(self._files)
        ]

    def fill_frames(self, memory: memoryview) -> None:
        """Put in place what no chunk holds: the headers, and zeros after the end of each file."""
        for begin, file in zip(self._begins, self._files, strict=True):
            memory[begin : begin + file.header_bytes] = file.header()
            end = begin + file.end
            padding = -file.end % ALIGNMENT
            memory[end : end + padding] = bytes(padding)

    def written(self, results: Sequence[WrittenImage]) -> list[WrittenFile]:
        """The files, now that they are on disk; their block digests become ``digests``."""
        self.digests = [digest for result in results for digest in result.digests]
        return [
            WrittenFile(name=file.name, bytes=file.end, header=file.header_bytes, digest=result.digest)
            for file, result in zip(self._files, results, strict=True)
        ]
