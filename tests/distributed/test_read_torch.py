"""What torch's dcp.save wrote on some ranks, loaded by holdfast on others: equal values, read by range."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import holdfast
from holdfast.filesystem import FileSystemReader

if TYPE_CHECKING:
    from tools.crew import Crew

ROWS, COLUMNS = 1021, 301  # large enough to be read by range, and no multiple of anything

Layouts = dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]]

LAYOUTS: dict[int, Layouts] = {
    1: {"rows": ((1,), (Shard(0),)), "columns": ((1,), (Shard(1),)), "grid": ((1,), (Replicate(),))},
    2: {"rows": ((2,), (Shard(0),)), "columns": ((2,), (Shard(1),)), "grid": ((2,), (Replicate(),))},
    3: {"rows": ((3,), (Shard(1),)), "columns": ((3,), (Shard(0),)), "grid": ((3,), (Shard(1),))},
    4: {
        "rows": ((4,), (Shard(0),)),
        "columns": ((2, 2), (Replicate(), Shard(1))),
        "grid": ((2, 2), (Shard(0), Shard(1))),
    },
}


def truth(key: str) -> torch.Tensor:
    start = {"rows": 0, "columns": 5, "grid": 9, "sharded": 3}[key]
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + start


def sharded_tensor(full: torch.Tensor) -> ShardedTensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    longest = -(-ROWS // world)
    part = full[rank * longest : (rank + 1) * longest]
    shard = LocalShard.from_tensor_and_offsets(part.clone(), [rank * longest, 0], rank)
    made: ShardedTensor = init_from_local_shards([shard], ROWS, COLUMNS)
    return made


def state_of(world: int, *, filled: bool) -> dict[str, Any]:
    factor = 1 if filled else 0
    tensors: dict[str, Any] = {}
    for key, (shape, placements) in LAYOUTS[world].items():
        mesh = init_device_mesh("cpu", shape)
        tensors[key] = distribute_tensor(truth(key) * factor, mesh, list(placements), src_data_rank=None)
    return {
        "model": tensors,
        "sharded": sharded_tensor(truth("sharded") * factor),
        "plain": torch.arange(10.0) * factor,
        "nested": {"list": [{"lr": 0.5 if filled else None}, torch.ones(3) * factor]},
        "step": 7 if filled else None,
    }


def save_with_torch(path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state_of(dist.get_world_size(), filled=True), checkpoint_id=path)


def load_with_holdfast(path: str) -> int:
    world = dist.get_world_size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        target, expected = (state_of(world, filled=filled) for filled in (False, True))
    report = holdfast.load(target, storage_reader=FileSystemReader(path, verify=True))
    for key, found in target["model"].items():
        assert isinstance(found, DTensor)
        assert torch.equal(found.to_local(), expected["model"][key].to_local()), key
    for shard, wanted in zip(target["sharded"].local_shards(), expected["sharded"].local_shards(), strict=True):
        assert torch.equal(shard.tensor, wanted.tensor)
    assert torch.equal(target["plain"], expected["plain"])
    assert target["nested"]["list"][0] == {"lr": 0.5}
    assert torch.equal(target["nested"]["list"][1], torch.ones(3))
    assert target["step"] == 7
    assert report.differences == ()
    return report.bytes_read


@pytest.mark.parametrize("writers", [1, 2, 4])
def test_on_other_numbers_of_ranks(pool: Crew, tmp_path: Path, writers: int) -> None:
    path = str(tmp_path / "checkpoint")
    pool.run(writers, save_with_torch, path)
    for readers in (1, 2, 3, 4):
        pool.run(readers, load_with_holdfast, path)
    with holdfast.open(path) as checkpoint:
        for key in ("rows", "columns", "grid"):
            assert torch.equal(checkpoint[f"model.{key}"][...], truth(key))
        assert torch.equal(checkpoint["sharded"][100:900, 7], truth("sharded")[100:900, 7])


def save_rows(path: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": distribute_tensor(rows_truth(), mesh, [Shard(0)], src_data_rank=None)}, checkpoint_id=path)


def rows_truth() -> torch.Tensor:
    return torch.arange(4096 * 512, dtype=torch.float32).view(4096, 512)


def load_rows(path: str) -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    target = {"w": distribute_tensor(torch.zeros(4096, 512), mesh, [Shard(0)], src_data_rank=None)}
    report = holdfast.load(target, storage_reader=FileSystemReader(path))
    assert torch.equal(target["w"].full_tensor(), rows_truth())
    return report.bytes_read


def test_each_rank_reads_only_its_rows(pool: Crew, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    pool.run(2, save_rows, path)
    share = 4096 * 512 * 4 // 4
    for counted in pool.run(4, load_rows, path):
        assert share <= counted <= share + 16 * 1024


def save_without_collectives(path: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(rows_truth(), mesh, [Shard(0)], src_data_rank=None), "same": torch.ones(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**state, f"own.{dist.get_rank()}": dist.get_rank()}, checkpoint_id=path, use_collectives=False)


def test_metadata_of_each_rank_is_put_together(pool: Crew, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    pool.run(2, save_without_collectives, str(path))
    assert not (path / ".metadata").exists()
    pool.run(3, load_rows, str(path))
    assert set(FileSystemReader(path).read_metadata(rank=1).state_dict_metadata) == {"w", "same", "own.1"}
    with holdfast.open(path) as checkpoint:
        assert set(checkpoint) == {"w", "same", "own.0", "own.1"}
        assert checkpoint["own.1"] == 1
        assert torch.equal(checkpoint["w"][2000:2100], rows_truth()[2000:2100])
