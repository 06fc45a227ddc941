"""save: the state of every rank, durable under one name, or an error and nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from holdfast import events
from holdfast._native.writer import NativeWriter
from holdfast._process import collector_paused
from holdfast._ranks.ranks import DEADLINE_S, Ranks, check_deadline, participants
from holdfast._save_plan.rounds import PlannedSave, Sketch, plan_save
from holdfast._staging.copies import Mode
from holdfast._staging.one_at_a_time import TURNS, AsyncSave
from holdfast._state.per_rank import job_rank
from holdfast._state.stateful_values import Owners, expose
from holdfast._torch_classes.adapt import as_save_planner, as_writer, id_and_storage, set_up_save_planner, set_up_writer
from holdfast._torch_format.writer import FsspecWriter
from holdfast._values.deadline import Progress
from holdfast.default_planner import DefaultSavePlanner
from holdfast.default_planner.other_keys import AnyMapping, check_mapping, check_moves_only
from holdfast.errors import CheckpointError
from holdfast.events.progress import check_progress, followed
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan, SavePlanner
from holdfast.storage import StorageWriter, WriteResult

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SaveOptions", "save"]

logger = logging.getLogger("holdfast")

Part = TypeVar("Part")

State = Mapping[Any, Any]
"""A state as users have it: keys may be of any type, at any depth."""

ReplicaCheck = Literal["sample", "all", "off"] | Collection[str]
"""How ranks compare what they have in common, or the keys of which they need not have the same."""


_CHOICES = {"stage": ("copy", "overlap", "device"), "when_busy": ("wait", "raise"), "at_exit": ("finish", "abandon")}


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """The options of ``save`` and ``async_save`` that torch does not have.

    Attributes:
        allow_pickle: store values that have no typed form as pickles; to load them, pass allow_pickle too.
        replica_check: how ranks compare data that must be equal: a "sample" of each tensor, "all" of it, or "off". A
            list of keys or patterns names what may differ; a sample of the rest is compared. Buffers of modules may
            always differ: those of the lowest rank are saved, and ``differing`` of the metadata has their keys.
        deadline_s: a rank that makes no progress for so many seconds while others wait for it counts as lost.
        mapping: leads from the state to the checkpoint: a ``Mapping`` of rules, a function, or a dict of prefixes, as
            for ``LoadOptions``. Rules that change numbers, Cast and Offset, are for exports only.
        progress: True shows a bar on the terminal of the coordinator: phase, bytes, speed, the slowest rank. A function
            is called as the save goes on, on every rank: with the handle of ``async_save``, and for ``save`` with a
            value that has the same ``phase``, ``bytes_done`` and ``bytes_total``.

        max_host_bytes: the most host memory for the buffers of ``save`` (two of 1 MiB at least), or for the snapshot of
            ``async_save``. A larger state streams through buffers: the call returns when the last byte is copied. With
            "overlap", what lies in host memory is written from where it is, after the call.

    Only for ``async_save``:

    Attributes:
        stage: "copy" returns when the snapshot is complete. "overlap" returns at once and copies while training goes
            on: do not change the state before ``handle.wait_staged()``, or before the step of an optimizer under
            ``guard``. "device" clones the state on its device, if there is room, and copies the clone.
        copy_now: with "overlap", keys (or starts of keys) that are copied before ``async_save`` returns. Buffers of
            modules and small tensors are copied too where there is no snapshot.
        when_busy: what to do while the last save is under way: "wait" for it, or "raise" BusyError.
        at_exit: what to do when the interpreter ends: "finish" the save, or "abandon" it and remove its files.
        prove: compute a fingerprint of every tensor now, on its device, and compare it with what was written.
        warn_unchanged: log a warning if trained tensors did not change since the last save. True checks those for which
            an optimizer has state, a list of keys checks these, False checks none.
    """

    allow_pickle: bool = False
    replica_check: ReplicaCheck = "sample"
    deadline_s: float = DEADLINE_S
    mapping: AnyMapping | None = None
    progress: bool | Callable[..., object] = False
    stage: Mode = "copy"
    copy_now: Sequence[str] = ()
    max_host_bytes: int | None = None
    when_busy: Literal["wait", "raise"] = "wait"
    at_exit: Literal["finish", "abandon"] = "finish"
    prove: bool = False
    warn_unchanged: bool | Sequence[str] = True

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} is one of {choices}, not {getattr(self, name)!r}")
        if isinstance(self.replica_check, str) and self.replica_check not in ("sample", "all", "off"):
            raise ValueError(f"replica_check is 'sample', 'all', 'off' or a list of keys, not {self.replica_check!r}")
        check_deadline(self.deadline_s)
        check_progress(self.progress)
        check_mapping(self.mapping)
        check_moves_only(self.mapping)


_DEFAULTS = SaveOptions()


@collector_paused
def save(
    state_dict: State,
    checkpoint_id: str | os.PathLike[str] | StorageWriter | None = None,
    *,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    overwrite: bool = True,
    user_metadata: Mapping[str, object] | None = None,
    options: SaveOptions = _DEFAULTS,
) -> Metadata:
    """Save ``state_dict`` under ``checkpoint_id``; when this returns, the checkpoint is whole, visible and durable.

    In a job of several ranks, all of them call it, each with its own part. DTensors and ShardedTensors know their part.
    Plain tensors and values under one key must be the same on all ranks that have them.

    Args:
        state_dict: nested dicts, lists and tuples of tensors, numpy arrays and plain values. Stateful objects (modules,
            optimizers) are saved as their state_dict. Only what is written is copied.
        checkpoint_id: the directory of the checkpoint, which is created if it does not exist; or the URL of a folder in
            an object store: s3, gs, az or memory. Other URLs fsspec writes, in torch's format. A storage here is
            torch's old form.
        storage_writer: a storage to write to, instead of native files at ``checkpoint_id``; ours or torch's.
        planner: decides what to write, instead of the whole state; ours or torch's.
        process_group: only these ranks take part.
        no_dist: only this process takes part.
        use_collectives: False lets every rank plan and publish its own part, for storage that keeps metadata per rank.
            Load it on as many ranks, each its own part.
        overwrite: replace a checkpoint of that name, atomically; False raises AlreadyPublishedError instead.
        user_metadata: plain values to keep in the manifest beside the state.
        options: all other options.

    Returns:
        The metadata of the checkpoint.

    Raises:
        InvalidStateError: the state has something that cannot be stored; it names the key, and nothing was written.
        AlreadyPublishedError: see ``overwrite``.
        RankLostError: a rank died, or made no progress for ``options.deadline_s`` seconds.
        RankDisagreementError: ranks gave different paths, or different things under one key.
        StorageError: the file system refused. Nothing of this save is visible, and the old checkpoint is still there;
            but if only the last sync of the directory failed, the new one is visible, and may not be durable.
    """
    ranks = participants(
        process_group, no_dist=no_dist, call="save", place=checkpoint_id, deadline_s=options.deadline_s
    )
    with ranks, contextlib.ExitStack() as stack:
        checkpoint_id, storage_writer = id_and_storage(checkpoint_id, storage_writer, function="save")
        writer = writer_for(
            checkpoint_id,
            storage_writer,
            overwrite=overwrite,
            allow_pickle=options.allow_pickle,
            user_metadata=user_metadata,
            max_host_bytes=options.max_host_bytes,
        )
        if planner is None:
            planner = planner_for(options)
        elif options.mapping is not None:
            raise ValueError("mapping is an option of the planner; pass it to the planner")
        if options.progress:
            stack.enter_context(followed(options.progress, checkpoint_id, ranks.overview, ranks.is_coordinator))
        return save_with(state_dict, writer, planner, ranks, use_collectives=use_collectives)


def planner_for(options: SaveOptions) -> DefaultSavePlanner:
    """The planner that is used when none is given."""
    replica_check, mapping = options.replica_check, options.mapping
    if isinstance(replica_check, str):
        return DefaultSavePlanner(replica_check=cast(Literal["sample", "all", "off"], replica_check), mapping=mapping)
    return DefaultSavePlanner(may_differ=replica_check, mapping=mapping)


def writer_for(
    checkpoint_id: str | os.PathLike[str] | None,
    storage_writer: StorageWriter | None,
    *,
    overwrite: bool,
    allow_pickle: bool,
    user_metadata: Mapping[str, object] | None,
    max_host_bytes: int | None = None,
) -> StorageWriter:
    """The storage that is meant: the one given, at ``checkpoint_id`` if that is given too, or what the id means."""
    if storage_writer is not None:
        if not overwrite or allow_pickle or user_metadata is not None:
            raise ValueError("pass overwrite, allow_pickle and user_metadata to the storage_writer, not to save")
        if checkpoint_id is not None:
            storage_writer.reset(checkpoint_id)
        return storage_writer
    if checkpoint_id is None:
        raise ValueError("save needs a checkpoint_id or a storage_writer: save(state, path)")
    if NativeWriter.validate_checkpoint_id(checkpoint_id):
        native = NativeWriter(
            checkpoint_id, overwrite=overwrite, allow_pickle=allow_pickle, user_metadata=user_metadata
        )
        native.max_host_bytes = max_host_bytes
        return native
    if user_metadata is not None:
        raise ValueError("this URL is written in torch's format, which has no place for user_metadata; save to a path")
    return FsspecWriter(os.fspath(checkpoint_id), overwrite=overwrite)


def save_with(
    state: State, writer: StorageWriter, planner: SavePlanner, ranks: Ranks, *, use_collectives: bool = True
) -> Metadata:
    """Save ``state`` with a storage and a planner, ours or torch's, among ``ranks`` that have been entered."""
    ours = as_writer(writer)
    ours.progress = written = Progress(ranks.check)
    ranks.follow(lambda: TURNS.bytes_done + written.done, lambda: ours.file_at_work, lambda: written.total)
    if use_collectives:
        return _save(state, Saving(ours, planner, ranks))
    metadata: list[Metadata] = []

    def save_alone() -> None:
        alone = Ranks(rank=ranks.rank, is_coordinator=ranks.is_coordinator)
        metadata.append(_save(state, Saving(ours, planner, alone, use_collectives=False)))

    ranks.all_reduce("saving apart from each other", save_alone, lambda done: None)
    return metadata[0]


def _save(state: State, saving: Saving) -> Metadata:
    writer, planner = saving.writer, saving.planner
    if events.subscriptions:
        saving.tell_as("save")
    try:
        plan = saving.plan(state, before=TURNS.finish)
        metadata = saving.write(lambda: writer.write_data(planner.finish_plan(plan), planner).wait())
        writer.conclude()
        return metadata
    except BaseException as error:
        writer.abandon()
        if saving.operation is not None:
            saving.operation.__exit__(type(error), error, None)
        raise
    finally:
        writer.progress = Progress()  # the storage may live on, and is not to keep the ranks


def _check(ranks: Ranks, process: int) -> None:
    # A child that a state_dict() or planner forked may come back from it: one saves, not two.
    if os.getpid() != process:
        raise CheckpointError("this process was forked during a save, which belongs to its parent; let it exit here")
    ranks.check()


_Part = tuple[MutableSequence[WriteResult], events.RankTimes]


class Saving:
    """One save in the two steps that all ranks take together; what goes wrong in one is raised on every rank.

    Planner and storage may be torch's. ``operation`` is there when somebody listens. A save in the background has a
    ``handle``, which gets the report; it sets ``blocked_s``, ``stage_s``, and when that was, ``staged_at``.
    """

    def __init__(
        self, writer: StorageWriter, planner: SavePlanner, ranks: Ranks, *, use_collectives: bool = True
    ) -> None:
        self.writer = as_writer(writer)
        self.planner = as_save_planner(planner)
        self.ranks = ranks
        self._use_collectives = use_collectives
        self._planned: PlannedSave | None = None
        self.owners = Owners()
        self.begun = self._planning_since = time.monotonic()
        self.plan_s = self.stage_s = self.staged_at = self.blocked_s = 0.0
        self.operation: events.Operation | None = None
        self.handle: AsyncSave | None = None
        self.report: events.SaveReport | None = None
        # Raises what another rank has failed with; any thread. No method: this is not to be kept by its own progress,
        # and the state with it.
        self.check = partial(_check, ranks, os.getpid())
        self.prepared = Progress(self.check)

    def plan(self, state: State, *, before: Callable[[], None] = lambda: None) -> SavePlan:
        """What this rank is to write of ``state``; the planner has yet to finish it.

        ``before`` is called first: what it raises is raised on every rank.
        """
        own = job_rank() if self.ranks.size > 1 else 0  # which is what meshes call it
        set_up = partial(self._set_up, state, before)
        self._planned = plan_save(self.planner, self.writer, self.ranks, set_up, job_rank=own)
        if self.ranks.size > 1:
            self.writer.meet(self._planned.plan, self.ranks)
        self.plan_s = time.monotonic() - self._planning_since - self.ranks.waited_s
        if self.operation is not None:
            self.operation.attempt = getattr(self._planned.plan.storage_data, "attempt", "")
            self.operation.tell("planned", seconds=self.plan_s)
        return self._planned.plan

    def prepare(self, phase: str, prepare: Callable[[], Part]) -> Part:
        """What ``prepare`` returns, which this rank needs to write; what goes wrong there is raised on every rank.

        It tells ``self.prepared`` how far it is.
        """
        self.prepared.done = 0
        return self.ranks.locally(phase, prepare)

    def write(self, write: Callable[[], MutableSequence[WriteResult]]) -> Metadata:
        """The metadata of the checkpoint, which is published once ``write`` has returned on every rank."""
        self.check()
        self.prepared.done = 0  # from here on what is written counts
        planned = self._planned
        assert planned is not None

        def publish(parts: list[_Part]) -> Metadata | Sketch:
            assert planned.metadata is not None
            begun, (results, times) = time.monotonic(), map(list, zip(*parts, strict=True))
            self.writer.finish(planned.metadata, results if planned.outcome is None else planned.with_plans(results))
            if self.operation is not None or self.handle is not None:
                now, ranks = time.monotonic(), dict(zip(self.ranks.job_ranks, times, strict=True))
                self.report = events.save_report(ranks, total_s=now - self.begun, commit_s=now - begun)
            return planned.metadata if planned.known is None else planned.told()

        told = self.ranks.all_reduce("writing the checkpoint", partial(self._timed, write), publish)
        if isinstance(told, Sketch):
            metadata = self.ranks.locally("describing the checkpoint", partial(planned.metadata_of, told, self.planner))
        else:
            metadata = told
        if self.operation is not None:
            self.operation.tell("published", nbytes=self.writer.progress.done, report=self.report)
        if self.handle is not None:
            self.handle.report = self.report
        if metadata.differing and self.ranks.is_coordinator:
            names = ", ".join(list(metadata.differing)[:3])
            logger.info("%d keys differ between ranks; the lowest rank's are saved: %s", len(metadata.differing), names)
        return metadata

    def _timed(self, write: Callable[[], MutableSequence[WriteResult]]) -> _Part:
        """What this rank has written, and how long its part of the save took."""
        begun, progress = time.monotonic(), self.writer.progress
        results = write()
        now, begun = time.monotonic(), max(begun, self.staged_at)
        sync_s = min(progress.sync_s, now - begun)
        if self.operation is not None:
            self.operation.tell("written", seconds=now - begun, nbytes=progress.done, sync_s=sync_s)
        phases_s = {"plan": self.plan_s, "stage": self.stage_s, "write": now - begun - sync_s, "sync": sync_s}
        if self.handle is not None:
            phases_s["blocked"] = self.blocked_s or now - self.begun
        return results, (events.HOST, progress.done, phases_s)

    def tell_as(self, name: str) -> events.Operation:
        """Have listeners told of this save, which is a ``name``."""
        meta, step = self.writer.storage_meta(), self.writer.user_metadata.get("step")
        operation = events.Operation(name, meta.checkpoint_id if meta else "", step=step, begun=self.begun)
        self.operation = operation
        return operation

    def _set_up(self, state: State, before: Callable[[], None]) -> None:
        before()
        self._planning_since, self.ranks.waited_s = time.monotonic(), 0.0
        writer, planner, ranks = self.writer, self.planner, self.ranks
        if isinstance(planner, DefaultSavePlanner):
            planner.ranks, planner.is_apart = ranks.size, not self._use_collectives
            planner.keeps_empty_dicts, planner.check_value = writer.keeps_empty_dicts, writer.check_value
        exposed, leads = expose(state, self.owners, apart=writer.keeps_empty_dicts), ranks.is_coordinator
        if isinstance(planner, DefaultSavePlanner):
            planner.buffers = frozenset(self.owners.buffers)
        set_up_save_planner(planner, exposed, writer.storage_meta(), is_coordinator=leads)
        set_up_writer(writer, is_coordinator=leads, rank=ranks.rank, use_collectives=self._use_collectives)
        self.check()  # what was called here may have forked
