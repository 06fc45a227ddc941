"""Real processes write what played ranks write, byte for byte; later saves and odd leaves take the way they should.

Played ranks take their turns in this process, each in a group where nobody else exists; so thousands of them are
planned as real ones are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast
from holdfast import NativeWriter
from holdfast._ranks.channel_ranks import ChannelRanks
from holdfast._save_plan.coordinator import Asked
from holdfast._save_plan.rounds import RankPlanning, _PlanMemory
from holdfast._torch_codec.pickles import decode_message, encode_message
from holdfast.default_planner import DefaultSavePlanner
from tools.timeless import timeless

if TYPE_CHECKING:
    from tools.crew import Crew

ATTEMPT = "fixed"


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def state_of(rank: int, world: int, *, columns: int = 5) -> dict[str, Any]:
    """DTensors of many placements, over all ranks and over a few, beside plain tensors and values."""
    mesh = DeviceMesh("cpu", torch.arange(world))
    state: dict[str, Any] = {
        "step": 7,
        "plain": numbered(3, 4),
        "rows": _placed(numbered(13, columns), mesh, Shard(0)),
        "columns": _placed(numbered(3, 2 * world + 1), mesh, Shard(1)),
        "few rows": _placed(numbered(2, 3), mesh, Shard(0)),
        "same": _placed(numbered(600, 50), mesh, Replicate()),
        "nested": {"list": [numbered(2), {"deep": 1.5}], 3: None},
        f"own.{rank}": rank,
    }
    state["tied"] = state["rows"]
    if world % 2 == 0 and world > 2:
        grid = DeviceMesh("cpu", torch.arange(world).view(-1, 2))
        state["hybrid"] = _placed(numbered(9, 6), grid, Replicate(), Shard(1))
        state["strided"] = _placed(numbered(24, 2), grid, _StridedShard(0, split_factor=2), Shard(0))
        half = DeviceMesh("cpu", torch.arange(world // 2))
        state["half"] = _placed(numbered(8, 3), half, Shard(0))
    return state


def _placed(truth: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return distribute_tensor(truth, mesh, placements, src_data_rank=None)


# Real processes against played ones.


def save_together(path: str) -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    metadata = holdfast.save(state_of(rank, world), storage_writer=NativeWriter(path, attempt=ATTEMPT))
    return list(metadata.state_dict_metadata)


@contextmanager
def played(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def play(path: str, world: int) -> None:
    """Save as ``world`` ranks would, one after the other in each step."""
    planners = [DefaultSavePlanner() for _ in range(world)]
    writers = [NativeWriter(path, attempt=ATTEMPT) for _ in range(world)]
    plannings: list[RankPlanning] = []
    parts: list[Any] = []
    for rank in range(world):
        with played(rank, world):
            planners[rank].ranks = world
            planners[rank].set_up_planner(state_of(rank, world))
            writers[rank].set_up_storage_writer(rank == 0)
            memory = _PlanMemory()
            plannings.append(
                RankPlanning(
                    planner=planners[rank],
                    writer=writers[rank],
                    memory=memory,
                    job_rank=rank,
                    size=world,
                )
            )
            parts.append(plannings[rank].said_first(lambda: None))
    answers = plannings[0].merged([decode_message(encode_message(part)) for part in parts])
    while isinstance(answers[0], Asked):
        parts = [planning.reply(asked) for planning, asked in zip(plannings, answers, strict=True)]
        answers = plannings[0].merged([decode_message(encode_message(part)) for part in parts])
    plans, results = [], []
    for rank, answer in enumerate(answers):
        plans.append(plannings[rank].planned(decode_message(encode_message(answer))))
        planner = planners[rank]
        result = writers[rank].write_data(planner.finish_plan(plans[rank].plan), planner).wait()
        results.append(decode_message(encode_message(result)))
    assert plans[0].metadata is not None
    writers[0].finish(plans[0].metadata, plans[0].with_plans(results))


def same_files(one: Path, other: Path) -> list[str]:
    """The names of the files, which are the same in both places."""
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in names:
        assert timeless(one / name) == timeless(other / name), name
    return names


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_real_processes_write_what_played_ranks_write(pool: Crew, tmp_path: Path, world: int) -> None:
    real, simulated = tmp_path / "real", tmp_path / "played"
    keys = pool.run(world, save_together, str(real))
    assert all(each == keys[0] for each in keys)
    play(str(simulated), world)
    assert len(same_files(real, simulated)) == world + 2 or world > 2  # a rank may have nothing to write
    found = holdfast.load(real)
    assert torch.equal(found["rows"], numbered(13, 5))
    assert found["tied"] is found["rows"]
    if world == 8:
        assert torch.equal(found["strided"], numbered(24, 2))
        assert torch.equal(found["half"], numbered(8, 3))


# A job that starts again.


def load_and_save_twice(path: str) -> None:
    """Take up the newest checkpoint in ``path``, if there is one, and write two more."""
    rank, world = dist.get_rank(), dist.get_world_size()
    state = state_of(rank, world)
    found = sorted(Path(path).iterdir())
    if found:
        holdfast.load(state, found[-1])
    for number in range(len(found), len(found) + 2):
        holdfast.save(state, storage_writer=NativeWriter(f"{path}/{number}", attempt=ATTEMPT))


def test_a_restarted_job_arrives_at_the_plan_of_its_last_checkpoint(pool: Crew, tmp_path: Path) -> None:
    pool.run(4, load_and_save_twice, str(tmp_path))
    # Another process group remembers nothing.
    pool.run(4, load_and_save_twice, str(tmp_path))
    for number in range(1, 4):
        same_files(tmp_path / "0", tmp_path / str(number))


# Later saves.


def save_and_count(path: str) -> list[list[int]]:
    """The bytes of each part that this rank sent, save by save; the third save has another placement."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sent: list[int] = []
    saves: list[list[int]] = []

    def note(ranks: ChannelRanks, phase: str, local: Any, merge: Any) -> Any:
        def noted() -> Any:
            part = local()
            sent.append(len(encode_message(part)))
            return part

        return scatter(ranks, phase, noted, merge)

    scatter = ChannelRanks.reduce_scatter
    with mock.patch.object(ChannelRanks, "reduce_scatter", note):
        for number in range(4):
            sent.clear()
            state = state_of(rank, world)
            if number >= 2:
                state["rows"] = state["rows"].redistribute(placements=[Shard(1)])
                state["tied"] = state["rows"]
            holdfast.save(state, f"{path}/{number}")
            saves.append(list(sent))
    return saves


def test_later_saves_send_little_until_a_placement_changes(pool: Crew, tmp_path: Path) -> None:
    for first, second, third, fourth in pool.run(4, save_and_count, str(tmp_path)):
        assert len(first) >= 2
        assert len(second) == len(fourth) == 1
        assert second[0] <= 64
        assert fourth[0] <= 64
        assert len(third) >= 2
    for number in range(4):
        found = holdfast.load(tmp_path / str(number))
        assert torch.equal(found["rows"], numbered(13, 5))
        assert torch.equal(found["hybrid"], numbered(9, 6))
        assert found["own.3"] == 3


def save_again_and_again(path: str) -> list[bool]:
    """Whether each save said anew what this rank holds; new planners each time, but for what the group keeps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = DeviceMesh("cpu", torch.arange(world))
    subgroup = dist.new_group(list(range(world)))
    sent: list[bool] = []

    said_first = RankPlanning.said_first

    def say_and_note(planning: RankPlanning, set_up: Callable[[], None]) -> Any:
        said = said_first(planning, set_up)
        sent.append(not isinstance(said, bytes))
        return said

    def save(number: int, state: dict[str, Any], group: Any = None) -> None:
        with mock.patch.object(RankPlanning, "said_first", say_and_note):
            holdfast.save(state, f"{path}/{number}", process_group=group)

    def state(fill: float, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        sharded = distribute_tensor(torch.full((6, 2), fill, dtype=dtype), mesh, [Shard(0)], src_data_rank=None)
        return {"sharded": sharded, "same": torch.full((3,), fill), "step": int(fill), f"own.{rank}": rank}

    save(0, state(0.0))
    save(1, state(1.0))
    save(2, state(2.0, torch.bfloat16))
    save(3, state(3.0, torch.bfloat16))
    save(4, state(4.0), subgroup)
    save(5, state(5.0), subgroup)
    return sent


def test_ranks_send_their_plans_only_when_they_change(pool: Crew, tmp_path: Path) -> None:
    sent = pool.run(2, save_again_and_again, str(tmp_path))
    assert sent == [[True, False, True, False, True, False]] * 2
    for number, dtype in enumerate([torch.float32] * 2 + [torch.bfloat16] * 2 + [torch.float32] * 2):
        found = holdfast.load(tmp_path / str(number))
        assert torch.equal(found["sharded"], torch.full((6, 2), float(number), dtype=dtype))
        assert found["same"].tolist() == [float(number)] * 3
        assert (found["step"], found["own.1"]) == (number, 1)


# Leaves that follow no rule, beside others that do.


def save_sharded_tensor(path: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    local = numbered(2, 3) + rank
    shard = LocalShard.from_tensor_and_offsets(local, [2 * rank, 0], rank)
    sharded: ShardedTensor = init_from_local_shards([shard], 2 * world, 3)
    for number in range(2):
        holdfast.save({**state_of(rank, world), "sharded": sharded}, f"{path}/{number}")


def test_a_sharded_tensor_is_saved_from_plans(pool: Crew, tmp_path: Path) -> None:
    pool.run(2, save_sharded_tensor, str(tmp_path))
    for number in range(2):
        found = holdfast.load(tmp_path / str(number))
        assert torch.equal(found["sharded"], torch.cat([numbered(2, 3), numbered(2, 3) + 1]))
        assert torch.equal(found["rows"], numbered(13, 5))
