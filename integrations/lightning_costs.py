"""What a save with Lightning costs: how long it blocks training, how many files it is, how much memory it takes."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from holdfast.integrations.lightning import HoldfastCallback, HoldfastIO


class Wide(LightningModule):
    """84 million parameters, which with AdamW's moments are 1 GB."""

    def __init__(self, shard: Callable[..., object] | None) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(5)))
        self.shard = shard

    def configure_model(self) -> None:
        if self.shard is not None:
            self.shard(self.network, self.device_mesh)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.network(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


def status_bytes(line: str) -> int:
    """A line of /proc/self/status, such as VmRSS or VmHWM, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(next(each for each in text.splitlines() if each.startswith(f"{line}:")).split()[1]) * 1024


class Measured(Callback):
    """Saves three times after the first step, and notes how long that took and how much memory."""

    def __init__(self, folder: Path, io: HoldfastIO | None) -> None:
        self.folder, self.io = folder, io
        self.blocked_s: list[float] = []
        self.peak = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        before = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        for number in range(3):
            dist.barrier()
            began = time.perf_counter()
            trainer.save_checkpoint(self.folder / f"{number}.ckpt")
            self.blocked_s.append(time.perf_counter() - began)
            if self.io is not None:
                self.io.wait()  # training goes on meanwhile
            dist.barrier()
        self.peak = status_bytes("VmHWM") - before


def measured(directory: Path, action: str, strategy_of: Callable[[str], Any], shard: Callable[..., object]) -> str:
    """How long a save of 1 GB blocks training, how many files it is, and how much memory it takes, as JSON."""
    world = int(os.environ["WORLD_SIZE"])
    kind = "sharded" if action.endswith("sharded") else "ddp"
    io = HoldfastIO(asynchronous="-sync" not in action) if "holdfast" in action else None
    plain = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    strategy = plain if kind == "sharded" and io is None else strategy_of(kind)
    seen = Measured(directory, io)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plugins = [] if io is None else [io]
    trainer = Trainer(accelerator="cpu", devices=world, strategy=strategy, plugins=plugins, max_steps=1,
                      callbacks=[seen, HoldfastCallback()], enable_checkpointing=False, **quiet)  # fmt: skip
    trainer.fit(
        Wide(shard if kind == "sharded" else None), torch.utils.data.DataLoader(torch.randn(8, 4096), batch_size=4)
    )
    peaks = [0] * world
    dist.all_gather_object(peaks, seen.peak)
    first = directory / "0.ckpt"
    files = [first] if first.is_file() else [path for path in first.rglob("*") if path.is_file()]
    nbytes = sum(path.stat().st_size for path in files)
    blocked_s = statistics.median(seen.blocked_s)
    result = {"blocked_s": round(blocked_s, 3), "files": len(files), "peak_rss_bytes": max(peaks), "bytes": nbytes}
    return json.dumps(result)
