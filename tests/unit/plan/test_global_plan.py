"""What the coordinator makes of the plans of all ranks: one head per key, ties, values once, and who disagrees."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from holdfast._save_plan.plans import LocalLeaves, as_planned, plan_together
from holdfast._values.lazy import LazyList
from holdfast.default_planner import DefaultSavePlanner
from holdfast.errors import InvalidStateError, RankDisagreementError
from holdfast.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from holdfast.metadata import TensorProperties as Properties
from holdfast.planner import (
    SavePlan,
    TensorHead,
    TensorWriteData,
    WriteColumns,
    WriteItem,
    WriteItemType,
    write_columns,
)

FLOAT = Properties(torch.float32)


def plan_of(state: dict[str, Any], replica_check: str = "sample") -> SavePlan:
    return SavePlan(LazyList(LocalLeaves(state, replica_check=replica_check).columns))


def shard(key: str, low: list[int], length: list[int], size: list[int]) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(low), torch.Size(length))
    data = TensorWriteData(chunk, FLOAT, torch.Size(size))
    return WriteItem(MetadataIndex(key, torch.Size(low)), WriteItemType.SHARD, None, data)


def held_nowhere(key: str, size: list[int]) -> SavePlan:
    """The plan of a rank that knows the key but holds nothing of it: outside a submesh, or an empty shard."""
    return SavePlan(
        LazyList(
            WriteColumns(
                keys=[key],
                heads=[TensorHead(FLOAT, torch.Size(size))],
                key=np.zeros(0, dtype=np.int64),
                lo=np.zeros((0, len(size)), dtype=np.int64),
                length=np.ones((0, len(size)), dtype=np.int64),
                hint=np.zeros(0, dtype=np.int64),
                is_shard=np.zeros(0, dtype=bool),
            )
        )
    )


def keys_written(plans: list[SavePlan]) -> list[list[str]]:
    return [[item.index.fqn for item in plan.items] for plan in plans]


def tensor(metadata: Any, key: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def test_keys_keep_the_order_in_which_ranks_first_have_them() -> None:
    states: list[dict[str, Any]] = [
        {"b": 1, "a": torch.ones(2)},
        {"c": torch.ones(1), "a": torch.ones(2)},
        {"d": 4, "b": 1},
    ]
    _, metadata = plan_together([plan_of(state) for state in states])
    assert list(metadata.state_dict_metadata) == ["b", "a", "c", "d"]
    assert isinstance(metadata.state_dict_metadata["d"], BytesStorageMetadata)


def test_what_several_ranks_have_is_written_by_one_of_them() -> None:
    plans, _ = plan_together([plan_of({"w": torch.ones(2), "step": 3}) for _ in range(4)])
    written = sorted(key for keys in keys_written(plans) for key in keys)
    assert written == ["step", "w"]


def test_a_single_plan_is_handed_back_as_it_came() -> None:
    plan = plan_of({"w": torch.ones(2), "step": 3})
    plans, _ = plan_together([plan])
    assert plans[0] is plan


def test_to_lowest_rank_leaves_everything_shared_with_the_first_holder() -> None:
    states: list[dict[str, Any]] = [
        {"w": torch.ones(50)},
        {"w": torch.ones(50), "x": torch.ones(9)},
        {"x": torch.ones(9), "y": 1},
    ]
    plans, _ = plan_together([plan_of(state) for state in states], to_lowest_rank=True)
    assert keys_written(plans) == [["w"], ["x"], ["y"]]


def test_planner_and_storage_data_of_each_rank_stay_with_it() -> None:
    plans = [SavePlan(plan_of({"w": torch.ones(2)}).items, f"storage {rank}", f"planner {rank}") for rank in range(2)]
    together, _ = plan_together(plans)
    assert [(plan.storage_data, plan.planner_data) for plan in together] == [
        ("storage 0", "planner 0"),
        ("storage 1", "planner 1"),
    ]


def test_shards_of_different_ranks_make_one_tensor() -> None:
    plans = [SavePlan([shard("w", [low, 0], [2, 3], [6, 3])]) for low in (4, 0, 2)]
    together, metadata = plan_together(plans)
    assert [tuple(chunk.offsets) for chunk in tensor(metadata, "w").chunks] == [(0, 0), (2, 0), (4, 0)]
    lows = [write_columns(plan.items).lo.tolist() for plan in together]
    assert lows == [[[4, 0]], [[0, 0]], [[2, 0]]]


def test_tensors_of_different_dimensions_are_planned_together() -> None:
    states: list[dict[str, Any]] = [
        {"matrix": torch.ones(2, 3)},
        {"scalar": torch.tensor(1.0), "cube": torch.ones(2, 2, 2), "n": 1},
    ]
    plans, metadata = plan_together([plan_of(state) for state in states])
    assert keys_written(plans) == [["matrix"], ["scalar", "cube", "n"]]
    assert [tuple(chunk.sizes) for chunk in tensor(metadata, "scalar").chunks] == [()]
    assert [tuple(chunk.sizes) for chunk in tensor(metadata, "cube").chunks] == [(2, 2, 2)]


# Ties.


def test_a_tie_that_all_holders_have_is_kept_and_follows_its_first_key() -> None:
    states: list[dict[str, Any]] = []
    for _ in range(3):
        weight = torch.ones(4)
        states.append({"first": weight, "second": weight})
    plans, metadata = plan_together([plan_of(state) for state in states])
    assert tensor(metadata, "second").alias_of == "first"
    assert sorted(keys_written(plans)) == [[], [], ["first", "second"]]


def test_a_tie_that_only_some_holders_have_is_dropped() -> None:
    weight = torch.ones(4)
    tied, loose = {"first": weight, "second": weight}, {"first": torch.ones(4), "second": torch.ones(4)}
    for states in ([tied, loose], [loose, tied], [tied, loose, tied]):
        _, metadata = plan_together([plan_of(state) for state in states])
        assert tensor(metadata, "second").alias_of is None


def test_ties_in_opposite_directions_are_dropped() -> None:
    one, two = torch.ones(4), torch.ones(4)
    _, metadata = plan_together([plan_of({"a": one, "b": one}), plan_of({"b": two, "a": two})])
    assert [tensor(metadata, key).alias_of for key in "ab"] == [None, None]


def test_a_rank_that_holds_nothing_of_a_key_has_no_say_about_its_ties() -> None:
    weight = torch.ones(4)
    tied = {"first": weight, "second": weight}
    for plans in ([held_nowhere("second", [4]), plan_of(tied)], [plan_of(tied), held_nowhere("second", [4])]):
        _, metadata = plan_together(plans)
        assert tensor(metadata, "second").alias_of == "first"


def test_a_tied_key_is_written_by_a_rank_that_has_it() -> None:
    weight = torch.ones(4)
    states: list[dict[str, Any]] = [{"first": weight}, {"first": weight, "second": weight}, {"first": weight}]
    for to_lowest_rank in (False, True):
        plans, metadata = plan_together([plan_of(state) for state in states], to_lowest_rank=to_lowest_rank)
        assert tensor(metadata, "second").alias_of == "first"
        written = {key: rank for rank, keys in enumerate(keys_written(plans)) for key in keys}
        assert written["second"] == 1
    assert written["first"] == 0


def test_keys_tied_on_different_ranks_are_each_written_where_they_are() -> None:
    weight = torch.ones(4)
    states: list[dict[str, Any]] = [
        {"first": weight},
        {"first": weight, "second": weight},
        {"first": weight, "third": weight},
    ]
    plans, metadata = plan_together([plan_of(state) for state in states])
    written = {key: rank for rank, keys in enumerate(keys_written(plans)) for key in keys}
    assert (written["second"], written["third"]) == (1, 2)
    assert [tensor(metadata, key).alias_of for key in ("second", "third")] == ["first", "first"]


def test_a_large_tied_key_follows_the_parts_of_the_other() -> None:
    weight = torch.empty(40 << 20, dtype=torch.uint8)
    states: list[dict[str, Any]] = [{"first": weight, "second": weight}, {"first": weight}]
    plans, metadata = plan_together([plan_of(state, "off") for state in states])
    assert {rank for rank, keys in enumerate(keys_written(plans)) if "first" in keys} == {0, 1}
    assert {rank for rank, keys in enumerate(keys_written(plans)) if "second" in keys} == {0}
    first, second = (list(tensor(metadata, key).chunks) for key in ("first", "second"))
    assert first == second
    assert len(first) > 1


def test_a_key_tied_to_what_is_held_elsewhere_too_is_refused_and_not_taken_for_whole() -> None:
    low = shard("first", [0], [2], [4])
    assert low.tensor_data is not None
    data = dataclasses.replace(low.tensor_data, alias_of="first")
    tied = dataclasses.replace(low, index=MetadataIndex("second", [0]), tensor_data=data)
    with pytest.raises(InvalidStateError, match="'second'"):
        plan_together([SavePlan([low, tied]), SavePlan([shard("first", [2], [2], [4])])])


def test_a_tied_key_whose_other_was_taken_out_of_the_plan_is_written_itself() -> None:
    weight = torch.ones(4)
    plan = plan_of({"first": weight, "second": weight})
    del plan.items[0]
    (planned,), metadata = plan_together([plan])
    (item,) = planned.items
    assert item.tensor_data is not None
    assert item.tensor_data.alias_of is None
    assert tensor(metadata, "second").alias_of is None


def test_hints_are_positions_in_the_metadata() -> None:
    plans = [SavePlan([shard("w", [low, 0], [2, 3], [6, 3]), shard("v", [low], [2], [6])]) for low in (4, 0, 2)]
    together, metadata = plan_together(plans)
    for plan in together:
        for item in plan.items:
            assert item.index.index is not None
            assert tensor(metadata, item.index.fqn).chunks[item.index.index].offsets == item.index.offset


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_key_requires_a_gradient_where_any_rank_says_so(who: int) -> None:
    states = [{"w": torch.ones(2, requires_grad=rank == who)} for rank in range(3)]
    plans, metadata = plan_together([plan_of(state) for state in states])
    assert tensor(metadata, "w").properties.requires_grad
    (item,) = (item for plan in plans for item in plan.items)
    assert item.tensor_data is not None
    assert item.tensor_data.properties.requires_grad


# Disagreement.


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (torch.ones(4), torch.ones(3), ("torch.float32 [4]", "torch.float32 [3]")),
        (torch.ones(4), torch.ones(4, 1), ("torch.float32 [4]", "torch.float32 [4, 1]")),
        (torch.ones(4), torch.ones(4).long(), ("torch.float32 [4]", "torch.int64 [4]")),
        (torch.ones(4), 1.0, ("torch.float32 [4]", "a value")),
        (1.0, torch.ones(4), ("a value", "torch.float32 [4]")),
        (np.ones(4), torch.ones(4).double(), ("numpy torch.float64 [4]", "torch.float64 [4]")),
    ],
)
def test_one_key_in_two_kinds_names_both_ranks(one: Any, other: Any, said: tuple[str, str]) -> None:
    plans = [plan_of({"fine": 1}), plan_of({"w": one}), plan_of({"fine": 1}), plan_of({"w": other})]
    with pytest.raises(RankDisagreementError) as caught:
        plan_together(plans)
    assert str(caught.value).startswith(f"'w' is {said[0]} on rank 1 but {said[1]} on rank 3")
    assert caught.value.said == {1: said[0], 3: said[1]}


def test_a_rank_that_holds_nothing_is_named_when_it_disagrees() -> None:
    with pytest.raises(RankDisagreementError, match=r"\[5\] on rank 1 but torch.float32 \[4\] on rank 2") as caught:
        plan_together([plan_of({"fine": 1}), held_nowhere("w", [5]), plan_of({"w": torch.ones(4)})])
    assert set(caught.value.said) == {1, 2}


@pytest.mark.parametrize("contents", [torch.ones(4), np.ones(4), 7, "text", [1, 2]])
def test_different_contents_of_replicas_name_the_ranks(contents: Any) -> None:
    other = contents * 2
    plans = [plan_of({"fine": 1, "w": each}) for each in (contents, contents, other, contents, other)]
    with pytest.raises(RankDisagreementError) as caught:
        plan_together(plans)
    assert "'w' has other contents on rank 2, 4 than on rank 0" in str(caught.value)
    assert set(caught.value.said) == {0, 1, 2, 3, 4}
    said = caught.value.said
    assert said[0] == said[1] == said[3] != said[2] == said[4]


def test_different_contents_are_not_looked_at_when_the_check_is_off() -> None:
    plans = [plan_of({"w": torch.full((3,), float(rank)), "step": rank}, "off") for rank in range(2)]
    plan_together(plans)


def test_values_whose_text_says_nothing_are_not_compared() -> None:
    plan_together([plan_of({"odd": object()}) for _ in range(2)])


# What is not whole.


def test_a_hole_is_named_by_its_key() -> None:
    with pytest.raises(InvalidStateError, match="'w'") as caught:
        plan_together([SavePlan([shard("w", [0], [2], [6])]), SavePlan([shard("w", [4], [2], [6])])])
    assert caught.value.key == "w"


def test_boxes_that_overlap_without_being_the_same_are_refused() -> None:
    with pytest.raises(InvalidStateError, match="'w'"):
        plan_together([SavePlan([shard("w", [0], [4], [6])]), SavePlan([shard("w", [3], [3], [6])])])


def test_a_key_that_nobody_holds_is_refused() -> None:
    with pytest.raises(InvalidStateError, match="'w'"):
        plan_together([held_nowhere("w", [4]), held_nowhere("w", [4])])


def test_a_value_twice_in_one_plan_is_refused() -> None:
    item = WriteItem(MetadataIndex("step"), WriteItemType.BYTE_IO)
    with pytest.raises(InvalidStateError, match="'step' 2 times"):
        plan_together([SavePlan([item, item]), SavePlan([])])


def test_a_piece_twice_in_one_plan_of_several_is_refused() -> None:
    twice = SavePlan([shard("w", [0], [2], [4]), shard("w", [0], [2], [4])])
    with pytest.raises(InvalidStateError, match="piece of 'w' twice"):
        plan_together([twice, SavePlan([shard("w", [2], [2], [4])])])


def test_nothing_at_all_is_a_plan_too() -> None:
    plans, metadata = plan_together([plan_of({}), plan_of({})])
    assert keys_written(plans) == [[], []]
    assert metadata.state_dict_metadata == {}


def test_a_value_in_the_plans_of_two_ranks_is_refused_where_plans_stay_as_they_are() -> None:
    plans = [SavePlan([WriteItem(MetadataIndex("step"), WriteItemType.BYTE_IO)]) for _ in range(2)]
    with pytest.raises(InvalidStateError, match="the plans have the value of 'step' 2 times") as caught:
        as_planned(plans)
    assert caught.value.key == "step"
    kept, metadata = as_planned(plans[:1])
    assert keys_written(kept) == [["step"]]
    assert list(metadata.state_dict_metadata) == ["step"]


def test_hosts_are_those_of_one_save() -> None:
    """A planner that is used again, by whoever drives it then, has forgotten who shared a host with whom."""
    planner = DefaultSavePlanner()
    for hosts in ([0, 0, 1], None):
        planner.set_up_planner({"w": torch.zeros(3 << 20)})
        assert planner.hosts is None
        planner.hosts = None if hosts is None else np.array(hosts)
        plans, _ = planner.create_global_plan([plan_of({"w": torch.zeros(3 << 20)})] * 3)
        sizes = [sum(item.tensor_data.chunk.sizes[0] for item in plan.items) for plan in plans]  # type: ignore[union-attr]
        assert sizes == ([3 << 18, 3 << 18, 3 << 19] if hosts else [1 << 20] * 3)


def test_what_may_differ_is_all_of_it_the_lowest_ranks() -> None:
    def plan(rank: int) -> SavePlan:
        state = {"weight": torch.ones(8 << 20), "mean": torch.full((8 << 20,), float(rank)), "step": rank, "same": 1}
        lenient = frozenset({"mean", "step", "same"}) if rank else frozenset[str]()
        return SavePlan(LazyList(LocalLeaves(state, replica_check="sample", lenient=lenient).columns))

    plans, metadata = plan_together([plan(0), plan(1)])
    assert metadata.differing == {"mean": 0, "step": 0}
    assert [keys.count("mean") for keys in keys_written(plans)] == [1, 0]
    assert [keys.count("step") for keys in keys_written(plans)] == [1, 0]
    assert [keys.count("weight") for keys in keys_written(plans)] == [1, 1]
