"""Locks of files: how a writer that lives is told from one that died.

A writer holds the lock of each file that it makes, from before anyone could miss it until the file is published or
gone; the kernel drops the lock when the writer dies, however it dies. Invariant: a new file that this module hands out
is locked and has its name. It never waits without end, and never takes a lock for more than it is: where a file system
has none, or where those of other hosts may not show, it says so.

A ``Directory`` is for those who remove what others made. It is held open, everything is done relative to it, and no
link is followed: so nothing outside can be reached through a name that was exchanged meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from functools import partial

from holdfast._io import posix
from holdfast._process import CLOSED, Descriptor, Ending, OpenDescriptor, begun, forget_in_child, opened
from holdfast.errors import BusyError, CorruptError, StorageError

UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What a file system answers that has no locks."""

_WAIT_S = 10.0
_PAUSE_S = 0.005
_TRIES = 20

_LOCAL_FILE_SYSTEMS = frozenset(
    {
        *("bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "hfsplus", "jfs"),
        *("ntfs3", "overlay", "ramfs", "reiserfs", "tmpfs", "vfat", "xfs", "zfs"),
    }
)


class LockedFile:
    """The file ``path``, once it is open a file whose lock this process holds, until it is closed or dropped.

    A forked child has it closed, and cannot remove it: a copy would keep the lock for as long as the child lives.
    """

    def __init__(self, path: str | os.PathLike[str], *descriptors: Descriptor) -> None:
        self.path = os.fspath(path)
        self._opened = list(descriptors)
        self._is_closed = False
        self._is_inherited = False
        forget_in_child(self)

    @property
    def descriptor(self) -> Descriptor:
        return CLOSED if self._is_closed or not self._opened else self._opened[-1]

    def create(self) -> None:
        """Make the file, which did not exist before, and hold its lock where there are locks.

        Between making a file and locking it, a sweep may take it for a dead writer's and remove it, and a forked child
        may get a copy that it does not know of, which would keep the lock; then it is made again. So is the directory,
        which another rank removes when its part of the save has failed. Whatever comes of it, an interrupt too,
        ``remove`` and ``close`` undo it.
        """
        for _ in range(_TRIES):
            forks_before = begun()
            try:
                posix.create_new(self.path, self._opened)
            except StorageError as error:
                if error.errno != errno.ENOENT:
                    raise
                posix.make_directories(os.path.dirname(self.path))
                continue
            if begun() != forks_before:
                self.remove()
            else:
                _wait_for_lock(self.descriptor, self.path)
                if has_name(self.descriptor, self.path):
                    return
            posix.close_descriptor(self._opened.pop(), self.path)
        raise StorageError(
            f"{self.path!r} was removed while being created, {_TRIES} times; save again",
            errno=errno.ENOENT,
            path=self.path,
        )

    def close(self) -> None:
        """Close it, which drops the lock; a second call does nothing."""
        self._is_closed = True
        for descriptor in self._opened:
            posix.close_descriptor(descriptor, self.path)

    def discard(self) -> None:
        with contextlib.suppress(StorageError):
            self.close()

    def remove(self) -> None:
        """Remove its name, for the process that made it."""
        if self._opened and not self._is_inherited:
            posix.remove(self.path)

    def forget_parent(self) -> None:
        self._is_inherited = True
        self.discard()


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str], data: bytes) -> Iterator[None]:
    """Creates ``path`` with exactly ``data``, as ``posix.write_new`` does, and holds its lock for the block."""
    file = LockedFile(path)
    try:
        try:
            file.create()
            posix.write_all(file.descriptor, data, path)
            posix.sync_file(file.descriptor, path)
        except BaseException:
            with contextlib.suppress(StorageError):
                file.remove()
            raise
        yield
    finally:
        # It is synced: whatever closing it tells, nothing is lost any more.
        file.discard()


class DirectoryLock(LockedFile):
    """The lock of the directory ``path``."""

    def acquire(self) -> bool:
        """Hold it; whatever comes of it, an interrupt too, ``release`` undoes it.

        False where directories have none. BusyError where somebody holds it for so long that it must have been stopped.
        """
        with posix.reporting("open", self.path):
            self._opened.extend(map(OpenDescriptor, map(os.open, (self.path,), (posix.DIRECTORY_FLAGS,))))
        try:
            return _wait_for_lock(self.descriptor, self.path)
        except StorageError as error:
            if error.errno == errno.EAGAIN:
                message = f"another process is at work in {self.path!r} and does not end; look for it, or try again"
                raise BusyError(message) from None
            if error.errno != errno.EBADF:
                raise
            return False

    def release(self) -> None:
        """Let it go; also again."""
        if self.descriptor >= 0:
            # Closing it would not do where a child was just forked, which has it open too.
            with contextlib.suppress(OSError):
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        self.discard()


@contextlib.contextmanager
def locked_directory(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock of the directory ``path`` for the block, where directories have locks; errors as ``acquire``.

    Where there is no directory, nothing can be done to it that the lock would keep others from.
    """
    lock = DirectoryLock(path)
    releasing = Ending(lock.release)
    with releasing, releasing:
        try:
            lock.acquire()
        except StorageError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
        yield


def try_lock(descriptor: int, path: str | os.PathLike[str]) -> bool:
    """Whether the open file's lock is ours now; False when someone holds it. Where there are none: StorageError."""
    with posix.reporting("lock", path):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def has_name(descriptor: int, path: str | os.PathLike[str], *, directory: int | None = None) -> bool:
    """Whether ``path``, in ``directory`` where that is given, is a name of the open file."""
    with posix.reporting("look at", path):
        try:
            named = posix.uninterrupted(os.stat, path, dir_fd=directory, follow_symlinks=False)
            return os.path.samestat(os.fstat(descriptor), named)
        except FileNotFoundError:
            return False


def are_reliable(descriptor: int) -> tuple[bool, str]:
    """Whether the locks of all writers show on the file system of the open directory, and what that is.

    They do on a local one. A shared one may keep the locks of each host to itself, depending on how it is mounted, and
    nothing tells; so it counts as unreliable, as does one that cannot be found out.
    """
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", "rb") as lines:
            mount = next(line.split()[1] for line in lines if line.startswith(b"mnt_id:"))
        with open("/proc/self/mountinfo", "rb") as lines:
            fields = next(line.split() for line in lines if line.split(maxsplit=1)[0] == mount)
        kind = os.fsdecode(fields[fields.index(b"-") + 1])
    except (OSError, StopIteration, ValueError, IndexError):
        return False, "an unknown file system"
    return kind in _LOCAL_FILE_SYSTEMS, kind


def _wait_for_lock(descriptor: int, path: str | os.PathLike[str]) -> bool:
    """Whether the lock is held; False where there are none.

    Of a file just made only a sweep that looks at it may be in the way, of a directory only somebody who publishes;
    neither is for long.
    """
    until = time.monotonic() + _WAIT_S
    with posix.reporting("lock", path):
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
            except OSError as error:
                if error.errno in UNSUPPORTED:
                    return False
                raise
            time.sleep(_PAUSE_S)


class Directory:
    """The directory ``path``, open; close it, or use it in a ``with`` block."""

    def __init__(self, descriptor: Descriptor, path: str) -> None:
        self.descriptor = descriptor
        self.path = path

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, flags: int = 0) -> Directory:
        """The directory ``path``; links that lead to it are the caller's choice, and so are more ``flags``."""
        with posix.reporting("open", path):
            return cls(opened(map(os.open, (path,), (posix.DIRECTORY_FLAGS | flags,))), os.fspath(path))

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, CLOSED
        posix.discard_descriptor(descriptor)  # nothing was written to it

    def path_of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def names(self) -> list[str]:
        """The names in it; none once it is removed."""
        with posix.reporting("list", self.path), contextlib.suppress(FileNotFoundError):
            return sorted(posix.uninterrupted(os.listdir, self.descriptor))
        return []

    def enter(self, name: str) -> Directory:
        """The directory ``name`` in it; a StorageError when it is a link, or no directory any more."""
        path = self.path_of(name)
        with posix.reporting("open", path):
            return Directory(opened(self._opening(name, posix.DIRECTORY_FLAGS | os.O_NOFOLLOW)), path)

    def status(self, name: str) -> os.stat_result | None:
        """The status of ``name`` itself; None if nothing has it."""
        with posix.reporting("look at", self.path_of(name)):
            try:
                return posix.uninterrupted(os.stat, name, dir_fd=self.descriptor, follow_symlinks=False)
            except FileNotFoundError:
                return None

    def read(self, name: str, *, limit: int) -> bytes:
        """The bytes of the regular file ``name``, of which there are at most ``limit``."""
        descriptor = self._open_regular(name, os.O_RDONLY)
        path = self.path_of(name)
        try:
            with posix.reporting("read", path), open(descriptor, "rb", closefd=False) as stream:
                data = stream.read(min(limit, os.fstat(descriptor).st_size) + 1)
                if data is None:  # what a buffer makes of EAGAIN
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        finally:
            posix.discard_descriptor(descriptor)
        if len(data) > limit:
            raise CorruptError(f"{path!r} is larger than {limit} bytes; use another checkpoint", path=path)
        return data

    def lock(self, name: str) -> LockedFile | None:
        """The regular file ``name``, its lock held; None when someone else holds it.

        StorageError where there are no locks or the file may not be opened for writing, which some file systems ask
        of those who lock. Nothing is written.
        """
        file = LockedFile(self.path_of(name), self._open_regular(name, os.O_RDWR))
        try:
            if try_lock(file.descriptor, file.path):
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
                is_ours = try_lock(self.descriptor, self.path)
            yield is_ours
        finally:
            if is_ours:
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def create(self, name: str, made: list[Descriptor]) -> None:
        """Make ``name`` a new empty file, whose descriptor goes to ``made``, unless something has the name."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with posix.reporting("create", self.path_of(name)), contextlib.suppress(FileExistsError):
            made.extend(map(OpenDescriptor, self._opening(name, flags)))

    def holds(self, name: str, descriptor: int) -> bool:
        return has_name(descriptor, name, directory=self.descriptor)

    def rename(self, name: str, new_name: str) -> None:
        """Give ``name`` the name ``new_name``, which nothing has."""
        with posix.reporting("rename", self.path_of(name)):
            try:
                os.rename(name, new_name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            except InterruptedError:
                if self.status(new_name) is None:  # or the first try has moved it all the same
                    self.rename(name, new_name)

    def remove(self, name: str) -> None:
        with posix.reporting("remove", self.path_of(name)), contextlib.suppress(FileNotFoundError):
            posix.uninterrupted(os.unlink, name, dir_fd=self.descriptor)

    def remove_directory(self, name: str) -> None:
        with posix.reporting("remove", self.path_of(name)):
            posix.uninterrupted(os.rmdir, name, dir_fd=self.descriptor)

    def sync(self) -> None:
        posix.sync_directory(self.path, self.descriptor)

    def _opening(self, name: str, flags: int) -> Iterator[int]:
        return map(partial(os.open, dir_fd=self.descriptor), (name,), (flags,), (0o666,))

    def _open_regular(self, name: str, flags: int) -> Descriptor:
        path = self.path_of(name)
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        status = self.status(name)
        if status is not None and not stat.S_ISREG(status.st_mode):
            raise CorruptError(f"{path!r} is not a regular file", path=path)
        with posix.reporting("open", path):
            descriptor = opened(self._opening(name, flags))
            is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if not is_regular:
            posix.discard_descriptor(descriptor)
            raise CorruptError(f"{path!r} is not a regular file", path=path)
        return descriptor


def walk(root: str | os.PathLike[str]) -> Iterator[Directory | StorageError]:
    """``root`` and every directory below it, each open until the next is asked for; errors instead of those that fail.

    Links are not followed, and nothing below 64 levels is looked at. At most one descriptor per level is open.
    """
    with Directory.open(root) as top:
        yield from _walk(top, 64)


def _walk(directory: Directory, levels: int) -> Iterator[Directory | StorageError]:
    if levels == 0:
        yield StorageError(f"{directory.path!r} is too deep to look into", errno=errno.ELOOP, path=directory.path)
        return
    yield directory
    try:
        names = posix.list_directories(directory.path, directory.descriptor)
    except StorageError as error:
        yield error
        return
    for name in names:
        try:
            child = directory.enter(name)
        except StorageError as error:
            if error.errno != errno.ENOENT:  # others may remove what is there, or publish it
                yield error
            continue
        with child:
            yield from _walk(child, levels - 1)
