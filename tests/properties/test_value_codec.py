from __future__ import annotations

import math

import msgspec
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._native.values import decode_value, decode_value_bytes, encode_value, encode_value_bytes
from holdfast._values.dtypes import DTYPES
from holdfast.errors import CorruptError, UnsupportedVersionError

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
numpy_scalars = st.one_of(
    st.booleans().map(np.bool_),
    st.integers(-128, 127).map(np.int8),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.floats(width=16).map(np.float16),
    st.floats(width=32).map(np.float32),
    st.floats().map(np.float64),
    st.complex_numbers(width=64).map(np.complex64),
    st.complex_numbers().map(np.complex128),
    texts.map(np.str_),
    st.binary(max_size=8).map(np.bytes_),
)
hashable_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**54), 2**54),
    st.floats(),
    st.complex_numbers(),
    texts,
    st.binary(max_size=8),
    st.lists(st.integers(0, 2**62), max_size=3).map(torch.Size),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")]),
    st.sampled_from(sorted(DTYPES)).map(lambda name: getattr(torch, name)),
    numpy_scalars,
)
hashables = st.recursive(
    hashable_leaves,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
values = st.recursive(
    hashables,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(hashables, inner, max_size=4),
        st.sets(hashables, max_size=4),
    ),
    max_leaves=15,
)
json_texts = st.one_of(
    texts,
    st.sampled_from(["nan", "inf", "0x20000000000000", "-0x20000000000000", "0x1", "YQ==", "float32", "int8", "cpu"]),
)
tags = st.sampled_from(
    [
        "tuple",
        "dict",
        "set",
        "frozenset",
        "int",
        "float",
        "bytes",
        "complex",
        "torch.dtype",
        "torch.device",
        "torch.Size",
        "numpy",
        "other",
    ]
)
jsons = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**55), 2**55)
    | st.floats(allow_nan=False, allow_infinity=False)
    | json_texts,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(tags, inner, min_size=1, max_size=2),
        st.lists(st.lists(inner, min_size=2, max_size=2), max_size=3),
    ),
    max_leaves=10,
)


def identical(left: object, right: object) -> bool:
    """Whether both have the same types and contents all the way down, nan and -0.0 included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Size) or isinstance(right, torch.Size):
        return left == right
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(identical, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return identical(list(left.items()), list(right.items()))
    if isinstance(left, (set, frozenset)) and isinstance(right, (set, frozenset)):
        return sorted(map(described, left)) == sorted(map(described, right))
    return described(left) == described(right)


def described(value: object) -> str:
    if isinstance(value, (float, np.floating)) and not math.isnan(value):
        return f"{type(value)} {float(value).hex()}"
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(described, value))}"
    if isinstance(value, tuple):
        return f"{type(value)} {list(map(described, value))}"
    return f"{type(value)} {value!r}"


@given(values)
@settings(max_examples=400)
def test_what_is_encoded_decodes_to_the_same(value: object) -> None:
    data = encode_value_bytes(value, key="k")
    decoded = decode_value_bytes(data, key="k")
    assert identical(decoded, value)
    assert encode_value_bytes(decoded, key="k") == data


@given(jsons)
@settings(max_examples=600)
def test_what_decodes_encodes_to_the_same(json: object) -> None:
    # Through text, so that it is what a file can hold.
    json = msgspec.json.decode(msgspec.json.encode(json))
    try:
        value = decode_value(json, key="k")
    except (CorruptError, UnsupportedVersionError):
        return
    assert msgspec.json.encode(encode_value(value, key="k")) == msgspec.json.encode(json)


@given(st.sets(hashables, max_size=6))
def test_sets_are_written_the_same_whatever_their_order(elements: set[object]) -> None:
    ordered = list(elements)
    assert encode_value_bytes(set(ordered), key="k") == encode_value_bytes(set(ordered[::-1]), key="k")


@given(
    st.binary(max_size=30) | st.text(alphabet='{}[]":,0123456789.-eEtruefalsn dictuplx', max_size=30).map(str.encode)
)
def test_arbitrary_bytes_never_raise_a_foreign_error(data: bytes) -> None:
    try:
        value = decode_value_bytes(data, key="k")
    except (CorruptError, UnsupportedVersionError):
        return
    assert encode_value_bytes(value, key="k") == data
