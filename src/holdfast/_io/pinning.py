"""Host memory made known to the GPU, so that copies to and from it need no help."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from holdfast._io.buffers import Slab

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
