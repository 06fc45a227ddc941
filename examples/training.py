"""A training job that saves as it goes and can be killed at any time: the part to copy.

``python examples/training.py CHECKPOINTS LOG`` trains a small network on the CPU, saves everything that the next step
depends on every few steps, and resumes from the newest whole checkpoint when there is one. Each loss and each save is
a line of JSON in LOG. It never cleans up after a crash, because nothing needs to be.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
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
    step: int = 0

    def state(self) -> dict[str, Any]:
        """What goes into a checkpoint; modules and optimizers stand for their state_dict."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "random": {"torch": torch.get_rng_state(), "data_order": self.data_order.get_state()},
            "step": self.step,
        }

    def take_over(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, as if nothing had happened in between."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"]["torch"])
        self.data_order.set_state(state["random"]["data_order"])
        self.step = state["step"]


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


def newest_whole_checkpoint(root: Path) -> Path | None:
    """The last step that was published and has all its files. A save that was cut short is simply not found."""
    steps = [found for found in root.glob("step-*") if found.name.removeprefix("step-").isdecimal()]
    for directory in sorted(steps, reverse=True):
        try:
            if holdfast.verify(directory, level="sizes").ok:
                return directory
        except (holdfast.NotFoundError, holdfast.CorruptError):
            continue
    return None


def train(job: Job) -> Iterator[float]:
    """The loss of each step that is left, after taking it."""
    inputs, targets = synthetic_data()
    while job.step < STEPS:
        batch = torch.randint(EXAMPLES, (BATCH,), generator=job.data_order)
        loss = nn.functional.mse_loss(job.model(inputs[batch]), targets[batch])
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        job.scheduler.step()
        job.step += 1
        yield loss.item()


def main(root: Path, log: Path) -> None:
    """Train to the end, from the newest whole checkpoint under ``root`` or from the start."""
    job = new_job()
    with log.open("w", buffering=1) as lines:
        newest = newest_whole_checkpoint(root)
        if newest is not None:
            started = time.perf_counter()
            job.take_over(holdfast.load(newest))
            lines.write(json.dumps({"resumed": job.step, "seconds": time.perf_counter() - started}) + "\n")
        for loss in train(job):
            lines.write(json.dumps({"step": job.step, "loss": loss}) + "\n")
            if job.step % STEPS_BETWEEN_SAVES == 0:
                started = time.perf_counter()
                holdfast.save(job.state(), root / f"step-{job.step:06d}")
                lines.write(json.dumps({"saved": job.step, "seconds": time.perf_counter() - started}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
