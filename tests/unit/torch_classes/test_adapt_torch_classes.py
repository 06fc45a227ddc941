"""Planners and storages derived from torch's classes, given to holdfast.save and holdfast.load: one process."""

from __future__ import annotations

import dataclasses
import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from outside_views import torch_fsspec
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint import planner as torch_planner
from torch.distributed.checkpoint import storage as torch_storage

import holdfast

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def state() -> dict[str, Any]:
    return {
        "weight": torch.arange(12.0).view(3, 4),
        "strided": torch.arange(6).view(2, 3).T,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "nested": {"list": [torch.zeros(2), {"x": 1.5}], "name": "adam"},
        "step": 7,
    }


def target() -> dict[str, Any]:
    return {
        "weight": torch.zeros(3, 4),
        "strided": torch.zeros(3, 2, dtype=torch.int64),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "nested": {"list": [torch.ones(2), {"x": 0.0}], "name": ""},
        "step": 0,
    }


# Planners of torch.


@dataclasses.dataclass(frozen=True)
class MarkedItem(torch_planner.WriteItem):
    mark: str = ""


@dataclasses.dataclass(frozen=True)
class MarkedPlan(torch_planner.SavePlan):
    mark: str = ""


class SeeingSavePlanner(dcp.DefaultSavePlanner):
    """Checks that it is given torch's objects only, its own ones where it made them, and notes the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        assert storage_meta is None or isinstance(storage_meta, torch_metadata.StorageMeta)
        assert is_coordinator
        self.calls.append("set_up_planner")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> Any:
        self.calls.append("create_local_plan")
        plan = super().create_local_plan()
        items = [MarkedItem(**vars(item), mark=item.index.fqn) for item in plan.items]
        return MarkedPlan(items, planner_data=plan.planner_data, mark="local")

    def create_global_plan(self, all_plans: Any) -> Any:
        self.calls.append("create_global_plan")
        assert [plan.mark for plan in all_plans] == ["local"]
        assert all(item.mark == item.index.fqn for plan in all_plans for item in plan.items)
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        self.calls.append("finish_plan")
        assert isinstance(new_plan, MarkedPlan)
        self.final = super().finish_plan(new_plan)
        return self.final

    def resolve_data(self, write_item: Any) -> Any:
        assert any(write_item is item for item in self.final.items)
        self.calls.append(write_item.mark)
        return super().resolve_data(write_item)


@pytest.mark.parametrize("storage", ["native", "torch", "hf", "memory"])
def test_a_planner_of_torch_sees_its_own_objects(tmp_path: Path, storage: str) -> None:
    planner = SeeingSavePlanner()
    path = str(tmp_path / "out")
    saved = state() if storage != "hf" else {"weight": torch.ones(3)}
    writers: dict[str, Any] = {
        "native": lambda: holdfast.NativeWriter(path),
        "torch": lambda: dcp.FileSystemWriter(path),
        "hf": lambda: dcp.HuggingFaceStorageWriter(path),
        "memory": lambda: torch_fsspec.FsspecWriter(f"memory://{tmp_path.name}/x"),
    }
    metadata = holdfast.save(saved, storage_writer=writers[storage](), planner=planner)
    assert planner.calls[:4] == ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"]
    keys = set(planner.calls[4:])
    assert keys == set(metadata.state_dict_metadata)
    assert isinstance(metadata, holdfast.Metadata)
    assert isinstance(metadata.state_dict_metadata["weight"], holdfast.TensorStorageMetadata)


class SeeingLoadPlanner(dcp.DefaultLoadPlanner):
    """Checks that it is given torch's objects only, and its own ones where it made them."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        assert isinstance(metadata, torch_metadata.Metadata)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def finish_plan(self, new_plan: Any) -> Any:
        assert type(new_plan) is torch_planner.LoadPlan
        self.final = super().finish_plan(new_plan)
        self.seen: list[str] = []
        return self.final

    def see(self, read_item: Any) -> None:
        assert any(read_item is item for item in self.final.items)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.see(read_item)
        super().load_bytes(read_item, value)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.see(read_item)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.see(read_item)
        self.seen.append(read_item.dest_index.fqn)


@pytest.mark.parametrize("storage", ["native", "torch"])
def test_a_load_planner_of_torch_sees_its_own_objects(path: str, storage: str, same: Callable[..., None]) -> None:
    planner = SeeingLoadPlanner()
    loaded = target()
    tensors = loaded["weight"], loaded["parameter"]
    if storage == "native":
        holdfast.save(state(), path)
        report = holdfast.load(loaded, path, planner=planner)
    else:
        dcp.save(state(), checkpoint_id=path)
        report = holdfast.load(loaded, storage_reader=dcp.FileSystemReader(path), planner=planner)
    same(loaded, state())
    assert loaded["weight"] is tensors[0]
    assert loaded["parameter"] is tensors[1]
    assert sorted(planner.seen) == ["nested.list.0", "parameter", "strided", "weight"]
    assert set(report.loaded) == {
        "nested.list.0",
        "nested.list.1.x",
        "nested.name",
        "parameter",
        "step",
        "strided",
        "weight",
    }


def test_torchs_strictness_comes_as_an_error_of_ours(path: str) -> None:
    holdfast.save({"a": torch.ones(2)}, path)
    with pytest.raises(holdfast.CheckpointError, match="Missing key in checkpoint state_dict: b") as caught:
        holdfast.load({"b": torch.ones(2)}, path, planner=dcp.DefaultLoadPlanner())
    assert isinstance(caught.value.__cause__, RuntimeError)
    partial = {"a": torch.zeros(2), "b": torch.zeros(2)}
    holdfast.load(partial, path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert partial["a"].sum() == 2


class Custom:
    """Only pickle can keep one."""


def test_pickles_reach_torchs_planners_only_if_allowed(path: str) -> None:
    holdfast.save({"object": Custom()}, path, options=holdfast.SaveOptions(allow_pickle=True))
    with pytest.raises(holdfast.UnsafeError):
        holdfast.load({"object": None}, path, planner=dcp.DefaultLoadPlanner())
    loaded = {"object": None}
    holdfast.load(loaded, path, planner=dcp.DefaultLoadPlanner(), options=holdfast.LoadOptions(allow_pickle=True))
    assert isinstance(loaded["object"], Custom)


# Storages of torch.


class MemoryWriter(torch_storage.StorageWriter):
    """Keeps everything in a dict, and checks that it is given torch's objects only."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self.kept = kept

    def reset(self, checkpoint_id: Any = None) -> None:
        self.kept["id"] = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        assert kwargs == {"rank": 0, "use_collectives": True}

    def prepare_local_plan(self, plan: Any) -> Any:
        assert type(plan) is torch_planner.SavePlan
        return dataclasses.replace(plan, storage_data="local")

    def prepare_global_plan(self, plans: Any) -> Any:
        assert [plan.storage_data for plan in plans] == ["local"]
        return [dataclasses.replace(plan, storage_data="global") for plan in plans]

    def write_data(self, plan: Any, planner: Any) -> Any:
        assert plan.storage_data == "global"
        results = []
        for item in plan.items:
            assert type(item) is torch_planner.WriteItem
            assert type(item.type) is torch_planner.WriteItemType
            data = planner.resolve_data(item)
            if item.type == torch_planner.WriteItemType.BYTE_IO:
                data = data.getvalue()
                self.kept["data"][item.index] = data
            else:
                self.kept["data"][item.index] = data.detach().clone()
            results.append(torch_storage.WriteResult(item.index, len(data), "written"))
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Any, results: Any) -> None:
        assert type(metadata) is torch_metadata.Metadata
        assert all(
            type(stored).__module__ == torch_metadata.__name__ for stored in metadata.state_dict_metadata.values()
        )
        metadata.storage_data = {result.index: result.storage_data for each in results for result in each}
        self.kept["metadata"] = pickle.dumps(metadata)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class MemoryReader(torch_storage.StorageReader):
    def __init__(self, kept: dict[str, Any]) -> None:
        self.kept = kept

    def reset(self, checkpoint_id: Any = None) -> None:
        self.kept["read id"] = checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        self.metadata = pickle.loads(self.kept["metadata"])
        return self.metadata

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        assert metadata is self.metadata
        assert kwargs == {"rank": 0, "use_collectives": True}

    def prepare_local_plan(self, plan: Any) -> Any:
        assert type(plan) is torch_planner.LoadPlan
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    def read_data(self, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            assert type(item) is torch_planner.ReadItem
            stored = self.kept["data"][item.storage_index]
            if item.type == torch_planner.LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(stored))
                continue
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                stored = stored.narrow(dimension, start, length)
            tensor = planner.resolve_tensor(item)
            tensor.copy_(stored)
            planner.commit_tensor(item, tensor)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


@pytest.mark.parametrize("planners", ["ours", "torch"])
def test_storages_of_torch_see_torchs_objects(planners: str, same: Callable[..., None]) -> None:
    kept: dict[str, Any] = {"data": {}}
    save_planner: Any = None if planners == "ours" else dcp.DefaultSavePlanner()
    load_planner: Any = None if planners == "ours" else dcp.DefaultLoadPlanner()
    metadata = holdfast.save(state(), "somewhere", storage_writer=MemoryWriter(kept), planner=save_planner)  # type: ignore[arg-type]
    assert kept["id"] == "somewhere"
    assert set(metadata.storage_data.values()) == {"written"}
    loaded = target()
    holdfast.load(loaded, "elsewhere", storage_reader=MemoryReader(kept), planner=load_planner)  # type: ignore[arg-type]
    assert kept["read id"] == "elsewhere"
    same(loaded, state())


def test_metadata_for_torchs_files_holds_nothing_of_ours() -> None:
    kept: dict[str, Any] = {"data": {}}
    odd = {"by number": {3: torch.ones(1)}, "tuple": (torch.ones(1), 2), "array": np.arange(3), "values": {1: "x"}}
    holdfast.save(odd, storage_writer=MemoryWriter(kept))  # type: ignore[arg-type]
    assert b"holdfast" not in kept["metadata"]
    planner_data = pickle.loads(kept["metadata"]).planner_data
    assert planner_data["by number.3"] == ("by number", "3")
    assert all(type(element) in (str, int) for path in planner_data.values() for element in path)


@pytest.mark.parametrize("scheme", ["path", "memory"])
def test_ids_and_storages_of_torch_itself(tmp_path: Path, scheme: str, same: Callable[..., None]) -> None:
    url = f"memory://{tmp_path.name}/checkpoint"
    if scheme == "memory":
        holdfast.save(state(), storage_writer=torch_fsspec.FsspecWriter(url))  # type: ignore[arg-type]
        loaded = target()
        dcp.load(loaded, storage_reader=torch_fsspec.FsspecReader(url))
        same(loaded, state())
    else:
        url = str(tmp_path / "checkpoint")
        holdfast.save(state(), storage_writer=dcp.FileSystemWriter(url, thread_count=2))  # type: ignore[arg-type]
        loaded = target()
        dcp.load(loaded, checkpoint_id=url)
        same(loaded, state())
    loaded = target()
    reader: Any = torch_fsspec.FsspecReader(url) if scheme == "memory" else dcp.FileSystemReader(url)
    holdfast.load(loaded, storage_reader=reader)
    same(loaded, state())


def test_hugging_face_storage(path: str) -> None:
    holdfast.save({"a": torch.arange(4.0)}, storage_writer=dcp.HuggingFaceStorageWriter(path))  # type: ignore[arg-type]
    loaded = {"a": torch.zeros(4)}
    holdfast.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(path))  # type: ignore[arg-type]
    assert loaded["a"].tolist() == [0, 1, 2, 3]


def test_no_checkpoint_is_not_found_whoever_reads(path: str) -> None:
    with pytest.raises(holdfast.NotFoundError, match="FileSystemReader"):
        holdfast.load({"a": 1}, storage_reader=dcp.FileSystemReader(path))  # type: ignore[arg-type]


def test_an_old_planner_behind_a_decorator_is_called_the_old_way(path: str) -> None:
    seen: list[bool] = []

    def decorated(method: Any) -> Any:
        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        return wrapper

    class Old(holdfast.DefaultSavePlanner):
        @decorated
        def set_up_planner(self, state_dict: Any, is_coordinator: bool) -> None:
            seen.append(is_coordinator)
            super().set_up_planner(state_dict, is_coordinator=is_coordinator)

    with pytest.warns(UserWarning, match="takes no storage_meta"):
        holdfast.save({"w": torch.ones(2)}, path, planner=Old())
    assert seen == [True]
