"""Segments of files into their targets: the read engine.

Segments in file order are coalesced into jobs of at most 8 MiB. Threads read ahead into slabs, and the calling one
verifies and delivers, or, where there are cores for it, others do so: one more whenever a full slab waits for those
that there are. For a GPU, and where files are in memory, jobs are as large as a slab and each thread does all of one;
from memory, what goes to one place as it is comes without a slab. What a segment must be to pass, and where files come
from, is for the format that subclasses ``SegmentFetch`` to say.
"""

from __future__ import annotations

import abc
import itertools
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from holdfast._io.direct import ALIGNMENT, LocalFiles
from holdfast._io.files import FileToRead
from holdfast._io.pipeline import cores_each, default_workers, run_ahead, run_bounded
from holdfast._io.slabs import SLAB_BYTES, Slab, SlabRing, slab_over, uses_cuda
from holdfast._plan.reads import coalesce
from holdfast._state.tensor_bytes import move
from holdfast._state.tensors import cuda_stream
from holdfast._values.deadline import Progress
from holdfast._values.digest import BLOCK_BYTES
from holdfast.errors import CorruptError

# A read of so many bytes stays in the processor's caches from its digest to its copy. For a GPU the number of copies
# matters more.
HOT_BYTES = 8 << 20

# A segment is at most so large: with the rest of its first and of its last page it is read at once.
MOST_SEGMENT_BYTES = HOT_BYTES - 2 * ALIGNMENT

# Slabs of so many bytes together have left the caches of the processor that emptied them when the disk fills them
# again. Where they had not, reads were up to four times slower, depending on which processor did the disk's work.
COLD_BYTES = 96 << 20

# From the page cache more than these only take the processor from the one that delivers.
_CACHED_READERS = 2

# From memory into a GPU: threads, and bytes of pinned slabs for them.
_MOST_CUDA_WORKERS = 16
_PINNED_BYTES = 128 << 20

# Segments that are smaller than this, on average, are mostly work for the interpreter.
_SMALL_BYTES = 128 << 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """Byte ranges in file order: of wanted box ``box``, from byte ``start`` of its chunk; ``digest`` -1: unverified."""

    box: np.ndarray
    start: np.ndarray
    nbytes: np.ndarray
    file: np.ndarray
    offset: np.ndarray
    digest: np.ndarray


def in_blocks(starts: np.ndarray, stops: np.ndarray, *, block: int = BLOCK_BYTES) -> tuple[np.ndarray, np.ndarray]:
    """The spans cut into pieces of at most ``block`` bytes, counted from the start of each span."""
    counts = -(-(stops - starts) // block)
    ends = np.cumsum(counts)
    piece = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    begins = np.repeat(starts, counts) + piece * block
    return begins, np.minimum(begins + block, np.repeat(stops, counts))


class Destination(Protocol):
    """What takes the bytes of one box, as ``_state.tensor_bytes.Target`` does."""

    tensor: torch.Tensor
    on_cpu: bool

    def memory(self, start: int, stop: int) -> memoryview | None:
        """Its own memory for bytes [start, stop), where they all go there as they are."""
        ...

    def copy_in(self, start: int, stop: int, buffer: Slab, at: int) -> None:
        """Take bytes [start, stop), which lie in ``buffer`` from ``at`` on."""
        ...


TargetT = TypeVar("TargetT", bound=Destination)


class SegmentFetch(abc.ABC, Generic[TargetT]):
    """One batch of reads. ``open_targets(numbers)`` gives the targets of boxes whose first bytes are about to come;
    ``close_target(n, target)`` is called, one at a time, when one is complete. ``progress`` is told of each read, and
    may raise to end it all. ``address`` has, where it is not 0, the memory that takes the bytes of each box as they
    are: such a box may be filled without its target being opened and closed.
    """

    max_gap = 0
    """Bytes between two segments that are read along rather than made two reads."""

    readers = LocalFiles.readers
    """Threads that only read, for one that delivers."""

    sharers = 1
    """How many processes of this host do the same at the same time."""

    delivers_at_once = False
    """Whether each of these threads delivers what it has read: where bytes do not come from a disk of this machine."""

    def __init__(
        self,
        segments: Segments,
        *,
        boxes: int,
        open_targets: Callable[[list[int]], list[TargetT]],
        close_target: Callable[[int, TargetT], None],
        progress: Progress,
        address: np.ndarray | None = None,
    ) -> None:
        self.progress = progress
        progress.total += int(segments.nbytes.sum())
        self._address = np.zeros(boxes, dtype=np.int64) if address is None else address
        self._open_targets = open_targets
        self._close_target = close_target
        self.segments = segments
        self._targets: dict[int, TargetT] = {}
        self._pending = np.bincount(segments.box, minlength=boxes).tolist()
        self._lock = threading.Lock()
        self._streams: dict[tuple[int, torch.device], torch.cuda.Stream] = {}
        self._devices: set[torch.device] = set()

    @abc.abstractmethod
    def file(self, number: int) -> AbstractContextManager[tuple[FileToRead, bool]]:
        """File ``number``, for the length of the block, and whether it is in the page cache."""

    @abc.abstractmethod
    def expected(self, digests: np.ndarray) -> list[int]:
        """What ``is_intact`` is to be told of segments with these values of ``digest``; -1 where nothing is checked."""

    @abc.abstractmethod
    def is_intact(self, box: int, start: int, view: memoryview, expected: int) -> bool:
        """Whether the bytes of ``box`` from ``start`` on are those that were written, as far as can be told."""

    @abc.abstractmethod
    def damaged(self, file: int, box: int, offset: int, nbytes: int) -> CorruptError:
        """The error that names the file, the key and the bytes."""

    def run(self) -> None:
        """Read, verify and deliver everything; CorruptError at the first block that is not what was written."""
        try:
            empty = [number for number, count in enumerate(self._pending) if count == 0]
            if empty:
                self._open(empty)
            for number in empty:
                self._close_target(number, self._targets.pop(number))
            self._transfer()
        finally:
            # A fetch whose own methods these are would hold itself, and the targets, until the collector comes.
            del self._open_targets, self._close_target

    def _transfer(self) -> None:
        """Read, verify and deliver everything that has bytes."""
        self._transfer_first(len(self.segments.box))

    def _transfer_first(self, count: int) -> None:
        """Read, verify and deliver the first ``count`` segments."""
        if count == 0:
            return
        # What is small is best left to one thread, because there is so little to each.
        are_small = self.segments.nbytes[:count].sum() < _SMALL_BYTES * count
        if not are_small and (uses_cuda() or self.delivers_at_once or self._is_cached()):
            self._run_in_threads(count)
        else:
            # Half of the cores: others read.
            self._run_ahead(count, deliverers=1 if are_small else cores_each(2 * self.sharers))

    def _is_cached(self) -> bool:
        """Whether there is no disk to wait for, judged by the first file."""
        with self.file(int(self.segments.file[0])) as (_, is_cached):
            return is_cached

    def _ring(self, workers: int, most: int, *, least: int = 0) -> SlabRing:
        """Slabs for ``workers`` threads that read ``most`` bytes at once; for the CPU of ``least`` bytes together."""
        if uses_cuda():
            return SlabRing(workers, nbytes=most, pinned=True)
        return SlabRing(max(workers + 1, least // most), nbytes=most)

    def _spans(self, count: int, *, most: int) -> list[slice]:
        """The first ``count`` segments in groups of at most ``most`` bytes, each to be read at once."""
        segments = self.segments
        groups = coalesce(
            segments.file[:count],
            segments.offset[:count],
            segments.nbytes[:count] + self.max_gap,
            most=most,
            alignment=ALIGNMENT,
        )
        return [slice(first, stop) for first, stop in itertools.pairwise(groups.tolist())]

    def _run_in_threads(self, count: int) -> None:
        """Read, verify and deliver in as many threads as there are."""
        workers, most = default_workers(self.sharers, least=3), SLAB_BYTES
        if self.delivers_at_once and not uses_cuda():
            workers, most = self.readers, HOT_BYTES
        elif uses_cuda() and self._is_cached():
            # All of a core's time goes into reads and digests, so each core is of use; to pin memory takes time too.
            workers = default_workers(self.sharers, least=3, most=_MOST_CUDA_WORKERS)
            most = min(SLAB_BYTES, _PINNED_BYTES // workers // ALIGNMENT * ALIGNMENT)
        spans = self._spans(count, most=most)
        ring = self._ring(workers, most)
        try:
            run_bounded((self._job(span, ring) for span in spans), workers=workers)
        finally:
            ring.close()

    def _run_ahead(self, count: int, *, deliverers: int) -> None:
        """Deliver in this thread while others read, or in up to so many while this one opens targets in file order.

        Small segments are mostly work for one interpreter, and copies of large ones compete with a disk for memory.
        """
        most = SLAB_BYTES if uses_cuda() else HOT_BYTES
        if self._is_cached():
            # There is no disk to keep busy, nor one to be kept from the caches: few slabs, and they stay hot.
            workers, least = _CACHED_READERS, 0
        else:
            workers, least = default_workers(self.sharers, least=3) if uses_cuda() else self.readers, COLD_BYTES
        ring = self._ring(workers + deliverers - 1, most, least=least + (deliverers - 1) * most)
        jobs = [SegmentJob(self, span) for span in self._spans(count, most=most)]
        # One slab stays with each delivery, so that no read ever waits for one.
        filled = run_ahead((partial(job.read, ring) for job in jobs), workers=workers, ahead=ring.count - deliverers)
        try:
            run_bounded(self._deliveries(jobs, filled, ring), workers=deliverers, ahead=0, at_once=True)
        finally:
            ring.close()

    def _deliveries(
        self, jobs: list[SegmentJob[TargetT]], filled: Generator[tuple[Slab, int], None, None], ring: SlabRing
    ) -> Iterator[Callable[[], None]]:
        with closing(filled):
            for job, (slab, base) in zip(jobs, filled, strict=True):
                self.progress.moved(job.nbytes)  # not where it was read: what this one raises ends the reading ahead
                job.open_unless_plain()
                yield partial(job.deliver_from, slab, base, ring)

    def _job(self, span: slice, ring: SlabRing) -> Callable[[], None]:
        self.progress.check()
        job = SegmentJob(self, span)
        job.open()
        return partial(job.run, ring)

    def parts(self, span: slice) -> tuple[list[int], list[_Part[TargetT]]]:
        """The boxes and the parts of the segments ``span``, their targets open."""
        segments, targets = self.segments, self._targets
        boxes: list[int] = segments.box[span].tolist()
        # Planners expect one call at a time, and finished targets are handed to them by other threads.
        with self._lock:
            self._open([number for number in dict.fromkeys(boxes) if number not in targets])
        columns = (segments.start, segments.nbytes, segments.offset)
        return boxes, list(
            zip(
                [targets[number] for number in boxes],
                *(column[span].tolist() for column in columns),
                self.expected(segments.digest[span]),
                strict=True,
            )
        )

    def addresses(self, span: slice) -> np.ndarray | None:
        """Where each of the segments ``span`` goes as it is; None where one of them needs its target."""
        address = self._address[self.segments.box[span]]
        return address + self.segments.start[span] if address.all() else None

    def extent(self, span: slice) -> tuple[int, int, int]:
        """File number, first byte and end of the segments ``span``."""
        segments = self.segments
        ends = segments.offset[span] + segments.nbytes[span]
        return int(segments.file[span.start]), int(segments.offset[span.start]), int(ends.max())

    def read(self, file_number: int, start: int, end: int, slab: Slab) -> int:
        """Put bytes [start, end) of a file into ``slab``; the offset in the file that its first byte has."""
        with self.file(file_number) as (file, is_cached):
            return file.read_range(slab.view, start, end, is_cached=is_cached)

    def _open(self, numbers: list[int]) -> None:
        opened = self._open_targets(numbers)
        self._targets.update(zip(numbers, opened, strict=True))
        for device in {target.tensor.device for target in opened if not target.on_cpu} - self._devices:
            self._devices.add(device)
            if device.type == "cuda":
                # What the caller's stream still does to its tensors comes before what other streams copy into them.
                torch.cuda.current_stream(device).synchronize()

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """This thread's stream for copies to ``device``, so that those of several jobs overlap; None for no GPU."""
        if device.type != "cuda":
            return None
        key = threading.get_ident(), device
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(device)
        return self._streams[key]

    def done(self, boxes: list[int]) -> None:
        """Take note that one segment of each of ``boxes`` is in its target; close the targets that are complete."""
        pending = self._pending
        with self._lock:
            for number in boxes:
                pending[number] -= 1
                if pending[number] == 0:
                    self._close_target(number, self._targets.pop(number))


# Target, first byte in the chunk, bytes, offset in the file, digest (or -1).
_Part = tuple[TargetT, int, int, int, int]


class SegmentJob(Generic[TargetT]):
    """Neighbouring segments of one file."""

    def __init__(self, fetch: SegmentFetch[TargetT], span: slice) -> None:
        self._fetch = fetch
        self._span = span
        self._addresses: np.ndarray | None = None
        self._boxes: list[int] = []
        self._parts: list[_Part[TargetT]] = []

    @property
    def nbytes(self) -> int:
        return int(self._fetch.segments.nbytes[self._span].sum())

    def open(self) -> None:
        """Get the targets; to be called by one thread at a time, and in file order."""
        self._boxes, self._parts = self._fetch.parts(self._span)

    def open_unless_plain(self) -> None:
        """The same, unless each segment has an address to go to."""
        self._addresses = self._fetch.addresses(self._span)
        if self._addresses is None:
            self.open()

    def run(self, ring: SlabRing) -> None:
        """Read, verify, deliver; from the page cache right into the targets where the bytes go there as they are."""
        number, first, _ = self._fetch.extent(self._span)
        with self._fetch.file(number) as (file, is_cached):
            if is_cached and (views := self._views()) is not None:
                self._read_hot(file, views)
                self._fetch.done(self._boxes)
            elif is_cached and uses_cuda():
                self._read_for_device(file, first - first % ALIGNMENT, ring)
            else:
                self.deliver_from(*self.read(ring), ring)
        self._fetch.progress.moved(self.nbytes)

    def _read_for_device(self, file: FileToRead, base: int, ring: SlabRing) -> None:
        """The same through a slab, in which each segment is verified before the next one is read."""
        with ring.lend() as slab:
            self._read_hot(file, [slab.view[at - base : at - base + nbytes] for _, _, nbytes, at, _ in self._parts])
            self._parts = [(target, start, nbytes, at, -1) for target, start, nbytes, at, _ in self._parts]
            self.deliver(slab, base)

    def _read_hot(self, file: FileToRead, views: list[memoryview]) -> None:
        """Read each segment into its view, and verify it while it is in the processor's caches."""
        for place, (view, (_, start, nbytes, offset, expected)) in enumerate(zip(views, self._parts, strict=True)):
            file.read_into(view, offset)
            if expected >= 0 and not self._fetch.is_intact(self._boxes[place], start, view, expected):
                raise self._fetch.damaged(self._fetch.extent(self._span)[0], self._boxes[place], offset, nbytes)

    def _views(self) -> list[memoryview] | None:
        """The memory of the targets for each segment; None unless each has its own."""
        views = []
        reached = -1
        for target, start, nbytes, offset, _ in self._parts:
            view = target.memory(start, start + nbytes) if offset > reached else None
            if view is None:
                return None
            views.append(view)
            reached = offset
        return views

    def read(self, ring: SlabRing) -> tuple[Slab, int]:
        """A slab with the bytes of all segments, of ``ring`` or not, and the offset in the file of its first byte."""
        number, start, end = self._fetch.extent(self._span)
        if not uses_cuda():  # which takes bytes only from slabs of the ring
            with self._fetch.file(number) as (file, _):
                data = file.take(start, end)
            if data is not None:
                return slab_over(data), start
        slab = ring.acquire()
        try:
            return slab, self._fetch.read(number, start, end, slab)
        except BaseException:
            ring.release(slab)
            raise

    def deliver_from(self, slab: Slab, base: int, ring: SlabRing) -> None:
        try:
            self.deliver(slab, base)
        finally:
            ring.release(slab)

    def deliver(self, slab: Slab, base: int) -> None:
        if self._addresses is not None:
            self._move(slab, base, self._addresses)
            return
        streams = [
            self._fetch.stream(device)
            for device in {part[0].tensor.device for part in self._parts if not part[0].on_cpu}
        ]
        with ExitStack() as stack:
            for stream in filter(None, streams):
                stack.callback(stream.synchronize)
                as_before = cuda_stream(stream.device)
                stack.enter_context(as_before)
                stack.enter_context(as_before)
                stack.enter_context(torch.cuda.stream(stream))
            self._copy(slab, base)
        self._fetch.done(self._boxes)

    def _move(self, slab: Slab, base: int, addresses: np.ndarray) -> None:
        fetch, segments, span, view = self._fetch, self._fetch.segments, self._span, slab.view
        offsets = segments.offset[span]
        columns = (segments.box[span], segments.start[span], offsets - base, segments.nbytes[span], addresses)
        expected = fetch.expected(segments.digest[span])
        for box, start, at, nbytes, address, wanted in zip(*(each.tolist() for each in columns), expected, strict=True):
            if wanted >= 0 and not fetch.is_intact(box, start, view[at : at + nbytes], wanted):
                raise fetch.damaged(fetch.extent(span)[0], box, base + at, nbytes)
            move(address, slab.address + at, nbytes)

    def _copy(self, slab: Slab, base: int) -> None:
        """Verify each segment and copy it while hot; to a device, or where nothing is verified, neighbours at once."""
        view = slab.view
        waiting: tuple[TargetT, int, int, int] | None = None
        for place, (target, start, nbytes, offset, expected) in enumerate(self._parts):
            at = offset - base
            if expected >= 0 and not self._fetch.is_intact(self._boxes[place], start, view[at : at + nbytes], expected):
                raise self._fetch.damaged(self._fetch.extent(self._span)[0], self._boxes[place], offset, nbytes)
            if target.on_cpu and expected >= 0:
                target.copy_in(start, start + nbytes, slab, at)
            elif waiting is not None and waiting[0] is target and waiting[2] == start:
                waiting = target, waiting[1], start + nbytes, waiting[3]
            else:
                if waiting is not None:
                    waiting[0].copy_in(*waiting[1:3], slab, waiting[3])
                waiting = target, start, start + nbytes, at
        if waiting is not None:
            waiting[0].copy_in(*waiting[1:3], slab, waiting[3])
