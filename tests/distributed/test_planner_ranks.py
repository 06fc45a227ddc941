"""Planners on several real ranks: balancing of one's own, data of each rank, cached plans, ties that not all have."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import MutableSequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.futures import Future

import holdfast
from holdfast import DefaultSavePlanner, Metadata, SavePlan, WriteItem, WriteResult

if TYPE_CHECKING:
    from tools.crew import Crew


# Load balancing.


class RoundRobinPlanner(DefaultSavePlanner):
    """Deals out what several ranks hold, one item after the other, whatever its size."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        holders: dict[Any, list[tuple[int, WriteItem]]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                holders.setdefault(item.index, []).append((rank, item))
        dealt: list[list[WriteItem]] = [[] for _ in all_plans]
        for number, held in enumerate(holders.values()):
            rank, item = held[number % len(held)]
            dealt[rank].append(item)
        plans = [dataclasses.replace(plan, items=items) for plan, items in zip(all_plans, dealt, strict=True)]
        return super().create_global_plan(plans)


def replicated() -> dict[str, Any]:
    weights = {f"w{number}": torch.full((4,), float(number)) for number in range(4)}
    return {**weights, "tied": weights["w0"], "step": 7}


def save_round_robin(path: str) -> list[str]:
    planner = RoundRobinPlanner()
    own = {f"own.{dist.get_rank()}": torch.ones(2)}
    holdfast.save({**replicated(), **own}, path, planner=planner)
    return sorted({item.index.fqn for item in planner.plan.items})


def test_a_planner_that_deals_out_items_loses_none(pool: Crew, tmp_path: Path) -> None:
    path = str(tmp_path / "dealt")
    written = pool.run(2, save_round_robin, path)
    assert written == [["own.0", "tied", "w0", "w2"], ["own.1", "step", "w1", "w3"]]
    found = holdfast.load(path)
    assert found["step"] == 7
    for key, leaf in replicated().items():
        if key != "step":
            assert torch.equal(found[key], leaf), key
    assert found["tied"] is found["w0"]


# Data of each rank.


class RankDataPlanner(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        return dataclasses.replace(super().create_local_plan(), planner_data={"seen by": dist.get_rank()})

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data=[plan.planner_data for plan in plans])


def save_rank_data(path: str) -> Any:
    state = {"model": {"w": torch.ones(3)}, "step": 1}
    return holdfast.save(state, path, planner=RankDataPlanner()).planner_data


def test_data_of_every_rank_is_in_the_metadata(pool: Crew, tmp_path: Path) -> None:
    path = str(tmp_path / "data")
    expected = [{"seen by": 0}, {"seen by": 1}]
    assert pool.run(2, save_rank_data, path) == [expected, expected]
    with holdfast.open(path) as checkpoint:
        assert checkpoint.metadata.planner_data == expected
    assert list(holdfast.load(path)) == ["model", "step"]


# Cached plans.


def save_differently(path: str) -> list[str]:
    """The errors of saves with cached plans, in which ranks hold different contents at the second one."""
    seen = []
    for number, fill in enumerate((1.0, 1.0 + dist.get_rank(), 3.0)):
        try:
            state = {"same": torch.full((3,), fill)}
            holdfast.save(state, f"{path}/{number}", planner=DefaultSavePlanner(enable_plan_caching=True))
            seen.append("saved")
        except holdfast.RankDisagreementError as error:
            seen.append(str(error))
    return seen


def test_cached_plans_do_not_hide_different_contents(pool: Crew, tmp_path: Path) -> None:
    for first, second, third in pool.run(2, save_differently, str(tmp_path)):
        assert first == third == "saved"
        assert "'same' has other contents on rank 1" in second


# Ties that not all ranks have, on storage that knows of none.


class MemoryWriter(holdfast.StorageWriter):
    """Resolves every item, as storage does that has no aliases; keeps the keys."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def reset(self, checkpoint_id: Any = None) -> None:
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: holdfast.SavePlanner) -> Future[MutableSequence[WriteResult]]:
        for item in plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, (torch.Tensor, io.BytesIO))
            self.keys.append(item.index.fqn)
        done: Future[MutableSequence[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, 1, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[MutableSequence[WriteResult]]) -> None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def partly_tied() -> dict[str, Any]:
    weight = torch.arange(4.0)
    return {"first": weight, **({"second": weight} if dist.get_rank() == 1 else {})}


def save_partly_tied(path: str) -> list[str]:
    writer = MemoryWriter()
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    holdfast.save(partly_tied(), storage_writer=writer, planner=planner)
    holdfast.save(partly_tied(), path, planner=planner)
    return writer.keys


def test_a_tied_key_is_asked_of_a_rank_that_has_it(pool: Crew, tmp_path: Path) -> None:
    path = str(tmp_path / "tied")
    assert pool.run(2, save_partly_tied, path) == [["first"], ["second"]]
    found = holdfast.load(path)
    assert found["second"] is found["first"]
    assert found["first"].tolist() == [0.0, 1.0, 2.0, 3.0]
