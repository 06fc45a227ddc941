"""torch and this library among several ranks: either drives, with planners and storages of either.

Tasks return plain values; the truth is numbered, so that every element tells where it belongs.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict as torch_save_with_coordinator
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast import NativeReader, NativeWriter
from holdfast.interop import use_in_torch
from holdfast.state_dict_loader import load_state_dict
from holdfast.state_dict_saver import save_state_dict

if TYPE_CHECKING:
    from tools.crew import Crew

FEW_ROWS = 3  # fewer than ranks: some hold nothing of it


def numbered(*shape: int, start: float = 0.0) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + start


def sharded(truth: torch.Tensor, placement: Any) -> DTensor:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    return distribute_tensor(truth.clone(), mesh, [placement], src_data_rank=None)


def shards(truth: torch.Tensor) -> Any:
    # torch's planners ask a ShardedTensor for what it warns of.
    warnings.filterwarnings("ignore", message="Please use DTensor instead")
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = len(truth) // world
    local = truth[rank * rows : (rank + 1) * rows].clone()
    return init_from_local_shards([LocalShard.from_tensor_and_offsets(local, [rank * rows, 0], rank)], *truth.shape)


def state(factor: float = 1.0) -> dict[str, Any]:
    """What every rank saves; with a factor of 0, what it loads into."""
    return {
        "rows": sharded(numbered(7, 4) * factor, Shard(0)),
        "columns": sharded(numbered(4, 10, start=100) * factor, Shard(1)),
        "few": sharded(numbered(FEW_ROWS, 2, start=200) * factor, Shard(0)),
        "replicated": sharded(numbered(5, start=300) * factor, Replicate()),
        "table": shards(numbered(8, 3, start=400) * factor),
        "plain": numbered(6, start=500) * factor,
        "nested": {"list": [numbered(2) * factor, {"step": int(9 * factor)}], "name": "adam" if factor else ""},
    }


def assert_loaded(loaded: dict[str, Any]) -> None:
    expected = state()
    for key in ("rows", "columns", "few", "replicated"):
        assert torch.equal(loaded[key].to_local(), expected[key].to_local()), key
    for mine, its in zip(loaded["table"].local_shards(), expected["table"].local_shards(), strict=True):
        assert torch.equal(mine.tensor, its.tensor)
    assert torch.equal(loaded["plain"], expected["plain"])
    assert torch.equal(loaded["nested"]["list"][0], expected["nested"]["list"][0])
    assert loaded["nested"]["list"][1] == {"step": 9}
    assert loaded["nested"]["name"] == "adam"


# torch drives native storage.


def torch_saves_native(path: str) -> list[str]:
    metadata = dcp.save(state(), storage_writer=NativeWriter(path))
    assert metadata.storage_data is None
    return sorted(metadata.state_dict_metadata)


def torch_loads_native(path: str) -> None:
    loaded = state(0)
    dcp.load(loaded, storage_reader=NativeReader(path))
    assert_loaded(loaded)
    loaded = state(0)
    holdfast.load(loaded, path)
    assert_loaded(loaded)


def test_torch_saves_and_loads_native_checkpoints_on_any_number_of_ranks(pool: Crew, tmp_path: Path) -> None:
    for ranks in (1, 2, 4):
        keys = pool.run(ranks, torch_saves_native, str(tmp_path / str(ranks)))
        assert all(each == keys[0] for each in keys)
        manifest = json.loads((tmp_path / str(ranks) / "manifest.json").read_text())
        assert manifest["writer"]["world_size"] == ranks
    for saved, loading in ((1, 4), (4, 2), (2, 1)):
        pool.run(loading, torch_loads_native, str(tmp_path / str(saved)))
    alone = holdfast.load(tmp_path / "4")
    assert torch.equal(alone["few"], numbered(FEW_ROWS, 2, start=200))
    assert torch.equal(alone["table"], numbered(8, 3, start=400))


class FailingOnOne(dcp.DefaultSavePlanner):
    """Fails on rank 1 after it has written something."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1 and write_item.index.fqn == "b":
            raise OSError("rank 1 has no data")
        return super().resolve_data(write_item)


def names_in(path: str) -> list[str]:
    return sorted(os.listdir(path))


def fails_and_goes_on(path: str) -> tuple[list[str], list[str], list[str]]:
    """What is there after a save, after one that failed on rank 1, and after the next one with the same writer."""
    seen = []
    writer = NativeWriter(path)
    good = {"a": sharded(numbered(8), Shard(0)), "b": sharded(numbered(4), Shard(0))}
    dcp.save(good, storage_writer=NativeWriter(path))
    dist.barrier()
    seen.append(names_in(path))
    with pytest.raises(dcp.CheckpointException, match="rank 1 has no data") as caught:
        dcp.save(good, storage_writer=writer, planner=FailingOnOne())
    assert list(caught.value.failures) == [1]
    dist.barrier()
    seen.append(names_in(path))
    target = {"a": sharded(torch.zeros(8), Shard(0))}
    dcp.load(target, storage_reader=NativeReader(path))
    assert torch.equal(target["a"].to_local(), good["a"].to_local())
    dcp.save(good, storage_writer=writer)
    dist.barrier()
    seen.append(names_in(path))
    return seen[0], seen[1], seen[2]


def test_a_failing_rank_publishes_nothing_and_the_next_save_sweeps(pool: Crew, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    for before, failed, after in pool.run(2, fails_and_goes_on, path):
        assert set(before) < set(failed), "rank 0 could not know that rank 1 had failed"
        assert not [name for name in failed if name not in before and "-1-0" in name], "rank 1 knew, and swept"
        assert len(after) == len(before) == 4, "manifest, index, one data file for each rank: nothing else is left"
        assert not set(after) & (set(failed) - {"manifest.json"})


class Caching(dcp.DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


def saves_with_cached_plans(directory: str) -> int:
    for number in range(3):
        # A new writer and another place each time: only torch's cache of plans is the same.
        path = os.path.join(directory, str(number % 2))
        own = {f"own.{dist.get_rank()}": numbered(2, start=number)} if number else {}
        dcp.save(
            {"a": sharded(numbered(8, start=number), Shard(0)), **own},
            storage_writer=NativeWriter(path),
            planner=Caching(),
        )
        target = {"a": sharded(torch.zeros(8), Shard(0))}
        dcp.load(target, storage_reader=NativeReader(path))
        assert torch.equal(target["a"].full_tensor(), numbered(8, start=number))
        dist.barrier()
    return len(names_in(os.path.join(directory, "0")))


def test_plans_that_torch_keeps_name_files_of_the_new_attempt(pool: Crew, tmp_path: Path) -> None:
    assert pool.run(2, saves_with_cached_plans, str(tmp_path)) == [4, 4]


def saves_in_a_thread(path: str) -> None:
    weight = sharded(numbered(8), Shard(0))
    future = dcp.async_save({"a": weight, "step": 3}, storage_writer=NativeWriter(path))
    weight.to_local().zero_()
    future.result()  # type: ignore[union-attr]


def test_torchs_async_save_in_threads(pool: Crew, tmp_path: Path) -> None:
    pool.run(2, saves_in_a_thread, str(tmp_path / "x"))
    assert torch.equal(holdfast.load(tmp_path / "x")["a"], numbered(8))


IN_ANOTHER_PROCESS = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
import holdfast
from holdfast.interop import use_in_torch

if __name__ == "__main__":
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1] + "/meet", rank=0, world_size=1)
    use_in_torch()
    for number, kind in enumerate((holdfast.NativeWriter, dcp.FileSystemWriter)):
        writer = kind(sys.argv[1] + f"/{number}")
        state = {"a": torch.full((5,), float(number)), "step": number}
        dcp.async_save(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchs_async_save_in_a_process_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_ANOTHER_PROCESS)
    environment = {**os.environ, "MASTER_ADDR": "localhost", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=140
    )
    assert done.returncode == 0, done.stderr
    for number in range(2):
        found = holdfast.load(tmp_path / str(number))
        assert found["step"] == number
        assert found["a"].tolist() == [number] * 5


def under_torchs_names(directory: str) -> None:
    with use_in_torch():
        dcp.save(state(), checkpoint_id=os.path.join(directory, "native"))
        loaded = state(0)
        dcp.load(loaded, checkpoint_id=os.path.join(directory, "native"))
        assert_loaded(loaded)
    dist.barrier()
    assert "manifest.json" in names_in(os.path.join(directory, "native"))


def test_native_storage_under_torchs_names(pool: Crew, tmp_path: Path) -> None:
    pool.run(2, under_torchs_names, str(tmp_path))


# This library drives torch's planners and storages.


class SeesAllPlans(dcp.DefaultSavePlanner):
    """Writes everything that only it decides about on the last rank, and adds to the metadata who took part."""

    def create_global_plan(self, all_plans: Any) -> Any:
        assert all(type(plan).__module__.startswith("torch.") for plan in all_plans)
        plans, metadata = super().create_global_plan(all_plans)
        self.seen = len(all_plans)
        return plans, metadata


def drive_torchs(directory: str, planners: str, storage: str) -> int:
    path = os.path.join(directory, f"{planners}-{storage}")
    save_planner: Any = SeesAllPlans() if planners == "torch" else None
    load_planner: Any = dcp.DefaultLoadPlanner() if planners == "torch" else None
    writer: Any = NativeWriter(path) if storage == "native" else dcp.FileSystemWriter(path)
    reader: Any = NativeReader(path) if storage == "native" else dcp.FileSystemReader(path)
    metadata = holdfast.save(state(), storage_writer=writer, planner=save_planner)
    assert type(metadata).__module__.startswith("holdfast.")
    loaded = state(0)
    holdfast.load(loaded, storage_reader=reader, planner=load_planner)
    assert_loaded(loaded)
    return getattr(save_planner, "seen", 0)


def torch_loads(path: str) -> None:
    loaded = state(0)
    dcp.load(loaded, checkpoint_id=path)
    assert_loaded(loaded)


@pytest.mark.parametrize(("planners", "storage"), [("torch", "native"), ("torch", "torch"), ("ours", "torch")])
def test_planners_and_storages_of_torch(pool: Crew, tmp_path: Path, planners: str, storage: str) -> None:
    seen = pool.run(4, drive_torchs, str(tmp_path), planners, storage)
    assert seen == ([4, 0, 0, 0] if planners == "torch" else [0] * 4)
    if storage == "torch":
        pool.run(2, torch_loads, str(tmp_path / f"{planners}-{storage}"))


def noting(thing: Any, names: str, calls: list[str]) -> Any:
    def noted(name: str, method: Any) -> Any:
        @functools.wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return method(*arguments, **options)

        return call

    for name in names.split():
        setattr(thing, name, noted(name, getattr(thing, name)))
    return thing


PLANNER = "set_up_planner create_local_plan create_global_plan finish_plan"
WRITER = "reset storage_meta set_up_storage_writer prepare_local_plan prepare_global_plan write_data finish"
SAVING = (
    "reset storage_meta set_up_planner set_up_storage_writer create_local_plan prepare_local_plan "
    "create_global_plan prepare_global_plan finish_plan write_data finish"
)
READER = "reset read_metadata set_up_storage_reader prepare_local_plan prepare_global_plan read_data"


def calls_of(directory: str, library: str, coordinator: int) -> tuple[list[str], list[str]]:
    path = os.path.join(directory, f"{library}-{coordinator}")
    saving: list[str] = []
    loading: list[str] = []
    writer, reader = noting(NativeWriter(path), WRITER, saving), noting(NativeReader(path), READER, loading)
    module: Any = holdfast if library == "holdfast" else dcp
    planner = noting(module.DefaultSavePlanner(), PLANNER, saving)
    load_planner = noting(module.DefaultLoadPlanner(), PLANNER, loading)
    if coordinator == 0:
        module.save({"a": numbered(3)}, checkpoint_id=path, storage_writer=writer, planner=planner)
        module.load({"a": numbered(3)}, checkpoint_id=path, storage_reader=reader, planner=load_planner)
    elif library == "holdfast":
        with pytest.warns(FutureWarning):
            save_state_dict({"a": numbered(3)}, writer, None, coordinator, False, planner)
        with pytest.warns(FutureWarning):
            load_state_dict({"a": numbered(3)}, reader, None, coordinator, False, load_planner)
    else:
        writer.reset()
        torch_save_with_coordinator({"a": numbered(3)}, writer, None, coordinator, False, planner)
        reader.reset()
        dcp.state_dict_loader._load_state_dict({"a": numbered(3)}, reader, None, coordinator, False, load_planner)
    return saving, loading


@pytest.mark.parametrize("coordinator", [0, 1])
def test_every_rank_sees_the_calls_that_it_sees_from_torch(pool: Crew, tmp_path: Path, coordinator: int) -> None:
    ours = pool.run(2, calls_of, str(tmp_path), "holdfast", coordinator)
    torchs = pool.run(2, calls_of, str(tmp_path), "torch", coordinator)
    assert ours == torchs
    saving, loading = ours[coordinator]
    assert saving == SAVING.split()
    assert loading[-4:] == ["create_global_plan", "prepare_global_plan", "finish_plan", "read_data"]
    other, _ = ours[1 - coordinator]
    assert not {"create_global_plan", "prepare_global_plan", "finish"} & set(other)


# Ranks apart from each other.


def saves_apart(path: str, fails: bool) -> list[str]:
    # torch's writer takes the metadata of a faster rank 0 for an old checkpoint.
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    rank = dist.get_rank()
    own = {"rows": sharded(numbered(6, 2), Shard(0)), "step": rank, **({"bad": object} if fails and rank == 1 else {})}
    writer: Any = dcp.FileSystemWriter(path)
    planner: Any = FailsToPlan() if fails else None
    holdfast.save(own, storage_writer=writer, planner=planner, use_collectives=False)
    target = {"rows": sharded(torch.zeros(6, 2), Shard(0)), "step": None}
    reader: Any = dcp.FileSystemReader(path)
    holdfast.load(target, storage_reader=reader)
    assert torch.equal(target["rows"].to_local(), own["rows"].to_local())
    assert target["step"] == rank
    columns = {"rows": sharded(torch.zeros(6, 2), Shard(1))}
    with pytest.raises(holdfast.MismatchError, match="load on as many ranks, with the same layout"):
        holdfast.load(columns, storage_reader=dcp.FileSystemReader(path))  # type: ignore[arg-type]
    return names_in(path)


class FailsToPlan(dcp.DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("rank 1 has no plan")
        return super().create_local_plan()


def torch_loads_what_was_saved_apart(path: str) -> None:
    target = {"rows": sharded(torch.zeros(6, 2), Shard(0)), "step": None}
    dcp.load(target, checkpoint_id=path)
    assert torch.equal(target["rows"].full_tensor(), numbered(6, 2))
    assert target["step"] == dist.get_rank()


def test_ranks_save_and_load_apart_from_each_other(pool: Crew, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    for names in pool.run(2, saves_apart, path, False):
        assert names == ["__0.metadata", "__0_0.distcp", "__1.metadata", "__1_0.distcp"]
    pool.run(2, torch_loads_what_was_saved_apart, path)


def apart(value: float) -> dict[str, Any]:
    """What all ranks hold in parts, and what each of them has of its own under one name."""
    return {"rows": sharded(numbered(6, 2) * bool(value), Shard(0)), "step": value, "noise": torch.full((2,), value)}


def found_apart(path: str, way: str) -> tuple[float, list[float], bool]:
    target = apart(0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "torch":
            dcp.load(target, checkpoint_id=path)
        elif way == "torch with our reader":
            dcp.load(target, storage_reader=holdfast.FileSystemReader(path))
        else:
            holdfast.load(target, path)
    return target["step"], target["noise"].tolist(), torch.equal(target["rows"].full_tensor(), numbered(6, 2))


def saves_apart_by_our_writer(path: str) -> None:
    own = apart(dist.get_rank() + 1.0)
    holdfast.save(own, storage_writer=holdfast.FileSystemWriter(path), use_collectives=False)


def test_ranks_that_saved_apart_get_their_own_back(pool: Crew, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    pool.run(2, saves_apart_by_our_writer, path)
    own = [(1.0, [1.0, 1.0], True), (2.0, [2.0, 2.0], True)]
    for way in ("torch", "torch with our reader", "ours"):
        assert pool.run(2, found_apart, path, way) == own
    # One that was not there gets what the first has; what is in parts is whole on any number of ranks.
    assert pool.run(3, found_apart, path, "ours") == [*own, own[0]]
    assert holdfast.load(path)["step"] == 1.0


def fails_apart(path: str) -> str:
    try:
        saves_apart(path, True)
    except holdfast.CheckpointError as error:
        return str(error)
    return "no error"


def test_a_rank_that_fails_alone_is_heard_of_by_all(pool: Crew, tmp_path: Path) -> None:
    told = pool.run(2, fails_apart, str(tmp_path / "x"))
    assert told[0] == told[1]
    assert "rank 1" in told[0]
    assert "no plan" in told[0]


# What torch does beside it.


def different_values_under_one_key(directory: str) -> tuple[Any, str]:
    rank = dist.get_rank()
    mine = {"step": rank, "weight": torch.full((3,), float(rank))}
    dcp.save(mine, checkpoint_id=os.path.join(directory, "torch"))
    mixed: dict[str, Any] = {"step": None, "weight": torch.zeros(3)}
    dcp.load(mixed, checkpoint_id=os.path.join(directory, "torch"))
    with pytest.raises(holdfast.RankDisagreementError) as caught:
        holdfast.save(mine, os.path.join(directory, "ours"))
    return (mixed["step"], mixed["weight"].tolist()), str(caught.value)


def test_different_values_under_one_key_are_mixed_by_torch_and_refused_here(pool: Crew, tmp_path: Path) -> None:
    for mixed, told in pool.run(2, different_values_under_one_key, str(tmp_path)):
        assert mixed == (0, [1.0] * 3), "a state that no rank ever had"
        assert "has other contents on rank 1 than on rank 0" in told
    assert not (tmp_path / "ours" / "manifest.json").exists()


class CannotTravel(Exception):
    """Unpickling one needs more than it gives; torch's coordinator dies of it and the others wait for it."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.second = second


class FailsUnspeakably(dcp.DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        if dist.get_rank() == 1:
            raise CannotTravel("it is broken", "beyond words")
        return super().create_local_plan()


def fails_unspeakably(path: str) -> str:
    planner: Any = FailsUnspeakably()
    with pytest.raises(holdfast.CheckpointError) as caught:
        holdfast.save({"a": 1}, path, planner=planner)
    holdfast.save({"a": 1}, path)
    return str(caught.value)


def test_an_exception_that_cannot_be_pickled_is_told_on_every_rank(pool: Crew, tmp_path: Path) -> None:
    for told in pool.run(2, fails_unspeakably, str(tmp_path / "x")):
        assert told.startswith("rank 1: planning the save failed: CannotTravel: it is broken")
