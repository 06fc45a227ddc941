"""Nested states <-> flat keys: torch's dotted keys, beside typed paths that bring the nesting back exactly.

Dicts and lists are flattened and keys joined by dots, dict keys as str. A list without tensors or dicts in it, and a
tuple without tensors in it, is one value. An empty container is a value too, so that it survives. Path elements equal
torch's (str for dict keys, int for positions); the subclasses ``TypedKey`` and ``TupleIndex`` remember the rest.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from holdfast._state.subclasses import CONTEXT_KEY, PACKED, ComposedTensor, inner_parts, is_composed
from holdfast._state.versions import versions_in
from holdfast._values.limits import MAX_PATH_DEPTH
from holdfast.errors import InvalidStateError
from holdfast.metadata import Metadata
from holdfast.stateful import is_stateful


class TypedKey(str):
    """A dict key that is no str: equals its ``str()``, and keeps the key itself in ``value``."""

    __slots__ = ("value",)
    value: Hashable

    def __new__(cls, value: Hashable) -> TypedKey:
        """The element for ``value``."""
        element = super().__new__(cls, str(value))
        element.value = value
        return element

    def __repr__(self) -> str:
        return repr(self.value)

    def __reduce__(self) -> tuple[type[TypedKey], tuple[Hashable]]:
        return TypedKey, (self.value,)


class TupleIndex(int):
    """A position in a tuple (a plain int is one in a list)."""


PathElement = str | int
Path = tuple[PathElement, ...]


def path_element(key: Hashable) -> str:
    """What stands for a dict's ``key`` in a path."""
    return key if type(key) is str else TypedKey(key)


def path_key(path: Path) -> str:
    """The dotted key of ``path``."""
    return ".".join(map(str, path))


def path_mapping(planner_data: object) -> dict[str, Path] | None:
    """``planner_data`` if it is what the default planner puts there, keys to paths; None for a planner's own data."""
    if not isinstance(planner_data, dict):
        return None
    return planner_data if all(type(path) is tuple and path for path in planner_data.values()) else None


def stored_paths(metadata: Metadata) -> dict[str, Path]:
    """Where each key belongs in the state, as far as ``metadata`` knows; the others are at the top."""
    return metadata.paths or path_mapping(metadata.planner_data) or {}


def is_path(path: Any) -> bool:
    """Whether it is a tuple of dict keys (str) and list positions (int), as planners write it."""
    return (
        isinstance(path, tuple)
        and 0 < len(path) <= MAX_PATH_DEPTH
        and all(isinstance(element, str) or (isinstance(element, int) and element >= 0) for element in path)
    )


def restorable_paths(metadata: Metadata) -> dict[str, Path]:
    """The stored paths that fit together, whoever wrote them.

    Ranks may have saved different things under one name, a list and a dict, or a value and a dict: a key that would not
    fit in beside those before it is left out, and stays at the top under its own name.
    """
    planner_data = metadata.paths or (metadata.planner_data if isinstance(metadata.planner_data, dict) else {})
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


def flatten(
    state: Mapping[Any, Any], versioned: dict[str, Mapping[Any, Any]] | None = None
) -> tuple[dict[str, Any], dict[str, Path]]:
    """The leaves of ``state`` by key, and the path of each key; InvalidStateError when two leaves share a key.

    State_dicts that know the versions of their modules are entered, by key, in ``versioned``.
    """
    found: list[tuple[str, Path, Any]] = []
    _collect(found, "", (), state, {} if versioned is None else versioned)
    leaves = {key: leaf for key, _, leaf in found}
    paths = {key: path for key, path, _ in found}
    if len(leaves) < len(found):
        seen: dict[str, Path] = {}
        for key, path, _ in found:
            if seen.setdefault(key, path) is not path:
                raise InvalidStateError(
                    f"key {key!r} stands for two entries of the state, at {seen[key]!r} and {path!r}; rename one",
                    key=key,
                )
    return leaves, paths


def empty_dicts(leaves: Mapping[str, Any]) -> set[str]:
    """The keys of empty dicts, which torch's format has not.

    torch takes a checkpoint that has one for an old one, and then looks for other keys in it.
    """
    return {key for key, leaf in leaves.items() if type(leaf) is dict and not leaf}


def _collect(
    found: list[tuple[str, Path, Any]], key: str, path: Path, value: Any, versioned: dict[str, Mapping[Any, Any]]
) -> None:
    """Append the leaves in ``value``, which is at ``path`` and has ``key``, each with its own key and path."""
    if len(path) > MAX_PATH_DEPTH or (len(path) == MAX_PATH_DEPTH and isinstance(value, Mapping) and value):
        raise InvalidStateError(
            f"the state is nested deeper than {MAX_PATH_DEPTH} at {key[:200]!r}; does it contain itself?", key=key
        )
    prefix = f"{key}." if path else ""
    if isinstance(value, Mapping) and (value or not path):
        _check_dict_keys(path, value)
        if type(value) is not dict and versions_in(value) is not None:
            versioned[key] = value
        for name, entry in value.items():
            element = path_element(name)
            if type(entry) is torch.Tensor and entry.dtype not in PACKED:
                found.append((prefix + element, (*path, element), entry))
            else:
                _collect(found, prefix + element, (*path, element), entry, versioned)
    elif isinstance(value, torch.Tensor) and is_composed(value):
        parts, context = inner_parts(key, value)
        for name, part in parts.items():
            _collect(found, prefix + name, (*path, name), part, versioned)
        found.append((prefix + CONTEXT_KEY, (*path, CONTEXT_KEY), ComposedTensor(value, context)))
    elif isinstance(value, (list, tuple)) and not is_one_value(value, len(path)):
        position = TupleIndex if isinstance(value, tuple) else int
        for index, entry in enumerate(value):
            _collect(found, f"{prefix}{index}", (*path, position(index)), entry, versioned)
    else:
        found.append((key, path, {} if isinstance(value, Mapping) else value))


def _check_dict_keys(path: Path, mapping: Mapping[Any, Any]) -> None:
    """InvalidStateError when two keys of one dict, such as 1 and "1", have the same name."""
    if all(type(key) is str for key in mapping):
        return
    names: dict[str, Any] = {}
    for key in mapping:
        if names.setdefault(str(key), key) is not key:
            dotted = path_key((*path, str(key)))
            raise InvalidStateError(
                f"key {dotted!r} stands for {names[str(key)]!r} and {key!r}; rename one", key=dotted
            )


def is_one_value(value: Any, depth: int = 0) -> bool:
    """Whether a list or tuple is kept as one value: nothing in it needs a key of its own."""
    if depth > MAX_PATH_DEPTH:
        # Ends the search at once, where True would go through every way into a list that contains itself.
        return False
    if isinstance(value, (torch.Tensor, np.ndarray)) or is_stateful(value):
        return False
    if isinstance(value, list):
        return not any(isinstance(entry, Mapping) or not is_one_value(entry, depth + 1) for entry in value)
    if isinstance(value, tuple):
        return all(is_one_value(entry, depth + 1) for entry in value)
    if isinstance(value, Mapping):
        return all(is_one_value(entry, depth + 1) for entry in value.values())
    return True


def unflatten(leaves: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[Any, Any]:
    """The nested state whose leaves are ``leaves``; a key without a path stays at the top under its own name."""
    root: dict[PathElement, Any] = {}
    for key, leaf in leaves.items():
        path = paths.get(key, (key,))
        node = root
        for element in path[:-1]:
            child = node.get(element)
            if not isinstance(child, _Branch):
                child = node[element] = _Branch()
            node = child
        node[path[-1]] = leaf
    return {_dict_key(element): _grown(child) for element, child in root.items()}


def tuple_like(value: tuple[Any, ...], entries: Iterable[Any]) -> Any:
    """``entries`` as a tuple; a named one where ``value`` is."""
    return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)


class _Branch(dict[PathElement, Any]):
    """A container under reconstruction: path element -> leaf or branch."""


def _dict_key(element: PathElement) -> Hashable:
    return element.value if isinstance(element, TypedKey) else element


def _grown(node: Any) -> Any:
    if not isinstance(node, _Branch):
        return node
    first = next(iter(node))
    if isinstance(first, str):
        return {_dict_key(element): _grown(child) for element, child in node.items()}
    entries = [_grown(node[index]) if index in node else None for index in range(max(map(int, node)) + 1)]
    return tuple(entries) if isinstance(first, TupleIndex) else entries


def set_element(container: Any, path: Path, value: Any) -> Any:
    """``container`` with ``value`` at ``path``: changed in place, except that tuples on the way are made anew."""
    if not path:
        return value
    element, rest = path[0], path[1:]
    if isinstance(container, MutableMapping):
        key = _dict_key(element)
        container[key] = set_element(container.get(key), rest, value)
        return container
    if isinstance(container, list) and isinstance(element, int):
        container[element] = set_element(container[element], rest, value)
        return container
    if isinstance(container, tuple) and isinstance(element, int):
        entries = list(container)
        entries[element] = set_element(entries[element], rest, value)
        return tuple_like(container, entries)
    if isinstance(container, torch.Tensor):
        # The context of a tensor subclass is compared, never set; its inner tensors are filled in place.
        return container
    return unflatten({"": value}, {"": path}) if isinstance(element, str) else value
