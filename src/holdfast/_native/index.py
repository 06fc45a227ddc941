"""The index: the table of all chunks as columns, in memory and as a safetensors file.

Columns are stored as narrow as their values allow, wide ones first so that each is aligned, and there is one way to
store a table. Offsets count from the start of a data file, dimensions beyond the rank of a tensor have lo 0 and length
1, and ``digests`` has one entry per block of each chunk, chunk after chunk. Never touches a file, never loops over
chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from holdfast._native.header import HEADER_ALIGNMENT, HeaderEntry, decode_header, encode_header
from holdfast._native.manifest import BYTE_KINDS, FileEntry, TensorEntry
from holdfast._plan.coverage import check_coverage
from holdfast._values.digest import block_counts, digest, to_hex
from holdfast._values.dtypes import DTYPES, MAX_DIMENSIONS, MAX_FILE_BYTES
from holdfast.errors import CorruptError, InternalError

_Int64s = npt.NDArray[np.int64]
_UInt64s = npt.NDArray[np.uint64]

INDEX_METADATA = {"format": "holdfast-index", "version": "1"}
"""What the index file says of itself, beside its columns."""

_COLUMNS = ("digests", "offset", "bytes", "tensor", "file", "lo", "length")
_WIDTHS = {"U8": 1, "U16": 2, "U32": 4, "U64": 8}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkIndex:
    """All chunks, sorted by tensor and then by where in it they begin; ``offset`` counts from the start of the file.

    ``tensor``, ``file``, ``offset`` and ``bytes`` are [n], ``lo`` and ``length`` [n, D], ``digests`` [blocks].
    """

    tensor: _Int64s
    file: _Int64s
    offset: _Int64s
    bytes: _Int64s
    lo: _Int64s
    length: _Int64s
    digests: _UInt64s

    def __len__(self) -> int:
        return len(self.tensor)

    def first_block(self) -> _Int64s:
        """Where in ``digests`` each chunk's begin; one more entry at the end, so that [i] to [i + 1] are chunk i's."""
        first = np.zeros(len(self.bytes) + 1, dtype=np.int64)
        np.cumsum(block_counts(self.bytes), out=first[1:])
        return first


def file_digest(header: bytes, block_digests: _UInt64s) -> str:
    """The digest of a data file in the manifest, from its header region and its blocks' digests in file order."""
    return to_hex(digest(header + np.ascontiguousarray(block_digests, dtype="<u8").tobytes()))


def encode_index(index: ChunkIndex) -> bytes:
    """The bytes of the index file."""
    columns = {name: np.asarray(getattr(index, name)) for name in _COLUMNS}
    if any(column.size and column.min() < 0 for column in columns.values()):
        raise InternalError("the index has a negative number; please report it")
    dtypes = {name: _narrowest(column) for name, column in columns.items()}
    entries = _layout(dtypes, {name: column.shape for name, column in columns.items()})
    parts = [encode_header(entries, metadata=INDEX_METADATA)]
    parts += [columns[entry.name].astype(f"<u{_WIDTHS[entry.dtype]}").tobytes() for entry in entries]
    return b"".join(parts)


def decode_index(data: memoryview | bytes, *, path: str) -> ChunkIndex:
    """The table whose bytes are ``data``, which wide columns share; CorruptError when ``encode_index`` writes no such.

    The columns agree in length and nothing is over 2**62; whether chunks make sense is for ``check_index`` to say.
    """
    entries = decode_header(bytes(data[:HEADER_ALIGNMENT]), path=path, metadata=INDEX_METADATA)
    dtypes = {entry.name: entry.dtype for entry in entries}
    shapes = {entry.name: entry.shape for entry in entries}
    if sorted(dtypes) != sorted(_COLUMNS) or not _WIDTHS.keys() >= set(dtypes.values()):
        raise _corrupt(path, "its columns are not those of an index")
    _check_shapes(shapes, path)
    if entries != _layout(dtypes, shapes):
        raise _corrupt(path, "its columns are not in order")
    if len(data) != HEADER_ALIGNMENT + entries[-1].end:
        raise _corrupt(path, f"it has {len(data)} bytes instead of {HEADER_ALIGNMENT + entries[-1].end}")
    stored = {entry.name: _view(data, entry) for entry in entries}
    for name, column in stored.items():
        if _narrowest(column) != dtypes[name]:
            raise _corrupt(path, f"the column {name!r} is wider than its values")
        if name != "digests" and column.size and int(column.max()) > MAX_FILE_BYTES:
            raise _corrupt(path, f"the column {name!r} has a value over 2**62")
    digests = stored.pop("digests").astype(np.uint64, copy=False)
    numbers = {name: column.astype(np.int64, copy=False) for name, column in stored.items()}
    counts = block_counts(numbers["bytes"])
    # The first sum cannot overflow, and the second is exact where the first is small.
    if counts.sum(dtype=np.float64) > MAX_FILE_BYTES or int(counts.sum()) != len(digests):
        raise _corrupt(path, "the digests are not one per block")
    return ChunkIndex(digests=digests, **numbers)


def check_index(index: ChunkIndex, *, files: Sequence[FileEntry], tensors: Sequence[TensorEntry], path: str) -> None:
    """Accept only chunks that tile every tensor and every file exactly; else CorruptError, which names the key."""
    _check_numbers("tensor", index.tensor, len(tensors), path)
    _check_numbers("file", index.file, len(files), path)
    ranks = np.fromiter((len(entry.shape) for entry in tensors), dtype=np.int64, count=len(tensors))
    dimensions = index.lo.shape[1]
    if len(ranks) and int(ranks.max()) > dimensions:
        raise _corrupt(path, f"it has {dimensions} dimensions and a tensor has more", tensors[int(ranks.argmax())].key)
    _check_order(index, tensors, path)
    inside = np.arange(dimensions) < ranks[:, None]
    padded = ~inside[index.tensor] & ((index.lo != 0) | (index.length != 1))
    if padded.any():
        _refuse_row(padded.any(axis=1), "uses more dimensions than the tensor has", index, tensors, path)
    shapes = np.ones((len(tensors), dimensions), dtype=np.int64)
    shapes[inside] = np.fromiter(chain.from_iterable(entry.shape for entry in tensors), np.int64, int(ranks.sum()))
    _check_boxes(index, shapes, tensors, path)
    _check_runs(index, tensors, path)
    _check_files(index, files, tensors, path)


def _narrowest(column: npt.NDArray[np.integer]) -> str:
    largest = int(column.max()) if column.size else 0
    return next(name for name, width in _WIDTHS.items() if largest < 1 << 8 * width)


def _layout(dtypes: dict[str, str], shapes: dict[str, tuple[int, ...]]) -> list[HeaderEntry]:
    """The columns as they lie in the file: wide ones first, so that each begins at a multiple of its width."""
    entries: list[HeaderEntry] = []
    position = 0
    for name in sorted(_COLUMNS, key=lambda name: -_WIDTHS[dtypes[name]]):
        end = position + math.prod(shapes[name]) * _WIDTHS[dtypes[name]]
        entries.append(HeaderEntry(name=name, dtype=dtypes[name], shape=shapes[name], begin=position, end=end))
        position = end
    return entries


def _check_shapes(shapes: dict[str, tuple[int, ...]], path: str) -> None:
    rows = shapes["tensor"]
    boxes = shapes["lo"]
    if (
        len(rows) != 1
        or len(shapes["digests"]) != 1
        or any(shapes[name] != rows for name in ("file", "offset", "bytes"))
    ):
        raise _corrupt(path, "its columns differ in length")
    if len(boxes) != 2 or boxes[0] != rows[0] or shapes["length"] != boxes or boxes[1] > MAX_DIMENSIONS:
        raise _corrupt(path, "its columns differ in length")


def _view(data: memoryview | bytes, entry: HeaderEntry) -> npt.NDArray[np.unsignedinteger]:
    dtype = np.dtype(f"<u{_WIDTHS[entry.dtype]}")
    count = (entry.end - entry.begin) // dtype.itemsize
    column = np.frombuffer(data, dtype, count, HEADER_ALIGNMENT + entry.begin) if count else np.empty(0, dtype)
    return column.reshape(entry.shape)


def _check_numbers(name: str, column: _Int64s, count: int, path: str) -> None:
    if column.size and not 0 <= int(column.min()) <= int(column.max()) < count:
        raise _corrupt(path, f"a chunk is of {name} number {int(column.max())}, and there are {count}")


def _check_order(index: ChunkIndex, tensors: Sequence[TensorEntry], path: str) -> None:
    undecided = np.ones(max(len(index) - 1, 0), dtype=bool)
    for column in (index.tensor, *index.lo.T):
        backwards = undecided & (column[1:] < column[:-1])
        if backwards.any():
            _refuse_row(np.append([False], backwards), "is not in order", index, tensors, path)
        undecided &= column[1:] == column[:-1]


def _check_boxes(index: ChunkIndex, shapes: _Int64s, tensors: Sequence[TensorEntry], path: str) -> None:
    stored = np.fromiter((entry.alias_of is None for entry in tensors), dtype=bool, count=len(tensors))
    if not stored[index.tensor].all():
        _refuse_row(~stored[index.tensor], "belongs to an alias", index, tensors, path)
    numbers = np.cumsum(stored) - 1
    faults = check_coverage(numbers[index.tensor], index.lo, index.length, shapes[stored])
    if faults:
        key = tensors[int(np.flatnonzero(stored)[faults[0].tensor])].key
        raise _corrupt(
            path, f"the chunks of {key[:200]!r} do not tile it: {faults[0].problem}, {faults[0].detail}", key
        )
    itemsizes = np.fromiter((DTYPES[entry.dtype].itemsize for entry in tensors), dtype=np.int64, count=len(tensors))
    # No overflow: boxes are within their shapes by now, and the manifest's shapes fit 62 bits.
    wrong = index.length.prod(axis=1) * itemsizes[index.tensor] != index.bytes
    if wrong.any():
        _refuse_row(wrong, "has not the size of its box", index, tensors, path)


def _check_runs(index: ChunkIndex, tensors: Sequence[TensorEntry], path: str) -> None:
    """Accept only one chunk for each run of bytes: readers take it as a whole."""
    counts = np.bincount(index.tensor, minlength=len(tensors))
    for number, entry in enumerate(tensors):
        if entry.kind in BYTE_KINDS and counts[number] != 1:
            raise _corrupt(path, f"{entry.key[:200]!r} is one run of bytes and has {counts[number]} chunks", entry.key)


def _check_files(index: ChunkIndex, files: Sequence[FileEntry], tensors: Sequence[TensorEntry], path: str) -> None:
    """Accept only files whose chunks follow each other from the end of the header to the end of the file."""
    begins = np.fromiter((file.header for file in files), dtype=np.int64, count=len(files))
    ends = np.fromiter((file.bytes for file in files), dtype=np.int64, count=len(files))
    if _are_filled(index, begins, ends):
        return
    order = np.lexsort((index.bytes, index.offset, index.file))
    file, offset = index.file[order], index.offset[order]
    reached = offset + index.bytes[order]
    expected = begins[file]
    same_file = file[1:] == file[:-1]
    expected[1:][same_file] = reached[:-1][same_file]
    misplaced = offset != expected
    if misplaced.any():
        first = np.arange(len(index)) == order[misplaced.argmax()]
        _refuse_row(first, "does not begin where the one before it ends", index, tensors, path)
    filled = begins.copy()
    is_last = np.append(~same_file, np.ones(min(len(file), 1), dtype=bool))
    filled[file[is_last]] = reached[is_last]
    unfilled = np.flatnonzero(filled != ends)
    if len(unfilled):
        name = files[int(unfilled[0])].name
        raise _corrupt(path, f"the chunks of {name} end at {filled[unfilled[0]]}, and it has {ends[unfilled[0]]} bytes")


def _are_filled(index: ChunkIndex, begins: _Int64s, ends: _Int64s) -> bool:
    """Whether every place where a chunk begins or a file ends is one where a chunk ends or a header, and the reverse.

    That is so exactly when the chunks of each file follow each other, and it takes no more than to sort numbers. False
    too where a place does not fit a number.
    """
    stop = index.offset + index.bytes
    highest = max(int(stop.max(initial=0)), int(ends.max(initial=0)), int(begins.max(initial=0)))
    if highest.bit_length() + len(begins).bit_length() > 62 or int(stop.min(initial=0)) < 0:
        return False
    shift = highest.bit_length()
    filled = index.bytes > 0
    file, number = index.file[filled] << shift, np.arange(len(begins)) << shift
    opened = np.sort(np.concatenate([file | index.offset[filled], number | ends]))
    closed = np.sort(np.concatenate([file | stop[filled], number | begins]))
    empty = np.flatnonzero(~filled)
    if not np.array_equal(opened, closed):
        return False
    # A chunk without bytes lies where others meet, or at either end.
    places = np.searchsorted(opened, (index.file[empty] << shift) | index.offset[empty])
    return bool(
        (opened[np.minimum(places, len(opened) - 1)] == ((index.file[empty] << shift) | index.offset[empty])).all()
    )


def _refuse_row(
    wrong: npt.NDArray[np.bool_], problem: str, index: ChunkIndex, tensors: Sequence[TensorEntry], path: str
) -> None:
    row = int(np.flatnonzero(wrong)[0])
    key = tensors[int(index.tensor[row])].key
    raise _corrupt(path, f"chunk {row}, of {key[:200]!r}, {problem}", key)


def _corrupt(path: str, problem: str, key: str | None = None) -> CorruptError:
    return CorruptError(f"{path} is damaged: {problem}; use another checkpoint", path=path, key=key)
