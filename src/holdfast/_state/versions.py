"""The versions of modules: ``_metadata`` of a state_dict, by which load_state_dict knows what it has to migrate.

torch keeps it as an attribute of the dict, for each module in it by name. A checkpoint keeps it for each such dict by
the key of the dict, without modules that say nothing but version 1. So it knows with which versions it was saved, and
load_state_dict is told those, instead of the versions of the classes that load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from holdfast.metadata import Versions

_ATTRIBUTE = "_metadata"
_USUAL = {"version": 1}
# A state_dict that is so deep in a state was forged: no module's is, and looking for it would take long.
_MOST_DOTS = 16
_PLAIN = (bool, int, float, str, type(None))


def versions_in(state_dict: Mapping[Any, Any]) -> Mapping[str, Any] | None:
    """What ``state_dict`` says of each of its modules; None for a dict that is no module's."""
    found = getattr(state_dict, _ATTRIBUTE, None)
    return found if isinstance(found, Mapping) else None


def with_versions(entries: dict[Any, Any], versions: Mapping[str, Any] | None) -> dict[Any, Any]:
    """``entries``; as a dict that says that of its modules, if there is something to say."""
    if versions is None:
        return entries
    made = OrderedDict(entries)
    setattr(made, _ATTRIBUTE, versions)
    return made


def pass_on_versions(source: Mapping[Any, Any], target: Mapping[Any, Any]) -> None:
    """Let ``target``, if it is a module's, say what ``source`` says."""
    versions = versions_in(source)
    if versions is not None and versions_in(target) is not None:
        setattr(target, _ATTRIBUTE, versions)


def unusual_versions(state_dicts: Mapping[str, Mapping[Any, Any]]) -> Versions:
    """What a checkpoint keeps of these modules' state_dicts, by their keys."""
    return {
        key: {
            str(module): {str(name): value for name, value in said.items() if isinstance(value, _PLAIN)}
            for module, said in (versions_in(state_dict) or {}).items()
            if isinstance(said, Mapping) and said != _USUAL
        }
        for key, state_dict in state_dicts.items()
    }


def tell_versions(state_dicts: Mapping[str, Mapping[Any, Any]], stored: Versions, failed: Collection[str]) -> None:
    """Let the target's ``state_dicts`` say with which versions that was saved which was loaded into them.

    Modules of which nothing could be loaded, because all of their keys are among ``failed``, stay what they are.
    """
    known = {_joined(key, module): said for key, modules in stored.items() for module, said in modules.items()}
    for key, state_dict in state_dicts.items() if stored else ():
        told: OrderedDict[str, Any] = OrderedDict(versions_in(state_dict) or {})
        filled = {_module_of(name) for name in state_dict if _joined(key, name) not in failed}
        left = {_module_of(name) for name in state_dict} - filled
        for module in told.keys() - left:
            name = _joined(key, module)
            if not stored.keys().isdisjoint(("", name, *_prefixes(name))):
                told[module] = dict(known.get(name, _USUAL))
        setattr(state_dict, _ATTRIBUTE, told)


def add_versions(state: dict[Any, Any], stored: Versions) -> dict[Any, Any]:
    """``state``, with dicts made for what was loaded; those that are modules' state_dicts say what was stored."""
    stored = {key: modules for key, modules in stored.items() if key.count(".") <= _MOST_DOTS}
    above = {prefix for key in stored for prefix in ("", *_prefixes(key))}
    made: dict[Any, Any] = _with_stored(state, "", stored, above)
    return made


def _with_stored(value: Any, key: str, stored: Versions, above: Collection[str]) -> Any:
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
