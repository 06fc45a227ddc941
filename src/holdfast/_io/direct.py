"""Large files: written and read past the page cache where the system allows it, through the cache where it does not.

Invariant: callers see the same bytes either way; a refusal of O_DIRECT, whether at open, by fcntl or at the first
transfer, costs speed and nothing else. Reads and writes are exact, at explicit offsets, and safe from many threads.
It never moves a file position and never follows a link.

The last one here is for files that grow: lines that are appended, each of them whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from holdfast._io import locks, page_cache, posix
from holdfast._process import CLOSED, Descriptor, Lock, forget_in_child, opened
from holdfast.errors import CorruptError, InternalError, StorageError

ALIGNMENT = 4096

_RESERVE_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENODEV, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
_COPIED_READ_BYTES = 16 << 20
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_IDLE_FILES = 32
_ASKED_BYTES = 64 << 20  # of smaller files it is not asked whether they are in memory
_in_memory: dict[int, bool] = {}


class OutputFile:
    """A new file being written at known offsets; its lock tells others that its writer lives.

    ``direct`` says whether writes go past the page cache; then address, length and offset of every write must be
    multiples of ``ALIGNMENT``. Nothing is durable before ``finish``, of which it took ``sync_s`` seconds to have it so.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = locks.LockedFile(path)
        self._lock = threading.Lock()
        self.path = self._file.path
        self.direct = False
        self.sync_s = 0.0

    def make(self, expected_bytes: int) -> None:
        """Make the file, which did not exist before, locked, with room for ``expected_bytes`` where it can be reserved.

        After a failure ``abandon`` it.
        """
        self._file.create()
        # In memory there is no room to choose, and filling it with zeros first takes as long as filling it.
        is_in_memory = expected_bytes >= _ASKED_BYTES and lies_in_memory(os.path.dirname(self.path))
        if hasattr(os, "posix_fallocate") and expected_bytes > 0 and not is_in_memory:
            with posix.reporting(f"reserve {expected_bytes} bytes for", self.path):
                try:
                    os.posix_fallocate(self._file.descriptor, 0, expected_bytes)
                except OSError as error:
                    if error.errno not in _RESERVE_UNSUPPORTED:
                        raise
        # Set afterwards, because an O_CREAT | O_DIRECT open that is refused may leave the file behind.
        if _O_DIRECT:
            with contextlib.suppress(OSError):
                flags = fcntl.fcntl(self._file.descriptor, fcntl.F_GETFL)
                fcntl.fcntl(self._file.descriptor, fcntl.F_SETFL, flags | _O_DIRECT)
                self.direct = True

    def write(self, view: memoryview, offset: int) -> None:
        """Writes all of ``view`` at ``offset``; where O_DIRECT turns out not to work, goes on without it for good."""
        rest = view.cast("B")
        while rest.nbytes:
            direct = self.direct
            with posix.reporting("write", self.path):
                try:
                    count = os.pwrite(self._file.descriptor, rest, offset)
                    if count == 0:
                        raise OSError(errno.EIO, "the system took no bytes")
                except OSError as error:
                    if error.errno != errno.EINVAL or not direct:
                        raise
                    self._leave_direct()
                    continue
                if direct and count < rest.nbytes and count % ALIGNMENT:
                    self._leave_direct()
            if not direct:
                # Has the kernel write it now, so that the sync at the end has little left to do.
                page_cache.advise(self._file.descriptor, "POSIX_FADV_DONTNEED", offset, count)
            rest = rest[count:]
            offset += count

    def finish(self, size: int, *, sync: bool = True) -> None:
        """Cuts the file to ``size`` and, unless told not to ``sync``, returns once its contents are durable.

        After an error only ``abandon`` it.
        """
        with posix.reporting("truncate", self.path):
            os.ftruncate(self._file.descriptor, size)
        if sync:
            begun = time.monotonic()
            posix.sync_file(self._file.descriptor, self.path)
            self.sync_s = time.monotonic() - begun

    def close(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        """Guarantees that the file is closed and its name gone."""
        try:
            # First the name: without the lock, others could take the file for a dead writer's.
            self._file.remove()
        finally:
            self._file.discard()

    def _leave_direct(self) -> None:
        with self._lock:
            if self.direct:
                flags = fcntl.fcntl(self._file.descriptor, fcntl.F_GETFL)
                fcntl.fcntl(self._file.descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT)
                self.direct = False


class InputFile:
    """A regular file being read at explicit offsets, by any number of threads.

    ``size`` is that at open. ``bytes_read`` counts what the kernel delivered, probes excepted. ``direct`` turns False
    once reading past the page cache was refused.
    """

    def __init__(self, descriptor: Descriptor, path: str, size: int) -> None:
        self._descriptor = descriptor
        self._direct_descriptor = CLOSED
        self._lock = threading.Lock()
        self.path = path
        self.size = size
        self.bytes_read = 0
        self.direct = _O_DIRECT != 0
        forget_in_child(self)

    def forget_parent(self) -> None:
        """Go on reading, from the same descriptor: reads at offsets do not disturb each other."""
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> InputFile:
        """The regular file ``path``, open for reading; a ``CorruptError`` where something else is there."""
        name = os.fspath(path)
        descriptor = posix.open_regular(name)
        try:
            with posix.reporting("open", name):
                return cls(descriptor, name, os.fstat(descriptor).st_size)
        except BaseException:
            posix.discard_descriptor(descriptor)
            raise

    def __enter__(self) -> InputFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def is_cached(self) -> bool:
        """Whether the file seems to be in the page cache, judged by a few pages; False where one cannot ask."""
        return self.size == 0 or page_cache.is_cached(self._descriptor, self.size)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fills ``view`` with the bytes at ``offset``; a file that ends before is a ``CorruptError``."""
        rest = view.cast("B")
        while rest.nbytes:
            count = self._read_once(self._descriptor, rest, offset)
            if count == 0:
                raise self._truncated(offset, offset + rest.nbytes)
            rest = rest[count:]
            offset += count

    def read_direct_into(self, view: memoryview, offset: int) -> None:
        """Fills ``view`` with the bytes at ``offset`` past the page cache, up to the end of the file.

        Address, length and offset are multiples of ``ALIGNMENT``; what lies beyond the file's end is left undefined.
        """
        wanted = view.cast("B")
        needed = max(0, min(wanted.nbytes, self.size - offset))
        done = 0
        while done < needed:
            descriptor = self._open_direct()
            # A short transfer may end anywhere, and only aligned ones may go on past the cache.
            if descriptor < 0 or done % ALIGNMENT:
                self.read_into(wanted[done:needed], offset + done)
                return
            try:
                count = self._read_once(descriptor, wanted[done:], offset + done)
            except StorageError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
                continue
            if count == 0:
                raise self._truncated(offset + done, offset + needed)
            done += count

    def take(self, start: int, end: int) -> memoryview | None:
        """A file fills memory that is given."""
        return None

    def read_range(self, view: memoryview, start: int, end: int, *, is_cached: bool) -> int:
        """Puts bytes [start, end) into ``view``, an aligned one; returns the offset in the file of its first byte.

        What ``is_cached``, and less than a page, comes through the page cache.
        """
        base = start - start % ALIGNMENT
        if end - base > view.nbytes:
            raise InternalError(f"a read of {end - start} bytes is larger than its buffer; please report it")
        if is_cached or end - start < ALIGNMENT:
            self.read_into(view[start - base : end - base], start)
        else:
            self.read_direct_into(view[: end - base + -(end - base) % ALIGNMENT], base)
        return base

    def close(self) -> None:
        descriptors = (self._descriptor, self._direct_descriptor)
        self._descriptor = self._direct_descriptor = CLOSED
        with contextlib.ExitStack() as stack:
            for descriptor in descriptors:
                stack.callback(posix.close_descriptor, descriptor, self.path)

    def _read_once(self, descriptor: int, view: memoryview, offset: int) -> int:
        with posix.reporting("read", self.path):
            if hasattr(os, "preadv"):
                count = os.preadv(descriptor, [view], offset)
            else:
                data = os.pread(descriptor, min(view.nbytes, _COPIED_READ_BYTES), offset)
                count = len(data)
                view[:count] = data
        with self._lock:
            self.bytes_read += count
        return count

    def _open_direct(self) -> int:
        """The descriptor that reads past the page cache; -1 where that is refused."""
        with self._lock:
            # Reading into a bytes object, as without preadv, has no alignment to offer.
            if not self.direct or not hasattr(os, "preadv"):
                return -1
            if self._direct_descriptor < 0:
                with contextlib.suppress(StorageError, CorruptError, OSError):
                    descriptor = posix.open_regular(self.path, flags=_O_DIRECT)
                    # The name may have been given to another file since, or to none; the first descriptor has ours.
                    if os.path.samestat(os.fstat(descriptor), os.fstat(self._descriptor)):
                        self._direct_descriptor = descriptor
                self.direct = self._direct_descriptor >= 0
            return self._direct_descriptor

    def _truncated(self, begin: int, end: int) -> CorruptError:
        return CorruptError(
            f"{self.path!r} is truncated: it ends before byte {end}; use another checkpoint",
            path=self.path,
            span=(begin, end),
        )


class LocalFiles:
    """Files by number: ``paths`` names them, ``sizes`` says how many bytes each must have, or have at least."""

    readers = 4
    """Threads that only read, for one that delivers: so many keep a disk busy, and three times as many were slower."""
    max_gap = 0
    piece_bytes = 16 << 20
    """What is best read at a time by who reads all."""
    is_remote = False

    def __init__(self, paths: Sequence[str], sizes: Sequence[int], *, at_least: bool = False) -> None:
        self._paths = paths
        self._sizes = sizes
        self._at_least = at_least
        self._are_cached: dict[int, bool] = {}
        self._lock = Lock()
        self._lent: dict[int, tuple[InputFile, int]] = {}
        self._idle: OrderedDict[int, InputFile] = OrderedDict()
        self._bytes_read = 0
        forget_in_child(self)

    def forget_parent(self) -> None:
        """Have no file open: what the parent reads at this moment is half done, and its locks may be held."""
        self._lock = Lock()
        self.close()

    @contextmanager
    def lend(self, number: int) -> Iterator[tuple[InputFile, bool]]:
        """File ``number``, open for the length of the block, and whether it was in the page cache at first sight.

        CorruptError when it is missing or has another size.
        """
        file, is_cached = self._take(number)
        try:
            yield file, is_cached
        finally:
            self._give_back(number)

    def check(self, number: int) -> None:
        """CorruptError unless file ``number`` is there in its size."""
        with self.lend(number):
            pass

    def is_cached(self, number: int) -> bool:
        with self.lend(number) as (_, is_cached):
            return is_cached

    def path(self, number: int) -> str:
        return self._paths[number]

    @property
    def bytes_read(self) -> int:
        """Bytes that the system delivered from these files; never waits for one that is being opened."""
        return self._bytes_read + sum(file.bytes_read for file in self._open_files())

    def _open_files(self) -> list[InputFile]:
        return [*(file for file, _ in tuple(self._lent.values())), *tuple(self._idle.values())]

    def close(self) -> None:
        """Close all files; nobody reads any more."""
        with self._lock:
            files = self._open_files()
            self._lent.clear()
            self._idle.clear()
            self._bytes_read += sum(file.bytes_read for file in files)
        with contextlib.ExitStack() as closing:
            for file in files:
                closing.callback(file.close)

    def _take(self, number: int) -> tuple[InputFile, bool]:
        with self._lock:
            if number in self._lent:
                file, readers = self._lent[number]
            else:
                file, readers = self._idle.pop(number) if number in self._idle else self._open(number), 0
            self._lent[number] = file, readers + 1
            if number not in self._are_cached:
                self._are_cached[number] = file.is_cached()
            return file, self._are_cached[number]

    def _give_back(self, number: int) -> None:
        with self._lock:
            file, readers = self._lent.pop(number, (None, 0))
            if file is None:
                return  # closed meanwhile
            if readers > 1:
                self._lent[number] = file, readers - 1
                return
            self._idle[number] = file
            if len(self._idle) <= _IDLE_FILES:
                return
            _, oldest = self._idle.popitem(last=False)
            self._bytes_read += oldest.bytes_read
        oldest.close()

    def _open(self, number: int) -> InputFile:
        path = self._paths[number]
        try:
            file = InputFile.open(path)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            raise missing(path) from error
        try:
            check_size(path, file.size, self._sizes[number], at_least=self._at_least)
        except BaseException:
            file.close()
            raise
        return file


def lies_in_memory(directory: str) -> bool:
    """Whether new files in ``directory`` are in memory, also where they are written past the page cache, as on tmpfs.

    The kernel lets only one thread at a time write to such a file. Asked once of each file system, with a page of a
    file that never has a name; False where there are no such files.
    """
    device = -1
    with contextlib.suppress(OSError, AttributeError):
        device = os.stat(directory).st_dev
        if device not in _in_memory:
            _in_memory[device] = False
            flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
            with (
                mmap.mmap(-1, ALIGNMENT) as page,
                contextlib.closing(opened(map(os.open, (directory,), (flags,), (0o600,)))) as descriptor,
            ):
                with contextlib.suppress(OSError):
                    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _O_DIRECT)
                os.pwrite(descriptor, page, 0)
                _in_memory[device] = page_cache.is_resident(descriptor, 0)
    return _in_memory.get(device, False)


def missing(path: str) -> CorruptError:
    """The error of a file that a checkpoint needs and that is not there."""
    return CorruptError(f"{path!r} is missing; use another checkpoint", path=path)


def check_size(path: str, size: int, expected: int, *, at_least: bool = False) -> None:
    """CorruptError unless ``size``, that of the file ``path``, is as ``expected``."""
    if size < expected or (size > expected and not at_least):
        raise CorruptError(
            f"{path!r} has {size} bytes instead of {expected}: it was truncated or replaced; use another checkpoint",
            path=path,
        )


def appender(path: str | os.PathLike[str], *, begin: bytes = b"") -> Callable[[bytes], None]:
    """What appends to the file ``path``, each time all or, if nobody else does so meanwhile, nothing.

    The file is made if there is none; an empty one gets ``begin`` first.
    """
    path = posix.absolute(path)
    with posix.reporting("open", path):
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        descriptor = opened(map(os.open, (path,), (flags,), (0o666,)))

    def append(data: bytes) -> None:
        with posix.reporting("write", path):
            end = os.fstat(descriptor).st_size
            data = data if end else begin + data
            if os.write(descriptor, data) < len(data):
                os.ftruncate(descriptor, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return append
