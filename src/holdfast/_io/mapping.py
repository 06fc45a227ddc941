"""Memory straight from the kernel, in large pages where it gives them: private, or shared with another process.

Direct transfers to small pages are two to three times slower. Knows no torch, so that a process without it can attach.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys

import numpy as np

from holdfast._process import Descriptor, opened

HUGE_PAGE = 2 << 20

# Of Linux; the names are not in every Python's mmap.
_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25
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
        raise OSError(errno.ENOSYS, "this system has no memory without a name")
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

    Linux does from 6.1 on, whatever its settings for shared memory are: those are for what it does unasked.
    """
    for page in range(start, stop, HUGE_PAGE):
        memory[page] = 0  # of a page without any memory nothing is made
    # Where it is refused, memory stays as it is; not by way of mmap, which would hold the interpreter all the time.
    _advise(_address(memory) + start, stop - start, _MADV_COLLAPSE)


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
