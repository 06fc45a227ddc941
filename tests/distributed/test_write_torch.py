"""Several ranks write torch's format; torch itself reads it on another number of ranks, with equal values."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.default_planner import DefaultSavePlanner
from holdfast.errors import CheckpointError
from holdfast.filesystem import FileSystemReader, FileSystemWriter

if TYPE_CHECKING:
    from tools.crew import Crew


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def spread(truth: torch.Tensor, *placements: Any) -> DTensor:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    return distribute_tensor(truth, mesh, list(placements), src_data_rank=None)


def shards(truth: torch.Tensor) -> Any:
    """A ShardedTensor of two shards on each rank."""
    # torch's planners ask a ShardedTensor for what it warns of.
    warnings.filterwarnings("ignore", message="Please use DTensor instead")
    rank, rows = dist.get_rank(), len(truth) // dist.get_world_size() // 2
    starts = [(2 * rank + number) * rows for number in range(2)]
    local = [
        LocalShard.from_tensor_and_offsets(truth[start : start + rows].clone(), [start, 0], rank) for start in starts
    ]
    return init_from_local_shards(local, *truth.shape)


def state_of(*, filled: bool) -> dict[str, Any]:
    """Every kind of leaf; empty-handed when it is to be a target."""
    factor = 1 if filled else 0
    tied = numbered(6, 5) * factor
    return {
        "rows": spread(numbered(13, 7) * factor, Shard(0)),
        "columns": {"weight": spread(numbered(5, 11).bfloat16() * factor, Shard(1))},
        "replicated": spread(numbered(9) * factor, Replicate()),
        "strided": spread((numbered(8, 12) * factor).t(), Shard(0)),
        "shards": shards(numbered(24, 2) * factor),
        "plain": numbered(4, 4) * factor,
        "scalar": torch.tensor(4.5) * factor,
        "empty": torch.empty(0, 3),
        "large": numbered(1 << 20) * factor,  # replicas above 1 MiB are split between those who hold them
        "first": tied,
        "second": tied,
        "nested": {"list": [numbered(3) * factor, {"name": "adam" if filled else None}], "step": 7 * factor},
        "array": np.arange(5, dtype=np.int32) if filled else None,
    }


def whole(leaf: Any) -> Any:
    if hasattr(leaf, "local_shards"):
        return torch.cat([shard.tensor for shard in leaf.local_shards()])
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf


def different(found: Any, expected: Any, place: str = "") -> list[str]:
    """The places where both differ."""
    if isinstance(expected, dict):
        return [each for key in expected for each in different(found[key], expected[key], f"{place}.{key}")]
    if isinstance(expected, list):
        return [each for n, one in enumerate(expected) for each in different(found[n], one, f"{place}.{n}")]
    found, expected = whole(found), whole(expected)
    if isinstance(expected, torch.Tensor):
        return [] if torch.equal(found, expected) else [place]
    return [] if np.array_equal(found, expected) else [place]


def save_all(path: str, options: dict[str, Any]) -> None:
    holdfast.save(state_of(filled=True), storage_writer=FileSystemWriter(path, **options))


def torch_loads_all(path: str) -> list[str]:
    target = state_of(filled=False)
    dcp.load(target, checkpoint_id=path)
    return different(target, state_of(filled=True))


def alone_torch_loads_all(path: str) -> list[str]:
    keys = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    target: dict[str, Any] = {
        key: torch.zeros(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None
        for key, entry in keys.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=path, no_dist=True)
    assert torch.equal(target["rows"], numbered(13, 7))
    assert torch.equal(target["large"], numbered(1 << 20))
    return sorted(keys)


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 4), (4, 2), (4, 1), (2, 2)])
def test_torch_reads_it_on_any_number_of_ranks(pool: Crew, tmp_path: Path, writers: int, readers: int) -> None:
    path = str(tmp_path / "checkpoint")
    options = {"thread_count": 2} if writers == 4 else {}
    pool.run(writers, save_all, path, options)
    assert pool.run(readers, torch_loads_all, path) == [[]] * readers


def test_the_files_are_torchs(pool: Crew, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    pool.run(2, save_all, path, {})
    assert sorted(os.listdir(path)) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    keys = alone_torch_loads_all(path)
    assert "second" in keys  # torch knows no tied weights: each key is stored
    places = pickle.loads((tmp_path / "checkpoint" / ".metadata").read_bytes()).storage_data
    assert len({info.relative_path for index, info in places.items() if index.fqn == "large"}) == 2


def load_ours(path: str) -> list[str]:
    target = state_of(filled=False)
    del target["array"]  # a pickle, which needs to be trusted
    holdfast.load(target, storage_reader=FileSystemReader(path))
    expected = state_of(filled=True)
    del expected["array"]
    return different(target, expected)


def save_at(url: str) -> None:
    holdfast.save(state_of(filled=True), url)


def load_from(url: str) -> list[str]:
    target, expected = state_of(filled=False), state_of(filled=True)
    del target["array"], expected["array"]
    holdfast.load(target, url)
    return different(target, expected)


def test_a_url_is_written_and_read_by_all_ranks(pool: Crew, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/checkpoint"
    pool.run(2, save_at, url)
    assert sorted(os.listdir(tmp_path / "checkpoint")) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert pool.run(3, load_from, url) == [[]] * 3
    assert pool.run(1, torch_loads_all, str(tmp_path / "checkpoint")) == [[]]


def test_holdfast_reads_it_on_another_number_of_ranks(pool: Crew, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    pool.run(2, save_all, path, {})
    assert pool.run(3, load_ours, path) == [[]] * 3


class FailsOnRankOne(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("rank 1 cannot")
        return super().resolve_data(write_item)


def replace_but_fail(path: str) -> list[str]:
    """The files once all ranks have given up, as this rank sees them."""
    state = {"rows": spread(numbered(8, 3) + 1, Shard(0)), "step": 2}
    with pytest.raises(CheckpointError, match="rank 1 cannot"):
        holdfast.save(state, storage_writer=FileSystemWriter(path), planner=FailsOnRankOne())
    dist.barrier()
    return sorted(os.listdir(path))


def save_small(path: str, step: int) -> None:
    state = {"rows": spread(numbered(8, 3) * step, Shard(0)), "step": step}
    holdfast.save(state, storage_writer=FileSystemWriter(path))


def torch_loads_small(path: str) -> tuple[int, float]:
    target = {"rows": spread(torch.zeros(8, 3), Shard(0)), "step": 0}
    dcp.load(target, checkpoint_id=path)
    return target["step"], target["rows"].full_tensor().sum().item()


def test_a_rank_that_fails_costs_only_the_new_checkpoint(pool: Crew, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    pool.run(4, save_small, path, 1)
    before = sorted(os.listdir(path))
    assert pool.run(2, replace_but_fail, path) == [before] * 2
    total = numbered(8, 3).sum().item()
    assert pool.run(2, torch_loads_small, path) == [(1, total)] * 2
    pool.run(2, save_small, path, 3)
    # Two writers replaced four: the files of all four are gone.
    assert len(os.listdir(path)) == 3
    assert pool.run(2, torch_loads_small, path) == [(3, 3 * total)] * 2
