"""save: the state of every rank, durable under one name, or an error and nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableSequence
from typing import TYPE_CHECKING, Any, Literal

from holdfast._coord.ranks import Ranks
from holdfast._native.writer import NativeWriter
from holdfast._state.collector import collector_paused
from holdfast._state.exposure import expose
from holdfast.default_planner import DefaultSavePlanner, WholeSavePlanner
from holdfast.default_planner.plan_messages import Sketch
from holdfast.default_planner.planning import SavePlanning
from holdfast.metadata import Metadata
from holdfast.participants import DEADLINE_S, mesh_rank, participants
from holdfast.planner import SavePlanner
from holdfast.storage import StorageWriter, WriteResult

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["save"]


@collector_paused()
def save(
    state_dict: Mapping[Any, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    overwrite: bool = True,
    allow_pickle: bool = False,
    user_metadata: Mapping[str, Any] | None = None,
    replica_check: Literal["sample", "all", "off"] = "sample",
    deadline_s: float = DEADLINE_S,
) -> Metadata:
    """Save ``state_dict`` under ``checkpoint_id``; when this returns, the checkpoint is whole, visible and durable.

    In a job of several ranks all of them call it, each with its own part: DTensors and ShardedTensors know which part
    that is, plain tensors and values that several ranks have are taken to be the same on all of them.

    Args:
        state_dict: nested dicts, lists and tuples of tensors, numpy arrays and plain values. Stateful objects (modules,
            optimizers) stand for their state_dict. Nothing is copied but what is written.
        checkpoint_id: the directory of the checkpoint; made when it does not exist.
        storage_writer: where to write instead of native files at ``checkpoint_id``.
        planner: what to write instead of the whole state.
        process_group: the ranks that take part, instead of all.
        no_dist: this process saves alone, whatever others do.
        overwrite: replace a checkpoint of that name, atomically; False makes that AlreadyPublishedError.
        allow_pickle: store values that have no typed form as pickles; loading them needs allow_pickle too.
        user_metadata: plain values to keep in the manifest beside the state.
        replica_check: how ranks compare what they should have in common: a sample of each tensor, all of it, or not.
        deadline_s: seconds without progress after which a rank that others wait for is given up.

    Returns:
        The metadata of the checkpoint.

    Raises:
        InvalidStateError: the state has something that cannot be stored; it names the key, and nothing was written.
        AlreadyPublishedError: see ``overwrite``.
        RankLostError: a rank died, or made no progress for ``deadline_s`` seconds.
        RankDisagreementError: ranks gave different paths, or different things under one key.
        StorageError: the file system refused; nothing of this save is visible, what was there before still is. Only
            where the last sync of the directory failed is the new checkpoint visible without being known to be durable.
    """
    ranks = participants(process_group, no_dist=no_dist, deadline_s=deadline_s)
    with ranks:
        if storage_writer is None:
            if checkpoint_id is None:
                raise ValueError("save needs a checkpoint_id or a storage_writer")
            storage_writer = NativeWriter(
                checkpoint_id, overwrite=overwrite, allow_pickle=allow_pickle, user_metadata=user_metadata
            )
        elif not overwrite or allow_pickle or user_metadata is not None:
            raise ValueError("overwrite, allow_pickle and user_metadata are options of the storage; give them to it")
        elif checkpoint_id is not None:
            storage_writer.reset(checkpoint_id)
        ranks.agree("checkpoint path", None if checkpoint_id is None else os.fspath(checkpoint_id))
        if planner is None:
            planner = WholeSavePlanner(replica_check=replica_check)
        return _save(state_dict, storage_writer, planner, ranks)


def _save(state: Mapping[Any, Any], writer: StorageWriter, planner: SavePlanner, ranks: Ranks) -> Metadata:
    planning = SavePlanning(planner, writer, ranks, name=mesh_rank())

    def set_up() -> None:
        if isinstance(planner, DefaultSavePlanner):
            planner.ranks, planner.kept = ranks.size, ranks.kept
        planner.set_up_planner(expose(state), writer.storage_meta(), ranks.is_coordinator)
        writer.set_up_storage_writer(ranks.is_coordinator, rank=ranks.rank, use_collectives=True)

    def write() -> MutableSequence[WriteResult]:
        return writer.write_data(planner.finish_plan(plan), planner).wait()

    def publish(results: list[MutableSequence[WriteResult]]) -> Metadata | Sketch:
        writer.finish(planning.planned, planning.bound(results))
        return planning.sketched()

    ranks.follow(lambda: writer.bytes_written)
    try:
        plan = planning.run(set_up)
        return planning.metadata(ranks.share("writing the checkpoint", write, publish))
    except BaseException:
        writer.abandon()
        raise
