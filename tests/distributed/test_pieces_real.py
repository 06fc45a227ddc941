"""What real gloo processes hold of the tensors that torch shards for them.

They shard numbered tensors with FSDP2, tensor parallelism, redistribute and distribute_tensor, and each compares its
pieces with the whole and all of them with the placements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast

if TYPE_CHECKING:
    from tools.crew import Crew

WORLD = 6


def test_pieces_of_real_processes_agree_with_the_whole(pool: Crew) -> None:
    # A check that was skipped everywhere would pass: each process says how many layouts it compared.
    assert set(pool.run(WORLD, check_all)) == {len(list(checks(WORLD)))}


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(tuple(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of the tensor that this process holds, and its elements."""

    box: tuple[slice, ...]
    tensor: torch.Tensor


def pieces_of(tensor: torch.Tensor) -> list[Piece]:
    """What a planner finds that this process holds of ``tensor``."""
    planner = holdfast.DefaultSavePlanner()
    planner.set_up_planner({"weight": tensor})
    plan = planner.finish_plan(planner.create_local_plan())
    found = []
    for item in plan.items:
        assert item.tensor_data is not None
        assert item.tensor_data.size == tensor.shape
        assert item.tensor_data.properties.requires_grad is tensor.requires_grad
        chunk = item.tensor_data.chunk
        box = tuple(slice(low, low + length) for low, length in zip(chunk.offsets, chunk.sizes, strict=True))
        data = planner.resolve_data(item)
        assert isinstance(data, torch.Tensor)
        assert data.shape == chunk.sizes
        found.append(Piece(box=box, tensor=data))
    return found


def check_held(name: str, truth: torch.Tensor, held: list[Piece]) -> None:
    """Fail, naming the layout, unless the pieces are right here and hold each element equally often over all ranks."""
    holders = torch.zeros_like(truth)
    for piece in held:
        assert torch.equal(piece.tensor, truth[piece.box]), f"{name}: wrong values in {piece.box}"
        holders[piece.box] += 1
    dist.all_reduce(holders)
    assert holders.min() >= 1, f"{name}: elements that nobody holds"
    assert holders.min() == holders.max(), f"{name}: elements held more often than others"


def mesh_of(shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """A mesh over the first ranks; the others are outside it."""
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).view(tuple(shape)), mesh_dim_names=tuple(names))


def check_placements(shape: Sequence[int], placements: Sequence[Placement], size: Sequence[int]) -> None:
    truth = numbered(size)
    mesh = mesh_of(shape, "abc"[: len(shape)])
    name = f"{tuple(placements)} on {tuple(shape)} of {tuple(size)}"
    if len(shape) < 3:  # of three, the local length cannot always tell whether torch split at once or in order
        at_once = distribute_tensor(truth.clone(), mesh, placements, src_data_rank=None)
        check_held(f"distribute_tensor {name}", truth, pieces_of(at_once))
    if mesh.get_coordinate() is not None:
        replicated = distribute_tensor(truth.clone(), mesh, [Replicate()] * len(shape))
        redistributed = replicated.redistribute(mesh, placements)
        held = pieces_of(redistributed)
        assert torch.equal(redistributed.full_tensor(), truth), name
    else:
        held = []
    check_held(f"redistribute {name}", truth, held)


def check_model(shape: Sequence[int], names: Sequence[str], rows: int, *, rowwise: bool) -> None:
    """FSDP2 (HSDP with three dimensions) over tensor parallelism of one linear layer."""
    truth = numbered((rows, 12))
    mesh = mesh_of(shape, names)
    held: list[Piece] = []
    if mesh.get_coordinate() is not None:
        layer = torch.nn.Linear(12, rows, bias=False)
        with torch.no_grad():
            layer.weight.copy_(truth)
        if "tp" in names:
            parallelize_module(layer, mesh["tp"], RowwiseParallel() if rowwise else ColwiseParallel())
        data_parallel = tuple(name for name in names if name != "tp")
        fully_shard(layer, mesh=mesh[data_parallel])
        assert layer.weight.requires_grad
        held = pieces_of(layer.weight)
    check_held(f"fully_shard {names} {tuple(shape)} rows {rows} rowwise {rowwise}", truth, held)


Layout = tuple[tuple[int, ...], list[Placement], tuple[int, int]]

LAYOUTS: list[Layout] = [
    *(
        (shape, [_StridedShard(0, split_factor=shape[1]), Shard(0)], (rows, columns))
        for shape, rows in [((3, 2), 13), ((2, 3), 13), ((2, 3), 10), ((2, 2), 7), ((3, 2), 1)]
        for columns in (1, 5)
    ),
    ((6,), [Shard(0)], (13, 7)),
    ((4,), [Shard(1)], (13, 7)),
    ((3, 2), [Shard(0), Shard(0)], (13, 7)),
    ((2, 3), [Shard(1), Shard(0)], (13, 7)),
    ((3, 2), [Replicate(), Shard(1)], (13, 7)),
    ((1, 3, 2), [Shard(0), _StridedShard(1, split_factor=2), Shard(1)], (13, 7)),
    ((2, 2, 2), [_StridedShard(0, split_factor=2), Replicate(), Shard(0)], (13, 7)),
    ((2, 2, 2), [Shard(1), Shard(0), Shard(0)], (13, 7)),
    ((2, 2, 2), [_StridedShard(0, split_factor=4), Shard(0), Shard(0)], (13, 7)),
    ((2, 2, 2), [_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)], (13, 7)),
]

MODELS: list[tuple[tuple[int, ...], tuple[str, ...]]] = [
    ((6,), ("dp",)),
    ((3, 2), ("dp", "tp")),
    ((2, 3), ("dp", "tp")),
    ((3, 2), ("replicate", "shard")),
    ((2, 2, 2), ("replicate", "shard", "tp")),
]


def checks(world: int) -> Iterator[Callable[[], None]]:
    """One check for every layout whose mesh fits into ``world`` processes."""
    for shape, placements, size in LAYOUTS:
        if math.prod(shape) <= world:
            yield partial(check_placements, shape, placements, size)
    for (mesh_shape, names), rows, rowwise in itertools.product(MODELS, (12, 13, 5), (False, True)):
        if math.prod(mesh_shape) <= world:
            yield partial(check_model, mesh_shape, names, rows, rowwise=rowwise)


def check_all() -> int:
    """How many layouts were compared."""
    return sum(check() is None for check in checks(dist.get_world_size()))
