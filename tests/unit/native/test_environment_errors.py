"""Paths that hold no checkpoint, or something else: each has its class of error and one line, and nothing changes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import holdfast

READERS: dict[str, Callable[[Any], Any]] = {
    "load": holdfast.load,
    "load into": lambda path: holdfast.load({"a": torch.zeros(3)}, path),
    "open": holdfast.open,
}

reading = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


def state() -> dict[str, Any]:
    return {"a": torch.arange(3.0), "step": 4}


def refused(read: Callable[[Any], Any], path: Path | str, kind: type[holdfast.CheckpointError]) -> str:
    """The one line that ``read`` fails with; the class counts exactly."""
    with pytest.raises(holdfast.CheckpointError) as caught:
        read(path)
    assert type(caught.value) is kind
    assert "\n" not in caught.value.message
    assert str(path) in caught.value.message
    return caught.value.message


@reading
def test_a_missing_path(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    refused(read, tmp_path / "nothing", holdfast.NotFoundError)
    refused(read, tmp_path / "nothing" / "at all", holdfast.NotFoundError)
    assert os.listdir(tmp_path) == []


@reading
def test_a_dangling_link(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(holdfast.NotFoundError):
        read(tmp_path / "link")


@reading
def test_an_empty_directory(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    assert "no finished checkpoint" in refused(read, tmp_path, holdfast.NotFoundError)


@reading
def test_leftovers_of_a_dead_save(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    holdfast.save(state(), tmp_path)
    os.rename(tmp_path / "manifest.json", tmp_path / "manifest-0123.tmp")
    assert "no finished checkpoint" in refused(read, tmp_path, holdfast.NotFoundError)


@reading
def test_leftovers_of_a_dead_save_in_torchs_format(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    holdfast.save(state(), storage_writer=holdfast.FileSystemWriter(tmp_path))
    os.rename(tmp_path / ".metadata", tmp_path / ".metadata-0123.tmp")
    assert "no finished checkpoint" in refused(read, tmp_path, holdfast.NotFoundError)


@reading
def test_a_directory_of_other_things(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"something")
    assert "not a checkpoint" in refused(read, tmp_path, holdfast.NotACheckpointError)


@reading
def test_a_path_that_is_a_file(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    (tmp_path / "file").write_text("something")
    assert "is a file" in refused(read, tmp_path / "file", holdfast.NotACheckpointError)


@reading
def test_a_path_below_a_file(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    (tmp_path / "file").write_text("something")
    with pytest.raises(holdfast.NotFoundError) as caught:
        read(tmp_path / "file" / "checkpoint")
    assert f"{str(tmp_path / 'file' / 'checkpoint')!r} is a file" not in caught.value.message


@pytest.mark.parametrize("name", ["file", "file/checkpoint"])
def test_saving_to_a_path_that_is_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("something")
    for overwrite in (True, False):
        with pytest.raises(holdfast.StorageError) as caught:
            holdfast.save(state(), tmp_path / name, overwrite=overwrite)
        assert caught.value.errno == errno.ENOTDIR
        assert "\n" not in caught.value.message
        assert str(tmp_path / "file") in caught.value.message
    assert (tmp_path / "file").read_text() == "something"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_paths_that_no_file_can_have(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(holdfast.StorageError):
        holdfast.save(state(), path)
    with pytest.raises(holdfast.CheckpointError):
        holdfast.load(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["ünïcödé 漢字", "with space", "quote's \"", "new\nline", "a.b@[0:1]", "-rf", "x" * 200]
)
def test_paths_of_any_sort_work(tmp_path: Path, name: str) -> None:
    holdfast.save(state(), tmp_path / "a" / "b" / name)
    assert holdfast.load(tmp_path / "a" / "b" / name)["step"] == 4


def test_relative_paths_links_and_trailing_slashes_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    holdfast.save(state(), "checkpoint/")
    (tmp_path / "link").symlink_to("checkpoint")
    holdfast.save(state(), "link")
    for path in ("checkpoint", "./checkpoint/", "link", "checkpoint/../checkpoint"):
        assert holdfast.load(path)["step"] == 4
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "link"]
    assert len(os.listdir("checkpoint")) == 3


def test_an_error_message_is_one_line_even_where_the_path_is_not(tmp_path: Path) -> None:
    with pytest.raises(holdfast.NotFoundError) as caught:
        holdfast.load(tmp_path / "two\nlines")
    assert "\n" not in caught.value.message


def rewrite_manifest(path: Path, old: bytes, new: bytes) -> None:
    """Changes the manifest as another version of this library might have written it: with the right digest."""
    data = (path / "manifest.json").read_bytes()
    assert data.count(old) == 1
    data = data.replace(old, new)
    blank = data[: -len('0123456789abcdef"}')] + b'0000000000000000"}'
    (path / "manifest.json").write_bytes(blank[:-18] + xxhash.xxh3_64_hexdigest(blank).encode() + b'"}')


@reading
def test_a_newer_format_version(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    path = tmp_path / "checkpoint"
    holdfast.save(state(), path)
    rewrite_manifest(path, b'"version":1', b'"version":2')
    message = refused(read, path, holdfast.UnsupportedVersionError)
    assert "version 2" in message
    assert "upgrade" in message


@reading
def test_a_feature_that_is_not_known(tmp_path: Path, read: Callable[[Any], Any]) -> None:
    path = tmp_path / "checkpoint"
    holdfast.save(state(), path)
    rewrite_manifest(path, b'"requires":[]', b'"requires":["compression-zstd"]')
    message = refused(read, path, holdfast.UnsupportedVersionError)
    assert "compression-zstd" in message
    assert "upgrade" in message


def test_a_newer_checkpoint_is_not_replaced_unless_allowed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    holdfast.save(state(), path)
    rewrite_manifest(path, b'"version":1', b'"version":2')
    with pytest.raises(holdfast.AlreadyPublishedError):
        holdfast.save(state(), path, overwrite=False)
    holdfast.save(state(), path)
    assert holdfast.load(path)["step"] == 4


def test_a_manifest_rewritten_without_a_change_is_still_good(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    holdfast.save(state(), path)
    rewrite_manifest(path, b'"version":1', b'"version":1')
    assert holdfast.load(path)["step"] == 4


def test_a_field_that_this_version_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    holdfast.save(state(), path)
    rewrite_manifest(path, b'"requires":[]', b'"requires":[],"colour":"red"')
    refused(holdfast.load, path, holdfast.CorruptError)


def test_a_manifest_that_leads_out_of_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    holdfast.save(state(), storage_writer=holdfast.NativeWriter(path, attempt="a"))
    rewrite_manifest(path, b'"data-a-0-0.safetensors"', b'"../data-a-0-0.safetensors"')
    refused(holdfast.load, path, holdfast.CorruptError)


@pytest.mark.parametrize("bad", [{"a": object()}, {"a": torch.zeros(2, device="meta")}, {"a.b": 1, "a": {"b": 2}}])
def test_a_state_that_cannot_be_saved_writes_nothing(tmp_path: Path, bad: dict[str, Any]) -> None:
    path = tmp_path / "checkpoint"
    with pytest.raises(holdfast.InvalidStateError) as caught:
        holdfast.save({"good": torch.zeros(10), **bad}, path)
    assert "'a" in caught.value.message
    assert "\n" not in caught.value.message
    assert not path.exists() or os.listdir(path) == []
    holdfast.save(state(), path)
    with pytest.raises(holdfast.InvalidStateError):
        holdfast.save({"good": torch.zeros(10), **bad}, path)
    assert holdfast.load(path)["step"] == 4
    assert len(os.listdir(path)) == 3


def test_a_state_that_fails_while_it_is_written_leaves_nothing(tmp_path: Path) -> None:
    class FailingPlanner(holdfast.DefaultSavePlanner):
        calls = 0

        def resolve_data(self, write_item: holdfast.WriteItem) -> Any:
            self.calls += 1
            if self.calls == 3:
                raise RuntimeError("the device is gone\nand this is a second line")
            return super().resolve_data(write_item)

    path = tmp_path / "checkpoint"
    holdfast.save(state(), path)
    before = sorted(os.listdir(path))
    planner = FailingPlanner()
    with pytest.raises(holdfast.CheckpointError) as caught:
        holdfast.save({str(number): torch.zeros(100) for number in range(5)}, path, planner=planner)
    assert planner.calls == 3
    assert "the device is gone" in caught.value.message
    assert "\n" not in caught.value.message
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert sorted(os.listdir(path)) == before
    assert holdfast.load(path)["step"] == 4
