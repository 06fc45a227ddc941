"""All ranks' reports into one index and one manifest, checked to be whole. Pure: reports in, bytes out.

Where the coordinator planned for all ranks, it knows every chunk, and reports say where their rows went: work is done
per rank and per tensor on columns, never per chunk. Otherwise the reports say everything, and it is checked that
their chunks make up the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast._native.forms import Json
from holdfast._native.index import ChunkIndex, encode_index
from holdfast._native.manifest import FileEntry, IndexEntry, Manifest, Quantizer, TensorEntry, ValueEntry, WriterEntry
from holdfast._native.paths import STATISTICS_NAME, encode_path
from holdfast._native.report import WriteReport, WrittenTensor, planned_tensors
from holdfast._native.statistics import encode_statistics, entry_for
from holdfast._native.values import encode_value
from holdfast._plan.coverage import check_coverage
from holdfast._save_plan.together import JointPlan
from holdfast._state.nested import stored_paths
from holdfast._values.digest import block_counts, digest, to_hex
from holdfast._values.dtypes import DTYPES
from holdfast._values.lazy import LazyDict
from holdfast._values.statistics import add_numbers, no_numbers
from holdfast.errors import InternalError, InvalidStateError
from holdfast.metadata import Metadata
from holdfast.planner import padded


def merge_reports(
    metadata: Metadata,
    reports: Sequence[WriteReport],
    *,
    attempt: str,
    writer: WriterEntry,
    user_metadata: dict[str, object],
) -> tuple[Manifest, bytes] | tuple[Manifest, bytes, bytes]:
    """The manifest and the bytes of the index of what ``reports`` say was written; and of the statistics, if all have.

    InvalidStateError unless that is everything ``metadata`` promises, each tensor tiled exactly.
    """
    paths = stored_paths(metadata)
    plan = _plan_of_all(metadata, reports)
    written = _written_as_reported(reports) if plan is None else _written_as_planned(plan, reports)
    tensors: dict[str, WrittenTensor] = {}
    values: dict[str, Json] = {}
    for key in filter(written.__contains__, metadata.state_dict_metadata):
        tensors[key] = _settled(key, written)
    for report in reports:
        values.update(report.values)
    missing = [key for key in metadata.state_dict_metadata if key not in tensors and key not in values]
    if missing:
        raise InternalError(f"{missing[0]!r} was planned but no rank wrote it ({len(missing)} keys in all)")
    files = tuple(
        FileEntry(name=file.name, bytes=file.bytes, header=file.header, digest=to_hex(file.digest))
        for report in reports
        for file in report.files
    )
    entries = tuple(
        TensorEntry(
            key=key,
            dtype=tensor.dtype,
            shape=tensor.shape,
            path=encode_path(key, paths.get(key)),
            alias_of=tensor.alias_of,
            requires_grad=tensor.requires_grad,
            kind=tensor.kind,
            quantizer=None if tensor.quantizer is None else msgspec.convert(tensor.quantizer, Quantizer),
        )
        for key, tensor in tensors.items()
    )
    chunks = _chunks_as_reported(tensors, reports) if plan is None else _chunks_as_planned(plan, tensors, reports)
    data = encode_index(_index(chunks, reports))
    statistics = _statistics(entries, chunks, reports)
    if statistics:
        entry = entry_for(attempt, len(reports), statistics)
        user_metadata = {**user_metadata, STATISTICS_NAME: msgspec.structs.asdict(entry)}
    manifest = Manifest(
        requires=("pickle",) if any(tensor.kind == "pickle" for tensor in tensors.values()) else (),
        attempt=attempt,
        writer=writer,
        files=files,
        index=IndexEntry(name=f"index-{attempt}.safetensors", bytes=len(data), digest=to_hex(digest(data))),
        tensors=entries,
        values=tuple(
            ValueEntry(key=key, value=values[key], position=position, path=encode_path(key, paths.get(key)))
            for position, key in enumerate(metadata.state_dict_metadata)
            if key in values
        ),
        metadata=encode_value(user_metadata, key="planner_data"),
    )
    return (manifest, data, statistics) if statistics else (manifest, data)


def _settled(key: str, written: Mapping[str, WrittenTensor]) -> WrittenTensor:
    """What was written under ``key``; an alias has become what the tensor it shares has become."""
    tensor = written[key]
    if tensor.alias_of is None:
        return tensor
    first = written.get(tensor.alias_of)
    if first is None:
        raise InvalidStateError(f"{key!r} shares the data of {tensor.alias_of!r}, which no rank wrote", key=key)
    return msgspec.structs.replace(tensor, dtype=first.dtype, shape=first.shape, quantizer=first.quantizer)


def _plan_of_all(metadata: Metadata, reports: Sequence[WriteReport]) -> JointPlan | None:
    """The plan that all reports are on; None where they are not on one, or it is not known."""
    entries = metadata.state_dict_metadata
    plan = entries.source if isinstance(entries, LazyDict) else None
    if not isinstance(plan, JointPlan) or plan.ranks != len(reports) or not reports[0].planning:
        return None
    return plan if all(report.planning == reports[0].planning for report in reports) else None


def _written_as_planned(plan: JointPlan, reports: Sequence[WriteReport]) -> dict[str, WrittenTensor]:
    """What was written under each key that is not a value in the manifest."""
    said: dict[str, WrittenTensor] = {}
    for report in reports:
        for key, tensor in report.tensors.items():
            if said.setdefault(key, tensor) != tensor:
                raise InvalidStateError(f"{key!r} was written in different ways by two ranks", key=key)
    return {**planned_tensors(plan.keys, plan.heads), **said}


def _written_as_reported(reports: Sequence[WriteReport]) -> dict[str, WrittenTensor]:
    """The same, where every rank says it."""
    written: dict[str, WrittenTensor] = {}
    for report in reports:
        for key, tensor in report.written.items():
            known = written.setdefault(key, tensor)
            if known != tensor:
                raise InvalidStateError(
                    f"{key!r} was written as {known.dtype} {list(known.shape)} by one rank "
                    f"and as {tensor.dtype} {list(tensor.shape)} by another",
                    key=key,
                )
    return written


class _Chunks(NamedTuple):
    """All chunks in the order of the index; ``of_report`` has the numbers of those of each report."""

    tensor: np.ndarray
    lo: np.ndarray
    length: np.ndarray
    nbytes: np.ndarray
    of_report: list[np.ndarray]


def _chunks_as_reported(tensors: Mapping[str, WrittenTensor], reports: Sequence[WriteReport]) -> _Chunks:
    """The chunks of all reports by tensor and place; InvalidStateError unless they tile the tensors exactly."""
    ids = dict(zip(tensors, range(len(tensors)), strict=True))
    boxes = [report.boxes for report in reports]
    shapes = [tensor.shape if tensor.alias_of is None else (0,) for tensor in tensors.values()]
    width = max([*(each.lo.shape[1] for each in boxes), *map(len, shapes)], default=0)
    numbers = [np.array([ids.get(key, -1) for key in report.columns.keys], dtype=np.int64) for report in reports]
    tensor = np.concatenate([number[each.key] for number, each in zip(numbers, boxes, strict=True)])
    if (tensor < 0).any():
        raise InternalError("a rank wrote a key that the metadata does not have")
    lo, length = _stacked([each.lo for each in boxes], 0, width), _stacked([each.length for each in boxes], 1, width)
    order = np.lexsort((*lo.T[::-1], tensor))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    tensor, lo, length = tensor[order], lo[order], length[order]
    sizes = _stacked([padded(shapes, fill=1)], 1, width)
    is_whole = np.array_equal(tensor, np.arange(len(sizes))) and not lo.any() and np.array_equal(length, sizes)
    for fault in () if is_whole else check_coverage(tensor, lo, length, sizes):
        key = list(tensors)[fault.tensor]
        raise InvalidStateError(f"{key!r} was not written as a whole: {fault.detail}", key=key)
    nbytes = np.concatenate([each.nbytes for each in boxes])[order]
    return _Chunks(tensor, lo, length, nbytes, np.split(place, np.cumsum([len(each.key) for each in boxes])[:-1]))


def _chunks_as_planned(
    plan: JointPlan, tensors: Mapping[str, WrittenTensor], reports: Sequence[WriteReport]
) -> _Chunks:
    """The chunks that were planned; nothing is sorted or checked, because the planner did it."""
    first = np.zeros(len(plan.keys) + 1, dtype=np.int64)  # the first chunk of each key
    lows: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    volumes: dict[int, np.ndarray] = {}
    for which, key in enumerate(plan.keys):
        tensor, chunks = tensors.get(key), plan.chunks[which]
        first[which + 1] = first[which]
        if tensor is not None and tensor.alias_of is None:
            lo, length = chunks.lo, chunks.length
            if plan.heads[which] is None:  # a value that became a chunk
                lo, length = np.zeros((1, 1), dtype=np.int64), np.array([tensor.shape], dtype=np.int64)
            if id(length) not in volumes:
                volumes[id(length)] = length.prod(axis=1, dtype=np.int64)
            lows.append(lo)
            lengths.append(length)
            sizes.append(volumes[id(length)] * DTYPES[tensor.dtype].itemsize)
            first[which + 1] += len(lo)
    stored = [number for number, tensor in enumerate(tensors.values()) if tensor.alias_of is None]
    of_report = []
    for rank, report in enumerate(reports):
        _, keys, numbers = plan.written.of(rank)
        of_report.append(first[keys[report.row]] + numbers[report.row])
    width = max((table.shape[1] for table in lows), default=0)
    return _Chunks(
        tensor=np.repeat(np.array(stored, dtype=np.uint32), list(map(len, sizes))),
        lo=_stacked(lows, 0, width),
        length=_stacked(lengths, 1, width),
        nbytes=np.concatenate([np.zeros(0, dtype=np.int64), *sizes]),
        of_report=of_report,
    )


def _stacked(tables: Sequence[np.ndarray], fill: int, width: int) -> np.ndarray:
    """The tables one below the other, the narrow ones filled up with ``fill``."""
    stacked = np.full((sum(map(len, tables)), width), fill, dtype=np.int64)
    start = 0
    for table in tables:
        stacked[start : start + len(table), : table.shape[1]] = table
        start += len(table)
    return stacked


def _index(chunks: _Chunks, reports: Sequence[WriteReport]) -> ChunkIndex:
    """Where all chunks are; every chunk was written once, and every file is filled by its chunks."""
    nbytes = chunks.nbytes
    file: np.ndarray = np.empty(len(nbytes), dtype=np.uint32)
    offset = np.full(len(nbytes), -1, dtype=np.int64)
    blocks = block_counts(nbytes)
    starts = np.cumsum(blocks) - blocks
    is_single = bool((blocks == 1).all())
    digests = np.empty(int(blocks.sum()), dtype=np.uint64)
    files = placed = 0
    for rank, (report, mine) in enumerate(zip(reports, chunks.of_report, strict=True)):
        _check_filled(report, rank, nbytes[mine])
        file[mine] = report.file + np.uint32(files)
        offset[mine] = report.offset
        places, counts = starts[mine], blocks[mine]
        if not is_single:  # from each start on, as many places as the chunk has blocks
            places = np.repeat(places - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        digests[places] = report.digests
        files += len(report.files)
        placed += len(mine)
    if placed != len(nbytes) or (len(offset) and int(offset.min()) < 0):
        raise InternalError("the written chunks are not the planned ones; please report it")
    return ChunkIndex(
        tensor=chunks.tensor,
        file=file,
        offset=offset,
        bytes=nbytes,
        lo=chunks.lo,
        length=chunks.length,
        digests=digests,
    )


def _statistics(entries: Sequence[TensorEntry], chunks: _Chunks, reports: Sequence[WriteReport]) -> bytes:
    """The numbers of all tensors, those of their chunks added up; nothing where a rank does not tell them."""
    table = no_numbers(len(entries))
    for report, mine in zip(reports, chunks.of_report, strict=True):
        if report.numbers is None:
            return b""
        add_numbers(table, chunks.tensor[mine], report.numbers)
    return encode_statistics(entries, table)


def _check_filled(report: WriteReport, rank: int, size: np.ndarray) -> None:
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
