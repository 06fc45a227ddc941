"""Saves that fail on ranks: no directory is left that they made; and what a save says that only one rank calls."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

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


class _NativeOnFullDisk(NativeWriter):
    """Cannot write; says whether the directory is still there while the other ranks know of no failure."""

    kept_directory = True

    def write_data(self, plan: Any, planner: Any) -> Any:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with mock.patch.object(os, "pwrite", side_effect=full):
            try:
                return super().write_data(plan, planner)
            except holdfast.StorageError:
                self.kept_directory = os.path.isdir(self.path)
                raise


def save_on_full_disk(path: str) -> tuple[bool, bool]:
    writer = _NativeOnFullDisk(path)
    state = {"w": torch.ones(1000)} if dist.get_rank() == 1 else {}  # rank 0 writes nothing, so nothing fails there
    with contextlib.suppress(holdfast.StorageError):
        holdfast.save(state, storage_writer=writer)
    dist.barrier()
    return writer.kept_directory, not os.path.exists(path)


def test_the_directory_stays_until_all_ranks_know_of_the_failure(pool: Crew, tmp_path: Path) -> None:
    """Another rank may be about to make its first file in it, and would fail for a reason of its own."""
    assert pool.run(2, save_on_full_disk, str(tmp_path / "made")) == [(True, True)] * 2


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
