"""One directory holds one checkpoint, native or in torch's format: which one it is, and how one replaces the other.

A native checkpoint is there while ``manifest.json`` is, one in torch's format while ``.metadata`` is: two names, which
no file system changes in one step. So whoever publishes over the other format first leaves a note that names both, by
the digests of these files, and says which one counts. Then the new one gets its name, and that is the one step; the old
one is removed after it. Whoever finds both looks for the note about just these two. Where there is none, somebody else
(torch itself) wrote one of them, and nobody can tell which one is meant: that is an error.

Savers publish one after the other, by the lock of the directory: so each knows what it replaces. Who cannot have the
lock, because there is none or because a saver that was stopped holds it, goes on without, but does not replace the
other format: only one at a time removes what is not its own, so that no two can remove each other's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import Literal

from holdfast._io import locks, posix
from holdfast._native.manifest import Manifest, decode_manifest
from holdfast._torchformat.places import METADATA_NAME, NOTE_PREFIX, metadata_name
from holdfast._torchformat.unpickling import data_files_of
from holdfast._values.digest import digest, to_hex
from holdfast._values.limits import MAX_MANIFEST_BYTES, MAX_METADATA_BYTES
from holdfast.errors import AlreadyPublishedError, CheckpointError, CorruptError, StorageError

MANIFEST_NAME = "manifest.json"
_MOST_NOTE_BYTES = 256

Format = Literal["native", "torch"]


def format_at(path: str | os.PathLike[str]) -> Format | None:
    """The format of the checkpoint in the directory ``path``; None when there is none.

    CorruptError when there are two, and nothing tells which one is meant.
    """
    directory = os.fspath(path)
    while True:
        # Twice: one may come, and the other go, while it is looked for them.
        found = _heads(directory) or _heads(directory)
        if len(found) < 2:
            return next(iter(found), None)
        digests = _digests(directory, found)
        notes = _notes(directory)
        for winner in found:
            if digests is not None and _note(winner, digests) in notes.values():
                return winner
        # A saver that replaced one by the other may have removed it, and its note, meanwhile.
        if digests is not None and _digests(directory, _heads(directory)) == digests:
            raise CorruptError(
                f"{directory!r} holds two checkpoints, {found['native']} (native) and {found['torch']} (torch's "
                "format), and nothing tells which one is meant; remove the one of these two files that is not, or name "
                "the one to read: storage_reader=NativeReader(path) or FileSystemReader(path)",
                path=directory,
            )


def files_of(manifest: Manifest) -> set[str]:
    """The other files of the native checkpoint that ``manifest`` describes."""
    return {manifest.index.name, *(file.name for file in manifest.files)}


def formats_at(path: str | os.PathLike[str]) -> list[Format]:
    """The formats that have a checkpoint in the directory ``path``, whichever of them counts."""
    return list(_heads(os.fspath(path)))


class Turn:
    """The turn to publish in ``directory``, in the format ``own``, from ``take`` to ``pass_on``.

    ``note`` is where a note goes, if there is to be one; ``name`` is of this save alone.
    """

    def __init__(self, directory: str, own: Format, *, name: str) -> None:
        self.note = os.path.join(directory, f"{NOTE_PREFIX}{name}.tmp")
        self._directory = directory
        self._own: Format = own
        self._other: Format = "torch" if own == "native" else "native"
        self._files: list[str] = []
        self._heads: list[str] = []
        self._is_alone = False
        self._lock = locks.DirectoryLock(directory)

    def take(self) -> None:
        """Have the turn."""
        self._is_alone = self._lock.acquire()

    def pass_on(self) -> None:
        """Let others have it; also again."""
        self._lock.release()

    def announce(self, head: bytes, *, overwrite: bool) -> bool:
        """Have ``head``, the contents of the file that is about to get its name, count and not the other format's.

        Whether a note was needed, which is to be removed if it does not get it. The note is durable once the directory
        is synced. AlreadyPublishedError where the other must stay.
        """
        found = _heads(self._directory)
        if self._other not in found:
            return False
        if not (overwrite and self._is_alone):
            raise other_format_stays(self._directory, self._own)
        self._heads = _all_heads(self._directory, self._other)
        self._files = _files_of(self._directory, self._heads)
        other = _read(self._directory, found[self._other])
        digests = {self._own: digest(head), self._other: digest(other)}
        posix.write_new(self.note, _note(self._own, digests))
        return True

    def remove_other(self) -> None:
        """Remove the checkpoint of the other format, durably; what is published counts, and is durable."""
        if not self._heads:
            return
        for head in self._heads:
            posix.remove(os.path.join(self._directory, head))
        posix.sync_directory(self._directory)
        for name in (*_notes(self._directory), *self._files):
            # What cannot be removed is invisible.
            with contextlib.suppress(StorageError):
                posix.remove(os.path.join(self._directory, name))


def other_format_stays(directory: str, own: Format) -> AlreadyPublishedError:
    """The error of a save in the format ``own`` that finds the other one and must not, or cannot, replace it."""
    kind = "torch's format" if own == "native" else "the native format"
    return AlreadyPublishedError(
        f"{directory!r} holds a checkpoint in {kind}, which this save may not replace; remove it, or use another name"
    )


def _heads(directory: str) -> dict[Format, str]:
    """The file whose presence is the checkpoint, for each format that has one."""
    torchs = next((name for name in (METADATA_NAME, metadata_name(0)) if _exists(directory, name)), None)
    found: dict[Format, str] = {"native": MANIFEST_NAME} if _exists(directory, MANIFEST_NAME) else {}
    return found if torchs is None else {**found, "torch": torchs}


def _all_heads(directory: str, kind: Format) -> list[str]:
    """All such files of a format, the one that tells last: ranks that saved apart have one each."""
    if kind == "native":
        return [MANIFEST_NAME]
    apart = (name for name in posix.list_names(directory) if name.startswith("__") and name.endswith(METADATA_NAME))
    return [name for name in (*sorted(apart, reverse=True), METADATA_NAME) if _exists(directory, name)]


def _exists(directory: str, name: str) -> bool:
    status = posix.file_status(os.path.join(directory, name))
    return status is not None and not stat.S_ISDIR(status.st_mode)


def _read(directory: str, name: str) -> bytes:
    limit = MAX_MANIFEST_BYTES if name == MANIFEST_NAME else MAX_METADATA_BYTES
    return posix.read_whole(os.path.join(directory, name), limit=limit)


def _digests(directory: str, found: dict[Format, str]) -> dict[Format, int] | None:
    """The digest of each file of ``found``; None when one is gone."""
    try:
        return {kind: digest(_read(directory, name)) for kind, name in found.items()}
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return None


def _note(winner: Format, digests: dict[Format, int]) -> bytes:
    return f"{winner} counts of native {to_hex(digests['native'])} and torch {to_hex(digests['torch'])}\n".encode()


def _notes(directory: str) -> dict[str, bytes]:
    """The notes in ``directory``, by name."""
    notes: dict[str, bytes] = {}
    for name in posix.list_names(directory):
        if name.startswith(NOTE_PREFIX):
            with contextlib.suppress(StorageError, CorruptError):
                notes[name] = posix.read_whole(os.path.join(directory, name), limit=_MOST_NOTE_BYTES)
    return notes


def _files_of(directory: str, heads: list[str]) -> list[str]:
    """The other files that ``heads`` name; none of one that cannot be read."""
    names: set[str] = set()
    for head in heads:
        with contextlib.suppress(CheckpointError):
            data, path = _read(directory, head), os.path.join(directory, head)
            names |= files_of(decode_manifest(data, path=path)) if head == MANIFEST_NAME else data_files_of(data, path)
    return sorted(names)
