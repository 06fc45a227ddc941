"""Overlap: which stored boxes of one tensor hold part of a wanted box, and which part.

Works on columns, one row per stored box, in bounds of int64. Never looks at more than one tensor at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Overlap:
    """The non-empty intersections of stored boxes with one wanted box.

    Row ``rows[i]`` of the stored boxes holds the box ``lo[i]``, ``length[i]``, in coordinates of the tensor.
    """

    rows: npt.NDArray[np.int64]
    lo: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]


def overlap(
    lo: npt.NDArray[np.int64],
    length: npt.NDArray[np.int64],
    box_lo: npt.NDArray[np.int64],
    box_length: npt.NDArray[np.int64],
) -> Overlap:
    """The parts of the stored boxes ``lo``, ``length`` (both [n, D]) that lie in one box (both [D]), in row order.

    In zero dimensions every stored box is the one element, so all rows overlap.
    """
    start = np.maximum(lo, box_lo)
    extent = np.minimum(lo + length, box_lo + box_length) - start
    rows = np.flatnonzero((extent > 0).all(axis=1)).astype(np.int64, copy=False)
    return Overlap(rows=rows, lo=start[rows], length=extent[rows])
