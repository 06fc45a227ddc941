"""What a file system must offer to hold a checkpoint in torch's format, and the commit there: ``.metadata`` gets its
name.

By then every writer has synced its data files. The metadata is written under a name of its own, flushed and synced,
and takes the place of the old one in one step; only after that the files that the old one names are removed. Where a
checkpoint (or what is left of one) is there already, data files have the id of the save in their names: so nothing that
is visible is ever written over. Local savers take turns, so that each knows what it replaces; ``_native.publish`` tells
how it replaces a native checkpoint.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import io
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast._io import posix
from holdfast._io.urls import is_store_url
from holdfast._native.publish import MANIFEST_NAME, Turn, other_format_stays
from holdfast._process import Ending
from holdfast._torch_classes.translate import encode_metadata
from holdfast._torch_codec.metadata_file import DATA_SUFFIX, METADATA_NAME, data_files_of
from holdfast._values.dtypes import MAX_METADATA_BYTES
from holdfast.errors import AlreadyPublishedError, CheckpointError, CorruptError, StorageError
from holdfast.metadata import Metadata

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
        with posix.open_stream(path, mode) as stream:
            yield stream

    def concat_path(self, path: PathLike, suffix: str) -> Path:
        return Path(path) / suffix

    def rename(self, path: PathLike, new_path: PathLike) -> None:
        posix.replace(path, new_path)

    def init_path(self, path: PathLike) -> Path:
        return Path(posix.absolute(path))

    def mkdir(self, path: PathLike) -> None:
        posix.make_directories(posix.absolute(path))  # which refuses what was a URL

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        if isinstance(checkpoint_id, Path):
            return True
        if "://" in str(checkpoint_id):
            return False
        return any(parent.exists() and os.access(parent, os.W_OK) for parent in Path(checkpoint_id).parents)

    def exists(self, path: PathLike) -> bool:
        return posix.exists(path)

    def rm_file(self, path: PathLike) -> None:
        posix.remove(path, missing_ok=False)

    def ls(self, path: PathLike) -> list[str]:
        return [os.path.join(path, name) for name in posix.list_names(path)]


class RemoteFileSystem(FileSystemBase):
    """The file system that fsspec has for a URL, from ``init_path`` on; ``options`` are those of that file system."""

    def __init__(self, **options: object) -> None:
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
        self._fs.makedirs(os.fspath(path), exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        if isinstance(checkpoint_id, Path):
            return False
        try:
            _file_system(os.fspath(checkpoint_id), {})
        except ValueError:
            return False
        return True

    def exists(self, path: PathLike) -> bool:
        self._fs.invalidate_cache()
        return bool(self._fs.exists(os.fspath(path)))

    def rm_file(self, path: PathLike) -> None:
        self._fs.rm_file(os.fspath(path))

    def ls(self, path: PathLike) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return list(self._fs.ls(os.fspath(path), detail=False))
        except FileNotFoundError:
            return []

    def size(self, path: PathLike) -> int:
        return int(self._fs.size(os.fspath(path)))


class Located:
    """What readers and writers of torch's format have in common: the ``path`` of the checkpoint on ``fs``."""

    fs: FileSystemBase
    path: PathLike
    kind: type[FileSystemBase] = FileSystem

    def place_at(self, path: PathLike, fs: FileSystemBase) -> None:
        self.fs = fs
        self.path = fs.init_path(path)

    @property
    def checkpoint_id(self) -> PathLike:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return cls.kind.validate_checkpoint_id(checkpoint_id)


class _UnknownStorageError(ValueError, RuntimeError):
    """The argument is a URL that nothing here can serve: wrong as an argument, and in torch a RuntimeError."""


def _file_system(url: str, options: dict[str, object]) -> Any:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise _UnknownStorageError(f"{url!r} is a URL, and those need fsspec; install it, or use a path") from error
    try:
        return url_to_fs(url, **options)[0]
    except (ValueError, ImportError) as error:
        raise _UnknownStorageError(
            f"fsspec has no storage for {url!r} ({error}); install the package for its scheme, or use a path"
        ) from error


def is_remote(checkpoint_id: PathLike) -> bool:
    """Whether the id is a URL and not a path."""
    return "://" in posix.text_path(checkpoint_id)


def is_for_fsspec(checkpoint_id: PathLike) -> bool:
    """Whether it is a URL, and no store that is used without fsspec."""
    return is_remote(checkpoint_id) and not is_store_url(checkpoint_id)


def is_local(fs: FileSystemBase) -> bool:
    """Whether files of ``fs`` are plain local files; a subclass may do anything with them."""
    return type(fs) is FileSystem


def local_path(directory: PathLike, relative_path: str) -> str:
    """The path of a file of the checkpoint in ``directory``; CorruptError where a link would lead out of it."""
    path = os.path.join(os.fspath(directory), relative_path)
    *folders, _ = relative_path.split("/")
    for depth in range(1, len(folders) + 1):
        folder = os.path.join(os.fspath(directory), *folders[:depth])
        status = posix.file_status(folder)
        if status is not None and stat.S_ISLNK(status.st_mode):
            raise CorruptError(f"{folder!r} is a link, which may lead anywhere; use another checkpoint", path=path)
    return path


def file_prefixes(fs: FileSystemBase, directory: PathLike, ranks: Sequence[int], *, save_id: str) -> list[str]:
    """How the names of each rank's files begin: like torch's; where such names are taken with the id as well.

    They were taken before where a native checkpoint is: somebody may still read what it replaced.
    """
    is_new = not _has_files_of(fs, directory, ranks) and not fs.exists(fs.concat_path(directory, MANIFEST_NAME))
    marker = "" if is_new else f"{save_id}_"
    return [f"__{rank}_{marker}" for rank in ranks]


def _has_files_of(fs: FileSystemBase, directory: PathLike, ranks: Sequence[int]) -> bool:
    list_names = getattr(fs, "ls", None)
    if list_names is None:
        return any(fs.exists(fs.concat_path(directory, f"__{rank}_0{DATA_SUFFIX}")) for rank in ranks)
    if isinstance(fs, FileSystem) and not fs.exists(directory):
        return False  # it is made when the first file is written; others may have no directories at all
    # "__3_..." has the rank between the second and the third underscore.
    parts = (os.path.basename(str(name)).split("_") for name in list_names(directory))
    taken = {part[2] for part in parts if len(part) > 3 and part[:2] == ["", ""]}
    return any(str(rank) in taken for rank in ranks)


def publish(
    fs: FileSystemBase,
    directory: PathLike,
    metadata: Metadata,
    *,
    name: str,
    save_id: str,
    overwrite: bool,
    sync: bool,
) -> None:
    """Make ``metadata`` the file ``name`` in ``directory``, in place of what is there, whose files are then removed.

    On an error before that nothing of it is left. AlreadyPublishedError when there is one and ``overwrite`` is not set.
    """
    data = encode_metadata(metadata)
    target = fs.concat_path(directory, name)
    staged = fs.concat_path(directory, f"{name}-{save_id}.tmp")
    check_replaceable(fs, directory, name, overwrite=overwrite)
    turn = Turn(os.fspath(directory), "torch", name=save_id) if is_local(fs) else None
    passing = Ending(turn.lock.release if turn is not None else lambda: None)
    replaced: set[str] = set()

    def conclude() -> None:
        if turn is not None:
            if sync:
                posix.sync_directory(directory)
            if turn.replaced:
                turn.remove_other()
        _remove(fs, directory, replaced, metadata)

    with passing, passing:
        try:
            if turn is not None:
                turn.take()
            replaced = _named_files(fs, target)
            with posix.reporting("write", str(staged)), fs.create_stream(staged, "wb") as stream:
                stream.write(data)
                if sync:
                    posix.sync_stream(stream, str(staged))
            if turn is not None and "native" in turn.announce(data, overwrite=overwrite and name == METADATA_NAME):
                posix.sync_directory(directory)
            _move(fs, staged, target, overwrite=overwrite)
        except BaseException as error:
            is_published = not isinstance(error, Exception) and read_whole(fs, target) == data
            for path in (staged,) if turn is None or is_published else (staged, turn.note):
                with contextlib.suppress(Exception):
                    if fs.exists(path):
                        fs.rm_file(path)
            if is_published:  # an interrupt came right after the fact
                conclude()
            raise
        try:
            conclude()
        except Exception:
            raise  # a sync that failed is not tried again
        except BaseException:
            conclude()
            raise


def _remove(fs: FileSystemBase, directory: PathLike, replaced: set[str], metadata: Metadata) -> None:
    """Remove the files that were ``replaced``, but for those that ``metadata`` names too."""
    for old in replaced - {info.relative_path for info in metadata.storage_data.values()}:
        # What cannot be removed is invisible.
        with contextlib.suppress(Exception):
            fs.rm_file(fs.concat_path(directory, old))


def _move(fs: FileSystemBase, staged: PathLike, target: PathLike, *, overwrite: bool) -> None:
    if not overwrite:
        if is_local(fs):
            posix.link_new(staged, target)
            return
        check_unpublished(fs, target)
    with posix.reporting("publish", str(target)):
        try:
            fs.rename(staged, target)
        except FileExistsError:
            # torch removes the old one first, so a file system made for it may not know how to replace.
            fs.rm_file(target)
            fs.rename(staged, target)


def check_replaceable(fs: FileSystemBase, directory: PathLike, name: str, *, overwrite: bool) -> None:
    """AlreadyPublishedError when there is a checkpoint that the metadata ``name`` must not, or cannot, replace."""
    if not overwrite:
        check_unpublished(fs, fs.concat_path(directory, name))
    # Ranks that save apart have no one step, and only local directories have a turn.
    is_possible = overwrite and name == METADATA_NAME and is_local(fs)
    if not is_possible and fs.exists(fs.concat_path(directory, MANIFEST_NAME)):
        raise other_format_stays(str(directory), "torch")


def check_unpublished(fs: FileSystemBase, target: PathLike) -> None:
    if fs.exists(target):
        raise AlreadyPublishedError.at(os.path.dirname(str(target)))


def may_be_published(fs: FileSystemBase, target: PathLike, names: Collection[str]) -> bool:
    """Whether the metadata ``target`` names one of the files ``names``, or one cannot tell: then they must stay."""
    if not names:
        return False
    try:
        data = read_whole(fs, target) or b""
    except Exception:
        return True
    # Short strings are as they are in a pickle; and a name that is there for another reason keeps a file too many.
    return any(name.encode() in data for name in names)


def read_whole(fs: FileSystemBase, path: PathLike) -> bytes | None:
    """What is in the file ``path``, one of metadata; None where there is none."""
    try:
        if is_local(fs):
            return posix.read_whole(path, limit=MAX_METADATA_BYTES)
        if not fs.exists(path):
            return None  # what its stream would raise, only the file system knows
        with fs.create_stream(path, "rb") as stream:
            data: bytes = stream.read(MAX_METADATA_BYTES + 1)
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return None
    except FileNotFoundError:
        return None
    if len(data) > MAX_METADATA_BYTES:
        raise CorruptError(f"{str(path)!r} is larger than {MAX_METADATA_BYTES} bytes; use another checkpoint")
    return data


def _named_files(fs: FileSystemBase, target: PathLike) -> set[str]:
    """The files in its own directory that the metadata ``target`` names; none where it cannot be read safely."""
    try:
        data = read_whole(fs, target)
        return set() if data is None else data_files_of(data, str(target))
    except (CheckpointError, OSError):
        return set()
