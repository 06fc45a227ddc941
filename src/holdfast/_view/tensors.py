"""Answers about one tensor: its chunks as columns, some of its elements, its numbers, its damaged blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from itertools import islice

import numpy as np
import torch

from holdfast._look.parts import dequantized, words_of
from holdfast._look.statistics import SAMPLE_BLOCKS, statistics
from holdfast._native.verify import Damage
from holdfast._state.numbers import has_numbers
from holdfast._values.box import Box
from holdfast._values.digest import BLOCK_BYTES, block_counts
from holdfast._values.statistics import TensorStatistics
from holdfast._view.answers import Query, exactly
from holdfast._view.checkpoints import tensor_row
from holdfast._view.tables import Table
from holdfast.errors import NotFoundError, UnsafeError
from holdfast.events.progress import OnBytes

_PAGE_BYTES = 1_000_000
_MOST_FILES = 5000
_MOST_CELLS = 64
_MOST_QUANTIZED = 64 << 20
_MOST_LISTED = 200
_MOST_RUNS = 1000


def row_asked(table: Table, query: Query) -> int:
    row = query.number("tensor")
    if row >= len(table.keys):
        raise NotFoundError(f"there is no tensor {row}; there are {len(table.keys):,}")
    return row


def about(table: Table, query: Query) -> dict[str, object]:
    row = row_asked(table, query)
    storing = int(table.storing[row])
    shared = [other for other in np.flatnonzero(table.storing == storing).tolist() if other != row]
    stored = None if table.statistics is None else table.statistics.get(table.keys[row])
    return {
        "checkpoint": query.number("checkpoint"),
        **tensor_row(table, row),
        "kind": table.entries[row].kind or "tensor",
        "shared_with": [{"tensor": other, "key": table.keys[other]} for other in shared[:_MOST_LISTED]],
        "requires_grad": None if table.format == "huggingface" else table.entries[row].requires_grad,
        "files": [
            table.manifest.files[number].name
            for number in np.unique(table.chunk_table(row).file)[:_MOST_FILES].tolist()
        ],
        "statistics": None if stored is None else told(stored),
    }


def chunks(table: Table, query: Query) -> bytes:
    """A page of the chunks: the length of a JSON header, the header, zeros up to 8 bytes; then columns, little endian.

    These are where chunks begin and how long they are (float64, row by row), their bytes (float64), the ranks that
    wrote them and their files (int32); files count those of this tensor.
    """
    found = table.chunk_table(row_asked(table, query))
    total, dims = len(found.file), found.lo.shape[1]
    first = min(query.number("first", 0), total)
    stop = min(total, first + _PAGE_BYTES // (16 * dims + 16 + 8))
    part = slice(first, stop)
    ranks = table.file_ranks[found.file[part]].astype("<i4")
    header = {"total": total, "first": first, "count": stop - first, "dims": dims, "ranks": bool((ranks >= 0).any())}
    text = json.dumps(header).encode()
    start = len(text).to_bytes(4, "little") + text
    numbers = np.searchsorted(np.unique(found.file), found.file[part])
    columns = [found.lo[part].astype("<f8"), found.length[part].astype("<f8"), found.bytes[part].astype("<f8")]
    parts = [column.tobytes() for column in [*columns, ranks, numbers.astype("<i4")]]
    return b"".join([start, bytes(-len(start) % 8), *parts])


def elements(table: Table, query: Query) -> dict[str, object]:
    """A rectangle of the last two dimensions, as far as there is one at this place."""
    row = row_asked(table, query)
    shape = table.entries[row].shape
    at = query.numbers("at") or [0] * len(shape)
    if len(at) != len(shape) or any(place >= max(size, 1) for place, size in zip(at, shape, strict=True)):
        raise ValueError(f"at is a place in {list(shape)}, with a number for each dimension, not {at}")
    is_quantized = table.dtypes[table.dtype[row]].startswith(("qint", "quint"))
    if is_quantized and table.nbytes[row] > _MOST_QUANTIZED:
        raise UnsafeError(f"{table.keys[row][:200]!r} is quantised, and too large to be read whole for a part of it")
    most = [query.number("rows", 16, most=_MOST_CELLS), query.number("columns", 16, most=_MOST_CELLS)][-len(shape) :]
    lengths = [1] * (len(shape) - len(most)) + most if shape else []
    box = Box(tuple(at), tuple(min(size - low, length) for low, size, length in zip(at, shape, lengths, strict=True)))
    with table.opened(row) as checkpoint:
        tensor = checkpoint[table.keys[row]]
        read = dequantized(tensor[...])[box.slices()] if is_quantized else tensor[box.slices()]
    cells = _cells(read)
    columns = box.lengths[-1] if shape else 1
    rows = 0 if not columns else len(cells) // columns
    return {
        "at": at,
        "rows": rows,
        "columns": columns,
        "values": [cells[start : start + columns] for start in range(0, rows * columns, columns or 1)],
    }


def _cells(tensor: torch.Tensor) -> list[object]:
    if not has_numbers(tensor.dtype):
        words = words_of(tensor)
        return [b"".join(part.tobytes() for part in row[::-1]).hex() for row in words.byteswap()]
    flat = tensor.reshape(-1)
    if flat.dtype.is_complex:
        return flat.to(torch.complex128).tolist()
    if not flat.dtype.is_floating_point:
        return flat.tolist()
    numbers = flat.to(torch.float64).tolist()
    # As many digits as the type has: 0.1 of a float32 is not 0.10000000149011612 to a reader.
    return numbers if flat.dtype == torch.float64 else [float(f"{number:.7g}") for number in numbers]


def told(found: TensorStatistics) -> dict[str, object]:
    """All fields of ``found``, and what follows from them."""
    own = {name: getattr(found, name) for name in TensorStatistics.__slots__}
    return {**own, **{name: getattr(found, name) for name in ("is_exact", "mean", "std", "rms", "norm")}}


def sampled(table: Table, query: Query) -> dict[str, object]:
    """The statistics of a sample of the tensor."""
    return _numbers(table, row_asked(table, query), SAMPLE_BLOCKS, False)


def numbers(table: Table, row: int, progress: OnBytes) -> dict[str, object]:
    """The statistics of all elements of the tensor."""
    return _numbers(table, row, None, progress)


def _numbers(table: Table, row: int, sample: int | None, progress: OnBytes | bool) -> dict[str, object]:
    key = table.keys[row]
    with table.opened(row) as checkpoint:
        found = statistics(checkpoint, keys=exactly(key), sample=sample, progress=progress)
    alias_of = table.keys[int(table.storing[row])] if table.is_tied(row) else None
    return {**told(found.tensors[key]), "alias_of": alias_of}


def blocks(table: Table, row: int, damage: Iterable[Damage] | None) -> dict[str, object]:
    """Which blocks of the tensor's chunks are damaged; None: nobody has looked."""
    found = table.chunk_table(row)
    counts = block_counts(found.bytes)
    first = np.concatenate([[0], np.cumsum(counts)])
    runs: list[tuple[int, int]] = []
    files = {file.name: number for number, file in enumerate(table.manifest.files)}
    of_this = (each for each in damage or () if each.key == table.keys[row])
    for each in islice(of_this, _MOST_RUNS):
        low, high = each.span
        hit = (found.file == files.get(each.file, -1)) & (found.offset < high) & (found.offset + found.bytes > low)
        for chunk in np.flatnonzero(hit).tolist():
            inside = (
                max(low - int(found.offset[chunk]), 0),
                min(high - int(found.offset[chunk]), int(found.bytes[chunk])),
            )
            start = int(first[chunk])
            runs.append((start + inside[0] // BLOCK_BYTES, start + math.ceil(inside[1] / BLOCK_BYTES) - 1))
    return {
        "blocks": int(first[-1]),
        "block_bytes": BLOCK_BYTES,
        "state": "unknown" if damage is None else "verified",
        "damaged": sorted(runs)[:_MOST_RUNS],
    }
