"""Memory: mappings in large pages, the slabs that bytes pass through between tensors and files, memory pinned for a
device.

Direct transfers to small pages are two to three times slower. Knows no torch, so that a process without it can attach.

Invariant: a ring never holds more than ``count`` slabs nor makes more than it was asked for, so that a small save costs
one, and lends them in turn; a slab is with at most one borrower. It never copies, and never hands a slab's memory back,
nor on to another ring, while someone holds it.

Only unchanged pages of a mapped file are ever given back: what is touched again is read again from the file, so nothing
is lost. That a page is of the file is never taken on trust; the system is asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from queue import Empty, SimpleQueue

import numpy as np
import torch

from holdfast._process import Descriptor, forget_in_child, opened
from holdfast.errors import InternalError, StorageError

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


SLAB_BYTES = 16 << 20

# The memory of the last ring, for the next one: the kernel clears new memory, and a virtual machine may have to get it
# from its host first. A deque, because its methods need no lock, which a fork could catch closed.
_kept: deque[torch.Tensor] = deque(maxlen=1)
_MOST_KEPT_BYTES = 192 << 20  # what twelve slabs take; a caller that asks for more has a bound of its own in mind


def release() -> None:
    """Give back the memory that is kept for the next ring."""
    _kept.clear()


class Slab:
    """Page-aligned memory, as a writable ``view`` and as a one-dimensional uint8 ``tensor``."""

    __slots__ = ("address", "is_lent", "tensor", "view")

    def __init__(self, view: memoryview, tensor: torch.Tensor) -> None:
        self.view = view
        self.tensor = tensor
        self.address: int = tensor.data_ptr()
        self.is_lent = True


class SlabRing:
    """At most ``count`` slabs of ``nbytes`` that threads borrow from each other.

    ``pinned`` ones can be copied to a device directly. A borrower that started an asynchronous copy waits for it before
    it gives the slab back.
    """

    def __init__(self, count: int, *, nbytes: int = SLAB_BYTES, pinned: bool = False) -> None:
        if count < 1:
            raise InternalError(f"a ring needs at least one slab, not {count}; please report it")
        self.count = count
        self._nbytes = nbytes
        self._pinned = pinned
        self._lock = threading.Lock()
        # What is free, or None to have those who wait look again. A queue: a condition does not bear interrupts.
        self._free: SimpleQueue[Slab | None] = SimpleQueue()
        self._unmade = list(range(count))[::-1]
        self._allocated = 0
        self._arena: torch.Tensor | None = None
        self._closed = False
        forget_in_child(self)

    def forget_parent(self) -> None:
        """Be closed: those who borrowed from it are not there to give anything back."""
        self._lock, self._free = threading.Lock(), SimpleQueue()
        self._closed = True

    @property
    def allocated(self) -> int:
        """How many slabs exist, lent or free."""
        return self._allocated

    def acquire(self) -> Slab:
        """A slab of one's own; waits for one to come back when all are lent."""
        while True:
            with self._lock:
                if self._closed:
                    self._free.put(None)
                    raise InternalError("a slab was asked of a closed ring; please report it")
                number = self._unmade.pop() if self._unmade else None
            if number is not None:
                return self._make(number)
            # The one used longest ago has left the processor's caches, from where a disk would have to take it.
            slab = self._free.get()
            if slab is not None:
                slab.is_lent = True
                return slab

    def _make(self, number: int) -> Slab:
        try:
            with self._lock:
                self._allocated += 1
            return _pinned_slab(self._nbytes) if self._pinned else self._mapped_slab(number)
        except BaseException:
            with self._lock:
                self._allocated -= 1
                self._unmade.append(number)
            self._free.put(None)
            raise

    def release(self, slab: Slab) -> None:
        """Gives ``slab`` to the next borrower; the caller does not touch it any more."""
        with self._lock:
            if not slab.is_lent:
                raise InternalError("a slab was given back twice; please report it")
            slab.is_lent = False
            if self._closed:
                self._allocated -= 1
            else:
                self._free.put(slab)

    @contextlib.contextmanager
    def lend(self) -> Iterator[Slab]:
        """A slab for the length of the block."""
        slab = self.acquire()
        try:
            yield slab
        finally:
            self.release(slab)

    def close(self) -> None:
        """Lets go of all slabs; those still lent live as long as their borrowers hold them."""
        with self._lock:
            self._closed = True
            with contextlib.suppress(Empty):
                while True:
                    self._allocated -= self._free.get_nowait() is not None
            arena, self._arena = self._arena, None
            if arena is not None and self._allocated == 0 and arena.numel() <= _MOST_KEPT_BYTES:
                _kept.append(arena)
            self._free.put(None)

    def _mapped_slab(self, number: int) -> Slab:
        with self._lock:
            if self._arena is None:
                self._arena = _memory(self.count * self._nbytes)
            tensor = self._arena[number * self._nbytes : (number + 1) * self._nbytes]
        return Slab(tensor.numpy().data, tensor)


def _memory(size: int) -> torch.Tensor:
    """At least ``size`` bytes: those that were kept, if they will do, else new ones."""
    with contextlib.suppress(IndexError):
        kept = _kept.pop()
        if kept.numel() >= size:
            return kept
        del kept  # first, so that there are never both
    return _huge_pages(size)


def _huge_pages(size: int) -> torch.Tensor:
    """Memory that the kernel may back by huge pages, all of it.

    A page becomes memory when it is first touched, so that slabs which are never lent cost nothing.
    """
    try:
        memory, start = map_private(size, is_wiped=True)
    except (OSError, MemoryError) as error:
        raise _no_memory(error, size) from error
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)


def _pinned_slab(size: int) -> Slab:
    try:
        tensor = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        if tensor.data_ptr() % mmap.PAGESIZE:
            tensor = torch.empty(size + mmap.PAGESIZE, dtype=torch.uint8, device="cpu", pin_memory=True)
            start = -tensor.data_ptr() % mmap.PAGESIZE
            tensor = tensor[start : start + size]
    except (RuntimeError, MemoryError) as error:
        raise _no_memory(error, size) from error
    return Slab(tensor.numpy().data, tensor)


def _no_memory(error: Exception, size: int) -> StorageError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return StorageError(f"cannot allocate buffers of {size} bytes: {reason}; free some memory", errno=errno.ENOMEM)


_FOR_ALL_DEVICES = 1


def pin(address: int, nbytes: int) -> int:
    """0 once the memory is pinned for all devices; else CUDA's reason not to."""
    reason = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _FOR_ALL_DEVICES))
    if reason:
        # CUDA remembers the refusal and has the next operation fail for it: one that nobody needs.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return reason


def unpin(address: int) -> None:
    """Let the memory go; it was pinned, so a refusal means only that CUDA is gone already."""
    torch.cuda.cudart().cudaHostUnregister(address)


@contextlib.contextmanager
def pinned(buffer: Slab) -> Iterator[None]:
    """Have ``buffer`` pinned for the length of the block; where that is refused, copies are slower, nothing else."""
    refused = pin(buffer.address, buffer.tensor.numel())
    try:
        yield
    finally:
        if not refused:
            unpin(buffer.address)


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
