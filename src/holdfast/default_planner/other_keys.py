"""States whose keys are not those of the checkpoint: the mapping that the caller gives, or what to suggest.

Prefixes and functions lead from a key of the state to the key in the checkpoint: a load planner sees the checkpoint
under the names that its target has, and says what it reads under the names that are stored. With a ``Mapping`` of
rules, a planner sees the state as it is outside, in tensors that are views of its memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, cast

import torch

from holdfast._mapping.mappings import Mapping as Rules
from holdfast._mapping.matching import Fault, Matched
from holdfast._mapping.rules import Cast, Offset
from holdfast._mapping.views import OutsideTensor, outside_of
from holdfast._state.nested import stored_paths, unflatten
from holdfast.default_planner.targets import empty_state, prefixes, require_gradients, settle_ties
from holdfast.errors import Difference, InvalidStateError, MismatchError
from holdfast.metadata import (
    STATE_DICT_TYPE,
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    Path,
    TensorStorageMetadata,
    Versions,
    path_key,
    restorable_paths,
)
from holdfast.planner import LoadPlan, read_columns
from holdfast.storage import StorageReader

if TYPE_CHECKING:
    from holdfast.default_planner.load_planner import DefaultLoadPlanner

Names = Callable[[str], str] | Mapping[str, str]
"""From a key of the state to the key in the checkpoint: a function, or prefixes of the one and of the other."""
AnyMapping = Rules | Names


def check_mapping(mapping: AnyMapping | None) -> None:
    """ValueError for what is no mapping."""
    is_table = isinstance(mapping, Mapping) and all(isinstance(part, str) for pair in mapping.items() for part in pair)
    if mapping is not None and not is_table and not isinstance(mapping, Rules) and not callable(mapping):
        known = "a dict from prefixes of the state's keys to those of stored keys"
        raise ValueError(f"mapping is a holdfast.Mapping, a function, or {known}")


def check_moves_only(mapping: AnyMapping | None) -> None:
    """ValueError for rules that change numbers, which only an export follows."""
    for rule in mapping.rules if isinstance(mapping, Rules) else ():
        if isinstance(rule, (Cast, Offset)):
            said = f"{rule} changes numbers, and a checkpoint keeps them as they are; use it in an export"
            raise ValueError(f"{said}, or leave the rule out")


def stored_key(mapping: Names, key: str) -> str:
    """The key in the checkpoint for ``key`` of the target; prefixes end at a dot, and the longest one counts."""
    if isinstance(mapping, Mapping):
        for prefix in (*prefixes(key), ""):
            given = prefix if prefix in mapping else f"{prefix}."
            if given in mapping:
                tail = key[len(prefix) :].removeprefix(".")
                return ".".join(part for part in (mapping[given].removesuffix("."), tail) if part)
        return key
    name = mapping(key)
    if not isinstance(name, str):
        raise InvalidStateError(f"mapping gave a {type(name).__name__} for {key!r}; it gives the key in the checkpoint")
    return name


def see_outside(planner: DefaultLoadPlanner, metadata: Metadata, mapping: AnyMapping) -> Metadata:
    """``metadata`` as the planner is to see it; with rules, it has the leaves of its target as they are outside."""
    if isinstance(mapping, Rules) and not planner.original_state_dict:
        _want_all(planner, metadata, mapping)
    paths = {key: planner.mappings.get(key, (key,)) for key in planner.state_dict}
    if not isinstance(mapping, Rules):
        metadata, planner.names = renamed(metadata, paths, mapping)
        return metadata
    outside = outside_of(mapping, planner.state_dict, is_save=False)
    planner.differences += [
        Difference(key=fault.key, kind="mapping", stored="", wanted=fault.problem) for fault in outside.faults
    ]
    stored, leaves = metadata.state_dict_metadata, dict(outside.leaves)
    planner.dropped = {key for key in stored if mapping.drops(key)}
    planner.names, sources = {}, dict(outside.sources)
    for inside, key in outside.again.items():
        name = inside
        while name in leaves or name in stored:
            name += "'"
        leaves[name], planner.names[name], sources[name] = planner.state_dict[inside], key, (inside,)
    viewed = {name for key, leaf in leaves.items() if isinstance(leaf, OutsideTensor) for name in sources[key]}
    planner.wrapped = [planner.state_dict[name] for name in viewed]
    planner.mappings = {
        key: paths[names[0]] if leaves[key] is planner.state_dict[names[0]] else (key,)
        for key, names in sources.items()
    }
    planner.state_dict = leaves
    # An empty container does not get what a rule has a place for.
    hidden = {key for key in stored if key not in leaves and mapping.moves(key)}
    if not hidden and not planner.names:
        return metadata
    entries = {key: entry for key, entry in stored.items() if key not in hidden}
    entries |= {name: stored[key] for name, key in planner.names.items() if key in stored}
    for key, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata) and entry.alias_of in hidden:
            entries[key] = dataclasses.replace(entry, alias_of=None)
    return dataclasses.replace(metadata, state_dict_metadata=entries)


def _want_all(planner: DefaultLoadPlanner, metadata: Metadata, mapping: Rules) -> None:
    """Have room in the target, which is empty, for all that is in the checkpoint, as it is inside."""
    inside, _ = metadata_inside(metadata, mapping)
    planner.state_dict, planner.mappings = leaves, paths = empty_state(inside), restorable_paths(inside)
    require_gradients(inside, leaves)
    made = unflatten(leaves, paths, inside.containers) if planner.flatten_state_dict else leaves
    planner.original_state_dict.update(made)
    planner.made = list(metadata.state_dict_metadata)


def metadata_inside(metadata: Metadata, mapping: Rules) -> tuple[Metadata, Matched]:
    """What a checkpoint of the inside would say of itself, where ``metadata`` is of the outside; and how they belong
    together. MismatchError with every fault of the mapping.
    """
    matched = mapping.from_outside(shapes_of(metadata))
    made, faults = metadata_made(metadata, matched)
    if faults:
        found = [Difference(key=each.key, kind="mapping", stored="", wanted=each.problem) for each in faults]
        raise MismatchError.of(found, advice="Change the rules of the mapping.")
    for key, other in matched.ties.items():
        entry = made.state_dict_metadata[other]
        assert isinstance(entry, TensorStorageMetadata)
        made.state_dict_metadata[key] = dataclasses.replace(entry, alias_of=other)
    return made, matched


def shapes_of(metadata: Metadata) -> dict[str, tuple[int, ...] | None]:
    """The shapes of all tensors, and None for what is none."""
    return {
        key: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) and entry.kind is None else None
        for key, entry in metadata.state_dict_metadata.items()
    }


def metadata_made(metadata: Metadata, matched: Matched) -> tuple[Metadata, list[Fault]]:
    """What a checkpoint of what ``matched`` makes would say of itself, but for ties; and all faults."""
    stored, paths, faults = metadata.state_dict_metadata, stored_paths(metadata), [*matched.faults]
    new_names = {name: key for key, name in matched.same.items()}
    entries: dict[str, STORAGE_TYPES] = {}
    sources: dict[str, tuple[str, ...]] = {key: (name,) for key, name in matched.same.items()}
    for key, name in matched.same.items():
        entry = entries[key] = stored[name]
        if isinstance(entry, TensorStorageMetadata) and entry.alias_of is not None:
            entries[key] = dataclasses.replace(entry, alias_of=new_names.get(entry.alias_of))
    for group in matched.groups:
        held = [entry for name in group.inside if isinstance(entry := stored[name], TensorStorageMetadata)]
        if len({each.properties.dtype for each in held}) > 1 or any(each.quantizer is not None for each in held):
            said = f"and {len(held) - 1} more make {group.outside[0]!r}, but have different dtypes, or are quantised"
            faults.append(Fault(key=group.inside[0], side="inside", kind="dtype", problem=said))
            continue
        for key, size in zip(group.outside, group.relation.sizes, strict=True):
            chunk = ChunkStorageMetadata(torch.Size((0,) * len(size)), torch.Size(size))
            entries[key], sources[key] = TensorStorageMetadata(held[0].properties, chunk.sizes, [chunk]), group.inside
    places = {key: _outside_path(paths.get(names[0], names[:1]), key) for key, names in sources.items() if paths}
    return dataclasses.replace(metadata, state_dict_metadata=entries, planner_data=places, paths=places), faults


def finish_reading(planner: DefaultLoadPlanner, reader: StorageReader, plan: LoadPlan) -> None:
    """Settle the ties of what was read by ``plan``, and add to it what the rules of the mapping say."""
    settle_ties(planner, reader, plan)
    if not isinstance(planner.mapping, Rules):
        return
    for key in dict.fromkeys(read_columns(plan.items).keys):
        number = planner.mapping.offset_of(*planner.stored([key]))
        if number and key not in planner.left_out:
            for place in planner.places(key):
                place.tensor.add_(number)


def saved_outside(
    mapping: AnyMapping, leaves: STATE_DICT_TYPE, paths: Mapping[str, Path], buffers: Collection[str]
) -> tuple[STATE_DICT_TYPE, dict[str, Path], frozenset[str]]:
    """``leaves`` as they are saved, with their paths, and those that are made of ``buffers`` alone.

    InvalidStateError with every fault of the mapping.
    """
    if isinstance(mapping, Rules):
        outside = outside_of(mapping, leaves, is_save=True)
        made, sources, faults = outside.leaves, outside.sources, list(outside.faults)
    else:
        made, sources, faults = {}, {}, []
        for key, leaf in leaves.items():
            name = stored_key(mapping, key)
            if name in made:
                said = f"would be the name of {sources[name][0]!r} and of {key!r}; change the mapping"
                faults.append(Fault(key=name, side="outside", kind="twice", problem=said))
            made[name], sources[name] = leaf, (key,)
    if faults:
        raise InvalidStateError.of([InvalidStateError(str(fault), key=fault.key) for fault in faults])
    places = {key: _outside_path(paths.get(names[0], names[:1]), key) for key, names in sources.items()}
    return made, places, frozenset(key for key, names in sources.items() if buffers and {*names} <= {*buffers})


def _outside_path(path: Path, key: str) -> Path:
    """Where ``key`` is, if it is made of what is at ``path``: below the same containers, as far as it can be."""
    for length in range(len(path) - 1, 0, -1):
        head = path_key(path[:length])
        if key.startswith(f"{head}."):
            return path if key == path_key(path) else (*path[:length], key[len(head) + 1 :])
    return path if key == path_key(path) else (key,)


def renamed(metadata: Metadata, paths: Mapping[str, Path], mapping: Names) -> tuple[Metadata, dict[str, str]]:
    """The checkpoint under the names of the target, whose leaves are at ``paths``; and the stored key for each name.

    What the target does not ask for, but may have an empty container for, has the name that the map would lead from; by
    a function, its own.
    """
    stored, there = metadata.state_dict_metadata, stored_paths(metadata)
    names = {key: stored_key(mapping, key) for key in paths}
    asked, places = set(names.values()), dict(paths)
    for key, name in zip(stored, names_for_target(stored, mapping), strict=True):
        if key not in asked and name not in names:
            names[name] = key
            path = _moved(there.get(key, (key,)), key, name)
            if path is not None:
                places[name] = path
    firsts: dict[str, str] = {}
    for name, key in names.items():
        firsts.setdefault(key, name)
    entries: dict[str, STORAGE_TYPES] = {}
    for name, key in names.items():
        entry = stored.get(key)
        if isinstance(entry, TensorStorageMetadata) and entry.alias_of is not None:
            entry = dataclasses.replace(entry, alias_of=firsts.get(entry.alias_of))
        if entry is not None:
            entries[name] = entry
    found = {name: places[name] for name in entries if name in places}
    seen = dataclasses.replace(metadata, state_dict_metadata=entries, versions=_versions(metadata.versions, names))
    if metadata.paths:
        seen.paths = found
    else:
        seen.planner_data = found
    return seen, names


def names_for_target(stored: Collection[str], mapping: AnyMapping | None) -> Collection[str]:
    """The names in the target that ``mapping`` would lead from to the ``stored`` keys; their own, but by prefixes."""
    back = {one: other for other, one in mapping.items()} if isinstance(mapping, Mapping) else {}
    return [stored_key(back, key) for key in stored] if back else stored


def _moved(path: Path, key: str, name: str) -> Path | None:
    """Where ``name`` is if ``key`` was at ``path``; None where a step would have to be cut in two."""
    if key == name:
        return path
    for start in range(len(path)):
        tail = path_key(path[start:])
        if name == tail or name.endswith(f".{tail}"):
            return (*filter(None, name[: -len(tail)].split(".")), *path[start:])
    return None


def _versions(stored: Versions, names: Mapping[str, str]) -> Versions:
    """The versions of modules by the names that they have in the target."""
    known = {".".join(filter(None, (key, name))): said for key, each in stored.items() for name, said in each.items()}
    modules = {name.rpartition(".")[0]: key.rpartition(".")[0] for name, key in names.items()}
    return {
        name: {"": known.get(key, {"version": 1})}
        for name, key in modules.items()
        if not stored.keys().isdisjoint(("", *prefixes(key)))
    }


_MOST_TRIED = 8
_WRAPPERS = "module.", "_orig_mod."  # what DistributedDataParallel and torch.compile put into keys


def suggestion(missing: Collection[str], wanted: Collection[str], stored: Collection[str]) -> str:
    """What may be meant by the ``missing`` keys, as a sentence: a container, or those that a map finds most of."""
    if not missing:
        return ""
    first = next(iter(missing))
    if any(key.startswith(f"{first}.") for key in stored):
        return f" The checkpoint has keys below {first!r}: have an empty dict there to load them."
    tables = [{target: source} for target, source in _candidates(first.split("."), stored)]
    tried: list[tuple[Names, str]] = [(table, repr(table)) for table in tables]
    for wrapper in _WRAPPERS:
        strip = cast(Names, lambda key, wrapper=wrapper: key.replace(wrapper, ""))
        tried.append((strip, f"lambda key: key.replace({wrapper!r}, '')"))
    found = [sum(stored_key(mapping, key) in stored for key in wanted) for mapping, _ in tried]
    mapping, text = tried[found.index(max(found))]
    if 2 * (max(found) + len(missing) - len(wanted)) <= len(missing):
        return ""
    return f" Did you mean {stored_key(mapping, first)!r} for {first!r}? Pass LoadOptions(mapping={text})."


def _candidates(wanted: list[str], stored: Iterable[str]) -> list[tuple[str, str]]:
    """Prefixes of ``wanted`` and of stored keys after which both are the same, the shortest first."""
    found: dict[tuple[str, str], int] = {}
    for key in stored:
        parts = key.split(".")
        same = 0
        while same < min(len(parts), len(wanted)) and parts[-1 - same] == wanted[-1 - same]:
            same += 1
        if same:
            found[".".join(wanted[: len(wanted) - same]), ".".join(parts[: len(parts) - same])] = same
    return sorted(found, key=lambda pair: (-found[pair], len(pair[1])))[:_MOST_TRIED]
