"""The commit: a checkpoint is there from the moment its manifest has its name, and takes the place of one in torch's
format.

A native checkpoint is there while ``manifest.json`` is, one in torch's format while ``.metadata`` is: two names, which
no file system changes in one step. So whoever publishes over the other format first leaves a note that names both, by
the digests of these files, and says which one counts. Then the new one gets its name, and that is the one step; the old
one is removed after it. Whoever finds both looks for the note about just these two. Where there is none, somebody else
(torch itself) wrote one of them, and nobody can tell which one is meant: that is an error.

Savers publish one after the other, by the lock of the directory: so each knows what it replaces. Who cannot have the
lock, because there is none or because a saver that was stopped holds it, goes on without, but does not replace the
other format: only one at a time removes what is not its own, so that no two can remove each other's.

The order is the protocol. By the time ``publish`` is called every writer has synced its data files and the directory;
then: index, manifest under a name of its attempt (each synced), the directory, then the name itself, then the directory
again. Only then may anyone be told. Files of the replaced checkpoint go last, so that at no instant there is none. The
marker for programs that look for torch's name, if one is wanted, comes after that. No lock file, no clock.

The lock of the index is held from the moment it exists until the checkpoint is published, and only then are the data
files looked at for the last time. A sweep holds that lock while it removes anything of an attempt: so either it is
refused, or what it removed is missed here, whichever rank died meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from holdfast._io import files, locks, posix
from holdfast._io.stores import store_of
from holdfast._native.manifest import (
    MOST_TOMBSTONE_BYTES,
    Manifest,
    Summary,
    decode_manifest,
    decode_summary,
    encode_manifest,
    is_retired,
)
from holdfast._native.statistics import statistics_entry
from holdfast._process import Ending
from holdfast._torch_codec.metadata_file import (
    MARKER,
    METADATA_NAME,
    NOTE_PREFIX,
    data_files_of,
    is_marker,
    metadata_name,
)
from holdfast._values.digest import digest, to_hex
from holdfast._values.dtypes import MAX_MANIFEST_BYTES, MAX_METADATA_BYTES
from holdfast.errors import AlreadyPublishedError, BusyError, CheckpointError, CorruptError, StorageError

MANIFEST_NAME = "manifest.json"
_MOST_NOTE_BYTES = 256

Format = Literal["native", "torch"]
_HEADS: tuple[tuple[Format, str], ...] = (
    ("native", MANIFEST_NAME),
    ("torch", METADATA_NAME),
    ("torch", metadata_name(0)),  # of rank 0, where ranks saved apart
)


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
                "format); remove the one of these two files that you do not want, or choose the reader: "
                "storage_reader=NativeReader(path) or FileSystemReader(path)",
                path=directory,
            )


def files_of(manifest: Summary, metadata: object) -> set[str]:
    """The other files of the native checkpoint that ``manifest``, with this ``metadata``, describes."""
    statistics = statistics_entry(manifest, metadata)
    tables = [manifest.index.name] if statistics is None else [manifest.index.name, statistics.name]
    return {*tables, *(file.name for file in manifest.files)}


def formats_at(path: str | os.PathLike[str]) -> list[Format]:
    """The formats that have a checkpoint in the directory ``path``, whichever of them counts."""
    return list(_heads(os.fspath(path)))


class Turn:
    """The turn to publish in ``directory``, in the format ``own``, from ``take`` until ``lock`` is released.

    ``note`` is where a note goes, if there is to be one; ``name`` is of this save alone.
    """

    def __init__(self, directory: str, own: Format, *, name: str) -> None:
        self.note = os.path.join(directory, f"{NOTE_PREFIX}{name}.tmp")
        self._directory = directory
        self._own: Format = own
        self._other: Format = "torch" if own == "native" else "native"
        self._files: list[str] = []
        self.replaced: list[str] = []
        self._is_alone = False
        self.lock = locks.DirectoryLock(directory)

    def take(self) -> None:
        with contextlib.suppress(BusyError):
            self._is_alone = self.lock.acquire()

    def announce(self, head: bytes, *, overwrite: bool) -> Collection[Format]:
        """Have ``head``, the contents of the file that is about to get its name, count and not the other format's.

        The formats that are there. For the other one a note is left, which is to be removed if ``head`` does not get
        its name, and is durable once the directory is synced. AlreadyPublishedError where the other must stay.
        """
        found = _heads(self._directory)
        if self._other not in found:
            return found
        if not (overwrite and self._is_alone):
            raise other_format_stays(self._directory, self._own)
        self.replaced = all_heads(self._directory, self._other)
        self._files = files_of_heads(self._directory, self.replaced)
        other = _read(self._directory, found[self._other])
        digests = {self._own: digest(head), self._other: digest(other)}
        posix.write_new(self.note, _note(self._own, digests))
        return found

    def remove_other(self) -> None:
        """Remove the checkpoint of the other format, durably; what is published counts, and is durable."""
        for head in self.replaced:
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
    found: dict[Format, str] = {}
    # One request tells of all files in a folder of a store.
    sizes = store_of(directory).sizes(directory) if "://" in directory else None
    for kind, name in _HEADS:
        if kind in found:
            continue
        if sizes is None:
            status = posix.file_status(os.path.join(directory, name))
            size = None if status is None or stat.S_ISDIR(status.st_mode) else status.st_size
        else:
            size = sizes.get(name)
        is_short = name == MANIFEST_NAME and (size or 0) <= MOST_TOMBSTONE_BYTES
        if (
            size is not None
            and not (is_short and _is_retired(directory))
            and not (name == METADATA_NAME and is_marked(directory))
        ):
            found[kind] = name
    return found


def _is_retired(directory: str) -> bool:
    try:
        return is_retired(_read(directory, MANIFEST_NAME))
    except CorruptError:  # it is no file
        return False
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return True


def all_heads(directory: str, kind: Format) -> list[str]:
    """All such files of a format, the one that tells last: ranks that saved apart have one each."""
    if kind == "native":
        return [MANIFEST_NAME]
    apart = (name for name in posix.list_names(directory) if name.startswith("__") and name.endswith(METADATA_NAME))
    return [name for name in (*sorted(apart, reverse=True), METADATA_NAME) if _exists(directory, name)]


def is_marked(directory: str) -> bool:
    """Whether ``.metadata`` is just the marker of a native checkpoint, or gone by now."""
    try:
        return is_marker(files.read_whole(os.path.join(directory, METADATA_NAME), limit=_MOST_NOTE_BYTES))
    except CorruptError:  # it is longer, or no file
        return False
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return True


def _exists(directory: str, name: str) -> bool:
    status = posix.file_status(os.path.join(directory, name))
    return status is not None and not stat.S_ISDIR(status.st_mode)


def _read(directory: str, name: str) -> bytes:
    limit = MAX_MANIFEST_BYTES if name == MANIFEST_NAME else MAX_METADATA_BYTES
    return files.read_whole(os.path.join(directory, name), limit=limit)


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
    notes: dict[str, bytes] = {}
    for name in files.list_names(directory):
        if name.startswith(NOTE_PREFIX):
            with contextlib.suppress(StorageError, CorruptError):
                notes[name] = files.read_whole(os.path.join(directory, name), limit=_MOST_NOTE_BYTES)
    return notes


def files_of_heads(directory: str, heads: list[str]) -> list[str]:
    """The other files that ``heads`` name; none of one that cannot be read."""
    names: set[str] = set()
    for head in heads:
        with contextlib.suppress(CheckpointError):
            data, path = _read(directory, head), os.path.join(directory, head)
            if head == MANIFEST_NAME:
                manifest = decode_manifest(data, path=path)
                names |= files_of(manifest, manifest.metadata)
            else:
                names |= data_files_of(data, path)
    return sorted(names)


def publish(
    directory: str, manifest: Manifest, tables: Mapping[str, bytes], *, overwrite: bool, marks: bool = False
) -> None:
    """Make the checkpoint visible and durable; on an error before it has its name, nothing of it is left.

    ``tables`` are other files by name, the index first; its data files must be there. Where only its durability could
    not be confirmed, it stays, and so do the files of the one that it replaced: the disk may come back with either.
    AlreadyPublishedError when there is one and ``overwrite`` is not set: of several savers exactly one succeeds. With
    ``marks``, programs that look for torch's ``.metadata`` find a marker, from after the checkpoint is durable: they
    never find one that is not whole.
    """
    attempt, encoded = manifest.attempt, encode_manifest(manifest)
    target = os.path.join(directory, MANIFEST_NAME)
    (index_path, index), *others = [(os.path.join(directory, name), table) for name, table in tables.items()]
    staged = os.path.join(directory, f"manifest-{attempt}.tmp")
    turn = Turn(directory, "native", name=attempt)
    passing = Ending(turn.lock.release)
    replaced: list[str] = []
    # All that there may be, because an interrupt may come right after the fact.
    written = [index_path, *[path for path, _ in others], staged, turn.note]
    with contextlib.ExitStack() as held, passing, passing:
        try:
            held.enter_context(locks.new_file(index_path, index))
            for path, table in others:
                posix.write_new(path, table)
            for file in manifest.files:
                path = os.path.join(directory, file.name)
                status = posix.file_status(path)
                if status is None or not stat.S_ISREG(status.st_mode) or status.st_size != file.bytes:
                    message = f"{path!r} is not what was written a moment ago; save again"
                    raise StorageError(message, errno=errno.ESTALE, path=path)
            posix.write_new(staged, encoded)
            turn.take()
            if "native" in turn.announce(encoded, overwrite=overwrite) and overwrite:
                with contextlib.suppress(CheckpointError):  # nothing that says which files are its own
                    replaced = sorted(files_of(*read_summary(directory)))
            # Otherwise a crash might keep the name of the manifest, and lose that of the index.
            posix.sync_directory(directory)
            if overwrite:
                posix.replace(staged, target)
            else:
                posix.link_new(staged, target)
        except BaseException as error:
            # Names that were taken are somebody else's.
            taken = error.path if isinstance(error, StorageError) and error.errno == errno.EEXIST else None
            # An interrupt may come right after the fact, and a network may lose the answer.
            published = is_published(directory, attempt)
            if published is False:
                for path in itertools.takewhile(lambda path: path != taken, written):
                    with contextlib.suppress(StorageError):
                        posix.remove(path)
            elif published and not isinstance(error, CheckpointError):
                _conclude(directory, turn, [*replaced, os.path.basename(staged)])
            raise
        try:
            _conclude(directory, turn, replaced)
        except CheckpointError:
            raise  # a sync that failed is not tried again
        except BaseException:
            _conclude(directory, turn, replaced)
            raise
        if marks and not _exists(directory, METADATA_NAME):
            _mark(directory, turn.note)


def _mark(directory: str, staged: str) -> None:
    """Leave the marker of the checkpoint that is published; a file that got the name meanwhile is somebody else's.

    It gets its name when it is whole. Until then it is named like a note, which others remove only when they have the
    turn to publish.
    """
    try:
        posix.write_new(staged, MARKER)
        with contextlib.suppress(AlreadyPublishedError):
            posix.link_new(staged, os.path.join(directory, METADATA_NAME))
        posix.sync_directory(directory)
    except StorageError as error:
        raise StorageError(
            f"the checkpoint in {directory!r} is whole, but programs that look for {METADATA_NAME} will not find it: "
            f"{error.message}; save again",
            errno=error.errno,
            path=error.path,
        ) from error
    finally:
        with contextlib.suppress(StorageError):
            posix.remove(staged)


def _conclude(directory: str, turn: Turn, replaced: Iterable[str]) -> None:
    """Make the name durable, then remove what was ``replaced``, in either format."""
    posix.sync_directory(directory)
    if turn.replaced:
        turn.remove_other()
    for name in replaced:
        # What cannot be removed is invisible, and a later sweep's business.
        with contextlib.suppress(StorageError):
            posix.remove(os.path.join(directory, name))


def is_published(directory: str, attempt: str) -> bool | None:
    """Whether the checkpoint of ``attempt`` is visible; None where one cannot tell: then nothing of it may go."""
    try:
        return read_manifest(directory).attempt == attempt
    except StorageError as error:
        return False if error.errno == errno.ENOENT else None
    except CheckpointError:
        return False


def check_unpublished(directory: str) -> None:
    """AlreadyPublishedError when a checkpoint has the name: better now than after writing everything."""
    if formats_at(directory):
        raise AlreadyPublishedError.at(directory)


def read_manifest(directory: str) -> Manifest:
    """The manifest of the checkpoint in ``directory``, checked; StorageError with ENOENT when there is none."""
    return decode_manifest(read_manifest_bytes(directory), path=os.path.join(directory, MANIFEST_NAME))


def read_summary(directory: str) -> tuple[Summary, object]:
    """What the same manifest says of its save and its files; and the user's metadata, still encoded."""
    return decode_summary(read_manifest_bytes(directory), path=os.path.join(directory, MANIFEST_NAME))


def read_manifest_bytes(directory: str) -> bytes:
    """The same as it is in the file, unchecked; one that only says that there is none counts as none."""
    path = os.path.join(directory, MANIFEST_NAME)
    data = files.read_whole(path, limit=MAX_MANIFEST_BYTES)
    if is_retired(data):
        raise StorageError(f"the checkpoint at {directory!r} was deleted", errno=errno.ENOENT, path=path)
    return data


@dataclass(slots=True, kw_only=True)
class WriterNumber:
    """What the coordinator tells each rank through ``SavePlan.storage_data``: ``failed`` names attempts to be removed,
    ``not_there`` directories that there were not before.

    A planner that keeps its plans brings an old one back: ``is_spent`` is how it is known.
    """

    attempt: str
    writer: int
    writers: int = 1
    failed: tuple[str, ...] = ()
    not_there: tuple[str, ...] = ()
    is_spent: bool = False
