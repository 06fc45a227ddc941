"""The wrapper over collectives on real ranks: results, subgroups, and every failure on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from holdfast import MetadataIndex, utils
from holdfast.errors import CheckpointError, CorruptError, RankDisagreementError

if TYPE_CHECKING:
    from tools.crew import Crew


class CannotPickle(ValueError):
    def __reduce__(self) -> Any:
        raise RuntimeError("never")


class CannotUnpickle(ValueError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def use_everything(coordinator: int) -> dict[str, Any]:
    wrapper = utils._DistWrapper(None, True, coordinator)
    rank, world = wrapper.get_rank(), wrapper.get_world_size()
    wrapper.barrier()
    return {
        "is_coordinator": wrapper.is_coordinator,
        "broadcast_object": wrapper.broadcast_object(f"of {rank}"),
        "gather_object": wrapper.gather_object(rank * 10),
        "all_gather_object": wrapper.all_gather_object(rank * 10),
        "scatter_object": wrapper.scatter_object([f"to {each}" for each in range(world)]),
        "reduce_scatter": wrapper.reduce_scatter(
            "step", lambda: rank, lambda parts: [part + sum(parts) for part in parts]
        ),
        "all_reduce": wrapper.all_reduce("step", lambda: rank, sum),
        "all_gather": wrapper.all_gather("step", lambda: {"rank": rank}),
        "broadcast": wrapper.broadcast("step", lambda: f"made by {rank}"),
    }


@pytest.mark.parametrize(("world", "coordinator"), [(2, 0), (3, 2)])
def test_results_arrive_where_they_should(pool: Crew, world: int, coordinator: int) -> None:
    total = sum(range(world))
    for rank, found in enumerate(pool.run(world, use_everything, coordinator)):
        assert found == {
            "is_coordinator": rank == coordinator,
            "broadcast_object": f"of {coordinator}",
            "gather_object": [each * 10 for each in range(world)] if rank == coordinator else None,
            "all_gather_object": [each * 10 for each in range(world)],
            "scatter_object": f"to {rank}",
            "reduce_scatter": rank + total,
            "all_reduce": total,
            "all_gather": [{"rank": each} for each in range(world)],
            "broadcast": f"made by {coordinator}",
        }


def use_subgroups() -> tuple[int, int, Any, Any]:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    wrapper = utils._DistWrapper(groups[dist.get_rank() % 2], True, 1)
    shared = wrapper.all_reduce("step", dist.get_rank, list)
    try:
        wrapper.all_gather(
            "step", lambda: 1 // (dist.get_rank() % 4 - 3)
        )  # fails on global rank 3, rank 1 of its group
    except CheckpointError as error:
        return (
            wrapper.global_coordinator_rank,
            wrapper.get_rank(),
            shared,
            {r: repr(e) for r, (e, _) in error.failures.items()},
        )
    return wrapper.global_coordinator_rank, wrapper.get_rank(), shared, None


def test_a_subgroup_works_alone_and_its_failures_stay_in_it(pool: Crew) -> None:
    failed = {1: "ZeroDivisionError('integer division or modulo by zero')"}
    assert pool.run(4, use_subgroups) == [
        (2, 0, [0, 2], None),
        (3, 0, [1, 3], failed),
        (2, 1, [0, 2], None),
        (3, 1, [1, 3], failed),
    ]


def raise_here(error: BaseException) -> Any:
    raise error


def _error(kind: str, rank: int) -> BaseException:
    return {
        "plain": lambda: ValueError(f"no, says {rank}"),
        "own": lambda: CorruptError("bad bytes", key="w"),
        "cannot pickle": lambda: CannotPickle(f"no, says {rank}"),
        "cannot unpickle": lambda: CannotUnpickle(rank, rank),
        "interrupt": KeyboardInterrupt,
    }[kind]()


def fail_in(step: str, kind: str, culprits: list[int], where: str) -> dict[str, Any]:
    """What a rank sees when ``culprits`` fail in ``step``, and whether the next step works."""
    wrapper = utils._DistWrapper(None, True, 0)
    rank = wrapper.get_rank()

    def give() -> int:
        return raise_here(_error(kind, rank)) if where == "map" and rank in culprits else rank

    def merge(parts: list[int]) -> Any:
        return raise_here(_error(kind, rank)) if where == "reduce" else parts

    seen: dict[str, Any]
    try:
        value = getattr(wrapper, step)("making it", give, *([merge] if "reduce" in step else []))
        seen = {"value": value}
    except KeyboardInterrupt:
        seen = {"interrupted": True}
    except CheckpointError as error:
        seen = {
            "kind": type(error).__name__,
            "message": str(error),
            "failures": {number: str(each) for number, (each, _) in error.failures.items()},
            "traced": sorted(number for number, (_, stack) in error.failures.items() if stack[-1].name == "raise_here"),
            "key": getattr(error, "key", None),
            "cause": type(error.__cause__).__name__,
        }
    seen["after"] = wrapper.all_gather("going on", lambda: rank)
    return seen


STEPS = ["reduce_scatter", "all_reduce", "all_gather", "broadcast"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", ["plain", "own", "cannot pickle", "cannot unpickle"])
def test_a_failure_on_one_rank_is_raised_on_all(pool: Crew, step: str, kind: str) -> None:
    culprit = 0 if step == "broadcast" else 1
    text = str(_error(kind, culprit))
    for rank, seen in enumerate(pool.run(2, fail_in, step, kind, [culprit], "map")):
        assert list(seen["failures"]) == [culprit]
        assert text in seen["failures"][culprit]
        assert seen["traced"] == [culprit]
        if kind == "own":
            assert (seen["kind"], seen["message"], seen["key"]) == ("CorruptError", f"rank {culprit}: {text}", "w")
        else:
            name = type(_error(kind, culprit)).__name__
            assert (seen["kind"], seen["message"]) == (
                "CheckpointError",
                f"rank {culprit}: making it failed: {name}: {text}",
            )
        assert (seen["cause"] == "NoneType") == (rank != culprit)
        assert seen["after"] == [0, 1]


def test_all_failures_are_told_and_the_lowest_rank_names_the_class(pool: Crew) -> None:
    for seen in pool.run(3, fail_in, "all_reduce", "plain", [1, 2], "map"):
        assert seen["failures"] == {1: "no, says 1", 2: "no, says 2"}
        assert seen["message"] == "rank 1: making it failed: ValueError: no, says 1"
        assert seen["after"] == [0, 1, 2]


@pytest.mark.parametrize("step", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("kind", ["plain", "cannot pickle"])
def test_a_failure_of_the_coordinators_reduction_is_raised_on_all(pool: Crew, step: str, kind: str) -> None:
    for seen in pool.run(2, fail_in, step, kind, [], "reduce"):
        assert list(seen["failures"]) == [0]
        assert "no, says 0" in seen["message"]
        assert seen["after"] == [0, 1]


@pytest.mark.parametrize("step", STEPS)
def test_an_interrupt_leaves_its_rank_as_it_is_and_is_told_to_the_others(pool: Crew, step: str) -> None:
    culprit = 0 if step == "broadcast" else 1
    seen = pool.run(2, fail_in, step, "interrupt", [culprit], "map")
    assert seen[culprit] == {"interrupted": True, "after": [0, 1]}
    assert seen[1 - culprit]["message"] == f"rank {culprit}: making it failed: KeyboardInterrupt"
    assert seen[1 - culprit]["after"] == [0, 1]


def give_what_cannot_travel() -> list[str]:
    wrapper = utils._DistWrapper(None, True, 0)
    messages = []
    attempts: list[Any] = [
        lambda: wrapper.all_gather("giving", lambda: (lambda: 1) if wrapper.rank == 1 else 1),
        lambda: wrapper.reduce_scatter("giving", lambda: 1, lambda parts: [lambda: 1] * 2),
        lambda: wrapper.reduce_scatter("giving", lambda: 1, lambda parts: parts[:1]),
    ]
    for attempt in attempts:
        try:
            attempt()
        except CheckpointError as error:
            messages.append(str(error))
    return messages


def test_a_value_that_cannot_be_pickled_is_a_failure_and_no_hang(pool: Crew) -> None:
    for messages in pool.run(2, give_what_cannot_travel):
        assert len(messages) == 3
        assert messages[0].startswith("rank 1: giving failed: ")
        assert messages[1].startswith("rank 0: giving failed: ")
        assert messages[2].endswith("giving made 1 results for 2 ranks")


def compare_keys() -> tuple[list[str], str, dict[int, str]]:
    rank = dist.get_rank()
    mine = {"common": 1, f"own-{rank}": 2} if rank else {"common": 1}
    utils._assert_same_keys({"common": rank})
    with pytest.raises(RankDisagreementError) as caught:
        utils._assert_same_keys(mine)
    assert isinstance(caught.value, AssertionError), "as torch has it"
    return sorted(utils._all_gather_keys(mine)), str(caught.value), caught.value.said


def test_keys_are_gathered_and_compared_on_every_rank(pool: Crew) -> None:
    for keys, message, said in pool.run(2, compare_keys):
        assert keys == ["common", "own-1"]
        assert message == "rank 0 has no 'own-1', which other ranks have; give every rank the same keys"
        assert said == {0: "lacks ['own-1']"}


def find_shards() -> list[float]:
    mesh = DeviceMesh("cpu", torch.arange(2))
    tensor = distribute_tensor(torch.arange(4.0).view(4, 1), mesh, [Shard(0)], src_data_rank=None)
    first = dist.get_rank() * 2
    found = utils.find_tensor_shard(tensor, MetadataIndex("w", (first, 0)))
    for wrong in (MetadataIndex("w"), MetadataIndex("w", (2 - first, 0))):
        with pytest.raises(ValueError, match="'w'"):
            utils.find_tensor_shard(tensor, wrong)
    assert utils.find_state_dict_object({"w": tensor}, MetadataIndex("w", (first, 0))).data_ptr() == found.data_ptr()
    return found.flatten().tolist()


def test_the_local_piece_of_a_sharded_tensor_is_found_by_its_offset(pool: Crew) -> None:
    assert pool.run(2, find_shards) == [[0.0, 1.0], [2.0, 3.0]]
