"""Boxes of stored chunks into their targets: the read engine.

Wanted boxes become segments: the 1 MiB blocks they touch, which are verified, or exactly their bytes when verification
is off. Segments in file order are coalesced into jobs of at most one slab. Where the file is in the page cache and the
bytes go to one place as they are, they are read straight into it; else through a slab.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from holdfast._io.buffers import SLAB_BYTES, Slab, SlabRing
from holdfast._io.direct import ALIGNMENT, InputFile
from holdfast._io.pipeline import default_workers, run_bounded
from holdfast._native.catalog import Catalog, DataFiles
from holdfast._plan.ranges import byte_spans, coalesce, touched_blocks
from holdfast._state.raw import Target
from holdfast._values.box import Box
from holdfast._values.digest import BLOCK_BYTES, block_counts, digest
from holdfast._values.dtypes import DTYPES
from holdfast.errors import CorruptError

# Below this, a read of its own costs more than copying out of a slab shared with its neighbours.
_STRAIGHT_BYTES = 256 << 10


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


class Fetch:
    """One batch of reads. ``open_target(n)`` gives the target of box n when its first bytes are about to come;
    ``close_target(n, target)`` is called, one at a time, when it is complete.
    """

    def __init__(
        self,
        catalog: Catalog,
        files: DataFiles,
        wanted: Wanted,
        *,
        open_target: Callable[[int], Target],
        close_target: Callable[[int, Target], None],
        verify: bool,
    ) -> None:
        self._catalog = catalog
        self._files = files
        self._open_target = open_target
        self._close_target = close_target
        self._segments = _segments(catalog, wanted, verify=verify)
        self._targets: dict[int, Target] = {}
        self._pending = np.bincount(self._segments.box, minlength=len(wanted.row)).tolist()
        self._lock = threading.Lock()
        self._streams: dict[int, torch.cuda.Stream] = {}

    def run(self) -> None:
        """Read, verify and deliver everything; CorruptError at the first block that is not what was written."""
        for number, count in enumerate(self._pending):
            if count == 0:
                self._close_target(number, self._open_target(number))
        segments, workers = self._segments, default_workers()
        groups = coalesce(segments.file, segments.offset, segments.nbytes, most=SLAB_BYTES, alignment=ALIGNMENT)
        pinned = torch.cuda.is_available() and torch.cuda.is_initialized()
        ring = SlabRing(workers, pinned=pinned)
        try:
            run_bounded(self._jobs(groups.tolist(), ring), workers=workers)
        finally:
            ring.close()

    def _jobs(self, groups: list[int], ring: SlabRing) -> Iterator[Callable[[], None]]:
        segments = self._segments
        for first, stop in itertools.pairwise(groups):
            boxes = segments.box[first:stop].tolist()
            for number in boxes:
                if number not in self._targets:
                    self._targets[number] = self._open_target(number)
            parts = [
                _Part(self._targets[number], number, *fields)
                for number, *fields in zip(
                    boxes,
                    segments.start[first:stop].tolist(),
                    segments.nbytes[first:stop].tolist(),
                    segments.offset[first:stop].tolist(),
                    segments.digest[first:stop].tolist(),
                    strict=True,
                )
            ]
            yield _Runner(self, int(segments.file[first]), parts, ring)

    def check(self, part: _Part, data: memoryview, file: int) -> None:
        """CorruptError unless ``data`` is the block that was written."""
        if part.digest >= 0 and digest(data) != int(self._catalog.index.digests[part.digest]):
            path, span = self._catalog.file_path(file), (part.offset, part.offset + part.nbytes)
            row = int(np.searchsorted(self._catalog.index.first_block(), part.digest, side="right")) - 1
            key = self._catalog.manifest.tensors[int(self._catalog.index.tensor[row])].key
            raise CorruptError(
                f"{path!r} is damaged in bytes {span[0]} to {span[1]}, which hold part of {key!r}; "
                "use another checkpoint",
                path=path,
                key=key,
                span=span,
            )

    def file(self, number: int) -> tuple[InputFile, bool]:
        """Data file ``number``, and whether it is in the page cache."""
        return self._files.get(number)

    def done(self, parts: list[_Part]) -> None:
        """Take note that ``parts`` are in their targets; close the targets that are complete."""
        with self._lock:
            for part in parts:
                self._pending[part.box] -= 1
                if self._pending[part.box] == 0:
                    self._close_target(part.box, self._targets.pop(part.box))


@dataclass(slots=True)
class _Part:
    """A segment on its way to ``target``."""

    target: Target
    box: int
    start: int
    nbytes: int
    offset: int
    digest: int


@dataclass(slots=True)
class _Runner:
    """One job: neighbouring segments of one file."""

    fetch: Fetch
    file_number: int
    parts: list[_Part]
    ring: SlabRing

    def __call__(self) -> None:
        file, is_cached = self.fetch.file(self.file_number)
        if not is_cached or not self._read_straight(file):
            with self.ring.lend() as slab:
                self._read_through(file, slab, is_cached)
        self.fetch.done(self.parts)

    def _read_straight(self, file: InputFile) -> bool:
        """Read each segment right into its target; False, with nothing done, where that is not possible or worth it."""
        views = []
        offset = -1
        for part in self.parts:
            view = part.target.memory(part.start, part.start + part.nbytes)
            if view is None or part.nbytes < _STRAIGHT_BYTES or part.offset <= offset:
                return False
            views.append(view)
            offset = part.offset
        for part, view in zip(self.parts, views, strict=True):
            file.read_into(view, part.offset)
            self.fetch.check(part, view, self.file_number)
        return True

    def _read_through(self, file: InputFile, slab: Slab, is_cached: bool) -> None:
        base = self.parts[0].offset
        end = max(part.offset + part.nbytes for part in self.parts)
        if is_cached or end - base < ALIGNMENT:
            file.read_into(slab.view[: end - base], base)
        else:
            base -= base % ALIGNMENT
            file.read_direct_into(slab.view[: end - base + -(end - base) % ALIGNMENT], base)
        checked = -1
        for part in self.parts:
            at = part.offset - base
            if part.digest != checked:
                self.fetch.check(part, slab.view[at : at + part.nbytes], self.file_number)
                checked = part.digest
        device = next((part.target.tensor.device for part in self.parts if part.target.tensor.is_cuda), None)
        if device is None:
            self._copy_in(slab, base)
            return
        # A stream of the job's own: copies of several jobs overlap, and the slab is free when the stream is done.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        with torch.cuda.stream(stream):
            self._copy_in(slab, base)
        stream.synchronize()

    def _copy_in(self, slab: Slab, base: int) -> None:
        for part in self.parts:
            part.target.copy_in(part.start, part.start + part.nbytes, slab, part.offset - base)


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
