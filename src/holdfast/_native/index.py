"""What the files of a checkpoint hold: the safetensors header of each, and the index, the table of all chunks.

A header is the eight little-endian bytes of its length, JSON, and spaces up to a multiple of ``HEADER_ALIGNMENT``, so
that the data starts on a page. The index is a safetensors file too. Its columns are as narrow as their values allow,
wide ones first so that each is aligned; offsets count from the start of a data file, dimensions beyond the rank of a
tensor have lo 0 and length 1, and ``digests`` has one entry per block of each chunk, chunk after chunk.

There is one way to write a header and a table, and nothing else is read. Never touches a file, never loops over chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast._native.manifest import BYTE_KINDS, FileEntry, TensorEntry
from holdfast._plan.coverage import check_coverage
from holdfast._values.box import Box
from holdfast._values.digest import block_counts, digest, to_hex
from holdfast._values.dtypes import (
    DTYPES,
    HEADER_ALIGNMENT,
    LENGTH_BYTES,
    MAX_DIMENSIONS,
    MAX_FILE_BYTES,
    MAX_HEADER_BYTES,
    Dtype,
)
from holdfast.errors import CorruptError, InternalError, InvalidStateError

_Int64s = npt.NDArray[np.int64]
_UInt64s = npt.NDArray[np.uint64]

RESERVED_NAME = "__metadata__"
"""The name that safetensors keeps for a file's own notes."""

INDEX_METADATA = {"format": "holdfast-index", "version": "1"}
"""What the index file says of itself, beside its columns."""

_ITEM_SIZES = {dtype.safetensors: dtype.itemsize for dtype in DTYPES.values() if dtype.safetensors is not None}
_ENTRY_ROOM = (
    len(',:{"dtype":"","shape":[],"data_offsets":[,]}') + max(map(len, _ITEM_SIZES)) + 3 * len(str(MAX_FILE_BYTES))
)
_COLUMNS = ("digests", "offset", "bytes", "tensor", "file", "lo", "length")
_WIDTHS = {"U8": 1, "U16": 2, "U32": 4, "U64": 8}


class HeaderEntry(NamedTuple):
    """One tensor of a safetensors file; ``begin`` and ``end`` count from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_body = msgspec.json.Decoder(_Body).decode
_encode_json = msgspec.json.Encoder().encode


def chunk_name(key: str, box: Box, shape: Sequence[int]) -> str:
    """The name under which a data file holds ``box`` of the tensor ``key``: the key itself when that is all of it.

    Distinct chunks get distinct names, whatever the keys look like.
    """
    is_whole = box.lengths == tuple(shape) and not any(box.offsets)
    if is_whole and "@[" not in key and key != RESERVED_NAME:
        return key
    ranges = ",".join(f"{low}:{low + length}" for low, length in zip(box.offsets, box.lengths, strict=True))
    return f"{key}@[{ranges}]"


def stored_as(dtype: Dtype, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """The safetensors dtype and shape of such a tensor: one more dimension where its elements become bytes."""
    if dtype.safetensors is not None:
        return dtype.safetensors, tuple(shape)
    return "U8", (*shape, dtype.itemsize) if dtype.itemsize > 1 else tuple(shape)


def header_entry_bytes(name: str, shape: Sequence[int]) -> int:
    """An upper bound of what one entry adds to the JSON, whatever its dtype and wherever its data will be."""
    # The text of a tuple has more characters than the numbers and commas that are written of it.
    return len(_quoted(name)) + len(str(tuple(shape))) + _ENTRY_ROOM


def encode_header(
    entries: Sequence[HeaderEntry], *, reserve: int = 0, metadata: Mapping[str, str] | None = None
) -> bytes:
    """The header of a file that holds ``entries``: a multiple of 4096 bytes, at least ``reserve`` of them."""
    members = [] if metadata is None else [f'"{RESERVED_NAME}":{_encode_json(metadata).decode()}']
    members += [
        f'{_quoted(name).decode()}:{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],'
        f'"data_offsets":[{begin},{end}]}}'
        for name, dtype, shape, begin, end in entries
    ]
    body = f"{{{','.join(members)}}}".encode()
    needed = max(LENGTH_BYTES + len(body), reserve)
    total = -(-needed // HEADER_ALIGNMENT) * HEADER_ALIGNMENT
    if total - LENGTH_BYTES > MAX_HEADER_BYTES:
        raise InternalError(f"a header of {total} bytes is more than safetensors reads; put fewer chunks into a file")
    return (total - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") + body.ljust(total - LENGTH_BYTES)


def decode_header(data: bytes, *, path: str = "", metadata: Mapping[str, str] | None = None) -> list[HeaderEntry]:
    """The entries of the header ``data`` (all of it and nothing more), in the order of their data.

    The ranges follow each other from 0 without a hole, sizes agree with dtypes and shapes, no name comes twice, and the
    bytes are exactly what ``encode_header`` makes of the entries and ``metadata``; else CorruptError names ``path``.
    """
    body_bytes = int.from_bytes(data[:LENGTH_BYTES], "little")
    if len(data) < LENGTH_BYTES or body_bytes > MAX_HEADER_BYTES or len(data) != LENGTH_BYTES + body_bytes:
        raise _bad_header(path, "its length is wrong")
    try:
        members = _decode_members(data[LENGTH_BYTES:])
        members.pop(RESERVED_NAME, None)
        bodies = {name: _decode_body(raw) for name, raw in members.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _bad_header(path, "it is not the expected JSON") from error
    entries: list[HeaderEntry] = []
    position = 0
    for name, body in bodies.items():
        begin, end = body.data_offsets
        _check_body(name, body, position, path)
        entries.append(HeaderEntry(name=name, dtype=body.dtype, shape=body.shape, begin=begin, end=end))
        position = end
    # Names that come twice, odd spacing and foreign notes all show as a difference to the one way of writing it.
    if encode_header(entries, reserve=len(data), metadata=metadata) != data:
        raise _bad_header(path, "it is not in canonical form")
    return entries


def _check_body(name: str, body: _Body, position: int, path: str) -> None:
    begin, end = body.data_offsets
    itemsize = _ITEM_SIZES.get(body.dtype)
    if itemsize is None:
        raise _bad_header(path, f"{name[:200]!r} has an unknown dtype")
    if len(body.shape) > MAX_DIMENSIONS + 1 or any(not 0 <= size <= MAX_FILE_BYTES for size in body.shape):
        raise _bad_header(path, f"{name[:200]!r} has an impossible shape")
    if begin != position or not begin <= end <= MAX_FILE_BYTES:
        raise _bad_header(path, f"the data of {name[:200]!r} does not follow what comes before it")
    if math.prod(body.shape) * itemsize != end - begin:
        raise _bad_header(path, f"the data of {name[:200]!r} does not have the size of its shape")


def _quoted(name: str) -> bytes:
    try:
        return _encode_json(name)
    except UnicodeEncodeError as error:
        raise InvalidStateError(f"the key {name[:200]!r} is not valid Unicode; rename it", key=name) from error


def _bad_header(path: str, problem: str) -> CorruptError:
    return CorruptError(
        f"the header of {path or 'a data file'} is damaged: {problem}; use another checkpoint", path=path or None
    )


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
    dtypes: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in _COLUMNS:
        column = np.asarray(getattr(index, name))
        if column.size and column.min() < 0:
            raise InternalError("the index has a negative number; please report it")
        dtypes[name], shapes[name] = _narrowest(column), column.shape
    entries = _layout(dtypes, shapes)
    parts = [encode_header(entries, metadata=INDEX_METADATA)]
    parts += [np.asarray(getattr(index, each.name)).astype(f"<u{_WIDTHS[each.dtype]}").tobytes() for each in entries]
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
    rows, boxes = shapes["tensor"], shapes["lo"]
    are_rows = len(rows) == 1 and rows == shapes["file"] == shapes["offset"] == shapes["bytes"]
    are_boxes = len(boxes) == 2 and boxes[:1] == rows and boxes == shapes["length"] and boxes[1] <= MAX_DIMENSIONS
    if not are_rows or not are_boxes or len(shapes["digests"]) != 1:
        raise _corrupt(path, "its columns differ in length")
    if entries != _layout(dtypes, shapes):
        raise _corrupt(path, "its columns are not in order")
    if len(data) != HEADER_ALIGNMENT + entries[-1].end:
        raise _corrupt(path, f"it has {len(data)} bytes instead of {HEADER_ALIGNMENT + entries[-1].end}")
    stored: dict[str, npt.NDArray[np.unsignedinteger]] = {}
    for name, _, shape, begin, end in entries:
        dtype = np.dtype(f"<u{_WIDTHS[dtypes[name]]}")
        count = (end - begin) // dtype.itemsize
        column = np.frombuffer(data, dtype, count, HEADER_ALIGNMENT + begin) if count else np.empty(0, dtype)
        stored[name] = column.reshape(shape)
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
    for name, column, count in (("tensor", index.tensor, len(tensors)), ("file", index.file, len(files))):
        if column.size and not 0 <= int(column.min()) <= int(column.max()) < count:
            raise _corrupt(path, f"a chunk names {name} number {int(column.max())}, but there are {count}")
    ranks = np.fromiter((len(entry.shape) for entry in tensors), dtype=np.int64, count=len(tensors))
    dimensions = index.lo.shape[1]
    if len(ranks) and int(ranks.max()) > dimensions:
        raise _corrupt(path, f"it has {dimensions} dimensions and a tensor has more", tensors[int(ranks.argmax())].key)
    undecided = np.ones(max(len(index.tensor) - 1, 0), dtype=bool)
    for column in (index.tensor, *index.lo.T):
        backwards = undecided & (column[1:] < column[:-1])
        if backwards.any():
            _refuse_row(np.append([False], backwards), "is not in order", index, tensors, path)
        undecided &= column[1:] == column[:-1]
    inside = np.arange(dimensions) < ranks[:, None]
    padded = ~inside[index.tensor] & ((index.lo != 0) | (index.length != 1))
    if padded.any():
        _refuse_row(padded.any(axis=1), "uses more dimensions than the tensor has", index, tensors, path)
    shapes = np.ones((len(tensors), dimensions), dtype=np.int64)
    shapes[inside] = np.fromiter(chain.from_iterable(entry.shape for entry in tensors), np.int64, int(ranks.sum()))
    _check_boxes(index, shapes, tensors, path)
    _check_files(index, files, tensors, path)


def _narrowest(column: npt.NDArray[np.integer]) -> str:
    return f"U{8 * np.min_scalar_type(int(column.max()) if column.size else 0).itemsize}"


def _layout(dtypes: dict[str, str], shapes: dict[str, tuple[int, ...]]) -> list[HeaderEntry]:
    """The columns as they lie in the file: wide ones first, so that each begins at a multiple of its width."""
    entries: list[HeaderEntry] = []
    position = 0
    for dtype, width in reversed(_WIDTHS.items()):
        for name in _COLUMNS:
            if dtypes[name] == dtype:
                end = position + math.prod(shapes[name]) * width
                entries.append(HeaderEntry(name=name, dtype=dtype, shape=shapes[name], begin=position, end=end))
                position = end
    return entries


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
        _refuse_row(wrong, "does not have the size of its box", index, tensors, path)
    counts = np.bincount(index.tensor, minlength=len(tensors))
    for number, entry in enumerate(tensors):
        # Readers take a run of bytes as a whole.
        if entry.kind in BYTE_KINDS and counts[number] != 1:
            raise _corrupt(path, f"{entry.key[:200]!r} must have one chunk, and has {counts[number]}", entry.key)


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
        first = np.arange(len(order)) == order[misplaced.argmax()]
        _refuse_row(first, "does not begin where the one before it ends", index, tensors, path)
    filled = begins.copy()
    is_last = np.append(~same_file, np.ones(min(len(file), 1), dtype=bool))
    filled[file[is_last]] = reached[is_last]
    unfilled = np.flatnonzero(filled != ends)
    if len(unfilled):
        name = files[int(unfilled[0])].name
        raise _corrupt(path, f"the chunks of {name} end at {filled[unfilled[0]]}, but it has {ends[unfilled[0]]} bytes")


def _are_filled(index: ChunkIndex, begins: _Int64s, ends: _Int64s) -> bool:
    """Whether the chunks of each file follow each other from ``begins`` to ``ends``; False also where numbers are huge.

    They do exactly when the places where something ends (a header, a chunk) are those where something begins (a chunk)
    or the file ends. To compare the two takes no more than to sort numbers.
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
    if not np.array_equal(opened, closed):
        return False
    # A chunk without bytes lies where others meet, or at either end.
    empty = (index.file[~filled] << shift) | index.offset[~filled]
    places = np.minimum(np.searchsorted(opened, empty), len(opened) - 1)
    return bool((opened[places] == empty).all())


def _refuse_row(
    wrong: npt.NDArray[np.bool_], problem: str, index: ChunkIndex, tensors: Sequence[TensorEntry], path: str
) -> None:
    row = int(np.flatnonzero(wrong)[0])
    key = tensors[int(index.tensor[row])].key
    raise _corrupt(path, f"chunk {row}, of {key[:200]!r}, {problem}", key)


def _corrupt(path: str, problem: str, key: str | None = None) -> CorruptError:
    return CorruptError(f"{path} is damaged: {problem}; use another checkpoint", path=path, key=key)
