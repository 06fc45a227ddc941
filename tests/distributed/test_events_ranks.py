"""Which rank was slowest, in reports and bars, and what each rank tells."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import events
from holdfast.events import Event, PhaseTimes

if TYPE_CHECKING:
    from tools.crew import Crew

EACH = ["started", "planned", "written", "published"]


class LostTime:
    """A clock of this process from which seconds can be taken."""

    def __init__(self) -> None:
        self.lost_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.lost_s


@contextlib.contextmanager
def lost_time() -> Iterator[LostTime]:
    clock = LostTime()
    with contextlib.ExitStack() as stack:
        for module in ("_saver", "_background", "_async_saver"):
            stack.enter_context(mock.patch(f"holdfast.{module}.time", SimpleNamespace(monotonic=clock.monotonic)))
        stack.enter_context(mock.patch("holdfast.events.HOST", f"host-{dist.get_rank()}"))
        yield clock


class SlowToPlan:
    """Takes 500 seconds on rank 1 to give its state."""

    def __init__(self, clock: LostTime) -> None:
        self._clock = clock

    def state_dict(self) -> dict[str, Any]:
        self._clock.lost_s += 500 * (dist.get_rank() == 1)
        return {"a": 1}

    def load_state_dict(self, state: object) -> None: ...


class SlowWriter(holdfast.NativeWriter):
    """Takes 1000 seconds on rank 2 to write, and 100 on rank 3 to sync."""

    clock: LostTime

    def write_data(self, plan: Any, planner: Any) -> Any:
        result = super().write_data(plan, planner)
        sync_s = 100 * (dist.get_rank() == 3)
        self.progress.sync_s += sync_s
        self.clock.lost_s += sync_s + 1000 * (dist.get_rank() == 2)
        return result


def state_of(rank: int) -> dict[str, Any]:
    return {f"own.{rank}": torch.full((1000,), float(rank)), "same": torch.ones(5)}


def saved(path: str) -> list[Event]:
    told: list[Event] = []
    with lost_time() as clock, events.subscribe(told.append):
        writer = SlowWriter(path, user_metadata={"step": 5})
        writer.clock = clock
        holdfast.save({**state_of(dist.get_rank()), "slow": SlowToPlan(clock)}, storage_writer=writer)
    return told


def test_the_coordinator_knows_the_slowest_rank_of_each_phase(pool: Crew, tmp_path: Path) -> None:
    by_rank = pool.run(4, saved, str(tmp_path / "a"))
    for rank, told in enumerate(by_rank):
        assert [event.name for event in told] == EACH
        assert {(event.rank, event.step, event.path) for event in told} == {(rank, 5, str(tmp_path / "a"))}
        assert {event.attempt for event in told[1:]} == {by_rank[0][1].attempt}
        assert (told[-1].report is None) == (rank > 0)
    report = by_rank[0][-1].report
    phases: dict[str, PhaseTimes] = report.phases
    assert {name: (phases[name].rank, phases[name].host) for name in ("plan", "write", "sync")} == {
        "plan": (1, "host-1"),
        "write": (2, "host-2"),
        "sync": (3, "host-3"),
    }
    for name, seconds in (("plan", 500), ("write", 1000), ("sync", 100)):
        assert seconds <= phases[name].max_s < seconds + 100
        assert seconds / 4 <= phases[name].mean_s < seconds / 4 + 100
        assert getattr(report, f"{name}_s") == phases[name].max_s
    assert report.bytes == sum(file.stat().st_size for file in (tmp_path / "a").glob("data-*"))


def saved_behind(path: str) -> tuple[list[Event], Any]:
    told: list[Event] = []
    with lost_time() as clock, events.subscribe(told.append):
        begin = holdfast._background.Staging.begin  # type: ignore[attr-defined]

        def slow(staging: Any) -> None:
            begin(staging)
            clock.lost_s += 700 * (dist.get_rank() == 1)

        with mock.patch("holdfast._background.Staging.begin", slow):
            handle = holdfast.async_save(state_of(dist.get_rank()), path)
            handle.result()
    return told, handle.report


def test_the_handle_of_the_coordinator_has_the_report(pool: Crew, tmp_path: Path) -> None:
    by_rank = pool.run(4, saved_behind, str(tmp_path / "a"))
    for rank, (told, report) in enumerate(by_rank):
        assert [event.name for event in told] == ["started", "planned", "staged", "written", "published"]
        assert report == told[-1].report
        assert (report is None) == (rank > 0)
    report = by_rank[0][1]
    for name in ("blocked", "stage"):
        assert (report.phases[name].rank, report.phases[name].host) == (1, "host-1")
        assert report.phases[name].max_s >= 700


def loaded(path: str) -> list[Event]:
    told: list[Event] = []
    with events.subscribe(told.append):
        holdfast.load({"same": torch.zeros(5)}, path)
        with pytest.raises(holdfast.MismatchError):
            holdfast.load({"same": torch.zeros(6 if dist.get_rank() == 1 else 5)}, path)
    return told


def test_every_rank_tells_of_its_load_and_of_its_failure(pool: Crew, tmp_path: Path) -> None:
    holdfast.save({"same": torch.ones(5)}, tmp_path / "a")
    for rank, told in enumerate(pool.run(2, loaded, str(tmp_path / "a"))):
        assert [event.name for event in told] == ["started", "loaded", "started", "failed"]
        assert {event.rank for event in told} == {rank}
        assert told[-1].problem.startswith("MismatchError: rank 1: ")


def followed(path: str, seen: str) -> list[tuple[str, str]]:
    """Rank 3 goes on only when the coordinator has seen that it is the slowest."""
    shown: list[tuple[str, str]] = []

    def show(far: Any) -> None:
        shown.append((far.phase, far.slowest))
        if dist.get_rank() == 0 and far.slowest.startswith("slowest: rank 3 "):
            Path(seen).touch()

    class Waits(holdfast.NativeWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            while dist.get_rank() == 3 and not os.path.exists(seen):
                time.sleep(0.01)
            return super().write_data(plan, planner)

    options = holdfast.SaveOptions(progress=show)
    holdfast.save(state_of(dist.get_rank()), storage_writer=Waits(path), options=options)
    return shown


def test_the_coordinator_shows_which_rank_is_behind(pool: Crew, tmp_path: Path) -> None:
    by_rank = pool.run(4, followed, str(tmp_path / "a"), str(tmp_path / "seen"))
    assert ("writing the checkpoint", "slowest: rank 3 (0%)") in by_rank[0]
    assert all(shown[-1] == ("done", "") for shown in by_rank)


def with_bar(path: str) -> str:
    import io

    with mock.patch("sys.stderr", io.StringIO()) as stream:
        holdfast.save(state_of(dist.get_rank()), path, options=holdfast.SaveOptions(progress=True))
        holdfast.load(state_of(dist.get_rank()), path, options=holdfast.LoadOptions(progress=True))
        holdfast.async_save(state_of(dist.get_rank()), path, options=holdfast.SaveOptions(progress=True)).result()
        return stream.getvalue()


def test_only_the_coordinator_shows_a_bar(pool: Crew, tmp_path: Path) -> None:
    first, *others = pool.run(3, with_bar, str(tmp_path / "a"))
    assert others == ["", ""]
    ends = [line.partition(" ━")[0] for line in first.splitlines()]
    assert ends == ["a: done", "a: done", "a: published"]
    assert "11.8/11.8 KiB" in first  # of all ranks
