"""``.pt`` files, as torch.save writes them: read without loading the tensors, written without having them in memory.

Reading maps the file; what a tensor holds comes when it is touched. Writing goes record by record: first the pickle, in
which storages are only named, then the bytes of each storage. A file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import secrets
import threading
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdfast._io import posix
from holdfast._io.slabs import SLAB_BYTES, SlabRing
from holdfast._state.tensor_bytes import LazyTensor, Source, source_of
from holdfast._state.tensors import empty_quantized
from holdfast._torch_codec.archive_writing import (
    DATA_ALIGNMENT,
    PADDING_FIELD,
    first_records,
    rebuilding_call,
    storage_reference,
)
from holdfast._torch_codec.pickles import weigh
from holdfast.errors import CorruptError, InvalidStateError, NotACheckpointError, NotFoundError, UnsafeError

OnProgress = Callable[[int, int], None]

_MOST_GROWTH = 16
_ALWAYS_BYTES = 64 << 20


class Progress:
    """Counts bytes for whoever wants to know, from any thread; no more than ``max_bytes``, or what is in proportion."""

    def __init__(self, told: OnProgress | None, source: str | os.PathLike[str], max_bytes: int | None) -> None:
        self._told = told
        self._lock = threading.Lock()
        self._source = os.fspath(source)
        self._source_bytes = _bytes_at(self._source)
        self._most = max(_ALWAYS_BYTES, _MOST_GROWTH * self._source_bytes) if max_bytes is None else max_bytes
        self.done = 0
        self.total = 0

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Take the bytes of all tensors that will be written, by key; InvalidStateError when they are too many."""
        self.total = sum(sizes.values())
        if self.total > self._most:
            key = max(sizes, key=sizes.__getitem__)
            raise InvalidStateError(
                f"{self._source!r} has {self._source_bytes} bytes and would become {self.total}, {sizes[key]} of them "
                f"for {key[:200]!r}, more than {self._most}; pass max_bytes={self.total} if you want that",
                key=key,
            )

    def add(self, nbytes: int) -> None:
        """So many more are done."""
        with self._lock:
            self.done += nbytes
            if self._told is not None:
                self._told(self.done, max(self.total, self.done))


def _bytes_at(path: str) -> int:
    """The bytes of a file, or of the files in a directory and below."""
    if os.path.isfile(path):
        return os.path.getsize(path)
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names)


_Path = str | os.PathLike[str]

_ARCHIVE = "archive"
_ARCHIVE_START = b"PK\x03\x04"
_ZIP64_BYTES = 1 << 30
_LOCAL_HEADER_BYTES = 30
_ZIP64_EXTRA_BYTES = 20
_CHECKED_BYTES = 1 << 20


# --- reading ---------------------------------------------------------------------------------------------------------


def read_pt(path: _Path, *, allow_pickle: bool = False, verify: bool = True) -> Mapping[Any, Any]:
    """The state that torch.save wrote to ``path``, on the CPU.

    The tensors stay in the file until they are touched; only those of files in the format before torch 1.6, which is no
    archive, are loaded as a whole. ``verify`` checks the checksums that the archive has. Nothing but weights, plain
    containers and plain values is unpickled unless ``allow_pickle`` is set.
    """
    name = os.fspath(path)
    if not posix.exists(name):
        raise NotFoundError(f"there is no file {name!r}")
    is_archive = _check_archive(name, verify=verify)
    if not allow_pickle:
        with posix.open_stream(name, "rb") as stream, posix.reporting("read", name):
            weigh(stream, what=repr(name))
    try:
        state = torch.load(name, map_location="cpu", weights_only=not allow_pickle, mmap=is_archive)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        if allow_pickle or (not is_archive and not _is_pickle(name)):
            raise NotACheckpointError(f"{name!r} is no file that torch.save wrote: {reason}") from error
        raise UnsafeError(
            f"{name!r} has more than weights and plain values in it, and loading it would run code; "
            "pass allow_pickle=True if you trust it"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        if is_archive and _has_pickle(name):
            raise CorruptError(f"{name!r} is damaged: {reason}; use another file", path=name) from error
        raise NotACheckpointError(f"{name!r} cannot be read as a file that torch.save wrote: {reason}") from error
    if not isinstance(state, Mapping):
        raise InvalidStateError(
            f"{name!r} holds a {type(state).__name__}, and a state is a dict of names to values; save it within one"
        )
    return state


def _check_archive(name: str, *, verify: bool) -> bool:
    """Whether the file is an archive; CorruptError when a record is damaged."""
    with posix.open_stream(name, "rb") as stream, posix.reporting("read", name):
        is_archive = stream.read(len(_ARCHIVE_START)) == _ARCHIVE_START
        try:
            if not zipfile.is_zipfile(stream) and not is_archive:
                return False
            with zipfile.ZipFile(stream) as archive:
                records = archive.infolist()
                if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                    problem = "has compressed records, which torch.save never writes"
                    raise CorruptError(f"{name!r} {problem}; use another file", path=name)
                # torch can be told to compute no checksums; then it writes 0.
                for record in (record for record in records if verify and record.CRC):
                    with archive.open(record) as file:
                        while file.read(_CHECKED_BYTES):
                            pass
        except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, RuntimeError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which is what a mad offset gets
                raise
            raise CorruptError(f"{name!r} is a damaged archive: {error}; use another file", path=name) from error
    return True


def _has_pickle(name: str) -> bool:
    """Whether the archive has what torch.save puts into one."""
    with posix.open_stream(name, "rb") as stream, zipfile.ZipFile(stream) as archive:
        return any(record.endswith("/data.pkl") for record in archive.namelist())


def _is_pickle(name: str) -> bool:
    with posix.open_stream(name, "rb") as stream:
        return stream.read(1) == pickle.PROTO  # type: ignore[no-any-return]


# --- writing ---------------------------------------------------------------------------------------------------------


def write_pt(state: Mapping[Any, Any], path: _Path, *, overwrite: bool = False) -> None:
    """Write ``state`` to ``path`` as torch.save would, durably; its LazyTensors are read while they are written.

    Tensors that are one object, or share a ``source``, share their storage again when loaded.
    """
    name = os.fspath(path)
    content, storages = _pickled(state)
    temporary = f"{name}.{secrets.token_hex(8)}.tmp"
    try:
        # Around the stream, because closing it writes too.
        with posix.reporting("write", name), posix.open_stream(temporary, "xb") as stream:
            _write_archive(stream, content, storages)
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
            for record, data in first_records(content).items():
                with _record(archive, stream, record, len(data)) as file:
                    file.write(data)
            for number, source in enumerate(storages):
                with _record(archive, stream, f"data/{number}", source.nbytes) as file:
                    for start in range(0, source.nbytes, SLAB_BYTES):
                        stop = min(start + SLAB_BYTES, source.nbytes)
                        source.copy_out(start, stop, slab, 0)
                        file.write(slab.view[: stop - start])
        archive.close()
    except BaseException:
        archive.fp = None  # the file is given up: nothing is to be written to it any more, now or when this is dropped
        raise


def _record(archive: zipfile.ZipFile, stream: io.IOBase, name: str, nbytes: int) -> Any:
    """A new record of ``nbytes``, open for writing; a field of padding in its header puts its data on an alignment."""
    info = zipfile.ZipInfo(f"{_ARCHIVE}/{name}")
    is_large = nbytes >= _ZIP64_BYTES
    header = _LOCAL_HEADER_BYTES + len(info.filename) + (_ZIP64_EXTRA_BYTES if is_large else 0) + 4
    padding = -(stream.tell() + header) % DATA_ALIGNMENT
    info.extra = PADDING_FIELD + padding.to_bytes(2, "little") + bytes(padding)
    return archive.open(info, "w", force_zip64=is_large)


def _pickled(state: object) -> tuple[bytes, list[Source]]:
    """The pickle of ``state``, and the storages that it names by their numbers."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(state)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise InvalidStateError(f"the state cannot be pickled: {error}") from error
    return buffer.getvalue(), pickler.storages


class _StorageName:
    """Stands in the pickle for the storage with that number."""

    def __init__(self, number: int, dtype: torch.dtype | None, nbytes: int) -> None:
        self.persistent = storage_reference(number, dtype, nbytes)


class _Pickler(pickle.Pickler):
    """Pickles what torch.load takes: tensors by the functions that torch rebuilds them with, storages by number."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=2)
        self.storages: list[Source] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []

    def persistent_id(self, obj: Any) -> Any:
        """How a storage is named in the pickle; None for everything else."""
        if isinstance(obj, _StorageName):
            return obj.persistent
        if isinstance(obj, torch.storage.TypedStorage):
            return self._named(obj._untyped_storage, obj.dtype).persistent
        if isinstance(obj, torch.UntypedStorage):
            return self._named(obj, None).persistent
        return None

    def reducer_override(self, obj: Any) -> Any:
        """A LazyTensor as the call that rebuilds a tensor; everything else as usual."""
        if not isinstance(obj, LazyTensor):
            return NotImplemented
        storage = _StorageName(self._number_of(obj.source), obj.dtype, obj.source.nbytes)
        if obj.quantizer is not None:
            rebuild, (_, *rest) = empty_quantized(obj.shape, obj.dtype, obj.quantizer).__reduce_ex__(2)
            return rebuild, (storage, *rest)
        return rebuilding_call(storage, obj.dtype, tuple(obj.shape), requires_grad=obj.requires_grad)

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
