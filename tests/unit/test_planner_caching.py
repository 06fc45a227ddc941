"""Plan caching: what has not changed is not planned again, what has changed in any respect is, and nothing is mixed.

Ranks are played by planners in one process, each with what it keeps from save to save.
"""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner as torch_default

import holdfast
from holdfast import DefaultSavePlanner, Metadata, SavePlan, TensorStorageMetadata
from holdfast.planner import write_columns

State = dict[str, Any]


class Job:
    """Ranks that plan together, each time with new planners, as messages would carry their plans."""

    def __init__(self, ranks: int, make: Any = DefaultSavePlanner) -> None:
        self.kept: list[dict[object, Any]] = [{} for _ in range(ranks)]
        self.make = make

    def planners(self, states: list[State], **options: Any) -> list[DefaultSavePlanner]:
        planners = []
        for rank, (state, kept) in enumerate(zip(states, self.kept, strict=True)):
            planner = self.make(enable_plan_caching=True, **options)
            planner.ranks, planner.kept = len(states), kept
            planner.set_up_planner(state, None, rank == 0)
            planners.append(planner)
        return planners

    def plan(self, states: list[State], **options: Any) -> Planned:
        planners = self.planners(states, **options)
        sent = [carried(planner.create_local_plan()) for planner in planners]
        plans, metadata = planners[0].create_global_plan(sent)
        stored = [dataclasses.replace(plan, storage_data=f"attempt {number}") for number, plan in enumerate(plans)]
        final = [planner.finish_plan(carried(plan)) for planner, plan in zip(planners, stored, strict=True)]
        return Planned(sent, plans, metadata, final)


def carried(plan: SavePlan) -> SavePlan:
    again: SavePlan = pickle.loads(pickle.dumps(plan))
    return again


@dataclasses.dataclass
class Planned:
    sent: list[SavePlan]
    answers: list[SavePlan]
    metadata: Metadata
    final: list[SavePlan]

    @property
    def was_planned(self) -> bool:
        return all(answer.usable for answer in self.answers)

    @property
    def sent_whole(self) -> list[bool]:
        return [plan.usable for plan in self.sent]

    @property
    def items(self) -> list[list[tuple[str, Any]]]:
        return [[(item.index.fqn, item.index.offset) for item in plan.items] for plan in self.final]


def states(fill: float = 1.0, dtype: torch.dtype = torch.float32) -> list[State]:
    shared = {"a": torch.full((8, 4), fill, dtype=dtype), "b": {"c": torch.full((5,), fill)}, "step": 3}
    return [{**shared, f"own.{rank}": torch.full((2,), float(rank))} for rank in range(3)]


def tensor(metadata: Metadata, key: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def test_unchanged_plans_are_neither_sent_nor_made_again() -> None:
    job = Job(3)
    first = job.plan(states())
    again = job.plan(states(fill=2.0))
    assert first.was_planned
    assert first.sent_whole == [True, True, True]
    assert again.sent_whole == [False, False, False]
    assert all(len(plan.items) == 0 for plan in (*again.sent, *again.answers))
    assert again.items == first.items
    assert again.metadata == first.metadata
    assert again.metadata is not first.metadata
    third = job.plan(states())
    assert not third.was_planned
    assert third.items == first.items


def test_the_storage_data_is_that_of_the_new_save() -> None:
    job = Job(2)
    job.plan(states()[:2])
    planners = job.planners(states()[:2])
    sent = [planner.create_local_plan() for planner in planners]
    plans, _ = planners[0].create_global_plan(sent)
    final = planners[1].finish_plan(dataclasses.replace(plans[1], storage_data="the second save"))
    assert final.storage_data == "the second save"
    assert final.usable
    assert len(final.items) > 0


CHANGES: dict[str, Any] = {
    "dtype": lambda state: state.update(a=state["a"].bfloat16()),
    "requires_grad": lambda state: state.update(a=state["a"].requires_grad_()),
    "size": lambda state: state.update(a=torch.ones(8, 5)),
    "kind": lambda state: state.update(a=state["a"].numpy()),
    "another key": lambda state: state.update(new=1),
    "a key less": lambda state: state.pop("step"),
    "value to tensor": lambda state: state.update(step=torch.tensor(3)),
    "another path": lambda state: state.update({"b": None, "b.c": state["b"]["c"]}),
    "int key": lambda state: state.update(b={**state["b"], 7: 1}),
    "tied": lambda state: state.update(a=torch.ones(8, 4), tied=state["a"]),
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_every_change_is_noticed(name: str) -> None:
    job, fresh = Job(3), Job(3)
    job.plan(states())
    changed = states()
    for state in changed:
        CHANGES[name](state)
    after, expected = job.plan(changed), fresh.plan(changed)
    assert after.sent_whole == [True, True, True]
    assert after.items == expected.items
    assert after.metadata == expected.metadata


def test_a_key_that_becomes_an_int_and_a_list_that_becomes_a_tuple_are_noticed() -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)

    def paths(state: State) -> Any:
        planner.set_up_planner(state)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        planner.finish_plan(plans[0])
        return {key: [type(step).__name__ for step in path] for key, path in metadata.planner_data.items()}

    assert paths({"a": {"0": torch.ones(1)}}) == {"a.0": ["str", "str"]}
    assert paths({"a": {0: torch.ones(1)}}) == {"a.0": ["str", "TypedKey"]}
    assert paths({"a": [torch.ones(1)]}) == {"a.0": ["str", "int"]}
    assert paths({"a": (torch.ones(1),)}) == {"a.0": ["str", "TupleIndex"]}


def test_one_changed_rank_sends_its_plan_and_the_others_do_not() -> None:
    job, fresh = Job(3), Job(3)
    job.plan(states())
    changed = states()
    changed[1]["own.1"] = torch.ones(7)
    after, expected = job.plan(changed), fresh.plan(changed)
    assert after.sent_whole == [False, True, False]
    assert after.was_planned
    assert after.items == expected.items
    assert after.metadata == expected.metadata
    assert not job.plan(changed).was_planned


def test_contents_that_differ_between_ranks_are_found_with_unchanged_plans() -> None:
    job = Job(3)
    job.plan(states())
    wrong = states()
    wrong[2]["a"] = torch.full((8, 4), 9.0)
    with pytest.raises(holdfast.RankDisagreementError, match="'a' has other contents on rank 2"):
        job.plan(wrong)
    assert job.plan(states()).sent_whole == [True, True, True], "what a failed save claimed must not be claimed again"
    assert not job.plan(states()).was_planned


def test_models_that_take_turns_each_keep_their_plans() -> None:
    job = Job(2)
    one, two = [{"w": torch.ones(3), "a": 1}] * 2, [{"w": torch.ones(4)}] * 2
    first = [job.plan(one), job.plan(two)]
    again = [job.plan(one), job.plan(two), job.plan(one)]
    assert [planned.was_planned for planned in again] == [False, False, False]
    assert [planned.items for planned in again] == [first[0].items, first[1].items, first[0].items]
    assert tensor(again[2].metadata, "w").size == (3,)
    assert tensor(again[1].metadata, "w").size == (4,)


def test_what_is_not_used_for_long_is_forgotten_by_all() -> None:
    job = Job(2)
    old = [{"old": torch.ones(3)}] * 2
    job.plan(old)
    for length in range(1, 6):
        job.plan([{"w": torch.ones(length)}] * 2)
    after = job.plan(old)
    assert after.sent_whole == [True, True]
    assert list(after.metadata.state_dict_metadata) == ["old"]
    memory = next(iter(job.kept[0].values()))
    assert len(memory._outcomes) <= 4
    assert len(memory._remembered) <= 4


@pytest.mark.parametrize("failing", ["global", "finish"])
def test_after_a_save_that_failed_plans_are_sent_whole(failing: str) -> None:
    job = Job(2)
    job.plan(states()[:2])
    planners = job.planners(states()[:2])
    sent = [planner.create_local_plan() for planner in planners]
    if failing == "finish":
        plans, _ = planners[0].create_global_plan(sent)
        planners[0].finish_plan(plans[0])  # the other rank never gets that far
    after = job.plan(states()[:2])
    assert after.sent_whole == ([False, True] if failing == "finish" else [True, True])
    assert after.items == Job(2).plan(states()[:2]).items


def test_another_option_is_planned_anew() -> None:
    job = Job(2)
    job.plan(states()[:2])
    lowest = job.plan(states()[:2], dedup_save_to_lowest_rank=True)
    assert lowest.sent_whole == [False, False]
    assert lowest.was_planned
    assert {key for key, _ in lowest.items[1]} == {"own.1"}


def test_another_coordinator_refuses_a_plan_that_it_never_saw() -> None:
    job = Job(2)
    job.plan(states()[:2])
    claims = [planner.create_local_plan() for planner in job.planners(states()[:2])]
    stranger = DefaultSavePlanner(enable_plan_caching=True)
    with pytest.raises(holdfast.InvalidStateError, match="rank 0 says that its plan has not changed"):
        stranger.create_global_plan(claims)
    assert job.plan(states()[:2]).was_planned


@pytest.mark.parametrize("keeps", ["usable", "nothing"])
def test_storage_that_makes_new_plans_loses_the_benefit_or_is_refused_but_loses_no_data(keeps: str) -> None:
    job = Job(2)
    expected = job.plan(states()[:2]).items
    planners = job.planners(states()[:2])
    plans, _ = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    made = [SavePlan([], "new", None, usable=plan.usable or keeps == "nothing") for plan in plans]
    if keeps == "nothing":
        with pytest.raises(holdfast.InvalidStateError, match="left out that it is not usable"):
            planners[1].finish_plan(made[1])
        return
    finished = [planner.finish_plan(plan) for planner, plan in zip(planners, made, strict=True)]
    assert Planned([], [], Metadata({}), finished).items == expected


def test_a_planner_with_plans_to_remember_can_be_sent_to_another_process() -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner.set_up_planner({"w": torch.ones(2)})
    planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0][0])
    again = pickle.loads(pickle.dumps(planner))
    again.set_up_planner({"w": torch.zeros(2)})
    assert not again.create_local_plan().usable


def test_a_subclass_keeps_its_plans_to_itself() -> None:
    class Mine(DefaultSavePlanner):
        pass

    job = Job(2, Mine)
    job.plan(states()[:2])
    assert job.plan(states()[:2]).sent_whole == [True, True]
    assert job.kept == [{}, {}]


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
    assert not planner.global_plan[0].usable
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
        found["holdfast"].append(tensor(ours, "w").properties.dtype)
    assert found["holdfast"] == [torch.float32, torch.bfloat16]
    assert found["torch"] == [torch.float32, torch.float32], "torch has mended it: so may the documents say"


def test_without_the_option_nothing_is_kept() -> None:
    planner = DefaultSavePlanner()
    for _ in range(2):
        planner.set_up_planner({"w": torch.ones(2)})
        plan = planner.create_local_plan()
        assert plan.usable
        assert type(plan) is SavePlan
        assert len(write_columns(plan.items)) == 1
        planner.finish_plan(planner.create_global_plan([plan])[0][0])
    assert planner.kept == {}
