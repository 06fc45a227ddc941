"""Files by their path or URL: in a directory through ``posix`` and ``direct``, in a store through ``stores``."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from holdfast._io import posix
from holdfast._io.direct import InputFile, LocalFiles, missing
from holdfast._io.objects import InputObject, ObjectFiles
from holdfast._io.stores import store_of
from holdfast._io.urls import is_store_url
from holdfast._values.digest import digest
from holdfast.errors import CorruptError, StorageError


class FileToRead(Protocol):
    """A file of which ranges are read, by any number of threads."""

    path: str

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with the bytes at ``offset``."""
        ...

    def take(self, start: int, end: int) -> memoryview | None:
        """Bytes [start, end), where they come in memory of their own anyway."""
        ...

    def read_range(self, view: memoryview, start: int, end: int, *, is_cached: bool) -> int:
        """Put bytes [start, end) into ``view``, an aligned one; returns the offset in the file of its first byte."""
        ...


class FilesToRead(Protocol):
    """Files by number. ``readers`` threads keep their medium busy; ``max_gap`` bytes are best read along; who reads all
    does so by ``piece_bytes``.
    """

    max_gap: int
    piece_bytes: int
    is_remote: bool

    @property
    def readers(self) -> int: ...

    @property
    def bytes_read(self) -> int: ...

    def lend(self, number: int) -> AbstractContextManager[tuple[FileToRead, bool]]:
        """File ``number``, for the length of the block, and whether it is in the page cache."""
        ...

    def check(self, number: int) -> None:
        """CorruptError unless file ``number`` is there in its size."""
        ...

    def is_cached(self, number: int) -> bool: ...

    def path(self, number: int) -> str: ...

    def close(self) -> None: ...


def data_files(paths: Sequence[str], sizes: Sequence[int], *, at_least: bool = False) -> FilesToRead:
    """The files ``paths``, which must have these ``sizes``, or ``at_least`` them."""
    kind = ObjectFiles if paths and is_store_url(paths[0]) else LocalFiles
    return kind(paths, sizes, at_least=at_least)


def read_whole(path: str, *, limit: int) -> bytes:
    """The bytes of the file ``path``, at most ``limit``; StorageError with ENOENT if it is missing."""
    if is_store_url(path):
        return bytes(store_of(path).get(path, limit=limit)[0])
    return posix.read_whole(path, limit=limit)


def size_of(path: str) -> int | None:
    """The size of the file ``path``; None where there is none; CorruptError for what is no regular file."""
    if is_store_url(path):
        found = store_of(path).head(path)
        return None if found is None else found.bytes
    status = posix.file_status(path)
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise CorruptError(f"{path!r} is not a regular file; use another checkpoint", path=path)
    return None if status is None else status.st_size


def list_names(path: str) -> list[str]:
    """The names in the directory ``path``; StorageError with ENOENT if there is none. A store has no empty ones."""
    if not is_store_url(path):
        return posix.list_names(path)
    folders, objects = store_of(path).folder(path)
    if not folders and not objects:
        raise StorageError(f"cannot list {path!r}: nothing is there", errno=errno.ENOENT, path=path)
    return sorted({*folders, *(each.name for each in objects)})


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether anything has the name ``path``."""
    name = os.fspath(path)
    if not is_store_url(name):
        return posix.exists(name)
    return store_of(name).head(name) is not None or is_directory(name)


def is_directory(path: str) -> bool:
    """Whether ``path`` is a directory, or names something in a store as one does."""
    if is_store_url(path):
        return store_of(path).folder(path) != ([], [])
    with posix.reporting("look at", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return stat.S_ISDIR(posix.uninterrupted(os.stat, path).st_mode)
    return False


def identity_of(path: str) -> tuple[int, ...]:
    """What tells what has the name ``path`` from what had or will have it; () where nothing does.

    Of a directory it changes with the names in it. Of a folder in a store also with what they stand for.
    """
    if is_store_url(path):
        store = store_of(path)
        found = [*store.folder(path)[1], *filter(None, [store.head(path)])]
        return (digest(repr([(each.name, each.bytes, each.version) for each in found]).encode()),) if found else ()
    with posix.reporting("look at", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = posix.uninterrupted(os.stat, path)
        return status.st_dev, status.st_ino, status.st_ctime_ns
    return ()


@contextlib.contextmanager
def opened(path: str) -> Iterator[InputFile | InputObject]:
    """The file ``path``, to be read from during the block; CorruptError if it is missing."""
    if is_store_url(path):
        size = size_of(path)
        if size is None:
            raise missing(path)
        yield InputObject(path, size)
        return
    try:
        file = InputFile.open(path)
    except StorageError as error:
        if posix.exists(path):
            raise
        raise missing(path) from error
    with file:
        yield file
