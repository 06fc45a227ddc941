"""The ways in which torch's documents extend planners, in forms that work, on native storage and on someone's own."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    Metadata,
    NativeReader,
    NativeWriter,
    ReadItem,
    SavePlan,
    WriteItem,
)

State = dict[str, Any]


def nested() -> State:
    return {"model": {"w": torch.linspace(0, 1, 6).view(2, 3), "ids": torch.arange(4)}, "step": 3, "log": [{"a": 1}]}


# Renaming.


class RenameOnSave(DefaultSavePlanner):
    def set_up_planner(self, state_dict: State, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        renamed = {"foo_" + key: entry for key, entry in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class RenameOnLoad(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: State, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.target = state_dict
        self.renamed = {"foo_" + key: entry for key, entry in state_dict.items()}
        super().set_up_planner(self.renamed, metadata, is_coordinator)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        super().load_bytes(read_item, value)
        self.target.update({key.removeprefix("foo_"): entry for key, entry in self.renamed.items()})


def test_keys_are_renamed_on_the_way_out_and_back_in(path: str) -> None:
    holdfast.save(nested(), path, planner=RenameOnSave())
    assert list(holdfast.load(path)) == ["foo_model", "foo_step", "foo_log"]
    target: State = {"model": {"w": torch.zeros(2, 3), "ids": torch.zeros(4).long()}, "step": 0, "log": [{"a": 0}]}
    weight = target["model"]["w"]
    report = holdfast.load(target, path, planner=RenameOnLoad())
    assert target["model"]["w"] is weight
    assert torch.equal(weight, nested()["model"]["w"])
    assert (target["step"], target["log"]) == (3, [{"a": 1}])
    assert "foo_model.w" in report.loaded
    assert set(target) == {"model", "step", "log"}


# Another dtype in the checkpoint.


class HalfPlanner(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None and item.tensor_data.properties.dtype.is_floating_point:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        if isinstance(data, torch.Tensor) and data.is_floating_point():
            return data.to(torch.float16)
        return data


def test_halves_are_planned_stored_and_cast_back(path: str) -> None:
    metadata = holdfast.save(nested(), path, planner=HalfPlanner())
    entry = metadata.state_dict_metadata["model.w"]
    assert isinstance(entry, holdfast.TensorStorageMetadata)
    assert entry.properties.dtype is torch.float16
    stored = holdfast.load(path)
    assert (stored["model"]["w"].dtype, stored["model"]["ids"].dtype) == (torch.float16, torch.int64)
    target = {"model": {"w": torch.zeros(2, 3)}}
    with pytest.raises(holdfast.MismatchError):
        holdfast.load(target, path)
    report = holdfast.load(target, path, options=holdfast.LoadOptions(cast=True))
    assert torch.equal(target["model"]["w"], nested()["model"]["w"].half().float())
    assert [difference.key for difference in report.casts] == ["model.w"]


# A planner's own data in the metadata.


class ExtraDataPlanner(DefaultSavePlanner):
    """As torch's documents print it: the mapping of keys to paths is replaced, in the plan and in the metadata."""

    data: Any = "per-rank-data"

    def create_local_plan(self) -> SavePlan:
        return dataclasses.replace(super().create_local_plan(), planner_data=self.data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data=[plan.planner_data for plan in plans])


class AddedDataPlanner(DefaultSavePlanner):
    """Keeps the mapping, and adds to it."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data={**metadata.planner_data, "run": {"seed": 7}})


@pytest.mark.parametrize(
    "data", ["per-rank-data", {"w": 5}, {"model.w": [1]}, (1, {2, 3}), float("inf"), {"a": ("b",)}]
)
def test_data_in_place_of_the_mapping_is_kept_and_the_nesting_too(data: Any, path: str) -> None:
    planner = ExtraDataPlanner()
    planner.data = data
    saved = holdfast.save(nested(), path, planner=planner, user_metadata={"note": 1})
    with holdfast.open(path) as checkpoint:
        assert checkpoint.metadata.planner_data == saved.planner_data == [data]
        assert checkpoint.user_metadata == {"note": 1}
        assert checkpoint.metadata.paths["model.w"] == ("model", "w")
    found = holdfast.load(path)
    assert list(found) == ["model", "step", "log"]
    assert torch.equal(found["model"]["w"], nested()["model"]["w"])
    target = {"model": {"w": torch.zeros(2, 3)}}
    holdfast.load(target, path)
    assert torch.equal(target["model"]["w"], nested()["model"]["w"])


def test_data_beside_the_mapping_is_kept_without_the_mapping_being_stored_twice(path: str) -> None:
    state: State = {"by_id": {7: torch.ones(2)}, "pair": (torch.ones(1), 1)}
    holdfast.save(state, path, planner=AddedDataPlanner())
    metadata = NativeReader(path).read_metadata()
    assert metadata.planner_data["run"] == {"seed": 7}
    assert metadata.planner_data["by_id.7"] == ("by_id", "7")
    assert metadata.user_metadata == {}
    assert Path(path, "manifest.json").read_text().count('"by_id"') == 1
    assert set(holdfast.load(path)["by_id"]) == {7}


def test_planners_that_flatten_nothing_keep_their_data_too(path: str) -> None:
    planner = ExtraDataPlanner(flatten_state_dict=False)
    holdfast.save({"a.b": torch.ones(2)}, path, planner=planner)
    assert NativeReader(path).read_metadata().planner_data == ["per-rank-data"]
    assert list(holdfast.load(path)) == ["a.b"]


def test_data_that_has_no_typed_form_is_refused_and_nothing_is_published(path: str) -> None:
    planner = ExtraDataPlanner()
    planner.data = object()
    with pytest.raises(holdfast.InvalidStateError, match="planner_data"):
        holdfast.save(nested(), path, planner=planner)
    with pytest.raises(holdfast.NotFoundError):
        holdfast.load(path)


def test_the_name_of_the_planners_data_is_not_the_users(path: str) -> None:
    with pytest.raises(holdfast.InvalidStateError, match="reserved"):
        holdfast.save({"w": torch.ones(1)}, path, user_metadata={"holdfast.planner_data": 1})
    holdfast.save({"w": torch.ones(1)}, storage_writer=NativeWriter(path, user_metadata={"planner_data": 1}))
    metadata = NativeReader(path).read_metadata()
    assert metadata.user_metadata == {"planner_data": 1}
    assert metadata.planner_data == {"w": ("w",)}


# Models without memory.


class MaterialisePlanner(DefaultLoadPlanner):
    """Gives meta tensors memory of one's own choice, whole, before anything is planned."""

    def set_up_planner(self, state_dict: State, metadata: Any = None, is_coordinator: bool = False) -> None:
        for module in state_dict.values():
            for name, tensor in module.items():
                if tensor.is_meta:
                    module[name] = torch.full_like(tensor, -1.0, device="cpu")
        super().set_up_planner(state_dict, metadata, is_coordinator)


@pytest.mark.parametrize("planner", [None, MaterialisePlanner()], ids=["default", "own"])
def test_a_model_on_the_meta_device_is_made_while_loading(planner: DefaultLoadPlanner | None, path: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    holdfast.save({"model": model}, path)
    with torch.device("meta"):
        skeleton = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    target = {"model": dict(skeleton.state_dict())}
    holdfast.load(target, path, planner=planner)
    skeleton.load_state_dict(target["model"], assign=True)
    assert all(torch.equal(mine, skeleton.state_dict()[name]) for name, mine in model.state_dict().items())


class CommitPlanner(DefaultLoadPlanner):
    """torch's printed example on the right base class: a tensor of its own for each item, taken when it is filled."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty(read_item.lengths, dtype=self.state_dict[read_item.dest_index.fqn].dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = tensor * 2


def test_what_is_filled_can_be_changed_before_it_is_taken(path: str) -> None:
    holdfast.save({"w": torch.ones(3)}, path)
    target = {"w": torch.zeros(3)}
    holdfast.load(target, path, planner=CommitPlanner())
    assert target["w"].tolist() == [2.0, 2.0, 2.0]
