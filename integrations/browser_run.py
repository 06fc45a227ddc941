"""What the browser is shown: a run that four ranks have trained, and checkpoints that are large or hostile."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import fsdp2
import holdfast
import tiny_transformer

STEPS_BETWEEN_SAVES = 10
HOSTILE_KEYS = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "\"'`${alert(3)}",
    "line\nbreak\ttab\x00\x1b[31m",
    "\u202egnp.exe",
    "__proto__",
    "a" * 3000,
    "",
)


def train(root: Path, saves: int) -> list[float]:
    """Train on these ranks, and save ``saves`` steps at ``root``; the losses, one of each save."""
    job = fsdp2.Job(width=256, layers=4)
    options = holdfast.SaveOptions(statistics=True)
    every = holdfast.Every(steps=STEPS_BETWEEN_SAVES)
    root.mkdir(exist_ok=True)
    # The pages Run and Ranks show how long saves took, where somebody has kept that.
    times = holdfast.events.jsonl(root / f"events-{dist.get_rank()}.jsonl")
    losses = []
    with (
        holdfast.CheckpointManager(root, save=every, asynchronous=False, options=options) as manager,
        holdfast.events.subscribe(times),
    ):
        for step in range(STEPS_BETWEEN_SAVES, (saves + 1) * STEPS_BETWEEN_SAVES, STEPS_BETWEEN_SAVES):
            losses.append(float(np.mean(job.train(STEPS_BETWEEN_SAVES))))
            state = {
                **job.state(),
                "vocabulary": tiny_transformer.VOCABULARY,
                "learning_rate_schedule": ("constant", 3e-3),
            }
            metrics = {"loss": losses[-1], "tokens": step * tiny_transformer.SEQUENCES * tiny_transformer.LENGTH}
            manager.save(step, state, metrics=metrics, user_metadata={"experiment": "tiny transformer, FSDP2, AdamW"})
            manager.should_stop(step)
    return losses


def save_tensors(path: Path, tensors: int) -> None:
    """A checkpoint of so many small tensors, as a model with many layers has them."""
    one = torch.zeros(4)
    state = {f"model.layers.{at // 500}.experts.{at % 500 // 5}.part_{at % 5}": one + at for at in range(tensors)}
    holdfast.save(state, path, no_dist=True)


def save_hostile(path: Path) -> None:
    """A checkpoint whose keys and values want to be taken for more than text."""
    state = {key: torch.randn(3, 4) for key in HOSTILE_KEYS}
    values = {f"value {number}": key for number, key in enumerate(HOSTILE_KEYS)}
    holdfast.save(
        {"model": state, "values": values, "odd": torch.tensor([float("nan"), float("inf"), 0.0, 1.0])},
        path,
        no_dist=True,
    )
