"""Every layout into every other one: saved on 1, 2, 3, 4 and 6 real processes, loaded on 1, 2, 3, 4 and 6.

One save per world holds all layouts of that world, each with several uneven shapes. Each world then loads every one of
these checkpoints into each of its own layouts. What a rank must get is what torch gives it when it shards the truth
itself, so nothing of this library takes part in the comparison.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast

if TYPE_CHECKING:
    from tools.crew import Crew

WORLDS = (1, 2, 3, 4, 6)

R, S0, S1 = Replicate(), Shard(0), Shard(1)

Layout = tuple[tuple[int, ...], tuple[Placement, ...]]

LAYOUTS: Mapping[int, Mapping[str, Layout]] = {
    1: {"alone": ((1,), (S0,)), "alone-2d": ((1, 1), (S0, S1))},
    2: {
        "rows": ((2,), (S0,)),
        "columns": ((2,), (S1,)),
        "replicated": ((2,), (R,)),
        "submesh": ((1,), (S0,)),
    },
    3: {"rows": ((3,), (S0,)), "columns": ((3,), (S1,)), "submesh": ((2,), (S0,))},
    4: {
        "rows": ((4,), (S0,)),
        "columns": ((4,), (S1,)),
        "hsdp": ((2, 2), (R, S0)),
        "rows-replicated": ((2, 2), (S0, R)),
        "rows-rows": ((2, 2), (S0, S0)),
        "rows-columns": ((2, 2), (S0, S1)),
        "columns-rows": ((2, 2), (S1, S0)),
        "strided": ((2, 2), (_StridedShard(0, split_factor=2), S0)),
        "replicated": ((4,), (R,)),
        "submesh": ((3,), (S0,)),
    },
    6: {
        "rows": ((6,), (S0,)),
        "columns": ((6,), (S1,)),
        "hsdp": ((2, 3), (R, S0)),
        "rows-columns": ((3, 2), (S0, S1)),
        "rows-rows": ((3, 2), (S0, S0)),
        "strided": ((3, 2), (_StridedShard(0, split_factor=2), S0)),
        "strided-wide": ((2, 3), (_StridedShard(0, split_factor=3), S0)),
        "three": ((1, 3, 2), (R, S0, S1)),
        "three-strided": ((1, 3, 2), (R, _StridedShard(0, split_factor=2), S0)),
        "three-columns": ((2, 1, 3), (S1, R, S1)),
        "submesh-strided": ((2, 2), (_StridedShard(0, split_factor=2), S0)),
        "submesh-columns": ((5,), (S1,)),
    },
}

SHAPES: tuple[tuple[int, ...], ...] = ((13, 7), (1, 9), (5, 3, 4), (8, 2), (0, 4))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def keys_of(world: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{'x'.join(map(str, shape))}": shape for name in LAYOUTS[world] for shape in SHAPES}


def truth_of(world: int, key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor, the same in every process: random numbers of a dtype that depends on the key."""
    seed = zlib.crc32(f"{world}/{key}".encode())
    numbers = torch.randint(-(1 << 20), 1 << 20, shape, generator=torch.Generator().manual_seed(seed))
    dtype = DTYPES[seed % len(DTYPES)]
    return numbers % 2 == 0 if dtype is torch.bool else numbers.to(dtype)


@functools.cache
def mesh_of(shape: tuple[int, ...], task: int) -> DeviceMesh:
    """A mesh over the first ranks, one for all tensors of a task; process groups do not outlive their task."""
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape))


def sharded(truth: torch.Tensor, layout: Layout, task: int) -> DTensor:
    """``truth`` as torch lays it out; strided shards by redistribute, which gives them the order that FSDP2 means."""
    shape, placements = layout
    mesh = mesh_of(shape, task)
    strided = any(isinstance(placement, _StridedShard) for placement in placements)
    if not strided or mesh.get_coordinate() is None:
        return distribute_tensor(truth.clone(), mesh, placements, src_data_rank=None)
    whole = distribute_tensor(truth.clone(), mesh, [Replicate()] * len(shape), src_data_rank=None)
    return whole.redistribute(mesh, placements)


def save_all(world: int, directory: str, task: int) -> int:
    """Save every layout of a world in one checkpoint."""
    state = {
        name: {
            key: sharded(truth_of(world, key, shape), layout, task)
            for key, shape in keys_of(world).items()
            if key.startswith(f"{name}.")
        }
        for name, layout in LAYOUTS[world].items()
    }
    metadata = holdfast.save(state, f"{directory}/{world}")
    return len(metadata.state_dict_metadata)


def load_all(world: int, directory: str, task: int) -> tuple[int, int]:
    """Load the checkpoints of all worlds into every layout of this one; how many tensors were compared, and elements.

    The elements are those of this rank.
    """
    tensors = elements = 0
    for layout in LAYOUTS[world].values():
        for source in WORLDS:
            target: dict[str, dict[str, DTensor]] = {name: {} for name in LAYOUTS[source]}
            for key, shape in keys_of(source).items():
                zeros = torch.zeros_like(truth_of(source, key, shape))
                target[key.partition(".")[0]][key] = sharded(zeros, layout, task)
            holdfast.load(target, f"{directory}/{source}")
            for key, shape in keys_of(source).items():
                found = target[key.partition(".")[0]][key].to_local()
                expected = sharded(truth_of(source, key, shape), layout, task).to_local()
                assert torch.equal(found, expected), f"{key} of {source} ranks, into {layout} of {world}"
                tensors += 1
                elements += found.numel()
    return tensors, elements


@pytest.fixture(scope="module")
def checkpoints(pool: Crew, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("matrix")
    for world in WORLDS:
        counts = pool.run(world, save_all, world, str(directory), world)
        assert counts == [len(keys_of(world))] * world
    return directory


@pytest.mark.parametrize("world", WORLDS)
def test_every_layout_loads_into_every_layout(pool: Crew, checkpoints: Path, world: int) -> None:
    results = pool.run(world, load_all, world, str(checkpoints), 100 + world)
    stored = {source: keys_of(source) for source in WORLDS}
    pairs = len(LAYOUTS[world]) * sum(map(len, stored.values()))
    assert [tensors for tensors, _ in results] == [pairs] * world
    whole = sum(math.prod(shape) for keys in stored.values() for shape in keys.values())
    copies = sum(_copies(layout) for layout in LAYOUTS[world].values())
    assert sum(elements for _, elements in results) == copies * whole


def _copies(layout: Layout) -> int:
    """How many ranks hold each element."""
    shape, placements = layout
    return math.prod(size for size, placement in zip(shape, placements, strict=True) if placement.is_replicate())


def test_one_process_without_a_group_reads_what_any_world_wrote(checkpoints: Path) -> None:
    for world in WORLDS:
        everything = holdfast.load(checkpoints / str(world))
        for key, shape in keys_of(world).items():
            found = everything[key.partition(".")[0]][key]
            assert torch.equal(found, truth_of(world, key, shape)), key
