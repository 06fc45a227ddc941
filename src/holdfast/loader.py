"""load: a checkpoint into a state, in place; or, without a state, everything that is in it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch

from holdfast._coord.ranks import Ranks, SoloRanks
from holdfast._native.reader import NativeReader
from holdfast._state.collector import collector_paused
from holdfast._state.exposure import expose, hand_back
from holdfast._state.paths import stored_paths, unflatten
from holdfast.default_planner import DefaultLoadPlanner, WholeLoadPlanner, empty_state
from holdfast.errors import CorruptError, Difference, InvalidStateError
from holdfast.metadata import Metadata, TensorStorageMetadata
from holdfast.participants import DEADLINE_S, participants
from holdfast.planner import LoadPlan, LoadPlanner, read_columns
from holdfast.planner_helpers import check_tiling
from holdfast.storage import StorageReader

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LoadReport", "load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did: keys read, what did not fit, what nobody asked for, bytes and seconds."""

    loaded: tuple[str, ...]
    unexpected: tuple[str, ...]
    differences: tuple[Difference, ...]
    casts: tuple[Difference, ...]
    bytes_read: int
    seconds: float

    @property
    def missing(self) -> tuple[str, ...]:
        """The keys of the target that the checkpoint does not have."""
        return tuple(difference.key for difference in self.differences if difference.kind == "missing")


@overload
def load(
    state_dict: MutableMapping[Any, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    allow_pickle: bool = False,
    deadline_s: float = DEADLINE_S,
) -> LoadReport: ...
@overload
def load(state_dict: str | os.PathLike[str], *, verify: bool = True, allow_pickle: bool = False) -> dict[Any, Any]: ...
@collector_paused()
def load(
    state_dict: MutableMapping[Any, Any] | str | os.PathLike[str],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    allow_pickle: bool = False,
    deadline_s: float = DEADLINE_S,
) -> LoadReport | dict[Any, Any]:
    """Load ``checkpoint_id`` into ``state_dict``, in place; ``load(path)`` alone returns everything, on the CPU.

    In a job of several ranks all of them call it, each with its own target; how many ranks wrote the checkpoint, and on
    which mesh, does not matter. ``load(path)`` is the business of one process.

    Args:
        state_dict: the target, of the same shape as what was saved. Tensors, on any device, are filled; other values
            are set in it; Stateful objects get load_state_dict. Meta tensors are replaced by CPU ones.
        checkpoint_id: the directory of the checkpoint.
        storage_reader: where to read from instead of native files at ``checkpoint_id``.
        planner: what to read instead of everything in the target.
        process_group: the ranks that take part, instead of all.
        no_dist: this process loads alone, whatever others do.
        strict: any difference in keys, kinds, shapes or dtypes is one MismatchError, raised before anything is
            touched; False loads what fits. Keys that only the checkpoint has are never an error.
        cast: let a tensor of one floating type be loaded into one of another.
        verify: check every byte that is read against its digest.
        allow_pickle: unpickle values that were saved with allow_pickle; it runs code from the checkpoint.
        deadline_s: seconds without progress after which a rank that others wait for is given up.

    Returns:
        A LoadReport; or, for ``load(path)``, the state, nested as it was saved.

    Raises:
        NotFoundError: no checkpoint is published there.
        MismatchError: see ``strict``.
        CorruptError: something is not what was written; the contents of the target are then undefined.
    """
    if isinstance(state_dict, (str, os.PathLike)):
        if checkpoint_id is not None or storage_reader is not None or planner is not None:
            raise ValueError("load(path) takes no other place to read from; load(state, path) loads into a state")
        return _load_everything(NativeReader(state_dict, verify=verify, allow_pickle=allow_pickle), allow_pickle)
    ranks = partial(participants, process_group, no_dist=no_dist, deadline_s=deadline_s)
    first = ranks()
    with first:
        if not isinstance(state_dict, MutableMapping):
            raise InvalidStateError(f"a target is a dict of names to values, not a {type(state_dict).__name__}")
        if storage_reader is None:
            if checkpoint_id is None:
                raise ValueError("load needs a checkpoint_id or a storage_reader")
            storage_reader = NativeReader(checkpoint_id, verify=verify, cast=cast, allow_pickle=allow_pickle)
        elif not verify:
            raise ValueError("verify is an option of the storage; give it to it")
        elif checkpoint_id is not None:
            storage_reader.reset(checkpoint_id)
        if planner is None:
            planner = WholeLoadPlanner(strict=strict, cast=cast, allow_pickle=allow_pickle)
        elif not strict:
            raise ValueError("strict is an option of the planner; give it to it")
        first.agree("checkpoint path", None if checkpoint_id is None else os.fspath(checkpoint_id))
    target, report = _load(state_dict, storage_reader, planner, ranks)
    hand_back(state_dict, target)
    return report


def _load_everything(reader: NativeReader, allow_pickle: bool) -> dict[Any, Any]:
    planner = WholeLoadPlanner(flatten_state_dict=False, allow_pickle=allow_pickle)
    leaves, _ = _load(None, reader, planner, SoloRanks)
    metadata = planner.metadata
    assert metadata is not None
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata) and stored.properties.requires_grad:
            leaves[key] = leaves[key].requires_grad_()
    return unflatten(leaves, stored_paths(metadata))


def _load(
    state: MutableMapping[Any, Any] | None,
    reader: StorageReader,
    planner: LoadPlanner,
    make_ranks: Callable[[], Ranks],
) -> tuple[dict[Any, Any], LoadReport]:
    """What was loaded for ``state``, and the report; without a state, everything that the checkpoint has, by key.

    When the checkpoint is replaced by another one while it is read, all ranks start again together.
    """
    started = time.monotonic()
    try:
        while True:
            try:
                with make_ranks() as ranks:
                    return _load_once(state, reader, planner, ranks, started)
            except CorruptError as error:
                with make_ranks() as ranks:
                    if ranks.share("looking for another checkpoint", partial(_was_replaced, reader), any):
                        continue
                error.args = (f"{error.message}. The contents of the target are undefined now.",)
                raise
    finally:
        if isinstance(reader, NativeReader):
            reader.close()


def _was_replaced(reader: StorageReader) -> bool:
    return isinstance(reader, NativeReader) and reader.was_replaced()


def _load_once(
    state: MutableMapping[Any, Any] | None, reader: StorageReader, planner: LoadPlanner, ranks: Ranks, started: float
) -> tuple[dict[Any, Any], LoadReport]:
    metadata: Metadata | None = None
    target: dict[Any, Any] = {}
    plan = LoadPlan([])

    def read_metadata() -> str | None:
        nonlocal metadata
        metadata = reader.read_metadata()
        if not isinstance(reader, NativeReader):
            check_tiling(metadata)  # native storage has done it on its index
        elif state is None:
            reader.check_files()  # room for what is not there may be more than there is
        return None if metadata.storage_meta is None else metadata.storage_meta.save_id

    def plan_locally() -> LoadPlan:
        nonlocal target
        assert metadata is not None
        target = empty_state(metadata) if state is None else expose(state)
        planner.set_up_planner(target, metadata, ranks.is_coordinator)
        reader.set_up_storage_reader(metadata, ranks.is_coordinator)
        return reader.prepare_local_plan(planner.create_local_plan())

    def plan_globally(plans: list[LoadPlan]) -> list[LoadPlan]:
        return reader.prepare_global_plan(planner.create_global_plan(plans))

    def read() -> None:
        nonlocal plan
        plan = planner.finish_plan(plan)
        with torch.no_grad():
            reader.read_data(plan, planner).wait()

    ranks.follow(lambda: reader.bytes_read)
    ranks.share("reading the metadata", read_metadata, _one_attempt)
    plan = ranks.scatter("planning the load", plan_locally, plan_globally)
    ranks.share("reading the checkpoint", read, lambda done: None)
    assert metadata is not None
    return target, _report(metadata, plan, planner, bytes_read=reader.bytes_read, seconds=time.monotonic() - started)


def _one_attempt(attempts: list[str | None]) -> None:
    """CorruptError unless all ranks have read the metadata of the same save: one of them was replaced meanwhile."""
    if len(set(attempts)) > 1:
        raise CorruptError("the checkpoint was replaced by another one while it was opened")


def _report(metadata: Metadata, plan: LoadPlan, planner: LoadPlanner, *, bytes_read: int, seconds: float) -> LoadReport:
    columns = read_columns(plan.items)
    loaded = set(columns.storage_keys)
    return LoadReport(
        loaded=tuple(dict.fromkeys(columns.keys)),
        unexpected=tuple(key for key in metadata.state_dict_metadata if key not in loaded),
        differences=tuple(planner.differences) if isinstance(planner, DefaultLoadPlanner) else (),
        casts=tuple(planner.casts) if isinstance(planner, DefaultLoadPlanner) else (),
        bytes_read=bytes_read,
        seconds=seconds,
    )
