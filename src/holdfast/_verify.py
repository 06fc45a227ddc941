"""verify: whether a checkpoint of either format is whole, and all that is damaged if it is not."""

from __future__ import annotations

import os
from collections.abc import Callable

from holdfast._checkpoint import is_torch_format
from holdfast._native.verify import Level, VerifyReport, verify_checkpoint
from holdfast._torch_format.file_systems import is_remote
from holdfast._torch_format.verify import verify_torch_checkpoint

__all__ = ["VerifyReport", "verify"]


def verify(
    path: str | os.PathLike[str],
    *,
    level: Level = "digests",
    sample: float = 1.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """What a look at every byte of the checkpoint at ``path`` found; nothing is changed or decoded.

    A checkpoint in torch's own format is checked as far as that goes; the report says what could not be.

    Args:
        path: the directory of the checkpoint.
        level: "sizes" looks whether each file is there in its size; "coverage" reads the index too, whose chunks must
            make up every tensor and every file; "digests" reads everything.
        sample: the part of the data that "digests" reads, chosen anew each time.
        on_progress: called with the bytes that are done and all that there are, from any thread.

    Raises:
        NotFoundError: there is no checkpoint.
        CorruptError: what describes the checkpoint is damaged, so that nothing else can be said.
        StorageError: the file system refused; this tells nothing about the bytes.
    """
    if is_remote(path):
        raise ValueError("only files can be checked; copy the checkpoint from its URL to a directory first")
    if sample < 1 and level != "digests":
        raise ValueError("a sample is of the digests; leave out the level")
    if not is_torch_format(path):
        return verify_checkpoint(path, level=level, sample=sample, on_progress=on_progress)
    if level != "digests" or sample != 1:
        raise ValueError("torch's own format is checked as a whole; leave out level and sample")
    return verify_torch_checkpoint(path, on_progress=on_progress)
