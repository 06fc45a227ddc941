"""A save that fails leaves no directory that it made, and every one that was there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import FileSystemWriter, NativeWriter

STATE = {"w": torch.ones(3), "n": 1}

Storage = Callable[[Path], Any]


def save_behind(writer: Any, kind: holdfast.AsyncCheckpointerType) -> None:
    holdfast.async_save(STATE, storage_writer=writer, async_checkpointer_type=kind).result()


WAYS: dict[str, Callable[[Any], object]] = {
    "save": lambda writer: holdfast.save(STATE, storage_writer=writer),
    "thread": lambda writer: save_behind(writer, holdfast.AsyncCheckpointerType.THREAD),
    "process": lambda writer: save_behind(writer, holdfast.AsyncCheckpointerType.PROCESS),
}


class NativeThatFails(NativeWriter):
    def finish(self, metadata: Any, results: Any) -> None:
        assert os.listdir(self.path)
        raise OSError("no")


class TorchThatFails(FileSystemWriter):
    def finish(self, metadata: Any, results: Any) -> None:
        assert os.listdir(self.path)
        raise OSError("no")


@pytest.mark.parametrize("storage", [NativeThatFails, TorchThatFails])
@pytest.mark.parametrize("way", WAYS)
def test_no_directory_is_left_that_the_save_made(tmp_path: Path, storage: Storage, way: str) -> None:
    (tmp_path / "was there").mkdir()
    path = tmp_path / "was there" / "made" / "made too"
    with pytest.raises(holdfast.CheckpointError, match="no"):
        WAYS[way](storage(path))
    assert os.listdir(tmp_path) == ["was there"]
    assert os.listdir(tmp_path / "was there") == []
    holdfast.release()


@pytest.mark.parametrize("storage", [NativeWriter, FileSystemWriter])
def test_what_is_refused_makes_no_directory(tmp_path: Path, storage: Storage) -> None:
    with pytest.raises(holdfast.InvalidStateError):
        holdfast.save({"f": lambda: 0}, storage_writer=storage(tmp_path / "a" / "b"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("storage", [NativeThatFails, TorchThatFails])
def test_a_directory_that_others_use_stays(tmp_path: Path, storage: Storage) -> None:
    path = tmp_path / "checkpoint"

    class Meanwhile(storage):  # type: ignore[misc, valid-type]
        def finish(self, metadata: Any, results: Any) -> None:
            (path / "notes").write_text("of somebody else")
            super().finish(metadata, results)

    with pytest.raises(holdfast.CheckpointError, match="no"):
        holdfast.save(STATE, storage_writer=Meanwhile(path))
    assert os.listdir(path) == ["notes"]


@pytest.mark.parametrize("storage", [NativeWriter, FileSystemWriter])
def test_the_next_save_works(tmp_path: Path, storage: Storage) -> None:
    writer = storage(tmp_path / "checkpoint")
    with pytest.raises(holdfast.InvalidStateError):
        holdfast.save({"f": lambda: 0}, storage_writer=writer)
    holdfast.save(STATE, storage_writer=writer)
    assert holdfast.verify(tmp_path / "checkpoint").ok
