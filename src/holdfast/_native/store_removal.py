"""Deleting and sweeping in an object store, where no lock tells who lives.

A deletion puts a manifest that only says so in place of the one that is there, on condition that it is still that one.
So it never hits a checkpoint that was published a moment ago. If there turns out to be a reason for the checkpoint to
stay, the manifest is put back the same way. Only then the other objects are removed: a deletion that is cut off leaves
the whole checkpoint, or objects that nobody takes for one, and the next deletion or sweep removes those.

Nothing tells whether a saver of an unpublished attempt lives. So a sweep says how old its objects are, and removes
those of attempts that are named, and those of checkpoints that were deleted.
"""

from __future__ import annotations

import errno
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import NamedTuple

from holdfast._io.stores import Found, store_of
from holdfast._native.catalog import read_published
from holdfast._native.leftovers import METRICS_NAME, PINNED_NAME, Leftover, SweepReport, Verdict, attempts_in
from holdfast._native.manifest import decode_summary, encode_tombstone, retired_attempt
from holdfast._native.publish import MANIFEST_NAME, is_marked
from holdfast._native.store_commit import Head, commit, read_head
from holdfast._torch_codec.metadata_file import METADATA_NAME
from holdfast.errors import (
    BusyError,
    CheckpointError,
    CorruptError,
    NotFoundError,
    StorageError,
    UnsupportedVersionError,
)

_UNREADABLE = "unreadable"
"""Takes the place of the attempt, if the manifest that names it cannot be read."""


class Removed(NamedTuple):
    """What a deletion removed: the sizes of objects by name; ``problems`` says what could not be removed."""

    attempt: str
    sizes: dict[str, int]
    problems: tuple[str, ...]


def delete_in_store(path: str, *, force: bool, why_it_stays: Callable[[], str]) -> Removed:
    """Delete the checkpoint at ``path``, or what a deletion left there. ``why_it_stays`` is asked when it is invisible.

    BusyError if it is pinned, unless ``force`` is set, or if it stays for that reason.
    """
    sizes, head = store_of(path).sizes(path), read_head(path)
    if head is None and MANIFEST_NAME in sizes:
        raise StorageError(
            f"the store lists {MANIFEST_NAME} at {path!r} and does not give it; nothing was removed: try again",
            errno=errno.EIO,
            path=path,
        )
    if head is None or not head.is_live:
        removed = _remove(path, "" if head is None else retired_attempt(head.data), sizes)
        if not removed.sizes and not removed.problems:
            read_published(path)  # its error says best what is there instead
        return removed
    if PINNED_NAME in sizes and not force:
        raise BusyError(f"{path!r} is pinned; unpin it first, or pass force=True")
    attempt = _attempt(head)
    retired = _replace(path, head, encode_tombstone(attempt))
    reason = why_it_stays()
    if reason:
        _replace(path, retired, head.data)
        raise BusyError(reason)
    removed = _remove(path, attempt, sizes)
    removed.sizes[MANIFEST_NAME] = len(head.data)
    return removed._replace(attempt="" if attempt == _UNREADABLE else attempt)


def finish_deletion_in_store(path: str) -> None:
    """Remove what a deletion that was cut off left at ``path``."""
    head = read_head(path)
    if head is not None and not head.is_live:
        _remove(path, retired_attempt(head.data), store_of(path).sizes(path))


def _replace(path: str, head: Head, data: bytes) -> Head:
    now = commit(path, data, head, lambda now: now == head)
    if now.data != data:
        raise BusyError(f"another save to {path!r} was published, or deleted, meanwhile; what is there now stays")
    return now


def _remove(path: str, attempt: str, sizes: dict[str, int]) -> Removed:
    """Remove the objects of ``attempt``, and what was added to it."""
    attempts = attempts_in(sizes)
    names = [name for name in (*attempts.pop(attempt, []), METRICS_NAME, PINNED_NAME) if name in sizes]
    if METADATA_NAME in sizes and is_marked(path):  # of a directory that was copied up
        names.append(METADATA_NAME)
    problems = []
    try:
        store_of(path).delete([f"{path}/{name}" for name in names])
    except CheckpointError as error:
        problems.append(f"objects of the attempt {attempt} stay at {path!r}: {error.message}")
        left = store_of(path).sizes(path)
        names = [name for name in names if name not in left]
    if attempts:
        problems.append(
            f"objects of the unpublished attempts {', '.join(attempts)} stay at {path!r}: nothing tells whether their "
            "savers live; sweep removes those that you name"
        )
    return Removed(attempt, {name: sizes[name] for name in names}, tuple(problems))


def _attempt(head: Head) -> str:
    try:
        return decode_summary(head.data, path=MANIFEST_NAME)[0].attempt
    except (CorruptError, UnsupportedVersionError):
        return _UNREADABLE


def sweep_store(root: str, *, delete: bool, named: Collection[str]) -> SweepReport:
    """What ``sweep`` does in a store."""
    folders: dict[str, list[Found]] = defaultdict(list)
    for found in store_of(root).listed(root):
        folder, _, name = found.name.rpartition("/")
        folders[f"{root}/{folder}".rstrip("/")].append(found._replace(name=name))
    if not folders:
        raise NotFoundError(f"there is nothing at {root!r} to sweep")
    leftovers: list[Leftover] = []
    problems: list[str] = []
    for path, objects in sorted(folders.items()):
        try:
            leftovers += _sweep_folder(path, {each.name: each for each in objects}, delete=delete, named=named)
        except CheckpointError as error:
            problems.append(error.message)
    return SweepReport(root=root, directories=len(folders), leftovers=tuple(leftovers), problems=tuple(problems))


def _sweep_folder(path: str, objects: dict[str, Found], *, delete: bool, named: Collection[str]) -> list[Leftover]:
    attempts = attempts_in(objects)
    if not attempts:
        return []
    # Read after the listing: what was published meanwhile is seen.
    head = read_head(path)
    published = _attempt(head) if head is not None and head.is_live else ""
    retired = retired_attempt(head.data) if head is not None and not head.is_live else ""
    leftovers = []
    for attempt, names in attempts.items():
        if attempt == published:
            continue
        newest = max(objects[name].modified_s for name in names)
        age = f"its newest object is {max(0.0, time.time() - newest) / 3600:,.1f} hours old"
        verdict: Verdict = "unknown"
        reason = f"nothing tells whether its saver lives; {age}"
        if published == _UNREADABLE:
            reason = f"{MANIFEST_NAME} cannot be read, so the objects that it needs are unknown; {age}"
        elif attempt == retired:
            verdict, reason = "dead", "its checkpoint was deleted"
        elif attempt in named:
            verdict, reason = "dead", "named by the caller"
        removed: tuple[str, ...] = ()
        if delete and verdict == "dead":
            store_of(path).delete([f"{path}/{name}" for name in names])
            removed = tuple(names)
        sizes = sum(objects[name].bytes for name in names)
        leftovers.append(
            Leftover(
                directory=path,
                attempt=attempt,
                files=tuple(names),
                bytes=sizes,
                verdict=verdict,
                reason=reason,
                removed=removed,
            )
        )
    return leftovers
