"""What the manifest's metadata holds beside the user's own, each under a name of its own.

The planner's data is kept there where it is more than the mapping of keys to paths, which is in the paths of the
manifest's entries; and the versions of modules. Readers that do not know the names take them for the user's, and miss
nothing that the state is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast._state.paths import Path, path_mapping, stored_paths
from holdfast.errors import InvalidStateError
from holdfast.metadata import Metadata, Versions

RESERVED_NAME = "holdfast.planner_data"
VERSIONS_NAME = "holdfast.versions"
_INSTEAD, _ADDED = "instead", "added"


def check_user_metadata(user_metadata: Mapping[str, Any]) -> None:
    """InvalidStateError when the user's metadata uses a reserved name."""
    for name in (RESERVED_NAME, VERSIONS_NAME):
        if name in user_metadata:
            raise InvalidStateError(f"the name {name!r} in user_metadata is reserved; use another")


def with_planner_data(user_metadata: Mapping[str, Any], metadata: Metadata, versions: Versions) -> dict[str, Any]:
    """What the manifest keeps: the user's metadata, versions of modules, and the planner's data where it is more."""
    data, paths = metadata.planner_data, stored_paths(metadata)
    kept = {**user_metadata, VERSIONS_NAME: versions} if versions else dict(user_metadata)
    if data is None or data is paths or (path_mapping(data) is not None and data == paths):
        return kept
    if paths and isinstance(data, dict) and paths.items() <= data.items():
        return {**kept, RESERVED_NAME: {_ADDED: {name: value for name, value in data.items() if name not in paths}}}
    return {**kept, RESERVED_NAME: {_INSTEAD: data}}


def split_planner_data(kept: object, paths: dict[str, Path]) -> tuple[dict[str, Any], Any, Versions]:
    """The user's metadata, the planner's data (``paths``, what was added to them, or what replaced them), versions."""
    if not isinstance(kept, dict):
        return {}, paths, {}
    user: dict[str, Any] = dict(kept)
    versions: Versions = {}
    if _are_versions(kept.get(VERSIONS_NAME)):
        versions = user.pop(VERSIONS_NAME)
    data = user.pop(RESERVED_NAME, None)
    if isinstance(data, dict) and data.keys() == {_ADDED} and isinstance(data[_ADDED], dict):
        return user, {**paths, **data[_ADDED]}, versions
    if isinstance(data, dict) and data.keys() == {_INSTEAD}:
        return user, data[_INSTEAD], versions
    return {**user, RESERVED_NAME: data} if RESERVED_NAME in kept else user, paths, versions


def _are_versions(kept: object) -> bool:
    """Whether it is what ``with_planner_data`` keeps: dicts of dicts of dicts, all with str keys."""
    nested: list[object] = [kept]
    for _ in range(3):
        if not all(isinstance(each, dict) and all(isinstance(name, str) for name in each) for each in nested):
            return False
        nested = [value for each in nested if isinstance(each, dict) for value in each.values()]
    return True
