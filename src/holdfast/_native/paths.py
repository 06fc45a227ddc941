"""Typed paths of the state in the manifest: their form there, and whether all together make one tree of bounded size.

A path leads from the state to a leaf: a str is a str key of a dict, {"key": <typed JSON>} another key of a dict,
{"list": i} and {"tuple": i} are positions. A leaf at the top of the state under its own key has no path in the
manifest. The check takes time in proportion to the paths, whatever they are. Never builds the lists themselves.

The planner's data is kept beside the user's metadata where it is more than these paths; and so are the versions of
modules. Readers that do not know the names take them for the user's, and miss nothing that the state is made of.
"""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeGuard, cast

import msgspec

from holdfast._native.forms import Json
from holdfast._native.values import decode_value, encode_value
from holdfast._state.nested import TupleIndex, TypedKey, path_mapping, stored_paths
from holdfast._values.deadline import Effort, TooMuchEffort
from holdfast._values.dtypes import MAX_KEY_BYTES, MAX_PATH_DEPTH
from holdfast._values.records import KEPT, Record, class_name, classes_in, emptied, fields_by_step, odd_names, parts_of
from holdfast.errors import CorruptError, InvalidStateError
from holdfast.metadata import Containers, Metadata, Path, PathElement, Versions, is_path

StoredElement: TypeAlias = str | dict[str, object]

MAX_EMPTY_POSITIONS = 1 << 20
"""Positions that no path leads to, of all lists and tuples: planners may leave some out, and each costs a pointer."""

_PLAIN_INTEGERS = 1 << 53  # The ids of optimizer states, mostly: no need to decode these.
_canonical = msgspec.json.Encoder().encode


class PathFault(NamedTuple):
    """What is wrong with the path of the leaf ``key``."""

    key: str
    problem: str


@dataclass(slots=True)
class _Tree:
    """All places that paths lead to, by number; 0 is the state itself.

    Lists by number rather than an object per place, because a large tree of objects sets the garbage collector off.
    """

    # What a place is, None for a leaf.
    kinds: list[str | None] = field(default_factory=partial(list, ["dict"]))
    # By place and writing, because numbers could be chosen to meet in this table; below zero are those of what is not
    # text, so that 1 and "1" are two.
    children: dict[tuple[int, str | bytes], int] = field(default_factory=dict)
    # The largest position of each list and tuple, and how many positions are taken in all of them.
    last_positions: dict[int, int] = field(default_factory=dict)
    taken_positions: int = 0
    # What writings mean, but for those of plain integers; and those of the keys in each dict that are not text.
    keys: dict[str | bytes, Hashable] = field(default_factory=dict)
    typed: dict[int, list[str | bytes]] = field(default_factory=dict)

    def typed_keys(self) -> Iterator[list[Hashable]]:
        """The keys of each dict that has some which are not text."""
        texts: dict[int, list[Hashable]] = {}
        # Just these can equal a text, so that nobody else has to look for it.
        if any(isinstance(key, str) for key in self.keys.values()):
            for place, written in self.children:
                if place in self.typed:
                    texts.setdefault(place, []).append(written)
        for place, writings in self.typed.items():
            yield texts.get(place, []) + [self.keys[each] if each in self.keys else int(each) for each in writings]


class _BadPath(Exception):
    """Why a path is refused; never leaves this module."""


def check_paths(leaves: Iterable[tuple[str, Sequence[StoredElement] | None]]) -> PathFault | None:
    """The first thing that is wrong with the paths of ``leaves`` (key and path each), or None.

    Without a path a leaf is in the state under its key. No leaf is at or below another one, each container is either a
    dict, a list or a tuple, the state itself a dict, and no two different keys of a dict are equal.
    """
    tree = _Tree()
    key = ""
    try:
        for key, path in leaves:
            if path is not None and len(path) == 1 and path[0] == key:
                raise _BadPath("has a path that is only its key, and needs none")
            _add_leaf(tree, (key,) if path is None else path)
        positions = sum(tree.last_positions.values()) + len(tree.last_positions)
        if positions - tree.taken_positions > MAX_EMPTY_POSITIONS:
            raise _BadPath("or another path leaves too many positions of a list empty")
        effort = Effort()
        for keys in tree.typed_keys() if tree.typed else ():
            if len(effort.fill(dict[object, None](), [(each, None) for each in keys], keys)) < len(keys):
                raise _BadPath("or another key has a path through two equal dict keys")
    except (_BadPath, TooMuchEffort) as fault:
        return PathFault(key=key, problem=str(fault))
    return None


def _add_leaf(tree: _Tree, path: Sequence[StoredElement]) -> None:
    if not 0 < len(path) <= MAX_PATH_DEPTH:
        raise _BadPath(f"has a path of {len(path)} steps, but 1 to {MAX_PATH_DEPTH} are allowed")
    place = 0
    is_new = False
    for element in path:
        kind, at, written = ("dict", place, element) if type(element) is str else _parse(element, place, tree)
        if tree.kinds[place] != kind:
            if not is_new:
                raise _BadPath(f"has a path through a {tree.kinds[place] or 'leaf'} that is also a {kind}")
            tree.kinds[place] = kind
        child = tree.children.get((at, written))
        is_new = child is None
        if child is None:
            child = tree.children[at, written] = len(tree.kinds)
            tree.kinds.append(None)
            if kind != "dict":
                tree.last_positions[place] = max(int(written), tree.last_positions.get(place, 0))
                tree.taken_positions += 1
            elif at < 0:
                tree.typed.setdefault(place, []).append(written)
        place = child
    if not is_new:
        raise _BadPath("has the path of another leaf, or one that other paths lead through")


def _parse(element: object, place: int, tree: _Tree) -> tuple[str, int, bytes]:
    """The kind of container that ``element`` leads through at ``place``, and where it is among the children."""
    if not isinstance(element, dict) or len(element) != 1:
        raise _BadPath("has a malformed path")
    [(kind, body)] = element.items()
    if kind in ("list", "tuple"):
        if type(body) is not int or not 0 <= body < 1 << 62:
            raise _BadPath("has a path with an impossible position")
        return kind, ~place, b"%d" % body
    if kind != "key" or type(body) is str:
        raise _BadPath("has a malformed path")
    if type(body) is int and abs(body) < _PLAIN_INTEGERS:
        return "dict", ~place, b"%d" % body
    try:
        written = _canonical(body)
        if written not in tree.keys:
            tree.keys[written] = decoded = decode_value(body, key="path")
            hash(decoded)
            str(decoded)  # fails for integers of thousands of digits, which no dotted key is made of
    except (CorruptError, TypeError, ValueError):
        raise _BadPath("has a path with a key that is damaged") from None
    return "dict", ~place, written


def check_key(key: str) -> None:
    """InvalidStateError when no manifest can hold ``key``."""
    if key.isascii() and len(key) <= MAX_KEY_BYTES:
        return
    try:
        is_short = len(key.encode()) <= MAX_KEY_BYTES
    except UnicodeEncodeError:
        raise InvalidStateError(f"the key {key[:200]!r} has lone surrogates; rename it", key=key) from None
    if not is_short:
        raise InvalidStateError(f"the key {key[:200]!r}... has more than {MAX_KEY_BYTES} bytes; shorten it", key=key)


def encode_path(key: str, path: Path | None) -> tuple[StoredElement, ...] | None:
    """The manifest's form of ``path``; None when the state has the leaf at the top under ``key``."""
    if path is None or (len(path) == 1 and type(path[0]) is str and path[0] == key):
        return None
    stored: list[StoredElement] = []
    for element in path:
        if isinstance(element, TypedKey):
            stored.append({"key": _encode_key(element.value, key)})
        elif isinstance(element, str):
            stored.append(str(element))
        else:
            stored.append({"tuple" if isinstance(element, TupleIndex) else "list": int(element)})
    return tuple(stored)


def _encode_key(value: object, key: str) -> Json:
    try:
        if type(value) is int or not any(True for _ in classes_in(value)):  # which would come back as records
            return encode_value(value, key=key)
    except InvalidStateError:
        pass
    advice = "its .name or .value" if isinstance(value, Enum) else "a str or a number"
    raise InvalidStateError(
        f"{key[:200]!r} lies under a dict key of type {class_name(type(value))}, which cannot be saved; use {advice} "
        "as the key",
        key=key,
    )


def decode_path(key: str, path: Sequence[StoredElement] | None) -> Path:
    """The path of ``key``, from what the manifest says and has been checked to mean."""
    if path is None:
        return (key,)
    elements: list[PathElement] = []
    for element in path:
        if isinstance(element, str):
            elements.append(element)
            continue
        ((tag, body),) = element.items()
        if tag == "key":
            elements.append(TypedKey(decode_value(body, key=key)))
        else:
            elements.append(TupleIndex(cast(int, body)) if tag == "tuple" else cast(int, body))
    return tuple(elements)


_DATA_NAME, _VERSIONS_NAME, CONTAINERS_NAME = "holdfast.planner_data", "holdfast.versions", "holdfast.containers"
STATISTICS_NAME = "holdfast.statistics"
RESERVED_NAMES = _DATA_NAME, _VERSIONS_NAME, CONTAINERS_NAME, STATISTICS_NAME
"""Names in the user's metadata that are not the user's."""

_INSTEAD, _ADDED = "instead", "added"


def with_planner_data(
    user_metadata: Mapping[str, object], metadata: Metadata, versions: Versions, containers: Containers
) -> dict[str, object]:
    """What the manifest keeps: the user's metadata, versions of modules, classes of containers, and the planner's data.

    That of the default planner is the paths, which the manifest has anyway.
    """
    data, paths = metadata.planner_data, stored_paths(metadata)
    kept = {**user_metadata, _VERSIONS_NAME: versions} if versions else dict(user_metadata)
    if containers:
        kept[CONTAINERS_NAME] = containers
    if data is None or data is paths or (path_mapping(data) is not None and data == paths):
        return kept
    if paths and isinstance(data, dict) and paths.items() <= data.items():
        return {**kept, _DATA_NAME: {_ADDED: {name: value for name, value in data.items() if name not in paths}}}
    return {**kept, _DATA_NAME: {_INSTEAD: data}}


def stored_containers(kept: object) -> Containers:
    """The classes of containers in what the manifest keeps; CorruptError for what no writer has put there."""
    containers = kept.get(CONTAINERS_NAME, {}) if isinstance(kept, dict) else {}
    if not isinstance(containers, dict) or not all(
        is_path(path)
        and {type(step) for step in path} <= {str, int}
        and (type(like) in KEPT or (isinstance(like, Record) and parts_of(like)))
        and like == emptied(like)
        for path, like in containers.items()
    ):
        raise CorruptError(f"{CONTAINERS_NAME!r} in the metadata is damaged; use another checkpoint")
    return containers


def check_fit(containers: Containers, leaves: Iterable[tuple[str, Sequence[StoredElement] | None]]) -> PathFault | None:
    """The first leaf whose path leads through a container that cannot hold it, if any."""
    fields = {path: fields_by_step(like) for path, like in containers.items() if isinstance(like, Record)}
    for key, stored in leaves:
        path = decode_path(key, stored)
        for depth in range(1, len(path)):
            like, step = containers.get(path[:depth]), path[depth]
            if like is None:
                continue
            if isinstance(like, Record):
                fits = type(step) in (str, TupleIndex) and step in fields[path[:depth]]
            elif isinstance(like, deque):
                fits = isinstance(step, int) and (like.maxlen is None or step < like.maxlen)
            else:
                fits = isinstance(step, str) and not (
                    isinstance(like, Namespace) and odd_names([step.value if isinstance(step, TypedKey) else step])
                )
            if not fits:
                what = like.kind if isinstance(like, Record) else type(like).__name__
                return PathFault(key=key, problem=f"is in a {what} that cannot hold it")
    return None


def is_statistics_record(kept: object) -> TypeGuard[dict[str, Any]]:
    """Whether it names a file of statistics; else it is a user's, who had it before the name was reserved."""
    types = {"name": str, "bytes": int, "digest": str}
    return isinstance(kept, dict) and {name: type(value) for name, value in kept.items()} == types


def split_planner_data(kept: object, paths: dict[str, Path]) -> tuple[dict[str, Any], Any, Versions]:
    """The user's metadata, the planner's data (``paths``, what was added to them, or what replaced them), versions."""
    if not isinstance(kept, dict):
        return {}, paths, {}
    user: dict[str, Any] = dict(kept)
    versions: Versions = {}
    if _are_versions(kept.get(_VERSIONS_NAME)):
        versions = user.pop(_VERSIONS_NAME)
    user.pop(CONTAINERS_NAME, None)
    if is_statistics_record(user.get(STATISTICS_NAME)):
        del user[STATISTICS_NAME]
    data = user.pop(_DATA_NAME, None)
    if isinstance(data, dict) and data.keys() == {_ADDED} and isinstance(data[_ADDED], dict):
        return user, {**paths, **data[_ADDED]}, versions
    if isinstance(data, dict) and data.keys() == {_INSTEAD}:
        return user, data[_INSTEAD], versions
    return {**user, _DATA_NAME: data} if _DATA_NAME in kept else user, paths, versions


def _are_versions(kept: object) -> bool:
    """Whether it is what ``with_planner_data`` keeps: dicts of dicts of dicts, all with str keys."""
    nested: list[object] = [kept]
    for _ in range(3):
        if not all(isinstance(each, dict) and all(isinstance(name, str) for name in each) for each in nested):
            return False
        nested = [value for each in nested if isinstance(each, dict) for value in each.values()]
    return True
