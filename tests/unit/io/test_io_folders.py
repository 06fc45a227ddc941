"""Folders that appear, are replaced and vanish as a whole."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import hf
from holdfast._io import posix
from holdfast._io.folders import (
    AttemptFolder,
    attempt_of,
    attempt_path,
    copy_into,
    fill_in,
    publish_folder,
    remove_folder,
    scratch_folder,
)
from holdfast._process import OpenDescriptor

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


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_what_was_replaced_stays_while_nobody_knows_that_the_new_one_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf.export({"a": torch.zeros(2)}, tmp_path / "model")
    sync = posix.sync_directory

    def fail_for_the_parent(path: str, *rest: Any) -> None:
        if Path(path) == tmp_path:
            raise holdfast.StorageError("cannot sync", errno=errno.EIO)
        sync(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(posix, "sync_directory", fail_for_the_parent)
        with pytest.raises(holdfast.StorageError, match="cannot sync"):
            hf.export({"a": torch.ones(2)}, tmp_path / "model", overwrite=True)
    (left,) = holdfast.sweep(tmp_path).dead
    assert holdfast.read(tmp_path / "model")["a"].sum() == 2
    assert holdfast.read(left.directory)["a"].sum() == 0  # all of it, for the power may go now


def test_an_old_folder_that_cannot_be_removed_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (0.0, 1.0):
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", failing(errno.EIO))
            hf.export({"a": torch.full((2,), value)}, tmp_path / "model", overwrite=True)
    assert holdfast.read(tmp_path / "model")["a"].sum() == 2
    assert holdfast.sweep(tmp_path, delete=True).removed_files == 3
    assert os.listdir(tmp_path) == ["model"]


def test_before_a_folder_is_removed_its_names_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(posix, "sync_directory", done.append)
    monkeypatch.setattr(shutil, "rmtree", done.append)
    remove_folder(str(folder_of(tmp_path / "old")))
    assert done == [str(tmp_path), str(tmp_path / "old")]


def test_what_comes_over_from_an_old_folder_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = folder_of(tmp_path / "new"), folder_of(tmp_path / "model", a="old")
    folder_of(target / "sub", b="old")
    synced: list[str] = []
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(posix, "link", lambda *_: False)  # as on file systems without links
    publish_folder(str(source), str(target), overwrite=True, keep=lambda name: True)
    assert {"new/a", "new/sub/b", "new/sub"} <= set(synced)


def test_two_may_publish_to_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one comes after this one has found no folder, and again while it takes over what is there."""
    source, target = folder_of(tmp_path / "new", a="new"), tmp_path / "model"
    rename, link = posix.renameat2, posix.link

    def rename_too_late(*arguments: Any) -> int:
        monkeypatch.setattr(posix, "renameat2", rename)
        folder_of(target, b="other")
        return rename(*arguments)

    def link_too_late(*arguments: Any) -> bool:
        monkeypatch.setattr(posix, "link", link)
        target.rename(tmp_path / "other")
        folder_of(target, c="other")
        shutil.rmtree(tmp_path / "other")
        return link(*arguments)

    monkeypatch.setattr(posix, "renameat2", rename_too_late)
    monkeypatch.setattr(posix, "link", link_too_late)
    publish_folder(str(source), str(target), overwrite=True, keep=lambda name: True)
    assert sorted(os.listdir(target)) == ["a", "c"]
    assert os.listdir(tmp_path) == ["model"]


def test_a_sweep_may_take_a_folder_before_it_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = os.mkdir

    def make_and_lose(path: str) -> None:
        make(path)
        os.rmdir(path)
        monkeypatch.setattr(os, "mkdir", make)

    monkeypatch.setattr(os, "mkdir", make_and_lose)
    folder = AttemptFolder(tmp_path / f"model.holdfast-{ATTEMPT}")
    folder.enter()
    folder.abandon()
    assert os.listdir(tmp_path) == []


def test_a_system_that_takes_no_bytes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(4))
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(holdfast.StorageError, match="took no bytes"):
        fill_in(str(tmp_path / "file"), [(0, b"text")])


def test_a_folder_that_cannot_be_opened_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = AttemptFolder(tmp_path / f"model.holdfast-{ATTEMPT}")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing(errno.EMFILE))
        with pytest.raises(holdfast.StorageError, match="cannot open"):
            folder.enter()
    folder.abandon()
    assert os.listdir(tmp_path) == []


def test_a_copy_that_fails_names_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").touch()
    with pytest.raises(holdfast.StorageError, match=r"cannot copy '.*' to '.*/folder/config.json'"):
        copy_into(str(tmp_path / "folder"), [str(tmp_path / "config.json")])


def test_a_sweep_says_nothing_of_folders_that_go_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path / "model")
    names = posix.list_directories
    monkeypatch.setattr(posix, "list_directories", lambda *_: [*names(*_), "gone"])
    report = holdfast.sweep(tmp_path)
    assert (report.problems, report.directories) == ((), 2)


def test_an_interrupt_leaves_nothing_of_what_was_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf.export({"a": torch.zeros(2)}, tmp_path / "model")
    remove = shutil.rmtree

    def interrupted(path: str) -> None:
        monkeypatch.setattr(shutil, "rmtree", remove)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hf.export({"a": torch.ones(2)}, tmp_path / "model", overwrite=True)
    assert os.listdir(tmp_path) == ["model"]
    assert holdfast.read(tmp_path / "model")["a"].sum() == 2


def test_a_signal_as_a_file_is_closed_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(4))
    close = OpenDescriptor.close

    def interrupted(descriptor: OpenDescriptor) -> None:
        close(descriptor)
        raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

    monkeypatch.setattr(OpenDescriptor, "close", interrupted)
    fill_in(str(tmp_path / "file"), [(0, b"text")])
    assert (tmp_path / "file").read_bytes() == b"text"


def test_a_scratch_folder_is_gone_after_its_block() -> None:
    with scratch_folder() as path:
        Path(path, "file").write_bytes(b"1")
    assert not os.path.exists(path)
