"""Tensors: what can be stored and filled, of which parts they are made, and what their contents are known by."""

from __future__ import annotations

import datetime
import decimal
import enum
import errno
import io
import pathlib
import subprocess
import sys
import uuid
import warnings
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from holdfast._state import tensors as module
from holdfast._state.tensors import (
    TORCH_DTYPES,
    as_tensor,
    check_fillable,
    check_savable,
    empty_quantized,
    empty_tensor,
    fingerprint_of_tensor,
    fingerprint_of_value,
    has_own_elements,
    inner_parts,
    is_composed,
    plain_address,
    quantizer_of,
    torch_dtype,
    word_dtype,
)
from holdfast._values.digest import digest
from holdfast._values.dtypes import DTYPES
from holdfast.errors import CorruptError, InvalidStateError, StorageError, UnsupportedVersionError

# --- what can be stored, and what can be filled -----------------------------------------------------------------------


pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor",
    "ignore:Sparse CSR tensor support",
    "ignore:The PyTorch API of nested tensors",
)


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
            if name.startswith("q") or not hasattr(torch, name):
                continue
            dtype = torch_dtype(name)
            for size in ((), (0, 3), (2, 3)):
                made = empty_tensor(size, dtype)
                assert (made.shape, made.dtype) == (torch.Size(size), dtype)


def test_unknown_dtypes_are_damage_and_those_of_later_torches_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CorruptError, match="'float7'"):
        torch_dtype("float7")
    monkeypatch.delitem(TORCH_DTYPES, "bcomplex32", raising=False)
    with pytest.raises(UnsupportedVersionError, match=r"'bcomplex32' does not exist in torch .*; use a newer torch"):
        torch_dtype("bcomplex32")


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


# --- which tensors are stored as several, and as which ----------------------------------------------------------------


class Halves(torch.Tensor):
    """A tensor subclass over memory of its own, which still tells that it is made of two."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["upper", "lower"], ("halves", len(self))

    @property
    def upper(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)[: len(self) // 2]

    @property
    def lower(self) -> Any:
        return self.as_subclass(torch.Tensor)[len(self) // 2 :]


class Broken(Halves):
    @property
    def lower(self) -> Any:
        return "no tensor"


def packed(columns: int) -> torch.Tensor:
    return torch.quantize_per_channel(torch.zeros(3, columns), torch.ones(3), torch.zeros(3), 0, torch.quint4x2)


def test_plain_tensors_are_one() -> None:
    with FakeTensorMode():
        fake = torch.zeros(2)
    nested = torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)
    for tensor in (torch.zeros(2), torch.nn.Parameter(torch.zeros(2)), fake, nested):
        assert not is_composed(tensor)


def test_subclasses_are_their_parts_and_their_context() -> None:
    tensor = torch.arange(4.0).as_subclass(Halves)
    assert is_composed(tensor)
    parts, context = inner_parts("key", tensor)
    assert {name: part.tolist() for name, part in parts.items()} == {"upper": [0.0, 1.0], "lower": [2.0, 3.0]}
    assert context == ("halves", 4)
    with pytest.raises(InvalidStateError, match=r"'key': Broken\.__tensor_flatten__ names 'lower'") as caught:
        inner_parts("key", torch.arange(4.0).as_subclass(Broken))
    assert caught.value.key == "key"


@pytest.mark.parametrize(("columns", "expected"), [(1, 3), (4, 6), (7, 12)])
def test_elements_below_a_byte_are_their_storage(columns: int, expected: int) -> None:
    tensor = packed(columns)
    assert is_composed(tensor)
    parts, context = inner_parts("key", tensor)
    assert parts["packed"].shape == (expected,)
    assert parts["packed"].data_ptr() == tensor.data_ptr()
    assert context[:2] == (torch.quint4x2, tensor.shape)
    assert hash(context) == hash(inner_parts("key", packed(columns))[1])


def test_part_of_a_packed_storage_is_refused() -> None:
    with pytest.raises(InvalidStateError, match="is a view of a packed"):
        inner_parts("key", packed(4)[1])


# --- fingerprints: equal for equal contents however they lie in memory, different for others --------------------------


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


class Side(enum.Enum):
    LEFT = 1
    RIGHT = 2


@dataclass
class Held:
    content: object


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
    datetime.datetime(2026, 1, 2),
    datetime.date(2026, 1, 2),
    pathlib.PurePosixPath("1"),
    uuid.UUID(int=1),
    decimal.Decimal(1),
    range(1),
    slice(1),
    deque([1]),
    Namespace(a=1),
    Namespace(a=2),
    io.BytesIO(b"1"),
    io.BytesIO(b"2"),
    torch.Generator().manual_seed(1),
    torch.Generator().manual_seed(2),
    Side.LEFT,
    Side.RIGHT,
    Held(1),
    Held(2),
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


# --- room for what a checkpoint claims to hold ------------------------------------------------------------------------


def test_room_that_cannot_be_had_is_a_storage_error() -> None:
    for make in (
        lambda: empty_tensor((1 << 60,), torch.uint8),
        lambda: empty_tensor((1 << 59,), torch.complex32),
        lambda: empty_quantized(torch.Size([1 << 60]), torch.qint8, {"scale": 0.5, "zero_point": 0}),
    ):
        with pytest.raises(StorageError, match="cannot allocate") as caught:
            make()
        assert caught.value.errno == errno.ENOMEM
        assert "\n" not in caught.value.message


def test_a_quantizer_that_torch_does_not_take_is_damage() -> None:
    quantizer = {"scheme": "per_tensor_affine", "scale": 0.5, "zero_point": 1 << 70}
    with pytest.raises(CorruptError, match="quantizer"):
        empty_quantized(torch.Size([1]), torch.qint8, quantizer)
