"""Memory straight from the kernel, in large pages where it gives them: private, or shared with another process.

Direct transfers to small pages are three times slower. Knows no torch, so that a process without it can attach.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os

HUGE_PAGE = 2 << 20


def map_private(size: int) -> mmap.mmap:
    """Anonymous memory of this process; a page becomes real when it is first touched."""
    # Private, because shared anonymous memory is a tmpfs: no huge pages, and charged to a container's /dev/shm.
    return _in_huge_pages(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def new_shared(size: int) -> int:
    """The descriptor of new memory, which nobody can shrink, for every process that gets it; the caller closes it.

    Not charged to /dev/shm, which is small in many containers.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memory without a name")
    descriptor = os.memfd_create("holdfast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_shared(size: int) -> tuple[mmap.mmap, int]:
    """New shared memory and its descriptor, which the caller closes."""
    descriptor = new_shared(size)
    try:
        return attach(descriptor, size), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def attach(descriptor: int, size: int) -> mmap.mmap:
    """The memory behind a descriptor of ``new_shared``."""
    return _in_huge_pages(mmap.mmap(descriptor, size))


def _in_huge_pages(memory: mmap.mmap) -> mmap.mmap:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        # Kernels without huge pages, or without them for shared memory, refuse; then it is slower, nothing else.
        with contextlib.suppress(OSError):
            memory.madvise(advice)
    return memory
