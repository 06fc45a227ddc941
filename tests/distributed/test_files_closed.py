"""After a save no rank holds a data file open: not its descriptor, not its lock, not its room on disk."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import holdfast

if TYPE_CHECKING:
    from tools.crew import Crew


def save(path: str, **options: Any) -> None:
    holdfast.save({f"own.{dist.get_rank()}": torch.ones(5000), "shared": torch.ones(9000)}, path, **options)


def saving_twice(path: str) -> list[str]:
    save(path)
    save(path)
    return open_data_files()


def interrupted_when_closing(path: str, victim: int, keeps_writer: bool) -> list[str]:
    """A rank is interrupted where it lets go of its files, in which it has told a finalizer of them."""
    detach = weakref.finalize.detach

    def interrupted(finalizer: Any) -> Any:
        weakref.finalize.detach = detach
        raise KeyboardInterrupt

    options = {"storage_writer": holdfast.NativeWriter(path)} if keeps_writer else {}
    save(path, **options)
    if dist.get_rank() == victim:
        weakref.finalize.detach = interrupted
        with pytest.raises(KeyboardInterrupt):
            save(path, **options)
    else:
        with suppress(holdfast.CheckpointError):  # of a coordinator that has not told yet that it published
            save(path, **options)
    return open_data_files()


def open_data_files() -> list[str]:
    names = (os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _is_open(number))
    return [name for name in names if "safetensors" in name]


def _is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


def test_no_rank_keeps_a_data_file_open(pool: Crew, tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "checkpoint")
    assert pool.run(2, saving_twice, path) == [[], []]
    assert holdfast.sweep(path).leftovers == ()


@pytest.mark.parametrize("keeps_writer", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_nor_does_one_that_is_interrupted_when_it_closes_them(
    pool: Crew, tmp_path: os.PathLike[str], victim: int, keeps_writer: bool
) -> None:
    path = os.path.join(tmp_path, "checkpoint")
    found = pool.run(2, interrupted_when_closing, path, victim, keeps_writer)
    assert found == [[], []]
