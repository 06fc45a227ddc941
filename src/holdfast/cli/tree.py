"""The leaves of a checkpoint as the lines of a tree, nested as they were in the state.

Positions in lists read ``[0]``, in tuples ``(0)``, keys of dicts that are no str as Python writes them. Lines are data:
guide, label and leaf; how they look is for the caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from holdfast._state.paths import PathElement, TupleIndex, TypedKey
from holdfast.cli.leaves import Leaf, ObjectLeaf, StoredLeaf, ValueLeaf
from holdfast.cli.terminal import shown_name, shown_value

_LOOKS_LIKE_A_NUMBER = re.compile(r"-?[0-9]+")
_LONGEST_KEY = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: ``guide`` draws the branches, ``under`` those of lines that belong below it.

    ``leaf`` is None for a container; ``bytes`` is what it holds, tied tensors counted where their data is.
    """

    guide: str
    under: str
    label: str
    leaf: Leaf | None
    bytes: int


@dataclass(slots=True)
class _Node:
    label: str
    leaf: Leaf | None = None
    bytes: int = 0
    children: dict[tuple[type, str], _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Guides:
    """How branches are drawn: to a child, to the last one, past a child, past the last one."""

    child: str
    last: str
    passing: str
    blank: str


_DRAWN = _Guides(child="├─ ", last="└─ ", passing="│  ", blank="   ")
_ASCII = _Guides(child="|- ", last="`- ", passing="|  ", blank="   ")


def tree_lines(leaves: Iterable[Leaf], *, ascii_only: bool = False) -> Iterator[Line]:
    """The lines of the tree of ``leaves``, parents before their children."""
    root = _Node("")
    for leaf in leaves:
        _add(root, leaf)
    yield from _lines(root, "", _ASCII if ascii_only else _DRAWN)


def _add(root: _Node, leaf: Leaf) -> None:
    nbytes = 0 if isinstance(leaf, ValueLeaf) or _is_tied(leaf) else leaf.bytes
    node = root
    for element in leaf.path:
        # By type too: the dict keys 0 and "0" are two branches.
        place = type(element), str(element)
        child = node.children.get(place)
        if child is None:
            child = node.children[place] = _Node(_label(element))
        child.bytes += nbytes
        node = child
    node.leaf = leaf


def _is_tied(leaf: StoredLeaf | ObjectLeaf) -> bool:
    return isinstance(leaf, StoredLeaf) and leaf.alias_of is not None


def _label(element: PathElement) -> str:
    if isinstance(element, TypedKey):
        return shown_value(element.value, most=_LONGEST_KEY)
    if isinstance(element, str):
        return repr(element) if _LOOKS_LIKE_A_NUMBER.fullmatch(element) else shown_name(element)
    return f"({int(element)})" if isinstance(element, TupleIndex) else f"[{element}]"


def _lines(node: _Node, indent: str, guides: _Guides) -> Iterator[Line]:
    last = len(node.children) - 1
    for number, child in enumerate(node.children.values()):
        guide, under = (guides.last, guides.blank) if number == last else (guides.child, guides.passing)
        below = indent + under
        yield Line(guide=indent + guide, under=below, label=child.label, leaf=child.leaf, bytes=child.bytes)
        yield from _lines(child, below, guides)
