"""What saves cost a training: how long they block it, what they leave on disk, and how much memory they take."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from holdfast import AsyncSave

SAVES = 3


class Cost:
    """Measured by all ranks together; ``finish`` returns when the save before is over.

    Memory is the peak of the process above what was resident before the first save: of the training with its saves,
    which is what a machine must have; and, of the first save alone, until it is over, while nobody trains. The other
    saves are for time: that of the call, and what the next step of the optimizer waits for the copy. Between two saves
    the training takes a step, which is a short one: see ``steps_s``.
    """

    def __init__(self, finish: Callable[[], object] = lambda: None) -> None:
        self._finish = finish
        self._blocked_s: list[float] = []
        self._steps_s: list[float] = []
        self._since = self._waited_s = 0.0
        self._resident = self._alone = 0
        mock.patch.object(AsyncSave, "fence", self.waiting(AsyncSave.fence)).start()

    def waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """``wait``, of which the time counts as blocked."""

        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = wait(*arguments)
            self._waited_s += time.perf_counter() - begin
            return result

        return timed

    @contextmanager
    def save(self) -> Iterator[None]:
        """Count the time from when all ranks come until all of them may train on."""
        self._end_step()
        self._finish()
        is_first = not self._blocked_s
        dist.barrier()
        if is_first:
            Path("/proc/self/clear_refs").write_text("5\n")  # forgets the peak of before
            self._resident = _status_bytes("VmRSS")
        begin = time.perf_counter()
        yield
        dist.barrier()
        self._blocked_s.append(time.perf_counter() - begin)
        if is_first:
            self._finish()
            self._alone = _status_bytes("VmHWM") - self._resident
        self._since, self._waited_s = time.perf_counter(), 0.0

    def _end_step(self) -> None:
        if self._blocked_s:
            self._blocked_s[-1] += self._waited_s
            self._steps_s.append(time.perf_counter() - self._since - self._waited_s)

    def told(self, checkpoint: str) -> str:
        """The cost as JSON. ``files`` are what a resume needs to find, each published by itself."""
        self._finish()
        assert len(self._blocked_s) == SAVES, self._blocked_s
        peak = _status_bytes("VmHWM") - self._resident
        most = torch.tensor([peak, self._alone, *self._blocked_s], dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        peak, alone, _, *blocked_s = most.tolist()
        cost = {
            "blocked_s": statistics.median(blocked_s),
            "files": published(checkpoint),
            "peak_rss_bytes": int(peak),
            "save_alone_bytes": int(alone),
            "steps_s": statistics.median(self._steps_s),
        }
        return json.dumps({**cost, "blocked_s_each": blocked_s})


def published(checkpoint: str) -> int:
    """How many files of ``checkpoint`` are published by themselves; a native one is, as a whole, by its manifest."""
    path = Path(checkpoint)
    if path.is_file() or (path / "manifest.json").exists():
        return 1
    return sum(file.is_file() for file in path.rglob("*"))


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024
