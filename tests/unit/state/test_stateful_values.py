"""Stateful objects exchanged for their state, and given it back."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from holdfast._state.stateful_values import expose, hand_back
from holdfast.errors import InvalidStateError


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        return {"content": self.content}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.content = state_dict["content"]


class Pair(NamedTuple):
    left: Any
    right: Any


def test_containers_are_copied_and_tensors_are_not() -> None:
    tensor = torch.ones(1)
    state = {"a": {"t": tensor}, "l": [tensor, 1], "p": (tensor,), "values": [1, 2], "n": Pair(tensor, Box(2))}
    exposed = expose(state)
    assert exposed["a"] is not state["a"]
    assert exposed["l"] is not state["l"]
    assert exposed["a"]["t"] is exposed["l"][0] is exposed["p"][0] is tensor
    assert exposed["values"] is state["values"]
    assert exposed["n"] == Pair(tensor, {"content": 2})
    assert isinstance(exposed["n"], Pair)


def test_stateful_in_stateful() -> None:
    assert expose({"x": Box({"y": [Box(1)]})}) == {"x": {"content": {"y": [{"content": 1}]}}}


def test_other_mappings_become_dicts() -> None:
    exposed = expose(MappingProxyType({"a": MappingProxyType({"b": 1})}))
    assert exposed == {"a": {"b": 1}}
    assert type(exposed["a"]) is dict


@pytest.mark.parametrize("state", [[1], None, torch.ones(1), Box(1), "text"], ids=lambda state: type(state).__name__)
def test_a_state_is_a_mapping(state: Any) -> None:
    with pytest.raises(InvalidStateError, match="a state is a dict of names to values"):
        expose(state)


def test_what_contains_itself_is_named() -> None:
    loop: dict[str, Any] = {}
    loop["again"] = {"and": loop, "more": loop}
    with pytest.raises(InvalidStateError, match="contain itself") as caught:
        expose({"x": loop})
    assert str(caught.value.key).startswith("x.again.and")


def test_values_go_back_into_the_containers_they_came_from() -> None:
    box, inner = Box(1), {"x": 1}
    state: dict[str, Any] = {"box": box, "list": [1, inner], "tuple": (1, Box(2)), "pair": Pair(1, inner), "none": None}
    objects = dict(state)
    hand_back(
        state,
        {
            "box": {"content": 5},
            "list": [6, {"x": 7, "new": 8}],
            "tuple": (9, {"content": 10}),
            "pair": Pair(11, {"x": 12}),
            "none": 13,
            "added": 14,
        },
    )
    assert state["box"] is box
    assert box.content == 5
    assert state["list"] is objects["list"]
    assert state["list"] == [6, {"x": 12, "new": 8}]
    assert state["tuple"][0] == 9
    assert state["tuple"][1] is objects["tuple"][1]
    assert state["tuple"][1].content == 10
    assert state["pair"] == Pair(11, inner)
    assert state["pair"].right is inner
    assert (state["none"], state["added"]) == (13, 14)


def test_read_only_mappings_are_replaced() -> None:
    state: dict[str, Any] = {"frozen": MappingProxyType({"a": 1})}
    hand_back(state, {"frozen": {"a": 2}})
    assert state["frozen"] == {"a": 2}


def test_lists_of_another_length_are_replaced() -> None:
    state: dict[str, Any] = {"list": [1, 2]}
    hand_back(state, {"list": [3]})
    assert state["list"] == [3]


def test_modules_with_meta_tensors_get_the_loaded_ones() -> None:
    with torch.device("meta"):
        module = torch.nn.Linear(2, 3)
    weight = torch.ones(3, 2)
    hand_back({"m": module}, {"m": {"weight": weight, "bias": torch.zeros(3)}})
    assert module.weight.data_ptr() == weight.data_ptr()
    assert isinstance(module.weight, torch.nn.Parameter)
    assert not module.bias.is_meta
