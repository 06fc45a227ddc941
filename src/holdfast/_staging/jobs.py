"""The three ways of a save in the background: native files, somebody else's storage, somebody else's stager.

A job has two halves. ``begin`` runs on the calling thread: it plans with the other ranks and takes the snapshot, or as
much of it as the way of staging wants. ``run`` runs in the background and ends with a published checkpoint.
"""

from __future__ import annotations

import abc
import concurrent.futures
import io
import logging
from collections.abc import Callable, Collection, Mapping, MutableSequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch

from holdfast._engine.images import ImageFiles
from holdfast._io.slabs import SLAB_BYTES
from holdfast._native.file_layout import Copy, StagedFiles
from holdfast._native.report import report_of
from holdfast._native.writer import ImageOutput, NativeWriter
from holdfast._staging.copies import Changes, Fingerprints, Mode, Staging
from holdfast._staging.memory import CUDA, Accelerator, Region
from holdfast._staging.one_at_a_time import TURNS, AsyncSave, interpreter_ends
from holdfast._state.tensor_bytes import source_of
from holdfast.errors import CheckpointError
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan, SavePlanner, WriteColumns, WriteItem, write_columns
from holdfast.staging import AsyncStager
from holdfast.storage import StorageWriter, WriteResult

logger = logging.getLogger("holdfast")

Part = TypeVar("Part")

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a save in the background is to be done, apart from what is saved and where."""

    stage: Mode = "copy"
    copy_now: tuple[str, ...] = ()
    max_host_bytes: int | None = None
    when_busy: Literal["wait", "raise"] = "wait"
    at_exit: Literal["finish", "abandon"] = "finish"
    prove: bool = False
    in_process: bool = False
    accelerator: Accelerator = CUDA


class Steps(Protocol):
    """The steps of a save that all ranks take together."""

    writer: StorageWriter
    planner: SavePlanner

    def plan(self, state: Mapping[Any, Any], *, before: Callable[[], None] = lambda: None) -> SavePlan:
        """What this rank is to write."""
        ...

    def expose(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """The state of the objects in ``state``."""
        ...

    def prepare(self, phase: str, prepare: Callable[[], Part]) -> Part:
        """What ``prepare`` returns, which this rank needs to write; what goes wrong there is raised on every rank."""
        ...

    def advance(self, nbytes: int) -> None:
        """Show the others that ``nbytes`` more are prepared; raise what another has failed with. Any thread."""
        ...

    def check(self) -> None:
        """Raise what another rank has failed with, if one has; any thread."""
        ...

    def write(self, write: Callable[[], MutableSequence[WriteResult]]) -> Metadata:
        """The metadata of the checkpoint, published once ``write`` has returned on every rank."""
        ...


CHANGES = Changes()
"""What this process wrote last."""


class Job(abc.ABC):
    """What all ways have in common.

    ``is_streaming`` after ``begin`` says that the caller has to wait until the background has copied the state.
    ``chosen`` finds the keys whose tensors should have changed since the save before.
    """

    is_streaming = False
    chosen: Callable[[], Collection[str]] = list

    def __init__(self, steps: Steps, handle: AsyncSave, options: Options) -> None:
        self._steps = steps
        self._handle = handle
        self._options = options
        self._staging: Staging | None = None

    @abc.abstractmethod
    def begin(self, state: Mapping[Any, Any]) -> None:
        """The half that the caller waits for."""

    @abc.abstractmethod
    def run(self) -> Metadata:
        """The half in the background."""

    def cancel(self) -> None:
        """Let nobody wait for copies that will not come."""
        if self._staging is not None:
            self._staging.cancel()

    def _take_turn(self) -> None:
        TURNS.take(self._handle, wait=self._options.when_busy == "wait")
        TURNS.raise_unobserved()

    def _check(self) -> None:
        """Show progress; raise if another rank has failed, or the interpreter ends and the save is abandoned then."""
        self._handle.tell()
        self._steps.check()
        if self._handle.is_given_up and not self._handle.is_staged.is_set():
            raise CheckpointError("the save was given up, because async_save was interrupted before all was copied")
        if self._options.at_exit == "abandon" and interpreter_ends():
            raise CheckpointError("the save was abandoned, because the interpreter ended and at_exit is 'abandon'")

    def _end_copying(self) -> None:
        """Let the state be changed; what was copied after the caller was interrupted may be changed already."""
        self._check()
        self._handle.enter("staged")

    def _at_once(self, keys: Collection[str]) -> set[str]:
        """Those of ``keys`` that the user named, or a part of whose path they named."""
        wanted = self._options.copy_now
        return {key for key in keys if any(key == name or key.startswith(f"{name}.") for name in wanted)}

    def _stage(
        self, copies: list[Copy], region: Region, at_once: Collection[str], digests: dict[int, int] | None = None
    ) -> None:
        """Begin to copy; the handle knows how to protect what is left for later."""
        options, handle = self._options, self._handle
        handle.enter("staging")
        self._staging = Staging(
            copies,
            region,
            mode=options.stage,
            accelerator=options.accelerator,
            at_once=at_once,
            advance=self._steps.advance,
            digests=digests,
        )
        self._staging.begin()
        handle.guard_with(self._staging.fence)
        if self._staging.is_done:
            handle.enter("staged")


class PlannedJob(Job):
    """What the two that plan before they stage have in common."""

    def begin(self, state: Mapping[Any, Any]) -> None:
        """Plan, lay out, and copy what the way of staging does not leave for later."""
        steps = self._steps
        plan = steps.plan(state, before=self._take_turn)
        steps.prepare("laying out the state", lambda: self._lay_out(steps.planner.finish_plan(plan)))
        steps.prepare("staging the state", self._begin_staging)

    @abc.abstractmethod
    def _lay_out(self, plan: SavePlan) -> None:
        """Ask the planner for all data, and give each its place."""

    @abc.abstractmethod
    def _begin_staging(self) -> None:
        """Copy it; a state over the bound is copied later, while the caller waits."""


class NativeJob(PlannedJob):
    """Native files: laid out before they are copied, written from where they were copied to."""

    def __init__(self, steps: Steps, handle: AsyncSave, options: Options, writer: NativeWriter) -> None:
        super().__init__(steps, handle, options)
        self._writer = writer
        self._staged: StagedFiles | None = None
        self._region: Region | None = None
        self._fingerprints: Fingerprints | None = None

    def _lay_out(self, plan: SavePlan) -> None:
        self._staged = self._writer.lay_out(plan, self._steps.planner, advance=self._steps.advance)

    def _begin_staging(self) -> None:
        staged, options = self._staged, self._options
        assert staged is not None
        image = staged.image
        self._handle.expect(image.nbytes, lambda: self._writer.bytes_written)
        if options.max_host_bytes is not None and image.nbytes > options.max_host_bytes:
            self.is_streaming = True
            options.accelerator.drain(image.copies)
            self._handle.enter("staging")
            return
        self._region = TURNS.memory.region(image.nbytes, is_shared=options.in_process)
        if options.in_process:
            TURNS.writer_process().prepare(self._region)  # now: an interpreter that shuts down starts no process
        if options.prove:
            self._fingerprints = Fingerprints(image.copies)
        at_once = self._at_once(staged.work.keys) if options.copy_now else ()
        names = {copy.name for key, copy in zip(staged.work.keys, image.copies, strict=True) if key in at_once}
        self._stage(image.copies, self._region, names, image.known)

    def run(self) -> Metadata:
        """Copy what is left, write, publish."""
        metadata = self._steps.write(self._stream if self.is_streaming else self._write)
        self._writer.close()
        return metadata

    def _write(self) -> MutableSequence[WriteResult]:
        staged, region = self._staged, self._region
        assert staged is not None
        assert region is not None
        assert self._staging is not None
        self._staging.finish()
        staged.forget_sources()
        self._end_copying()
        staged.image.fill_frames(region.view)
        self._handle.enter("writing")
        results = self._writer.write_staged(staged, region.view, self._output(region))
        if self._fingerprints is not None:
            self._fingerprints.compare(region)
        self._look_for_changes(results)
        return results

    def _output(self, region: Region) -> ImageOutput:
        if not self._options.in_process:
            return ImageFiles(check=self._check)
        process = TURNS.writer_process()
        process.prepare(region)
        return process.output(self._check)

    def _stream(self) -> MutableSequence[WriteResult]:
        """Copy and write in turns, through as many buffers as the bound allows; the caller waits for the copying."""
        assert self._staged is not None
        assert self._options.max_host_bytes is not None
        results = self._writer.stream_staged(
            self._staged,
            slabs=self._options.max_host_bytes // SLAB_BYTES,
            check=self._check,
            on_copied=self._end_copying,
        )
        self._staged.forget_sources()
        self._look_for_changes(results)
        return results

    def _look_for_changes(self, results: MutableSequence[WriteResult]) -> None:
        same = CHANGES.unchanged(report_of(results), self.chosen())
        self._handle.unchanged = same
        if same:
            logger.warning(
                "%d tensors that are being trained are just as they were at the save before (%s); if steps were taken "
                "in between, the state that is saved is not the one that is trained",
                len(same),
                ", ".join(same[:3]),
            )


class ForeignJob(PlannedJob):
    """Somebody's storage: it is given, in the background, a planner whose data has been copied."""

    def __init__(self, steps: Steps, handle: AsyncSave, options: Options) -> None:
        super().__init__(steps, handle, options)
        self._plan_to_write: SavePlan | None = None
        self._planner: SavePlanner = steps.planner
        self._data: list[torch.Tensor | io.BytesIO] = []
        self._sizes: list[int] = []

    def _lay_out(self, plan: SavePlan) -> None:
        self._plan_to_write, columns = plan, write_columns(plan.items)
        for row in range(len(columns)):
            each = self._steps.planner.resolve_row(columns, row)
            self._data.append(each)
            self._sizes.append(each.numel() * each.dtype.itemsize if isinstance(each, torch.Tensor) else 0)
            self._steps.advance(self._sizes[-1])

    def _begin_staging(self) -> None:
        assert self._plan_to_write is not None
        columns = write_columns(self._plan_to_write.items)
        data, self._data = self._data, []
        places, end = [], 0
        for size in self._sizes:
            places.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._handle.expect(sum(self._sizes), lambda: self._steps.writer.bytes_written)
        if self._options.max_host_bytes is not None and end > self._options.max_host_bytes:
            self.is_streaming = True
            self._handle.enter("staging")
            return
        region = TURNS.memory.region(end, is_shared=False)
        copies = [
            Copy(columns.keys[columns.key[row]], source_of(tensor, is_ordered=True), at)
            for row, (tensor, at) in enumerate(zip(data, places, strict=True))
            if isinstance(tensor, torch.Tensor) and not tensor.is_quantized
        ]
        kept = [_kept(each, region, at) for each, at in zip(data, places, strict=True)]
        self._planner = _CopiedPlanner(self._steps.planner, columns, kept)
        self._stage(copies, region, self._at_once({copy.name for copy in copies}))

    def run(self) -> Metadata:
        """Copy what is left, let the storage write and publish."""

        def write() -> MutableSequence[WriteResult]:
            assert self._plan_to_write is not None
            if self._staging is not None:
                self._staging.finish()
                self._end_copying()
            self._handle.enter("writing")
            results = self._steps.writer.write_data(self._plan_to_write, self._planner).wait()
            if self.is_streaming:
                self._end_copying()
            return results

        return self._steps.write(write)


def _kept(data: torch.Tensor | io.BytesIO, region: Region, at: int) -> torch.Tensor | io.BytesIO:
    """What the storage gets: a tensor in ``region``, or the bytes as they are now."""
    if not isinstance(data, torch.Tensor):
        return io.BytesIO(data.getvalue())
    if data.is_quantized:
        return data.detach().cpu().clone()
    return region.tensor_at(at, data.dtype, data.shape)


class _CopiedPlanner(SavePlanner):
    """A planner that has been asked for everything already."""

    def __init__(self, planner: SavePlanner, columns: WriteColumns, data: list[torch.Tensor | io.BytesIO]) -> None:
        self._planner = planner
        self._data = {columns.item(row).index: each for row, each in enumerate(data)}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """As the planner behind it."""
        self._planner.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """As the planner behind it."""
        return self._planner.create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As the planner behind it."""
        return self._planner.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As the planner behind it."""
        return self._planner.finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """What the planner gave for ``write_item`` when the save was called."""
        data = self._data[write_item.index]
        if isinstance(data, io.BytesIO):
            data.seek(0)
        return data


class StagerJob(Job):
    """Somebody's stager: the whole state is theirs to copy, and what they give back is saved in the background."""

    def __init__(self, steps: Steps, handle: AsyncSave, options: Options, stager: AsyncStager) -> None:
        super().__init__(steps, handle, options)
        self.stager = stager
        self._staged: Any = None
        # It cannot show progress; an error that others give it up with tells whose work it was.
        self._phase = f"staging the state with {type(stager).__name__}"

    @property
    def is_staged(self) -> bool:
        """Whether the stager was done when it returned."""
        return not isinstance(self._staged, Future)

    def begin(self, state: Mapping[Any, Any]) -> None:
        """Have the state staged, once the buffers of the stager are free."""
        self._steps.prepare(self._phase, lambda: self._begin_staging(state))

    def _begin_staging(self, state: Mapping[Any, Any]) -> None:
        self._take_turn()
        self._handle.enter("staging")
        self._staged = self.stager.stage(self._steps.expose(state))
        if self.is_staged:
            self._handle.enter("staged")
        else:
            self._handle.guard_with(self._wait)

    def _wait(self) -> None:
        concurrent.futures.wait([self._staged])

    def _end_staging(self) -> Any:
        state = self._staged if self.is_staged else self._staged.result()
        self._end_copying()
        return state

    def run(self) -> Metadata:
        """Wait for the stager, then save what it staged like any state."""
        steps = self._steps
        state = steps.prepare(self._phase, self._end_staging)
        plan = steps.plan(state)

        def write() -> MutableSequence[WriteResult]:
            self._handle.enter("writing")
            return steps.writer.write_data(steps.planner.finish_plan(plan), steps.planner).wait()

        return steps.write(write)
