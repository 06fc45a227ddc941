"""How far the elements of tensors in two checkpoints differ, in sums over parts that are read from both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from holdfast._checkpoint import Checkpoint, read_boxes
from holdfast._look.parts import batches, dequantized, nbytes_of, numbers_of, parts_of, words_of
from holdfast._state.numbers import has_numbers
from holdfast._values.box import Box
from holdfast.events.progress import OnBytes
from holdfast.metadata import TensorStorageMetadata

_SLICE = 1 << 19  # elements that are compared together: they stay in the caches


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementsDiff:
    """How far b is from a, element by element.

    An element differs where any bit does (of other types: where the number does, and NaN equals NaN). Where it is NaN
    or infinite in one or both, it is ``unmeasured``: distances leave it out. They are reckoned in float64, and None
    where there is no such number: without elements that can be measured, for the cosine of zero, beyond float64, and
    for types that are no numbers. ``relative_l2`` is |b - a| / |a|, infinite where only a is zero.
    """

    elements: int
    differing: int
    first_index: tuple[int, ...] | None
    max_abs: float | None
    relative_l2: float | None
    cosine: float | None
    nan_a: int
    nan_b: int
    unmeasured: int


Pair = tuple[str, str]


def compare_elements(
    a: Checkpoint, b: Checkpoint, pairs: Sequence[Pair], on_progress: OnBytes
) -> dict[Pair, ElementsDiff]:
    """How far the tensors of each pair, a key of a and one of b, differ; they have the same shape."""
    stored = {pair: (_tensor(a, pair[0]), _tensor(b, pair[1])) for pair in pairs}
    distances = {pair: _Distance() for pair in pairs}
    names = {str(number): pair for number, pair in enumerate(pairs)}
    total, done = sum(nbytes_of(one) for one, _ in stored.values()), 0

    def parts() -> Iterator[tuple[str, Box, int]]:
        for name, pair in names.items():
            one, other = stored[pair]
            itemsize = one.properties.dtype.itemsize + other.properties.dtype.itemsize
            # A quantised tensor is read whole.
            for box in parts_of(one if other.quantizer is None else other):
                yield name, box, box.volume * itemsize

    for batch in batches(parts()):
        from_a = read_boxes(a, [(names[name][0], box) for name, box in batch])
        from_b = read_boxes(b, [(names[name][1], box) for name, box in batch])
        for (name, box), one, other in zip(batch, from_a, from_b, strict=True):
            distances[names[name]].add(box, one, other)
            done += one.nbytes
        on_progress(min(done, total), total)
    return {pair: distances[pair].result(math.prod(one.size)) for pair, (one, _) in stored.items()}


def _tensor(checkpoint: Checkpoint, key: str) -> TensorStorageMetadata:
    stored = checkpoint.metadata.state_dict_metadata[key]
    assert isinstance(stored, TensorStorageMetadata)
    return stored


class _Distance:
    """Sums over elements of two tensors, to which more may be added."""

    def __init__(self) -> None:
        self._differing = self._nan_a = self._nan_b = self._unmeasured = self._measured = 0
        self._first: tuple[int, ...] | None = None
        self._max = self._squares_a = self._squares_b = self._squares = self._product = 0.0

    def add(self, box: Box, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add what ``box`` holds in one and in the other."""
        is_numeric = has_numbers(a.dtype) and has_numbers(b.dtype)
        words = (words_of(a), words_of(b)) if a.dtype == b.dtype else None
        a, b = dequantized(a), dequantized(b)
        flat_a, flat_b = a.reshape(-1), b.reshape(-1)
        for start in range(0, len(flat_a), _SLICE):
            part = slice(start, start + _SLICE)
            numbers = (numbers_of(flat_a[part]), numbers_of(flat_b[part])) if is_numeric else None
            if words is not None:
                is_other = (words[0][part] != words[1][part]).any(axis=1)
            else:
                assert numbers is not None
                is_other = ~((numbers[0] == numbers[1]) | (np.isnan(numbers[0]) & np.isnan(numbers[1])))
            self._note(box, start, is_other)
            if numbers is not None:
                self._measure(*numbers)

    def _note(self, box: Box, start: int, is_other: np.ndarray) -> None:
        count = int(np.count_nonzero(is_other))
        self._differing += count
        if count:
            within = np.unravel_index(start + int(is_other.argmax()), box.lengths) if box.lengths else ()
            index = tuple(low + int(each) for low, each in zip(box.offsets, within, strict=True))
            # Parts come in the order of the chunks.
            self._first = index if self._first is None else min(self._first, index)

    def _measure(self, a: np.ndarray, b: np.ndarray) -> None:
        is_finite = np.isfinite(a) & np.isfinite(b)
        if not is_finite.all():
            self._nan_a += int(np.isnan(a).sum())
            self._nan_b += int(np.isnan(b).sum())
            a, b = a[is_finite], b[is_finite]
            self._unmeasured += len(is_finite) - len(a)
        if not len(a):
            return
        self._measured += len(a)
        with np.errstate(over="ignore", invalid="ignore"):  # what is beyond float64 has no number in the result
            delta = b - a
            self._max = max(self._max, float(np.abs(delta).max()))
            self._squares_a += float(np.vdot(a, a).real)
            self._squares_b += float(np.vdot(b, b).real)
            self._squares += float(np.vdot(delta, delta).real)
            self._product += float(np.vdot(a, b).real)

    def result(self, elements: int) -> ElementsDiff:
        """What has been added, of a tensor of so many elements."""
        norms = math.sqrt(self._squares_a) * math.sqrt(self._squares_b)
        relative = 0.0
        if self._squares:
            relative = math.sqrt(self._squares) / math.sqrt(self._squares_a) if self._squares_a else math.inf
        is_known = self._measured > 0 and math.isfinite(self._squares) and math.isfinite(norms)
        cosine = max(-1.0, min(1.0, self._product / norms)) if is_known and norms else None
        return ElementsDiff(
            elements=elements,
            differing=self._differing,
            first_index=self._first,
            max_abs=self._max if self._measured and math.isfinite(self._max) else None,
            relative_l2=relative if is_known else None,
            cosine=cosine,
            nan_a=self._nan_a,
            nan_b=self._nan_b,
            unmeasured=self._unmeasured,
        )
