"""Tensors on their way to the CPU ahead of a stream: order, bounds, and which loader is chosen when."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from holdfast.filesystem import FileSystemReader, FileSystemWriter, _OverlappingCpuLoader, _SerialCpuLoader


class PretendStream:
    def __init__(self) -> None:
        self.device = SimpleNamespace(type="pretend")
        self.waited_for: list[Any] = []
        self.synchronized = 0

    def wait_stream(self, other: Any) -> None:
        self.waited_for.append(other)

    def synchronize(self) -> None:
        self.synchronized += 1


class Identity:
    """A transform that changes nothing, so that items go through streams."""

    def transform_to(self, output: Any) -> Any:
        return output

    def get_descriptor(self) -> str:
        return "identity/1"


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device backend of another name: streams that count, tensors that are on the CPU already."""
    current, entered = PretendStream(), []

    @contextlib.contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        entered.append(chosen)
        yield

    module = SimpleNamespace(current_stream=lambda: current, stream=stream, entered=entered, current=current)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="pretend"))
    monkeypatch.setattr(torch, "get_device_module", lambda name: {"pretend": module}[name])
    return module


class Resolving:
    """Counts what was asked for and not yet taken by the consumer."""

    def __init__(self) -> None:
        self.out: list[int] = []

    def __call__(self, size: int) -> torch.Tensor:
        self.out.append(size)
        return torch.zeros(size, dtype=torch.uint8).requires_grad_(False)


def test_serial_gives_one_at_a_time_in_order() -> None:
    resolve = Resolving()
    loader = _SerialCpuLoader(resolve)
    for size in (30, 10, 20):
        loader.add(size, size)
    loader.start_loading()
    assert resolve.out == []
    for count, (tensor, size) in enumerate(loader.values(), start=1):
        assert tensor.nbytes == size
        assert len(resolve.out) == count
    assert resolve.out == [30, 10, 20]


def test_overlapping_gives_small_ones_first_and_bounds_what_is_under_way(pretend: SimpleNamespace) -> None:
    resolve = Resolving()
    loader = _OverlappingCpuLoader(resolve, inflight_threshhold=100)
    sizes = [60, 10, 90, 40, 50, 70, 20, 30, 80]
    for size in sizes:
        loader.add(size, size)
    assert resolve.out == []
    loader.start_loading()
    assert resolve.out == [10, 20, 30, 40]  # 100 bytes are under way, and not one tensor more
    loader.start_loading()
    taken = 0
    found = []
    for tensor, size in loader.values():
        assert tensor.nbytes == size
        found.append(size)
        taken += size
        assert loader.in_flight_data == sum(resolve.out) - taken
        assert loader.in_flight_data < 100 + max(sizes)
    assert found == sorted(sizes)
    assert loader.in_flight_data == 0
    assert pretend.current.synchronized >= 3
    assert set(pretend.entered) == {pretend.current}


def test_nothing_is_added_once_loading_has_begun(pretend: SimpleNamespace) -> None:
    loader = _OverlappingCpuLoader(Resolving())
    loader.add(1, 1)
    loader.start_loading()
    with pytest.raises(RuntimeError, match="begun to load"):
        loader.add(2, 2)
    assert [size for _, size in loader.values()] == [1]


def test_an_overlapping_loader_takes_a_stream_of_its_own(pretend: SimpleNamespace) -> None:
    own = PretendStream()
    loader = _OverlappingCpuLoader(Resolving(), stream=own)  # type: ignore[arg-type]
    assert own.waited_for == [pretend.current]
    loader.add(5, 5)
    assert [size for _, size in loader.values()] == [5]
    assert (own.synchronized, pretend.current.synchronized) == (1, 0)


@pytest.mark.parametrize(
    ("options", "is_chosen"),
    [
        ({}, True),
        ({"thread_count": 2}, False),
        ({"per_thread_copy_ahead": 0}, False),
    ],
    ids=["one thread", "two threads", "nothing ahead"],
)
def test_the_overlapping_one_is_chosen_only_where_it_helps(
    pretend: SimpleNamespace, path: str, options: dict[str, Any], is_chosen: bool
) -> None:
    state = {"a": torch.zeros(30), "b": torch.zeros(1)}
    holdfast.save(state, storage_writer=FileSystemWriter(path, _extensions=[Identity()], **options))
    assert bool(pretend.entered) is is_chosen


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, ["v", "c", "b", "a"]),
        ({"per_thread_copy_ahead": 0}, ["v", "a", "c", "b"]),
        ({"stage": True}, ["v", "a", "c", "b"]),
    ],
    ids=["ahead", "not ahead", "staged"],
)
def test_a_writer_of_streams_copies_ahead(
    pretend: SimpleNamespace, path: str, options: dict[str, Any], order: list[str]
) -> None:
    """Small tensors come first when they are copied ahead; a staged state is on the CPU already."""
    state: dict[str, Any] = {"a": torch.zeros(30), "c": torch.zeros(1), "v": 1, "b": torch.zeros(20)}
    is_staged = options.pop("stage", False)
    writer = FileSystemWriter(path, _extensions=[Identity()], **options)
    if is_staged:
        state = writer.stage(state)
    holdfast.save(state, storage_writer=writer)
    places = FileSystemReader(path).read_metadata().storage_data
    assert [index.fqn for index in sorted(places, key=lambda index: places[index].offset)] == order
    assert bool(pretend.entered) is (order[1] == "c")


def test_without_an_accelerator_there_is_only_the_serial_one(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    holdfast.save({"a": torch.zeros(30)}, storage_writer=FileSystemWriter(path, _extensions=[Identity()]))
    with pytest.raises(RuntimeError, match="no accelerator"):
        _OverlappingCpuLoader(Resolving())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu_arrive_on_the_cpu() -> None:
    state = {number: torch.full((number * 1000,), float(number), device="cuda") for number in range(1, 20)}
    state[20] = torch.ones(3)
    loader = _OverlappingCpuLoader(lambda number: state[number], torch.cuda.Stream(), inflight_threshhold=10_000)
    for number, tensor in state.items():
        loader.add(tensor.nbytes, number)
    seen = 0
    for tensor, number in loader.values():
        assert tensor.is_cpu
        assert torch.equal(tensor, state[number].cpu())
        seen += 1
    assert seen == len(state)
