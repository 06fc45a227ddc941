"""Stateful objects, at any depth, exchanged for their state and given it back.

``expose`` copies containers, never tensors. What it returns is what planners see; on load it is filled and
``hand_back`` passes it on: Stateful objects get load_state_dict, generators their state, everything else is set in the
caller's containers.

The state_dict of a module has the versions of its modules, by name, as an attribute. A checkpoint keeps those other
than 1, by the key of the dict. So load_state_dict is told the versions that were saved, not those of the classes that
load.
"""

from __future__ import annotations

import operator
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from holdfast._state.nested import (
    ATTRIBUTE,
    LEAVES,
    AnyDict,
    AnyMapping,
    AnyTarget,
    TypedKey,
    check_containers,
    is_one_value,
    is_stateful,
    keeps_class,
    record_apart,
    tuple_like,
    versions_in,
    with_versions,
)
from holdfast._values.dtypes import MAX_PATH_DEPTH
from holdfast._values.records import KEPT, REGISTERED, emptied, fields_by_step, parts_of, refilled, with_parts
from holdfast.errors import Difference, InvalidStateError
from holdfast.metadata import STATE_DICT_TYPE, Path, Versions, path_key
from holdfast.stateful import Stateful

_USUAL = {"version": 1}
# A state_dict that is so deep in a state was forged: no module's is, and looking for it would take long.
_MOST_DOTS = 16
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Owners:
    """What the objects of a state say of it.

    ``parameters`` has the parameter to whose state a path leads, where an optimizer has none of it yet; ``modules`` the
    paths of those that hold nothing, and want nothing; ``buffers`` the keys of what modules have as buffers. A load has
    ``room_for`` some objects other than their state, None for the rest, and ``refused`` says which cannot be loaded.
    """

    parameters: dict[Path, torch.Tensor] = field(default_factory=dict)
    modules: set[Path] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    refused: list[Difference] = field(default_factory=list)
    room_for: Callable[[object, Path], AnyDict | None] | None = None


def expose(state: object, owners: Owners | None = None, *, apart: bool = True) -> AnyDict:
    """``state`` with every Stateful replaced by its state_dict; containers on the way are copied, ``owners`` filled.

    Dataclasses count as containers where they are taken ``apart``.
    """
    if not isinstance(state, Mapping):
        raise InvalidStateError(
            f"a state is a dict of names to values, not a {type(state).__name__}; wrap it, as in {{'model': model}}"
        )
    check_containers(state)
    return cast(AnyDict, _exposed(state, (), owners or Owners(), apart))


def _exposed(value: object, trail: Path, owners: Owners, apart: bool) -> object:
    if len(trail) > MAX_PATH_DEPTH:
        key = path_key(trail)
        raise InvalidStateError(
            f"the state is nested deeper than {MAX_PATH_DEPTH} at {key[:200]!r}; does it contain itself?", key=key
        )
    if type(value) in REGISTERED and trail:
        return value
    if isinstance(value, Mapping):
        entries = dict(value)
        for key, entry in value.items():
            if type(entry) not in LEAVES and not isinstance(entry, torch.Tensor):
                entries[key] = _exposed(entry, (*trail, key if type(key) is str else TypedKey(key)), owners, apart)
        if type(value) in KEPT and keeps_class(value):
            return refilled(emptied(value), entries)
        return entries if type(value) is dict else with_versions(entries, versions_in(value))
    if apart and (record := record_apart(value)) is not None:
        trails, parts = {name: (*trail, step) for step, name in fields_by_step(record).items()}, record.items
        return with_parts(value, {name: _exposed(part, trails[name], owners, apart) for name, part in parts})
    if apart and isinstance(value, tuple) and parts_of(value) is not None:
        return value  # a named tuple that cannot be taken apart
    if (isinstance(value, (list, tuple)) or type(value) is deque) and not is_one_value(value, len(trail), apart=apart):
        made = [_exposed(entry, (*trail, position), owners, apart) for position, entry in enumerate(value)]
        if isinstance(value, deque):
            return refilled(emptied(value), made)
        return made if isinstance(value, list) else tuple_like(value, made)
    if type(value) is Namespace and not is_one_value(value, len(trail)):
        return refilled(Namespace(), cast(AnyDict, _exposed(vars(value), trail, owners, apart)))
    if is_stateful(value):
        if owners.room_for is not None and (room := owners.room_for(value, trail)) is not None:
            return room
        inner = cast(Stateful, value).state_dict()
        check_containers(inner, within=path_key(trail))
        exposed = _exposed(inner, trail, owners, apart)
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
    handed = handed_back(original, loaded)
    if handed is not original or not is_stateful(original):
        container[key] = handed


def handed_back(original: object, loaded: object) -> object:
    """What takes the place of ``original``: itself, filled in place, wherever that is possible."""
    if loaded is original:
        return loaded
    if isinstance(original, Mapping) and isinstance(loaded, Mapping):
        if not isinstance(original, MutableMapping):
            return loaded
        for key, entry in loaded.items():
            _hand_back_entry(original, key, entry)
        pass_on_versions(loaded, original)
        return original
    if isinstance(original, Namespace) and isinstance(loaded, Namespace) and not is_one_value(original):
        handed_back(vars(original), vars(loaded))
        return original
    if isinstance(original, torch.Generator) and isinstance(loaded, torch.Generator):
        # The program holds this very object.
        return original.set_state(loaded.get_state())
    if type(original) is deque and is_one_value(original):
        return loaded
    if isinstance(original, (list, deque)) and type(loaded) is type(original) and len(original) == len(loaded):
        for place, (old, new) in enumerate(zip(list(original), loaded, strict=True)):
            original[place] = handed_back(old, new)
        return original
    if isinstance(original, tuple) and isinstance(loaded, tuple) and len(original) == len(loaded):
        entries = [handed_back(old, new) for old, new in zip(original, loaded, strict=True)]
        # What holds nothing to hand back is the value itself, such as a torch.Size.
        is_value = not hasattr(original, "_fields") and all(map(operator.is_, entries, loaded))
        return loaded if is_value else tuple_like(original, entries)
    if is_stateful(original) and not is_stateful(loaded):  # which is a value, out of a pickle
        _load_into(cast(Stateful, original), cast(STATE_DICT_TYPE, loaded))
        return original
    is_alike = type(loaded) is type(original) and not (is_one_value(original) and is_one_value(loaded))
    mine, its = (record_apart(original), record_apart(loaded)) if is_alike else (None, None)
    if mine is None or its is None or mine.fields.keys() != its.fields.keys():
        return loaded
    handed = {name: handed_back(part, its.fields[name]) for name, part in mine.items}
    if mine is original:
        return with_parts(mine, handed)
    for name, part in mine.items:
        if handed[name] is not part:
            object.__setattr__(original, name, handed[name])  # also where the class is frozen
    return original


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


def pass_on_versions(source: AnyMapping, target: AnyMapping) -> None:
    """Give ``target``, if it is a module's, the versions of ``source``."""
    versions = versions_in(source)
    if versions is not None and versions_in(target) is not None:
        setattr(target, ATTRIBUTE, versions)


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
        setattr(state_dict, ATTRIBUTE, told)


def add_versions(state: AnyDict, stored: Versions) -> AnyDict:
    """``state``, made for what was loaded, with the stored versions in the state_dicts of modules."""
    stored = {key: modules for key, modules in stored.items() if key.count(".") <= _MOST_DOTS}
    above = {prefix for key in stored for prefix in ("", *_prefixes(key))}
    made = _with_stored(state, "", stored, above)
    assert isinstance(made, dict)
    return made


def _with_stored(value: object, key: str, stored: Versions, above: Collection[str]) -> object:
    if key in above and isinstance(value, Namespace):
        _with_stored(vars(value), key, stored, above)
    parts = parts_of(value) if key in above and not isinstance(value, (dict, tuple)) else None
    if parts:
        keys = {name: _joined(key, str(step)) for step, name in fields_by_step(value).items()}
        return with_parts(value, {name: _with_stored(parts[name], keys[name], stored, above) for name in keys})
    if key in above and isinstance(value, (dict, list, tuple, deque)):
        entries = list(value.items() if isinstance(value, dict) else enumerate(value))
        grown = [(name, _with_stored(child, _joined(key, str(name)), stored, above)) for name, child in entries]
        if isinstance(value, tuple):
            return tuple_like(value, (child for _, child in grown))
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
