"""The steps of a run that are disturbed while they are deleted, noted, followed or retired, by hand or by a manager.

What may be found then: each step holds the state of its own number, so that whatever is loaded is whole and the right
one, or torn.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Collection
from pathlib import Path

import holdfast
from torture import managing, saves, torch_dcp

RETIRE = "save, retire, sweep"
BEFORE_AND_AFTER: dict[str, tuple[set[int], set[int]]] = {
    "delete": ({1, 2}, {2}),
    "report": ({1, 2}, {1, 2}),
    "pin": ({1, 2}, {1, 2}),
    "follow": ({1, 2}, {1, 2}),
    RETIRE: ({1, 2}, {2, 3}),
    **dict.fromkeys(managing.SAVES, ({1, 2}, {2, 3})),
    **dict.fromkeys(managing.RESUMES, ({1, 2}, {1, 2})),
}
"""Which steps are there, whole, before each operation, and after it."""

MODES = tuple(BEFORE_AND_AFTER)
_WRONG = (saves.Torn, holdfast.CheckpointError)


def prepare(root: Path, mode: str, library: str = "holdfast") -> None:
    """Make the run that is there before ``mode``; all of it is durable."""
    root.mkdir(parents=True)
    for step in sorted(BEFORE_AND_AFTER[mode][0]):
        if library == "torch":
            torch_dcp.save(root / f"step-{step}", step)
        else:
            saves.save(root / f"step-{step}", "fresh", version=step)
    if library == "torch":
        os.sync()
    else:
        holdfast.Steps(root).report(1, {"loss": 1.0})
        managing.prepare(root, mode)


def operate(root: Path, mode: str, library: str = "holdfast", acknowledge: Callable[[], None] = lambda: None) -> None:
    """What is disturbed; when this returns it is acknowledged.

    ``acknowledge`` is called when the new step was, and old ones may still be there.
    """
    if mode in managing.MODES:
        managing.operate(root, mode, acknowledge)
        return
    steps = holdfast.Steps(root)
    if library == "torch":  # as scripts do it that keep the latest ones
        torch_dcp.save(root / "step-3", 3)
        shutil.rmtree(root / "step-1")
    elif mode == "delete":
        steps.delete(1)
    elif mode == "report":
        steps.report(1, {"loss": 2.0})
    elif mode == "pin":
        steps.pin(1)
    elif mode == "follow":
        for held in holdfast.follow(root, until=lambda: True):
            if saves.found_version(Path(held.path)) != held.step:
                raise saves.Torn(f"step {held.step} is another one where it is held")
    else:
        saves.save(root / "step-3", "fresh, may overwrite", version=3)
        for old in steps.steps()[:-2]:
            steps.delete(old.step)
        holdfast.sweep(root, delete=True)


def problem_found(
    root: Path, mode: str, library: str = "holdfast", *, acknowledged: bool = False, published: bool = False
) -> str | None:
    """What a reader would find wrong; None when the promises hold.

    ``published`` says that the new step was acknowledged, ``acknowledged`` that all was.
    """
    before, after = BEFORE_AND_AFTER[mode]
    damaged = {managing.DAMAGED} if mode in managing.RESUMES else set()
    try:
        found = _torch_steps(root) if library == "torch" else whole_steps(root, damaged)
    except _WRONG as error:
        return "torn visible" if library == "torch" else f"torn: {type(error).__name__}: {error}"
    if not before & after <= found.keys() <= before | after:
        return "previous lost" if library == "torch" else f"steps are lost, or come from nowhere: {sorted(found)}"
    if (acknowledged and found.keys() != after) or (published and not after <= found.keys()):
        return "acknowledged but lost" if library == "torch" else f"acknowledged but lost: {sorted(found)}"
    if library == "torch":
        return None
    latest = holdfast.Steps(root).latest()
    if latest is None or latest.step != max({*found, *damaged}):
        return f"the latest is {latest}, of {sorted(found)}"
    for step in found.values():
        if step.metrics.get("loss") not in _losses(mode, step.step, acknowledged=acknowledged, published=published):
            return f"the metrics of step {step.step} are {step.metrics}"
        if step.pinned and (mode, step.step) != ("pin", 1):
            return f"step {step.step} is pinned"
    if acknowledged and mode == "pin" and not found[1].pinned:
        return "acknowledged but not pinned"
    return managing.problem_noted(root) if mode in managing.MODES else None


def _losses(mode: str, step: int, *, acknowledged: bool, published: bool) -> set[float | None]:
    """The losses that ``step`` may have."""
    if step == 1:
        return {1.0} if mode != "report" else {2.0} if acknowledged else {1.0, 2.0}
    if step == 3 and mode == managing.SAVE_BEHIND:
        return {3.0} if acknowledged or published else {None, 3.0}
    return {None}


def problem_after(
    root: Path, mode: str, library: str = "holdfast", *, acknowledged: bool = False, published: bool = False
) -> str | None:
    """The same, and what is wrong when somebody goes on there."""
    problem = problem_found(root, mode, library, acknowledged=acknowledged, published=published)
    if problem is not None or library == "torch":
        return problem
    try:
        if mode not in managing.MODES:  # a manager does so itself
            holdfast.Steps(root).finish_deletions()
        if mode != "delete" or 1 in whole_steps(root):
            operate(root, mode)
        problem = problem_found(root, mode, acknowledged=True)
        holdfast.sweep(root, delete=True)
    except _WRONG as error:
        return f"going on failed: {type(error).__name__}: {error}"
    if problem is not None:
        return f"after going on: {problem}"
    whole = whole_steps(root, {managing.DAMAGED} if mode in managing.RESUMES else set())
    own, readers = root / ".holdfast", root / ".holdfast" / "readers"
    there = {*os.listdir(root), *(name for place in (own, readers) if place.exists() for name in os.listdir(place))}
    known = {".holdfast", "manager.lock", "resumes.json", "readers", *(f"step-{step}" for step in whole)}
    litter = sorted(there - known - ({f"step-{managing.DAMAGED}"} if mode in managing.RESUMES else set()))
    for step in whole.values():
        names = {name.partition("-")[0] for name in os.listdir(step.path)}
        litter += sorted(names - {"data", "index", "manifest.json", "metrics.json", "pinned"})
    return f"going on leaves {litter}" if litter else None


def whole_steps(root: Path, damaged: Collection[int] = ()) -> dict[int, holdfast.Step]:
    """The steps that are there, all of them whole but those ``damaged`` before; Torn otherwise."""
    found = {step.step: step for step in holdfast.Steps(root).steps() if step.step not in damaged}
    for number, step in found.items():
        if step.problem:
            raise saves.Torn(f"step {number}: {step.problem}")
        version = saves.found_version(Path(step.path))
        if version != number:
            raise saves.Torn(f"step {number} has version {version}")
    return found


def _torch_steps(root: Path) -> dict[int, holdfast.Step]:
    """The same for checkpoints of torch's: a step is there if its metadata is."""
    found: dict[int, holdfast.Step] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in root.glob("step-*"):
            version = torch_dcp.found_version(path)
            if version is not None:
                found[version] = holdfast.Step(step=version, path=str(path))
    return found
