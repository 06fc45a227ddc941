"""Clocks that are wrong, jump, and differ between ranks: nothing here asks what time it is."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import holdfast
from holdfast._native.sweep import sweep
from holdfast._native.verify import verify_checkpoint
from torture.crew import REPOSITORY
from torture.part import Options, PartResult
from torture.saves import found_version, save

NAME = "clock"
DAYS = (-400, 0, 400)
DAY_S = 86_400
LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1",
    "/usr/lib64/faketime/libfaketime.so.1",
)


def run(options: Options) -> PartResult:
    """Wrong times of files, clocks that jump at each look, and whole processes that live in another year."""
    chosen = random.Random(options.seed)
    violations: list[str] = []
    notes: list[str] = []
    counts = {"times of files": 0, "jumping clocks": 0, "processes in another year": 0, "ranks of different years": 0}
    for number in range(rounds := 5 if options.quick else 40):
        options.progress(number, rounds)
        counts["times of files"] += 1
        violations += _wrong_times(options.folder / f"times-{number}", chosen)
        counts["jumping clocks"] += 1
        violations += _jumping(options.folder / f"jumping-{number}", chosen)
    library = next((path for path in LIBRARIES if Path(path).exists()), None)
    if library is None:
        notes.append("libfaketime is not installed: no process lived in another year")
    else:
        pairs = [(400, -400)] if options.quick else [(one, other) for one in DAYS for other in DAYS if one != other]
        for one, other in pairs:
            if not options.quick:
                counts["processes in another year"] += 2
                violations += _other_years(options.folder / f"years{one}{other}", library, one, other)
            counts["ranks of different years"] += 2
            violations += _other_ranks(options.folder / f"ranks{one}{other}", library, one, other)
    return PartResult(
        fault="clock skew of 400 days both ways: files, processes, ranks, jumps in the middle of a save",
        must_hold="nothing depends on the wall clock",
        injected=sum(counts.values()),
        required=80,
        violations=violations,
        notes=notes,
        counts=counts,
    )


def _wrong_times(path: Path, chosen: random.Random) -> list[str]:
    """Files from any year, dead ones from the future and from before there were files."""
    checkpoint = path / "checkpoint"
    save(checkpoint, "fresh", version=1)
    dead = checkpoint / "data-dead-0-0.safetensors"
    dead.write_bytes(b"dead")
    for file in [*checkpoint.iterdir(), checkpoint]:
        then = time.time() + chosen.choice((-400, 400, -20_000, 20_000)) * DAY_S
        os.utime(file, (then, max(0.0, then - chosen.random() * DAY_S)))
    problems = [] if found_version(checkpoint) == 1 else ["load"]
    problems += [] if verify_checkpoint(checkpoint).ok else ["verify"]
    save(checkpoint, "replacing", version=2)
    problems += [] if found_version(checkpoint) == 2 else ["save"]
    report = sweep(path, delete=True)
    problems += [] if report.removed_files == 1 and not dead.exists() else ["sweep"]
    return [f"files of wrong times: {problem} went wrong" for problem in problems]


@contextmanager
def _jumping_clock(chosen: random.Random) -> Iterator[None]:
    """Every look at the wall clock gives another year; what only moves on, still does."""
    real = time.time

    def jumping() -> float:
        return real() + chosen.choice((-400, 0, 400)) * DAY_S

    def jumping_ns() -> int:
        return int(jumping() * 1e9)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(time, "time", jumping))
        stack.enter_context(mock.patch.object(time, "time_ns", jumping_ns))
        yield


def _jumping(path: Path, chosen: random.Random) -> list[str]:
    with _jumping_clock(chosen):
        save(path, "fresh", version=1)
        save(path, "replacing", version=2)
        version = found_version(path)
        report = verify_checkpoint(path)
        leftovers = sweep(path).leftovers
    is_right = version == 2 and report.ok and 0 <= report.seconds < 60 and not leftovers
    return [] if is_right else [f"a jumping clock: version {version}, {report}, {leftovers}"]


_PROCESS = """
import sys, time
from pathlib import Path
from torture.saves import found_version, save
before, version, year = sys.argv[2], int(sys.argv[3]), time.gmtime().tm_year
found = found_version(Path(sys.argv[1]))
assert str(found) == before, f"version {found} is there in {year}"
save(Path(sys.argv[1]), "replacing", version=version)
assert found_version(Path(sys.argv[1])) == version
print(int(time.time()))
"""

_RANK = """
import sys, time, torch, torch.distributed as dist
import holdfast
path, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{path}.meeting", rank=rank, world_size=2)
weight = torch.arange(100_000.0)
holdfast.save({"weight": weight, "step": 3}, path, options=holdfast.SaveOptions(deadline_s=30))
target = {"weight": torch.zeros(100_000), "step": 0}
holdfast.load(target, path, options=holdfast.LoadOptions(deadline_s=30))
assert target["step"] == 3 and torch.equal(target["weight"], weight)
dist.destroy_process_group()
print(int(time.time()))
"""


def _environment(library: str, days: int) -> dict[str, str]:
    paths = os.pathsep.join((str(REPOSITORY / "src"), str(REPOSITORY)))
    # Only the wall clock is wrong: no kernel lets the other one jump.
    fake = {"LD_PRELOAD": library, "FAKETIME": f"{days:+d}d", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"}
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(fake if days else {})}


def _told(processes: list[subprocess.Popen[str]], days: list[int]) -> list[str]:
    """What is wrong with how processes ended that lived so many days away."""
    problems: list[str] = []
    for process, skew in zip(processes, days, strict=True):
        try:
            output, errors = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            problems.append(f"a process {skew} days away hung")
        if process.returncode:
            problems.append(f"a process {skew} days away failed: {errors[-500:]}")
        elif abs(int(output.split()[-1]) - time.time() - skew * DAY_S) > DAY_S:
            problems.append(f"the clock was not {skew} days away")
    return problems


def _start(script: str, arguments: list[str], library: str, days: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment(library, days)
    )


def _other_years(path: Path, library: str, one: int, other: int) -> list[str]:
    """A save in one year, replaced by one in another, read here and now."""
    save(path, "fresh", version=1)
    problems = _told([_start(_PROCESS, [str(path), "1", "2"], library, one)], [one])
    problems += _told([_start(_PROCESS, [str(path), "2", "3"], library, other)], [other])
    problems += [] if found_version(path) == 3 else ["the last one saved is not there"]
    return [f"{one} and {other} days: {problem}" for problem in problems]


def _other_ranks(path: Path, library: str, one: int, other: int) -> list[str]:
    """Two ranks, each of another year, save and load together."""
    days = [one, other]
    ranks = [_start(_RANK, [str(path), str(rank)], library, skew) for rank, skew in enumerate(days)]
    problems = _told(ranks, days)
    try:
        problems += [] if holdfast.load(path)["step"] == 3 else ["another step"]
    except holdfast.CheckpointError as error:
        problems.append(str(error))
    return [f"ranks {one} and {other} days away: {problem}" for problem in problems]
