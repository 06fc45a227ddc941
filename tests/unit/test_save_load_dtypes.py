"""Every element type that torch has, bit for bit, in every kind of shape."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import holdfast

# torch deprecated making quantised tensors; storing those that exist is still promised.
pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")

ALL_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
PLAIN_DTYPES = [dtype for dtype in ALL_DTYPES if dtype not in QUANTISED]
SHAPES = [(), (1,), (0,), (3, 0, 2), (5,), (3, 7), (2, 1, 3, 2)]

Same = Callable[..., None]
Bits = Callable[[torch.Tensor], bytes]


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    limit = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, limit, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def test_all_element_types_of_torch_are_tried() -> None:
    assert len(ALL_DTYPES) >= 46
    assert len(PLAIN_DTYPES) + len(QUANTISED) == len(ALL_DTYPES)


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype, path: str, same: Same) -> None:
    whole = random_bits(dtype, 6, 10)
    state = {f"shape {shape}": random_bits(dtype, *shape) for shape in SHAPES}
    state |= {"transposed": whole.t(), "sliced": whole[1:5, 2:9], "strided": whole[::2, ::3], "row": whole[3]}
    state |= {"expanded": random_bits(dtype, 4, 1).expand(4, 5), "scalar view": whole[2, 3]}
    holdfast.save(state, path)
    same(holdfast.load(path), state)


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
def test_every_dtype_loads_into_existing_tensors(dtype: torch.dtype, path: str, bits: Bits) -> None:
    saved = {"plain": random_bits(dtype, 5, 4), "turned": random_bits(dtype, 5, 4), "scalar": random_bits(dtype)}
    holdfast.save(saved, path)
    blank = torch.zeros(41 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    target = {"plain": blank[:20].view(5, 4), "turned": blank[20:40].view(4, 5).t(), "scalar": blank[40]}
    identities = {key: id(tensor) for key, tensor in target.items()}
    report = holdfast.load(target, path)
    assert set(report.loaded) == set(saved)
    assert {key: id(tensor) for key, tensor in target.items()} == identities
    for key in saved:
        assert bits(target[key]) == bits(saved[key]), key


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2])
def test_nan_payloads_infinities_and_signed_zeros_survive(dtype: torch.dtype, path: str, bits: Bits) -> None:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    top = 8 * dtype.itemsize
    patterns = [0, 1, -1, -(1 << (top - 1)), (1 << (top - 1)) - 1, (1 << (top - 1)) - 2, -2, 0x7D]
    values = torch.tensor([pattern % 256 if words is torch.uint8 else pattern for pattern in patterns], dtype=words)
    saved = {"straight": values.view(dtype), "strided": torch.stack([values, values], 1).view(dtype)[:, 0]}
    holdfast.save(saved, path)
    loaded = holdfast.load(path)
    target = {"straight": torch.zeros(8, dtype=dtype), "strided": torch.zeros(16, dtype=dtype)[::2]}
    holdfast.load(target, path)
    for key, tensor in saved.items():
        assert bits(loaded[key]) == bits(tensor)
        assert bits(target[key]) == bits(tensor)


def test_narrow_types_before_wide_ones_keep_their_places(path: str, same: Same) -> None:
    # Odd sizes in an order that would leave every wider element unaligned, were it kept.
    state = {}
    for number, dtype in enumerate([torch.bool, torch.int8, torch.int16, torch.float32, torch.float64] * 40):
        state[f"tensor {number}"] = random_bits(dtype, 1 + number % 7, 1 + number % 3)
    holdfast.save(state, path)
    same(holdfast.load(path), state)


def quantised_tensors() -> dict[str, torch.Tensor]:
    values = torch.linspace(-3, 3, 12).view(3, 4)
    scales, zeros = torch.tensor([0.1, 0.25, 0.5]), torch.tensor([1, 0, 3])
    return {
        "qint8": torch.quantize_per_tensor(values, 0.1, 3, torch.qint8),
        "quint8": torch.quantize_per_tensor(values, 0.05, 90, torch.quint8),
        "qint32": torch.quantize_per_tensor(values, 0.001, 0, torch.qint32),
        "transposed": torch.quantize_per_tensor(values, 0.1, 3, torch.qint8).t(),
        "empty": torch.quantize_per_tensor(torch.zeros(0, 4), 0.1, 3, torch.qint8),
        "channels": torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8),
        "channels of axis 1": torch.quantize_per_channel(values.t(), scales, zeros, 1, torch.quint8),
        "channels of floats": torch.quantize_per_channel(values, scales, zeros.float(), 0, torch.quint8),
    }


def assert_same_quantised(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape, found.qscheme()) == (expected.dtype, expected.shape, expected.qscheme())
    assert torch.equal(found.int_repr(), expected.int_repr())
    assert torch.equal(found.dequantize(), expected.dequantize())


def test_quantised_tensors_come_back_with_their_quantizer(path: str) -> None:
    saved = quantised_tensors()
    holdfast.save(saved, path)
    loaded = holdfast.load(path)
    assert list(loaded) == list(saved)
    for key, tensor in saved.items():
        assert_same_quantised(loaded[key], tensor)


def test_a_quantised_target_takes_over_the_stored_quantizer(path: str) -> None:
    values = torch.linspace(-3, 3, 12).view(3, 4)
    saved = {
        "tensor": torch.quantize_per_tensor(values, 0.1, 3, torch.qint8),
        "channels": torch.quantize_per_channel(values, torch.ones(3) / 4, torch.arange(3), 0, torch.qint8),
    }
    holdfast.save(saved, path)
    target = {
        "tensor": torch.quantize_per_tensor(torch.zeros(3, 4), 7.0, 0, torch.qint8),
        "channels": torch.quantize_per_channel(torch.zeros(3, 4), torch.ones(3), torch.ones(3).long(), 0, torch.qint8),
    }
    originals = dict(target)
    holdfast.load(target, path)
    for key, tensor in saved.items():
        assert target[key] is originals[key]
        assert_same_quantised(target[key], tensor)


def test_another_way_to_quantise_is_a_mismatch_and_touches_nothing(path: str) -> None:
    values = torch.linspace(-3, 3, 12).view(3, 4)
    holdfast.save({"q": torch.quantize_per_tensor(values, 0.1, 3, torch.qint8), "w": torch.ones(2)}, path)
    target = {
        "q": torch.quantize_per_channel(torch.zeros(3, 4), torch.ones(3), torch.zeros(3), 0, torch.qint8),
        "w": torch.zeros(2),
    }
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load(target, path)
    assert [difference.key for difference in caught.value.differences] == ["q"]
    assert torch.equal(target["w"], torch.zeros(2))


def packed(values: torch.Tensor, scale: float) -> torch.Tensor:
    scales = torch.tensor([scale] * len(values))
    return torch.quantize_per_channel(values, scales, torch.zeros(len(values)), 0, torch.quint4x2)


@pytest.mark.parametrize("columns", [1, 4, 7])
def test_elements_smaller_than_a_byte_load_into_a_template(columns: int, path: str) -> None:
    values = torch.arange(3.0 * columns).view(3, columns) % 15
    saved = packed(values, 1.0)
    holdfast.save({"q": saved}, path)
    target = packed(torch.zeros(3, columns), 1.0)
    holdfast.load({"q": target}, path)
    assert_same_quantised(target, saved)
    with pytest.raises(holdfast.MismatchError, match="context"):
        holdfast.load({"q": packed(torch.zeros(3, columns), 2.0)}, path)


def test_two_bit_elements_are_kept_as_their_bytes(path: str) -> None:
    saved = torch.empty(9, dtype=torch.quint2x4)
    stored_bytes = torch.empty(0, dtype=torch.uint8).set_(saved.untyped_storage())
    stored_bytes.copy_(torch.tensor([27, 228, 3], dtype=torch.uint8))
    holdfast.save({"q": saved}, path)
    target = torch.empty(9, dtype=torch.quint2x4)
    holdfast.load({"q": target}, path)
    loaded_bytes = torch.empty(0, dtype=torch.uint8).set_(target.untyped_storage())
    assert loaded_bytes.tolist() == [27, 228, 3]


def test_part_of_a_packed_tensor_is_refused(path: str, assert_nothing_written: Callable[[], None]) -> None:
    with pytest.raises(holdfast.InvalidStateError, match="'q' is a view of a packed") as caught:
        holdfast.save({"q": packed(torch.zeros(3, 4), 1.0)[1]}, path)
    assert caught.value.key == "q"
    assert_nothing_written()


def test_a_quantised_tensor_without_a_quantizer_is_refused(path: str, assert_nothing_written: Same) -> None:
    with pytest.raises(holdfast.InvalidStateError, match="'q' is quantised but has no quantizer"):
        holdfast.save({"q": torch.empty(3, dtype=torch.qint8), "w": torch.ones(3)}, path)
    assert_nothing_written()
