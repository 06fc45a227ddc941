"""Which tensors are stored as several, and as which."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from holdfast._state.tensors import inner_parts, is_composed
from holdfast.errors import InvalidStateError

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested tensors")


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
