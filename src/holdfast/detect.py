"""Which format a checkpoint is in, told by what is there."""

from __future__ import annotations

import os

from holdfast._filesystem.reader import FileSystemReader, has_torch_metadata
from holdfast._filesystem.remote import FsspecReader, is_remote
from holdfast._io import posix
from holdfast._native.publish import MANIFEST_NAME
from holdfast._native.reader import NativeReader


def is_torch_format(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint in torch's own format, and none in the native one, is at ``path``; at a URL always."""
    if is_remote(path):
        return True
    return not posix.exists(os.path.join(os.fspath(path), MANIFEST_NAME)) and has_torch_metadata(path)


def reader_for(
    path: str | os.PathLike[str], *, verify: bool = True, cast: bool = False, allow_pickle: bool = False
) -> NativeReader | FileSystemReader:
    """The reader of the checkpoint at ``path``; where nothing is, the native one, which says so when it reads.

    ``verify`` lets torch's files be checked as far as that costs no time; see ``FileSystemReader``.
    """
    if is_torch_format(path):
        reader = FsspecReader if is_remote(path) else FileSystemReader
        return reader(path, verify=None if verify else False, cast=cast, allow_pickle=allow_pickle)
    return NativeReader(path, verify=verify, cast=cast, allow_pickle=allow_pickle)
