"""The steps of a run, as they are on disk: which there are, which one is the newest or the best, which may be deleted.

A root has a directory ``step-<number>`` for each step. The listing is the truth: a step exists while its manifest
exists. No file says which step is the latest, so no such file can be wrong, and a root may be moved. A directory
without a manifest is never a step: a save is under way there, or was killed.

Any process may list, report, pin and delete, with or without a manager. Reports and pins take the lock of the step's
directory, so none of them runs during a deletion. Deletions take the lock of the root, so two of them never remove the
last two steps. What a manifest says is remembered until that file changes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import operator
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, SupportsFloat, TypeVar, cast

import msgspec

from holdfast._io import locks, posix
from holdfast._native.delete import METRICS_NAME, PINNED_NAME, DeleteReport, delete, finish_deletion
from holdfast._native.manifest import Summary, decode_summary
from holdfast._native.publish import MANIFEST_NAME, read_manifest_bytes
from holdfast._native.sweep import READERS_NAME, sweep_directory
from holdfast._native.values import decode_value
from holdfast._native.verify import has_its_files
from holdfast._process import Ending
from holdfast._torch_codec.metadata_file import NOTE_PREFIX
from holdfast._values.lazy import few
from holdfast.errors import (
    BusyError,
    CheckpointError,
    CorruptError,
    NotACheckpointError,
    NotFoundError,
    StorageError,
    UnsupportedVersionError,
)

__all__ = ["Step", "Steps"]

logger = logging.getLogger("holdfast")

_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_MOST_METRICS_BYTES = 1 << 20
_GONE = (errno.ENOENT, errno.ENOTDIR)

Found = TypeVar("Found")
Mode = Literal["min", "max"]
_Identity = tuple[int, int, int]
"""What tells two manifests of one step apart: inode, time of change, size."""


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
        if "://" in posix.text_path(root):
            raise ValueError("steps are listed in a local directory; a URL has none")
        self.root = posix.absolute(root)
        self._remembered: dict[int, tuple[_Identity, Step]] = {}

    def path(self, step: int) -> str:
        """The directory of ``step``, whether it exists or not."""
        return os.path.join(self.root, f"step-{checked_step(step)}")

    def steps(self) -> list[Step]:
        """All steps, ascending. A step whose manifest cannot be read is among them, with its ``problem``."""
        return self._until_settled(lambda: list(self._descending()))[::-1]

    def latest(self) -> Step | None:
        """The newest step that has all its files, in their sizes."""
        return self._until_settled(lambda: next(filter(is_whole, self._descending()), None))

    def best(self, metric: str, mode: Mode = "min") -> Step | None:
        """The step with the lowest ("min") or highest ("max") ``metric``, among those that have all their files.

        NaN is worse than any number. Of equal steps, the later one is better. Steps without the metric do not count.
        """
        return next(filter(is_whole, ranked(self.steps(), metric, mode)), None)

    def report(self, step: int, metrics: Mapping[str, object]) -> None:
        """Add ``metrics``, numbers by name, to those of ``step``, durably. A name that exists gets the new number.

        They belong to the checkpoint that is there now. When the step is saved again, they no longer count.
        """
        numbers = checked_metrics(metrics)
        with self._locked(step) as found:
            with contextlib.suppress(CorruptError):  # the listing has logged it
                numbers = {**_reported(found), **numbers}
            kept = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
            data = msgspec.json.encode(_Reported(attempt=found.attempt, metrics=kept))
            # It is named like a note, because a sweep removes notes that are left.
            staged = os.path.join(found.path, f"{NOTE_PREFIX}{secrets.token_hex(8)}.tmp")
            removing = Ending(lambda: posix.remove(staged))
            with removing, removing:
                posix.write_new(staged, data)
                posix.replace(staged, os.path.join(found.path, METRICS_NAME))

    def pin(self, step: int) -> None:
        """Protect ``step`` from being deleted, durably, until ``unpin``."""
        with self._locked(step) as found:
            if not found.pinned:
                posix.write_new(os.path.join(found.path, PINNED_NAME), b"")

    def unpin(self, step: int) -> None:
        """Let ``step`` be deleted again."""
        with self._locked(step) as found:
            posix.remove(os.path.join(found.path, PINNED_NAME))

    def delete(self, step: int, *, force: bool = False) -> DeleteReport:
        """Delete ``step``. With ``force``, also one that is pinned, or the only one that is whole.

        Raises:
            NotFoundError: there is no such step.
            BusyError: it is pinned, the only one that is whole, held by a reader, or being saved. It stays.
        """
        self._existing(step)  # there may be no root to lock
        with locks.locked_directory(self.root):
            found = self._existing(step)
            others = (other for other in self._descending() if other.step != found.step)
            if not force and is_whole(found) and not any(map(is_whole, others)):
                raise BusyError(f"step {step} of {self.root!r} is the only one that is whole; force=True deletes it")
            if found.step in held_steps(self.root):
                raise BusyError(f"a reader holds step {step} of {self.root!r}; wait until it follows on, or ends")
            return delete(found.path, force=force)

    def finish_deletions(self) -> None:
        """Remove what killed deletions and saves left. Call it only while nobody begins a save here."""
        for number in self._numbers():
            with contextlib.suppress(BusyError, NotFoundError):
                finish_deletion(self.path(number))

    def found(self) -> list[tuple[int, _Identity]]:
        """The numbers of all steps, ascending, and the identities of their manifests."""
        return list(self._found_descending())[::-1]

    def _found_descending(self) -> Iterator[tuple[int, _Identity]]:
        """The same, the newest first. Old steps are not touched until they are asked for: one of them may be broken."""
        for number in reversed(self._numbers()):
            status = posix.file_status(os.path.join(self.path(number), MANIFEST_NAME))
            if status is not None:
                yield number, (status.st_ino, status.st_mtime_ns, status.st_size)

    def _descending(self) -> Iterator[Step]:
        looks = (self.look(number, identity) for number, identity in self._found_descending())
        return (step for step in looks if step is not None)

    def _until_settled(self, look: Callable[[], Found]) -> Found:
        """What ``look`` finds. If that is nothing, it looks again until no step has changed between two looks.

        During one look, all the listed steps may be deleted and new ones published.
        """
        before: list[tuple[int, _Identity]] | None = None
        while True:
            result = look()
            if result or (now := self.found()) == before:
                return result
            before = now

    def _numbers(self) -> list[int]:
        try:
            names = posix.list_directories(self.root)
        except StorageError as error:
            if error.errno == errno.ENOTDIR and posix.exists(self.root):
                raise NotACheckpointError(f"{self.root!r} is a file; the root of a run is a directory") from error
            raise
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match is not None)

    def look(self, number: int, identity: _Identity, *, strict: bool = False) -> Step | None:
        """The step whose manifest has this ``identity``; None if it was deleted meanwhile.

        If the manifest cannot be read, the step has the ``problem``; ``strict`` raises it instead.
        """
        known, step = self._remembered.get(number, (None, None))
        if step is None or known != identity:
            try:
                step = _read(number, self.path(number))
            except CheckpointError as error:
                if strict:
                    raise
                return Step(step=number, path=self.path(number), problem=error.message)
            if step is None:
                return None
            self._remembered[number] = identity, step
        metrics = step.metrics
        try:
            metrics = {**metrics, **_reported(step)}
        except CheckpointError as error:
            logger.warning("metrics that were reported for step %d do not count: %s", number, error)
        return replace(step, metrics=metrics, pinned=posix.exists(os.path.join(step.path, PINNED_NAME)))

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
        with locks.locked_directory(self.path(step)):
            found = self._existing(step, strict=True)
            yield found
            posix.sync_directory(found.path)


def held_steps(root: str) -> set[int]:
    """The steps of the run in ``root`` that readers hold. Where locks cannot be trusted, dead readers count too."""
    readers = os.path.join(root, READERS_NAME)
    if not posix.exists(readers):
        return set()
    held: set[str] = set()
    with locks.Directory.open(readers) as directory:
        for reader in sweep_directory(directory, [], delete=False):
            if reader.verdict != "dead":
                held.update(posix.list_directories(directory.path_of(f"reader-{reader.attempt}")))
    return {int(match[1]) for match in map(_NAME.fullmatch, held) if match is not None}


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


def is_whole(step: Step) -> bool:
    """Whether the manifest of ``step`` can be read, and all files that it names are there in their sizes."""
    try:
        return has_its_files(step.path, read_summary(step.path)[0])
    except (CorruptError, UnsupportedVersionError):
        return False
    except StorageError as error:
        if error.errno not in _GONE:
            raise  # it may be whole all the same
        return False


def read_summary(path: str) -> tuple[Summary, object]:
    """What the manifest in ``path`` says of its save and its files; and the user's metadata, still encoded."""
    return decode_summary(read_manifest_bytes(path), path=os.path.join(path, MANIFEST_NAME))


def _read(number: int, path: str) -> Step | None:
    """What the manifest in ``path`` says; None if there is no manifest."""
    try:
        summary, metadata = read_summary(path)
    except StorageError as error:
        if error.errno not in _GONE:
            raise
        return None
    return Step(
        step=number,
        path=path,
        attempt=summary.attempt,
        saved_at=summary.writer.saved_at,
        bytes=summary.index.bytes + sum(file.bytes for file in summary.files),
        world_size=summary.writer.world_size,
        metrics=_numbers_in(decode_value(metadata, key="user_metadata")),
    )


def _numbers_in(kept: object) -> dict[str, float]:
    """The metrics in the user's metadata. Only floats count: a user may keep other things under that name."""
    metrics = kept.get("metrics") if isinstance(kept, dict) else None
    pairs = metrics.items() if isinstance(metrics, dict) else ()
    return {name: value for name, value in pairs if isinstance(name, str) and type(value) is float}


def _reported(step: Step) -> dict[str, float]:
    """The metrics that were reported after the save; CorruptError if the file is not one of ours."""
    path = os.path.join(step.path, METRICS_NAME)
    try:
        reported = msgspec.json.decode(posix.read_whole(path, limit=_MOST_METRICS_BYTES), type=_Reported)
        numbers = {name: float(value) for name, value in reported.metrics.items()}
    except StorageError as error:
        if error.errno not in _GONE:
            raise
        return {}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptError(f"{path!r} is not what was written ({error}); remove it", path=path) from error
    return numbers if reported.attempt == step.attempt else {}
