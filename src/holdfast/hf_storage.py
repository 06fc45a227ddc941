"""Storage of Hugging Face folders, under the names of torch.distributed.checkpoint.hf_storage."""

from __future__ import annotations

import os

from holdfast._huggingface.reader import HuggingFaceReader
from holdfast._huggingface.writer import ExportForm, FolderWriter
from holdfast._values.dtypes import MAX_FILE_BYTES

__all__ = ["HuggingFaceStorageReader", "HuggingFaceStorageWriter"]


class HuggingFaceStorageReader(HuggingFaceReader):
    """Reads a Hugging Face folder, or the files that torch writes rank by rank, for planners of ours and of torch.

    Where torch's planner asks, which compares no dtypes, one floating type is cast into another; anything else is
    refused. ``thread_count`` is there because torch has it: reads are parallel anyway.
    """

    reads_in_common = True

    def __init__(self, path: str | os.PathLike[str], thread_count: int = 1) -> None:
        super().__init__(path, cast=True)
        self.thread_count = thread_count


class HuggingFaceStorageWriter(FolderWriter):
    """Writes the folder ``path``, whole and durable, in one pass, from any number of ranks.

    ``fqn_to_index_mapping`` has the number of the file for each key; without it, all keys are in one. The other
    arguments are there because torch has them: ranks always write the final files together, in parallel.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fqn_to_index_mapping: dict[str, int] | None = None,
        thread_count: int = 1,
        save_distributed: bool = False,
        enable_consolidation: bool = False,
        thread_count_consolidation: int = 1,
    ) -> None:
        numbers = fqn_to_index_mapping or {}
        count = max(numbers.values(), default=1)
        files = {key: f"model-{number:05}-of-{count:05}.safetensors" for key, number in numbers.items()}
        super().__init__(path, form=ExportForm(files=files, shard_bytes=MAX_FILE_BYTES))
        self.fqn_to_index_mapping = fqn_to_index_mapping
        self.thread_count = thread_count
        self.save_distributed = save_distributed
        self.enable_consolidation = enable_consolidation
        self.thread_count_consolidation = thread_count_consolidation
