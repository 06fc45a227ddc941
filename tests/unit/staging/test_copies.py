"""Staging with an accelerator that is only played: memory that only it may copy, and copies that come late.

Its copies happen in a thread, and not before the test allows it; so whoever does not wait is found out every time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from outside_views import held_bytes

import holdfast
from holdfast import async_save, guard, prewarm, release
from holdfast._native.file_layout import Copy
from holdfast._staging.copies import Mode
from holdfast._staging.memory import CUDA, Looking, Region
from holdfast._state.tensor_bytes import MemorySource, Source

TIMEOUT_S = 300


class PlayedTransfer:
    """Copies that a thread does as soon as they are issued and allowed; it looks at them as a device would."""

    numbers: Looking | None = None

    def __init__(self, played: PlayedAccelerator, copies: Sequence[Copy], target: torch.Tensor) -> None:
        self._played = played
        self._copies = [(copy.source, copy.at) for copy in copies]
        self._numbered = [copy.number for copy in copies]
        self._target = target
        self._done = threading.Event()

    def clone(self) -> bool:
        if not self._played.has_room:
            return False
        clones = [(torch.cat(list(source.pieces(1 << 20))), at) for source, at in self._copies]
        self._copies = [(MemorySource(clone, clone.data_ptr(), clone.numel()), at) for clone, at in clones]
        self._played.log.append("clone")
        return True

    def issue(self) -> None:
        self._played.log.append("issue")
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        if not self._played.allowed.wait(TIMEOUT_S):
            return
        for source, at in self._copies:
            piece = torch.cat(list(source.pieces(1 << 20)))
            self._target[at : at + piece.numel()] = piece
        if self.numbers is not None:
            for number, (source, _) in zip(self._numbered, self._copies, strict=True):
                self.numbers.look_at(number, source)
            self.numbers.flush()
        self._done.set()

    def fence(self) -> None:
        # A stream would wait; here the caller does.
        self._played.log.append("fence")
        self._played.allowed.set()
        assert self._done.wait(TIMEOUT_S)

    def wait(self) -> None:
        if self._played.allows_callers and threading.current_thread() is threading.main_thread():
            self._played.allowed.set()
        assert self._done.wait(TIMEOUT_S)


class PlayedAccelerator:
    """Everything that ``put`` was called with is in its memory."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()
        self.pinned: dict[int, int] = {}
        self.allowed = threading.Event()
        self.allows_callers = False
        self.has_room = True
        self.log: list[str] = []

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        self.addresses.add(tensor.data_ptr())
        return tensor

    def holds(self, source: Source) -> bool:
        return isinstance(source, MemorySource) and source.address in self.addresses

    def pin(self, address: int, nbytes: int) -> None:
        assert address not in self.pinned
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def transfer(self, copies: Sequence[Copy], target: torch.Tensor) -> PlayedTransfer:
        assert target.data_ptr() in self.pinned
        return PlayedTransfer(self, copies, target)

    def drain(self, copies: Sequence[Copy]) -> None:
        self.log.append("drain")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedAccelerator]:
    """An accelerator in place of CUDA."""
    release()
    accelerator = PlayedAccelerator()
    for name in ("holds", "pin", "unpin", "transfer", "drain"):
        monkeypatch.setattr(CUDA, name, getattr(accelerator, name))
    yield accelerator
    accelerator.allowed.set()
    release()
    assert accelerator.pinned == {}


def state_on(played: PlayedAccelerator) -> dict[str, torch.Tensor]:
    return {
        "weight": played.put(torch.full((300_000,), 1.0)),
        "bias": played.put(torch.full((77,), 2.0)),
        "ema": played.put(torch.full((100_000,), 3.0)),
        "host": torch.full((50_000,), 4.0),
        "strided": torch.full((300, 200), 5.0).T,
    }


EXPECTED = {"weight": [1.0], "bias": [2.0], "ema": [3.0], "host": [4.0], "strided": [5.0]}


def stored(path: Path) -> dict[str, list[float]]:
    return {key: tensor.unique().tolist() for key, tensor in holdfast.load(path).items()}


def spoil(state: dict[str, torch.Tensor]) -> None:
    for tensor in state.values():
        tensor.fill_(-1)


def test_copy_returns_when_all_is_copied(tmp_path: Path, played: PlayedAccelerator) -> None:
    played.allowed.set()
    state = state_on(played)
    handle = async_save(state, tmp_path / "checkpoint", options=holdfast.SaveOptions(prove=True))
    assert handle.staging_completion.done()
    spoil(state)
    handle.result()
    assert stored(tmp_path / "checkpoint") == EXPECTED
    assert played.log == ["issue"]
    assert list(played.pinned.values()) == [held_bytes()]


@pytest.mark.parametrize("stage", ["copy", "overlap", "device"])
def test_statistics_are_of_what_there_was_at_the_call(tmp_path: Path, played: PlayedAccelerator, stage: Mode) -> None:
    played.allowed.set()
    state = state_on(played)
    options = holdfast.SaveOptions(stage=stage, statistics=True, copy_now=["ema"])
    handle = async_save(state, tmp_path / "checkpoint", options=options)
    handle.wait_staged()
    spoil(state)
    handle.result(timeout=60)
    with holdfast.open(tmp_path / "checkpoint") as checkpoint:
        kept = checkpoint.statistics
        assert kept is not None
        assert {key: [each.mean] for key, each in kept.items()} == EXPECTED
        assert {key: (each.min, each.max, each.zeros) for key, each in kept.items()} == {
            key: (value, value, 0) for key, (value,) in EXPECTED.items()
        }


def test_overlap_returns_before_and_the_fence_waits(tmp_path: Path, played: PlayedAccelerator) -> None:
    state = state_on(played)
    handle = async_save(state, tmp_path / "checkpoint", options=holdfast.SaveOptions(stage="overlap", prove=True))
    assert handle.phase == "staging"
    assert not handle.staging_completion.done()
    handle.fence()
    spoil(state)
    handle.wait_staged(TIMEOUT_S)
    handle.result()
    assert stored(tmp_path / "checkpoint") == EXPECTED


def test_a_guarded_optimizer_steps_after_the_copies(tmp_path: Path, played: PlayedAccelerator) -> None:
    parameter = torch.nn.Parameter(played.put(torch.full((1000,), 1.0)))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones(1000)
    removable = guard(optimizer)
    handle = async_save(
        {"parameter": parameter}, tmp_path / "checkpoint", options=holdfast.SaveOptions(stage="overlap", prove=True)
    )
    optimizer.step()
    assert "fence" in played.log
    handle.result()
    assert stored(tmp_path / "checkpoint") == {"parameter": [1.0]}
    assert parameter.unique().tolist() == [0.0]
    removable.remove()
    optimizer.step()
    assert played.log.count("fence") == 1


def test_named_tensors_are_copied_before_overlap_returns(tmp_path: Path, played: PlayedAccelerator) -> None:
    state = state_on(played)
    # None is allowed before the call itself waits for one.
    played.allows_callers = True
    handle = async_save(
        state, tmp_path / "checkpoint", options=holdfast.SaveOptions(stage="overlap", copy_now=["ema", "host"])
    )
    assert played.log[0] == "issue"
    assert played.allowed.is_set()
    state["ema"].fill_(-1)
    state["host"].fill_(-1)
    handle.result()
    assert stored(tmp_path / "checkpoint") == EXPECTED


def test_the_proof_finds_what_was_changed_too_early(tmp_path: Path, played: PlayedAccelerator) -> None:
    state = state_on(played)
    handle = async_save(state, tmp_path / "checkpoint", options=holdfast.SaveOptions(stage="overlap", prove=True))
    state["ema"][99_999] = 0
    played.allowed.set()
    with pytest.raises(holdfast.InvalidStateError, match="'ema' changed between"):
        handle.result()
    assert not (tmp_path / "checkpoint").exists()


def test_device_clones_first(tmp_path: Path, played: PlayedAccelerator) -> None:
    state = state_on(played)
    handle = async_save(state, tmp_path / "checkpoint", options=holdfast.SaveOptions(stage="device", prove=True))
    assert played.log == ["clone"] or played.log == ["clone", "issue"]
    spoil(state)
    handle.fence()
    assert not handle.done()
    played.allowed.set()
    handle.result()
    assert stored(tmp_path / "checkpoint") == EXPECTED


def test_device_copies_where_there_is_no_room(
    tmp_path: Path, played: PlayedAccelerator, caplog: pytest.LogCaptureFixture
) -> None:
    played.has_room = False
    played.allowed.set()
    state = state_on(played)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        handle = async_save(state, tmp_path / "checkpoint", options=holdfast.SaveOptions(stage="device"))
    assert "no room for a clone" in caplog.text
    assert handle.staging_completion.done()
    spoil(state)
    handle.result()
    assert stored(tmp_path / "checkpoint") == EXPECTED


def test_a_bounded_snapshot_waits_for_the_callers_streams(tmp_path: Path, played: PlayedAccelerator) -> None:
    state = state_on(played)
    handle = async_save(state, tmp_path / "checkpoint", options=holdfast.SaveOptions(max_host_bytes=1000))
    spoil(state)
    handle.result()
    assert played.log == ["drain"]
    assert stored(tmp_path / "checkpoint") == EXPECTED


def test_prewarm_pins_once(tmp_path: Path, played: PlayedAccelerator) -> None:
    played.allowed.set()
    state = state_on(played)
    prewarm(state)
    pinned = dict(played.pinned)
    assert len(pinned) == 1
    for number in range(3):
        async_save(state, tmp_path / str(number)).result()
    assert played.pinned == pinned


@pytest.mark.parametrize("stage", ["copy", "overlap"])
def test_a_failing_copy_fails_the_save_and_holds_up_nobody(
    tmp_path: Path, played: PlayedAccelerator, monkeypatch: pytest.MonkeyPatch, stage: Any
) -> None:
    def fail(transfer: PlayedTransfer) -> None:
        raise RuntimeError("the device is gone")

    state = state_on(played)
    with monkeypatch.context() as patched:
        patched.setattr(PlayedTransfer, "issue", fail)
        if stage == "copy":
            with pytest.raises(
                holdfast.CheckpointError, match="staging the state failed: RuntimeError: the device is gone"
            ):
                async_save(state, tmp_path / "checkpoint", options=holdfast.SaveOptions(stage=stage))
        else:
            handle = async_save(state, tmp_path / "checkpoint", options=holdfast.SaveOptions(stage=stage))
            handle.fence()
            with pytest.raises(holdfast.CheckpointError, match="the device is gone"):
                handle.wait_staged(TIMEOUT_S)
            with pytest.raises(holdfast.CheckpointError, match="the device is gone"):
                handle.result()
    played.allowed.set()
    async_save(state, tmp_path / "next").result()
    assert stored(tmp_path / "next") == EXPECTED


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_region_is_aligned_zero_and_writable(is_shared: bool) -> None:
    region = Region(5_000_000, is_shared=is_shared)
    assert region.address % (2 << 20) == 0  # where huge pages begin, without which there would be none
    assert region.nbytes >= 5_000_000
    assert not region.tensor.any()
    region.tensor[-1] = 7
    assert region.view[-1] == 7
    assert (region.descriptor >= 0) is is_shared
    region.close()
    assert region.descriptor == -1


def test_memory_that_cannot_be_had_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(holdfast.StorageError, match="max_host_bytes"):
        Region(1 << 60, is_shared=False)
