"""Saves in the background: what is in the checkpoint, what the handle tells, what happens when things go wrong."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from outside_views import held_bytes, writer_processes

import holdfast
from holdfast import AsyncCheckpointerType, AsyncSave, AsyncSaveResponse, async_save, guard, prewarm, release
from holdfast.errors import BusyError, InvalidStateError, StorageError
from tools.timeless import timeless

THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
STAGES = ("copy", "overlap", "device")
TIMEOUT_S = 300


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    release()


def state_of(seed: int = 0) -> dict[str, Any]:
    """Views, shared storage, tied weights, odd sizes, containers."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(300, 401, generator=generator)
    tied = torch.randn(97, 13, generator=generator)
    return {
        "whole": torch.randn(1_000_003, generator=generator),
        "view": base[3:200:2, 5:],
        "transposed": base.T,
        "tied": {"first": tied, "second": tied},
        "half": torch.randn(7, 4096, generator=generator).to(torch.bfloat16),
        "array": np.arange(1000, dtype=np.int16).reshape(10, 100).copy(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "long": list(range(20_000)),
        "nested": [1, {"names": ["a", "b"], "sizes": (1, 2)}],
        "step": seed,
    }


def spoil(state: dict[str, Any]) -> None:
    """Change everything that can be changed in place."""
    for key in ("whole", "view", "transposed", "half", "scalar"):
        state[key].add_(1)
    state["tied"]["first"].zero_()
    state["array"][:] = -1
    state["long"][5] = "changed"
    state["nested"][1]["names"].append("c")
    state["nested"].append(2)
    state["step"] = -1
    state["new"] = torch.ones(3)


def assert_is(path: Path, seed: int = 0) -> None:
    found, expected = holdfast.load(path), state_of(seed)
    assert list(found) == list(expected)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key
        elif isinstance(value, np.ndarray):
            assert np.array_equal(found[key], value)
        elif key == "tied":
            assert torch.equal(found[key]["first"], value["first"])
            assert found[key]["first"] is found[key]["second"]
        else:
            assert found[key] == value


# The snapshot.


@pytest.mark.parametrize("kind", [THREAD, PROCESS])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_changed_after_the_snapshot_is_not_in_the_checkpoint(tmp_path: Path, stage: Any, kind: Any) -> None:
    for seed in range(2):
        state = state_of(seed)
        handle = async_save(
            state,
            tmp_path / str(seed),
            async_checkpointer_type=kind,
            options=holdfast.SaveOptions(stage=stage, prove=True),
        )
        handle.fence()
        spoil(state)
        metadata = handle.result()
        assert "tied.second" in metadata.state_dict_metadata
        assert_is(tmp_path / str(seed), seed)


def test_the_files_are_those_of_a_save_in_the_foreground(tmp_path: Path) -> None:
    attempt = "0123456789abcdef"
    state = state_of()
    holdfast.save(state, storage_writer=holdfast.NativeWriter(tmp_path / "save", attempt=attempt))
    for kind in (THREAD, PROCESS):
        path = tmp_path / kind.value
        writer = holdfast.NativeWriter(path, attempt=attempt)
        async_save(state, storage_writer=writer, async_checkpointer_type=kind).result()
        assert sorted(os.listdir(path)) == sorted(os.listdir(tmp_path / "save"))
        for file in (tmp_path / "save").iterdir():
            assert timeless(path / file.name) == timeless(file), file.name


def test_a_state_without_tensors_and_one_with_large_values(tmp_path: Path) -> None:
    for kind in (THREAD, PROCESS):
        async_save({"step": 3, "text": "x"}, tmp_path / "values", async_checkpointer_type=kind).result()
        assert holdfast.load(tmp_path / "values") == {"step": 3, "text": "x"}
        data = {"blob": os.urandom(3_000_000), "step": 1}
        async_save(data, tmp_path / "blob", async_checkpointer_type=kind).result()
        assert holdfast.load(tmp_path / "blob") == data


def test_user_metadata_is_copied_too(tmp_path: Path) -> None:
    notes = {"run": {"name": "a"}}
    handle = async_save({"a": torch.ones(3)}, tmp_path / "checkpoint", user_metadata=notes)
    notes["run"]["name"] = "b"
    handle.result()
    with holdfast.open(tmp_path / "checkpoint") as checkpoint:
        assert checkpoint.user_metadata == {"run": {"name": "a"}}


def test_a_state_over_the_bound_streams_through_few_buffers(tmp_path: Path) -> None:
    state = {str(number): torch.randn(2_500_000) for number in range(10)}
    expected = {key: tensor.clone() for key, tensor in state.items()}
    handle = async_save(state, tmp_path / "checkpoint", options=holdfast.SaveOptions(max_host_bytes=33 << 20))
    assert handle.staging_completion.done()
    for tensor in state.values():
        tensor.zero_()
    handle.result()
    assert held_bytes() == 0
    found = holdfast.load(tmp_path / "checkpoint")
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


class Held:
    """Options that have a large state written from where it is, and nothing of it before ``go`` is set."""

    def __init__(self, **options: Any) -> None:
        self.go = threading.Event()
        self.options = holdfast.SaveOptions(
            stage="overlap", max_host_bytes=4 << 20, prove=True, progress=self._wait, **options
        )

    def _wait(self, handle: AsyncSave) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert self.go.wait(TIMEOUT_S)


class Normed(torch.nn.Module):
    """A large weight, and a large buffer that a forward pass may change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3_000_001))
        self.register_buffer("mean", torch.randn(1_000_001))


def test_a_state_in_memory_is_written_from_where_it_is_with_overlap_and_a_bound(tmp_path: Path) -> None:
    model, held = Normed(), Held(copy_now=["named"])
    state = {
        "model": model,
        "named": torch.randn(1_000_001),
        "small": torch.randn(5),
        "turned": torch.randn(999, 777).T,
    }
    expected = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    expected |= {f"model.{key}": value.clone() for key, value in model.state_dict().items()}
    handle = async_save(state, tmp_path / "checkpoint", options=held.options)
    assert not handle.staging_completion.done()
    for tensor in (model.mean, state["named"], state["small"], state["turned"]):
        tensor.zero_()
    held.go.set()
    handle.result()
    assert held_bytes() == 0
    with holdfast.open(tmp_path / "checkpoint") as checkpoint:
        assert all(torch.equal(checkpoint[key][:], tensor) for key, tensor in expected.items())


def test_what_changes_a_state_that_is_written_from_where_it_is_fails_the_save(tmp_path: Path) -> None:
    model, held = Normed(), Held()
    handle = async_save({"model": model}, tmp_path / "checkpoint", options=held.options)
    model.weight.data[2_000_000] += 1  # of which autograd hears nothing
    held.go.set()
    with pytest.raises(InvalidStateError, match=r"'model\.weight' changed between the call"):
        handle.result()
    assert not (tmp_path / "checkpoint").exists()


def test_a_guarded_step_waits_until_a_state_is_written_from_where_it_is(tmp_path: Path) -> None:
    model, held, seen = Normed(), Held(), list[bool]()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: held.go.set())
    guard(optimizer)
    optimizer.register_step_pre_hook(lambda *_: seen.append(handle.staging_completion.done()))
    model.weight.grad = torch.ones_like(model.weight)
    expected = model.weight.detach().clone()
    handle = async_save({"model": model, "optimizer": optimizer}, tmp_path / "checkpoint", options=held.options)
    optimizer.step()
    assert seen == [True]
    handle.result()
    assert torch.equal(holdfast.read(tmp_path / "checkpoint")["model"]["weight"], expected)


@pytest.mark.parametrize("way", ["streamed", "waited for"])
def test_the_future_of_the_snapshot_is_done_once_the_snapshot_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Also where the thread that ends it is slow to say so."""
    end = Future.set_result

    def end_late(future: Future[Any], result: object) -> None:
        time.sleep(0.1)
        end(future, result)

    monkeypatch.setattr(Future, "set_result", end_late)
    bound = holdfast.SaveOptions(max_host_bytes=33 << 20) if way == "streamed" else holdfast.SaveOptions()
    handle = async_save({"a": torch.randn(10_000_000)}, tmp_path / "checkpoint", options=bound)
    if way == "waited for":
        handle.wait_staged()
    assert handle.staging_completion.done()
    handle.result()


def test_memory_is_kept_grown_and_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = {"a": torch.ones(1_000_000)}, {"a": torch.ones(3_000_000)}
    sizes: list[int] = []

    class Mapped(mmap.mmap):
        def __new__(cls, descriptor: int, length: int, *arguments: Any, **options: Any) -> Any:
            sizes.append(length)
            return super().__new__(cls, descriptor, length, *arguments, **options)

    monkeypatch.setattr(mmap, "mmap", Mapped)
    held = prewarm(small)
    assert 4_000_000 <= held < 4_000_000 + (4 << 20)
    assert [size for size in sizes if size >= 4_000_000] != []
    async_save(small, tmp_path / "1").result()
    sizes.clear()
    async_save(small, tmp_path / "1").result()
    assert [size for size in sizes if size >= 4_000_000] == []
    assert held_bytes() == held
    async_save(large, tmp_path / "2").result()
    assert held_bytes() >= 12_000_000
    release()
    assert held_bytes() == 0
    async_save(small, tmp_path / "3").result()
    assert torch.equal(holdfast.load(tmp_path / "3")["a"], small["a"])


def test_prewarm_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prewarm(state_of(), async_checkpointer_type=PROCESS)
    assert len(writer_processes()) == 1
    assert os.listdir(tmp_path) == []


# The handle.


def test_the_handle_is_a_future_and_torchs_response(tmp_path: Path) -> None:
    phases: list[str] = []
    handle = async_save(
        {"a": torch.ones(3)},
        tmp_path / "checkpoint",
        options=holdfast.SaveOptions(progress=lambda it: phases.append(it.phase)),
    )
    assert isinstance(handle, Future)
    assert isinstance(handle, AsyncSaveResponse)
    assert handle.staging_completion.result() is None
    assert handle.upload_completion.result() is handle.result()
    assert not handle.cancel()
    assert handle.phase == "published"
    assert handle.bytes_done == handle.bytes_total == 8192
    assert list(dict.fromkeys(phases)) == ["staging", "staged", "writing", "published"]
    assert {handle: 1}[handle] == 1


def test_a_broken_progress_callback_does_not_break_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    def fails(handle: AsyncSave) -> None:
        calls.append(handle.phase)
        raise ValueError("broken")

    async_save({"a": torch.ones(3)}, tmp_path / "checkpoint", options=holdfast.SaveOptions(progress=fails)).result()
    assert calls == ["staging"]
    assert "progress callback" in caplog.text


def test_progress_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async_save({"a": torch.ones(3)}, tmp_path / "checkpoint", options=holdfast.SaveOptions(progress=True)).result()
    assert "checkpoint: published" in capsys.readouterr().err


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    for options in ({"stage": "later"}, {"when_busy": "skip"}, {"at_exit": "hang"}):
        with pytest.raises(ValueError, match="is one of"):
            holdfast.SaveOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="checkpoint_id"):
        async_save({"a": torch.ones(3)})
    with pytest.raises(InvalidStateError, match="'b'"):
        async_save({"b": object()}, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()
    async_save({"a": torch.ones(3)}, tmp_path / "checkpoint", options=holdfast.SaveOptions(when_busy="raise")).result()


# One after the other.


class Gate:
    """Holds up the writing of data files until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.entered = threading.Event()
        write = os.pwrite

        def held(*arguments: Any) -> int:
            self.entered.set()
            assert self.is_open.wait(TIMEOUT_S)
            return write(*arguments)

        monkeypatch.setattr(os, "pwrite", held)


def test_a_second_save_is_refused_or_waits_while_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    first = async_save(state_of(1), tmp_path / "first")
    assert gate.entered.wait(TIMEOUT_S)
    assert first.phase == "writing"
    with pytest.raises(BusyError, match="still writing"):
        async_save(state_of(2), tmp_path / "refused", options=holdfast.SaveOptions(when_busy="raise"))
    second: list[AsyncSave] = []
    thread = threading.Thread(target=lambda: second.append(async_save(state_of(2), tmp_path / "second")))
    thread.start()
    assert not first.done()
    gate.is_open.set()
    thread.join(TIMEOUT_S)
    assert first.done()
    second[0].result()
    assert_is(tmp_path / "first", 1)
    assert_is(tmp_path / "second", 2)
    assert not (tmp_path / "refused").exists()


def test_a_save_in_the_foreground_comes_after_those_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    first = async_save(state_of(1), tmp_path / "checkpoint")
    threading.Timer(0.05, gate.is_open.set).start()
    holdfast.save(state_of(2), tmp_path / "checkpoint")
    assert first.done()
    assert_is(tmp_path / "checkpoint", 2)


def test_a_done_callback_may_save(tmp_path: Path) -> None:
    following: Future[AsyncSave] = Future()

    def save_again(handle: Future[Any]) -> None:
        following.set_result(
            async_save({"a": torch.ones(3)}, tmp_path / "second", options=holdfast.SaveOptions(when_busy="raise"))
        )

    async_save({"a": torch.ones(3)}, tmp_path / "first").add_done_callback(save_again)
    following.result().result()
    assert torch.equal(holdfast.load(tmp_path / "second")["a"], torch.ones(3))


def test_many_quick_saves_never_mix(tmp_path: Path) -> None:
    tensor = torch.zeros(500_000)
    handles = []
    for number in range(6):
        tensor.fill_(number)
        handles.append(async_save({"a": tensor}, tmp_path / str(number)))
    for number, handle in enumerate(handles):
        handle.result()
        assert holdfast.load(tmp_path / str(number))["a"].unique().tolist() == [number]


# Failures.


def is_full(*arguments: Any) -> int:
    """In place of ``os.pwrite``."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_error_comes_from_the_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", is_full)
    handle = async_save({"a": torch.ones(3)}, tmp_path / "checkpoint")
    with pytest.raises(StorageError, match="No space") as caught:
        handle.result()
    assert caught.value.errno == errno.ENOSPC
    assert handle.phase == "failed"
    assert not os.path.exists(tmp_path / "checkpoint")
    handle.wait_staged(TIMEOUT_S)
    handle.fence()


@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_that_nobody_asked_for_is_logged_and_raised_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    def save() -> None:
        if is_async:
            async_save({"a": torch.ones(3)}, tmp_path / "next").result()
        else:
            holdfast.save({"a": torch.ones(3)}, tmp_path / "next")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", is_full)
        async_save({"a": torch.ones(3)}, tmp_path / "checkpoint").wait_staged(TIMEOUT_S)
        with pytest.raises(StorageError, match="No space"):
            save()
    assert "No space" in caplog.text
    assert not (tmp_path / "next").exists()
    save()
    assert torch.equal(holdfast.load(tmp_path / "next")["a"], torch.ones(3))


def test_the_checkpoint_before_stays_when_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async_save(state_of(1), tmp_path / "checkpoint").result()
    before = sorted(os.listdir(tmp_path / "checkpoint"))

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EIO, "gone")

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", fail)
        patched.setattr(os, "rename", fail)
        with pytest.raises(holdfast.CheckpointError, match="gone"):
            async_save(state_of(2), tmp_path / "checkpoint").result()
    assert sorted(os.listdir(tmp_path / "checkpoint")) == before
    assert_is(tmp_path / "checkpoint", 1)


def test_an_existing_checkpoint_is_refused_on_the_spot(tmp_path: Path) -> None:
    async_save(state_of(), tmp_path / "checkpoint").result()
    with pytest.raises(holdfast.AlreadyPublishedError):
        async_save(state_of(), tmp_path / "checkpoint", overwrite=False)


# The process.


def test_the_process_is_kept_and_outlives_a_failed_save(tmp_path: Path) -> None:
    async_save(state_of(1), tmp_path / "1", async_checkpointer_type=PROCESS).result()
    processes = writer_processes()
    assert len(processes) == 1
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StorageError, match="file"):
        async_save(state_of(2), tmp_path / "file" / "2", async_checkpointer_type=PROCESS).result()
    taken = tmp_path / "taken" / "data-0123456789abcdef-0-0.safetensors"
    taken.parent.mkdir()
    taken.write_text("in the way")
    writer = holdfast.NativeWriter(tmp_path / "taken", attempt="0123456789abcdef")
    with pytest.raises(StorageError, match="exists") as caught:
        async_save(state_of(2), storage_writer=writer, async_checkpointer_type=PROCESS).result()
    assert caught.value.path == str(taken)
    async_save(state_of(3), tmp_path / "3", async_checkpointer_type=PROCESS).result()
    assert writer_processes() == processes
    assert_is(tmp_path / "3", 3)


def test_after_its_death_the_process_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(1)
    prewarm(state, async_checkpointer_type=PROCESS)
    (number,) = writer_processes()
    os.kill(number, signal.SIGSTOP)
    wait = select.select

    def wait_for_the_dead(*arguments: Any) -> Any:
        (tmp_path / "lost" / "data-0123456789abcdef-0-0.safetensors").write_text("begun")
        os.kill(number, signal.SIGKILL)
        return wait(*arguments)

    writer = holdfast.NativeWriter(tmp_path / "lost", attempt="0123456789abcdef")
    with monkeypatch.context() as patched:
        patched.setattr(select, "select", wait_for_the_dead)
        handle = async_save(state, storage_writer=writer, async_checkpointer_type=PROCESS)
        with pytest.raises(holdfast.CheckpointError, match=r"died \(exit code -9\)"):
            handle.result()
    assert not os.path.exists(tmp_path / "lost")
    async_save(state, tmp_path / "next", async_checkpointer_type=PROCESS).result()
    (another,) = writer_processes()
    assert another != number
    assert_is(tmp_path / "next", 1)


def test_what_is_published_stays_when_the_process_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is never told that the save is over, because its parent was killed before it could."""
    send, sent = socket.socket.sendall, []

    def send_the_order_alone(connection: socket.socket, data: bytes) -> None:
        sent.append(data)
        if len(sent) > 1:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        send(connection, data)

    monkeypatch.setattr(socket.socket, "sendall", send_the_order_alone)
    async_save(state_of(1), tmp_path / "checkpoint", async_checkpointer_type=PROCESS).result()
    assert len(sent) == 2
    release()
    assert writer_processes() == []
    assert_is(tmp_path / "checkpoint", 1)


# What has not changed.


def test_trained_tensors_that_did_not_change_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(30, 20)
    frozen = torch.nn.Linear(3, 2).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "frozen": frozen, "optimizer": optimizer}

    def step() -> None:
        model(torch.ones(1, 30)).sum().backward()
        optimizer.step()

    step()
    assert async_save(state, tmp_path / "1").result() is not None
    step()
    handle = async_save(state, tmp_path / "2")
    handle.result()
    assert handle.unchanged == ()
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        handle = async_save(state, tmp_path / "3")
        handle.result()
    assert sorted(handle.unchanged) == ["model.bias", "model.weight"]
    assert "did not change since the last save" in caplog.text
    handle = async_save(state, tmp_path / "4", options=holdfast.SaveOptions(warn_unchanged=False))
    handle.result()
    assert handle.unchanged == ()
    handle = async_save(state, tmp_path / "5", options=holdfast.SaveOptions(warn_unchanged=["frozen.weight"]))
    handle.result()
    assert handle.unchanged == ("frozen.weight",)


def test_names_in_an_optimizers_state_tell_what_is_trained(tmp_path: Path) -> None:
    state = {
        "model": {"layer.weight": torch.ones(3), "buffer": torch.ones(2)},
        "optim": {"state": {"layer.weight": {"exp_avg": torch.ones(3)}}},
    }
    for number in range(2):
        handle = async_save(state, tmp_path / str(number))
        handle.result()
    assert handle.unchanged == ("model.layer.weight",)


def test_guard_waits_for_nothing_when_nothing_is_saved() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    removable = guard(optimizer)
    parameter.grad = torch.ones(3)
    optimizer.step()
    removable.remove()
    assert parameter.tolist() == [0.5] * 3
