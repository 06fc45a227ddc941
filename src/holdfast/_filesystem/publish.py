"""The commit in torch's format: a checkpoint is there from the moment its ``.metadata`` has its name.

By then every writer has synced its data files. The metadata is written under a name of its own, flushed and synced,
and takes the place of the old one in one step; only after that the files that the old one names are removed. Where a
checkpoint (or what is left of one) is there already, data files have the id of the save in their names: so nothing that
is visible is ever written over.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence

from holdfast._filesystem.base import FileSystemBase, PathLike, is_local
from holdfast._io import posix
from holdfast._torchformat.pickling import encode_metadata
from holdfast._torchformat.unpickling import decode_metadata
from holdfast._values.limits import MAX_METADATA_BYTES
from holdfast.errors import AlreadyPublishedError, CheckpointError
from holdfast.metadata import Metadata

DATA_SUFFIX = ".distcp"


def file_prefixes(fs: FileSystemBase, directory: PathLike, ranks: Sequence[int], *, save_id: str) -> list[str]:
    """How the names of each rank's files begin: like torch's, and where such names are taken with the id as well."""
    marker = f"{save_id}_" if _has_files_of(fs, directory, ranks) else ""
    return [f"__{rank}_{marker}" for rank in ranks]


def _has_files_of(fs: FileSystemBase, directory: PathLike, ranks: Sequence[int]) -> bool:
    list_names = getattr(fs, "ls", None)
    if list_names is None:
        return any(fs.exists(fs.concat_path(directory, f"__{rank}_0{DATA_SUFFIX}")) for rank in ranks)
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
    replaced = _named_files(fs, target)
    try:
        with posix.reporting("write", str(staged)), fs.create_stream(staged, "wb") as stream:
            stream.write(data)
            if sync:
                posix.sync_stream(stream, str(staged))
        _move(fs, staged, target, overwrite=overwrite)
    except BaseException:
        with contextlib.suppress(Exception):
            if fs.exists(staged):
                fs.rm_file(staged)
        raise
    if sync and is_local(fs):
        posix.sync_directory(directory)
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


def check_unpublished(fs: FileSystemBase, target: PathLike) -> None:
    """AlreadyPublishedError when there is a checkpoint whose metadata is ``target``."""
    if fs.exists(target):
        raise AlreadyPublishedError(
            f"{os.path.dirname(str(target))!r} holds a checkpoint already; choose another name, or pass overwrite=True"
        )


def may_be_published(fs: FileSystemBase, target: PathLike, names: Collection[str]) -> bool:
    """Whether the metadata ``target`` names one of the files ``names``, or one cannot tell: then they must stay."""
    if not names:
        return False
    try:
        data = _read(fs, target)
    except Exception:
        return True
    # Short strings are as they are in a pickle; and a name that is there for another reason keeps a file too many.
    return any(name.encode() in data for name in names)


def _read(fs: FileSystemBase, path: PathLike) -> bytes:
    """The contents of ``path``, nothing when it does not exist."""
    if not fs.exists(path):
        return b""
    with posix.reporting("read", str(path)), fs.create_stream(path, "rb") as stream:
        data: bytes = stream.read(MAX_METADATA_BYTES + 1)
    return data


def _named_files(fs: FileSystemBase, target: PathLike) -> set[str]:
    """The files in its own directory that the metadata ``target`` names; none where it cannot be read safely."""
    try:
        data = _read(fs, target)
        if not data or len(data) > MAX_METADATA_BYTES:
            return set()
        places = decode_metadata(data, path=str(target)).storage_data
    except (CheckpointError, OSError):
        return set()
    names = {info.relative_path for info in places.values()}
    return {name for name in names if name.endswith(DATA_SUFFIX) and os.path.basename(name) == name}
