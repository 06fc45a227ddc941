"""async_save: a snapshot of the state at the price of a memory copy; the checkpoint is written behind the training."""

from __future__ import annotations

import contextlib
import copy
import enum
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from holdfast._io import slabs
from holdfast._native.writer import NativeWriter
from holdfast._process import CollectorPause
from holdfast._ranks.ranks import Ranks, SoloRanks
from holdfast._ranks.rendezvous import DEADLINE_S, participants
from holdfast._saver import ReplicaCheck, Saving, planner_for, writer_for
from holdfast._staging.copies import Mode, Staging, trained_keys
from holdfast._staging.jobs import ForeignJob, Job, NativeJob, Options, StagerJob
from holdfast._staging.memory import CUDA
from holdfast._staging.one_at_a_time import TURNS, AsyncSave, AsyncSaveResponse, Background, interpreter_ends
from holdfast._torch_classes.adapt import id_and_storage
from holdfast.default_planner import DefaultSavePlanner
from holdfast.metadata import Metadata
from holdfast.planner import SavePlanner
from holdfast.staging import AsyncStager
from holdfast.storage import StorageWriter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["AsyncCheckpointerType", "AsyncSave", "AsyncSaveResponse", "async_save", "guard", "prewarm", "release"]

Choice = TypeVar("Choice", bound=str)

_guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class AsyncCheckpointerType(enum.Enum):
    """Who writes: a thread of this process, or a process of its own."""

    THREAD = "thread"
    PROCESS = "process"


def async_save(
    state_dict: Mapping[Any, Any],
    checkpoint_id: str | os.PathLike[str] | StorageWriter | None = None,
    *,
    stage: Mode = "copy",
    copy_now: Sequence[str] = (),
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    overwrite: bool = True,
    allow_pickle: bool = False,
    user_metadata: Mapping[str, Any] | None = None,
    replica_check: ReplicaCheck = "sample",
    deadline_s: float = DEADLINE_S,
    max_host_bytes: int | None = None,
    when_busy: Literal["wait", "raise"] = "wait",
    at_exit: Literal["finish", "abandon"] = "finish",
    prove: bool = False,
    warn_unchanged: bool | Sequence[str] = True,
    progress: Literal["terminal"] | Callable[[AsyncSave], None] | None = None,
) -> AsyncSave:
    """Save ``state_dict`` as it is now, in the background; the checkpoint is there when the handle is done.

    Args:
        state_dict: as for ``save``. With ``stage="copy"`` all of it may be changed as soon as this returns.
        checkpoint_id: the directory of the checkpoint.
        stage: "copy" returns when the snapshot is complete. "overlap" returns at once, and the copies run beside the
            training: nothing of the state may be changed before ``handle.wait_staged()``, or the step of an optimizer
            under ``guard``. "device" clones the state on its device, if there is room, and copies it from there.
        copy_now: with "overlap", keys (or what keys begin with) that are copied before this returns.
        storage_writer: where to write instead of native files at ``checkpoint_id``.
        planner: what to write instead of the whole state.
        process_group: the ranks that take part, instead of all.
        async_checkpointer_type: whether a thread writes native files, or a process. Other storage is always a thread's.
        async_stager: who copies the state, instead of this library; so does a storage writer that is a stager. It
            cannot show progress: other ranks that wait for it give up after ``deadline_s``.
        no_dist: this process saves alone, whatever others do.
        use_collectives: as for ``save``.
        overwrite: as for ``save``.
        allow_pickle: as for ``save``.
        user_metadata: as for ``save``; copied now.
        replica_check: as for ``save``; for tensors on a device it waits for what their streams have queued.
        deadline_s: as for ``save``.
        max_host_bytes: a bound of the host memory for the snapshot. A larger state streams through it: then this
            returns only when the last byte is copied, most of the others being on disk by then.
        when_busy: whether to wait while the save before is under way, or to raise BusyError.
        at_exit: whether the interpreter waits for the save when it ends, or abandons it and removes what is there.
        prove: take a fingerprint of every tensor now, where it is, and compare it with what was written.
        warn_unchanged: log a warning for tensors that are just as they were at the save before: False for none, or the
            keys to look at; those for which an optimizer has state by default.
        progress: "terminal" for a progress bar, or what to call with the handle when something has changed.

    Returns:
        A future of the metadata, which also tells how far the save is.

    Raises:
        BusyError: see ``when_busy``.
        InvalidStateError: the state has something that cannot be stored.
        CheckpointError: the save before failed, and nobody has asked its handle; or as ``save``. What fails later is
            raised by ``result`` of the handle.
    """
    handle = AsyncSave()
    ranks = participants(process_group, no_dist=no_dist, call="async_save", place=checkpoint_id, deadline_s=deadline_s)
    holding = _Holding(handle, ranks)
    with holding, holding:
        holding.begin()
        checkpoint_id, storage_writer = id_and_storage(checkpoint_id, storage_writer, function="async_save")
        handle.show(_progress(progress, checkpoint_id))
        options = Options(
            stage=_checked("stage", stage, ("copy", "overlap", "device")),
            copy_now=tuple(copy_now),
            max_host_bytes=max_host_bytes,
            when_busy=_checked("when_busy", when_busy, ("wait", "raise")),
            at_exit=_checked("at_exit", at_exit, ("finish", "abandon")),
            prove=prove,
            in_process=AsyncCheckpointerType(async_checkpointer_type) is AsyncCheckpointerType.PROCESS
            and not interpreter_ends(),
        )
        writer = writer_for(
            checkpoint_id,
            storage_writer,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            user_metadata=copy.deepcopy(user_metadata),
        )
        planner = planner or planner_for(replica_check)
        those = ranks if use_collectives else SoloRanks(rank=ranks.rank, is_coordinator=ranks.is_coordinator)
        saving = Saving(writer, planner, those, use_collectives=use_collectives)
        ranks.follow(lambda: TURNS.bytes_done, lambda: saving.writer.file_at_work)
        saving.writer.watch(ranks.check)
        holding.writer = saving.writer
        if async_stager is None and isinstance(writer, AsyncStager):
            async_stager = writer
        job = _job(saving, handle, options, async_stager)
        job.chosen = _chosen(warn_unchanged, saving.planner, list(_optimizers(state_dict)))
        with handle.working():
            job.begin(state_dict)
        holding.background.start(_second_half(job, handle, holding, None if use_collectives else ranks))
        _catch_up(job, handle)
    return handle


def _job(saving: Saving, handle: AsyncSave, options: Options, stager: AsyncStager | None) -> Job:
    """The way in which this save is done."""
    writer = saving.writer
    if stager is not None:
        return StagerJob(saving, handle, options, stager)
    if isinstance(writer, NativeWriter):
        return NativeJob(saving, handle, options, writer)
    return ForeignJob(saving, handle, options)


class _Holding:
    """What a save holds while the caller is at it; what is not in the background by the end of the block is given back.

    Enter it twice: an interrupt may come into the one end, and then there is the other.
    """

    def __init__(self, handle: AsyncSave, ranks: Ranks) -> None:
        self._handle = handle
        self._is_inside = False
        self.ranks = ranks
        self.background = Background()
        self.pause = CollectorPause()
        self.writer: StorageWriter | None = None

    def begin(self) -> None:
        """Get hold of what does not depend on the save."""
        self.background.get_ready()
        self.pause.__enter__()
        self.ranks.__enter__()
        self._is_inside = True

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.background.has_work:
            # The caller may go on with the training, and has no handle to wait for.
            self._handle.is_given_up = self._handle.is_given_up or error is not None
            return
        self.background.call_off()
        TURNS.pass_on(self._handle, is_begun=False)
        self.pause.end()
        self.abandon()
        if self._is_inside:
            self.ranks.__exit__(kind, error, trace)
            self._is_inside = False

    def abandon(self) -> None:
        """Remove what was written."""
        if self.writer is not None:
            self.writer.abandon()


def _second_half(job: Job, handle: AsyncSave, holding: _Holding, together: Ranks | None) -> Callable[[], None]:
    """What runs in the background; among ``together``, if each of them has saved apart from the others.

    The collector's pause ends there too: what it then has to look at need not keep the caller waiting.
    """

    def run() -> Metadata:
        if together is None:
            return job.run()
        found: list[Metadata] = []
        together.all_reduce("saving apart from each other", lambda: found.append(job.run()), lambda done: None)
        return found[0]

    def work() -> None:
        try:
            with contextlib.ExitStack() as stack, handle.working():
                stack.push(holding.ranks)  # which the caller has entered
                stack.push(lambda kind, error, trace: None if error is None else holding.abandon())
                holding.pause.end()
                metadata = run()
        except BaseException as error:
            job.cancel()
            TURNS.pass_on(handle)
            handle.fail(error)
        else:
            TURNS.pass_on(handle)
            handle.succeed(metadata)

    return work


def _catch_up(job: Job, handle: AsyncSave) -> None:
    """Wait for what the caller has to wait for although it happens in the background."""
    if job.is_streaming:
        handle.is_staged.wait()
    elif isinstance(job, StagerJob) and job.is_staged and job.stager.should_synchronize_after_execute:
        job.stager.synchronize_staging()


def _checked(name: str, value: Choice, allowed: tuple[str, ...]) -> Choice:
    if value not in allowed:
        raise ValueError(f"{name} is one of {', '.join(map(repr, allowed))}, not {value!r}")
    return value


def _progress(
    wanted: Literal["terminal"] | Callable[[AsyncSave], None] | None, checkpoint_id: str | os.PathLike[str] | None
) -> Callable[[AsyncSave], None] | None:
    if wanted != "terminal":
        return wanted
    # Only now: it is for people, and takes a while to import.
    from holdfast._staging.one_at_a_time import TerminalProgress

    return TerminalProgress("checkpoint" if checkpoint_id is None else os.path.basename(os.fspath(checkpoint_id)))


def _optimizers(state: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers in ``state`` and those under guard."""
    yield from list(_guarded)
    yield from (value for value in state.values() if isinstance(value, torch.optim.Optimizer))


def _chosen(
    wanted: bool | Sequence[str], planner: SavePlanner, optimizers: Iterable[torch.optim.Optimizer]
) -> Callable[[], Collection[str]]:
    """What finds, in the background, the keys whose tensors should have changed."""
    if not isinstance(wanted, bool):
        return lambda: list(wanted)
    if not wanted or not isinstance(planner, DefaultSavePlanner):
        return list
    return lambda: trained_keys(planner.state_dict, optimizers)


def guard(optimizer: torch.optim.Optimizer) -> RemovableHandle:
    """Let every step of ``optimizer`` wait, on its stream, for copies that an asynchronous save has not done yet.

    What else changes the state (averaged weights, buffers that the forward pass updates) it cannot see: name those in
    ``copy_now``. Returns a handle whose ``remove()`` ends it.
    """
    _guarded.add(optimizer)
    return optimizer.register_step_pre_hook(lambda *_: TURNS.fence())


def prewarm(
    state_dict: Mapping[Any, Any],
    *,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    no_dist: bool = False,
    max_host_bytes: int | None = None,
    deadline_s: float = DEADLINE_S,
) -> int:
    """Get ready for saves of ``state_dict``, so that the first is as fast as the others; returns the bytes held.

    All ranks call it, as they call ``async_save``. Host memory is allocated and pinned, the state is copied once for
    practice, and the process that writes is started, where one is wanted. Nothing is written.
    """
    handle = AsyncSave()
    passing = TURNS.passing(handle)
    ranks = participants(process_group, no_dist=no_dist, call="prewarm", deadline_s=deadline_s)
    with ranks, passing, passing:
        writer = NativeWriter("")
        saving = Saving(writer, planner or DefaultSavePlanner(replica_check="off"), ranks)
        with handle.working():
            plan = saving.plan(state_dict, before=lambda: TURNS.take(handle, wait=True))
        image = writer.lay_out(saving.planner.finish_plan(plan), saving.planner).image
        if max_host_bytes is None or image.nbytes <= max_host_bytes:
            is_shared = async_checkpointer_type is AsyncCheckpointerType.PROCESS
            region = TURNS.memory.region(image.nbytes, is_shared=is_shared)
            Staging(image.copies, region, mode="copy", accelerator=CUDA).begin()
            if is_shared:
                TURNS.writer_process().prepare(region)
    return TURNS.memory.nbytes


def release() -> None:
    """Give back the host memory and the process of asynchronous saves, once the one under way is over.

    The buffers of saves and loads, which are kept for the next one, go too.
    """
    TURNS.release()
    slabs.release()
