"""What torch.save writes, written without torch.save: the archive of one tensor around its bytes, and ``.pt`` files.

The archive of a tensor is a zip file without compression: ``head``, the row-major bytes of the tensor from a multiple
of 64 on, ``tail``. Both are known from dtype and shape alone, but for the checksum, which stands behind the data: so
every offset is known before the first byte moves, and data of any size passes through in pieces.

A ``.pt`` file is written record by record: first the pickle, in which storages are only named, then the bytes of each
storage. It appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import secrets
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import IO

import torch

from holdfast._io import posix
from holdfast._io.slabs import SLAB_BYTES, SlabRing
from holdfast._state.tensor_bytes import LazyTensor, Source, source_of
from holdfast._state.tensors import empty_quantized
from holdfast.errors import InvalidStateError

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
_PADDING_FIELD = b"FB"  # torch's mark on the extra field that aligns the data
# When a record written by zipfile gets 64-bit fields; and the sizes of the parts of its header.
_ZIP64_BYTES, _LOCAL_HEADER_BYTES, _ZIP64_EXTRA_BYTES = 1 << 30, 30, 20

_Call = tuple[Callable[..., object], tuple[object, ...]]


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
    data_bytes = dtype.itemsize * math.prod(shape)
    head = bytearray()
    directory = bytearray()
    records = _first_records(_pickled_tensor(dtype, shape, data_bytes))
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


def _first_records(pickled: bytes) -> dict[str, bytes]:
    """What an archive has before the data: the pickle, and what readers must know."""
    return {
        "data.pkl": pickled,
        ".format_version": b"1",
        ".storage_alignment": b"%d" % DATA_ALIGNMENT,
        "byteorder": sys.byteorder.encode(),
        "version": b"3\n",
    }


def _rebuilding_call(
    storage: object, dtype: torch.dtype, shape: tuple[int, ...], *, requires_grad: bool = False
) -> _Call:
    """The call that torch.load makes to build a row-major tensor from what stands for its storage."""
    stride = torch.empty(shape, dtype=torch.uint8, device="meta").stride()
    hooks: OrderedDict[object, object] = OrderedDict()
    arguments = (storage, 0, shape, stride, requires_grad, hooks)
    if dtype in STORAGE_CLASSES:
        return torch._utils._rebuild_tensor_v2, arguments
    return torch._utils._rebuild_tensor_v3, (*arguments, dtype)


def _pickled_tensor(dtype: torch.dtype, shape: tuple[int, ...], data_bytes: int) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(_Reduced(_rebuilding_call(_StorageName(0, dtype, data_bytes), dtype, shape)))
    return buffer.getvalue()


class _Reduced:
    def __init__(self, call: _Call) -> None:
        self._call = call

    def __reduce__(self) -> _Call:
        return self._call


class _StorageName:
    """Stands in a pickle for the record ``data/<number>``: elements of ``dtype``, or bytes where it has no class."""

    def __init__(self, number: int, dtype: torch.dtype | None, nbytes: int) -> None:
        storage_class = None if dtype is None else STORAGE_CLASSES.get(dtype) or _QUANTIZED_CLASSES.get(dtype)
        elements = nbytes if dtype is None or storage_class is None else nbytes // dtype.itemsize
        self.persistent = "storage", storage_class or torch.UntypedStorage, str(number), "cpu", elements


class _Pickler(pickle.Pickler):
    """Pickles what torch.load takes: tensors by the functions that torch rebuilds them with, storages by number."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=2)
        self.storages: list[Source] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []

    def persistent_id(self, obj: object) -> object:
        """How a storage is named in the pickle; None for everything else."""
        if isinstance(obj, _StorageName):
            return obj.persistent
        if isinstance(obj, torch.storage.TypedStorage):
            return self._named(obj._untyped_storage, obj.dtype).persistent
        if isinstance(obj, torch.UntypedStorage):
            return self._named(obj, None).persistent
        return None

    def reducer_override(self, obj: object) -> _Call:
        """A LazyTensor as the call that rebuilds a tensor; everything else as usual."""
        if not isinstance(obj, LazyTensor):
            return NotImplemented  # type: ignore[no-any-return]
        storage = _StorageName(self._number_of(obj.source), obj.dtype, obj.source.nbytes)
        if obj.quantizer is not None:
            rebuild, (_, *rest) = empty_quantized(obj.shape, obj.dtype, obj.quantizer).__reduce_ex__(2)
            return rebuild, (storage, *rest)
        return _rebuilding_call(storage, obj.dtype, tuple(obj.shape), requires_grad=obj.requires_grad)

    def _named(self, storage: torch.UntypedStorage, dtype: torch.dtype | None) -> _StorageName:
        """The name of a storage that is in memory, which is written as it is."""
        storage = storage.cpu()
        source = source_of(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
        self._kept.append(source)
        return _StorageName(self._number_of(source, storage._cdata), dtype, storage.nbytes())

    def _number_of(self, source: Source, identity: int | None = None) -> int:
        number = self._numbers.setdefault(id(source) if identity is None else identity, len(self.storages))
        if number == len(self.storages):
            self.storages.append(source)
        return number


def _large(size: int) -> bool:
    return size >= _ELSEWHERE


def _local_header(name: str, size: int, at: int) -> bytes:
    """The header of a record that begins at ``at`` of the archive, padded so that its content is aligned."""
    title = f"archive/{name}".encode()
    extra = struct.pack("<HHQQ", 1, 16, size, size) if _large(size) else b""
    padding = -(at + 30 + len(title) + len(extra) + 4) % DATA_ALIGNMENT
    extra += struct.pack("<2sH", _PADDING_FIELD, padding) + b"Z" * padding
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


def write_pt(state: Mapping[str, object], path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write ``state`` to ``path`` as torch.save would, durably; its LazyTensors are read while they are written.

    Tensors that are one object, or share a ``source``, share their storage again when loaded.
    """
    name = os.fspath(path)
    content = io.BytesIO()
    pickler = _Pickler(content)
    try:
        pickler.dump(state)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InvalidStateError(f"the state cannot be pickled: {error}") from error
    temporary = f"{name}.{secrets.token_hex(8)}.tmp"
    try:
        # Around the stream, because closing it writes too.
        with posix.reporting("write", name), posix.open_stream(temporary, "xb") as stream:
            _write_archive(stream, content.getvalue(), pickler.storages)
            stream.flush()
            posix.sync_file(stream.fileno(), temporary)
        (posix.replace if overwrite else posix.link_new)(temporary, name)
    except BaseException:
        with contextlib.suppress(Exception):
            posix.remove(temporary)
        raise
    posix.sync_directory(os.path.dirname(name) or os.curdir)


def _write_archive(stream: io.IOBase, content: bytes, storages: list[Source]) -> None:
    ring = SlabRing(1)
    archive = zipfile.ZipFile(stream, "w")
    try:
        with ring.lend() as slab:
            for record, data in _first_records(content).items():
                with _new_record(archive, stream, record, len(data)) as file:
                    file.write(data)
            for number, source in enumerate(storages):
                with _new_record(archive, stream, f"data/{number}", source.nbytes) as file:
                    for start in range(0, source.nbytes, SLAB_BYTES):
                        stop = min(start + SLAB_BYTES, source.nbytes)
                        source.copy_out(start, stop, slab, 0)
                        file.write(slab.view[: stop - start])
        archive.close()
    except BaseException:
        archive.fp = None  # the file is given up: nothing is to be written to it any more, now or when this is dropped
        raise


def _new_record(archive: zipfile.ZipFile, stream: io.IOBase, name: str, nbytes: int) -> IO[bytes]:
    """A new record of ``nbytes``, open for writing; a field of padding in its header puts its data on an alignment."""
    info = zipfile.ZipInfo(f"archive/{name}")
    is_large = nbytes >= _ZIP64_BYTES
    header = _LOCAL_HEADER_BYTES + len(info.filename) + (_ZIP64_EXTRA_BYTES if is_large else 0) + 4
    padding = -(stream.tell() + header) % DATA_ALIGNMENT
    info.extra = _PADDING_FIELD + padding.to_bytes(2, "little") + bytes(padding)
    return archive.open(info, "w", force_zip64=is_large)
