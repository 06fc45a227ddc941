"""A training job on any number of ranks, that saves as it goes, can be killed at any time, and resumes on other ranks.

``torchrun --standalone --nproc-per-node 4 examples/elastic_training.py CHECKPOINTS LOG`` trains a transformer with
FSDP2 and AdamW. It goes on from the newest whole checkpoint when there is one, however many ranks have saved it. Rank 0
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

import holdfast
from fsdp2 import Job
from tiny_transformer import process_group
from training import newest_whole_checkpoint

STEPS = 30
STEPS_BETWEEN_SAVES = 5
WIDTH = 512
LAYERS = 1


def main(root: Path, log: Path) -> None:
    """Train to the end, from the newest whole checkpoint under ``root`` or from the start."""
    log.with_name(f"{log.name}.{dist.get_rank()}.pid").write_text(str(os.getpid()))
    job, step = Job(width=WIDTH, layers=LAYERS), 0
    is_first = dist.get_rank() == 0
    with log.open("w", buffering=1) if is_first else open(os.devnull, "w") as lines:
        newest = newest_whole_checkpoint(root)
        if newest is not None:
            started = time.perf_counter()
            job.load(newest)
            step = int(newest.name.removeprefix("step-"))
            lines.write(json.dumps({"resumed": step, "seconds": time.perf_counter() - started}) + "\n")
        while step < STEPS:
            (loss,) = job.train(1)
            step += 1
            lines.write(json.dumps({"step": step, "loss": loss}) + "\n")
            if step % STEPS_BETWEEN_SAVES == 0:
                started = time.perf_counter()
                holdfast.save(job.state(), root / f"step-{step:06d}")
                lines.write(json.dumps({"saved": step, "seconds": time.perf_counter() - started}) + "\n")


if __name__ == "__main__":
    with process_group():
        main(Path(sys.argv[1]), Path(sys.argv[2]))
