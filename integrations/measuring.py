"""What saves cost a training: how long they block it, what they leave on disk, and how much memory they take."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

SAVES = 3


class Cost:
    """Measured by all ranks together. Memory counts from the first save on, above what was resident then."""

    def __init__(self) -> None:
        self.blocked_s: list[float] = []
        self._resident = 0

    @contextmanager
    def save(self) -> Iterator[None]:
        """Count the time from when all ranks come until all of them may train on."""
        dist.barrier()
        if not self.blocked_s:
            Path("/proc/self/clear_refs").write_text("5\n")  # forgets the peak of before
            self._resident = _status_bytes("VmRSS")
        begin = time.perf_counter()
        yield
        dist.barrier()
        self.blocked_s.append(time.perf_counter() - begin)

    def told(self, checkpoint: str) -> str:
        """The cost as JSON. ``files`` are what a resume needs to find, each published by itself."""
        peak = torch.tensor(_status_bytes("VmHWM") - self._resident)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        assert len(self.blocked_s) == SAVES, self.blocked_s
        cost = {
            "blocked_s": statistics.median(self.blocked_s),
            "files": published(checkpoint),
            "peak_rss_bytes": peak.item(),
        }
        return json.dumps({**cost, "blocked_s_each": self.blocked_s})


def published(checkpoint: str) -> int:
    """How many files of ``checkpoint`` are published by themselves; a native one is, as a whole, by its manifest."""
    path = Path(checkpoint)
    return 1 if (path / "manifest.json").exists() else sum(file.is_file() for file in path.rglob("*"))


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024
