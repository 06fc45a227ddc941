"""After a save no rank holds a data file open: not its descriptor, not its lock, not its room on disk."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import holdfast
from holdfast._native.sweep import sweep

if TYPE_CHECKING:
    from tools.crew import Crew


def saving_twice(path: str) -> list[str]:
    rank = dist.get_rank()
    for _ in range(2):
        holdfast.save({f"own.{rank}": torch.ones(5000), "shared": torch.ones(9000)}, path)
    names = (os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _is_open(number))
    return [name for name in names if "safetensors" in name]


def _is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


def test_no_rank_keeps_a_data_file_open(pool: Crew, tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "checkpoint")
    assert pool.run(2, saving_twice, path) == [[], []]
    assert sweep(path).leftovers == ()
