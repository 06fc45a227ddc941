"""What several ranks save together and load again: every kind of leaf, keys that not all have, subgroups, one process.

Tasks return what they saw as plain values; the tests compare it with what was put in.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast import NativeReader

if TYPE_CHECKING:
    from tools.crew import Crew


def numbered(*shape: int, start: float = 0.0) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + start


def rows_over(truth: torch.Tensor, ranks: int) -> DTensor:
    mesh = DeviceMesh("cpu", torch.arange(ranks))
    return distribute_tensor(truth.clone(), mesh, [Shard(0)], src_data_rank=None)


# Every kind of leaf.


def state_of(rank: int, world: int, *, filled: bool) -> dict[str, Any]:
    """A state with every kind of leaf; empty-handed when it is to be a target."""
    factor = 1 if filled else 0
    tied = rows_over(numbered(7, 3) * factor, world)
    return {
        "plain": numbered(5, 4, start=1) * factor,
        "scalar": torch.tensor(4.5) * factor,
        "empty": torch.empty(0, 3),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3) * factor,
        "step": 7 if filled else None,
        "nested": {"list": [1, {"name": "adam"}], "text": "ä"}
        if filled
        else {"list": [None, {"name": None}], "text": ""},
        "tied": {"first": tied, "second": tied},
        f"own.{rank}": numbered(3, start=rank) * factor,
        f"own_value.{rank}": rank if filled else None,
        **({"first_ranks": numbered(2, 2, start=9) * factor} if rank < world - 1 else {}),
        **({"last_rank": {"bias": numbered(4) * factor}} if rank == world - 1 else {}),
    }


def save_every_kind(path: str) -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    metadata = holdfast.save(
        state_of(rank, world, filled=True), path, options=holdfast.SaveOptions(replica_check="all")
    )
    return list(metadata.state_dict_metadata)


def load_every_kind(path: str) -> dict[str, Any]:
    """What is not as it was saved: nothing, one hopes; and whether tied tensors are still one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    expected, target = (state_of(rank, world, filled=filled) for filled in (True, False))
    first = target["tied"]["first"]
    report = holdfast.load(target, path)
    for key in ("plain", "scalar", "empty", f"own.{rank}", "first_ranks"):
        if key in expected:
            assert torch.equal(target[key], expected[key]), key
    if "last_rank" in expected:
        assert torch.equal(target["last_rank"]["bias"], expected["last_rank"]["bias"])
    np.testing.assert_array_equal(target["array"], expected["array"])
    assert target["array"].dtype == np.int16
    for key in ("step", "nested", f"own_value.{rank}"):
        assert target[key] == expected[key], key
    assert target["tied"]["first"] is first
    assert target["tied"]["second"] is first
    assert torch.equal(first.to_local(), expected["tied"]["first"].to_local())
    return {"unexpected": sorted(report.unexpected), "differences": report.differences}


def test_every_kind_of_leaf_on_every_rank(pool: Crew, tmp_path: Path) -> None:
    path = str(tmp_path / "all")
    keys = pool.run(3, save_every_kind, path)
    assert keys[0] == keys[1] == keys[2]
    assert {f"own.{rank}" for rank in range(3)} | {"first_ranks", "last_rank.bias", "tied.first"} <= set(keys[0])
    for rank, seen in enumerate(pool.run(3, load_every_kind, path)):
        others = {f"own.{other}" for other in range(3) if other != rank}
        assert others <= set(seen["unexpected"])
        assert seen["differences"] == ()
    alone = holdfast.load(path)
    assert torch.equal(alone["plain"], numbered(5, 4, start=1))
    assert alone["tied"]["first"] is alone["tied"]["second"]
    assert torch.equal(alone["tied"]["first"], numbered(7, 3))
    assert alone["nested"] == {"list": [1, {"name": "adam"}], "text": "ä"}
    assert [alone[f"own_value.{rank}"] for rank in range(3)] == [0, 1, 2]
    assert isinstance(alone["array"], np.ndarray)
    with holdfast.open(path) as checkpoint:
        stored = checkpoint.metadata.state_dict_metadata["tied.second"]
        assert isinstance(stored, holdfast.TensorStorageMetadata)
        assert stored.alias_of == "tied.first"


def load_what_one_saved(path: str) -> list[float]:
    target = {"weight": rows_over(torch.zeros(11, 3), dist.get_world_size()), "step": 0}
    holdfast.load(target, path)
    assert target["step"] == 3
    weight = target["weight"]
    assert isinstance(weight, DTensor)
    found: list[float] = weight.to_local().flatten().tolist()
    return found


def test_several_ranks_load_what_one_process_saved(pool: Crew, tmp_path: Path) -> None:
    truth = numbered(11, 3)
    holdfast.save({"weight": truth, "step": 3}, tmp_path / "one")
    found = pool.run(4, load_what_one_saved, str(tmp_path / "one"))
    assert [number for part in found for number in part] == truth.flatten().tolist()


# Tensor subclasses.


class Scaled(torch.Tensor):
    """Numbers and a scale behind the face of one tensor."""

    numbers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype)
        made.numbers, made.scale = numbers, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], "per row"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers.detach(), args[0].scale.detach())
        raise NotImplementedError(f"{func} is nothing that a checkpoint needs")


def move_subclass(path: str) -> tuple[list[float], list[float]]:
    holdfast.save({"scaled": Scaled(numbered(4, 3), numbered(4, start=5))}, path)
    target = Scaled(torch.zeros(4, 3), torch.zeros(4))
    holdfast.load({"scaled": target}, path)
    return target.numbers.flatten().tolist(), target.scale.tolist()


def test_tensor_subclasses_are_stored_once_and_filled_on_every_rank(pool: Crew, tmp_path: Path) -> None:
    expected = numbered(12).tolist(), numbered(4, start=5).tolist()
    assert pool.run(3, move_subclass, str(tmp_path / "scaled")) == [expected] * 3


# ShardedTensor: several shards on one rank.


def shards_of(truth: torch.Tensor, starts: list[tuple[int, int]], *, filled: bool) -> ShardedTensor:
    """Blocks of three rows each, those that begin at the rows which are this rank's."""
    rank = dist.get_rank()
    mine = [
        LocalShard.from_tensor_and_offsets(truth[row : row + 3].clone() * filled, [row, 0], rank)
        for row, owner in starts
        if owner == rank
    ]
    made: ShardedTensor = init_from_local_shards(mine, *truth.shape)
    return made


def move_shards(path: str) -> int:
    truth = numbered(12, 5)
    source = shards_of(truth, [(0, 0), (3, 1), (6, 0), (9, 1)], filled=True)
    holdfast.save({"table": source}, path)
    target = shards_of(truth, [(0, 1), (3, 1), (6, 1), (9, 0)], filled=False)
    holdfast.load({"table": target}, path)
    for shard in target.local_shards():
        row = shard.metadata.shard_offsets[0]
        assert torch.equal(shard.tensor, truth[row : row + 3]), row
    return len(target.local_shards())


def test_sharded_tensors_with_several_local_shards_move_between_ranks(pool: Crew, tmp_path: Path) -> None:
    assert pool.run(2, move_shards, str(tmp_path / "table")) == [1, 3]
    assert torch.equal(holdfast.load(tmp_path / "table")["table"], numbered(12, 5))


# Who takes part.


def save_in_subgroups(directory: str) -> list[float]:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    which = rank % 2
    path = os.path.join(directory, f"group-{which}")
    state = {"common": numbered(4, start=which), f"own.{rank}": numbered(2, start=rank)}
    holdfast.save(state, path, process_group=groups[which])
    target = {"common": torch.zeros(4), f"own.{(rank + 2) % 4}": torch.zeros(2)}
    holdfast.load(target, path, process_group=groups[which])
    assert torch.equal(target["common"], state["common"])
    found: list[float] = target[f"own.{(rank + 2) % 4}"].tolist()
    return found


def test_subgroups_save_and_load_apart_from_each_other(pool: Crew, tmp_path: Path) -> None:
    found = pool.run(4, save_in_subgroups, str(tmp_path))
    assert found == [[2.0, 3.0], [3.0, 4.0], [0.0, 1.0], [1.0, 2.0]]
    assert set(holdfast.load(tmp_path / "group-1")) == {"common", "own.1", "own.3"}


def alone_among_others(directory: str) -> float:
    rank = dist.get_rank()
    path = os.path.join(directory, str(rank))
    if rank != 1:  # the others do not call at all
        holdfast.save({"weight": numbered(3, start=rank)}, path, no_dist=True)
        target = {"weight": torch.zeros(3)}
        holdfast.load(target, path, no_dist=True)
        return float(target["weight"][0])
    return -1.0


def test_no_dist_needs_nobody_else(pool: Crew, tmp_path: Path) -> None:
    assert pool.run(3, alone_among_others, str(tmp_path)) == [0.0, -1.0, 2.0]


# What a rank reads.

ROWS_PER_RANK = 1 << 17  # 4 MiB for each rank


class _CountingReader(NativeReader):
    """Remembers which files were open when everything was read."""

    opened: tuple[str, ...] = ()

    def close(self) -> None:
        if self._files is not None:
            self.opened += tuple(os.path.basename(file.path) for file in self._files._open_files())
        super().close()


def load_own_part(path: str) -> tuple[int, tuple[str, ...]]:
    world = dist.get_world_size()
    truth = numbered(world * ROWS_PER_RANK, 8)
    holdfast.save({"weight": rows_over(truth, world)}, path)
    target = {"weight": rows_over(torch.zeros_like(truth), world)}
    reader = _CountingReader(path)
    report = holdfast.load(target, storage_reader=reader)
    rank = dist.get_rank()
    assert torch.equal(target["weight"].to_local(), truth[rank * ROWS_PER_RANK : (rank + 1) * ROWS_PER_RANK])
    return report.bytes_read, reader.opened


def test_a_rank_reads_its_own_file_only_when_the_layout_is_the_same(pool: Crew, tmp_path: Path) -> None:
    results = pool.run(3, load_own_part, str(tmp_path / "large"))
    local = ROWS_PER_RANK * 8 * 4
    for bytes_read, opened in results:
        assert local <= bytes_read <= local + (1 << 16)
        assert len(opened) == 1
    assert len({opened for _, opened in results}) == 3


def written_by_each(path: str, large: bool) -> list[int]:
    """The sizes of the data files after all ranks have saved the same, by who wrote it."""
    state = {"weight": torch.ones(1 << 22 if large else 1), **{f"small.{i}": torch.ones(512) for i in range(64)}}
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    state["replicated"] = distribute_tensor(torch.ones(1 << 20), mesh, [Replicate()], src_data_rank=None)
    holdfast.save(state, path)
    return sorted(os.path.getsize(os.path.join(path, name)) for name in os.listdir(path) if name.startswith("data-"))


def test_what_all_ranks_hold_is_written_once_and_by_all_of_them(pool: Crew, tmp_path: Path) -> None:
    sizes = pool.run(3, written_by_each, str(tmp_path / "ddp"), True)[0]
    total = 4 * ((1 << 22) + 64 * 512 + (1 << 20))
    assert len(sizes) == 3
    assert total <= sum(sizes) <= total * 1.01
    assert sizes[-1] <= sizes[0] * 1.1
