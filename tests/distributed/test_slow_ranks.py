"""A rank whose own part takes longer than the deadline, and one that stands still."""

from __future__ import annotations

import io
import os
import pkgutil
import re
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import holdfast
from holdfast.errors import RankLostError
from holdfast.staging import BlockingAsyncStager

DEADLINE_S = 2.0
PARTS = 14


class SlowPlanner(holdfast.DefaultSavePlanner):
    """Takes its time over each of many tensors, so that bytes keep moving; or over just one."""

    def __init__(self, *, pause_s: float, at_once: bool) -> None:
        super().__init__()
        self._pause_s = pause_s
        self._at_once = at_once
        self._seen = 0

    def transform_object(self, write_item: holdfast.WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        self._seen += 1
        if not self._at_once or self._seen == 1:
            time.sleep(self._pause_s)  # the slowness itself, which is what is tested
        return super().transform_object(write_item, object)


def save_slowly(path: str, at_once: bool) -> str:
    rank = torch.distributed.get_rank()
    # Each of 17 MiB, so that a slab is written, and counted, for every tensor.
    state = {f"{rank}.{number}": torch.full((17 << 20,), number, dtype=torch.uint8) for number in range(PARTS)}
    slow = SlowPlanner(pause_s=DEADLINE_S * 3.5 if at_once else DEADLINE_S * 3.5 / PARTS, at_once=at_once)
    planner = slow if rank == 1 else holdfast.DefaultSavePlanner()
    try:
        holdfast.save(state, path, planner=planner, options=holdfast.SaveOptions(deadline_s=DEADLINE_S))
    except RankLostError as error:
        return str(error)
    return "saved"


def test_a_slow_rank_whose_bytes_move_is_waited_for(pool: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    assert pool.run(2, save_slowly, path, False, timeout_s=60) == ["saved", "saved"]
    assert len(holdfast.load(path)) == 2 * PARTS


def test_a_rank_that_stands_still_is_given_up_by_name(pool: Any, tmp_path: Path) -> None:
    said = pool.run(2, save_slowly, str(tmp_path / "checkpoint"), True, timeout_s=60)
    assert all("rank 1" in text and "no progress" in text for text in said)
    with pytest.raises(holdfast.NotFoundError):
        holdfast.load(str(tmp_path / "checkpoint"))


def save_while_another_fails(path: str) -> tuple[str, float]:
    """Rank 0 fails at once; rank 1 would be busy for ten seconds. What each was told, and after how long."""
    rank = torch.distributed.get_rank()
    state = {f"{rank}.{number}": torch.full((17 << 20,), number, dtype=torch.uint8) for number in range(20)}
    planner = SlowPlanner(pause_s=0.5, at_once=False) if rank == 1 else _FailingPlanner()
    started = time.monotonic()
    try:
        holdfast.save(state, path, planner=planner)
    except holdfast.CheckpointError as error:
        return str(error), time.monotonic() - started
    return "saved", time.monotonic() - started


class _FailingPlanner(holdfast.DefaultSavePlanner):
    def transform_object(self, write_item: holdfast.WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        raise ZeroDivisionError("odd")


def test_a_busy_rank_stops_soon_after_another_has_failed(pool: Any, tmp_path: Path) -> None:
    told = pool.run(2, save_while_another_fails, str(tmp_path / "checkpoint"), timeout_s=60)
    for message, seconds in told:
        assert message.startswith("rank 0: writing the checkpoint failed: ZeroDivisionError")
        assert seconds < 5  # far from the ten seconds that its own part takes


def async_save_while_another_fails(path: str, when: str) -> tuple[str, float]:
    """Rank 0 fails when it stages or writes; rank 1 would be busy with that for ten seconds. As above."""
    rank = torch.distributed.get_rank()
    state = {f"{rank}.{number}": torch.full((17 << 20,), number, dtype=torch.uint8) for number in range(10)}
    name = "holdfast._staging.copies.HostCopier._copy_part" if when == "staging" else "os.pwrite"
    call = pkgutil.resolve_name(name)
    in_turn = threading.Lock()

    def fail_or_be_slow(*arguments: Any) -> Any:
        if rank == 0:
            raise ZeroDivisionError("odd")
        with in_turn:
            time.sleep(0.5)  # the slowness itself, which is what is tested
        return call(*arguments)

    with mock.patch(name, fail_or_be_slow):
        started = time.monotonic()
        try:
            holdfast.async_save(state, path).result()
        except holdfast.CheckpointError as error:
            return str(error), time.monotonic() - started
    return "saved", time.monotonic() - started


@pytest.mark.parametrize("when", ["staging", "writing"])
def test_a_rank_busy_with_an_async_save_stops_soon_too(pool: Any, tmp_path: Path, when: str) -> None:
    phase = {"staging": "staging the state", "writing": "writing the checkpoint"}[when]
    for message, seconds in pool.run(2, async_save_while_another_fails, str(tmp_path / "one"), when, timeout_s=60):
        assert message == f"rank 0: {phase} failed: ZeroDivisionError: odd"
        assert seconds < 8  # of ten
    assert list((tmp_path / "one").glob("*")) == []


class _StandingStager(BlockingAsyncStager):
    def stage(self, state_dict: Any) -> Any:
        time.sleep(5)  # the hang itself, longer than the deadline, which is longer than two beats
        return super().stage(state_dict)


def stage_for_too_long(path: str) -> str:
    """The stager of rank 1 takes longer than the deadline: what each rank is told."""
    rank = torch.distributed.get_rank()
    stager = _StandingStager() if rank == 1 else BlockingAsyncStager()
    try:
        holdfast.async_save({f"of rank {rank}": torch.ones(9)}, path, async_stager=stager, deadline_s=2.5).result()
    except holdfast.CheckpointError as error:
        return str(error)
    return "saved"


def test_a_stager_that_others_give_up_is_named_with_what_to_raise(pool: Any, tmp_path: Path) -> None:
    said = pool.run(2, stage_for_too_long, str(tmp_path / "checkpoint"), timeout_s=60)
    assert set(said) == {
        "rank 1 made no progress for 2.5 s in 'staging the state with _StandingStager'; "
        "look at what it hangs on, or allow more with deadline_s"
    }


def fail_to_prepare(path: str, when: str) -> str:
    """Rank 1 fails between planning and writing: what each rank is told."""
    rank = torch.distributed.get_rank()
    planner = _UnpreparedPlanner(when) if rank == 1 else holdfast.DefaultSavePlanner()
    try:
        holdfast.async_save({f"of rank {rank}": torch.ones(9)}, path, planner=planner).result()
    except holdfast.CheckpointError as error:
        return str(error)
    return "saved"


class _UnpreparedPlanner(holdfast.DefaultSavePlanner):
    def __init__(self, when: str) -> None:
        super().__init__()
        self._when = when

    def finish_plan(self, new_plan: holdfast.SavePlan) -> holdfast.SavePlan:
        if self._when == "finish_plan":
            raise ZeroDivisionError("odd")
        return super().finish_plan(new_plan)

    def transform_object(self, write_item: holdfast.WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        if self._when == "resolve":
            raise ZeroDivisionError("odd")
        return super().transform_object(write_item, object)


@pytest.mark.parametrize("when", ["finish_plan", "resolve"])
def test_what_fails_between_planning_and_writing_is_the_same_on_every_rank(
    pool: Any, tmp_path: Path, when: str
) -> None:
    said = pool.run(2, fail_to_prepare, str(tmp_path / "checkpoint"), when)
    assert said == ["rank 1: laying out the state failed: ZeroDivisionError: odd"] * 2


SHORT_S = 1.5


def hang_in_a_call(path: str, operation: str) -> str:
    """Rank 1 hangs in its fourth write to, or read from, a file: what it is told, once the call is over."""
    rank = torch.distributed.get_rank()
    state = {f"{rank}.{number}": torch.full((17 << 20,), number, dtype=torch.uint8) for number in range(4)}
    name = "preadv" if operation == "load" else "pwrite"
    call, calls = getattr(os, name), 0

    def hang(*arguments: Any) -> Any:
        nonlocal calls
        calls += len(arguments) == 3  # probes of the page cache have flags too
        if calls == 4:
            calls += 1
            time.sleep(2 * SHORT_S)
        return call(*arguments)

    with mock.patch(f"os.{name}", hang if rank == 1 else call):
        try:
            if operation == "save":
                holdfast.save(state, path, options=holdfast.SaveOptions(deadline_s=SHORT_S))
            elif operation == "async_save":
                holdfast.async_save(state, path, deadline_s=SHORT_S).result()
            else:
                holdfast.load(state, path, options=holdfast.LoadOptions(deadline_s=SHORT_S))
        except RankLostError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("operation", ["save", "async_save", "load"])
def test_the_error_of_a_hang_tells_rank_file_and_bytes(pool: Any, tmp_path: Path, operation: str) -> None:
    path = str(tmp_path / "checkpoint")
    if operation == "load":
        holdfast.save(
            {f"{rank}.{n}": torch.zeros(17 << 20, dtype=torch.uint8) for rank in (0, 1) for n in range(4)}, path
        )
    said = pool.run(2, hang_in_a_call, path, operation, timeout_s=60)
    phase = "reading the checkpoint" if operation == "load" else "writing the checkpoint"
    told = re.fullmatch(
        rf"rank 1 made no progress for 1.5 s in '{phase}' \(([\d,]+) bytes done, at '(data-.*\.safetensors)'\); .*",
        said[0],
    )
    assert told is not None, said
    assert int(told[1].replace(",", "")) > 0
    assert said[1] == said[0]
    if operation == "load":
        assert told[2] in os.listdir(path)
    else:
        assert re.fullmatch(r"data-\w+-1-0\.safetensors", told[2])
