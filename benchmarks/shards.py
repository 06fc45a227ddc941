"""The large state on several ranks, as DTensors or replicated: each makes its part of the same values by itself.

The values come from a seed and the global shapes alone, so what a rank should hold after a load is known whoever wrote
the checkpoint. Nothing here communicates, saves or loads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from states import Shapes, State, empty_state


def sharded_state(shapes: Shapes, mesh: DeviceMesh, *, dim: int | None, seed: int = 0) -> State:
    """This rank's DTensors of random bits; the global values depend on ``shapes`` and ``seed`` only.

    Without a ``dim`` to split by, every rank has whole, plain tensors, as with data parallelism.
    """
    if dim is None:
        return {key: full.clone() for key, full in _full_tensors(shapes, seed)}
    return {
        key: _distributed(_part_of(full, mesh, dim).clone(memory_format=torch.contiguous_format), full, mesh, dim)
        for key, full in _full_tensors(shapes, seed)
    }


def sharded_target(shapes: Shapes, mesh: DeviceMesh, *, dim: int | None) -> State:
    """The same for a load: zeroed, so that its memory is resident before the clock starts."""
    if dim is None:
        return empty_state(shapes)
    target: State = {}
    for key, shape in shapes.items():
        full = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        part = _part_of(full, mesh, dim)
        target[key] = _distributed(torch.zeros(part.shape, dtype=part.dtype), full, mesh, dim)
    return target


def local_parts(state: State) -> State:
    """The plain tensors of this rank under the DTensors of ``state``, sharing their memory."""
    return {key: tensor.to_local() if isinstance(tensor, DTensor) else tensor for key, tensor in state.items()}


def _full_tensors(shapes: Shapes, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Each whole tensor in turn, in memory that the next one overwrites: no rank ever holds the whole state."""
    generator = torch.Generator().manual_seed(seed)
    scratch = torch.empty(max(torch.Size(shape).numel() for shape in shapes.values()), dtype=torch.bfloat16)
    for key, shape in shapes.items():
        full = scratch[: torch.Size(shape).numel()].view(shape)
        full.view(torch.int16).random_(generator=generator)
        yield key, full


def _part_of(full: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    dim = _sharded_dim(full, dim)
    length = full.shape[dim]
    longest = -(-length // mesh.size())
    start = min(mesh.get_local_rank() * longest, length)
    return full.narrow(dim, start, min(longest, length - start))


def _distributed(part: torch.Tensor, full: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    placements = [Shard(_sharded_dim(full, dim))]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def _sharded_dim(full: torch.Tensor, dim: int) -> int:
    """A vector has only its one dimension to be split by."""
    return min(dim, full.ndim - 1)
