"""A save in the background, in two halves.

The first runs on the calling thread: it plans with the other ranks and takes the snapshot, or as much of it as the way
of staging wants. It returns the second, which runs in a thread and ends with a published checkpoint. Between the two
there is what the caller has to wait for although it happens in the background.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, MutableSequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple

import torch

from holdfast import events
from holdfast._native.file_layout import Copy, WriterFiles
from holdfast._native.place import ImageStorage, Proof
from holdfast._native.report import report_of
from holdfast._process import CollectorPause, start_thread
from holdfast._ranks.ranks import Ranks
from holdfast._saver import SaveOptions, Saving
from holdfast._staging.copies import Changes, CopiedPlanner, Fingerprints, Live, Staging, is_named
from holdfast._staging.memory import CUDA, Region
from holdfast._staging.one_at_a_time import TURNS, AsyncSave, interpreter_ends
from holdfast._staging.process import ProcessOutput
from holdfast._state.stateful_values import expose
from holdfast._state.tensor_bytes import MemorySource, source_of
from holdfast._values.deadline import Progress
from holdfast.errors import CheckpointError
from holdfast.metadata import STATE_DICT_TYPE, Metadata
from holdfast.planner import SavePlan, write_columns
from holdfast.staging import AsyncStager, aligned
from holdfast.storage import StorageWriter, WriteResult

logger = logging.getLogger("holdfast")

Results = MutableSequence[WriteResult]
State = Mapping[str, object]

CHANGES = Changes()
"""What this process wrote last."""


class Begun(NamedTuple):
    """What is left of a save: ``run`` is for the background; ``wait`` is for the caller, once that has begun."""

    run: Callable[[], Metadata]
    wait: Callable[[], object] = lambda: None


class BackgroundSave:
    """One save. ``trained`` finds the keys whose tensors should have changed since the save before."""

    def __init__(
        self,
        saving: Saving,
        handle: AsyncSave,
        options: SaveOptions,
        *,
        in_process: bool,
        trained: Callable[[], Collection[str]],
    ) -> None:
        self.saving = saving
        self.options = options
        self.in_process = in_process and not interpreter_ends()
        self._handle = handle
        self._trained = trained
        self._staging_since = 0.0
        self.written = saving.writer.progress = Progress(partial(_go_on, saving.check, handle, options))

    def begin(self, state: State, stager: AsyncStager | None) -> Begun:
        """Take the snapshot, or have ``stager`` take it; returns when the rest can be done in the background."""
        with self._handle._working():
            return self._begin(state) if stager is None else self._begin_with(stager, state)

    def _begin(self, state: State) -> Begun:
        """Plan, give everything its place, and copy what the way of staging does not leave for later."""
        saving = self.saving
        plan = saving.plan(state, before=self._take_turn)
        self._staging_since = time.monotonic()
        snapshot = saving.prepare("laying out the state", lambda: self._lay_out(saving.planner.finish_plan(plan)))
        return saving.prepare("staging the state", lambda: self._stage(snapshot))

    def _begin_with(self, stager: AsyncStager, state: State) -> Begun:
        """Have the state copied by ``stager``, once its buffers are free; what it gives back is planned and saved."""
        saving, handle = self.saving, self._handle
        # It cannot show progress; an error that others give it up with tells whose work it was.
        phase = f"staging the state with {type(stager).__name__}"

        def begin() -> Future[STATE_DICT_TYPE] | STATE_DICT_TYPE:
            self._take_turn()
            self._staging_since = time.monotonic()
            handle._enter("staging")
            staged = stager.stage(expose(state, saving.owners, apart=saving.writer.keeps_empty_dicts))
            if isinstance(staged, Future):
                handle._guard_with(lambda: concurrent.futures.wait([staged]))
            else:
                self._enter_staged()
            return staged

        def end() -> STATE_DICT_TYPE:
            copied = staged.result() if isinstance(staged, Future) else staged
            self.end_copying()
            return copied

        def run() -> Metadata:
            plan = saving.plan(saving.prepare(phase, end))
            return saving.write(lambda: write(plan))

        def write(plan: SavePlan) -> Results:
            handle._enter("writing")
            return saving.writer.write_data(saving.planner.finish_plan(plan), saving.planner).wait()

        staged = saving.prepare(phase, begin)
        if isinstance(staged, Future) or not stager.should_synchronize_after_execute:
            return Begun(run)
        return Begun(run, stager.synchronize_staging)

    def end_copying(self) -> None:
        """Say that the state may be changed; raises if the caller was interrupted and may have done so too early."""
        self.written.check()
        self._enter_staged()

    def _enter_staged(self) -> None:
        """Say that the snapshot is complete; a second time is as good as none."""
        saving = self.saving
        if not saving.stage_s:
            saving.staged_at = time.monotonic()
            saving.stage_s = saving.staged_at - self._staging_since
            if saving.operation is not None:
                saving.operation.tell("staged", seconds=saving.stage_s, nbytes=self._handle.bytes_total)
        self._handle._enter("staged")

    def _take_turn(self) -> None:
        TURNS.take(self._handle, wait=self.options.when_busy == "wait")
        TURNS.raise_unobserved()

    def _lay_out(self, plan: SavePlan) -> _Files | _Items:
        writer = self.saving.writer
        return _Files(self, writer, plan) if isinstance(writer, ImageStorage) else _Items(self, plan)

    def _stage(self, snapshot: _Files | _Items) -> Begun:
        saving, handle, options = self.saving, self._handle, self.options
        handle.bytes_total, handle._written = snapshot.nbytes, self.written
        handle._enter("staging")
        if options.max_host_bytes is not None and snapshot.nbytes > options.max_host_bytes:
            live = snapshot.live(options, saving) if options.stage == "overlap" else None
            CUDA.drain(snapshot.copies)
            stream = partial(self._stream, snapshot, options.max_host_bytes, live.check if live else lambda _: None)
            handle._guard_with(handle._ends_staging)
            return Begun(lambda: saving.write(stream), handle._ends_staging if live is None else lambda: None)
        region = TURNS.memory.region(snapshot.nbytes, is_shared=snapshot.is_shared)
        write = snapshot.writing_from(region)
        fingerprints = Fingerprints(snapshot.copies) if options.prove else None
        each = zip(snapshot.keys, snapshot.copies, strict=True)
        now = {copy.name for key, copy in each if is_named(key, options.copy_now)}
        staging = Staging(
            snapshot.copies, region, mode=options.stage, now=now, progress=saving.prepared, digests=snapshot.digests
        )
        staging.numbers = snapshot.numbers
        staging.begin()
        handle._guard_with(staging.fence)
        if staging.is_done:
            self._enter_staged()

        def finish_and_write() -> Results:
            staging.finish()
            snapshot.forget_sources()
            self.end_copying()
            handle._enter("writing")
            results = write()
            if fingerprints is not None:
                fingerprints.compare(region)
            self._look_for_changes(snapshot, results)
            return results

        def run() -> Metadata:
            try:
                return saving.write(finish_and_write)
            except BaseException:
                staging.abandon()  # nobody is to wait for copies that will not come
                raise

        return Begun(run)

    def _stream(self, snapshot: _Files | _Items, max_bytes: int, proof: Proof) -> Results:
        """Copy and write in turns; the caller, or whoever changes the state, waits for the copying."""
        results = snapshot.stream(max_bytes, proof)
        snapshot.forget_sources()
        self._look_for_changes(snapshot, results)
        return results

    def _look_for_changes(self, snapshot: _Files | _Items, results: Results) -> None:
        if snapshot.digests is None:
            return
        same = self._handle.unchanged = CHANGES.unchanged(report_of(results), self._trained())
        if same:
            logger.warning(
                "%d trained tensors did not change since the last save (%s); if the optimizer took steps, check that "
                "you save the state that you train",
                len(same),
                ", ".join(same[:3]),
            )


def _go_on(check: Callable[[], None], handle: AsyncSave, options: SaveOptions) -> None:
    """Show progress; raise if another rank has failed, or the interpreter ends and the save is abandoned then."""
    handle._tell()
    check()
    if handle._is_given_up and not handle._is_staged.is_set():
        raise CheckpointError("the save was abandoned, because async_save was interrupted before it copied all")
    if options.at_exit == "abandon" and interpreter_ends():
        raise CheckpointError("the save was abandoned, because the interpreter ended and at_exit is 'abandon'")


class _Files:
    """A snapshot that is laid out as the files which are written from it.

    ``keys`` has the key of each of ``copies``; ``digests`` takes those of the blocks, by their place.
    """

    def __init__(self, save: BackgroundSave, storage: ImageStorage, plan: SavePlan) -> None:
        self._save = save
        self._storage = storage
        self._staged = storage.lay_out(plan, save.saving.planner, save.saving.prepared)
        self.is_shared = save.in_process
        if self.is_shared:
            storage.check_for_process()
        self.nbytes = self._staged.image.nbytes
        self.copies = self._staged.image.copies
        self.digests: dict[int, int] | None = self._staged.image.known
        self.numbers = None if self._staged.work.numbers is None else self._staged.work
        in_host = (copy for copy in (self.copies if self.numbers else ()) if not CUDA.holds(copy.source))
        self._in_host = [(copy.number, copy.at, copy.source.nbytes) for copy in in_host]

    @property
    def keys(self) -> list[str]:
        return self._staged.work.keys

    def writing_from(self, region: Region) -> Callable[[], Results]:
        """What writes the snapshot, once ``region`` holds it."""
        if self.is_shared:
            TURNS.writer_process().prepare(region)  # now: an interpreter that shuts down starts no process
        return partial(self._write, region)

    def _write(self, region: Region) -> Results:
        for number, at, nbytes in self._in_host:  # the copy, because nobody waits for this
            self._staged.work.look_at(number, MemorySource(region, region.address + at, nbytes))
        self._staged.image.fill_frames(region.view)
        output = self._storage.image_output(self._save.written)
        if self.is_shared:
            process = TURNS.writer_process()
            process.prepare(region)  # again: it may have died
            output = ProcessOutput(process, self._save.written)
        return self._storage.write_staged(self._staged, region.view, output)

    def live(self, options: SaveOptions, saving: Saving) -> Live | None:
        """What has the state written as it is now, from where it is, if all of it is in host memory."""
        if any(CUDA.holds(copy.source) for copy in self.copies):
            return None
        held = [key in saving.owners.buffers or is_named(key, options.copy_now) for key in self.keys]
        return Live(self._staged.chunks, held, proves=options.prove, progress=saving.prepared)

    def stream(self, max_bytes: int, proof: Proof) -> Results:
        """Copy and write in turns, through as many buffers as the bound allows."""
        end = self._save.end_copying
        return self._storage.stream_staged(self._staged, max_bytes, on_copied=end, proof=proof)

    def forget_sources(self) -> None:
        self._staged.forget_sources()


class _Items:
    """A snapshot of what somebody else's storage asks a planner for, item by item."""

    is_shared = False
    digests: dict[int, int] | None = None
    numbers: WriterFiles | None = None
    live = staticmethod(lambda *_: None)  # how long a storage goes on to ask, nobody knows

    def __init__(self, save: BackgroundSave, plan: SavePlan) -> None:
        self._save = save
        self._plan = plan
        self.nbytes = 0
        self._data: list[tuple[torch.Tensor | io.BytesIO, int]] = []
        self.copies: list[Copy] = []
        columns = write_columns(plan.items)
        for row in range(len(columns)):
            data = save.saving.planner.resolve_row(columns, row)
            self._data.append((data, self.nbytes))
            if isinstance(data, torch.Tensor):
                size = data.numel() * data.dtype.itemsize
                if not data.is_quantized:
                    source = source_of(data, is_ordered=True)
                    self.copies.append(Copy(columns.keys[columns.key[row]], source, self.nbytes))
                self.nbytes += aligned(size)
                save.saving.prepared.moved(size)

    @property
    def keys(self) -> list[str]:
        return [copy.name for copy in self.copies]

    def writing_from(self, region: Region) -> Callable[[], Results]:
        """What writes the snapshot, once ``region`` holds it."""
        planner = CopiedPlanner(self._plan, self._data, region)
        return lambda: self._save.saving.writer.write_data(self._plan, planner).wait()

    def stream(self, max_bytes: int, proof: Proof) -> Results:
        """Have the storage ask for the state itself, while the caller waits; how much it holds, nobody knows."""
        self.forget_sources()
        saving = self._save.saving
        results = saving.writer.write_data(self._plan, saving.planner).wait()
        self._save.end_copying()
        return results

    def forget_sources(self) -> None:
        self._data.clear()
        self.copies.clear()


class BackgroundThread:
    """The thread of a save, and what the caller holds until the thread has its work; without that all is given back.

    Enter its block twice: an interrupt may come into the one end, and then there is the other.
    """

    def __init__(self, handle: AsyncSave, ranks: Ranks) -> None:
        self._handle = handle
        self._ranks = ranks
        self._is_inside = self._is_started = False
        self._pause = CollectorPause()
        self._to_do: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._given: list[None] = []
        self.writer: StorageWriter | None = None
        self.operation: events.Operation | None = None

    def __enter__(self) -> None:
        return None

    def begin(self) -> None:
        """Start the thread, which waits for its work, and enter what does not depend on the save.

        Now, because starting one takes as long as it takes another thread to give the interpreter back.
        """
        if not interpreter_ends():
            # No daemon: the interpreter is to wait for it.
            start_thread(threading.Thread(target=_do_first, args=(self._to_do,), name="holdfast-save", daemon=False))
            self._is_started = True
        self._pause.__enter__()
        self._ranks.__enter__()
        self._is_inside = True

    def run(self, save: BackgroundSave, state: State, stager: AsyncStager | None) -> None:
        """Begin ``save`` here and have the thread do the rest; returns when the caller may go on."""
        self.writer = writer = save.saving.writer
        prepared, handle = save.saving.prepared, self._handle
        count = lambda: TURNS.bytes_done + prepared.done  # noqa: E731 - one of three
        self._ranks.follow(count, lambda: writer.file_at_work, lambda: handle.bytes_total)
        begun = save.begin(state, stager)
        is_apart = save.saving.ranks is not self._ranks
        self.start(partial(_run_apart, self._ranks, begun.run) if is_apart else begun.run)
        begun.wait()

    def start(self, run: Callable[[], Metadata]) -> None:
        """Have ``run`` done; all that this holds is the thread's from now on."""
        # Given and noted in one step of the interpreter: no interrupt comes between.
        self._given.extend(map(self._to_do.put, (partial(self._work, run),)))
        if not self._is_started:
            _do_first(self._to_do)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._given:
            # The caller may go on with the training, and has no handle to wait for.
            self._handle._is_given_up = self._handle._is_given_up or error is not None
            return
        self._to_do.put(None)
        TURNS.end(self._handle, is_begun=False)
        self._pause.end()
        self._abandon()
        self._forget_progress()
        if self._is_inside:
            self._ranks.__exit__(kind, error, trace)
            self._is_inside = False

    def _abandon(self) -> None:
        if self.writer is not None:
            self.writer.abandon()

    def _forget_progress(self) -> None:
        if self.writer is not None:
            self.writer.progress = Progress()  # the storage may live on, and is not to keep handle and ranks

    def _work(self, run: Callable[[], Metadata]) -> None:
        handle = self._handle
        try:
            with contextlib.ExitStack() as stack, handle._working():
                if self.operation is not None:
                    stack.enter_context(self.operation)
                stack.callback(self._forget_progress)
                stack.push(self._ranks)  # which the caller has entered
                stack.push(lambda kind, error, trace: None if error is None else self._abandon())
                # Only here: what the collector then has to look at need not keep the caller waiting.
                self._pause.end()
                metadata = run()
                if self.writer is not None:
                    self.writer.conclude()
        except BaseException as error:
            TURNS.end(handle)
            handle._fail(error)
        else:
            TURNS.end(handle)
            handle._succeed(metadata)


def _run_apart(ranks: Ranks, run: Callable[[], Metadata]) -> Metadata:
    """What ``run`` returns, once each of ``ranks`` has saved its part apart from the others."""
    found: list[Metadata] = []
    ranks.all_reduce("saving apart from each other", lambda: found.append(run()), lambda done: None)
    return found[0]


def _do_first(to_do: SimpleQueue[Callable[[], None] | None]) -> None:
    work = to_do.get()
    if work is not None:
        work()
