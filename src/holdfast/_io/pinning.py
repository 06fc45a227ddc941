"""Memory that is shared between processes, made known to the GPU so that copies from it need no help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from holdfast._io.buffers import Slab


@contextmanager
def pinned(buffer: Slab) -> Iterator[None]:
    """Have ``buffer`` pinned for the length of the block; where that is refused, copies are slower, nothing else."""
    runtime = torch.cuda.cudart()
    refused = int(runtime.cudaHostRegister(buffer.address, buffer.tensor.numel(), 0)) != 0
    try:
        yield
    finally:
        if not refused:
            runtime.cudaHostUnregister(buffer.address)
