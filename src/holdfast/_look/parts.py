"""Tensors of a checkpoint in parts: which boxes to look at, many of them read at once, and their elements as numbers.

Parts are cut out of stored chunks, at blocks where rows allow it, so that next to no block is read twice. Memory holds
one batch of parts, however large the tensors are. Every read is verified as far as the format goes.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np
import torch

from holdfast._checkpoint import Checkpoint, open
from holdfast._io.pipeline import run_ahead
from holdfast._state.numbers import as_numbers
from holdfast._state.tensors import words_of_quantized
from holdfast._values.box import Box, whole
from holdfast._values.digest import BLOCK_BYTES
from holdfast.metadata import TensorStorageMetadata, chunk_columns

PART_BYTES = 8 << 20
_BATCH_BYTES = 16 << 20
_BATCH_PARTS = 1024


@contextlib.contextmanager
def opened(*checkpoints: str | os.PathLike[str] | Checkpoint) -> Iterator[list[Checkpoint]]:
    """The checkpoints at paths, opened beside each other and closed at the end; open ones are left as they are."""
    paths = [each for each in checkpoints if not isinstance(each, Checkpoint)]
    with contextlib.ExitStack() as stack:
        found = run_ahead([partial(open, path) for path in paths], workers=len(paths) or 1, ahead=len(paths) or 1)
        mine = [stack.enter_context(each) for each in found]
        yield [each if isinstance(each, Checkpoint) else mine.pop(0) for each in checkpoints]


def matching(keys: Iterable[str], patterns: str | Sequence[str] | None) -> list[str]:
    """Those of ``keys`` that are, or match, one of ``patterns``: without any, all; ValueError where one finds none."""
    keys = list(keys)
    if patterns is None:
        return keys
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    found: set[str] = set()
    for pattern in patterns:
        matches = [key for key in keys if key == pattern or fnmatch.fnmatchcase(key, pattern)]
        if not matches:
            raise ValueError(f"no key matches {pattern[:200]!r}; holdfast show lists the keys")
        found.update(matches)
    return [key for key in keys if key in found]


def nbytes_of(stored: TensorStorageMetadata) -> int:
    return math.prod(stored.size) * stored.properties.dtype.itemsize


def parts_of(stored: TensorStorageMetadata, sample: int | None = None) -> Iterator[Box]:
    """Boxes that make up the tensor; with ``sample``, so many of a block each, spread over it, where it has more."""
    if nbytes_of(stored) == 0:
        return
    if stored.quantizer is not None:
        yield whole(stored.size)  # it cannot be read in parts
        return
    itemsize = stored.properties.dtype.itemsize
    columns = chunk_columns(stored.chunks, len(stored.size))
    volumes = columns.length.prod(axis=1, dtype=np.int64)
    if sample is None or int((-(-volumes * itemsize // BLOCK_BYTES)).sum()) <= sample:
        for lo, length in zip(columns.lo.tolist(), columns.length.tolist(), strict=True):
            yield from (_moved(box, lo) for box in _cut(length, itemsize))
        return
    stops = np.cumsum(volumes)
    places = [(2 * number + 1) * int(stops[-1]) // (2 * sample) for number in range(sample)]
    seen: set[Box] = set()
    for place, row in zip(places, np.searchsorted(stops, places, side="right").tolist(), strict=True):
        within = place - int(stops[row]) + int(volumes[row])
        box = _moved(_block_at(columns.length[row].tolist(), within, itemsize), columns.lo[row].tolist())
        if box not in seen:
            seen.add(box)
            yield box


def _cut(lengths: Sequence[int], itemsize: int) -> Iterator[Box]:
    """Boxes of neighbouring rows that make up a chunk."""
    if not lengths or 0 in lengths:
        yield whole(lengths)
        return
    dimension, step = _rows(lengths, PART_BYTES // itemsize, itemsize)
    inner = len(lengths) - dimension - 1
    for outer in product(*map(range, lengths[:dimension])):
        for start in range(0, lengths[dimension], step):
            length = min(step, lengths[dimension] - start)
            yield Box((*outer, start, *(0,) * inner), (*(1,) * dimension, length, *lengths[dimension + 1 :]))


def _block_at(lengths: Sequence[int], place: int, itemsize: int) -> Box:
    """About a block of neighbouring rows of a chunk, with the element number ``place`` in it."""
    if not lengths:
        return whole(lengths)
    dimension, step = _rows(lengths, BLOCK_BYTES // itemsize, itemsize)
    offsets = [int(each) for each in np.unravel_index(place, lengths)]
    start = offsets[dimension] // step * step
    inner = len(lengths) - dimension - 1
    length = min(step, lengths[dimension] - start)
    return Box((*offsets[:dimension], start, *(0,) * inner), (*(1,) * dimension, length, *lengths[dimension + 1 :]))


def _rows(lengths: Sequence[int], most: int, itemsize: int) -> tuple[int, int]:
    """The outermost dimension whose rows have at most so many elements, and how many of them have, at whole blocks."""
    inner, dimension = 1, len(lengths) - 1
    while dimension and inner * lengths[dimension] <= most:
        inner *= lengths[dimension]
        dimension -= 1
    step = max(1, most // inner)
    unit = BLOCK_BYTES // math.gcd(BLOCK_BYTES, inner * itemsize)
    return dimension, step - step % unit if unit <= step else step


def _moved(box: Box, lo: Sequence[int]) -> Box:
    return Box(tuple(own + low for own, low in zip(box.offsets, lo, strict=True)), box.lengths)


def batches(parts: Iterable[tuple[str, Box, int]]) -> Iterator[list[tuple[str, Box]]]:
    """The parts, each a key, a box and its bytes, in lists of which all is in memory at once."""
    batch: list[tuple[str, Box]] = []
    room = _BATCH_BYTES
    for key, box, nbytes in parts:
        if batch and (nbytes > room or len(batch) == _BATCH_PARTS):
            yield batch
            batch, room = [], _BATCH_BYTES
        batch.append((key, box))
        room -= nbytes
    if batch:
        yield batch


# --- elements ---------------------------------------------------------------------------------------------------------


def words_of(tensor: torch.Tensor) -> np.ndarray:
    """The elements as unsigned integers, one for each or two for those of 16 bytes, in rows: [elements, 1 or 2]."""
    tensor = words_of_quantized(tensor) if tensor.is_quantized else tensor
    itemsize = tensor.dtype.itemsize
    words: np.ndarray = tensor.contiguous().view(-1).view(torch.uint8).numpy().view(f"u{min(itemsize, 8)}")
    return words.reshape(-1, max(1, itemsize // 8))


def dequantized(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers that a quantised tensor stands for; any other one as it is."""
    return tensor.dequantize() if tensor.is_quantized else tensor


def numbers_of(tensor: torch.Tensor) -> np.ndarray:
    """The elements as float64, or complex128 where they are complex."""
    flat = tensor.contiguous().view(-1)
    numbers: np.ndarray = as_numbers(flat).numpy()
    return numbers.view(np.complex128)[:, 0] if numbers.ndim > 1 else numbers
