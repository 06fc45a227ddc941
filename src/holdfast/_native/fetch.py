"""Boxes of stored chunks into their targets: the read engine.

Wanted boxes become segments: the 1 MiB blocks they touch, which are verified, or exactly their bytes when verification
is off. Segments in file order are coalesced into jobs of at most 4 MiB, or one slab for a GPU. Where the file is in the
page cache and the bytes go to one place as they are, they are read straight into it; else through a slab.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np
import torch

from holdfast._io.buffers import SLAB_BYTES, Slab, SlabRing
from holdfast._io.direct import ALIGNMENT, InputFile
from holdfast._io.pipeline import default_workers, run_ahead, run_bounded
from holdfast._native.catalog import Catalog, DataFiles
from holdfast._plan.ranges import byte_spans, coalesce, touched_blocks
from holdfast._state.raw import Target
from holdfast._values.box import Box
from holdfast._values.digest import BLOCK_BYTES, block_counts, digest
from holdfast._values.dtypes import DTYPES
from holdfast.errors import CorruptError

# A read of so many bytes stays in the last-level cache until it is hashed and copied: on a fast disk, a fifth of the
# speed. For a GPU the number of copies matters more.
_HOT_BYTES = 4 << 20

# Reads of more segments than this consist of small ones.
_FEW_SEGMENTS = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """Boxes to be read: box ``lo``, ``length`` (both [n, D], padded with 0 and 1) of the chunk in index row ``row``."""

    row: np.ndarray
    lo: np.ndarray
    length: np.ndarray

    def box(self, number: int, dimensions: int) -> Box:
        """Box ``number``, within its chunk."""
        return Box(tuple(self.lo[number, :dimensions].tolist()), tuple(self.length[number, :dimensions].tolist()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Segments:
    """Byte ranges in file order: of wanted box ``box``, from byte ``start`` of its chunk; ``digest`` -1: unverified."""

    box: np.ndarray
    start: np.ndarray
    nbytes: np.ndarray
    file: np.ndarray
    offset: np.ndarray
    digest: np.ndarray


# Target, first byte in the chunk, bytes, offset in the file, digest (or -1).
_Part = tuple[Target, int, int, int, int]


class Fetch:
    """One batch of reads. ``open_targets(numbers)`` gives the targets of boxes whose first bytes are about to come;
    ``close_target(n, target)`` is called, one at a time, when one is complete.
    """

    def __init__(
        self,
        catalog: Catalog,
        files: DataFiles,
        wanted: Wanted,
        *,
        open_targets: Callable[[list[int]], list[Target]],
        close_target: Callable[[int, Target], None],
        verify: bool,
    ) -> None:
        self._catalog = catalog
        self._files = files
        self._open_targets = open_targets
        self._close_target = close_target
        self._wanted = wanted
        self._segments = _segments(catalog, wanted, verify=verify)
        self._targets: dict[int, Target] = {}
        self._pending = np.bincount(self._segments.box, minlength=len(wanted.row)).tolist()
        self._lock = threading.Lock()
        self._streams: dict[tuple[int, torch.device], torch.cuda.Stream] = {}
        self._devices: set[torch.device] = set()

    def run(self) -> None:
        """Read, verify and deliver everything; CorruptError at the first block that is not what was written."""
        empty = [number for number, count in enumerate(self._pending) if count == 0]
        self._open(empty)
        for number in empty:
            self._close_target(number, self._targets.pop(number))
        segments = self._segments
        pinned = torch.cuda.is_available() and torch.cuda.is_initialized()
        most = SLAB_BYTES if pinned else _HOT_BYTES
        groups = coalesce(segments.file, segments.offset, segments.nbytes, most=most, alignment=ALIGNMENT)
        spans = [slice(first, stop) for first, stop in itertools.pairwise(groups.tolist())]
        workers = default_workers()
        ring = SlabRing(workers, pinned=pinned)
        try:
            if len(segments.box) > _FEW_SEGMENTS * len(spans):
                self._run_beside(spans, ring, workers)
            else:
                run_bounded((self._job(span, ring) for span in spans), workers=workers)
        finally:
            ring.close()

    def _run_beside(self, spans: list[slice], ring: SlabRing, workers: int) -> None:
        """Deliver in this thread while others read ahead: small segments are mostly work for one interpreter."""
        jobs = [_Job(self, span, ring) for span in spans]
        # One slab stays with the delivery, so that no read ever waits for one.
        with closing(run_ahead((job.read for job in jobs), workers=workers - 1)) as slabs:
            for job, (slab, base) in zip(jobs, slabs, strict=True):
                job.open()
                job.deliver(slab, base)
                ring.release(slab)

    def _job(self, span: slice, ring: SlabRing) -> Callable[[], None]:
        job = _Job(self, span, ring)
        job.open()
        return job.run

    def parts(self, span: slice) -> tuple[list[int], list[_Part]]:
        """The boxes and the parts of the segments ``span``, their targets open."""
        segments, targets = self._segments, self._targets
        boxes: list[int] = segments.box[span].tolist()
        # Planners expect one call at a time, and finished targets are handed to them by other threads.
        with self._lock:
            self._open([number for number in dict.fromkeys(boxes) if number not in targets])
        columns = (segments.start, segments.nbytes, segments.offset)
        return boxes, list(
            zip(
                [targets[number] for number in boxes],
                *(column[span].tolist() for column in columns),
                self._expected(segments.digest[span]),
                strict=True,
            )
        )

    def extent(self, span: slice) -> tuple[int, int, int]:
        """File number, first byte and end of the segments ``span``."""
        segments = self._segments
        ends = segments.offset[span] + segments.nbytes[span]
        return int(segments.file[span.start]), int(segments.offset[span.start]), int(ends.max())

    def _open(self, numbers: list[int]) -> None:
        opened = self._open_targets(numbers)
        self._targets.update(zip(numbers, opened, strict=True))
        for device in {target.tensor.device for target in opened if not target.on_cpu} - self._devices:
            self._devices.add(device)
            if device.type == "cuda":
                # What the caller's stream still does to its tensors comes before what other streams copy into them.
                torch.cuda.current_stream(device).synchronize()

    def _expected(self, digests: np.ndarray) -> list[int]:
        """The digests themselves, or -1 where nothing is verified."""
        if len(digests) and digests[0] < 0:
            return [-1] * len(digests)
        expected: list[int] = self._catalog.index.digests[digests].tolist()
        return expected

    def damaged(self, file: int, box: int, offset: int, nbytes: int) -> CorruptError:
        """The error that names the file, the key and the bytes."""
        path = self._catalog.file_path(file)
        row = int(self._wanted.row[box])
        key = self._catalog.manifest.tensors[int(self._catalog.index.tensor[row])].key
        return CorruptError(
            f"{path!r} is damaged in bytes {offset} to {offset + nbytes}, which hold part of {key!r}; "
            "use another checkpoint",
            path=path,
            key=key,
            span=(offset, offset + nbytes),
        )

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """This thread's stream for copies to ``device``, so that those of several jobs overlap; None for no GPU."""
        if device.type != "cuda":
            return None
        key = threading.get_ident(), device
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(device)
        return self._streams[key]

    def file(self, number: int) -> tuple[InputFile, bool]:
        """Data file ``number``, and whether it is in the page cache."""
        return self._files.get(number)

    def done(self, boxes: list[int]) -> None:
        """Take note that one segment of each of ``boxes`` is in its target; close the targets that are complete."""
        pending = self._pending
        with self._lock:
            for number in boxes:
                pending[number] -= 1
                if pending[number] == 0:
                    self._close_target(number, self._targets.pop(number))


class _Job:
    """Neighbouring segments of one file."""

    def __init__(self, fetch: Fetch, span: slice, ring: SlabRing) -> None:
        self._fetch = fetch
        self._span = span
        self._ring = ring
        self._file_number, self._start, self._end = fetch.extent(span)
        self._boxes: list[int] = []
        self._parts: list[_Part] = []

    def open(self) -> None:
        """Get the targets; to be called by one thread at a time, and in file order."""
        self._boxes, self._parts = self._fetch.parts(self._span)

    def run(self) -> None:
        """Read, verify, deliver; from the page cache right into the targets where the bytes go there as they are."""
        file, is_cached = self._fetch.file(self._file_number)
        views = self._views() if is_cached else None
        if views is not None:
            for place, (view, (_, _, nbytes, offset, expected)) in enumerate(zip(views, self._parts, strict=True)):
                file.read_into(view, offset)
                if expected >= 0 and digest(view) != expected:
                    raise self._fetch.damaged(self._file_number, self._boxes[place], offset, nbytes)
            self._fetch.done(self._boxes)
            return
        slab, base = self.read()
        try:
            self.deliver(slab, base)
        finally:
            self._ring.release(slab)

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

    def read(self) -> tuple[Slab, int]:
        """A slab with the bytes of all segments, and the offset in the file that its first byte has."""
        file, is_cached = self._fetch.file(self._file_number)
        base, end = self._start, self._end
        slab = self._ring.acquire()
        try:
            if is_cached or end - base < ALIGNMENT:
                file.read_into(slab.view[: end - base], base)
            else:
                base -= base % ALIGNMENT
                file.read_direct_into(slab.view[: end - base + -(end - base) % ALIGNMENT], base)
        except BaseException:
            self._ring.release(slab)
            raise
        return slab, base

    def deliver(self, slab: Slab, base: int) -> None:
        """Verify every segment and put it where it belongs."""
        streams = [self._fetch.stream(device) for device in {part[0].tensor.device for part in self._parts}]
        with ExitStack() as stack:
            for stream in filter(None, streams):
                stack.callback(stream.synchronize)
                stack.enter_context(torch.cuda.stream(stream))
            self._copy(slab, base)
        self._fetch.done(self._boxes)

    def _copy(self, slab: Slab, base: int) -> None:
        """Verify each segment and copy it to its target while it is hot; to a device, neighbours go in one copy."""
        view = slab.view
        waiting: tuple[Target, int, int, int] | None = None
        for place, (target, start, nbytes, offset, expected) in enumerate(self._parts):
            at = offset - base
            if expected >= 0 and digest(view[at : at + nbytes]) != expected:
                raise self._fetch.damaged(self._file_number, self._boxes[place], offset, nbytes)
            if target.on_cpu:
                target.copy_in(start, start + nbytes, slab, at)
            elif waiting is not None and waiting[0] is target and waiting[2] == start:
                waiting = target, waiting[1], start + nbytes, waiting[3]
            else:
                if waiting is not None:
                    waiting[0].copy_in(*waiting[1:3], slab, waiting[3])
                waiting = target, start, start + nbytes, at
        if waiting is not None:
            waiting[0].copy_in(*waiting[1:3], slab, waiting[3])


def _segments(catalog: Catalog, wanted: Wanted, *, verify: bool) -> _Segments:
    index = catalog.index
    is_whole = ((wanted.lo == 0) & (wanted.length == index.length[wanted.row])).all(axis=1)
    boxes = np.flatnonzero(is_whole)
    counts = block_counts(index.bytes[wanted.row[boxes]])
    ends = np.cumsum(counts)
    block = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    parts = [(np.repeat(boxes, counts), block * BLOCK_BYTES, np.full(len(block), BLOCK_BYTES))]
    for number in np.flatnonzero(~is_whole).tolist():
        starts, stops = _spans(catalog, wanted, number, verify=verify)
        parts.append((np.full(len(starts), number), starts, stops - starts))
    box, start, nbytes = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    row = wanted.row[box]
    nbytes = np.minimum(nbytes, index.bytes[row] - start)
    digests = index.first_block()[row] + start // BLOCK_BYTES if verify else np.full(len(box), -1)
    file, offset = index.file[row], index.offset[row] + start
    order = np.lexsort((offset, file))
    return _Segments(
        box=box[order],
        start=start[order],
        nbytes=nbytes[order],
        file=file[order],
        offset=offset[order],
        digest=digests[order],
    )


def _spans(catalog: Catalog, wanted: Wanted, number: int, *, verify: bool) -> tuple[np.ndarray, np.ndarray]:
    """The byte ranges of a chunk that part of it needs: whole blocks to verify them, else just its bytes."""
    row = int(wanted.row[number])
    entry = catalog.manifest.tensors[int(catalog.index.tensor[row])]
    dimensions = len(entry.shape)
    shape = tuple(catalog.index.length[row, :dimensions].tolist())
    starts, stops = byte_spans(
        shape,
        wanted.box(number, dimensions),
        DTYPES[entry.dtype].itemsize,
        max_gap=BLOCK_BYTES - 1 if verify else 0,
    )
    if verify:
        blocks = touched_blocks(starts, stops, BLOCK_BYTES)
        return blocks * BLOCK_BYTES, (blocks + 1) * BLOCK_BYTES
    counts = block_counts(stops - starts)
    ends = np.cumsum(counts)
    piece = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    begins = np.repeat(starts, counts) + piece * BLOCK_BYTES
    return begins, np.minimum(begins + BLOCK_BYTES, np.repeat(stops, counts))
