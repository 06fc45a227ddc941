"""Several ranks save to an object store, load from it on another number of ranks, and die."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast
from holdfast._io.stores import Store
from tests.stores.conftest import MIB, Place, settings_of
from tools.crew import Crew
from torture.spoiling import Proxy

ROWS = 1031


def stores(place: Place, **options: Any) -> tuple[str, dict[str, Any]]:
    """What a rank needs to have the same store."""
    assert place.server is not None
    return place.url, {"config": settings_of(place.server), "part_bytes": 5 * MIB, **options}


def whole(number: int = 1) -> torch.Tensor:
    return torch.arange(ROWS * 1024, dtype=torch.int64).view(ROWS, 1024) * number


def state_of_rank(placement: Any, number: int = 1) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    return {
        "rows": distribute_tensor(whole(number), mesh, [placement], src_data_rank=None),
        "same": torch.arange(1000.0),
        "step": number,
    }


def save_sharded(store: tuple[str, dict[str, Any]], kind: str) -> int:
    url = holdfast.Store(store[0], **store[1]) / "a"
    state = state_of_rank(Shard(0))
    if kind == "save":
        holdfast.save(state, url)
    else:
        handle = holdfast.async_save(state, url, async_checkpointer_type=holdfast.AsyncCheckpointerType(kind))
        handle.result(timeout=120)
        holdfast.release()
    return dist.get_rank()


def load_resharded(store: tuple[str, dict[str, Any]], dimension: int) -> tuple[bool, int, int]:
    url = holdfast.Store(store[0], **store[1]) / "a"
    target = state_of_rank(Shard(dimension), 0)
    report = holdfast.load(target, url)
    expected = state_of_rank(Shard(dimension))["rows"].to_local()
    return target["rows"].to_local().equal(expected), target["step"], report.bytes_read


@pytest.mark.parametrize("kind", ["save", "thread", "process"])
def test_four_ranks_save_and_two_load(pool: Crew, bucket: Place, kind: str) -> None:
    store = stores(bucket)
    assert pool.run(4, save_sharded, store, kind) == [0, 1, 2, 3]
    assert len([name for name in bucket.objects("a") if name.startswith("data-")]) == 4
    found = holdfast.read(f"{bucket.url}/a")
    assert found["rows"].equal(whole())
    assert holdfast.verify(f"{bucket.url}/a").ok
    for is_right, step, _ in pool.run(2, load_resharded, store, 0 if kind == "save" else 1):
        assert is_right
        assert step == 1


def load_replicated(store: tuple[str, dict[str, Any]], share: Any) -> tuple[bool, int]:
    url = holdfast.Store(store[0], **store[1]) / "a"
    target = state_of_rank(Replicate(), 0)
    report = holdfast.load(target, url, options=holdfast.LoadOptions(share=share))
    return target["rows"].to_local().equal(whole()), report.bytes_read


def test_a_byte_is_fetched_once_for_all_ranks_of_a_host(pool: Crew, spoiled: Place, proxy: Proxy) -> None:
    store = stores(spoiled, retry_s=30)
    pool.run(4, save_sharded, store, "save")
    stored = sum(nbytes for name, nbytes in spoiled.objects("a").items() if name.startswith("data-"))
    fetched = {}
    for share in ("host", "off"):
        proxy.reset()
        found = pool.run(2, load_replicated, store, share)
        assert all(is_right for is_right, _ in found)
        spans = [each.range.removeprefix("bytes=").split("-") for each in proxy.requests() if "/data-" in each.path]
        fetched[share] = sum(int(end) - int(start) + 1 for start, end in (span for span in spans if len(span) == 2))
        assert sum(nbytes for _, nbytes in found) == pytest.approx(fetched[share], rel=0.05)
    assert 0.9 * stored < fetched["host"] <= 1.05 * stored
    assert 1.8 * stored < fetched["off"]


def save_and_die(store: tuple[str, dict[str, Any]], dying: int, number: int) -> str:
    """A rank is killed when its data is there, and nothing is published."""
    url = holdfast.Store(store[0], **store[1]) / "a"
    put_parts = Store.put_parts

    def put_and_die(*arguments: Any) -> None:
        put_parts(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(Store, "put_parts", put_and_die if dist.get_rank() == dying else put_parts):
        try:
            holdfast.save(state_of_rank(Shard(0), number), url, options=holdfast.SaveOptions(deadline_s=60))
        except holdfast.RankLostError as error:
            return f"rank {error.rank}"
    return "saved"


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_is_killed_publishes_nothing(pool: Crew, bucket: Place, dying: int) -> None:
    store, url = stores(bucket), f"{bucket.url}/a"
    holdfast.save({"rows": whole(7), "step": 7}, url)
    before = bucket.objects("a")
    told = pool.run(2, save_and_die, store, dying, 2, dies={dying})
    assert told[1 - dying] == f"rank {dying}"
    assert holdfast.read(url)["step"] == 7
    left = holdfast.sweep(bucket.url).leftovers
    assert [each.verdict for each in left] == ["unknown"] * len(left)
    if dying == 0:
        assert left  # nobody else may remove what the coordinator may have published
    else:
        assert left == ()
        assert bucket.objects("a") == before
    pool.run(2, save_sharded, store, "save")
    assert holdfast.read(url)["rows"].equal(whole())
    assert holdfast.sweep(bucket.url, delete=True, attempts=[each.attempt for each in left]).removed_files == sum(
        len(each.files) for each in left
    )
    assert holdfast.sweep(bucket.url).leftovers == ()
    assert holdfast.verify(url).ok


def save_refused(store: tuple[str, dict[str, Any]]) -> str:
    url = holdfast.Store(store[0], **store[1]) / "a"
    try:
        holdfast.save(state_of_rank(Shard(0)), url)
    except holdfast.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_all_ranks_are_told_why(pool: Crew, spoiled: Place, proxy: Proxy) -> None:
    proxy.spoil("403", always=True, where=lambda request: request.method == "PUT" and "-1-0." in request.path)
    for said in pool.run(2, save_refused, stores(spoiled, retry_s=1)):
        assert said.startswith("StorageError")
        assert "check the credentials" in said
    assert spoiled.objects("a") == {}


def save_with_deadline(store: tuple[str, dict[str, Any]]) -> str:
    url = holdfast.Store(store[0], **store[1]) / "a"
    try:
        holdfast.save(state_of_rank(Shard(0)), url, options=holdfast.SaveOptions(deadline_s=3))
    except holdfast.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_deadline_names_the_object_that_a_rank_waits_for(pool: Crew, spoiled: Place, proxy: Proxy) -> None:
    proxy.spoil("late", always=True, where=lambda request: request.method == "PUT" and "-1-0." in request.path)
    told = pool.run(2, save_with_deadline, stores(spoiled), timeout_s=100)
    assert told[0].startswith("RankLostError: rank 1")
    assert "-1-0.safetensors" in told[0]
    assert "saved" not in told
    assert "a/manifest.json" not in spoiled.objects()


def run_steps(store: tuple[str, dict[str, Any]]) -> list[int]:
    root = holdfast.Store(store[0], **store[1])
    with holdfast.CheckpointManager(
        root, save=holdfast.Every(steps=1), keep=[holdfast.Latest(2)], stop=None
    ) as checkpoints:
        target = state_of_rank(Shard(0), 0)
        first = checkpoints.resume(target).next_step
        assert target["step"] == max(first - 1, 0)
        for step in range(first, first + 3):
            checkpoints.save(step, state_of_rank(Shard(0), step))
    return [step.step for step in holdfast.Steps(root).steps()] if dist.get_rank() == 0 else []


def test_a_run_goes_on_with_another_number_of_ranks(pool: Crew, bucket: Place) -> None:
    store = stores(bucket)
    assert pool.run(2, run_steps, store)[0] == [1, 2]
    assert pool.run(4, run_steps, store)[0] == [4, 5]
    assert holdfast.read(f"{bucket.url}/step-5")["rows"].equal(whole(5))


def report_some(store: tuple[str, dict[str, Any]]) -> None:
    steps = holdfast.Steps(holdfast.Store(store[0], **store[1]))
    dist.barrier()
    for number in range(8):
        steps.report(1, {f"{dist.get_rank()}-{number}": number})


def test_two_processes_report_at_once(pool: Crew, bucket: Place) -> None:
    """Each adds its own metrics, one after the other; none is lost."""
    holdfast.save({"x": 1}, f"{bucket.url}/step-1")
    pool.run(2, report_some, stores(bucket))
    (step,) = holdfast.Steps(bucket.url).steps()
    assert step.metrics == {f"{rank}-{number}": float(number) for rank in (0, 1) for number in range(8)}
