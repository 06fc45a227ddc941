"""Arguments that are almost right: a short error at once, or what they say."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.interop import convert

STATE = {"w": torch.ones(3)}


@pytest.mark.parametrize("deadline_s", [0, -1, math.nan, -math.inf])
def test_a_deadline_is_positive(tmp_path: Path, deadline_s: float) -> None:
    calls: list[Callable[[], object]] = [
        lambda: holdfast.save(STATE, tmp_path / "a", options=holdfast.SaveOptions(deadline_s=deadline_s)),
        lambda: holdfast.async_save(STATE, tmp_path / "a", options=holdfast.SaveOptions(deadline_s=deadline_s)),
        lambda: holdfast.load(dict(STATE), tmp_path / "a", options=holdfast.LoadOptions(deadline_s=deadline_s)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"deadline_s is a positive number of seconds, or math\.inf"):
            call()
    assert not (tmp_path / "a").exists()


def test_there_may_be_no_deadline(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path / "a", options=holdfast.SaveOptions(deadline_s=math.inf))
    holdfast.async_save(STATE, tmp_path / "b", options=holdfast.SaveOptions(deadline_s=math.inf)).result()
    holdfast.load(dict(STATE), tmp_path / "a", options=holdfast.LoadOptions(deadline_s=math.inf))


def test_a_path_is_text(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path / "a")
    path: Any = os.fsencode(tmp_path / "a")
    calls: list[Callable[[], object]] = [
        lambda: holdfast.save(STATE, path),
        lambda: holdfast.async_save(STATE, path),
        lambda: holdfast.load(dict(STATE), path),
        lambda: holdfast.load(path),
        lambda: holdfast.open(path),
        lambda: holdfast.NativeWriter(path),
        lambda: holdfast.NativeReader(path),
        lambda: convert(path, tmp_path / "b", to="pt"),
        lambda: convert(tmp_path / "a", path, to="pt"),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"a path is a str, or a PathLike of one, not bytes; use os\.fsdecode"):
            call()
    for storage in (holdfast.FileSystemWriter, holdfast.FileSystemReader):
        with pytest.raises(TypeError, match="bytes"):
            storage(path)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("replica_check", ["al", "", "ALL"])
def test_replicas_are_compared_in_three_ways(tmp_path: Path, replica_check: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: holdfast.save(STATE, tmp_path / "a", options=holdfast.SaveOptions(replica_check=replica_check)),
        lambda: holdfast.async_save(STATE, tmp_path / "a", options=holdfast.SaveOptions(replica_check=replica_check)),
        lambda: holdfast.DefaultSavePlanner(replica_check=replica_check),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="replica_check is 'sample', 'all'"):
            call()
    assert not (tmp_path / "a").exists()
