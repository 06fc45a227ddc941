"""The numbers of tensors as sums that can be added up: what is not finite, zeros, moments, range, orders of magnitude.

All is reckoned in float64, part by part. Elements of one or two bytes are counted first, each bit pattern by itself, so
that what follows does not depend on how many there are. A sample is blocks spread over the tensor, the same each time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from holdfast._checkpoint import Checkpoint, Door, read_boxes
from holdfast._look.parts import (
    batches,
    dequantized,
    matching,
    nbytes_of,
    numbers_of,
    opened,
    parts_of,
    words_of,
)
from holdfast._state.numbers import has_numbers
from holdfast._values.box import Box
from holdfast._values.digest import BLOCK_BYTES
from holdfast._values.shown import short_repr
from holdfast._values.statistics import TensorStatistics
from holdfast.events.progress import OnBytes, following_bytes
from holdfast.metadata import TensorStorageMetadata

SAMPLE_BLOCKS = 16
_SLICE = 1 << 19  # elements that are looked at together: they stay in the caches
_SIGN, _NOT_FINITE, _BINS = 0x800, 0x7FF, 0x1000  # in the uppermost twelve bits of a float64
_BIAS = 1023


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Of each tensor, in the order of the checkpoint; ``bytes_read`` is what the system delivered for that."""

    __repr__ = short_repr

    tensors: Mapping[str, TensorStatistics]
    bytes_read: int

    @property
    def non_finite_keys(self) -> tuple[str, ...]:
        """The tensors in which NaN or infinity was seen."""
        return tuple(key for key, tensor in self.tensors.items() if tensor.nan or tensor.inf)


def statistics(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    keys: str | Sequence[str] | None = None,
    sample: int | None = SAMPLE_BLOCKS,
    stored: bool = True,
    progress: bool | OnBytes = False,
) -> Statistics:
    """The numbers of the tensors in the checkpoint at ``path``, in any format; values that are no tensors are left out.

    Args:
        path: a directory, URL or folder as for ``open``, or a checkpoint that is open.
        keys: keys or patterns, as ``show`` has them: only tensors that match one of them.
        sample: look at so many blocks of at most 1 MiB of each tensor, spread over it; None: at all of it.
        stored: take the numbers that the save kept, where it did: they are of every element, and no data is read. They
            have no ``magnitudes``. False looks at the data in any case.
        progress: as for ``verify``.

    Raises:
        CorruptError: what was read is not what was written.
        ValueError: a pattern matches no key.
    """
    if sample is not None and sample < 1:
        raise ValueError(f"sample is a number of blocks, or None for all, not {sample}")
    with Door(), opened(path) as (checkpoint,):
        entries = checkpoint.metadata.state_dict_metadata
        wanted = {key: entries[key] for key in matching(entries, keys)}
        tensors = {key: entry for key, entry in wanted.items() if isinstance(entry, TensorStorageMetadata)}
        kept = (checkpoint.statistics if stored else None) or {}
        # Tied tensors are looked at once.
        storing = {entry.alias_of or key: entry for key, entry in tensors.items() if key not in kept}
        read_before = checkpoint.bytes_read
        with following_bytes(progress, "statistics") as on_progress:
            tallies = _tallied(checkpoint, storing, sample, on_progress)
        return Statistics(
            tensors={
                key: kept[key] if key in kept else tallies[entry.alias_of or key].result(key, entry)
                for key, entry in tensors.items()
            },
            bytes_read=checkpoint.bytes_read - read_before,
        )


def _tallied(
    checkpoint: Checkpoint, storing: dict[str, TensorStorageMetadata], sample: int | None, on_progress: OnBytes
) -> dict[str, Tally]:
    """What is in these tensors."""
    tallies = {key: Tally() for key in storing}
    most = math.inf if sample is None else sample * BLOCK_BYTES
    numeric = {key: stored for key, stored in storing.items() if has_numbers(stored.properties.dtype)}
    total, done = int(sum(min(nbytes_of(stored), most) for stored in numeric.values())), 0

    def parts() -> Iterator[tuple[str, Box, int]]:
        for key, stored in numeric.items():
            for box in parts_of(stored, sample):
                yield key, box, box.volume * stored.properties.dtype.itemsize

    for batch in batches(parts()):
        by_key: dict[str, list[torch.Tensor]] = {}
        for (key, _), tensor in zip(batch, read_boxes(checkpoint, batch), strict=True):
            by_key.setdefault(key, []).append(tensor)
            done += tensor.nbytes
        for key, read in by_key.items():
            # Parts may be small and many: looked at together they cost as much as one.
            tallies[key].look_at(read[0] if len(read) == 1 else torch.cat([each.view(-1) for each in read]))
        on_progress(min(done, total), total)
    on_progress(total, total)
    return tallies


class Tally:
    """Sums over elements, to which more may be added."""

    def __init__(self) -> None:
        self._bins = np.zeros(_BINS, dtype=np.int64)
        self._looked_at = self._nan = self._zeros = self._not_finite = 0
        self._sum: complex = 0.0
        self._squares = 0.0
        self._min, self._max = math.inf, -math.inf

    def look_at(self, tensor: torch.Tensor) -> None:
        """Add the elements of ``tensor``."""
        flat = dequantized(tensor).reshape(-1)
        for start in range(0, len(flat), _SLICE):
            part = flat[start : start + _SLICE]
            if part.dtype.itemsize > 2 or part.dtype.is_complex:
                self._add(numbers_of(part), None)
            else:
                counts = np.bincount(words_of(part)[:, 0], minlength=1 << 8 * part.dtype.itemsize)
                found = np.flatnonzero(counts)
                self._add(_every_number(part.dtype)[found], counts[found])

    def _add(self, numbers: np.ndarray, counts: np.ndarray | None) -> None:
        """Add each of ``numbers``, so many times."""
        is_complex = np.iscomplexobj(numbers)
        sizes = np.abs(numbers) if is_complex else numbers
        places = (sizes.view(np.int64) >> 52) & (_BINS - 1)
        bins = _counted(places, counts)
        self._looked_at += int(bins.sum())
        if bins[_NOT_FINITE] or bins[_NOT_FINITE | _SIGN]:
            is_nan, is_finite = np.isnan(numbers), np.isfinite(sizes)
            self._nan += int(is_nan.sum() if counts is None else counts[is_nan].sum())
            self._not_finite += int(bins[_NOT_FINITE] + bins[_NOT_FINITE | _SIGN])
            numbers, sizes, places = numbers[is_finite], sizes[is_finite], places[is_finite]
            counts = None if counts is None else counts[is_finite]
        is_zero = sizes == 0
        zeros = _counted(places[is_zero], None if counts is None else counts[is_zero])
        self._zeros += int(zeros.sum())
        self._bins += bins - zeros
        if not len(numbers):
            return
        with np.errstate(over="ignore", invalid="ignore"):  # sums beyond float64 are infinite
            self._sum += (numbers.sum() if counts is None else numbers @ counts).item()
            self._squares += float(sizes @ sizes if counts is None else (sizes * sizes) @ counts)
        if not is_complex:
            self._min, self._max = min(self._min, float(sizes.min())), max(self._max, float(sizes.max()))

    def result(self, key: str, stored: TensorStorageMetadata) -> TensorStatistics:
        """The statistics of the tensor ``key``, whose elements have been added."""
        is_any = self._looked_at > self._not_finite
        has_range = is_any and not stored.properties.dtype.is_complex
        magnitudes = (
            (each - _BIAS, int(self._bins[each | _SIGN]), int(self._bins[each]))
            for each in range(_NOT_FINITE)
            if self._bins[each] or self._bins[each | _SIGN]
        )
        return TensorStatistics(
            key=key,
            dtype=str(stored.properties.dtype).removeprefix("torch."),
            shape=tuple(stored.size),
            alias_of=stored.alias_of,
            elements=math.prod(stored.size),
            looked_at=self._looked_at,
            nan=self._nan,
            inf=self._not_finite - self._nan,
            zeros=self._zeros,
            sum=self._sum if is_any and math.isfinite(abs(self._sum)) else None,
            sum_squares=self._squares if is_any and math.isfinite(self._squares) else None,
            min=self._min if has_range else None,
            max=self._max if has_range else None,
            magnitudes=tuple(magnitudes),
        )


def _counted(places: np.ndarray, counts: np.ndarray | None) -> np.ndarray:
    """How many elements are in each bin; exact, since float64 has every integer up to 2**53."""
    found: np.ndarray = np.bincount(places, weights=counts, minlength=_BINS).astype(np.int64)
    return found


@lru_cache(maxsize=64)
def _every_number(dtype: torch.dtype) -> np.ndarray:
    """What each bit pattern of a type of one or two bytes stands for."""
    words = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32, device="cpu")
    return numbers_of(words.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype))
