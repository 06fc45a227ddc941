"""The functions beside the default planners, and the helpers that planners of others are made of: torch's results."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardedTensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint import default_planner as torch_default
from torch.distributed.checkpoint import filesystem as torch_filesystem
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint import planner_helpers as torch_helpers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast
from holdfast import (
    ChunkStorageMetadata,
    Metadata,
    SavePlan,
    TensorProperties,
    TensorStorageMetadata,
    planner_helpers,
)
from holdfast.default_planner import (
    _create_default_local_metadata,
    _EmptyStateDictLoadPlanner,
    _validate_global_plan,
    create_default_global_load_plan,
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
    dedup_save_plans,
    dedup_tensors,
)
from holdfast.filesystem import CURRENT_DCP_VERSION

Boxes = list[tuple[list[int], list[int]]]


def chunks(boxes: Boxes, cls: Any = ChunkStorageMetadata) -> list[Any]:
    return [cls(torch.Size(low), torch.Size(length)) for low, length in boxes]


def tensor_metadata(size: list[int], boxes: Boxes) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), chunks(boxes))


def torch_metadata_of(size: list[int], boxes: Boxes) -> torch_metadata.TensorStorageMetadata:
    return torch_metadata.TensorStorageMetadata(
        torch_metadata.TensorProperties(torch.float32),
        torch.Size(size),
        chunks(boxes, torch_metadata.ChunkStorageMetadata),
    )


def item_parts(item: Any) -> tuple[Any, ...]:
    """A read or write item of either library as plain values, hints included."""
    if hasattr(item, "dest_index"):
        dest, stored = item.dest_index, item.storage_index
        return (
            item.type.name,
            (dest.fqn, dest.offset, dest.index),
            (stored.fqn, stored.offset, stored.index),
            tuple(item.dest_offsets),
            tuple(item.storage_offsets),
            tuple(item.lengths),
        )
    data = item.tensor_data
    properties = data and {name: value for name, value in vars(data.properties).items() if name != "strides"}
    said = data and (data.chunk.offsets, data.chunk.sizes, data.size, properties)
    return item.type.name, item.index.fqn, item.index.offset, said


def state() -> dict[str, Any]:
    return {"w": torch.arange(6.0).view(2, 3), "scalar": torch.tensor(1.5), "empty": torch.ones(0, 2), "step": 3}


def keys_of(plans: list[SavePlan]) -> list[list[str]]:
    return [[item.index.fqn for item in plan.items] for plan in plans]


# Local and global plans.


@pytest.mark.parametrize("is_coordinator", [False, True])
def test_a_local_save_plan_is_torchs(is_coordinator: bool) -> None:
    ours = create_default_local_save_plan(state(), is_coordinator)
    theirs = torch_default.create_default_local_save_plan(state(), is_coordinator)
    assert list(map(item_parts, ours.items)) == list(map(item_parts, theirs.items))


def test_a_global_save_plan_has_torchs_metadata_and_hints() -> None:
    def halves(library: Any, cls: Any) -> list[Any]:
        plans = []
        for low in (2, 0):
            local = library.create_default_local_save_plan({"w": torch.ones(2, 3), f"step.{low}": 1}, True)
            whole = local.items[0]
            data = dataclasses.replace(
                whole.tensor_data, chunk=cls(torch.Size([low, 0]), torch.Size([2, 3])), size=torch.Size([4, 3])
            )
            index = dataclasses.replace(whole.index, offset=torch.Size([low, 0]))
            kind = type(whole.type).SHARD
            piece = dataclasses.replace(whole, index=index, type=kind, tensor_data=data)
            plans.append(dataclasses.replace(local, items=[piece, local.items[1]]))
        return plans

    ours = halves(holdfast.default_planner, ChunkStorageMetadata)
    theirs = halves(torch_default, torch_metadata.ChunkStorageMetadata)
    plans, metadata = create_default_global_save_plan(ours)
    torch_plans, torchs = torch_default.create_default_global_save_plan(theirs)
    assert [list(map(item_parts, plan.items)) for plan in plans] == [
        list(map(item_parts, plan.items)) for plan in torch_plans
    ]
    assert set(metadata.state_dict_metadata) == set(torchs.state_dict_metadata)
    stored = metadata.state_dict_metadata["w"]
    assert isinstance(stored, TensorStorageMetadata)
    for plan in plans:
        (item,) = (item for item in plan.items if item.index.fqn == "w")
        assert item.index.index is not None
        assert stored.chunks[item.index.index].offsets == item.index.offset
    kept, _ = create_default_global_save_plan(ours, rewrite_index_hints=False)
    assert all(one is other for one, other in zip(kept, ours, strict=True))


def test_a_global_save_plan_wants_no_duplicates() -> None:
    plans = [create_default_local_save_plan({"step": 1}, True) for _ in range(2)]
    with pytest.raises(holdfast.InvalidStateError, match="'step' 2 times"):
        create_default_global_save_plan(plans)
    plans = [create_default_local_save_plan({"w": torch.ones(2)}, True) for _ in range(2)]
    with pytest.raises(holdfast.InvalidStateError, match="'w'"):
        create_default_global_save_plan(plans)


def test_plans_without_duplicates_have_every_item_in_one() -> None:
    states = [{"a": torch.ones(40), "b": torch.ones(30), "c": torch.ones(20), "step": 1} for _ in range(2)]
    plans = [create_default_local_save_plan(each, rank == 0) for rank, each in enumerate(states)]
    balanced = dedup_save_plans(plans)
    assert sorted(key for keys in keys_of(balanced) for key in keys) == ["a", "b", "c", "step"]
    assert all(keys for keys in keys_of(balanced))
    for lowest in (dedup_save_plans(plans, save_to_lowest_rank=True), dedup_tensors(plans)):
        assert [sorted(keys) for keys in keys_of(lowest)] == [["a", "b", "c", "step"], []]
    create_default_global_save_plan(balanced)


def test_large_items_are_not_split_where_a_function_says_once() -> None:
    big = torch.empty(40 << 20, dtype=torch.uint8)
    plans = dedup_save_plans([create_default_local_save_plan({"big": big}, True) for _ in range(2)])
    assert sorted(map(len, keys_of(plans))) == [0, 1]


def test_a_local_load_plan_is_torchs(path: str, tmp_path: Path) -> None:
    metadata = holdfast.save(state(), path)
    plan = torch_default.create_default_local_save_plan(state(), True)
    _, torchs = torch_default.create_default_global_save_plan([plan])
    target = {key: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else None for key, leaf in state().items()}
    ours = create_default_local_load_plan(target, metadata)
    theirs = torch_default.create_default_local_load_plan(target, torchs)
    without_hints = [(part[0], part[1][:2], *part[2:]) for part in map(item_parts, ours.items)]
    expected = [(part[0], part[1][:2], *part[2:]) for part in map(item_parts, theirs.items) if part[-1] != (0, 2)]
    assert without_hints == expected
    assert create_default_global_load_plan([ours]) == [ours]


def test_a_local_load_plan_wants_every_key_unless_told_otherwise(path: str) -> None:
    metadata = holdfast.save({"w": torch.ones(2)}, path)
    target = {"w": torch.zeros(2), "new": torch.zeros(1)}
    with pytest.raises(holdfast.MismatchError, match="'new'"):
        create_default_local_load_plan(target, metadata)
    plan = create_default_local_load_plan(target, metadata, strict=False)
    assert [item.dest_index.fqn for item in plan.items] == ["w"]
    with pytest.raises(holdfast.MismatchError, match="'w'"):
        create_default_local_load_plan({"w": torch.zeros(3)}, metadata, strict=False)


# Validation.

FAULTS: dict[str, Boxes] = {
    "outside": [([0, 0], [3, 3])],
    "overlap": [([0, 0], [2, 2]), ([0, 1], [2, 2])],
    "gap": [([0, 0], [1, 3])],
    "same volume": [([0, 0], [1, 3]), ([0, 0], [1, 3])],
}


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_chunks_that_do_not_make_up_a_tensor_are_named(name: str) -> None:
    entry = tensor_metadata([2, 3], FAULTS[name])
    fine = tensor_metadata([2, 3], [([0, 0], [2, 3])])
    (message,) = _validate_global_plan([SavePlan([])], Metadata({"fine": fine, "w": entry}))
    assert message.startswith("key:w ")


def test_one_plan_is_checked_for_gaps_where_torch_checks_several_only() -> None:
    boxes = FAULTS["gap"]
    theirs = torch_metadata.Metadata({"w": torch_metadata_of([2, 3], boxes)})
    assert torch_default._validate_global_plan([torch_default.SavePlan([])], theirs) == []
    assert _validate_global_plan([SavePlan([])], Metadata({"w": tensor_metadata([2, 3], boxes)})) != []


def test_whole_metadata_has_no_faults() -> None:
    entries: dict[str, Any] = {
        "w": tensor_metadata([2, 3], [([0, 0], [2, 1]), ([0, 1], [2, 2])]),
        "scalar": tensor_metadata([], [([], [])]),
        "step": holdfast.BytesStorageMetadata(),
    }
    assert _validate_global_plan([], Metadata(entries)) == []


# Read items.


@pytest.mark.parametrize(
    ("size", "stored", "wanted"),
    [
        ([4, 6], [([0, 0], [2, 6]), ([2, 0], [2, 6])], [([0, 0], [4, 3]), ([0, 3], [4, 3])]),
        ([7], [([0], [3]), ([3], [4])], [([2], [3])]),
        ([], [([], [])], [([], [])]),
        ([3, 5, 2], [([0, 0, 0], [3, 2, 2]), ([0, 2, 0], [3, 3, 2])], [([1, 1, 0], [2, 3, 1])]),
        ([4], [([0], [4])], []),
    ],
)
def test_read_items_for_chunks_are_torchs(size: list[int], stored: Boxes, wanted: Boxes) -> None:
    ours = planner_helpers.create_read_items_for_chunk_list("w", tensor_metadata(size, stored), chunks(wanted))
    theirs = torch_helpers.create_read_items_for_chunk_list(
        "w", torch_metadata_of(size, stored), chunks(wanted, torch_metadata.ChunkStorageMetadata)
    )
    assert sorted(map(item_parts, ours)) == sorted(map(item_parts, theirs))
    assert holdfast.planner_helpers.__all__ == torch_helpers.__all__


def test_read_items_of_a_target_are_torchs() -> None:
    ours = planner_helpers._create_read_items("w", tensor_metadata([4], [([0], [3]), ([3], [1])]), torch.zeros(4))
    theirs = torch_helpers._create_read_items("w", torch_metadata_of([4], [([0], [3]), ([3], [1])]), torch.zeros(4))
    assert list(map(item_parts, ours)) == list(map(item_parts, theirs))
    (value,) = planner_helpers._create_read_items("step", holdfast.BytesStorageMetadata(), None)
    (torchs,) = torch_helpers._create_read_items("step", torch_metadata.BytesStorageMetadata(), None)
    assert item_parts(value) == item_parts(torchs)
    with pytest.raises(holdfast.MismatchError, match="'w'"):
        planner_helpers._create_read_items("w", tensor_metadata([4], [([0], [4])]), 3)


# Write items and chunks.


@pytest.fixture
def group() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield DeviceMesh("cpu", [0])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "leaf", [torch.ones(2, 3), torch.tensor(1.0), {"any": "value"}], ids=["matrix", "0-d", "value"]
)
def test_write_items_of_a_leaf_are_torchs(leaf: Any) -> None:
    ours = planner_helpers._create_write_items("key", leaf)
    theirs = torch_helpers._create_write_items("key", leaf)
    assert list(map(item_parts, ours)) == list(map(item_parts, theirs))


def test_single_write_items_are_torchs() -> None:
    tensor = torch.ones(2, 3, requires_grad=True)
    for name, leaf in (("_create_write_item_for_tensor", tensor), ("_create_write_item_for_bytesio", b"bytes")):
        ours, theirs = (getattr(library, name)("key", leaf) for library in (planner_helpers, torch_helpers))
        assert item_parts(ours) == item_parts(theirs)
    ours, theirs = (each._create_chunk_from_tensor(tensor) for each in (planner_helpers, torch_helpers))
    assert (ours.offsets, ours.sizes) == (theirs.offsets, theirs.sizes)


def test_items_and_chunks_of_a_distributed_tensor_are_torchs(group: DeviceMesh) -> None:
    tensor = DTensor.from_local(torch.ones(4, 3), group, [Shard(0)])
    ours, theirs = (each._create_write_items_for_dtensor("w", tensor) for each in (planner_helpers, torch_helpers))
    assert item_parts(ours) == item_parts(theirs)
    assert list(map(item_parts, planner_helpers._create_write_items("w", tensor))) == [item_parts(theirs)]
    for leaf in (tensor, torch.ones(2, 2)):
        mine, torchs = (each._create_chunk_list(leaf) for each in (planner_helpers, torch_helpers))
        assert [(chunk.offsets, chunk.sizes) for chunk in mine] == [(chunk.offsets, chunk.sizes) for chunk in torchs]
    mine, torchs = (each._create_chunk_from_dtensor(tensor) for each in (planner_helpers, torch_helpers))
    assert (mine.offsets, mine.sizes) == (torchs.offsets, torchs.sizes)
    for library in (planner_helpers, torch_helpers):
        with pytest.raises(ValueError, match="str"):
            library._create_chunk_list("text")  # type: ignore[arg-type]


def test_single_read_items_are_torchs() -> None:
    ours, theirs = (
        (
            library._create_read_item_for_tensor(index("w", (2, 0)), [1, 0], index("old", (0, 0)), [3, 0], [1, 4]),
            library._create_read_item_for_byteio(index("step"), 0, index("step"), 0, 0),
        )
        for library, index in (
            (planner_helpers, holdfast.MetadataIndex),
            (torch_helpers, torch_metadata.MetadataIndex),
        )
    )
    assert list(map(item_parts, ours)) == list(map(item_parts, theirs))


def test_meta_tensors_are_replaced_at_any_depth() -> None:
    meta = torch.empty(2, 3, device="meta", dtype=torch.bfloat16)
    real = torch.ones(1)
    target: dict[str, Any] = {"a": {"b": [meta, real]}, "step": {1, 2}}
    planner_helpers._init_state_dict(target)
    filled, kept = target["a"]["b"]
    assert (filled.device.type, filled.shape, filled.dtype) == ("cpu", (2, 3), torch.bfloat16)
    assert kept is real
    assert target["step"] == {1, 2}


# Plans compared.


def plan(dtype: torch.dtype = torch.float32, **options: Any) -> SavePlan:
    return dataclasses.replace(create_default_local_save_plan({"w": torch.ones(2, dtype=dtype)}, True), **options)


def test_plans_are_compared_in_all_that_they_say() -> None:
    same = planner_helpers._compare_save_plans
    assert same(plan(), plan())
    assert not same(plan(), plan(usable=False))
    assert not same(plan(planner_data={"w": ("w",)}), plan(planner_data={"w": ("x",)}))
    assert not same(plan(), SavePlan([]))
    assert not same(plan(torch.float32), plan(torch.bfloat16))
    theirs = [torch_default.create_default_local_save_plan({"w": torch.ones(2, dtype=each)}, True) for each in DTYPES]
    assert torch_helpers._compare_save_plans(*theirs), "torch has mended it: so may the documents say"


DTYPES = (torch.float32, torch.bfloat16)


def test_changed_plans_are_put_in_place_of_those_before() -> None:
    old, new, unchanged = plan(), plan(torch.bfloat16), SavePlan([], usable=False)
    assert planner_helpers._merge_delta_local_plans([old, old], [unchanged, new]) == [old, new]
    assert planner_helpers._contains_usable_plan([unchanged, new])
    assert not planner_helpers._contains_usable_plan([unchanged, unchanged])


@pytest.fixture
def torchs_metadata(path: str) -> torch_metadata.Metadata:
    holdfast.save({"w": torch.arange(6.0), "n": 3}, storage_writer=holdfast.FileSystemWriter(path))
    return torch_filesystem.FileSystemReader(path).read_metadata()


def test_metadata_of_torch_works_in_plans_made_by_hand(path: str, torchs_metadata: torch_metadata.Metadata) -> None:
    metadata: Any = torchs_metadata
    state: dict[str, Any] = {"w": torch.zeros(6), "n": 0}
    plan = create_default_local_load_plan(state, metadata)
    assert [(item.storage_index.fqn, item.lengths) for item in plan.items] == [("w", (6,)), ("n", (0,))]
    planner = holdfast.DefaultLoadPlanner()
    planner.set_up_planner(state, metadata)
    reader = holdfast.FileSystemReader(path)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    assert planner.state_dict["n"] == 3
    assert state["w"].tolist() == [0, 1, 2, 3, 4, 5]
    for key, entry in metadata.state_dict_metadata.items():
        (item,) = planner_helpers._create_read_items(key, entry, state[key])
        assert item.storage_index.fqn == key
    metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([5])
    assert "w" in _validate_global_plan([], metadata)[0]


def test_a_reader_of_ours_may_return_metadata_of_torch(path: str, torchs_metadata: torch_metadata.Metadata) -> None:
    class Reader(holdfast.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return torchs_metadata

    state: dict[str, Any] = {"w": torch.zeros(6), "n": 0}
    holdfast.load(state, storage_reader=Reader(path))
    assert (state["n"], state["w"].tolist()) == (3, [0, 1, 2, 3, 4, 5])
    made: dict[str, Any] = {}
    holdfast.load(made, storage_reader=Reader(path), planner=_EmptyStateDictLoadPlanner())
    assert made["n"] == 3
    assert torch.equal(made["w"], state["w"])


def test_planners_are_told_the_version_of_the_metadata(path: str) -> None:
    for writer in (holdfast.NativeWriter(path), holdfast.FileSystemWriter(f"{path}-torch")):
        holdfast.save({"w": torch.ones(2)}, storage_writer=writer)
        planner = holdfast.DefaultLoadPlanner()
        holdfast.load({"w": torch.zeros(2)}, writer.path, planner=planner)
        assert planner.metadata is not None
        assert planner.metadata.version == CURRENT_DCP_VERSION == torch_filesystem.CURRENT_DCP_VERSION


def test_the_metadata_of_a_state_is_there_without_a_save() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        placed = [ShardMetadata([row, 0], [1, 3], f"rank:{row}/cpu") for row in range(2)]
        described = ShardedTensorMetadata(placed, torch.Size([2, 3]), ShardedTensorProperties())
        mine = [LocalShard(torch.ones(1, 3), placed[0])]
        sharded = ShardedTensor._init_from_local_shards_and_global_metadata(mine, described)
    finally:
        dist.destroy_process_group()
    state = {"b": torch.ones(2, 3, dtype=torch.bfloat16), "n": 3, "s": sharded, "a": torch.zeros(0)}
    ours, theirs = _create_default_local_metadata(state), torch_default._create_default_local_metadata(state)
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    for key, entry in ours.state_dict_metadata.items():
        expected: Any = theirs.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            assert type(expected) is torch_metadata.BytesStorageMetadata
            continue
        assert (entry.size, entry.properties.dtype) == (expected.size, expected.properties.dtype)
        assert [(each.offsets, each.sizes) for each in entry.chunks] == [
            (each.offsets, each.sizes) for each in expected.chunks
        ]
