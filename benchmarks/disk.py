"""The disk under the benchmarks: its raw limit, its caches, its free space, and what "durable" means.

The raw limit is what O_DIRECT gives without any work on the bytes: 16 MiB slabs from page-aligned memory, several in
flight, space reserved first, fsync counted. Nothing here knows holdfast, so that the limit is not measured by the code
it judges.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import shutil
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SLAB = 16 * 1024 * 1024
PAGE = 4096
HUGE_PAGE = 2 * 1024 * 1024
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def write_raw(path: Path, total: int, *, threads: int, source: memoryview | None = None) -> None:
    """Write ``total`` bytes, rounded up to whole pages, at the speed of the disk; durable on return.

    They come from ``source``, if it is given, whole pages that hold as many bytes; else from a few slabs, used again.
    """
    rounded = _whole_pages(total)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, rounded)

        offsets = _Offsets(rounded)

        def write_share(slab: memoryview) -> None:
            for offset in offsets:
                length = min(SLAB, rounded - offset)
                taken = slab[:length] if source is None else source[offset : offset + length]
                if os.pwrite(descriptor, taken, offset) != length:
                    raise OSError(f"short write to {path}: is the disk full?")

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write_share, _slabs(threads)))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fsync_path(path.parent)


def read_raw(path: Path, *, threads: int) -> None:
    """Read the whole file at the speed of the disk, past the page cache, into memory that is then forgotten."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        total = os.fstat(descriptor).st_size

        offsets = _Offsets(total)

        def read_share(slab: memoryview) -> None:
            for offset in offsets:
                length = min(SLAB, total - offset)
                if os.preadv(descriptor, [slab[: _whole_pages(length)]], offset) != length:
                    raise OSError(f"short read from {path}")

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read_share, _slabs(threads)))
    finally:
        os.close(descriptor)


_prepared_slabs: list[memoryview] = []


def _slabs(count: int) -> list[memoryview]:
    """Memory full of random bits, made once: filling it is not the disk's work.

    Whole huge pages: the kernel takes direct transfers apart page by page, and small pages cost most of the speed.
    """
    while len(_prepared_slabs) < count:
        slab = huge_pages(SLAB)
        slab[:] = random.Random(len(_prepared_slabs)).randbytes(SLAB)
        _prepared_slabs.append(slab)
    return _prepared_slabs[:count]


def huge_pages(nbytes: int) -> memoryview:
    """So much memory from the start of a huge page on, rounded up to whole pages; not yet touched."""
    memory = mmap.mmap(-1, nbytes + PAGE + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return memoryview(memory)[-address % HUGE_PAGE :][: _whole_pages(nbytes)]


def prepare_raw(*, threads: int) -> None:
    """Make the slabs now, so that the first timed run does not."""
    _slabs(threads)


class _Offsets:
    """The slab offsets of a file, each to whichever thread asks next, so that all threads end together."""

    def __init__(self, total: int) -> None:
        self._offsets = iter(range(0, total, SLAB))
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        while True:
            with self._lock:
                offset = next(self._offsets, None)
            if offset is None:
                return
            yield offset


def _whole_pages(length: int) -> int:
    return -(-length // PAGE) * PAGE


def fsync_path(path: Path) -> None:
    """Make a file's bytes, or a directory's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_under(folder: Path) -> list[Path]:
    """Every file in the folder and below, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def cache_dropping() -> str:
    """How caches are dropped here, in words."""
    if os.access(_DROP_CACHES, os.W_OK):
        return "drop_caches"
    return "posix_fadvise(DONTNEED) on the files: not root, so the kernel may keep some of them"


def drop_caches(folders: Iterable[Path]) -> None:
    """Write back everything, then make the kernel forget the files in ``folders`` (as root: all files)."""
    os.sync()
    if os.access(_DROP_CACHES, os.W_OK):
        _DROP_CACHES.write_text("3\n")
        return
    for path in (path for folder in folders for path in files_under(folder)):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def bytes_from_disk() -> int:
    """How many bytes the kernel has read from disks for this process so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def bytes_under(folder: Path) -> int:
    """How many bytes the files under ``folder`` have."""
    return sum(path.stat().st_size for path in files_under(folder))


def read_through_cache(folder: Path) -> None:
    """Read every file once, so that the page cache holds them all."""
    buffer = bytearray(SLAB)
    for path in files_under(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def empty_folder(folder: Path) -> Path:
    """The folder, there and empty, with everything before it written back."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()
    return folder


def require_space(folder: Path, wanted: int) -> None:
    """Return only if the folder's disk has room for ``wanted`` bytes; exit with one line otherwise."""
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise SystemExit(
            f"too little disk space in {folder}: {wanted / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free; "
            "free some, choose another --dir, or run with --quick"
        )
