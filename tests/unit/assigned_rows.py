"""Who writes which of the boxes that ranks hold, asked of the planner with boxes alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from holdfast._plan.balance import SPLIT_BYTES
from holdfast._plan.coverage import HeldRows, holding_of
from holdfast._save_plan.plans import properties_of
from holdfast._save_plan.together import joint_plan
from holdfast.planner import TensorHead

Int64s = npt.NDArray[np.int64]
DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64, 16: torch.complex128}


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """What all ranks hold, a row for each rank and box: ``lo`` and ``length`` are [n, D], the others [n]."""

    rank: Int64s
    tensor: Int64s
    lo: Int64s
    length: Int64s
    itemsize: Int64s

    @property
    def nbytes(self) -> Int64s:
        return self.length.prod(axis=1) * self.itemsize


@dataclass(frozen=True, kw_only=True, eq=False)
class Assignment:
    """What is written, by tensor and place: the box ``lo``, ``length``, by the rank of ``row``."""

    row: Int64s
    lo: Int64s
    length: Int64s


def assign(
    held: Held,
    *,
    ranks: int,
    to_lowest_rank: bool = False,
    split_bytes: int = SPLIT_BYTES,
) -> Assignment:
    tensors = np.unique(held.tensor).tolist()
    rows_of = [np.flatnonzero(held.tensor == tensor) for tensor in tensors]
    rows_of = [rows[np.argsort(held.rank[rows], kind="stable")] for rows in rows_of]
    heads: dict[str, TensorHead | None] = {}
    holdings = []
    for tensor, rows in zip(tensors, rows_of, strict=True):
        size = torch.Size((held.lo[rows] + held.length[rows]).max(axis=0).tolist())
        heads[f"{tensor:09}"] = TensorHead(properties_of(DTYPES[int(held.itemsize[rows[0]])], False), size)
        holdings.append(holding_of([HeldRows(rank=held.rank[rows], lo=held.lo[rows], length=held.length[rows])]))
    plan = joint_plan(heads, holdings, ranks, to_lowest_rank=to_lowest_rank, split_bytes=split_bytes, is_whole=False)
    found: list[tuple[int, int, int]] = []  # key, chunk, row
    in_order = np.concatenate(rows_of) if rows_of else np.zeros(0, dtype=np.int64)
    for rank in range(ranks):
        mine = in_order[held.rank[in_order] == rank]
        local, keys, numbers = plan.written.of(rank)
        found += zip(keys.tolist(), numbers.tolist(), mine[local].tolist(), strict=True)
    found.sort()
    width = held.lo.shape[1]
    return Assignment(
        row=np.array([row for _, _, row in found], dtype=np.int64),
        lo=np.array([plan.chunks[key].lo[chunk] for key, chunk, _ in found], np.int64).reshape(len(found), width),
        length=np.array([plan.chunks[key].length[chunk] for key, chunk, _ in found], np.int64).reshape(
            len(found), width
        ),
    )
