"""Which format a checkpoint is in, told by what is there; and what both formats say of the nesting of its keys."""

from __future__ import annotations

import os

from holdfast._filesystem.reader import FileSystemReader, has_torch_metadata
from holdfast._io import posix
from holdfast._native.publish import MANIFEST_NAME
from holdfast._native.reader import NativeReader
from holdfast._state.paths import Path
from holdfast._torchformat.unpickling import is_path
from holdfast.metadata import Metadata


def is_torch_format(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint in torch's own format, and none in the native one, is at ``path``."""
    return not posix.exists(os.path.join(os.fspath(path), MANIFEST_NAME)) and has_torch_metadata(path)


def reader_for(
    path: str | os.PathLike[str], *, verify: bool = True, cast: bool = False, allow_pickle: bool = False
) -> NativeReader | FileSystemReader:
    """The reader of the checkpoint at ``path``; where nothing is, the native one, which says so when it reads.

    ``verify`` lets torch's files be checked as far as that costs no time; see ``FileSystemReader``.
    """
    if is_torch_format(path):
        return FileSystemReader(path, verify=None if verify else False, cast=cast, allow_pickle=allow_pickle)
    return NativeReader(path, verify=verify, cast=cast, allow_pickle=allow_pickle)


def stored_paths(metadata: Metadata) -> dict[str, Path]:
    """Where in the state each key belongs, as far as planners wrote it down and it can be restored.

    Ranks may have saved different things under one name, a list and a dict, or a value and a dict: a key that would not
    fit in beside those before it is left out, and stays at the top under its own name.
    """
    planner_data = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    found = {key: planner_data[key] for key in metadata.state_dict_metadata if is_path(planner_data.get(key))}
    leaves = set(found.values())
    kinds: dict[Path, bool] = {}
    paths: dict[str, Path] = {}
    for key, path in found.items():
        parents = [path[:depth] for depth in range(1, len(path))]
        if leaves.isdisjoint(parents) and all(
            kinds.setdefault(path[:depth], isinstance(element, str)) == isinstance(element, str)
            for depth, element in enumerate(path)
        ):
            paths[key] = path
    return paths
