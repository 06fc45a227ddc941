"""A call that one rank misses, or in which it is interrupted: it costs itself alone, and the ranks meet at the next.

There are no deadlines, so whoever would have to wait for one hangs; but where a rank misses a call and does nothing
else, the others can only learn of it by their deadline, which is short for that call alone.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import CheckpointError, DefaultLoadPlanner, DefaultSavePlanner, RankLostError

if TYPE_CHECKING:
    from tools.crew import Crew


SHORT_S = 3.0


def state(version: int) -> dict[str, Any]:
    return {f"of rank {dist.get_rank()}": torch.full((3,), float(version)), "version": version}


def save(path: str, *, deadline_s: float = 120.0, **arguments: Any) -> None:
    holdfast.save(state(1), path, options=holdfast.SaveOptions(deadline_s=deadline_s), **arguments)


def save_behind(path: str, **options: Any) -> None:
    holdfast.async_save(state(1), path, **options).result()


def load(path: str, **options: Any) -> None:
    holdfast.load(state(0), path, **options)


CALLS: dict[str, Callable[..., None]] = {"save": save, "async_save": save_behind, "load": load}


def told_by(call: Callable[[], None]) -> str:
    """The class of what ``call`` raised, or nothing."""
    try:
        call()
    except (CheckpointError, KeyboardInterrupt, ValueError, AttributeError) as error:
        return type(error).__name__
    return ""


def works_again(folder: str, name: str) -> bool:
    """Whether all calls work now, for all ranks, and with the right values."""
    path = f"{folder}/{name}"
    holdfast.save(state(2), path, options=holdfast.SaveOptions(deadline_s=math.inf))
    found = state(0)
    holdfast.load(found, path, deadline_s=math.inf)
    holdfast.async_save(state(3), path, deadline_s=math.inf).result()
    again = state(0)
    holdfast.load(again, path, deadline_s=math.inf)
    mine = f"of rank {dist.get_rank()}"
    values = (found["version"], again["version"], found[mine].tolist(), again[mine].tolist())
    return values == (2, 3, [2.0] * 3, [3.0] * 3)


def miss(folder: str, missing: int, calls: list[str], has_barrier: bool) -> Any:
    """A rank misses calls that all others make; then all make the same ones."""
    path = f"{folder}/first"
    save(path)
    told = []
    if dist.get_rank() != missing:
        for number, call in enumerate(calls):
            place = path if call == "load" else f"{folder}/missed-{number}"
            # With a barrier it can only be the deadline that tells of the one who stays away.
            limits = {"deadline_s": SHORT_S if has_barrier else math.inf}
            told.append(told_by(lambda c=call, p=place, o=limits: CALLS[c](p, **o)))  # type: ignore[misc]
    if has_barrier:
        dist.barrier()
    return told, works_again(folder, "next")


class _Interrupted:
    """Raises KeyboardInterrupt at the first call of one of our functions on this thread, as Ctrl-C may."""

    def __init__(self, module: str, function: str) -> None:
        self.module, self.function = module, function
        self.has_struck = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        is_it = frame.f_code.co_name == self.function and frame.f_globals.get("__name__", "").endswith(self.module)
        if is_it and event == "call" and not self.has_struck:
            self.has_struck = True
            raise KeyboardInterrupt


PLACES = [
    ("participants", "participants"),
    ("rendezvous", "connect"),
    ("channel_ranks", "__enter__"),
    ("channel", "enter"),
    ("channel", "post"),
    ("channel_ranks", "_together"),
    ("channel", "see_sent"),
    ("channel_ranks", "_wait_until"),
    ("channel_ranks", "_gather"),
    ("channel_ranks", "_reply"),
    ("channel_ranks", "__exit__"),
    ("channel_ranks", "_see_received"),
    ("stateful_values", "_exposed"),
    ("rounds", "said_first"),
    ("writer", "write_data"),
    ("publish", "publish"),
    ("reader", "read_data"),
    ("stateful_values", "hand_back"),
]


def interrupt(folder: str, rank: int, call: str, places: list[tuple[str, str]]) -> Any:
    """A rank is interrupted inside of a call, at each of the places; after each, all calls work."""
    path = f"{folder}/first"
    save(path)
    found = []
    for number, (module, function) in enumerate(places):
        place = path if call == "load" else f"{folder}/{number}"
        interrupted = _Interrupted(module, function)
        if dist.get_rank() == rank:
            sys.setprofile(interrupted)
        try:
            told = told_by(lambda p=place: CALLS[call](p, deadline_s=math.inf))  # type: ignore[misc]
        finally:
            sys.setprofile(None)
        found.append((module, function, interrupted.has_struck, told, works_again(folder, f"next-{number}")))
    return found


class _FailingSave(DefaultSavePlanner):
    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


class _FailingLoad(DefaultLoadPlanner):
    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


def arguments_of_one(folder: str, rank: int) -> Any:
    """One rank gives what cannot be, or is interrupted in its planner; the others are told, whatever the call."""
    path = f"{folder}/first"
    save(path)
    is_it = dist.get_rank() == rank
    calls: list[Callable[[], object]] = [
        lambda: save(path, user_metadata={} if not is_it else None, storage_writer=_odd(is_it)),
        lambda: load(path, share="nobody" if is_it else "host"),
        lambda: save_behind(path, stage="later" if is_it else "copy"),
        lambda: save(path, planner=_FailingSave() if is_it else None),
        lambda: load(path, planner=_FailingLoad() if is_it else None),
        lambda: save_behind(path, planner=_FailingSave() if is_it else None),
    ]
    return [(told_by(call), works_again(folder, f"next-{number}")) for number, call in enumerate(calls)]  # type: ignore[arg-type]


def _odd(is_it: bool) -> Any:
    return object() if is_it else None


def late(folder: str, rank: int) -> Any:
    """A rank comes to a call after the others have given it up; with the next one it is there."""
    store = dist.distributed_c10d._get_default_store()
    save(f"{folder}/first")
    told = []
    if dist.get_rank() == rank:
        store.wait([f"given up by {other}" for other in range(dist.get_world_size()) if other != rank])
    told.append(told_by(lambda: save(f"{folder}/late", deadline_s=SHORT_S)))
    store.set(f"given up by {dist.get_rank()}", "")
    return told, works_again(folder, "next")


def different_calls(folder: str) -> Any:
    """Every rank has a path of its own, or another function; all are told, and go on."""
    save(f"{folder}/first")
    rank = dist.get_rank()
    found = []
    for call in (lambda: save(f"{folder}/of-{rank}"), lambda: (load if rank else save)(f"{folder}/first")):
        try:
            call()
        except holdfast.RankDisagreementError as error:
            found.append(str(error))
        dist.barrier()
    return found, works_again(folder, "next")


MISSED = [["save"], ["load"], ["save", "load"], ["async_save", "save"]]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("has_barrier", [False, True], ids=["at once", "after a barrier"])
def test_a_missed_call_costs_itself_alone(pool: Crew, tmp_path: Path, world: int, has_barrier: bool) -> None:
    cases = itertools.product((world - 1, 0), MISSED[: 2 if has_barrier else None])
    for number, (missing, calls) in enumerate(cases):
        if world == 2 and missing == 0 and not has_barrier:
            continue  # who of two has missed a call cannot be told
        folder = tmp_path / str(number)
        folder.mkdir()
        results = pool.run(world, miss, str(folder), missing, calls, has_barrier)
        error = "RankLostError" if has_barrier else "RankDisagreementError"
        for rank, (told, works) in enumerate(results):
            assert told == ([] if rank == missing else [error] * len(calls)), (missing, calls, results)
            assert works, (missing, calls, results)


def miss_as_coordinator(folder: str) -> Any:
    """The coordinator of two misses calls, and nobody can tell who has: a few more fail, then they meet."""
    save(f"{folder}/first")
    if dist.get_rank() == 1:
        told_by(lambda: save(f"{folder}/missed"))
    told = [told_by(lambda number=number: save(f"{folder}/{number}")) for number in range(6)]  # type: ignore[misc]
    return told, works_again(folder, "next")


def test_where_nobody_can_tell_who_missed_a_call_the_ranks_meet_soon(pool: Crew, tmp_path: Path) -> None:
    for told, works in pool.run(2, miss_as_coordinator, str(tmp_path)):
        assert told[3:] == ["", "", ""]
        assert set(told[:3]) <= {"", "RankDisagreementError"}
        assert works


@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (4, 2)])
def test_an_interrupt_anywhere_in_a_call_costs_itself_alone(
    pool: Crew, tmp_path: Path, world: int, rank: int, call: str
) -> None:
    # Before it says anything the call is one that it misses, and of two ranks nobody can tell which has.
    places = PLACES[3:] if (world, rank) == (2, 0) else PLACES
    results = pool.run(world, interrupt, str(tmp_path), rank, call, places)
    for case in zip(*results, strict=True):
        assert all(works for *_, works in case), case
        has_struck, told = case[rank][2:4]
        if has_struck and told:
            assert told == "KeyboardInterrupt", case
    struck = [each[1] for each in results[rank] if each[2]]
    assert len(struck) >= 8, struck


@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (4, 3)])
def test_what_fails_on_one_rank_before_anything_is_told_costs_itself_alone(
    pool: Crew, tmp_path: Path, world: int, rank: int
) -> None:
    results = pool.run(world, arguments_of_one, str(tmp_path), rank)
    for case in zip(*results, strict=True):
        assert all(works for _, works in case), results
        assert all(told for told, _ in case), results


@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (4, 0), (4, 3)])
def test_a_rank_that_comes_too_late_is_there_at_the_next_call(
    pool: Crew, tmp_path: Path, world: int, rank: int
) -> None:
    for told, works in pool.run(world, late, str(tmp_path), rank):
        assert told in ([RankLostError.__name__], ["RankDisagreementError"])
        assert works


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_at_different_calls_are_told_which(pool: Crew, tmp_path: Path, world: int) -> None:
    for (paths, calls), works in pool.run(world, different_calls, str(tmp_path)):
        assert paths.startswith("the ranks disagree on the checkpoint path: ")
        assert "/of-0'" in paths
        assert calls.startswith("the ranks disagree on the call: ")
        assert "rank 0 says save '" in calls
        assert works


def one_path_of_its_own(folder: str, odd: int) -> Any:
    """One rank has another path, once, and all go on at once; a save that fails on every rank comes next."""
    save(f"{folder}/first")
    mine = f"{folder}/odd" if dist.get_rank() == odd else f"{folder}/even"
    told = [told_by(lambda: save(mine)), told_by(lambda: holdfast.save({"odd": object()}, f"{folder}/invalid"))]
    return told, works_again(folder, "next")


@pytest.mark.parametrize(("world", "odd"), [(2, 1), (3, 0), (4, 0), (4, 2)])
def test_calls_that_fail_after_different_ones_do_not_confuse(pool: Crew, tmp_path: Path, world: int, odd: int) -> None:
    for told, works in pool.run(world, one_path_of_its_own, str(tmp_path), odd):
        assert told[0] == "RankDisagreementError"
        assert told[1] in ("InvalidStateError", "RankDisagreementError", "RankLostError")
        assert works
