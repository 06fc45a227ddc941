"""The values and options of planners: torch's names, positions and meanings, and what is mended."""

from __future__ import annotations

import dataclasses
import inspect
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner as torch_default
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint import planner as torch_planner

import holdfast
from holdfast import (
    BytesIOWriteData,
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    Metadata,
    MetadataIndex,
    ReadItem,
    SavePlan,
    TensorProperties,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

SIZE = torch.Size([4, 3])


def write_item(dtype: torch.dtype, size: torch.Size = SIZE) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([1, 3]))
    data = TensorWriteData(chunk, TensorProperties(dtype), size)
    return WriteItem(MetadataIndex("w", [0, 0]), WriteItemType.SHARD, tensor_data=data)


# Values.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.bool])
def test_the_storage_size_is_that_of_the_whole_tensor(dtype: torch.dtype) -> None:
    theirs = torch_planner.WriteItem(
        torch_metadata.MetadataIndex("w", [0, 0]),
        torch_planner.WriteItemType.SHARD,
        tensor_data=torch_planner.TensorWriteData(
            torch_metadata.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([1, 3])),
            torch_metadata.TensorProperties(dtype),
            SIZE,
        ),
    )
    assert write_item(dtype).tensor_storage_size() == 12 * dtype.itemsize == theirs.tensor_storage_size()


def test_a_value_has_no_storage_size() -> None:
    item = WriteItem(MetadataIndex("step"), WriteItemType.BYTE_IO, BytesIOWriteData(nbytes=7))
    assert item.tensor_storage_size() is None
    assert item.bytes_io_data == BytesIOWriteData(7)


def test_save_plans_are_frozen_and_load_plans_are_not() -> None:
    plan = SavePlan([write_item(torch.float32)], "storage", "planner")
    assert (plan.storage_data, plan.planner_data, plan.usable) == ("storage", "planner", True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.usable = False  # type: ignore[misc]
    loading = LoadPlan([])
    loading.storage_data = "storage"
    assert loading == LoadPlan([], "storage")


def test_items_are_frozen_values() -> None:
    item = write_item(torch.float32)
    assert item == write_item(torch.float32) != write_item(torch.float64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        item.type = WriteItemType.TENSOR  # type: ignore[misc]
    none = torch.Size([0])
    read = ReadItem(LoadItemType.BYTE_IO, MetadataIndex("a"), none, MetadataIndex("b"), none, none)
    assert hash(read) == hash(dataclasses.replace(read))


def test_the_hint_of_an_index_is_no_part_of_it() -> None:
    for index in (MetadataIndex, torch_metadata.MetadataIndex):
        assert index("w", [1, 2], 3) == index("w", torch.Size([1, 2]))
        assert hash(index("w", [1, 2], 3)) == hash(index("w", [1, 2], 4))
        assert index("w", [1, 2]) != index("w", [1, 3])
        assert index("w") != index("w", [])
        assert index("w", [1, 2], 3).index == 3
        assert index("w", [1, 2]).offset == torch.Size([1, 2])


@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last, torch.preserve_format, torch.channels_last_3d]
)
def test_properties_survive_pickling(memory_format: torch.memory_format) -> None:
    properties = TensorProperties(torch.bfloat16, torch.strided, True, memory_format, True)
    assert pickle.loads(pickle.dumps(properties)) == properties


def test_properties_are_those_of_the_tensor() -> None:
    tensor = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    ours, theirs = (cls.create_from_tensor(tensor) for cls in (TensorProperties, torch_metadata.TensorProperties))
    vars(theirs).pop("strides", None)  # of the memory, which torch keeps since 2.14; files have none
    assert vars(ours) == vars(theirs)
    assert ours.dtype is torch.float64
    assert ours.requires_grad


def test_the_default_dtype_is_torchs_at_the_time() -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert TensorProperties().dtype is torch.float64
    finally:
        torch.set_default_dtype(before)


def test_metadata_has_what_torchs_has() -> None:
    metadata = Metadata({}, "planner", "storage", holdfast.StorageMeta("id", "save", "load", ["module"]), "1.0.0")
    assert (metadata.planner_data, metadata.storage_data, metadata.version) == ("planner", "storage", "1.0.0")
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.modules == ["module"]
    assert Metadata({}).version is None
    assert dict[str, Any] == holdfast.metadata.STATE_DICT_TYPE


# What a planner need not have.


class BareLoadPlanner(LoadPlanner):
    """The least that loads a tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        self.target = target

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        return holdfast.default_planner.create_default_local_load_plan({"w": self.target}, self.metadata)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.target


def test_a_load_planner_need_not_care_for_filled_tensors_or_give_buffers(path: str) -> None:
    holdfast.save({"w": torch.ones(3)}, path)
    planner = BareLoadPlanner(torch.zeros(3))
    holdfast.load({}, path, planner=planner)
    assert planner.target.tolist() == [1.0, 1.0, 1.0]
    none = torch.Size([0])
    item = ReadItem(LoadItemType.BYTE_IO, MetadataIndex("a"), none, MetadataIndex("a"), none, none)
    for each in (planner, DefaultLoadPlanner()):
        with pytest.raises(NotImplementedError):
            each.resolve_bytes(item)


# Options.


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (DefaultSavePlanner, torch_default.DefaultSavePlanner),
        (DefaultLoadPlanner, torch_default.DefaultLoadPlanner),
    ],
)
def test_options_have_torchs_positions_and_defaults(ours: Any, torchs: Any) -> None:
    theirs = list(inspect.signature(torchs).parameters.values())
    mine = list(inspect.signature(ours).parameters.values())
    assert [(each.name, each.default, each.kind) for each in mine[: len(theirs)]] == [
        (each.name, each.default, each.kind) for each in theirs
    ]
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in mine[len(theirs) :])


def test_the_deprecated_option_warns_and_changes_nothing(path: str) -> None:
    with pytest.warns(FutureWarning, match="dedup_replicated_tensors has no effect"):
        planner = DefaultSavePlanner(True, True, False)
    holdfast.save({"w": torch.ones(2)}, path, planner=planner)
    assert holdfast.load(path)["w"].tolist() == [1.0, 1.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DefaultSavePlanner(dedup_save_to_lowest_rank=True)


@pytest.mark.parametrize("flatten_sharded_tensors", [False, True])
def test_plain_states_do_not_care_for_nested_shards(flatten_sharded_tensors: bool, path: str) -> None:
    state = {"a": {"b": torch.ones(2)}, "step": 1}
    holdfast.save(state, path, planner=DefaultSavePlanner(True, flatten_sharded_tensors))
    target = {"a": {"b": torch.zeros(2)}, "step": 0}
    holdfast.load(target, path, planner=DefaultLoadPlanner(True, flatten_sharded_tensors))
    assert target["a"]["b"].tolist() == [1.0, 1.0]  # type: ignore[index]
    assert target["step"] == 1


def partial_target() -> dict[str, Any]:
    return {
        "w": torch.zeros(2),
        "own": {1, 2},
        "dtype": torch.float16,
        "new": {"lr": 0.5, "tensor": torch.full((1,), 7.0)},
    }


def test_a_partial_load_keeps_what_the_checkpoint_lacks_where_torch_makes_it_none(path: str, tmp_path: Any) -> None:
    theirs = partial_target()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "torch", no_dist=True)
        planner = torch_default.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(theirs, checkpoint_id=tmp_path / "torch", planner=planner, no_dist=True)
    assert theirs["own"] is None
    assert theirs["dtype"] is None

    holdfast.save({"w": torch.ones(2)}, path)
    ours = partial_target()
    report = holdfast.load(ours, path, planner=DefaultLoadPlanner(True, True, True))
    assert ours["w"].tolist() == [1.0, 1.0]
    assert ours["own"] == {1, 2}
    assert ours["dtype"] is torch.float16
    assert ours["new"]["lr"] == 0.5
    assert ours["new"]["tensor"].tolist() == [7.0]
    assert set(report.missing) == {"own", "dtype", "new.lr", "new.tensor"}


def test_a_partial_load_excuses_nothing_but_missing_keys(path: str) -> None:
    holdfast.save({"w": torch.ones(2)}, path)
    with pytest.raises(holdfast.MismatchError, match="'w'"):
        holdfast.load({"w": torch.zeros(3), "x": 1}, path, planner=DefaultLoadPlanner(allow_partial_load=True))


# Containers that the checkpoint has as one value.


class OneValueSavePlanner(DefaultSavePlanner):
    """Saves as torch before 2.4 did: a list or dict without tensors in it is one value."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.flatten_state_dict = False
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def test_a_container_is_loaded_from_the_one_value_that_the_checkpoint_has(path: str) -> None:
    groups = [{"lr": 0.1, "betas": (0.9, 0.99)}]
    stored = {"model.w": torch.ones(2), "optimizer.groups": groups, "step": 3}
    holdfast.save(stored, path, planner=OneValueSavePlanner())
    target: dict[str, Any] = {
        "model": {"w": torch.zeros(2)},
        "optimizer": {"groups": [{"lr": 0.0, "betas": (0.0, 0.0)}]},
        "step": 0,
    }
    report = holdfast.load(target, path)
    assert target["model"]["w"].tolist() == [1.0, 1.0]
    assert target["optimizer"]["groups"] == groups
    assert report.loaded == ("model.w", "step", "optimizer.groups")
    assert report.missing == ()


def test_a_container_whose_leaves_the_checkpoint_has_too_is_not_replaced(path: str) -> None:
    stored = {"a": 5, "a.b": torch.ones(2)}
    holdfast.save(stored, path, planner=DefaultSavePlanner(flatten_state_dict=False))
    target: dict[str, Any] = {"a": {"b": torch.zeros(2), "c": 1}}
    report = holdfast.load(target, path, strict=False)
    assert target["a"]["b"].tolist() == [1.0, 1.0]
    assert target["a"]["c"] == 1
    assert report.missing == ("a.c",)
