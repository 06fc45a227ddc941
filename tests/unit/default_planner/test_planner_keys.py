"""Loading chosen keys without a template: torch's planner for it, with the nesting and types that were saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner as TorchPlanner

import holdfast
from holdfast.default_planner import _EmptyStateDictLoadPlanner
from holdfast.default_planner.targets import chosen_keys


def state() -> dict[str, Any]:
    weight = torch.arange(6.0).view(2, 3)
    return {
        "model": {"layers": [{"w": weight}, {"w": weight + 1}], "layers2": torch.ones(2), "tied": weight},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1}]},
        "pair": (torch.ones(1), "text"),
        "seen": np.arange(3),
        "step": 7,
    }


def load(path: str, keys: Any = None, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    holdfast.load(found, path, planner=_EmptyStateDictLoadPlanner(keys, **options))
    return found


def test_without_keys_everything_comes_back(path: str, same: Callable[..., None]) -> None:
    holdfast.save(state(), path)
    found = load(path)
    same({key: found[key] for key in state()}, state())
    assert found["model"]["tied"] is found["model"]["layers"][0]["w"]


def test_a_key_stands_for_all_below_it_at_its_dots(path: str, same: Callable[..., None]) -> None:
    holdfast.save(state(), path)
    whole = state()
    same(load(path, {"model.layers"}), {"model": {"layers": whole["model"]["layers"]}})
    same(load(path, {"step", "optimizer"}), {"optimizer": whole["optimizer"], "step": 7})
    same(load(path, ["optimizer.groups.0.lr"]), {"optimizer": {"groups": [{"lr": 0.1}]}})
    same(load(path, "model.layers2"), {"model": {"layers2": torch.ones(2)}})
    assert load(path, {"pair.1"}) == {"pair": (None, "text")}
    assert load(path, []) == {}


def test_only_what_was_chosen_is_read(path: str) -> None:
    holdfast.save({"small": torch.ones(2), "large": torch.ones(1 << 20)}, path)
    target: dict[str, Any] = {}
    report = holdfast.load(target, path, planner=_EmptyStateDictLoadPlanner(["small"]))
    assert report.loaded == ("small",)
    assert report.unexpected == ("large",)
    assert report.bytes_read < 1 << 20


def test_names_that_stand_for_nothing_are_an_error_where_torch_says_nothing(path: str, tmp_path: Path) -> None:
    holdfast.save(state(), path)
    with pytest.raises(holdfast.MismatchError) as caught:
        load(path, {"step", "stap", "model.lay"})
    assert [difference.key for difference in caught.value.differences] == ["model.lay", "stap"]
    assert load(path, {"step", "stap"}, allow_partial_load=True) == {"step": 7}
    theirs: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"step": 7}, checkpoint_id=tmp_path / "torch", no_dist=True)
        dcp.load(theirs, checkpoint_id=tmp_path / "torch", planner=TorchPlanner({"stap"}), no_dist=True)
    assert theirs == {}


def test_the_same_keys_are_chosen_as_torch_chooses(path: str, tmp_path: Path) -> None:
    flat = {"a": {"b": torch.ones(1), "bc": torch.ones(2)}, "ab": torch.ones(3), "v": {"x": [{"y": 1}]}}
    metadata = holdfast.save(flat, path)
    theirs = TorchPlanner()
    for keys in ({"a"}, {"a.b"}, {"ab", "v.x"}, {"v.x.0"}):
        theirs.keys = keys
        expected = [key for key in metadata.state_dict_metadata if theirs._should_include_key(key, metadata)]  # type: ignore[arg-type]
        assert chosen_keys(metadata, keys) == expected


def test_the_target_must_be_empty(path: str) -> None:
    holdfast.save(state(), path)
    with pytest.raises(holdfast.InvalidStateError, match="must be empty"):
        holdfast.load({"step": 0}, path, planner=_EmptyStateDictLoadPlanner())
    with pytest.raises(holdfast.InvalidStateError, match="metadata"):
        _EmptyStateDictLoadPlanner().set_up_planner({})


def test_a_checkpoint_without_paths_is_flat(path: str) -> None:
    stored = {"a.b": torch.ones(2), "v": 1}
    holdfast.save(stored, path, planner=holdfast.DefaultSavePlanner(flatten_state_dict=False))
    found = load(path, ["a"])
    assert list(found) == ["a.b"]
    found = load(path, flatten_state_dict=False)
    assert list(found) == ["a.b", "v"]
    assert found["v"] == 1
