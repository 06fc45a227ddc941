"""All ranks' reports into one index and one manifest, checked to be whole. Pure: reports in, bytes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from holdfast._native.index import ChunkIndex, check_index, encode_index
from holdfast._native.manifest import FileEntry, IndexEntry, Manifest, Quantizer, TensorEntry, ValueEntry, WriterEntry
from holdfast._native.merge_short import ShortMerge, short_reports, tied
from holdfast._native.report import ShortReport, WriteReport, WrittenTensor
from holdfast._native.tree import encode_path
from holdfast._native.values import Json
from holdfast._state.paths import Path, stored_paths
from holdfast._values.digest import digest, to_hex
from holdfast.errors import CorruptError, InternalError, InvalidStateError
from holdfast.metadata import Metadata


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
