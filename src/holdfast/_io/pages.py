"""Memory that stands for a file: giving its pages back before the end.

Never loses a byte: what is given back and touched again is read again.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

_PAGE_OUT = getattr(mmap, "MADV_PAGEOUT", 21)


def give_back_pages(address: int, nbytes: int) -> None:
    """Ask the system to take back the whole pages of [address, address + nbytes), which stay what they are.

    It is advice: where the system does not know it (only Linux does), the pages stay until memory is short.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= last:
        return
    with contextlib.suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        advise(first, last - first, _PAGE_OUT)
