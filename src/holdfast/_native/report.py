"""What one rank wrote, as columns: what it tells the coordinator, and what the index is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

import msgspec
import numpy as np
import torch

from holdfast._native.forms import Json
from holdfast._plan.coverage import widened
from holdfast._state.tensors import DTYPE_NAMES, torch_dtype
from holdfast._values.digest import block_counts
from holdfast._values.dtypes import DTYPES
from holdfast._values.lazy import LazyList, cached_property
from holdfast.errors import InternalError
from holdfast.metadata import Containers, MetadataIndex, TensorProperties, Versions
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
    quantizer: dict[str, object] | None = None


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

    json: Json


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkBoxes:
    """The boxes of chunks: ``key`` is the number of each one's key in the plan."""

    key: np.ndarray
    lo: np.ndarray
    length: np.ndarray
    nbytes: np.ndarray

    def first_block(self) -> np.ndarray:
        """Where each chunk's blocks start among those of all, and the end."""
        return np.concatenate([[0], np.cumsum(block_counts(self.nbytes))])


@dataclass(frozen=True, kw_only=True, eq=False)
class WriteReport:
    """Where the rows of a plan went, and the digests of all blocks of one chunk after the other.

    Chunk i is row ``row[i]`` of the plan, as the coordinator counts them where it made the plan; it lies in file number
    ``file[i]``, ``offset[i]`` bytes from its start. ``tensors`` are keys under which something else was written than
    planned, among them values that became chunks. ``values`` are those for the manifest. ``numbers`` are the statistics
    of each chunk, where they are kept.
    ``planning`` names the plan to a coordinator that knows it: then the report is sent without the plan.
    """

    files: list[WrittenFile]
    row: np.ndarray
    file: np.ndarray
    offset: np.ndarray
    digests: np.ndarray
    tensors: dict[str, WrittenTensor]
    values: dict[str, Json]
    versions: Versions = field(default_factory=dict)
    containers: Containers = field(default_factory=dict)
    numbers: np.ndarray | None = None
    planning: bytes = b""
    plan: WriteColumns | Callable[[], WriteColumns] | None = None

    def __getstate__(self) -> dict[str, object]:
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**state, "plan": None if self.planning else self.columns}

    def with_plan(self, plan: Callable[[], WriteColumns]) -> WriteReport:
        """The same, where the plan is known."""
        return replace(self, plan=plan)

    @cached_property
    def columns(self) -> WriteColumns:
        """The plan that this is a report on."""
        if self.plan is None:
            raise InternalError("a report belongs to an unknown plan; please report it")
        return self.plan() if callable(self.plan) else self.plan

    @cached_property
    def written(self) -> dict[str, WrittenTensor]:
        """What was written under each key of the plan that is not a value in the manifest."""
        return {**planned_tensors(self.columns.keys, self.columns.heads), **self.tensors}

    @cached_property
    def boxes(self) -> ChunkBoxes:
        """What of its tensor each chunk is."""
        plan, row = self.columns, self.row
        if plan.planned is not None:
            place = np.empty(len(plan.planned), dtype=np.int64)
            place[plan.planned] = np.arange(len(place))
            row = place[row]
        key = plan.key[row]
        lo, length = plan.lo[row], plan.length[row]
        if self.tensors:
            width = max([lo.shape[1], *(len(tensor.shape) for tensor in self.tensors.values())])
            lo, length = widened(lo, width, 0), widened(length, width, 1)
        itemsizes = np.array([1 if head is None else head.properties.dtype.itemsize for head in plan.heads])
        for number, (name, head) in enumerate(zip(plan.keys, plan.heads, strict=True) if self.tensors else ()):
            tensor = self.tensors.get(name)
            if tensor is not None:
                itemsizes[number] = DTYPES[tensor.dtype].itemsize
                if head is None or tuple(head.size) != tensor.shape:  # only whole tensors change their shape
                    lo[key == number], length[key == number] = 0, widened(np.array([tensor.shape]), width, 1)
        return ChunkBoxes(key=key, lo=lo, length=length, nbytes=length.prod(axis=1, dtype=np.int64) * itemsizes[key])

    @cached_property
    def _without_bytes(self) -> list[WriteResult]:
        tied = [(key, tensor) for key, tensor in self.written.items() if tensor.alias_of is not None]
        return [WriteResult(MetadataIndex(key, torch.Size([0] * len(each.shape))), 0, each) for key, each in tied] + [
            WriteResult(MetadataIndex(key), 0, WrittenValue(json=json)) for key, json in self.values.items()
        ]

    def __len__(self) -> int:
        return len(self.row) + len(self._without_bytes)

    def item(self, row: int) -> WriteResult:
        """What ``row`` is in torch's protocol: chunks first, then tied tensors, then values."""
        if row >= len(self.row):
            return self._without_bytes[row - len(self.row)]
        boxes = self.boxes
        key = self.columns.keys[boxes.key[row]]
        tensor = self.written[key]
        lo = tuple(boxes.lo[row, : len(tensor.shape)].tolist())
        first = boxes.first_block()
        chunk = WrittenChunk(
            file=self.files[self.file[row]],
            offset=int(self.offset[row]),
            digests=tuple(self.digests[first[row] : first[row + 1]].tolist()),
            lo=lo,
            length=tuple(boxes.length[row, : len(tensor.shape)].tolist()),
            tensor=tensor,
        )
        return WriteResult(MetadataIndex(key, torch.Size(lo)), int(boxes.nbytes[row]), chunk)


def report_on(
    plan: WriteColumns,
    rows: Sequence[int],
    *,
    files: list[WrittenFile],
    places: Sequence[tuple[int, int]],
    digests: Sequence[int],
    tensors: dict[str, WrittenTensor],
    values: dict[str, Json],
    versions: Versions,
) -> WriteReport:
    """The report of a rank that wrote ``rows`` of its plan to ``places``: each the number of a file, and an offset."""
    planned = planned_tensors(plan.keys, plan.heads) if tensors else {}
    is_as_planned = True
    for key, tensor in tensors.items():
        is_as_planned &= planned.get(key) in (None, msgspec.structs.replace(tensor, quantizer=None))
    row = np.array(rows, dtype=np.int64)
    file, offset = np.array(places, dtype=np.int64).reshape(-1, 2).T
    return WriteReport(
        files=files,
        row=narrowed(row if plan.planned is None else plan.planned[row]),
        file=narrowed(file),
        offset=narrowed(offset),
        digests=np.array(digests, dtype=np.uint64),
        tensors=tensors,
        values=values,
        versions=versions,
        planning=plan.planning if is_as_planned else b"",
        plan=plan,
    )


def planned_tensors(keys: Iterable[str], heads: Iterable[TensorHead | None]) -> dict[str, WrittenTensor]:
    """What is written under each key that is no value's, where it is written as planned."""
    planned: dict[str, WrittenTensor] = {}
    for key, head in zip(keys, heads, strict=True):
        if head is not None:
            planned[key] = written_tensor(head, head.properties.dtype, tuple(head.size), alias_of=head.alias_of)
    return planned


def written_tensor(
    head: TensorHead,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    *,
    alias_of: str | None = None,
    quantizer: dict[str, object] | None = None,
) -> WrittenTensor:
    """What is written where ``head`` was planned and a tensor of this dtype and shape came."""
    return WrittenTensor(
        dtype=DTYPE_NAMES[dtype],
        shape=shape,
        requires_grad=head.properties.requires_grad and (dtype.is_floating_point or dtype.is_complex),
        alias_of=alias_of,
        kind=head.kind,
        quantizer=quantizer,
    )


def narrowed(numbers: np.ndarray) -> np.ndarray:
    """The same integers in as few bytes each as they need."""
    return numbers.astype(np.result_type(*map(np.min_scalar_type, (numbers.min(initial=0), numbers.max(initial=0)))))


def report_of(results: Sequence[WriteResult]) -> WriteReport:
    """``results`` as columns, without a copy while nobody has touched them."""
    if isinstance(results, LazyList) and isinstance(results.columns, WriteReport):
        return results.columns
    chunks: list[tuple[str, WrittenChunk]] = []
    tensors: dict[str, WrittenTensor] = {}
    values: dict[str, Json] = {}
    for result in results:
        key, data = result.index.fqn, result.storage_data
        if isinstance(data, WrittenChunk):
            chunks.append((key, data))
            tensors.setdefault(key, data.tensor)
        elif isinstance(data, WrittenTensor):
            tensors[key] = data
        elif isinstance(data, WrittenValue):
            values[key] = data.json
        else:
            raise InternalError(f"a {type(data).__name__} is no result of native storage; please report it")
    files = {chunk.file.name: chunk.file for _, chunk in chunks}
    numbers = {name: number for number, name in enumerate(files)}
    keys = {key: number for number, key in enumerate(tensors)}
    plan = WriteColumns(
        keys=list(keys),
        heads=[_head_of(tensor) for tensor in tensors.values()],
        key=np.array([keys[key] for key, _ in chunks], dtype=np.int64),
        lo=padded([chunk.lo for _, chunk in chunks], fill=0),
        length=padded([chunk.length for _, chunk in chunks], fill=1),
        hint=np.full(len(chunks), -1),
        is_shard=np.ones(len(chunks), dtype=bool),
    )
    return report_on(
        plan,
        range(len(chunks)),
        files=list(files.values()),
        places=[(numbers[chunk.file.name], chunk.offset) for _, chunk in chunks],
        digests=[digest for _, chunk in chunks for digest in chunk.digests],
        tensors={key: tensor for key, tensor in tensors.items() if tensor.quantizer is not None},
        values=values,
        versions={},
    )


def _head_of(tensor: WrittenTensor) -> TensorHead:
    properties = TensorProperties(torch_dtype(tensor.dtype), torch.strided, tensor.requires_grad)
    return TensorHead(properties, torch.Size(tensor.shape), tensor.alias_of, tensor.kind)
