"""Where the elements of outside tensors lie in inside tensors, by the operations of a rule.

An operation only ever says where elements go. So what all of them do together is a list of patches for each outside
tensor: boxes, of which each dimension runs along one dimension of an inside tensor, in steps of equal width. Only
shapes are looked at here, never a key or an element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast._mapping.rules import Concat, Interleave, Move, Operation, Split, Stack, Transpose, Unstack
from holdfast._values.box import Box

Size = tuple[int, ...]


class DoesNotFit(Exception):
    """Why the operations of a rule cannot be done with tensors of these shapes."""


class Axis(NamedTuple):
    """What a dimension of a patch runs along: from ``start`` of dimension ``dim`` inside, in steps of ``step``.

    ``dim`` is -1 where there is no such dimension inside, and one index outside.
    """

    dim: int
    start: int
    step: int


@dataclass(frozen=True, slots=True)
class Patch:
    """A box of an outside tensor, and where it lies in the inside tensor with the number ``inside``.

    ``fixed`` has the dimensions inside of which only one index belongs to it.
    """

    box: Box
    inside: int
    axes: tuple[Axis, ...]
    fixed: tuple[tuple[int, int], ...]

    def around(self, box: Box) -> Box | None:
        """The smallest box of the inside tensor that has what is in ``box`` of the outside one; None for nothing."""
        common = self.box.intersect(box)
        if common is None:
            return None
        spans = {dim: (index, 1) for dim, index in self.fixed}
        for (dim, start, step), first, low, length in zip(
            self.axes, self.box.offsets, common.offsets, common.lengths, strict=True
        ):
            spans[dim] = start + step * (low - first), step * (length - 1) + 1
        dims = sorted(dim for dim in spans if dim >= 0)
        return Box(tuple(spans[dim][0] for dim in dims), tuple(spans[dim][1] for dim in dims))


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """The outside tensors of a rule: for each pattern in turn, one, or as many as its list is long (``numbers``)."""

    sizes: tuple[Size, ...]
    patches: tuple[tuple[Patch, ...], ...]
    numbers: int


def relation_of(move: Move, sizes: Sequence[Size]) -> Relation:
    """What ``move`` makes of inside tensors with ``sizes``, which are in the order of its patterns; or DoesNotFit."""
    numbers = len(sizes) // len(move.insides)
    tensors = [_whole(number, size) for number, size in enumerate(sizes)]
    found = [tensors[start : start + numbers] for start in range(0, len(sizes), numbers)]
    for operation in reversed(move.operations):
        found = _undone(operation, found, len(move.outsides))
    flat = [tensor for each in found for tensor in each]
    return Relation(
        sizes=tuple(tensor.size for tensor in flat),
        patches=tuple(tuple(map(_patch, tensor.blocks)) for tensor in flat),
        numbers=len(found[0]),
    )


class _Span(NamedTuple):
    """``length`` indices of a dimension, from ``first`` on, and what they run along."""

    first: int
    length: int
    axis: Axis


class _Block(NamedTuple):
    source: int
    spans: tuple[_Span, ...]
    fixed: tuple[tuple[int, int], ...]


class _Arranged(NamedTuple):
    """A tensor that is made of parts of inside tensors."""

    size: Size
    blocks: list[_Block]


_Lists = list[list[_Arranged]]


def _whole(number: int, size: Size) -> _Arranged:
    spans = tuple(_Span(0, count, Axis(dim, 0, 1)) for dim, count in enumerate(size))
    return _Arranged(tuple(size), [_Block(number, spans, ())])


def _patch(block: _Block) -> Patch:
    box = Box(tuple(span.first for span in block.spans), tuple(span.length for span in block.spans))
    return Patch(box, block.source, tuple(span.axis for span in block.spans), block.fixed)


def _undone(operation: Operation, found: _Lists, outsides: int) -> _Lists:
    """What ``operation`` was done to, if ``found`` came of it."""
    if isinstance(operation, Concat):
        parts = operation.parts or (1,) * outsides
        pieces = [list(_parted(tensor, operation.dim, parts)) for tensor in found[0]]
        return [[of_one[part] for of_one in pieces] for part in range(len(parts))]
    if isinstance(operation, Split):
        lengths = [tensor.size[_dimension(tensor.size, operation.dim)] for each in found for tensor in each[:1]]
        if operation.parts and any(
            length * sum(operation.parts) != part * sum(lengths)
            for length, part in zip(lengths, operation.parts, strict=True)
        ):
            raise DoesNotFit(
                f"are {lengths} long in dimension {operation.dim}, not in the proportion {operation.parts}"
            )
        return [[_joined(of_one, operation.dim) for of_one in zip(*found, strict=True)]]
    if isinstance(operation, Stack):
        lists = [list(_unbound(each[0], operation.dim)) for each in found]
        if len({len(each) for each in lists}) > 1:
            raise DoesNotFit(f"are stacked in different numbers: {[len(each) for each in lists]}")
        return lists
    if isinstance(operation, Unstack):
        return [[_joined([_widened(tensor, operation.dim) for tensor in each], operation.dim)] for each in found]
    if isinstance(operation, Transpose):
        return [[_transposed(tensor, operation.dim, operation.other) for tensor in each] for each in found]
    return [
        [_reordered(tensor, operation) for tensor in each] if not operation.only or number in operation.only else each
        for number, each in enumerate(found)
    ]


def _dimension(size: Size, dim: int, more: int = 0) -> int:
    """``dim`` of a tensor of ``size``, or of one with ``more`` dimensions, counted from the first one."""
    number = len(size) + more
    if not -number <= dim < number:
        raise DoesNotFit(f"of shape {list(size)} have no dimension {dim}")
    return dim % number


def _with(items: tuple[_Span, ...], at: int, *new: _Span) -> tuple[_Span, ...]:
    return (*items[:at], *new, *items[at + 1 :])


def _moved(block: _Block, dim: int, low: int, high: int) -> _Block | None:
    """What ``block`` has of the indices ``low`` to ``high`` of dimension ``dim``, counted from ``low``."""
    first, count, (inner, start, step) = block.spans[dim]
    begin, end = max(first, low), min(first + count, high)
    if begin >= end:
        return None
    span = _Span(begin - low, end - begin, Axis(inner, start + step * (begin - first), step))
    return block._replace(spans=_with(block.spans, dim, span))


def _parted(tensor: _Arranged, dim: int, parts: Sequence[int]) -> Iterator[_Arranged]:
    dim = _dimension(tensor.size, dim)
    length, total = tensor.size[dim], sum(parts)
    if length % total:
        shares = f"{total} equal parts" if set(parts) == {1} else f"parts in the proportion {parts}"
        raise DoesNotFit(f"of shape {list(tensor.size)} cannot be cut into {shares} in dimension {dim}")
    low = 0
    for part in parts:
        high = low + part * length // total
        blocks = [found for block in tensor.blocks if (found := _moved(block, dim, low, high)) is not None]
        yield _Arranged((*tensor.size[:dim], high - low, *tensor.size[dim + 1 :]), blocks)
        low = high


def _joined(tensors: Sequence[_Arranged], dim: int) -> _Arranged:
    size = tensors[0].size
    dim = _dimension(size, dim)
    blocks: list[_Block] = []
    length = 0
    for tensor in tensors:
        if (*tensor.size[:dim], *tensor.size[dim + 1 :]) != (*size[:dim], *size[dim + 1 :]):
            raise DoesNotFit(f"of shapes {list(size)} and {list(tensor.size)} cannot be joined in dimension {dim}")
        for block in tensor.blocks:
            span = block.spans[dim]
            blocks.append(block._replace(spans=_with(block.spans, dim, span._replace(first=span.first + length))))
        length += tensor.size[dim]
    return _Arranged((*size[:dim], length, *size[dim + 1 :]), blocks)


def _widened(tensor: _Arranged, dim: int) -> _Arranged:
    """``tensor`` with one more dimension, which has one index."""
    dim = _dimension(tensor.size, dim, more=1)
    one = _Span(0, 1, Axis(-1, 0, 1))
    blocks = [block._replace(spans=(*block.spans[:dim], one, *block.spans[dim:])) for block in tensor.blocks]
    return _Arranged((*tensor.size[:dim], 1, *tensor.size[dim:]), blocks)


def _unbound(tensor: _Arranged, dim: int) -> Iterator[_Arranged]:
    """For each index of ``dim`` what is there."""
    dim = _dimension(tensor.size, dim)
    size = (*tensor.size[:dim], *tensor.size[dim + 1 :])
    if tensor.size[dim] == 0:
        raise DoesNotFit(f"of shape {list(tensor.size)} are a list of none in dimension {dim}")
    for index in range(tensor.size[dim]):
        blocks: list[_Block] = []
        for block in tensor.blocks:
            first, count, (inner, start, step) = block.spans[dim]
            if first <= index < first + count:
                fixed = block.fixed if inner < 0 else (*block.fixed, (inner, start + step * (index - first)))
                blocks.append(_Block(block.source, (*block.spans[:dim], *block.spans[dim + 1 :]), fixed))
        yield _Arranged(size, blocks)


def _transposed(tensor: _Arranged, first: int, second: int) -> _Arranged:
    first, second = _dimension(tensor.size, first), _dimension(tensor.size, second)
    order = list(range(len(tensor.size)))
    order[first], order[second] = second, first
    blocks = [block._replace(spans=tuple(block.spans[dim] for dim in order)) for block in tensor.blocks]
    return _Arranged(tuple(tensor.size[dim] for dim in order), blocks)


def _reordered(tensor: _Arranged, operation: Operation) -> _Arranged:
    """``tensor`` with the order that it has outside, in runs of indices that follow each other there."""
    assert not isinstance(operation, (Concat, Split, Stack, Unstack, Transpose))
    dim = _dimension(tensor.size, operation.dim)
    length, parts = tensor.size[dim], operation.parts
    if length % (operation.groups * parts):
        raise DoesNotFit(
            f"of shape {list(tensor.size)} cannot be cut into {operation.groups} times {parts} parts in dimension {dim}"
        )
    of_group = length // operation.groups
    of_part = of_group // parts
    count, step = (of_part, parts) if isinstance(operation, Interleave) else (parts, of_part)
    blocks: list[_Block] = []
    for outer in range(0, length, max(1, count)):
        start = outer // of_group * of_group + outer % of_group // count
        for block in tensor.blocks:
            first, its_count, (inner, its_start, its_step) = block.spans[dim]
            low = max(0, -((start - first) // step))
            high = min(count, -((start - first - its_count) // step))
            if low < high:
                axis = Axis(inner, its_start + its_step * (start + step * low - first), its_step * step)
                blocks.append(block._replace(spans=_with(block.spans, dim, _Span(outer + low, high - low, axis))))
    return _Arranged(tensor.size, blocks)
