"""The long way to plan a save: when all ranks send their plans, and who may look at them."""

from __future__ import annotations

from collections.abc import MutableSequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from thread_ranks import ATTEMPT, Job, states

import holdfast
from holdfast import DefaultSavePlanner, Metadata, NativeWriter, SavePlan
from holdfast._save_plan import coordinator
from holdfast.storage import WriteResult


class KeepsAllPlans(DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.seen = [[item.index.fqn for item in plan.items] for plan in all_plans]
        return super().create_global_plan(all_plans)


def test_a_planner_of_another_class_gets_all_plans(tmp_path: Path) -> None:
    job = Job(2, tmp_path, KeepsAllPlans)
    for _ in range(2):
        job.save(states(2))
        assert job.sent(0) == ["LocalPlan"] * 2
        planner = job.planners[0]
        assert isinstance(planner, KeepsAllPlans)
        assert [len(keys) for keys in planner.seen] == [7, 7]
    assert job.loaded()["step"] == 7


def test_ranks_with_a_short_way_send_plans_where_the_coordinator_has_none(tmp_path: Path) -> None:
    job = Job(3, tmp_path)
    makers = iter([KeepsAllPlans, DefaultSavePlanner, DefaultSavePlanner])
    job.make = lambda: next(makers)()
    job.save(states())
    assert job.sent(1) == ["NoneType", "LocalPlan", "LocalPlan"]
    assert job.loaded()["own.1"].tolist() == [1.0, 1.0]


class Shards(torch.Tensor):
    """A tensor that alone knows what it holds."""

    @staticmethod
    def of(size: int, start: int, local: torch.Tensor) -> Shards:
        made = torch.Tensor._make_wrapper_subclass(Shards, (size,), dtype=local.dtype)  # type: ignore[attr-defined]
        made.start, made.local = start, local
        return made

    def __create_chunk_list__(self) -> list[holdfast.ChunkStorageMetadata]:
        return [holdfast.ChunkStorageMetadata(torch.Size([self.start]), self.local.shape)]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.local

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError

    start: int
    local: torch.Tensor


def test_a_leaf_that_follows_no_rule_is_planned_by_its_boxes_and_remembered(tmp_path: Path) -> None:
    job = Job(2, tmp_path)
    halves = [Shards.of(4, 2 * rank, torch.arange(2.0) + 2 * rank) for rank in range(2)]
    for sent in ("Offer", "Again"):
        job.save([{"w": half, "step": 1} for half in halves])
        assert job.sent(0) == [sent] * 2
        assert job.loaded()["w"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_ties_that_not_all_ranks_have_are_kept_where_they_hold(tmp_path: Path) -> None:
    job = Job(2, tmp_path)
    weight = torch.arange(4.0)
    job.save([{"first": weight}, {"first": weight, "second": weight}])
    found = job.loaded()
    assert found["second"] is found["first"]


def test_rows_that_are_not_what_the_layout_says_stop_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "row_digests", lambda plan: np.zeros(plan.ranks, dtype=np.uint64))
    with pytest.raises(holdfast.InternalError, match="not what its layout says"):
        Job(2, tmp_path).save(states(2))


class LooksAtPlans(NativeWriter):
    """Storage that looks at every item, before and after."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.planned = sorted(item.index.fqn for plan in plans for item in plan.items)
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[MutableSequence[WriteResult]]) -> None:
        self.written = sorted(result.index.fqn for each in results for result in each)
        super().finish(metadata, results)


def test_storage_may_look_at_all_plans_and_results(tmp_path: Path) -> None:
    job = Job(3, tmp_path)
    writers: list[LooksAtPlans] = []

    def make(path: str) -> LooksAtPlans:
        writers.append(LooksAtPlans(path, attempt=ATTEMPT))
        return writers[-1]

    job.make_writer = make
    for _ in range(2):
        writers.clear()
        metadata = job.save(states())[0]
        (first,) = (each for each in writers if hasattr(each, "planned"))
        assert first.planned == first.written == sorted(metadata.state_dict_metadata)
        assert job.loaded()["step"] == 7


class LooksAtResults(LooksAtPlans):
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.planned = []
        return NativeWriter.prepare_global_plan(self, plans)


def test_results_are_objects_to_whoever_looks_at_them(tmp_path: Path) -> None:
    job = Job(2, tmp_path)
    writers: list[LooksAtResults] = []

    def make(path: str) -> LooksAtResults:
        writers.append(LooksAtResults(path, attempt=ATTEMPT))
        return writers[-1]

    job.make_writer = make
    metadata = job.save(states(2))[0]
    assert next(each.written for each in writers if hasattr(each, "written")) == sorted(metadata.state_dict_metadata)
    assert job.loaded()["nested"][5] == "five"
