"""Saves in the background of several ranks: quick ones in a row, beside other work, and when one rank fails."""

from __future__ import annotations

import errno
import logging
import os
import threading
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from holdfast import AsyncCheckpointerType, async_save, prewarm, release
from holdfast.errors import BusyError, StorageError
from holdfast.staging import BlockingAsyncStager, DefaultStager, StagingOptions

if TYPE_CHECKING:
    from tools.crew import Crew

TIMEOUT_S = 45.0


def sharded(value: float, rows: int = 1001) -> DTensor:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    return distribute_tensor(torch.full((rows, 300), value), mesh, [Shard(0)], src_data_rank=None)


def save_four_times(path: str, stage: str, kind: AsyncCheckpointerType) -> list[int]:
    """Four saves without waiting for one; every state is spoiled as soon as it may be."""
    weight, replicated = sharded(0.0), torch.zeros(200_000)
    handles = []
    for number in range(4):
        weight.to_local().fill_(number)
        replicated.fill_(number)
        state = {"weight": weight, "replicated": replicated, "step": number}
        handle = async_save(
            state,
            f"{path}/{number}",
            async_checkpointer_type=kind,
            options=holdfast.SaveOptions(stage=stage, prove=True),
        )  # type: ignore[arg-type]
        handle.fence()
        handles.append(handle)
    keys = [len(handle.result().state_dict_metadata) for handle in handles]
    release()
    return keys


@pytest.mark.parametrize("stage", ["copy", "overlap"])
@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
def test_four_quick_saves_of_two_ranks_never_mix(pool: Crew, tmp_path: Path, stage: str, kind: Any) -> None:
    assert pool.run(2, save_four_times, str(tmp_path), stage, kind) == [[3] * 4] * 2
    for number in range(4):
        found = holdfast.load(tmp_path / str(number))
        assert found["weight"].unique().tolist() == [number]
        assert found["weight"].shape == (1001, 300)
        assert found["replicated"].unique().tolist() == [number]
        assert found["step"] == number


def save_replicas(path: str) -> tuple[int, int]:
    """How much this rank holds and stages of tensors that all ranks have."""
    state = {str(number): torch.full((250_000,), float(number)) for number in range(8)}
    held = prewarm(state)
    handle = async_save(state, path)
    handle.result()
    staged = handle.bytes_total
    release()
    return held, staged


def test_a_rank_copies_only_what_it_writes(pool: Crew, tmp_path: Path) -> None:
    (held, staged), (other_held, other_staged) = pool.run(2, save_replicas, str(tmp_path / "checkpoint"))
    assert 8_000_000 <= staged + other_staged < 8_100_000
    assert 3_900_000 < staged < 4_100_000
    assert max(held, other_held) < 4_100_000 + (4 << 20)
    found = holdfast.load(tmp_path / "checkpoint")
    assert all(found[str(number)].unique().tolist() == [number] for number in range(8))


def held_writing(allowed: threading.Event) -> Any:
    """A block in which data files are written once the event is set, and not before."""
    write = os.pwrite

    def held(*arguments: Any) -> int:
        assert allowed.wait(TIMEOUT_S)
        return write(*arguments)

    return mock.patch.object(os, "pwrite", held)


def work_beside_a_save(path: str) -> bool:
    """A load, a collective and a save of another group, all while a save of both ranks is held up."""
    rank = dist.get_rank()
    holdfast.save({"a": sharded(3.0)}, f"{path}/before")
    allowed = threading.Event()
    with held_writing(allowed):
        handle = async_save({"a": sharded(4.0)}, f"{path}/background")
        target = {"a": sharded(0.0)}
        holdfast.load(target, f"{path}/before")
        assert target["a"].to_local().unique().tolist() == [3.0]
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
        was_done = handle.done()
        allowed.set()
        holdfast.save({"own": torch.full((3,), float(rank))}, f"{path}/own{rank}", no_dist=True)
        handle.result()
    release()
    return was_done


def test_other_operations_go_on_beside_a_save(pool: Crew, tmp_path: Path) -> None:
    assert pool.run(2, work_beside_a_save, str(tmp_path)) == [False, False]
    assert holdfast.load(tmp_path / "background")["a"].unique().tolist() == [4.0]
    assert holdfast.load(tmp_path / "own1")["own"].tolist() == [1.0] * 3


def fail_on_one(path: str) -> list[str]:
    """What the handle, and then the next save of each kind, say after writing failed on rank 1."""
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    said: list[str] = []
    with mock.patch.object(os, "pwrite", side_effect=full) if dist.get_rank() == 1 else nullcontext():
        handle = async_save({"a": sharded(1.0)}, f"{path}/failed")
        if dist.get_rank() == 1:  # the other one looks away
            said.append(type(handle.exception(TIMEOUT_S)).__name__)
        try:
            holdfast.save({"a": sharded(2.0)}, f"{path}/next")
        except StorageError as error:
            said.append(str(error).partition("; ")[0])
    async_save({"a": sharded(3.0)}, f"{path}/last").result()
    release()
    return said


def test_a_failure_reaches_every_rank_and_the_next_save_of_all(pool: Crew, tmp_path: Path) -> None:
    first, second = pool.run(2, fail_on_one, str(tmp_path))
    assert second[0] == "StorageError"
    assert "No space" in first[0]
    assert "No space" in second[1]
    assert not os.path.exists(tmp_path / "failed")
    assert not (tmp_path / "next").exists()
    assert holdfast.load(tmp_path / "last")["a"].unique().tolist() == [3.0]


def refuse_while_busy(path: str) -> str:
    """What the second save says while the first is held up on rank 1 alone."""
    allowed = threading.Event()
    with held_writing(allowed) if dist.get_rank() == 1 else nullcontext():
        handle = async_save({"a": sharded(1.0)}, f"{path}/first")
        try:
            async_save({"a": sharded(2.0)}, f"{path}/second", options=holdfast.SaveOptions(when_busy="raise"))
        except BusyError as error:
            said = str(error)
        allowed.set()
        handle.result()
    release()
    return said


def test_a_busy_rank_makes_all_refuse(pool: Crew, tmp_path: Path) -> None:
    said = pool.run(2, refuse_while_busy, str(tmp_path))
    assert all("the last save is still" in each for each in said)
    assert not (tmp_path / "second").exists()
    assert holdfast.load(tmp_path / "first")["a"].unique().tolist() == [1.0]


def sharded_tensor() -> tuple[torch.Tensor, Any]:
    """Three rows of each rank, and the ShardedTensor that they are in."""
    rank = dist.get_rank()
    local = torch.zeros(3, 5)
    shard = LocalShard.from_tensor_and_offsets(local, [3 * rank, 0], rank)
    return local, init_from_local_shards([shard], 3 * dist.get_world_size(), 5)


def save_with_stagers(path: str) -> None:
    stagers: list[Any] = [
        None,
        BlockingAsyncStager(),
        BlockingAsyncStager(cache_staged_state_dict=True),
        DefaultStager(),
        DefaultStager(StagingOptions(False, False, False, False)),
    ]
    weight, (shard, old) = sharded(0.0), sharded_tensor()
    for number, stager in enumerate(stagers):
        for turn in range(2):
            weight.to_local().fill_(number)
            shard.fill_(number)
            state = {"weight": weight, "old": [old], "step": turn}
            handle = async_save(state, f"{path}/{number}", async_stager=stager)
            handle.wait_staged(TIMEOUT_S)
            weight.to_local().fill_(-1)
            shard.fill_(-1)
            if turn:
                handle.result()
        if stager is not None:
            stager.close()


def test_stagers_copy_what_each_rank_has(pool: Crew, tmp_path: Path) -> None:
    pool.run(2, save_with_stagers, str(tmp_path))
    for number in range(5):
        found = holdfast.load(tmp_path / str(number))
        assert found["weight"].unique().tolist() == [number]
        assert found["old"][0].shape == (6, 5)
        assert found["old"][0].unique().tolist() == [number]
        assert found["step"] == 1


# Ranks apart from each other.


class CannotPlan(holdfast.DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("rank 1 has no plan")
        return super().create_local_plan()


def save_apart(path: str) -> list[str]:
    # torch's writer takes the metadata of a faster rank 0 for an old checkpoint.
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    rank, weight = dist.get_rank(), sharded(1.0, rows=7)
    writers: dict[str, Any] = {
        "ours": holdfast.FileSystemWriter(f"{path}/ours"),
        "unstaged": holdfast.filesystem._FileSystemWriter(f"{path}/unstaged"),
        "torchs": dcp.FileSystemWriter(f"{path}/torchs"),
    }
    for name, writer in writers.items():
        weight.to_local().fill_(rank)
        handle = async_save({"weight": weight, "step": rank}, storage_writer=writer, use_collectives=False)
        handle.wait_staged(TIMEOUT_S)
        weight.to_local().fill_(-1)
        metadata = handle.result()
        assert set(metadata.state_dict_metadata) == {"weight", "step"}
        target = {"weight": sharded(5.0, rows=7), "step": None}
        reader: Any = dcp.FileSystemReader(f"{path}/{name}")
        holdfast.load(target, storage_reader=reader)
        assert target["weight"].to_local().unique().tolist() == [rank]
        assert target["step"] == rank
    told = []
    for place in ("native", "fails"):
        planner = CannotPlan() if place == "fails" else None
        writer = holdfast.FileSystemWriter(f"{path}/fails") if place == "fails" else holdfast.NativeWriter(path)
        with pytest.raises(holdfast.CheckpointError) as caught:
            async_save({"step": rank}, storage_writer=writer, planner=planner, use_collectives=False).result()
        told.append(str(caught.value))
    return told


def test_ranks_save_apart_from_each_other(pool: Crew, tmp_path: Path) -> None:
    first, second = pool.run(2, save_apart, str(tmp_path))
    for name in ("ours", "unstaged", "torchs"):
        names = sorted(each.name for each in (tmp_path / name).iterdir())
        assert names == ["__0.metadata", "__0_0.distcp", "__1.metadata", "__1_0.distcp"]
    assert first == second
    assert "use_collectives" in first[0]
    assert "rank 1 has no plan" in first[1]
