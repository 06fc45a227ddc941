"""Checkpoints at URLs: torch's format over whatever file system fsspec has for the scheme.

They are read and written by the same code as local ones, so metadata and objects are as restricted here as there.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast._io import posix
from holdfast._torch_format.file_systems import FileSystemBase, PathLike
from holdfast._torch_format.reader import FileSystemReader
from holdfast._torch_format.streams import StreamTransform
from holdfast._torch_format.writer import FileSystemWriter, SerializationFormat


def is_remote(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether the id is a URL and not a path."""
    return "://" in posix.text_path(checkpoint_id)


class RemoteFileSystem(FileSystemBase):
    """The file system that fsspec has for a URL, from ``init_path`` on; ``options`` are those of that file system."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._fs: Any = None

    @contextlib.contextmanager
    def create_stream(self, path: PathLike, mode: str) -> Iterator[io.IOBase]:
        """A binary stream on ``path``; what is written counts when the block ends, and is removed if it fails."""
        stream = self._fs.open(os.fspath(path), mode)
        try:
            with stream:
                yield stream
        except BaseException:
            # Closing a stream completes an upload, also of half a file.
            if "r" not in mode:
                with contextlib.suppress(Exception):
                    self.rm_file(path)
            raise

    def concat_path(self, path: PathLike, suffix: str) -> str:
        """``path`` and ``suffix`` with a slash between them."""
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def rename(self, path: PathLike, new_path: PathLike) -> None:
        """Move ``path`` to ``new_path``: in one step if the storage can, else by a copy."""
        self._fs.mv(os.fspath(path), os.fspath(new_path))

    def init_path(self, path: PathLike) -> str:
        """``path``, once fsspec knows its file system; ValueError where it does not."""
        url = os.fspath(path)
        self._fs = _file_system(url, self._options)
        return url

    def mkdir(self, path: PathLike) -> None:
        """Make ``path``, where the storage has directories."""
        self._fs.makedirs(os.fspath(path), exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        """Whether it is a string and fsspec has a file system for it."""
        if isinstance(checkpoint_id, Path):
            return False
        try:
            _file_system(os.fspath(checkpoint_id), {})
        except ValueError:
            return False
        return True

    def exists(self, path: PathLike) -> bool:
        """Whether anything has the name ``path`` now."""
        self._fs.invalidate_cache()
        found: bool = self._fs.exists(os.fspath(path))
        return found

    def rm_file(self, path: PathLike) -> None:
        """Remove the file ``path``."""
        self._fs.rm_file(os.fspath(path))

    def ls(self, path: PathLike) -> list[str]:
        """What is below ``path`` now; nothing where storage without directories has no such prefix."""
        self._fs.invalidate_cache()
        try:
            names: list[str] = self._fs.ls(os.fspath(path), detail=False)
        except FileNotFoundError:
            return []
        return names

    def size(self, path: PathLike) -> int:
        """Bytes of the file ``path``."""
        nbytes: int = self._fs.size(os.fspath(path))
        return nbytes


def _file_system(url: str, options: dict[str, Any]) -> Any:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ValueError(f"{url!r} is a URL, and those need fsspec; install it, or use a path") from error
    try:
        return url_to_fs(url, **options)[0]
    except (ValueError, ImportError) as error:
        raise ValueError(
            f"fsspec has no storage for {url!r} ({error}); install the package for its scheme, or use a path"
        ) from error


class FsspecWriter(FileSystemWriter):
    """Writes a checkpoint in torch's format to the URL ``path``; ``options`` go to the file system of its scheme."""

    def __init__(
        self,
        path: PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransform] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        **options: Any,
    ) -> None:
        super().__init__(
            path,
            single_file_per_rank,
            sync_files,
            thread_count,
            per_thread_copy_ahead,
            overwrite=overwrite,
            _extensions=_extensions,
            serialization_format=serialization_format,
        )
        self.fs = RemoteFileSystem(**options)
        self.path = self.fs.init_path(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        """Whether fsspec has a file system for it."""
        return RemoteFileSystem.validate_checkpoint_id(checkpoint_id)


class FsspecReader(FileSystemReader):
    """Reads a checkpoint in torch's format from the URL ``path``; ``options`` go to the file system of its scheme.

    ``cast``, ``allow_pickle`` and ``verify`` are those of ``FileSystemReader``.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        cast: bool = False,
        allow_pickle: bool = False,
        verify: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, cast=cast, allow_pickle=allow_pickle, verify=verify)
        self.fs = RemoteFileSystem(**options)
        self.path = self.fs.init_path(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        """Whether fsspec has a file system for it."""
        return RemoteFileSystem.validate_checkpoint_id(checkpoint_id)
