"""async_save: a snapshot of the state at the price of a memory copy; the checkpoint is written behind the training."""

from __future__ import annotations

import contextlib
import copy
import enum
import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from holdfast import events
from holdfast._background import BackgroundSave, BackgroundThread
from holdfast._io import slabs
from holdfast._native.writer import NativeWriter
from holdfast._ranks.ranks import DEADLINE_S, Ranks, participants
from holdfast._saver import SaveOptions, Saving, planner_for, writer_for
from holdfast._staging.copies import Staging, trained_keys
from holdfast._staging.one_at_a_time import TURNS, AsyncSave, AsyncSaveResponse
from holdfast._torch_classes.adapt import id_and_storage
from holdfast.default_planner import DefaultSavePlanner
from holdfast.events.progress import Shown, followed
from holdfast.planner import SavePlanner
from holdfast.staging import AsyncStager
from holdfast.storage import StorageWriter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["AsyncCheckpointerType", "AsyncSave", "AsyncSaveResponse", "async_save", "guard", "prewarm", "release"]

_DEFAULTS = SaveOptions()

_guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class AsyncCheckpointerType(enum.Enum):
    """Who writes: a thread of this process, or another process."""

    THREAD = "thread"
    PROCESS = "process"


def async_save(
    state_dict: Mapping[Any, Any],
    checkpoint_id: str | os.PathLike[str] | StorageWriter | None = None,
    *,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    overwrite: bool = True,
    user_metadata: Mapping[str, Any] | None = None,
    options: SaveOptions = _DEFAULTS,
) -> AsyncSave:
    """Save ``state_dict`` as it is now, in the background; the handle is a future of the metadata.

    Args:
        state_dict: as for ``save``. You may change it as soon as this returns, unless ``options.stage`` says otherwise.
        checkpoint_id: as for ``save``.
        storage_writer: as for ``save``.
        planner: as for ``save``.
        process_group: as for ``save``.
        async_checkpointer_type: whether a thread or a process writes native files. A thread writes all other storage.
        async_stager: copies the state, instead of this library; a storage writer that is a stager does so too. It
            cannot show progress: ranks that wait for it give up after ``options.deadline_s``.
        no_dist: as for ``save``.
        use_collectives: as for ``save``.
        overwrite: as for ``save``.
        user_metadata: as for ``save``; copied now.
        options: all other options.

    Raises:
        BusyError: see ``options.when_busy``.
        InvalidStateError: the state has something that cannot be stored.
        CheckpointError: the last save failed, and you did not ask its handle; or as for ``save``. ``result`` of the
            handle raises what fails later.

    Examples:
        >>> handle = holdfast.async_save({"model": model, "step": 200}, "checkpoints/step-200")
        >>> metadata = handle.result()  # waits until the checkpoint is published and durable
    """
    handle, begun = AsyncSave(), time.monotonic()
    ranks = participants(
        process_group, no_dist=no_dist, call="async_save", place=checkpoint_id, deadline_s=options.deadline_s
    )
    background = BackgroundThread(handle, ranks)
    with background, background, contextlib.ExitStack() as stack:
        background.begin()
        checkpoint_id, storage_writer = id_and_storage(checkpoint_id, storage_writer, function="async_save")
        handle.path = os.fspath(checkpoint_id or "")
        handle._on_progress = options.progress if callable(options.progress) else None
        if options.progress is True:
            look = partial(_look, ranks, handle)
            handle._on_progress = stack.enter_context(followed(True, checkpoint_id, look, ranks.is_coordinator))
        kept = copy.deepcopy(user_metadata)
        writer = writer_for(checkpoint_id, storage_writer, options, overwrite=overwrite, user_metadata=kept)
        those = ranks if use_collectives else Ranks(rank=ranks.rank, is_coordinator=ranks.is_coordinator)
        if planner is not None and options.mapping is not None:
            raise ValueError("mapping is an option of the planner; pass it to the planner")
        saving = Saving(writer, planner or planner_for(options), those, use_collectives=use_collectives)
        saving.begun, saving.handle = begun, handle
        if events.subscriptions:
            background.operation = stack.enter_context(saving.tell_as("async_save"))
        in_process = AsyncCheckpointerType(async_checkpointer_type) is AsyncCheckpointerType.PROCESS
        trained = _trained(options, saving.planner, state_dict)
        save = BackgroundSave(saving, handle, options, in_process=in_process, trained=trained)
        if async_stager is None and isinstance(writer, AsyncStager):
            async_stager = writer
        background.run(save, state_dict, async_stager)
        saving.blocked_s = time.monotonic() - begun
        stack.pop_all()  # bar and operation go on
    return handle


def _look(ranks: Ranks, handle: AsyncSave) -> Shown:
    shown, report = ranks.overview()._replace(phase=handle.phase), handle.report
    return shown if report is None else shown._replace(bytes_done=report.bytes, bytes_total=report.bytes)


def _trained(options: SaveOptions, planner: SavePlanner, state: Mapping[Any, Any]) -> Callable[[], Collection[str]]:
    """What finds, in the background, the keys whose tensors should have changed."""
    wanted = options.warn_unchanged
    if not isinstance(wanted, bool):
        return lambda: wanted
    if not wanted or not isinstance(planner, DefaultSavePlanner) or not isinstance(state, Mapping):
        return tuple
    optimizers = [*_guarded, *(value for value in state.values() if isinstance(value, torch.optim.Optimizer))]
    return lambda: trained_keys(planner.state_dict, optimizers)


def guard(optimizer: torch.optim.Optimizer) -> RemovableHandle:
    """Make every step of ``optimizer`` wait, on its stream, until an asynchronous save has copied the state.

    It cannot stop other changes of the state (averaged weights, buffers that the forward pass updates): name those in
    ``copy_now``. To end it, call ``remove()`` of the handle that this returns.
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
    """Prepare for saves of ``state_dict``, so that the first is as fast as the others; return the bytes held.

    All ranks call it, as they call ``async_save``. It allocates and pins host memory, copies the state once for
    practice, and starts the process that writes, if you want one. It writes nothing.
    """
    handle = AsyncSave()
    turn = TURNS.ending(handle)
    ranks = participants(process_group, no_dist=no_dist, call="prewarm", deadline_s=deadline_s)
    with ranks, turn, turn:
        writer = NativeWriter("")
        saving = Saving(writer, planner or DefaultSavePlanner(replica_check="off"), ranks)
        with handle._working():
            plan = saving.plan(state_dict, before=lambda: TURNS.take(handle, wait=True))
        image = writer.lay_out(saving.planner.finish_plan(plan), saving.planner, saving.prepared).image
        if max_host_bytes is None or image.nbytes <= max_host_bytes:
            is_shared = async_checkpointer_type is AsyncCheckpointerType.PROCESS
            region = TURNS.memory.region(image.nbytes, is_shared=is_shared)
            Staging(image.copies, region, mode="copy").begin()
            if is_shared:
                TURNS.writer_process().prepare(region)
    return TURNS.memory.nbytes


def release() -> None:
    """Wait for the asynchronous save under way, then free the host memory and end the process that writes.

    This also frees the buffers that saves and loads keep for the next one.
    """
    TURNS.release()
    slabs.release()
