"""The host memory of snapshots: one region, allocated once, kept between saves, grown when a larger one is needed.

Invariant: a region is page-aligned and touched before it is handed out, so that no copy into it waits for the kernel.
It is anonymous memory (huge pages where the kernel gives them), or a memfd where another process is to see it; never
/dev/shm, and never torch's pinned allocator, which takes the next power of two.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from functools import partial
from typing import Any

import torch

from holdfast._io.descriptor import CLOSED
from holdfast._io.mapping import HUGE_PAGE, attach, collapse, map_private, new_shared
from holdfast._io.pipeline import run_bounded
from holdfast._staging.accelerator import Accelerator
from holdfast._values.forks import forget_in_child
from holdfast.errors import StorageError

_TOUCHED_BYTES = 64 << 20


class Region:
    """``nbytes`` of memory: as a uint8 ``tensor``, as a ``view``, and from ``address`` on.

    ``descriptor`` is that of the memory where it ``is_shared``, else -1. ``pin`` makes it fit for copies from a device.
    """

    _unpin: weakref.finalize[..., Any] | None = None

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
        """All of it, writable."""
        return self.tensor.numpy().data

    def tensor_at(self, at: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """The tensor whose bytes begin at ``at``, over memory of just its size."""
        nbytes = shape.numel() * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self.view[at : at + nbytes], dtype=torch.uint8).view(dtype).view(shape)

    @property
    def is_pinned(self) -> bool:
        """Whether a device can copy into it directly."""
        return self._unpin is not None and self._unpin.alive

    def pin(self, accelerator: Accelerator) -> None:
        """Let the device copy into it directly."""
        if not self.is_pinned:
            accelerator.pin(self.address, self.nbytes)
            self._unpin = weakref.finalize(self, accelerator.unpin, self.address)

    def unpin(self) -> None:
        """Take that back: memory that CUDA knows must not go before it has forgotten it."""
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
        """How much is held now."""
        return 0 if self._region is None else self._region.nbytes

    def region(self, nbytes: int, *, is_shared: bool) -> Region:
        """A region of at least ``nbytes``, the one of last time if it will do."""
        region = self._region
        if region is None or region.nbytes < nbytes or region.is_shared != is_shared:
            self.close()  # first, so that there are never two
            region = self._region = Region(nbytes, is_shared=is_shared)
        return region

    def close(self) -> None:
        """Give everything back."""
        region, self._region = self._region, None
        if region is not None:
            region.close()
