"""Row-major bytes of tensors, any range at a time, from and to every arrangement in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from holdfast._io.slabs import Slab, SlabRing
from holdfast._state.tensor_bytes import MemorySource, ScatteredSource, Target, source_of
from holdfast._values.box import Box
from holdfast.errors import InvalidStateError

Bits = Callable[[torch.Tensor], bytes]


@pytest.fixture
def slab() -> Iterator[Slab]:
    ring = SlabRing(1)
    with ring.lend() as lent:
        yield lent
    ring.close()


def sources() -> dict[str, torch.Tensor]:
    cube = torch.arange(2 * 3 * 5, dtype=torch.int32).view(2, 3, 5)
    numbers = torch.view_as_complex(torch.arange(24.0).view(3, 4, 2))
    return {
        "contiguous": cube,
        "transposed": cube.permute(2, 0, 1),
        "strided": cube[:, ::2, 1::2],
        "expanded": cube[:, :1].expand(2, 4, 5),
        "bytes": torch.arange(60, dtype=torch.uint8).view(3, 4, 5).transpose(0, 2),
        "bfloat16": torch.arange(30.0).bfloat16().view(5, 6).t(),
        "float8": torch.arange(30.0).to(torch.float8_e5m2).view(5, 6).t(),
        "complex128": numbers.to(torch.complex128).t(),
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "scalar": cube[1, 2, 3],
        "one element, odd stride": torch.arange(10.0)[::3][:1],
        "empty": cube[:, :, 5:],
    }


@pytest.mark.parametrize("name", sorted(sources()))
@pytest.mark.parametrize("shift", [0, 1, 8, 13])
def test_any_range_of_elements_comes_out(name: str, shift: int, slab: Slab, bits: Bits) -> None:
    tensor = sources()[name]
    source = source_of(tensor)
    expected, size = bits(tensor), tensor.dtype.itemsize
    assert source.nbytes == len(expected)
    for start, stop in itertools.combinations(range(0, len(expected) + 1, size), 2):
        slab.view[: stop - start + 64] = b"\xee" * (stop - start + 64)
        source.copy_out(start, stop, slab, shift)
        assert bytes(slab.view[shift : shift + stop - start]) == expected[start:stop]
        assert bytes(slab.view[:shift]) == b"\xee" * shift
        assert bytes(slab.view[shift + stop - start : stop - start + 64]) == b"\xee" * (64 - shift)


def test_contiguous_memory_is_moved_as_it_is() -> None:
    assert isinstance(source_of(torch.arange(6)), MemorySource)
    assert isinstance(source_of(torch.arange(6)[2:]), MemorySource)
    assert isinstance(source_of(torch.arange(6, dtype=torch.float32, requires_grad=True)), MemorySource)
    assert isinstance(source_of(torch.arange(6).view(2, 3).t()), ScatteredSource)
    assert isinstance(source_of(torch.zeros(2, dtype=torch.complex64).conj()), ScatteredSource)


def test_the_memory_of_a_source_stays(slab: Slab) -> None:
    source = source_of(torch.full((1000,), 7, dtype=torch.uint8))
    torch.full((1000,), 9, dtype=torch.uint8)  # would take the memory, were it free
    source.copy_out(0, 1000, slab, 0)
    assert bytes(slab.view[:1000]) == b"\x07" * 1000


BOXES = [
    Box((0, 0, 0), (4, 5, 6)),
    Box((1, 0, 0), (2, 5, 6)),
    Box((2, 1, 0), (1, 3, 6)),
    Box((2, 3, 1), (1, 1, 4)),
    Box((0, 1, 2), (4, 3, 2)),
    Box((3, 4, 5), (1, 1, 1)),
    Box((0, 0, 5), (4, 5, 1)),
    Box((0, 2, 0), (4, 2, 6)),
    Box((1, 0, 1), (2, 5, 4)),
    Box((1, 2, 3), (3, 1, 2)),
]


def targets(box: Box, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    turned = torch.zeros(tuple(reversed(box.lengths)), dtype=dtype)
    room = torch.zeros([2 * length for length in box.lengths], dtype=dtype)
    return {
        "contiguous": torch.zeros(box.lengths, dtype=dtype),
        "turned": turned.permute(2, 1, 0),
        "spread": room[::2, 1::2, ::2],
    }


@pytest.mark.parametrize("box", BOXES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.uint8, torch.complex128])
def test_a_box_of_a_chunk_comes_in_piece_by_piece(box: Box, dtype: torch.dtype, slab: Slab, bits: Bits) -> None:
    chunk = torch.arange(120).to(dtype).view(4, 5, 6)
    stored, size = bits(chunk), dtype.itemsize
    for name, tensor in targets(box, dtype).items():
        target = Target(tensor, dtype=dtype, shape=(4, 5, 6), wanted=box)
        # Pieces of any length, at any place of the buffer, whether the box wants something of them or not.
        for step in (1, 7, 23, 120):
            tensor.zero_()
            for number, start in enumerate(range(0, len(stored), step * size)):
                stop = min(start + step * size, len(stored))
                place = (number * 3) % 29
                slab.view[place : place + stop - start] = stored[start:stop]
                target.copy_in(start, stop, slab, place)
            assert bits(tensor) == bits(chunk[box.slices()]), (name, step)


@pytest.mark.parametrize("box", BOXES, ids=repr)
def test_a_box_that_is_one_run_offers_its_memory(box: Box, bits: Bits) -> None:
    chunk = torch.arange(120).view(4, 5, 6)
    tensor = torch.zeros(box.lengths, dtype=torch.int64)
    target = Target(tensor, dtype=torch.int64, shape=(4, 5, 6), wanted=box)
    begin = sum(offset * stride for offset, stride in zip(box.offsets, chunk.stride(), strict=True))
    is_one_run = chunk.flatten()[begin : begin + box.volume].tolist() == chunk[box.slices()].flatten().tolist()
    assert (target.run is not None) == is_one_run
    if target.run is None:
        assert target.memory(0, 8) is None
        return
    assert target.run == (begin * 8, (begin + box.volume) * 8)
    memory = target.memory(*target.run)
    assert memory is not None
    memory[:] = bits(chunk[box.slices()])
    assert torch.equal(tensor, chunk[box.slices()])
    assert target.memory(target.run[0] - 8, target.run[1]) is None
    assert target.memory(target.run[0], target.run[1] + 8) is None


def test_a_tensor_of_one_element_with_an_odd_stride_offers_its_memory() -> None:
    tensor = torch.zeros(10)[::3][:1]
    assert tensor.is_contiguous()
    target = Target(tensor, dtype=torch.float32, shape=(1,), wanted=Box((0,), (1,)))
    memory = target.memory(0, 4)
    assert memory is not None
    memory[:] = b"\x00\x00\x80\x3f"
    assert tensor.tolist() == [1.0]


def test_bytes_are_cast_where_the_target_is_of_another_type(slab: Slab, bits: Bits) -> None:
    chunk = torch.linspace(-4, 4, 20, dtype=torch.float64).view(4, 5)
    tensor = torch.zeros(2, 5, dtype=torch.bfloat16)
    target = Target(tensor, dtype=torch.float64, shape=(4, 5), wanted=Box((1, 0), (2, 5)))
    assert target.run is None
    stored = bits(chunk)
    slab.view[3 : 3 + len(stored)] = stored
    target.copy_in(0, len(stored), slab, 3)
    assert torch.equal(tensor, chunk[1:3].bfloat16())


@pytest.mark.parametrize("view", [lambda t: t.conj(), lambda t: t.conj().imag], ids=["conjugate", "negative"])
def test_lazy_views_get_the_values_and_not_the_bits(
    view: Callable[[torch.Tensor], torch.Tensor], slab: Slab, bits: Bits
) -> None:
    tensor = view(torch.zeros(3, dtype=torch.complex64))
    values = torch.tensor([1.0, -2.0, 3.0]).to(tensor.dtype) * (1j if tensor.is_complex() else 1)
    target = Target(tensor, dtype=tensor.dtype, shape=(3,), wanted=Box((0,), (3,)))
    assert target.memory(0, tensor.nbytes) is None
    slab.view[: tensor.nbytes] = bits(values)
    target.copy_in(0, tensor.nbytes, slab, 0)
    assert torch.equal(tensor.resolve_conj().resolve_neg(), values)


def test_a_target_without_memory_is_refused() -> None:
    hollow = torch._to_functional_tensor(torch.zeros(3))
    with pytest.raises(InvalidStateError, match="without memory"):
        Target(hollow, dtype=torch.float32, shape=(3,), wanted=Box((0,), (3,)))
