"""What one rank has to write, from the plan to chunks in file order, on disk or in memory, and what became of them.

Chunks whose size is a multiple of a page come first, so that each of them starts on a page, as the file's data does,
and can be read and written without the page cache. Never leaves room between chunks.

Values are encoded before anything is written, because they may still be refused. Data is asked of the planner as late
as possible, one chunk at a time, apart from what it knows to be plain memory.

The files are the same, byte for byte, that the packer writes. They lie one after the other, each from a page on.
"""

from __future__ import annotations

import bisect
import dataclasses
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from holdfast._io.direct import ALIGNMENT
from holdfast._io.mapping import FileImage, WrittenImage
from holdfast._native.forms import Json
from holdfast._native.index import chunk_name, header_entry_bytes, stored_as
from holdfast._native.packer import HEADER_FRAME_BYTES, Chunk, DataFile, Lane, Placed
from holdfast._native.report import WriteReport, WrittenFile, WrittenTensor, planned_tensors, report_on, written_tensor
from holdfast._native.values import encode_value
from holdfast._state.numbers import PieceNumbers
from holdfast._state.tensor_bytes import MemorySource, ScatteredSource, Source, source_of
from holdfast._state.tensors import DTYPE_NAMES, check_savable, quantizer_of
from holdfast._values.box import Box, whole
from holdfast._values.digest import BLOCK_BYTES
from holdfast._values.dtypes import DTYPES, MAX_HEADER_BYTES, MAX_VALUE_INLINE_BYTES
from holdfast._values.lazy import cached_property
from holdfast._values.records import REGISTERED, classes_in
from holdfast.errors import InvalidStateError
from holdfast.planner import Memory, SavePlan, SavePlanner, WriteColumns, write_columns
from holdfast.storage import SavedValueBuffer, ValueBuffer


def pack_order(nbytes: npt.NDArray[np.int64], page: int) -> npt.NDArray[np.int64]:
    """The order to store chunks of sizes ``nbytes``: multiples of ``page`` (0 too), then the rest, each as given."""
    return np.argsort(np.asarray(nbytes, dtype=np.int64) % page != 0, kind="stable")


# What one file's header may take before another file is begun; safetensors itself reads 100 MB.
_MOST_HEADER_BYTES = MAX_HEADER_BYTES // 2
_NOWHERE = None, 0


class _Planned(NamedTuple):
    """A chunk as planned: row ``row`` of the plan, and what of it is in the header of a file.

    ``chunk`` is all there is to it where that is known without asking the planner.
    """

    row: int
    key: str
    box: Box
    nbytes: int
    name: str
    header_bytes: int
    chunk: Chunk | None


class WriterFiles:
    """What one rank has to write, in file order, and what became of it.

    ``values`` are for the manifest; ``tensors`` are keys under which something else is written than planned.
    """

    def __init__(
        self,
        columns: WriteColumns,
        planner: SavePlanner,
        planned: list[_Planned],
        *,
        path: str,
        is_ordered: bool,
        values: dict[str, Json],
        tensors: dict[str, WrittenTensor],
    ) -> None:
        self.keys = [each.key for each in planned]
        self._sizes = [each.nbytes for each in planned]
        self.planned_bytes = sum(self._sizes)
        self._columns = columns
        self._planner = planner
        self._planned = planned
        self._path = path
        self._is_ordered = is_ordered
        self._values = values
        self._tensors = tensors
        self._asked: dict[str, WrittenTensor] = {}
        self.numbers: PieceNumbers | None = None
        """Where it is there, statistics of the chunks are kept."""
        self._bounds = [0, len(planned)]
        self._versions, self._containers = planner.versions(), planner.containers  # as they are now

    def next_file(self, number: int, start: int) -> DataFile:
        """Data file ``number``, with room for as many of the chunks from ``start`` on as one header should hold."""
        stop = self._bounds[bisect.bisect_right(self._bounds, start)]
        header_bytes = [each.header_bytes for each in self._planned[start:stop]]
        count = max(1, int(np.searchsorted(np.cumsum(header_bytes), _MOST_HEADER_BYTES, side="right")))
        path = f"{self._path}-{number}.safetensors"
        return DataFile(
            path,
            os.path.basename(path),
            header_bytes=HEADER_FRAME_BYTES + sum(header_bytes[:count]),
            expected_bytes=sum(self._sizes[start : start + count]),
        )

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[Chunk]:
        """Everything that has bytes, in file order."""
        for planned in self._planned[start:stop]:
            yield self._ask(planned) if planned.chunk is None else planned.chunk

    def lanes(self, count: int) -> list[Lane]:
        """The same, in ``count`` lanes of about as many bytes each, or fewer; from now on files are made for these."""
        shares = np.arange(count) * self.planned_bytes // count
        begins = np.cumsum([0, *self._sizes])
        self._bounds = np.unique([*np.searchsorted(begins, shares), len(self._sizes)]).tolist()
        return [Lane(start, self.chunks(start, stop)) for start, stop in itertools.pairwise(self._bounds)]

    def _ask(self, planned: _Planned) -> Chunk:
        """A chunk with what the planner gives for it; where that has another dtype or size, it is what counts."""
        row, key, box, _, name, header_bytes, _ = planned
        head = self._columns.heads[self._columns.key[row]]
        assert head is not None
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
        written = written_tensor(head, tensor.dtype, tuple(size), quantizer=quantizer_of(tensor))
        if self._asked.setdefault(key, written) != written:
            raise InvalidStateError(f"the pieces of {key!r} have different dtypes or shapes", key=key)
        if written != planned_tensors([key], [head])[key]:
            self._tensors[key] = written
        stored, source = DTYPES[written.dtype], source_of(tensor, is_ordered=self._is_ordered)
        return Chunk(name, *stored_as(stored, box.lengths), source, header_bytes)

    def looked_at(self, chunks: Iterable[Chunk], start: int = 0) -> Iterator[Chunk]:
        """All of ``chunks``, the first of them number ``start``, each looked at before it goes on."""
        for number, chunk in enumerate(chunks, start):
            self.look_at(number, chunk.source)
            yield chunk

    def look_at(self, number: int, source: Source) -> None:
        """Reckon the statistics of chunk ``number``, whose bytes are those of ``source``."""
        planned = self._planned[number]
        head, written = self._columns.heads[self._columns.key[planned.row]], self._tensors.get(planned.key)
        if self.numbers is not None and head is not None:  # else it is a value that is stored as bytes
            dtype = DTYPE_NAMES[head.properties.dtype] if written is None else written.dtype
            self.numbers.look_at(number, source, dtype)

    def flush(self) -> None:
        """Queue all operations for the statistics of what was looked at."""
        if self.numbers is not None:
            self.numbers.flush()

    def report(self, files: list[WrittenFile], placed: Sequence[Placed], digests: Sequence[int]) -> WriteReport:
        """What was written, when chunk i of ``chunks`` went to ``placed[i]`` and all blocks have ``digests``."""
        report = report_on(
            self._columns,
            [each.row for each in self._planned],
            files=files,
            places=placed,
            digests=digests,
            tensors=self._tensors,
            values=self._values,
            versions=self._versions,
        )
        if self.numbers is not None:
            report = dataclasses.replace(report, numbers=self.numbers.table(len(self._planned)))
        return dataclasses.replace(report, containers=dict(self._containers)) if self._containers else report


def files_to_write(
    plan: SavePlan, planner: SavePlanner, *, path: str, allow_pickle: bool, is_ordered: bool = False
) -> WriterFiles:
    """The files of ``plan``; values are encoded, because they may still be refused. ``is_ordered`` as for sources.

    ``path`` is what the paths of all files begin with.
    """
    columns = write_columns(plan.items)
    values: dict[str, Json] = {}
    tensors: dict[str, WrittenTensor] = {}
    blobs: list[_Planned] = []
    rows: list[int] = []
    refused: list[InvalidStateError] = []
    for row, which in enumerate(columns.key.tolist()):
        key, head = columns.keys[which], columns.heads[which]
        if head is not None:
            if head.alias_of is None:  # else the rank that has the other one writes it
                rows.append(row)
            continue
        try:
            encoded = encode_leaf(key, planner.resolve_row(columns, row), allow_pickle=allow_pickle)
        except InvalidStateError as error:
            refused.append(error)
            continue
        if isinstance(encoded, _Blob):
            shape = (len(encoded.data),)
            tensors[key] = WrittenTensor(dtype="uint8", shape=shape, kind=encoded.kind)
            blobs.append(_planned_blob(row, key, encoded.data))
        else:
            values[key] = encoded
    if refused:
        raise InvalidStateError.of(refused)
    return WriterFiles(
        columns,
        planner,
        _planned_chunks(columns, rows, planner.plain_memory(), is_ordered=is_ordered) + blobs,
        path=path,
        is_ordered=is_ordered,
        values=values,
        tensors=tensors,
    )


class _Blob(NamedTuple):
    """A value that is stored as bytes, like a tensor's."""

    kind: str
    data: bytes


def encode_leaf(key: str, buffer: object, *, allow_pickle: bool) -> Json | _Blob:
    """A value as it is stored: in the manifest, or as bytes."""
    if not isinstance(buffer, io.BytesIO):
        raise InvalidStateError(f"the planner gave a {type(buffer).__name__} for the value of {key!r}", key=key)
    if not isinstance(buffer, ValueBuffer):
        return _Blob("opaque", buffer.getvalue())
    if type(buffer.value) is bytes and len(buffer.value) > MAX_VALUE_INLINE_BYTES:
        return _Blob("bytes", buffer.value)
    if allow_pickle and not all(cls in REGISTERED for cls in classes_in(buffer.value)):
        return _Blob("pickle", buffer.getvalue())  # which brings back the instance itself
    try:
        json = encode_value(buffer.value, key=key)
    except InvalidStateError as error:
        if isinstance(buffer, SavedValueBuffer):
            return _Blob("opaque", buffer.getvalue())
        if not allow_pickle:
            raise InvalidStateError(f"{error.message}; or pass allow_pickle=True on both sides", key=key) from error
        return _Blob("pickle", buffer.getvalue())
    text = msgspec.json.encode(json)
    return _Blob("json", text) if len(text) > MAX_VALUE_INLINE_BYTES else json


def _planned_blob(row: int, key: str, data: bytes) -> _Planned:
    shape = (len(data),)
    box, owner = whole(shape), np.frombuffer(data, dtype=np.uint8)
    name, header_bytes = chunk_name(key, box, shape), header_entry_bytes(key, shape)
    chunk = Chunk(name, "U8", shape, MemorySource(owner, owner.ctypes.data, len(data)), header_bytes)
    return _Planned(row, key, box, len(data), name, header_bytes, chunk)


def _planned_chunks(
    columns: WriteColumns, rows: list[int], memory: Mapping[str, Memory], *, is_ordered: bool
) -> list[_Planned]:
    """The chunks of ``rows`` in file order: pages first, then by element size, so that every chunk is aligned."""
    itemsizes = np.array([1 if head is None else head.properties.dtype.itemsize for head in columns.heads])
    itemsize = itemsizes[columns.key[rows]]
    nbytes = columns.length[rows].prod(axis=1, dtype=np.int64) * itemsize
    by_size = np.argsort(-itemsize, kind="stable")
    order = by_size[pack_order(nbytes[by_size], ALIGNMENT)]
    planned = []
    for row, size in zip(np.array(rows, dtype=np.int64)[order].tolist(), nbytes[order].tolist(), strict=True):
        which, lo, length, _, _ = columns.rows[row]
        key, head = columns.keys[which], columns.heads[which]
        assert head is not None
        dimensions = len(head.size)
        box = Box(tuple(lo[:dimensions]), tuple(length[:dimensions]))
        name = chunk_name(key, box, head.size)
        header_bytes = header_entry_bytes(name, box.lengths)
        tensor, address = memory.get(key, _NOWHERE)
        chunk = None
        if tensor is not None and tensor.shape == box.lengths and tensor.dtype is head.properties.dtype:
            if tensor.is_cpu:
                source: Source = MemorySource(tensor, address, size)
            else:
                source = ScatteredSource(tensor.detach(), is_ordered=is_ordered)
            chunk = Chunk(name, *stored_as(DTYPES[DTYPE_NAMES[tensor.dtype]], box.lengths), source, header_bytes)
        planned.append(_Planned(row, key, box, size, name, header_bytes, chunk))
    return planned


@dataclasses.dataclass(frozen=True, slots=True)
class StagedFiles:
    """The files of one writer as they will lie in memory: ``image`` says what is to be copied where."""

    work: WriterFiles
    chunks: list[Chunk]
    image: Image

    def forget_sources(self) -> None:
        self.chunks.clear()
        self.image.copies.clear()


class Copy(NamedTuple):
    """All bytes of ``source`` are to lie from ``at`` on; ``name`` is that of chunk ``number``."""

    name: str
    source: Source
    at: int
    number: int = 0


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
            self.copies.append(Copy(chunk.name, chunk.source, begin + file.end, len(self.copies)))
            file.enter(chunk)
        self._end_file()
        self._sizes = [copy.source.nbytes for copy in self.copies]
        self.data_bytes = sum(self._sizes)

    @property
    def data_files(self) -> list[DataFile]:
        """The files, laid out."""
        return self._files

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
