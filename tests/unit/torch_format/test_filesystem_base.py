"""The local file system behind torch's verbs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import FileSystem as TorchFileSystem

from holdfast.errors import StorageError
from holdfast.filesystem import FileSystem, FileSystemBase, FileSystemWriter


def test_a_base_has_every_verb_and_can_do_none() -> None:
    with pytest.raises(TypeError, match="abstract"):
        FileSystemBase()  # type: ignore[abstract]
    assert FileSystemBase.__abstractmethods__ == {
        "concat_path",
        "create_stream",
        "exists",
        "init_path",
        "mkdir",
        "rename",
        "rm_file",
        "validate_checkpoint_id",
    }


@pytest.mark.parametrize("fs", [FileSystem(), TorchFileSystem()], ids=["ours", "torch"])
def test_verbs_do_what_torchs_do(fs: FileSystem, tmp_path: Path) -> None:
    root = fs.init_path(str(tmp_path / "a" / "b"))
    assert isinstance(root, Path)
    fs.mkdir(root)
    fs.mkdir(root)
    one, two = fs.concat_path(str(root), "one"), fs.concat_path(root, "two")
    assert one == root / "one"
    with fs.create_stream(one, "wb") as stream:
        stream.write(b"1")
    with fs.create_stream(str(two), "wb") as stream:
        stream.write(b"2")
    assert sorted(fs.ls(root)) == [str(one), str(two)]
    fs.rename(one, two)
    assert not fs.exists(one)
    assert fs.exists(str(two))
    with fs.create_stream(two, "rb") as stream:
        assert stream.read() == b"1"
    fs.rm_file(two)
    assert fs.ls(str(root)) == []


def test_refusals_are_errors_of_storage(tmp_path: Path) -> None:
    fs = FileSystem()
    for verb in (
        lambda: fs.rm_file(tmp_path / "none"),
        lambda: fs.rename(tmp_path / "none", tmp_path / "other"),
        lambda: fs.ls(tmp_path / "none"),
        lambda: fs.create_stream(tmp_path / "none", "rb").__enter__(),
    ):
        with pytest.raises(StorageError, match="No such file"):
            verb()


@pytest.mark.parametrize("cls", [FileSystem, FileSystemWriter, TorchFileSystem])
def test_ids_that_a_local_checkpoint_can_have(cls: type[FileSystem], tmp_path: Path) -> None:
    assert cls.validate_checkpoint_id(Path("/no/such/place"))
    assert cls.validate_checkpoint_id(str(tmp_path / "new" / "newer"))
    assert not cls.validate_checkpoint_id("s3://bucket/x")
    assert not cls.validate_checkpoint_id("memory://x")


def test_an_id_below_what_cannot_be_written_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert not FileSystem.validate_checkpoint_id("/tmp/x")
    assert FileSystem.validate_checkpoint_id(Path("/tmp/x"))
