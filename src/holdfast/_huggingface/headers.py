"""The header of a safetensors file, whoever wrote it: its tensors, strictly checked, in the order of their data.

Names may come in any order, with any spaces, and the data may start anywhere; but each name comes once, each size is
that of dtype and shape, and the data fills the file without holes and overlaps, as the safetensors library demands too.
In the files that torch writes rank by rank, ``__metadata__`` says which part of its tensor each one is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from holdfast._native.index import RESERVED_NAME
from holdfast._values.dtypes import (
    DTYPES,
    LENGTH_BYTES,
    MAX_DIMENSIONS,
    MAX_FILE_BYTES,
    MAX_HEADER_BYTES,
    MAX_KEY_BYTES,
    MAX_TENSORS,
)
from holdfast.errors import CorruptError

SHARDING_NAME = "DCP_SHARDING_INFO"
"""Under this name torch notes, in the files of each rank, where in its tensor each part begins."""

# What this library itself stores as U8, because not all readers know these names.
_LATER_NAMES = {
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}
_DTYPES = {dtype.safetensors: name for name, dtype in DTYPES.items() if dtype.safetensors} | _LATER_NAMES
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class Tensor(NamedTuple):
    """A tensor of a file, or the part of one from ``lo`` on; ``begin`` and ``end`` count from the start of the data."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    lo: tuple[int, ...]
    is_part: bool


class _AnyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Saved(msgspec.Struct, frozen=True):
    saved_offsets: tuple[int, ...]


_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_body = msgspec.json.Decoder(_AnyBody).decode
_decode_texts = msgspec.json.Decoder(dict[str, str]).decode
_decode_sharding = msgspec.json.Decoder(dict[str, _Saved]).decode


def count_strings(data: bytes) -> int:
    """How many strings there are in JSON: more than in what was decoded of it where a name comes twice."""
    if b"\\" not in data:
        return data.count(b'"') // 2
    return _STRING.subn(b"", data)[1]


def decode_any_header(header: bytes, *, file_bytes: int, path: str) -> list[Tensor]:
    """The tensors of the file ``path``, of which this is the header, with its length; CorruptError if one is wrong."""
    body = header[LENGTH_BYTES:]
    if not body.startswith(b"{") or len(body) > MAX_HEADER_BYTES:
        raise _bad(path, "it does not begin with an object")
    try:
        members = _decode_members(body)
        notes = _decode_texts(members.get(RESERVED_NAME, b"{}"))
        has_notes = members.pop(RESERVED_NAME, None) is not None
        bodies = {key: _decode_body(raw) for key, raw in members.items()}
        sharding = _decode_sharding(notes[SHARDING_NAME]) if SHARDING_NAME in notes else None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _bad(path, f"it is not the expected JSON ({error})") from error
    # Of each tensor its name, three more, and that of its dtype.
    if count_strings(body) != 5 * len(bodies) + 2 * len(notes) + has_notes:
        raise _bad(path, "a name comes twice in it")
    if len(bodies) > MAX_TENSORS:
        raise _bad(path, f"it has more than {MAX_TENSORS} tensors")
    tensors = [_tensor(key, each, sharding, path) for key, each in bodies.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    position = 0
    for tensor in tensors:
        if tensor.begin != position:
            how = "overlaps" if tensor.begin < position else "leaves a hole after"
            raise _bad(path, f"the data of {tensor.key[:200]!r} {how} what comes before it", tensor.key)
        position = tensor.end
    if position != file_bytes - len(header):
        data_bytes = file_bytes - len(header)
        raise _bad(path, f"its tensors end at byte {position} of the data, and there are {data_bytes}")
    return tensors


def _tensor(key: str, body: _AnyBody, sharding: Mapping[str, _Saved] | None, path: str) -> Tensor:
    begin, end = body.data_offsets
    shape = body.shape
    dtype = _DTYPES.get(body.dtype)
    # A character takes at most four bytes, so that most keys need no closer look.
    if 4 * len(key) > MAX_KEY_BYTES and len(key.encode()) > MAX_KEY_BYTES:
        raise _bad(path, f"{key[:200]!r} is a key of more than {MAX_KEY_BYTES} bytes", key)
    if dtype is None:
        raise _bad(path, f"{key[:200]!r} has the dtype {body.dtype[:80]!r}, which this library does not know", key)
    if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0:
        raise _bad(path, f"{key[:200]!r} has an impossible shape", key)
    # An empty tensor too must have strides that fit 63 bits.
    itemsize = DTYPES[dtype].itemsize
    if math.prod(size or 1 for size in shape) * itemsize >= MAX_FILE_BYTES:
        raise _bad(path, f"{key[:200]!r} is too large", key)
    if begin < 0 or end - begin != math.prod(shape) * itemsize:
        raise _bad(path, f"the data of {key[:200]!r} does not have the size of its shape", key)
    lo = (0,) * len(shape)
    if sharding is not None:
        saved = sharding.get(key)
        if saved is None or len(saved.saved_offsets) != len(shape):
            raise _bad(path, f"its {SHARDING_NAME} does not say where {key[:200]!r} begins", key)
        lo = saved.saved_offsets
        if not all(0 <= low < MAX_FILE_BYTES - size for low, size in zip(lo, shape, strict=True)):
            raise _bad(path, f"{key[:200]!r} begins at an impossible place", key)
    return Tensor(key, dtype, shape, begin, end, lo, sharding is not None)


def _bad(path: str, problem: str, key: str | None = None) -> CorruptError:
    return CorruptError(
        f"the header of {path!r} is damaged: {problem}; use another copy of the file", path=path, key=key
    )
