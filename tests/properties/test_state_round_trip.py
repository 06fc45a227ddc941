"""Random states, nested at random, through files and back: by load(path), and into a blank template."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.errors import InvalidStateError

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.uint4,
    torch.bits16,
]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of random bits whose memory is arranged at random."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    steps = draw(st.lists(st.integers(1, 3), min_size=len(shape), max_size=len(shape)))
    order = draw(st.permutations(range(len(shape))))
    room = [size * step for size, step in zip(shape, steps, strict=True)]
    count = math.prod(room) * dtype.itemsize
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype).view(room)
    tensor = tensor[tuple(slice(None, None, step) for step in steps)].permute(tuple(order))
    return torch.nn.Parameter(tensor) if dtype.is_floating_point and draw(st.booleans()) else tensor


arrays = st.builds(
    lambda kind, size: np.arange(size).astype(kind), st.sampled_from(["f4", "i8", "c16", "?"]), st.integers(0, 5)
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=5),
    st.binary(max_size=5),
    st.frozensets(st.integers(-3, 3), max_size=3),
    st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([2, 3]), np.float32(1.5)]),
)
keys = st.one_of(
    st.text(st.sampled_from("ab.0é"), max_size=3),
    st.integers(-2, 11),
    st.sampled_from([None, True, 2.5, (1, "a"), b"k"]),
)
leaves = st.one_of(tensors(), scalars, arrays)
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=12,
)
states = st.dictionaries(keys, nested, max_size=4)


def described(value: Any) -> Any:
    """``value`` in a form that is equal exactly for the same types, order, shapes and bits."""
    if isinstance(value, torch.Tensor):
        words = value.detach().view(WORDS[value.dtype.itemsize])
        return "tensor", value.dtype, tuple(value.shape), value.requires_grad, words.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return "dict", [(type(key), repr(key), described(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value), [described(entry) for entry in value]
    if isinstance(value, frozenset):
        return "frozenset", sorted(value)
    return type(value), repr(value)


@contextlib.contextmanager
def keys_that_read_the_same_are_left_out() -> Iterator[None]:
    """Reject the example where two keys read the same, as those of {"a.0": ...} and {"a": [...]}."""
    try:
        yield
    except InvalidStateError as error:
        assume("; rename one" not in error.message)
        raise


def save(state: dict[Any, Any], path: str) -> None:
    with keys_that_read_the_same_are_left_out():
        holdfast.save(state, path)


def is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple)) and not isinstance(value, torch.Size)


def leaves_of(value: Any) -> Iterator[Any]:
    """What is in no container of its own, in order."""
    if not is_container(value):
        yield value
        return
    for entry in value.values() if isinstance(value, dict) else value:
        yield from leaves_of(entry)


def blank(value: Any) -> Any:
    """A target for ``value``: the same containers, whose leaves hold none of it."""
    if isinstance(value, dict):
        return {key: blank(entry) for key, entry in value.items()}
    if is_container(value):
        return type(value)(map(blank, value))
    if isinstance(value, torch.Tensor):
        raw = torch.zeros(value.numel() * value.dtype.itemsize, dtype=torch.uint8)
        return raw.view(value.dtype).view(value.shape).requires_grad_(value.requires_grad)
    return np.zeros_like(value) if isinstance(value, np.ndarray) else "nothing yet"


@given(states)
@settings(max_examples=80)
def test_what_is_saved_is_loaded(state: dict[Any, Any]) -> None:
    with tempfile.TemporaryDirectory() as path:
        save(state, path)
        assert described(holdfast.load(path)) == described(state)
        assert described(holdfast.load(path, options=holdfast.LoadOptions(verify=False))) == described(state)


@given(states)
@settings(max_examples=60)
def test_a_blank_template_is_filled(state: dict[Any, Any]) -> None:
    template = blank(state)
    targets = [id(leaf) for leaf in leaves_of(template) if isinstance(leaf, torch.Tensor)]
    with tempfile.TemporaryDirectory() as path:
        save(state, path)
        report = holdfast.load(template, path)
    assert described(template) == described(state)
    assert report.differences == report.unexpected == ()
    assert [id(leaf) for leaf in leaves_of(template) if isinstance(leaf, torch.Tensor)] == targets


def emptied(data: st.DataObject, value: Any) -> Any:
    """``value``, a state, without what is in some of its containers, at any depth of its dicts; leaves are blank."""
    if is_container(value) and data.draw(st.booleans()):
        return type(value)()
    if isinstance(value, dict):
        return {key: emptied(data, entry) for key, entry in value.items()}
    return blank(value)


@given(states, st.data())
@settings(max_examples=80)
def test_empty_containers_are_filled(state: dict[Any, Any], data: st.DataObject) -> None:
    target = emptied(data, state)
    with tempfile.TemporaryDirectory() as path:
        save(state, path)
        with keys_that_read_the_same_are_left_out():  # an empty container has a key of its own
            report = holdfast.load(target, path)
    assert described(target) == described(state)
    assert report.differences == report.unexpected == ()
    assert set(report.made) <= set(report.loaded)


@given(states, st.data())
@settings(max_examples=40)
def test_every_part_of_every_tensor_can_be_read(state: dict[Any, Any], data: st.DataObject) -> None:
    """Keys are in the order of the leaves."""
    tensors_in_order = [leaf for leaf in leaves_of(state) if isinstance(leaf, (torch.Tensor, np.ndarray))]
    with tempfile.TemporaryDirectory() as path:
        save(state, path)
        with holdfast.open(path, verify=data.draw(st.booleans())) as checkpoint:
            stored = [found for found in checkpoint.values() if isinstance(found, holdfast.StoredTensor)]
            for found, leaf in zip(stored, tensors_in_order, strict=True):
                if not isinstance(leaf, torch.Tensor):
                    continue
                bounds = st.integers(-5, 5) | st.none()
                index = tuple(slice(data.draw(bounds), data.draw(bounds)) for _ in leaf.shape)
                assert described(found[index]) == described(leaf.detach()[index])
