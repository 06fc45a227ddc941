"""Numpy arrays: saved like tensors, handed back as arrays, filled in place where they are targets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import holdfast

KINDS = ["bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def arrangements() -> dict[str, np.ndarray]:
    base = np.arange(60.0).reshape(3, 4, 5)
    return {
        "whole": base,
        "0-d": np.array(2.5),
        "empty": np.zeros((0, 3)),
        "fortran": np.asfortranarray(base),
        "reversed": base[:, ::-1],
        "strided": base[::2, :, ::3],
        "read-only": read_only(np.arange(4)),
        "from bytes": np.frombuffer(b"abcdef", dtype=np.uint8),
        "unaligned": np.frombuffer(b"xabcdefgh", dtype=np.uint8)[1:].view(np.int32),
        "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
        "big-endian": np.arange(5, dtype=">i4"),
        "big-endian floats": np.linspace(0, 1, 5).astype(">f8"),
        "nan": np.array([np.nan, -0.0, np.inf], dtype=np.float16),
    }


@pytest.mark.parametrize("name", sorted(arrangements()))
def test_every_arrangement_comes_back_as_an_array_of_the_same_values(name: str, path: str) -> None:
    array = arrangements()[name]
    holdfast.save({"x": array}, path)
    loaded = holdfast.load(path)["x"]
    assert type(loaded) is np.ndarray
    assert loaded.dtype == array.dtype.newbyteorder("=")
    assert loaded.shape == array.shape
    assert loaded.flags.writeable
    np.testing.assert_array_equal(loaded, array)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (0, 2), (7,), (3, 5)])
def test_every_kind_of_number(kind: str, shape: tuple[int, ...], path: str, same: Callable[..., None]) -> None:
    count = int(np.prod(shape))
    raw = np.random.default_rng(5).integers(0, 2 if kind == "bool" else 256, count * np.dtype(kind).itemsize)
    array = raw.astype(np.uint8).view(kind).reshape(shape)
    holdfast.save({"x": array, "y": torch.ones(1)}, path)
    same(holdfast.load(path)["x"], array)


def test_arrays_are_filled_in_place(path: str) -> None:
    holdfast.save({"a": np.arange(6), "b": np.arange(6.0).reshape(2, 3), "c": np.array(3), "d": np.zeros((0, 4))}, path)
    room = np.full((3, 4), -1.0)
    target = {"a": np.zeros(12, dtype=np.int64)[::2], "b": room.T[::2, :3], "c": np.array(0), "d": np.zeros((0, 4))}
    originals = dict(target)
    holdfast.load(target, path)
    assert all(target[key] is original for key, original in originals.items())
    assert target["a"].tolist() == [0, 1, 2, 3, 4, 5]
    assert target["b"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert room[:, 1].tolist() == [-1.0, -1.0, -1.0]
    assert target["c"] == 3


def test_arrays_and_tensors_load_into_each_other(path: str) -> None:
    holdfast.save({"array": np.arange(3), "tensor": torch.arange(3)}, path)
    target = {"array": torch.zeros(3, dtype=torch.int64), "tensor": np.zeros(3, dtype=np.int64)}
    holdfast.load(target, path)
    assert target["array"].tolist() == [0, 1, 2]
    assert target["tensor"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (read_only(np.zeros(3)), "read-only"),
        (np.zeros(3)[::-1], "negative stride"),
        (np.zeros(3, dtype=">f8"), "byte order"),
        (np.broadcast_to(np.zeros(1), (3,)), "read-only"),
        (np.lib.stride_tricks.as_strided(np.zeros(1), (3,), (0,)), "share memory"),
    ],
    ids=["read-only", "reversed", "big-endian", "broadcast", "overlapping"],
)
def test_arrays_that_cannot_be_filled_are_refused_by_name(target: np.ndarray, message: str, path: str) -> None:
    holdfast.save({"w": torch.ones(2), "x": np.ones(3)}, path)
    state = {"w": torch.zeros(2), "x": target}
    with pytest.raises(holdfast.InvalidStateError, match=f"'x' in the target .*{message}") as caught:
        holdfast.load(state, path)
    assert caught.value.key == "x"
    assert torch.equal(state["w"], torch.zeros(2))
    assert target.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(3, dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array([object()]),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.zeros(2, dtype=np.longdouble),
        np.ma.masked_array([1, 2], [True, False]),
    ],
    ids=["structured", "text", "bytes", "objects", "dates", "long double", "masked"],
)
def test_arrays_that_are_no_tensors_are_refused_by_name(
    array: np.ndarray, path: str, assert_nothing_written: Callable[[], None]
) -> None:
    with pytest.raises(holdfast.InvalidStateError, match=r"'data\.x' is a (masked )?numpy array") as caught:
        holdfast.save({"ok": torch.ones(3), "data": {"x": array}}, path)
    assert caught.value.key == "data.x"
    assert_nothing_written()


def test_an_array_against_a_value_is_a_difference_of_kind(path: str) -> None:
    holdfast.save({"array": np.arange(3), "value": 5}, path)
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load({"array": 1, "value": np.zeros(1)}, path)
    assert [difference.kind for difference in caught.value.differences] == ["kind", "kind"]
