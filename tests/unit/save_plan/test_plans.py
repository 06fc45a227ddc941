"""What one rank offers to write, and what the coordinator makes of the plans of all."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._save_plan.plans import as_planned, local_leaves, plan_together
from holdfast._values.box import Box
from holdfast._values.lazy import LazyList
from holdfast.errors import InvalidStateError, RankDisagreementError
from holdfast.metadata import (
    BytesStorageMetadata,
    ChunkColumns,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    chunk_columns,
)
from holdfast.planner import (
    SavePlan,
    TensorHead,
    TensorWriteData,
    WriteColumns,
    WriteItem,
    WriteItemType,
    padded,
    write_columns,
)
from holdfast.planner_helpers import ReadRows

# --- one rank: a row per leaf, ties, and fingerprints only where ranks may have to compare ----------------------------


class HalfHeld(torch.Tensor):
    """Rows 2 and 5 of six, as two chunks: a tensor that knows its own part."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> HalfHeld:
        return torch.Tensor._make_subclass(cls, data)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 3])) for row in (2, 5)]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        row = index.offset[0]
        return self.as_subclass(torch.Tensor)[row : row + 1]


def test_every_leaf_is_one_row_in_the_order_of_the_state() -> None:
    state = {"w": torch.ones(2, 3), "step": 3, "array": np.ones(4, dtype=np.int16), "scalar": torch.tensor(1.0)}
    columns = local_leaves(state).columns
    assert columns.keys == list(state)
    assert columns.key.tolist() == [0, 1, 2, 3]
    assert columns.length.tolist() == [[2, 3], [1, 1], [4, 1], [1, 1]]
    assert not columns.is_shard.any()
    kinds = [None if head is None else (head.properties.dtype, head.kind) for head in columns.heads]
    assert kinds == [(torch.float32, None), None, (torch.int16, "numpy"), (torch.float32, None)]


def test_requires_grad_is_kept() -> None:
    heads = local_leaves({"w": torch.nn.Parameter(torch.ones(2)), "b": torch.ones(2)}).columns.heads
    assert [head is not None and head.properties.requires_grad for head in heads] == [True, False]


def test_a_sharded_leaf_is_one_row_per_piece() -> None:
    held = HalfHeld(torch.arange(18.0).view(6, 3))
    local = local_leaves({"table": held, "same": held})
    columns = local.columns
    assert columns.lo.tolist() == [[2, 0], [5, 0], [2, 0], [5, 0]]
    assert columns.length.tolist() == [[1, 3]] * 4
    assert columns.is_shard.all()
    assert [None if head is None else head.alias_of for head in columns.heads] == [None, "table"]
    assert set(local.pieces) == {"table", "same"}
    assert len(set(local.fingerprints(np.arange(4), "all").tolist())) == 2


def test_only_the_very_same_memory_is_tied() -> None:
    weight = torch.ones(4, 4)
    state = {
        "first": weight,
        "same": weight.view(4, 4),
        "transposed": weight.t(),
        "part": weight[:2],
        "bits": weight.view(torch.int32),
        "copy": weight.clone(),
        "empty": torch.empty(0),
        "empty too": torch.empty(0),
    }
    heads = local_leaves(state).columns.heads
    ties = {key: head.alias_of for key, head in zip(state, heads, strict=True) if head is not None and head.alias_of}
    assert ties == {"same": "first"}


@pytest.mark.parametrize("check", ["sample", "all"])
def test_fingerprints_are_made_only_when_they_are_asked_for(check: str) -> None:
    state = {"w": torch.ones(3), "step": 1, "array": np.ones(2)}
    looked_at = local_leaves(state).looked_at(check).fingerprint
    assert looked_at is not None
    assert (looked_at != 0).all()
    assert local_leaves(state).columns.fingerprint is None
    assert not local_leaves(state).fingerprints(np.arange(3), "off").any()


def test_what_has_no_data_is_refused_by_name() -> None:
    with pytest.raises(InvalidStateError, match="'w'"):
        local_leaves({"w": torch.ones(3, device="meta")})


def test_an_empty_state_has_no_rows() -> None:
    assert len(local_leaves({}).columns) == 0


# --- all ranks: one head per key, ties, values once, and who disagrees ------------------------------------------------


FLOAT = TensorProperties(torch.float32)


def plan_of(state: dict[str, Any], replica_check: str = "sample") -> SavePlan:
    return SavePlan(LazyList(local_leaves(state).looked_at(replica_check)))


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


def test_what_may_differ_is_all_of_it_the_lowest_ranks() -> None:
    def plan(rank: int) -> SavePlan:
        state = {"weight": torch.ones(8 << 20), "mean": torch.full((8 << 20,), float(rank)), "step": rank, "same": 1}
        lenient = frozenset({"mean", "step", "same"}) if rank else frozenset[str]()
        return SavePlan(LazyList(local_leaves(state, lenient=lenient).looked_at("sample")))

    plans, metadata = plan_together([plan(0), plan(1)])
    assert metadata.differing == {"mean": 0, "step": 0}
    assert [keys.count("mean") for keys in keys_written(plans)] == [1, 0]
    assert [keys.count("step") for keys in keys_written(plans)] == [1, 0]
    assert [keys.count("weight") for keys in keys_written(plans)] == [1, 1]


# --- thousands of random layouts, planned in one process: every element is written once and read back once ------------


DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A tensor over a mesh: ``placements`` has a tensor dimension for each mesh dimension, or None for replicas."""

    size: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[int | None, ...]

    def boxes(self, rank: int) -> list[Box]:
        """What the rank holds: one split after the other; nothing where the rank is outside the mesh."""
        if rank >= math.prod(self.mesh):
            return []
        low, length = [0] * len(self.size), list(self.size)
        for place, parts, dimension in zip(np.unravel_index(rank, self.mesh), self.mesh, self.placements, strict=True):
            if dimension is not None:
                step = -(-length[dimension] // parts)
                start = min(int(place) * step, length[dimension])
                low[dimension] += start
                length[dimension] = min(step, length[dimension] - start)
        box = Box(tuple(low), tuple(length))
        return [box] if box.volume or not math.prod(self.size) else []


@st.composite
def layouts(draw: st.DrawFn, ranks: int) -> Layout:
    size = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    mesh: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        mesh.append(draw(st.integers(1, max(1, ranks // math.prod(mesh)))))
    dimension = st.none() | st.integers(0, len(size) - 1) if size else st.none()
    return Layout(size=size, mesh=tuple(mesh), placements=tuple(draw(dimension) for _ in mesh))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A world: the layout and dtype of every tensor, and which ranks have each value."""

    ranks: int
    tensors: tuple[tuple[Layout, torch.dtype], ...]
    values: tuple[frozenset[int], ...]

    def plan_of(self, rank: int) -> SavePlan:
        keys: list[str] = []
        heads: list[TensorHead | None] = []
        rows: list[tuple[int, Box, bool]] = []
        for number, (layout, dtype) in enumerate(self.tensors):
            rows.extend((len(keys), box, True) for box in layout.boxes(rank))
            keys.append(f"tensor.{number}")
            heads.append(TensorHead(TensorProperties(dtype), torch.Size(layout.size)))
        for number, holders in enumerate(self.values):
            if rank in holders:
                rows.append((len(keys), Box((), ()), False))
                keys.append(f"value.{number}")
                heads.append(None)
        return SavePlan(LazyList(_columns(keys, heads, rows)))

    def plans(self) -> list[SavePlan]:
        return [self.plan_of(rank) for rank in range(self.ranks)]


def _columns(keys: list[str], heads: list[TensorHead | None], rows: list[tuple[int, Box, bool]]) -> WriteColumns:
    return WriteColumns(
        keys=keys,
        heads=heads,
        key=np.array([number for number, _, _ in rows], dtype=np.int64),
        lo=padded([box.offsets for _, box, _ in rows], fill=0),
        length=padded([box.lengths for _, box, _ in rows], fill=1),
        hint=np.zeros(len(rows), dtype=np.int64),
        is_shard=np.array([is_shard for _, _, is_shard in rows], dtype=bool),
        fingerprint=np.ones(len(rows), dtype=np.uint64),
    )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    ranks = draw(st.integers(1, 12))
    tensors = draw(st.lists(st.tuples(layouts(ranks), st.sampled_from(DTYPES)), max_size=5))
    holders = st.frozensets(st.integers(0, ranks - 1), min_size=1)
    return Job(ranks=ranks, tensors=tuple(tensors), values=tuple(draw(st.lists(holders, max_size=3))))


def written(plans: list[SavePlan]) -> list[tuple[int, str, Box]]:
    """Rank, key and box of everything that is written; a value has a box without dimensions."""
    found = []
    for rank, plan in enumerate(plans):
        columns = write_columns(plan.items)
        for which, low, length, _, _ in columns.rows:
            head = columns.heads[which]
            dimensions = 0 if head is None else len(head.size)
            found.append((rank, columns.keys[which], Box(tuple(low[:dimensions]), tuple(length[:dimensions]))))
    return found


def stored(metadata: Metadata, key: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


@given(jobs(), st.booleans())
@settings(max_examples=400)
def test_every_element_is_written_once_by_a_rank_that_holds_it(job: Job, to_lowest_rank: bool) -> None:
    plans, _ = plan_together(job.plans(), to_lowest_rank=to_lowest_rank)
    found = written(plans)
    for number, (layout, _) in enumerate(job.tensors):
        counts = np.zeros(layout.size, dtype=np.int64)
        for rank, key, box in found:
            if key != f"tensor.{number}":
                continue
            counts[box.slices()] += 1
            held = layout.boxes(rank)
            assert any(each.contains(box) for each in held), f"rank {rank} does not hold {box}"
            if to_lowest_rank:
                assert rank == min(other for other in range(job.ranks) if held[0] in layout.boxes(other))
        assert (counts == 1).all()
    for number, holders in enumerate(job.values):
        writers = [rank for rank, key, _ in found if key == f"value.{number}"]
        assert len(writers) == 1
        assert writers[0] in holders


@given(jobs())
@settings(max_examples=300)
def test_the_metadata_tells_what_is_written(job: Job) -> None:
    plans, metadata = plan_together(job.plans())
    found = written(plans)
    assert set(metadata.state_dict_metadata) == {key for _, key, _ in found}
    for number, (layout, dtype) in enumerate(job.tensors):
        key = f"tensor.{number}"
        entry = stored(metadata, key)
        assert tuple(entry.size) == layout.size
        assert entry.properties.dtype == dtype
        told = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        assert told == sorted((box.offsets, box.lengths) for _, name, box in found if name == key)


@given(jobs())
@settings(max_examples=150)
def test_the_same_plans_give_the_same_result(job: Job) -> None:
    first, second = (written(plan_together(job.plans())[0]) for _ in range(2))
    assert first == second


@given(jobs(), st.data())
@settings(max_examples=300)
def test_every_wanted_element_is_read_once_from_where_it_was_written(job: Job, data: st.DataObject) -> None:
    """Into another random layout of each tensor, on another number of ranks, with numbered contents."""
    _, metadata = plan_together(job.plans())
    ranks = data.draw(st.integers(1, 12), label="ranks of the target")
    for number, (layout, _) in enumerate(job.tensors):
        entry = stored(metadata, f"tensor.{number}")
        truth = np.arange(math.prod(layout.size)).reshape(layout.size)
        chunks = chunk_columns(entry.chunks, len(layout.size))
        wanted = data.draw(target_boxes(layout.size, ranks), label="target boxes")
        for box in wanted:
            rows = ReadRows()
            rows.add_tensor("tensor", entry, box)
            columns = rows.columns()
            target = np.full(box.lengths, -1)
            times = np.zeros(box.lengths, dtype=np.int64)
            for row in range(len(columns)):
                item = columns.item(row)
                hint = item.storage_index.index
                assert hint is not None
                low = tuple(chunks.lo[hint].tolist())
                assert tuple(item.storage_index.offset or ()) == low
                chunk = truth[Box(low, tuple(chunks.length[hint].tolist())).slices()]
                place = Box(tuple(item.dest_offsets), tuple(item.lengths)).slices()
                target[place] = chunk[Box(tuple(item.storage_offsets), tuple(item.lengths)).slices()]
                times[place] += 1
            assert (times == 1).all()
            assert (target == truth[box.slices()]).all()


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 3), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_few_rows_and_many_make_the_same_read_items(chunks: int, wide: int, scalars: int, random: Random) -> None:
    """Rows are kept one by one or as a table, whichever is cheaper; both in the order they were asked for."""
    tables = [(chunks, (chunks, 3)), (1, (4,)), (wide, (2, wide)), *[(1, ())] * scalars]
    random.shuffle(tables)
    rows = ReadRows()
    expected: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for number, (parts, size) in enumerate(tables):
        key = f"w{number}"
        dimension = int(np.argmax(size)) if parts > 1 else 0
        lo = np.zeros((parts, len(size)), dtype=np.int64)
        length = np.tile(np.array(size, dtype=np.int64), (parts, 1)).reshape(parts, len(size))
        if parts > 1:
            lo[:, dimension], length[:, dimension] = np.arange(parts), 1
        columns = ChunkColumns(lo, length, 0, parts, len(size))
        rows.add_tensor(key, TensorStorageMetadata(TensorProperties(), torch.Size(size), LazyList(columns)), None)
        expected += [(key, tuple(a), tuple(b)) for a, b in zip(lo.tolist(), length.tolist(), strict=True)]
        rows.add_value(f"value{number}")
        expected.append((f"value{number}", (), (0,)))
    columns_of_all = rows.columns()
    items = [columns_of_all.item(row) for row in range(len(rows))]
    assert [
        (item.dest_index.fqn, tuple(item.storage_index.offset or ()), tuple(item.lengths)) for item in items
    ] == expected
    assert all(item.dest_offsets == item.storage_index.offset for item in items if item.storage_index.offset)


@st.composite
def target_boxes(draw: st.DrawFn, size: tuple[int, ...], ranks: int) -> list[Box]:
    """The boxes of all ranks in some layout of a tensor of that size."""
    dimension = st.none() | st.integers(0, len(size) - 1) if size else st.none()
    layout = Layout(size=size, mesh=(ranks,), placements=(draw(dimension),))
    return list(itertools.chain.from_iterable(layout.boxes(rank) for rank in range(ranks)))


@given(
    st.integers(2, 16),
    st.lists(st.integers(1, 1 << 22), min_size=40, max_size=120),
    st.integers(0, 3),
)
@settings(max_examples=60)
def test_what_everybody_holds_is_spread_evenly(ranks: int, lengths: list[int], large: int) -> None:
    sizes = [*lengths, *([1 << 26] * large)]
    keys = [f"tensor.{number}" for number in range(len(sizes))]
    heads: list[TensorHead | None] = [TensorHead(TensorProperties(torch.float32), torch.Size([size])) for size in sizes]
    rows = [(number, Box((0,), (size,)), False) for number, size in enumerate(sizes)]
    plans, _ = plan_together([SavePlan(LazyList(_columns(keys, heads, rows))) for _ in range(ranks)])
    loads = [0] * ranks
    for rank, _, box in written(plans):
        loads[rank] += 4 * box.volume
    assert sum(loads) == 4 * sum(sizes)
    # A rank writes a tenth more than another at most, or as much as the smallest part that is worth a cut.
    assert max(loads) - min(loads) <= max(0.1 * max(loads), 1 << 20)


@given(jobs().filter(lambda job: any(math.prod(layout.size) for layout, _ in job.tensors)), st.data())
@settings(max_examples=200)
def test_a_box_that_nobody_brings_is_missed(job: Job, data: st.DataObject) -> None:
    """Without one of its boxes on all ranks that hold it, a tensor has a hole, which must not go unnoticed."""
    full = [number for number, (layout, _) in enumerate(job.tensors) if math.prod(layout.size)]
    number = data.draw(st.sampled_from(full), label="tensor")
    layout = job.tensors[number][0]
    lost = data.draw(st.sampled_from([box for rank in range(job.ranks) for box in layout.boxes(rank)]), label="lost")
    plans = []
    for plan in job.plans():
        columns = write_columns(plan.items)
        items = [columns.item(row) for row in range(len(columns))]
        kept = [
            item
            for item in items
            if item.index.fqn != f"tensor.{number}"
            or item.tensor_data is None
            or Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)) != lost
        ]
        plans.append(SavePlan(kept))
    # When it was all there was, no plan names the tensor any more.
    named = any(f"tensor.{number}" in write_columns(plan.items).keys for plan in plans)
    if not named:
        assert f"tensor.{number}" not in plan_together(plans)[1].state_dict_metadata
        return
    with pytest.raises(InvalidStateError) as caught:
        plan_together(plans)
    assert caught.value.key == f"tensor.{number}"
