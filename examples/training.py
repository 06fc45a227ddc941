"""A training job that saves as it goes and can be killed at any time: the part to copy.

``python examples/training.py CHECKPOINTS LOG`` trains a small network on the CPU, saves everything that the next step
depends on every few steps, and resumes from the newest step that can be loaded. SIGTERM ends it at a step that is
saved. Each loss and each save is a line of JSON in LOG. It never cleans up after a crash, because nothing needs to be.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast

STEPS = 60
STEPS_BETWEEN_SAVES = 10
WIDTH = 2048
BATCH = 32
EXAMPLES = 2048
FEATURES = 64


@dataclass(slots=True, kw_only=True)
class Job:
    """All that the next step depends on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    data_order: torch.Generator

    def state(self) -> dict[str, Any]:
        """What goes into a checkpoint, and is filled from one: these objects stand for their state."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data_order": self.data_order,
            "rng": holdfast.Rng(),
        }


def new_job() -> Job:
    """A job at step 0, the same one every time."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.GELU(),
        nn.Dropout(0.1),  # draws from the global random state
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.GELU(),
        nn.Linear(2 * WIDTH, 1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    return Job(model=model, optimizer=optimizer, scheduler=scheduler, data_order=torch.Generator().manual_seed(11))


def synthetic_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a problem that a small network can learn."""
    source = torch.Generator().manual_seed(3)
    inputs = torch.randn(EXAMPLES, FEATURES, generator=source)
    hidden = torch.tanh(inputs @ torch.randn(FEATURES, 16, generator=source) / 4)
    return inputs, hidden @ torch.randn(16, 1, generator=source)


def train_step(job: Job, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """The loss of the next step, after taking it."""
    batch = torch.randint(EXAMPLES, (BATCH,), generator=job.data_order)
    loss = nn.functional.mse_loss(job.model(inputs[batch]), targets[batch])
    job.optimizer.zero_grad()
    loss.backward()
    job.optimizer.step()
    job.scheduler.step()
    return loss.item()


def main(root: Path, log: Path) -> None:
    """Train to the end, from the newest step under ``root`` or from the start."""
    job, data = new_job(), synthetic_data()
    state = job.state()
    save, keep = holdfast.Every(steps=STEPS_BETWEEN_SAVES), [holdfast.Latest(3)]
    with log.open("w", buffering=1) as lines, holdfast.CheckpointManager(root, save=save, keep=keep) as checkpoints:
        resumed = checkpoints.resume(state)
        if resumed.step is not None:
            lines.write(json.dumps({"resumed": resumed.step}) + "\n")
        for step in range((resumed.step or 0) + 1, STEPS + 1):
            loss = train_step(job, *data)
            lines.write(json.dumps({"step": step, "loss": loss}) + "\n")
            if checkpoints.save(step, state, metrics={"loss": loss}):
                lines.write(json.dumps({"saved": step}) + "\n")
            if checkpoints.should_stop(step):
                break


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
