"""Nested states <-> flat keys: torch's dotted keys, typed paths that bring the nesting back exactly, versions of
modules.

Dicts and lists are flattened and keys joined by dots, dict keys as str. A list without tensors or dicts in it, and a
tuple without tensors in it, is one value. An empty container is a value too, so that it survives. Path elements equal
torch's (str for dict keys, int for positions); the subclasses ``TypedKey`` and ``TupleIndex`` remember the rest.

A checkpoint keeps a container once for each path that leads to it. A few dozen lists, each of which has the one before
twice, would never end, whether a program made them or a pickle did: so entries are counted first.

The state_dict of a module has the versions of its modules, by name, as an attribute. A checkpoint keeps those other
than 1, by the key of the dict. So load_state_dict is told the versions that were saved, not those of the classes that
load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from holdfast._state.tensors import CONTEXT_KEY, PACKED, ComposedTensor, inner_parts, is_composed
from holdfast._values.dtypes import MAX_PATH_DEPTH, MAX_REPEATED_ENTRIES, MAX_REPETITION
from holdfast.errors import InvalidStateError
from holdfast.metadata import STATE_DICT_TYPE, Metadata, Versions

AnyDict: TypeAlias = dict[Any, Any]
AnyMapping: TypeAlias = Mapping[Any, Any]
AnyTarget: TypeAlias = MutableMapping[Any, Any]
"""The dicts of a state: keys and values of any type."""

_LONG = 64  # So much text counts as one entry.
_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, int, float, str, bool, bytes, type(None)})
_CONTAINERS = (dict, list, tuple, set, frozenset, Mapping)
_Container: TypeAlias = "AnyMapping | list[object] | tuple[object, ...] | set[object] | frozenset[object]"


def check_containers(value: object, *, within: str = "") -> None:
    """InvalidStateError when ``value`` contains itself, nests too deep, or repeats containers out of all proportion.

    ``within`` is the key of ``value``; the error names the key of what is wrong.
    """
    if not isinstance(value, _CONTAINERS):
        return
    try:
        _EntryCount().count(value, 0)
    except _BadContainer as fault:
        key = ".".join(([within] if within else []) + fault.trail[::-1])
        raise InvalidStateError(fault.problem.format(repr(key[:200])), key=key) from None


class _BadContainer(Exception):
    """What is wrong; ``trail`` becomes the way there, from its end, as the search is given up."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.trail: list[str] = []


@dataclass(slots=True)
class _EntryCount:
    """How many entries containers stand for, and how many there are."""

    # By address, with the container itself, so that no other gets its address; None while it is being counted.
    _counts: dict[int, tuple[object, int | None]] = field(default_factory=dict)
    _entries: int = 0

    def count(self, value: _Container, depth: int) -> int:
        """The entries at and below ``value``, those of a container each time that it is met."""
        if depth > MAX_PATH_DEPTH:
            raise _BadContainer(f"the state is nested deeper than {MAX_PATH_DEPTH} at {{}}; flatten it")
        if id(value) in self._counts:
            known = self._counts[id(value)][1]
            if known is None:
                raise _BadContainer(
                    "{} leads back to a container that it is in; a state cannot contain itself, so remove it"
                )
            return known
        self._counts[id(value)] = value, None
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        total = len(value)
        self._entries += total
        for name, entry in items:
            if type(entry) in _LEAVES or not isinstance(entry, _CONTAINERS):
                if isinstance(entry, (str, bytes)) and len(entry) > _LONG:
                    weight = len(entry) // _LONG
                    total += weight
                    if id(entry) not in self._counts:
                        self._counts[id(entry)] = entry, weight
                        self._entries += weight
                continue
            try:
                total += self.count(entry, depth + 1)
            except _BadContainer as fault:
                fault.trail.append(str(name))
                raise
        if total > MAX_REPEATED_ENTRIES and total > MAX_REPETITION * self._entries:
            raise _BadContainer(
                f"{{}} has the same containers in so many places that {self._entries} entries would be stored as "
                f"{total} or more; keep each in one place"
            )
        self._counts[id(value)] = value, total
        return total


_ATTRIBUTE = "_metadata"
_USUAL = {"version": 1}
# A state_dict that is so deep in a state was forged: no module's is, and looking for it would take long.
_MOST_DOTS = 16
_PLAIN = (bool, int, float, str, type(None))


def versions_in(state_dict: AnyMapping) -> Mapping[str, object] | None:
    """What ``state_dict`` says of each of its modules; None for a dict that is no module's."""
    found = getattr(state_dict, _ATTRIBUTE, None)
    return found if isinstance(found, Mapping) else None


def with_versions(entries: AnyDict, versions: Mapping[str, object] | None) -> AnyDict:
    """``entries``, as a dict that has these versions if there are any."""
    if versions is None:
        return entries
    made = OrderedDict(entries)
    setattr(made, _ATTRIBUTE, versions)
    return made


def pass_on_versions(source: AnyMapping, target: AnyMapping) -> None:
    """Give ``target``, if it is a module's, the versions of ``source``."""
    versions = versions_in(source)
    if versions is not None and versions_in(target) is not None:
        setattr(target, _ATTRIBUTE, versions)


def unusual_versions(state_dicts: Mapping[str, AnyMapping]) -> Versions:
    """What a checkpoint keeps of these modules' state_dicts, by their keys."""
    return {
        key: {
            str(module): {str(name): value for name, value in said.items() if isinstance(value, _PLAIN)}
            for module, said in (versions_in(state_dict) or {}).items()
            if isinstance(said, Mapping) and said != _USUAL
        }
        for key, state_dict in state_dicts.items()
    }


def tell_versions(state_dicts: Mapping[str, AnyMapping], stored: Versions, failed: Collection[str]) -> None:
    """Give the target's ``state_dicts`` the versions with which their contents were saved.

    Modules of which nothing could be loaded, because all of their keys are among ``failed``, stay what they are.
    """
    known = {_joined(key, module): said for key, modules in stored.items() for module, said in modules.items()}
    for key, state_dict in state_dicts.items() if stored else ():
        told: OrderedDict[str, object] = OrderedDict(versions_in(state_dict) or {})
        filled = {_module_of(name) for name in state_dict if _joined(key, name) not in failed}
        left = {_module_of(name) for name in state_dict} - filled
        for module in told.keys() - left:
            name = _joined(key, module)
            if not stored.keys().isdisjoint(("", name, *_prefixes(name))):
                told[module] = dict(known.get(name, _USUAL))
        setattr(state_dict, _ATTRIBUTE, told)


def add_versions(state: AnyDict, stored: Versions) -> AnyDict:
    """``state``, made for what was loaded, with the stored versions in the state_dicts of modules."""
    stored = {key: modules for key, modules in stored.items() if key.count(".") <= _MOST_DOTS}
    above = {prefix for key in stored for prefix in ("", *_prefixes(key))}
    made = _with_stored(state, "", stored, above)
    assert isinstance(made, dict)
    return made


def _with_stored(value: object, key: str, stored: Versions, above: Collection[str]) -> object:
    if key in above and isinstance(value, (dict, list, tuple)):
        entries = list(value.items() if isinstance(value, dict) else enumerate(value))
        grown = [(name, _with_stored(child, _joined(key, str(name)), stored, above)) for name, child in entries]
        if isinstance(value, tuple):
            return getattr(type(value), "_make", tuple)(child for _, child in grown)
        for name, child in grown:
            value[name] = child
    if not isinstance(value, dict) or key not in stored or versions_in(value) is not None:
        return value
    modules = stored[key].keys() | {_module_of(str(name)) for name in value} | {""}
    versions = OrderedDict((module, dict(stored[key].get(module, _USUAL))) for module in sorted(modules))
    return with_versions(value, versions)


def _joined(key: str, name: str) -> str:
    return f"{key}.{name}" if key and name else key or name


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _prefixes(key: str) -> Iterator[str]:
    """What comes before each dot of ``key``."""
    return (key[:place] for place, character in enumerate(key) if character == ".")


class TypedKey(str):
    """A dict key that is no str: equals its ``str()``, and keeps the key itself in ``value``."""

    __slots__ = ("value",)
    value: Hashable

    def __new__(cls, value: Hashable) -> TypedKey:
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


def path_key(path: Path) -> str:
    return ".".join(map(str, path))


def path_mapping(planner_data: object) -> dict[str, Path] | None:
    """``planner_data`` if it is what the default planner puts there, keys to paths; None for a planner's own data."""
    if not isinstance(planner_data, dict):
        return None
    paths = planner_data.values()
    return planner_data if {tuple}.issuperset(map(type, paths)) and all(paths) else None


def stored_paths(metadata: Metadata) -> dict[str, Path]:
    """Where each key belongs in the state, as far as ``metadata`` knows; the others are at the top."""
    return metadata.paths or path_mapping(metadata.planner_data) or {}


def is_path(path: object) -> bool:
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
    state: AnyMapping, versioned: dict[str, AnyMapping] | None = None
) -> tuple[STATE_DICT_TYPE, dict[str, Path]]:
    """The leaves of ``state`` by key, and the path of each key; InvalidStateError when two leaves share a key.

    State_dicts that know the versions of their modules are entered, by key, in ``versioned``.
    """
    found: list[tuple[str, Path, object]] = []
    _collect(found, "", (), state, {} if versioned is None else versioned)
    keys, ways, values = zip(*found, strict=True) if found else ((), (), ())
    leaves, paths = dict(zip(keys, values, strict=True)), dict(zip(keys, ways, strict=True))
    if len(leaves) < len(found):
        seen: dict[str, Path] = {}
        for key, path, _ in found:
            if seen.setdefault(key, path) is not path:
                raise InvalidStateError(
                    f"key {key!r} stands for two entries of the state, at {seen[key]!r} and {path!r}; rename one",
                    key=key,
                )
    return leaves, paths


def empty_dicts(leaves: Mapping[str, object]) -> set[str]:
    """The keys of empty dicts: torch takes a checkpoint with one for an old one, and looks for other keys in it."""
    return {key for key, leaf in leaves.items() if type(leaf) is dict and not leaf}


def _collect(
    found: list[tuple[str, Path, object]], key: str, path: Path, value: object, versioned: dict[str, AnyMapping]
) -> None:
    """Append the leaves in ``value``, which is at ``path`` and has ``key``, each with its own key and path."""
    if len(path) > MAX_PATH_DEPTH or (len(path) == MAX_PATH_DEPTH and isinstance(value, Mapping) and value):
        raise InvalidStateError(
            f"the state is nested deeper than {MAX_PATH_DEPTH} at {key[:200]!r}; does it contain itself?", key=key
        )
    prefix = f"{key}." if path else ""
    if isinstance(value, Mapping) and (value or not path):
        if not {str}.issuperset(map(type, value)):
            _check_dict_keys(path, value)
        if type(value) is not dict and versions_in(value) is not None:
            versioned[key] = value
        for name, entry in value.items():
            element = name if type(name) is str else TypedKey(name)
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


def _check_dict_keys(path: Path, mapping: AnyMapping) -> None:
    """InvalidStateError when two keys of one dict, such as 1 and "1", have the same name."""
    names: dict[str, object] = {}
    for key in mapping:
        if names.setdefault(str(key), key) is not key:
            dotted = path_key((*path, str(key)))
            raise InvalidStateError(
                f"key {dotted!r} stands for {names[str(key)]!r} and {key!r}; rename one", key=dotted
            )


def is_stateful(value: object) -> bool:
    """Whether ``value`` is a Stateful object: ``isinstance`` gives the same answer at twenty times the cost."""
    kind = type(value)
    return hasattr(kind, "load_state_dict") and hasattr(kind, "state_dict") and not isinstance(value, type)


def is_one_value(value: object, depth: int = 0) -> bool:
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


def unflatten(leaves: Mapping[str, object], paths: Mapping[str, Path]) -> AnyDict:
    """The nested state whose leaves are ``leaves``; a key without a path stays at the top under its own name."""
    root = _Branch()
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


def tuple_like(value: tuple[object, ...], entries: Iterable[object]) -> tuple[object, ...]:
    """``entries`` as a tuple; a named one where ``value`` is."""
    kind: Callable[..., tuple[object, ...]] = type(value)
    return kind(*entries) if hasattr(value, "_fields") else tuple(entries)


class _Branch(dict[PathElement, object]):
    """A container under reconstruction: path element -> leaf or branch."""


def _dict_key(element: PathElement) -> Hashable:
    return element.value if isinstance(element, TypedKey) else element


def _grown(node: object) -> object:
    if not isinstance(node, _Branch):
        return node
    first = next(iter(node))
    if isinstance(first, str):
        return {_dict_key(element): _grown(child) for element, child in node.items()}
    entries = [_grown(node[index]) if index in node else None for index in range(max(map(int, node)) + 1)]
    return tuple(entries) if isinstance(first, TupleIndex) else entries


def set_element(container: object, path: Path, value: object) -> object:
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
