"""Which format a checkpoint is in, told by what is there."""

from __future__ import annotations

import os

from holdfast._filesystem.reader import FileSystemReader
from holdfast._filesystem.remote import FsspecReader, is_remote
from holdfast._native.formats import format_at
from holdfast._native.reader import NativeReader


def is_torch_format(path: str | os.PathLike[str]) -> bool:
    """Whether the checkpoint at ``path`` is in torch's own format; at a URL always.

    CorruptError where another program left one of each, and nothing tells which one is meant.
    """
    return is_remote(path) or format_at(path) == "torch"


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
