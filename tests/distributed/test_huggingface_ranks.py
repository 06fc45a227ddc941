"""Hugging Face folders on real ranks: any layout gets its part, and what several want is read once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from outside_views import page_cache
from safetensors.torch import save_file
from torch.distributed.checkpoint import hf_storage as torch_hf
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast
from holdfast import LoadOptions
from torture.hostile_folders import FIRST, SECOND, flip_last, write_folder, write_notes

if TYPE_CHECKING:
    from tools.crew import Crew

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS: dict[int, dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]]] = {
    1: {"alone": ((1,), (S0,))},
    2: {"rows": ((2,), (S0,)), "columns": ((2,), (S1,)), "replicated": ((2,), (R,))},
    4: {
        "rows": ((4,), (S0,)),
        "columns": ((4,), (S1,)),
        "both": ((2, 2), (S0, S1)),
        "hybrid": ((2, 2), (R, S0)),
        "strided": ((2, 2), (_StridedShard(0, split_factor=2), S0)),
        "replicated": ((4,), (R,)),
    },
}
SHAPES = {"uneven": (1031, 513), "few": (3, 7), "one row": (1, 300), "large": (1500, 1000), "nothing": (0, 4)}
DTYPES = {"uneven": torch.float32, "few": torch.int64, "one row": torch.float8_e4m3fn, "large": torch.bfloat16}


def truth_of(key: str) -> torch.Tensor:
    shape, dtype = SHAPES[key], DTYPES.get(key, torch.float32)
    numbers = torch.arange(math.prod(shape)) % 251 + len(key)
    return numbers.reshape(shape).to(torch.float32).to(dtype)


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def laid_out(tensor: torch.Tensor, layout: tuple[tuple[int, ...], tuple[Placement, ...]]) -> DTensor:
    shape, placements = layout
    mesh = DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape))
    whole = words(tensor) if tensor.dtype.itemsize == 1 else tensor  # which torch cannot move for all dtypes
    made = distribute_tensor(whole, mesh, list(placements), src_data_rank=None)
    if made.dtype == tensor.dtype:
        return made
    local = made.to_local().view(tensor.dtype)
    return DTensor.from_local(local, mesh, placements, shape=tensor.shape, stride=tensor.stride(), run_check=False)


def loads_into_every_layout(folders: list[str]) -> int:
    """How many pieces were right, whatever the layout, the page cache and the sharing."""
    right = 0
    for layout in LAYOUTS[dist.get_world_size()].values():
        for number, folder in enumerate(folders):
            target: dict[str, Any] = {
                key: laid_out(torch.zeros(SHAPES[key], dtype=truth_of(key).dtype), layout) for key in SHAPES
            }
            target["plain"] = torch.zeros(3)
            target["meta"] = torch.empty(5, 2, device="meta")
            with page_cache(is_full=bool(number % 2)):
                report = holdfast.load(target, folder, options=LoadOptions(share="host" if number < 2 else "off"))
            assert set(report.loaded) == set(target)
            for key in SHAPES:
                found, expected = target[key].to_local(), laid_out(truth_of(key), layout).to_local()
                assert torch.equal(words(found), words(expected)), (key, layout)
                right += 1
            assert target["plain"].tolist() == [1, 2, 3]
            assert target["meta"].sum() == 10
    return right


def make_folder(path: Path, *, pad: int, has_notes: bool) -> str:
    others = {"plain": torch.tensor([1.0, 2, 3]), "meta": torch.ones(5, 2)}
    keys = list(SHAPES)
    first, second = ({key: truth_of(key) for key in half} for half in (keys[:2], keys[2:]))
    write_folder(path, {FIRST: first, SECOND: {**others, **second}}, pad=pad)
    if has_notes:
        write_notes(path, rows=100)
    return str(path)


@pytest.mark.parametrize("world", LAYOUTS)
def test_any_layout_gets_its_part(pool: Crew, tmp_path: Path, world: int) -> None:
    folders = [
        make_folder(tmp_path / f"{pad}-{has_notes}", pad=pad, has_notes=has_notes)
        for has_notes in (False, True)
        for pad in (0, 1)
    ]
    assert set(pool.run(world, loads_into_every_layout, folders)) == {len(LAYOUTS[world]) * 4 * len(SHAPES)}


def reads_of_replicated(folder: str) -> tuple[int, int]:
    """The bytes that this rank read, with sharing and without."""
    read = []
    for share in ("host", "off"):
        target = {"w": torch.zeros(3000, 1000), "v": torch.zeros(999, 1111)}
        with page_cache(is_full=False):
            report = holdfast.load(target, folder, options=LoadOptions(share=share))  # type: ignore[arg-type]
        assert torch.equal(target["w"], torch.arange(3_000_000.0).view(3000, 1000))
        read.append(report.bytes_read)
    return read[0], read[1]


@pytest.mark.parametrize("has_notes", [False, True])
def test_what_four_ranks_want_is_read_once(pool: Crew, tmp_path: Path, has_notes: bool) -> None:
    tensors = {"w": torch.arange(3_000_000.0).view(3000, 1000), "v": torch.ones(999, 1111)}
    write_folder(tmp_path, {FIRST: tensors}, pad=3)
    if has_notes:
        write_notes(tmp_path)
    size = (tmp_path / FIRST).stat().st_size
    read = pool.run(4, reads_of_replicated, str(tmp_path))
    assert size * 0.99 < sum(once for once, _ in read) < size * 1.1
    assert sum(each for _, each in read) > 3.9 * size


def reads_of_rows(folder: str) -> int:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    target = {"w": distribute_tensor(torch.zeros(3000, 1000), mesh, [S0], src_data_rank=None)}
    with page_cache(is_full=False):
        report = holdfast.load(target, folder)
    assert torch.equal(target["w"].full_tensor(), torch.arange(3_000_000.0).view(3000, 1000))
    return report.bytes_read


def test_rows_without_digests_are_read_to_the_byte(pool: Crew, tmp_path: Path) -> None:
    write_folder(tmp_path, {FIRST: {"w": torch.arange(3_000_000.0).view(3000, 1000)}}, pad=3)
    own = 1500 * 1000 * 4
    assert all(own <= read <= own + 8192 for read in pool.run(2, reads_of_rows, str(tmp_path))), (
        "whole pages, no blocks"
    )


def damaged_load(folder: str) -> str:
    try:
        holdfast.load({"w": torch.zeros(1000, 1000)}, folder)
    except holdfast.CorruptError as error:
        return f"{error.key} {Path(error.path or '').name}"
    return "nothing"


def test_damage_is_told_on_every_rank(pool: Crew, tmp_path: Path) -> None:
    write_folder(tmp_path, {FIRST: {"w": torch.ones(1000, 1000)}})
    write_notes(tmp_path)
    flip_last(tmp_path / FIRST)
    assert pool.run(2, damaged_load, str(tmp_path)) == [f"w {FIRST}"] * 2
    (tmp_path / FIRST).write_bytes(b"garbage!!" * 3)
    assert pool.run(2, damaged_load, str(tmp_path)) == [f"None {FIRST}"] * 2


def saved_by_torch_rank_by_rank(folder: str) -> bool:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    truth = {"rows": torch.randn(10, 6, generator=torch.Generator().manual_seed(1))}
    truth["columns"] = truth["rows"] + 5
    state: dict[str, Any] = {
        "rows": distribute_tensor(truth["rows"], mesh, [S0], src_data_rank=None),
        "columns": distribute_tensor(truth["columns"], mesh, [S1], src_data_rank=None),
    }
    writer = torch_hf.HuggingFaceStorageWriter(folder, save_distributed=True)
    torch_save(state, storage_writer=writer)
    target: dict[str, Any] = {
        "rows": distribute_tensor(torch.zeros(10, 6), mesh, [S1], src_data_rank=None),
        "columns": torch.zeros(10, 6),
    }
    holdfast.load(target, storage_reader=holdfast.HuggingFaceStorageReader(folder))
    return torch.equal(target["rows"].full_tensor(), truth["rows"]) and torch.equal(target["columns"], truth["columns"])


def test_what_torch_wrote_rank_by_rank(pool: Crew, tmp_path: Path) -> None:
    assert pool.run(2, saved_by_torch_rank_by_rank, str(tmp_path / "torchs")) == [True, True]


def blocks_into_columns(folder: str) -> tuple[bool, int]:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    reader = holdfast.QuantizedHuggingFaceStorageReader(folder, target_dtype=torch.bfloat16)
    alone = {"x.weight": torch.zeros(700, 900, dtype=torch.bfloat16)}
    holdfast.load(alone, storage_reader=reader, no_dist=True)
    target: dict[str, Any] = {
        "x.weight": distribute_tensor(torch.zeros(700, 900, dtype=torch.bfloat16), mesh, [S1], src_data_rank=None)
    }
    with page_cache(is_full=False):
        report = holdfast.load(target, storage_reader=reader)
    part = distribute_tensor(alone["x.weight"], mesh, [S1], src_data_rank=None).to_local()
    return torch.equal(target["x.weight"].to_local(), part) and bool(part.any()), report.bytes_read


def test_blocks_of_eight_bits_into_columns(pool: Crew, tmp_path: Path) -> None:
    weight = torch.randn(700, 900).to(torch.float8_e4m3fn)
    tensors = {"x.weight": weight, "x.weight_scale_inv": torch.rand(6, 8)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = pool.run(2, blocks_into_columns, str(tmp_path))
    assert [is_right for is_right, _ in found] == [True, True]
    assert sum(read for _, read in found) < 1.1 * weight.numel(), "each rank reads what no other one does"
