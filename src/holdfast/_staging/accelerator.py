"""Copies from a device to pinned host memory, on streams of their own beside the training's.

Invariant: a transfer sees what the caller's streams had queued when it was made, and nothing later, provided that the
caller's streams are fenced before they change a tensor. The device is never synchronised as a whole, and no copy is
issued on a stream of the training, except a clone on the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from holdfast._io import pinning
from holdfast._native.image import Copy
from holdfast._state.modes import cuda_stream
from holdfast._state.raw import ScatteredSource, Source
from holdfast.errors import StorageError

_ROOM_LEFT = 256 << 20
"""Bytes of device memory that a clone leaves free for the training."""

_NON_BLOCKING = 1  # does not wait for the stream that every program has


class Transfer(Protocol):
    """Copies from devices to host memory, from the moment they are ordered until they are done."""

    def clone(self) -> bool:
        """Copy within the device first, on the caller's streams; False, and nothing done, where it has no room."""
        ...

    def issue(self) -> None:
        """Queue the copies to the host; any thread, once."""
        ...

    def fence(self) -> None:
        """Make the caller's streams wait for the copies; waits itself only until they are issued."""
        ...

    def wait(self) -> None:
        """Return when the copies are done; raises what went wrong with them."""
        ...


class Accelerator(Protocol):
    """A kind of device that copies to pinned host memory by itself."""

    def holds(self, source: Source) -> bool:
        """Whether the bytes are in such a device's memory."""
        ...

    def pin(self, address: int, nbytes: int) -> None:
        """Let the devices copy into this memory."""
        ...

    def unpin(self, address: int) -> None:
        """Take that back."""
        ...

    def transfer(self, copies: Sequence[Copy], target: torch.Tensor) -> Transfer:
        """The copies into ``target``, ordered after all that the caller's streams have queued by now."""
        ...

    def drain(self, copies: Sequence[Copy]) -> None:
        """Return when all that the caller's streams have queued by now, where the bytes of ``copies`` are, is done."""
        ...


class Cuda:
    """CUDA devices. Make transfers on the thread whose streams matter."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def holds(self, source: Source) -> bool:
        """Whether the bytes are in the memory of a CUDA device."""
        return isinstance(source, ScatteredSource) and source.device.type == "cuda"

    def pin(self, address: int, nbytes: int) -> None:
        """Register the memory with CUDA, for all devices."""
        torch.cuda.init()
        reason = pinning.pin(address, nbytes)
        if reason:
            raise StorageError(
                f"CUDA refused to pin {nbytes} bytes of host memory (error {reason}); raise the limit of locked memory "
                "(ulimit -l), or bound the snapshot with max_host_bytes"
            )

    def unpin(self, address: int) -> None:
        """Unregister the memory."""
        pinning.unpin(address)

    def transfer(self, copies: Sequence[Copy], target: torch.Tensor) -> CudaTransfer:
        """The copies into ``target``, ordered after all that the current streams have queued by now."""
        by_device: dict[torch.device, list[Copy]] = {}
        for copy in copies:
            assert isinstance(copy.source, ScatteredSource)
            by_device.setdefault(copy.source.device, []).append(copy)
        return CudaTransfer([_DeviceCopies(each, self._stream(device)) for device, each in by_device.items()], target)

    def drain(self, copies: Sequence[Copy]) -> None:
        """Return when the current streams of the devices that hold some of ``copies`` are done."""
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


class _DeviceCopies:
    """The copies from one device, and the stream that they run on."""

    def __init__(self, copies: list[Copy], stream: torch.cuda.Stream) -> None:
        self.copies = copies
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
        start = 0
        for copy in sorted(self.copies, key=lambda copy: copy.at):
            assert isinstance(copy.source, ScatteredSource)
            copy.source.issue(buffer, start)
            end = start + copy.source.nbytes
            if runs and runs[-1][2] + runs[-1][1] - runs[-1][0] == copy.at:
                runs[-1] = (runs[-1][0], end, runs[-1][2])
            else:
                runs.append((start, end, copy.at))
            start = end
        self._cloned = [(buffer[low:high], at) for low, high, at in runs]
        self.copies = []
        self.ready = torch.cuda.current_stream(self.device).record_event()
        return True

    def issue(self, target: torch.Tensor) -> None:
        as_before = cuda_stream(self.device)
        # A thread starts on device 0; without this it would get a context there.
        with as_before, as_before, torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self.stream.wait_event(self.ready)
            for copy in self.copies:
                assert isinstance(copy.source, ScatteredSource)
                copy.source.issue(target, copy.at)
            for piece, at in self._cloned:
                target[at : at + piece.numel()].copy_(piece, non_blocking=True)
            # Waiting for it sleeps instead of keeping a core busy.
            self.done = torch.cuda.Event(blocking=True)
            self.done.record(self.stream)

    def release(self) -> None:
        """Let go of the tensors, now that nothing reads them any more."""
        self.copies, self._cloned = [], []


class CudaTransfer:
    """Copies from CUDA devices."""

    def __init__(self, devices: list[_DeviceCopies], target: torch.Tensor) -> None:
        self._devices = devices
        self._target = target
        self._issued: Future[None] = Future()
        self._lock = threading.Lock()

    def clone(self) -> bool:
        """Copy within each device first; False where one has no room, which then is copied to the host as it is."""
        return all([device.clone() for device in self._devices])

    def issue(self) -> None:
        """Queue the copies to the host."""
        try:
            for device in self._devices:
                device.issue(self._target)
        except BaseException as error:
            self._issued.set_exception(error)
            raise
        self._issued.set_result(None)

    def fence(self) -> None:
        """Make the current streams wait for the copies."""
        if self._issued.exception() is None:
            for device in self._devices:
                assert device.done is not None
                torch.cuda.current_stream(device.device).wait_event(device.done)

    def wait(self) -> None:
        """Return when the copies are done."""
        self._issued.result()
        for device in self._devices:
            assert device.done is not None
            device.done.synchronize()
        with self._lock:
            for device in self._devices:
                device.release()


CUDA = Cuda()
"""The CUDA devices of this process; nothing is initialised before they are used."""
