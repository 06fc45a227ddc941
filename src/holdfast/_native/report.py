"""What one rank wrote, as columns: what it tells the coordinator, and what the index is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec
import numpy as np
import torch

from holdfast._state.tensors import DTYPE_NAMES
from holdfast._values.digest import block_counts
from holdfast._values.dtypes import DTYPES
from holdfast._values.lazy import LazyList
from holdfast.errors import InternalError
from holdfast.metadata import MetadataIndex, Versions
from holdfast.planner import TensorHead, WriteColumns, padded
from holdfast.storage import WriteResult


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A data file that is complete and synced; ``digest`` covers its header and its block digests."""

    name: str
    bytes: int
    header: int
    digest: int


class WrittenTensor(msgspec.Struct, frozen=True, kw_only=True):
    """What was written under one key, which may be other than what was planned."""

    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool = False
    alias_of: str | None = None
    kind: str | None = None
    quantizer: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenChunk:
    """Where one chunk went, as ``WriteResult.storage_data`` says it."""

    file: WrittenFile
    offset: int
    digests: tuple[int, ...]
    lo: tuple[int, ...]
    length: tuple[int, ...]
    tensor: WrittenTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenValue:
    """A value small enough for the manifest, as typed JSON."""

    json: Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WriteReport:
    """Chunks first, then aliases (which have no bytes of their own), then values.

    Chunk row i: ``key`` picks from ``keys`` and ``tensors``, ``file`` from ``files``; ``offset`` counts from the start
    of the file; ``digests`` holds the block digests of all chunks one after the other. ``short`` says the same to a
    coordinator that knows the plan: it is sent instead, where there is one.
    """

    files: list[WrittenFile]
    keys: list[str]
    tensors: list[WrittenTensor]
    key: np.ndarray
    file: np.ndarray
    offset: np.ndarray
    nbytes: np.ndarray
    lo: np.ndarray
    length: np.ndarray
    digests: np.ndarray
    aliases: dict[str, WrittenTensor]
    values: dict[str, Any]
    versions: Versions = field(default_factory=dict)
    short: ShortReport | None = None

    def __len__(self) -> int:
        return len(self.key) + len(self.aliases) + len(self.values)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self.short is not None:
            return _same, (self.short,)
        return _report, ({each.name: getattr(self, each.name) for each in fields(self)},)

    def first_block(self) -> np.ndarray:
        """Where in ``digests`` each chunk's blocks start, and the end."""
        return np.concatenate([[0], np.cumsum(block_counts(self.nbytes))])

    def item(self, row: int) -> WriteResult:
        """What ``row`` is in torch's protocol."""
        if row >= len(self.key):
            return self._without_bytes(row - len(self.key))
        tensor = self.tensors[self.key[row]]
        dimensions = len(tensor.shape)
        lo = tuple(self.lo[row, :dimensions].tolist())
        first = self.first_block()
        chunk = WrittenChunk(
            file=self.files[self.file[row]],
            offset=int(self.offset[row]),
            digests=tuple(self.digests[first[row] : first[row + 1]].tolist()),
            lo=lo,
            length=tuple(self.length[row, :dimensions].tolist()),
            tensor=tensor,
        )
        return WriteResult(MetadataIndex(self.keys[self.key[row]], torch.Size(lo)), int(self.nbytes[row]), chunk)

    def _without_bytes(self, row: int) -> WriteResult:
        if row < len(self.aliases):
            key, tensor = list(self.aliases.items())[row]
            return WriteResult(MetadataIndex(key, torch.Size([0] * len(tensor.shape))), 0, tensor)
        key, json = list(self.values.items())[row - len(self.aliases)]
        return WriteResult(MetadataIndex(key), 0, WrittenValue(json=json))


def _same(report: ShortReport) -> ShortReport:
    return report


def _report(columns: dict[str, Any]) -> WriteReport:
    return WriteReport(**columns)


@dataclass(kw_only=True, eq=False)
class ShortReport:
    """What one rank wrote, as planned by ``planning``: where each row of its plan went, and the digests.

    ``row`` is the coordinator's number of it; -1 for ``blobs``, values that became chunks, one after the other.
    ``tensors`` are those of which more was written than the plan says. ``plan`` gives the rank's plan, to whoever
    received this and knows it.
    """

    planning: bytes
    files: list[WrittenFile]
    row: np.ndarray
    file: np.ndarray
    offset: np.ndarray
    digests: np.ndarray
    blobs: dict[str, WrittenTensor]
    tensors: dict[str, WrittenTensor]
    values: dict[str, Any]
    versions: Versions
    plan: Callable[[], WriteColumns] | None = None
    _whole: WriteReport | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "plan": None, "_whole": None}

    def __len__(self) -> int:
        return len(self.whole())

    def item(self, row: int) -> WriteResult:
        """What ``row`` is in torch's protocol."""
        return self.whole().item(row)

    def whole(self) -> WriteReport:
        """The same in full."""
        if self._whole is None:
            if self.plan is None:
                raise InternalError("a report is of a plan that is not known here; please report it")
            self._whole = _in_full(self, self.plan())
        return self._whole


def planned_tensor(head: TensorHead) -> WrittenTensor:
    """What is written of a tensor where it is written as planned."""
    dtype = head.properties.dtype
    return WrittenTensor(
        dtype=DTYPE_NAMES[dtype],
        shape=tuple(head.size),
        requires_grad=head.properties.requires_grad and (dtype.is_floating_point or dtype.is_complex),
        alias_of=head.alias_of,
        kind=head.kind,
    )


def shortened(report: WriteReport, plan: WriteColumns, rows: Sequence[int]) -> WriteReport:
    """``report`` with its short form, if the coordinator knows ``plan`` and its chunks are those at ``rows``.

    Blobs come after them.
    """
    if not plan.planning or plan.planned is None:
        return report
    heads = dict(zip(plan.keys, plan.heads, strict=True))
    blobs: dict[str, WrittenTensor] = {}
    tensors: dict[str, WrittenTensor] = {}
    for key, written in zip(report.keys, report.tensors, strict=True):
        head = heads[key]
        if head is None:
            blobs[key] = written
        elif (planned := planned_tensor(head)) != written:
            if msgspec.structs.replace(written, quantizer=None) != planned:
                return report
            tensors[key] = written
    if len(report.key) != len(rows) + len(blobs) or set(report.keys[len(report.keys) - len(blobs) :]) != set(blobs):
        return report
    short = ShortReport(
        planning=plan.planning,
        files=report.files,
        row=narrowed(np.concatenate([plan.planned[np.array(rows, dtype=np.int64)], np.full(len(blobs), -1)])),
        file=narrowed(report.file),
        offset=narrowed(report.offset),
        digests=report.digests,
        blobs=blobs,
        tensors=tensors,
        values=report.values,
        versions=report.versions,
    )
    return replace(report, short=short)


def narrowed(numbers: np.ndarray) -> np.ndarray:
    """The same integers in as few bytes each as they need."""
    return numbers.astype(np.result_type(*map(np.min_scalar_type, (numbers.min(initial=0), numbers.max(initial=0)))))


def _in_full(short: ShortReport, plan: WriteColumns) -> WriteReport:
    """The report whose short form on ``plan`` is ``short``."""
    assert plan.planned is not None
    place = np.empty(len(plan.planned), dtype=np.int64)
    place[plan.planned] = np.arange(len(place))
    planned = place[short.row[short.row >= 0]]
    used, key = np.unique(plan.key[planned], return_inverse=True)
    names = [plan.keys[number] for number in used.tolist()]
    heads = {name: plan.heads[number] for name, number in zip(names, used.tolist(), strict=True)}
    tensors = [short.tensors.get(name) or planned_tensor(head) for name, head in heads.items() if head is not None]
    sizes = np.array([DTYPES[tensor.dtype].itemsize for tensor in tensors], dtype=np.int64)
    blob_bytes = np.array([blob.shape[0] for blob in short.blobs.values()], dtype=np.int64)
    width = max(plan.lo.shape[1], 1 if short.blobs else 0)

    def boxes(table: np.ndarray, fill: int, of_blobs: np.ndarray) -> np.ndarray:
        wide = np.full((len(short.row), width), fill, dtype=np.int64)
        wide[: len(planned), : table.shape[1]] = table[planned]
        wide[len(planned) :, :1] = of_blobs[:, None]
        return wide

    lo, length = boxes(plan.lo, 0, np.zeros_like(blob_bytes)), boxes(plan.length, 1, blob_bytes)
    nbytes = plan.length[planned].prod(axis=1, dtype=np.int64) * sizes[key]
    aliases = {
        name: planned_tensor(head)
        for name, head in zip(plan.keys, plan.heads, strict=True)
        if head is not None and head.alias_of is not None
    }
    return WriteReport(
        files=short.files,
        keys=[*names, *short.blobs],
        tensors=[*tensors, *short.blobs.values()],
        key=np.concatenate([key.astype(np.int64), len(names) + np.arange(len(short.blobs))]),
        file=short.file.astype(np.int64),
        offset=short.offset.astype(np.int64),
        nbytes=np.concatenate([nbytes, blob_bytes]),
        lo=lo,
        length=length,
        digests=short.digests,
        aliases=aliases,
        values=short.values,
        versions=short.versions,
    )


def full_report_of(results: Sequence[WriteResult]) -> WriteReport:
    """``results`` as columns that say everything."""
    report = report_of(results)
    return report.whole() if isinstance(report, ShortReport) else report


def report_of(results: Sequence[WriteResult]) -> WriteReport | ShortReport:
    """``results`` as columns, without a copy while nobody has touched them."""
    if isinstance(results, LazyList) and isinstance(results.columns, (WriteReport, ShortReport)):
        return results.columns
    chunks: list[tuple[str, WrittenChunk, int]] = []
    aliases: dict[str, WrittenTensor] = {}
    values: dict[str, Any] = {}
    for result in results:
        data = result.storage_data
        if isinstance(data, WrittenChunk):
            chunks.append((result.index.fqn, data, result.size_in_bytes))
        elif isinstance(data, WrittenTensor):
            aliases[result.index.fqn] = data
        elif isinstance(data, WrittenValue):
            values[result.index.fqn] = data.json
        else:
            raise InternalError(f"a {type(data).__name__} is no result of native storage; please report it")
    files = {chunk.file.name: chunk.file for _, chunk, _ in chunks}
    keys = {key: chunk.tensor for key, chunk, _ in chunks}
    file_ids = {name: number for number, name in enumerate(files)}
    key_ids = {key: number for number, key in enumerate(keys)}
    return WriteReport(
        files=list(files.values()),
        keys=list(keys),
        tensors=list(keys.values()),
        key=np.array([key_ids[key] for key, _, _ in chunks], dtype=np.int64),
        file=np.array([file_ids[chunk.file.name] for _, chunk, _ in chunks], dtype=np.int64),
        offset=np.array([chunk.offset for _, chunk, _ in chunks], dtype=np.int64),
        nbytes=np.array([nbytes for _, _, nbytes in chunks], dtype=np.int64),
        lo=padded([chunk.lo for _, chunk, _ in chunks], fill=0),
        length=padded([chunk.length for _, chunk, _ in chunks], fill=1),
        digests=np.array([digest for _, chunk, _ in chunks for digest in chunk.digests], dtype=np.uint64),
        aliases=aliases,
        values=values,
    )
