"""A training job on any number of ranks, that saves as it goes, can be killed at any time, and resumes on other ranks.

``torchrun --standalone --nproc-per-node 4 examples/elastic_training.py CHECKPOINTS LOG`` trains a transformer with
FSDP2 and AdamW. It goes on from the newest step that can be loaded, however many ranks have saved it. Rank 0
writes each loss and each save as a line of JSON to LOG, and every rank its process id to LOG.RANK.pid. It never cleans
up after a crash, because nothing needs to be.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from fsdp2 import Job
from holdfast import CheckpointManager, Every, Latest
from tiny_transformer import process_group

STEPS = 20
STEPS_BETWEEN_SAVES = 4
WIDTH = 512
LAYERS = 1


def main(root: Path, log: Path) -> None:
    """Train to the end, from the newest step under ``root`` or from the start."""
    log.with_name(f"{log.name}.{dist.get_rank()}.pid").write_text(str(os.getpid()))
    job = Job(width=WIDTH, layers=LAYERS)
    state = job.state()
    is_first = dist.get_rank() == 0
    with (
        log.open("w", buffering=1) if is_first else open(os.devnull, "w") as lines,
        # Not in the background: the log has the time until a save is durable.
        CheckpointManager(
            root, save=Every(steps=STEPS_BETWEEN_SAVES), keep=Latest(3), asynchronous=False
        ) as checkpoints,
    ):
        resumed = checkpoints.resume(state)
        if resumed.report is not None:
            lines.write(json.dumps({"resumed": resumed.step, "seconds": resumed.report.seconds}) + "\n")
        for step in range((resumed.step or 0) + 1, STEPS + 1):
            (loss,) = job.train(1)
            lines.write(json.dumps({"step": step, "loss": loss}) + "\n")
            started = time.perf_counter()
            if checkpoints.save(step, state, metrics={"loss": loss}):
                lines.write(json.dumps({"saved": step, "seconds": time.perf_counter() - started}) + "\n")
            if checkpoints.should_stop(step):
                break


if __name__ == "__main__":
    with process_group():
        main(Path(sys.argv[1]), Path(sys.argv[2]))
