"""Stateful objects, at any depth, exchanged for their state and given it back.

``expose`` copies containers, never tensors. What it returns is what planners see; on load it is filled and
``hand_back`` passes it on: Stateful objects get load_state_dict, everything else is set in the caller's containers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from holdfast._state.nested import (
    AnyDict,
    AnyMapping,
    AnyTarget,
    Path,
    TypedKey,
    check_containers,
    is_one_value,
    is_stateful,
    pass_on_versions,
    path_key,
    tuple_like,
    versions_in,
    with_versions,
)
from holdfast._values.dtypes import MAX_PATH_DEPTH
from holdfast.errors import InvalidStateError
from holdfast.metadata import STATE_DICT_TYPE
from holdfast.stateful import Stateful


@dataclass(frozen=True, slots=True)
class Owners:
    """What the objects of a state say of it.

    ``parameters`` has the parameter to whose state a path leads, where an optimizer has none of it yet; ``modules`` the
    paths of those that hold nothing, and want nothing; ``buffers`` the keys of what modules have as buffers.
    """

    parameters: dict[Path, torch.Tensor] = field(default_factory=dict)
    modules: set[Path] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)


def expose(state: object, owners: Owners | None = None) -> AnyDict:
    """``state`` with every Stateful replaced by its state_dict; containers on the way are copied, ``owners`` filled."""
    if not isinstance(state, Mapping):
        raise InvalidStateError(
            f"a state is a dict of names to values, not a {type(state).__name__}; wrap it, as in {{'model': model}}"
        )
    check_containers(state)
    return cast(AnyDict, _exposed(state, (), owners or Owners()))


def _exposed(value: object, trail: Path, owners: Owners) -> object:
    if len(trail) > MAX_PATH_DEPTH:
        key = path_key(trail)
        raise InvalidStateError(
            f"the state is nested deeper than {MAX_PATH_DEPTH} at {key[:200]!r}; does it contain itself?", key=key
        )
    if isinstance(value, Mapping):
        entries = dict(value)
        for key, entry in value.items():
            if not isinstance(entry, torch.Tensor):
                entries[key] = _exposed(entry, (*trail, key if type(key) is str else TypedKey(key)), owners)
        return entries if type(value) is dict else with_versions(entries, versions_in(value))
    if isinstance(value, (list, tuple)) and not is_one_value(value, len(trail)):
        made = [_exposed(entry, (*trail, position), owners) for position, entry in enumerate(value)]
        return made if isinstance(value, list) else tuple_like(value, made)
    if is_stateful(value):
        inner = cast(Stateful, value).state_dict()
        check_containers(inner, within=path_key(trail))
        exposed = _exposed(inner, trail, owners)
        if isinstance(value, torch.nn.Module):
            owners.modules.update(() if exposed else [trail])
            names = (name for name, _ in value.named_buffers(remove_duplicate=False))
            owners.buffers.update(path_key((*trail, name)) for name in names)
        elif hasattr(value, "param_groups") and isinstance(exposed, dict):
            owners.parameters.update(_without_state(value.param_groups, exposed, trail))
        return exposed
    return value


def _without_state(groups: list[AnyDict], exposed: AnyDict, trail: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    """The parameters of which ``exposed``, an optimizer's state_dict, has no state, and where it belongs."""
    try:
        state = exposed["state"]
        for group, named in zip(groups, exposed["param_groups"], strict=True):
            for parameter, name in zip(group["params"], named["params"], strict=True):
                if isinstance(parameter, torch.Tensor) and not state.get(name):
                    yield (*trail, "state", name if type(name) is str else TypedKey(name)), parameter
    except (AttributeError, LookupError, TypeError, ValueError):
        return  # it gives its state another form, which tells nothing of parameters


def hand_back(state: AnyTarget, loaded: AnyMapping) -> None:
    """Put what was loaded into ``state``, in place: what is new first, the rest in the order of its keys."""
    for key in sorted(loaded, key=lambda key: str(key) if key in state else ""):
        _hand_back_entry(state, key, loaded[key])
    pass_on_versions(loaded, state)


def _hand_back_entry(container: AnyTarget, key: Any, loaded: object) -> None:
    """Set what was loaded; an object that took its state is there already, and the container may be anybody's."""
    original = container.get(key)
    handed = _handed_back(original, loaded)
    if handed is not original or not is_stateful(original):
        container[key] = handed


def _handed_back(original: object, loaded: object) -> object:
    if loaded is original:
        return loaded
    if isinstance(original, Mapping) and isinstance(loaded, Mapping):
        if not isinstance(original, MutableMapping):
            return loaded
        for key, entry in loaded.items():
            _hand_back_entry(original, key, entry)
        pass_on_versions(loaded, original)
        return original
    if isinstance(original, list) and isinstance(loaded, list) and len(original) == len(loaded):
        original[:] = [_handed_back(old, new) for old, new in zip(original, loaded, strict=True)]
        return original
    if isinstance(original, tuple) and isinstance(loaded, tuple) and len(original) == len(loaded):
        entries = [_handed_back(old, new) for old, new in zip(original, loaded, strict=True)]
        # What holds nothing to hand back is the value itself, such as a torch.Size.
        is_value = not hasattr(original, "_fields") and all(map(operator.is_, entries, loaded))
        return loaded if is_value else tuple_like(original, entries)
    if is_stateful(original):
        _load_into(cast(Stateful, original), cast(STATE_DICT_TYPE, loaded))
        return original
    return loaded


def _load_into(original: Stateful, loaded: STATE_DICT_TYPE) -> None:
    """Give ``original`` its state; a module with meta tensors gets the loaded ones themselves, tied as it had them."""
    if not isinstance(original, torch.nn.Module):
        original.load_state_dict(loaded)
        return
    parameters = dict(original.named_parameters(remove_duplicate=False))
    if not any(tensor.is_meta for tensor in (*parameters.values(), *original.buffers())):
        original.load_state_dict(loaded)
        return
    original.load_state_dict(loaded, assign=True)
    firsts: dict[int, str] = {}
    for name, parameter in parameters.items():
        first = firsts.setdefault(id(parameter), name)
        if first != name:
            owner, _, attribute = name.rpartition(".")
            setattr(original.get_submodule(owner), attribute, original.get_parameter(first))
