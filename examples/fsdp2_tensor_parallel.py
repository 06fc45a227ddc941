"""FSDP2 and tensor parallelism: the linear layers are split over both dimensions of the mesh.

Save on 4 ranks, resume on 2:

    torchrun --standalone --nproc-per-node 4 examples/fsdp2_tensor_parallel.py checkpoints/a
    torchrun --standalone --nproc-per-node 2 examples/fsdp2_tensor_parallel.py checkpoints/b --resume checkpoints/a
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import holdfast
from tiny_transformer import Transformer, arguments, batch, process_group, take_step

TENSOR_PARALLEL = 2


class Job:
    """All that the next step depends on."""

    def __init__(self) -> None:
        shape = dist.get_world_size() // TENSOR_PARALLEL, TENSOR_PARALLEL
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
        plan |= {name: RowwiseParallel() for name in ("output", "down")}
        self.model = Transformer()
        for block in self.model.blocks:
            parallelize_module(block, self.mesh["tensor"], plan)
            fully_shard(block, mesh=self.mesh["data"])
        fully_shard(self.model, mesh=self.mesh["data"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.data_order = torch.Generator().manual_seed(11)

    def state(self) -> dict[str, Any]:
        """What goes into a checkpoint, under names that do not depend on the ranks."""
        return {"model": self.model, "optimizer": self.optimizer, "data_order": self.data_order}

    def load(self, path: Path) -> None:
        """Go on from the checkpoint at ``path``, whatever ranks have saved it; the optimizer needs no state yet."""
        holdfast.load(self.state(), path)

    def train(self, steps: int) -> list[float]:
        """The losses of the next steps."""
        part, parts = self.mesh["data"].get_local_rank(), self.mesh["data"].size()
        return [take_step(self.model, self.optimizer, batch(self.data_order, part, parts)) for _ in range(steps)]


def main(checkpoint: Path, resume: Path | None) -> None:
    """Train, or resume; save; go on; and go on from the checkpoint in the same way."""
    job = Job()
    if resume is None:
        job.train(5)
    else:
        job.load(resume)
    holdfast.save(job.state(), checkpoint)
    expected = job.train(3)

    job = Job()
    job.load(checkpoint)
    assert job.train(3) == expected, "the losses after loading are not those after saving"
    if dist.get_rank() == 0:
        parts = " x ".join(map(str, job.mesh.shape))
        print(f"FSDP2 x TP on {parts} ranks: the same losses after loading: {expected}")


if __name__ == "__main__":
    paths = arguments(__doc__)
    with process_group():
        main(*paths)
