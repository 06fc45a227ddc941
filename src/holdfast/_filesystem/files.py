"""The local data files of a torch checkpoint while they are read: opened when needed, few at a time.

There may be one file for each item, so files that nobody reads from are closed again.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from holdfast._io import posix
from holdfast._io.direct import InputFile
from holdfast._values import forks
from holdfast.errors import CorruptError, StorageError

_IDLE_FILES = 64


class LocalFiles:
    """Files by number: ``paths`` names them, ``ends`` says how many bytes each must have at least."""

    def __init__(self, paths: Sequence[str], ends: Sequence[int]) -> None:
        self._paths = paths
        self._ends = ends
        self._lock = forks.Lock()
        self._lent: dict[int, tuple[InputFile, bool, int]] = {}
        self._idle: OrderedDict[int, tuple[InputFile, bool]] = OrderedDict()
        self._bytes_read = 0

    @contextmanager
    def lend(self, number: int) -> Iterator[tuple[InputFile, bool]]:
        """File ``number``, open for the length of the block, and whether it is in the page cache."""
        file, is_cached = self._take(number)
        try:
            yield file, is_cached
        finally:
            self._give_back(number)

    def path(self, number: int) -> str:
        """The path of file ``number``."""
        return self._paths[number]

    @property
    def bytes_read(self) -> int:
        """Bytes that the system delivered from these files."""
        with self._lock:
            return self._bytes_read + sum(file.bytes_read for file in self._open_files())

    def _open_files(self) -> list[InputFile]:
        return [file for file, _, _ in self._lent.values()] + [file for file, _ in self._idle.values()]

    def close(self) -> None:
        """Close all files; nobody reads any more."""
        with self._lock:
            files = self._open_files()
            self._lent.clear()
            self._idle.clear()
            self._bytes_read += sum(file.bytes_read for file in files)
        for file in files:
            file.close()

    def _take(self, number: int) -> tuple[InputFile, bool]:
        with self._lock:
            if number in self._lent:
                file, is_cached, readers = self._lent[number]
            elif number in self._idle:
                (file, is_cached), readers = self._idle.pop(number), 0
            else:
                file, readers = self._open(number), 0
                is_cached = file.is_cached()
            self._lent[number] = file, is_cached, readers + 1
            return file, is_cached

    def _give_back(self, number: int) -> None:
        with self._lock:
            file, is_cached, readers = self._lent.pop(number)
            if readers > 1:
                self._lent[number] = file, is_cached, readers - 1
                return
            self._idle[number] = file, is_cached
            if len(self._idle) <= _IDLE_FILES:
                return
            _, (oldest, _) = self._idle.popitem(last=False)
            self._bytes_read += oldest.bytes_read
        oldest.close()

    def _open(self, number: int) -> InputFile:
        path = self._paths[number]
        try:
            file = InputFile.open(path)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            raise CorruptError(f"{path!r} is missing; use another checkpoint", path=path) from error
        if file.size < self._ends[number]:
            size = file.size
            file.close()
            raise CorruptError(
                f"{path!r} has {size} bytes and needs {self._ends[number]}: it was truncated or replaced; "
                "use another checkpoint",
                path=path,
            )
        return file


def local_path(directory: str | os.PathLike[str], relative_path: str) -> str:
    """The path of a file of the checkpoint in ``directory``; CorruptError where a link would lead out of it."""
    path = os.path.join(os.fspath(directory), relative_path)
    *folders, _ = relative_path.split("/")
    for depth in range(1, len(folders) + 1):
        folder = os.path.join(os.fspath(directory), *folders[:depth])
        status = posix.file_status(folder)
        if status is not None and stat.S_ISLNK(status.st_mode):
            raise CorruptError(f"{folder!r} is a link, which may lead anywhere; use another checkpoint", path=path)
    return path
