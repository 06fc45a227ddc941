"""Planners of users: what they change in plans and data is what is stored and loaded."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import (
    ChunkStorageMetadata,
    LoadPlan,
    Metadata,
    MetadataIndex,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)


def nothing_published(path: str) -> bool:
    return not Path(path).exists() or not list(Path(path).iterdir())


class PrefixSavePlanner(holdfast.DefaultSavePlanner):
    """Saves everything under another name."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner({f"prefix_{key}": entry for key, entry in state_dict.items()})


class PrefixLoadPlanner(holdfast.DefaultLoadPlanner):
    """Loads everything from another name, by changing the items of the plan."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        self.metadata = dataclasses.replace(
            self.metadata, state_dict_metadata={key.removeprefix("prefix_"): entry for key, entry in stored.items()}
        )
        plan = super().create_local_plan()
        for number, item in enumerate(plan.items):
            index = dataclasses.replace(item.storage_index, fqn=f"prefix_{item.storage_index.fqn}")
            plan.items[number] = dataclasses.replace(item, storage_index=index)
        return plan


def test_keys_can_be_renamed_on_the_way_out(path: str) -> None:
    holdfast.save({"w": torch.ones(2), "step": 3}, path, planner=PrefixSavePlanner())
    loaded = holdfast.load(path)
    assert list(loaded) == ["prefix_w", "prefix_step"]


def test_keys_can_be_renamed_on_the_way_in(path: str) -> None:
    holdfast.save({"prefix_w": torch.arange(6.0).view(2, 3), "prefix_step": 3}, path)
    target = {"w": torch.zeros(2, 3), "step": 0}
    report = holdfast.load(target, path, planner=PrefixLoadPlanner())
    assert torch.equal(target["w"], torch.arange(6.0).view(2, 3))
    assert target["step"] == 3
    assert report.unexpected == ()
    assert report.loaded == ("w", "step")


class HalfSavePlanner(holdfast.DefaultSavePlanner):
    """Saves tensors as float16 without a word about it in the plan."""

    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        data = super().transform_object(write_item, object)
        return data.to(torch.float16) if isinstance(data, torch.Tensor) else data


def test_a_dtype_changed_while_saving_is_the_one_that_is_stored(path: str) -> None:
    weight = torch.linspace(-1, 1, 100_000)
    state = {"a": torch.ones(3, dtype=torch.float64), "w": weight, "tied": weight, "step": 3}
    holdfast.save(state, path, planner=HalfSavePlanner())
    loaded = holdfast.load(path)
    assert loaded["w"].dtype == loaded["a"].dtype == torch.float16
    assert torch.equal(loaded["w"], weight.half())
    assert loaded["tied"] is loaded["w"]
    assert loaded["step"] == 3
    assert sum(file.stat().st_size for file in Path(path).glob("data-*")) < weight.nbytes
    with holdfast.open(path) as checkpoint:
        assert checkpoint["w"].dtype == torch.float16
        assert torch.equal(checkpoint["w"][5:9], weight[5:9].half())
    target = {"w": torch.zeros(100_000)}
    holdfast.load(target, path, options=holdfast.LoadOptions(cast=True))
    assert torch.equal(target["w"], weight.half().float())


class ReshapingSavePlanner(holdfast.DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        data = super().transform_object(write_item, object)
        return torch.cat([data, data]) if isinstance(data, torch.Tensor) else data


def test_a_shape_changed_while_saving_is_the_one_that_is_stored(path: str) -> None:
    holdfast.save({"w": torch.arange(3.0), "x": torch.ones(0, 2)}, path, planner=ReshapingSavePlanner())
    assert holdfast.load(path)["w"].tolist() == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]


class OpaqueSavePlanner(holdfast.DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(b"my own " + write_item.index.fqn.encode())
        return super().resolve_data(write_item)


class OpaqueLoadPlanner(holdfast.DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = value.read()
        self.original_state_dict[read_item.dest_index.fqn] = type(value), self.state_dict[read_item.dest_index.fqn]


def test_plain_bytes_of_a_planner_come_back_as_they_were(path: str) -> None:
    holdfast.save({"w": torch.ones(2), "step": 3}, path, planner=OpaqueSavePlanner())
    target: dict[str, Any] = {"step": None}
    holdfast.load(target, path, planner=OpaqueLoadPlanner())
    assert target["step"] == (io.BytesIO, b"my own step")


def test_bytes_of_torch_save_are_understood_by_the_default_planner(path: str) -> None:
    class TorchSavePlanner(holdfast.DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            if write_item.type is not WriteItemType.BYTE_IO:
                return super().resolve_data(write_item)
            buffer = io.BytesIO()
            torch.save(self.lookup_object(write_item.index), buffer)
            return buffer

    holdfast.save({"w": torch.ones(2), "steps": [3, (4,)]}, path, planner=TorchSavePlanner())
    assert holdfast.load(path)["steps"] == [3, (4,)]
    target = {"steps": None}
    holdfast.load(target, path)
    assert target["steps"] == [3, (4,)]


def test_bytes_that_nobody_understands_are_an_error(path: str) -> None:
    holdfast.save({"step": 3, "w": torch.ones(1)}, path, planner=OpaqueSavePlanner())
    with pytest.raises(holdfast.CheckpointError, match="'step'"):
        holdfast.load({"step": 0}, path)


class EditingSavePlanner(holdfast.DefaultSavePlanner):
    """Changes the local plan by ``edit`` before anyone else sees it."""

    def __init__(self, edit: Callable[[SavePlan], None], *, when: str = "create_local_plan") -> None:
        super().__init__()
        self.edit = edit
        self.when = when

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if self.when == "create_local_plan":
            self.edit(plan)
        return plan

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if self.when == "finish_plan":
            self.edit(new_plan)
        return super().finish_plan(new_plan)


def test_items_removed_before_the_global_plan_are_just_not_saved(path: str) -> None:
    def edit(plan: SavePlan) -> None:
        plan.items[:] = [item for item in plan.items if item.index.fqn != "secret"]

    state = {"w": torch.ones(2), "secret": torch.ones(3), "step": 1}
    holdfast.save(state, path, planner=EditingSavePlanner(edit))
    assert list(holdfast.load(path)) == ["w", "step"]


def test_items_added_to_a_plan_are_saved(path: str) -> None:
    class AddingPlanner(EditingSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> Any:
            return torch.full((4,), 9.0) if index.fqn == "added" else super().lookup_object(index)

    def edit(plan: SavePlan) -> None:
        chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
        data = TensorWriteData(chunk, holdfast.TensorProperties(torch.float32), torch.Size([4]))
        plan.items.append(WriteItem(MetadataIndex("added", [0]), WriteItemType.TENSOR, tensor_data=data))

    holdfast.save({"w": torch.ones(2)}, path, planner=AddingPlanner(edit))
    assert holdfast.load(path)["added"].tolist() == [9.0] * 4


def test_a_tensor_can_be_saved_in_pieces(path: str) -> None:
    class SplittingPlanner(EditingSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
            data = super().transform_object(write_item, object)
            if write_item.tensor_data is None or not isinstance(data, torch.Tensor):
                return data
            chunk = write_item.tensor_data.chunk
            return data.narrow(0, chunk.offsets[0], chunk.sizes[0])

    def edit(plan: SavePlan) -> None:
        (item,) = plan.items
        assert item.tensor_data is not None
        pieces = []
        for start, length in ((0, 300), (300, 1), (301, 699)):
            chunk = ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([length, 7]))
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            pieces.append(WriteItem(MetadataIndex("w", [start, 0]), WriteItemType.SHARD, tensor_data=data))
        plan.items[:] = pieces

    weight = torch.arange(7000.0).view(1000, 7)
    metadata = holdfast.save({"w": weight}, path, planner=SplittingPlanner(edit))
    assert len(metadata.state_dict_metadata["w"].chunks) == 3
    assert torch.equal(holdfast.load(path)["w"], weight)
    target = torch.zeros(7, 1000).t()
    holdfast.load({"w": target}, path)
    assert torch.equal(target, weight)
    with holdfast.open(path) as checkpoint:
        assert checkpoint["w"].chunks == 3
        assert torch.equal(checkpoint["w"][295:305, 2:4], weight[295:305, 2:4])
        assert torch.equal(checkpoint["w"][300], weight[300])


BROKEN_PLANS: dict[str, tuple[str, Callable[[SavePlan], Any]]] = {
    "removed": ("finish_plan", lambda plan: plan.items.pop()),
    "removed all": ("finish_plan", lambda plan: plan.items.clear()),
    "duplicated early": ("create_local_plan", lambda plan: plan.items.append(plan.items[0])),
    "duplicated late": ("finish_plan", lambda plan: plan.items.append(plan.items[0])),
    "duplicated value": ("create_local_plan", lambda plan: plan.items.append(plan.items[2])),
}


@pytest.mark.parametrize("name", sorted(BROKEN_PLANS))
def test_plans_that_are_not_whole_are_never_published(name: str, path: str) -> None:
    when, edit = BROKEN_PLANS[name]
    state = {"w": torch.ones(2), "x": torch.ones(3), "step": 1}
    with pytest.raises(holdfast.CheckpointError) as caught:
        holdfast.save(state, path, planner=EditingSavePlanner(edit, when=when))
    assert any(f"'{key}'" in caught.value.message for key in state)
    assert nothing_published(path)


def test_pieces_that_leave_a_gap_are_refused_before_writing(path: str) -> None:
    def edit(plan: SavePlan) -> None:
        item = plan.items[0]
        assert item.tensor_data is not None
        item.tensor_data.chunk.sizes = torch.Size([1])

    with pytest.raises(holdfast.InvalidStateError, match="'w' do not make up the whole tensor") as caught:
        holdfast.save({"w": torch.ones(2)}, path, planner=EditingSavePlanner(edit))
    assert caught.value.key == "w"
    assert nothing_published(path)


@pytest.mark.parametrize("wrong", [io.BytesIO(b"x"), None, [1]], ids=["bytes", "none", "list"])
def test_a_planner_that_gives_no_tensor_for_a_tensor(wrong: Any, path: str) -> None:
    class WrongPlanner(holdfast.DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            return wrong

    with pytest.raises(holdfast.InvalidStateError, match="'w'"):
        holdfast.save({"w": torch.ones(2)}, path, planner=WrongPlanner())
    assert nothing_published(path)


def test_a_planner_that_gives_a_tensor_for_a_value(path: str) -> None:
    class WrongPlanner(holdfast.DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            return torch.ones(1)

    with pytest.raises(holdfast.InvalidStateError, match="'step'"):
        holdfast.save({"step": 1}, path, planner=WrongPlanner())
    assert nothing_published(path)


def test_a_planner_that_gives_a_tensor_without_data(path: str) -> None:
    class MetaPlanner(holdfast.DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
            return torch.zeros(2, device="meta")

    with pytest.raises(holdfast.InvalidStateError, match="'w' is a meta tensor"):
        holdfast.save({"w": torch.ones(2)}, path, planner=MetaPlanner())
    assert nothing_published(path)


@pytest.mark.parametrize("hook", ["resolve_data", "lookup_object", "transform_object"])
def test_a_foreign_exception_arrives_with_its_cause_and_leaves_nothing(
    hook: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = ZeroDivisionError("from the planner")

    class FailingPlanner(holdfast.DefaultSavePlanner):
        pass

    def fail(*args: Any) -> None:
        raise cause

    monkeypatch.setattr(FailingPlanner, hook, fail, raising=False)
    with pytest.raises(holdfast.CheckpointError, match="writing the checkpoint failed: ZeroDivisionError") as caught:
        holdfast.save({"w": torch.ones(2), "x": torch.ones(3)}, path, planner=FailingPlanner())
    assert caught.value.__cause__ is cause
    assert nothing_published(path)


def test_load_planners_can_load_into_something_else(path: str) -> None:
    holdfast.save({"w": torch.arange(12.0).view(3, 4), "b": torch.ones(2)}, path)
    elsewhere: dict[str, torch.Tensor] = {}
    committed: list[str] = []

    class ElsewherePlanner(holdfast.DefaultLoadPlanner):
        def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
            return elsewhere.setdefault(index.fqn, torch.zeros_like(self.state_dict[index.fqn]))

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            committed.append(read_item.dest_index.fqn)

    target = {"w": torch.zeros(3, 4), "b": torch.zeros(2)}
    holdfast.load(target, path, planner=ElsewherePlanner())
    assert torch.equal(elsewhere["w"], torch.arange(12.0).view(3, 4))
    assert sorted(committed) == ["b", "w"]
    assert not target["w"].any()


def test_a_load_planner_can_read_part_of_a_tensor(path: str) -> None:
    class RowsPlanner(holdfast.DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            plan = super().create_local_plan()
            (item,) = plan.items
            part = dataclasses.replace(
                item,
                dest_offsets=torch.Size([1, 0]),
                storage_offsets=torch.Size([5, 0]),
                lengths=torch.Size([2, 3]),
            )
            return LoadPlan([part])

    stored = torch.arange(30.0).view(10, 3)
    holdfast.save({"w": stored}, path)
    target = torch.zeros(10, 3)
    holdfast.load({"w": target}, path, planner=RowsPlanner())
    assert torch.equal(target[1:3], stored[5:7])
    assert not target[0].any()
    assert not target[3:].any()


def test_a_load_planner_that_gives_another_shape_is_an_error(path: str) -> None:
    class WrongPlanner(holdfast.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return torch.zeros(7)

    holdfast.save({"w": torch.ones(2)}, path)
    with pytest.raises(holdfast.CheckpointError, match="'w'"):
        holdfast.load({"w": torch.zeros(2)}, path, planner=WrongPlanner())


def test_a_planner_without_flattening_takes_a_flat_state(path: str) -> None:
    state = {"model.w": torch.ones(2), "values": {"nested": [1, 2]}}
    holdfast.save(state, path, planner=holdfast.DefaultSavePlanner(flatten_state_dict=False))
    target: dict[str, Any] = {"model.w": torch.zeros(2), "values": None}
    holdfast.load(target, path, planner=holdfast.DefaultLoadPlanner(flatten_state_dict=False))
    assert target["model.w"].tolist() == [1.0, 1.0]
    assert target["values"] == {"nested": [1, 2]}


def test_a_planner_can_be_used_again(path: str) -> None:
    save_planner, load_planner = holdfast.DefaultSavePlanner(), holdfast.DefaultLoadPlanner()
    for fill, key in ((1.0, "a"), (2.0, "b")):
        holdfast.save({key: torch.full((2,), fill)}, path, planner=save_planner)
        target = {key: torch.zeros(2)}
        holdfast.load(target, path, planner=load_planner)
        assert target[key].tolist() == [fill, fill]


def test_the_metadata_that_save_returns_is_that_of_the_checkpoint(path: str) -> None:
    saved: Metadata = holdfast.save({"w": torch.ones(2, 3), "n": {"step": 1}}, path)
    with holdfast.open(path) as checkpoint:
        stored = checkpoint.metadata
    assert list(saved.state_dict_metadata) == list(stored.state_dict_metadata) == ["w", "n.step"]
    for metadata in (saved, stored):
        weight = metadata.state_dict_metadata["w"]
        assert isinstance(weight, holdfast.TensorStorageMetadata)
        assert weight.size == (2, 3)
        assert weight.properties.dtype == torch.float32
        assert list(weight.chunks) == [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))]
        assert isinstance(metadata.state_dict_metadata["n.step"], holdfast.BytesStorageMetadata)
        assert metadata.planner_data == {"w": ("w",), "n.step": ("n", "step")}
