"""The steps of a run, as they are on disk: which there are, which one is the newest or the best, which may be deleted.

A root has a directory ``step-<number>`` for each step. The listing is the truth: a step exists while its manifest
exists. No file says which step is the latest, so no such file can be wrong, and a root may be moved. A directory
without a manifest is never a step: a save is under way there, or was killed.

Any process may list, report, pin and delete, with or without a manager. In a directory, reports and pins take the lock
of the step, so none of them runs during a deletion. Deletions take the lock of the root, so two of them never remove
the last two steps. ``store_runs.py`` tells how that is in an object store. What a manifest says is remembered until it
changes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import operator
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, SupportsFloat, TypeVar, cast

import msgspec

from holdfast._io import posix
from holdfast._io.pipeline import run_ahead
from holdfast._io.urls import is_store_url
from holdfast._native.delete import DeleteReport
from holdfast._native.leftovers import METRICS_NAME
from holdfast._native.manifest import Summary
from holdfast._native.publish import read_summary
from holdfast._native.values import decode_value
from holdfast._steps.runs import Found, Run, RunDirectory
from holdfast._steps.store_runs import RunInStore
from holdfast._values.shown import few
from holdfast.errors import CheckpointError, CorruptError, NotFoundError, StorageError

__all__ = ["Step", "Steps"]

logger = logging.getLogger("holdfast")

_GONE = (errno.ENOENT, errno.ENOTDIR)

Seen = TypeVar("Seen")
Mode = Literal["min", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that was saved: where, by which attempt, when, how many bytes, on how many ranks.

    ``metrics`` has those of the save and those that were reported later. ``problem`` says why the manifest cannot be
    read; then nothing else is known of the step. It is "" where the manifest can be read.
    """

    step: int
    path: str
    attempt: str = ""
    saved_at: str | None = None
    bytes: int = 0
    world_size: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    pinned: bool = False
    problem: str = ""


class _Reported(msgspec.Struct, frozen=True):
    """Metrics that were reported for what ``attempt`` saved. NaN and infinity are texts, because JSON lacks them."""

    attempt: str
    metrics: Mapping[str, float | str]


class Steps:
    """The steps in the directory ``root``, which need not exist yet. Each call looks at the disk again."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = posix.absolute(root)
        self._run = run_at(self.root)
        self._remembered: dict[int, tuple[Hashable, Step]] = {}
        self._last_read: tuple[str, Summary] | None = None

    def path(self, step: int) -> str:
        """The directory of ``step``, whether it exists or not."""
        return os.path.join(self.root, f"step-{checked_step(step)}")

    def steps(self) -> list[Step]:
        """All steps, ascending. A step whose manifest cannot be read is among them, with its ``problem``."""
        return self._until_settled(lambda: self.look_at(self.found()))

    def latest(self) -> Step | None:
        """The newest step that has all its files, in their sizes."""
        return self._until_settled(lambda: next(filter(self.is_whole, self._descending()), None))

    def best(self, metric: str, mode: Mode = "min") -> Step | None:
        """The step with the lowest ("min") or highest ("max") ``metric``, among those that have all their files.

        NaN is worse than any number. Of equal steps, the later one is better. Steps without the metric do not count.
        """
        return next(filter(self.is_whole, ranked(self.steps(), metric, mode)), None)

    def report(self, step: int, metrics: Mapping[str, object]) -> None:
        """Add ``metrics``, numbers by name, to those of ``step``, durably. A name that exists gets the new number.

        They belong to the checkpoint that is there now. When the step is saved again, they no longer count.
        """
        numbers = checked_metrics(metrics)
        with self._locked(step) as found:
            attempt = found.attempt

            def change(before: bytes | None) -> bytes:
                known: dict[str, float] = {}
                with contextlib.suppress(CorruptError):  # the listing has logged it
                    known = _reported(found, before)
                kept = {name: n if math.isfinite(n) else str(n) for name, n in {**known, **numbers}.items()}
                return msgspec.json.encode(_Reported(attempt=attempt, metrics=kept))

            self._run.change(found.step, change)

    def pin(self, step: int) -> None:
        """Protect ``step`` from being deleted, durably, until ``unpin``."""
        with self._locked(step) as found:
            if not found.pinned:
                self._run.pin(found.step)

    def unpin(self, step: int) -> None:
        """Let ``step`` be deleted again."""
        with self._locked(step) as found:
            self._run.unpin(found.step)

    def delete(self, step: int, *, force: bool = False) -> DeleteReport:
        """Delete ``step``. With ``force``, also one that is pinned, or the only one that is whole.

        Raises:
            NotFoundError: there is no such step.
            BusyError: it is pinned, the only one that is whole, held by a reader, or being saved. It stays.
        """
        self._existing(step)  # there may be no root to lock

        was_whole: list[bool] = []

        def why_it_stays() -> str:
            if not was_whole:
                was_whole.append(self.is_whole(self._existing(step)))
            others = (other for other in self._descending() if other.step != step)
            if was_whole[0] and not force and not any(map(self.is_whole, others)):
                return f"step {step} of {self.root!r} is the only one that is whole; force=True deletes it"
            if step in self._run.held():
                return f"a reader holds step {step} of {self.root!r}; wait until it follows on, or ends"
            return ""

        return self._run.delete(checked_step(step), why_it_stays, force=force)

    def finish_deletions(self) -> None:
        """Remove what killed deletions and saves left. Call it only while nobody begins a save here."""
        self._run.finish_deletions()

    def found(self) -> list[Found]:
        """All steps, ascending."""
        return self._run.found()

    def _descending(self) -> Iterator[Step]:
        looks = (self.look(number, identity) for number, identity in self._run.found_descending())
        return (step for step in looks if step is not None)

    def look_at(self, found: list[Found]) -> list[Step]:
        """Those of the steps that are still there."""
        looks = (partial(self.look, number, identity) for number, identity in found)
        at_once = self._run.looks_at_once
        seen = run_ahead(looks, workers=at_once, ahead=at_once) if at_once > 1 else (look() for look in looks)
        return [step for step in seen if step is not None]

    def held(self) -> set[int]:
        """The steps that readers hold."""
        return self._run.held()

    def is_whole(self, step: Step) -> bool:
        """Whether the manifest of ``step`` can be read, and all files that it names are there in their sizes."""
        last = self._last_read
        return self._run.is_whole(step.step, last[1] if last is not None and last[0] == step.attempt else None)

    def _until_settled(self, look: Callable[[], Seen]) -> Seen:
        """What ``look`` finds. If that is nothing, it looks again until no step has changed between two looks.

        During one look, all the listed steps may be deleted and new ones published.
        """
        before: list[Found] | None = None
        while True:
            result = look()
            if result or (now := self.found()) == before:
                return result
            before = now

    def look(self, number: int, identity: Hashable, *, strict: bool = False) -> Step | None:
        """The step whose manifest has this ``identity``; None if it was deleted meanwhile.

        If the manifest cannot be read, the step has the ``problem``; ``strict`` raises it instead.
        """
        known, step = self._remembered.get(number, (None, None))
        if step is None or known != identity:
            try:
                step = self._read(number)
            except CheckpointError as error:
                if strict:
                    raise
                return Step(step=number, path=self.path(number), problem=error.message)
            if step is None:
                return None
            self._remembered[number] = identity, step
        metrics = step.metrics
        try:
            metrics = {**metrics, **_reported(step, self._run.reported(number))}
        except CheckpointError as error:
            logger.warning("metrics that were reported for step %d do not count: %s", number, error)
        return replace(step, metrics=metrics, pinned=self._run.is_pinned(number))

    def _read(self, number: int) -> Step | None:
        """What the manifest says; None if there is no manifest."""
        path = self.path(number)
        try:
            summary, metadata = read_summary(path)
        except StorageError as error:
            if error.errno not in _GONE:
                raise
            return None
        self._last_read = summary.attempt, summary
        return Step(
            step=number,
            path=path,
            attempt=summary.attempt,
            saved_at=summary.writer.saved_at,
            bytes=summary.index.bytes + sum(file.bytes for file in summary.files),
            world_size=summary.writer.world_size,
            metrics=_numbers_in(decode_value(metadata, key="user_metadata")),
        )

    def _existing(self, step: int, *, strict: bool = False) -> Step:
        number, identities = checked_step(step), dict(self.found())
        found = self.look(number, identities[number], strict=strict) if number in identities else None
        if found is None:
            there = f"there are {few(identities, len(identities))}" if identities else "there are none"
            raise NotFoundError(f"there is no step {step} in {self.root!r}; {there}")
        return found

    @contextlib.contextmanager
    def _locked(self, step: int) -> Iterator[Step]:
        """The step. It cannot be deleted or replaced during the block; then the directory is synced."""
        with self._run.locked(checked_step(step)):
            yield self._existing(step, strict=True)


def run_at(root: str) -> Run:
    """The run in the directory, or the folder of a store, ``root``."""
    if is_store_url(root):
        return RunInStore(root)
    if "://" in root:
        raise ValueError("the steps of a run are in a directory, or in an object store: s3, gs, az or memory")
    return RunDirectory(root)


def checked_step(step: object) -> int:
    """``step`` as an int; ValueError if it cannot be the number of a step."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < 10**18:
        raise ValueError(f"a step is a whole number from 0 on, not {step!r}")
    return number


def checked_metrics(metrics: Mapping[str, object]) -> dict[str, float]:
    """``metrics`` as floats; ValueError if a name is no text, or a value is not one number."""
    if not isinstance(metrics, Mapping):
        raise ValueError(f"metrics is a dict of numbers by name, not {few([metrics], 1)}")
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"the name of a metric is a text, not {name!r}")
        try:
            item = value.item() if hasattr(value, "item") else value  # of tensors and arrays
            if isinstance(item, (bool, str, bytes)):
                raise TypeError
            numbers[name] = float(cast(SupportsFloat, item))
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ValueError(f"the metric {name!r} is one number, not {few([value], 1)}") from None
    return numbers


def ranked(steps: Iterable[Step], metric: str, mode: Mode = "min") -> list[Step]:
    """The ``steps`` that have ``metric``, the best first. NaN comes last; of equal steps, the later comes first."""
    if mode not in ("min", "max"):
        raise ValueError(f"mode is 'min' or 'max', not {mode!r}")

    def goodness(step: Step) -> tuple[bool, float, int]:
        value = step.metrics[metric]
        is_number = not math.isnan(value)
        return is_number, (-value if mode == "min" else value) if is_number else 0.0, step.step

    return sorted((step for step in steps if metric in step.metrics), key=goodness, reverse=True)


def _numbers_in(kept: object) -> dict[str, float]:
    """The metrics in the user's metadata. Only floats count: a user may keep other things under that name."""
    metrics = kept.get("metrics") if isinstance(kept, dict) else None
    pairs = metrics.items() if isinstance(metrics, dict) else ()
    return {name: value for name, value in pairs if isinstance(name, str) and type(value) is float}


def _reported(step: Step, data: bytes | None) -> dict[str, float]:
    """The metrics that were reported after the save; CorruptError if the file is not one of ours."""
    if data is None:
        return {}
    path = os.path.join(step.path, METRICS_NAME)
    try:
        reported = msgspec.json.decode(data, type=_Reported)
        numbers = {name: float(value) for name, value in reported.metrics.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptError(f"{path!r} is not what was written ({error}); remove it", path=path) from error
    return numbers if reported.attempt == step.attempt else {}
