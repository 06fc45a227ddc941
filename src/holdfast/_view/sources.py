"""What the viewer was asked to show: runs and checkpoints, each with a number, and the few that are open.

A number stays with one save: where a step is deleted, or saved again, its number leads to NotFoundError, and what is
new gets a number of its own. A checkpoint that was named by its path is read again when it changes. Nothing is held
open and no step is protected: to look must not keep anybody from deleting.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast._huggingface.folder import is_folder
from holdfast._io import files, posix
from holdfast._io.urls import is_store_url
from holdfast._native.publish import format_at
from holdfast._native.sweep import sweep
from holdfast._steps.listing import Step, Steps, run_at
from holdfast._torch_format.file_systems import is_for_fsspec
from holdfast._values.digest import digest, to_hex
from holdfast._view.answers import encoded, unix_seconds
from holdfast._view.tables import Table, give_memory_back, identity_at, read_table
from holdfast._view.timings import SaveTimes, Timings
from holdfast.errors import CheckpointError, NotFoundError

_MOST_OPEN = 2
_POLL_S, _STORE_POLL_S = 1.0, 10.0
_WAIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSource:
    """A run, or one checkpoint, that is shown; ``checkpoint`` is the number of the one."""

    number: int
    path: str
    steps: Steps | None
    timings: Timings | None = None
    checkpoint: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCheckpoint:
    """A checkpoint by its number: where it is, and of which ``attempt``; "" where any will do."""

    number: int
    source: int
    path: str
    step: int | None
    attempt: str


class Sources:
    """The runs and checkpoints at ``paths``. NotFoundError for a path where nothing is that can be shown."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self.all: list[ShownSource] = []
        self.closing = threading.Event()
        self._checkpoints: list[ShownCheckpoint] = []
        self._numbers: dict[tuple[int, str, str], int] = {}
        self._whole: dict[tuple[str, str], bool] = {}
        self._tables: OrderedDict[int, tuple[tuple[int, ...], Table]] = OrderedDict()
        self._lock = threading.Lock()
        self._reading, self._listing = threading.Lock(), threading.Lock()
        for path in paths:
            self._add(posix.absolute(path))

    def _add(self, path: str) -> None:
        is_one = is_for_fsspec(path) or format_at(path) is not None or is_folder(path)
        if is_one or not (files.is_directory(path) or is_store_url(path)):
            if not is_one:
                read_table(path)  # which says what is wrong with it
            self._add_checkpoint(path)
            return
        below = [] if run_at(path).numbers() else _checkpoints_below(path)
        for each in below:
            self._add_checkpoint(each)
        if not below:  # or a run that has not begun
            timings = None if is_store_url(path) else Timings(path)
            self.all.append(ShownSource(number=len(self.all), path=path, steps=Steps(path), timings=timings))

    def _add_checkpoint(self, path: str) -> None:
        number = self._number(len(self.all), path, None, "")
        self.all.append(ShownSource(number=len(self.all), path=path, steps=None, checkpoint=number))

    def _number(self, source: int, path: str, step: int | None, attempt: str) -> int:
        with self._lock:
            number = self._numbers.setdefault((source, path, attempt), len(self._checkpoints))
            if number == len(self._checkpoints):
                shown = ShownCheckpoint(number=number, source=source, path=path, step=step, attempt=attempt)
                self._checkpoints.append(shown)
            return number

    def source(self, number: int) -> ShownSource:
        if number >= len(self.all):
            raise NotFoundError(f"there is no source {number}")
        return self.all[number]

    def checkpoint(self, number: int) -> ShownCheckpoint:
        if number >= len(self._checkpoints):
            raise NotFoundError(f"there is no checkpoint {number}")
        return self._checkpoints[number]

    def table(self, number: int) -> Table:
        """The tensors of a checkpoint, read if they are not in memory, or if another one is there by now."""
        asked = self.checkpoint(number)
        with self._reading:  # one at a time, because that takes memory
            identity = identity_at(asked.path)
            known = self._tables.get(number)
            if known is None or known[0] != identity:
                self._tables.pop(number, None)
                if not identity:
                    raise _gone(asked)
                while len(self._tables) >= _MOST_OPEN:
                    self._tables.popitem(last=False)
                table = read_table(asked.path)
                if asked.attempt not in ("", table.manifest.attempt):
                    raise _gone(asked)
                known = self._tables[number] = identity, table
                give_memory_back()
            self._tables.move_to_end(number)
            return known[1]

    # --- runs ---------------------------------------------------------------------------------------------------------

    def listing(self, number: int, *, after: str = "") -> dict[str, object] | None:
        """The steps of a run; where ``after`` is what they were, something new is waited for, None if nothing comes."""
        source = self.source(number)
        if source.steps is None:
            raise ValueError(f"the source {number} is no run")
        waited, poll_s = 0.0, _STORE_POLL_S if is_store_url(source.path) else _POLL_S
        while True:
            with self._listing:
                rows = self._rows(source, source.steps, looks_again=not after)
            revision = to_hex(digest(encoded({"steps": rows})))
            if revision != after:
                return {"source": number, "path": source.path, "revision": revision, "steps": rows}
            if waited >= _WAIT_S or self.closing.wait(poll_s):
                return None
            waited += poll_s

    def times(self, checkpoint: int, attempt: str) -> SaveTimes | None:
        """How long the save of a step took, if events tell."""
        timings = self.all[self.checkpoint(checkpoint).source].timings
        return None if timings is None else timings.saves.get(attempt)

    def _rows(self, source: ShownSource, steps: Steps, *, looks_again: bool) -> list[dict[str, object]]:
        found, held = steps.steps(), steps.held()
        if source.timings is not None:
            source.timings.look()
        rows = {step.step: self._row(source, steps, step, step.step in held, looks_again) for step in found}
        for number in set(run_at(steps.root).numbers()) - rows.keys():
            rows[number] = _unfinished(steps.path(number), number)
        return [rows[number] for number in sorted(rows)]

    def _row(self, source: ShownSource, steps: Steps, step: Step, held: bool, looks_again: bool) -> dict[str, object]:
        saved = step.path, step.attempt
        number = self._number(source.number, step.path, step.step, step.attempt)
        times = self.times(number, step.attempt)
        why = step.problem
        if not why and (looks_again or not self._whole.get(saved)):
            self._whole[saved] = steps.is_whole(step)
        if not why and not self._whole[saved]:
            why = "files are missing, or have another size"
        return {
            "checkpoint": number,
            **_step_fields(step.step, step.path, "damaged" if why else "whole", why),
            "bytes": step.bytes,
            "saved_at": unix_seconds(step.saved_at),
            "ranks": step.world_size or None,
            "seconds": None if times is None else times.seconds,
            "blocked_s": None if times is None else times.blocked_s,
            "metrics": step.metrics,
            "pinned": step.pinned,
            "held": held,
        }


def _step_fields(step: int, path: str, state: str, why: str) -> dict[str, object]:
    none: dict[str, object] = dict.fromkeys(("saved_at", "ranks", "seconds", "blocked_s"))
    fields = {"step": step, "path": path, "state": state, "why": why or None}
    return {**none, **fields, "bytes": 0, "metrics": {}, "pinned": False, "held": False}


def _unfinished(path: str, number: int) -> dict[str, object]:
    """A directory of a step that has no manifest: a save goes on there, has died, or the step was deleted."""
    fields = {"checkpoint": None, **_step_fields(number, path, "unfinished", "nothing is in it")}
    try:
        left = sweep(path).leftovers
    except CheckpointError as error:
        return {**fields, "why": error.message}
    if not left and is_store_url(path):
        return {**fields, "state": "retired", "why": "it was deleted"}
    said = {"living": "a save goes on", "dead": "a save died", "unknown": "a save did not finish"}
    why = "; ".join(f"{said[each.verdict]}: {each.reason}" for each in left[:3])
    return {**fields, "why": why or fields["why"], "bytes": sum(each.bytes for each in left)}


def _checkpoints_below(root: str) -> list[str]:
    """The checkpoints right below a directory that is no run."""
    if is_store_url(root):
        return []
    below = (os.path.join(root, name) for name in sorted(posix.list_names(root)))
    return [path for path in below if os.path.isdir(path) and (format_at(path) is not None or is_folder(path))]


def _gone(asked: ShownCheckpoint) -> NotFoundError:
    what = asked.path if asked.step is None else f"step {asked.step}"
    return NotFoundError(f"{what} was deleted, or saved again, since it was listed; look at the list again")
