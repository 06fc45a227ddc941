"""A .pt file read by one rank and loaded on all: plain and sharded targets, and failures that all ranks see."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.errors import CheckpointError, MismatchError
from holdfast.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner

if TYPE_CHECKING:
    from tools.crew import Crew


def truth() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(15.0).view(5, 3), "bias": torch.arange(5).bfloat16()},
        "count": torch.tensor(7),
        "empty": torch.empty(0, 2),
        "step": 3,
        "unwanted": torch.ones(1000),
    }


def sharded(tensor: torch.Tensor, placement: Any) -> DTensor:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)


def load_sharded(path: str, coordinator: int) -> dict[str, Any]:
    target = {
        "model": {
            "weight": sharded(torch.zeros(5, 3), Shard(0)),
            "bias": sharded(torch.zeros(5, dtype=torch.bfloat16), Replicate()),
        },
        "count": torch.tensor(0),
        "empty": torch.empty(0, 2),
        "step": 0,
        **({"unwanted": torch.zeros(1000)} if dist.get_rank() == 1 else {}),
    }
    weight = target["model"]["weight"]
    report = holdfast.load(
        target,
        path,
        storage_reader=BroadcastingTorchSaveReader(coordinator_rank=coordinator),
        planner=DynamicMetaLoadPlanner(),
    )
    assert target["model"]["weight"] is weight
    return {
        "weight": target["model"]["weight"].full_tensor(),
        "local": target["model"]["weight"].to_local().shape[0],
        "bias": target["model"]["bias"].to_local(),
        "count": target["count"].item(),
        "step": target["step"],
        "unwanted": target.get("unwanted", torch.zeros(())).sum().item(),
        "loaded": len(report.loaded),
    }


@pytest.mark.parametrize("coordinator", [0, 1])
def test_every_rank_gets_its_part(pool: Crew, tmp_path: Path, coordinator: int) -> None:
    torch.save(truth(), tmp_path / "a.pt")
    for rank, found in enumerate(pool.run(2, load_sharded, str(tmp_path / "a.pt"), coordinator)):
        assert torch.equal(found["weight"], truth()["model"]["weight"])
        assert found["local"] == (3, 2)[rank]
        assert torch.equal(found["bias"], truth()["model"]["bias"])
        assert (found["count"], found["step"], found["unwanted"]) == (7, 3, (0, 1000)[rank])
        assert found["loaded"] == 4 + rank  # of an empty tensor there is nothing to read


def load_wrongly(path: str, wrong: str) -> tuple[str, str, float]:
    target: dict[str, Any] = {"count": torch.tensor(0)}
    if wrong == "missing":
        target["other"] = torch.ones(2)
    elif wrong == "shape on one rank" and dist.get_rank() == 1:
        target["unwanted"] = torch.ones(3)
    elif wrong == "dtype":
        target["unwanted"] = torch.ones(1000, dtype=torch.float64)
    elif wrong == "kind":
        target["step"] = torch.ones(1)
    try:
        holdfast.load(
            target,
            storage_reader=BroadcastingTorchSaveReader(path + ("x" if wrong == "no file" else "")),
            planner=DynamicMetaLoadPlanner(),
        )
    except CheckpointError as error:
        return type(error).__name__, str(error), target["count"].item()
    return "", "", target["count"].item()


@pytest.mark.parametrize(
    ("wrong", "kind", "told"),
    [
        ("missing", "MismatchError", "'other' is not in the checkpoint"),
        ("shape on one rank", "MismatchError", "'unwanted' has shape [1000] in the checkpoint but [3]"),
        ("dtype", "MismatchError", "float32 in the checkpoint but float64"),
        ("kind", "MismatchError", "'step' has kind a value in the checkpoint but a tensor"),
        ("no file", "NotFoundError", "there is no file"),
    ],
)
def test_what_does_not_fit_is_told_to_all_before_anything_is_touched(
    pool: Crew, tmp_path: Path, wrong: str, kind: str, told: str
) -> None:
    torch.save(truth(), tmp_path / "a.pt")
    for name, message, count in pool.run(2, load_wrongly, str(tmp_path / "a.pt"), wrong):
        assert (name, count) == (kind, 0)
        assert told in message


def load_in_subgroup(path: str) -> str:
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return ""
    with pytest.raises(CheckpointError) as caught:
        holdfast.load(
            {"count": torch.tensor(0)},
            storage_reader=BroadcastingTorchSaveReader(path),
            planner=DynamicMetaLoadPlanner(),
            process_group=group,
        )
    return str(caught.value)


def test_a_subgroup_is_refused(pool: Crew, tmp_path: Path) -> None:
    torch.save(truth(), tmp_path / "a.pt")
    for message in pool.run(3, load_in_subgroup, str(tmp_path / "a.pt"))[:2]:
        assert "all ranks of the default process group" in message


# One process.


def test_one_process_needs_no_process_group(tmp_path: Path) -> None:
    torch.save(truth(), tmp_path / "a.pt")
    model = {"weight": torch.zeros(5, 3), "bias": torch.zeros(5, dtype=torch.bfloat16)}
    target = {"model": model, "step": 0}
    holdfast.load(
        target, tmp_path / "a.pt", storage_reader=BroadcastingTorchSaveReader(), planner=DynamicMetaLoadPlanner()
    )
    assert torch.equal(model["weight"], truth()["model"]["weight"])
    assert target["step"] == 3


def test_missing_keys_can_be_excused(tmp_path: Path) -> None:
    torch.save(truth(), tmp_path / "a.pt")
    target = {"count": torch.tensor(0), "new": torch.ones(2)}
    reader = BroadcastingTorchSaveReader(tmp_path / "a.pt")
    with pytest.raises(MismatchError):
        holdfast.load(target, storage_reader=reader, planner=DynamicMetaLoadPlanner())
    report = holdfast.load(target, storage_reader=reader, planner=DynamicMetaLoadPlanner(allow_partial_load=True))
    assert target["count"] == 7
    assert (report.loaded, report.missing) == (("count",), ("new",))


def test_flat_states_are_taken_as_they_are(tmp_path: Path) -> None:
    torch.save({"a.b": torch.ones(2)}, tmp_path / "a.pt")
    target = {"a.b": torch.zeros(2)}
    reader = BroadcastingTorchSaveReader(tmp_path / "a.pt")
    holdfast.load(target, storage_reader=reader, planner=DynamicMetaLoadPlanner(flatten_state_dict=False))
    assert target["a.b"].sum() == 2


def test_a_reader_without_a_path_says_so() -> None:
    with pytest.raises(CheckpointError, match="needs the path"):
        holdfast.load({"a": 1}, storage_reader=BroadcastingTorchSaveReader(), planner=DynamicMetaLoadPlanner())
    assert not BroadcastingTorchSaveReader.validate_checkpoint_id("nothing/here")
