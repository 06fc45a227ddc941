"""The steps of a run, as they are on disk: which there are, which is the newest, the best, and what may go.

A root holds a directory ``step-<number>`` for each step. The listing is the truth: a step is there while its manifest
is. No file says which one is the latest, so none can say something else than what is there, and a root may be moved.
What a directory holds without a manifest is a save under way, or left by one that was killed: it is never a step.

Any process may list, report, pin and delete, without a manager and beside one. Reports and pins are written under the
lock of the step's directory, so that they and a deletion come one after the other; deletions under that of the root, so
that no two of them remove the last two steps. What was read of a manifest is remembered for as long as that file stays.
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
"""What tells one manifest from the next: inode, time of change, size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that was saved: where, by which attempt, when, and how much; ``metrics`` of the save and reported later.

    ``problem`` says why its manifest cannot be read, "" that it can; then nothing else is known of it.
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
    """The metrics that were reported for what ``attempt`` saved; those that no JSON number can be are texts."""

    attempt: str
    metrics: Mapping[str, float | str]


_decode_reported = msgspec.json.Decoder(_Reported).decode


class Steps:
    """The steps below the directory ``root``, which need not exist yet; each call looks at what is there then."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        if "://" in posix.text_path(root):
            raise ValueError("steps are listed in a local directory; a URL has none")
        self.root = posix.absolute(root)
        self._remembered: dict[int, tuple[_Identity, Step]] = {}

    def path(self, step: int) -> str:
        """The directory of ``step``, be it there or not."""
        return os.path.join(self.root, f"step-{checked_step(step)}")

    def steps(self) -> list[Step]:
        """All steps, ascending; those whose manifest cannot be read too, with ``problem``."""
        return self._until_settled(lambda: list(self._descending()))[::-1]

    def latest(self) -> Step | None:
        """The newest step that has all its files, in their sizes."""
        return self._until_settled(lambda: next(filter(is_whole, self._descending()), None))

    def best(self, metric: str, mode: Mode = "min") -> Step | None:
        """The step with the lowest or highest ``metric`` that has all its files; the later one of equal ones.

        NaN is worse than any number. Steps without the metric do not count.
        """
        return next(filter(is_whole, ranked(self.steps(), metric, mode)), None)

    def report(self, step: int, metrics: Mapping[str, object]) -> None:
        """Add ``metrics``, names to numbers, to those of ``step``, durably; a name that is there gets the new number.

        They belong to the checkpoint that is there now: when the step is saved again, they no longer count.
        """
        numbers = checked_metrics(metrics)
        with self._locked(step) as found:
            with contextlib.suppress(CorruptError):  # which the listing has told
                numbers = {**_reported(found), **numbers}
            kept = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
            data = msgspec.json.encode(_Reported(attempt=found.attempt, metrics=kept))
            # Named like a note, which a sweep removes when nobody is at work here.
            staged = os.path.join(found.path, f"{NOTE_PREFIX}{secrets.token_hex(8)}.tmp")
            try:
                posix.write_new(staged, data)
                posix.replace(staged, os.path.join(found.path, METRICS_NAME))
            except BaseException:
                with contextlib.suppress(StorageError):
                    posix.remove(staged)
                raise

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
        """Delete ``step``; ``force`` deletes it even if it is pinned, or the only one that is whole.

        Raises:
            NotFoundError: there is no such step.
            BusyError: it is pinned, the only one that is whole, held by a reader, or being saved; it stays.
        """
        self._existing(step)
        with locks.locked_directory(self.root):
            found = self._existing(step)
            others = (self.look(number, identity) for number, identity in reversed(self.found()) if number != step)
            if not force and is_whole(found) and not any(other is not None and is_whole(other) for other in others):
                raise BusyError(f"step {step} of {self.root!r} is the only one that is whole; force=True deletes it")
            if checked_step(step) in held_steps(self.root):
                raise BusyError(f"a reader holds step {step} of {self.root!r}; wait until it follows on, or ends")
            return delete(found.path, force=force)

    def finish_deletions(self) -> None:
        """Remove what deletions and saves that were killed left; for when nobody begins to save here."""
        for number in self._numbers():
            with contextlib.suppress(BusyError, NotFoundError):
                finish_deletion(self.path(number))

    def found(self) -> list[tuple[int, _Identity]]:
        """The numbers of all steps, ascending, and what tells whether they are still the same."""
        found = ((number, self._identity(number)) for number in self._numbers())
        return [(number, identity) for number, identity in found if identity is not None]

    def _identity(self, number: int) -> _Identity | None:
        status = posix.file_status(os.path.join(self.path(number), MANIFEST_NAME))
        return None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size)

    def _descending(self) -> Iterator[Step]:
        for number in reversed(self._numbers()):
            identity = self._identity(number)
            step = None if identity is None else self.look(number, identity)
            if step is not None:
                yield step

    def _until_settled(self, look: Callable[[], Found]) -> Found:
        """What ``look`` finds; if nothing, it looks again: all may have gone during the look, and others come."""
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
            if error.errno == errno.ENOENT:
                return []
            if error.errno == errno.ENOTDIR and posix.exists(self.root):
                raise NotACheckpointError(f"{self.root!r} is a file; the root of a run is a directory") from error
            raise
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match is not None)

    def look(self, number: int, identity: _Identity, *, strict: bool = False) -> Step | None:
        """What is known of the step; None where it was deleted meanwhile. ``strict`` raises what its problem is."""
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
        """The step, which cannot be deleted or saved again during the block; what it does to names becomes durable."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(locks.locked_directory(self.path(step)))
            except StorageError as error:
                if error.errno not in _GONE:
                    raise
            found = self._existing(step, strict=True)
            yield found
            posix.sync_directory(found.path)


def held_steps(root: str) -> set[int]:
    """The steps of the run in ``root`` that readers hold; where locks do not tell, those of dead readers too."""
    try:
        directory = locks.Directory.open(os.path.join(root, READERS_NAME))
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return set()
    held: set[str] = set()
    with directory:
        for reader in sweep_directory(directory, [], delete=False):
            folder = f"reader-{reader.attempt}"
            if reader.verdict != "dead" and directory.status(folder) is not None:
                held.update(posix.list_directories(directory.path_of(folder)))
    return {int(match[1]) for match in map(_NAME.fullmatch, held) if match is not None}


def checked_step(step: object) -> int:
    """``step`` as an int; ValueError for what is no number of a step."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < 10**18:
        raise ValueError(f"a step is a whole number from 0 on, not {step!r}")
    return number


def checked_metrics(metrics: Mapping[str, object]) -> dict[str, float]:
    """``metrics`` as floats; ValueError for a name that is no text, and for what is not one number."""
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
    """Those of ``steps`` that have ``metric``, the best first: NaN is last, of equal ones the later comes first."""
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
    """What the manifest in ``path`` says of its save and files, and its metadata."""
    return decode_summary(read_manifest_bytes(path), path=os.path.join(path, MANIFEST_NAME))


def _read(number: int, path: str) -> Step | None:
    """What the manifest in ``path`` says; None where there is none."""
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
    """The metrics in what was kept beside a state; what is none is somebody else's."""
    metrics = kept.get("metrics") if isinstance(kept, dict) else None
    pairs = metrics.items() if isinstance(metrics, dict) else ()
    return {name: value for name, value in pairs if isinstance(name, str) and type(value) is float}


def _reported(step: Step) -> dict[str, float]:
    """The metrics that were reported after the save; CorruptError for a file that nobody here wrote."""
    path = os.path.join(step.path, METRICS_NAME)
    if not posix.exists(path):
        return {}
    try:
        reported = _decode_reported(posix.read_whole(path, limit=_MOST_METRICS_BYTES))
        numbers = {name: float(value) for name, value in reported.metrics.items()}
    except StorageError as error:
        if error.errno not in _GONE:
            raise
        return {}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptError(f"{path!r} is not what was written ({error}); remove it", path=path) from error
    return numbers if reported.attempt == step.attempt else {}
