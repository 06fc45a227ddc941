"""Safetensors headers: how a data file says what it holds, and how a chunk is named in it.

A header is the eight little-endian bytes of its length, JSON, and spaces up to a multiple of ``HEADER_ALIGNMENT``, so
that the data starts on a page. There is one way to write a list of entries, and nothing else is read. Never touches a
file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast._values.box import Box
from holdfast._values.dtypes import DTYPES, MAX_DIMENSIONS, MAX_FILE_BYTES, MAX_HEADER_BYTES, Dtype
from holdfast.errors import CorruptError, InternalError, InvalidStateError

HEADER_ALIGNMENT = 4096
"""Data starts at a multiple of this, which suits every page size and every O_DIRECT alignment in use."""

LENGTH_BYTES = 8
"""The length that comes before the JSON takes this many bytes."""

RESERVED_NAME = "__metadata__"
"""The name that safetensors keeps for a file's own notes."""

_ITEM_SIZES = {dtype.safetensors: dtype.itemsize for dtype in DTYPES.values() if dtype.safetensors is not None}
_LONGEST_DTYPE = max(len(name) for name in _ITEM_SIZES)
_LONGEST_NUMBER = len(str(MAX_FILE_BYTES))
_ENTRY_ROOM = len(',:{"dtype":"","shape":[],"data_offsets":[,]}') + _LONGEST_DTYPE + 3 * _LONGEST_NUMBER

_NUMBER = r"(?:0|[1-9][0-9]{0,18})"
_RANGES = re.compile(rf"(?:{_NUMBER}:{_NUMBER}(?:,{_NUMBER}:{_NUMBER})*)?\]")


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


def parse_chunk_name(name: str) -> tuple[str, Box | None]:
    """The key and the box that ``chunk_name`` made ``name`` from; no box when the name is a key for all of it."""
    key, mark, ranges = name.rpartition("@[")
    if not mark or _RANGES.fullmatch(ranges) is None:
        return name, None
    pairs = [pair.split(":") for pair in ranges[:-1].split(",")] if ranges != "]" else []
    offsets = tuple(int(low) for low, _ in pairs)
    lengths = tuple(int(high) - low for (_, high), low in zip(pairs, offsets, strict=True))
    if any(length < 0 for length in lengths):
        return name, None
    return key, Box(offsets, lengths)


def stored_dtype_name(dtype: Dtype) -> str:
    """The safetensors dtype under which ``dtype`` is stored."""
    return dtype.safetensors or "U8"


def stored_shape(dtype: Dtype, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape under which a tensor of ``shape`` is stored: one more dimension where its elements become bytes."""
    if dtype.safetensors is None and dtype.itemsize > 1:
        return (*shape, dtype.itemsize)
    return tuple(shape)


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
        raise _corrupt(path, "its length is wrong")
    try:
        members = _decode_members(data[LENGTH_BYTES:])
        members.pop(RESERVED_NAME, None)
        bodies = {name: _decode_body(raw) for name, raw in members.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _corrupt(path, "it is not the JSON that it should be") from error
    entries: list[HeaderEntry] = []
    position = 0
    for name, body in bodies.items():
        begin, end = body.data_offsets
        _check_body(name, body, position, path)
        entries.append(HeaderEntry(name=name, dtype=body.dtype, shape=body.shape, begin=begin, end=end))
        position = end
    # Names that come twice, odd spacing and foreign notes all show as a difference to the one way of writing it.
    if encode_header(entries, reserve=len(data), metadata=metadata) != data:
        raise _corrupt(path, "it is not written in the one way that it should be")
    return entries


def _check_body(name: str, body: _Body, position: int, path: str) -> None:
    begin, end = body.data_offsets
    itemsize = _ITEM_SIZES.get(body.dtype)
    if itemsize is None:
        raise _corrupt(path, f"{name[:200]!r} has an unknown dtype")
    if len(body.shape) > MAX_DIMENSIONS + 1 or any(not 0 <= size <= MAX_FILE_BYTES for size in body.shape):
        raise _corrupt(path, f"{name[:200]!r} has an impossible shape")
    if begin != position or not begin <= end <= MAX_FILE_BYTES:
        raise _corrupt(path, f"the data of {name[:200]!r} does not follow what comes before it")
    if math.prod(body.shape) * itemsize != end - begin:
        raise _corrupt(path, f"the data of {name[:200]!r} has not the size of its shape")


def _quoted(name: str) -> bytes:
    try:
        return _encode_json(name)
    except UnicodeEncodeError as error:
        raise InvalidStateError(f"the key {name[:200]!r} is not valid Unicode; rename it", key=name) from error


def _corrupt(path: str, problem: str) -> CorruptError:
    return CorruptError(
        f"the header of {path or 'a data file'} is damaged: {problem}; use another checkpoint", path=path or None
    )
