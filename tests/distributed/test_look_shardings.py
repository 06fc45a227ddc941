"""Checkpoints of other shardings: digests compare where chunks are the same, else the elements do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast

if TYPE_CHECKING:
    from tools.crew import Crew


def save_along(path: str, dimension: int, last: float) -> None:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    truth = torch.arange(1200 * 1000, dtype=torch.float32).view(1200, 1000)
    truth[-1, -1] = last
    sharded = distribute_tensor(truth, mesh, [Shard(dimension)], src_data_rank=None)
    holdfast.save({"w": sharded, "step": 1}, path)


def test_other_shardings_compare_by_elements(pool: Crew, tmp_path: Path) -> None:
    rows, columns, other = (tmp_path / name for name in ("rows", "columns", "other"))
    pool.run(3, save_along, str(rows), 0, 1.0)
    pool.run(3, save_along, str(tmp_path / "again"), 0, 1.0)
    pool.run(2, save_along, str(columns), 1, 1.0)
    pool.run(2, save_along, str(other), 1, 2.0)
    again = holdfast.diff(rows, tmp_path / "again")
    assert again.same
    assert (again.keys["w"].by, again.data_bytes_read) == ("digests", 0)
    unknown = holdfast.diff(rows, columns)
    assert (unknown.keys["w"].status, unknown.keys["w"].why) == ("not compared", "they are stored in other chunks")
    assert unknown.data_bytes_read == 0
    assert holdfast.diff(rows, columns, values=True).same
    elements = holdfast.diff(columns, rows.with_name("other"), values=True).keys["w"].elements
    assert elements is not None
    assert (elements.differing, elements.first_index, elements.max_abs) == (1, (1199, 999), 1.0)
    # Columns first, so that the first difference is not in the first part.
    elements = holdfast.diff(other, rows, values=True).keys["w"].elements
    assert elements is not None
    assert (elements.differing, elements.first_index) == (1, (1199, 999))
    ours, theirs = (holdfast.statistics(path, sample=None).tensors["w"] for path in (rows, columns))
    assert ours.sum == pytest.approx(theirs.sum)
    assert (ours.looked_at, ours.zeros, ours.max) == (theirs.looked_at, theirs.zeros, theirs.max)
