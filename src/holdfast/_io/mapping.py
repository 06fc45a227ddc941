"""Memory straight from the kernel, private or shared with another process, and data files that lie in it.

Pages are large where the kernel gives such: direct transfers to small ones are two to three times slower.

Files lie in memory as they are to lie on disk. They are hashed there and written from there, without a copy. Plain
numbers say where a file begins, how long it is and which ranges are its blocks. So another process, which has only the
memory, can do the same. For its sake nothing here knows torch.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np

from holdfast._io.direct import ALIGNMENT, OutputFile
from holdfast._io.pipeline import run_bounded
from holdfast._process import Descriptor, Once, opened, start_thread
from holdfast._values.deadline import Progress
from holdfast._values.digest import digest
from holdfast.errors import StorageError

HUGE_PAGE = 2 << 20

# Of Linux; the names are not in every Python's mmap.
_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25
_PATIENCE_S = 0.25
_ASKED_BYTES = 32 << 20
_MADV_WIPEONFORK = 18

_system = ctypes.CDLL(None, use_errno=True)
_map = _system.mmap
_map.restype = ctypes.c_void_p
_map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t)
_advise = _system.madvise
_advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_private(size: int, *, is_wiped: bool = False) -> tuple[mmap.mmap, int]:
    """Anonymous memory of this process, ``size`` bytes from the returned offset on; real when first touched.

    A forked child finds it as it was, or, where ``is_wiped``, empty. Memory for direct reads must be wiped: pages that
    both have are copied when one of them writes, and what is on its way from the disk may go to the other (open(2)).
    """
    # Private, because shared anonymous memory is a tmpfs: no huge pages, and charged to a container's /dev/shm.
    memory = _room_for(size)
    _ask_for_huge_pages(memory)
    if is_wiped and sys.platform == "linux":
        with contextlib.suppress(OSError):  # before 4.14
            memory.madvise(_MADV_WIPEONFORK)
    return memory, -_address(memory) % HUGE_PAGE


def new_shared(size: int) -> Descriptor:
    """The descriptor of new memory, which nobody can shrink, for every process that gets it; the caller closes it.

    Not charged to /dev/shm, which is small in many containers.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no anonymous shared memory (memfd_create)")
    descriptor = opened(map(os.memfd_create, ("holdfast",), (os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING,)))
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        descriptor.close()
        raise
    return descriptor


def attach(descriptor: int, size: int) -> tuple[mmap.mmap, int]:
    """The memory behind a descriptor of ``new_shared``, from the returned offset on, fit for ``collapse``.

    For that a huge page of the memory must be one of the address space too, and ``mmap`` lets nobody choose an address:
    the memory is put over part of a larger range, and goes with it.
    """
    room = _room_for(size)
    start = _address(room)
    offset = -start % HUGE_PAGE
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _map(start + offset, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0) != start + offset:
        raise OSError(ctypes.get_errno(), "cannot map shared memory")
    _ask_for_huge_pages(room)
    return room, offset


def collapse(memory: mmap.mmap, start: int, stop: int) -> None:
    """Have shared memory [start, stop), which nobody has used yet, in huge pages, where the kernel makes them.

    Linux does from 6.1 on, whatever its settings for shared memory are: those are for what it does unasked. On a busy
    machine it may take minutes for a single page, and lets nobody stop it. So a thread asks, and is left alone when it
    gets no further.
    """
    for page in range(start, stop, HUGE_PAGE):
        memory[page] = 0  # of a page without any memory nothing is made
    is_over, asked = Once(), [start]
    limit = [stop]

    def ask() -> None:
        try:
            while asked[0] < limit[0]:
                # Where it is refused, memory stays as it is; not by way of mmap, which would hold the interpreter.
                count = min(_ASKED_BYTES, stop - asked[0])
                _advise(_address(memory) + asked[0], count, _MADV_COLLAPSE)
                asked[0] += count
        finally:
            is_over.set()

    start_thread(threading.Thread(target=ask, name="holdfast-huge-pages", daemon=True))
    before = -1
    while not is_over.wait(_PATIENCE_S) and asked[0] != before:
        before = asked[0]
    limit[0] = start


def _room_for(size: int) -> mmap.mmap:
    """Addresses for ``size`` bytes from a huge page's first one on."""
    return mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _address(memory: mmap.mmap) -> int:
    address: int = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]
    return address


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        # Kernels without huge pages, or without them for shared memory, refuse; then it is slower, nothing else.
        with contextlib.suppress(OSError):
            memory.madvise(advice)


# --- files that lie in memory ----------------------------------------------------------------------------------------

_JOB_BYTES = 16 << 20
_WORKERS = max(4, min(8, (os.cpu_count() or 4) // 2))  # to keep a disk busy, and leave the processor to the training


class FileImage(msgspec.Struct, frozen=True, kw_only=True):
    """One data file: ``size`` bytes from ``begin`` on, which is a page; the first ``header`` of them are its header.

    ``starts`` and ``stops`` bound the blocks, in order, counted from the start of the memory like ``begin``; ``known``
    has their digests, as far as there are any yet. The memory after the file's end, up to the next page, belongs to it
    and is zero. ``path`` is in bytes: not every name is Unicode.
    """

    path: bytes
    begin: int
    size: int
    header: int
    starts: list[int]
    stops: list[int]
    known: list[int | None]


class WrittenImage(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a file image: the digest of each block, and the one that covers header and block digests."""

    digests: list[int]
    digest: int


class ImageFiles:
    """Writes file images; until ``close`` the files stay open and locked, which tells others that their writer lives.

    ``progress`` is told of each piece, before and after.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._outputs: list[OutputFile] = []

    def write(self, files: Sequence[FileImage], memory: memoryview) -> list[WrittenImage]:
        """What was written, durably; after an error ``abandon`` what there is."""
        digests = [[0] * len(file.starts) for file in files]
        for file in files:
            self._outputs.append(OutputFile(os.fsdecode(file.path)))
            self._outputs[-1].make(file.size)
        run_bounded(self._jobs(files, memory, digests), workers=_WORKERS)
        written: list[WrittenImage] = []
        for file, output, blocks in zip(files, self._outputs, digests, strict=True):
            self._progress.check()
            output.finish(file.size)
            self._progress.sync_s += output.sync_s
            header = memory[file.begin : file.begin + file.header]
            covered = digest(bytes(header) + np.array(blocks, dtype="<u8").tobytes())
            written.append(WrittenImage(digests=blocks, digest=covered))
        return written

    def _jobs(
        self, files: Sequence[FileImage], memory: memoryview, digests: list[list[int]]
    ) -> Iterator[Callable[[], None]]:
        for file, output, blocks in zip(files, self._outputs, digests, strict=True):
            end = file.begin + -(-file.size // ALIGNMENT) * ALIGNMENT
            for start in range(file.begin, end, _JOB_BYTES):
                yield partial(self._write_piece, file, output, memory, blocks, start, min(start + _JOB_BYTES, end))

    def _write_piece(
        self, file: FileImage, output: OutputFile, memory: memoryview, blocks: list[int], start: int, stop: int
    ) -> None:
        """Hash those of the blocks that begin in [start, stop) that nobody has, then write that range."""
        self._progress.check()
        for number in range(bisect.bisect_left(file.starts, start), bisect.bisect_left(file.starts, stop)):
            known = file.known[number]
            blocks[number] = digest(memory[file.starts[number] : file.stops[number]]) if known is None else known
        output.write(memory[start:stop], start - file.begin)
        self._progress.moved(stop - start)

    def close(self) -> None:
        """Close the files, which ends the sign that their writer lives."""
        for output in self._outputs:
            # They are synced: whatever closing them tells, nothing is lost any more.
            with contextlib.suppress(StorageError):
                output.close()

    def abandon(self) -> None:
        for output in self._outputs:
            # What cannot be removed is invisible; the error that led here is the one to tell.
            with contextlib.suppress(StorageError):
                output.abandon()
