"""The slabs that bytes pass through between tensors and files: few, large, page-aligned, used again and again.

Invariant: a ring never holds more than ``count`` slabs nor makes more than it was asked for, so that a small save costs
one, and lends them in turn; a slab is with at most one borrower. It never copies, and never hands a slab's memory back,
nor on to another ring, while someone holds it.

On the way to a file, bytes from many sources make jobs of whole pages. Nothing is shared between jobs: each has its
bytes copied into a slab of its own and writes whole pages. Where the last byte lies inside a page, the next job writes
that page, with the bytes that this one has in its slab. So what was looked at in the slab (hashed, say) is what is
written, whatever happens to the sources meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar

import numpy as np
import torch

from holdfast._io.direct import ALIGNMENT, OutputFile
from holdfast._io.mapping import map_private
from holdfast._process import Once, forget_in_child
from holdfast._values.deadline import Progress
from holdfast.errors import InternalError, StorageError, first_line

SLAB_BYTES = 16 << 20
Job = TypeVar("Job", bound="PageJob")

# The memory of the last ring, for the next one: the kernel clears new memory, and a virtual machine may have to get it
# from its host first. A deque, because its methods need no lock, which a fork could catch closed.
_kept: deque[torch.Tensor] = deque(maxlen=1)
_MOST_KEPT_BYTES = 192 << 20  # what twelve slabs take; a caller that asks for more has a bound of its own in mind


def release() -> None:
    """Give back the memory that is kept for the next ring."""
    _kept.clear()


class Slab:
    """Page-aligned memory, as a writable ``view`` and as a one-dimensional uint8 ``tensor``.

    One that ``is_apart`` is over memory of others, which may not be written, and goes back to no ring.
    """

    __slots__ = ("address", "is_apart", "is_lent", "tensor", "view")

    def __init__(self, view: memoryview, tensor: torch.Tensor, *, is_apart: bool = False) -> None:
        self.view = view
        self.tensor = tensor
        self.address: int = tensor.data_ptr()
        self.is_lent, self.is_apart = True, is_apart


class _Memory:
    """What numpy takes for writable memory, which torch would otherwise warn of."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        known = np.frombuffer(view, np.uint8).__array_interface__
        self.__array_interface__ = {**known, "data": (known["data"][0], False)}


def slab_over(view: memoryview) -> Slab:
    """A slab over the memory of ``view``."""
    return Slab(view, torch.from_numpy(np.asarray(_Memory(view))), is_apart=True)


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
        self.allocated = 0
        self._arena: torch.Tensor | None = None
        self._closed = False
        forget_in_child(self)

    def forget_parent(self) -> None:
        """Be closed: those who borrowed from it are not there to give anything back."""
        self._lock, self._free = threading.Lock(), SimpleQueue()
        self._closed = True

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
                self.allocated += 1
            if self._pinned:
                return _pinned_slab(self._nbytes)
            with self._lock:
                if self._arena is None:
                    self._arena = _memory(self.count * self._nbytes)
                tensor = self._arena[number * self._nbytes : (number + 1) * self._nbytes]
            return Slab(tensor.numpy().data, tensor)
        except BaseException:
            with self._lock:
                self.allocated -= 1
                self._unmade.append(number)
            self._free.put(None)
            raise

    def release(self, slab: Slab) -> None:
        """Gives ``slab`` to the next borrower; the caller does not touch it any more."""
        if slab.is_apart:
            return
        with self._lock:
            if not slab.is_lent:
                raise InternalError("a slab was given back twice; please report it")
            slab.is_lent = False
            if self._closed:
                self.allocated -= 1
            else:
                self._free.put(slab)

    @contextlib.contextmanager
    def lend(self) -> Iterator[Slab]:
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
                    self.allocated -= self._free.get_nowait() is not None
            arena, self._arena = self._arena, None
            if arena is not None and self.allocated == 0 and arena.numel() <= _MOST_KEPT_BYTES:
                _kept.append(arena)
            self._free.put(None)


def lent_view(slab: Slab, count: int, ring: SlabRing) -> memoryview:
    """The first ``count`` bytes of ``slab``, which goes back to ``ring`` when nobody has this view any more."""
    view = slab.view[:count]
    weakref.finalize(view, ring.release, slab).atexit = False
    return view


def _memory(size: int) -> torch.Tensor:
    """At least ``size`` bytes: those that were kept, if they will do, else new ones.

    A page becomes memory when it is first touched, so that slabs which are never lent cost nothing.
    """
    with contextlib.suppress(IndexError):
        kept = _kept.pop()
        if kept.numel() >= size:
            return kept
        del kept  # first, so that there are never both
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
    reason = first_line(error) or type(error).__name__
    return StorageError(f"cannot allocate buffers of {size} bytes: {reason}; free some memory", errno=errno.ENOMEM)


def uses_cuda() -> bool:
    """Whether this process has work for a GPU, so that slabs are best pinned; never makes it begin."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def pin(address: int, nbytes: int) -> int:
    """0 once the memory is pinned for all devices; else CUDA's reason not to."""
    reason = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 1))  # for all devices
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


@dataclass(slots=True)
class PageJob:
    """Bytes of one file up to ``end``; ``before`` has those ahead of the first, from the start of its page on.

    What the bytes are is a subclass's to say.
    """

    file: OutputFile
    base: int
    end: int
    before: PageJob | None = None
    is_last: bool = False
    tail: bytes = b""
    is_filled: Once = field(default_factory=Once)


def following(job: Job) -> Job:
    """The job after ``job`` in its file: from the page that ``job`` leaves unfinished."""
    return type(job)(job.file, job.end - job.end % ALIGNMENT, job.end, job)


def filled_slab(job: Job, ring: SlabRing, fill: Callable[[Job, Slab], None]) -> Slab:
    """A slab into which ``fill`` has put the bytes of ``job``."""
    try:
        slab = ring.acquire()
        try:
            fill(job, slab)
        except BaseException:
            ring.release(slab)
            raise
        filled = job.end - job.base
        job.tail = bytes(slab.view[filled - filled % ALIGNMENT : filled])
        return slab
    finally:
        # Also after an error: the next job must not wait for ever.
        job.is_filled.set()


def write_pages(job: PageJob, slab: Slab, ring: SlabRing, progress: Progress) -> None:
    """Write the whole pages of ``job``; a last one that is not whole is the next job's, or padded at the file's end."""
    try:
        if job.before is not None:
            # What it left on the page where this job begins. Jobs start in order and fill their slab before they wait,
            # so this ends.
            job.before.is_filled.wait()
            slab.view[: len(job.before.tail)] = job.before.tail
            job.before = None
        filled = job.end - job.base
        if job.is_last:
            padding = -filled % ALIGNMENT
            slab.view[filled : filled + padding] = bytes(padding)
            filled += padding
        filled -= filled % ALIGNMENT
        job.file.write(slab.view[:filled], job.base)
        progress.moved(filled)
    finally:
        ring.release(slab)
