"""A run whose steps are saved, retired, deleted, swept, followed and read by eight processes at the same time."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import holdfast
from torture import saves, stepping, torch_dcp
from torture.crew import Child
from torture.part import Options, PartResult
from torture.samples import get_ready_to_fork

NAME = "steps"
ROUNDS = 1000
_TORCH_ROUNDS = 100
_SAVES = 5  # of each of two savers
_KEPT = 2
_LIMIT_S = 300.0
_Told = dict[str, Any]


def run(options: Options) -> PartResult:
    """Rounds with a run of their own each; then the same by hand, on top of torch's checkpoints."""
    get_ready_to_fork()
    chosen = random.Random(options.seed)
    rounds, torch_rounds = (3, 1) if options.quick else (ROUNDS, _TORCH_ROUNDS)
    violations: list[str] = []
    counts: Counter[str] = Counter()
    by_hand: Counter[str] = Counter()
    for number in range(rounds + torch_rounds):
        is_torch = number >= rounds
        # Every other round on a disk: syncs take time there, and windows are wider.
        root = (options.disk if number % 2 else options.folder) / f"run-{number}"
        problems, told = (_round_by_hand if is_torch else _round)(root, chosen.randrange(1 << 30))
        (by_hand if is_torch else counts).update(told)
        if not is_torch:
            violations += [f"round {number}: {problem}" for problem in problems]
        shutil.rmtree(root, ignore_errors=True)
        options.progress(number + 1, rounds + torch_rounds)
    reads = by_hand["loads of the latest"]
    return PartResult(
        fault="8 processes save, retire, delete, sweep, follow and read the steps of one run",
        must_hold="once there was a checkpoint that can be loaded, there is one at every moment; what a reader holds "
        "is whole, and who reads without holding finds no checkpoint at worst",
        injected=rounds,
        required=ROUNDS,
        violations=violations,
        counts=dict(counts),
        torch=f"keep-latest by hand, {torch_rounds} rounds: {by_hand['damaged']} of {reads} loads of the latest "
        f"failed, {by_hand['without']} looks found none that is finished, "
        f"{2 * torch_rounds - by_hand['savers that ended well']} of {2 * torch_rounds} savers failed",
    )


def _round(root: Path, seed: int) -> tuple[list[str], Counter[str]]:
    """What went wrong, and how often what was done."""
    saves.save(root / "step-0", "fresh", version=0)
    savers = [_saver(root, first, seed + first) for first in (1, 2)]
    others = [
        _retirer(root),
        _retirer(root),
        _sweeper(root),
        _follower(root, "latest"),
        _follower(root, "all"),
        _watcher(root),
    ]
    problems, counts = _together(root, savers, others)
    holdfast.Steps(root).finish_deletions()
    holdfast.sweep(root, delete=True)
    left = {*os.listdir(root), *os.listdir(root / ".holdfast" / "readers")} - {".holdfast", "over"}
    try:
        wanted = {f"step-{step}" for step in stepping.whole_steps(root)}
        problems += [f"in the end there is {sorted(left)}"] if left != wanted or not wanted else []
    except (saves.Torn, holdfast.CheckpointError) as error:
        problems.append(f"in the end: {type(error).__name__}: {error}")
    return problems, counts


def _together(
    root: Path, savers: list[Callable[[], _Told]], others: list[Callable[[], _Told]]
) -> tuple[list[str], Counter[str]]:
    """Run all of them at once, the others until the savers are done; what they told."""
    children = [Child(function) for function in (*savers, *others)]
    ends = [child.end(_LIMIT_S) for child in children[: len(savers)]]
    (root / "over").touch()
    ends += [child.end(_LIMIT_S) for child in children[len(savers) :]]
    problems = [f"a process ended with {end}" for end in ends if end.told is None]
    counts: Counter[str] = Counter()
    for end in ends:
        if end.told is not None:
            problems += end.told.pop("problems", [])
            counts.update(end.told)
    return problems, counts


def _until_over(root: Path) -> Iterator[None]:
    """Goes on until the savers are done, and once more."""
    while not (root / "over").exists():
        yield
    yield


def _saver(root: Path, first: int, seed: int) -> Callable[[], _Told]:
    def act() -> _Told:
        chosen = random.Random(seed)
        for step in range(first, 2 * _SAVES + first, 2):
            time.sleep(chosen.random() * 0.01)
            saves.save(root / f"step-{step}", "fresh", version=step)
        return {"saves": _SAVES}

    return act


def _retirer(root: Path) -> Callable[[], _Told]:
    """Keeps the latest, as retention does; another one may be at it, and readers may hold what should go."""

    def act() -> _Told:
        steps, told = holdfast.Steps(root), Counter[str]()
        for _ in _until_over(root):
            for old in steps.steps()[:-_KEPT]:
                with contextlib.suppress(holdfast.BusyError, holdfast.NotFoundError):
                    steps.delete(old.step)
                    told["deletions"] += 1
        return {**told}

    return act


def _sweeper(root: Path) -> Callable[[], _Told]:
    def act() -> _Told:
        told, problems = Counter[str](), list[str]()
        for _ in _until_over(root):
            told["sweeps"] += 1
            # A directory may go while it is looked at.
            gone = "No such file or directory"
            problems += [f"sweep: {each}" for each in holdfast.sweep(root, delete=True).problems if gone not in each]
        return {**told, "problems": problems}

    return act


def _follower(root: Path, start: Any) -> Callable[[], _Told]:
    def act() -> _Told:
        told, problems = Counter[str](), list[str]()
        for held in holdfast.follow(root, start=start, poll_s=0.001, until=(root / "over").exists):
            told["steps held"] += 1
            try:
                if saves.found_version(Path(held.path)) != held.step:
                    problems.append(f"step {held.step} is not there, and it is held")
            except (saves.Torn, holdfast.CheckpointError) as error:
                problems.append(f"step {held.step}, which is held: {type(error).__name__}: {error}")
        return {**told, "problems": problems}

    return act


def _watcher(root: Path) -> Callable[[], _Told]:
    """Who holds nothing always finds a latest one, and loads it whole unless it is deleted meanwhile."""

    def act() -> _Told:
        steps, told, problems = holdfast.Steps(root), Counter[str](), list[str]()
        for _ in _until_over(root):
            latest = steps.latest()
            if latest is None:
                problems.append("there is no checkpoint that can be loaded")
                continue
            told["loads of the latest"] += 1
            try:
                version = saves.found_version(Path(latest.path))
                told["overtaken by a deletion"] += version is None
                if version not in (None, latest.step):
                    problems.append(f"step {latest.step} has version {version}")
            except (saves.Torn, holdfast.CheckpointError) as error:
                problems.append(f"a reader of step {latest.step}: {type(error).__name__}: {error}")
        return {**told, "problems": problems}

    return act


def _round_by_hand(root: Path, seed: int) -> tuple[list[str], Counter[str]]:
    """The same as scripts do it: torch's checkpoints, the last few directories are kept, the highest number counts."""
    root.mkdir(parents=True)
    torch_dcp.save(root / "step-0", 0)
    logging.disable()  # of each failure there would be a screenful

    def numbers() -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))

    def saver(first: int) -> Callable[[], _Told]:
        def act() -> _Told:
            chosen = random.Random(seed + first)
            for step in range(first, 2 * _SAVES + first, 2):
                time.sleep(chosen.random() * 0.01)
                torch_dcp.save(root / f"step-{step}", step)
                for old in numbers()[:-_KEPT]:
                    shutil.rmtree(root / f"step-{old}", ignore_errors=True)
            return {"savers that ended well": 1}

        return act

    def reader() -> _Told:
        told = Counter[str]()
        for _ in _until_over(root):
            finished = [step for step in numbers() if (root / f"step-{step}" / ".metadata").exists()]
            told["without"] += not finished
            if finished:
                told["loads of the latest"] += 1
                try:
                    torch_dcp.found_version(root / f"step-{finished[-1]}")
                except saves.Torn:
                    told["damaged"] += 1
        return {**told}

    try:
        return _together(root, [saver(1), saver(2)], [reader] * 6)
    finally:
        logging.disable(logging.NOTSET)
