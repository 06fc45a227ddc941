"""The bytes of native checkpoints stay what they are: 20 layouts on 1, 4 and 8 ranks, against digests that are kept.

A change that is meant to change no format changes none of these. Where one is meant to, write them anew and say why:

    HOLDFAST_WRITE_DIGESTS=1 python -m pytest tests/distributed/test_same_bytes.py
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast

if TYPE_CHECKING:
    from tools.crew import Crew

DIGESTS = Path(__file__).parents[1] / "compat" / "data" / "same_bytes.json"
ATTEMPT = "same"
# What a manifest says of the versions that wrote it, and the digest over that.
VERSIONS = rb'"writer":\{[^}]*\},|,"digest":"[0-9a-f]{16}"\}$'

State = dict[Any, Any]


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 251).to(dtype).view(shape)


def line() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(dist.get_world_size()))


def grid() -> DeviceMesh:
    """Two columns; one where there is but one rank."""
    return DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(-1, min(2, dist.get_world_size())))


def placed(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def plain() -> State:
    return {"step": 7, "weight": numbered(30, 50), "bias": numbered(50, dtype=torch.bfloat16)}


def large_replicas() -> State:
    return {f"layer.{number}": numbered(1 << 20, 6, dtype=torch.uint8) for number in range(3)} | {"small": numbered(3)}


def many_small() -> State:
    return {f"layer.{number}": {"weight": numbered(number % 7 + 1, 3)} for number in range(200)}


def values() -> State:
    return {"int": 2**70, "float": 0.1, "none": None, "text": "☃", "list": [1, (2, "x")], 5: {"deep": {True: b"\0"}}}


def arrays() -> State:
    return {"f8": np.linspace(0, 1, 5), "big-endian": np.arange(3, dtype=">u2"), "0-d": np.array(7)}


def dtypes() -> State:
    kinds = (torch.float64, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64, torch.uint16)
    return {str(kind): numbered(4, 6, dtype=torch.uint8).to(kind) for kind in kinds}


def empty() -> State:
    return {"none": numbered(0, 3), "dict": {}, "list": [], "sharded": placed(numbered(0, 4), line(), Shard(0))}


def tied() -> State:
    weight = placed(numbered(12, 5), line(), Shard(0))
    same = numbered(4, 4)
    return {"embedding": weight, "head": weight, "a": same, "b": same, "c": same.view(16)}


def rows() -> State:
    return {f"p{number}": placed(numbered(16, number + 2), line(), Shard(0)) for number in range(6)}


def uneven_rows() -> State:
    return {"thirteen": placed(numbered(13, 5), line(), Shard(0)), "two": placed(numbered(2, 3), line(), Shard(0))}


def columns() -> State:
    return {"even": placed(numbered(6, 16), line(), Shard(1)), "uneven": placed(numbered(3, 17), line(), Shard(1))}


def replicated() -> State:
    return {"same": placed(numbered(600, 50), line(), Replicate()), "scalar": placed(numbered(), line(), Replicate())}


def hybrid() -> State:
    return {
        "hsdp": placed(numbered(9, 6), grid(), Replicate(), Shard(0)),
        "turned": placed(numbered(9, 6), grid(), Shard(1), Replicate()),
    }


def two_dimensions() -> State:
    return {"tp": placed(numbered(10, 12), grid(), Shard(0), Shard(1)), "same": numbered(5)}


def strided() -> State:
    return {"rows": placed(numbered(24, 2), grid(), _StridedShard(0, split_factor=grid().shape[1]), Shard(0))}


def half_of_the_ranks() -> State:
    half = DeviceMesh("cpu", torch.arange(max(1, dist.get_world_size() // 2)))
    return {"half": placed(numbered(8, 3), half, Shard(0)), "all": numbered(4)}


def own_keys() -> State:
    rank = dist.get_rank()
    return {f"own.{rank}": numbered(rank + 1, 4), "common": numbered(100, 10), f"rank.{rank}": rank}


def sharded_tensors() -> State:
    rank, world = dist.get_rank(), dist.get_world_size()
    piece = LocalShard.from_tensor_and_offsets(numbered(3, 4), [3 * rank, 0], rank)
    return {"sharded": init_from_local_shards([piece], 3 * world, 4), "plain": numbered(7)}


def odd_ties() -> State:
    """Keys that are tied on some ranks only."""
    weight = numbered(8, 8)
    return {"a": weight, "b": weight if dist.get_rank() % 2 == 0 else weight.clone()}


def training() -> State:
    """A model and its optimizer after a step; the numbers are then set, because processors round differently."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    moments = [moment for state in optimizer.state.values() for moment in state.values()]
    with torch.no_grad():
        for tensor in (*model.parameters(), *moments):
            tensor.copy_(numbered(*tensor.shape))
    return {"model": model, "optimizer": optimizer, "step": 1}


LAYOUTS: list[Callable[[], State]] = [
    plain, large_replicas, many_small, values, arrays, dtypes, empty, tied, rows, uneven_rows, columns, replicated,
    hybrid, two_dimensions, strided, half_of_the_ranks, own_keys, sharded_tensors, odd_ties, training,
]  # fmt: skip


class OwnPlans(holdfast.DefaultSavePlanner):
    """Makes plans as a planner of somebody else does: ranks send them whole."""

    def create_local_plan(self) -> holdfast.SavePlan:
        return super().create_local_plan()


def save_all(directory: str) -> None:
    """Every layout three times: with no planner, again, as it then is planned before, and with a planner."""
    for layout in LAYOUTS:
        state = layout()
        for name in ("first", "again", "planner"):
            planner = OwnPlans() if name == "planner" else None
            writer = holdfast.NativeWriter(f"{directory}/{layout.__name__}/{name}", attempt=ATTEMPT)
            holdfast.save(state, storage_writer=writer, planner=planner)


def digests(folder: Path) -> dict[str, str]:
    """One digest of each checkpoint: of the names and the bytes of all its files."""
    found = {}
    for checkpoint in sorted(folder.iterdir()):
        whole = hashlib.sha256()
        for file in sorted(file for file in checkpoint.rglob("*") if file.is_file()):
            data = re.sub(VERSIONS, b"", file.read_bytes()) if file.name == "manifest.json" else file.read_bytes()
            whole.update(repr((str(file.relative_to(checkpoint)), data)).encode())
        found[checkpoint.name] = whole.hexdigest()[:16]
    return found


@pytest.mark.parametrize("world", [1, 4, 8])
def test_the_files_of_every_layout_are_what_they_were(pool: Crew, tmp_path: Path, world: int) -> None:
    pool.run(world, save_all, str(tmp_path))
    found = {layout.__name__: digests(tmp_path / layout.__name__) for layout in LAYOUTS}
    kept = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    if os.environ.get("HOLDFAST_WRITE_DIGESTS"):
        DIGESTS.write_text(json.dumps({**kept, str(world): found}, indent=1, sort_keys=True) + "\n")
        return
    assert [name for name, files in found.items() if files != kept[str(world)].get(name)] == []
