"""What the browser is shown: a run that four ranks have trained, and checkpoints that are large or hostile."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch

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
    # Kept where this version of the library can: the page Dynamics shows them.
    kept = (
        {"statistics": True} if "statistics" in {each.name for each in dataclasses.fields(holdfast.SaveOptions)} else {}
    )
    losses = []
    every = holdfast.Every(steps=STEPS_BETWEEN_SAVES)
    options = holdfast.SaveOptions(**kept)
    with holdfast.CheckpointManager(root, save=every, asynchronous=False, options=options) as manager:
        manager.resume(job.state())
        for _ in range(saves):
            losses.append(float(np.mean(job.train(STEPS_BETWEEN_SAVES))))
            step = len(losses) * STEPS_BETWEEN_SAVES
            norm = float(sum(p.grad.full_tensor().norm() ** 2 for p in job.model.parameters()) ** 0.5)
            state = {
                **job.state(),
                "sequences_seen": step * tiny_transformer.SEQUENCES,
                "vocabulary": tiny_transformer.VOCABULARY,
            }
            manager.save(
                step,
                state,
                metrics={"loss": losses[-1], "gradient_norm": norm},
                user_metadata={"experiment": "tiny transformer, FSDP2, AdamW"},
            )
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
