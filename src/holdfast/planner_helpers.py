"""From wanted boxes and stored chunks to read items, as columns."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from holdfast._plan.coverage import check_coverage
from holdfast._plan.overlap import overlap
from holdfast._values.box import Box, whole
from holdfast._values.limits import MAX_DIMENSIONS
from holdfast.errors import CorruptError
from holdfast.metadata import Metadata, TensorStorageMetadata, chunk_columns
from holdfast.planner import ReadColumns, padded

_Sizes = tuple[int, ...]


def check_tiling(metadata: Metadata) -> None:
    """CorruptError unless the chunks of every tensor make it up exactly: what they leave out would be left unfilled."""
    tensors = [
        (key, each) for key, each in metadata.state_dict_metadata.items() if isinstance(each, TensorStorageMetadata)
    ]
    tables = [chunk_columns(stored.chunks, len(stored.size)) for _, stored in tensors]
    sizes = padded([stored.size for _, stored in tensors], fill=1)
    # The last row, left out again, makes all tables as wide as the sizes, though the widest tensor may have no chunks.
    widest = [1] * sizes.shape[1]
    faults = check_coverage(
        np.repeat(np.arange(len(tables)), [len(table) for table in tables]),
        padded([*(row for table in tables for row in table.lo.tolist()), widest], fill=0)[:-1],
        padded([*(row for table in tables for row in table.length.tolist()), widest], fill=1)[:-1],
        sizes,
    )
    if faults:
        key = tensors[faults[0].tensor][0]
        raise CorruptError(f"the chunks of {key!r} do not make up the tensor: {faults[0].detail}", key=key)


class _Offsets(NamedTuple):
    """Where a box starts: its chunk in the tensor, its piece of the target in the tensor, itself in piece and chunk."""

    chunk: _Sizes
    target: _Sizes
    dest: _Sizes
    storage: _Sizes


_NOWHERE = [_Offsets(zeros, zeros, zeros, zeros) for zeros in ((0,) * count for count in range(MAX_DIMENSIONS + 1))]


class ReadRows:
    """Read items under construction; ``columns`` gives them all."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._dimensions: list[int] = []
        self._rows: list[tuple[int, int, _Offsets, _Sizes]] = []

    def add_value(self, key: str) -> None:
        """Want the value of ``key``."""
        self._rows.append((len(self._keys), 0, _NOWHERE[0], ()))
        self._keys.append(key)
        self._dimensions.append(-1)

    def add_tensor(self, key: str, stored: TensorStorageMetadata, box: Box | None = None) -> None:
        """Want ``box`` of the tensor ``key`` (all of it by default), for a target piece that is just that box."""
        size = tuple(stored.size)
        number, dimensions = len(self._keys), len(size)
        self._keys.append(key)
        self._dimensions.append(dimensions)
        chunks = stored.chunks
        if box is None and len(chunks) == 1 and 0 not in size:
            # One chunk that is all of the tensor, since chunks tile it.
            self._rows.append((number, 0, _NOWHERE[dimensions], size))
            return
        columns = chunk_columns(chunks, dimensions)
        box = whole(size) if box is None else box
        low = np.array(box.offsets, dtype=np.int64)
        found = overlap(columns.lo, columns.length, low, np.array(box.lengths, dtype=np.int64))
        chunk_lo = columns.lo[found.rows]
        for hint, at, dest, stored_at, length in zip(
            found.rows.tolist(),
            chunk_lo.tolist(),
            (found.lo - low).tolist(),
            (found.lo - chunk_lo).tolist(),
            found.length.tolist(),
            strict=True,
        ):
            offsets = _Offsets(tuple(at), box.offsets, tuple(dest), tuple(stored_at))
            self._rows.append((number, hint, offsets, tuple(length)))

    def columns(self) -> ReadColumns:
        """All that was wanted so far."""
        chunk_lo = padded([offsets.chunk for _, _, offsets, _ in self._rows], fill=0)

        def column(pick: Callable[[_Offsets], _Sizes]) -> np.ndarray:
            # Where every target is a whole tensor of one chunk, as most are, all offsets are the same zeros.
            if all(pick(offsets) is offsets.chunk for _, _, offsets, _ in self._rows):
                return chunk_lo
            return padded([pick(offsets) for _, _, offsets, _ in self._rows], fill=0)

        return ReadColumns(
            keys=self._keys,
            storage_keys=self._keys,
            dimensions=self._dimensions,
            key=np.array([number for number, _, _, _ in self._rows], dtype=np.int64),
            hint=np.array([hint for _, hint, _, _ in self._rows], dtype=np.int64),
            chunk_lo=chunk_lo,
            target_lo=column(attrgetter("target")),
            dest_lo=column(attrgetter("dest")),
            storage_lo=column(attrgetter("storage")),
            length=padded([length for _, _, _, length in self._rows], fill=1),
        )
