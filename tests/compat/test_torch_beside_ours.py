"""What torch does and what this library does in the same situation: each test shows both.

These are the places where code that moves over behaves otherwise, on purpose.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as torch_metadata

import holdfast
from holdfast.state_dict_loader import _load_state_dict_from_keys

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def test_a_cast_is_silent_in_torch_and_asked_for_here(tmp_path: Path) -> None:
    dcp.save({"a": torch.tensor([300.0])}, checkpoint_id=tmp_path / "torch")
    target = {"a": torch.zeros(1, dtype=torch.int8)}
    dcp.load(target, checkpoint_id=tmp_path / "torch")
    assert target["a"].tolist() == [44], "300 does not fit into 8 bits"

    holdfast.save({"a": torch.tensor([300.0])}, tmp_path / "ours")
    target = {"a": torch.zeros(1, dtype=torch.int8)}
    for cast in (False, True):  # which is for floating types only
        with pytest.raises(holdfast.MismatchError, match="dtype"):
            holdfast.load(target, tmp_path / "ours", options=holdfast.LoadOptions(cast=cast))
    assert target["a"].tolist() == [0]
    half = {"a": torch.zeros(1, dtype=torch.float16)}
    assert [
        each.kind for each in holdfast.load(half, tmp_path / "ours", options=holdfast.LoadOptions(cast=True)).casts
    ] == ["dtype"]


class HalfATensor(dcp.DefaultSavePlanner):
    """Plans the first two of four elements, as a broken shard would."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        (item,) = plan.items
        chunk = torch_metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
        data = dataclasses.replace(item.tensor_data, chunk=chunk)
        return dataclasses.replace(plan, items=[dataclasses.replace(item, tensor_data=data)])

    def resolve_data(self, write_item: Any) -> Any:
        return super().resolve_data(write_item)[:2]


def test_chunks_that_leave_something_out_are_taken_by_torch_and_refused_here(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(4)}, checkpoint_id=tmp_path / "torch", planner=HalfATensor())
    target = {"a": torch.full((4,), -1.0)}
    dcp.load(target, checkpoint_id=tmp_path / "torch")
    assert target["a"].tolist() == [1, 1, -1, -1], "whatever was there before is still there"

    target = {"a": torch.full((4,), -1.0)}
    reader: Any = dcp.FileSystemReader(tmp_path / "torch")
    with pytest.raises(holdfast.CorruptError, match="do not make up the tensor"):
        holdfast.load(target, storage_reader=reader)
    assert target["a"].tolist() == [-1] * 4
    planner: Any = HalfATensor()
    with pytest.raises(holdfast.InvalidStateError, match="not written as a whole"):
        holdfast.save({"a": torch.ones(4)}, tmp_path / "ours", planner=planner)
    with pytest.raises(dcp.CheckpointException, match="not written as a whole"):
        dcp.save({"a": torch.ones(4)}, storage_writer=holdfast.NativeWriter(tmp_path / "ours"), planner=HalfATensor())
    assert not os.path.exists(tmp_path / "ours")


def caught_by_except_exception(function: Any) -> bool:
    try:
        function()
    except Exception:
        return True
    except BaseException:
        return False
    raise AssertionError("it should have failed")


def test_errors_pass_every_except_exception_in_torch_and_are_exceptions_here(tmp_path: Path) -> None:
    target = {"a": torch.zeros(1)}
    assert not caught_by_except_exception(lambda: dcp.load(target, checkpoint_id=tmp_path / "nothing"))
    assert caught_by_except_exception(lambda: holdfast.load(target, tmp_path / "nothing"))
    assert holdfast.CheckpointException is holdfast.CheckpointError


def test_no_checkpoint_is_an_assertion_in_torch_and_has_a_class_here(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"a": torch.zeros(1)}, checkpoint_id=tmp_path)
    assert isinstance(caught.value.failures[0][0], AssertionError)
    with pytest.raises(holdfast.NotFoundError):
        holdfast.load({"a": torch.zeros(1)}, tmp_path)


def test_a_partial_load_makes_values_none_in_torch_and_leaves_them_here(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "torch")
    target: dict[str, Any] = {"a": torch.zeros(1), "dtype": torch.float16}
    dcp.load(target, checkpoint_id=tmp_path / "torch", planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert target["dtype"] is None

    holdfast.save({"a": torch.ones(1)}, tmp_path / "ours")
    target = {"a": torch.zeros(1), "dtype": torch.float16}
    report = holdfast.load(target, tmp_path / "ours", planner=holdfast.DefaultLoadPlanner(allow_partial_load=True))
    assert target["dtype"] is torch.float16
    assert report.missing == ("dtype",)
    assert target["a"].tolist() == [1]


class Array:
    """What an array saved by torch's format, where it is an object, does to targets: torch's way and ours."""

    def __init__(self, path: Path) -> None:
        self.path = path
        dcp.save({"a": np.arange(3.0), "n": [np.arange(2)]}, checkpoint_id=path)

    def by_torch(self, target: Any) -> Any:
        dcp.load(target, checkpoint_id=self.path)
        return target

    def by_us(self, target: Any, **options: Any) -> Any:
        holdfast.load(target, self.path, **options, options=holdfast.LoadOptions(allow_pickle=True))
        return target


def test_an_array_saved_as_an_object_replaces_the_array_of_the_target_in_both(tmp_path: Path) -> None:
    saved = Array(tmp_path / "x")
    for load in (saved.by_torch, saved.by_us):
        array = np.zeros(3)
        target = load({"a": array, "n": [np.zeros(5, dtype=np.int8)]})
        assert target["a"].tolist() == [0, 1, 2]
        assert array.tolist() == [0, 0, 0], "replaced, not filled"
        assert (target["n"][0].dtype, target["n"][0].tolist()) == (np.int64, [0, 1]), "whatever its shape and dtype"
    with pytest.raises(holdfast.UnsafeError, match="allow_pickle"):
        holdfast.load({"a": np.zeros(3)}, tmp_path / "x")


def test_an_array_saved_as_an_object_replaces_a_tensor_in_torch_and_is_a_mismatch_here(tmp_path: Path) -> None:
    saved = Array(tmp_path / "x")
    assert isinstance(saved.by_torch({"a": torch.zeros(3)})["a"], np.ndarray)
    with pytest.raises(holdfast.MismatchError, match="'a' has kind a value"):
        saved.by_us({"a": torch.zeros(3)})


def test_a_tensor_does_not_go_into_an_array_in_torch_and_does_here(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(3.0)}, checkpoint_id=tmp_path / "x")
    with pytest.raises(dcp.CheckpointException, match="expected BytesStorageMetadata"):
        dcp.load({"a": np.zeros(3, dtype=np.float32)}, checkpoint_id=tmp_path / "x")
    target = {"a": np.zeros(3, dtype=np.float32)}
    array = target["a"]
    holdfast.load(target, tmp_path / "x")
    assert target["a"] is array
    assert array.tolist() == [0, 1, 2]
    with pytest.raises(holdfast.MismatchError, match="dtype"):
        holdfast.load({"a": np.zeros(3)}, tmp_path / "x")


def test_a_plain_value_replaces_an_array_in_torch_and_is_a_mismatch_here(tmp_path: Path) -> None:
    dcp.save({"a": 5}, checkpoint_id=tmp_path / "torch")
    target: dict[str, Any] = {"a": np.zeros(3)}
    dcp.load(target, checkpoint_id=tmp_path / "torch")
    assert target == {"a": 5}

    holdfast.save({"a": 5}, tmp_path / "ours")
    for name in ("torch", "ours"):
        target = {"a": np.zeros(3)}
        with pytest.raises(holdfast.MismatchError, match="'a' has kind a"):
            holdfast.load(target, tmp_path / name)
        report = holdfast.load(target, tmp_path / name, strict=False)
        assert [difference.key for difference in report.differences] == ["a"]
        assert target["a"].tolist() == [0, 0, 0]


def test_flipped_bits_are_loaded_by_torch_and_found_here(tmp_path: Path) -> None:
    weight = torch.arange(1000.0)
    for name, save in (("torch", dcp.save), ("ours", holdfast.save)):
        save({"a": weight}, checkpoint_id=tmp_path / name)  # type: ignore[operator]
        (file,) = (each for each in (tmp_path / name).iterdir() if each.name.startswith(("__0", "data-")))
        data = bytearray(file.read_bytes())
        data[data.index(weight.numpy().tobytes()) + 402] ^= 0x40
        file.write_bytes(data)
    target = {"a": torch.zeros(1000)}
    dcp.load(target, checkpoint_id=tmp_path / "torch")
    assert (target["a"] != weight).sum() == 1
    with pytest.raises(holdfast.CorruptError):
        holdfast.load(target, tmp_path / "ours")


def test_a_key_that_the_target_lacks_is_ignored_by_torch_and_reported_here(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(1), "b": 1}, checkpoint_id=tmp_path / "torch")
    assert dcp.load({"a": torch.zeros(1)}, checkpoint_id=tmp_path / "torch") is None
    holdfast.save({"a": torch.ones(1), "b": 1}, tmp_path / "ours")
    assert holdfast.load({"a": torch.zeros(1)}, tmp_path / "ours").unexpected == ("b",)


def test_int_keys_become_text_in_torch_and_stay_numbers_here(tmp_path: Path) -> None:
    saved = {"state": {0: {"step": 3}}}
    dcp.save(saved, checkpoint_id=tmp_path / "torch")
    reader: Any = dcp.FileSystemReader(tmp_path / "torch")
    assert _load_state_dict_from_keys(storage_reader=reader) == {"state": {"0": {"step": 3}}}
    holdfast.save(saved, tmp_path / "ours")
    assert holdfast.load(tmp_path / "ours") == saved
