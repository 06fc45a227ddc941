"""Memory straight from the kernel, in large pages where it gives them: private, or shared with another process.

Direct transfers to small pages are three times slower. Knows no torch, so that a process without it can attach.
"""

from __future__ import annotations

import contextlib
import mmap
import os

HUGE_PAGE = 2 << 20


def map_private(size: int) -> mmap.mmap:
    """Anonymous memory of this process; a page becomes real when it is first touched."""
    # Private, because shared anonymous memory is a tmpfs: no huge pages, and charged to a container's /dev/shm.
    return _in_huge_pages(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def map_shared(size: int) -> tuple[mmap.mmap, int]:
    """Memory that another process can attach to by the descriptor, which the caller closes."""
    descriptor = os.memfd_create("holdfast-snapshot", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        return attach(descriptor, size), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def attach(descriptor: int, size: int) -> mmap.mmap:
    """The memory behind a descriptor of ``map_shared``."""
    return _in_huge_pages(mmap.mmap(descriptor, size))


def _in_huge_pages(memory: mmap.mmap) -> mmap.mmap:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        # Kernels without huge pages, or without them for shared memory, refuse; then it is slower, nothing else.
        with contextlib.suppress(OSError):
            memory.madvise(advice)
    return memory
