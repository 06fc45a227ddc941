"""How ranks plan a save together: what they send in which round, what they compare, what they remember."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from thread_ranks import ATTEMPT, Job, same_layout, states

import holdfast
from holdfast import DefaultSavePlanner, Metadata, NativeWriter, SavePlan
from holdfast._native.report import WriteReport
from holdfast._save_plan import coordinator
from holdfast._save_plan.rounds import Sketch
from holdfast._values.lazy import LazyList
from holdfast.storage import WriteResult

# What is sent.


def test_one_rank_of_each_layout_describes_it(tmp_path: Path) -> None:
    job = Job(4, tmp_path)
    job.save([*same_layout(2, step=7), *same_layout(2, more=1)])
    assert job.sent(0) == ["Offer"] * 4
    assert job.sent(1) == ["NoneType", "NoneType", "Layout", "NoneType"]
    assert job.sent(2) == ["bytes"] * 4  # contents
    assert max(job.board.bytes[0]) <= 64
    assert len(job.board.rounds) == 4
    assert job.loaded()["more"] == 1


def test_a_layout_that_the_coordinator_has_is_not_described(tmp_path: Path) -> None:
    job = Job(3, tmp_path)
    job.save(same_layout())
    assert job.sent(0) == ["Offer"] * 3
    assert len(job.board.rounds) == 3  # offers, contents, reports
    assert job.board.rounds[1][1] == job.board.rounds[1][2]


def test_later_saves_send_the_name_of_the_planning_and_digests(tmp_path: Path) -> None:
    job = Job(3, tmp_path)
    for fill in (1.0, 2.0, 3.0):
        job.save(states(weight=torch.full((2, 3), fill), tied=0))
    assert len(job.board.rounds) == 2  # one to plan, one of reports
    assert not job.was_planned_again
    assert max(job.board.bytes[0]) <= 64
    assert job.loaded()["weight"].tolist() == [[3.0] * 3] * 2
    assert job.loaded()["own.2"].tolist() == [2.0, 2.0]


def test_reports_are_short(tmp_path: Path) -> None:
    job = Job(2, tmp_path)
    many = {f"w{number}": torch.ones(4) * number for number in range(400)}
    job.save([many, many])
    reports = [result.columns for result, _ in job.board.rounds[-1] if isinstance(result, LazyList)]
    assert sum(len(report.row) for report in reports if isinstance(report, WriteReport)) == 400
    assert sum(job.board.bytes[-1]) <= 400 * (24 + 8) + 2 * 700
    for key, leaf in job.loaded().items():
        assert torch.equal(leaf, many[key])


def test_every_rank_gets_the_same_metadata_without_its_chunks_being_sent(tmp_path: Path) -> None:
    job = Job(3, tmp_path)
    first, *others = job.save(states())
    assert isinstance(job.board.wholes[1], Sketch)
    for other in others:
        assert other.state_dict_metadata == first.state_dict_metadata
        assert list(other.state_dict_metadata) == list(first.state_dict_metadata)
        assert other.paths == first.paths
        assert other.planner_data == first.planner_data


# Contents.


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("key", ["weight", "step", "array"])
def test_different_contents_name_key_and_ranks(tmp_path: Path, key: str, later: bool) -> None:
    job = Job(4, tmp_path)
    if later:
        job.save(states(4))
    wrong = states(4)
    other: dict[str, Any] = {"weight": torch.ones(2, 3), "step": 8, "array": np.ones(3, dtype=np.int64)}
    wrong[2][key] = other[key]
    wrong[2]["tied"] = wrong[2]["weight"]
    with pytest.raises(holdfast.RankDisagreementError, match=f"'{key}' has other contents on rank 2 than on rank 0"):
        job.save(wrong)
    job.save(states(4))
    assert not later or not job.was_planned_again


def test_contents_that_nobody_looks_at_may_differ(tmp_path: Path) -> None:
    job = Job(2, tmp_path, lambda: DefaultSavePlanner(replica_check="off"))
    for _ in range(2):
        job.save([{"w": torch.zeros(2)}, {"w": torch.ones(2)}])
    assert len(job.board.rounds) == 2


def test_values_that_cannot_be_compared_do_not_stop_a_save(tmp_path: Path) -> None:
    """A value that one rank can tell apart and another cannot makes digests differ, and nothing else."""
    job = Job(2, tmp_path)
    job.make_writer = lambda path: NativeWriter(path, attempt=ATTEMPT, allow_pickle=True)
    mine, yours = {"odd": torch.Size([1])}, {"odd": object}
    job.save([mine, yours])
    assert len(job.board.rounds) == 4  # offers, contents, details, reports


# When all ranks send their plans, and who may look at them.


class KeepsAllPlans(DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.seen = [[item.index.fqn for item in plan.items] for plan in all_plans]
        return super().create_global_plan(all_plans)


def test_a_planner_of_another_class_gets_all_plans(tmp_path: Path) -> None:
    job = Job(2, tmp_path, KeepsAllPlans)
    for _ in range(2):
        job.save(states(2))
        assert job.sent(0) == ["SavePlan"] * 2
        planner = job.planners[0]
        assert isinstance(planner, KeepsAllPlans)
        assert [len(keys) for keys in planner.seen] == [7, 7]
    assert job.loaded()["step"] == 7


def test_ranks_with_a_short_way_send_plans_where_the_coordinator_has_none(tmp_path: Path) -> None:
    job = Job(3, tmp_path)
    makers = iter([KeepsAllPlans, DefaultSavePlanner, DefaultSavePlanner])
    job.make = lambda: next(makers)()
    job.save(states())
    assert job.sent(1) == ["NoneType", "SavePlan", "SavePlan"]
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


# What ranks remember of the saves before: any change is noticed, whoever has forgotten is told again.


def changes() -> dict[str, Callable[[], list[dict[str, Any]]]]:
    def untied() -> list[dict[str, Any]]:
        return [{**state, "tied": state["weight"].clone()} for state in same_layout()]

    def of_one_rank() -> list[dict[str, Any]]:
        first, second, third = same_layout()
        return [first, second, {**third, "more": 1}]

    def in_another_order() -> list[dict[str, Any]]:
        return [dict(reversed(list(state.items()))) for state in same_layout()]

    return {
        "dtype": lambda: same_layout(weight=torch.ones(2, 3, dtype=torch.bfloat16)),
        "shape": lambda: same_layout(weight=torch.ones(3, 2)),
        "new key": lambda: same_layout(more=torch.ones(1)),
        "a key of one rank": of_one_rank,
        "a value for a tensor": lambda: same_layout(weight=3),
        "a tensor for a value": lambda: same_layout(step=torch.tensor(7)),
        "an array for a tensor": lambda: same_layout(weight=np.ones((2, 3), dtype=np.float32)),
        "a gradient": lambda: same_layout(weight=torch.nn.Parameter(torch.ones(2, 3))),
        "ties": untied,
        "the type of a dict key": lambda: same_layout(nested={"list": [torch.ones(2)], "5": "five"}),
        "a tuple for a list": lambda: same_layout(nested={"list": (torch.ones(2),), 5: "five"}),
        "order": in_another_order,
    }


@pytest.mark.parametrize("what", changes())
def test_a_change_is_noticed(tmp_path: Path, what: str) -> None:
    job = Job(3, tmp_path)
    job.save(same_layout())
    job.save(same_layout())
    assert not job.was_planned_again
    changed = changes()[what]()
    job.save(changed)
    assert job.was_planned_again
    found = job.loaded()
    alone = tmp_path / "alone"
    holdfast.save({**changed[0], **changed[-1]}, alone, no_dist=True)
    expected = holdfast.load(alone)
    assert repr(found) == repr(expected)
    assert (found["tied"] is found["weight"]) == (expected["tied"] is expected["weight"])
    job.save(changes()[what]())
    assert not job.was_planned_again
    assert repr(job.loaded()) == repr(expected)


def test_models_that_take_turns_are_all_remembered(tmp_path: Path) -> None:
    job = Job(2, tmp_path)
    models = [same_layout(2, **{f"model{number}": torch.ones(number + 1)}) for number in range(3)]
    again = []
    for _ in range(3):
        for model in models:
            job.save(model)
            again.append(job.was_planned_again)
    assert again == [True] * 3 + [False] * 6


def test_another_manner_is_planned_anew(tmp_path: Path) -> None:
    job = Job(2, tmp_path)
    job.save(same_layout(2))
    job.make = lambda: DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    job.save(same_layout(2))
    assert len(job.planners[1].plan.items) == 0
    assert repr(job.loaded()["weight"]) == repr(same_layout(1)[0]["weight"])


def test_a_coordinator_that_forgot_asks_again(tmp_path: Path) -> None:
    job = Job(3, tmp_path)
    job.save(states())
    job.kept[0].clear()
    job.save(states())
    assert job.sent(0) == ["Offer", "Again", "Again"]
    assert job.sent(1) == ["NoneType", "tuple", "tuple"]
    assert job.loaded()["step"] == 7


def test_a_rank_that_forgot_is_told_again(tmp_path: Path) -> None:
    job = Job(3, tmp_path)
    job.save(states())
    job.kept[2].clear()
    job.save(states())
    assert job.sent(0) == ["Again", "Again", "Offer"]
    assert job.loaded()["own.2"].tolist() == [2.0, 2.0]
    job.save(states())
    assert not job.was_planned_again
