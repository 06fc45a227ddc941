"""What a ``CheckpointManager`` does to a run: it resumes, over a step that is damaged, and it saves and retires steps.

What it has acknowledged is there, and whoever comes next resumes, whatever became of the note that a resume leaves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import holdfast
from torture import saves

SAVE, SAVE_BEHIND = "managed save", "managed save, async"
RESUME, RESUME_NOTED = "resume", "resume, damaged note"
SAVES, RESUMES = (SAVE, SAVE_BEHIND), (RESUME, RESUME_NOTED)
MODES = (*SAVES, *RESUMES)
DAMAGED = 3
"""The newest step where a run is only resumed."""


class PassedOver(saves.Torn):
    """A run was resumed from another step than the newest one that is whole."""


_NOTE = Path(".holdfast") / "resumes.json"
_TORN_NOTE = b'{"published":["0123456789abcdef"],"times":{"012345'


def prepare(root: Path, mode: str) -> None:
    """Add to the steps of ``root`` what a resume has to bear."""
    if mode not in RESUMES:
        return
    saves.save(root / f"step-{DAMAGED}", "fresh", version=DAMAGED)
    (data,) = (root / f"step-{DAMAGED}").glob("data-*")
    with open(data, "r+b") as file:
        last = file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(last)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())
    if mode == RESUME_NOTED:
        (root / _NOTE).parent.mkdir()
        (root / _NOTE).write_bytes(_TORN_NOTE)
        for path in (root / _NOTE, (root / _NOTE).parent, root):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def operate(root: Path, mode: str, acknowledge: Callable[[], None]) -> None:
    """Resume, and save step 3 with a manager that keeps two; ``acknowledge`` is called when that is published."""
    with quiet(), _manager(root, asynchronous=mode == SAVE_BEHIND) as manager:
        resume(manager, mode)
        if mode in RESUMES:
            return
        manager.save(3, saves.state_of(3), force=True)
        if mode == SAVE_BEHIND:
            manager.report(3, {"loss": 3.0})  # which waits until it is published, and deletions go on meanwhile
        acknowledge()


def resume(manager: holdfast.CheckpointManager, mode: str) -> None:
    """Have the manager load the newest step that is whole; Torn for anything else."""
    target: dict[str, Any] = saves.state_of(0)
    resumed = manager.resume(target)
    version = saves.version_of(target)
    if resumed.step != version:
        raise saves.Torn(f"resumed from step {resumed.step}, and the state is of version {version}")
    if mode in RESUMES and (version != 2 or [each.step for each in resumed.skipped] != [DAMAGED]):
        raise PassedOver(f"resumed from step {version}, passing over {resumed.skipped}")


def problem_next(root: Path, mode: str) -> str | None:
    """What is wrong for the next manager, which finds the run as it is now."""
    try:
        with quiet(), _manager(root, asynchronous=False) as manager:
            resume(manager, mode)
    except (saves.Torn, holdfast.CheckpointError) as error:
        return f"the next manager does not resume: {type(error).__name__}: {error}"
    return None


def problem_noted(root: Path) -> str | None:
    """What is wrong with the note of one resume at most, none of which ended in order."""
    if not (root / _NOTE).exists() or (data := (root / _NOTE).read_bytes()) == _TORN_NOTE:
        return None
    try:
        times = json.loads(data)["times"]
    except (ValueError, KeyError) as error:
        return f"the note of a resume is torn: {type(error).__name__}: {error}"
    return None if max(times.values(), default=0) <= 1 else f"one resume is counted as {times}"


def _manager(root: Path, *, asynchronous: bool) -> holdfast.CheckpointManager:
    due, keep = holdfast.Every(steps=1), holdfast.Latest(2)
    return holdfast.CheckpointManager(root, save=due, keep=keep, stop=None, asynchronous=asynchronous)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nobody reads what is logged in the block: that a step was passed over is what the cases are for."""
    logger = logging.getLogger("holdfast")
    handler = logging.NullHandler()
    logger.addHandler(handler)
    before, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)
