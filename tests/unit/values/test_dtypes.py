"""Every dtype of torch has its row, and the limits fit together."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from holdfast._values import dtypes as limits
from holdfast._values.dtypes import DTYPES

TORCH_DTYPES = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


def test_the_table_has_exactly_the_dtypes_of_torch() -> None:
    assert set(TORCH_DTYPES) <= set(DTYPES), f"torch {torch.__version__} has dtypes that the table has not"
    assert set(DTYPES) - set(TORCH_DTYPES) <= {"bcomplex32"}, "which torch has since 2.14"
    assert len(DTYPES) == 47


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_item_sizes_are_those_of_torch(name: str) -> None:
    assert DTYPES[name].name == name
    if name in TORCH_DTYPES:
        assert DTYPES[name].itemsize == TORCH_DTYPES[name].itemsize


def test_floating_are_the_types_that_torch_converts() -> None:
    floating = {name for name, dtype in TORCH_DTYPES.items() if dtype.is_floating_point} - {"float4_e2m1fn_x2"}
    assert {name for name, dtype in DTYPES.items() if dtype.is_floating} == floating
    for name in floating:
        ones = torch.ones(3).to(TORCH_DTYPES[name])
        assert ones.to(torch.float64).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", sorted(name for name, dtype in DTYPES.items() if dtype.safetensors))
def test_safetensors_opens_the_name_as_the_same_dtype(name: str, tmp_path: Path) -> None:
    dtype = DTYPES[name]
    nbytes = 3 * dtype.itemsize
    header = json.dumps({"x": {"dtype": dtype.safetensors, "shape": [3], "data_offsets": [0, nbytes]}}).encode()
    path = tmp_path / "one.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(nbytes))
    with safe_open(path, framework="pt") as file:
        tensor = file.get_tensor("x")
    assert tensor.dtype == TORCH_DTYPES[name]
    assert tensor.shape == (3,)


def test_names_that_old_readers_reject_are_not_used() -> None:
    assert {dtype.safetensors for dtype in DTYPES.values()} - {None} == {
        *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"),
        *("F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64"),
    }


# --- limits -----------------------------------------------------------------------------------------------------------


def test_sums_of_offsets_and_sizes_stay_in_64_bits() -> None:
    assert 2 * limits.MAX_FILE_BYTES <= 2**63


def test_recursion_ends_before_the_interpreter_stops_it() -> None:
    assert max(limits.MAX_VALUE_DEPTH, limits.MAX_PATH_DEPTH) * 2 < sys.getrecursionlimit()


def test_an_inline_value_is_a_small_part_of_a_manifest() -> None:
    assert limits.MAX_VALUE_INLINE_BYTES * 1024 <= limits.MAX_MANIFEST_BYTES


def test_the_header_cap_is_that_of_safetensors() -> None:
    assert limits.MAX_HEADER_BYTES == 100_000_000
