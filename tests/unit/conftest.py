"""What the tests of saving and loading share: bits to compare, states to compare, and a place for a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class FsspecMemory(MemoryFileSystem):
    """The memory of fsspec under a scheme that only fsspec knows: "memory" is a store of ours."""

    protocol = "fsspec-memory"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        stripped: Any = MemoryFileSystem._strip_protocol(path.removeprefix("fsspec-memory://"))
        return stripped


fsspec.register_implementation("fsspec-memory", FsspecMemory)


def bits_of(tensor: torch.Tensor) -> bytes:
    """The row-major bytes of a tensor's values, whatever its dtype, strides and lazy conjugation."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return tensor.view(_WORDS[tensor.dtype.itemsize]).numpy().tobytes()


def assert_same_state(found: Any, expected: Any, place: str = "state") -> None:
    """Fail, naming the place, unless both have the same types, order, shapes, dtypes and bits all the way down."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), place
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        assert found.requires_grad == expected.requires_grad, place
        assert bits_of(found) == bits_of(expected), place
        return
    assert type(found) is type(expected), f"{place}: {type(found)} is not {type(expected)}"
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        assert found.tobytes() == expected.tobytes(), place
    elif isinstance(expected, dict):
        assert list(map(repr, found)) == list(map(repr, expected)), f"{place}: keys or their order differ"
        for (key, one), other in zip(found.items(), expected.values(), strict=True):
            assert_same_state(one, other, f"{place}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), place
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same_state(one, other, f"{place}[{number}]")
    elif isinstance(expected, (set, frozenset)):
        assert found == expected, place
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(found), place
    else:
        assert repr(found) == repr(expected), place


@pytest.fixture
def same() -> Callable[..., None]:
    return assert_same_state


@pytest.fixture
def bits() -> Callable[[torch.Tensor], bytes]:
    return bits_of


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where a checkpoint may go; nothing is there yet."""
    return str(tmp_path / "checkpoint")


@pytest.fixture
def assert_nothing_written(path: str) -> Callable[[], None]:
    def check() -> None:
        directory = Path(path)
        assert not directory.exists() or not list(directory.iterdir())

    return check
