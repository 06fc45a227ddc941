"""A deleted checkpoint is gone in one step, and whoever was reading it is told so, never that it is damaged."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import xxhash
from outside_views import locked_directory

import holdfast


def state() -> dict[str, Any]:
    return {"a": torch.arange(300_000.0), "b": torch.ones(7), "step": 1}


def save(path: Path, attempt: str = "now", *, marks: bool = False) -> None:
    writer = holdfast.NativeWriter(path, attempt=attempt)
    writer.leaves_marker = marks
    holdfast.save(state(), storage_writer=writer)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Cut(Exception):
    """Ends the process, for all that the library knows."""


@contextlib.contextmanager
def cut_before(name: str, count: int = 0) -> Iterator[None]:
    """Have call number ``count`` of the function ``name`` of os not come back, nor any after it."""
    real, calls = getattr(os, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > count:
            raise Cut
        return real(*args, **kwargs)

    with mock.patch.object(os, name, call):
        yield


def test_a_deleted_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "one"
    save(path)
    sizes = {name: (path / name).stat().st_size for name in os.listdir(path)}
    report = holdfast.delete(path)
    assert report == holdfast.DeleteReport(
        path=str(path), attempt="now", files=tuple(sorted(sizes)), bytes=sum(sizes.values()), problems=()
    )
    assert os.listdir(tmp_path) == []


def test_the_marker_for_other_programs_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "one"
    save(path, marks=True)
    assert ".metadata" in os.listdir(path)
    assert ".metadata" in holdfast.delete(path).files
    assert not path.exists()


def test_files_of_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "one"
    save(path)
    (path / "notes.txt").write_text("mine")
    (path / "folder").mkdir()
    assert "notes.txt" not in holdfast.delete(path).files
    assert sorted(os.listdir(path)) == ["folder", "notes.txt"]


def test_where_nothing_is_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(holdfast.NotFoundError, match="no such directory"):
        holdfast.delete(tmp_path / "missing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(holdfast.NotACheckpointError, match="is a file"):
        holdfast.delete(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    with pytest.raises(holdfast.NotACheckpointError):
        holdfast.delete(tmp_path / "folder")
    assert os.listdir(tmp_path / "folder") == ["notes.txt"]
    with pytest.raises(ValueError, match="only directories and object stores"):
        holdfast.delete("ftp://somewhere")


def test_of_two_deletions_the_later_one_finds_nothing(tmp_path: Path) -> None:
    """The other one ends when this one has opened the directory."""
    real = os.open

    def overtaken(path: Any, *args: Any, **options: Any) -> int:
        descriptor = real(path, *args, **options)
        if path == str(tmp_path / "step-1"):
            with mock.patch.object(os, "open", real):
                shutil.rmtree(path, ignore_errors=True)
        return descriptor

    for delete in (holdfast.delete, lambda path: holdfast.Steps(tmp_path).finish_deletions()):
        save(tmp_path / "step-1")
        with mock.patch.object(os, "open", overtaken), contextlib.suppress(holdfast.NotFoundError):
            delete(tmp_path / "step-1")
        assert os.listdir(tmp_path) == []


def test_a_link_to_a_checkpoint_is_not_followed(tmp_path: Path) -> None:
    save(tmp_path / "one")
    (tmp_path / "link").symlink_to("one")
    with pytest.raises(holdfast.NotACheckpointError, match="is a link"):
        holdfast.delete(tmp_path / "link")
    assert holdfast.verify(tmp_path / "one").ok


def test_a_directory_that_cannot_be_opened_is_not_taken_for_a_link(tmp_path: Path) -> None:
    save(tmp_path / "one")
    real = os.open

    def refused(path: Any, *args: Any, **options: Any) -> int:
        if path == str(tmp_path / "one"):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *args, **options)

    with mock.patch.object(os, "open", refused), pytest.raises(holdfast.StorageError) as caught:
        holdfast.delete(tmp_path / "one")
    assert caught.value.errno == errno.EACCES
    assert holdfast.verify(tmp_path / "one").ok


def test_a_checkpoint_that_is_pinned_stays_unless_forced(tmp_path: Path) -> None:
    save(tmp_path / "one")
    (tmp_path / "one" / "pinned").touch()
    with pytest.raises(holdfast.BusyError, match="is pinned"):
        holdfast.delete(tmp_path / "one")
    assert holdfast.verify(tmp_path / "one").ok
    holdfast.delete(tmp_path / "one", force=True)
    assert not (tmp_path / "one").exists()


def test_what_is_being_saved_stays(tmp_path: Path) -> None:
    path = tmp_path / "one"
    save(path)
    (path / "data-other-0-0.safetensors").write_bytes(bytes(10))
    with (
        locked(path / "data-other-0-0.safetensors"),
        pytest.raises(holdfast.BusyError, match=r"under way: a writer holds the lock of data-other"),
    ):
        holdfast.delete(path, force=True)
    # Its saver publishes, and is not done yet.
    with locked(path / "index-now.safetensors"), pytest.raises(holdfast.BusyError, match="under way"):
        holdfast.delete(path)
    assert holdfast.verify(path).ok
    holdfast.delete(path)
    assert not path.exists()


def test_one_who_is_publishing_is_waited_for(tmp_path: Path) -> None:
    save(tmp_path / "one")
    waited = []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        fcntl.flock(publishing, fcntl.LOCK_UN)

    publishing = os.open(tmp_path / "one", os.O_RDONLY)
    try:
        fcntl.flock(publishing, fcntl.LOCK_EX)
        with mock.patch("time.sleep", pause):
            holdfast.delete(tmp_path / "one")
    finally:
        os.close(publishing)
    assert len(waited) == 1
    assert not (tmp_path / "one").exists()


def test_one_who_does_not_end_is_not_waited_for_without_end(tmp_path: Path) -> None:
    save(tmp_path / "one")
    with (
        locked_directory(tmp_path / "one"),
        mock.patch("time.monotonic", side_effect=itertools.count(0, 5)),
        mock.patch("time.sleep"),
        pytest.raises(holdfast.BusyError, match="does not end"),
    ):
        holdfast.delete(tmp_path / "one")
    assert holdfast.verify(tmp_path / "one").ok


@pytest.mark.parametrize("call", ["rename", "fsync", "unlink", "rmdir"])
def test_a_deletion_that_is_cut_off_is_finished_by_the_next(tmp_path: Path, call: str) -> None:
    path = tmp_path / "one"
    cuts = 0
    for count in range(20):
        shutil.rmtree(path, ignore_errors=True)
        save(path, marks=True)
        (path / "metrics.json").write_text("{}")
        with contextlib.suppress(Cut), cut_before(call, count):
            holdfast.delete(path)
            break
        cuts += 1
        try:
            assert holdfast.verify(path).ok
        except holdfast.NotFoundError:
            assert not (path / "manifest.json").exists()
        if os.listdir(path):
            holdfast.delete(path)
            assert not path.exists()
        else:
            with pytest.raises(holdfast.NotFoundError):
                holdfast.delete(path)
    assert cuts > 0


def test_a_sweep_removes_what_a_deletion_left_of_its_attempt(tmp_path: Path) -> None:
    save(tmp_path / "one")
    with pytest.raises(Cut), cut_before("rename"):
        holdfast.delete(tmp_path / "one")
    holdfast.sweep(tmp_path, delete=True)
    assert holdfast.verify(tmp_path / "one").ok
    with pytest.raises(Cut), cut_before("fsync", 1):
        holdfast.delete(tmp_path / "one")
    assert len(os.listdir(tmp_path / "one")) == 3
    holdfast.sweep(tmp_path, delete=True)
    assert os.listdir(tmp_path / "one") == []


def test_a_manifest_with_two_names_goes_too(tmp_path: Path) -> None:
    """A saver that was killed right after it published leaves both; to rename one to the other changes nothing."""
    path = tmp_path / "one"
    save(path)
    os.link(path / "manifest.json", path / "manifest-now.tmp")
    holdfast.delete(path)
    assert not path.exists()


@pytest.mark.parametrize("damage", ["torn", "link"])
def test_a_damaged_checkpoint_can_be_deleted(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "one"
    save(path)
    if damage == "torn":
        os.truncate(path / "manifest.json", 40)
    else:
        (path / "manifest.json").rename(tmp_path / "elsewhere")
        (path / "manifest.json").symlink_to(tmp_path / "elsewhere")
    report = holdfast.delete(path)
    assert report.attempt == ""
    if damage == "torn":
        assert report.problems == ()
        assert not path.exists()
    else:
        assert os.listdir(path) == ["manifest-damaged.tmp"]
        assert "not a regular file" in report.problems[0]
        assert (tmp_path / "elsewhere").exists()


def test_a_checkpoint_of_a_newer_version_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "one"
    save(path)
    before = sorted(os.listdir(path))
    newer = (path / "manifest.json").read_bytes().replace(b'"version":1', b'"version":9')[:-18]
    digest = xxhash.xxh3_64_hexdigest(newer + b'0000000000000000"}')
    (path / "manifest.json").write_bytes(newer + digest.encode() + b'"}')
    with pytest.raises(holdfast.UnsupportedVersionError):
        holdfast.delete(path)
    assert sorted(os.listdir(path)) == before


def test_files_that_cannot_be_removed_are_told(tmp_path: Path) -> None:
    path = tmp_path / "one"
    save(path)
    real = os.unlink

    def unlink(name: str, **kwargs: Any) -> None:
        if name.startswith("data-"):
            raise OSError(errno.EPERM, "not permitted")
        real(name, **kwargs)

    with mock.patch.object(os, "unlink", unlink):
        report = holdfast.delete(path)
    assert "not permitted" in report.problems[0]
    assert "manifest.json" in report.files
    with pytest.raises(holdfast.NotFoundError):
        holdfast.open(path)


@pytest.mark.parametrize("where", ["native", "torch"])
def test_a_load_that_is_overtaken_finds_nothing(tmp_path: Path, where: str) -> None:
    path = tmp_path / "one"
    if where == "native":
        save(path)
    else:
        holdfast.save(state(), storage_writer=holdfast.FileSystemWriter(path))
    target = state()
    real = os.open
    opened: list[object] = []

    def open_late(name: Any, *args: Any, **kwargs: Any) -> int:
        if not opened and (str(name).endswith(".distcp") or os.path.basename(name).startswith("data-")):
            opened.append(name)
            with mock.patch.object(os, "open", real):
                holdfast.delete(path)
        return real(name, *args, **kwargs)

    with mock.patch.object(os, "open", open_late), pytest.raises(holdfast.NotFoundError, match="undefined now"):
        holdfast.load(target, path)
    assert len(opened) == 1


def test_reads_of_an_open_checkpoint_find_nothing(tmp_path: Path) -> None:
    path = tmp_path / "one"
    save(path)
    with holdfast.open(path) as opened:
        holdfast.delete(path)
        with pytest.raises(holdfast.NotFoundError, match="was deleted since it was opened"):
            opened["a"][0]
    save(path)
    with holdfast.open(path) as opened:
        save(path, "then")
        with pytest.raises(holdfast.StorageError, match="was replaced") as caught:
            opened["a"][0]
        assert caught.value.errno == errno.ESTALE


def test_a_look_at_every_byte_finds_nothing_in_the_end(tmp_path: Path) -> None:
    path = tmp_path / "one"
    save(path)
    called: list[int] = []

    def overtaken(done: int, total: int) -> None:
        if not called:
            called.append(done)
            holdfast.delete(path)

    with pytest.raises(holdfast.NotFoundError):
        holdfast.verify(path, progress=overtaken)
    assert called


def test_torchs_format_goes_with_the_files_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "one"
    holdfast.save(state(), storage_writer=holdfast.FileSystemWriter(path))
    (path / "__9_9.distcp").write_bytes(b"of another save")
    report = holdfast.delete(path)
    assert ".metadata" in report.files
    assert report.attempt == ""
    assert os.listdir(path) == ["__9_9.distcp"]


def test_of_two_formats_the_one_that_counts_goes_last(tmp_path: Path) -> None:
    path = tmp_path / "one"
    save(path, "old")
    with mock.patch("holdfast._native.publish.Turn.remove_other"):
        holdfast.save(state(), storage_writer=holdfast.FileSystemWriter(path))
    order = []
    real_unlink, real_rename = os.unlink, os.rename

    def unlink(name: Any, **kwargs: Any) -> None:
        order.append(os.path.basename(name))
        real_unlink(name, **kwargs)

    def rename(name: Any, *args: Any, **kwargs: Any) -> None:
        order.append(os.path.basename(name))
        real_rename(name, *args, **kwargs)

    assert {"manifest.json", ".metadata"} <= set(os.listdir(path))
    with mock.patch.object(os, "unlink", unlink), mock.patch.object(os, "rename", rename):
        holdfast.delete(path)
    assert order.index("manifest.json") < order.index(".metadata")
    assert not path.exists()
