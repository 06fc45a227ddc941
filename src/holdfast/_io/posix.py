"""Whole small files, names, directories and durability, as plain functions over ``os``.

Invariant: when a function that promises durability returns, the kernel has confirmed it; a failed fsync is final and
never tried again, because the kernel may already have dropped the pages that it could not write. Links are never
followed and only regular files are ever read, so that nothing planted in a checkpoint can redirect or block a reader.
It never lets an ``OSError`` out.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, ParamSpec, TypeVar, cast

from holdfast._process import Descriptor, OpenDescriptor, opened, reset_in_child
from holdfast.errors import AlreadyPublishedError, CorruptError, StorageError

P = ParamSpec("P")
Result = TypeVar("Result")

_LINK_UNSUPPORTED = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS})
_RENAME_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_DIRECTORY_SYNC_UNSUPPORTED = _RENAME_UNSUPPORTED
_FULL_SYNC_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY})
_RENAME_NOREPLACE, _AT_FDCWD = 1, -100
_SHOWN_NAME = 100
_BEGIN_URLS = ("s3:/", "s3a:/", "gs:/", "az:/", "adl:/", "azure:/", "abfs:/", "abfss:/", "memory:/")
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class _Work(NamedTuple):
    """What a thread asks of the system, and what that is part of."""

    path: str
    outer: _Work | None


# What each thread asks of the system just now, the longest first, and what was asked last.
_underway: dict[int, _Work] = {}
_last = ""
reset_in_child(_underway.clear)


@contextlib.contextmanager
def reporting(action: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """A refusal by the system leaves the block as a ``StorageError``; ``file_at_work`` tells of ``path`` meanwhile."""
    global _last
    thread = threading.get_ident()
    name = os.fsdecode(path)
    work = _Work(name, _underway.get(thread))
    try:
        _underway.pop(thread, None)
        _underway[thread], _last = work, name
        yield
    except (OSError, ValueError) as error:
        # From Python 3.12 on, this frame knows its caller, which knows the error: if that knew this frame, all of them
        # would stay, with what they have open, until the cycle collector comes.
        error.__traceback__ = getattr(error.__traceback__, "tb_next", None)
        if isinstance(error, OSError):
            raise StorageError.from_os(error, action, path) from error
        # A name with a NUL or a lone surrogate does not even reach the system.
        raise StorageError(f"cannot {action} {os.fspath(path)!r}: {error}", errno=errno.EINVAL, path=path) from error
    finally:
        # After an interrupt this may come late: what is under way by then is let alone. No interrupt comes into it,
        # because nothing is called.
        current = _underway[thread] if thread in _underway else None  # noqa: SIM401
        while current is not None and current is not work:
            current = current.outer
        if current is not None:
            del _underway[thread]
            if work.outer is not None:
                _underway[thread] = work.outer


def file_at_work(directory: str | os.PathLike[str]) -> str:
    """The name of the file in ``directory`` that the oldest call under way is about, or else the last call was.

    The end of a long name, nothing where the calls are about other places. Any thread may ask; what it gets can be
    encoded and printed.
    """
    inside = os.path.join(os.fsdecode(directory), "")
    for path in (*(work.path for work in tuple(_underway.values())), _last):
        if os.path.join(path, "").startswith(inside):
            name = os.path.basename(path.rstrip(os.sep)).encode(errors="backslashreplace").decode()
            return name if len(name) <= _SHOWN_NAME else f"...{name[3 - _SHOWN_NAME :]}"
    return ""


def text_path(path: str | os.PathLike[str]) -> str:
    """``path`` as text; TypeError for bytes, of which most of the library could make nothing."""
    name: object = os.fspath(path)
    if not isinstance(name, str):
        raise TypeError(f"a path is a str, or a PathLike of one, not {type(name).__name__}; use os.fsdecode({name!r})")
    return name


def absolute(path: str | os.PathLike[str]) -> str:
    """``path`` as it is now, wherever the process goes; links stay, and so do dots, which may come after one."""
    name = text_path(path)
    scheme, mark, place = name.partition("://")
    if mark:  # a URL is never relative
        return f"{scheme}://{place.rstrip('/')}"
    if not name or os.path.isabs(name):
        return name
    if name.startswith(_BEGIN_URLS):
        raise ValueError(f"{name!r} was a URL until pathlib took a slash of it; pass a str (for a directory, ./{name})")
    with reporting("find", name):
        return os.path.join(os.getcwd(), name)


def open_regular(path: str | os.PathLike[str], *, flags: int = 0) -> Descriptor:
    """A descriptor that reads the regular file ``path``; anything else there is a ``CorruptError``.

    ``flags`` is added to the flags of open. A FIFO does not block, a symbolic link is not followed.
    """
    flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with reporting("open", path):
        try:
            descriptor = opened(map(os.open, (path,), (flags,)))
        except OSError:
            status = file_status(path)
            if status is not None and not stat.S_ISREG(status.st_mode):
                raise _not_regular(path) from None
            raise
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _not_regular(path)
            os.set_blocking(descriptor, True)
        except BaseException:
            discard_descriptor(descriptor)
            raise
    return descriptor


def create_new(path: str | os.PathLike[str], made: list[Descriptor]) -> None:
    """Creates the file ``path``, which did not exist before; a descriptor that writes it goes to ``made``.

    Not returned, because an interrupt could come before it is kept: so whoever looks at ``made`` knows what there is.
    """
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with reporting("create", path):
        made.extend(map(OpenDescriptor, map(os.open, (path,), (flags,), (0o666,))))


def read_whole(path: str | os.PathLike[str], *, limit: int) -> bytes:
    """The bytes of the regular file ``path``, of which there are at most ``limit``; no more is ever allocated."""
    descriptor = open_regular(path)
    try:
        with reporting("read", path):
            size = os.fstat(descriptor).st_size
            pieces: list[bytes] = []
            total = 0
            while total <= limit and size <= limit:
                piece = os.read(descriptor, min(max(size - total, 0), limit - total) + 1)
                if not piece:
                    return b"".join(pieces)
                pieces.append(piece)
                total += len(piece)
    finally:
        close_descriptor(descriptor, path)
    raise CorruptError(f"{os.fspath(path)!r} is larger than {limit} bytes; use another checkpoint", path=path)


def write_new(path: str | os.PathLike[str], data: bytes | bytearray | memoryview) -> None:
    """Creates ``path`` with exactly ``data``, durable once its directory is synced; nothing stays after a failure."""
    made: list[Descriptor] = []
    try:
        create_new(path, made)
        write_all(made[0], data, path)
        sync_file(made[0], path)
        close_descriptor(made[0], path)
    except BaseException:
        if made:
            discard_descriptor(made[0])
            with contextlib.suppress(StorageError):
                remove(path)
        raise


def write_all(descriptor: int, data: bytes | bytearray | memoryview, path: str | os.PathLike[str]) -> None:
    """Writes all of ``data`` to the open file ``path``, where it stands."""
    with reporting("write", path):
        rest = memoryview(data).cast("B")
        while rest.nbytes:
            count = os.write(descriptor, rest)
            if count == 0:
                # POSIX lets a write take nothing; going on would never end.
                raise OSError(errno.EIO, "the system took no bytes")
            rest = rest[count:]


def link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> bool:
    """Give ``source`` the name ``target`` too; False where a file system has no such links."""
    with reporting("link", source):
        try:
            uninterrupted(os.link, source, target)
        except OSError as error:
            if error.errno not in {*_LINK_UNSUPPORTED, errno.EXDEV}:
                raise
            return False
    return True


def link_new(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Moves ``source`` to ``target`` atomically; what is there already stays, and is an ``AlreadyPublishedError``."""
    with reporting("publish", target):
        try:
            uninterrupted(os.link, source, target)
        except FileExistsError:
            # A retried request, on NFS or after an interruption, finds the link that its first try made.
            one, other = file_status(source), file_status(target)
            if one is None or other is None or not os.path.samestat(one, other):
                raise _already_published(target) from None
        except OSError as error:
            if error.errno not in _LINK_UNSUPPORTED:
                raise
            _rename_new(source, target)
            return
    # The target is visible from here on: a source name that cannot be removed is litter, not a failure.
    with contextlib.suppress(OSError):
        uninterrupted(os.unlink, source)


def replace(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Moves ``source`` to ``target`` atomically, in place of what is there."""
    with reporting("replace", target):
        try:
            os.rename(source, target)
        except InterruptedError:
            # The first try may have moved it all the same; then nothing is left to be moved.
            with contextlib.suppress(FileNotFoundError):
                uninterrupted(os.rename, source, target)


def sync_file(descriptor: int, path: str | os.PathLike[str]) -> None:
    """Returns once the contents of the open file are durable; after an error the file is condemned."""
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    with reporting("sync", path):
        if full_sync is not None:
            # On macOS fsync stops at the drive's own cache; this does not.
            try:
                fcntl.fcntl(descriptor, full_sync)
                return
            except OSError as error:
                if error.errno not in _FULL_SYNC_UNSUPPORTED:
                    raise
        os.fsync(descriptor)


def sync_directory(path: str | os.PathLike[str], descriptor: Descriptor | None = None) -> None:
    """Returns once the names in the directory are durable, where the file system has such a notion.

    ``descriptor`` is that of the directory if it is open, and stays open.
    """
    is_ours = descriptor is None
    if descriptor is None:
        with reporting("sync", path):
            descriptor = opened(map(os.open, (path,), (DIRECTORY_FLAGS,)))
    try:
        sync_file(descriptor, path)
    except StorageError as error:
        if error.errno not in _DIRECTORY_SYNC_UNSUPPORTED:
            raise
    finally:
        if is_ours:
            close_descriptor(descriptor, path)


def missing_directories(path: str | os.PathLike[str]) -> list[str]:
    """Those of ``path`` and its parents that are not there, the innermost first; StorageError where a file is."""
    missing: list[str] = []
    current = os.fspath(path)
    while True:
        with reporting("create", current):
            try:
                if stat.S_ISDIR(uninterrupted(os.stat, current).st_mode):
                    return missing
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            except FileNotFoundError:
                missing.append(current)
        current = os.path.dirname(current) or os.curdir
        if current == missing[-1]:
            raise StorageError(f"cannot create {os.fspath(path)!r}: it has no parent", errno=errno.ENOENT, path=path)


def make_directories(path: str | os.PathLike[str]) -> None:
    """Guarantees that ``path`` is a directory, and that the names of those it had to create are durable."""
    for directory in reversed(missing_directories(path)):
        with reporting("create", directory):
            try:
                uninterrupted(os.mkdir, directory)
            except FileExistsError:
                if missing_directories(directory):
                    raise
        # Also where someone else was faster: they may not have come to syncing it yet.
        sync_directory(os.path.dirname(directory) or os.curdir)


def remove(path: str | os.PathLike[str], *, missing_ok: bool = True) -> None:
    """Guarantees that no file has the name ``path``."""
    with reporting("remove", path):
        try:
            uninterrupted(os.unlink, path)
        except FileNotFoundError:
            if not missing_ok:
                raise


def remove_empty_directories(paths: Iterable[str]) -> None:
    """Remove each directory of ``paths``, the innermost first, up to one that is not empty or cannot be removed."""
    with contextlib.suppress(OSError):
        for path in paths:
            uninterrupted(os.rmdir, path)


def discard(descriptor: int) -> None:
    """From now on, what is written to ``descriptor`` goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextlib.contextmanager
def open_stream(path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
    """A stream on ``path``, opened as ``open`` does and closed at the end of the block."""
    with reporting("open", path):
        stream = open(path, mode)  # noqa: SIM115 - what the block itself raises is not about opening
    with stream:
        yield cast(io.IOBase, stream)


def sync_stream(stream: io.IOBase, path: str | os.PathLike[str]) -> None:
    """Returns once what was written to ``stream`` is durable: by its file, or by syncing all where it has none."""
    with reporting("write", path):
        stream.flush()
    try:
        descriptor = stream.fileno()
    except (AttributeError, io.UnsupportedOperation):
        os.sync()
        return
    sync_file(descriptor, path)


def umask() -> int | None:
    """The mode bits that new files of this process do not get now; None where one can only ask by changing them."""
    with contextlib.suppress(OSError), open("/proc/thread-self/status", encoding="ascii", errors="replace") as lines:
        return next((int(line.split()[1], 8) for line in lines if line.startswith("Umask:")), None)
    return None


def list_names(path: str | os.PathLike[str]) -> list[str]:
    with reporting("list", path):
        return sorted(uninterrupted(os.listdir, path))


def list_directories(path: str | os.PathLike[str], descriptor: int | None = None) -> list[str]:
    """The names of the directories in ``path``, or in what is open as ``descriptor``; links to some are none.

    None where it is gone.
    """
    place = path if descriptor is None else descriptor
    with reporting("list", path), contextlib.suppress(FileNotFoundError), uninterrupted(os.scandir, place) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    return []


def file_status(path: str | os.PathLike[str]) -> os.stat_result | None:
    """The status of what has the name ``path`` (a link itself, not where it leads); None if nothing does."""
    with reporting("look at", path):
        try:
            return uninterrupted(os.lstat, path)
        except (FileNotFoundError, NotADirectoryError):
            return None


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether anything has the name ``path``, be it a dangling link."""
    return file_status(path) is not None


def close_descriptor(descriptor: Descriptor, path: str | os.PathLike[str]) -> None:
    """Closes the descriptor; some file systems tell of failed writes only here, so an error is reported."""
    # Interrupted or not, it is closed; and what it wrote was synced before.
    with reporting("close", path), contextlib.suppress(InterruptedError):
        descriptor.close()


def discard_descriptor(descriptor: Descriptor) -> None:
    """Closes the descriptor after an error, which is the one to tell."""
    with contextlib.suppress(OSError):
        descriptor.close()


def uninterrupted(call: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """What ``call`` returns, tried again for as long as a signal cuts it short.

    Python does so itself for calls on descriptors; network file systems interrupt those on names too.
    """
    while True:
        try:
            return call(*args, **kwargs)
        except InterruptedError:
            continue


def _not_regular(path: str | os.PathLike[str]) -> CorruptError:
    return CorruptError(f"{os.fspath(path)!r} is not a regular file; use another checkpoint", path=path)


def _already_published(target: str | os.PathLike[str]) -> AlreadyPublishedError:
    return AlreadyPublishedError(f"{os.fspath(target)!r} exists already; use another name or overwrite=True")


def _rename_new(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    code = renameat2(source, target, _RENAME_NOREPLACE)
    if code == errno.EEXIST:
        raise _already_published(target)
    if code in _RENAME_UNSUPPORTED:
        raise StorageError(
            f"cannot publish {os.fspath(target)!r}: the file system can neither link nor rename without replacing; "
            "use another one, or overwrite=True",
            errno=code,
            path=target,
        )
    if code:
        raise OSError(code, os.strerror(code))


def renameat2(source: str | os.PathLike[str], target: str | os.PathLike[str], flag: int) -> int:
    """The errno of a rename by the Linux call with this flag; 0 when it is done, ENOSYS where there is no such call."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return errno.ENOSYS
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    function.restype = ctypes.c_int
    interrupted = False
    while function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            # The interrupted try may have moved it all the same; then nothing is left to be moved.
            return 0 if interrupted and code == errno.ENOENT else code
        interrupted = True
    return 0
