"""What several ranks of a host want is read from the disk once: byte counts, contents, failures, ways out.

Tensors are of some MiB, so that there are blocks to share; states are of few hundred KiB where only errors matter.
"""

from __future__ import annotations

import gc
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from outside_views import page_cache
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import holdfast
from holdfast import CheckpointError, DefaultLoadPlanner, LoadPlan, NativeReader
from holdfast._values.digest import digest

if TYPE_CHECKING:
    from tools.crew import Crew

MIB = 1 << 20
# Several blocks, parts of blocks, less than a block, nothing.
SHAPES = {"large": (6144, 1031), "wide": (7, 300_001), "small": (13, 5), "empty": (0, 4)}
MANY = {f"many.{number}": (37, 3) for number in range(300)}


def truth_of(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(key.encode()))
    return torch.randint(-(1 << 30), 1 << 30, shape, dtype=torch.int32, generator=generator)


def state_of(shapes: dict[str, tuple[int, ...]], placements: list[Placement], *, zeros: bool = False) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    state: dict[str, Any] = {}
    for key, shape in shapes.items():
        truth = truth_of(key, shape)
        state[key] = distribute_tensor(
            torch.zeros_like(truth) if zeros else truth, mesh, placements, src_data_rank=None
        )
    return state


def check(state: dict[str, Any], shapes: dict[str, tuple[int, ...]], placements: list[Placement]) -> None:
    expected = state_of(shapes, placements)
    for key in shapes:
        assert torch.equal(state[key].to_local(), expected[key].to_local()), key


def sizes(path: str, prefix: str) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.name.startswith(prefix))


def stored_bytes(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(4 * torch.Size(shape).numel() for shape in shapes.values())


def load_counted(target: dict[str, Any], path: str, *, is_cached: bool = False, **options: Any) -> tuple[int, int]:
    """The bytes of data, and of manifest and index, that this rank read; files are cold or cached, as is said."""
    reader = NativeReader(path, **options)
    with page_cache(is_full=is_cached):
        report = holdfast.load(target, storage_reader=reader)
    return report.bytes_read, reader.catalog_bytes_read


def save_and_load(path: str, wanted: list[Placement], options: dict[str, Any]) -> tuple[int, int]:
    shapes = {**SHAPES, **MANY}
    holdfast.save({"state": state_of(shapes, [Shard(0)]), "step": 3}, path)
    target = {"state": state_of(shapes, wanted, zeros=True), "step": 0}
    counts = load_counted(target, path, **options)
    check(target["state"], shapes, wanted)
    assert target["step"] == 3
    return counts


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_replicated_state_is_read_once_however_many_want_it(
    pool: Crew, tmp_path: Path, world: int, verify: bool
) -> None:
    path = str(tmp_path / "step")
    counts = pool.run(world, save_and_load, path, [Replicate()], {"verify": verify})
    read = [data for data, _ in counts]
    total = stored_bytes({**SHAPES, **MANY})
    # Reads past the page cache begin and end on pages.
    assert total <= sum(read) <= sizes(path, "data-") + 4096 * 20
    assert max(read) - min(read) <= 2 * 6 * MIB + 4 * 8192, "nobody reads much more than others"


@pytest.mark.parametrize("world", [2, 3])
def test_rows_into_columns_reads_every_block_once(pool: Crew, tmp_path: Path, world: int) -> None:
    path = str(tmp_path / "step")
    counts = pool.run(world, save_and_load, path, [Shard(1)], {})
    assert sum(data for data, _ in counts) <= sizes(path, "data-") + 4096 * 20


def reshard_on_many_cores(path: str, is_cached: bool) -> int:
    """How many other threads have checked blocks of a save in rows that is loaded in columns."""
    threads: set[int] = set()

    def noted(view: memoryview) -> int:
        threads.add(threading.get_ident())
        return digest(view)

    with mock.patch.object(os, "cpu_count", return_value=64), mock.patch("holdfast._native.fetch.digest", noted):
        save_and_load(path, [Shard(1)], {"is_cached": is_cached})
    return len(threads - {threading.get_ident()})


@pytest.mark.parametrize(("world", "is_cached"), [(2, False), (5, False), (5, True)])
def test_where_there_are_cores_for_it_others_check_and_copy(
    pool: Crew, tmp_path: Path, world: int, is_cached: bool
) -> None:
    assert max(pool.run(world, reshard_on_many_cores, str(tmp_path / "step"), is_cached)) >= 1


def test_the_same_layout_reads_only_what_is_its_own(pool: Crew, tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    counts = pool.run(3, save_and_load, path, [Shard(0)], {})
    assert sum(data for data, _ in counts) <= sizes(path, "data-") + 4096 * 20


@pytest.mark.parametrize(("world", "times"), [(2, 2), (5, 1)])
def test_what_is_in_the_page_cache_is_shared_only_between_many(
    pool: Crew, tmp_path: Path, world: int, times: int
) -> None:
    path = str(tmp_path / "step")
    counts = pool.run(world, save_and_load, path, [Replicate()], {"is_cached": True})
    total = stored_bytes({**SHAPES, **MANY})
    assert times * total <= sum(data for data, _ in counts) <= times * (total + 4096 * 20)


def test_manifest_and_index_are_read_by_one_rank_of_the_host(pool: Crew, tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    counts = pool.run(3, save_and_load, path, [Shard(0)], {})
    metadata = sizes(path, "manifest") + sizes(path, "index-")
    assert [catalog for _, catalog in counts] == [metadata, 0, 0]


# Loads that do not share.


def load_in_other_ways(path: str) -> dict[str, int]:
    """With the option off, alone, in a subgroup of two."""
    rank = dist.get_rank()
    truth = truth_of("large", SHAPES["large"])
    if rank == 0:
        holdfast.save({"large": truth}, path, no_dist=True)
    dist.barrier()
    pair = dist.new_group([0, 2])
    read = {}
    for name in ("off", "alone", "pair"):
        target = {"large": torch.zeros_like(truth)}
        if name == "off":
            report = holdfast.load(target, path, options=holdfast.LoadOptions(share="off"))
        elif name == "alone":
            report = holdfast.load(target, path, no_dist=True)
        elif rank == 1:
            continue
        else:
            report = holdfast.load(target, path, process_group=pair)
        assert torch.equal(target["large"], truth)
        read[name] = report.bytes_read
    with pytest.raises(ValueError, match="share is 'host', 'job' or 'off'"):
        holdfast.load({}, path, options=holdfast.LoadOptions(share="all"))  # type: ignore[call-overload]
    return read


def test_sharing_can_be_switched_off_and_works_in_a_subgroup(pool: Crew, tmp_path: Path) -> None:
    results = pool.run(3, load_in_other_ways, str(tmp_path / "step"))
    total = 4 * torch.Size(SHAPES["large"]).numel()
    assert all(result["off"] >= total and result["alone"] >= total for result in results)
    assert results[0]["pair"] + results[2]["pair"] < 1.5 * total


# What happens when something goes wrong in the middle.


def damaged_block(path: str) -> dict[str, Any]:
    if dist.get_rank() == 0:
        holdfast.save({"large": truth_of("large", SHAPES["large"])}, path, no_dist=True)
        (name,) = (entry.name for entry in os.scandir(path) if entry.name.startswith("data-"))
        with open(f"{path}/{name}", "r+b") as file:
            file.seek(-3 * MIB, os.SEEK_END)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
    dist.barrier()
    try:
        holdfast.load({"large": torch.zeros(SHAPES["large"], dtype=torch.int32)}, path)
    except holdfast.CorruptError as error:
        told = {"key": error.key, "message": str(error), "failures": sorted(error.failures)}
    return told


def test_a_damaged_block_is_named_on_every_rank_though_one_has_read_it(pool: Crew, tmp_path: Path) -> None:
    results = pool.run(3, damaged_block, str(tmp_path / "step"))
    assert [result["key"] for result in results] == ["large"] * 3
    assert all("is damaged in bytes" in result["message"] and "data-" in result["message"] for result in results)
    assert all(len(result["failures"]) == 1 for result in results)


class RaisingPlanner(DefaultLoadPlanner):
    """Fails on one rank: when the plan is finished, or when the first tensor is asked for."""

    def __init__(self, rank: int, where: str) -> None:
        super().__init__()
        self._fails = dist.get_rank() == rank
        self._where = where

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        self._visit("finish_plan")
        return super().finish_plan(central_plan)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self._visit("resolve_tensor")
        return super().resolve_tensor(read_item)

    def _visit(self, where: str) -> None:
        if self._fails and self._where == where:
            raise ValueError(f"no {where} here")


def fail_in_the_middle(path: str) -> list[tuple[str, list[int]]]:
    if dist.get_rank() == 0:
        holdfast.save({"large": truth_of("large", SHAPES["large"])}, path, no_dist=True)
    dist.barrier()
    told = []
    for rank in range(dist.get_world_size()):
        for where in ("finish_plan", "resolve_tensor"):
            target = {"large": torch.zeros(SHAPES["large"], dtype=torch.int32)}
            try:
                holdfast.load(
                    target, path, planner=RaisingPlanner(rank, where), options=holdfast.LoadOptions(deadline_s=math.inf)
                )
            except CheckpointError as error:
                told.append((str(error), sorted(error.failures)))
            # And the next load works, with nothing left of the one before.
            holdfast.load(target, path)
            assert torch.equal(target["large"], truth_of("large", SHAPES["large"]))
    gc.collect()
    shared = [name for name in map(_link_of, os.listdir("/proc/self/fd")) if "memfd:holdfast" in name]
    assert shared == []
    return told


def _link_of(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def test_a_rank_that_raises_while_others_wait_for_it_fails_all_at_once(pool: Crew, tmp_path: Path) -> None:
    results = pool.run(3, fail_in_the_middle, str(tmp_path / "step"))
    for told in results:
        assert len(told) == 6
        for number, (message, failures) in enumerate(told):
            assert failures == [number // 2]
            assert f"no {('finish_plan', 'resolve_tensor')[number % 2]} here" in message


@contextmanager
def before_reads(action: Callable[[], object]) -> Iterator[None]:
    """``action`` happens before each read of a data file by this process."""
    read = os.preadv

    def reading(descriptor: int, buffers: list[Any], offset: int, flags: int = 0) -> int:
        if not flags:  # else it asks what the page cache has
            action()
        return read(descriptor, buffers, offset, flags)

    with mock.patch.object(os, "preadv", reading):
        yield


def count_reads_after_a_failure(path: str) -> tuple[int, int]:
    """How many reads a slow rank had to do, and how many it did although the other had failed."""
    shapes = {f"part.{number}": (2, MIB // 4) for number in range(24)}
    holdfast.save(state_of(shapes, [Shard(0)]), path)
    reads = [0]

    def read_slowly() -> None:
        reads[0] += 1
        time.sleep(1.0)  # the slowness itself, which is what is tested

    planner = RaisingPlanner(1, "resolve_tensor")
    with (
        before_reads(read_slowly),
        mock.patch("holdfast._engine.HOT_BYTES", MIB + 8192),
        pytest.raises(CheckpointError, match="no resolve_tensor here"),
    ):
        holdfast.load(state_of(shapes, [Shard(0)], zeros=True), path, planner=planner)
    return len(shapes), reads[0]


def test_a_rank_that_needs_nobody_stops_reading_when_another_has_failed(pool: Crew, tmp_path: Path) -> None:
    (wanted, done), (_, begun) = pool.run(2, count_reads_after_a_failure, str(tmp_path / "step"))
    assert 0 < done < wanted
    assert begun < wanted  # it reads ahead of what it asks its planner for


def die_while_others_wait(path: str, how: str) -> tuple[str, str, int | None] | None:
    if dist.get_rank() == 0:
        holdfast.save({"large": truth_of("large", SHAPES["large"])}, path, no_dist=True)
    dist.barrier()
    target = {"large": torch.zeros(SHAPES["large"], dtype=torch.int32)}
    actions = {
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stuck": threading.Event().wait,
    }
    try:
        with before_reads(actions[how] if dist.get_rank() == 1 else lambda: None):
            holdfast.load(target, path, options=holdfast.LoadOptions(deadline_s=5.0 if how == "stuck" else math.inf))
    except CheckpointError as error:
        return type(error).__name__, str(error), getattr(error, "rank", None)
    return None


@pytest.mark.parametrize("how", ["killed", "stuck"])
def test_a_rank_that_is_lost_while_others_wait_for_its_blocks_is_named(pool: Crew, tmp_path: Path, how: str) -> None:
    results = pool.run(3, die_while_others_wait, str(tmp_path / "step"), how, dies={1})
    for rank in (0, 2):
        kind, message, lost = results[rank]
        assert kind == "RankLostError", message
        assert lost == 1, message
        assert "rank 1 " in message


# Memory.


def load_and_measure(path: str) -> int:
    """How many bytes the resident memory of this process grew by at most beyond the target."""
    shapes = {f"part.{number}": (16, MIB) for number in range(3)}  # 3 x 64 MiB
    if dist.get_rank() == 0:
        holdfast.save({key: torch.ones(shape, dtype=torch.int32) for key, shape in shapes.items()}, path, no_dist=True)
    dist.barrier()
    target = {key: torch.zeros(shape, dtype=torch.int32) for key, shape in shapes.items()}
    Path("/proc/self/clear_refs").write_text("5")
    before = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[1])
    holdfast.load(target, path)
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    assert all(bool((tensor == 1).all()) for tensor in target.values())
    return int(peak.split()[1]) * 1024 - before


def test_memory_beyond_the_target_is_bounded(pool: Crew, tmp_path: Path) -> None:
    grown = pool.run(4, load_and_measure, str(tmp_path / "step"))
    assert max(grown) <= 256 * MIB
