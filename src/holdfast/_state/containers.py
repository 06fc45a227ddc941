"""Containers that are in several places of a state, or in themselves.

A checkpoint keeps a container once for each path that leads to it. A few dozen lists, each made of the one before twice
over, would never end, whether a program made them or a pickle did. They are counted here, each container once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast._values.limits import MAX_PATH_DEPTH, MAX_REPEATED_ENTRIES, MAX_REPETITION
from holdfast.errors import InvalidStateError

_LONG = 64  # So much text counts as one entry.
_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, int, float, str, bool, bytes, type(None)})
_CONTAINERS = (dict, list, tuple, set, frozenset, Mapping)


def check_containers(value: Any, *, within: str = "") -> None:
    """InvalidStateError when ``value`` contains itself, nests too deep, or repeats containers out of all proportion.

    ``within`` is the key of ``value``; the error names the key of what is wrong.
    """
    if not isinstance(value, _CONTAINERS):
        return
    try:
        _Census().count(value, 0)
    except _Fault as fault:
        key = ".".join(([within] if within else []) + fault.trail[::-1])
        raise InvalidStateError(fault.problem.format(repr(key[:200])), key=key) from None


class _Fault(Exception):
    """What is wrong; ``trail`` becomes the way there, from its end, as the search is given up."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.trail: list[str] = []


class _Census:
    """How many entries containers stand for, and how many there are."""

    def __init__(self) -> None:
        # By address, with the container itself, so that no other gets its address; None while it is being counted.
        self._counts: dict[int, tuple[object, int | None]] = {}
        self._entries = 0

    def count(self, value: Any, depth: int) -> int:
        """The entries at and below ``value``, those of a container each time that it is met."""
        if depth > MAX_PATH_DEPTH:
            raise _Fault(f"the state is nested deeper than {MAX_PATH_DEPTH} at {{}}; flatten it")
        if id(value) in self._counts:
            known = self._counts[id(value)][1]
            if known is None:
                raise _Fault("{} leads back to a container that it is in, and no state can contain itself; take it out")
            return known
        self._counts[id(value)] = value, None
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        total = len(value)
        self._entries += total
        for name, entry in items:
            if type(entry) in _LEAVES or not isinstance(entry, _CONTAINERS):
                if type(entry) in (str, bytes) and len(entry) > _LONG:
                    total += self._text(entry)
                continue
            try:
                total += self.count(entry, depth + 1)
            except _Fault as fault:
                fault.trail.append(str(name))
                raise
        if total > MAX_REPEATED_ENTRIES and total > MAX_REPETITION * self._entries:
            raise _Fault(
                f"{{}} has the same containers in so many places that {self._entries} entries would be stored as "
                f"{total} or more; keep each in one place"
            )
        self._counts[id(value)] = value, total
        return total

    def _text(self, text: str | bytes) -> int:
        """What a long text counts for in one place."""
        weight = len(text) // _LONG
        if id(text) not in self._counts:
            self._counts[id(text)] = text, weight
            self._entries += weight
        return weight
