"""Ranks that do not hold, or do not ask for, quite the same: what each of them is told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast

if TYPE_CHECKING:
    from tools.crew import Crew

WORLD = 3


def rows(truth: torch.Tensor) -> DTensor:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    return distribute_tensor(truth, mesh, [Shard(0)], src_data_rank=None)


def state(fill: float) -> dict[str, Any]:
    """Two rows over three ranks: the last has none."""
    return {"few": rows(torch.full((2, 4), fill)), "all": torch.full((3,), fill), "step": int(fill)}


def loads_with_an_empty_shard(path: str) -> list[tuple[Any, ...]]:
    told = []
    for writer in (holdfast.NativeWriter(f"{path}/native"), holdfast.FileSystemWriter(f"{path}/torch")):
        holdfast.save(state(3.0), storage_writer=writer, options=holdfast.SaveOptions(deadline_s=math.inf))
        target = state(0.0)
        report = holdfast.load(target, writer.path, options=holdfast.LoadOptions(deadline_s=math.inf))
        empty = holdfast.load({"few": state(0.0)["few"]}, writer.path)
        told.append((report.loaded, report.unexpected, empty.unexpected, target["few"].to_local().tolist()))
        wrong = {"few": rows(torch.zeros(4, 4))}
        differing = holdfast.load(wrong, writer.path, strict=False)
        told.append((differing.loaded, differing.unexpected, [each.kind for each in differing.differences], []))
    return told


def test_a_rank_without_elements_has_loaded_them_all(pool: Crew, tmp_path: Path) -> None:
    results = pool.run(WORLD, loads_with_an_empty_shard, str(tmp_path))
    for rank, told in enumerate(results):
        for right, wrong in (told[:2], told[2:]):
            loaded, unexpected, unexpected_by_few, filled = right
            assert set(loaded) == {"few", "all", "step"}
            assert unexpected == ()
            assert set(unexpected_by_few) == {"all", "step"}
            assert filled == ([[3.0] * 4] if rank < 2 else [])
            assert (wrong[0], set(wrong[1]), wrong[2]) == ((), {"all", "step"}, ["shape"])


class _Own(holdfast.DefaultLoadPlanner):
    def create_global_plan(self, global_plan: list[holdfast.LoadPlan]) -> list[holdfast.LoadPlan]:
        return super().create_global_plan(global_plan)


class _OwnSave(holdfast.DefaultSavePlanner):
    pass


def planners_on_one_rank(path: str) -> list[tuple[str, str]]:
    told, rank = [], dist.get_rank()
    holdfast.save(state(1.0), path)
    for kind in (holdfast.DefaultLoadPlanner, _Own):
        for odd in (0, 1):
            try:
                holdfast.load(state(0.0), path, planner=kind() if rank == odd else None)
                told.append(("loaded", ""))
            except holdfast.CheckpointError as error:
                told.append((type(error).__name__, error.message))
    for odd in (0, 1):
        holdfast.save(state(2.0 + odd), path, planner=_OwnSave() if rank == odd else None)
        target = state(0.0)
        holdfast.load(target, path)
        told.append(("saved", str(target["step"])))
    return told


def test_a_planner_on_one_rank_alone_is_told_or_works(pool: Crew, tmp_path: Path) -> None:
    for told in pool.run(WORLD, planners_on_one_rank, str(tmp_path / "a")):
        assert told[:2] == [("loaded", "")] * 2  # the default one is what is used where none is given
        for (kind, message), odd in zip(told[2:4], (0, 1), strict=True):
            assert kind == "RankDisagreementError"
            assert "disagree on the planner" in message
            assert f"rank {odd} says another one" in message
        assert told[4:] == [("saved", "2"), ("saved", "3")]
