"""torch's own save, load and async_save, with native storage given to them: one process, torch on both sides of it."""

from __future__ import annotations

import copy
import errno
import gc
import io
import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import holdfast
from holdfast import NativeReader, NativeWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(5, 3)
        self.register_buffer("counter", torch.tensor(0))


def trained() -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model.inner(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    model.counter += 3
    return model, optimizer


def state() -> dict[str, Any]:
    model, optimizer = trained()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "parameter": model.inner.weight,
        "step": 7,
        "nested": {"list": [1, 2.5, "text", None], "tensors": [torch.arange(4), {"deep": torch.ones(2, 2).T}]},
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "tuple": (torch.ones(2), 3),
    }


def target() -> dict[str, Any]:
    made = state()
    for tensor in (*made["model"].values(), made["parameter"], made["nested"]["tensors"][0], made["scalar"]):
        tensor.detach().zero_()
    made["nested"]["tensors"][1]["deep"].zero_()
    made.update(step=0, tuple=None)
    made["nested"]["list"] = None
    for entry in made["optimizer"]["state"].values():
        for tensor in entry.values():
            tensor.zero_()
    return made


def data_files(path: str) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.startswith("data-")) if os.path.isdir(path) else []


def test_save_and_load_by_torch(path: str, same: Callable[..., None]) -> None:
    saved = state()
    metadata = dcp.save(saved, storage_writer=NativeWriter(path))
    assert type(metadata) is torch_metadata.Metadata
    assert metadata.storage_data is None, "it is broadcast to all ranks"
    loaded = target()
    kept = loaded["parameter"], loaded["model"]["inner.weight"]
    dcp.load(loaded, storage_reader=NativeReader(path))
    same(loaded, saved)
    assert loaded["parameter"] is kept[0]
    assert loaded["model"]["inner.weight"] is kept[1]


def test_what_torch_saved_is_a_checkpoint_like_any_other(path: str, same: Callable[..., None]) -> None:
    saved = state()
    dcp.save(saved, storage_writer=NativeWriter(path))
    whole = holdfast.load(path)
    assert whole["step"] == 7
    assert whole["nested"]["list"] == [1, 2.5, "text", None]
    same(whole["tuple"], saved["tuple"])
    same(whole["model"]["inner.weight"], saved["model"]["inner.weight"])
    assert whole["optimizer"]["param_groups"] == saved["optimizer"]["param_groups"]
    into = {"step": 0, "tuple": None, "nested": {"list": []}}
    holdfast.load(into, path)
    assert into["step"] == 7
    assert holdfast.load(into, path, planner=dcp.DefaultLoadPlanner()).loaded == ("step", "tuple", "nested.list")


def test_values_are_stored_typed_where_they_have_a_typed_form(path: str) -> None:
    dcp.save({"step": 7, "betas": (0.9, 0.95), "tensors": (torch.ones(1),)}, storage_writer=NativeWriter(path))
    manifest = json.loads((Path(path) / "manifest.json").read_text())
    assert {entry["key"] for entry in manifest["values"]} == {"step", "betas"}
    assert [(entry["key"], entry["kind"]) for entry in manifest["tensors"]] == [("tensors", "opaque")]
    assert manifest["requires"] == []


class Custom:
    """Only pickle can keep one."""

    def __init__(self, number: int = 0) -> None:
        self.number = number


def test_pickles_need_consent_on_both_sides(path: str) -> None:
    with pytest.raises(dcp.CheckpointException, match="allow_pickle=True") as caught:
        dcp.save({"object": Custom(3)}, storage_writer=NativeWriter(path))
    assert isinstance(caught.value.failures[0][0], holdfast.InvalidStateError)
    dcp.save({"object": Custom(3)}, storage_writer=NativeWriter(path, allow_pickle=True))
    loaded = {"object": Custom()}
    with pytest.raises(dcp.CheckpointException, match="allow_pickle=True") as caught:
        dcp.load(loaded, storage_reader=NativeReader(path))
    assert isinstance(caught.value.failures[0][0], holdfast.UnsafeError)
    dcp.load(loaded, storage_reader=NativeReader(path, allow_pickle=True))
    assert loaded["object"].number == 3


class HostilePlanner(dcp.DefaultSavePlanner):
    """Stores what would run code when it is loaded, as bytes that do not look like torch.save's."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return io.BytesIO(pickle.dumps(Custom(1), protocol=2))


def test_bytes_of_an_unknown_kind_do_not_reach_a_planner_that_would_unpickle_them(path: str) -> None:
    dcp.save({"object": 1}, storage_writer=NativeWriter(path), planner=HostilePlanner())
    loaded = {"object": None}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(loaded, storage_reader=NativeReader(path))
    assert isinstance(caught.value.failures[0][0], holdfast.UnsafeError)
    assert loaded == {"object": None}


class RenamingSave(dcp.DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.meta = storage_meta
        super().set_up_planner({f"renamed.{key}": each for key, each in state_dict.items()}, storage_meta)


class HalvingSave(dcp.DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        data = super().transform_object(write_item, object)
        return data.half() if isinstance(data, torch.Tensor) else data


class CountingLoad(dcp.DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__()
        self.resolved: list[Any] = []
        self.committed: list[Any] = []

    def create_local_plan(self) -> Any:
        self.made = super().create_local_plan()
        return self.made

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.resolved.append(read_item)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.committed.append(read_item)


def test_hooks_of_torchs_planners_get_the_items_they_made(path: str) -> None:
    planner = RenamingSave()
    dcp.save({"a": torch.arange(3.0), "b": 5}, storage_writer=NativeWriter(path), planner=planner)
    assert planner.meta.checkpoint_id == path
    loaded = {"renamed.a": torch.zeros(3), "renamed.b": 0}
    counting = CountingLoad()
    dcp.load(loaded, storage_reader=NativeReader(path), planner=counting)
    assert loaded["renamed.a"].tolist() == [0, 1, 2]
    assert loaded["renamed.b"] == 5
    (tensor_item,) = (item for item in counting.made.items if item.type.name == "TENSOR")
    assert [id(item) for item in (*counting.resolved, *counting.committed)] == [id(tensor_item)] * 2


def test_what_a_planner_changes_is_what_the_manifest_says(path: str) -> None:
    dcp.save({"a": torch.arange(3.0)}, storage_writer=NativeWriter(path), planner=HalvingSave())
    assert holdfast.load(path)["a"].dtype is torch.float16


def test_templates_from_the_metadata_and_pickled_metadata(path: str, same: Callable[..., None]) -> None:
    saved = state()
    dcp.save(saved, storage_writer=NativeWriter(path))
    loaded = _load_state_dict_from_keys(storage_reader=NativeReader(path))
    same(loaded["nested"]["tensors"], saved["nested"]["tensors"])
    found = NativeReader(path).read_metadata()
    assert isinstance(found, holdfast.Metadata)
    assert isinstance(found, torch_metadata.Metadata)
    assert isinstance(found.state_dict_metadata["step"], torch_metadata.BytesStorageMetadata)
    assert isinstance(found.state_dict_metadata["scalar"], torch_metadata.TensorStorageMetadata)
    for again in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert again == found
        assert found == again
        assert isinstance(again, holdfast.Metadata)
    assert found != "something else"


def test_dtypes_must_agree_unless_the_reader_casts(path: str) -> None:
    dcp.save({"a": torch.arange(3.0)}, storage_writer=NativeWriter(path))
    loaded = {"a": torch.zeros(3, dtype=torch.float64)}
    with pytest.raises(dcp.CheckpointException, match="dtype"):
        dcp.load(loaded, storage_reader=NativeReader(path))
    dcp.load(loaded, storage_reader=NativeReader(path, cast=True))
    assert loaded["a"].tolist() == [0, 1, 2]


def test_damage_is_found(path: str) -> None:
    dcp.save({"a": torch.arange(3000.0)}, storage_writer=NativeWriter(path))
    (name,) = data_files(path)
    with open(Path(path) / name, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"a": torch.zeros(3000)}, storage_reader=NativeReader(path))
    assert isinstance(caught.value.failures[0][0], holdfast.CorruptError)


def test_no_checkpoint_is_told_in_torchs_way(path: str) -> None:
    with pytest.raises(dcp.CheckpointException, match="no such directory"):
        dcp.load({"a": torch.zeros(1)}, storage_reader=NativeReader(path))


def test_one_writer_saves_again_and_again(path: str) -> None:
    writer = NativeWriter(path)
    for number in range(3):
        dcp.save({"a": torch.full((4,), number)}, storage_writer=writer)
        assert len(data_files(path)) == 1
    assert holdfast.load(path)["a"].tolist() == [2] * 4
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({"a": torch.zeros(1)}, storage_writer=NativeWriter(path, overwrite=False))
    assert isinstance(caught.value.failures[0][0], holdfast.AlreadyPublishedError)


@pytest.fixture
def fresh_plan_cache() -> Any:
    caches = [
        each for name, each in vars(SavePlanner).items() if name.startswith("_cached_") and isinstance(each, dict)
    ]
    assert caches
    for cache in caches:
        cache.clear()
    yield
    for cache in caches:
        cache.clear()


@pytest.mark.usefixtures("fresh_plan_cache")
def test_cached_plans_bring_an_old_attempt_which_is_not_used_again(path: str) -> None:
    attempts = set()
    for number in range(3):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"a": torch.full((4,), number)}, storage_writer=NativeWriter(path), planner=planner)
        assert holdfast.load(path)["a"].tolist() == [number] * 4
        manifest = json.loads((Path(path) / "manifest.json").read_text())
        attempts.add(manifest["attempt"])
        assert data_files(path) == [file["name"] for file in manifest["files"]]
    assert len(attempts) == 3


def fail(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.EIO, "the disk is gone")


def test_the_coordinator_sweeps_when_it_cannot_publish(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "rename", fail)
    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(dcp.CheckpointException, match="the disk is gone"):
        dcp.save({"a": torch.zeros(4)}, storage_writer=NativeWriter(path))
    assert not os.path.exists(path)


@pytest.mark.parametrize("how", ["reset", "set up", "forgotten"])
def test_what_a_save_left_that_failed_elsewhere_goes_when_the_writer_goes_on(
    path: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({"a": torch.ones(4)}, storage_writer=NativeWriter(path))
    kept = data_files(path)
    writer = NativeWriter(path)
    with monkeypatch.context() as patch:
        patch.setattr(NativeWriter, "finish", fail)  # as if another rank had failed: it is not called at all then
        with pytest.raises(dcp.CheckpointException):
            dcp.save({"a": torch.zeros(4)}, storage_writer=writer)
    assert len(data_files(path)) == 2
    if how == "reset":
        writer.reset()
    elif how == "set up":
        dcp.save({"a": torch.ones(4)}, storage_writer=writer)
        assert len(data_files(path)) == 1
        kept = data_files(path)
    else:
        del writer
        gc.collect()
    assert data_files(path) == kept
    assert holdfast.load(path)["a"].tolist() == [1] * 4


class FailingData(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "second":
            raise ValueError("no data")
        return super().resolve_data(write_item)


def test_a_rank_that_fails_while_writing_removes_its_files_itself(path: str) -> None:
    writer = NativeWriter(path)
    with pytest.raises(dcp.CheckpointException, match="no data"):
        dcp.save({"first": torch.ones(9), "second": torch.ones(3)}, storage_writer=writer, planner=FailingData())
    assert not os.path.exists(path)


def test_no_descriptor_stays_open(path: str) -> None:
    dcp.save({"a": torch.ones(4)}, storage_writer=NativeWriter(path))
    writer, reader = NativeWriter(path), NativeReader(path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        dcp.save({"a": torch.ones(4)}, storage_writer=writer)
        dcp.load({"a": torch.zeros(4)}, storage_reader=reader)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_use_collectives_is_not_for_native_storage(path: str) -> None:
    with pytest.raises(ValueError, match="use_collectives"):
        dcp.save({"a": torch.ones(1)}, storage_writer=NativeWriter(path), use_collectives=False)


def test_async_save_in_a_thread(path: str) -> None:
    weight = torch.ones(1000)
    future = dcp.async_save({"weight": weight, "step": 3}, storage_writer=NativeWriter(path))
    weight.zero_()
    future.result()  # type: ignore[union-attr]
    assert holdfast.load(path)["weight"].sum() == 1000
    with pytest.raises(dcp.CheckpointException):
        dcp.async_save({"object": Custom()}, storage_writer=NativeWriter(path)).result()  # type: ignore[union-attr]
    assert holdfast.load(path)["step"] == 3


def test_storages_survive_pickling_while_they_hold_files(path: str) -> None:
    writer, reader = NativeWriter(path), NativeReader(path)
    dcp.save({"a": torch.ones(4)}, storage_writer=writer)
    reader.read_metadata()
    again = pickle.loads(pickle.dumps(writer))
    dcp.save({"a": torch.zeros(4)}, storage_writer=again)
    loaded = {"a": torch.ones(4)}
    dcp.load(loaded, storage_reader=pickle.loads(pickle.dumps(reader)))
    assert loaded["a"].sum() == 0


def test_planners_of_ours_under_torchs_save_and_load(path: str) -> None:
    dcp.save(
        {"a": {"b": torch.ones(4)}, 3: 4}, storage_writer=NativeWriter(path), planner=holdfast.DefaultSavePlanner()
    )
    loaded: dict[Any, Any] = {"a": {"b": torch.zeros(4)}}
    dcp.load(loaded, storage_reader=NativeReader(path), planner=holdfast.DefaultLoadPlanner())
    assert loaded["a"]["b"].sum() == 4
    assert holdfast.load(path)[3] == 4


def test_values_that_load_safely_need_no_consent(path: str) -> None:
    dcp.save({"values": (OrderedDict(a=1), torch.ones(2), {2, 3})}, storage_writer=NativeWriter(path))
    ordered, tensor, numbers = holdfast.load(path)["values"]
    assert (type(ordered), tensor.tolist(), numbers) == (OrderedDict, [1, 1], {2, 3})
    with pytest.raises(dcp.CheckpointException, match="allow_pickle"):
        dcp.save({"array": np.arange(3)}, storage_writer=NativeWriter(path))
