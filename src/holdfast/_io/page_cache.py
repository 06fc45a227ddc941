"""The page cache: whether a file is in it, and advice about what to do with its pages.

It never reads a page that is not there, so that looking costs nothing and changes nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import secrets

import numpy as np

_PROBES = 5

_mincore = ctypes.CDLL(None).mincore  # asked for here, because a load opens nothing but files of the checkpoint


def is_cached(descriptor: int, size: int) -> bool:
    """Whether a file of ``size`` bytes seems to be in memory, judged by a few pages; False where one cannot ask.

    Where reads that do not wait are refused, as on tmpfs and on many network file systems, the kernel is asked which
    pages a mapping of the file has.
    """
    offsets = _probe_offsets(size)
    no_wait = getattr(os, "RWF_NOWAIT", None)
    if no_wait is None or not hasattr(os, "preadv"):
        return False
    page = bytearray(mmap.PAGESIZE)
    # Without this a page that is not there would bring in its neighbours.
    advise(descriptor, "POSIX_FADV_RANDOM")
    try:
        return all(os.preadv(descriptor, [page], offset, no_wait) > 0 for offset in offsets)
    except BlockingIOError:
        return False
    except OSError:
        return all(is_resident(descriptor, offset) for offset in offsets)
    finally:
        advise(descriptor, "POSIX_FADV_NORMAL")


def advise(descriptor: int, advice: str, offset: int = 0, count: int = 0) -> None:
    """Tell the kernel; where it does not take advice, nothing is lost but time."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, count, getattr(os, advice))


def is_resident(descriptor: int, offset: int) -> bool:
    """Whether the page at ``offset`` is in memory. For files that are not ours the kernel may say so of any page."""
    try:
        with mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ, offset=offset) as mapped:
            address = np.frombuffer(mapped, np.uint8).ctypes.data
            told = ctypes.c_ubyte()
            length = ctypes.c_size_t(mmap.PAGESIZE)
            is_told = _mincore(ctypes.c_void_p(address), length, ctypes.byref(told)) == 0
            return is_told and bool(told.value & 1)
    except (OSError, ValueError):  # a file that cannot be mapped, or was cut meanwhile
        return False


def _probe_offsets(size: int) -> list[int]:
    """A page in each of a few equal parts of the file, another one each time.

    Asking for an absent page may bring it in; were it asked for again, a file nobody reads would look cached. The
    choice leaves the program's own random numbers alone, on which a resumed training depends.
    """
    pages = -(-size // mmap.PAGESIZE)
    parts = min(_PROBES, pages)
    bounds = [pages * part // parts for part in range(parts + 1)]
    return [(low + secrets.randbelow(high - low)) * mmap.PAGESIZE for low, high in itertools.pairwise(bounds)]
