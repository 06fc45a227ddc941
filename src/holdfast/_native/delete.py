"""Deleting a checkpoint: one atomic step makes it no checkpoint any more, and only then are its files removed.

That step undoes the last step of a save: ``manifest.json`` becomes the unpublished manifest of its attempt. When that
is durable, the files are like those of a killed save, and ``sweep`` removes them. So a deletion that is cut off leaves
the whole checkpoint, or files that nobody takes for one; a sweep or another deletion removes those. A reader that is at
work finds no checkpoint in the end, never a damaged one: it looks for the manifest before it reports damage.

In torch's format, the files that make it a checkpoint go first, and then the files that they name.

Never follows a link, and removes only files that have a name of ours or are named by the checkpoint.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass

from holdfast import events
from holdfast._io import locks, posix
from holdfast._io.locks import Directory
from holdfast._io.urls import is_store_url
from holdfast._native.catalog import read_published
from holdfast._native.leftovers import METRICS_NAME, PINNED_NAME, attempts_in
from holdfast._native.manifest import decode_summary
from holdfast._native.publish import MANIFEST_NAME, all_heads, files_of_heads, format_at, formats_at, is_marked
from holdfast._native.store_removal import delete_in_store
from holdfast._native.sweep import living_writer, sweep_directory
from holdfast._torch_codec.metadata_file import METADATA_NAME
from holdfast._values.dtypes import MAX_MANIFEST_BYTES
from holdfast._values.shown import short_repr
from holdfast.errors import BusyError, CorruptError, NotACheckpointError, StorageError

__all__ = ["DeleteReport", "delete"]

_DAMAGED = "damaged"
"""Takes the place of the attempt, if the manifest that names it cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteReport:
    """What a deletion removed: ``files``, which had ``bytes`` in all. ``problems`` says what could not be removed.

    ``attempt`` is that of the native checkpoint that was there, or "" if there was none.
    """

    __repr__ = short_repr

    path: str
    attempt: str
    files: tuple[str, ...]
    bytes: int
    problems: tuple[str, ...]


def delete(path: str | os.PathLike[str], *, force: bool = False) -> DeleteReport:
    """Delete the checkpoint at ``path``, of either format, and its directory if nothing else is in it.

    When this returns, the checkpoint is gone, durably. What killed deletions and saves left there is removed too.

    Args:
        path: the directory of the checkpoint.
        force: delete it even if it is pinned.

    Raises:
        NotFoundError: there is no checkpoint, and nothing is left of one.
        BusyError: a save to the path is under way, or the checkpoint is pinned. Nothing was changed.
        CorruptError: there are two checkpoints, and nothing tells which one is meant.
        StorageError: the file system refused.
    """
    path = posix.absolute(path)
    if is_store_url(path):
        return delete_at_url(path, force=force, why_it_stays=lambda: "")
    if "://" in path:
        raise ValueError("only directories and object stores are known; at this URL, use the tools of its file system")
    with events.Operation("delete", path) as operation, _open(path) as directory:
        found = {name: directory.status(name) for name in directory.names()}
        with locks.locked_directory(path):
            _check_unused(directory, force=force)
            attempt, named = _hide(directory)
            _remove_extras(directory)
        problems: list[str] = []
        for leftover in sweep_directory(directory, problems, delete=True, named={attempt}):
            if set(leftover.removed) != set(leftover.files):
                problems.append(f"files of the attempt {leftover.attempt} stay in {path!r}: {leftover.reason}")
        for name in named:
            directory.remove(name)
        gone = {name: status for name, status in found.items() if directory.status(name) is None}
        posix.remove_empty_directories([path])
        operation.attempt = "" if attempt == _DAMAGED else attempt
        nbytes = sum(status.st_size for status in gone.values() if status is not None)
        operation.tell("removed", nbytes=nbytes)
    return DeleteReport(path=path, attempt=operation.attempt, files=tuple(gone), bytes=nbytes, problems=tuple(problems))


def delete_at_url(path: str, *, force: bool, why_it_stays: Callable[[], str]) -> DeleteReport:
    """The same in an object store; it stays if there is a reason when it has just been made no checkpoint any more."""
    with events.Operation("delete", path) as operation:
        removed = delete_in_store(path, force=force, why_it_stays=why_it_stays)
        operation.attempt = removed.attempt
        nbytes = sum(removed.sizes.values())
        operation.tell("removed", nbytes=nbytes)
    files, problems = tuple(removed.sizes), removed.problems
    return DeleteReport(path=path, attempt=removed.attempt, files=files, bytes=nbytes, problems=problems)


def finish_deletion(path: str) -> None:
    """Remove what a killed deletion or save left in the directory ``path``, unless a checkpoint or a saver is there."""
    with _open(path) as directory:
        with locks.locked_directory(path):
            if formats_at(path) or living_writer(directory) is not None:
                return
            _remove_extras(directory)
        for _ in sweep_directory(directory, [], delete=True):
            pass
        posix.remove_empty_directories([path])


def _remove_extras(directory: Directory) -> None:
    """Remove what was added to a checkpoint that is gone now."""
    for name in (METRICS_NAME, PINNED_NAME, *([METADATA_NAME] if is_marked(directory.path) else ())):
        directory.remove(name)


def _open(path: str) -> Directory:
    try:
        return Directory.open(path, flags=os.O_NOFOLLOW)
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        read_published(path)  # its error says best what is there instead
        raise NotACheckpointError(
            f"{path!r} is a link; delete the checkpoint that it leads to, by its own path"
        ) from None


def _check_unused(directory: Directory, *, force: bool) -> None:
    """BusyError if somebody needs what is there; NotFoundError if nothing is there."""
    names = directory.names()
    # Without a checkpoint beside it, .metadata is a marker that was left.
    is_left = bool(attempts_in(names) or {METRICS_NAME, PINNED_NAME, METADATA_NAME} & set(names))
    if not is_left and not formats_at(directory.path):
        read_published(directory.path)
    living = living_writer(directory)
    if living is not None:
        raise BusyError(f"a save to {directory.path!r} is under way: {living}; wait for it to end")
    if PINNED_NAME in names and not force:
        raise BusyError(f"{directory.path!r} is pinned; unpin it first, or pass force=True")


def _hide(directory: Directory) -> tuple[str, list[str]]:
    """Make it no checkpoint any more, durably; returns its attempt, and the files that torch's metadata named."""
    counts = format_at(directory.path)
    attempt, named = "", list[str]()
    if is_marked(directory.path):
        directory.remove(METADATA_NAME)
    # Of two formats, the one that counts goes last. Otherwise the other would count for a moment.
    for kind in sorted(formats_at(directory.path), key=lambda kind: kind == counts):
        if kind == "torch":
            heads = all_heads(directory.path, kind)
            named = files_of_heads(directory.path, heads)
            for head in reversed(heads):
                directory.remove(head)
        else:
            attempt = _hide_native(directory)
        directory.sync()
    return attempt, named


def _hide_native(directory: Directory) -> str:
    try:
        data = directory.read(MANIFEST_NAME, limit=MAX_MANIFEST_BYTES)
        attempt = decode_summary(data, path=directory.path_of(MANIFEST_NAME))[0].attempt
    except CorruptError:
        attempt = _DAMAGED
    hidden = f"manifest-{attempt}.tmp"
    # A killed saver may have left both names on one file. Then a rename would do nothing.
    directory.remove(hidden)
    directory.rename(MANIFEST_NAME, hidden)
    return attempt
