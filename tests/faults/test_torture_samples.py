"""A seeded sample of what ``make torture`` does in full, through the same harness."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

from torture.crew import Crew
from torture.part import Options, PartResult
from torture.parts import crash_states, errno, forks, interrupts, kill, kill_ranks, power, short, steps, stops, stores

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the shim is for Linux"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the shim is C, and there is no gcc"),
]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with closing(Crew()) as crew:
        yield crew


def sample(part: ModuleType, crew: Crew, tmp_path: Path) -> PartResult:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 2 << 30 else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        options = Options(seed=0, quick=True, folder=Path(folder), disk=tmp_path, crew=crew)
        result: PartResult = part.run(options)
    assert not result.violations, "\n".join(result.violations[:5])
    if result.skipped is not None:
        pytest.skip(result.skipped)
    return result


def test_kill_at_every_call(crew: Crew, tmp_path: Path) -> None:
    assert sample(kill, crew, tmp_path).injected >= 40


def test_kill_of_a_rank(crew: Crew, tmp_path: Path) -> None:
    assert sample(kill_ranks, crew, tmp_path).injected >= 5


def test_every_error_of_the_file_system(crew: Crew, tmp_path: Path) -> None:
    assert sample(errno, crew, tmp_path).injected == 100


def test_short_transfers_and_failed_syncs(crew: Crew, tmp_path: Path) -> None:
    counts = sample(short, crew, tmp_path).counts
    assert counts["shorten"] >= 20
    assert counts["sync"] >= 2


def test_children_forked_in_the_middle(crew: Crew, tmp_path: Path) -> None:
    assert sample(forks, crew, tmp_path).injected >= 18


def test_power_cuts(crew: Crew, tmp_path: Path) -> None:
    assert sample(power, crew, tmp_path).injected >= 10


def test_crash_states(crew: Crew, tmp_path: Path) -> None:
    assert sample(crash_states, crew, tmp_path).injected >= 300


def test_steps_of_one_run_in_eight_processes(crew: Crew, tmp_path: Path) -> None:
    result = sample(steps, crew, tmp_path)
    assert result.counts["saves"] == 10 * result.injected
    assert result.counts["deletions"] > 0
    assert result.counts["steps held"] > 0
    assert result.counts["loads of the latest"] > 0


def test_stops_under_torchrun(crew: Crew, tmp_path: Path) -> None:
    result = sample(stops, crew, tmp_path)
    assert result.injected == 4
    assert result.counts["started by the command line"] == 1


def test_object_stores(crew: Crew, tmp_path: Path) -> None:
    result = sample(stores, crew, tmp_path)
    assert result.injected >= 25
    assert result.counts["killed"] >= 5
    assert result.counts["race, new: saved"] == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older interpreters look for signals elsewhere")
def test_interrupts_everywhere(crew: Crew, tmp_path: Path) -> None:
    counts = sample(interrupts, crew, tmp_path).counts
    assert counts["bytecodes"] >= 60
    assert counts["signals"] >= 5
    assert counts["ranks"] >= 3
