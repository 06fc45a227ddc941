"""The numbers of pieces of tensors, reckoned where the pieces are: on a GPU, or in the host's memory.

A few operations of torch look at many pieces at once. Nothing waits for a device before ``table``, which fetches what
was found in one transfer for each device. Everything is reckoned in float64. Operations run on the current stream of
the device: whoever looks sees to it that the pieces do not change before.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from holdfast._state.tensor_bytes import MemorySource, ScatteredSource, Source
from holdfast._state.tensors import TORCH_DTYPES, torch_dtype
from holdfast._values.statistics import COLUMNS, add_numbers, no_numbers

logger = logging.getLogger("holdfast")

_PARTS = {"complex32": "float16", "bcomplex32": "bfloat16", "complex64": "float32", "complex128": "float64"}
COMPLEX_PARTS = {TORCH_DTYPES[name]: TORCH_DTYPES[part] for name, part in _PARTS.items() if name in TORCH_DTYPES}
# torch cannot convert them: several numbers in each byte, or fewer bits than it has.
_OPAQUE = re.compile(r"bits.*|float4.*|u?int[1-7]")

_At = tuple[torch.device, torch.dtype]

# Elements that are looked at together. On the host they stay in the caches, and are too few for torch to share them
# among threads, which wait for each other (but for ``dot``, which it always shares). On a device they are worth the
# launches.
_HOST_ELEMENTS, _DEVICE_ELEMENTS = 1 << 14, 1 << 22


def has_numbers(dtype: torch.dtype) -> bool:
    """Whether the elements of a tensor of ``dtype`` are numbers to us, and not just bits."""
    return _OPAQUE.fullmatch(str(dtype).removeprefix("torch.")) is None


def are_kept(dtype_name: str) -> bool:
    """Whether a save keeps the numbers of such tensors: not of quantised ones, of which it sees only the integers."""
    return _OPAQUE.fullmatch(dtype_name) is None and not dtype_name.startswith("q")


def as_numbers(flat: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor of one dimension as float64; of complex ones both parts, in rows of two."""
    part = COMPLEX_PARTS.get(flat.dtype)
    return flat.to(torch.float64) if part is None else flat.view(part).to(torch.float64).view(-1, 2)


class PieceNumbers:
    """What was seen of pieces so far, each by its number; several may have one number."""

    def __init__(self) -> None:
        self._waiting: dict[_At, list[tuple[int, torch.Tensor]]] = {}
        self._elements: dict[_At, int] = {}
        self._found: dict[torch.device, list[tuple[list[int], torch.Tensor]]] = {}

    def look_at(self, number: int, source: Source, dtype_name: str) -> None:
        """Take the elements of ``source``; all operations for it are queued by the next ``flush``."""
        if not source.nbytes or not are_kept(dtype_name):
            return
        dtype = torch_dtype(dtype_name)
        assert isinstance(source, (MemorySource, ScatteredSource)), "only what is in memory is looked at"
        on_host = isinstance(source, MemorySource) or source.device.type == "cpu"
        most = _HOST_ELEMENTS if on_host else _DEVICE_ELEMENTS
        for piece in source.pieces(most * dtype.itemsize):
            at = piece.device, dtype
            elements = piece.numel() // dtype.itemsize
            if self._elements.get(at, 0) + elements > most:
                self._flush(at)
            self._waiting.setdefault(at, []).append((number, piece))
            self._elements[at] = self._elements.get(at, 0) + elements

    def flush(self) -> None:
        """Queue all operations for what was taken."""
        for at in list(self._waiting):
            self._flush(at)

    def _flush(self, at: _At) -> None:
        waiting, self._elements[at] = self._waiting.pop(at, []), 0
        if not waiting:
            return
        device, dtype = at
        pieces = [piece for _, piece in waiting]
        with torch.no_grad():
            try:
                found = _numbers_of(pieces, dtype)
            except torch.OutOfMemoryError:
                logger.warning("%s has no room to reckon statistics; the host does it for some tensors", device)
                found = _numbers_of([piece.cpu() for piece in pieces], dtype)
        self._found.setdefault(found.device, []).append(([number for number, _ in waiting], found))

    def table(self, count: int) -> npt.NDArray[np.float64]:
        """What was found of each number below ``count``, in ``COLUMNS``; returns when the devices are done with it."""
        self.flush()
        table = no_numbers(count)
        for found in self._found.values():
            numbers = np.concatenate([number for number, _ in found])
            add_numbers(table, numbers, torch.cat([rows for _, rows in found]).cpu().numpy())
        self._found = {}
        return table


def _numbers_of(pieces: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A row of ``COLUMNS`` for each piece, given as bytes; all of them on one device, and none empty."""
    whole = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
    if whole.storage_offset() % dtype.itemsize:
        whole = whole.clone()
    numbers = as_numbers(whole.view(dtype))
    lengths = None
    if len(pieces) > 1:
        counts = [piece.numel() // dtype.itemsize for piece in pieces]
        lengths = torch.tensor(counts, dtype=torch.int64, device=whole.device)

    def reduced(column: torch.Tensor, how: str) -> torch.Tensor:
        column = column if column.dtype is torch.float64 else column.to(torch.float64)
        if lengths is not None:
            return torch.segment_reduce(column, how, lengths=lengths, unsafe=True)
        whole = column.sum() if how == "sum" else column.amin() if how == "min" else column.amax()
        return whole.view(1)

    none = torch.zeros(len(pieces), dtype=torch.float64, device=whole.device)
    is_complex = numbers.dim() > 1
    kept, is_lost, nan, lost, sum_squares = numbers, None, none, none, None
    if numbers.is_cpu:  # there it costs nothing to look first: a finite sum of squares has only finite elements
        sum_squares = reduced(numbers.square().sum(1) if is_complex else numbers.square(), "sum")
    if sum_squares is None or not math.isfinite(sum_squares.sum()):
        kept = numbers.nan_to_num(0.0, 0.0, 0.0)
        is_lost, is_nan = numbers.ne(kept), numbers.isnan()
        if is_complex:
            is_lost, is_nan = is_lost.any(1), is_nan.any(1)
            kept = kept.masked_fill(is_lost[:, None], 0.0)
        nan, lost = reduced(is_nan, "sum"), reduced(is_lost, "sum")
        sum_squares = reduced(kept.square().sum(1) if is_complex else kept.square(), "sum")
    if is_complex:
        nonzero = reduced(kept.ne(0).any(1), "sum")
        sums, least, most = [reduced(part.contiguous(), "sum") for part in kept.unbind(1)], none, none
    else:
        nonzero = kept.count_nonzero().view(1) if lengths is None else reduced(kept.ne(0), "sum")
        sums = [reduced(kept, "sum"), none]
        least = reduced(numbers if is_lost is None else numbers.masked_fill(is_lost, math.inf), "min")
        most = reduced(numbers if is_lost is None else numbers.masked_fill(is_lost, -math.inf), "max")
    found = [nan, lost, nonzero.to(torch.float64), *sums, sum_squares, least, most]
    assert len(found) == len(COLUMNS)
    return torch.stack(found, dim=1)
