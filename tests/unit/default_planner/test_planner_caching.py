"""``enable_plan_caching`` is taken and changes nothing: what is saved is what the state is, each time."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner as torch_default

import holdfast
from holdfast import DefaultSavePlanner, SavePlan


def test_a_planner_that_edits_plans_has_its_edits_in_every_save(path: str) -> None:
    class OnlyWeights(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            return dataclasses.replace(plan, items=[item for item in plan.items if item.index.fqn != "secret"])

        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            plan = super().finish_plan(new_plan)
            assert [item.index.fqn for item in plan.items] == ["w"]
            plan.items.append(plan.items[0])
            del plan.items[-1]
            return plan

    planner = OnlyWeights(enable_plan_caching=True)
    for fill in (1.0, 2.0, 3.0):
        holdfast.save({"w": torch.full((3,), fill), "secret": torch.ones(2)}, path, planner=planner)
        assert {key: leaf.tolist() for key, leaf in holdfast.load(path).items()} == {"w": [fill] * 3}


def test_saves_through_native_storage_with_a_planner_that_is_used_again(path: str) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for fill in (1.0, 2.0):
        holdfast.save({"w": torch.full((3,), fill), "step": fill}, f"{path}-{fill}", planner=planner)
    for fill in (1.0, 2.0):
        assert holdfast.load(f"{path}-{fill}")["w"].tolist() == [fill] * 3
        assert holdfast.load(f"{path}-{fill}")["step"] == fill


@pytest.fixture
def torch_caches() -> Iterator[None]:
    caches = [
        getattr(dcp.SavePlanner, name) for name in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans")
    ] + [dcp.SavePlanner._cached_global_plan, dcp.SavePlanner._cached_metadata]
    yield
    for cache in caches:
        cache.clear()


def test_a_dtype_that_changes_is_missed_by_torch_and_not_here(path: str, torch_caches: None) -> None:
    found: dict[str, list[torch.dtype]] = {"torch": [], "holdfast": []}
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for dtype in (torch.float32, torch.bfloat16):
        state = {"w": torch.ones(4, dtype=dtype)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = dcp.save(
                dict(state),
                checkpoint_id=f"{path}-torch-{dtype}",
                planner=torch_default.DefaultSavePlanner(enable_plan_caching=True),
                no_dist=True,
            )
        found["torch"].append(theirs.state_dict_metadata["w"].properties.dtype)
        ours = holdfast.save(state, f"{path}-{dtype}", planner=planner)
        found["holdfast"].append(ours.state_dict_metadata["w"].properties.dtype)
    assert found["holdfast"] == [torch.float32, torch.bfloat16]
    assert found["torch"] == [torch.float32, torch.float32], "torch has mended it: so may the documents say"
