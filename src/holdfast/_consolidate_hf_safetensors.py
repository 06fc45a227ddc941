"""What others import from torch's module of this name: the files of all ranks become those of a Hugging Face folder.

Our ``HuggingFaceStorageWriter`` writes such a folder at once, so there is nothing to do for what it has written. Files
that torch has written rank by rank are copied in pieces; the folder appears whole or not at all.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from holdfast.errors import MismatchError
from holdfast.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from holdfast.interop.copying import copy_checkpoint
from holdfast.utils import _DistWrapper

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["consolidate_safetensors_files", "consolidate_safetensors_files_on_every_rank"]


def consolidate_safetensors_files(
    input_dir: str, output_dir: str, fqn_to_index_mapping: dict[str, int], num_threads: int = 1
) -> None:
    """Write the tensors in ``input_dir`` to ``output_dir``, into the files that ``fqn_to_index_mapping`` numbers.

    ``num_threads`` is there because torch has it. A folder that is its own target has to be whole already.
    """
    metadata = HuggingFaceStorageReader(input_dir).read_metadata()
    if there := metadata.state_dict_metadata.keys() ^ fqn_to_index_mapping.keys():
        raise MismatchError(f"{input_dir!r} and the mapping do not have the same keys: {', '.join(sorted(there)[:5])}")
    if os.path.realpath(input_dir) != os.path.realpath(output_dir):
        copy_checkpoint(input_dir, HuggingFaceStorageWriter(output_dir, fqn_to_index_mapping))
    elif any(name.startswith("shard-") for name in os.listdir(input_dir)):
        raise ValueError(f"{input_dir!r} has the files of single ranks; pass another output_dir for the whole ones")


def consolidate_safetensors_files_on_every_rank(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: dict[str, int],
    num_threads: int = 1,
    process_group: ProcessGroup | None = None,
) -> None:
    """Do the same when all ranks call it; the first rank copies, and an error is raised on every rank."""
    ranks = _DistWrapper(process_group, dist.is_available() and dist.is_initialized(), 0)
    ranks.broadcast(
        "consolidating", lambda: consolidate_safetensors_files(input_dir, output_dir, fqn_to_index_mapping, num_threads)
    )
