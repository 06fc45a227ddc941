"""Savers, readers and sweeps at one name at the same time, in 2 to 8 processes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import holdfast
from holdfast._native.sweep import sweep
from torture import exports
from torture.crew import Child
from torture.part import Options, PartResult
from torture.samples import get_ready_to_fork
from torture.saves import EXPORT_MODES, Torn, found_version, save, state_of, version_of

NAME = "concurrency"
_EXPORTING = (
    "exporters that may overwrite",
    "exporters that may not",
    "exporter against sweep",
    "reader against exporters",
)
ROUNDS = {"savers of both formats": 50, "reader against savers of both formats": 50, **dict.fromkeys(_EXPORTING, 50)}
"""Of the others 200 each."""

SCENARIOS = (
    "savers that may overwrite",
    "savers that may not",
    "saver against sweep",
    "reader against replace",
    "savers of both formats",
    "reader against savers of both formats",
    *_EXPORTING,
)
_NATIVE, _TORCHS, _EXPORT = "replacing", "torch's format, replacing", EXPORT_MODES[1]


def run(options: Options) -> PartResult:
    """Rounds of each scenario, each with processes of its own that start together."""
    get_ready_to_fork()
    chosen = random.Random(options.seed)
    rounds = {scenario: 1 if options.quick else ROUNDS.get(scenario, 200) for scenario in SCENARIOS}
    violations: list[str] = []
    counts: dict[str, int] = {}
    holdfast.save(state_of(1), options.folder / "warm")
    found_version(options.folder / "warm")
    done = 0
    for index, scenario in enumerate(SCENARIOS):
        for number in range(rounds[scenario]):
            # Every other round on a disk: syncs take time there, and windows are wider.
            path = (options.disk if (index + number) % 2 else options.folder) / f"{index}-{number}"
            processes = chosen.randrange(2, 9)
            told = _round(scenario, path, processes, chosen.randrange(1 << 30), counts)
            violations += [f"{scenario}, round {number}, {processes} processes: {problem}" for problem in told]
            shutil.rmtree(path, ignore_errors=True)
            done += 1
            options.progress(done, sum(rounds.values()))
    return PartResult(
        fault="concurrent savers to one name, also of two formats, and exporters; either against sweep and "
        "readers; 2 to 8 processes",
        must_hold="never mixed, one winner with overwrite off, readers always whole, no live writer swept, nothing of "
        "what was replaced left",
        injected=done,
        required=sum(rounds.values()),
        violations=violations,
        counts=counts,
    )


def _round(scenario: str, path: Path, processes: int, seed: int, counts: dict[str, int]) -> list[str]:
    path.mkdir(parents=True)
    if scenario == "savers that may overwrite":
        return _overwriting(path / "checkpoint", processes, seed, counts, modes=(_NATIVE,))
    if scenario == "savers of both formats":
        return _overwriting(path / "checkpoint", processes, seed, counts, modes=(_NATIVE, _TORCHS))
    if scenario == "savers that may not":
        return _one_winner(path / "checkpoint", processes, seed, counts)
    if scenario == "saver against sweep":
        return _swept(path, processes, seed, counts)
    if scenario == "exporters that may overwrite":
        return _exporting(path / "model", processes, seed, counts)
    if scenario == "exporters that may not":
        return _one_exporter(path / "model", processes, seed, counts)
    if scenario == "exporter against sweep":
        return _exporting(path / "model", processes, seed, counts, sweeps=6)
    modes = (_NATIVE, _TORCHS) if "both" in scenario else (_EXPORT,) if "export" in scenario else (_NATIVE,)
    return _read(path / "checkpoint", processes, seed, counts, modes=modes)


def _together(functions: list[Any]) -> list[Any]:
    """What each function told; all are started before any of them goes on."""
    start = time.monotonic() + 0.004 * len(functions)

    def waiting(function: Any) -> Any:
        time.sleep(max(0.0, start - time.monotonic()))
        return function()

    children = [Child(partial(waiting, function)) for function in functions]
    ends = [child.end() for child in children]
    return [end.told if end.told is not None else [f"a process ended with {end}"] for end in ends]


def _saver(path: Path, versions: list[int], mode: str | tuple[str, ...], seed: int) -> Any:
    def function() -> list[str]:
        chosen = random.Random(seed)
        outcome: list[str] = []
        for version in versions:
            time.sleep(chosen.random() * 0.004)
            try:
                save(path, mode if isinstance(mode, str) else chosen.choice(mode), version=version)
                outcome.append(f"saved {version}")
            except holdfast.CheckpointError as error:
                outcome.append(f"{type(error).__name__}: {error}")
        return outcome

    return function


def _visible(path: Path, allowed: set[int | None]) -> list[str]:
    try:
        version = found_version(path)
    except (Torn, holdfast.CheckpointError) as error:
        return [f"torn: {type(error).__name__}: {error}"]
    return [] if version in allowed else [f"version {version} is there, of {sorted(allowed, key=str)}"]


def _overwriting(path: Path, processes: int, seed: int, counts: dict[str, int], *, modes: tuple[str, ...]) -> list[str]:
    save(path, "fresh", version=1)
    versions = [[100 * saver + step for step in range(1, 3)] for saver in range(1, processes + 1)]
    told = _together([_saver(path, own, modes, seed + number) for number, own in enumerate(versions)])
    problems = [line for lines in told for line in lines if not line.startswith("saved")]
    # A manifest, an index and a data file; or torch's metadata, and a data file for each of two threads.
    if len(os.listdir(path)) != 3:
        problems.append(f"of what was replaced there is left {sorted(os.listdir(path))}")
    # The last of some saver's is there: whatever it was that came last.
    problems += _visible(path, {own[-1] for own in versions})
    _count(counts, "saves over each other", sum(map(len, versions)))
    leftovers = sweep(path, delete=True)
    problems += [f"the sweep: {problem}" for problem in leftovers.problems]
    problems += [f"{left.verdict}: {left.reason}" for left in leftovers.leftovers if left.verdict != "dead"]
    return problems + _visible(path, {own[-1] for own in versions})


def _one_winner(path: Path, processes: int, seed: int, counts: dict[str, int]) -> list[str]:
    modes = ("fresh", "torch's format, fresh")
    told = _together([_saver(path, [saver], modes, seed + saver) for saver in range(1, processes + 1)])
    lines = [line for lines in told for line in lines]
    winners = [int(line.split()[1]) for line in lines if line.startswith("saved")]
    losers = [line for line in lines if line.startswith("AlreadyPublishedError")]
    problems = [line for line in lines if not line.startswith(("saved", "AlreadyPublishedError"))]
    if len(winners) != 1:
        problems.append(f"{len(winners)} savers won: {lines}")
    _count(counts, "savers that were refused", len(losers))
    if len(os.listdir(path)) != 3:
        problems.append(f"the losers left {sorted(os.listdir(path))}")
    return problems + _visible(path, set(winners))


def _swept(path: Path, processes: int, seed: int, counts: dict[str, int]) -> list[str]:
    """Savers that replace, savers of values alone, and sweeps that remove all they can; nobody may fail."""
    target = path / "checkpoint"
    save(target, "fresh", version=1)
    save(path / "values", "fresh", "values", version=1)
    dead = ["data-dead-0-0.safetensors", "index-dead.safetensors", "manifest-dead.tmp"]
    for name in dead:
        (target / name).write_bytes(b"left by a dead saver")

    def sweeper() -> list[str]:
        found: list[str] = []
        for _ in range(6):
            report = sweep(path, delete=True)
            found += [f"sweep: {problem}" for problem in report.problems]
        return found

    def values_saver() -> list[str]:
        for version in (2, 3, 4):
            save(path / "values", "replacing", "values", version=version)
        return []

    savers = max(1, processes - 2)
    versions = [[100 * saver + step for step in range(1, 4)] for saver in range(1, savers + 1)]
    functions = [_saver(target, own, "replacing", seed + number) for number, own in enumerate(versions)]
    told = _together([*functions, values_saver, sweeper])
    problems = [line for lines in told for line in lines if not line.startswith("saved")]
    problems += _visible(target, {own[-1] for own in versions})
    with contextlib.suppress(Torn):
        if found_version(path / "values", "values") != 4:
            problems.append("the save of values is not there")
    problems += [f"{name} is still there" for name in dead if (target / name).exists()]
    _count(counts, "saves beside sweeps", sum(map(len, versions)) + 3)
    _count(counts, "sweeps beside saves", 6)
    return problems


def _exporting(path: Path, processes: int, seed: int, counts: dict[str, int], *, sweeps: int = 0) -> list[str]:
    """Exporters that replace one folder, beside sweeps, which remove what is dead."""
    save(path, EXPORT_MODES[0], version=1)
    exports.add_own(path)
    dead = path.with_name(f"{path.name}.holdfast-0123456789abcdef")
    if sweeps:
        dead.mkdir()
        (dead / "model.safetensors").write_bytes(b"left by a dead exporter")

    def sweeper() -> list[str]:
        return [f"sweep: {each}" for _ in range(sweeps) for each in sweep(path.parent, delete=True).problems]

    versions = [[100 * exporter + step for step in range(1, 4)] for exporter in range(1, processes + 1)]
    functions = [_saver(path, own, _EXPORT, seed + number) for number, own in enumerate(versions)]
    told = _together([*functions, *([sweeper] if sweeps else [])])
    problems = [line for lines in told for line in lines if not line.startswith("saved")]
    problems += _visible(path, {own[-1] for own in versions})
    if left := set(os.listdir(path.parent)) - {path.name}:
        problems.append(f"left beside the folder: {sorted(left)}")
    _count(counts, "exports over each other" if not sweeps else "exports beside sweeps", sum(map(len, versions)))
    _count(counts, "sweeps beside exports", sweeps)
    return problems


def _one_exporter(path: Path, processes: int, seed: int, counts: dict[str, int]) -> list[str]:
    told = _together([_saver(path, [own], EXPORT_MODES[0], seed + own) for own in range(1, processes + 1)])
    lines = [line for lines in told for line in lines]
    winners = [int(line.split()[1]) for line in lines if line.startswith("saved")]
    problems = [line for line in lines if not line.startswith(("saved", "AlreadyPublishedError"))]
    if len(winners) != 1:
        problems.append(f"{len(winners)} exporters won: {lines}")
    if left := set(os.listdir(path.parent)) - {path.name}:
        problems.append(f"left beside the folder: {sorted(left)}")
    _count(counts, "exporters that were refused", len(lines) - len(winners))
    return problems + _visible(path, set(winners))


def _read(path: Path, processes: int, seed: int, counts: dict[str, int], *, modes: tuple[str, ...]) -> list[str]:
    save(path, EXPORT_MODES[0] if modes == (_EXPORT,) else "fresh", version=1)
    last = 8

    def look() -> int | None:
        if modes == (_EXPORT,):  # what lies beside the weights may be of the next export by then
            return version_of(holdfast.read(path))
        return found_version(path)

    def reader() -> list[str]:
        seen: list[int] = []
        problems: list[str] = []
        while not seen or seen[-1] != last:
            try:
                version = look()
            except (Torn, holdfast.CheckpointError) as error:
                problems.append(f"a reader: {type(error).__name__}: {error}")
                break
            if version is None or (seen and version < seen[-1]):
                problems.append(f"a reader saw {version} after {seen}")
                break
            seen.append(version)
        return [*problems, f"seen {len(seen)}"]

    functions = [_saver(path, list(range(2, last + 1)), modes, seed), *[reader] * (processes - 1)]
    told = _together(functions)
    lines = [line for lines in told for line in lines]
    _count(counts, "loads beside saves", sum(int(line.split()[1]) for line in lines if line.startswith("seen")))
    return [line for line in lines if not line.startswith(("saved", "seen"))] + _visible(path, {last})


def _count(counts: dict[str, int], what: str, number: int) -> None:
    counts[what] = counts.get(what, 0) + number
