"""holdfast.statistics: exact numbers are torch's own, samples are bounded and say what they are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import FileSystemWriter, TensorStatistics

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64)


def of_one(path: Path, tensor: torch.Tensor, **options: Any) -> TensorStatistics:
    holdfast.save({"w": tensor}, path, no_dist=True)
    return holdfast.statistics(path, **options).tensors["w"]


@pytest.mark.parametrize("dtype", [*FLOATING, *INTEGERS], ids=str)
def test_the_numbers_are_those_of_torch(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(700, 30, generator=torch.Generator().manual_seed(1)).mul(3).abs().to(dtype)
    found, truth = of_one(tmp_path / "a", tensor, sample=None), tensor.double()
    assert (found.elements, found.looked_at, found.is_exact) == (21_000, 21_000, True)
    assert found.zeros == int((truth == 0).sum())
    assert found.sum == pytest.approx(float(truth.sum()))
    assert found.mean == pytest.approx(float(truth.mean()))
    assert found.std == pytest.approx(float(truth.std(correction=0)))
    assert found.norm == pytest.approx(float(truth.norm()))
    assert (found.min, found.max) == (float(truth.min()), float(truth.max()))
    assert sum(negative + positive for _, negative, positive in found.magnitudes) == 21_000 - found.zeros


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_what_is_not_finite_is_counted_and_left_out(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, -2.0, math.nan, 0.0, math.nan, 4.0]).to(dtype)
    found = of_one(tmp_path / "a", tensor)
    assert (found.nan, found.inf, found.zeros, found.finite) == (2, 0, 1, 4)
    assert (found.sum, found.sum_squares, found.min, found.max) == (3.0, 21.0, -2.0, 4.0)
    assert found.magnitudes == ((0, 0, 1), (1, 1, 0), (2, 0, 1))
    assert holdfast.statistics(tmp_path / "a").non_finite_keys == ("w",)


def test_infinity_is_counted_apart(tmp_path: Path) -> None:
    found = of_one(tmp_path / "a", torch.tensor([math.inf, -math.inf, math.nan, 8.0]))
    assert (found.nan, found.inf, found.min, found.max) == (1, 2, 8.0, 8.0)
    nothing = of_one(tmp_path / "b", torch.tensor([math.inf]))
    assert (nothing.sum, nothing.mean, nothing.std, nothing.norm, nothing.min) == (None,) * 5


def test_complex_numbers_have_a_complex_sum_and_no_range(tmp_path: Path) -> None:
    found = of_one(tmp_path / "a", torch.tensor([3 + 4j, 0, complex(math.nan, 1), -1j]))
    assert (found.nan, found.zeros, found.sum, found.sum_squares) == (1, 1, 3 + 3j, 26.0)
    assert (found.min, found.max, found.rms) == (None, None, math.sqrt(26 / 3))


def test_types_that_are_no_numbers_are_not_looked_at(tmp_path: Path) -> None:
    found = of_one(tmp_path / "a", torch.zeros(64, dtype=torch.uint8).view(torch.bits8))
    assert (found.elements, found.looked_at, found.sum, found.is_exact) == (64, 0, None, False)


def test_a_sample_is_bounded_spread_and_the_same_each_time(tmp_path: Path) -> None:
    tensor = torch.zeros(6 << 20)
    tensor[3 << 20 :] = 1.0
    holdfast.save({"w": tensor}, tmp_path / "a", no_dist=True)
    found = holdfast.statistics(tmp_path / "a", sample=4)
    one = found.tensors["w"]
    assert one.looked_at == 4 << 18
    assert one.mean == 0.5
    assert one.norm == pytest.approx(math.sqrt(3 << 20))
    assert not one.is_exact
    assert found.bytes_read == 4 << 20
    assert holdfast.statistics(tmp_path / "a", sample=4) == found
    exact = holdfast.statistics(tmp_path / "a", sample=None)
    assert exact.tensors["w"].looked_at == 6 << 20
    assert exact.bytes_read == 24 << 20


@pytest.mark.parametrize("shape", [(3, 700_000), (300_001, 7), (5, 3, 200_003), (2, 70_000, 3, 5)], ids=str)
def test_parts_of_any_shape_make_up_the_tensor(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    found = of_one(tmp_path / "a", tensor, sample=None)
    count = tensor.numel()
    assert (found.looked_at, found.sum, found.min, found.max) == (count, count * (count - 1) / 2, 0.0, count - 1.0)
    sample = holdfast.statistics(tmp_path / "a", sample=2).tensors["w"]
    assert 0 < sample.looked_at <= 2 << 17


def test_tied_tensors_values_and_patterns(tmp_path: Path) -> None:
    weight = torch.ones(10)
    holdfast.save({"one": weight, "tied": weight, "step": 1, "scalar": torch.tensor(2.0)}, tmp_path / "a", no_dist=True)
    found = holdfast.statistics(tmp_path / "a")
    assert list(found.tensors) == ["one", "tied", "scalar"]
    assert found.tensors["tied"].alias_of == "one"
    assert found.tensors["tied"].sum == 10.0
    assert list(holdfast.statistics(tmp_path / "a", keys="t*").tensors) == ["tied"]
    with pytest.raises(ValueError, match="no key matches"):
        holdfast.statistics(tmp_path / "a", keys="x*")
    with pytest.raises(ValueError, match="number of blocks"):
        holdfast.statistics(tmp_path / "a", sample=0)


def test_torchs_format_gives_the_same_numbers(tmp_path: Path) -> None:
    state = {"w": torch.randn(1000, 300, generator=torch.Generator().manual_seed(2)).bfloat16()}
    holdfast.save(state, tmp_path / "a", no_dist=True)
    holdfast.save(state, tmp_path / "b", no_dist=True, storage_writer=FileSystemWriter(tmp_path / "b"))
    ours, torchs = (holdfast.statistics(tmp_path / name, sample=None).tensors["w"] for name in ("a", "b"))
    assert ours == torchs


def test_damage_is_an_error(tmp_path: Path) -> None:
    of_one(tmp_path / "a", torch.ones(5000))
    (file,) = (tmp_path / "a").glob("data-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(holdfast.CorruptError, match="'w'"):
        holdfast.statistics(tmp_path / "a")


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    of_one(tmp_path / "a", torch.ones(9 << 20), sample=None, progress=lambda done, total: told.append((done, total)))
    assert len(told) >= 3
    assert told == sorted(told)
    assert told[-1] == (36 << 20, 36 << 20)
