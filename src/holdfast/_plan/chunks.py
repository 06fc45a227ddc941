"""Chunks: what becomes of the boxes of a tensor when they are shared out, and what of it is each rank's.

Works on columns. Never decides who writes what.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast._plan.balance import Parts, cut_out
from holdfast._plan.holdings import Holding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyChunks:
    """The chunks of one key, by place: boxes of the holding, or parts of them.

    ``box`` is the number of the box that a chunk is, or is cut from, ``writer`` its rank; None where every chunk is a
    box and its lowest holder writes it.
    """

    lo: np.ndarray
    length: np.ndarray
    box: np.ndarray | None = None
    writer: np.ndarray | None = None
    is_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ByRank:
    """Columns of all ranks, one after the other: those of rank r are the rows from ``bounds[r]`` to ``bounds[r + 1]``.

    ``row`` is a rank's local row; ``key`` and ``number`` say what of it: a chunk of its key, or its set of holders.
    """

    bounds: np.ndarray
    row: np.ndarray
    key: np.ndarray
    number: np.ndarray

    def of(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows, keys and numbers of ``rank``."""
        mine = slice(int(self.bounds[rank]), int(self.bounds[rank + 1]))
        return self.row[mine], self.key[mine], self.number[mine]


def chunks_of(holding: Holding, parts: Parts, writer: np.ndarray) -> KeyChunks:
    """The chunks of one key: ``parts`` of its shared boxes, and the others whole."""
    alone = np.delete(np.arange(len(holding.lo)), holding.shared)
    box = np.concatenate([alone, parts.box])
    writer = np.concatenate([holding.lowest[alone], writer])
    if not (parts.dimension >= 0).any():
        order = np.argsort(box, kind="stable")
        return KeyChunks(lo=holding.lo, length=holding.length, box=box[order], writer=writer[order])
    lo, length = cut_out(holding.lo[parts.box], holding.length[parts.box], parts)
    lo = np.concatenate([holding.lo[alone], lo])
    length = np.concatenate([holding.length[alone], length])
    order = np.lexsort((*length.T[::-1], *lo.T[::-1]))
    return KeyChunks(lo=lo[order], length=length[order], box=box[order], writer=writer[order], is_cut=True)


def widened(table: np.ndarray, width: int, fill: int) -> np.ndarray:
    """``table`` with as many columns as ``width``, the new ones filled with ``fill``."""
    missing = width - table.shape[1]
    return np.pad(table, ((0, 0), (0, missing)), constant_values=fill) if missing else table
