"""What torch.distributed.checkpoint's planner costs for the same job: one object for each chunk, pickled and planned.

The plans of all ranks are made here, outside the timed parts; torch's own functions plan, write and read the metadata.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from scale_ranks import DTYPE, Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchCost:
    """Seconds and bytes of torch's planner."""

    ranks: int
    tensors: int
    received: int
    unpickle_s: float
    plan_s: float
    stored: int
    read_s: float
    read_plan_s: float

    @property
    def coordinator_s(self) -> float:
        """What the coordinator does before anyone may write."""
        return self.unpickle_s + self.plan_s


def measure_torch(ranks: int, sizes: Sizes) -> TorchCost:
    """The cost of a save of ``sizes``, each sharded over all ranks, and of one rank's plan to load it on 3/4 of it."""
    messages = [pickle.dumps(_plan_of(rank, ranks, sizes)) for rank in range(ranks)]
    start = time.perf_counter()
    plans = [pickle.loads(message) for message in messages]
    unpickled = time.perf_counter()
    _, metadata = create_default_global_save_plan(plans)
    planned = time.perf_counter()
    data = pickle.dumps(metadata)
    before_reading = time.perf_counter()
    stored = pickle.loads(data)
    read = time.perf_counter()
    readers = -(-ranks * 3 // 4)
    for key, size in sizes.items():
        entry = stored.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        create_read_items_for_chunk_list(key, entry, [_chunk(1, readers, size)])
    return TorchCost(
        ranks=ranks,
        tensors=len(sizes),
        received=sum(map(len, messages)),
        unpickle_s=unpickled - start,
        plan_s=planned - unpickled,
        stored=len(data),
        read_s=read - before_reading,
        read_plan_s=time.perf_counter() - read,
    )


def _chunk(rank: int, ranks: int, size: tuple[int, int]) -> ChunkStorageMetadata:
    step = -(-size[0] // ranks)
    start = min(size[0], rank * step)
    return ChunkStorageMetadata(torch.Size((start, 0)), torch.Size((min(step, size[0] - start), size[1])))


def _plan_of(rank: int, ranks: int, sizes: Sizes) -> SavePlan:
    items = []
    for key, size in sizes.items():
        chunk = _chunk(rank, ranks, size)
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=DTYPE), size=torch.Size(size))
        items.append(WriteItem(index=MetadataIndex(key, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)
