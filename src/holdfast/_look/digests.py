"""Which tensors of two catalogs are stored as the same bytes, told by the digests of their blocks: no data is read.

Digests compare where chunks are the same boxes, since blocks count from the start of a chunk. All is done in columns,
because there may be millions of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast._native.catalog import Catalog


def differing_blocks(a: Catalog, b: Catalog, keys: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """How many blocks each of ``keys`` has, and in how many of them the two differ; -1 where they do not compare.

    Each is a tensor of the same dtype and shape in both.
    """
    blocks, differing = np.zeros(len(keys), dtype=np.int64), np.full(len(keys), -1)
    if not keys or not (a.has_digests and b.has_digests):
        return blocks, differing
    first_a, count_a = _rows(a, keys)
    first_b, count_b = _rows(b, keys)
    asked = np.flatnonzero(count_a == count_b)
    rows_a, of = _ranges(first_a[asked], count_a[asked])
    rows_b, _ = _ranges(first_b[asked], count_a[asked])
    # Dimensions beyond those that a tensor has are padded alike.
    width = min(a.index.lo.shape[1], b.index.lo.shape[1])
    is_other = np.zeros(len(rows_a), dtype=bool)
    for name in ("lo", "length"):
        mine, its = getattr(a.index, name), getattr(b.index, name)
        for dimension in range(width):
            is_other |= mine[rows_a, dimension] != its[rows_b, dimension]
    same = np.ones(len(asked), dtype=bool)
    same[of[is_other]] = False
    kept = same[of]
    rows_a, rows_b, of = rows_a[kept], rows_b[kept], of[kept]
    counts = a.first_block[rows_a + 1] - a.first_block[rows_a]
    at_a, chunk = _ranges(a.first_block[rows_a], counts)
    at_b, _ = _ranges(b.first_block[rows_b], counts)
    wrong = np.flatnonzero(a.index.digests[at_a] != b.index.digests[at_b])
    found = np.bincount(of[chunk[wrong]], minlength=len(asked))
    blocks[asked[same]] = np.bincount(of, weights=counts, minlength=len(asked)).astype(np.int64)[same]
    differing[asked[same]] = found[same]
    return blocks, differing


def _rows(catalog: Catalog, keys: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each key in the index, and how many it has."""
    ids = catalog.tensor_ids
    numbers = catalog.storing_ids[np.array([ids[key] for key in keys], dtype=np.int64)]
    return catalog.row_bounds[numbers], catalog.row_bounds[numbers + 1] - catalog.row_bounds[numbers]


def _ranges(first: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All numbers of the ranges that begin at ``first``, one range after the other, and the range that each is of."""
    of = np.repeat(np.arange(len(first)), count)
    ends = np.cumsum(count)
    return np.arange(len(of)) + np.repeat(first - (ends - count), count), of
