"""Folders that appear, are replaced and vanish as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import hf
from holdfast._io.folders import AttemptFolder, attempt_of, attempt_path, publish_folder

ATTEMPT = "0123456789abcdef"


def folder_of(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def test_the_name_of_an_attempt_leads_back_to_it() -> None:
    assert attempt_of(os.path.basename(attempt_path("/models/a.holdfast-b", ATTEMPT))) == ATTEMPT
    for name in ("a", f".holdfast-{ATTEMPT}", "a.holdfast-1", "a.holdfast-0123456789ABCDEF"):
        assert attempt_of(name) is None


def test_a_folder_gets_its_name_also_over_an_empty_one(tmp_path: Path) -> None:
    target = folder_of(tmp_path / "model")
    publish_folder(str(folder_of(tmp_path / "new", a="1")), str(target), overwrite=False, keep=lambda name: True)
    assert (target / "a").read_text() == "1"
    assert os.listdir(tmp_path) == ["model"]


def test_what_is_there_is_replaced_only_if_that_is_wanted(tmp_path: Path) -> None:
    source, target = folder_of(tmp_path / "new", a="new"), folder_of(tmp_path / "model", a="old", b="old", c="old")
    (target / "sub").mkdir()
    (target / "sub" / "d").write_text("old")
    os.symlink("nowhere", target / "link")
    with pytest.raises(holdfast.AlreadyPublishedError, match="is not empty"):
        publish_folder(str(source), str(target), overwrite=False, keep=lambda name: True)
    publish_folder(str(source), str(target), overwrite=True, keep=lambda name: name != "c")
    assert sorted(os.listdir(target)) == ["a", "b", "link", "sub"]
    assert [(target / name).read_text() for name in ("a", "b", "sub/d")] == ["new", "old", "old"]
    assert os.listdir(tmp_path) == ["model"]


def test_a_file_in_the_place_of_a_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(holdfast.AlreadyPublishedError):
            hf.export({"a": torch.ones(2)}, tmp_path / "model", overwrite=overwrite)
    assert (tmp_path / "model").read_text() == "mine"
    assert os.listdir(tmp_path) == ["model"]


def test_a_sweep_removes_the_folder_of_a_dead_attempt_alone(tmp_path: Path) -> None:
    hf.export({"a": torch.ones(2)}, tmp_path / "model")
    path = attempt_path(str(tmp_path / "model"), ATTEMPT)
    living = AttemptFolder(path)
    living.enter()
    (Path(path) / "model.safetensors").write_bytes(b"half")
    (found,) = holdfast.sweep(tmp_path, delete=True).leftovers
    assert (found.verdict, found.attempt, found.bytes) == ("living", ATTEMPT, 4)
    living.discard()
    assert [each.verdict for each in holdfast.sweep(tmp_path).leftovers] == ["dead"]
    (found,) = holdfast.sweep(tmp_path, delete=True).leftovers
    assert found.removed == ("model.safetensors",)
    assert os.listdir(tmp_path) == ["model"]
    assert not holdfast.sweep(tmp_path).leftovers


def test_the_last_one_to_give_up_removes_the_folder(tmp_path: Path) -> None:
    first, second = (AttemptFolder(tmp_path / f"model.holdfast-{ATTEMPT}") for _ in range(2))
    first.enter()
    second.enter()
    first.abandon()
    assert os.listdir(tmp_path) == [f"model.holdfast-{ATTEMPT}"]
    second.abandon()
    assert os.listdir(tmp_path) == []
