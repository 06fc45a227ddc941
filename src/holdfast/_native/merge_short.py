"""The short reports of all ranks into the columns of one index. Pure: reports in, columns out.

What was planned is known by layout, tensor for tensor; a report says where a rank's rows went. Work is done per rank
and per tensor on columns, never per chunk, and columns are no wider than they have to be.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast._native.index import ChunkIndex
from holdfast._native.report import ShortReport, WriteReport, WrittenTensor, planned_tensor
from holdfast._values.digest import block_counts
from holdfast._values.dtypes import DTYPES
from holdfast._values.lazy import LazyDict
from holdfast.errors import InternalError, InvalidStateError
from holdfast.layout_plan import LayoutPlan
from holdfast.metadata import Metadata


class ShortMerge:
    """The reports of all ranks on one plan: ``tensors`` by key, in order, and the ``index`` of their chunks."""

    def __init__(self, plan: LayoutPlan, reports: Sequence[ShortReport]) -> None:
        self._plan = plan
        self._reports = reports
        self.tensors = self._tensors()
        self.index = self._index()

    def _tensors(self) -> dict[str, WrittenTensor]:
        """What was written under each key that is not a value in the manifest."""
        said: dict[str, WrittenTensor] = {}
        for report in self._reports:
            for key, tensor in (*report.blobs.items(), *report.tensors.items()):
                if said.setdefault(key, tensor) != tensor:
                    raise InvalidStateError(f"{key!r} was written in different ways by two ranks", key=key)
        tensors = {}
        for key, head in zip(self._plan.keys, self._plan.heads, strict=True):
            written = said.get(key)
            if written is None and head is not None:
                written = planned_tensor(head)
                if head.alias_of in said:
                    written = tied(written, said[head.alias_of])
            if written is not None:
                tensors[key] = written
        return tensors

    def _index(self) -> ChunkIndex:
        plan = self._plan
        first = np.zeros(len(plan.keys) + 1, dtype=np.int64)  # the first chunk of each key
        boxes: list[tuple[np.ndarray, np.ndarray]] = []
        sizes: list[np.ndarray] = []
        volumes: dict[int, np.ndarray] = {}
        for which, key in enumerate(plan.keys):
            tensor, chunks = self.tensors.get(key), plan.chunks[which]
            count = 0
            if tensor is not None and tensor.alias_of is None:
                lo, length = chunks.lo, chunks.length
                if plan.heads[which] is None:  # a value that became a chunk
                    lo, length = np.zeros((1, 1), dtype=np.int64), np.array([tensor.shape], dtype=np.int64)
                if id(length) not in volumes:
                    volumes[id(length)] = length.prod(axis=1, dtype=np.int64)
                count = len(lo)
                boxes.append((lo, length))
                sizes.append(volumes[id(length)] * DTYPES[tensor.dtype].itemsize)
            first[which + 1] = first[which] + count
        nbytes = np.concatenate(sizes) if sizes else np.zeros(0, dtype=np.int64)
        file, offset, digests = self._placed(first, nbytes)
        rows = [len(lo) for lo, _ in boxes]
        stored = [number for number, tensor in enumerate(self.tensors.values()) if tensor.alias_of is None]
        return ChunkIndex(
            tensor=np.repeat(np.array(stored, dtype=np.uint32), rows),
            file=file,
            offset=offset,
            bytes=nbytes,
            lo=_stacked([lo for lo, _ in boxes], rows, 0),
            length=_stacked([length for _, length in boxes], rows, 1),
            digests=digests,
        )

    def _placed(self, first: np.ndarray, nbytes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """File, offset and digests of all chunks; every chunk was written once, every file is filled by its chunks."""
        written = self._plan.written
        file = np.empty(len(nbytes), dtype=np.uint32)
        offset = np.full(len(nbytes), -1, dtype=np.int64)
        blocks = block_counts(nbytes)
        starts = np.cumsum(blocks) - blocks
        is_single = bool((blocks == 1).all())
        digests = np.empty(int(blocks.sum()), dtype=np.uint64)
        files = placed = 0
        for rank, report in enumerate(self._reports):
            _, keys, numbers = written.of(rank)
            row = report.row[report.row >= 0]
            chunk = first[keys[row]] + numbers[row]
            if report.blobs:
                blobs = [first[self._plan.numbers[key]] for key in report.blobs]
                chunk = np.concatenate([chunk, np.array(blobs, dtype=np.int64)])
            size = nbytes[chunk]
            _check_filled(report, rank, size)
            file[chunk] = report.file + np.uint32(files)
            offset[chunk] = report.offset
            if is_single:
                digests[starts[chunk]] = report.digests
            else:
                digests[_runs(starts[chunk], blocks[chunk])] = report.digests
            files += len(report.files)
            placed += len(chunk)
        if placed != len(nbytes) or (len(offset) and int(offset.min()) < 0):
            missing = int(np.argmin(offset)) if len(offset) else 0
            key = self._plan.keys[int(np.searchsorted(first, missing, side="right")) - 1]
            raise InternalError(f"a chunk of {key!r} was planned but not written once; please report it")
        return file, offset, digests


def short_reports(
    metadata: Metadata, reports: Sequence[WriteReport | ShortReport]
) -> tuple[LayoutPlan, list[ShortReport]] | None:
    """The plan by which all reports are short, and these; None where one of them is not, or the plan is not known."""
    entries = metadata.state_dict_metadata
    plan = entries.source if isinstance(entries, LazyDict) else None
    if not isinstance(plan, LayoutPlan) or plan.ranks != len(reports):
        return None
    shorts = []
    for report in reports:
        short = report.short if isinstance(report, WriteReport) else report
        if short is None or short.files is not report.files:
            return None
        shorts.append(short)
    return (plan, shorts) if len({short.planning for short in shorts}) == 1 else None


def tied(tensor: WrittenTensor, first: WrittenTensor) -> WrittenTensor:
    """``tensor``, which shares the bytes of ``first``."""
    return WrittenTensor(
        dtype=first.dtype,
        shape=first.shape,
        requires_grad=tensor.requires_grad,
        alias_of=tensor.alias_of,
        kind=tensor.kind,
        quantizer=first.quantizer,
    )


def _check_filled(report: ShortReport, rank: int, size: np.ndarray) -> None:
    """InvalidStateError unless the chunks of each file follow each other from its header to its end."""
    if len(size) != len(report.offset) or int(block_counts(size).sum()) != len(report.digests):
        raise InvalidStateError(f"what rank {rank} wrote is not whole: its report has other chunks than its plan")
    begin = report.offset.astype(np.int64)
    end = begin + size
    last = np.flatnonzero(np.diff(report.file, append=len(report.files)))
    expected = np.empty_like(begin)
    expected[1:] = end[:-1]
    starts = np.concatenate([[0], last[:-1] + 1])
    used = report.file[last].astype(np.int64)
    if len(begin):
        expected[starts] = [report.files[number].header for number in used.tolist()]
    if (
        len(used) != len(report.files)
        or (begin != expected).any()
        or [report.files[number].bytes for number in used.tolist()] != end[last].tolist()
    ):
        raise InvalidStateError(f"what rank {rank} wrote is not whole: its chunks do not fill its files")


def _runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers from each start on, so many, one run after the other."""
    before = np.cumsum(counts) - counts
    shift: np.ndarray = np.repeat(starts - before, counts)
    return shift + np.arange(len(shift))


def _stacked(tables: Sequence[np.ndarray], rows: Sequence[int], fill: int) -> np.ndarray:
    """The tables one below the other, the narrow ones filled up with ``fill``."""
    width = max((table.shape[1] for table in tables), default=0)
    stacked = np.full((sum(rows), width), fill, dtype=np.int64)
    start = 0
    for table, count in zip(tables, rows, strict=True):
        stacked[start : start + count, : table.shape[1]] = table
        start += count
    return stacked
