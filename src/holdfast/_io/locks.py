"""Locks of files: how a writer that lives is told from one that died.

A writer holds the lock of each file that it makes, from before anyone could miss it until the file is published or
gone; the kernel drops the lock when the writer dies, however it dies. Invariant: a new file that this module hands out
is locked and has its name. It never waits without end, and never takes a lock for more than it is: where a file system
has none, or where those of other hosts may not show, it says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator

from holdfast._io import posix
from holdfast._values import forks
from holdfast.errors import StorageError

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


def create_locked(path: str | os.PathLike[str]) -> int:
    """A descriptor that writes the file ``path``, which did not exist before; its lock is held where there are locks.

    Between making a file and locking it, a sweep may take it for a dead writer's and remove it; then it is made again.
    """
    for _ in range(_TRIES):
        descriptor = posix.create_new(path)
        try:
            _wait_for_lock(descriptor, path)
            if has_name(descriptor, path):
                return descriptor
        except BaseException:
            with contextlib.suppress(StorageError):
                posix.remove(path)
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise
        posix.close_descriptor(descriptor, path)
    raise StorageError(
        f"{os.fspath(path)!r} was removed while being created, {_TRIES} times; save again",
        errno=errno.ENOENT,
        path=path,
    )


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str], data: bytes) -> Iterator[None]:
    """Creates ``path`` with exactly ``data``, as ``posix.write_new`` does, and holds its lock for the block."""
    descriptor = create_locked(path)
    try:
        try:
            posix.write_all(descriptor, data, path)
            posix.sync_file(descriptor, path)
        except BaseException:
            with contextlib.suppress(StorageError):
                posix.remove(path)
            raise
        yield
    finally:
        # It is synced: whatever closing it tells, nothing is lost any more.
        with contextlib.suppress(OSError):
            os.close(descriptor)


@contextlib.contextmanager
def directory_lock(path: str | os.PathLike[str]) -> Iterator[bool]:
    """Holds the lock of the directory ``path`` for the block.

    False where directories have none, or where somebody holds it for so long that it must have been stopped.
    """
    with posix.reporting("open", path):
        descriptor = _Descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    forks.forget_in_child(descriptor)
    is_held = False
    try:
        try:
            is_held = _wait_for_lock(descriptor.number, path)
        except StorageError as error:
            if error.errno not in (errno.EAGAIN, errno.EBADF):
                raise
        yield is_held
    finally:
        if is_held:
            # Closing it would not do where a child was just forked, which has it open too.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor.number, fcntl.LOCK_UN)
        descriptor.close()


class _Descriptor:
    """An open file, closed in a child of this process: its copy would hold the lock when this process is dead."""

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        """Close it; a second call does nothing."""
        number, self.number = self.number, -1
        if number >= 0:
            posix.discard_descriptor(number)

    forget_parent = close


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
