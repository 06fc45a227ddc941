from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import holdfast
from holdfast._io import locks, posix
from holdfast._native.manifest import FileEntry, IndexEntry, Manifest, WriterEntry
from holdfast._native.publish import MANIFEST_NAME, check_unpublished, publish, read_manifest
from holdfast._native.values import encode_value


def save(path: Path, attempt: str, state: dict[str, Any] | None = None, *, overwrite: bool = True) -> None:
    writer = holdfast.NativeWriter(path, attempt=attempt, overwrite=overwrite)
    holdfast.save({"a": torch.ones(3), "attempt": attempt} if state is None else state, storage_writer=writer)


DATA_BYTES = 4096


def publish_new(path: Path, *data_files: str, overwrite: bool = True) -> None:
    digest = "0" * 16
    manifest = Manifest(
        requires=(),
        attempt="new",
        writer=WriterEntry(holdfast="1", torch="2", python="3", world_size=1),
        files=tuple(FileEntry(name=name, bytes=DATA_BYTES, header=4096, digest=digest) for name in data_files),
        index=IndexEntry(name="index-new.safetensors", bytes=4096, digest=digest),
        tensors=(),
        values=(),
        metadata=encode_value({}, key="metadata"),
    )
    publish(str(path), manifest, b"index", overwrite=overwrite)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is done to the file system from now on, and to which name."""
    steps: list[tuple[str, str]] = []

    def recording(name: str, module: ModuleType = posix) -> Any:
        real = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            steps.append((name, os.path.basename(args[-1] if name in ("replace", "link_new") else args[0])))
            return real(*args, **kwargs)

        return call

    for name in ("sync_directory", "write_new", "replace", "link_new", "remove"):
        monkeypatch.setattr(posix, name, recording(name))
    monkeypatch.setattr(locks, "new_file", recording("new_file", locks))
    return steps


def test_the_order_of_a_replacement_is_the_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    save(path, "old")
    steps = recorded(monkeypatch)
    save(path, "new")
    assert steps == [
        ("sync_directory", "checkpoint"),
        ("new_file", "index-new.safetensors"),
        ("write_new", "manifest-new.tmp"),
        ("sync_directory", "checkpoint"),
        ("replace", "manifest.json"),
        ("sync_directory", "checkpoint"),
        ("remove", "data-old-0-0.safetensors"),
        ("remove", "index-old.safetensors"),
    ]


def test_the_order_of_a_first_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    steps = recorded(monkeypatch)
    save(path, "new", overwrite=False)
    assert steps == [
        ("sync_directory", tmp_path.name),
        ("sync_directory", "checkpoint"),
        ("new_file", "index-new.safetensors"),
        ("write_new", "manifest-new.tmp"),
        ("sync_directory", "checkpoint"),
        ("link_new", "manifest.json"),
        ("sync_directory", "checkpoint"),
    ]
    assert sorted(os.listdir(path)) == ["data-new-0-0.safetensors", "index-new.safetensors", "manifest.json"]


def test_every_file_is_synced_before_the_manifest_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def syncing(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_sync(descriptor)

    def renaming(source: str, target: str) -> None:
        synced.append("--- published ---")
        real_rename(source, target)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("no /proc here")
    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "rename", renaming)
    save(tmp_path / "checkpoint", "new")
    assert synced == [
        tmp_path.name,
        "data-new-0-0.safetensors",
        "checkpoint",
        "index-new.safetensors",
        "manifest-new.tmp",
        "checkpoint",
        "--- published ---",
        "checkpoint",
    ]


def test_a_taken_name_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save(path, "old")
    before = sorted(os.listdir(path))
    with pytest.raises(holdfast.AlreadyPublishedError):
        publish_new(path, overwrite=False)
    assert sorted(os.listdir(path)) == before
    with pytest.raises(holdfast.AlreadyPublishedError):
        check_unpublished(str(path))
    assert read_manifest(str(path)).attempt == "old"


def test_an_unpublished_name_is_free(tmp_path: Path) -> None:
    check_unpublished(str(tmp_path))
    check_unpublished(str(tmp_path / "nothing"))
    (tmp_path / "manifest-dead.tmp").write_text("{}")
    check_unpublished(str(tmp_path))


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


def test_the_manifest_that_is_read_is_the_one_that_was_published(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save(path, "one")
    manifest = read_manifest(str(path))
    assert (manifest.attempt, manifest.writer.world_size) == ("one", 1)
    assert manifest.writer.holdfast == holdfast.__version__
    assert manifest.writer.torch == str(torch.__version__)
    with pytest.raises(holdfast.StorageError) as caught:
        read_manifest(str(tmp_path))
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("damage", ["missing", "shorter", "link"])
def test_a_data_file_that_changed_before_the_commit_is_not_published(tmp_path: Path, damage: str) -> None:
    """Its writer may have died and a sweep have taken it; the publisher, who holds the lock of the index, looks."""
    data = tmp_path / "checkpoint" / "data-new-0-0.safetensors"
    data.parent.mkdir()
    if damage == "shorter":
        data.write_bytes(b"123")
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(bytes(DATA_BYTES))
        data.symlink_to(tmp_path / "elsewhere")
    before = sorted(os.listdir(data.parent))
    with pytest.raises(holdfast.StorageError, match="not what was written") as caught:
        publish_new(data.parent, data.name)
    assert caught.value.path == str(data)
    assert sorted(os.listdir(data.parent)) == before


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
    publish_new(tmp_path)
    assert held == [True]
    assert can_lock(index)


def can_lock(path: Path) -> bool:
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
