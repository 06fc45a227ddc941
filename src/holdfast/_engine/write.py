"""Files from jobs of whole pages, filled from many sources, or from memory in which they lie as they are to lie on
disk.

Nothing is shared between jobs: each has its bytes copied into a slab of its own and writes whole pages. Where the last
byte lies inside a page, the next job writes that page, with the bytes that this one has in its slab. So what was
looked at in the slab (hashed, say) is what is written, whatever happens to the sources meanwhile.

Knows no torch and no planner: plain numbers say where a file begins, how long it is and which ranges are its blocks, so
that another process, which has only the memory, can do the same.
"""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from holdfast._io.direct import ALIGNMENT, OutputFile
from holdfast._io.memory import Slab, SlabRing
from holdfast._io.pipeline import run_bounded
from holdfast._process import Event
from holdfast._values.digest import digest
from holdfast.errors import StorageError

Job = TypeVar("Job", bound="PageJob")


@dataclass(slots=True)
class PageJob:
    """Bytes of one file up to ``end``; ``before`` has those ahead of the first, from the start of its page on.

    What the bytes are is a subclass's to say.
    """

    file: OutputFile
    base: int
    end: int
    before: PageJob | None = None
    is_last: bool = False
    tail: bytes = b""
    is_filled: Event = field(default_factory=Event)


def following(job: Job) -> Job:
    """The job after ``job`` in its file: from the page that ``job`` leaves unfinished."""
    return type(job)(job.file, job.end - job.end % ALIGNMENT, job.end, job)


def filled_slab(job: Job, ring: SlabRing, fill: Callable[[Job, Slab], None]) -> Slab:
    """A slab into which ``fill`` has put the bytes of ``job``."""
    try:
        slab = ring.acquire()
        try:
            fill(job, slab)
        except BaseException:
            ring.release(slab)
            raise
        filled = job.end - job.base
        job.tail = bytes(slab.view[filled - filled % ALIGNMENT : filled])
        return slab
    finally:
        # Also after an error: the next job must not wait for ever.
        job.is_filled.set()


def write_pages(job: PageJob, slab: Slab, ring: SlabRing) -> None:
    """Write the whole pages of ``job``; a last one that is not whole is the next job's, or padded at the file's end."""
    try:
        _take_over(job, slab)
        filled = job.end - job.base
        if job.is_last:
            padding = -filled % ALIGNMENT
            slab.view[filled : filled + padding] = bytes(padding)
            filled += padding
        job.file.write(slab.view[: filled - filled % ALIGNMENT], job.base)
    finally:
        ring.release(slab)


def _take_over(job: PageJob, slab: Slab) -> None:
    """Copy what the job before left on the page where this one begins: the very bytes that it has in its slab."""
    if job.before is not None:
        # Jobs start in order and fill their slab before they wait, so this ends.
        job.before.is_filled.wait()
        slab.view[: len(job.before.tail)] = job.before.tail
        job.before = None


_JOB_BYTES = 16 << 20
_WORKERS = max(4, min(8, (os.cpu_count() or 4) // 2))  # to keep a disk busy, and leave the processor to the training


class FileImage(msgspec.Struct, frozen=True, kw_only=True):
    """One data file: ``size`` bytes from ``begin`` on, which is a page; the first ``header`` of them are its header.

    ``starts`` and ``stops`` bound the blocks, in order, counted from the start of the memory like ``begin``; ``known``
    has their digests, as far as there are any yet. The memory after the file's end, up to the next page, belongs to it
    and is zero. ``path`` is in bytes: not every name is Unicode.
    """

    path: bytes
    begin: int
    size: int
    header: int
    starts: list[int]
    stops: list[int]
    known: list[int | None]


class WrittenImage(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a file image: the digest of each block, and the one that covers header and block digests."""

    digests: list[int]
    digest: int


class ImageFiles:
    """Writes file images; until ``close`` the files stay open and locked, which tells others that their writer lives.

    ``check`` is called before each piece of work and raises to give up.
    """

    def __init__(self, *, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._outputs: list[OutputFile] = []

    @property
    def bytes_written(self) -> int:
        """Bytes that the system took."""
        return sum(output.bytes_written for output in tuple(self._outputs))

    def write(self, files: Sequence[FileImage], memory: memoryview) -> list[WrittenImage]:
        """What was written, durably; after an error ``abandon`` what there is."""
        digests = [[0] * len(file.starts) for file in files]
        for file in files:
            self._outputs.append(OutputFile(os.fsdecode(file.path)))
            self._outputs[-1].make(file.size)
        run_bounded(self._jobs(files, memory, digests), workers=_WORKERS)
        written: list[WrittenImage] = []
        for file, output, blocks in zip(files, self._outputs, digests, strict=True):
            self._check()
            output.finish(file.size)
            header = memory[file.begin : file.begin + file.header]
            covered = digest(bytes(header) + np.array(blocks, dtype="<u8").tobytes())
            written.append(WrittenImage(digests=blocks, digest=covered))
        return written

    def _jobs(
        self, files: Sequence[FileImage], memory: memoryview, digests: list[list[int]]
    ) -> Iterator[Callable[[], None]]:
        for file, output, blocks in zip(files, self._outputs, digests, strict=True):
            end = file.begin + -(-file.size // ALIGNMENT) * ALIGNMENT
            for start in range(file.begin, end, _JOB_BYTES):
                yield partial(self._write_piece, file, output, memory, blocks, start, min(start + _JOB_BYTES, end))

    def _write_piece(
        self, file: FileImage, output: OutputFile, memory: memoryview, blocks: list[int], start: int, stop: int
    ) -> None:
        """Hash those of the blocks that begin in [start, stop) that nobody has, then write that range."""
        self._check()
        for number in range(bisect.bisect_left(file.starts, start), bisect.bisect_left(file.starts, stop)):
            known = file.known[number]
            blocks[number] = digest(memory[file.starts[number] : file.stops[number]]) if known is None else known
        output.write(memory[start:stop], start - file.begin)

    def close(self) -> None:
        """Close the files, which ends the sign that their writer lives."""
        for output in self._outputs:
            # They are synced: whatever closing them tells, nothing is lost any more.
            with contextlib.suppress(StorageError):
                output.close()

    def abandon(self) -> None:
        """Close and remove the files."""
        for output in self._outputs:
            # What cannot be removed is invisible; the error that led here is the one to tell.
            with contextlib.suppress(StorageError):
                output.abandon()
