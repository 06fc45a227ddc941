"""load: a checkpoint into a state, in place; or, without a state, everything that is in it."""

from __future__ import annotations

import os
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, overload

import torch

from holdfast._coord.ranks import Ranks, SoloRanks
from holdfast._native.reader import NativeReader
from holdfast._state.collector import collector_paused
from holdfast._state.exposure import expose, hand_back
from holdfast._state.paths import unflatten
from holdfast.default_planner import DefaultLoadPlanner, WholeLoadPlanner, empty_state
from holdfast.errors import CorruptError, Difference, InvalidStateError
from holdfast.metadata import TensorStorageMetadata
from holdfast.planner import LoadPlan, LoadPlanner, read_columns
from holdfast.planner_helpers import check_tiling
from holdfast.storage import StorageReader

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
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    allow_pickle: bool = False,
) -> LoadReport: ...
@overload
def load(state_dict: str | os.PathLike[str], *, verify: bool = True, allow_pickle: bool = False) -> dict[Any, Any]: ...
def load(
    state_dict: MutableMapping[Any, Any] | str | os.PathLike[str],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    allow_pickle: bool = False,
) -> LoadReport | dict[Any, Any]:
    """Load ``checkpoint_id`` into ``state_dict``, in place; ``load(path)`` alone returns everything, on the CPU.

    Args:
        state_dict: the target, of the same shape as what was saved. Tensors, on any device, are filled; other values
            are set in it; Stateful objects get load_state_dict. Meta tensors are replaced by CPU ones.
        checkpoint_id: the directory of the checkpoint.
        storage_reader: where to read from instead of native files at ``checkpoint_id``.
        planner: what to read instead of everything in the target.
        strict: any difference in keys, kinds, shapes or dtypes is one MismatchError, raised before anything is
            touched; False loads what fits. Keys that only the checkpoint has are never an error.
        cast: let a tensor of one floating type be loaded into one of another.
        verify: check every byte that is read against its digest.
        allow_pickle: unpickle values that were saved with allow_pickle; it runs code from the checkpoint.

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
    target = expose(state_dict)
    report = _load(target, storage_reader, planner, SoloRanks())
    hand_back(state_dict, target)
    return report


def _load_everything(reader: NativeReader, allow_pickle: bool) -> dict[Any, Any]:
    planner = WholeLoadPlanner(flatten_state_dict=False, allow_pickle=allow_pickle)
    _load(None, reader, planner, SoloRanks())
    metadata = planner.metadata
    assert metadata is not None
    leaves = planner.original_state_dict
    for key, stored in metadata.state_dict_metadata.items():
        leaf = leaves[key]
        if isinstance(stored, TensorStorageMetadata) and stored.properties.requires_grad:
            leaves[key] = leaf.requires_grad_()
    return unflatten(leaves, metadata.planner_data)


def _load(target: dict[Any, Any] | None, reader: StorageReader, planner: LoadPlanner, ranks: Ranks) -> LoadReport:
    """Load, and again from the start when the checkpoint was replaced by another one while it was read.

    Without a target, one is made of everything that the checkpoint has; the planner holds it.
    """
    started = time.monotonic()
    try:
        while True:
            try:
                with collector_paused():
                    return _load_once(target, reader, planner, ranks, started)
            except CorruptError as error:
                if isinstance(reader, NativeReader) and reader.was_replaced():
                    continue
                error.args = (f"{error.message}. The contents of the target are undefined now.",)
                raise
    finally:
        if isinstance(reader, NativeReader):
            reader.close()


def _load_once(
    target: dict[Any, Any] | None, reader: StorageReader, planner: LoadPlanner, ranks: Ranks, started: float
) -> LoadReport:
    metadata = reader.read_metadata()
    if not isinstance(reader, NativeReader):
        check_tiling(metadata)  # native storage has done it on its index

    def plan_locally() -> LoadPlan:
        planner.set_up_planner(empty_state(metadata) if target is None else target, metadata, ranks.is_coordinator)
        reader.set_up_storage_reader(metadata, ranks.is_coordinator)
        return reader.prepare_local_plan(planner.create_local_plan())

    def plan_globally(plans: list[LoadPlan]) -> list[LoadPlan]:
        return reader.prepare_global_plan(planner.create_global_plan(plans))

    plan = ranks.scatter("planning the load", plan_locally, plan_globally)

    def read() -> None:
        nonlocal plan
        plan = planner.finish_plan(plan)
        with torch.no_grad():
            reader.read_data(plan, planner).wait()

    ranks.share("reading the checkpoint", read, lambda done: None)
    columns = read_columns(plan.items)
    loaded = set(columns.storage_keys)
    return LoadReport(
        loaded=tuple(dict.fromkeys(columns.keys)),
        unexpected=tuple(key for key in metadata.state_dict_metadata if key not in loaded),
        differences=tuple(planner.differences) if isinstance(planner, DefaultLoadPlanner) else (),
        casts=tuple(planner.casts) if isinstance(planner, DefaultLoadPlanner) else (),
        bytes_read=reader.bytes_read,
        seconds=time.monotonic() - started,
    )
