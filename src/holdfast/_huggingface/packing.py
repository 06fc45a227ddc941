"""What one rank writes of a folder: runs of whole pages at their places, and the rest for the coordinator.

One page, one writer: a rank writes the pages that are all its own. What it has of others, at the ends of its runs, goes
into its report, and the coordinator writes these pages. Every block is hashed in the slab from which it is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from holdfast._io.direct import ALIGNMENT
from holdfast._io.folders import SharedOutputFile
from holdfast._io.pipeline import default_workers, run_bounded
from holdfast._io.slabs import SLAB_BYTES, PageJob, Slab, SlabRing, filled_slab, following
from holdfast._native.packer import BlockJob, Packer, fill_blocks, slabs_for
from holdfast._state.tensor_bytes import Buffer, DistantSource, Source
from holdfast._state.tensors import empty_tensor
from holdfast._values.box import Box, flat_range_boxes
from holdfast._values.deadline import Progress
from holdfast._values.digest import BLOCK_BYTES, digest

_CONVERTED_ELEMENTS = 1 << 18


class Fragment(NamedTuple):
    """Bytes at ``offset`` of the file ``name``, which are no whole page."""

    name: str
    offset: int
    data: bytes


class Pages(NamedTuple):
    """Whole pages that were written, from ``offset`` to ``end`` of the file ``name``."""

    name: str
    offset: int
    end: int


class Span(NamedTuple):
    """The bytes of ``source``, to lie at ``offset`` of ``file``."""

    file: SharedOutputFile
    offset: int
    source: Source


@dataclass(slots=True)
class _RunJob(BlockJob):
    """Whole blocks of a run; ``head`` bytes of its first page are another's."""

    head: int = 0


class RunPacker(Packer):
    """Writes spans; those that follow each other in a file as one run."""

    def __init__(self, *, pinned: bool, progress: Progress, nbytes: int) -> None:
        super().__init__(pinned=pinned, slabs=slabs_for(nbytes), progress=progress)
        self.fragments: list[Fragment] = []
        self.pages: list[Pages] = []

    def write_spans(self, spans: Iterable[Span]) -> None:
        """Write all of ``spans``; their digests are added to ``digests``, in order."""
        workers, slabs = default_workers(), max(2, self._slabs.number)
        ring = SlabRing(slabs, pinned=self._pinned)
        try:
            run_bounded(self._span_jobs(spans, ring), workers=workers, ahead=max(2, slabs - workers))
        finally:
            ring.close()

    def _span_jobs(self, spans: Iterable[Span], ring: SlabRing) -> Iterator[partial[None]]:
        for job in self._runs(spans):
            self._progress.check()
            yield partial(self._write, job, filled_slab(job, ring, partial(fill_blocks, self.digests)), ring)

    def _runs(self, spans: Iterable[Span]) -> Iterator[_RunJob]:
        job: _RunJob | None = None
        for file, offset, source in spans:
            if job is None or job.file is not file or job.end != offset:
                if job is not None:
                    job.is_last = True
                    yield job
                head = offset % ALIGNMENT
                job = _RunJob(file, offset - head, offset, head=head)
            for start in range(0, source.nbytes, BLOCK_BYTES):
                nbytes = min(BLOCK_BYTES, source.nbytes - start)
                if job.end - job.base + nbytes > SLAB_BYTES:
                    yield job
                    job = following(job)
                job.blocks.append((source, start, start + nbytes, job.end - job.base, len(self.digests)))
                job.end += nbytes
                self.digests.append(0)
        if job is not None:
            job.is_last = True
            yield job

    def _write(self, job: _RunJob, slab: Slab, ring: SlabRing) -> None:
        try:
            if job.before is not None:
                _take_tail(job, job.before, slab)
            self.write_part(job.file, slab.view, job.base, (job.head, job.end - job.base), is_last=job.is_last)
        finally:
            ring.release(slab)

    def write_part(
        self, file: object, view: memoryview, base: int, part: tuple[int, int], *, is_last: bool = True
    ) -> None:
        """Write the whole pages within ``part`` of ``view``, which begins at ``base`` of ``file``; keep the rest."""
        assert isinstance(file, SharedOutputFile)
        start, stop = part
        first, last = -(-start // ALIGNMENT) * ALIGNMENT, stop - stop % ALIGNMENT
        if first != start:
            self.fragments.append(Fragment(file.name, base + start, bytes(view[start : min(first, stop)])))
        if is_last and max(first, last) < stop:
            rest = max(first, last)
            self.fragments.append(Fragment(file.name, base + rest, bytes(view[rest:stop])))
        if first < last:
            file.write(view[first:last], base + first)
            self.pages.append(Pages(file.name, base + first, base + last))
        self._progress.moved(stop - start)


def _take_tail(job: PageJob, before: PageJob, slab: Slab) -> None:
    """Take what the job before left on the page where this one begins; it fills its slab before it waits itself."""
    before.is_filled.wait()
    slab.view[: len(before.tail)] = before.tail
    job.before = None


class ConvertedSource(DistantSource):
    """The bytes of another source, of the dtype ``stored``, as ``dtype``, with ``added`` to each element.

    Every rank rounds to nearest, ties to even. DistantSource: it is asked for as much at a time as can be.
    """

    def __init__(self, source: Source, stored: torch.dtype, dtype: torch.dtype, added: float = 0.0) -> None:
        self._source = source
        self._stored = stored
        self._dtype = dtype
        self._added = added
        self.nbytes = source.nbytes // stored.itemsize * dtype.itemsize

    def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        size = self._dtype.itemsize
        for first in range(start // size, stop // size, _CONVERTED_ELEMENTS):
            count = min(_CONVERTED_ELEMENTS, stop // size - first)
            scratch = empty_tensor((count * self._stored.itemsize,), torch.uint8)
            taken = Slab(scratch.numpy().data, scratch)
            self._source.copy_out(first * self._stored.itemsize, (first + count) * self._stored.itemsize, taken, 0)
            place = at + first * size - start
            values = converted(scratch.view(self._stored), self._added)
            buffer.tensor[place : place + count * size].view(self._dtype).copy_(values)


def converted(values: torch.Tensor, added: float) -> torch.Tensor:
    """``values`` with ``added`` to each, computed in float32 at least."""
    if not added:
        return values
    return (values if values.dtype == torch.float64 else values.float()) + added


@dataclass(frozen=True, slots=True)
class HeldPart:
    """``box`` of a tensor, and the memory that has its elements."""

    box: Box
    tensor: torch.Tensor


@dataclass(slots=True)
class AssembledSource:
    """The bytes of ``box`` of a tensor, as ``dtype``, as far as they are in ``held``."""

    box: Box
    dtype: torch.dtype
    held: Sequence[HeldPart]
    added: float = 0.0
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.box.volume * self.dtype.itemsize

    def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        size = self.dtype.itemsize
        for part in flat_range_boxes(self.box.lengths, start // size, stop // size):
            nbytes = part.volume * size
            target = buffer.tensor[at : at + nbytes].view(self.dtype).view(part.lengths)
            offsets = tuple(map(int.__add__, part.offsets, self.box.offsets))
            wanted = Box(offsets, part.lengths)
            for each in self.held:
                common = each.box.intersect(wanted)
                if common is not None:
                    piece = each.tensor[common.relative_to(each.box).slices()]
                    target[common.relative_to(wanted).slices()].copy_(converted(piece, self.added))
            at += nbytes


_WORD = 8  # bytes


def most_packed(box: Box, dtype: torch.dtype) -> int:
    """The most bytes that ``packed`` can be: as if every element had a box of its own."""
    return box.volume * (dtype.itemsize + 2 * box.ndim * _WORD) + 2 * _WORD


def packed(source: AssembledSource) -> torch.Tensor:
    """What is ``held`` of a box, as bytes to be sent: part by part; then where these are, their number, a digest."""
    parts = [(common, each) for each in source.held if (common := each.box.intersect(source.box)) is not None]
    places = np.array([(box.offsets, box.lengths) for box, _ in parts], dtype="<i8").tobytes()
    nbytes = sum(box.volume for box, _ in parts) * source.dtype.itemsize
    data = empty_tensor((nbytes + len(places) + 2 * _WORD,), torch.uint8)
    room, at = Slab(data.numpy().data, data), 0
    for box, each in parts:
        part = AssembledSource(box, source.dtype, [each], source.added)
        part.copy_out(0, part.nbytes, room, at)
        at += part.nbytes
    room.view[nbytes:-_WORD] = places + len(parts).to_bytes(_WORD, "little")
    room.view[-_WORD:] = digest(room.view[:-_WORD]).to_bytes(_WORD, "little")
    return data


def unpacked(data: torch.Tensor, box: Box, dtype: torch.dtype) -> AssembledSource | None:
    """What was packed of ``box``, over the same memory; None if it is not what was sent."""
    view, wide = data.numpy().data, 2 * box.ndim
    if len(view) < 2 * _WORD or digest(view[:-_WORD]) != int.from_bytes(view[-_WORD:], "little"):
        return None
    count = int.from_bytes(view[-2 * _WORD : -_WORD], "little")
    nbytes = len(view) - _WORD * (2 + count * wide)
    if nbytes < 0:
        return None
    words = np.frombuffer(view[nbytes : len(view) - 2 * _WORD], dtype="<i8").reshape(count, 2, box.ndim)
    held, at = [], 0
    for offsets, lengths in words.tolist():
        part = Box(tuple(offsets), tuple(lengths))
        end = at + part.volume * dtype.itemsize
        if not box.contains(part) or min(lengths) < 1 or end > nbytes:
            return None
        held.append(HeldPart(part, data[at:end].view(dtype).view(part.lengths)))
        at = end
    return AssembledSource(box, dtype, held) if at == nbytes else None


def block_digests(view: memoryview) -> list[int]:
    """The digests of the blocks of ``view``."""
    return [digest(view[start : start + BLOCK_BYTES]) for start in range(0, view.nbytes, BLOCK_BYTES)]
