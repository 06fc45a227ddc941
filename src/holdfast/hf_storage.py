"""Storage of Hugging Face folders, under the names of torch.distributed.checkpoint.hf_storage."""

from __future__ import annotations

import os

from holdfast._huggingface.reader import HuggingFaceReader

__all__ = ["HuggingFaceStorageReader"]


class HuggingFaceStorageReader(HuggingFaceReader):
    """Reads a Hugging Face folder, or the files that torch writes rank by rank, for planners of ours and of torch.

    Where torch's planner asks, which compares no dtypes, one floating type is cast into another; anything else is
    refused. ``thread_count`` is there because torch has it: reads are parallel anyway.
    """

    reads_in_common = True

    def __init__(self, path: str | os.PathLike[str], thread_count: int = 1) -> None:
        super().__init__(path, cast=True)
        self.thread_count = thread_count
