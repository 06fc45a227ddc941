"""What verify finds, what a deletion leaves, and what a sweep shows and removes in an object store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from tests.stores.conftest import Place

State = Callable[..., dict[str, Any]]


@pytest.fixture
def saved(place: Place, state: State) -> str:
    """The URL of a checkpoint."""
    holdfast.save(state(3), f"{place.url}/a")
    return f"{place.url}/a"


def index_of(place: Place, folder: str) -> str:
    return next(f"{folder}/{name}" for name in place.objects(folder) if name.startswith("index-"))


def test_an_object_that_is_cut_short(place: Place, saved: str) -> None:
    name = place.data_of("a")
    place.put(name, place.get(name)[:-1])
    report = holdfast.verify(saved)
    assert not report.ok
    assert [Path(damage.file).name for damage in report.damage] == [Path(name).name]
    with pytest.raises(holdfast.CorruptError, match=Path(name).name):
        holdfast.read(saved)


def test_a_byte_that_is_another_one(place: Place, saved: str) -> None:
    name = place.data_of("a")
    data = bytearray(place.get(name))
    data[-7] ^= 64
    place.put(name, bytes(data))
    assert holdfast.verify(saved).damaged_keys == ("w",)
    with pytest.raises(holdfast.CorruptError, match="w"):
        holdfast.read(saved)


def test_a_byte_of_the_header(place: Place, saved: str) -> None:
    name = place.data_of("a")
    data = bytearray(place.get(name))
    data[20] ^= 1
    place.put(name, bytes(data))
    assert not holdfast.verify(saved).ok


@pytest.mark.parametrize("which", ["data", "index"])
def test_an_object_that_is_missing(place: Place, saved: str, which: str) -> None:
    name = place.data_of("a") if which == "data" else index_of(place, "a")
    place.remove(name)
    with pytest.raises(holdfast.CorruptError, match=Path(name).name):
        holdfast.read(saved)
    if which == "data":
        assert [Path(damage.file).name for damage in holdfast.verify(saved).damage] == [Path(name).name]
    else:
        with pytest.raises(holdfast.CorruptError, match="index"):
            holdfast.verify(saved)


@pytest.mark.parametrize("which", ["index", "manifest"])
def test_the_description_is_damaged(place: Place, saved: str, which: str) -> None:
    name = "a/manifest.json" if which == "manifest" else index_of(place, "a")
    data = bytearray(place.get(name))
    data[len(data) // 2] ^= 1
    place.put(name, bytes(data))
    for look in (holdfast.read, holdfast.verify, holdfast.open):
        with pytest.raises(holdfast.CorruptError, match=which):
            look(saved)


def test_verify_on_the_command_line(place: Place, saved: str) -> None:
    assert CliRunner().invoke(app, ["verify", saved]).exit_code == 0
    place.remove(place.data_of("a"))
    found = CliRunner().invoke(app, ["verify", "--json", saved])
    assert found.exit_code != 0
    assert json.loads(found.stdout)["ok"] is False


def test_what_was_deleted_is_no_checkpoint(place: Place, saved: str, state: State, same: Callable[..., None]) -> None:
    names = place.objects("a")
    report = holdfast.delete(saved)
    assert set(report.files) == set(names)
    assert report.bytes == sum(names.values())
    assert report.problems == ()
    assert list(place.objects("a")) == ["manifest.json"]
    for look in (holdfast.read, holdfast.verify, holdfast.open, holdfast.delete):
        with pytest.raises(holdfast.NotFoundError, match="deleted"):
            look(saved)
    assert holdfast.sweep(place.url).leftovers == ()
    holdfast.save(state(4), saved, overwrite=False)
    same(holdfast.read(saved), state(4))
    assert holdfast.verify(saved).ok


def test_a_deletion_that_was_cut_off(place: Place, saved: str, state: State) -> None:
    """Only its first step was done: what it leaves is no checkpoint, and the sweep knows it is dead."""
    objects = {name: place.get(f"a/{name}") for name in place.objects("a")}
    holdfast.delete(saved)
    for name, data in objects.items():
        if name != "manifest.json":
            place.put(f"a/{name}", data)
    with pytest.raises(holdfast.NotFoundError):
        holdfast.read(saved)
    (found,) = holdfast.sweep(place.url).leftovers
    assert (found.verdict, found.removed) == ("dead", ())
    (found,) = holdfast.sweep(place.url, delete=True).leftovers
    assert set(found.removed) == objects.keys() - {"manifest.json"}
    assert list(place.objects("a")) == ["manifest.json"]


def test_a_deletion_ends_what_another_one_began(place: Place, saved: str) -> None:
    objects = {name: place.get(f"a/{name}") for name in place.objects("a")}
    holdfast.delete(saved)
    for name, data in objects.items():
        if name != "manifest.json":
            place.put(f"a/{name}", data)
    assert set(holdfast.delete(saved).files) == objects.keys() - {"manifest.json"}
    assert list(place.objects("a")) == ["manifest.json"]


def test_a_sweep_removes_only_what_is_named(place: Place, saved: str, state: State, same: Callable[..., None]) -> None:
    for attempt in ("0123456789abcdef", "fedcba9876543210"):
        place.put(f"a/data-{attempt}-0-0.safetensors", b"left")
        place.put(f"a/index-{attempt}.safetensors", b"left too")
    place.put("a/notes.txt", b"somebody's")
    found = holdfast.sweep(place.url, delete=True).leftovers
    assert [each.verdict for each in found] == ["unknown"] * 2
    assert all("hours old" in each.reason and each.removed == () for each in found)
    report = holdfast.sweep(place.url, delete=True, attempts=["0123456789abcdef"])
    assert {each.attempt: len(each.removed) for each in report.leftovers} == {
        "0123456789abcdef": 2,
        "fedcba9876543210": 0,
    }
    assert [name for name in place.objects("a") if "0123456789abcdef" in name] == []
    assert len([name for name in place.objects("a") if "fedcba9876543210" in name]) == 2
    same(holdfast.read(saved), state(3))
    assert place.get("a/notes.txt") == b"somebody's"


def test_a_sweep_never_removes_what_is_published(
    place: Place, saved: str, state: State, same: Callable[..., None]
) -> None:
    attempt = index_of(place, "a").removeprefix("a/index-").removesuffix(".safetensors")
    assert holdfast.sweep(place.url, delete=True, attempts=[attempt]).leftovers == ()
    same(holdfast.read(saved), state(3))
    # With a manifest that cannot be read, nobody knows what it needs.
    place.put("a/manifest.json", place.get("a/manifest.json")[:-20])
    (found,) = holdfast.sweep(place.url, delete=True, attempts=[attempt]).leftovers
    assert (found.verdict, found.removed) == ("unknown", ())


def test_sweep_on_the_command_line(place: Place, saved: str) -> None:
    place.put("a/data-0123456789abcdef-0-0.safetensors", b"left")
    shown = CliRunner().invoke(app, ["sweep", place.url], env={"COLUMNS": "250"})
    assert shown.exit_code == 0, shown.output
    assert "0123456789abcdef" in shown.output
    assert "data-0123456789abcdef-0-0.safetensors" in place.objects("a")


def test_nothing_to_sweep_and_nothing_to_delete(place: Place) -> None:
    for door in (holdfast.sweep, holdfast.delete, holdfast.verify, holdfast.read):
        with pytest.raises(holdfast.NotFoundError):
            door(f"{place.url}/nothing")


def test_a_damaged_checkpoint_can_be_deleted(place: Place, saved: str) -> None:
    place.put("a/manifest.json", place.get("a/manifest.json")[:-20])
    report = holdfast.delete(saved)
    assert "manifest.json" in report.files
    assert report.problems  # what the damaged manifest named stays, and it is said
    with pytest.raises(holdfast.NotFoundError):
        holdfast.read(saved)


def test_a_folder_without_a_checkpoint_loses_nothing(place: Place) -> None:
    place.put("b/notes.txt", b"somebody's")
    with pytest.raises(holdfast.NotACheckpointError):
        holdfast.delete(f"{place.url}/b")
    assert list(place.objects("b")) == ["notes.txt"]


def test_a_tombstone_in_a_directory(bucket: Place, tmp_path: Path, state: State, same: Callable[..., None]) -> None:
    """A folder whose checkpoint was deleted is copied to a disk: it counts as none there too."""
    holdfast.save(state(3), f"{bucket.url}/a")
    holdfast.delete(f"{bucket.url}/a")
    path = tmp_path / "a"
    path.mkdir()
    for name in bucket.objects("a"):
        (path / name).write_bytes(bucket.get(f"a/{name}"))
    for look in (holdfast.read, holdfast.verify, holdfast.open):
        with pytest.raises(holdfast.NotFoundError):
            look(path)
    assert holdfast.sweep(tmp_path).problems == ()
    holdfast.save(state(4), path, overwrite=True)
    same(holdfast.read(path), state(4))
    holdfast.delete(path)
    assert not path.exists()


def test_a_tombstone_in_a_directory_is_replaced_only_with_overwrite(
    bucket: Place, tmp_path: Path, state: State, same: Callable[..., None]
) -> None:
    """A file system has no put on condition: nothing tells the link which file it may replace."""
    holdfast.save(state(3), f"{bucket.url}/a")
    holdfast.delete(f"{bucket.url}/a")
    path = tmp_path / "a"
    path.mkdir()
    (path / "manifest.json").write_bytes(bucket.get("a/manifest.json"))
    with pytest.raises(holdfast.AlreadyPublishedError, match="overwrite=True"):
        holdfast.save(state(4), path, overwrite=False)
    assert [each.name for each in path.iterdir()] == ["manifest.json"]
    holdfast.save(state(4), path)
    same(holdfast.read(path), state(4))


def test_a_tombstone_in_a_directory_can_be_deleted(bucket: Place, tmp_path: Path, state: State) -> None:
    holdfast.save(state(3), f"{bucket.url}/a")
    objects = {name: bucket.get(f"a/{name}") for name in bucket.objects("a")}
    holdfast.delete(f"{bucket.url}/a")
    path = tmp_path / "a"
    path.mkdir()
    for name, data in {**objects, "manifest.json": bucket.get("a/manifest.json")}.items():
        (path / name).write_bytes(data)
    (found,) = holdfast.sweep(tmp_path).leftovers
    assert found.attempt in index_name(objects)
    holdfast.sweep(tmp_path, delete=True)
    assert [each.name for each in path.iterdir()] == ["manifest.json"]
    with pytest.raises(holdfast.NotFoundError):
        holdfast.read(path)
    assert holdfast.Steps(tmp_path).steps() == []


def index_name(names: Any) -> str:
    return next(name for name in names if name.startswith("index-"))


def test_a_tombstone_is_no_step_in_a_directory(bucket: Place, tmp_path: Path, state: State) -> None:
    holdfast.save(state(3), f"{bucket.url}/step-3")
    holdfast.delete(f"{bucket.url}/step-3")
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "manifest.json").write_bytes(bucket.get("step-3/manifest.json"))
    steps = holdfast.Steps(tmp_path)
    assert steps.steps() == []
    assert steps.latest() is None
    with holdfast.CheckpointManager(tmp_path, save=holdfast.Every(steps=1), stop=None) as checkpoints:
        assert checkpoints.resume({"w": torch.zeros(64, 3), "step": 0}).step is None
