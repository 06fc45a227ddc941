"""Hugging Face folders with weights in blocks of eight bits, under the names of torch's module.

``x.weight`` stands for numbers together with ``x.weight_scale_inv``, which has one factor for each square block of it.
A load sees only the weight, as numbers; what it wants of it is multiplied tile by tile, as the tiles come in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from holdfast._native.reader import CatalogReader, ChunkDelivery
from holdfast._state.tensor_bytes import Target
from holdfast._state.tensors import empty_tensor, torch_dtype
from holdfast._values.box import Box
from holdfast._values.lazy import cached_property
from holdfast.default_planner import DefaultLoadPlanner
from holdfast.errors import CorruptError
from holdfast.hf_storage import HuggingFaceStorageReader
from holdfast.metadata import Metadata, TensorProperties, TensorStorageMetadata
from holdfast.planner import LoadPlanner, ReadColumns
from holdfast.planner_helpers import ReadRows, check_resolved

__all__ = ["QuantizedHuggingFaceStorageReader"]

_WEIGHT, _SCALES = ".weight", ".weight_scale_inv"

# Of a tile there are, at times, three copies of four bytes for each element.
_TILE_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Factors:
    """The factors of the blocks from block ``first`` (row and column) on, and what to make of the products."""

    first: tuple[int, int]
    factors: torch.Tensor
    block: int
    dtype: torch.dtype

    def applied(self, weight: torch.Tensor, low: Sequence[int]) -> torch.Tensor:
        """The numbers that the part of a weight stands for that begins at ``low``."""
        chosen = self.factors
        for dimension, (begin, count) in enumerate(zip(low, weight.shape, strict=True)):
            blocks = torch.arange(begin, begin + count, device="cpu") // self.block - self.first[dimension]
            chosen = chosen.index_select(dimension, blocks)
        return (weight.to(torch.float32) * chosen).to(self.dtype)


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader):
    """Reads a Hugging Face folder whose weights may be in blocks of eight bits; a load gets them as numbers.

    Factors have no keys here. Weights in four bits (``_blocks`` and ``_scales``) are left as they are stored.

    Args:
        path: the folder.
        thread_count: there because torch has it: reads are parallel anyway.
        target_dtype: what the numbers are rounded to, before they are cast into the target.
        block_size: rows, and columns, of a block.
    """

    reads_in_common = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        thread_count: int = 1,
        target_dtype: torch.dtype = torch.float32,
        block_size: int = 128,
    ) -> None:
        super().__init__(path, thread_count)
        if block_size < 1 or not target_dtype.is_floating_point:
            raise ValueError(f"blocks of {block_size}, and numbers as {target_dtype}, are no way to store weights")
        self.target_dtype = target_dtype
        self.block_size = block_size
        self._factors: Mapping[str, _Factors] = {}

    def _scales_of(self, key: str) -> str | None:
        """The key of the factors for the weight ``key``; None for any other tensor."""
        scales = f"{key.removesuffix(_WEIGHT)}{_SCALES}"
        return scales if key.endswith(_WEIGHT) and self.catalog.entry(scales) is not None else None

    def own_metadata(self) -> Metadata:
        """Weights as numbers, and no factors; CorruptError where these do not fit."""
        metadata = super().own_metadata()
        entries = metadata.state_dict_metadata
        for key, stored in list(entries.items()):
            scales = self._scales_of(key)
            if scales is None or not isinstance(stored, TensorStorageMetadata):
                continue
            entry = self.catalog.entry(scales)
            assert entry is not None
            blocks = tuple(-(-size // self.block_size) for size in stored.size)
            if len(blocks) != 2 or entry.shape != blocks:
                raise CorruptError(
                    f"{scales[:200]!r} has the shape {list(entry.shape)}, and {key[:200]!r} in blocks of "
                    f"{self.block_size} needs {list(blocks)}; pass the block_size that it was stored with",
                    path=self.path,
                    key=scales,
                )
            entries[key] = replace(stored, properties=TensorProperties(dtype=self.target_dtype))
            del entries[scales]
            metadata.paths.pop(scales, None)
        return metadata

    def same_bytes(self, key: str, other: str) -> bool | None:
        """Unknown for weights whose factors may differ."""
        if key != other and (self._scales_of(key) or self._scales_of(other)):
            return None
        return super().same_bytes(key, other)

    def deliver(self, columns: ReadColumns, planner: LoadPlanner, *, is_alone: bool = False) -> None:
        """The same, weights in tiles, once the factors that they need are here."""
        is_weight = np.array([bool(self._scales_of(key)) for key in columns.storage_keys], dtype=bool)[columns.key]
        is_weight &= (columns.length > 0).all(axis=1)
        if is_weight.any():
            self._factors = self._read_factors(columns.take(is_weight))
            columns = _in_tiles(columns, is_weight)
        super().deliver(columns, planner, is_alone=is_alone)

    def _read_factors(self, weights: ReadColumns) -> dict[str, _Factors]:
        """The factors of all blocks between the first and the last that each weight needs."""
        target: dict[str, torch.Tensor] = {}
        boxes: dict[str, Box] = {}
        metadata, rows = CatalogReader.own_metadata(self), ReadRows()
        low = (weights.chunk_lo + weights.storage_lo)[:, :2]
        first, last = low // self.block_size, (low + weights.length[:, :2] - 1) // self.block_size
        for number in np.unique(weights.key).tolist():
            key, chosen = weights.storage_keys[number], weights.key == number
            begin, end = first[chosen].min(axis=0).tolist(), last[chosen].max(axis=0).tolist()
            boxes[key] = box = Box(tuple(begin), tuple(high - low + 1 for low, high in zip(begin, end, strict=True)))
            scales = self._scales_of(key)
            assert scales is not None
            stored = metadata.state_dict_metadata[scales]
            assert isinstance(stored, TensorStorageMetadata)
            target[scales] = empty_tensor(box.lengths, stored.properties.dtype)
            rows.add_tensor(scales, stored, box)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(target, metadata)
        super().deliver(rows.columns(), planner, is_alone=True)
        return {
            key: _Factors(
                first=(box.offsets[0], box.offsets[1]),
                factors=target[str(self._scales_of(key))].to(torch.float32),
                block=self.block_size,
                dtype=self.target_dtype,
            )
            for key, box in boxes.items()
        }

    def delivery(self, columns: ReadColumns, planner: LoadPlanner) -> ChunkDelivery:
        options = {"cast": self.cast, "allow_pickle": self.allow_pickle}
        return _WeightDelivery(self.catalog, columns, planner, **options).with_factors(self._factors)

    def close(self) -> None:
        self._factors = {}
        super().close()


def _in_tiles(columns: ReadColumns, is_weight: np.ndarray) -> ReadColumns:
    """The same items, those of weights in tiles of so many rows that each is small."""
    height = np.where(is_weight, columns.length[:, 0], 1)
    most = np.maximum(1, _TILE_ELEMENTS // np.maximum(1, columns.length[:, 1:].prod(axis=1)))
    counts = -(-height // most)
    parent = np.repeat(np.arange(len(height)), counts)
    begin = (np.arange(len(parent)) - np.repeat(np.cumsum(counts) - counts, counts)) * most[parent]
    begin = np.where(is_weight[parent], begin, 0)
    tiles = columns.take(parent)
    tiles.storage_lo[:, 0] += begin
    tiles.dest_lo[:, 0] += begin
    tiles.length[:, 0] = np.where(
        is_weight[parent], np.minimum(most[parent], height[parent] - begin), tiles.length[:, 0]
    )
    return tiles


class _WeightDelivery(ChunkDelivery):
    """Hands over the numbers that tiles of weights stand for; all else as it is."""

    _factors: Mapping[str, _Factors] = {}

    def with_factors(self, factors: Mapping[str, _Factors]) -> _WeightDelivery:
        self._factors = factors
        return self

    @cached_property
    def _factors_of_keys(self) -> list[_Factors | None]:
        return [self._factors.get(key) for key in self.columns.storage_keys]

    def _of(self, number: int) -> _Factors | None:
        return self._factors_of_keys[self.columns.boxes[self.items[number]][0]]

    def addresses(self) -> np.ndarray | None:
        """No weight goes to its target as it is stored."""
        addresses = super().addresses()
        if addresses is None or not self._factors:
            return addresses
        is_plain = np.array([each is None for each in self._factors_of_keys], dtype=bool)
        return np.where(is_plain[self.columns.key[self.items]], addresses, 0)

    def open_targets(self, numbers: list[int]) -> list[Target]:
        plain = iter(super().open_targets([number for number in numbers if self._of(number) is None]))
        return [next(plain) if self._of(number) is None else self._tile(number) for number in numbers]

    def _tile(self, number: int) -> Target:
        columns, item = self.columns, self.items[number]
        which, lengths = columns.boxes[item]
        entry = self.catalog.entry(columns.storage_keys[which])
        assert entry is not None
        dtype, shape = torch_dtype(entry.dtype), self.chunk_shape(number)
        box = Box(tuple(columns.storage_lo[item, : len(shape)].tolist()), lengths)
        return Target(empty_tensor(lengths, dtype), dtype, shape, box)

    def close_target(self, number: int, target: Target) -> None:
        factors = self._of(number)
        if factors is None:
            super().close_target(number, target)
            return
        columns, item = self.columns, self.items[number]
        tensor = self.planner.resolve_row(columns, item)
        if tensor.dtype != factors.dtype or tensor.shape != target.tensor.shape:
            check_resolved(columns, item, tensor, factors.dtype, cast=self.cast)
        low = (columns.chunk_lo[item] + columns.storage_lo[item])[:2].tolist()
        tensor.copy_(factors.applied(target.tensor, low))
        self.planner.commit_row(columns, item, tensor)
