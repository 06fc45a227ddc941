"""A path is what it was at the call, wherever the process goes afterwards."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import AsyncCheckpointerType, AsyncSave, FileSystemReader, FileSystemWriter, NativeReader, NativeWriter
from holdfast.interop import convert

STATE = {"weight": torch.arange(5000.0), "step": 3}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, beside one that is called "elsewhere"."""
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def saved_late(**arguments: Any) -> None:
    """Save; the working directory is another one before anything is written."""
    go = threading.Event()

    def wait(handle: AsyncSave) -> None:
        if handle.phase == "writing":
            assert go.wait(300)

    handle = holdfast.async_save(STATE, **arguments, options=holdfast.SaveOptions(progress=wait))
    os.chdir("../elsewhere")
    go.set()
    handle.result()


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
def test_a_save_in_the_background_goes_where_it_was_called(here: Path, kind: AsyncCheckpointerType) -> None:
    saved_late(checkpoint_id="checkpoint", async_checkpointer_type=kind)
    assert holdfast.load(here / "checkpoint")["step"] == 3
    # Later ones go on from where the process is now, and those before have not been moved.
    holdfast.async_save(STATE, "checkpoint", async_checkpointer_type=kind).result()
    assert holdfast.load(here.parent / "elsewhere" / "checkpoint")["step"] == 3
    assert os.listdir(here) == os.listdir(here.parent / "elsewhere") == ["checkpoint"]
    holdfast.release()


@pytest.mark.parametrize("make", [FileSystemWriter, NativeWriter])
def test_so_does_one_by_a_storage_made_before(here: Path, make: type[FileSystemWriter] | type[NativeWriter]) -> None:
    writer = make("checkpoint")
    os.chdir("../elsewhere")
    holdfast.save(STATE, storage_writer=writer)
    assert holdfast.load(here / "checkpoint")["step"] == 3
    writer.reset("another")
    os.chdir(here)
    holdfast.save(STATE, storage_writer=writer)
    assert holdfast.load(here.parent / "elsewhere" / "another")["step"] == 3


def test_a_storage_reads_where_it_was_made(here: Path) -> None:
    holdfast.save(STATE, "native")
    holdfast.save(STATE, storage_writer=FileSystemWriter("torch"))
    readers = [NativeReader("native"), FileSystemReader("torch")]
    checkpoints = [holdfast.open("native"), holdfast.open("torch")]
    os.chdir("../elsewhere")
    for reader in readers:
        target = {"weight": torch.zeros(5000), "step": 0}
        holdfast.load(target, storage_reader=reader)
        assert target["step"] == 3
    for checkpoint in checkpoints:
        with checkpoint:
            assert torch.equal(checkpoint["weight"][...], STATE["weight"])


def test_whatever_looks_at_a_tree_or_converts_it_stays_there(here: Path) -> None:
    holdfast.save(STATE, "native")
    leave = lambda done, total: os.chdir("../elsewhere")  # noqa: E731
    convert("native", "torch", to="torch", progress=leave)
    os.chdir(here)
    assert not holdfast.verify("torch", progress=leave).damage
    os.chdir(here)
    assert not holdfast.verify("native", progress=leave).damage
    os.chdir(here)
    assert holdfast.sweep("native").root == str(here / "native")


def test_links_and_what_comes_after_them_stay(here: Path, tmp_path: Path) -> None:
    (tmp_path / "far" / "away").mkdir(parents=True)
    (here / "link").symlink_to(tmp_path / "far" / "away")
    assert NativeReader("link/../x").path == str(here / "link/../x")  # which is far/x, and not here/x
    holdfast.save(STATE, "link/../checkpoint")
    assert holdfast.load(tmp_path / "far" / "checkpoint")["step"] == 3


def test_a_url_an_absolute_path_and_none_are_as_they_are(here: Path) -> None:
    assert NativeReader("/a/../b").path == "/a/../b"
    assert NativeReader("").path == ""
    assert FileSystemReader(Path("x")).path == here / "x"


def test_without_a_working_directory_there_is_an_error(here: Path) -> None:
    here.rmdir()
    with pytest.raises(holdfast.StorageError, match="cannot find 'checkpoint'"):
        holdfast.save(STATE, "checkpoint")
