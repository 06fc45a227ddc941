"""Checkpoints of torch's dcp.save into CUDA tensors."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.filesystem import FileSystemReader

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_cold", [False, True])
def test_everything_arrives_on_the_device(tmp_path: Path, is_cold: bool) -> None:
    state: dict[str, Any] = {
        "big": torch.arange(10_000_000.0),
        "transposed": torch.arange(600_000).view(600, 1000).t(),
        **{f"small.{number}": torch.full((number + 1,), float(number)) for number in range(200)},
        "step": 7,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=tmp_path)
    if is_cold:
        for file in tmp_path.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        target = {
            key: torch.zeros(value.shape, dtype=value.dtype, device="cuda") if isinstance(value, torch.Tensor) else None
            for key, value in state.items()
        }
        holdfast.load(target, storage_reader=FileSystemReader(tmp_path, verify=True))
        for key, value in state.items():
            found = target[key]
            assert torch.equal(found.cpu(), value) if isinstance(found, torch.Tensor) else found == value, key
