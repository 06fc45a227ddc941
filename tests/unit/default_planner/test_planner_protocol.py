"""The protocol between saver, loader, planners and storage: torch's calls in torch's order."""

from __future__ import annotations

import io
import os
from collections.abc import MutableSequence
from typing import Any

import pytest
import torch
from torch.futures import Future

import holdfast
from holdfast import LoadPlan, Metadata, ReadItem, SavePlan, WriteItem, WriteResult


class RecordingSavePlanner(holdfast.DefaultSavePlanner):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.log.append(f"planner.set_up_planner({sorted(state_dict)}, coordinator={is_coordinator})")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        self.log.append("planner.create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.log.append(f"planner.create_global_plan({len(all_plans)})")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.log.append(f"planner.finish_plan(storage_data={new_plan.storage_data})")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self.log.append(f"planner.resolve_data({write_item.index.fqn})")
        return super().resolve_data(write_item)


class RecordingWriter(holdfast.StorageWriter):
    """Keeps what it is given in memory, by key."""

    def __init__(self, log: list[str], *, fails: bool = False) -> None:
        self.log = log
        self.fails = fails
        self.data: dict[str, Any] = {}
        self.metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.log.append(f"writer.reset({checkpoint_id})")

    def storage_meta(self) -> holdfast.StorageMeta | None:
        self.log.append("writer.storage_meta")
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.log.append(f"writer.set_up_storage_writer({is_coordinator}, {sorted(kwargs)})")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.log.append(f"writer.prepare_local_plan({len(plan.items)})")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.log.append(f"writer.prepare_global_plan({len(plans)})")
        return [SavePlan(plan.items, "from storage", plan.planner_data) for plan in plans]

    def write_data(self, plan: SavePlan, planner: holdfast.SavePlanner) -> Future[MutableSequence[WriteResult]]:
        self.log.append("writer.write_data")
        if self.fails:
            raise OSError("the medium is full\nof detail")
        for item in plan.items:
            data = planner.resolve_data(item)
            self.data[item.index.fqn] = data.getvalue() if isinstance(data, io.BytesIO) else data.clone()
        done: Future[MutableSequence[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, 1, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[MutableSequence[WriteResult]]) -> None:
        self.log.append(f"writer.finish({[len(result) for result in results]})")
        self.metadata = metadata

    def abandon(self) -> None:
        self.log.append("writer.abandon")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class RecordingLoadPlanner(holdfast.DefaultLoadPlanner):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        self.log.append(f"planner.set_up_planner({sorted(state_dict)}, coordinator={is_coordinator})")
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        self.log.append("planner.create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self.log.append(f"planner.create_global_plan({len(global_plan)})")
        return super().create_global_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        self.log.append(f"planner.finish_plan(storage_data={central_plan.storage_data})")
        return super().finish_plan(central_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.log.append(f"planner.load_bytes({read_item.dest_index.fqn})")
        super().load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.log.append(f"planner.resolve_tensor({read_item.dest_index.fqn})")
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.log.append(f"planner.commit_tensor({read_item.dest_index.fqn})")
        super().commit_tensor(read_item, tensor)


class RecordingReader(holdfast.StorageReader):
    """Gives back what a RecordingWriter kept."""

    def __init__(self, log: list[str], writer: RecordingWriter) -> None:
        self.log = log
        self.writer = writer

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.log.append(f"reader.reset({checkpoint_id})")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.log.append("reader.read_metadata")
        assert self.writer.metadata is not None
        return self.writer.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.log.append(f"reader.set_up_storage_reader({is_coordinator})")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        self.log.append(f"reader.prepare_local_plan({len(plan.items)})")
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        self.log.append(f"reader.prepare_global_plan({len(plans)})")
        return [LoadPlan(plan.items, "from storage") for plan in plans]

    def read_data(self, plan: LoadPlan, planner: holdfast.LoadPlanner) -> Future[None]:
        self.log.append("reader.read_data")
        for item in plan.items:
            stored = self.writer.data[item.storage_index.fqn]
            if item.type is holdfast.LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(stored))
            else:
                tensor = planner.resolve_tensor(item)
                tensor.copy_(stored)
                planner.commit_tensor(item, tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def test_a_save_makes_exactly_these_calls() -> None:
    log: list[str] = []
    holdfast.save(
        {"w": torch.ones(2), "step": 3},
        "somewhere",
        storage_writer=RecordingWriter(log),
        planner=RecordingSavePlanner(log),
    )
    assert log == [
        "writer.reset(somewhere)",
        "writer.storage_meta",
        "planner.set_up_planner(['step', 'w'], coordinator=True)",
        "writer.set_up_storage_writer(True, ['rank', 'use_collectives'])",
        "planner.create_local_plan",
        "writer.prepare_local_plan(2)",
        "planner.create_global_plan(1)",
        "writer.prepare_global_plan(1)",
        "planner.finish_plan(storage_data=from storage)",
        "writer.write_data",
        "planner.resolve_data(w)",
        "planner.resolve_data(step)",
        "writer.finish([2])",
    ]


def test_a_load_makes_exactly_these_calls() -> None:
    writer = RecordingWriter([])
    holdfast.save({"w": torch.ones(2), "step": 3}, storage_writer=writer)
    log: list[str] = []
    target = {"w": torch.zeros(2), "step": 0}
    reader, planner = RecordingReader(log, writer), RecordingLoadPlanner(log)
    report = holdfast.load(target, "somewhere", storage_reader=reader, planner=planner)
    assert target["w"].tolist() == [1.0, 1.0]
    assert target["step"] == 3
    assert report.loaded == ("w", "step")
    assert log == [
        "reader.reset(somewhere)",
        "reader.read_metadata",
        "planner.set_up_planner(['step', 'w'], coordinator=True)",
        "reader.set_up_storage_reader(True)",
        "planner.create_local_plan",
        "reader.prepare_local_plan(2)",
        "planner.create_global_plan(1)",
        "reader.prepare_global_plan(1)",
        "planner.finish_plan(storage_data=from storage)",
        "reader.read_data",
        "planner.resolve_tensor(w)",
        "planner.commit_tensor(w)",
        "planner.load_bytes(step)",
    ]


def test_without_an_id_nothing_is_reset() -> None:
    log: list[str] = []
    writer = RecordingWriter(log)
    holdfast.save({"w": torch.ones(2)}, storage_writer=writer)
    assert "writer.reset(None)" not in log
    holdfast.load({"w": torch.zeros(2)}, storage_reader=RecordingReader(log, writer))
    assert not [line for line in log if ".reset" in line]


def test_a_storage_gets_the_bytes_that_torch_would_save() -> None:
    writer = RecordingWriter([])
    holdfast.save({"value": {"nested": [1, (2, 3)]}, "name": "x"}, storage_writer=writer)
    assert torch.load(io.BytesIO(writer.data["value.nested"]), weights_only=True) == [1, (2, 3)]
    assert torch.load(io.BytesIO(writer.data["name"]), weights_only=True) == "x"


def test_a_failed_save_is_abandoned_and_arrives_as_one_line() -> None:
    log: list[str] = []
    with pytest.raises(holdfast.CheckpointError) as caught:
        holdfast.save({"w": torch.ones(2)}, storage_writer=RecordingWriter(log, fails=True))
    assert log[-1] == "writer.abandon"
    assert not [line for line in log if line.startswith("writer.finish")]
    assert caught.value.message == "writing the checkpoint failed: OSError: the medium is full"
    assert isinstance(caught.value.__cause__, OSError)
    error, stack = caught.value.failures[0]
    assert error is caught.value.__cause__
    assert stack[-1].name == "write_data"


@pytest.mark.parametrize("hook", ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"])
def test_a_save_planner_that_raises_arrives_with_its_cause(
    hook: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = KeyError("from the planner")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise cause

    monkeypatch.setattr(RecordingSavePlanner, hook, fail)
    log: list[str] = []
    with pytest.raises(holdfast.CheckpointError, match="KeyError") as caught:
        holdfast.save({"w": torch.ones(2)}, storage_writer=RecordingWriter(log), planner=RecordingSavePlanner([]))
    assert caught.value.__cause__ is cause
    assert log[-1] == "writer.abandon"


@pytest.mark.parametrize(
    "hook",
    ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_tensor", "commit_tensor"],
)
def test_a_load_planner_that_raises_arrives_with_its_cause(
    hook: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast.save({"w": torch.ones(2)}, path)
    cause = KeyError("from the planner")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise cause

    monkeypatch.setattr(RecordingLoadPlanner, hook, fail)
    with pytest.raises(holdfast.CheckpointError, match="KeyError") as caught:
        holdfast.load({"w": torch.zeros(2)}, path, planner=RecordingLoadPlanner([]))
    assert caught.value.__cause__ is cause


def test_interrupts_pass_through(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RecordingSavePlanner, "resolve_data", interrupt)
    log: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        holdfast.save({"w": torch.ones(2)}, storage_writer=RecordingWriter(log), planner=RecordingSavePlanner([]))
    assert log[-1] == "writer.abandon"


def test_native_storage_calls_the_hooks_of_a_planner_for_every_item(path: str) -> None:
    log: list[str] = []
    state = {"w": torch.ones(3), "many": [torch.ones(2), torch.zeros(0)], "step": 3, "large": b"x" * 100_000}
    holdfast.save(state, path, planner=RecordingSavePlanner(log))
    resolved = sorted(line for line in log if "resolve_data" in line)
    keys = ["large", "many.0", "many.1", "step", "w"]
    assert resolved == [f"planner.resolve_data({key})" for key in keys]
    log.clear()
    target = {"w": torch.zeros(3), "many": [torch.zeros(2), torch.ones(0)], "step": 0, "large": b""}
    holdfast.load(target, path, planner=RecordingLoadPlanner(log))
    tensors = ["many.0", "many.1", "w"]
    assert sorted(line for line in log if "_tensor" in line) == [
        *(f"planner.commit_tensor({key})" for key in tensors if key != "many.1"),
        *(f"planner.resolve_tensor({key})" for key in tensors if key != "many.1"),
    ]
    assert sorted(line for line in log if "load_bytes" in line) == [
        "planner.load_bytes(large)",
        "planner.load_bytes(step)",
    ]
    assert target["large"] == b"x" * 100_000
