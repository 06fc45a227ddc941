"""A target whose keys are not those of the checkpoint, on ranks: sharded, replicated, and in either format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast

if TYPE_CHECKING:
    from tools.crew import Crew

WHOLE = torch.arange(24.0).view(8, 3)


def save_and_load_renamed(path: str, storage: str) -> list[object]:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    state = {"model": {"w": distribute_tensor(WHOLE, mesh, [Shard(0)]), "same": WHOLE.clone(), "n": 7}}
    writer: Any = {"native": holdfast.NativeWriter, "torch": holdfast.FileSystemWriter}[storage](path)
    holdfast.save(state, storage_writer=writer)
    other = distribute_tensor(torch.zeros(8, 3), mesh, [Shard(1)])
    target = {"module": {"w": other, "same": distribute_tensor(torch.zeros(8, 3), mesh, [Replicate()]), "n": 0}}
    report = holdfast.load(target, path, options=holdfast.LoadOptions(mapping={"module": "model"}))
    try:
        holdfast.load(target, path)
        hint = ""
    except holdfast.MismatchError as error:
        hint = str(error).rpartition("? ")[2]
    filled = [leaf.full_tensor() for leaf in (other, target["module"]["same"])]  # type: ignore[union-attr]
    return [all(torch.equal(one, WHOLE) for one in filled), target["module"]["n"], sorted(report.loaded), hint]


@pytest.mark.parametrize("storage", ["native", "torch"])
def test_ranks_load_by_a_map(pool: Crew, tmp_path: Path, storage: str) -> None:
    hint = "Pass LoadOptions(mapping={'module': 'model'})."
    for told in pool.run(3, save_and_load_renamed, str(tmp_path / "a"), storage):
        assert told == [True, 7, ["model.n", "model.same", "model.w"], hint]
