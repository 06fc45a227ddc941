"""The crew of rank processes itself: results by rank, failures with every traceback, deaths and hangs replaced."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from tools.crew import Crew


def sum_of_ranks(offset: int) -> tuple[int, int, float]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), float(total)


def process_of_rank() -> int:
    return os.getpid()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} was told to")


def kill_self(rank: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def hang_while_another_fails() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["hanging"])
        raise ValueError("rank 1 was told to")
    store.set("hanging", "")
    threading.Event().wait()


def threads_of_parent() -> int:
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
def test_results_come_by_rank(pool: Crew, world: int) -> None:
    total = float(sum(range(world)) + 10 * world)
    assert pool.run(world, sum_of_ranks, 10) == [(rank, world, total) for rank in range(world)]


def test_workers_are_used_again(pool: Crew) -> None:
    first = pool.run(2, process_of_rank)
    assert pool.run(2, process_of_rank) == first
    assert len(set(first)) == 2
    assert os.getpid() not in first


def test_the_fork_server_has_one_thread(pool: Crew) -> None:
    assert pool.run(1, threads_of_parent) == [1]


def test_a_failure_shows_the_traceback_of_its_rank_and_the_pool_goes_on(pool: Crew) -> None:
    with pytest.raises(AssertionError, match=r"(?s)failed on ranks \[1\].*rank 1 of 2.*ValueError: rank 1 was told to"):
        pool.run(2, fail_on, 1)
    assert len(pool.run(2, process_of_rank)) == 2


def test_a_death_is_reported_and_replaced(pool: Crew) -> None:
    before = pool.run(2, process_of_rank)
    with pytest.raises(AssertionError, match="rank 1 of 2:\nthe process died, exit code -9"):
        pool.run(2, kill_self, 1)
    assert not set(before) & set(pool.run(2, process_of_rank))


def test_a_death_that_is_expected_is_no_failure(pool: Crew) -> None:
    assert pool.run(3, kill_self, 2, dies=[2]) == ["alive", "alive", None]


def test_a_hang_shows_where(pool: Crew) -> None:
    with pytest.raises(AssertionError, match=r"(?s)did not return within its time.*in hang.*rank 1 was told to"):
        pool.run(2, hang_while_another_fails, after_failure_s=0.1)
    assert len(pool.run(1, process_of_rank)) == 1
