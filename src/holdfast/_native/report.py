"""What one rank wrote, as columns: what it tells the coordinator, and what the index is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from holdfast._values.digest import block_counts
from holdfast._values.lazy import LazyList
from holdfast.errors import InternalError
from holdfast.metadata import MetadataIndex
from holdfast.planner import padded
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
    of the file; ``digests`` holds the block digests of all chunks one after the other.
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

    def __len__(self) -> int:
        return len(self.key) + len(self.aliases) + len(self.values)

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


def report_of(results: Sequence[WriteResult]) -> WriteReport:
    """``results`` as columns, without a copy while nobody has touched them."""
    if isinstance(results, LazyList) and isinstance(results.columns, WriteReport):
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
