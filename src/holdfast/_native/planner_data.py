"""What a planner put into the metadata that is not the mapping of keys to paths, kept beside the user's own.

The mapping itself is in the paths of the manifest's entries. Anything else goes, as a typed value, into the manifest's
metadata under a name of its own: readers that do not know the name take it for the user's, and miss nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast._state.paths import Path, path_mapping, stored_paths
from holdfast.errors import InvalidStateError
from holdfast.metadata import Metadata

RESERVED_NAME = "holdfast.planner_data"
_INSTEAD, _ADDED = "instead", "added"


def check_user_metadata(user_metadata: Mapping[str, Any]) -> None:
    """InvalidStateError when the user's metadata uses the reserved name."""
    if RESERVED_NAME in user_metadata:
        raise InvalidStateError(f"the name {RESERVED_NAME!r} in user_metadata is reserved; use another")


def with_planner_data(user_metadata: Mapping[str, Any], metadata: Metadata) -> dict[str, Any]:
    """What the manifest keeps: the user's metadata, and the planner's data where it is more than keys to paths."""
    data, paths = metadata.planner_data, stored_paths(metadata)
    if data is None or data is paths or (path_mapping(data) is not None and data == paths):
        return dict(user_metadata)
    if paths and isinstance(data, dict) and paths.items() <= data.items():
        kept = {_ADDED: {name: value for name, value in data.items() if name not in paths}}
    else:
        kept = {_INSTEAD: data}
    return {**user_metadata, RESERVED_NAME: kept}


def split_planner_data(kept: object, paths: dict[str, Path]) -> tuple[dict[str, Any], Any]:
    """The user's metadata, and the planner's data: ``paths``, what was added to them, or what was there instead."""
    if not isinstance(kept, dict):
        return {}, paths
    data = kept.get(RESERVED_NAME)
    user = {name: value for name, value in kept.items() if name != RESERVED_NAME}
    if isinstance(data, dict) and data.keys() == {_ADDED} and isinstance(data[_ADDED], dict):
        return user, {**paths, **data[_ADDED]}
    if isinstance(data, dict) and data.keys() == {_INSTEAD}:
        return user, data[_INSTEAD]
    return dict(kept), paths
