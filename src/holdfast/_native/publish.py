"""The commit: a checkpoint is there from the moment its manifest has its name, and not before.

The order is the protocol. By the time ``publish`` is called every writer has synced its data files and the directory;
then: index, manifest under a name of its attempt (each synced), the directory, then the name itself, then the directory
again. Only then may anyone be told. Files of the replaced checkpoint go last, so that at no instant there is none. No
lock file, no clock. Savers take turns at it, so that each knows what it replaces; ``formats`` tells how it replaces a
checkpoint in torch's format.

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
from collections.abc import Iterable

from holdfast._io import locks, posix
from holdfast._native.formats import MANIFEST_NAME, Turn, files_of, formats_at
from holdfast._native.manifest import Manifest, decode_manifest
from holdfast._values.ending import Ending
from holdfast._values.limits import MAX_MANIFEST_BYTES
from holdfast.errors import AlreadyPublishedError, CheckpointError, StorageError


def publish(
    directory: str,
    manifest: bytes,
    *,
    attempt: str,
    index_name: str,
    index: bytes,
    data_files: Iterable[tuple[str, int]],
    overwrite: bool,
) -> None:
    """Make the checkpoint visible and durable; on an error before it has its name, nothing of it is left.

    ``data_files`` are the names and sizes of the files that hold its data, and must be there.
    Where only its durability could not be confirmed, it stays, and so do the files of the one that it replaced: the
    disk may come back with either. AlreadyPublishedError when there is one and ``overwrite`` is not set: of several
    savers exactly one succeeds.
    """
    target = os.path.join(directory, MANIFEST_NAME)
    index_path = os.path.join(directory, index_name)
    staged = os.path.join(directory, f"manifest-{attempt}.tmp")
    turn = Turn(directory, "native", name=attempt)
    passing = Ending(turn.pass_on)
    replaced: list[str] = []
    # All that there may be, because an interrupt may come right after the fact.
    written = [index_path, staged, turn.note]
    with contextlib.ExitStack() as held, passing, passing:
        try:
            held.enter_context(locks.new_file(index_path, index))
            for name, size in data_files:
                _check_data_file(os.path.join(directory, name), size)
            posix.write_new(staged, manifest)
            turn.take()
            replaced = _published_files(directory) if overwrite else []
            turn.announce(manifest, overwrite=overwrite)
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
            if not may_be_published(directory, attempt):
                for path in itertools.takewhile(lambda path: path != taken, written):
                    with contextlib.suppress(StorageError):
                        posix.remove(path)
            elif not isinstance(error, CheckpointError) and _is_published(directory, attempt):
                _conclude(directory, turn, [*replaced, os.path.basename(staged)])
            raise
        try:
            _conclude(directory, turn, replaced)
        except CheckpointError:
            raise  # a sync that failed is not tried again
        except BaseException:
            _conclude(directory, turn, replaced)
            raise


def _conclude(directory: str, turn: Turn, replaced: Iterable[str]) -> None:
    """Make the name durable, then remove what was ``replaced``, in either format."""
    posix.sync_directory(directory)
    turn.remove_other()
    for name in replaced:
        # What cannot be removed is invisible, and a later sweep's business.
        with contextlib.suppress(StorageError):
            posix.remove(os.path.join(directory, name))


def _is_published(directory: str, attempt: str) -> bool:
    try:
        return read_manifest(directory).attempt == attempt
    except CheckpointError:
        return False


def _check_data_file(path: str, size: int) -> None:
    status = posix.file_status(path)
    if status is None or not stat.S_ISREG(status.st_mode) or status.st_size != size:
        raise StorageError(f"{path!r} is not what was written a moment ago; save again", errno=errno.ESTALE, path=path)


def may_be_published(directory: str, attempt: str) -> bool:
    """Whether the checkpoint of ``attempt`` is visible, or one cannot tell: then nothing of it may be removed."""
    try:
        return read_manifest(directory).attempt == attempt
    except StorageError as error:
        return error.errno != errno.ENOENT
    except CheckpointError:
        return False


def check_unpublished(directory: str) -> None:
    """AlreadyPublishedError when a checkpoint has the name: better now than after writing everything."""
    if formats_at(directory):
        raise AlreadyPublishedError(
            f"{directory!r} holds a checkpoint already; choose another name, or pass overwrite=True"
        )


def read_manifest(directory: str) -> Manifest:
    """The manifest of the checkpoint in ``directory``, checked; StorageError with ENOENT when there is none."""
    return decode_manifest(read_manifest_bytes(directory), path=os.path.join(directory, MANIFEST_NAME))


def read_manifest_bytes(directory: str) -> bytes:
    """The same as it is in the file, unchecked."""
    return posix.read_whole(os.path.join(directory, MANIFEST_NAME), limit=MAX_MANIFEST_BYTES)


def _published_files(directory: str) -> list[str]:
    try:
        return sorted(files_of(read_manifest(directory)))
    except CheckpointError:
        return []  # nothing there, or nothing that says which files are its own
