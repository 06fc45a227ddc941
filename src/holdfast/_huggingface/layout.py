"""Which bytes of which file every tensor of a folder has, known on every rank before the first byte moves. Pure.

Files are filled in the order of the keys, up to a size, so that readers which work file by file have enough of them.
Within a file, tensors whose size is a multiple of a page come first, each of them on a page of its own, the others by
falling size of their elements: so every element is aligned, and no two tensors have a hole between them. A tensor lies
in the file as a whole, whoever writes which part of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from holdfast._native.file_layout import pack_order
from holdfast._native.index import HeaderEntry, encode_header
from holdfast._values.box import Box
from holdfast._values.dtypes import DTYPES, HEADER_ALIGNMENT

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class Laid(NamedTuple):
    """A tensor of a folder; ``dtype`` is a name of this library."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


class FolderFile(NamedTuple):
    """A file of a folder: its name, its header, and how large it is with it."""

    name: str
    header: bytes
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderLayout:
    """``files``, and for each of ``tensors`` the number of its file and its first byte there."""

    tensors: tuple[Laid, ...]
    files: tuple[FolderFile, ...]
    file: tuple[int, ...]
    offset: tuple[int, ...]

    def index(self) -> bytes:
        """The index: which file each key is in, and how many bytes all tensors have."""
        names = {tensor.key: self.files[number].name for tensor, number in zip(self.tensors, self.file, strict=True)}
        total = sum(tensor.nbytes for tensor in self.tensors)
        return json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2).encode() + b"\n"


def lay_out(
    tensors: Sequence[Laid], *, shard_bytes: int, files: Mapping[str, str], metadata: Mapping[str, str]
) -> FolderLayout:
    """The layout of ``tensors``, in files of at most ``shard_bytes`` or one tensor.

    ``files`` says for each key the name of its file; where it is empty, files are numbered. ``metadata`` is for the
    headers. All keys and types are such that safetensors has names for them.
    """
    if files:
        by_name: dict[str, list[int]] = {}
        for number, tensor in enumerate(tensors):
            by_name.setdefault(files[tensor.key], []).append(number)
    else:
        groups = list(_groups(tensors, shard_bytes))
        count = len(groups)
        by_name = {
            SINGLE_NAME if count == 1 else f"model-{place:05}-of-{count:05}.safetensors": group
            for place, group in enumerate(groups, start=1)
        }
    file, offset = [0] * len(tensors), [0] * len(tensors)
    made = []
    for place, (name, group) in enumerate(sorted(by_name.items())):
        made.append(_file(name, group, tensors, metadata, offset))
        for number in group:
            file[number] = place
    return FolderLayout(tensors=tuple(tensors), files=tuple(made), file=tuple(file), offset=tuple(offset))


def _groups(tensors: Sequence[Laid], shard_bytes: int) -> Iterator[list[int]]:
    group: list[int] = []
    filled = 0
    for number, tensor in enumerate(tensors):
        if group and filled + tensor.nbytes > shard_bytes:
            yield group
            group, filled = [], 0
        group.append(number)
        filled += tensor.nbytes
    yield group


def _file(
    name: str, group: Sequence[int], tensors: Sequence[Laid], metadata: Mapping[str, str], offset: list[int]
) -> FolderFile:
    """The file of the tensors ``group``, each of which is given its ``offset``."""
    chosen = [tensors[number] for number in group]
    by_size = np.argsort([-tensor.itemsize for tensor in chosen], kind="stable")
    order = by_size[pack_order(np.array([chosen[place].nbytes for place in by_size], np.int64), HEADER_ALIGNMENT)]
    entries, end = [], 0
    for place in order.tolist():
        key, dtype, shape = chosen[place]
        entries.append(HeaderEntry(key, DTYPES[dtype].safetensors or "", shape, end, end + chosen[place].nbytes))
        end = entries[-1].end
    header = encode_header(entries, metadata=metadata)
    for place, entry in zip(order.tolist(), entries, strict=True):
        offset[group[place]] = len(header) + entry.begin
    return FolderFile(name, header, len(header) + end)


def flat_start(box: Box, shape: Sequence[int]) -> int | None:
    """The number of the first element of ``box`` in row-major order, if its elements follow each other; else None."""
    start, width, is_open = 0, 1, True
    for size, low, length in zip(reversed(shape), reversed(box.offsets), reversed(box.lengths), strict=True):
        if not is_open and length != 1:
            return None
        is_open = is_open and length == size
        start += low * width
        width *= size
    return start


def stripes_of(tensor: Laid, boxes: Sequence[Box], *, most: int) -> list[Box]:
    """``tensor`` in boxes whose elements follow each other, of about ``most`` bytes at most.

    No stripe has parts of ``boxes`` that begin or end within its rows: so it needs as few of them as can be.
    """
    shape, row = tensor.shape, tensor.itemsize
    dim = len(shape) - 1
    while dim > 0 and row * shape[dim] <= most:
        row *= shape[dim]
        dim -= 1
    # Rows that make whole pages, if that is not too many.
    pages = HEADER_ALIGNMENT // math.gcd(row, HEADER_ALIGNMENT)
    step = max(1, most // row)
    step = step // pages * pages or step
    cuts = sorted({*range(0, shape[dim], step), shape[dim]}.union(*(_ends(box, dim) for box in boxes)))
    ahead, behind = shape[:dim], shape[dim + 1 :]
    return [
        Box((*index, low, *(0 for _ in behind)), (*(1 for _ in index), high - low, *behind))
        for index in product(*map(range, ahead))
        for low, high in pairwise(cuts)
    ]


def _ends(box: Box, dim: int) -> tuple[int, int]:
    return box.offsets[dim], box.offsets[dim] + box.lengths[dim]
