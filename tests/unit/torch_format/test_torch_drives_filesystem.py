"""torch's own save and load, on this library's storages for torch's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def state(start: int) -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(12.0).view(3, 4) + start, "bias": torch.full((3,), start, dtype=torch.int32)},
        "step": start,
        "names": ["one", "two"],
    }


@pytest.mark.parametrize(("ours_writes", "ours_reads"), [(True, False), (False, True), (True, True)])
def test_torch_saves_and_loads_through_them(tmp_path: Path, ours_writes: bool, ours_reads: bool) -> None:
    writer: Any = holdfast.FileSystemWriter(tmp_path) if ours_writes else dcp.FileSystemWriter(tmp_path)
    dcp.save(state(5), storage_writer=writer)
    target = state(0)
    reader: Any = holdfast.FileSystemReader(tmp_path) if ours_reads else dcp.FileSystemReader(tmp_path)
    dcp.load(target, storage_reader=reader)
    assert torch.equal(target["model"]["weight"], state(5)["model"]["weight"])
    assert torch.equal(target["model"]["bias"], state(5)["model"]["bias"])
    assert target["step"] == 5


def test_what_torch_saved_through_them_loads_by_itself(tmp_path: Path) -> None:
    dcp.save(state(7), storage_writer=holdfast.FileSystemWriter(tmp_path))  # type: ignore[arg-type]
    loaded = holdfast.load(tmp_path)
    assert torch.equal(loaded["model"]["weight"], state(7)["model"]["weight"])
    assert loaded["step"] == 7
    assert loaded["names"] == ["one", "two"]
