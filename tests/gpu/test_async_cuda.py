"""Asynchronous saves of CUDA tensors: whatever streams do after the call, the checkpoint is the state at the call."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from outside_views import held_bytes

import holdfast
from holdfast import AsyncCheckpointerType, async_save, guard, prewarm, release
from holdfast.staging import BlockingAsyncStager, DefaultStager, StagingOptions

pytestmark = pytest.mark.gpu

STAGES = ("copy", "overlap", "device")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    release()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def many_kinds() -> dict[str, torch.Tensor]:
    """Large and small, strided and conjugated, on the device and beside it."""
    matrix = random(3001, 2003, seed=1)
    return {
        "large": random(40_000_003, seed=2, dtype=torch.bfloat16),
        "strided": matrix.T,
        "slice": matrix[7:2000:3, 5:1999],
        "conjugate": torch.view_as_complex(random(1001, 503, 2, seed=3)).conj(),
        "scalar": torch.tensor(4.5, device="cuda", dtype=torch.float64),
        "empty": torch.empty(0, 3, device="cuda"),
        "bool": random(10_007, seed=4) > 0,
        "host": random(2_000_003, seed=5).cpu(),
        **{f"small.{number}": random(number % 13 + 1, 7, seed=number) for number in range(300)},
    }


def expected_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.cuda.synchronize()
    return {key: tensor.detach().resolve_conj().cpu().clone() for key, tensor in state.items()}


def spoil(state: dict[str, torch.Tensor]) -> None:
    """Change every tensor, on the current stream."""
    for tensor in state.values():
        if tensor.dtype is torch.bool:
            tensor.logical_not_()
        else:
            tensor.add_(1)


def assert_stored(path: Path, expected: dict[str, torch.Tensor]) -> None:
    found = holdfast.load(path)
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
@pytest.mark.parametrize("stage", STAGES)
def test_the_checkpoint_is_the_state_at_the_call(tmp_path: Path, stage: Any, kind: AsyncCheckpointerType) -> None:
    state = many_kinds()
    for number in range(2):
        expected = expected_of(state)
        handle = async_save(
            state,
            tmp_path / str(number),
            async_checkpointer_type=kind,
            options=holdfast.SaveOptions(stage=stage, prove=True),
        )
        handle.fence()
        spoil(state)
        handle.result()
        assert_stored(tmp_path / str(number), expected)


@pytest.mark.parametrize("is_side_stream", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_what_the_callers_stream_has_queued_comes_first_and_what_it_queues_later_does_not(
    tmp_path: Path, stage: Any, is_side_stream: bool
) -> None:
    stream = torch.cuda.Stream() if is_side_stream else torch.cuda.current_stream()
    state = {"a": torch.zeros(30_000_000, device="cuda"), "b": torch.zeros(3000, 2000, device="cuda").T}
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        for tensor in state.values():
            tensor.fill_(7.0)
        handle = async_save(state, tmp_path / "checkpoint", options=holdfast.SaveOptions(stage=stage))
        handle.fence()
        for tensor in state.values():
            tensor.fill_(1.0)
    handle.result()
    found = holdfast.load(tmp_path / "checkpoint")
    assert {key: tensor.unique().tolist() for key, tensor in found.items()} == {"a": [7.0], "b": [7.0]}


def test_a_guarded_optimizer_steps_after_the_copies(tmp_path: Path) -> None:
    model = torch.nn.Linear(8000, 8000, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    removable = guard(optimizer)
    for number in range(4):
        model(random(4, 8000, seed=number)).square().sum().backward()
        expected = model.weight.detach().clone()
        handle = async_save(
            {"model": model, "optimizer": optimizer},
            tmp_path / str(number),
            options=holdfast.SaveOptions(stage="overlap", prove=True),
        )
        optimizer.step()
        optimizer.zero_grad()
        handle.result()
        assert handle.unchanged == ()
        assert torch.equal(holdfast.load(tmp_path / str(number))["model"]["weight"], expected.cpu())
        assert not torch.equal(model.weight, expected)
    removable.remove()


def late_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no copy begin before the event is set."""
    allowed = threading.Event()
    stream_of = torch.cuda.stream

    def stream_late(stream: torch.cuda.Stream) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert allowed.wait(300)
        return stream_of(stream)

    monkeypatch.setattr(torch.cuda, "stream", stream_late)
    return allowed


def test_tensors_that_are_named_are_copied_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = late_copies(monkeypatch)
    state = {"weight": random(5_000_000), "ema": {"weight": random(5_000_000, seed=1)}}
    expected = {"weight": state["weight"].cpu(), "ema": state["ema"]["weight"].cpu()}
    handle = async_save(
        state, tmp_path / "checkpoint", options=holdfast.SaveOptions(stage="overlap", copy_now=["ema"], prove=True)
    )
    state["ema"]["weight"].zero_()
    torch.cuda.synchronize()
    allowed.set()
    handle.result()
    found = holdfast.load(tmp_path / "checkpoint")
    assert torch.equal(found["weight"], expected["weight"])
    assert torch.equal(found["ema"]["weight"], expected["ema"])


def test_the_proof_finds_a_tensor_that_was_changed_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = late_copies(monkeypatch)
    state = {"good": random(5_000_000), "early": random(5_000_000, seed=1)}
    handle = async_save(state, tmp_path / "checkpoint", options=holdfast.SaveOptions(stage="overlap", prove=True))
    state["early"][4_999_999] += 1
    torch.cuda.synchronize()
    allowed.set()
    with pytest.raises(holdfast.InvalidStateError, match="'early' changed"):
        handle.result()
    assert not (tmp_path / "checkpoint" / "manifest.json").exists()


@pytest.mark.parametrize("stage", ["copy", "overlap"])
def test_copies_take_no_memory_of_the_device(tmp_path: Path, stage: Any) -> None:
    state = {"rows": random(16_000, 16_000, dtype=torch.bfloat16), "columns": random(8_000, 16_000).T}
    async_save(state, tmp_path / "first", options=holdfast.SaveOptions(stage=stage)).result()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, (free, _) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
    async_save(state, tmp_path / "second", options=holdfast.SaveOptions(stage=stage)).result()
    assert torch.cuda.max_memory_allocated() - before <= 64 * MIB
    assert free - torch.cuda.mem_get_info()[0] <= 64 * MIB


def test_without_room_for_a_clone_the_state_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = many_kinds()
    expected = expected_of(state)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, 1 << 50))
    monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)  # nothing is kept for later either
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        handle = async_save(state, tmp_path / "checkpoint", options=holdfast.SaveOptions(stage="device"))
    assert "no room for a clone" in caplog.text
    assert handle.staging_completion.done()
    spoil(state)
    handle.result()
    assert_stored(tmp_path / "checkpoint", expected)


def test_a_bounded_snapshot_streams(tmp_path: Path) -> None:
    state = {str(number): random(10_000_000, seed=number) for number in range(8)}
    expected = expected_of(state)
    handle = async_save(state, tmp_path / "checkpoint", options=holdfast.SaveOptions(max_host_bytes=64 * MIB))
    assert handle.staging_completion.done()
    spoil(state)
    handle.result()
    assert held_bytes() == 0
    assert_stored(tmp_path / "checkpoint", expected)


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
def test_memory_is_pinned_once_and_given_back(
    tmp_path: Path, kind: AsyncCheckpointerType, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = torch.cuda.cudart()
    pinned: list[int] = []
    unpinned: list[int] = []

    class Noted:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
            pinned.append(address)
            return driver.cudaHostRegister(address, nbytes, flags)

        def cudaHostUnregister(self, address: int) -> Any:
            unpinned.append(address)
            return driver.cudaHostUnregister(address)

    state = {"a": random(20_000_000)}
    release()
    monkeypatch.setattr(torch.cuda, "cudart", Noted)
    held = prewarm(state, async_checkpointer_type=kind)
    assert held >= 80_000_000
    assert len(pinned) == 1
    async_save(state, tmp_path / "checkpoint", async_checkpointer_type=kind).result()
    assert (len(pinned), unpinned) == (1, [])
    release()
    assert held_bytes() == 0
    assert unpinned == pinned
    async_save(state, tmp_path / "again", async_checkpointer_type=kind).result()
    assert_stored(tmp_path / "again", expected_of(state))


STAGERS: list[Callable[[], Any]] = [
    lambda: BlockingAsyncStager(),
    lambda: BlockingAsyncStager(cache_staged_state_dict=True),
    lambda: DefaultStager(),
    lambda: DefaultStager(StagingOptions(False, False, False, False)),
]


@pytest.mark.parametrize("make", STAGERS)
def test_stagers_copy_from_the_device(tmp_path: Path, make: Callable[[], Any]) -> None:
    stager = make()
    state = many_kinds()
    for number in range(2):
        expected = expected_of(state)
        handle = async_save(state, tmp_path / str(number), async_stager=stager)
        handle.wait_staged(60)
        spoil(state)
        handle.result()
        assert_stored(tmp_path / str(number), expected)
    stager.close()


@contextlib.contextmanager
def busy_stream() -> Iterator[torch.cuda.Event]:
    """The current stream is at work until the block ends; an event that comes after that work."""
    is_done = torch.zeros(1, dtype=torch.int32).pin_memory()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    assert wait(stream, ctypes.c_uint64(is_done.data_ptr()), ctypes.c_uint32(1), ctypes.c_uint(0)) == 0
    try:
        yield torch.cuda.current_stream().record_event()
    finally:
        is_done.fill_(1)


@pytest.mark.timeout(120)  # whoever waits for the stream never ends
def test_steps_go_on_while_a_save_is_written(tmp_path: Path) -> None:
    """The copies are not in the way of the caller's stream, and nobody synchronises the device."""
    state = {"a": random(300_000_000)}
    prewarm(state)
    torch.cuda.synchronize()
    with busy_stream() as busy:
        handle = async_save(state, tmp_path / "checkpoint", options=holdfast.SaveOptions(stage="overlap"))
        assert not busy.query()
        assert not handle.done()
    handle.result()
    assert_stored(tmp_path / "checkpoint", expected_of(state))


@pytest.mark.parametrize("stage", STAGES)
def test_statistics_are_of_what_there_was_at_the_call(tmp_path: Path, stage: Any) -> None:
    state = many_kinds()
    state["not finite"] = torch.tensor([1.0, torch.nan, -torch.inf, 0.0], device="cuda").repeat(3 * MIB)
    handle = async_save(state, tmp_path / "a", options=holdfast.SaveOptions(stage=stage, statistics=True))
    handle.wait_staged()
    spoil({key: tensor for key, tensor in state.items() if tensor.is_cuda})
    handle.result()
    with holdfast.open(tmp_path / "a") as checkpoint:
        kept = checkpoint.statistics
        assert kept is not None
        for key, read in holdfast.statistics(checkpoint, sample=None, stored=False).tensors.items():
            mine = kept[key]
            for name in ("nan", "inf", "zeros", "min", "max", "elements"):
                assert getattr(mine, name) == getattr(read, name), (key, name)
            assert mine.sum == (None if read.sum is None else pytest.approx(read.sum, rel=1e-9, abs=1e-6))
            assert mine.sum_squares == (None if read.sum_squares is None else pytest.approx(read.sum_squares))
