"""HSDP: shards within a group of ranks, replicas between groups; one writer for each shard, loads on any mesh.

Save on 4 ranks, resume on 2:

    torchrun --standalone --nproc-per-node 4 examples/hsdp.py checkpoints/a
    torchrun --standalone --nproc-per-node 2 examples/hsdp.py checkpoints/b --resume checkpoints/a
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from tiny_transformer import Transformer, arguments, batch, process_group, take_step


class Job:
    """All that the next step depends on."""

    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        self.model = Transformer()
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
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
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return [take_step(self.model, self.optimizer, batch(self.data_order, rank, ranks)) for _ in range(steps)]


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
        print(f"HSDP on 2 x {dist.get_world_size() // 2} ranks: the same losses after loading: {expected}")


if __name__ == "__main__":
    paths = arguments(__doc__)
    with process_group():
        main(*paths)
