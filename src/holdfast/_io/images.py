"""Data files that lie in memory as they are to lie on disk: hashed there and written from there, without a copy.

Knows no torch and no planner: plain numbers say where a file begins, how long it is and which ranges are its blocks, so
that another process, which has only the memory, can do the same.
"""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np

from holdfast._io.direct import ALIGNMENT, OutputFile
from holdfast._io.pipeline import run_bounded
from holdfast._values.deadline import Progress
from holdfast._values.digest import digest
from holdfast.errors import StorageError

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

    ``progress`` is told of each piece, before and after.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._outputs: list[OutputFile] = []

    def write(self, files: Sequence[FileImage], memory: memoryview) -> list[WrittenImage]:
        """What was written, durably; after an error ``abandon`` what there is."""
        digests = [[0] * len(file.starts) for file in files]
        for file in files:
            self._outputs.append(OutputFile(os.fsdecode(file.path)))
            self._outputs[-1].make(file.size)
        run_bounded(self._jobs(files, memory, digests), workers=_WORKERS)
        written: list[WrittenImage] = []
        for file, output, blocks in zip(files, self._outputs, digests, strict=True):
            self._progress.check()
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
        self._progress.check()
        for number in range(bisect.bisect_left(file.starts, start), bisect.bisect_left(file.starts, stop)):
            known = file.known[number]
            blocks[number] = digest(memory[file.starts[number] : file.stops[number]]) if known is None else known
        output.write(memory[start:stop], start - file.begin)
        self._progress.moved(stop - start)

    def close(self) -> None:
        """Close the files, which ends the sign that their writer lives."""
        for output in self._outputs:
            # They are synced: whatever closing them tells, nothing is lost any more.
            with contextlib.suppress(StorageError):
                output.close()

    def abandon(self) -> None:
        for output in self._outputs:
            # What cannot be removed is invisible; the error that led here is the one to tell.
            with contextlib.suppress(StorageError):
                output.abandon()
