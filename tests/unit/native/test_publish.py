"""The commit: in which order things are done to the file system, and what is left where one of them fails."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast

MANIFEST_NAME = "manifest.json"


def save(path: Path, attempt: str, state: dict[str, Any] | None = None, *, overwrite: bool = True) -> None:
    writer = holdfast.NativeWriter(path, attempt=attempt, overwrite=overwrite)
    holdfast.save({"a": torch.ones(3), "attempt": attempt} if state is None else state, storage_writer=writer)


def attempt_at(path: Path) -> str:
    return str(json.loads((path / MANIFEST_NAME).read_bytes())["attempt"])


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is done to the file system from now on, and to which name."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("no /proc here")
    steps: list[tuple[str, str]] = []
    real_open, real_sync = os.open, os.fsync

    def opening(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            steps.append(("create", os.path.basename(name)))
        return real_open(name, flags, *args, **kwargs)

    def syncing(descriptor: int) -> None:
        steps.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        real_sync(descriptor)

    def recording(call: str) -> Callable[..., None]:
        real = getattr(os, call)

        def done(*names: Any, **kwargs: Any) -> None:
            steps.append((call, os.path.basename(names[-1])))
            real(*names, **kwargs)

        return done

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "fsync", syncing)
    for call in ("rename", "link", "unlink"):
        monkeypatch.setattr(os, call, recording(call))
    return steps


def before_publishing(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Do it once the data of the attempt "new" is written, and nothing of its commit."""
    real = os.open

    def opening(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if os.path.basename(name) == "index-new.safetensors" and flags & os.O_CREAT:
            action()
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", opening)


def test_the_order_of_a_replacement_is_the_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    save(path, "old")
    steps = recorded(monkeypatch)
    save(path, "new")
    assert steps == [
        ("create", "data-new-0-0.safetensors"),
        ("sync", "data-new-0-0.safetensors"),
        ("sync", "checkpoint"),
        ("create", "index-new.safetensors"),
        ("sync", "index-new.safetensors"),
        ("create", "manifest-new.tmp"),
        ("sync", "manifest-new.tmp"),
        ("sync", "checkpoint"),
        ("rename", "manifest.json"),
        ("sync", "checkpoint"),
        ("unlink", "data-old-0-0.safetensors"),
        ("unlink", "index-old.safetensors"),
    ]


def test_the_order_of_a_first_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    steps = recorded(monkeypatch)
    save(path, "new", overwrite=False)
    assert steps == [
        ("sync", tmp_path.name),
        ("create", "data-new-0-0.safetensors"),
        ("sync", "data-new-0-0.safetensors"),
        ("sync", "checkpoint"),
        ("create", "index-new.safetensors"),
        ("sync", "index-new.safetensors"),
        ("create", "manifest-new.tmp"),
        ("sync", "manifest-new.tmp"),
        ("sync", "checkpoint"),
        ("link", "manifest.json"),
        ("unlink", "manifest-new.tmp"),
        ("sync", "checkpoint"),
    ]
    assert sorted(os.listdir(path)) == ["data-new-0-0.safetensors", "index-new.safetensors", "manifest.json"]


def test_a_taken_name_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    save(path, "old")
    steps = recorded(monkeypatch)
    with pytest.raises(holdfast.AlreadyPublishedError):
        save(path, "new", overwrite=False)
    assert steps == []
    assert attempt_at(path) == "old"


def test_a_name_that_is_taken_meanwhile_is_refused_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint"
    before_publishing(monkeypatch, lambda: save(path, "old"))
    with pytest.raises(holdfast.AlreadyPublishedError):
        save(path, "new", overwrite=False)
    assert attempt_at(path) == "old"
    assert sorted(os.listdir(path)) == ["data-old-0-0.safetensors", "index-old.safetensors", "manifest.json"]


def test_what_a_dead_save_left_does_not_take_the_name(tmp_path: Path) -> None:
    (tmp_path / "manifest-dead.tmp").write_text("{}")
    save(tmp_path, "new", overwrite=False)
    assert attempt_at(tmp_path) == "new"


@pytest.mark.parametrize("state", [{"a": torch.ones(3)}, {"a": 1}], ids=["tensors", "values only"])
def test_an_attempt_that_exists_already_is_refused_and_not_harmed(tmp_path: Path, state: dict[str, Any]) -> None:
    """Of an attempt that comes twice, the first one's files are not the second one's to remove."""
    path = tmp_path / "checkpoint"
    save(path, "same", state)
    before = {name: (path / name).read_bytes() for name in os.listdir(path)}
    for overwrite in (True, False):
        with pytest.raises((holdfast.StorageError, holdfast.AlreadyPublishedError)):
            save(path, "same", state, overwrite=overwrite)
        assert {name: (path / name).read_bytes() for name in os.listdir(path)} == before
    holdfast.load(path)


def test_old_files_that_cannot_be_removed_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    save(path, "old")
    refused = []

    def refusing(name: str, *args: Any, **kwargs: Any) -> None:
        refused.append(os.path.basename(name))
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(os, "unlink", refusing)
    save(path, "new")
    monkeypatch.undo()
    assert refused == ["data-old-0-0.safetensors", "index-old.safetensors"]
    assert holdfast.load(path)["attempt"] == "new"
    save(path, "newer")
    assert holdfast.load(path)["attempt"] == "newer"


def test_what_a_damaged_manifest_names_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save(path, "old")
    data = (path / MANIFEST_NAME).read_bytes()
    (path / MANIFEST_NAME).write_bytes(data.replace(b'"world_size":1', b'"world_size":2'))
    save(path, "new")
    assert holdfast.load(path)["attempt"] == "new"
    assert (path / "data-old-0-0.safetensors").exists()


def test_a_directory_in_place_of_the_manifest_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    (path / MANIFEST_NAME).mkdir(parents=True)
    with pytest.raises(holdfast.StorageError):
        save(path, "new")
    assert os.listdir(path) == [MANIFEST_NAME]


def test_the_manifest_tells_who_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save(path, "one")
    assert attempt_at(path) == "one"
    writer = json.loads((path / MANIFEST_NAME).read_bytes())["writer"]
    assert (writer["holdfast"], writer["torch"]) == (holdfast.__version__, str(torch.__version__))
    assert writer["world_size"] == 1


@pytest.mark.parametrize("damage", ["missing", "shorter", "link"])
def test_a_data_file_that_changed_before_the_commit_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """Its writer may have died and a sweep have taken it; the publisher, who holds the lock of the index, looks."""
    data, elsewhere = tmp_path / "checkpoint" / "data-new-0-0.safetensors", tmp_path / "elsewhere"

    def change() -> None:
        if damage == "shorter":
            os.truncate(data, 3)
            return
        os.rename(data, elsewhere)
        if damage == "link":
            data.symlink_to(elsewhere)

    before_publishing(monkeypatch, change)
    with pytest.raises(holdfast.StorageError, match="not what was written") as caught:
        save(data.parent, "new")
    assert caught.value.path == str(data)
    assert not data.parent.exists()
    assert damage == "shorter" or elsewhere.stat().st_size > 4096


def test_a_file_that_cannot_be_read_where_two_formats_are_is_not_taken_for_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "native", "new")
    holdfast.save({"a": torch.ones(3)}, storage_writer=holdfast.FileSystemWriter(tmp_path / "torch"))
    os.rename(tmp_path / "torch" / ".metadata", tmp_path / "native" / ".metadata")
    real, refusals = os.open, [errno.EACCES]

    def refusing(name: Any, *args: Any, **kwargs: Any) -> int:
        if os.path.basename(name) == ".metadata" and refusals:
            raise OSError(refusals.pop(), "refused")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(holdfast.StorageError) as caught:
        holdfast.open(tmp_path / "native")
    assert caught.value.errno == errno.EACCES


def test_the_lock_of_the_index_is_held_until_the_manifest_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index-new.safetensors"
    held: list[bool] = []
    real = os.rename

    def renaming(source: str, target: str) -> None:
        held.append(not can_lock(index))
        real(source, target)

    monkeypatch.setattr(os, "rename", renaming)
    save(tmp_path, "new")
    assert held == [True]
    assert can_lock(index)


def can_lock(path: Path) -> bool:
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
