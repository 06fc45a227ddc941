"""Chunks into data files: offsets run on, slabs are cut at block boundaries, every block is hashed while hot.

A job owns whole blocks: it copies them into a slab, hashes them there (so the digest is of the very bytes that are
written, whatever happens to the tensor meanwhile), and writes whole pages. The header goes last, into the room that was
reserved for it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat, zip_longest
from typing import NamedTuple, TypeVar

import numpy as np

from holdfast._io.direct import ALIGNMENT, OutputFile
from holdfast._io.pipeline import default_workers, run_bounded
from holdfast._io.slabs import SLAB_BYTES, PageJob, Slab, SlabRing, filled_slab, following, write_pages
from holdfast._native.index import HeaderEntry, encode_header
from holdfast._native.report import WrittenFile
from holdfast._state.tensor_bytes import DistantSource, Source
from holdfast._values.deadline import Progress
from holdfast._values.digest import BLOCK_BYTES, digest
from holdfast.errors import InternalError, StorageError

Item = TypeVar("Item")

HEADER_FRAME_BYTES = 16  # the length in front, the braces

# Slabs that are full and wait, beside those being written: a write then finds its bytes in memory, not in the caches of
# the processor that filled them, from where they come slower.
_WAITING_SLABS = 4


class Slabs(NamedTuple):
    """How many, and of what size."""

    number: int
    nbytes: int


def slabs_for(nbytes: int, most_bytes: int | None = None) -> Slabs:
    """The slabs that suit ``nbytes``; where they may take ``most_bytes`` together, smaller ones: two blocks at least.

    A new slab costs as much as a copy, so each is to be used twice at least. One has room for whole blocks behind what
    is left of a page.
    """
    if most_bytes is None:
        return Slabs(min(default_workers() + _WAITING_SLABS, -(-nbytes // (2 * SLAB_BYTES))), SLAB_BYTES)
    blocks = max(1, (most_bytes // _WAITING_SLABS - ALIGNMENT) // BLOCK_BYTES)
    size = min(blocks * BLOCK_BYTES + ALIGNMENT, SLAB_BYTES)
    return Slabs(max(2, most_bytes // size), size)


class Chunk(NamedTuple):
    """Bytes to be stored under a name; ``dtype`` and ``shape`` as the safetensors header says them.

    ``header_bytes`` bounds what the header needs for it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: Source
    header_bytes: int


PackedBlock = tuple[Source, int, int, int, int]
"""Bytes from a start to a stop of a source, their place in the slab, the number of their digest."""


@dataclass(slots=True)
class BlockJob(PageJob):
    """Whole blocks of one file."""

    blocks: list[PackedBlock] = field(default_factory=list)


class DataFile:
    """One data file while it is being laid out and written."""

    def __init__(self, path: str, name: str, *, header_bytes: int, expected_bytes: int) -> None:
        self.output = OutputFile(path)
        self.name = name
        self.header_bytes = -(-header_bytes // ALIGNMENT) * ALIGNMENT
        self.expected_bytes = expected_bytes
        self.entries: list[HeaderEntry] = []
        self.end = self.header_bytes
        self.first_digest = 0
        self._header_used = HEADER_FRAME_BYTES

    def takes(self, chunk: Chunk) -> bool:
        """Whether the header has room for ``chunk``; an empty file takes any."""
        return not self.entries or self._header_used + chunk.header_bytes <= self.header_bytes

    def make_room(self, chunk: Chunk) -> None:
        """Guarantee that the header of a file that has nothing yet has room for ``chunk``, planned like that or not."""
        needed = HEADER_FRAME_BYTES + chunk.header_bytes
        self.header_bytes = self.end = max(self.header_bytes, -(-needed // ALIGNMENT) * ALIGNMENT)

    def enter(self, chunk: Chunk) -> None:
        """Give ``chunk`` the bytes from ``end`` on."""
        name, dtype, shape, source, header_bytes = chunk
        begin = self.end - self.header_bytes
        self.end += source.nbytes
        self.entries.append(HeaderEntry(name, dtype, shape, begin, self.end - self.header_bytes))
        self._header_used += header_bytes

    def header(self) -> bytes:
        """The header, which takes just the room that was reserved for it."""
        header = encode_header(self.entries, reserve=self.header_bytes)
        if len(header) != self.header_bytes:
            raise InternalError(f"the header of {self.name} outgrew the room reserved for it; please report it")
        return header

    def complete(self, digests: list[int]) -> WrittenFile:
        """Write the header, make everything durable; ``digests`` are those of this file's blocks, in order."""
        header = self.header()
        ring = SlabRing(1)
        with ring.lend() as slab:
            for start in range(0, len(header), SLAB_BYTES):
                piece = header[start : start + SLAB_BYTES]
                slab.view[: len(piece)] = piece
                self.output.write(slab.view[: len(piece)], start)
        ring.close()
        self.output.finish(self.end)
        covered = digest(header + np.array(digests, dtype="<u8").tobytes())
        return WrittenFile(name=self.name, bytes=self.end, header=self.header_bytes, digest=covered)


class Placed(NamedTuple):
    """Where a chunk went: ``offset`` from the start of file number ``file``."""

    file: int
    offset: int


@dataclass(slots=True, eq=False)
class Lane:
    """Chunks that are written one after the other, the first of them number ``start`` of all; and what became of them.

    Places count the files of the lane.
    """

    start: int
    chunks: Iterable[Chunk]
    files: list[DataFile] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)


class Packer:
    """Writes chunks, in the order they come, to as many files as their headers need, or to several files at once.

    Until ``close``, the files stay open and locked, which tells others that their writer lives. The calling thread
    fills ``slabs`` ahead of those who write (threads that all copy, hash and need the interpreter get in each other's
    way), and ``on_filled`` is called once it has filled the last: nothing is asked of the chunks' sources any more.
    Where there are several lanes there is no disk to wait for, and each thread fills what it writes. ``progress`` is
    told of each job, before and after.
    """

    def __init__(
        self,
        *,
        pinned: bool = False,
        slabs: Slabs | None = None,
        on_filled: Callable[[], None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._pinned = pinned
        self._progress = progress or Progress()
        self._slabs = slabs or Slabs(default_workers() + _WAITING_SLABS, SLAB_BYTES)
        self._on_filled = on_filled
        self.files: list[DataFile] = []
        self.digests: list[int] = []
        self.placed: list[Placed] = []

    def write(self, lanes: Sequence[Lane], open_file: Callable[[int, int], DataFile]) -> list[WrittenFile]:
        """Write every chunk and return the durable files; on an error they are left to ``abandon``.

        ``open_file(number, start)`` makes the next data file, for the chunks from number ``start`` on.
        """
        workers = default_workers()
        # One job is held back until there is a second.
        slabs = max(2, self._slabs.number)
        if len(lanes) > 1:
            # Each who works, the calling thread at the end too, has a slab without waiting: some wait for another's.
            workers = min(workers, slabs - 1)
        ring = SlabRing(slabs, nbytes=self._slabs.nbytes, pinned=self._pinned)
        try:
            run_bounded(self._runners(lanes, open_file, ring), workers=workers, ahead=max(2, slabs - workers))
        finally:
            ring.close()
        written: list[WrittenFile] = []
        for lane in lanes:
            first = len(written)
            self.placed += [Placed(first + file, offset) for file, offset in lane.placed] if first else lane.placed
            self.digests += lane.digests
            for file, after in zip_longest(lane.files, lane.files[1:]):
                stop = len(lane.digests) if after is None else after.first_digest
                written.append(file.complete(lane.digests[file.first_digest : stop]))
                self._progress.sync_s += file.output.sync_s
        return written

    def close(self) -> None:
        """Close the files, which ends the sign that their writer lives."""
        for file in self.files:
            # They are synced: whatever closing them tells, nothing is lost any more.
            with contextlib.suppress(StorageError):
                file.output.close()

    def abandon(self) -> None:
        for file in self.files:
            # What cannot be removed is invisible; the error that led here is the one to tell.
            with contextlib.suppress(StorageError):
                file.output.abandon()

    def _jobs(self, lane: Lane, open_file: Callable[[int, int], DataFile]) -> Iterator[tuple[Lane, BlockJob]]:
        job: BlockJob | None = None
        file: DataFile | None = None
        digests = lane.digests
        for chunk in lane.chunks:
            if job is None or file is None or not file.takes(chunk):
                if job is not None:
                    job.is_last = True
                    yield lane, job
                file = open_file(len(self.files), lane.start + len(lane.placed))
                file.first_digest = len(digests)
                file.make_room(chunk)
                self.files.append(file)  # first: whatever comes, it is known
                lane.files.append(file)
                file.output.make(file.header_bytes + file.expected_bytes)
                job = BlockJob(file.output, file.header_bytes, file.header_bytes)
            source, nbytes = chunk.source, chunk.source.nbytes
            lane.placed.append(Placed(len(lane.files) - 1, file.end))
            file.enter(chunk)
            for start in range(0, nbytes, BLOCK_BYTES):
                stop = min(start + BLOCK_BYTES, nbytes)
                at = job.end - job.base
                if at + stop - start > self._slabs.nbytes:
                    yield lane, job
                    job = following(job)
                    at = job.end - job.base
                job.blocks.append((source, start, stop, at, len(digests)))
                job.end += stop - start
                digests.append(0)
        if job is not None:
            job.is_last = True
            yield lane, job

    def _runners(
        self, lanes: Sequence[Lane], open_file: Callable[[int, int], DataFile], ring: SlabRing
    ) -> Iterator[Callable[[], None]]:
        jobs = deque(map(self._jobs, lanes, repeat(open_file)))
        for lane, job in jobs[0] if len(jobs) == 1 else _in_turns(jobs):
            self._progress.check()
            fill = partial(filled_slab, job, ring, partial(fill_blocks, lane.digests))
            if len(lanes) > 1:
                yield partial(self._fill_and_write, job, fill, ring)
            else:
                yield partial(write_pages, job, fill(), ring, self._progress)
        if self._on_filled is not None:
            self._on_filled()

    def _fill_and_write(self, job: BlockJob, fill: Callable[[], Slab], ring: SlabRing) -> None:
        write_pages(job, fill(), ring, self._progress)


def _in_turns(left: deque[Iterator[Item]]) -> Iterator[Item]:
    """The first of each, then the second of each, and so on."""
    while left:
        with contextlib.suppress(StopIteration):
            yield next(left[0])
            left.append(left[0])
        left.popleft()


def fill_blocks(digests: list[int], job: BlockJob, slab: Slab) -> None:
    """Put the blocks of ``job`` into ``slab``, and take their ``digests`` there."""
    view, filled = slab.view, 0
    for number, (source, start, stop, at, slot) in enumerate(job.blocks):
        if not isinstance(source, DistantSource):
            source.copy_out(start, stop, slab, at)
        elif at >= filled:
            end = _end_of_run(job.blocks, number)
            source.copy_out(start, end, slab, at)
            filled = at + end - start
        digests[slot] = digest(view[at : at + stop - start])


def _end_of_run(blocks: list[PackedBlock], number: int) -> int:
    """Where the last of the blocks ends that follow block ``number`` in its source."""
    source, _, end, _, _ = blocks[number]
    for other, start, stop, _, _ in blocks[number + 1 :]:
        if other is not source or start != end:
            break
        end = stop
    return end
