"""Saves that fail on ranks: no directory is left that they made; and what a save says that only one rank calls."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import FileSystemWriter, NativeWriter

if TYPE_CHECKING:
    from tools.crew import Crew

WORLD = 3


class _NativeThatFails(NativeWriter):
    def finish(self, metadata: Any, results: Any) -> None:
        raise OSError("no")


class _TorchThatFails(FileSystemWriter):
    def finish(self, metadata: Any, results: Any) -> None:
        raise OSError("no")


STORAGES = {"native": _NativeThatFails, "torch": _TorchThatFails}


def save_that_fails(path: str, storage: str, way: str) -> str:
    state = {f"of rank {dist.get_rank()}": torch.ones(1000), "all": torch.ones(3)}
    writer: Any = STORAGES[storage](path)
    try:
        if way == "async":
            holdfast.async_save(state, storage_writer=writer).result()
        else:
            holdfast.save(state, storage_writer=writer)
    except holdfast.CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("way", ["save", "async"])
def test_no_directory_is_left_that_the_save_made(pool: Crew, tmp_path: Path, storage: str, way: str) -> None:
    (tmp_path / "was there").mkdir()
    told = pool.run(WORLD, save_that_fails, str(tmp_path / "was there" / "made" / "made too"), storage, way)
    assert told == ["rank 0: writing the checkpoint failed: OSError: no"] * WORLD
    assert os.listdir(tmp_path) == ["was there"]
    assert os.listdir(tmp_path / "was there") == []


def save_on_one_rank(path: str, rank: int) -> str:
    said = ""
    if dist.get_rank() == rank:
        try:
            holdfast.save({"w": torch.ones(3)}, path, options=holdfast.SaveOptions(deadline_s=1.5))
        except holdfast.RankLostError as error:
            said = str(error)
    dist.barrier()
    return said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_one_rank_calls_says_what_to_do(pool: Crew, tmp_path: Path, rank: int) -> None:
    said = pool.run(2, save_on_one_rank, str(tmp_path / "a"), rank)[rank]
    assert said.startswith(f"rank {1 - rank} ")
    assert said.endswith("; call it on every rank, or pass no_dist=True")
    assert os.listdir(tmp_path) == []
