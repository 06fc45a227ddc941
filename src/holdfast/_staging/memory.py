"""The host memory of snapshots, kept between saves, and copies from a device to it on streams of their own.

Invariant: a region is page-aligned and touched before it is handed out, so that no copy into it waits for the kernel.
It is anonymous memory (huge pages where the kernel gives them), or a memfd where another process is to see it; never
/dev/shm, and never torch's pinned allocator, which takes the next power of two.

Invariant: a transfer sees what the caller's streams had queued when it was made, and nothing later, provided that the
caller's streams are fenced before they change a tensor. The device is never synchronised as a whole, and no copy is
issued on a stream of the training, except a clone on the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import torch

from holdfast._io import slabs
from holdfast._io.mapping import HUGE_PAGE, attach, collapse, map_private, new_shared
from holdfast._io.pipeline import run_bounded
from holdfast._native.file_layout import Copy
from holdfast._process import CLOSED, forget_in_child
from holdfast._state.tensor_bytes import ScatteredSource, Source
from holdfast._state.tensors import cuda_stream
from holdfast.errors import StorageError

_TOUCHED_BYTES = 64 << 20


class Region:
    """``nbytes`` of memory: as a uint8 ``tensor``, as a ``view``, and from ``address`` on.

    ``descriptor`` is that of the memory where it ``is_shared``, else -1. ``pin`` makes it fit for copies from a device.
    """

    _unpin: weakref.finalize[[int], Region] | None = None

    def __init__(self, nbytes: int, *, is_shared: bool) -> None:
        self.nbytes = -(-max(nbytes, 1) // HUGE_PAGE) * HUGE_PAGE
        self.is_shared = is_shared
        self.descriptor = CLOSED
        try:
            if is_shared:
                self.descriptor = new_shared(self.nbytes)
                memory, start = attach(self.descriptor, self.nbytes)
                collapse(memory, start, start + self.nbytes)
            else:
                memory, start = map_private(self.nbytes)
        except (OSError, MemoryError) as error:
            self._close_descriptor()
            raise StorageError(
                f"cannot allocate {self.nbytes} bytes of host memory for a snapshot: {error}; free some, or bound it "
                "with max_host_bytes",
                errno=errno.ENOMEM,
            ) from error
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8, count=self.nbytes, offset=start)
        self.address: int = self.tensor.data_ptr()
        forget_in_child(self)
        self._touch()

    def _touch(self) -> None:
        """Make every page real, with several threads: the kernel clears them at a few GB/s each."""
        pages = self.tensor.numpy()

        def touch(start: int) -> None:
            pages[start : start + _TOUCHED_BYTES : mmap.PAGESIZE] = 0

        starts = range(0, self.nbytes, _TOUCHED_BYTES)
        run_bounded((partial(touch, start) for start in starts), workers=min(8, os.cpu_count() or 1))

    @property
    def view(self) -> memoryview:
        return self.tensor.numpy().data

    def tensor_at(self, at: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """The tensor whose bytes begin at ``at``, over memory of just its size."""
        nbytes = shape.numel() * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self.view[at : at + nbytes], dtype=torch.uint8).view(dtype).view(shape)

    @property
    def is_pinned(self) -> bool:
        return self._unpin is not None and self._unpin.alive

    def pin(self) -> None:
        """Let devices copy into it directly."""
        if not self.is_pinned:
            CUDA.pin(self.address, self.nbytes)
            self._unpin = weakref.finalize(self, CUDA.unpin, self.address)

    def unpin(self) -> None:
        """Undo ``pin``: memory must be unpinned before it is given back."""
        if self._unpin is not None:
            self._unpin()

    def close(self) -> None:
        """Give the memory back as soon as nobody holds a view of it."""
        self.unpin()
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._close_descriptor()

    def forget_parent(self) -> None:
        """Give the copy back; it is the parent's device that knows the memory."""
        if self._unpin is not None:
            self._unpin.detach()
        self.close()

    def _close_descriptor(self) -> None:
        descriptor, self.descriptor = self.descriptor, CLOSED
        descriptor.close()


class HostMemory:
    """At most one region, kept until it is too small, of the wrong kind, or ``close``. For one user at a time."""

    def __init__(self) -> None:
        self.forget_parent()
        forget_in_child(self)

    def forget_parent(self) -> None:
        """Have nothing: what the parent stages is not ours to write to."""
        self._region: Region | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._region is None else self._region.nbytes

    def region(self, nbytes: int, *, is_shared: bool) -> Region:
        """A region of at least ``nbytes``, the one of last time if it will do."""
        region = self._region
        if region is None or region.nbytes < nbytes or region.is_shared != is_shared:
            self.close()  # first, so that there are never two
            region = self._region = Region(nbytes, is_shared=is_shared)
        return region

    def close(self) -> None:
        region, self._region = self._region, None
        if region is not None:
            region.close()


_ROOM_LEFT = 256 << 20
"""Bytes of device memory that a clone leaves free for the training."""

_NON_BLOCKING = 1  # does not wait for the stream that every program has


class Cuda:
    """The CUDA devices, which copy to pinned host memory by themselves. Make transfers on the thread whose streams
    matter.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def holds(self, source: Source) -> bool:
        return isinstance(source, ScatteredSource) and source.device.type == "cuda"

    def pin(self, address: int, nbytes: int) -> None:
        """Register the memory with CUDA, for all devices."""
        torch.cuda.init()
        reason = slabs.pin(address, nbytes)
        if reason:
            raise StorageError(
                f"CUDA refused to pin {nbytes} bytes of host memory (error {reason}); raise the limit of locked memory "
                "(ulimit -l), or bound the snapshot with max_host_bytes"
            )

    def unpin(self, address: int) -> None:
        slabs.unpin(address)

    def transfer(self, copies: Sequence[Copy], target: torch.Tensor) -> CudaTransfer:
        """The copies into ``target``, ordered after all that the current streams have queued by now."""
        by_device: dict[torch.device, list[Copy]] = {}
        for copy in copies:
            assert isinstance(copy.source, ScatteredSource)
            by_device.setdefault(copy.source.device, []).append(copy)
        return CudaTransfer([_DeviceCopies(each, self._stream(device)) for device, each in by_device.items()], target)

    def drain(self, copies: Sequence[Copy]) -> None:
        """Return when all that the current streams have queued by now, where ``copies`` are from, is done."""
        sources = (copy.source for copy in copies)
        for device in {each.device for each in sources if isinstance(each, ScatteredSource) and self.holds(each)}:
            torch.cuda.current_stream(device).synchronize()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = _new_stream(device)
        return self._streams[device]


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of the driver's own: the first one from torch comes with a pool that takes 70 MiB of the device."""
    handle = ctypes.c_void_p()
    with torch.cuda.device(device), contextlib.suppress(OSError, AttributeError):
        if ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING) == 0:
            return torch.cuda.ExternalStream(handle.value, device=device)
    return torch.cuda.Stream(device)


class Looking(Protocol):
    """Whoever reckons the statistics of chunks, each by its number."""

    def look_at(self, number: int, source: Source) -> None: ...

    def flush(self) -> None:
        """Queue, on the current stream, all operations for what was looked at."""
        ...


class _DeviceCopies:
    """The copies from one device, and the stream that they run on."""

    def __init__(self, copies: list[Copy], stream: torch.cuda.Stream) -> None:
        self.copies = copies
        self._looked_at = [(copy.number, copy.source) for copy in copies]
        self.stream = stream
        self.device = stream.device
        self.ready = torch.cuda.current_stream(self.device).record_event()
        self.done: torch.cuda.Event | None = None
        self._cloned: list[tuple[torch.Tensor, int]] = []

    def clone(self) -> bool:
        """Copy into one buffer on the device, in the order of the host memory: it leaves in few large copies."""
        total = sum(copy.source.nbytes for copy in self.copies)
        free, _ = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if total + _ROOM_LEFT > free + unused:
            return False
        try:
            buffer = torch.empty(total, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            return False
        runs: list[tuple[int, int, int]] = []  # start and end in the buffer, and where it goes in host memory
        numbered: list[tuple[int, Source]] = []
        start = 0
        for copy in sorted(self.copies, key=lambda copy: copy.at):
            assert isinstance(copy.source, ScatteredSource)
            copy.source.issue(buffer, start)
            end = start + copy.source.nbytes
            numbered.append((copy.number, ScatteredSource(buffer[start:end], is_ordered=True)))
            if runs and runs[-1][2] + runs[-1][1] - runs[-1][0] == copy.at:
                runs[-1] = (runs[-1][0], end, runs[-1][2])
            else:
                runs.append((start, end, copy.at))
            start = end
        self._cloned = [(buffer[low:high], at) for low, high, at in runs]
        self.copies, self._looked_at = [], numbered
        self.ready = torch.cuda.current_stream(self.device).record_event()
        return True

    def issue(self, target: torch.Tensor, numbers: Looking | None) -> None:
        as_before = cuda_stream(self.device)
        # A thread starts on device 0; without this it would get a context there.
        with as_before, as_before, torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self.stream.wait_event(self.ready)
            for copy in self.copies:
                assert isinstance(copy.source, ScatteredSource)
                copy.source.issue(target, copy.at)
            for piece, at in self._cloned:
                target[at : at + piece.numel()].copy_(piece, non_blocking=True)
            if numbers is not None:
                self._look(numbers)
            # Waiting for it sleeps instead of keeping a core busy.
            self.done = torch.cuda.Event(blocking=True)
            self.done.record(self.stream)

    def _look(self, numbers: Looking) -> None:
        """Reckon on a stream beside the copies, which are queued by now: the engines that copy reckon nothing."""
        beside = torch.cuda.Stream(self.device)
        with torch.cuda.stream(beside):
            beside.wait_event(self.ready)
            for number, source in self._looked_at:
                numbers.look_at(number, source)
            numbers.flush()
            self.stream.wait_event(beside.record_event())

    def release(self) -> None:
        """Let go of the tensors, now that nothing reads them any more."""
        self.copies, self._cloned, self._looked_at = [], [], []


class CudaTransfer:
    """Copies from CUDA devices to host memory, from the moment they are ordered until they are done."""

    numbers: Looking | None = None

    def __init__(self, devices: list[_DeviceCopies], target: torch.Tensor) -> None:
        self._devices = devices
        self._target = target
        self._issued: Future[None] = Future()
        self._lock = threading.Lock()

    def clone(self) -> bool:
        """Copy within each device first, on the caller's streams; False where one has no room, which then is copied to
        the host as it is.
        """
        return all([device.clone() for device in self._devices])

    def issue(self) -> None:
        """Queue the copies to the host, and have ``numbers`` look at what is copied; any thread, once."""
        try:
            for device in self._devices:
                device.issue(self._target, self.numbers)
        except BaseException as error:
            self._issued.set_exception(error)
            raise
        self._issued.set_result(None)

    def fence(self) -> None:
        """Make the current streams wait for the copies; waits itself only until they are issued."""
        if self._issued.exception() is None:
            for device in self._devices:
                assert device.done is not None
                torch.cuda.current_stream(device.device).wait_event(device.done)

    def wait(self) -> None:
        """Return when the copies are done; raises what went wrong with them."""
        self._issued.result()
        for device in self._devices:
            assert device.done is not None
            device.done.synchronize()
        with self._lock:
            for device in self._devices:
                device.release()


CUDA = Cuda()
"""The CUDA devices of this process; nothing is initialised before they are used."""
