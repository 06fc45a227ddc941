"""Exports from any sharding: what safetensors reads in the folder is what the state was, to the bit."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast
from holdfast import hf
from holdfast.hf_storage import HuggingFaceStorageWriter

if TYPE_CHECKING:
    from tools.crew import Crew

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
LAYOUTS: Mapping[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows": ((4,), (S0,)),
    "columns": ((4,), (S1,)),
    "rows and columns": ((2, 2), (S0, S1)),
    "strided": ((2, 2), (_StridedShard(0, split_factor=2), S0)),
    "copies of columns": ((2, 2), (R, S1)),
    "replicated": ((4,), (R,)),
}
SHAPES = ((1024, 512), (13, 7), (5, 1), (1, 130), (700, 333), (3, 4100))


def truth() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        f"{number}.{name}": torch.randn(shape, generator=generator).to(dtype)
        for number, (shape, dtype) in enumerate(zip(SHAPES, [torch.bfloat16, torch.float32] * 3, strict=True))
        for name in LAYOUTS
        if name != "strided" or shape[0] % 4 == 0  # as torch has them
    }
    tensors["experts"] = torch.randn(6, 40, 90, generator=generator)
    tensors["scale"] = torch.tensor(2.5)
    tensors["steps"] = torch.arange(11)
    tensors["empty"] = torch.empty(0, 4)
    return tensors


def sharded() -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for key, tensor in truth().items():
        name = key.partition(".")[2]
        if name in LAYOUTS:
            shape, placements = LAYOUTS[name]
            mesh = DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape))
            state[key] = distribute_tensor(tensor, mesh, placements)
        elif key == "experts":
            state[key] = distribute_tensor(tensor, DeviceMesh("cpu", torch.arange(4)), [S2])
        else:
            state[key] = tensor
    return state


def export_on_rank(path: str, asynchronous: bool, options: dict[str, object]) -> None:
    if asynchronous:
        hf.async_export(sharded(), path, **options).result()  # type: ignore[arg-type]
    else:
        hf.export(sharded(), path, **options)  # type: ignore[arg-type]


def save_by_torchs_name(path: str, driver: str) -> None:
    state = sharded()
    files = {key: 1 + number % 3 for number, key in enumerate(state)}
    writer = HuggingFaceStorageWriter(path, files, save_distributed=True, enable_consolidation=True)
    if driver == "torch":
        rows = {key: tensor for key, tensor in state.items() if key.endswith((".rows", "steps"))}
        dcp.save(rows, storage_writer=writer)  # type: ignore[arg-type]  # ours is not torch's class
    else:
        holdfast.save(state, storage_writer=writer)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """What safetensors finds in the files that the index names."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        found |= load_file(folder / name)
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_folder_holds_what_the_ranks_have(pool: Crew, tmp_path: Path, asynchronous: bool) -> None:
    folder = tmp_path / "model"
    options = {"options": hf.ExportOptions(shard_bytes=3_000_000)}
    pool.run(4, export_on_rank, str(folder), asynchronous, options)
    found, expected = stored(folder), truth()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert sorted(os.listdir(tmp_path)) == ["model"]


def test_a_dtype_is_rounded_alike_wherever_a_tensor_is(pool: Crew, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    pool.run(4, export_on_rank, str(folder), False, {"dtype": torch.bfloat16})
    found = stored(folder)
    for key, tensor in truth().items():
        assert torch.equal(found[key], tensor.bfloat16() if tensor.is_floating_point() else tensor), key


def test_an_export_over_another_keeps_what_is_no_weights(pool: Crew, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"old")
    with pytest.raises(Exception, match=r"AlreadyPublishedError: .* is not empty"):
        pool.run(4, export_on_rank, str(folder), False, {})
    assert sorted(os.listdir(folder)) == ["config.json", "pytorch_model.bin"]
    pool.run(4, export_on_rank, str(folder), False, {"overwrite": True})
    assert sorted(os.listdir(folder)) == [
        "config.json",
        "holdfast.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ]
    assert sorted(os.listdir(tmp_path)) == ["model"]


@pytest.mark.parametrize("driver", ["holdfast", "torch"])
def test_the_writer_under_torchs_name_makes_the_files_that_it_is_told(pool: Crew, tmp_path: Path, driver: str) -> None:
    folder = tmp_path / "model"
    pool.run(4, save_by_torchs_name, str(folder), driver)
    found, expected = stored(folder), truth()
    assert len(found) > 6
    assert len(found) == len(expected) or driver == "torch"
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
    assert len(list(folder.glob("model-0000?-of-00003.safetensors"))) == 3
