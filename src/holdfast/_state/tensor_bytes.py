"""The row-major bytes of tensors, any range at a time, out to a buffer and in from one.

No range is ever made contiguous as a whole: a strided, conjugated or remote tensor is copied piece by piece, so that
memory stays within the buffer. Copies between equal dtypes move words and keep every bit.

A buffer is given as its uint8 tensor and its address. Contiguous CPU memory is moved by address, because the cost per
tensor is what counts for thousands of small ones; the source or target object keeps the memory alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from holdfast._state.tensors import is_lazy, word_dtype, words_of_quantized
from holdfast._values.box import Box, flat_range_boxes, whole
from holdfast.errors import InvalidStateError
from holdfast.metadata import STATE_DICT_TYPE


class LazyTensor(torch.Tensor):
    """A tensor of ``size`` and ``dtype`` whose row-major bytes come from ``source``, any range at a time.

    For conversions, so that no tensor is ever whole in memory. All that can be done with one is to ask ``source_of``
    for its bytes. ``quantizer`` is what a quantised dtype needs besides them.
    """

    source: Source
    quantizer: STATE_DICT_TYPE | None

    @staticmethod
    def __new__(
        cls,
        source: Source,
        size: Sequence[int],
        dtype: torch.dtype,
        requires_grad: bool = False,
        *,
        quantizer: STATE_DICT_TYPE | None = None,
    ) -> LazyTensor:
        tensor: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(size), dtype=dtype, device=torch.device("cpu"), requires_grad=requires_grad
        )
        tensor.source = source
        tensor.quantizer = quantizer
        return tensor

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass  # all is done

    def detach(self) -> LazyTensor:
        """The same elements, without a gradient."""
        return LazyTensor(self.source, self.shape, self.dtype, quantizer=self.quantizer)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={list(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub has an instance method
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        """InvalidStateError: there are no elements here to compute with."""
        raise InvalidStateError(f"{func} was asked of a tensor that is only in a file; read it first")


_MOVE_SIGNATURE = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
_move_large = ctypes.CFUNCTYPE(*_MOVE_SIGNATURE)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)
_move_small = ctypes.PYFUNCTYPE(*_MOVE_SIGNATURE)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)
_LARGE_BYTES = 256 << 10
_ISSUED_BYTES = 8 << 20


def move(target: int, source: int, nbytes: int) -> None:
    """Copy memory; letting other threads run meanwhile costs more than a small copy takes, so only large ones do."""
    (_move_large if nbytes >= _LARGE_BYTES else _move_small)(target, source, nbytes)


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


class DistantSource:
    """A source that has to fetch its bytes from somewhere: it wants to be asked for much at a time."""


@dataclass(slots=True, eq=False)
class MemorySource:
    """Bytes that lie in this process's memory; ``owner`` keeps them there."""

    owner: object
    address: int
    nbytes: int

    def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        nbytes = stop - start
        (_move_large if nbytes >= _LARGE_BYTES else _move_small)(buffer.address + at, self.address + start, nbytes)

    def pieces(self, limit: int) -> Iterator[torch.Tensor]:
        """All bytes in order, at most ``limit`` at a time, as uint8 tensors that share the memory."""
        for start in range(0, self.nbytes, limit):
            count = min(limit, self.nbytes - start)
            memory = (ctypes.c_uint8 * count).from_address(self.address + start)
            yield torch.frombuffer(memory, dtype=torch.uint8)


class ScatteredSource:
    """A tensor that is strided, has a lazy conjugation, or lives on a device.

    Unless it ``is_ordered`` by whoever copies, other threads copy after what the caller's stream has queued by now.
    """

    __slots__ = ("_ready", "_tensor", "nbytes")

    def __init__(self, tensor: torch.Tensor, *, is_ordered: bool = False) -> None:
        # Threads have streams of their own: what the caller's has queued for the tensor is to be done first.
        is_marked = tensor.is_cuda and not is_ordered
        self._ready = torch.cuda.current_stream(tensor.device).record_event() if is_marked else None
        self._tensor = tensor
        self.nbytes = tensor.numel() * tensor.dtype.itemsize

    def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        if self._ready is not None:
            torch.cuda.current_stream(self._tensor.device).wait_event(self._ready)
        words = self._words()
        itemsize = words.dtype.itemsize
        for box, begin, end in _boxes(words.shape, start, stop, itemsize):
            piece = words[box.slices()]
            place = at + begin - start
            if place % itemsize == 0:
                buffer.tensor[place : place + end - begin].view(words.dtype).view(box.lengths).copy_(piece)
            else:
                aligned = torch.empty(box.lengths, dtype=words.dtype, device="cpu").copy_(piece)
                ctypes.memmove(buffer.address + place, aligned.data_ptr(), end - begin)

    def _words(self) -> torch.Tensor:
        """The bits as they are, unless they are not those of the values."""
        return self._tensor if is_lazy(self._tensor) else _as_words(self._tensor)

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    def issue(self, target: torch.Tensor, at: int) -> None:
        """Queue, on the current stream, copying all bytes into ``target`` (uint8: pinned, or on the device) at ``at``.

        Nothing larger than a few MiB is allocated for it. The target has them when the stream is that far.
        """
        if self._tensor.is_contiguous() and not is_lazy(self._tensor):
            target[at : at + self.nbytes].copy_(_flat_bytes(self._words()), non_blocking=True)
            return
        for piece in self.pieces(_ISSUED_BYTES):
            target[at : at + piece.numel()].copy_(piece, non_blocking=True)
            at += piece.numel()

    def pieces(self, limit: int) -> Iterator[torch.Tensor]:
        """All bytes in order, at most ``limit`` at a time, as uint8 tensors on the device of the tensor."""
        if self._tensor.is_contiguous() and not is_lazy(self._tensor):
            yield from _flat_bytes(self._words()).split(limit)
            return
        for start in range(0, self.nbytes, limit):
            stop = min(start + limit, self.nbytes)
            parts = [
                _flat_bytes(_as_words(self._tensor[box.slices()].resolve_conj().resolve_neg().contiguous()))
                for box, _, _ in _boxes(self._tensor.shape, start, stop, self._tensor.dtype.itemsize)
            ]
            yield parts[0] if len(parts) == 1 else torch.cat(parts)


def source_of(tensor: torch.Tensor, *, is_ordered: bool = False) -> Source:
    """The bytes of ``tensor``; ``is_ordered`` if whoever copies them sees to what streams have queued."""
    if isinstance(tensor, LazyTensor):
        return tensor.source
    if tensor.is_cpu:
        if tensor.is_quantized:
            tensor = words_of_quantized(tensor)
        if tensor.is_contiguous() and not is_lazy(tensor):
            return MemorySource(tensor, tensor.data_ptr(), tensor.numel() * tensor.dtype.itemsize)
    return ScatteredSource(tensor.detach(), is_ordered=is_ordered)


class Rows(NamedTuple):
    """Bytes of a chunk: ``number`` rows of ``nbytes`` each, the first at ``first``, ``stride`` from one to the next."""

    first: int
    nbytes: int
    stride: int
    number: int


class Target:
    """A tensor to be filled with box ``wanted`` of a stored chunk of ``shape`` and ``dtype``; None wants all of it.

    ``run`` is the byte range of the chunk that is wanted, when it is one range and the tensor takes it as one range.
    Memory is written behind torch's back: autograd is told now, before the first byte, that the tensor is another.
    """

    __slots__ = ("_address", "_flat", "_rows", "_shape", "_takes_words", "_wanted", "dtype", "on_cpu", "run", "tensor")

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], wanted: Box | None) -> None:
        torch.autograd.graph.increment_version(tensor)
        self.tensor = tensor
        self.dtype = dtype
        self._shape = shape
        self._wanted = wanted
        self.on_cpu = tensor.is_cpu
        self.run: tuple[int, int] | None = None
        self._flat: memoryview | None = None
        self._address = 0
        self._rows: Rows | None = None
        # Bits are kept as they are, unless they are to be cast or the target itself is a conjugate or negative view.
        self._takes_words = tensor.dtype == dtype and not is_lazy(tensor)
        if self._takes_words and tensor.is_contiguous():
            whole_bytes = tensor.numel() * dtype.itemsize
            self._rows = Rows(0, whole_bytes, 0, 1) if wanted is None else _rows(shape, wanted, dtype.itemsize)
            if self._rows is not None and self._rows.number == 1:
                self.run = self._rows.first, self._rows.first + self._rows.nbytes
            self._address = tensor.data_ptr()
            if self._address == 0 and whole_bytes:
                raise InvalidStateError(f"a {type(tensor).__name__} without memory of its own cannot be loaded into")

    def _words(self) -> torch.Tensor:
        """The tensor as words where bits are to be kept, as it is where they are to be converted."""
        tensor = words_of_quantized(self.tensor) if self.tensor.is_quantized else self.tensor
        return _as_words(tensor) if self._takes_words else tensor

    def memory(self, start: int, stop: int) -> memoryview | None:
        """The target's own memory for bytes [start, stop) of the chunk, where they all go there as they are."""
        if self.run is None or not self.on_cpu or start < self.run[0] or stop > self.run[1]:
            return None
        if self._flat is None:
            self._flat = _flat_bytes(self._words()).numpy().data
        return self._flat[start - self.run[0] : stop - self.run[0]]

    def copy_in(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        """Take bytes [start, stop) of the chunk, which lie in ``buffer`` from ``at`` on."""
        if self.run is None:
            if self._rows is not None and self.on_cpu:
                self._take_rows(self._rows, start, stop, buffer, at)
            else:
                self._scatter(start, stop, buffer, at)
            return
        first, last = self.run
        low, high = max(start, first), min(stop, last)
        if low >= high:
            return
        place = at + low - start
        if self.on_cpu:
            move(self._address + low - first, buffer.address + place, high - low)
        else:
            flat = _flat_bytes(self._words())
            source = buffer.tensor[place : place + high - low]
            flat[low - first : high - first].copy_(source, non_blocking=self.tensor.is_cuda)

    def _take_rows(self, rows: Rows, start: int, stop: int, buffer: Buffer, at: int) -> None:
        """Take what lies in [start, stop) of rows: whole ones at once, the first and the last as far as they go."""
        first, nbytes, stride, count = rows
        row = max(0, -(-(start - first) // stride))
        end = min(count, (stop - first - nbytes) // stride + 1)
        for part in {row - 1, end} if row <= end else {row - 1}:
            begin = first + part * stride
            low, high = max(start, begin), min(stop, begin + nbytes)
            if 0 <= part < count and low < high:
                move(self._address + part * nbytes + low - begin, buffer.address + at + low - start, high - low)
        if row >= end:
            return
        place = at + first + row * stride - start
        itemsize = 1 if place % self.dtype.itemsize else self.dtype.itemsize
        shape = end - row, nbytes // itemsize
        source = buffer.tensor[place : place + (shape[0] - 1) * stride + nbytes].view(word_dtype(itemsize))
        flat = _flat_bytes(self._words())[row * nbytes : end * nbytes].view(word_dtype(itemsize))
        flat.view(shape).copy_(source.as_strided(shape, (stride // itemsize, 1)))

    def _scatter(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        itemsize, words = self.dtype.itemsize, self._words()
        wanted = whole(self._shape) if self._wanted is None else self._wanted
        on_cuda = self.tensor.is_cuda
        dtype = words.dtype if self._takes_words else self.dtype
        for box, begin, end in _boxes(self._shape, start, stop, itemsize):
            common = box.intersect(wanted)
            if common is None:
                continue
            place = at + begin - start
            span = buffer.tensor[place : place + end - begin]
            if not self.on_cpu:
                span = span.to(self.tensor.device, non_blocking=on_cuda)
            elif place % itemsize:
                span = span.clone()
            piece = span.view(dtype).view(box.lengths)[common.relative_to(box).slices()]
            words[common.relative_to(wanted).slices()].copy_(piece, non_blocking=on_cuda)


def _boxes(shape: tuple[int, ...], start: int, stop: int, itemsize: int) -> Iterator[tuple[Box, int, int]]:
    """The boxes that bytes [start, stop) make up, each with its own byte range."""
    begin = start
    for box in flat_range_boxes(tuple(shape), start // itemsize, stop // itemsize):
        end = begin + box.volume * itemsize
        yield box, begin, end
        begin = end


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(word_dtype(tensor.dtype.itemsize))


def _flat_bytes(words: torch.Tensor) -> torch.Tensor:
    """The bytes of contiguous words; a plain reshape would keep the odd stride of a tensor of one element."""
    return words.as_strided((words.numel(),), (1,)).view(torch.uint8)


def _rows(shape: tuple[int, ...], wanted: Box, itemsize: int) -> Rows | None:
    """Where ``wanted`` lies in a row-major array of ``shape``; None when that is not in rows at equal distances."""
    first, width, nbytes, stride, count = 0, itemsize, itemsize, 0, 1
    for size, low, length in zip(reversed(shape), reversed(wanted.offsets), reversed(wanted.lengths), strict=True):
        first += low * width
        if length != 1:
            if count == 1 and width == nbytes:
                nbytes *= length
            elif count == 1:
                stride, count = width, length
            elif width == stride * count:
                count *= length
            else:
                return None
        width *= size
    return Rows(first, nbytes, stride, count)
