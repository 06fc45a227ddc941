"""Nested states <-> flat keys: torch's dotted keys, typed paths that bring the nesting back exactly.

Dicts and lists are flattened and keys joined by dots, dict keys as str. A list without tensors or dicts in it, and a
tuple without tensors in it, is one value. An empty container is a value too, so that it survives. Path elements equal
torch's (str for dict keys, int for positions); the subclasses ``TypedKey`` and ``TupleIndex`` remember the rest.

A checkpoint keeps a container once for each path that leads to it. A few dozen lists, each of which has the one before
twice, would never end, whether a program made them or a pickle did: so entries are counted first.

Containers of the classes in ``KEPT`` come back as what they were: beside the paths, a checkpoint has an empty one of
the class for each path to such a container. So do dataclasses and named tuples that have tensors in them, with a Record
beside the paths: they are taken apart like dicts and tuples. Without tensors, an instance is one value.
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from holdfast._state.tensors import CONTEXT_KEY, PACKED, ComposedTensor, inner_parts, is_composed
from holdfast._values.dtypes import MAX_PATH_DEPTH, MAX_REPEATED_ENTRIES, MAX_REPETITION
from holdfast._values.records import (
    FACTORIES,
    KEPT,
    REGISTERED,
    NotStorable,
    Record,
    emptied,
    fields_by_step,
    odd_names,
    parts_of,
    record_of,
    refilled,
    with_parts,
)
from holdfast.errors import InvalidStateError
from holdfast.metadata import STATE_DICT_TYPE, Containers, Metadata, Path, PathElement, path_key

AnyDict: TypeAlias = dict[Any, Any]
AnyMapping: TypeAlias = Mapping[Any, Any]
AnyTarget: TypeAlias = MutableMapping[Any, Any]
"""The dicts of a state: keys and values of any type."""

_FIELDS = "__dataclass_fields__"
_LONG = 64  # So much text counts as one entry.
_VALUES = frozenset({int, float, str, bool, bytes, type(None)})
LEAVES = _VALUES | {torch.Tensor, torch.nn.Parameter}
_USUAL = LEAVES | {dict, list, tuple}
_CONTAINERS = (dict, list, tuple, set, frozenset, Mapping, deque, Namespace)


def check_containers(value: object, *, within: str = "", is_value: bool = False) -> None:
    """InvalidStateError when ``value`` contains itself, nests too deep, or repeats containers out of all proportion.

    ``within`` is the key of ``value``; the error names the key of what is wrong. The fields of dataclasses count where
    ``value`` is a value that is to be stored.
    """
    if not isinstance(value, _CONTAINERS) and not (is_value and hasattr(type(value), _FIELDS)):
        return
    try:
        _EntryCount(is_value=is_value).count(value, 0)
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

    is_value: bool = False
    # By address, with the container itself, so that no other gets its address; None while it is being counted.
    _counts: dict[int, tuple[object, int | None]] = field(default_factory=dict)
    _entries: int = 0

    def count(self, value: Any, depth: int) -> int:
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
        entries = vars(value) if isinstance(value, Namespace) else value
        if not isinstance(value, _CONTAINERS):
            entries = {name: getattr(value, name, None) for name in getattr(value, _FIELDS)}
        items = entries.items() if isinstance(entries, Mapping) else enumerate(entries)
        total = len(entries)
        self._entries += total
        for name, entry in items:
            if type(entry) in LEAVES or not (
                isinstance(entry, _CONTAINERS) or (self.is_value and hasattr(type(entry), _FIELDS))
            ):
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


ATTRIBUTE = "_metadata"


def versions_in(state_dict: AnyMapping) -> Mapping[str, object] | None:
    """What ``state_dict`` says of each of its modules; None for a dict that is no module's."""
    found = getattr(state_dict, ATTRIBUTE, None)
    return found if isinstance(found, Mapping) else None


def with_versions(entries: AnyDict, versions: Mapping[str, object] | None) -> AnyDict:
    """``entries``, as a dict that has these versions if there are any."""
    if versions is None:
        return entries
    made = OrderedDict(entries)
    setattr(made, ATTRIBUTE, versions)
    return made


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


def path_mapping(planner_data: object) -> dict[str, Path] | None:
    """``planner_data`` if it is what the default planner puts there, keys to paths; None for a planner's own data."""
    if not isinstance(planner_data, dict):
        return None
    paths = planner_data.values()
    return planner_data if {tuple}.issuperset(map(type, paths)) and all(paths) else None


def stored_paths(metadata: Metadata) -> dict[str, Path]:
    """Where each key belongs in the state, as far as ``metadata`` knows; the others are at the top."""
    return metadata.paths or path_mapping(metadata.planner_data) or {}


def flatten(
    state: AnyMapping,
    versioned: dict[str, AnyMapping] | None = None,
    containers: Containers | None = None,
    stored: Containers | None = None,
) -> tuple[STATE_DICT_TYPE, dict[str, Path]]:
    """The leaves of ``state`` by key, and the path of each key; InvalidStateError when two leaves share a key.

    State_dicts that know the versions of their modules are entered, by key, in ``versioned``; in ``containers``, by
    path, empty containers whose class is kept, and instances. Where that is None, as torch has it, a deque, Namespace
    or dataclass with tensors in it is a leaf. Instances without tensors are taken apart where ``stored`` has Records.
    """
    found: list[tuple[str, Path, object]] = []
    _collect(found, "", (), state, {} if versioned is None else versioned, containers, stored or {})
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
    return {key for key, leaf in leaves.items() if isinstance(leaf, dict) and not leaf}


def _collect(
    found: list[tuple[str, Path, object]],
    key: str,
    path: Path,
    value: object,
    versioned: dict[str, AnyMapping],
    containers: Containers | None,
    stored: Containers,
) -> None:
    """Append the leaves in ``value``, which is at ``path`` and has ``key``, each with its own key and path."""
    if len(path) > MAX_PATH_DEPTH or (len(path) == MAX_PATH_DEPTH and isinstance(value, Mapping) and value):
        raise InvalidStateError(
            f"the state is nested deeper than {MAX_PATH_DEPTH} at {key[:200]!r}; does it contain itself?", key=key
        )
    prefix = f"{key}." if path else ""
    leaf, is_apart = value, containers is not None
    if path and type(value) not in _USUAL:
        value, leaf = _kept(key, path, value, containers, stored.get(path))
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
                _collect(found, prefix + element, (*path, element), entry, versioned, containers, stored)
    elif isinstance(value, torch.Tensor) and is_composed(value):
        parts, context = inner_parts(key, value)
        for name, part in parts.items():
            _collect(found, prefix + name, (*path, name), part, versioned, containers, stored)
        found.append((prefix + CONTEXT_KEY, (*path, CONTEXT_KEY), ComposedTensor(value, context)))
    elif isinstance(value, (list, tuple)) and (value is not leaf or not is_one_value(value, len(path), apart=is_apart)):
        position = TupleIndex if isinstance(value, tuple) else int
        for index, entry in enumerate(value):
            _collect(found, f"{prefix}{index}", (*path, position(index)), entry, versioned, containers, stored)
    else:
        is_plain = isinstance(leaf, Mapping) and type(leaf) not in KEPT and type(leaf) not in REGISTERED
        found.append((key, path, {} if is_plain else leaf))


def _kept(key: str, path: Path, value: Any, containers: Containers | None, stored: object) -> tuple[object, object]:
    """What is to be taken apart of ``value``, whose class may be kept, and what is the leaf where nothing is."""
    record = None
    if type(value) in REGISTERED:
        return None, value
    if type(value) not in KEPT:
        if containers is None or isinstance(value, (Mapping, list, torch.Tensor)) or parts_of(value) is None:
            return value, value
        record = record_apart(value) if isinstance(stored, Record) or not is_one_value(value, len(path)) else None
        if record is None:
            return None, value
    elif isinstance(value, dict):
        if containers is None or not keeps_class(value):
            return value, dict(value)
    elif containers is None or is_one_value(value, len(path)):
        return None, value
    if isinstance(value, Namespace) and (odd := odd_names(vars(value))):
        raise InvalidStateError(f"{key!r} is a Namespace with the name {odd[0]!r}; rename it", key=key)
    if not isinstance(value, dict) or value:
        like = emptied(value) if record is None else value
        containers[tuple(str(step) if isinstance(step, str) else int(step) for step in path)] = like
    if record is not None:
        return (tuple(record.fields.values()) if record.kind == "namedtuple" else record.fields), value
    return (value if isinstance(value, dict) else vars(value) if isinstance(value, Namespace) else list(value)), value


def record_apart(value: object) -> Record | None:
    """The fields of an instance that can be taken apart; None for all else, which whoever is to store it may refuse."""
    if type(value) in _USUAL or isinstance(value, (Mapping, list, torch.Tensor)) or not parts_of(value):
        return None
    try:
        check_containers(value, is_value=True)
        return None if is_stateful(value) and not isinstance(value, tuple) else record_of(value)
    except (InvalidStateError, NotStorable):
        return None


def keeps_class(value: object) -> bool:
    """Whether a mapping comes back as its class: a state_dict does by its versions, some defaultdicts cannot."""
    if not isinstance(value, defaultdict):
        return type(value) in KEPT and versions_in(cast(AnyMapping, value)) is None
    return type(value) in KEPT and any(value.default_factory is factory for factory in FACTORIES)


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


def is_one_value(value: object, depth: int = 0, *, apart: bool = True, seen: set[int] | None = None) -> bool:
    """Whether a list, tuple, deque, Namespace or dataclass is one value: nothing in it needs a key of its own.

    Not taken ``apart``, a dataclass is one value whatever is in it. All that is ``seen`` in one is looked at once, and
    dicts in a list need no keys there.
    """
    if depth > MAX_PATH_DEPTH:
        # Ends the search at once, where True would go through every way into a list that contains itself.
        return False
    if type(value) in _VALUES:
        return True
    if isinstance(value, (torch.Tensor, np.ndarray, torch.Generator)) or is_stateful(value):
        return False
    number = id(value)
    if isinstance(value, Namespace):
        value = vars(value)
    elif apart and not isinstance(value, (list, tuple, Mapping)) and (parts := parts_of(value)) is not None:
        seen, value = set() if seen is None else seen, parts
    if seen is not None:
        if number in seen:
            return True
        seen.add(number)
    entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple, deque)) else ()
    return not any(
        (isinstance(value, list) and isinstance(entry, Mapping) and seen is None)
        or not is_one_value(entry, depth + 1, apart=apart, seen=seen)
        for entry in entries
    )


def unflatten(leaves: Mapping[str, object], paths: Mapping[str, Path], containers: Containers | None = None) -> AnyDict:
    """The nested state whose leaves are ``leaves``; a key without a path stays at the top under its own name.

    What is at the paths of ``containers`` is of their class, which has to fit; but an instance of which only some
    fields are there is a Record of these.
    """
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
    for path, like in (containers or {}).items():
        found: object = root
        for element in path:
            found = found.get(element) if isinstance(found, _Branch) else None
        if isinstance(found, _Branch):
            found.like = like
    return {_dict_key(element): _grown(child) for element, child in root.items()}


def tuple_like(value: tuple[object, ...], entries: Iterable[object]) -> tuple[object, ...]:
    """``entries`` as a tuple; a named one where ``value`` is."""
    return tuple.__new__(type(value) if hasattr(value, "_fields") else tuple, entries)


class _Branch(dict[PathElement, object]):
    """A container under reconstruction: path element -> leaf or branch; ``like`` an empty one of its class."""

    like: object = None


def _dict_key(element: PathElement) -> Hashable:
    return element.value if isinstance(element, TypedKey) else element


def _grown(node: object) -> object:
    if not isinstance(node, _Branch):
        return node
    if steps := fields_by_step(node.like):
        return with_parts(node.like, {name: _grown(node[step]) for step, name in steps.items() if step in node})
    first = next(iter(node))
    if isinstance(first, str):
        named = {_dict_key(element): _grown(child) for element, child in node.items()}
        return named if node.like is None else refilled(emptied(node.like), named)
    entries = [_grown(node[index]) if index in node else None for index in range(max(map(int, node)) + 1)]
    if node.like is not None:
        return refilled(emptied(node.like), entries)
    return tuple(entries) if isinstance(first, TupleIndex) else entries


def set_element(container: object, path: Path, value: object) -> object:
    """``container`` with ``value`` at ``path``: changed in place, but tuples and Records on the way are made anew."""
    if not path:
        return value
    element, rest = path[0], path[1:]
    if isinstance(container, MutableMapping):
        key = _dict_key(element)
        container[key] = set_element(container.get(key), rest, value)
        return container
    if isinstance(container, Namespace):
        set_element(vars(container), path, value)
        return container
    if isinstance(container, (list, deque)) and isinstance(element, int):
        container[element] = set_element(container[element], rest, value)
        return container
    if isinstance(container, tuple) and isinstance(element, int):
        entries = list(container)
        entries[element] = set_element(entries[element], rest, value)
        return tuple_like(container, entries)
    if isinstance(container, torch.Tensor):
        # The context of a tensor subclass is compared, never set; its inner tensors are filled in place.
        return container
    if parts := parts_of(container):
        name = fields_by_step(container)[element]
        part = set_element(parts[name], rest, value)
        if isinstance(container, Record):
            return with_parts(container, {**parts, name: part})
        object.__setattr__(container, name, part)
        return container
    return unflatten({"": value}, {"": path}) if isinstance(element, str) else value
