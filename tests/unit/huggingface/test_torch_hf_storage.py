"""Hugging Face storage under torch's names: its signatures, its files rank by rank, its blocks of eight bits."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import hf_storage as torch_hf
from torch.distributed.checkpoint import quantized_hf_storage as torch_quantized

import holdfast
from holdfast import CorruptError, LoadOptions, MismatchError
from holdfast.hf_storage import HuggingFaceStorageReader
from holdfast.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torture.hostile_folders import FIRST, SECOND, shards, write_notes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

Load = Callable[[dict[str, Any], Any], Any]
LOADS: list[Load] = [
    lambda state, reader: holdfast.load(state, storage_reader=reader, options=LoadOptions(cast=True)),
    lambda state, reader: dcp.load(state, storage_reader=reader),
]
BY = pytest.mark.parametrize("load", LOADS, ids=["holdfast", "torch"])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (HuggingFaceStorageReader, torch_hf.HuggingFaceStorageReader),
        (QuantizedHuggingFaceStorageReader, torch_quantized.QuantizedHuggingFaceStorageReader),
    ],
)
def test_every_parameter_of_torchs_reader_is_there(ours: Any, theirs: Any) -> None:
    mine, its = (
        [(each.name, each.default, each.kind) for each in inspect.signature(reader).parameters.values()]
        for reader in (ours, theirs)
    )
    assert mine[: len(its)] == its


def test_the_modules_and_classes_have_torchs_names() -> None:
    assert holdfast.hf_storage.HuggingFaceStorageReader is holdfast.HuggingFaceStorageReader
    assert issubclass(holdfast.QuantizedHuggingFaceStorageReader, holdfast.HuggingFaceStorageReader)


@BY
def test_a_folder_is_loaded_whoever_drives(tmp_path: Path, load: Load) -> None:
    truth = {"a": torch.randn(5, 3), "b": torch.arange(4), "half": torch.randn(7).bfloat16(), "zero": torch.tensor(2.5)}
    save_file(truth, tmp_path / "model.safetensors")
    target = {key: torch.zeros_like(tensor) for key, tensor in truth.items()}
    target["half"] = torch.zeros(7)
    load(target, HuggingFaceStorageReader(str(tmp_path)))
    assert all(torch.equal(target[key].to(tensor.dtype), tensor) for key, tensor in truth.items())


@BY
def test_what_is_no_floating_type_is_not_cast(tmp_path: Path, load: Load) -> None:
    save_file({"a": torch.tensor([300.0])}, tmp_path / "model.safetensors")
    target = {"a": torch.zeros(1, dtype=torch.int8)}
    with pytest.raises(
        (MismatchError, dcp.CheckpointException), match="'a' has dtype float32 in the checkpoint but int8"
    ):
        load(target, HuggingFaceStorageReader(str(tmp_path)))
    assert target["a"].tolist() == [0]


@BY
def test_files_rank_by_rank_as_torch_writes_them(tmp_path: Path, load: Load) -> None:
    truth = torch.arange(24.0).reshape(4, 6)
    parts = [(0, 0, 2, 4), (0, 4, 2, 2), (2, 0, 2, 6)]
    shards(tmp_path / "apart", [([row, column], [rows, columns], "F32") for row, column, rows, columns in parts])
    for number, (row, column, rows, columns) in enumerate(parts, 1):
        file = tmp_path / "apart" / f"shard-{number:05}-model-00001-of-00001.safetensors"
        data = file.read_bytes()
        part = truth[row : row + rows, column : column + columns].contiguous().numpy().tobytes()
        file.write_bytes(data[: len(data) - len(part)] + part)
    target = {"w": torch.zeros(4, 6)}
    load(target, HuggingFaceStorageReader(str(tmp_path / "apart")))
    assert torch.equal(target["w"], truth)
    with holdfast.open(tmp_path / "apart") as checkpoint:
        assert checkpoint["w"].chunks == 3
        assert torch.equal(checkpoint["w"][1:3, 3:5], truth[1:3, 3:5])


@pytest.mark.parametrize("is_distributed", [False, True])
def test_what_torchs_writer_writes(tmp_path: Path, is_distributed: bool) -> None:
    truth = {"a": torch.randn(5, 3), "b": torch.randn(4).bfloat16()}
    writer = torch_hf.HuggingFaceStorageWriter(
        str(tmp_path), save_distributed=is_distributed, fqn_to_index_mapping={"a": 1, "b": 2}
    )
    dcp.save(truth, storage_writer=writer)
    found = holdfast.read(tmp_path)
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in truth.items())


# Blocks of eight bits.

SHAPES = {"square.weight": (256, 256), "odd.weight": (300, 517), "small.weight": (3, 5), "flat.weight": (1, 1000)}


def in_blocks(folder: Path, *, block: int = 128, scales_apart: bool = True) -> dict[str, torch.Tensor]:
    """A folder of such weights; what is in it."""
    folder.mkdir()
    torch.manual_seed(5)
    weights, scales = {}, {}
    for key, shape in SHAPES.items():
        weights[key] = (torch.randn(shape) * 100).to(torch.float8_e4m3fn)
        blocks = [math.ceil(size / block) for size in shape]
        scales[key.replace(".weight", ".weight_scale_inv")] = torch.rand(blocks) * torch.rand(()) * 10
    weights["norm.weight"] = torch.randn(77).bfloat16()
    files = {FIRST: weights, SECOND: scales} if scales_apart else {FIRST: {**weights, **scales}}
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    index = {"weight_map": {key: name for name, tensors in files.items() for key in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {**weights, **scales}


def by_torch(folder: Path, into: torch.dtype, **options: Any) -> dict[str, torch.Tensor]:
    target = {key: torch.zeros(shape, dtype=into) for key, shape in {**SHAPES, "norm.weight": (77,)}.items()}
    reader = torch_quantized.QuantizedHuggingFaceStorageReader(str(folder), **options)
    dcp.load(target, storage_reader=reader)
    return target


@BY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
def test_blocks_become_the_numbers_that_torch_makes_of_them(
    tmp_path: Path, load: Load, dtype: torch.dtype, into: torch.dtype, bits: Callable[[torch.Tensor], bytes]
) -> None:
    in_blocks(tmp_path / "folder")
    truth = by_torch(tmp_path / "folder", into, target_dtype=dtype)
    target = {key: torch.zeros_like(tensor) for key, tensor in truth.items()}
    load(target, QuantizedHuggingFaceStorageReader(str(tmp_path / "folder"), target_dtype=dtype))
    for key, tensor in truth.items():
        assert bits(target[key]) == bits(tensor), key
        assert tensor.count_nonzero() > 0


def test_other_blocks_digests_strides_and_many_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_blocks(tmp_path / "folder", block=32, scales_apart=False)
    truth = by_torch(tmp_path / "folder", torch.float32, block_size=32)
    write_notes(tmp_path / "folder", rows=50)
    monkeypatch.setattr("holdfast.quantized_hf_storage._TILE_ELEMENTS", 7_001)
    target = {key: torch.zeros(tuple(reversed(tensor.shape))).t() for key, tensor in truth.items() if tensor.dim() == 2}
    reader = QuantizedHuggingFaceStorageReader(tmp_path / "folder", block_size=32)
    report = holdfast.load(target, storage_reader=reader)
    assert report.unexpected == ("norm.weight",), "factors have no keys"
    assert report.unchecked == ()
    assert all(torch.equal(tensor, truth[key]) for key, tensor in target.items())
    data = bytearray((tmp_path / "folder" / FIRST).read_bytes())
    data[-1] ^= 1
    (tmp_path / "folder" / FIRST).write_bytes(data)
    with pytest.raises(CorruptError):
        holdfast.load({key: torch.zeros_like(truth[key]) for key in SHAPES}, storage_reader=reader)


def test_factors_that_do_not_fit_are_told(tmp_path: Path) -> None:
    in_blocks(tmp_path / "folder", block=64)
    with pytest.raises(CorruptError, match="pass the block_size that it was stored with") as caught:
        holdfast.load({}, storage_reader=QuantizedHuggingFaceStorageReader(tmp_path / "folder"))
    assert caught.value.key == "flat.weight_scale_inv"
    with pytest.raises(ValueError, match="no way to store weights"):
        QuantizedHuggingFaceStorageReader(tmp_path, block_size=0)


def test_targets_of_another_shape_are_told_before_anything_is_touched(tmp_path: Path) -> None:
    in_blocks(tmp_path / "folder")
    target = {"odd.weight": torch.zeros(300, 518), "square.weight": torch.zeros(256, 256)}
    with pytest.raises(MismatchError):
        holdfast.load(target, storage_reader=QuantizedHuggingFaceStorageReader(tmp_path / "folder"))
    assert not target["square.weight"].any()
