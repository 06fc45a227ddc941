"""A rank whose own part takes longer than the deadline, and one that stands still."""

from __future__ import annotations

import io
import itertools
import os
import pkgutil
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import holdfast
from holdfast.staging import BlockingAsyncStager

DEADLINE_S = 6.0
PARTS = 14


def state_of(rank: int, parts: int | None = None) -> dict[str, Any]:
    """Tensors of 17 MiB each, so that a slab is written, and counted, for every one; rank 1 has many."""
    parts = parts or (PARTS if rank == 1 else 1)
    return {f"{rank}.{number}": torch.full((17 << 20,), number, dtype=torch.uint8) for number in range(parts)}


class GivenUp:
    """A file that one rank makes once it was told of an error, and the one that stands still waits for."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).with_name("given up")

    def wait(self, *_: object) -> None:
        while not self._file.exists():
            time.sleep(0.01)

    def told_by(self, action: Callable[[], object]) -> str:
        """What the error of ``action`` says."""
        try:
            action()
        except holdfast.CheckpointError as error:
            self._file.touch()
            return str(error)
        return "no error"


class PausingPlanner(holdfast.DefaultSavePlanner):
    """Does something before each tensor that it is asked for, and counts them."""

    def __init__(self, pause: Callable[[], object]) -> None:
        super().__init__()
        self._pause = pause
        self.seen = 0

    def transform_object(self, write_item: holdfast.WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        self.seen += 1
        self._pause()
        return super().transform_object(write_item, object)


def save_slowly(path: str) -> None:
    rank = torch.distributed.get_rank()
    # Longer than the deadline in all, and each tensor far shorter.
    pause_s = 1.2 * DEADLINE_S / PARTS if rank == 1 else 0.0
    planner = PausingPlanner(lambda: time.sleep(pause_s))
    holdfast.save(state_of(rank), path, planner=planner, options=holdfast.SaveOptions(deadline_s=DEADLINE_S))


def stand_still(path: str) -> str:
    given_up, rank = GivenUp(path), torch.distributed.get_rank()
    planner = PausingPlanner(given_up.wait) if rank == 1 else None
    state, options = {f"of {rank}": torch.ones(9)}, holdfast.SaveOptions(deadline_s=4.0)
    return given_up.told_by(lambda: holdfast.save(state, path, planner=planner, options=options))


def test_a_slow_rank_whose_bytes_move_is_waited_for(pool: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    pool.run(2, save_slowly, path)
    assert len(holdfast.load(path)) == PARTS + 1


def test_a_rank_that_stands_still_is_given_up_by_name(pool: Any, tmp_path: Path) -> None:
    said = pool.run(2, stand_still, str(tmp_path / "checkpoint"))
    assert all("rank 1" in text and "no progress" in text for text in said)
    with pytest.raises(holdfast.NotFoundError):
        holdfast.load(str(tmp_path / "checkpoint"))


def save_while_another_fails(path: str) -> tuple[str, int]:
    """Rank 0 fails at once; rank 1 is slow. What each was told, and how many tensors it had been asked for."""
    rank = torch.distributed.get_rank()
    planner = PausingPlanner((lambda: time.sleep(2.0)) if rank == 1 else _fail)
    return GivenUp(path).told_by(lambda: holdfast.save(state_of(rank), path, planner=planner)), planner.seen


def _fail() -> None:
    raise ZeroDivisionError("odd")


def test_a_busy_rank_stops_soon_after_another_has_failed(pool: Any, tmp_path: Path) -> None:
    told = pool.run(2, save_while_another_fails, str(tmp_path / "checkpoint"))
    for message, seen in told:
        assert message.startswith("rank 0: writing the checkpoint failed: ZeroDivisionError")
        assert seen < PARTS


def async_save_while_another_fails(path: str, when: str) -> tuple[str, int]:
    """Rank 0 fails when it stages or writes; rank 1 is slow at that. What each was told, and how often it was at it."""
    rank = torch.distributed.get_rank()
    name = "holdfast._staging.copies.HostCopier._copy_pieces" if when == "staging" else "os.pwrite"
    call = pkgutil.resolve_name(name)
    in_turn, seen = threading.Lock(), itertools.count()

    def fail_or_be_slow(*arguments: Any) -> Any:
        if rank == 0:
            _fail()
        with in_turn:
            next(seen)
            time.sleep(2.0)  # the slowness itself, which is what is tested
        return call(*arguments)

    with mock.patch(name, fail_or_be_slow):
        return GivenUp(path).told_by(lambda: holdfast.async_save(state_of(rank), path).result()), next(seen)


@pytest.mark.parametrize("when", ["staging", "writing"])
def test_a_rank_busy_with_an_async_save_stops_soon_too(pool: Any, tmp_path: Path, when: str) -> None:
    phase = {"staging": "staging the state", "writing": "writing the checkpoint"}[when]
    for message, seen in pool.run(2, async_save_while_another_fails, str(tmp_path / "one"), when):
        assert message == f"rank 0: {phase} failed: ZeroDivisionError: odd"
        assert seen < PARTS
    assert list((tmp_path / "one").glob("*")) == []


class _StandingStager(BlockingAsyncStager):
    def __init__(self, given_up: GivenUp) -> None:
        super().__init__()
        self._given_up = given_up

    def stage(self, state_dict: Any) -> Any:
        self._given_up.wait()
        return super().stage(state_dict)


def stage_for_too_long(path: str) -> str:
    """The stager of rank 1 takes longer than the deadline: what each rank is told."""
    given_up, rank = GivenUp(path), torch.distributed.get_rank()
    stager = _StandingStager(given_up) if rank == 1 else BlockingAsyncStager()
    state = {f"of rank {rank}": torch.ones(9)}
    return given_up.told_by(
        lambda: holdfast.async_save(
            state, path, async_stager=stager, options=holdfast.SaveOptions(deadline_s=4.0)
        ).result()
    )


def test_a_stager_that_others_give_up_is_named_with_what_to_raise(pool: Any, tmp_path: Path) -> None:
    said = pool.run(2, stage_for_too_long, str(tmp_path / "checkpoint"))
    assert set(said) == {
        "rank 1 made no progress for 4 s in 'staging the state with _StandingStager'; "
        "find out where it hangs, or raise deadline_s"
    }


def fail_to_prepare(path: str, when: str) -> str:
    """Rank 1 fails between planning and writing: what each rank is told."""
    rank = torch.distributed.get_rank()
    planner = _UnpreparedPlanner(when) if rank == 1 else holdfast.DefaultSavePlanner()
    state = {f"of rank {rank}": torch.ones(9)}
    return GivenUp(path).told_by(lambda: holdfast.async_save(state, path, planner=planner).result())


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


def hang_in_a_call(path: str, operation: str) -> str:
    """Rank 1 hangs in its fourth write to, or read from, a file: what it is told, once the call is over."""
    given_up, rank = GivenUp(path), torch.distributed.get_rank()
    state = state_of(rank, 4)
    name = "preadv" if operation == "load" else "pwrite"
    call, calls = getattr(os, name), 0

    def hang(*arguments: Any) -> Any:
        nonlocal calls
        calls += len(arguments) == 3  # probes of the page cache have flags too
        if calls == 4:
            calls += 1
            given_up.wait()
        return call(*arguments)

    with mock.patch(f"os.{name}", hang if rank == 1 else call):
        return given_up.told_by(
            {
                "save": lambda: holdfast.save(state, path, options=holdfast.SaveOptions(deadline_s=DEADLINE_S)),
                "async_save": lambda: holdfast.async_save(
                    state, path, options=holdfast.SaveOptions(deadline_s=DEADLINE_S)
                ).result(),
                "load": lambda: holdfast.load(state, path, options=holdfast.LoadOptions(deadline_s=DEADLINE_S)),
            }[operation]
        )


@pytest.mark.parametrize("operation", ["save", "async_save", "load"])
def test_the_error_of_a_hang_tells_rank_file_and_bytes(pool: Any, tmp_path: Path, operation: str) -> None:
    path = str(tmp_path / "checkpoint")
    if operation == "load":
        holdfast.save({**state_of(0, 4), **state_of(1, 4)}, path)
    said = pool.run(2, hang_in_a_call, path, operation)
    phase = "reading the checkpoint" if operation == "load" else "writing the checkpoint"
    told = re.fullmatch(
        rf"rank 1 made no progress for 6 s in '{phase}' \(([\d,]+) bytes done, at '(data-.*\.safetensors)'\); .*",
        said[0],
    )
    assert told is not None, said
    assert int(told[1].replace(",", "")) > 0
    assert said[1] == said[0]
    if operation == "load":
        assert told[2] in os.listdir(path)
    else:
        assert re.fullmatch(r"data-\w+-1-0\.safetensors", told[2])
