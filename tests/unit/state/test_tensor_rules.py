"""What can be stored of a tensor or array, and what can be filled."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch

from holdfast._state.tensors import (
    as_tensor,
    check_fillable,
    check_savable,
    empty_quantized,
    empty_tensor,
    has_own_elements,
    plain_address,
    quantizer_of,
    torch_dtype,
    word_dtype,
)
from holdfast._values.dtypes import DTYPES
from holdfast.errors import CorruptError, InvalidStateError

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:Sparse CSR tensor support")


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(6, 8)[::2, ::3], True),
        (torch.zeros(3, 4).permute(1, 0)[::2], True),
        (torch.tensor(1.0), True),
        (torch.zeros(1).expand(1, 1), True),
        (torch.zeros(0, 1).expand(0, 5), True),
        (torch.zeros(1, 4).expand(3, 4), False),
        (torch.zeros(1).expand(2), False),
        (torch.zeros(10).unfold(0, 4, 2), False),
        (torch.zeros(10).unfold(0, 2, 2), True),
        (torch.zeros(10).as_strided((3, 3), (1, 2)), False),
    ],
)
def test_elements_that_share_memory(tensor: torch.Tensor, expected: bool) -> None:
    assert has_own_elements(tensor) is expected


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: torch.zeros(2, 1).expand(2, 2), "share memory"),
        (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch._to_functional_tensor(torch.zeros(2)), "without memory"),
        (lambda: np.zeros(3)[::-1], "negative stride"),
        (lambda: np.zeros(3, dtype=">f4"), "foreign byte order"),
        (lambda: np.frombuffer(b"abcd", dtype=np.uint8), "read-only"),
        (lambda: np.array(["x"]), "is a numpy array of dtype"),
    ],
)
def test_what_cannot_be_filled(build: Callable[[], torch.Tensor | np.ndarray], message: str) -> None:
    with pytest.raises(InvalidStateError, match=message) as caught:
        check_fillable("a.b", build())
    assert caught.value.key == "a.b"
    assert "'a.b'" in caught.value.message


def test_what_can_be_filled() -> None:
    for leaf in (torch.zeros(3), torch.zeros(0), torch.zeros(4, 4).t()[::2], np.zeros((2, 3)).T, np.array(1)):
        check_fillable("x", leaf)


def test_every_dtype_of_the_table_can_be_made_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in DTYPES:
            if name.startswith("q"):
                continue
            dtype = torch_dtype(name)
            for size in ((), (0, 3), (2, 3)):
                made = empty_tensor(size, dtype)
                assert (made.shape, made.dtype) == (torch.Size(size), dtype)


def test_unknown_dtypes_are_damage() -> None:
    with pytest.raises(CorruptError, match="'float7'"):
        torch_dtype("float7")


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_words_have_the_size_of_the_element(itemsize: int) -> None:
    assert word_dtype(itemsize).itemsize == itemsize


def test_arrays_share_their_memory_where_they_can() -> None:
    array = np.zeros(3)
    as_tensor("x", array)[1] = 5
    assert array[1] == 5
    reversed_array = np.arange(3)[::-1]
    assert as_tensor("x", reversed_array).tolist() == [2, 1, 0]
    assert as_tensor("x", np.arange(3, dtype=">i2")).dtype == torch.int16
    with pytest.raises(InvalidStateError, match="'x' is a masked numpy array"):
        as_tensor("x", np.ma.masked_array([1], [True]))


def test_quantizers_describe_and_rebuild() -> None:
    values, scales = torch.linspace(-1, 1, 6).view(2, 3), torch.tensor([0.5, 0.25])
    for tensor in (
        torch.quantize_per_tensor(values, 0.1, 3, torch.quint8),
        torch.quantize_per_channel(values, scales, torch.tensor([1, 2]), 0, torch.qint8),
        torch.quantize_per_channel(values, scales, torch.tensor([1.5, 2.0]), 0, torch.quint8),
    ):
        quantizer = quantizer_of(tensor)
        assert quantizer is not None
        made = empty_quantized(tensor.shape, tensor.dtype, quantizer)
        assert quantizer_of(made) == quantizer
        assert (made.shape, made.dtype, made.qscheme()) == (tensor.shape, tensor.dtype, tensor.qscheme())
    assert quantizer_of(values) is None
    assert quantizer_of(torch.empty(2, dtype=torch.qint8)) is None


def test_strided_tensors_with_memory_can_be_saved() -> None:
    for tensor in (torch.zeros(3), torch.zeros(0), torch.zeros(3, requires_grad=True), torch.zeros(2, 3).t()):
        check_savable("x", tensor)


def test_memory_that_is_the_elements_row_by_row() -> None:
    plain, numbers = torch.ones(3, 4), torch.ones(2, dtype=torch.complex64)
    assert plain_address(plain) == plain_address(torch.nn.Parameter(plain)) == plain.data_ptr()
    assert plain_address(plain[1:]) == plain.data_ptr() + 16
    others = (
        plain.T,
        plain[:, 1:],
        torch._neg_view(plain),
        numbers.conj(),
        plain.to("meta"),
        plain.to_sparse(),
        torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8),
        plain.as_subclass(type("Own", (torch.Tensor,), {})),
    )
    assert [plain_address(other) for other in others] == [0] * len(others)
