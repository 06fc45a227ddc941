"""Several processes at once at one store: savers who race for a name, and the steps of a run with all who use them."""

from __future__ import annotations

import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import holdfast
from holdfast._io.stores import store_of
from torture import managing, saves
from torture.crew import Case, Child
from torture.store_worlds import clear, found, in_child, new_url, save, state_of, use, version_of, world

PROCESSES, THREADS = 4, 4
_STEPS = 6
_LIMIT_S = 300.0
_Told = dict[str, Any]


def raced(*, rounds: int, overwrite: bool) -> Case:
    """Rounds in which all savers begin at once; what went wrong, and what they were told."""
    root = new_url()
    if overwrite:
        in_child(lambda: _prepare(root, [f"{each}" for each in range(rounds)]))
    barrier = multiprocessing.get_context("fork").Barrier(PROCESSES)
    children = [Child(_saver(root, rounds, first, overwrite, barrier)) for first in range(1, 17, THREADS)]
    ends = [child.end(_LIMIT_S) for child in children]
    if any(end.told is None for end in ends):
        return {"problems": [f"the savers ended with {ends}"], "counts": {}}
    told = [[line for end in ends for line in end.told[each]] for each in range(rounds)]
    there: list[Any] = in_child(lambda: _left(root, rounds))
    in_child(lambda: clear(root))
    problems, counts = list[str](), Counter[str]()
    for number, (lines, (version, objects)) in enumerate(zip(told, there, strict=True)):
        counts.update("saved" if error is None else error.partition(":")[0] for _, error in lines)
        winners = [saver for saver, error in lines if error is None]
        others = [f"{saver}: {error}" for saver, error in lines if error is not None]
        unsure = [line for line in others if " UncertainError" in line]
        if (len(winners) > 1 and not overwrite) or not winners + unsure:
            problems.append(f"round {number}: the savers {winners} won, {others}")
        if not unsure and version not in winners:
            problems.append(f"round {number}: there is {version}, and {winners} were told that they saved it")
        if not unsure and len(objects) != 3:
            problems.append(f"round {number}: there is {objects}")
        problems += [f"round {number}: {each}" for each in others if not _is_truth(each)]
    return {"problems": problems, "counts": dict(counts)}


def _is_truth(line: str) -> bool:
    return any(f": {name}: " in line for name in ("AlreadyPublishedError", "UncertainError"))


def _prepare(root: str, names: list[str]) -> None:
    use(world()[0], root, prove=False)
    for name in names:
        save(f"{root}/{name}", 0)


def _left(root: str, rounds: int) -> list[tuple[int | str | None, list[str]]]:
    """What each round left: the version, and the names of objects."""
    use(world()[0], root, prove=False)
    urls = [f"{root}/{each}" for each in range(rounds)]
    return [(found(url), sorted(store_of(url).sizes(url))) for url in urls]


def _saver(root: str, rounds: int, first: int, overwrite: bool, barrier: Any) -> Callable[[], list[list[Any]]]:
    """Some of the savers, in threads of one process: each with its version and its error in every round."""

    def attempt(url: str, version: int, lines: list[Any]) -> None:
        try:
            save(url, version, overwrite=overwrite)
            lines.append((version, None))
        except Exception as error:
            lines.append((version, f"{type(error).__name__}: {error}"))

    def act() -> list[list[Any]]:
        use(world()[0], root)
        told = []
        for number in range(rounds):
            lines: list[Any] = []
            barrier.wait(_LIMIT_S)
            threads = [
                threading.Thread(target=attempt, args=(f"{root}/{number}", first + each, lines))
                for each in range(THREADS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            told.append(lines)
        return told

    return act


def together(*, folder: str, number: int) -> Case:
    """A manager that saves and deletes, a saver, two who follow, one who reads without holding, until all is saved."""
    root, over = new_url(), Path(folder) / f"over-{number}"
    in_child(lambda: _prepare(root, ["step-0"]))
    savers = [Child(_manager(root)), Child(_plain_saver(root))]
    readers = [_follower(root, over, "latest"), _follower(root, over, "all"), _watcher(root, over)]
    others = [Child(reader) for reader in readers]
    ends = [child.end(_LIMIT_S) for child in savers]
    over.touch()
    ends += [child.end(_LIMIT_S) for child in others]
    problems = [f"a process ended with {end}" for end in ends if end.told is None]
    counts = Counter[str]()
    for end in ends:
        if end.told is not None:
            problems += end.told.pop("problems", [])
            counts.update(end.told)
    there = in_child(lambda: _kept(root))
    problems += [f"in the end step {step} has {version}" for step, version in there if step != version]
    if len(there) > 3:  # two that are kept, and one that the other saver adds
        problems.append(f"in the end there are {there}")
    in_child(lambda: clear(root))
    counts["retired"] += 2 * _STEPS + 1 - len(there)
    return {"problems": problems, "counts": {**counts, "runs": 1}}


def _kept(root: str) -> list[tuple[int, int | str | None]]:
    use(world()[0], root, prove=False)
    return [(step.step, found(step.path)) for step in holdfast.Steps(root).steps()]


def _manager(root: str) -> Callable[[], _Told]:
    def act() -> _Told:
        use(world()[0], root)
        due, keep = holdfast.Every(steps=1), holdfast.Latest(2)
        with managing.quiet(), holdfast.CheckpointManager(root, save=due, keep=keep, stop=None) as manager:
            first = manager.resume(state_of(0)).next_step
            first += first % 2
            for step in range(first, first + 2 * _STEPS, 2):
                manager.save(step, state_of(step), force=True)
        return {"saves": _STEPS}

    return act


def _plain_saver(root: str) -> Callable[[], _Told]:
    def act() -> _Told:
        use(world()[0], root)
        for step in range(1, 2 * _STEPS, 2):
            save(f"{root}/step-{step}", step)
        return {"saves": _STEPS}

    return act


def _until(over: Path) -> Iterator[None]:
    """Goes on until the savers are done, and once more."""
    while not over.exists():
        yield
    yield


def _follower(root: str, over: Path, start: Any) -> Callable[[], _Told]:
    def act() -> _Told:
        use(world()[0], root)
        told, problems = Counter[str](), list[str]()
        for held in holdfast.follow(root, start=start, poll_s=0.01, until=over.exists):
            told["steps held"] += 1
            if (version := found(held.path)) != held.step:
                problems.append(f"step {held.step}, which is held, has {version}")
        return {**told, "problems": problems}

    return act


def _watcher(root: str, over: Path) -> Callable[[], _Told]:
    def act() -> _Told:
        use(world()[0], root)
        steps, told, problems = holdfast.Steps(root), Counter[str](), list[str]()
        for _ in _until(over):
            latest = steps.latest()
            if latest is None:
                problems.append("there is no checkpoint that can be loaded")
                continue
            told["loads of the latest"] += 1
            try:
                version = version_of(holdfast.read(latest.path))
                if version != latest.step:
                    problems.append(f"step {latest.step} has version {version}")
            except holdfast.NotFoundError:
                told["overtaken by a deletion"] += 1
            except (saves.Torn, holdfast.CheckpointError) as error:
                problems.append(f"a reader of step {latest.step}: {type(error).__name__}: {error}")
        return {**told, "problems": problems}

    return act
