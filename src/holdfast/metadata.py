"""What a checkpoint says of itself, under the names of torch.distributed.checkpoint.metadata.

``MetadataIndex.index`` is a hint and no part of equality. ``TensorStorageMetadata.chunks`` is a list to everyone, and
columns to this library (see ``ChunkColumns``). Fields that torch does not have come last and have defaults.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from holdfast._values.dtypes import MAX_PATH_DEPTH
from holdfast._values.lazy import LazyList
from holdfast._values.shown import few

__all__ = [
    "BytesStorageMetadata",
    "ChunkColumns",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "chunk_columns",
]

STATE_DICT_TYPE = dict[str, Any]

PathElement = str | int
Path = tuple[PathElement, ...]

Versions = dict[str, dict[str, dict[str, object]]]
"""By the key of a state_dict and the name of a module in it: what the module says of itself, if not version 1."""

Containers = dict[Path, object]
"""By path, with dict keys as text: an empty container of the class that is there, where that is no plain one."""


@dataclass(slots=True)
class ChunkStorageMetadata:
    """A box of a tensor as stored: where it starts and how long it is in each dimension."""

    offsets: torch.Size
    sizes: torch.Size


class ChunkColumns:
    """The chunks of one tensor: rows ``first`` to ``stop``, in the first ``dimensions``, of tables that many share."""

    __slots__ = ("_dimensions", "_first", "_length", "_lo", "_stop")

    def __init__(self, lo: np.ndarray, length: np.ndarray, first: int, stop: int, dimensions: int) -> None:
        self._lo = lo
        self._length = length
        self._first = first
        self._stop = stop
        self._dimensions = dimensions

    @property
    def lo(self) -> np.ndarray:
        """Where each chunk starts: int64 of shape (chunks, dimensions)."""
        return self._lo[self._first : self._stop, : self._dimensions]

    @property
    def length(self) -> np.ndarray:
        """How long each chunk is: int64 of shape (chunks, dimensions)."""
        return self._length[self._first : self._stop, : self._dimensions]

    def __len__(self) -> int:
        return self._stop - self._first

    def item(self, row: int) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.lo[row].tolist()), torch.Size(self.length[row].tolist()))


def chunk_columns(chunks: Sequence[ChunkStorageMetadata], dimensions: int) -> ChunkColumns:
    """``chunks`` as columns, without a copy while nobody has touched them."""
    if isinstance(chunks, LazyList) and isinstance(chunks.columns, ChunkColumns):
        return chunks.columns
    shape = (len(chunks), dimensions)
    lo = np.array([tuple(chunk.offsets) for chunk in chunks], dtype=np.int64).reshape(shape)
    length = np.array([tuple(chunk.sizes) for chunk in chunks], dtype=np.int64).reshape(shape)
    return ChunkColumns(lo, length, 0, len(chunks), dimensions)


@dataclass
class TensorProperties:
    """What a tensor is besides its size and contents."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = field(default=torch.strided)
    requires_grad: bool = False
    memory_format: torch.memory_format = field(default=torch.contiguous_format)
    pin_memory: bool = False

    def __getstate__(self) -> tuple[torch.dtype, torch.layout, bool, str, bool]:
        # A memory format has no pickled form of its own.
        name = str(self.memory_format).removeprefix("torch.")
        return self.dtype, self.layout, self.requires_grad, name, self.pin_memory

    def __setstate__(self, state: tuple[torch.dtype, torch.layout, bool, str, bool]) -> None:
        self.dtype, self.layout, self.requires_grad, name, self.pin_memory = state
        self.memory_format = getattr(torch, name)

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        return TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            memory_format=torch.contiguous_format,
            pin_memory=tensor.is_pinned(),
        )


@dataclass
class TensorStorageMetadata:
    """A stored tensor: properties, global size, and the chunks that tile it.

    ``alias_of`` names the key whose bytes this one shares; ``kind`` says how a value kept as a tensor is handed back
    ("numpy"); ``quantizer`` is what a quantised dtype needs besides its bytes.
    """

    properties: TensorProperties
    size: torch.Size
    chunks: Sequence[ChunkStorageMetadata]
    alias_of: str | None = None
    kind: str | None = None
    quantizer: STATE_DICT_TYPE | None = None


@dataclass
class BytesStorageMetadata:
    """A stored value that is not a tensor."""


STORAGE_TYPES = TensorStorageMetadata | BytesStorageMetadata


@dataclass
class StorageMeta:
    """Which checkpoint, which try at saving or loading it."""

    checkpoint_id: str | os.PathLike[str] | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


@dataclass
class Metadata:
    """Everything a checkpoint says of itself.

    ``planner_data`` is the planner's own; that of the default planner maps each key to its path in the state.
    ``user_metadata`` is what the caller gave to be kept beside the state. ``paths`` maps keys to paths whatever a
    planner put in the place of the default planner's data. ``versions`` are those of the modules whose state_dicts were
    saved, ``containers`` the classes of containers other than dict, list and tuple. ``differing``, of a save, has the
    keys whose contents differed between ranks and were allowed to, such as buffers of modules; each with the rank whose
    contents were kept.
    """

    state_dict_metadata: MutableMapping[str, STORAGE_TYPES]
    planner_data: Any = None
    storage_data: Any = None
    storage_meta: StorageMeta | None = None
    version: str | None = None
    user_metadata: STATE_DICT_TYPE = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    versions: Versions = field(default_factory=dict)
    containers: Containers = field(default_factory=dict)
    differing: dict[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        keys, user = self.state_dict_metadata, self.user_metadata
        return f"Metadata({len(keys):,} keys {few(keys, len(keys), '{}')}, user_metadata {few(user, len(user), '{}')})"


@dataclass(frozen=True)
class MetadataIndex:
    """The name of a chunk: key and offset; ``index`` is a hint of its position, outside of equality."""

    fqn: str
    offset: torch.Size | None = None
    index: int | None = field(hash=False, compare=False, default=None)

    def __init__(self, fqn: str, offset: Sequence[int] | None = None, index: int | None = None) -> None:
        set_field = object.__setattr__
        set_field(self, "fqn", fqn)
        set_field(self, "offset", offset if offset is None or type(offset) is torch.Size else torch.Size(offset))
        set_field(self, "index", index)


def path_key(path: Path) -> str:
    return ".".join(map(str, path))


def is_path(path: object) -> bool:
    """Whether it is a tuple of dict keys (str) and list positions (int), as planners write it."""
    return (
        isinstance(path, tuple)
        and 0 < len(path) <= MAX_PATH_DEPTH
        and all(isinstance(element, str) or (isinstance(element, int) and element >= 0) for element in path)
    )


def restorable_paths(metadata: Metadata) -> dict[str, Path]:
    """The stored paths that fit together, whoever wrote them.

    Ranks may have saved different things under one name, a list and a dict, or a value and a dict: a key that would not
    fit in beside those before it is left out, and stays at the top under its own name.
    """
    planner_data = metadata.paths or (metadata.planner_data if isinstance(metadata.planner_data, dict) else {})
    found = {key: planner_data[key] for key in metadata.state_dict_metadata if is_path(planner_data.get(key))}
    leaves = set(found.values())
    kinds: dict[Path, bool] = {}
    paths: dict[str, Path] = {}
    for key, path in found.items():
        parents = [path[:depth] for depth in range(1, len(path))]
        if leaves.isdisjoint(parents) and all(
            kinds.setdefault(path[:depth], isinstance(element, str)) == isinstance(element, str)
            for depth, element in enumerate(path)
        ):
            paths[key] = path
    return paths
