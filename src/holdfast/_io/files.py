"""The local data files of a checkpoint while they are read: opened when needed, few at a time.

There may be one file for each rank or item, so files that nobody reads from are closed again.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from holdfast._io.direct import InputFile
from holdfast._values import forks
from holdfast.errors import CorruptError, StorageError

_IDLE_FILES = 32


class LocalFiles:
    """Files by number: ``paths`` names them, ``sizes`` says how many bytes each must have, or have at least."""

    def __init__(self, paths: Sequence[str], sizes: Sequence[int], *, at_least: bool = False) -> None:
        self._paths = paths
        self._sizes = sizes
        self._at_least = at_least
        self._are_cached: dict[int, bool] = {}
        self._lock = forks.Lock()
        self._lent: dict[int, tuple[InputFile, int]] = {}
        self._idle: OrderedDict[int, InputFile] = OrderedDict()
        self._bytes_read = 0
        forks.forget_in_child(self)

    def forget_parent(self) -> None:
        """Have no file open: what the parent reads at this moment is half done, and its locks may be held."""
        self._lock = forks.Lock()
        self.close()

    @contextmanager
    def lend(self, number: int) -> Iterator[tuple[InputFile, bool]]:
        """File ``number``, open for the length of the block, and whether it was in the page cache at first sight.

        CorruptError when it is missing or has another size.
        """
        file, is_cached = self._take(number)
        try:
            yield file, is_cached
        finally:
            self._give_back(number)

    def is_cached(self, number: int) -> bool:
        """Whether file ``number`` was in the page cache at first sight."""
        with self.lend(number) as (_, is_cached):
            return is_cached

    def path(self, number: int) -> str:
        """The path of file ``number``."""
        return self._paths[number]

    @property
    def bytes_read(self) -> int:
        """Bytes that the system delivered from these files; never waits for one that is being opened."""
        return self._bytes_read + sum(file.bytes_read for file in self._open_files())

    def _open_files(self) -> list[InputFile]:
        return [*(file for file, _ in tuple(self._lent.values())), *tuple(self._idle.values())]

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
                file, readers = self._lent[number]
            else:
                file, readers = self._idle.pop(number) if number in self._idle else self._open(number), 0
            self._lent[number] = file, readers + 1
            if number not in self._are_cached:
                self._are_cached[number] = file.is_cached()
            return file, self._are_cached[number]

    def _give_back(self, number: int) -> None:
        with self._lock:
            file, readers = self._lent.pop(number, (None, 0))
            if file is None:
                return  # closed meanwhile
            if readers > 1:
                self._lent[number] = file, readers - 1
                return
            self._idle[number] = file
            if len(self._idle) <= _IDLE_FILES:
                return
            _, oldest = self._idle.popitem(last=False)
            self._bytes_read += oldest.bytes_read
        oldest.close()

    def _open(self, number: int) -> InputFile:
        path = self._paths[number]
        try:
            file = InputFile.open(path)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            raise missing(path) from error
        try:
            check_size(path, file.size, self._sizes[number], at_least=self._at_least)
        except BaseException:
            file.close()
            raise
        return file


def missing(path: str) -> CorruptError:
    """The error of a file that a checkpoint needs and that is not there."""
    return CorruptError(f"{path!r} is missing; use another checkpoint", path=path)


def check_size(path: str, size: int, expected: int, *, at_least: bool = False) -> None:
    """CorruptError unless ``size``, that of the file ``path``, is as ``expected``."""
    if size < expected or (size > expected and not at_least):
        raise CorruptError(
            f"{path!r} has {size} bytes instead of {expected}: it was truncated or replaced; use another checkpoint",
            path=path,
        )
