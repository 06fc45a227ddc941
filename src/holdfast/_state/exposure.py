"""Stateful objects, at any depth, exchanged for their state and given it back.

``expose`` copies containers, never tensors. What it returns is what planners see; on load it is filled and
``hand_back`` passes it on: Stateful objects get load_state_dict, everything else is set in the caller's containers.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from holdfast._state.paths import is_one_value
from holdfast._values.limits import MAX_PATH_DEPTH
from holdfast.errors import InvalidStateError
from holdfast.stateful import Stateful


def expose(state: Any) -> dict[Any, Any]:
    """``state`` with every Stateful replaced by its state_dict; containers on the way are copied."""
    if not isinstance(state, Mapping):
        raise InvalidStateError(
            f"a state is a dict of names to values, not a {type(state).__name__}; wrap it, as in {{'model': model}}"
        )
    exposed: dict[Any, Any] = _exposed(state, depth=0)
    return exposed


def _exposed(value: Any, depth: int) -> Any:
    if depth > MAX_PATH_DEPTH:
        return value  # the flattening names the place
    if isinstance(value, Mapping):
        return {key: _exposed(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, (list, tuple)) and not is_one_value(value):
        entries = [_exposed(entry, depth + 1) for entry in value]
        if isinstance(value, list):
            return entries
        return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
    if isinstance(value, Stateful) and not isinstance(value, type):
        return _exposed(value.state_dict(), depth + 1)
    return value


def hand_back(state: MutableMapping[Any, Any], loaded: Mapping[Any, Any]) -> None:
    """Put what was loaded into ``state``, in place, in the order of its keys."""
    for key in sorted(loaded, key=str):
        state[key] = _handed_back(state.get(key), loaded[key])


def _handed_back(original: Any, loaded: Any) -> Any:
    if isinstance(original, Mapping) and isinstance(loaded, Mapping):
        if not isinstance(original, MutableMapping):
            return loaded
        for key, entry in loaded.items():
            original[key] = _handed_back(original.get(key), entry)
        return original
    if isinstance(original, list) and isinstance(loaded, list) and len(original) == len(loaded):
        original[:] = [_handed_back(old, new) for old, new in zip(original, loaded, strict=True)]
        return original
    if isinstance(original, tuple) and isinstance(loaded, tuple) and len(original) == len(loaded):
        entries = [_handed_back(old, new) for old, new in zip(original, loaded, strict=True)]
        return type(original)(*entries) if hasattr(original, "_fields") else tuple(entries)
    if isinstance(original, Stateful) and not isinstance(original, type):
        original.load_state_dict(loaded)
        return original
    return loaded
