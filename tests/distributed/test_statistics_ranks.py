"""Statistics of tensors that ranks hold in every way: each element counts once, whoever writes it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast
from holdfast import AsyncCheckpointerType, SaveOptions

if TYPE_CHECKING:
    from tools.crew import Crew

KEPT = SaveOptions(statistics=True)


def truth(*shape: int, seed: int) -> torch.Tensor:
    tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    tensor.view(-1)[::7] = 0
    tensor.view(-1)[3::11] = torch.nan
    tensor.view(-1)[5] = -torch.inf
    return tensor


def sharded_state() -> dict[str, Any]:
    line = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("all",))
    grid = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replica", "shard"))
    made = {
        "rows": (line, [Shard(0)], (64, 8)),
        "uneven": (line, [Shard(0)], (10, 3)),
        "some ranks have nothing": (line, [Shard(0)], (2, 9)),
        "columns": (line, [Shard(1)], (5, 32)),
        "replicated": (line, [Replicate()], (30, 7)),
        "both": (grid, [Shard(0), Shard(1)], (12, 14)),
        "hybrid": (grid, [Replicate(), Shard(0)], (9, 4)),
    }
    state: dict[str, Any] = {
        name: distribute_tensor(truth(*shape, seed=number), mesh, placements, src_data_rank=None)
        for number, (name, (mesh, placements, shape)) in enumerate(made.items())
    }
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.Linear(7, 5))
    fully_shard(model, mesh=line)
    state["model"] = model
    return {**state, "plain": torch.arange(60_000.0), "same": truth(1000, seed=50), "step": 1}


def save_on_rank(path: str, how: str) -> None:
    state = sharded_state()
    if how == "save":
        holdfast.save(state, path, options=KEPT)
    elif how == "manager":
        with holdfast.CheckpointManager(path, save=holdfast.Every(steps=1), stop=None, options=KEPT) as manager:
            manager.save(1, state)
    else:
        handle = holdfast.async_save(state, path, async_checkpointer_type=AsyncCheckpointerType(how), options=KEPT)
        handle.result(timeout=120)
    dist.barrier()


@pytest.mark.parametrize("how", ["save", "thread", "process", "manager"])
def test_every_sharding_tells_the_numbers_of_the_whole(pool: Crew, tmp_path: Path, how: str) -> None:
    pool.run(4, save_on_rank, str(tmp_path / "a"), how, timeout_s=240.0)
    path = tmp_path / "a" / "step-1" if how == "manager" else tmp_path / "a"
    with holdfast.open(path) as checkpoint:
        kept, read = checkpoint.statistics, holdfast.statistics(checkpoint, sample=None, stored=False).tensors
    assert kept is not None
    assert kept.keys() == read.keys()
    for key, each in read.items():
        mine = kept[key]
        assert (mine.nan, mine.inf, mine.zeros, mine.min, mine.max) == (
            each.nan,
            each.inf,
            each.zeros,
            each.min,
            each.max,
        )
        assert mine.sum == pytest.approx(each.sum, rel=1e-12, abs=1e-9)
        assert mine.sum_squares == pytest.approx(each.sum_squares, rel=1e-12)
    assert kept["same"].nan == len(range(3, 1000, 11))
    assert kept["plain"].sum == 60_000 * 59_999 / 2
    assert holdfast.verify(path).ok
