"""The row-major bytes of tensors, any range at a time, out to a buffer and in from one.

No range is ever made contiguous as a whole: a strided, conjugated or remote tensor is copied piece by piece, so that
memory stays within the buffer. Copies between equal dtypes move words and keep every bit.

A buffer is given as its uint8 tensor and its address. Contiguous CPU memory is moved by address, because the cost per
tensor is what counts for thousands of small ones; the source or target object keeps the memory alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Protocol

import torch

from holdfast._state.tensors import word_dtype, words_of_quantized
from holdfast._values.box import Box, flat_range_boxes


class Buffer(Protocol):
    """Staging memory: ``tensor`` is uint8, one-dimensional, and starts at ``address``."""

    @property
    def address(self) -> int: ...
    @property
    def tensor(self) -> torch.Tensor: ...


class Source(Protocol):
    """Something with row-major bytes."""

    nbytes: int

    def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        """Put bytes [start, stop) into ``buffer`` from ``at`` on."""
        ...


class MemorySource:
    """Bytes that lie in this process's memory; ``owner`` keeps them there."""

    __slots__ = ("_address", "_owner", "nbytes")

    def __init__(self, owner: object, address: int, nbytes: int) -> None:
        self._owner = owner
        self._address = address
        self.nbytes = nbytes

    def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        """Put bytes [start, stop) into ``buffer`` from ``at`` on."""
        ctypes.memmove(buffer.address + at, self._address + start, stop - start)


class ScatteredSource:
    """A tensor that is strided, has a lazy conjugation, or lives on a device."""

    __slots__ = ("_dtype", "_tensor", "nbytes")

    def __init__(self, tensor: torch.Tensor) -> None:
        lazy = tensor.is_conj() or tensor.is_neg()
        self._tensor = tensor if lazy else _as_words(tensor)
        self._dtype = self._tensor.dtype
        self.nbytes = tensor.numel() * tensor.dtype.itemsize

    def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        """Put bytes [start, stop) into ``buffer`` from ``at`` on."""
        for box, begin, end in _boxes(self._tensor.shape, start, stop, self._dtype.itemsize):
            piece = self._tensor[box.slices()]
            place = at + begin - start
            if place % self._dtype.itemsize == 0:
                _typed(buffer, place, place + end - begin, self._dtype, box).copy_(piece)
            else:
                aligned = torch.empty(box.lengths, dtype=self._dtype).copy_(piece)
                ctypes.memmove(buffer.address + place, aligned.data_ptr(), end - begin)


def source_of(tensor: torch.Tensor) -> MemorySource | ScatteredSource:
    """The bytes of ``tensor``."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        if tensor.is_quantized:
            tensor = words_of_quantized(tensor)
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return MemorySource(tensor, tensor.data_ptr(), tensor.numel() * tensor.dtype.itemsize)
    return ScatteredSource(tensor)


class Target:
    """A tensor to be filled with box ``wanted`` of a stored chunk of ``shape`` and ``dtype``.

    ``run`` is the byte range of the chunk that is wanted, when it is one range and the tensor takes it as one range.
    """

    __slots__ = ("_address", "_flat", "_on_cpu", "_shape", "_wanted", "_words", "dtype", "run", "tensor")

    def __init__(self, tensor: torch.Tensor, *, dtype: torch.dtype, shape: tuple[int, ...], wanted: Box) -> None:
        self.tensor = tensor
        self.dtype = dtype
        self._shape = shape
        self._wanted = wanted
        self._on_cpu = tensor.device.type == "cpu"
        words = words_of_quantized(tensor) if tensor.is_quantized else tensor
        self._words = _as_words(words) if tensor.dtype == dtype else words
        self.run: tuple[int, int] | None = None
        self._flat: memoryview | None = None
        self._address = 0
        if tensor.dtype == dtype and words.is_contiguous():
            self.run = _one_run(shape, wanted, dtype.itemsize)
            self._address = words.data_ptr()

    def memory(self, start: int, stop: int) -> memoryview | None:
        """The target's own memory for bytes [start, stop) of the chunk, where they all go there as they are."""
        if self.run is None or not self._on_cpu or start < self.run[0] or stop > self.run[1]:
            return None
        if self._flat is None:
            self._flat = self._words.reshape(-1).view(torch.uint8).numpy().data
        return self._flat[start - self.run[0] : stop - self.run[0]]

    def copy_in(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        """Take bytes [start, stop) of the chunk, which lie in ``buffer`` from ``at`` on."""
        if self.run is None:
            self._scatter(start, stop, buffer, at)
            return
        low, high = max(start, self.run[0]), min(stop, self.run[1])
        if low >= high:
            return
        place = at + low - start
        if self._on_cpu:
            ctypes.memmove(self._address + low - self.run[0], buffer.address + place, high - low)
        else:
            flat = self._words.reshape(-1).view(torch.uint8)
            flat[low - self.run[0] : high - self.run[0]].copy_(
                buffer.tensor[place : place + high - low], non_blocking=True
            )

    def _scatter(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        itemsize = self.dtype.itemsize
        dtype = self._words.dtype if self.tensor.dtype == self.dtype else self.dtype
        for box, begin, end in _boxes(self._shape, start, stop, itemsize):
            common = box.intersect(self._wanted)
            if common is None:
                continue
            place = at + begin - start
            span = buffer.tensor[place : place + end - begin]
            if not self._on_cpu:
                span = span.to(self.tensor.device, non_blocking=True)
            elif place % itemsize:
                span = span.clone()
            piece = span.view(dtype).view(box.lengths)[common.relative_to(box).slices()]
            self._words[common.relative_to(self._wanted).slices()].copy_(piece, non_blocking=True)


def _boxes(shape: tuple[int, ...], start: int, stop: int, itemsize: int) -> Iterator[tuple[Box, int, int]]:
    """The boxes that bytes [start, stop) make up, each with its own byte range."""
    begin = start
    for box in flat_range_boxes(tuple(shape), start // itemsize, stop // itemsize):
        end = begin + box.volume * itemsize
        yield box, begin, end
        begin = end


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(word_dtype(tensor.dtype.itemsize))


def _typed(buffer: Buffer, start: int, stop: int, dtype: torch.dtype, box: Box) -> torch.Tensor:
    return buffer.tensor[start:stop].view(dtype).view(box.lengths)


def _one_run(shape: tuple[int, ...], wanted: Box, itemsize: int) -> tuple[int, int] | None:
    """The byte range of ``wanted`` in a row-major array of ``shape``, when it is one range."""
    start, width, split = 0, itemsize, False
    for size, low, length in zip(reversed(shape), reversed(wanted.offsets), reversed(wanted.lengths), strict=True):
        if split and length != 1:
            return None
        start += low * width
        split = split or length != size
        width *= size
    return start, start + wanted.volume * itemsize
