"""What a run's steps need of the place that they are in: a directory, or a folder in an object store.

``RunDirectory`` is the one, ``RunInStore`` in ``store_runs.py`` the other.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from holdfast._io import locks, posix
from holdfast._native.delete import DeleteReport, delete, finish_deletion
from holdfast._native.leftovers import METRICS_NAME, PINNED_NAME, READERS_NAME, attempts_in
from holdfast._native.manifest import Summary
from holdfast._native.publish import MANIFEST_NAME, read_summary
from holdfast._native.sweep import sweep, sweep_directory
from holdfast._native.verify import has_its_files
from holdfast._process import Ending
from holdfast._torch_codec.metadata_file import NOTE_PREFIX
from holdfast.errors import (
    BusyError,
    CorruptError,
    NotACheckpointError,
    NotFoundError,
    StorageError,
    UnsupportedVersionError,
)

logger = logging.getLogger("holdfast")

STEP_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")
FOLDER = ".holdfast"
MOST_NOTE_BYTES = 1 << 20
_GONE = (errno.ENOENT, errno.ENOTDIR)

Found = tuple[int, Hashable]
"""The number of a step, and what tells its manifest from others."""


class Run(Protocol):
    """The steps in ``root``. A step is named by its number, and by the ``path`` of its checkpoint."""

    root: str
    looks_at_once: int
    """So many steps are best looked at together."""

    def numbers(self) -> list[int]:
        """The steps that there may be, ascending."""
        ...

    def found(self) -> list[Found]:
        """All steps, ascending."""
        ...

    def found_descending(self) -> Iterator[Found]:
        """The same, the newest first. Old steps are not touched until they are asked for: one of them may be broken."""
        ...

    def reported(self, number: int) -> bytes | None:
        """What was reported for a step that was found."""
        ...

    def is_pinned(self, number: int) -> bool: ...

    def is_whole(self, number: int, known: Summary | None) -> bool:
        """Whether the manifest can be read, and all its files are there in their sizes; ``known`` was just read."""
        ...

    def locked(self, number: int) -> AbstractContextManager[object]:
        """The step is not deleted or replaced during the block, as far as locks can be had; then it is durable."""
        ...

    def change(self, number: int, change: Callable[[bytes | None], bytes]) -> None:
        """Have what was reported be what ``change`` makes of it, durably."""
        ...

    def pin(self, number: int) -> None: ...

    def unpin(self, number: int) -> None: ...

    def held(self) -> set[int]:
        """The steps that readers hold."""
        ...

    def delete(self, number: int, why_it_stays: Callable[[], str], *, force: bool) -> DeleteReport:
        """Delete a step; BusyError if there is a reason why it stays."""
        ...

    def finish_deletions(self) -> None:
        """Remove what deletions left that were cut off."""
        ...

    def claim(self) -> Callable[[], None]:
        """Be the only manager, as far as locks can be had; what is returned ends it. BusyError if there is another."""
        ...

    def remove_leftovers(self) -> None:
        """Remove what killed saves and readers left, as far as it is proven dead, and tell of the rest."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Have the file ``name`` of the folder of the run be ``data``, in one step."""
        ...


class RunDirectory:
    """A directory of a file system, which need not exist yet."""

    looks_at_once = 1

    def __init__(self, root: str) -> None:
        self.root = root

    def _path(self, number: int) -> str:
        return os.path.join(self.root, f"step-{number}")

    def numbers(self) -> list[int]:
        try:
            names = posix.list_directories(self.root)
        except StorageError as error:
            if error.errno == errno.ENOTDIR and posix.exists(self.root):
                raise NotACheckpointError(f"{self.root!r} is a file; the root of a run is a directory") from error
            raise
        return sorted(int(match[1]) for match in map(STEP_NAME.fullmatch, names) if match is not None)

    def found(self) -> list[Found]:
        return list(self.found_descending())[::-1]

    def found_descending(self) -> Iterator[Found]:
        for number in reversed(self.numbers()):
            status = posix.file_status(os.path.join(self._path(number), MANIFEST_NAME))
            if status is not None:
                yield number, (status.st_ino, status.st_mtime_ns, status.st_size)

    def is_pinned(self, number: int) -> bool:
        return posix.exists(os.path.join(self._path(number), PINNED_NAME))

    def reported(self, number: int) -> bytes | None:
        try:
            return posix.read_whole(os.path.join(self._path(number), METRICS_NAME), limit=MOST_NOTE_BYTES)
        except StorageError as error:
            if error.errno not in _GONE:
                raise
            return None

    def is_whole(self, number: int, known: Summary | None) -> bool:
        path = self._path(number)
        try:
            return has_its_files(path, read_summary(path)[0])
        except (CorruptError, UnsupportedVersionError):
            return False
        except StorageError as error:
            if error.errno not in _GONE:
                raise  # it may be whole all the same
            return False

    @contextlib.contextmanager
    def locked(self, number: int) -> Iterator[None]:
        path = self._path(number)
        with locks.locked_directory(path):
            yield
            posix.sync_directory(path)

    def change(self, number: int, change: Callable[[bytes | None], bytes]) -> None:
        path = self._path(number)
        before: bytes | None = None
        with contextlib.suppress(CorruptError):  # too large for one of ours; the listing has logged it
            before = self.reported(number)
        data = change(before)
        # It is named like a note, because a sweep removes notes that are left.
        staged = os.path.join(path, f"{NOTE_PREFIX}{secrets.token_hex(8)}.tmp")
        removing = Ending(lambda: posix.remove(staged))
        with removing, removing:
            posix.write_new(staged, data)
            posix.replace(staged, os.path.join(path, METRICS_NAME))

    def pin(self, number: int) -> None:
        posix.write_new(os.path.join(self._path(number), PINNED_NAME), b"")

    def unpin(self, number: int) -> None:
        posix.remove(os.path.join(self._path(number), PINNED_NAME))

    def held(self) -> set[int]:
        """Where locks cannot be trusted, dead readers count too."""
        readers = os.path.join(self.root, READERS_NAME)
        if not posix.exists(readers):
            return set()
        held: set[str] = set()
        with locks.Directory.open(readers) as directory:
            for reader in sweep_directory(directory, [], delete=False):
                if reader.verdict != "dead":
                    held.update(posix.list_directories(directory.path_of(f"reader-{reader.attempt}")))
        return {int(match[1]) for match in map(STEP_NAME.fullmatch, held) if match is not None}

    def delete(self, number: int, why_it_stays: Callable[[], str], *, force: bool) -> DeleteReport:
        with locks.locked_directory(self.root):
            reason = why_it_stays()
            if reason:
                raise BusyError(reason)
            return delete(self._path(number), force=force)

    def finish_deletions(self) -> None:
        for number in self.numbers():
            with contextlib.suppress(BusyError, NotFoundError):
                finish_deletion(self._path(number))

    def claim(self) -> Callable[[], None]:
        """Take the lock of the run. The log says where locks cannot be trusted."""
        self.numbers()  # raises if the root is a file
        folder, name = os.path.join(self.root, FOLDER), "manager.lock"
        posix.make_directories(folder)
        with locks.Directory.open(folder) as directory:
            is_reliable, kind = locks.are_reliable(directory.descriptor)
            if not is_reliable:
                logger.warning("%r: locks of other hosts may be invisible on %s; have one manager only", folder, kind)
            directory.create(name, [])
            try:
                file = directory.lock(name)
            except StorageError as error:
                if error.errno not in locks.UNSUPPORTED:
                    raise
                return lambda: None  # nothing can be locked
            if file is None:
                holder = directory.read(name, limit=MOST_NOTE_BYTES).decode(errors="replace").strip()
                raise BusyError(
                    f"another CheckpointManager has {self.root!r}: {holder}; close it, or wait for that process to "
                    "end. holdfast.Steps lists, reports, pins and deletes without one"
                )
            who = f"process {os.getpid()} on {socket.gethostname()}"
            # Long enough to cover the line before.
            posix.write_all(file.descriptor, f"{who:<120}\n".encode(), file.path)
            return file.discard

    def remove_leftovers(self) -> None:
        sweep(os.path.join(self.root, FOLDER), delete=True)  # what dead readers left
        for number, _ in self.found():
            path = self._path(number)
            if len(attempts_in(posix.list_names(path))) > 1:  # one is the published one
                sweep(path, delete=True)

    def put(self, name: str, data: bytes) -> None:
        path = os.path.join(self.root, FOLDER, name)
        posix.remove(f"{path}.tmp")
        posix.write_new(f"{path}.tmp", data)
        posix.replace(f"{path}.tmp", path)
