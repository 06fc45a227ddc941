"""Two ranks that share a GPU and a host load what both want: read once, passed on through pinned memory."""

from __future__ import annotations

import multiprocessing
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast

pytestmark = pytest.mark.gpu

RANKS = 2
SHAPES = {"large": (4096, 4099), "small": (37, 11), "half": (2048, 1024)}


def truth_of(key: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(key.encode()))
    whole = torch.randn(SHAPES[key], generator=generator)
    return whole.to(torch.bfloat16) if key == "half" else whole


def rank_of_two(rank: int, port: int, path: str, results: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.cuda.init()
    state = {key: truth_of(key).cuda() for key in SHAPES}
    holdfast.save(state, path)
    read = []
    for transpose in (False, True):
        # Once as it lies in the file, once into memory with other strides.
        target = {
            key: torch.zeros_like(tensor.t()).t() if transpose else torch.zeros_like(tensor)
            for key, tensor in state.items()
        }
        report = holdfast.load(target, path)
        assert all(torch.equal(target[key], state[key]) for key in SHAPES)
        read.append(report.bytes_read)
    dist.barrier()
    dist.destroy_process_group()
    results.put((rank, read))


def test_two_ranks_on_one_gpu_read_every_byte_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    arguments = (server.port, str(tmp_path / "step"), results)
    processes = [context.Process(target=rank_of_two, args=(rank, *arguments)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 150
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    assert [process.exitcode for process in processes] == [0] * RANKS
    read = dict(results.get(timeout=300) for _ in range(RANKS))
    total = sum(truth_of(key).nbytes for key in SHAPES)
    for number in range(2):
        both = read[0][number] + read[1][number]
        assert total <= both <= total + 64 * 4096
