"""save, load and their deprecated relatives with torch's signatures; the order of calls; planners and storages of old.

Old means: written before the protocol had keywords.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import MutableSequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_loader as torch_loader
from torch.distributed.checkpoint import state_dict_saver as torch_saver

import holdfast
from holdfast import NativeReader, NativeWriter, state_dict_loader, state_dict_saver
from holdfast.errors import CheckpointError, MismatchError
from holdfast.state_dict_loader import _load_state_dict, _load_state_dict_from_keys, load_state_dict
from holdfast.state_dict_saver import _save_state_dict, save_state_dict


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (state_dict_saver.save, torch_saver.save),
        (state_dict_saver.save_state_dict, torch_saver.save_state_dict),
        (state_dict_saver._save_state_dict, torch_saver._save_state_dict),
        (state_dict_loader.load, torch_loader.load),
        (state_dict_loader.load_state_dict, torch_loader.load_state_dict),
        (state_dict_loader._load_state_dict, torch_loader._load_state_dict),
        (state_dict_loader._load_state_dict_from_keys, torch_loader._load_state_dict_from_keys),
    ],
)
def test_every_parameter_of_torch_is_there_in_its_place(ours: Any, theirs: Any) -> None:
    mine, its = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    missing = [name for name in its if name not in mine]
    assert not missing, (
        f"{theirs.__module__}.{theirs.__name__} of torch {torch.__version__} has {missing}, ours has not"
    )
    for name, parameter in its.items():
        assert mine[name].default == parameter.default, name
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert list(mine).index(name) == list(its).index(name), name
            assert mine[name].kind is parameter.kind, name


# The order of calls.

PLANNER_CALLS = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan")
WRITER_CALLS = (
    *("reset", "storage_meta", "set_up_storage_writer", "prepare_local_plan"),
    *("prepare_global_plan", "write_data", "finish"),
)
READER_CALLS = (
    *("reset", "read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data"),
)


def noting(name: str, method: Any, calls: list[str]) -> Any:
    @functools.wraps(method)
    def noted(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        return method(*arguments, **options)

    return noted


def recording(thing: Any, names: tuple[str, ...], calls: list[str]) -> Any:
    """``thing``, whose methods note that they were called."""
    for name in names:
        setattr(thing, name, noting(name, getattr(thing, name), calls))
    return thing


SAVE_ORDER = [
    *("storage_meta", "set_up_planner", "set_up_storage_writer", "create_local_plan", "prepare_local_plan"),
    *("create_global_plan", "prepare_global_plan", "finish_plan", "write_data", "finish"),
]
LOAD_ORDER = [
    *("read_metadata", "set_up_planner", "set_up_storage_reader", "create_local_plan", "prepare_local_plan"),
    *("create_global_plan", "prepare_global_plan", "finish_plan", "read_data"),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("library", [holdfast, dcp])
def test_calls_come_in_torchs_order(path: str, library: Any) -> None:
    calls: list[str] = []
    writer = recording(NativeWriter("elsewhere"), WRITER_CALLS, calls)
    planner = recording(library.DefaultSavePlanner(), PLANNER_CALLS, calls)
    library.save({"a": torch.ones(2)}, checkpoint_id=path, storage_writer=writer, planner=planner)
    assert calls == ["reset", *SAVE_ORDER]
    calls.clear()
    reader = recording(NativeReader("elsewhere"), READER_CALLS, calls)
    load_planner = recording(library.DefaultLoadPlanner(), PLANNER_CALLS, calls)
    library.load({"a": torch.ones(2)}, checkpoint_id=path, storage_reader=reader, planner=load_planner)
    assert calls == ["reset", *LOAD_ORDER]
    calls.clear()
    library.save({"a": torch.ones(2)}, storage_writer=writer, planner=planner)
    library.load({"a": torch.ones(2)}, storage_reader=reader, planner=load_planner)
    assert calls == [*SAVE_ORDER, *LOAD_ORDER]


def test_deprecated_functions_reset_without_an_id_and_warn(path: str) -> None:
    given: list[Any] = []

    class Writer(NativeWriter):
        def reset(self, checkpoint_id: Any = None) -> None:
            given.append(checkpoint_id)
            super().reset(checkpoint_id)

    class Reader(NativeReader):
        def reset(self, checkpoint_id: Any = None) -> None:
            given.append(checkpoint_id)
            super().reset(checkpoint_id)

    with pytest.warns(FutureWarning, match="save_state_dict is deprecated"):
        metadata = save_state_dict({"a": torch.ones(2), "n": 1}, Writer(path), None, 0, True, None)
    assert set(metadata.state_dict_metadata) == {"a", "n"}
    loaded = {"a": torch.zeros(2), "n": 0}
    with pytest.warns(FutureWarning, match="load_state_dict is deprecated"):
        load_state_dict(loaded, Reader(path), None, 0, True, holdfast.DefaultLoadPlanner())
    assert given == [None, None]
    assert loaded["n"] == 1
    _save_state_dict({"n": 2}, Writer(path))
    _load_state_dict(loaded_again := {"n": 0}, Reader(path))
    assert loaded_again == {"n": 2}
    assert given == [None, None]


# Where to.


def test_the_old_form_gives_the_storage_in_second_place(path: str) -> None:
    with pytest.warns(UserWarning, match=r"save\(state, storage\) is the old form") as caught:
        holdfast.save({"a": 1}, NativeWriter(path))
    assert caught[0].filename == __file__
    loaded = {"a": 0}
    with pytest.warns(UserWarning, match=r"load\(state, storage\) is the old form") as caught:
        holdfast.load(loaded, NativeReader(path))
    assert caught[0].filename == __file__
    assert loaded == {"a": 1}
    with pytest.raises(ValueError, match="two storages"):
        holdfast.save({"a": 1}, NativeWriter(path), storage_writer=NativeWriter(path))


def test_there_must_be_an_id_or_a_storage() -> None:
    with pytest.raises(ValueError, match="save needs a checkpoint_id or a storage_writer"):
        holdfast.save({"a": 1})
    with pytest.raises(ValueError, match="load needs a checkpoint_id or a storage_reader"):
        holdfast.load({"a": 1})
    with pytest.raises(ValueError, match="load needs"):
        _load_state_dict_from_keys()


# Without a template.


@pytest.fixture
def stored(path: str) -> str:
    holdfast.save(
        {
            "model": {"layer": {"weight": torch.ones(2), "bias": torch.zeros(1)}, "layers": [torch.ones(1)]},
            "optimizer": {"lr": 0.1, 3: {"step": 5}},
            "step": 7,
        },
        path,
    )
    return path


def test_chosen_keys_are_loaded_without_a_template(stored: str) -> None:
    found = holdfast.read(stored, keys=["model.layer", "step"])
    assert set(found) == {"model", "step"}
    assert set(found["model"]) == {"layer"}, "layers is no part of layer"
    assert holdfast.read(stored, keys="optimizer.3") == {"optimizer": {3: {"step": 5}}}
    assert holdfast.read(stored, keys=[]) == {}
    with pytest.raises(MismatchError, match=r"model\.lay"):
        holdfast.read(stored, keys={"model.lay", "step"})


def test_torchs_name_for_it(stored: str) -> None:
    assert _load_state_dict_from_keys("step", checkpoint_id=stored) == {"step": 7}
    assert _load_state_dict_from_keys({"optimizer.lr"}, storage_reader=NativeReader(stored)) == {
        "optimizer": {"lr": 0.1}
    }
    reader = NativeReader("elsewhere")
    assert set(_load_state_dict_from_keys(checkpoint_id=stored, storage_reader=reader)) == {
        "model",
        "optimizer",
        "step",
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_chosen_keys_of_a_checkpoint_in_torchs_format(path: str) -> None:
    dcp.save({"a": {"b": torch.ones(2), "c": 3}, "d": 4}, checkpoint_id=path)
    found = _load_state_dict_from_keys({"a"}, storage_reader=dcp.FileSystemReader(path))  # type: ignore[arg-type]
    assert found["a"]["c"] == 3
    assert torch.equal(found["a"]["b"], torch.ones(2))
    assert set(found) == {"a"}


# What ranks save apart from each other.


def test_native_storage_does_not_keep_ranks_apart(path: str) -> None:
    with pytest.raises(CheckpointError, match="leave use_collectives at True"):
        holdfast.save({"a": 1}, path, use_collectives=False)


def test_one_process_saves_and_loads_by_metadata_of_its_own(path: str) -> None:
    writer: Any = dcp.FileSystemWriter(path)
    holdfast.save({"a": torch.arange(4.0), "n": 3}, storage_writer=writer, use_collectives=False)
    assert sorted(each.name for each in Path(path).iterdir()) == ["__0.metadata", "__0_0.distcp"]
    loaded = {"a": torch.zeros(4), "n": 0}
    reader: Any = dcp.FileSystemReader(path)
    holdfast.load(loaded, storage_reader=reader)
    assert loaded["a"].tolist() == [0, 1, 2, 3]
    assert loaded["n"] == 3


# In place.


class Stateful:
    def __init__(self, value: int, calls: list[str], name: str) -> None:
        self.value, self.calls, self.name = value, calls, name

    def state_dict(self) -> dict[str, Any]:
        self.calls.append(f"{self.name} asked")
        return {"value": self.value, "tensor": torch.full((2,), self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append(f"{self.name} given")
        self.value = state["value"]
        assert state["tensor"].tolist() == [self.value] * 2


class NotingDict(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        self.set_keys = [*getattr(self, "set_keys", []), key]
        super().__setitem__(key, value)


def test_loads_are_in_place_and_stateful_objects_are_given_their_state_after_reading(path: str) -> None:
    holdfast.save({"b": Stateful(4, [], "b"), "a": Stateful(3, [], "a"), "n": 5, "t": torch.ones(3)}, path)
    calls: list[str] = []
    tensor = torch.zeros(3)
    loaded = NotingDict(b=Stateful(0, calls, "b"), a=Stateful(0, calls, "a"), n=0, t=tensor)
    objects = loaded["a"], loaded["b"]
    holdfast.load(loaded, path)
    assert calls == ["b asked", "a asked", "a given", "b given"], "in the order of their keys, on every rank"
    assert (loaded["a"], loaded["b"]) == objects
    assert (loaded["a"].value, loaded["b"].value, loaded["n"]) == (3, 4, 5)
    assert loaded["t"] is tensor
    assert tensor.sum() == 3
    assert "n" in loaded.set_keys


# Of old.


class OldPlanner(holdfast.DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, is_coordinator: bool) -> None:  # type: ignore[override]
        assert is_coordinator is True
        super().set_up_planner(state_dict, None, is_coordinator)


class OldTorchPlanner(dcp.DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, is_coordinator: bool) -> None:  # type: ignore[override]
        assert is_coordinator is True
        super().set_up_planner(state_dict, None, is_coordinator)


class WrappingPlanner(holdfast.DefaultSavePlanner):
    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        assert kwargs["storage_meta"].checkpoint_id
        super().set_up_planner(*args, **kwargs)


class OldWriter(NativeWriter):
    def set_up_storage_writer(self, is_coordinator: bool) -> None:  # type: ignore[override]
        super().set_up_storage_writer(is_coordinator)


class OldTorchWriter(dcp.FileSystemWriter):
    def set_up_storage_writer(self, is_coordinator: bool) -> None:  # type: ignore[override]
        super().set_up_storage_writer(is_coordinator)


class OldReader(NativeReader):
    def read_metadata(self) -> Any:  # type: ignore[override]
        return super().read_metadata()

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:  # type: ignore[override]
        super().set_up_storage_reader(metadata, is_coordinator)


class OldTorchReader(dcp.FileSystemReader):
    def read_metadata(self) -> Any:  # type: ignore[override]
        return super().read_metadata()

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:  # type: ignore[override]
        super().set_up_storage_reader(metadata, is_coordinator)


@pytest.mark.parametrize("planner", [OldPlanner, OldTorchPlanner])
def test_planners_of_old_work_with_a_warning(path: str, planner: Any) -> None:
    with pytest.warns(UserWarning, match=f"{planner.__name__}.set_up_planner takes no storage_meta"):
        holdfast.save({"a": 1}, path, planner=planner())
    assert holdfast.load(path) == {"a": 1}


def test_planners_that_take_anything_get_everything(path: str) -> None:
    holdfast.save({"a": 1}, path, planner=WrappingPlanner())


@pytest.mark.parametrize(("writer", "reader"), [(OldWriter, OldReader), (OldTorchWriter, OldTorchReader)])
def test_storages_of_old_work_with_a_warning(path: str, writer: Any, reader: Any) -> None:
    with pytest.warns(UserWarning, match=f"{writer.__name__}.set_up_storage_writer takes no keywords"):
        holdfast.save({"a": 1}, storage_writer=writer(path))
    loaded = {"a": 0}
    with pytest.warns(UserWarning, match=f"{reader.__name__}.set_up_storage_reader takes no keywords"):
        holdfast.load(loaded, storage_reader=reader(path))
    assert loaded == {"a": 1}
    with pytest.raises(CheckpointError, match="does not support use_collectives"):
        holdfast.save({"a": 1}, storage_writer=writer(path), use_collectives=False)


@pytest.mark.parametrize("reader", [OldReader, OldTorchReader])
def test_readers_of_old_have_no_metadata_of_single_ranks(path: str, reader: Any) -> None:
    with pytest.raises(holdfast.NotFoundError):
        holdfast.load({"a": 0}, storage_reader=reader(path))


class Recorder(holdfast.StorageWriter):
    """A storage of somebody's that has just what the protocol asks for."""

    def __init__(self) -> None:
        self.set_up: dict[str, Any] = {}

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *, rank: int, use_collectives: bool) -> None:  # type: ignore[override]
        self.set_up = {"is_coordinator": is_coordinator, "rank": rank, "use_collectives": use_collectives}

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:
        done: torch.futures.Future[MutableSequence[holdfast.WriteResult]] = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata: Any, results: Any) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


@pytest.mark.parametrize("use_collectives", [True, False])
def test_storages_are_told_their_rank_and_whether_ranks_plan_together(use_collectives: bool) -> None:
    writer = Recorder()
    holdfast.save({"a": 1}, storage_writer=writer, use_collectives=use_collectives)
    assert writer.set_up == {"is_coordinator": True, "rank": 0, "use_collectives": use_collectives}
