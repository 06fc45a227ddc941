"""use_in_torch: native storage under torch's names, given back at the end."""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, storage
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import holdfast
from holdfast.interop import replacing as torch_storage
from holdfast.interop import use_in_torch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def names() -> tuple[type, ...]:
    return dcp.FileSystemWriter, dcp.FileSystemReader, filesystem.FileSystemWriter, filesystem.FileSystemReader


# In tuples, for names of this module would be replaced like all others.
TORCHS_OWN = names()
REPLACED = (torch_storage.NativeWriterForTorch, torch_storage.NativeReaderForTorch) * 2


@pytest.fixture(autouse=True)
def nothing_stays_replaced() -> Iterator[None]:
    yield
    assert names() == TORCHS_OWN


def is_native(path: Path) -> bool:
    return (path / "manifest.json").exists()


def test_torchs_names_stand_for_native_storage_until_the_end(tmp_path: Path) -> None:
    original = names()
    with use_in_torch() as replacement:
        assert names() == REPLACED
        dcp.save({"a": torch.ones(3), "n": 4}, checkpoint_id=tmp_path / "by id")
        dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "by writer", thread_count=3))
        loaded = {"a": torch.zeros(3), "n": 0}
        dcp.load(loaded, checkpoint_id=tmp_path / "by id")
        dcp.load({"a": torch.zeros(3)}, storage_reader=dcp.FileSystemReader(str(tmp_path / "by writer")))
    assert names() == original
    assert loaded["n"] == 4
    assert loaded["a"].sum() == 3
    assert is_native(tmp_path / "by id")
    assert is_native(tmp_path / "by writer")
    assert "torch.distributed.checkpoint.FileSystemWriter" in replacement.replaced
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "after")
    assert not is_native(tmp_path / "after")


def test_checkpoints_of_torch_are_still_read(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3), "n": 4}, checkpoint_id=tmp_path / "old")
    with use_in_torch():
        for reader in (None, dcp.FileSystemReader(tmp_path / "old")):
            loaded = {"a": torch.zeros(3), "n": 0}
            dcp.load(loaded, checkpoint_id=None if reader else tmp_path / "old", storage_reader=reader)
            assert loaded["n"] == 4
        by_holdfast = {"a": torch.zeros(3), "n": 0}
        stands_for_both: Any = dcp.FileSystemReader(tmp_path / "old")
        holdfast.load(by_holdfast, storage_reader=stands_for_both)
        assert by_holdfast["n"] == 4
        with pytest.raises(dcp.CheckpointException, match=r"\.metadata"):
            dcp.load({"a": torch.zeros(3)}, checkpoint_id=tmp_path / "nothing")
        # The same reader goes on to another one, which is native.
        dcp.save({"a": torch.ones(3), "n": 5}, checkpoint_id=tmp_path / "new")
        dcp.load(by_holdfast, checkpoint_id=tmp_path / "new", storage_reader=stands_for_both)
        assert by_holdfast["n"] == 5
        assert stands_for_both.checkpoint_id == str(tmp_path / "new")


def test_names_that_others_have_imported_are_replaced_and_given_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    framework = ModuleType("some_framework.checkpointing")
    framework.Writer = TORCHS_OWN[0]  # type: ignore[attr-defined]
    framework.dcp = dcp  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_framework.checkpointing", framework)
    monkeypatch.setitem(sys.modules, "some_framework.broken", object())  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, logger="holdfast"):
        replacement = use_in_torch()
        assert framework.Writer is REPLACED[0]
        late = ModuleType("some_framework.late")
        late.Reader = dcp.FileSystemReader  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "some_framework.late", late)
        replacement.undo()
        replacement.undo()
    assert framework.Writer is TORCHS_OWN[0]
    assert late.Reader is TORCHS_OWN[1]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "some_framework.checkpointing.Writer" in told[0]
    assert "some_framework.late.Reader" in told[1]


@pytest.mark.parametrize("first_undone", [0, 1])
def test_uses_may_nest_and_end_in_any_order(first_undone: int) -> None:
    uses = [use_in_torch(), use_in_torch(allow_pickle=True)]
    assert torch_storage.NativeWriterForTorch("x").allow_pickle is True
    uses.pop(first_undone).undo()
    assert names() == REPLACED
    assert torch_storage.NativeWriterForTorch("x").allow_pickle is (first_undone == 0)
    uses.pop().undo()
    assert names() == TORCHS_OWN
    assert torch_storage.NativeWriterForTorch("x").allow_pickle is False


def test_isinstance_goes_on_to_work(tmp_path: Path) -> None:
    before = dcp.FileSystemWriter(tmp_path), dcp.FileSystemReader(tmp_path)
    with use_in_torch():
        during = dcp.FileSystemWriter(tmp_path), dcp.FileSystemReader(tmp_path)
        for writer, reader in (before, during):
            assert isinstance(writer, dcp.FileSystemWriter)
            assert isinstance(writer, storage.StorageWriter)
            assert isinstance(reader, dcp.FileSystemReader)
            assert isinstance(reader, storage.StorageReader)
        assert isinstance(dcp.HuggingFaceStorageWriter(str(tmp_path)), dcp.FileSystemWriter)
        assert not isinstance(during[0], dcp.FileSystemReader)
        assert during[0].checkpoint_id == str(tmp_path)


def test_what_torch_derives_from_its_storage_stays_its_own(tmp_path: Path) -> None:
    with use_in_torch():
        assert TORCHS_OWN[0] in dcp.HuggingFaceStorageWriter.__mro__
        assert TORCHS_OWN[0] in FsspecWriter.__mro__
        dcp.save({"a": torch.ones(2)}, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "hf")))
        dcp.save({"a": torch.ones(2)}, checkpoint_id=f"memory://{tmp_path.name}")
        loaded = {"a": torch.zeros(2)}
        dcp.load(loaded, checkpoint_id=f"memory://{tmp_path.name}")
    assert loaded["a"].sum() == 2
    assert "model.safetensors.index.json" in os.listdir(tmp_path / "hf")


def test_a_module_of_torch_that_is_loaded_already_writes_native_checkpoints_too(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "in.pt")
    with use_in_torch():
        torch_save_to_dcp(tmp_path / "in.pt", tmp_path / "checkpoint")
        assert is_native(tmp_path / "checkpoint")
        dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["a"].sum() == 2


def test_options_that_torchs_arguments_do_not_have(tmp_path: Path) -> None:
    weight = {"a": torch.ones(2, dtype=torch.bfloat16)}
    with use_in_torch():
        dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "x")
        with pytest.raises(dcp.CheckpointException, match="dtype"):
            dcp.load(weight, checkpoint_id=tmp_path / "x")
    with use_in_torch(cast=True, verify=False):
        dcp.load(weight, checkpoint_id=tmp_path / "x")
        reader = dcp.FileSystemReader(tmp_path / "x")
        assert reader.behind.verify is False  # type: ignore[attr-defined]
        with pytest.raises(dcp.CheckpointException, match="already"):
            dcp.save({"a": 1}, storage_writer=dcp.FileSystemWriter(tmp_path / "x", overwrite=False))
        with pytest.raises(ValueError, match="stream transforms"):
            dcp.FileSystemWriter(tmp_path / "x", _extensions=["zstd"])  # type: ignore[list-item]
        assert dcp.FileSystemReader.validate_checkpoint_id("a://b") is False


def test_writers_stage_and_are_pickled_like_torchs(tmp_path: Path) -> None:
    with use_in_torch():
        weight = torch.ones(5)
        writer = dcp.FileSystemWriter(tmp_path / "x")
        future = dcp.async_save({"a": weight}, storage_writer=writer)
        weight.zero_()
        future.result()  # type: ignore[union-attr]
        assert holdfast.load(tmp_path / "x")["a"].sum() == 5
        again = pickle.loads(pickle.dumps(writer))
        dcp.save({"a": weight}, storage_writer=again)
        assert holdfast.load(tmp_path / "x")["a"].sum() == 0
