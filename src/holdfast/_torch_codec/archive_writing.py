"""The bytes of ``torch.save(tensor)`` around the tensor's own, so that items can be laid out without torch.save.

An archive is a zip file without compression: ``head``, the row-major bytes of the tensor from a multiple of 64 on,
``tail``. Both are known from dtype and shape alone, but for the checksum, which stands behind the data: so every offset
is known before the first byte moves, and data of any size passes through in pieces. Never touches the data itself.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

DATA_ALIGNMENT = 64

STORAGE_CLASSES: dict[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}
"""torch's first dtypes have a storage class each; all later ones are an untyped storage and a dtype."""

_QUANTIZED_CLASSES: dict[torch.dtype, type] = {
    torch.quint8: torch.QUInt8Storage,
    torch.qint8: torch.QInt8Storage,
    torch.qint32: torch.QInt32Storage,
    torch.quint4x2: torch.QUInt4x2Storage,
    torch.quint2x4: torch.QUInt2x4Storage,
}

# The zip format: its signatures, and its way of saying that a number is in the 64-bit field instead.
_LOCAL, _CENTRAL, _DESCRIPTOR = b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08"
_END_64, _LOCATOR_64, _END = b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06"
_ELSEWHERE = 0xFFFFFFFF
_FLAGS = 0x0808  # checksum and sizes follow the data; names are UTF-8
_MADE_BY, _NEEDED = 0x031E, 45
PADDING_FIELD = b"FB"
"""torch's mark on the extra field that aligns the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorArchive:
    """``torch.save`` of a contiguous CPU tensor, without its ``data_bytes``; ``nbytes`` counts everything."""

    head: bytes
    data_bytes: int
    nbytes: int
    _between: bytes
    _after: bytes

    def tail(self, checksum: int) -> bytes:
        """What follows the data, whose CRC-32 is ``checksum``."""
        crc = struct.pack("<I", checksum)
        return b"".join((_DESCRIPTOR, crc, self._between, crc, self._after))


@lru_cache(maxsize=4096)
def tensor_archive(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorArchive:
    """The archive of a tensor of ``dtype`` and ``shape``."""
    data_bytes = dtype.itemsize * math.prod(shape)
    head = bytearray()
    directory = bytearray()
    records = first_records(_pickled_tensor(dtype, shape, data_bytes))
    for name, content in records.items():
        crc = zlib.crc32(content)
        directory += _central_entry(name, crc, len(content), len(head))
        head += _local_header(name, len(content), len(head)) + content + _descriptor(crc, len(content))
    data_entry = _central_entry("data/0", 0, data_bytes, len(head))
    head += _local_header("data/0", data_bytes, len(head))
    descriptor = _descriptor(0, data_bytes)
    directory_at = len(head) + data_bytes + len(descriptor)
    end = _end(count=len(records) + 1, nbytes=len(directory) + len(data_entry), at=directory_at)
    return TensorArchive(
        head=bytes(head),
        data_bytes=data_bytes,
        nbytes=directory_at + len(directory) + len(data_entry) + len(end),
        _between=descriptor[8:] + bytes(directory) + data_entry[:16],
        _after=data_entry[20:] + end,
    )


def first_records(pickled: bytes) -> dict[str, bytes]:
    """What an archive has before the data: the pickle, and what readers must know."""
    return {
        "data.pkl": pickled,
        ".format_version": b"1",
        ".storage_alignment": b"%d" % DATA_ALIGNMENT,
        "byteorder": sys.byteorder.encode(),
        "version": b"3\n",
    }


def storage_reference(number: int, dtype: torch.dtype | None, nbytes: int) -> tuple[Any, ...]:
    """How a pickle names the record ``data/<number>``: elements of ``dtype``, or bytes where it has no class."""
    storage_class = None if dtype is None else STORAGE_CLASSES.get(dtype) or _QUANTIZED_CLASSES.get(dtype)
    if dtype is None or storage_class is None:
        return "storage", torch.UntypedStorage, str(number), "cpu", nbytes
    return "storage", storage_class, str(number), "cpu", nbytes // dtype.itemsize


def rebuilding_call(
    storage: Any, dtype: torch.dtype, shape: tuple[int, ...], *, requires_grad: bool = False
) -> tuple[Any, tuple[Any, ...]]:
    """The call that torch.load makes to build a row-major tensor from what stands for its storage."""
    stride = torch.empty(shape, dtype=torch.uint8, device="meta").stride()
    arguments: tuple[Any, ...] = (storage, 0, shape, stride, requires_grad, OrderedDict())
    if dtype in STORAGE_CLASSES:
        return torch._utils._rebuild_tensor_v2, arguments
    return torch._utils._rebuild_tensor_v3, (*arguments, dtype)


class _WrittenStorage:
    """Stands for the storage of the tensor, which a pickle of torch.save only names."""

    def __init__(self, reference: tuple[Any, ...]) -> None:
        self.reference = reference


class _Reduced:
    """Pickles as a call."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


class _TensorPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        """What is written in place of ``obj``."""
        return obj.reference if isinstance(obj, _WrittenStorage) else None


def _pickled_tensor(dtype: torch.dtype, shape: tuple[int, ...], data_bytes: int) -> bytes:
    storage = _WrittenStorage(storage_reference(0, dtype, data_bytes))
    buffer = io.BytesIO()
    _TensorPickler(buffer, protocol=2).dump(_Reduced(*rebuilding_call(storage, dtype, shape)))
    return buffer.getvalue()


def _large(size: int) -> bool:
    return size >= _ELSEWHERE


def _local_header(name: str, size: int, at: int) -> bytes:
    """The header of a record that begins at ``at`` of the archive, padded so that its content is aligned."""
    title = f"archive/{name}".encode()
    extra = struct.pack("<HHQQ", 1, 16, size, size) if _large(size) else b""
    padding = -(at + 30 + len(title) + len(extra) + 4) % DATA_ALIGNMENT
    extra += struct.pack("<2sH", PADDING_FIELD, padding) + b"Z" * padding
    sizes = (_ELSEWHERE, _ELSEWHERE) if _large(size) else (0, 0)
    return struct.pack("<4s5H3I2H", _LOCAL, 0, _FLAGS, 0, 0, 0, 0, *sizes, len(title), len(extra)) + title + extra


def _descriptor(crc: int, size: int) -> bytes:
    return struct.pack("<4sIQQ" if _large(size) else "<4sIII", _DESCRIPTOR, crc, size, size)


def _central_entry(name: str, crc: int, size: int, at: int) -> bytes:
    """The directory's entry of a record; those behind the first 4 GiB of an archive do not occur."""
    title = f"archive/{name}".encode()
    extra = struct.pack("<HHQQ", 1, 16, size, size) if _large(size) else b""
    stated = _ELSEWHERE if _large(size) else size
    fixed = (_CENTRAL, 0, 0, _FLAGS, 0, 0, 0, crc, stated, stated, len(title), len(extra), 0, 0, 0, 0, at)
    return struct.pack("<4s6H3I5H2I", *fixed) + title + extra


def _end(*, count: int, nbytes: int, at: int) -> bytes:
    """The end of the directory, in the 64-bit form and in the one that refers to it."""
    whole = struct.pack("<4sQ2H2I4Q", _END_64, 44, _MADE_BY, _NEEDED, 0, 0, count, count, nbytes, at)
    locator = struct.pack("<4sIQI", _LOCATOR_64, 0, at + nbytes, 1)
    stated = min(at, _ELSEWHERE)
    return whole + locator + struct.pack("<4s4H2IH", _END, 0, 0, count, count, nbytes, stated, 0)
