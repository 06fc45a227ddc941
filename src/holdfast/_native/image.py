"""Data files laid out in memory before a byte has moved: which bytes of the state go where.

The files are the same, byte for byte, that the packer writes. They lie one after the other, each from a page on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from holdfast._io.direct import ALIGNMENT
from holdfast._native.image_files import FileImage, WrittenImage
from holdfast._native.packer import Chunk, DataFile, Placed
from holdfast._native.report import WrittenFile
from holdfast._state.raw import Source
from holdfast._values.digest import BLOCK_BYTES
from holdfast._values.lazy import cached_property


class Copy(NamedTuple):
    """All bytes of ``source`` are to lie from ``at`` on; ``name`` is that of the chunk."""

    name: str
    source: Source
    at: int


class Image:
    """The files of ``chunks``: ``nbytes`` of memory, which ``copies`` and ``fill_frames`` fill together.

    Whoever has done the copies may clear them, because they hold the tensors, and may leave the digests of blocks in
    ``known``, each by its place.
    """

    def __init__(self, open_file: Callable[[int, int], DataFile], chunks: Iterable[Chunk]) -> None:
        self.placed: list[Placed] = []
        self.copies: list[Copy] = []
        self.known: dict[int, int] = {}
        self.digests: list[int] = []
        self._files: list[DataFile] = []
        self._begins: list[int] = []
        self.nbytes = 0
        for chunk in chunks:
            if not self._files or not self._files[-1].takes(chunk):
                self._end_file()
                file = open_file(len(self._files), len(self.placed))
                file.make_room(chunk)
                begin = self.nbytes
                self._begins.append(begin)
                self._files.append(file)
                number = len(self._begins) - 1
            self.placed.append(Placed(number, file.end))
            self.copies.append(Copy(chunk.name, chunk.source, begin + file.end))
            file.enter(chunk)
        self._end_file()
        self._sizes = [copy.source.nbytes for copy in self.copies]
        self.data_bytes = sum(self._sizes)

    def _end_file(self) -> None:
        if self._files:
            self.nbytes = self._begins[-1] + -(-self._files[-1].end // ALIGNMENT) * ALIGNMENT

    @cached_property
    def files(self) -> list[FileImage]:
        """What there is to write, as plain numbers; made when it is written, because there may be many blocks."""
        starts: list[list[int]] = [[] for _ in self._files]
        stops: list[list[int]] = [[] for _ in self._files]
        for (number, offset), nbytes in zip(self.placed, self._sizes, strict=True):
            begin = self._begins[number] + offset
            end = begin + nbytes
            blocks = range(begin, end, BLOCK_BYTES)
            starts[number].extend(blocks)
            stops[number].extend(min(start + BLOCK_BYTES, end) for start in blocks)
        return [
            FileImage(
                path=os.fsencode(file.output.path),
                begin=self._begins[number],
                size=file.end,
                header=file.header_bytes,
                starts=starts[number],
                stops=stops[number],
                known=[self.known.get(start) for start in starts[number]],
            )
            for number, file in enumerate(self._files)
        ]

    def fill_frames(self, memory: memoryview) -> None:
        """Put in place what no chunk holds: the headers, and zeros after the end of each file."""
        for begin, file in zip(self._begins, self._files, strict=True):
            memory[begin : begin + file.header_bytes] = file.header()
            end = begin + file.end
            padding = -file.end % ALIGNMENT
            memory[end : end + padding] = bytes(padding)

    def written(self, results: Sequence[WrittenImage]) -> list[WrittenFile]:
        """The files, now that they are on disk; their block digests become ``digests``."""
        self.digests = [digest for result in results for digest in result.digests]
        return [
            WrittenFile(name=file.name, bytes=file.end, header=file.header_bytes, digest=result.digest)
            for file, result in zip(self._files, results, strict=True)
        ]
