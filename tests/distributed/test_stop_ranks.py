"""All ranks of a run stop at one step, whichever of them is asked to, and whatever the others do then."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import CheckpointManager, Every, StopOn

if TYPE_CHECKING:
    from tools.crew import Crew

WORLD = 4
TIMEOUT_S = 300.0


def manager(root: str, **options: Any) -> CheckpointManager:
    stop = StopOn(signals=("SIGTERM",), file=os.path.join(root, "STOP"))
    return CheckpointManager(root, **{"save": Every(steps=1000), "stop": stop, **options})


def train(checkpoints: CheckpointManager, step: int, together: bool = True) -> bool:
    """One step; whether to stop after it."""
    weight = torch.full((3,), float(step))
    if together:
        dist.all_reduce(weight)
    checkpoints.save(step, {"weight": weight, "step": step})
    return checkpoints.should_stop(step)


def ask_one(root: str, asked: int, together: bool, stride: int) -> int:
    """The step at which this rank stopped; one of them was sent a signal, or the file was made."""
    with manager(root) as checkpoints:
        for step in itertools.count(step=stride):
            if step == 4 * stride and dist.get_rank() == max(asked, 0):
                if asked < 0:
                    Path(root, "STOP").touch()
                else:
                    os.kill(os.getpid(), signal.SIGTERM)
            if train(checkpoints, step, together):
                assert checkpoints.stop_requested()
                return step
    raise AssertionError


@pytest.mark.parametrize(
    ("asked", "together", "stride"), [(0, True, 1), (2, True, 7), (3, False, 1), (-1, True, 1), (-1, False, 3)]
)
def test_who_is_asked_makes_all_stop_at_one_step(
    tmp_path: Path, pool: Crew, asked: int, together: bool, stride: int
) -> None:
    steps = pool.run(WORLD, ask_one, str(tmp_path), asked, together, stride, timeout_s=TIMEOUT_S)
    assert len(set(steps)) == 1, steps
    found = holdfast.Steps(tmp_path).latest()
    assert found is not None
    assert found.step == steps[0]
    assert holdfast.load(found.path)["step"] == steps[0]


def messages_of_idle_steps(root: str) -> int:
    """How many messages this rank sent in a hundred steps at which nothing was due."""
    with manager(root, save=Every(steps=10**9, seconds=10**6)) as checkpoints:
        train(checkpoints, 0)
        dist.barrier()
        with mock.patch("holdfast._ranks.connections.Connections.post") as post:
            for step in range(1, 101):
                assert not train(checkpoints, step, together=False)
            dist.barrier()
        return post.call_count


def test_steps_at_which_nothing_is_due_send_nothing(tmp_path: Path, pool: Crew) -> None:
    assert pool.run(2, messages_of_idle_steps, str(tmp_path), timeout_s=TIMEOUT_S) == [0, 0]


def stop_at_a_save(root: str) -> int:
    """The step at which this rank stopped; all were asked to within one that was being saved."""
    with manager(root, save=Every(steps=5)) as checkpoints:
        for step in itertools.count(1):
            checkpoints.save(step, {"weight": torch.zeros(3)})
            if step == 10:
                os.kill(os.getpid(), signal.SIGTERM)
            dist.barrier()
            if checkpoints.should_stop(step):
                return step
    raise AssertionError


def test_a_stop_within_a_step_that_is_saved_saves_no_step_twice(tmp_path: Path, pool: Crew) -> None:
    steps = pool.run(WORLD, stop_at_a_save, str(tmp_path), timeout_s=TIMEOUT_S)
    assert len(set(steps)) == 1
    last = steps[0]
    assert last >= 10
    assert {step.step for step in holdfast.Steps(tmp_path).steps()} == {*range(5, last, 5), last}


def evaluate(root: str, asked: int) -> tuple[int, bool]:
    """The step at which this rank stopped, and whether an endless evaluation ended by what another rank was told."""
    with manager(root) as checkpoints:
        train(checkpoints, 0)
        if dist.get_rank() == asked:
            os.kill(os.getpid(), signal.SIGTERM)
        pause = threading.Event()
        while not checkpoints.stop_requested():
            pause.wait(0.001)
        for step in itertools.count(1):
            if train(checkpoints, step):
                return step, checkpoints.stop_requested()
    raise AssertionError


def test_an_evaluation_on_every_rank_hears_of_the_stop(tmp_path: Path, pool: Crew) -> None:
    assert pool.run(WORLD, evaluate, str(tmp_path), 3, timeout_s=TIMEOUT_S) == [(1, True)] * WORLD


def run_twice(root: str) -> list[int]:
    """The steps at which two runs stopped, one after the other, in the same processes and directory."""
    return [ask_one(root, asked, True, 1) for asked in (1, 2)]


def test_the_next_run_of_the_same_processes_stops_too(tmp_path: Path, pool: Crew) -> None:
    steps = pool.run(WORLD, run_twice, str(tmp_path), timeout_s=TIMEOUT_S)
    assert all(each == steps[0] for each in steps)


def stop_in_one_group(root: str) -> int:
    """The step at which this rank stopped; every two ranks are a run of their own, and one of them is asked."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    with manager(f"{root}/{rank // 2}", process_group=groups[rank // 2]) as checkpoints:
        for step in range(50) if rank < 2 else itertools.count():
            if step == 5 and rank == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            dist.barrier(groups[rank // 2])
            checkpoints.save(step, {"weight": torch.zeros(3)})
            if checkpoints.should_stop(step):
                break
    return step


def test_a_stop_is_that_of_one_group(tmp_path: Path, pool: Crew) -> None:
    steps = pool.run(WORLD, stop_in_one_group, str(tmp_path), timeout_s=TIMEOUT_S)
    assert steps[:2] == [49, 49]
    assert steps[2] == steps[3] >= 5  # the other one may hear of it before it begins the step


def stop_without_a_rank(root: str) -> str:
    """What a rank raises that is asked to stop when another one has died."""
    with manager(root, save=Every(steps=1_000_000)) as checkpoints:
        train(checkpoints, 0)
        if dist.get_rank() == 2:
            os._exit(0)
        try:
            for step in itertools.count(1):
                if step == 5 and dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                train(checkpoints, step, together=False)
                threading.Event().wait(0.001)
        except holdfast.RankLostError as error:
            return str(error)
    raise AssertionError


def test_a_rank_that_died_is_named_to_those_who_would_stop(tmp_path: Path, pool: Crew) -> None:
    told = pool.run(WORLD, stop_without_a_rank, str(tmp_path), timeout_s=TIMEOUT_S, dies=[2])
    assert told[2] is None
    assert all("rank 2" in error for rank, error in enumerate(told) if rank != 2), told
