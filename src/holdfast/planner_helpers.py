"""From wanted boxes and stored chunks to read items, as columns."""

from __future__ import annotations

import numpy as np

from holdfast._plan.overlap import overlap
from holdfast._values.box import Box, whole
from holdfast._values.limits import MAX_DIMENSIONS
from holdfast.metadata import TensorStorageMetadata, chunk_columns
from holdfast.planner import ReadColumns, padded

_Sizes = tuple[int, ...]
_ZEROS: list[_Sizes] = [(0,) * dimensions for dimensions in range(MAX_DIMENSIONS + 1)]


class ReadRows:
    """Read items under construction; ``columns`` gives them all."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._dimensions: list[int] = []
        self._key: list[int] = []
        self._hint: list[int] = []
        self._chunk_lo: list[_Sizes] = []
        self._target_lo: list[_Sizes] = []
        self._dest_lo: list[_Sizes] = []
        self._storage_lo: list[_Sizes] = []
        self._length: list[_Sizes] = []

    def add_value(self, key: str) -> None:
        """Want the value of ``key``."""
        self._add_key(key, -1)
        self._add(0, (), (), (), (), ())

    def add_tensor(self, key: str, stored: TensorStorageMetadata, box: Box | None = None) -> None:
        """Want ``box`` of the tensor ``key`` (all of it by default), for a target piece that is just that box."""
        size = tuple(stored.size)
        dimensions = len(size)
        chunks = chunk_columns(stored.chunks, dimensions)
        self._add_key(key, dimensions)
        if len(chunks) == 1 and tuple(chunks.length[0].tolist()) == size:
            offsets, lengths = (_ZEROS[dimensions], size) if box is None else (box.offsets, box.lengths)
            if 0 not in lengths:
                self._add(0, _ZEROS[dimensions], offsets, _ZEROS[dimensions], offsets, lengths)
            return
        box = whole(size) if box is None else box
        low = np.array(box.offsets, dtype=np.int64)
        found = overlap(chunks.lo, chunks.length, low, np.array(box.lengths, dtype=np.int64))
        chunk_lo = chunks.lo[found.rows]
        for hint, at, dest, stored_at, length in zip(
            found.rows.tolist(),
            chunk_lo.tolist(),
            (found.lo - low).tolist(),
            (found.lo - chunk_lo).tolist(),
            found.length.tolist(),
            strict=True,
        ):
            self._add(hint, tuple(at), box.offsets, tuple(dest), tuple(stored_at), tuple(length))

    def _add_key(self, key: str, dimensions: int) -> None:
        self._keys.append(key)
        self._dimensions.append(dimensions)

    def _add(
        self, hint: int, chunk_lo: _Sizes, target_lo: _Sizes, dest_lo: _Sizes, storage_lo: _Sizes, length: _Sizes
    ) -> None:
        self._key.append(len(self._keys) - 1)
        self._hint.append(hint)
        self._chunk_lo.append(chunk_lo)
        self._target_lo.append(target_lo)
        self._dest_lo.append(dest_lo)
        self._storage_lo.append(storage_lo)
        self._length.append(length)

    def columns(self) -> ReadColumns:
        """All that was wanted so far."""
        chunk_lo = padded(self._chunk_lo, fill=0)

        def column(rows: list[_Sizes]) -> np.ndarray:
            # Where every target is a whole tensor of one chunk, as most are, all offsets are the same zeros.
            return chunk_lo if rows == self._chunk_lo else padded(rows, fill=0)

        return ReadColumns(
            keys=self._keys,
            storage_keys=self._keys,
            dimensions=self._dimensions,
            key=np.array(self._key, dtype=np.int64),
            hint=np.array(self._hint, dtype=np.int64),
            chunk_lo=chunk_lo,
            target_lo=column(self._target_lo),
            dest_lo=column(self._dest_lo),
            storage_lo=column(self._storage_lo),
            length=padded(self._length, fill=1),
        )
