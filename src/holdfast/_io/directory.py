"""A directory held open: its names stay its own, whatever happens to the path that led there.

Everything is done relative to the open directory and no link is ever followed, so that nothing outside can be reached
through a name that was exchanged meanwhile. For those who remove what others made.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from functools import partial
from types import TracebackType

from holdfast._io import locks, posix
from holdfast._process import CLOSED, Descriptor, OpenDescriptor, opened
from holdfast.errors import CorruptError, StorageError

_MOST_LEVELS = 64
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Directory:
    """The directory ``path``, open; close it, or use it in a ``with`` block."""

    def __init__(self, descriptor: Descriptor, path: str) -> None:
        self._descriptor = descriptor
        self.path = path

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Directory:
        """The directory ``path``; links that lead to it are the caller's choice."""
        with posix.reporting("open", path):
            return cls(opened(map(os.open, (path,), (_DIRECTORY,))), os.fspath(path))

    def __enter__(self) -> Directory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close it; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, CLOSED
        descriptor.close()

    def path_of(self, name: str) -> str:
        """The path of ``name``, for messages."""
        return os.path.join(self.path, name)

    def names(self) -> list[str]:
        """The sorted names in it."""
        with posix.reporting("list", self.path):
            return sorted(os.listdir(self._descriptor))

    def subdirectories(self) -> list[str]:
        """The sorted names of the directories in it; a link to one is none."""
        with posix.reporting("list", self.path), os.scandir(self._descriptor) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def enter(self, name: str) -> Directory:
        """The directory ``name`` in it; a StorageError when it is a link, or no directory any more."""
        path = self.path_of(name)
        with posix.reporting("open", path):
            return Directory(opened(self._opening(name, _DIRECTORY | os.O_NOFOLLOW)), path)

    def status(self, name: str) -> os.stat_result | None:
        """The status of ``name`` itself; None if nothing has it."""
        with posix.reporting("look at", self.path_of(name)):
            try:
                return posix.uninterrupted(os.stat, name, dir_fd=self._descriptor, follow_symlinks=False)
            except FileNotFoundError:
                return None

    def read(self, name: str, *, limit: int) -> bytes:
        """The bytes of the regular file ``name``, of which there are at most ``limit``."""
        descriptor = self._open_regular(name, os.O_RDONLY)
        path = self.path_of(name)
        try:
            with posix.reporting("read", path), open(descriptor, "rb", closefd=False) as stream:
                data = stream.read(min(limit, os.fstat(descriptor).st_size) + 1)
        finally:
            descriptor.close()
        if len(data) > limit:
            raise CorruptError(f"{path!r} is larger than {limit} bytes; use another checkpoint", path=path)
        return data

    def lock(self, name: str) -> locks.LockedFile | None:
        """The regular file ``name``, its lock held; None when someone else holds it.

        StorageError where there are no locks or the file may not be opened for writing, which some file systems ask
        of those who lock. Nothing is written.
        """
        file = locks.LockedFile(self.path_of(name), self._open_regular(name, os.O_RDWR))
        try:
            if locks.try_lock(file.descriptor, file.path):
                return file
        except BaseException:
            file.discard()
            raise
        file.discard()
        return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold its own lock for the block; False when someone else does, or directories have none."""
        is_ours = False
        try:
            with contextlib.suppress(StorageError):
                is_ours = locks.try_lock(self._descriptor, self.path)
            yield is_ours
        finally:
            if is_ours:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def create(self, name: str, made: list[Descriptor]) -> None:
        """Make ``name`` a new empty file, whose descriptor goes to ``made``, unless something has the name."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with posix.reporting("create", self.path_of(name)), contextlib.suppress(FileExistsError):
            made.extend(map(OpenDescriptor, self._opening(name, flags)))

    def holds(self, name: str, descriptor: int) -> bool:
        """Whether ``name`` is the open file ``descriptor``."""
        return locks.has_name(descriptor, name, directory=self._descriptor)

    def remove(self, name: str) -> None:
        """Guarantees that no file has the name."""
        with posix.reporting("remove", self.path_of(name)), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def sync(self) -> None:
        """Returns once the names in it are durable, where the file system has such a notion."""
        posix.sync_directory_descriptor(self._descriptor, self.path)

    def locks_are_reliable(self) -> tuple[bool, str]:
        """Whether the locks of every writer show here, and on which kind of file system that is."""
        return locks.are_reliable(self._descriptor)

    def _opening(self, name: str, flags: int) -> Iterator[int]:
        return map(partial(os.open, dir_fd=self._descriptor), (name,), (flags,), (0o666,))

    def _open_regular(self, name: str, flags: int) -> Descriptor:
        path = self.path_of(name)
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        status = self.status(name)
        if status is not None and not stat.S_ISREG(status.st_mode):
            raise CorruptError(f"{path!r} is not a regular file", path=path)
        with posix.reporting("open", path):
            descriptor = opened(self._opening(name, flags))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            descriptor.close()
            raise CorruptError(f"{path!r} is not a regular file", path=path)
        return descriptor


def walk(root: str | os.PathLike[str]) -> Iterator[Directory | StorageError]:
    """``root`` and every directory below it, each open until the next is asked for; errors instead of those that fail.

    Links are not followed, and nothing below 64 levels is looked at. At most one descriptor per level is open.
    """
    with Directory.open(root) as top:
        yield from _walk(top, _MOST_LEVELS)


def _walk(directory: Directory, levels: int) -> Iterator[Directory | StorageError]:
    if levels == 0:
        yield StorageError(f"{directory.path!r} is too deep to look into", errno=errno.ELOOP, path=directory.path)
        return
    yield directory
    try:
        names = directory.subdirectories()
    except StorageError as error:
        yield error
        return
    for name in names:
        try:
            child = directory.enter(name)
        except StorageError as error:
            yield error
            continue
        with child:
            yield from _walk(child, levels - 1)
