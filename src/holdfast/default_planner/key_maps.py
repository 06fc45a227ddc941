"""Targets whose keys are not those of the checkpoint: the map that the caller gives, and what to suggest without one.

A map leads from a key of the target to the key in the checkpoint. A planner with a map sees the checkpoint under the
names that its target has, and says what it reads under the names that are stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import cast

from holdfast._state.nested import stored_paths
from holdfast.default_planner.targets import prefixes
from holdfast.errors import InvalidStateError
from holdfast.metadata import STORAGE_TYPES, Metadata, Path, TensorStorageMetadata, Versions, path_key

KeyMap = Callable[[str], str] | Mapping[str, str]
"""From a key of the target to the key in the checkpoint: a function, or prefixes of the one and of the other."""


def check_key_map(key_map: KeyMap | None) -> None:
    """ValueError for what is no map."""
    is_table = isinstance(key_map, Mapping) and all(isinstance(part, str) for pair in key_map.items() for part in pair)
    if key_map is not None and not is_table and not callable(key_map):
        raise ValueError("key_map is a function, or a dict from prefixes of the target's keys to those of stored keys")


def stored_key(key_map: KeyMap, key: str) -> str:
    """The key in the checkpoint for ``key`` of the target; prefixes end at a dot, and the longest one counts."""
    if isinstance(key_map, Mapping):
        for prefix in (*prefixes(key), ""):
            given = prefix if prefix in key_map else f"{prefix}."
            if given in key_map:
                tail = key[len(prefix) :].removeprefix(".")
                return ".".join(part for part in (key_map[given].removesuffix("."), tail) if part)
        return key
    name = key_map(key)
    if not isinstance(name, str):
        raise InvalidStateError(f"key_map gave a {type(name).__name__} for {key!r}; it gives the key in the checkpoint")
    return name


def renamed(metadata: Metadata, paths: Mapping[str, Path], key_map: KeyMap) -> tuple[Metadata, dict[str, str]]:
    """The checkpoint under the names of the target, whose leaves are at ``paths``; and the stored key for each name.

    What the target does not ask for, but may have an empty container for, has the name that the map would lead from; by
    a function, its own.
    """
    stored, there = metadata.state_dict_metadata, stored_paths(metadata)
    names = {key: stored_key(key_map, key) for key in paths}
    asked, places = set(names.values()), dict(paths)
    for key, name in zip(stored, names_for_target(stored, key_map), strict=True):
        if key not in asked and name not in names:
            names[name] = key
            path = _moved(there.get(key, (key,)), key, name)
            if path is not None:
                places[name] = path
    firsts: dict[str, str] = {}
    for name, key in names.items():
        firsts.setdefault(key, name)
    entries: dict[str, STORAGE_TYPES] = {}
    for name, key in names.items():
        entry = stored.get(key)
        if isinstance(entry, TensorStorageMetadata) and entry.alias_of is not None:
            entry = dataclasses.replace(entry, alias_of=firsts.get(entry.alias_of))
        if entry is not None:
            entries[name] = entry
    found = {name: places[name] for name in entries if name in places}
    seen = dataclasses.replace(metadata, state_dict_metadata=entries, versions=_versions(metadata.versions, names))
    if metadata.paths:
        seen.paths = found
    else:
        seen.planner_data = found
    return seen, names


def names_for_target(stored: Collection[str], key_map: KeyMap | None) -> Collection[str]:
    """The names in the target that ``key_map`` would lead from to the ``stored`` keys; by a function, their own."""
    back = {one: other for other, one in key_map.items()} if isinstance(key_map, Mapping) else {}
    return [stored_key(back, key) for key in stored] if back else stored


def _moved(path: Path, key: str, name: str) -> Path | None:
    """Where ``name`` is if ``key`` was at ``path``; None where a step would have to be cut in two."""
    if key == name:
        return path
    for start in range(len(path)):
        tail = path_key(path[start:])
        if name == tail or name.endswith(f".{tail}"):
            return (*filter(None, name[: -len(tail)].split(".")), *path[start:])
    return None


def _versions(stored: Versions, names: Mapping[str, str]) -> Versions:
    """The versions of modules by the names that they have in the target."""
    known = {".".join(filter(None, (key, name))): said for key, each in stored.items() for name, said in each.items()}
    modules = {name.rpartition(".")[0]: key.rpartition(".")[0] for name, key in names.items()}
    return {
        name: {"": known.get(key, {"version": 1})}
        for name, key in modules.items()
        if not stored.keys().isdisjoint(("", *prefixes(key)))
    }


_MOST_TRIED = 8
_WRAPPERS = "module.", "_orig_mod."  # what DistributedDataParallel and torch.compile put into keys


def suggestion(missing: Collection[str], wanted: Collection[str], stored: Collection[str]) -> str:
    """What may be meant by the ``missing`` keys, as a sentence: a container, or those that a map finds most of."""
    if not missing:
        return ""
    first = next(iter(missing))
    if any(key.startswith(f"{first}.") for key in stored):
        return f" The checkpoint has keys below {first!r}: have an empty dict there to load them."
    tables = [{target: source} for target, source in _candidates(first.split("."), stored)]
    tried: list[tuple[KeyMap, str]] = [(table, repr(table)) for table in tables]
    for wrapper in _WRAPPERS:
        strip = cast(KeyMap, lambda key, wrapper=wrapper: key.replace(wrapper, ""))
        tried.append((strip, f"lambda key: key.replace({wrapper!r}, '')"))
    found = [sum(stored_key(key_map, key) in stored for key in wanted) for key_map, _ in tried]
    key_map, text = tried[found.index(max(found))]
    if 2 * (max(found) + len(missing) - len(wanted)) <= len(missing):
        return ""
    return f" Did you mean {stored_key(key_map, first)!r} for {first!r}? Pass LoadOptions(key_map={text})."


def _candidates(wanted: list[str], stored: Iterable[str]) -> list[tuple[str, str]]:
    """Prefixes of ``wanted`` and of stored keys after which both are the same, the shortest first."""
    found: dict[tuple[str, str], int] = {}
    for key in stored:
        parts = key.split(".")
        same = 0
        while same < min(len(parts), len(wanted)) and parts[-1 - same] == wanted[-1 - same]:
            same += 1
        if same:
            found[".".join(wanted[: len(wanted) - same]), ".".join(parts[: len(parts) - same])] = same
    return sorted(found, key=lambda pair: (-found[pair], len(pair[1])))[:_MOST_TRIED]
