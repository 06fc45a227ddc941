"""Boxes of stored chunks into their targets: which bytes of which files that takes, and what they must be.

Wanted boxes become segments: the 1 MiB blocks they touch, which are verified, or exactly their bytes when verification
is off.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from holdfast._io.direct import InputFile
from holdfast._io.files import LocalFiles
from holdfast._native.catalog import Catalog
from holdfast._native.segments import SegmentFetch, Segments
from holdfast._plan.ranges import byte_spans, cut_at_blocks, touched_blocks
from holdfast._state.raw import Target
from holdfast._values.box import Box
from holdfast._values.digest import BLOCK_BYTES, block_counts, digest
from holdfast._values.dtypes import DTYPES
from holdfast.errors import CorruptError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """Boxes to be read: box ``lo``, ``length`` (both [n, D], padded with 0 and 1) of the chunk in index row ``row``.

    ``address`` as for a ``SegmentFetch``.
    """

    row: np.ndarray
    lo: np.ndarray
    length: np.ndarray
    address: np.ndarray | None = None

    def box(self, number: int, dimensions: int) -> Box:
        """Box ``number``, within its chunk."""
        return Box(tuple(self.lo[number, :dimensions].tolist()), tuple(self.length[number, :dimensions].tolist()))


class Fetch(SegmentFetch[Target]):
    """One batch of reads from native files; every block that is read is verified, unless ``verify`` is off."""

    def __init__(
        self,
        catalog: Catalog,
        files: LocalFiles,
        wanted: Wanted,
        *,
        open_targets: Callable[[list[int]], list[Target]],
        close_target: Callable[[int, Target], None],
        verify: bool,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            _segments(catalog, wanted, verify=verify),
            boxes=len(wanted.row),
            address=wanted.address,
            open_targets=open_targets,
            close_target=close_target,
            check=check,
        )
        self._catalog = catalog
        self._files = files
        self._wanted = wanted

    def file(self, number: int) -> AbstractContextManager[tuple[InputFile, bool]]:
        """Data file ``number``, and whether it is in the page cache."""
        return self._files.lend(number)

    def expected(self, digests: np.ndarray) -> list[int]:
        """The digests themselves, or -1 where nothing is verified."""
        if len(digests) and digests[0] < 0:
            return [-1] * len(digests)
        expected: list[int] = self._catalog.index.digests[digests].tolist()
        return expected

    def is_intact(self, box: int, start: int, view: memoryview, expected: int) -> bool:
        """Whether the block has its digest."""
        return digest(view) == expected

    def damaged(self, file: int, box: int, offset: int, nbytes: int) -> CorruptError:
        """The error that names the file, the key and the bytes."""
        return self._damaged_chunk(int(self._wanted.row[box]), offset, nbytes)

    def _damaged_chunk(self, row: int, offset: int, nbytes: int) -> CorruptError:
        path = self._catalog.file_path(int(self._catalog.index.file[row]))
        key = self._catalog.manifest.tensors[int(self._catalog.index.tensor[row])].key
        return CorruptError(
            f"{path!r} is damaged in bytes {offset} to {offset + nbytes}, which hold part of {key!r}; "
            "use another checkpoint",
            path=path,
            key=key,
            span=(offset, offset + nbytes),
        )


def _segments(catalog: Catalog, wanted: Wanted, *, verify: bool) -> Segments:
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
    return Segments(
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
    return cut_at_blocks(starts, stops, BLOCK_BYTES)
