"""All ranks' reports into one index and one manifest, checked to be whole. Pure: reports in, bytes out.

What was planned is known by layout, tensor for tensor; a report says where a rank's rows went. Work is done per rank
and per tensor on columns, never per chunk, and columns are no wider than they have to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from holdfast._native.index import ChunkIndex, check_index, encode_index
from holdfast._native.manifest import FileEntry, IndexEntry, Manifest, Quantizer, TensorEntry, ValueEntry, WriterEntry
from holdfast._native.paths import encode_path
from holdfast._native.report import ShortReport, WriteReport, WrittenTensor, planned_tensor
from holdfast._native.values import Json
from holdfast._save_plan.from_layouts import LayoutPlan
from holdfast._state.nested import Path, stored_paths
from holdfast._values.digest import block_counts, digest, to_hex
from holdfast._values.dtypes import DTYPES
from holdfast._values.lazy import LazyDict
from holdfast.errors import CorruptError, InternalError, InvalidStateError
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


def merge_reports(
    metadata: Metadata,
    reports: Sequence[WriteReport | ShortReport],
    *,
    attempt: str,
    versions: tuple[str, str, str],
    user_metadata: Json,
) -> tuple[Manifest, bytes]:
    """The manifest and the bytes of the index of what ``reports`` say was written.

    InvalidStateError unless that is everything ``metadata`` promises, each tensor tiled exactly.
    """
    paths = stored_paths(metadata)
    short = short_reports(metadata, reports)
    if short is not None:
        merged = ShortMerge(*short)
        tensors, reports = merged.tensors, short[1]
    else:
        wholes = [report.whole() if isinstance(report, ShortReport) else report for report in reports]
        tensors, reports = _tensors(metadata, wholes), wholes
    values = {key: json for report in reports for key, json in report.values.items()}
    missing = [key for key in metadata.state_dict_metadata if key not in tensors and key not in values]
    if missing:
        raise InternalError(f"{missing[0]!r} was planned but no rank wrote it ({len(missing)} keys in all)")
    files = tuple(
        FileEntry(name=file.name, bytes=file.bytes, header=file.header, digest=to_hex(file.digest))
        for report in reports
        for file in report.files
    )
    entries = tuple(_entry(key, tensor, paths.get(key)) for key, tensor in tensors.items())
    data = encode_index(merged.index if short is not None else _checked_index(wholes, files, entries))
    holdfast, torch, python = versions
    manifest = Manifest(
        requires=("pickle",) if any(tensor.kind == "pickle" for tensor in tensors.values()) else (),
        attempt=attempt,
        writer=WriterEntry(holdfast=holdfast, torch=torch, python=python, world_size=len(reports)),
        files=files,
        index=IndexEntry(name=f"index-{attempt}.safetensors", bytes=len(data), digest=to_hex(digest(data))),
        tensors=entries,
        values=tuple(
            ValueEntry(key=key, value=values[key], position=position, path=encode_path(key, paths.get(key)))
            for position, key in enumerate(metadata.state_dict_metadata)
            if key in values
        ),
        metadata=user_metadata,
    )
    return manifest, data


def _checked_index(
    reports: Sequence[WriteReport], files: tuple[FileEntry, ...], entries: tuple[TensorEntry, ...]
) -> ChunkIndex:
    index = _index(reports, {entry.key: number for number, entry in enumerate(entries)})
    try:
        check_index(index, files=files, tensors=entries, path="the new checkpoint")
    except CorruptError as error:
        raise InvalidStateError(f"what was written is not whole: {error.message}", key=error.key) from error
    return index


def _tensors(metadata: Metadata, reports: Sequence[WriteReport]) -> dict[str, WrittenTensor]:
    """What was written under each key, in the order of ``metadata``."""
    written: dict[str, WrittenTensor] = {}
    for report in reports:
        for key, tensor in (*zip(report.keys, report.tensors, strict=True), *report.aliases.items()):
            known = written.setdefault(key, tensor)
            if known != tensor:
                raise InvalidStateError(
                    f"{key!r} was written as {known.dtype} {list(known.shape)} by one rank "
                    f"and as {tensor.dtype} {list(tensor.shape)} by another",
                    key=key,
                )
    return {key: _settled(key, written) for key in metadata.state_dict_metadata if key in written}


def _settled(key: str, written: Mapping[str, WrittenTensor]) -> WrittenTensor:
    """What was written under ``key``; an alias has become what the tensor it shares has become."""
    tensor = written[key]
    if tensor.alias_of is None:
        return tensor
    first = written.get(tensor.alias_of)
    if first is None:
        raise InvalidStateError(f"{key!r} is planned as the same as {tensor.alias_of!r}, which nobody wrote", key=key)
    return tied(tensor, first)


def _entry(key: str, tensor: WrittenTensor, path: Path | None) -> TensorEntry:
    quantizer = tensor.quantizer
    return TensorEntry(
        key=key,
        dtype=tensor.dtype,
        shape=tensor.shape,
        path=encode_path(key, path),
        alias_of=tensor.alias_of,
        requires_grad=tensor.requires_grad,
        kind=tensor.kind,
        quantizer=None if quantizer is None else msgspec.convert(quantizer, Quantizer),
    )


def _index(reports: Sequence[WriteReport], ids: Mapping[str, int]) -> ChunkIndex:
    """The chunks of all reports, sorted by tensor and place, with their digests in the same order."""
    width = max((report.lo.shape[1] for report in reports), default=0)
    first_file = np.cumsum([0, *(len(report.files) for report in reports)])
    first_digest = np.cumsum([0, *(len(report.digests) for report in reports)])

    def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def widened(table: np.ndarray, fill: int) -> np.ndarray:
        return np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=fill)

    tensor = joined(
        [np.array([ids.get(key, -1) for key in report.keys], dtype=np.int64)[report.key] for report in reports]
    )
    if (tensor < 0).any():
        raise InternalError("a rank wrote a key that the metadata does not have")
    lo = joined([widened(report.lo, 0) for report in reports]).reshape(len(tensor), width)
    order = np.lexsort((*lo.T[::-1], tensor))
    starts = joined([report.first_block()[:-1] + first_digest[rank] for rank, report in enumerate(reports)])[order]
    nbytes = joined([report.nbytes for report in reports])[order]
    counts = joined([np.diff(report.first_block()) for report in reports])[order]
    ends = np.cumsum(counts)
    gather = np.repeat(starts - (ends - counts), counts) + np.arange(int(ends[-1]) if len(ends) else 0)
    return ChunkIndex(
        tensor=tensor[order],
        file=joined([report.file + first_file[rank] for rank, report in enumerate(reports)])[order],
        offset=joined([report.offset for report in reports])[order],
        bytes=nbytes,
        lo=lo[order],
        length=joined([widened(report.length, 1) for report in reports]).reshape(len(tensor), width)[order],
        digests=joined([report.digests for report in reports])[gather].astype(np.uint64),
    )
