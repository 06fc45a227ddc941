"""Saves in the background to an object store, by a thread and by another process: what they tell and leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from obstore.store import MemoryStore

import holdfast
from holdfast import AsyncCheckpointerType, SaveOptions, async_save, events
from tests.stores.conftest import MIB, Place
from torture.spoiling import Proxy

State = Callable[..., dict[str, Any]]
LIMIT_S = 120.0
KINDS = list(AsyncCheckpointerType)


@pytest.fixture(scope="module", autouse=True)
def _released() -> Iterator[None]:
    yield
    holdfast.release()


def large_state(number: int) -> dict[str, Any]:
    values = torch.arange(11 * MIB // 8, dtype=torch.int64) * number
    return {"values": values, "again": values, "empty": torch.empty(0), "number": number}


@pytest.mark.parametrize("stage", ["copy", "overlap"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_there_at_the_call_is_saved(
    bucket: Place, same: Callable[..., None], kind: AsyncCheckpointerType, stage: Any
) -> None:
    state = large_state(3)
    handle = async_save(
        state, f"{bucket.url}/a", async_checkpointer_type=kind, options=SaveOptions(stage=stage, prove=True)
    )
    handle.wait_staged()
    state["values"].zero_()
    handle.result(timeout=LIMIT_S)
    same(holdfast.read(f"{bucket.url}/a"), large_state(3))
    assert holdfast.verify(f"{bucket.url}/a").ok
    assert len(bucket.objects("a")) == 3


def test_a_thread_saves_everywhere(place: Place, same: Callable[..., None]) -> None:
    for number in (1, 2):
        async_save(large_state(number), f"{place.url}/a").result(timeout=LIMIT_S)
    same(holdfast.read(f"{place.url}/a"), large_state(2))
    assert len(place.objects("a")) == 3


def test_a_state_that_streams_through_little_memory(place: Place, same: Callable[..., None]) -> None:
    options = SaveOptions(max_host_bytes=2 * MIB)
    async_save(large_state(5), f"{place.url}/a", options=options).result(timeout=LIMIT_S)
    same(holdfast.read(f"{place.url}/a"), large_state(5))


@pytest.mark.parametrize(
    "store", [lambda name: f"memory://{name}", lambda name: holdfast.Store(f"s3://{name}", config=MemoryStore()).url]
)
def test_another_process_cannot_write_to_memory_of_this_one(prefix: str, state: State, store: Any) -> None:
    url = store(prefix)
    with pytest.raises(holdfast.InvalidStateError, match="this process alone"):
        async_save(state(), f"{url}/a", async_checkpointer_type=AsyncCheckpointerType.PROCESS).result(timeout=LIMIT_S)
    with pytest.raises(holdfast.NotFoundError):
        holdfast.read(f"{url}/a")
    async_save(state(), f"{url}/a").result(timeout=LIMIT_S)
    assert holdfast.read(f"{url}/a")["step"] == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overwrites", [False, True])
def test_a_save_that_fails_leaves_nothing(
    spoiled: Place, proxy: Proxy, state: State, kind: AsyncCheckpointerType, overwrites: bool
) -> None:
    url = f"{spoiled.url}/a"
    if overwrites:
        holdfast.save(state(1), url)
    before = spoiled.objects("a")
    proxy.spoil("403", always=True, where=lambda request: request.operation == "part")
    handle = async_save(large_state(2), url, async_checkpointer_type=kind)
    with pytest.raises(holdfast.StorageError, match="data-") as caught:
        handle.result(timeout=LIMIT_S)
    assert caught.value.path is not None
    assert caught.value.path.startswith(url)
    assert len(proxy.spoiled()) >= 1
    assert spoiled.objects("a") == before
    assert [request for request in proxy.requests() if request.operation == "abort"]
    proxy.reset()
    async_save(state(4), url, async_checkpointer_type=kind).result(timeout=LIMIT_S)
    assert holdfast.read(url)["step"] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_progress_and_events(bucket: Place, kind: AsyncCheckpointerType) -> None:
    seen: list[tuple[str, int, int]] = []
    told: list[events.Event] = []
    url = f"{bucket.url}/a"

    def progress(handle: Any) -> None:
        seen.append((handle.phase, handle.bytes_done, handle.bytes_total))

    with events.subscribe(told.append):
        handle = async_save(large_state(1), url, async_checkpointer_type=kind, options=SaveOptions(progress=progress))
        handle.result(timeout=LIMIT_S)
    assert seen[-1][0] == "published"
    assert seen[-1][1] == seen[-1][2] >= 11 * MIB
    assert {event.path for event in told} == {url}
    names = [event.name for event in told]
    assert names[0] == "started"
    assert "published" in names
    assert "failed" not in names
    report = next(event.report for event in told if event.report is not None)
    assert report.bytes >= 11 * MIB
    secret = bucket.store.config["secret_access_key"]
    assert all(str(secret) not in repr(event) for event in told)


def test_events_and_progress_of_other_operations(place: Place, state: State) -> None:
    told: list[events.Event] = []
    seen: list[str] = []
    url = f"{place.url}/a"
    with events.subscribe(told.append):
        holdfast.save(state(), url, options=SaveOptions(progress=lambda now: seen.append(now.phase)))
        holdfast.load(
            {"w": torch.zeros(64, 3), "step": 0},
            url,
            options=holdfast.LoadOptions(progress=lambda now: seen.append(now.phase)),
        )
        holdfast.verify(url)
        holdfast.delete(url)
    assert seen
    assert {event.operation for event in told} >= {"save", "load", "delete"}
    assert {event.path for event in told} == {url}


def test_a_part_that_comes_late_is_waited_for(spoiled: Place, proxy: Proxy) -> None:
    """The upload stalls, and another save to the same place goes through."""
    url = f"{spoiled.url}/a"
    proxy.spoil("late", where=lambda request: request.operation == "part")
    handle = async_save(large_state(1), url)
    proxy.wait_held()
    assert not handle.done()
    proxy.release()
    handle.result(timeout=LIMIT_S)
    assert holdfast.read(url)["number"] == 1
