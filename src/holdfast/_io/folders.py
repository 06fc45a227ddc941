"""Folders that become visible as a whole: filled under the name of an attempt, then given their own name in one step.

Several processes fill a folder together. Each of them holds a shared lock of it while it writes: so a folder of an
attempt that nobody holds is dead. At every moment the name has the old folder or the new one. Never follows a link.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable

from holdfast._io import locks, posix
from holdfast._io.direct import OutputFile
from holdfast._process import opened
from holdfast.errors import AlreadyPublishedError, StorageError

_KEEP, _EXCHANGE = 1, 2  # RENAME_NOREPLACE and RENAME_EXCHANGE of Linux
_NO_SUCH_CALL = (errno.EINVAL, errno.ENOSYS)
_INFIX = ".holdfast-"
_TRIES = 100
_PAUSE_S = 0.005


def attempt_path(path: str, attempt: str) -> str:
    """Where the folder ``path`` is filled before it has its name: beside it, so that a rename is enough."""
    return f"{path}{_INFIX}{attempt}"


def attempt_of(name: str) -> str | None:
    """The attempt whose folder has the name ``name``; None for other names."""
    stem, infix, attempt = name.rpartition(_INFIX)
    return attempt if stem and infix and len(attempt) == 16 and set(attempt) <= set("0123456789abcdef") else None


class AttemptFolder(locks.LockedFile):
    """The folder of an attempt, which this process fills beside others; its lock tells that one of them lives.

    Where it has replaced another folder, that one has its old name, and may be all that a power cut leaves. It goes
    with ``abandon`` only where ``replaces`` says so: for who publishes, unless a sync failed.
    """

    replaces = False

    def enter(self) -> None:
        """Make the folder if it is not there yet, and hold its lock."""
        for _ in range(_TRIES):
            with posix.reporting("create", self.path), contextlib.suppress(FileExistsError):
                posix.uninterrupted(os.mkdir, self.path)
            # Between making it and locking it, a sweep may take it for a dead one.
            with posix.reporting("open", self.path):
                try:
                    self._opened.append(opened(map(os.open, (self.path,), (posix.DIRECTORY_FLAGS | os.O_NOFOLLOW,))))
                except FileNotFoundError:
                    continue
                except OSError:
                    posix.remove_empty_directories([self.path])
                    raise
            is_free = self._lock(fcntl.LOCK_SH)
            if is_free and locks.has_name(self.descriptor, self.path):
                return
            posix.close_descriptor(self._opened.pop(), self.path)
            if not is_free:
                time.sleep(_PAUSE_S)
        raise StorageError(f"{self.path!r} was removed while being filled; save again", errno=errno.ENOENT)

    def _lock(self, kind: int) -> bool:
        with posix.reporting("lock", self.path):
            try:
                fcntl.flock(self.descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in locks.UNSUPPORTED:
                    raise
        return True

    def abandon(self) -> None:
        """Leave it; the last one that does removes it. What cannot be removed is left to a sweep."""
        with contextlib.suppress(StorageError):
            is_ours = self.descriptor >= 0 and not self._is_inherited
            if is_ours and self._lock(fcntl.LOCK_EX):
                if locks.has_name(self.descriptor, self.path):
                    _remove(self.path)
                elif self.replaces:
                    remove_folder(self.path)
        self.discard()


class _SharedFile(locks.LockedFile):
    """A file that whoever comes first makes; its folder has the lock."""

    def create(self) -> None:
        with posix.reporting("create", self.path):
            flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            self._opened.append(opened(map(os.open, (self.path,), (flags,), (0o666,))))


class SharedOutputFile(OutputFile):
    """A file that several processes fill together, each of them whole pages of its own."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._file = _SharedFile(path)
        self.name = os.path.basename(path)

    def make(self, expected_bytes: int) -> None:
        """Have the file open, of its final size."""
        super().make(expected_bytes)
        with posix.reporting("truncate", self.path):
            os.ftruncate(self._file.descriptor, expected_bytes)

    def sync(self) -> None:
        """Have what was written durable."""
        posix.sync_file(self._file.descriptor, self.path)


def fill_in(path: str, parts: Iterable[tuple[int, bytes]]) -> None:
    """Put bytes at offsets of the file ``path``, durably: what is no whole page, and so not written past the cache."""
    with posix.reporting("write", path):
        descriptor = opened(map(os.open, (path,), (os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC,)))
        try:
            for offset, data in parts:
                rest = memoryview(data)
                while rest:
                    count = os.pwrite(descriptor, rest, offset)
                    if count == 0:
                        raise OSError(errno.EIO, "the system took no bytes")
                    rest, offset = rest[count:], offset + count
            posix.sync_file(descriptor, path)
        except BaseException:
            posix.discard_descriptor(descriptor)
            raise
    posix.close_descriptor(descriptor, path)


def publish_folder(source: str, target: str, *, overwrite: bool, keep: Callable[[str], bool]) -> None:
    """Give the folder ``source`` the name ``target`` in one step, durably.

    What is there already is replaced if ``overwrite`` is set; of its own files, those for whose names ``keep`` is true
    are in the new folder too, unless that has others of these names. An empty folder is nothing.
    """
    posix.sync_directory(source)
    parent = os.path.dirname(target)
    for _ in range(_TRIES):  # others may publish to the same name
        if check_free(target, overwrite=overwrite):
            posix.remove_empty_directories([target])
        if not overwrite or not posix.exists(target):
            if _is_named(source, target):
                posix.sync_directory(parent)
                return
        elif _is_exchanged(source, target, keep):
            posix.sync_directory(parent)
            # The new one is there, durably: if the old one cannot be removed, that is litter and no failure.
            with contextlib.suppress(StorageError):
                _remove(source)
            return
    raise StorageError(f"{target!r} changes all the time; use another name", errno=errno.EBUSY, path=target)


def _is_named(source: str, target: str) -> bool:
    """Give ``source`` the name ``target``; False if something has it now."""
    code = posix.renameat2(source, target, _KEEP)
    if code in _NO_SUCH_CALL:
        posix.replace(source, target)  # which replaces an empty folder at most
    elif code not in (0, errno.EEXIST):
        raise StorageError.from_os(OSError(code, os.strerror(code)), "publish", target)
    return code != errno.EEXIST


def _is_exchanged(source: str, target: str, keep: Callable[[str], bool]) -> bool:
    """Exchange the folders; False if another one has the name ``target`` now, or none."""
    before = posix.file_status(target)
    try:
        _carry_over(target, source, keep)
    except StorageError as error:
        now = posix.file_status(target)
        if error.errno == errno.ENOENT and (before is None or now is None or not os.path.samestat(before, now)):
            return False
        raise
    code = posix.renameat2(source, target, _EXCHANGE)
    if code == errno.ENOENT and posix.exists(source) and not posix.exists(target):
        return False
    if code:
        problem = "cannot replace a folder in one step" if code in _NO_SUCH_CALL else os.strerror(code)
        advice = "export to a new name, or remove the old folder first"
        raise StorageError(f"cannot replace {target!r}: the file system {problem}; {advice}", errno=code, path=target)
    return True


def check_free(target: str, *, overwrite: bool) -> bool:
    """Whether the empty folder ``target`` is there; AlreadyPublishedError where something is that has to stay."""
    status = posix.file_status(target)
    if status is None:
        return False
    if not stat.S_ISDIR(status.st_mode):
        raise AlreadyPublishedError(f"{target!r} is there and is no folder; use another name")
    is_empty = not posix.list_names(target)
    if not is_empty and not overwrite:
        raise _already_there(target)
    return is_empty


def remove_folder(path: str) -> None:
    """Guarantees that nothing has the name ``path``.

    Its directory is synced first: no power cut gives back to what is removed a name that it had before.
    """
    posix.sync_directory(os.path.dirname(path))
    _remove(path)


def _remove(path: str) -> None:
    with posix.reporting("remove", path), contextlib.suppress(FileNotFoundError):
        posix.uninterrupted(shutil.rmtree, path)


def _carry_over(old: str, new: str, keep: Callable[[str], bool]) -> None:
    """Have the files and folders of ``old`` for which ``keep`` is true in ``new`` too, durably."""
    for name in filter(keep, posix.list_names(old)):
        if not posix.exists(os.path.join(new, name)):
            _bring(os.path.join(old, name), os.path.join(new, name))
    posix.sync_directory(new)


def _bring(source: str, target: str) -> None:
    """Have ``source`` at ``target`` too; files by links where they can be."""
    status = posix.file_status(source)
    if status is None:
        raise StorageError(f"{source!r} went away while being copied", errno=errno.ENOENT, path=source)
    if stat.S_ISDIR(status.st_mode):
        with posix.reporting("create", target):
            posix.uninterrupted(os.mkdir, target)
        for name in posix.list_names(source):
            _bring(os.path.join(source, name), os.path.join(target, name))
        with posix.reporting("change", target):
            posix.uninterrupted(os.chmod, target, stat.S_IMODE(status.st_mode))
        posix.sync_directory(target)
    elif stat.S_ISLNK(status.st_mode):
        with posix.reporting("copy", source):
            posix.uninterrupted(os.symlink, posix.uninterrupted(os.readlink, source), target)
    elif not posix.link(source, target):
        _copy(source, target)


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for files that programs of others write or read; the block that it is entered for ends it."""
    return tempfile.TemporaryDirectory(prefix="holdfast-")


def copy_into(folder: str, paths: Iterable[str]) -> None:
    """Copy the files ``paths`` into ``folder``, durably."""
    for path in paths:
        _copy(path, os.path.join(folder, os.path.basename(path)))


def _copy(source: str, target: str) -> None:
    """Copy a file, durably."""
    # Interrupted or not, they are closed; and what was written was synced before.
    closing = contextlib.suppress(InterruptedError)
    with posix.reporting(f"copy {source!r} to", target), closing, open(source, "rb") as read, open(target, "xb") as new:
        shutil.copyfileobj(read, new)
        posix.sync_stream(new, target)


def _already_there(target: str) -> AlreadyPublishedError:
    return AlreadyPublishedError(f"{target!r} exists already and is not empty; use another name or overwrite=True")
