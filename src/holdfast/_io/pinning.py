"""Memory that is shared between processes, made known to the GPU so that copies from it need no help."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from holdfast._io.buffers import Slab

_FOR_ALL_DEVICES = 1


@contextlib.contextmanager
def pinned(buffer: Slab) -> Iterator[None]:
    """Have ``buffer`` pinned for the length of the block; where that is refused, copies are slower, nothing else."""
    runtime = torch.cuda.cudart()
    refused = int(runtime.cudaHostRegister(buffer.address, buffer.tensor.numel(), _FOR_ALL_DEVICES)) != 0
    if refused:
        # CUDA remembers the refusal and has the next operation fail for it: one that nobody needs.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    try:
        yield
    finally:
        if not refused:
            runtime.cudaHostUnregister(buffer.address)
