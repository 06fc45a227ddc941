"""The layout of a torch.save archive: where in its bytes the elements of its one tensor lie.

torch's format keeps each chunk as a complete zip archive whose pickle says how to rebuild a tensor from a record of raw
bytes. ``find_tensor`` reads the directory at the end, the pickle at the start and the header before the record, so that
any part of the tensor can then be read by offset. What is not one dense tensor of little-endian elements has no such
layout: it is for torch.load. Sizes, names and headers are checked against each other; the checksum of the record is
handed on. Never reads the elements.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from holdfast._torch_codec.archive_writing import STORAGE_CLASSES
from holdfast._torch_codec.pickles import unpickle
from holdfast.errors import CorruptError, UnsafeError

HEAD_BYTES = 1024
"""How much of the start of an archive usually holds its pickle and the header of its record."""
TAIL_BYTES = 1024
"""How much of the end of an archive usually holds its directory."""

# Signature, versions, flags, method, time and date, checksum, sizes, then lengths of name and extra field.
_LOCAL = struct.Struct("<4s2xHH4xLLLHH")
# The same, then the length of the comment, disk, attributes, offset of the local header.
_ENTRY = struct.Struct("<4s4xHH4xLLLHHH8xL")
_END = struct.Struct("<4sHHHHLLH")
_END_64_LOCATOR = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQHHLLQQQQ")
_ALL_ONES_16, _ALL_ONES = 0xFFFF, 0xFFFF_FFFF
_ENCRYPTED = 1
_MOST_PICKLE_BYTES = 1 << 16
_LITTLE = b"little"
_LITTLE_CRC = zlib.crc32(_LITTLE)

Read = Callable[[int, int], bytes]
"""The bytes of an archive from one offset to another, which lie within it."""


class Elements(NamedTuple):
    """The elements of a dense tensor: ``nbytes`` from byte ``begin`` of the archive, in memory order.

    ``order`` lists the dimensions from the outermost in memory to the innermost: for a contiguous tensor 0, 1, 2...
    ``checksum`` is the CRC-32 of just these bytes; None where the archive has none, or only that of more bytes.
    """

    begin: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]
    checksum: int | None


class ArchiveRecord(NamedTuple):
    """An entry of an archive: its data from byte ``begin``; ``checksum`` None where the writer left it out."""

    begin: int
    nbytes: int
    checksum: int | None


class _Entry(NamedTuple):
    name: bytes
    header: int
    nbytes: int
    crc: int
    is_stored: bool


def find_tensor(read: Read, length: int) -> Elements | None:
    """Where the tensor of an archive of ``length`` bytes lies; None when only torch.load can tell what it holds."""
    entries = _directory(read, length)
    if entries is None:
        return None
    # All records are in one folder.
    prefix = entries[0].name.partition(b"/")[0] if entries else b""
    names = {entry.name: entry for entry in entries}
    if len(names) != len(entries):
        raise _damaged("it has two records of one name")
    pickled = names.get(prefix + b"/data.pkl")
    if pickled is None or pickled.nbytes > _MOST_PICKLE_BYTES or not pickled.is_stored:
        return None
    order = names.get(prefix + b"/byteorder")
    if order is not None and order.crc != _LITTLE_CRC and _content(read, order, length) != _LITTLE:
        return None
    view = _decode_view(_content(read, pickled, length))
    if view is None:
        return None
    record = names.get(prefix + b"/data/" + view.storage.encode())
    if record is None or not record.is_stored:
        return None
    if record.nbytes != view.storage_bytes:
        raise _damaged(f"its tensor needs {view.storage_bytes} bytes of storage, and there are {record.nbytes}")
    found = _record(read, record, length)
    checksum = found.checksum if view.elements.nbytes == record.nbytes else None
    return view.elements._replace(begin=found.begin + view.elements.begin, checksum=checksum)


def records(read: Read, length: int) -> list[ArchiveRecord] | None:
    """Every record of the archive, headers checked; None when it is no archive, or a compressed one."""
    entries = _directory(read, length)
    if entries is None or not all(entry.is_stored for entry in entries):
        return None
    return [_record(read, entry, length) for entry in entries]


def _directory(read: Read, length: int) -> list[_Entry] | None:
    if length < _END.size:
        return None
    end = _END.unpack(read(length - _END.size, length))
    if end[0] != b"PK\x05\x06":
        return None
    _, _, _, _, count, size, start, _ = end
    limit = length - _END.size
    if count == _ALL_ONES_16 or _ALL_ONES in (size, start):
        limit, count, size, start = _directory_64(read, length)
    # A name takes at least as much as an entry's fixed part leaves out, so the count is bounded by the size.
    if start + size > limit or count * _ENTRY.size > size:
        raise _damaged("its directory lies outside of it")
    return _entries(read(start, start + size), count, start)


def _directory_64(read: Read, length: int) -> tuple[int, int, int, int]:
    """End, number of entries, size and start of the directory of an archive of more than 4 GiB."""
    at = length - _END.size - _END_64_LOCATOR.size
    if at < _END_64.size:
        raise _damaged("its directory is cut off")
    signature, _, where, _ = _END_64_LOCATOR.unpack(read(at, at + _END_64_LOCATOR.size))
    if signature != b"PK\x06\x07" or where > at - _END_64.size:
        raise _damaged("its directory cannot be found")
    signature, _, _, _, _, _, _, count, size, start = _END_64.unpack(read(where, where + _END_64.size))
    if signature != b"PK\x06\x06":
        raise _damaged("its directory cannot be found")
    return where, count, size, start


def _entries(data: bytes, count: int, start: int) -> list[_Entry]:
    entries = []
    at = 0
    for _ in range(count):
        if at + _ENTRY.size > len(data):
            raise _damaged("its directory is cut off")
        signature, flags, method, crc, packed, size, name, extra, comment, header = _ENTRY.unpack_from(data, at)
        begin = at + _ENTRY.size
        at = begin + name + extra + comment
        if signature != b"PK\x01\x02" or at > len(data):
            raise _damaged("its directory is damaged")
        if _ALL_ONES in (packed, size, header):
            size, packed, header = _long_fields(data[begin + name : begin + name + extra], size, packed, header)
        if header + size > start:
            raise _damaged("one of its records lies outside of it")
        is_stored = method == 0 and packed == size and not flags & _ENCRYPTED
        entries.append(_Entry(data[begin : begin + name], header, size, crc, is_stored))
    return entries


def _long_fields(extra: bytes, *fields: int) -> list[int]:
    """``fields``, those that are all ones taken from the extra field of 64-bit numbers, in their order."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{min(size, len(extra) - at - 4) // 8}Q", extra, at + 4))
            return [next(numbers, field) if field == _ALL_ONES else field for field in fields]
        at += 4 + size
    return list(fields)


def _record(read: Read, entry: _Entry, length: int) -> ArchiveRecord:
    """Where the record's data is, once its own header says what the directory says."""
    begin = entry.header + _LOCAL.size
    if begin + len(entry.name) > length:
        raise _damaged("one of its records lies outside of it")
    header = read(entry.header, begin + len(entry.name))
    signature, _, method, _, _, _, name_bytes, extra_bytes = _LOCAL.unpack_from(header)
    begin += name_bytes + extra_bytes
    if signature != b"PK\x03\x04" or method or begin + entry.nbytes > length or header[_LOCAL.size :] != entry.name:
        raise _damaged(f"the header of its record {entry.name!r} is damaged")
    # Writers that are told not to compute checksums write 0.
    return ArchiveRecord(begin=begin, nbytes=entry.nbytes, checksum=entry.crc or None)


def _content(read: Read, entry: _Entry, length: int) -> bytes:
    if entry.nbytes > _MOST_PICKLE_BYTES:
        raise _damaged(f"its record {entry.name!r} is too large")
    record = _record(read, entry, length)
    data = read(record.begin, record.begin + record.nbytes)
    if record.checksum is not None and zlib.crc32(data) != record.checksum:
        raise _damaged(f"its record {entry.name!r} has another checksum")
    return data


def _damaged(problem: str) -> CorruptError:
    return CorruptError(f"is not a whole torch.save archive: {problem}")


class _View(NamedTuple):
    """A tensor over the record ``data/<storage>`` of ``storage_bytes``, from whose start ``elements`` counts."""

    storage: str
    storage_bytes: int
    elements: Elements


class _Storage(NamedTuple):
    """What a persistent id of torch.save names."""

    key: str
    dtype: torch.dtype
    elements: int


class _Tensor(NamedTuple):
    """What the function ``function`` is to rebuild a tensor from."""

    function: str
    arguments: tuple[Any, ...]


class _NoView(Exception):
    """The pickle is fine, but not a plain dense tensor."""


# Each kind of storage is told by its dtype; an untyped one counts bytes.
_CONSTANTS: dict[str, object] = {
    **{f"torch.{storage_class.__name__}": dtype for dtype, storage_class in STORAGE_CLASSES.items()},
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.Size": torch.Size,
    "collections.OrderedDict": lambda: {},
}


@lru_cache(maxsize=4096)
def _decode_view(data: bytes) -> _View | None:
    """The view that a pickle describes; the pickles of equally shaped tensors are equal, and decoded once."""
    # Functions made for this call, because a stream may set attributes of what it names; dtypes have none to set.
    makers = {
        "torch._utils._rebuild_tensor_v2": lambda *arguments: _Tensor("v2", arguments),
        "torch._utils._rebuild_tensor_v3": lambda *arguments: _Tensor("v3", arguments),
        "torch._utils._rebuild_parameter": lambda *arguments: _Tensor("parameter", arguments),
    }

    def find(module: str, name: str) -> object:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        full = f"{module}.{name}"
        return makers[full] if full in makers else _CONSTANTS[full]

    try:
        return _view(unpickle(data, find, what="its pickle", persistent=_storage))
    except (UnsafeError, _NoView):
        return None
    except CorruptError as error:
        if isinstance(error.__cause__, _NoView):
            return None
        raise _damaged(error.message) from error
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise _damaged(f"its pickle calls for something impossible: {error}") from error


def _storage(pid: object) -> _Storage:
    if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], torch.dtype)):
        raise _NoView
    if not isinstance(pid[2], str) or type(pid[4]) is not int or pid[4] < 0:
        raise _NoView
    return _Storage(pid[2], pid[1], pid[4])


def _view(found: object) -> _View:
    if isinstance(found, _Tensor) and found.function == "parameter":
        found = found.arguments[0]
    if not isinstance(found, _Tensor) or found.function == "parameter":
        raise _NoView
    storage, first, size, stride, _, _, *rest = found.arguments
    if not isinstance(storage, _Storage):
        raise _NoView
    dtype, *rest = rest if found.function == "v3" else (storage.dtype, *rest)
    # What comes after all this are the lazy conjugation and negation of the elements.
    if not isinstance(dtype, torch.dtype) or any(rest):
        raise _NoView
    shape, strides = tuple(map(int, size)), tuple(map(int, stride))
    if len(shape) != len(strides) or first < 0 or any(number < 0 for number in (*shape, *strides)):
        raise ValueError(f"a tensor of shape {shape} and strides {strides}")
    order = _memory_order(shape, strides)
    if order is None:
        raise _NoView
    nbytes = math.prod(shape) * dtype.itemsize
    begin = first * dtype.itemsize if nbytes else 0
    storage_bytes = storage.elements * storage.dtype.itemsize
    if begin + nbytes > storage_bytes:
        raise ValueError(f"a tensor of {nbytes} bytes in a storage of {storage_bytes}")
    elements = Elements(begin=begin, nbytes=nbytes, dtype=dtype, shape=shape, order=order, checksum=None)
    return _View(storage.key, storage_bytes, elements)


def _memory_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The dimensions from the outermost in memory to the innermost; None where elements overlap or leave gaps."""
    dimensions = range(len(shape))
    if 0 in shape:
        return tuple(dimensions)
    # Dimensions of one element may have any stride, and may be put anywhere.
    order = sorted(dimensions, key=lambda dimension: (-strides[dimension] if shape[dimension] > 1 else 0, dimension))
    expected = 1
    for dimension in reversed(order):
        if shape[dimension] > 1:
            if strides[dimension] != expected:
                return None
            expected *= shape[dimension]
    if [each for each in order if shape[each] > 1] == [each for each in dimensions if shape[each] > 1]:
        return tuple(dimensions)
    return tuple(order)
