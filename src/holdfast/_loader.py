"""load: a checkpoint into a state, in place. read: all that is in a checkpoint, without a state."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, overload

import torch

from holdfast import events
from holdfast._checkpoint import Door, metadata_on_all, reader_for
from holdfast._mapping.mappings import Mapping as Rules
from holdfast._process import collector_paused
from holdfast._ranks.ranks import DEADLINE_S, Ranks, agreed, check_deadline, participants
from holdfast._state.nested import unflatten
from holdfast._state.per_rank import PerRank, SavedRanks
from holdfast._state.stateful_values import Owners, add_versions, expose, hand_back, tell_versions
from holdfast._state.tensors import grad_mode
from holdfast._torch_classes.adapt import as_load_planner, as_reader, id_and_storage, set_up_reader
from holdfast._values.deadline import Progress
from holdfast._values.records import checked_types
from holdfast._values.shown import few
from holdfast.default_planner import DefaultLoadPlanner
from holdfast.default_planner.other_keys import AnyMapping, check_mapping, finish_reading, names_for_target
from holdfast.default_planner.targets import check_filled, chosen_keys, empty_state, require_gradients
from holdfast.errors import CheckpointError, CorruptError, Difference, InvalidStateError, NotFoundError
from holdfast.events.progress import check_progress, followed
from holdfast.metadata import Metadata, restorable_paths
from holdfast.planner import LoadPlan, LoadPlanner, is_overridden, read_columns
from holdfast.storage import StorageReader

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LoadOptions", "LoadReport", "load", "read"]

Part = TypeVar("Part")
State = dict[Any, Any]
Target = MutableMapping[Any, Any]
FindReader = Callable[[], StorageReader]
"""Gives the storage for what is there when it is called; again after that was replaced by another checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The options of ``load`` and ``read`` that torch does not have.

    Attributes:
        cast: allow loading one floating type into another.
        verify: check every byte that is read against its digest.
        allow_pickle: unpickle values that were saved with allow_pickle; this runs code from the checkpoint.
        deadline_s: a rank that makes no progress for so many seconds while others wait for it counts as lost.
        share: "host": one rank reads what several ranks of its host want, and passes it on in memory. "job": one host
            also reads what four or more hosts want, and sends it to the others. "off": every rank reads for itself.
        mapping: leads from the target to the checkpoint: a ``Mapping`` of rules; for ``load`` also a function of a key,
            or a dict of prefixes, as {"module": ""} where only the target's keys begin with "module.", {"": "module"}
            where only the stored ones do. Prefixes end at a dot; the longest counts.
        types: dataclasses, named tuples and enums to make instances of, instead of a ``holdfast.Record``.
        progress: True shows a bar on the terminal of the coordinator: phase, bytes, speed, the slowest rank. A function
            is called now and then, on every rank, with a value that has ``phase``, ``bytes_done`` and ``bytes_total``.
    """

    cast: bool = False
    verify: bool = True
    allow_pickle: bool = False
    deadline_s: float = DEADLINE_S
    share: Literal["host", "job", "off"] = "host"
    mapping: AnyMapping | None = None
    types: Collection[type] = ()
    progress: bool | Callable[..., object] = False

    def __post_init__(self) -> None:
        check_mapping(self.mapping)
        check_deadline(self.deadline_s)
        check_progress(self.progress)
        if self.share not in ("host", "job", "off"):
            raise ValueError(f"share is 'host', 'job' or 'off', not {self.share!r}")
        checked_types(self.types)


_DEFAULTS = LoadOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did: keys loaded, keys that only the checkpoint has, differences, casts, bytes and seconds.

    ``made`` has the loaded keys for which the target had only an empty container. With a ``mapping``, all keys are
    those of the checkpoint. ``per_rank`` says what became of each ``PerRank``, ``unchecked`` what had no digests.
    """

    loaded: tuple[str, ...]
    unexpected: tuple[str, ...]
    differences: tuple[Difference, ...]
    casts: tuple[Difference, ...]
    bytes_read: int
    seconds: float
    made: tuple[str, ...] = ()
    per_rank: Mapping[str, str] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ()

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in ("loaded", "unexpected", "differences", "casts", "made")}
        shown = ", ".join(f"{name}={few(keys, len(keys))}" for name, keys in fields.items() if keys)
        shown += "".join(f", {name}={told}" for name in ("per_rank", "unchecked") if (told := getattr(self, name)))
        return f"LoadReport({shown}{shown and ', '}bytes_read={self.bytes_read}, seconds={self.seconds:.3g})"

    @property
    def missing(self) -> tuple[str, ...]:
        """The keys of the target that the checkpoint does not have."""
        return tuple(difference.key for difference in self.differences if difference.kind == "missing")


@overload
def load(
    state_dict: Target,
    checkpoint_id: str | os.PathLike[str] | StorageReader | None = None,
    *,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    strict: bool = True,
    options: LoadOptions = _DEFAULTS,
) -> LoadReport: ...
@overload
def load(state_dict: str | os.PathLike[str], *, options: LoadOptions = _DEFAULTS) -> State: ...
@collector_paused
def load(
    state_dict: Target | str | os.PathLike[str],
    checkpoint_id: str | os.PathLike[str] | StorageReader | None = None,
    *,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    strict: bool = True,
    options: LoadOptions = _DEFAULTS,
) -> LoadReport | State:
    """Load ``checkpoint_id`` into ``state_dict``, in place; ``load(path)`` alone is ``read(path)``.

    In a job of several ranks, all of them call it, each with its own target. Any number of ranks, on any mesh, may have
    written the checkpoint.

    Args:
        state_dict: the target, nested like the saved state. Tensors are filled, on any device; other values are set;
            ``load_state_dict`` of Stateful objects is called. Meta tensors are replaced by CPU tensors. An empty
            container gets all that is stored below it, on the CPU; a new optimizer, in the layout of its parameters.
        checkpoint_id: the directory of the checkpoint, or the URL of one in torch's format, which needs fsspec.
            A storage here is torch's old form.
        storage_reader: a storage to read from, instead of ``checkpoint_id``; ours or torch's.
        planner: decides what to read, instead of everything in the target; ours or torch's.
        process_group: only these ranks take part.
        no_dist: only this process takes part.
        strict: if keys, kinds, shapes or dtypes differ, raise one MismatchError before anything is changed; False loads
            what fits. Keys that only the checkpoint has are never an error.
        options: all other options.

    Returns:
        A report of what was loaded; for ``load(path)`` the state.

    Raises:
        NotFoundError: no checkpoint is published there.
        MismatchError: see ``strict``.
        CorruptError: something is not what was written; the contents of the target are then undefined.
        RankLostError: a rank died, or made no progress for ``options.deadline_s`` seconds.
    """
    if isinstance(state_dict, (str, bytes, os.PathLike)):
        if isinstance(checkpoint_id, Mapping):
            raise ValueError("the state comes first: load(state, path); the first argument is a path")
        if checkpoint_id is not None or storage_reader is not None or planner is not None:
            raise ValueError("load(path) takes no checkpoint_id, storage or planner; call load(state, path) for those")
        return read(state_dict, options=options)
    ranks = participants(
        process_group, no_dist=no_dist, call="load", place=checkpoint_id, deadline_s=options.deadline_s
    )
    shown = followed(options.progress, checkpoint_id, ranks.overview, ranks.is_coordinator)
    with Door(), ranks, shown:
        checkpoint_id, storage_reader = id_and_storage(checkpoint_id, storage_reader, function="load")
        if not isinstance(state_dict, MutableMapping):
            raise InvalidStateError(f"a target is a dict of names to values, not a {type(state_dict).__name__}")
        find_reader = reader_finder(checkpoint_id, storage_reader, options)
        if planner is None:
            chosen = {"strict": strict, "cast": options.cast, "allow_pickle": options.allow_pickle}
            planner = DefaultLoadPlanner(**chosen, mapping=options.mapping, types=options.types)
        elif not strict or options.mapping is not None or options.types:
            raise ValueError("strict, mapping and types are options of the planner; pass them to the planner")
        return load_with(state_dict, find_reader, planner, ranks, options)


@collector_paused
def read(
    path: str | os.PathLike[str],
    keys: Iterable[str] | None = None,
    *,
    options: LoadOptions = _DEFAULTS,
    types: Collection[type] = (),
) -> State:
    """Return everything in the checkpoint at ``path``, nested as it was saved, on the CPU; other ranks take no part.

    With ``keys``, return only these and everything below them: "model" includes "model.weight". A key that is not there
    raises MismatchError. With a ``Mapping``, return what is inside. ``types`` adds to ``options.types``.
    """
    options = replace(options, types=(*options.types, *checked_types(types)))
    if options.mapping is not None:
        if keys is not None or not isinstance(options.mapping, Rules):
            raise ValueError("read takes a Mapping of rules, and no keys then; all else is for load(state, path)")
        load(state := State(), path, no_dist=True, options=options)
        return state
    ranks = Ranks()
    with Door(), followed(options.progress, path, ranks.overview, ranks.is_coordinator):
        return read_with(reader_finder(path, None, options), keys, ranks, options)


def reader_finder(
    checkpoint_id: str | os.PathLike[str] | None, storage_reader: StorageReader | None, options: LoadOptions
) -> FindReader:
    """What finds the storage that is meant: the one given, at ``checkpoint_id`` if that is given too, or that of it."""
    if storage_reader is not None:
        if not options.verify:
            raise ValueError("verify is an option of the storage; pass it to the storage_reader")
        if checkpoint_id is not None:
            storage_reader.reset(checkpoint_id)
        return lambda: storage_reader
    if checkpoint_id is None:
        raise ValueError("load needs a checkpoint_id or a storage_reader")
    return partial(
        reader_for, checkpoint_id, verify=options.verify, cast=options.cast, allow_pickle=options.allow_pickle
    )


def load_with(
    state: Target, find_reader: FindReader, planner: LoadPlanner, ranks: Ranks, options: LoadOptions = _DEFAULTS
) -> LoadReport:
    """Load into ``state``, in place, with a storage and a planner, ours or torch's, among ranks that were entered."""
    started = time.monotonic()
    planner = as_load_planner(planner, allow_pickle=options.allow_pickle)
    ours = planner if isinstance(planner, DefaultLoadPlanner) else None
    per_rank: dict[str, PerRank[Any]] = {}

    def make_target(reader: StorageReader, metadata: Metadata) -> State:
        if not state:
            reader.check_files()  # room for all, and what is not there may be more than there is
        if ours is None or not ours.flatten_state_dict:
            return expose(state)  # which nobody fills where it is empty
        names = names_for_target(metadata.state_dict_metadata, ours.mapping)
        saved = SavedRanks(names=names, place=(ranks.rank, ranks.size), found=per_rank)
        ours.owners = Owners(modules=saved.want_nothing, refused=saved.refused, room_for=saved.room_for)
        return expose(state, ours.owners)

    def finish(loaded: _Loaded) -> LoadReport:
        report = _report(loaded, planner, time.monotonic() - started)
        _on_all(ranks, "handing back the state", lambda: _hand_back(state, loaded, planner))
        outcomes = {key: value.outcome for key, value in per_rank.items()}
        return replace(report, per_rank=outcomes) if per_rank else report

    return _load(make_target, find_reader, planner, ranks, finish, share=options.share)


def read_with(
    find_reader: FindReader, keys: Iterable[str] | None, ranks: Ranks, options: LoadOptions = _DEFAULTS
) -> State:
    """All that the checkpoint has, or what is at and below ``keys``, on each of the ranks, which were entered."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, allow_pickle=options.allow_pickle, types=options.types)
    chosen = None if keys is None else {keys} if isinstance(keys, str) else set(keys)  # which may be read again

    def make_target(reader: StorageReader, metadata: Metadata) -> State:
        reader.check_files()  # room for what is not there may be more than there is
        return empty_state(metadata, chosen_keys(metadata, chosen))

    def finish(loaded: _Loaded) -> State:
        leaves, metadata = loaded.target, loaded.metadata
        require_gradients(metadata, leaves)
        containers = metadata.containers if planner.metadata is None else planner.metadata.containers
        return add_versions(unflatten(leaves, restorable_paths(metadata), containers), metadata.versions)

    return _load(make_target, find_reader, planner, ranks, finish, is_callers=False)


class _Loaded(NamedTuple):
    """What was loaded: the target, filled, the metadata of the checkpoint, and what this rank has read."""

    target: State
    metadata: Metadata
    plan: LoadPlan
    bytes_read: int
    unchecked: tuple[str, ...]


def _load(
    make_target: Callable[[StorageReader, Metadata], State],
    find_reader: FindReader,
    planner: LoadPlanner,
    ranks: Ranks,
    finish: Callable[[_Loaded], Part],
    *,
    share: str = "host",
    is_callers: bool = True,
) -> Part:
    """Read all of the target, which may be the caller's own; what ``finish`` makes of it.

    When the checkpoint is replaced by another one, or deleted, while it is read, all ranks start again together.
    """
    reader: StorageReader | None = None
    operation: events.Operation | None = None
    is_touched = False
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: _close(reader))
        while True:
            try:
                reader = _found(find_reader, ranks)
                told = "load" if is_callers else "read", getattr(reader, "path", "")
                operation = operation or stack.enter_context(events.Operation(*told))
                metadata, _ = opened = metadata_on_all(reader, ranks, share)
                target = ranks.locally("planning the load", partial(make_target, reader, metadata))
                plan = _plan(reader, planner, ranks, target, opened)
                meta, operation.step = metadata.storage_meta, metadata.user_metadata.get("step")
                operation.attempt = (meta and meta.save_id) or ""
                is_touched = True
                plan = _on_all(ranks, "reading the checkpoint", partial(_read, reader, planner, plan))
                loaded = _Loaded(target, metadata, plan, reader.bytes_read, reader.unchecked)
                break
            except (CorruptError, NotFoundError) as error:
                ranks.again()
                was_replaced = partial(_was_replaced, reader, find_reader)
                if ranks.all_reduce("looking for another checkpoint", was_replaced, any):
                    _close(reader)
                    continue
                if is_touched and is_callers:
                    error.args = (f"{error.message}. The contents of the target are undefined now.",)
                raise
        _close(reader)
        reader, result = None, finish(loaded)
        operation.tell("loaded", nbytes=loaded.bytes_read)
        return result


def _on_all(ranks: Ranks, phase: str, local: Callable[[], Part]) -> Part:
    """What ``local`` returns, once it has returned on every rank."""
    kept: list[Part] = []
    ranks.all_reduce(phase, lambda: kept.append(local()), lambda done: None)
    return kept[0]


def _found(find_reader: FindReader, ranks: Ranks) -> StorageReader:
    """The storage for what is there; where there is nothing, that is raised on every rank."""
    try:
        return as_reader(find_reader())
    except CheckpointError as error:
        return ranks.locally("looking for the checkpoint", partial(_refuse, error))


def _refuse(error: CheckpointError) -> StorageReader:
    raise error


def _was_replaced(reader: StorageReader | None, find_reader: FindReader) -> bool:
    """Whether another checkpoint is there than the one that ``reader`` read, or none."""
    return reader is not None and (type(as_reader(find_reader())) is not type(reader) or reader.was_replaced())


def _close(reader: StorageReader | None) -> None:
    if reader is not None:
        reader.progress = Progress()  # the storage may live on, and is not to keep the ranks
        reader.close()


def _plan(
    reader: StorageReader, planner: LoadPlanner, ranks: Ranks, target: State, opened: tuple[Metadata, bool]
) -> LoadPlan:
    """What this rank reads; plans travel only where somebody may want to see them all."""
    (metadata, is_apart), leads = opened, ranks.is_coordinator
    ours = planner if isinstance(planner, DefaultLoadPlanner) else None
    # These two leave all plans as they are, and so does a rank that has only metadata of its own.
    is_plain = ours is not None and not is_overridden(ours, DefaultLoadPlanner, "create_global_plan")
    changes_plans = is_overridden(reader, StorageReader, "prepare_local_plan", "prepare_global_plan")
    is_alone = is_apart or (is_plain and not changes_plans)

    def plan_locally() -> LoadPlan:
        if ours is not None:
            ours.same_bytes = reader.same_bytes
        planner.set_up_planner(target, metadata, leads)
        set_up_reader(reader, metadata, is_coordinator=leads, rank=ranks.rank, use_collectives=not is_apart)
        if ours is not None:
            ours.stored_values = partial(reader.stored_values, allow_pickle=ours.allow_pickle)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        if is_alone:
            (plan,) = plan_globally([plan])
        if is_apart and ours is not None:
            check_filled(ours, plan)
        return plan

    def plan_globally(plans: list[LoadPlan]) -> list[LoadPlan]:
        return reader.prepare_global_plan(planner.create_global_plan(plans))

    def merged(plans: list[LoadPlan | None]) -> list[LoadPlan | None]:
        there = [plan for plan in plans if plan is not None]
        if there and len(there) < len(plans):
            ways = ("the default one" if plan is None else "another one" for plan in plans)
            agreed("planner", dict(zip(ranks.job_ranks, ways, strict=True)))
        return list(plan_globally(there)) if there else plans

    local = ranks.locally("planning the load", plan_locally)
    # One step for both, or ranks that do not plan alike would never meet.
    plan = ranks.reduce_scatter("planning the load", lambda: None if is_alone else local, merged)
    return local if plan is None else plan


def _read(reader: StorageReader, planner: LoadPlanner, plan: LoadPlan) -> LoadPlan:
    plan = planner.finish_plan(plan)
    as_before = grad_mode()
    with as_before, as_before, torch.no_grad():
        reader.read_data(plan, planner).wait()
        if isinstance(planner, DefaultLoadPlanner):
            finish_reading(planner, reader, plan)
    return plan


def _report(loaded: _Loaded, planner: LoadPlanner, seconds: float) -> LoadReport:
    columns, stored = read_columns(loaded.plan.items), loaded.metadata.state_dict_metadata
    # Other planners have nothing to tell.
    ours = planner if isinstance(planner, DefaultLoadPlanner) else DefaultLoadPlanner()
    asked = {*columns.storage_keys, *ours.stored(ours.state_dict), *ours.dropped}
    return LoadReport(
        # A rank that holds no element of a tensor has nothing to read, and has it all.
        loaded=tuple(dict.fromkeys(ours.stored((*columns.keys, *ours.keys_without_elements())))),
        unexpected=tuple(key for key in stored if key not in asked),
        differences=tuple(ours.told(ours.differences)),
        casts=tuple(ours.told(ours.casts)),
        bytes_read=loaded.bytes_read,
        seconds=seconds,
        made=tuple(ours.stored(ours.made)),
        unchecked=loaded.unchecked,
    )


def _hand_back(state: Target, loaded: _Loaded, planner: LoadPlanner) -> None:
    """Give the state what was loaded; modules' state_dicts in it say with which versions that was saved."""
    target, versions = loaded.target, loaded.metadata.versions
    if isinstance(planner, DefaultLoadPlanner):
        versions = versions if planner.mapping is None or planner.metadata is None else planner.metadata.versions
        tell_versions(planner.versioned, versions, {difference.key for difference in planner.differences})
        if planner.made and planner.mapping is None:
            target = add_versions(target, versions)
    hand_back(state, target)
