"""What hostile checkpoints and full memories once did wrong: each stays fixed."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import holdfast
from holdfast.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.planner_helpers import check_tiling


@pytest.mark.parametrize("kind", ["missing", "cut", "directory"])
def test_all_files_are_looked_at_before_there_is_room_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Also one that holds nothing but a tensor of no elements."""
    monkeypatch.setattr("holdfast._native.packer.DataFile.takes", lambda file, chunk: not file.entries)
    path = tmp_path / "checkpoint"
    holdfast.save({"weight": torch.ones(5), "empty": torch.zeros(0, 2)}, path)
    file = min(path.glob("data-*"), key=lambda each: each.stat().st_size)
    file.unlink() if kind != "cut" else os.truncate(file, 100)
    if kind == "directory":
        file.mkdir()
    monkeypatch.setattr("holdfast._loader.empty_state", lambda *args: pytest.fail("there is room already"))
    with pytest.raises(holdfast.CorruptError) as caught:
        holdfast.load(path)
    assert caught.value.path == str(file)


def test_keys_in_whole_files_can_be_loaded_beside_lost_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast._native.packer.DataFile.takes", lambda file, chunk: not file.entries)
    path = tmp_path / "checkpoint"
    holdfast.save({"a": torch.ones(5), "b": torch.ones(5000)}, path)
    max(path.glob("data-*"), key=lambda each: each.stat().st_size).unlink()
    target = {"a": torch.zeros(5)}
    holdfast.load(target, path)
    assert target["a"].tolist() == [1] * 5


def test_the_widest_tensor_may_have_no_chunks() -> None:
    properties = TensorProperties(torch.float32)
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
    entries: dict[str, Any] = {
        "wide": TensorStorageMetadata(properties, torch.Size([4, 6]), []),
        "flat": TensorStorageMetadata(properties, torch.Size([3]), [chunk]),
    }
    with pytest.raises(holdfast.CorruptError, match="'wide'"):
        check_tiling(Metadata(entries, storage_meta=StorageMeta()))


class Large:
    def __reduce__(self) -> Any:
        return bytearray, (1 << 62,)


@pytest.mark.filterwarnings("ignore")
def test_values_that_cannot_be_had_are_damage(tmp_path: Path) -> None:
    dcp_save({"step": Large()}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    with pytest.raises(holdfast.CorruptError, match="'step'"):
        holdfast.load(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_a_link_above_a_data_file_of_torchs_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    dcp_save({"w": torch.ones(3)}, storage_writer=FileSystemWriter(path), no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    file = info.relative_path
    for folder in ("folder", "folder/deeper"):
        (path / folder).mkdir()
        shutil.copy(path / file, path / folder)
    os.unlink(path / file)

    def name_in(folder: str) -> None:
        info.relative_path = f"{folder}/{file}"
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    for folder in ("folder", "folder/deeper"):
        name_in(folder)
        assert holdfast.load(path)["w"].tolist() == [1.0] * 3
    shutil.move(path / "folder", tmp_path / "outside")
    (path / "folder").symlink_to(tmp_path / "outside")
    for folder in ("folder", "folder/deeper"):
        name_in(folder)
        with pytest.raises(holdfast.CorruptError, match="link"):
            holdfast.load(path)
