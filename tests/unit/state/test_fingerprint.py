"""Fingerprints: equal for equal contents however they lie in memory, different for others that were looked at."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from holdfast._state import tensors as module
from holdfast._state.tensors import fingerprint_of_tensor, fingerprint_of_value
from holdfast._values.digest import digest

BOTH = pytest.mark.parametrize("everything", [False, True])


@BOTH
def test_how_a_tensor_lies_in_memory_does_not_matter(everything: bool) -> None:
    tensor = torch.arange(600.0).view(20, 30)
    strided = torch.empty(30, 20).t().copy_(tensor)
    assert not strided.is_contiguous()
    prints = {fingerprint_of_tensor(each, everything=everything) for each in (tensor, strided, tensor.clone())}
    assert len(prints) == 1
    assert 0 not in prints


@BOTH
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_contents_that_differ_everywhere_are_told_apart(everything: bool, dtype: torch.dtype) -> None:
    zeros, ones = torch.zeros(9, 5), torch.ones(9, 5)
    prints = [fingerprint_of_tensor(each.to(dtype), everything=everything) for each in (zeros, ones)]
    assert prints[0] != prints[1]


@BOTH
def test_scalars_have_fingerprints_and_empty_tensors_have_none(everything: bool) -> None:
    assert fingerprint_of_tensor(torch.tensor(1.5), everything=everything) != 0
    assert fingerprint_of_tensor(torch.tensor(1.5), everything=everything) != fingerprint_of_tensor(
        torch.tensor(2.5), everything=everything
    )
    assert fingerprint_of_tensor(torch.empty(0, 3), everything=everything) == 0


@BOTH
def test_views_that_are_conjugate_or_negative_count_as_what_they_show(everything: bool) -> None:
    tensor = torch.complex(torch.arange(6.0), torch.ones(6))
    lazily, really = tensor.conj(), tensor.conj().resolve_conj()
    assert fingerprint_of_tensor(lazily, everything=everything) == fingerprint_of_tensor(really, everything=everything)
    assert fingerprint_of_tensor(lazily, everything=everything) != fingerprint_of_tensor(tensor, everything=everything)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@BOTH
def test_quantised_tensors_are_compared_by_what_is_stored(everything: bool) -> None:
    made = [torch.quantize_per_tensor(torch.full((8,), value), 0.1, 0, torch.qint8) for value in (1.0, 1.0, 2.0)]
    prints = [fingerprint_of_tensor(each, everything=everything) for each in made]
    assert prints[0] == prints[1] != prints[2]


def test_everything_sees_the_one_element_that_a_sample_misses() -> None:
    tensor = torch.zeros(1000, 10)
    other = tensor.clone()
    other[3, 1] = 1
    assert fingerprint_of_tensor(tensor, everything=False) == fingerprint_of_tensor(other, everything=False)
    assert fingerprint_of_tensor(tensor, everything=True) != fingerprint_of_tensor(other, everything=True)


def test_a_sample_sees_the_first_element_and_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counted(data: bytes) -> int:
        seen.append(len(data))
        return digest(data)

    monkeypatch.setattr(module, "digest", counted)
    tensor = torch.zeros(999, 1001)
    other = tensor.clone()
    other[0, 0] = 1
    assert fingerprint_of_tensor(tensor, everything=False) != fingerprint_of_tensor(other, everything=False)
    assert max(seen) <= 64 * 4


def test_everything_goes_through_a_large_tensor_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLICE_BYTES", 4 * 10 * 3)
    tensor = torch.arange(100.0).view(10, 10)
    prints = {fingerprint_of_tensor(tensor, everything=True)}
    for row in range(10):
        other = tensor.clone()
        other[row, 9] = -1
        prints.add(fingerprint_of_tensor(other, everything=True))
    assert len(prints) == 11


DIFFERENT: list[Any] = [
    None,
    0,
    1,
    True,
    1.0,
    1j,
    "1",
    b"1",
    (1,),
    [1],
    {1},
    {1: 1},
    OrderedDict({1: 1}),
    float("nan"),
    np.int64(1),
    torch.float32,
    torch.device("cpu"),
]


def test_values_of_different_types_are_told_apart() -> None:
    prints = [fingerprint_of_value(value) for value in DIFFERENT]
    assert 0 not in prints
    assert len(set(prints)) == len(DIFFERENT)


def test_equal_values_have_equal_fingerprints() -> None:
    assert fingerprint_of_value({"a": [1, 2.5, "x"]}) == fingerprint_of_value({"a": [1, 2.5, "x"]})
    assert fingerprint_of_value(float("nan")) == fingerprint_of_value(float("nan"))


def test_sets_have_the_same_fingerprint_in_every_process() -> None:
    """The order of a set of strings depends on the hash seed of the process."""
    code = (
        "from holdfast._state.tensors import fingerprint_of_value\n"
        "print(fingerprint_of_value({chr(c) * 3 for c in range(97, 123)}))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_what_has_no_telling_text_is_not_looked_at() -> None:
    nested: list[Any] = []
    for _ in range(100):
        nested = [nested]
    assert [fingerprint_of_value(value) for value in (object(), [1, object()], {"a": object()}, nested)] == [0] * 4


def test_text_with_lone_surrogates_has_a_fingerprint() -> None:
    assert fingerprint_of_value("\ud800") != 0
