"""Hugging Face folders in an object store are read where they are; they are written to directories alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from tests.stores.conftest import Place


def model() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.arange(300_000.0).view(300, 1000), "b": torch.arange(5)}


def zeros() -> dict[str, torch.Tensor]:
    return {key: torch.zeros_like(each) for key, each in model().items()}


@pytest.fixture
def url(place: Place, tmp_path: Path) -> str:
    """An export that was copied up."""
    holdfast.hf.export(model(), tmp_path / "model")
    for file in (tmp_path / "model").iterdir():
        place.put(f"model/{file.name}", file.read_bytes())
    return f"{place.url}/model"


def test_it_is_read_by_every_door(url: str, same: Callable[..., None]) -> None:
    same(holdfast.read(url), model())
    target = zeros()
    assert holdfast.load(target, url).bytes_read >= 1_200_040
    same(target, model())
    with holdfast.open(url) as checkpoint:
        assert checkpoint["a.weight"][3:5, :2].equal(model()["a.weight"][3:5, :2])
    report = holdfast.verify(url)
    assert report.ok
    assert report.unchecked == ()
    shown = CliRunner().invoke(app, ["show", url], env={"COLUMNS": "250"})
    assert (shown.exit_code, "a Hugging Face folder" in shown.output) == (0, True)
    target = zeros()
    holdfast.load(target, storage_reader=holdfast.HuggingFaceStorageReader(url))
    same(target, model())


def test_one_file_and_a_folder_without_digests(place: Place, url: str, same: Callable[..., None]) -> None:
    same(holdfast.read(f"{url}/model.safetensors"), model())
    place.remove("model/holdfast.json")
    same(holdfast.read(url), model())
    assert holdfast.verify(url).unchecked != ()


def test_it_is_converted(place: Place, url: str, tmp_path: Path, same: Callable[..., None]) -> None:
    holdfast.convert(url, f"{place.url}/native", to="native")
    same(holdfast.read(f"{place.url}/native"), model())
    assert holdfast.verify(f"{place.url}/native").ok
    holdfast.convert(f"{place.url}/native", f"{place.url}/again", to="native")
    holdfast.convert(f"{place.url}/again", tmp_path / "folder", to="hf")
    same(holdfast.read(tmp_path / "folder"), model())
    done = CliRunner().invoke(app, ["convert", url, f"{place.url}/by-command", "--to", "native"])
    assert done.exit_code == 0, done.output
    same(holdfast.read(f"{place.url}/by-command"), model())
    with pytest.raises(holdfast.AlreadyPublishedError):
        holdfast.convert(url, f"{place.url}/native", to="native")


def test_damage_is_found(place: Place, url: str) -> None:
    data = bytearray(place.get("model/model.safetensors"))
    data[-9] ^= 1
    place.put("model/model.safetensors", bytes(data))
    assert holdfast.verify(url).damaged_keys
    with pytest.raises(holdfast.CorruptError):
        holdfast.read(url)


@pytest.mark.parametrize("to", ["hf", "pt", "torch"])
def test_only_native_checkpoints_are_written_there(bucket: Place, tmp_path: Path, to: Any) -> None:
    holdfast.save(model(), tmp_path / "native")
    with pytest.raises(ValueError, match="only native checkpoints are written to an object store"):
        holdfast.convert(tmp_path / "native", f"{bucket.url}/a", to=to)
    doors: list[Callable[[], object]] = [
        lambda: holdfast.hf.export(model(), f"{bucket.url}/a"),
        lambda: holdfast.hf.async_export(model(), f"{bucket.url}/a").result(timeout=60),
        lambda: holdfast.save(model(), storage_writer=holdfast.HuggingFaceStorageWriter(f"{bucket.url}/a")),
    ]
    for door in doors:
        with pytest.raises(ValueError, match=r"is written to a directory, not to .*; copy it up"):
            door()
    assert bucket.objects() == {}
