"""Targets whose tensors share memory at random, against checkpoints that agree with that or not.

What a load must do is what copies one after the other do to numpy memory: the last in order is whole. It is an error
exactly if some of what was copied is not there in the end.
"""

from __future__ import annotations

import tempfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast

BYTES = 256
DTYPES = [torch.uint8, torch.int16, torch.float32]


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]:
    """A dtype, an offset, sizes and strides that stay within the memory, and no element of which meets another."""
    dtype = draw(st.sampled_from(DTYPES))
    room = BYTES // dtype.itemsize
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    strides, reach = [], 1
    for size in sizes:
        strides.append(reach * draw(st.integers(1, 2)))
        reach = strides[-1] * size
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    offset = draw(st.integers(0, room - 1 - last))
    order = draw(st.permutations(range(len(sizes))))
    return dtype, offset, tuple(sizes[place] for place in order), tuple(strides[place] for place in order)


def seen(memory: torch.Tensor, view: tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]) -> torch.Tensor:
    dtype, offset, sizes, strides = view
    return memory.view(dtype).as_strided(sizes, strides, offset)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


@pytest.mark.parametrize("form", ["native", "torch"])
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_any_targets_with_common_memory(form: str, data: st.DataObject) -> None:
    kinds = data.draw(st.lists(views(), min_size=1, max_size=3))
    chosen = [data.draw(st.sampled_from(kinds)) for _ in range(data.draw(st.integers(2, 5)))]
    truths = [torch.from_numpy(np.random.default_rng(seed).integers(0, 256, BYTES, np.uint8)) for seed in range(2)]
    origin = [data.draw(st.sampled_from([0, 0, 0, 1])) for _ in chosen]
    keys = [f"k{number}" for number in range(len(chosen))]
    stored = {key: seen(truths[which], view).clone() for key, view, which in zip(keys, chosen, origin, strict=True)}
    after = torch.zeros(BYTES, dtype=torch.uint8)
    order = data.draw(st.permutations(range(len(keys))))
    for number in order:
        seen(after, chosen[number]).view(chosen[number][0]).copy_(stored[keys[number]])
    lost = {key for key, view in zip(keys, chosen, strict=True) if bits(seen(after, view)) != bits(stored[key])}

    with tempfile.TemporaryDirectory() as path:
        if form == "native":
            holdfast.save(stored, path)
        else:
            holdfast.save(stored, storage_writer=holdfast.FileSystemWriter(path))

        memory = torch.zeros(BYTES, dtype=torch.uint8)
        target = {keys[number]: seen(memory, chosen[number]) for number in order}
        report = holdfast.load(target, path, strict=False)
        assert bits(memory) == bits(after)
        assert {each.key for each in report.differences} == lost
        assert {each.kind for each in report.differences} <= {"tied"}

        memory.zero_()
        if not lost:
            holdfast.load(target, path)
            assert bits(memory) == bits(after)
            return
        with pytest.raises(holdfast.MismatchError, match="other data than"):
            holdfast.load(target, path)
