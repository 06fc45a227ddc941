"""What hostile checkpoints and full memories once did wrong: each stays fixed."""

from __future__ import annotations

import errno
import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import holdfast
from holdfast._state.tensors import empty_quantized, empty_tensor
from holdfast._torch_codec.pickles import deserialize_object
from holdfast._torch_format.file_systems import local_path
from holdfast.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.planner_helpers import check_tiling


def test_room_that_cannot_be_had_is_a_storage_error() -> None:
    for make in (
        lambda: empty_tensor((1 << 60,), torch.uint8),
        lambda: empty_tensor((1 << 59,), torch.complex32),
        lambda: empty_quantized(torch.Size([1 << 60]), torch.qint8, {"scale": 0.5, "zero_point": 0}),
    ):
        with pytest.raises(holdfast.StorageError, match="cannot allocate") as caught:
            make()
        assert caught.value.errno == errno.ENOMEM
        assert "\n" not in caught.value.message


def test_a_quantizer_that_torch_does_not_take_is_damage() -> None:
    quantizer = {"scheme": "per_tensor_affine", "scale": 0.5, "zero_point": 1 << 70}
    with pytest.raises(holdfast.CorruptError, match="quantizer"):
        empty_quantized(torch.Size([1]), torch.qint8, quantizer)


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


def test_values_that_cannot_be_had_are_damage() -> None:
    class Large:
        def __reduce__(self) -> Any:
            return bytearray, (1 << 62,)

    stream = io.BytesIO()
    torch.save(Large(), stream)
    stream.seek(0)
    with pytest.raises(holdfast.CorruptError, match="'step'"):
        deserialize_object(stream, key="step", allow_pickle=False)


@pytest.mark.filterwarnings("ignore")
def test_a_link_above_a_data_file_of_torchs_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    dcp_save({"w": torch.ones(3)}, storage_writer=FileSystemWriter(path), no_dist=True)
    (path / "folder").mkdir()
    assert local_path(path, "folder/x") == str(path / "folder" / "x")
    shutil.move(path / "folder", tmp_path / "outside")
    (path / "folder").symlink_to(tmp_path / "outside")
    for name in ("folder/x", "folder/deeper/x"):
        with pytest.raises(holdfast.CorruptError, match="link"):
            local_path(path, name)
