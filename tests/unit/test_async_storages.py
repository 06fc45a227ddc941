"""Saves in the background with somebody else's storage, stager or planner."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator, MutableSequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner as TorchSavePlanner
from torch.distributed.checkpoint import FileSystemReader as TorchReader
from torch.distributed.checkpoint import FileSystemWriter as TorchWriter
from torch.distributed.checkpoint import load as torch_load
from torch.futures import Future as TorchFuture

import holdfast
from holdfast import AsyncCheckpointerType, async_save, release
from holdfast.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions

TIMEOUT_S = 300


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    release()


class MemoryWriter(holdfast.StorageWriter):
    """A storage that keeps what it is given, and waits for a gate before it asks for it."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.tensors: dict[str, torch.Tensor] = {}
        self.values: dict[str, bytes] = {}
        self.threads: set[str] = set()
        self.finished = False

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: holdfast.SavePlan) -> holdfast.SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[holdfast.SavePlan]) -> list[holdfast.SavePlan]:
        return plans

    def write_data(
        self, plan: holdfast.SavePlan, planner: holdfast.SavePlanner
    ) -> TorchFuture[MutableSequence[holdfast.WriteResult]]:
        assert self.gate.wait(TIMEOUT_S)
        self.threads.add(threading.current_thread().name)
        results = []
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, torch.Tensor):
                assert data.untyped_storage().nbytes() == data.numel() * data.element_size()
                assert data.device.type == "cpu"
                self.tensors[item.index.fqn] = data.clone()
            else:
                self.values[item.index.fqn] = data.read()
                assert planner.resolve_data(item).read() == self.values[item.index.fqn]
            results.append(holdfast.WriteResult(item.index, 1, None))
        done: TorchFuture[MutableSequence[holdfast.WriteResult]] = TorchFuture()
        done.set_result(results)
        return done

    def finish(self, metadata: holdfast.Metadata, results: Any) -> None:
        self.finished = True

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(8), 0.5, 0, torch.quint8)


def state_of() -> dict[str, Any]:
    base = torch.arange(2000.0).reshape(40, 50)
    return {
        "a": base,
        "view": base[3:30, 1:7],
        "half": torch.ones(33, dtype=torch.bfloat16),
        "quantized": quantized(),
        "empty": torch.empty(0, 2),
        "list": [1, {"b": 2}],
    }


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
@pytest.mark.parametrize("stage", ["copy", "overlap", "device"])
def test_a_storage_of_somebody_else_gets_the_snapshot(stage: Any, kind: AsyncCheckpointerType) -> None:
    writer, state = MemoryWriter(), state_of()
    writer.gate.clear()
    handle = async_save(
        state, storage_writer=writer, async_checkpointer_type=kind, options=holdfast.SaveOptions(stage=stage)
    )
    handle.fence()
    expected = state["a"].clone()
    for tensor in (state["a"], state["half"]):
        tensor.zero_()
    state["list"][1]["b"] = "changed"
    assert not handle.done()
    writer.gate.set()
    handle.result()
    assert writer.finished
    assert writer.threads == {"holdfast-save"}
    assert torch.equal(writer.tensors["a"], expected)
    assert torch.equal(writer.tensors["view"], expected[3:30, 1:7])
    assert writer.tensors["half"].unique().tolist() == [1.0]
    assert torch.equal(writer.tensors["quantized"].dequantize(), torch.ones(8))
    assert writer.tensors["empty"].shape == (0, 2)
    assert torch.load(io.BytesIO(writer.values["list.1.b"]), weights_only=True) == 2


def test_a_state_over_the_bound_is_given_as_it_is_while_the_caller_waits() -> None:
    writer, state = MemoryWriter(), {"a": torch.ones(1000)}
    handle = async_save(state, storage_writer=writer, options=holdfast.SaveOptions(max_host_bytes=100))
    state["a"].zero_()
    handle.result()
    assert writer.tensors["a"].unique().tolist() == [1.0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torchs_storage_and_planner(tmp_path: Path) -> None:
    state = {"a": torch.arange(100.0), "step": 3}
    handle = async_save(state, storage_writer=TorchWriter(tmp_path / "theirs"), planner=TorchSavePlanner())
    state["a"].zero_()
    handle.result()
    target = {"a": torch.zeros(100), "step": 0}
    torch_load(target, storage_reader=TorchReader(tmp_path / "theirs"), no_dist=True)
    assert torch.equal(target["a"], torch.arange(100.0))
    assert target["step"] == 3


class HalfPlanner(holdfast.DefaultSavePlanner):
    """Saves everything in half precision."""

    def transform_object(self, write_item: holdfast.WriteItem, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        return found.to(torch.float16) if isinstance(found, torch.Tensor) else found


@pytest.mark.parametrize("stage", ["copy", "overlap"])
def test_a_planner_may_change_what_is_saved(tmp_path: Path, stage: Any) -> None:
    state = {"a": torch.arange(1000.0), "b": torch.ones(50, 30), "step": 3}
    handle = async_save(
        state, tmp_path / "checkpoint", planner=HalfPlanner(), options=holdfast.SaveOptions(stage=stage)
    )
    handle.fence()
    state["a"].zero_()
    handle.result()
    found = holdfast.load(tmp_path / "checkpoint")
    assert found["a"].dtype is torch.float16
    assert torch.equal(found["a"], torch.arange(1000.0).to(torch.float16))
    assert found["step"] == 3


# Stagers.


class Recorded(AsyncStager):
    """A stager that copies, at once or in a thread, and writes down what it is asked."""

    def __init__(self, *, is_late: bool = False, fails: bool = False) -> None:
        self.log: list[str] = []
        self.gate = threading.Event()
        self._executor = ThreadPoolExecutor(1) if is_late else None
        self._fails = fails

    def stage(self, state_dict: dict[str, Any]) -> Any:
        self.log.append("stage")
        if self._executor is None:
            return self._copied(state_dict)
        return self._executor.submit(self._copied_late, state_dict)

    def _copied(self, state: dict[str, Any]) -> dict[str, Any]:
        if self._fails:
            raise RuntimeError("cannot stage")
        return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}

    def _copied_late(self, state: dict[str, Any]) -> dict[str, Any]:
        assert self.gate.wait(TIMEOUT_S)
        return self._copied(state)

    def synchronize_staging(self) -> None:
        self.log.append("synchronize")

    def close(self) -> None:
        self.log.append("close")
        if self._executor is not None:
            self._executor.shutdown()


def test_a_stager_that_copies_at_once(tmp_path: Path) -> None:
    stager, state = Recorded(), {"a": torch.ones(100), "step": 1}
    handle = async_save(state, tmp_path / "checkpoint", async_stager=stager)
    assert handle.staging_completion.done()
    state["a"].zero_()
    handle.result()
    assert stager.log == ["stage", "synchronize"]
    assert holdfast.load(tmp_path / "checkpoint")["a"].unique().tolist() == [1.0]


def test_a_stager_that_returns_a_future(tmp_path: Path) -> None:
    stager, state = Recorded(is_late=True), {"a": torch.ones(100), "step": 1}
    handle = async_save(state, tmp_path / "checkpoint", async_stager=stager)
    assert not handle.staging_completion.done()
    assert handle.phase == "staging"
    stager.gate.set()
    handle.fence()
    state["a"].zero_()
    handle.result()
    stager.close()
    assert stager.log == ["stage", "close"]
    assert holdfast.load(tmp_path / "checkpoint")["a"].unique().tolist() == [1.0]


def test_a_stager_that_fails(tmp_path: Path) -> None:
    with pytest.raises(
        holdfast.CheckpointError, match="staging the state with Recorded failed: RuntimeError: cannot stage"
    ):
        async_save({"a": torch.ones(3)}, tmp_path / "checkpoint", async_stager=Recorded(fails=True))
    stager = Recorded(is_late=True, fails=True)
    stager.gate.set()
    handle = async_save({"a": torch.ones(3)}, tmp_path / "checkpoint", async_stager=stager)
    with pytest.raises(
        holdfast.CheckpointError, match="staging the state with Recorded failed: RuntimeError: cannot stage"
    ):
        handle.wait_staged(TIMEOUT_S)
    with pytest.raises(
        holdfast.CheckpointError, match="staging the state with Recorded failed: RuntimeError: cannot stage"
    ):
        handle.result()
    handle.fence()
    stager.close()
    async_save({"a": torch.ones(3)}, tmp_path / "checkpoint").result()


class StagingWriter(holdfast.NativeWriter, BlockingAsyncStager):
    """A storage that is its own stager, as torch's are."""

    def __init__(self, path: Path) -> None:
        holdfast.NativeWriter.__init__(self, path)
        BlockingAsyncStager.__init__(self)
        self.staged = 0

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.staged += 1
        return super().stage(state_dict)


def test_a_writer_that_is_a_stager_stages(tmp_path: Path) -> None:
    writer, state = StagingWriter(tmp_path / "checkpoint"), {"a": torch.ones(100)}
    assert isinstance(writer, AsyncStager)
    assert not isinstance(holdfast.NativeWriter(tmp_path), AsyncStager)
    handle = async_save(state, storage_writer=writer)
    state["a"].zero_()
    handle.result()
    assert writer.staged == 1
    assert holdfast.load(tmp_path / "checkpoint")["a"].unique().tolist() == [1.0]


STAGERS = {
    "blocking": lambda: BlockingAsyncStager(),
    "cached": lambda: BlockingAsyncStager(cache_staged_state_dict=True, type_check=True),
    "default": lambda: DefaultStager(),
    "plain": lambda: DefaultStager(StagingOptions(False, False, False, False)),
}


@pytest.mark.parametrize("name", STAGERS)
def test_a_staged_state_is_a_copy_with_its_sharing_kept(name: str) -> None:
    stager: Any = STAGERS[name]()
    tied, base = torch.ones(4, 5), torch.arange(1000.0)
    state = {
        "tied": [tied, {"again": tied}],
        "view": base[10:20],
        "odd": base[1:998:3],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "text": ["a"],
        "pair": (torch.zeros(2), 3),
    }
    answer = stager.stage(state)
    is_late = name == "default"
    assert isinstance(answer, Future) is is_late
    staged = answer.result() if is_late else answer
    stager.synchronize_staging()
    for tensor in (tied, base, state["parameter"].data, state["pair"][0]):  # type: ignore[attr-defined]
        tensor.fill_(-7)
    state["text"].append("b")  # type: ignore[attr-defined]
    assert staged["tied"][0].data_ptr() == staged["tied"][1]["again"].data_ptr()
    assert staged["tied"][0].unique().tolist() == [1.0]
    assert torch.equal(staged["view"], torch.arange(10.0, 20.0))
    assert staged["view"].untyped_storage().nbytes() == 40
    assert torch.equal(staged["odd"], torch.arange(1000.0)[1:998:3])
    assert staged["parameter"].requires_grad
    assert staged["text"] == ["a"]
    assert staged["pair"][0].tolist() == [0.0, 0.0]
    assert staged["pair"][1] == 3
    assert stager.should_synchronize_after_execute is isinstance(stager, DefaultStager)
    stager.close()


def test_a_closed_stager_says_so() -> None:
    stager = DefaultStager(StagingOptions(False, False, False, False))
    stager.close()
    with pytest.raises(RuntimeError, match="closed"):
        stager.stage({"a": torch.ones(3)})


def test_a_cached_stager_never_overwrites_what_is_being_written(tmp_path: Path) -> None:
    stager, tensor = BlockingAsyncStager(cache_staged_state_dict=True), torch.zeros(300_000)
    handles = []
    for number in range(4):
        tensor.fill_(number)
        handles.append(async_save({"a": tensor}, tmp_path / str(number), async_stager=stager))
    for number, handle in enumerate(handles):
        handle.result()
        assert holdfast.load(tmp_path / str(number))["a"].unique().tolist() == [number]
    stager.close()


@pytest.mark.parametrize("is_cached", [False, True])
def test_the_storage_of_torchs_format_stages_itself(tmp_path: Path, is_cached: bool) -> None:
    writer = holdfast.FileSystemWriter(tmp_path / "theirs", cache_staged_state_dict=is_cached)
    assert isinstance(writer, AsyncStager)
    state = {"a": torch.arange(1000.0), "step": 3}
    for number in range(2):
        handle = async_save(state, tmp_path / str(number), storage_writer=writer)
        state["a"].add_(1)
        handle.result()
        found = holdfast.load(tmp_path / str(number))
        assert torch.equal(found["a"], torch.arange(1000.0) + number)
        assert found["step"] == 3
