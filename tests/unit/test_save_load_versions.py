"""The versions of modules, ``_metadata`` of a state_dict: load_state_dict is told with which versions was saved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn

import holdfast
from holdfast.interop import convert

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:torch.ao", "ignore:TypedStorage", "ignore:torch.quantize"
)


class Scaled(nn.Module):
    """Version 2 keeps the weight itself; version 1 kept a tenth of it."""

    _version = 2

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), value))
        self.seen: list[int | None] = []

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        version = local_metadata.get("version")
        self.seen.append(version)
        if version is None or version < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 10
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


@contextlib.contextmanager
def version(number: int) -> Iterator[None]:
    newest, Scaled._version = Scaled._version, number
    try:
        yield
    finally:
        Scaled._version = newest


class Application:
    """A Stateful of one's own around a module."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [{"model": self.model.state_dict()}], "step": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.model.load_state_dict(state_dict["inner"][0]["model"])


def model_of(value: float) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(Scaled(value)), nn.BatchNorm1d(4))


def save(state: dict[str, Any], path: str, way: str) -> None:
    if way == "native":
        holdfast.save(state, path)
    elif way == "async":
        holdfast.async_save(state, path).result()
    elif way == "process":
        kind = holdfast.AsyncCheckpointerType.PROCESS
        holdfast.async_save(state, path, async_checkpointer_type=kind).result()
    elif way == "torch":
        holdfast.save(state, storage_writer=holdfast.FileSystemWriter(path))
    else:
        torch_dcp.save(state, checkpoint_id=path)


WAYS = ["native", "async", "process", "torch", "by torch"]


@pytest.mark.parametrize("way", WAYS)
def test_good_weights_are_not_migrated_again(path: str, way: str) -> None:
    save({"model": model_of(5.0), "app": Application(model_of(6.0))}, path, way)
    target, app = model_of(0.0), Application(model_of(0.0))
    holdfast.load({"model": target, "app": app}, path)
    assert target[1][0].seen == app.model[1][0].seen == [2]
    assert torch.equal(target[1][0].weight, torch.full((4,), 5.0))
    assert torch.equal(app.model[1][0].weight, torch.full((4,), 6.0))


@pytest.mark.parametrize("way", ["native", "async", "process"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_weights_of_an_older_version_are_migrated_once(path: str, way: str, wrapped: bool) -> None:
    wrap = Application if wrapped else lambda model: model
    with version(1):
        save({"model": wrap(model_of(0.5))}, path, way)
    model = model_of(0.0)
    holdfast.load({"model": wrap(model)}, path)
    assert model[1][0].seen == [1]
    assert torch.equal(model[1][0].weight, torch.full((4,), 5.0))


def test_everything_without_a_target_comes_with_the_versions_saved(path: str) -> None:
    with version(1):
        old = model_of(0.5)
        state = {"model": old.state_dict(), "both": (old.state_dict(), 1), "plain": {"a": torch.ones(1)}}
        holdfast.save(state, path)
    loaded = holdfast.load(path)
    saved = state["model"]._metadata
    for each in (loaded["model"], loaded["both"][0]):
        assert {name: each._metadata.get(name, saved[name]) for name in saved} == saved
        assert each._metadata["2"] == {"version": 2}
        assert each._metadata["1.0"] == {"version": 1}
    assert type(loaded["plain"]) is dict
    assert list(loaded["model"]) == list(state["model"])
    model = model_of(0.0)
    model.load_state_dict(loaded["model"])
    assert torch.equal(model[1][0].weight, torch.full((4,), 5.0))


def test_dicts_that_are_made_for_an_empty_target_have_them_too(path: str) -> None:
    with version(1):
        holdfast.save({"models": [model_of(0.5)], "same": model_of(0.6)}, path)
    target: dict[str, Any] = {"same": model_of(0.0)}
    holdfast.load(target, path)
    assert torch.equal(target["same"][1][0].weight, torch.full((4,), 6.0))
    everything: dict[str, Any] = {}
    holdfast.load(everything, path)
    model = model_of(0.0)
    model.load_state_dict(everything["models"][0])
    assert torch.equal(model[1][0].weight, torch.full((4,), 5.0))


def test_a_state_that_is_a_state_dict_itself(path: str) -> None:
    with version(1):
        holdfast.save(Scaled(0.5).state_dict(), path)
    model = Scaled()
    state = model.state_dict()
    holdfast.load(state, path)
    model.load_state_dict(state)
    assert torch.equal(model.weight, torch.full((4,), 5.0))
    model = Scaled()
    model.load_state_dict(holdfast.load(path))
    assert torch.equal(model.weight, torch.full((4,), 5.0))


@pytest.mark.parametrize("way", WAYS)
def test_the_callers_own_state_dict_stays_one(path: str, way: str) -> None:
    save({"model": model_of(5.0).state_dict()}, path, way)
    model = model_of(0.0)
    state = {"model": model.state_dict()}
    mine = state["model"]
    holdfast.load(state, path)
    assert state["model"] is mine
    assert mine._metadata == model.state_dict()._metadata
    model.load_state_dict(mine)
    assert model[1][0].seen == [2]


def test_what_could_not_be_loaded_keeps_its_version(path: str) -> None:
    with version(1):
        holdfast.save({"model": {"a": Scaled(0.5)}}, path)
    model = nn.ModuleDict({"a": Scaled(1.0), "b": Scaled(2.0)})
    holdfast.load({"model": model}, path, strict=False)
    assert model["a"].seen == [1]
    assert model["b"].seen == [2]
    assert torch.equal(model["a"].weight, torch.full((4,), 5.0))
    assert torch.equal(model["b"].weight, torch.full((4,), 2.0))


def test_a_checkpoint_that_knows_no_versions_leaves_those_of_the_target(path: str) -> None:
    holdfast.save({"model": dict(model_of(5.0).state_dict())}, path)
    model = model_of(0.0)
    holdfast.load({"model": model}, path)
    assert model[1][0].seen == [2]


@pytest.mark.parametrize("way", WAYS)
def test_quantised_modules_are_loaded(path: str, way: str) -> None:
    from torch.ao.nn.quantized import Linear

    def linear() -> Linear:
        made = Linear(4, 3)
        made.set_weight_bias(torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 0, torch.qint8), torch.randn(3))
        return made

    saved, target = linear(), linear()
    save({"model": nn.Sequential(saved)}, path, way)
    holdfast.load({"model": nn.Sequential(target)}, path)
    assert torch.equal(target.weight().int_repr(), saved.weight().int_repr())
    assert torch.equal(target.bias(), saved.bias())
    if way == "native":
        again = nn.Sequential(linear())
        again.load_state_dict(holdfast.load(path)["model"])
        assert torch.equal(again[0].weight().int_repr(), saved.weight().int_repr())


def test_versions_are_not_the_users_metadata(path: str) -> None:
    metadata = holdfast.save({"model": model_of(1.0)}, path, user_metadata={"mine": 1})
    assert metadata is not None
    with holdfast.open(path) as checkpoint:
        assert checkpoint.user_metadata == {"mine": 1}
        assert checkpoint.metadata.versions == {"model": {"1.0": {"version": 2}, "2": {"version": 2}}}
    with pytest.raises(holdfast.InvalidStateError, match="reserved"):
        holdfast.save({"a": 1}, path, user_metadata={"holdfast.versions": 1})


def test_a_conversion_keeps_versions(path: str, tmp_path: Path) -> None:
    with version(1):
        holdfast.save({"model": model_of(0.5)}, path)
    convert(path, tmp_path / "copy", to="native")
    convert(path, tmp_path / "copy.pt", to="pt")
    convert(tmp_path / "copy.pt", tmp_path / "again", to="native")
    for copy in (tmp_path / "copy", tmp_path / "again"):
        model = model_of(0.0)
        holdfast.load({"model": model}, copy)
        assert torch.equal(model[1][0].weight, torch.full((4,), 5.0))
    model = model_of(0.0)
    model.load_state_dict(torch.load(tmp_path / "copy.pt")["model"])
    assert torch.equal(model[1][0].weight, torch.full((4,), 5.0))


def test_show_tells_the_users_metadata_alone(path: str) -> None:
    from typer.testing import CliRunner

    from holdfast.cli import app

    holdfast.save({"model": model_of(1.0)}, path)
    assert "holdfast.versions" not in CliRunner().invoke(app, ["show", path]).stdout
