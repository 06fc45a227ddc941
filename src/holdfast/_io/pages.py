"""Memory that stands for a file: giving its pages back before the end.

Only unchanged pages of a mapped file are ever given back: what is touched again is read again from the file, so nothing
is lost. That a page is of the file is never taken on trust; the system is asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

_DONT_NEED = getattr(mmap, "MADV_DONTNEED", None)
_MAPPINGS = "/proc/self/maps"


class MappedFile:
    """Where this process has mapped the file ``path``, now; nowhere, where the system does not tell (only Linux does).

    Whoever asks for pages to be given back guarantees that nobody has written to them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._ranges: list[tuple[int, int]] = []
        name = os.path.realpath(path)
        with contextlib.suppress(OSError), open(_MAPPINGS, encoding="utf-8", errors="surrogateescape") as mappings:
            for line in mappings:
                addresses, *_, found = line.rstrip("\n").split(maxsplit=5)
                if found == name:
                    start, _, stop = addresses.partition("-")
                    self._ranges.append((int(start, 16), int(stop, 16)))

    def give_back(self, address: int, nbytes: int) -> None:
        """Let the system have the whole pages in [address, address + nbytes) that are of the file."""
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if _DONT_NEED is None or not any(start <= first < last <= stop for start, stop in self._ranges):
            return
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        advise(first, last - first, _DONT_NEED)
