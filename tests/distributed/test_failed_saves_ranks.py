"""Saves that fail on ranks: no directory is left that they made; and what a save says that only one rank calls."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import FileSystemWriter, NativeWriter
from holdfast._io import posix

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


def save_beside_a_failure(path: str) -> tuple[str, bool]:
    """Rank 1 fails to write and leaves; only then rank 0 makes its first file."""
    rank, create = dist.get_rank(), posix.create_new
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    removed = f"{path}-removed"

    def wait_for_failure(*arguments: Any) -> None:
        while not os.path.exists(removed):
            time.sleep(0.01)
        create(*arguments)

    def tell(directories: list[str]) -> None:
        remove(directories)
        Path(removed).touch()

    remove = posix.remove_empty_directories
    writing = mock.patch.object(os, "pwrite", side_effect=full) if rank == 1 else contextlib.nullcontext()
    removing = mock.patch.object(posix, "remove_empty_directories", tell) if rank == 1 else contextlib.nullcontext()
    creating = mock.patch.object(posix, "create_new", wait_for_failure) if rank == 0 else contextlib.nullcontext()
    said = ""
    with writing, removing, creating:
        try:
            holdfast.save({f"of rank {rank}": torch.ones(1000)}, path)
        except holdfast.StorageError as error:
            said = str(error)
    dist.barrier()
    return said, os.path.exists(path)


def test_the_failure_of_one_rank_is_no_failure_of_another(pool: Crew, tmp_path: Path) -> None:
    """The directory that rank 1 removes is made again, so that all are told the reason and nothing else."""
    for said, is_left in pool.run(2, save_beside_a_failure, str(tmp_path / "made")):
        assert "No space left" in said
        assert "No such file" not in said
        assert not is_left


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
