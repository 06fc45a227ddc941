"""The native storage writer: items to data files, reports to an index, the index to a published manifest."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import platform
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from functools import partial
from operator import attrgetter

import torch
from torch.futures import Future

from holdfast._io import posix
from holdfast._io.direct import lies_in_memory
from holdfast._io.mapping import ImageFiles
from holdfast._io.pipeline import cores_each, ranks_of_host
from holdfast._io.slabs import uses_cuda
from holdfast._io.stores import store_of
from holdfast._io.urls import is_store_url
from holdfast._native.file_layout import Image, StagedFiles, WriterFiles, encode_leaf, files_to_write
from holdfast._native.manifest import WriterEntry
from holdfast._native.merge import merge_reports
from holdfast._native.packer import Lane, Packer, slabs_for
from holdfast._native.paths import RESERVED_NAMES, check_key, encode_path, with_planner_data
from holdfast._native.place import ChunkOutput, Files, ImageOutput, MakesPacker, SavePlace
from holdfast._native.publish import WriterNumber, check_unpublished, is_published, publish
from holdfast._native.report import WriteReport, WrittenFile, report_of
from holdfast._native.store_place import StorePlace
from holdfast._native.values import encode_value
from holdfast._process import forget_in_child
from holdfast._state.nested import TypedKey, path_mapping
from holdfast._state.numbers import PieceNumbers
from holdfast._torch_classes.adapt import final_save_plan, is_torchs
from holdfast._torch_classes.translate import metadata_from_torch, save_plan_from_torch
from holdfast._torch_codec.pickles import serialize_object
from holdfast._values.deadline import Progress
from holdfast._values.lazy import LazyList
from holdfast._version import __version__
from holdfast.errors import InternalError, InvalidStateError, StorageError
from holdfast.metadata import Containers, Metadata, StorageMeta, Versions
from holdfast.planner import SavePlan, SavePlanner, write_columns
from holdfast.storage import StorageWriter, ValueBuffer, WriteResult

logger = logging.getLogger("holdfast")

# How many attempts that failed a coordinator tells of; whoever missed so many leaves them to a sweep.
_MOST_FAILED = 8

# Files to which one rank writes at once, and what each of them is to have at least.
_MOST_FILES = 4
_LEAST_FILE_BYTES = 64 << 20


class DirectoryPlace:
    """A directory of a file system."""

    packer: MakesPacker = Packer
    images: Callable[[Progress], ImageOutput] = ImageFiles
    missing_directories = staticmethod(posix.missing_directories)
    make = staticmethod(posix.make_directories)
    sync = staticmethod(posix.sync_directory)
    is_in_memory = staticmethod(lies_in_memory)
    publish = staticmethod(publish)

    def begin(self, path: str, *, overwrite: bool) -> None:
        if not overwrite:
            check_unpublished(path)

    def rename(self, path: str, name: str, new_name: str) -> None:
        posix.replace(os.path.join(path, name), os.path.join(path, new_name))

    def remove(self, path: str, attempt: str, names: Iterable[str]) -> None:
        if is_published(path, attempt) is False:
            for name in names:
                with contextlib.suppress(StorageError):
                    posix.remove(os.path.join(path, name))

    def clear(self, path: str, attempt: str | None, directories: Sequence[str]) -> None:
        posix.remove_empty_directories(directories)


class Held:
    """The files of one attempt, open and locked, which tells others that their writer lives.

    They are let go when ``writer`` is gone, which tells of a failure where nobody else does; ``removing`` is for the
    coordinator, who knows that it did not publish, as others cannot. They are nothing to a forked child, whatever
    becomes of the child's copies of writer and finalizer.
    """

    def __init__(self, files: Files, path: str, attempt: str, *, writer: object, removing: bool) -> None:
        self.files = files
        self.attempt = attempt
        self._path = path
        self._is_closed = False
        self._is_inherited = False
        forget_in_child(self)
        self._when_forgotten = weakref.finalize(writer, self.remove if removing else self.close)

    def forget_parent(self) -> None:
        self._is_inherited = True

    def close(self) -> None:
        self._when_forgotten.detach()
        self._is_closed = True
        if not self._is_inherited:
            self.files.close()

    def remove(self) -> None:
        """Remove the files, unless they are let go already or part of what is published."""
        if not self._is_closed and not self._is_inherited and is_published(self._path, self.attempt) is False:
            self.files.abandon()
        self.close()


class NativeWriter(StorageWriter):
    """Writes a checkpoint in the native format to the directory ``path``.

    ``overwrite=False`` refuses to replace a published checkpoint; otherwise it is replaced atomically. ``attempt`` is
    the id in the names of this save's files (a random one by default). ``allow_pickle`` stores values that have no
    typed form as pickles, which only readers that allow it too will load. ``user_metadata`` is kept in the manifest.
    ``statistics`` keeps numbers of every tensor, and ``max_host_bytes`` bounds the buffers, as in SaveOptions.
    """

    keeps_empty_dicts = True
    leaves_marker = False
    """Whether programs that look for torch's ``.metadata`` are to find the checkpoint."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        attempt: str | None = None,
        allow_pickle: bool = False,
        user_metadata: Mapping[str, object] | None = None,
        statistics: bool = False,
        max_host_bytes: int | None = None,
    ) -> None:
        self.path = posix.absolute(path)
        self._place: SavePlace = StorePlace() if "://" in self.path else DirectoryPlace()
        self.overwrite = overwrite
        self.allow_pickle = allow_pickle
        self.statistics = statistics
        self._max_host_bytes = max_host_bytes
        if user_metadata is not None and not isinstance(user_metadata, Mapping):
            raise ValueError(f"user_metadata is a dict, not {user_metadata!r}")
        self.user_metadata = dict(user_metadata or {})
        self._given_attempt = attempt
        self._attempt = attempt or secrets.token_hex(8)
        self.is_coordinator = True
        self._unfinished: str | None = None
        self._failed: tuple[str, ...] = ()
        self._held: Held | None = None
        self._not_there: Sequence[str] = ()
        self._writers = 1

    @property
    def file_at_work(self) -> str:  # type: ignore[override]
        """The file of the checkpoint that is being written."""
        return posix.file_at_work(self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new attempt, at ``checkpoint_id`` when it is given."""
        self._begin_attempt()
        if checkpoint_id is not None:
            self.path = posix.absolute(checkpoint_id)
            self._place = StorePlace() if "://" in self.path else DirectoryPlace()

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.path, save_id=self._attempt)

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Refuse early what could not be published; nothing is on disk before something is written."""
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "a native checkpoint is planned by all ranks together; leave use_collectives at True, "
                "or use FileSystemWriter"
            )
        self.is_coordinator = is_coordinator
        self._begin_attempt()
        self._not_there = ()
        if is_coordinator:
            self._place.begin(self.path, overwrite=self.overwrite)
        for name in RESERVED_NAMES:
            if name in self.user_metadata:
                raise InvalidStateError(f"the name {name!r} in user_metadata is reserved; use another")
        encode_value(self.user_metadata, key="user_metadata")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """``plan``, unchanged; InvalidStateError for a key that no manifest can hold, before anything is written."""
        paths = path_mapping(plan.planner_data) or {}
        ours = save_plan_from_torch(plan) if is_torchs(plan) else plan
        for key in write_columns(ours.items).keys:
            check_key(key)
            path = paths.get(key, ())
            for element in path:
                if type(element) is TypedKey:
                    encode_path(key, path)
        return plan

    def check_value(self, key: str, value: object) -> None:
        encode_leaf(key, ValueBuffer(value, partial(serialize_object, key=key)), allow_pickle=self.allow_pickle)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, each with the attempt and the number of its writer."""
        self._unfinished = self._attempt
        # By now every rank has cleaned up after the save before, and none has begun to write.
        number = partial(WriterNumber, failed=self._failed, not_there=tuple(self._place.missing_directories(self.path)))
        return [
            dataclasses.replace(plan, storage_data=number(attempt=self._attempt, writer=writer, writers=len(plans)))
            for writer, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[MutableSequence[WriteResult]]:
        """Write the tensors of ``plan`` to data files of this writer, durably; values are encoded before that."""
        work = self._work(plan, planner)
        done: Future[MutableSequence[WriteResult]] = Future()
        self.progress.total = work.planned_bytes
        slabs = slabs_for(work.planned_bytes, self._max_host_bytes)
        output = self._place.packer(slabs=slabs, pinned=uses_cuda(), progress=self.progress)
        lanes, files = [Lane(0, work.chunks())], min(_MOST_FILES, work.planned_bytes // _LEAST_FILE_BYTES)
        there = os.path.dirname(min(self._not_there, key=len)) if self._not_there else self.path
        if files > 1 and self._place.is_in_memory(there):
            # Where only one thread at a time may write to a file, several are.
            sharers = min(self._writers, ranks_of_host(otherwise=self._writers))
            lanes = work.lanes(min(files, cores_each(2 * sharers)))
        for lane in lanes if work.numbers is not None else ():
            lane.chunks = work.looked_at(lane.chunks, lane.start)
        write = partial(output.write, lanes, work.next_file)
        done.set_result(self._written(work, output, output, write))
        return done

    def lay_out(self, plan: SavePlan, planner: SavePlanner, progress: Progress) -> StagedFiles:
        """The files of ``plan``, laid out and not yet written: values are encoded, tensors still to be copied.

        Whoever copies them sees to it that they are copied after what the caller's streams have queued. ``progress``
        is told of the bytes of each chunk that has its place.
        """
        work = self._work(plan, planner, is_ordered=True)
        chunks = []
        for chunk in work.chunks():
            chunks.append(chunk)
            progress.moved(chunk.source.nbytes)
        return StagedFiles(work, chunks, Image(work.next_file, chunks))

    def stream_staged(
        self, staged: StagedFiles, max_bytes: int, on_copied: Callable[[], None], proof: Callable[[list[int]], None]
    ) -> MutableSequence[WriteResult]:
        """Copy and write what ``lay_out`` laid out, through ``max_bytes`` of buffers.

        ``on_copied`` is called in between, and ``proof`` with the digests of all blocks, in order.
        """
        slabs = slabs_for(staged.work.planned_bytes, max_bytes)
        output = self._place.packer(slabs=slabs, on_filled=on_copied, pinned=uses_cuda(), progress=self.progress)
        work = staged.work
        chunks = staged.chunks if work.numbers is None else work.looked_at(staged.chunks)

        def write() -> list[WrittenFile]:
            written = output.write([Lane(0, chunks)], work.next_file)
            proof(output.digests)
            return written

        return self._written(work, output, output, write)

    def image_output(self, progress: Progress) -> ImageOutput:
        """What writes files from memory in this process."""
        return self._place.images(progress)

    def check_for_process(self) -> None:
        """InvalidStateError where another process cannot write."""
        if is_store_url(self.path):
            assert store_of(self.path).settings

    def write_staged(self, staged: StagedFiles, memory: memoryview, files: ImageOutput) -> MutableSequence[WriteResult]:
        """Write what ``lay_out`` laid out and ``memory`` holds by now, by means of ``files``, durably."""
        image = staged.image
        return self._written(staged.work, image, files, lambda: image.written(files.write(image.files, memory)))

    def _work(self, plan: SavePlan, planner: SavePlanner, *, is_ordered: bool = False) -> WriterFiles:
        """What there is to write for the attempt that the plan names; what failed before is removed."""
        plan, planner = final_save_plan(plan, planner)
        number = plan.storage_data
        if not isinstance(number, WriterNumber):
            raise InternalError("the plan did not pass through prepare_global_plan of native storage")
        if self._held is not None and self._held.attempt in number.failed:
            self._held.remove()
        self.close()
        if number.is_spent:
            # Nobody could tell this rank the attempt; finish gives its files the names that they should have.
            not_there = tuple(self._place.missing_directories(self.path))
            attempt = secrets.token_hex(8)
            number = dataclasses.replace(number, attempt=attempt, failed=(), not_there=not_there)
        else:
            self._attempt = number.attempt
        self._not_there, self._writers = number.not_there, number.writers
        number.is_spent = True
        path = os.path.join(self.path, f"data-{number.attempt}-{number.writer}")
        work = files_to_write(plan, planner, path=path, allow_pickle=self.allow_pickle, is_ordered=is_ordered)
        work.numbers = PieceNumbers() if self.statistics else None
        return work

    def _written(
        self, work: WriterFiles, places: ChunkOutput | Image, files: Files, write: Callable[[], list[WrittenFile]]
    ) -> MutableSequence[WriteResult]:
        """What ``write`` wrote; ``files`` are held from here on, and removed if it fails."""
        self._held = Held(files, self.path, self._attempt, writer=self, removing=self.is_coordinator)
        try:
            self._place.make(self.path)
            written = write()
        except BaseException:
            self.abandon()
            raise
        begun = time.monotonic()
        if written:
            self._place.sync(self.path)
        self.progress.sync_s += time.monotonic() - begun
        self.progress.done = sum(map(attrgetter("bytes"), written))  # by the byte, headers too
        return LazyList(work.report(written, places.placed, places.digests))

    def finish(self, metadata: Metadata, results: list[MutableSequence[WriteResult]]) -> None:
        """Check what was written against ``metadata``, write the index, publish the manifest; or remove all of it."""
        reports = [self._named(report_of(result), writer) for writer, result in enumerate(results)]
        versions: Versions = {}
        containers: Containers = {}
        for report in reversed(reports):  # of what is on several ranks, what the first of them says
            containers.update(report.containers)
            for key, modules in report.versions.items():
                versions.setdefault(key, {}).update(modules)
        if self.statistics and any(report.numbers is None for report in reports):
            logger.warning("no statistics are kept at %r, because somebody took the results of ranks apart", self.path)
        ours = metadata_from_torch(metadata) if is_torchs(metadata) else metadata
        writer = WriterEntry(
            holdfast=__version__,
            torch=str(torch.__version__),
            python=platform.python_version(),
            world_size=len(reports),
            saved_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        try:
            manifest, tables = merge_reports(
                ours,
                reports,
                attempt=self._attempt,
                writer=writer,
                user_metadata=with_planner_data(self.user_metadata, ours, versions, containers),
            )
            self._place.publish(self.path, manifest, tables, overwrite=self.overwrite, marks=self.leaves_marker)
        except BaseException:
            self._place.remove(self.path, self._attempt, [file.name for report in reports for file in report.files])
            self.abandon()
            raise
        self._unfinished = None
        self.close()

    def abandon(self) -> None:
        """Remove the files of a save that failed and directories made for it, unless it failed once published."""
        if self._held is not None:
            self._held.remove()
        self.close()
        self._place.clear(self.path, self._unfinished, self._not_there)
        self._unfinished = None

    def _named(self, report: WriteReport, writer: int) -> WriteReport:
        """``report``, its files under names of this attempt: those of a rank that did not know it are renamed."""
        prefix = f"data-{self._attempt}-"
        for number, file in enumerate(report.files):
            if not file.name.startswith(prefix):
                name = f"{prefix}{writer}-{number}.safetensors"
                self._place.rename(self.path, file.name, name)
                files = list(report.files)
                files[number] = dataclasses.replace(file, name=name)
                report = dataclasses.replace(report, files=files)
        return report

    def _begin_attempt(self) -> None:
        """Have a new attempt; the coordinator, who alone knows how the last one ended, removes what it left."""
        if self._unfinished is not None:
            if is_published(self.path, self._unfinished) is False:
                self._failed = (*self._failed, self._unfinished)[-_MOST_FAILED:]
            self.abandon()
        self._attempt = self._given_attempt or secrets.token_hex(8)

    def close(self) -> None:
        """Close the files of a save that is over, which ends the sign that their writer lives."""
        if self._held is not None:
            self._held.close()
        self._held = None  # only now: whoever is interrupted before closes them again

    conclude = close

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_held": None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id) or is_store_url(checkpoint_id)
