"""What a file system must offer to hold a checkpoint in torch's format, and the local one."""

from __future__ import annotations

import abc
import contextlib
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from holdfast._io import posix
from holdfast.errors import CorruptError

PathLike = str | os.PathLike[str]


class FileSystemBase(abc.ABC):
    """The verbs that the torch format needs of a file system; subclass it for one that is not local."""

    @contextlib.contextmanager
    @abc.abstractmethod
    def create_stream(self, path: PathLike, mode: str) -> Iterator[io.IOBase]:
        """A binary stream on ``path``, closed at the end of the block."""
        yield io.BytesIO()

    @abc.abstractmethod
    def concat_path(self, path: PathLike, suffix: str) -> PathLike:
        """The name ``suffix`` in the directory ``path``."""

    @abc.abstractmethod
    def rename(self, path: PathLike, new_path: PathLike) -> None:
        """Give ``path`` the name ``new_path``, in place of what has it."""

    @abc.abstractmethod
    def init_path(self, path: PathLike) -> PathLike:
        """``path`` in the form that this file system works with."""

    @abc.abstractmethod
    def mkdir(self, path: PathLike) -> None:
        """Guarantee that ``path`` is a directory."""

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        """Whether a checkpoint can be kept under such an id."""

    @abc.abstractmethod
    def exists(self, path: PathLike) -> bool:
        """Whether anything has the name ``path``."""

    @abc.abstractmethod
    def rm_file(self, path: PathLike) -> None:
        """Remove the file ``path``."""


class FileSystem(FileSystemBase):
    """The local file system."""

    @contextlib.contextmanager
    def create_stream(self, path: PathLike, mode: str) -> Iterator[io.IOBase]:
        """A binary stream on the file ``path``."""
        with posix.open_stream(path, mode) as stream:
            yield stream

    def concat_path(self, path: PathLike, suffix: str) -> Path:
        """``path / suffix``."""
        return Path(path) / suffix

    def rename(self, path: PathLike, new_path: PathLike) -> None:
        """Move ``path`` to ``new_path`` atomically."""
        posix.replace(path, new_path)

    def init_path(self, path: PathLike) -> Path:
        """``path`` as a Path that is absolute."""
        return Path(posix.absolute(path))

    def mkdir(self, path: PathLike) -> None:
        """Make ``path`` and its parents where they are missing."""
        posix.make_directories(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        """A Path always; a string unless it is a URL or has no parent that can be written to."""
        if isinstance(checkpoint_id, Path):
            return True
        if "://" in str(checkpoint_id):
            return False
        return any(parent.exists() and os.access(parent, os.W_OK) for parent in Path(checkpoint_id).parents)

    def exists(self, path: PathLike) -> bool:
        """Whether anything has the name ``path``."""
        return posix.exists(path)

    def rm_file(self, path: PathLike) -> None:
        """Remove the file ``path``."""
        posix.remove(path, missing_ok=False)

    def ls(self, path: PathLike) -> list[str]:
        """What is in the directory ``path``, as full names."""
        return [os.path.join(path, name) for name in posix.list_names(path)]


def is_local(fs: FileSystemBase) -> bool:
    """Whether files of ``fs`` are plain local files; a subclass may do anything with them."""
    return type(fs) is FileSystem


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
