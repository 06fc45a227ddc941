"""Deleting a checkpoint: in one step it is no checkpoint any more, and only then do its files go.

The step is that of a save in reverse: ``manifest.json`` becomes the unpublished manifest of its attempt. When that is
durable, the attempt is what a killed save leaves, and goes as ``sweep`` has it go. So a deletion that is cut off leaves
the whole checkpoint, or files that nobody takes for one, which a sweep or another deletion removes. A reader that is at
work finds no checkpoint in the end, never a damaged one: it looks for the manifest before it speaks of damage.

In torch's format the files that make it a checkpoint go first, and then those that they name.

Never follows a link, and never removes a file that has another name than those of a checkpoint.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from holdfast import events
from holdfast._io import locks, posix
from holdfast._io.locks import Directory
from holdfast._native.catalog import read_published
from holdfast._native.manifest import decode_summary
from holdfast._native.publish import MANIFEST_NAME, all_heads, files_of_heads, format_at, formats_at, is_marked
from holdfast._native.sweep import attempts_in, living_writer, sweep_directory
from holdfast._torch_codec.metadata_file import METADATA_NAME
from holdfast._values.dtypes import MAX_MANIFEST_BYTES
from holdfast.errors import BusyError, CorruptError, NotACheckpointError, StorageError

__all__ = ["DeleteReport", "delete"]

METRICS_NAME, PINNED_NAME = "metrics.json", "pinned"
"""What may be written into the directory of a published step: metrics that came later; a file that protects it."""

_DAMAGED = "damaged"
"""Stands for the attempt that a manifest would name if it could be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteReport:
    """What a deletion removed: ``files`` of ``bytes`` in all. ``problems`` are what could not be removed, and why.

    ``attempt`` is that of the native checkpoint that was there, else "".
    """

    path: str
    attempt: str
    files: tuple[str, ...]
    bytes: int
    problems: tuple[str, ...]


def delete(path: str | os.PathLike[str], *, force: bool = False) -> DeleteReport:
    """Delete the checkpoint at ``path``, of either format, and its directory if nothing else is in it.

    When this returns, there durably is no checkpoint. It also removes what deletions and saves that were killed have
    left there.

    Args:
        path: the directory of the checkpoint.
        force: delete it even if it is pinned.

    Raises:
        NotFoundError: there is no checkpoint, nor anything left of one.
        BusyError: a save to the path is under way, or the checkpoint is pinned; nothing was changed.
        CorruptError: there are two checkpoints, and nothing tells which one is meant.
        StorageError: the file system refused.
    """
    if "://" in posix.text_path(path):
        raise ValueError("only local checkpoints can be deleted; at a URL, use the tools of its file system")
    path = posix.absolute(path)
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
    return DeleteReport(
        path=path,
        attempt=operation.attempt,
        files=tuple(gone),
        bytes=nbytes,
        problems=tuple(problems),
    )


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
    """Remove what is beside the files of a checkpoint that is none any more."""
    for name in (METRICS_NAME, PINNED_NAME, *([METADATA_NAME] if is_marked(directory.path) else ())):
        directory.remove(name)


def _open(path: str) -> Directory:
    try:
        return Directory.open(path, flags=os.O_NOFOLLOW)
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        read_published(path)  # it says best what is there instead
        raise NotACheckpointError(
            f"{path!r} is a link; delete the checkpoint that it leads to, by its own path"
        ) from None


def _check_unused(directory: Directory, *, force: bool) -> None:
    """BusyError where somebody needs what is there, NotFoundError where nothing is."""
    names = directory.names()
    # Where no format has a head, .metadata is a marker that was left.
    is_left = bool(attempts_in(names) or {METRICS_NAME, PINNED_NAME, METADATA_NAME} & set(names))
    if not is_left and not formats_at(directory.path):
        read_published(directory.path)
    living = living_writer(directory)
    if living is not None:
        raise BusyError(f"a save to {directory.path!r} is under way: {living}; wait for it to end")
    if PINNED_NAME in names and not force:
        raise BusyError(f"{directory.path!r} is pinned; unpin it first, or pass force=True")


def _hide(directory: Directory) -> tuple[str, list[str]]:
    """Have no checkpoint be there, durably: the attempt of the one that was, and files that only its metadata named."""
    counts = format_at(directory.path)
    attempt, named = "", list[str]()
    if is_marked(directory.path):
        directory.remove(METADATA_NAME)
    # The one that counts goes last, or the other would count.
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
    # A saver that was killed may have left both names on one file; then a rename would do nothing.
    directory.remove(hidden)
    directory.rename(MANIFEST_NAME, hidden)
    return attempt
