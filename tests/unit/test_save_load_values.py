"""Values that are not tensors, and the structure that holds them: back as they were, order included."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import holdfast

Same = Callable[..., None]


class Own(OrderedDict[str, Any]):
    pass


VALUES: dict[str, Any] = {
    "none": None,
    "true": True,
    "int": -7,
    "big int": 2**200 + 1,
    "negative big int": -(2**64),
    "edge of exact integers": [2**53 - 1, 2**53, -(2**53), 2**63, 2**64],
    "float": 0.1,
    "negative zero": -0.0,
    "tiny": 5e-324,
    "nan": math.nan,
    "infinities": [math.inf, -math.inf],
    "empty text": "",
    "text": 'Zürich ☃ \x00 \U0001f40d "quoted" \\',
    "bytes": b"\x00\xff",
    "empty bytes": b"",
    "complex": complex(1, -0.0),
    "complex nan": complex(0.0, math.inf),
    "list": [1, "two", 3.0, None],
    "nested lists": [[1, [2, [3]]], []],
    "tuple": (1, ("two", (3.0,)), ()),
    "tuple with a dict": ({"a": (1, {2: 3})}, [4]),
    "set": {1, "a", (2, 3)},
    "frozenset": frozenset({frozenset({1}), 2}),
    "empty set": set(),
    "dtype": torch.float8_e4m3fn,
    "device": torch.device("cuda", 3),
    "size": torch.Size([2, 0, 3]),
    "numpy scalars": [np.float32(0.1), np.int8(-3), np.bool_(True), np.uint64(2**64 - 1), np.str_("x")],
    "numpy complex": np.complex64(1 + 2j),
    "large list": list(range(20_000)),
    "large bytes": bytes(range(256)) * 600,
    "large text": "é" * 70_000,
}


@pytest.mark.parametrize("name", sorted(VALUES))
def test_every_value_comes_back_alone(name: str, path: str, same: Same) -> None:
    holdfast.save({"value": VALUES[name]}, path)
    same(holdfast.load(path), {"value": VALUES[name]})


@pytest.mark.parametrize("name", sorted(VALUES))
def test_every_value_replaces_one_of_its_kind_in_a_target(name: str, path: str, same: Same) -> None:
    holdfast.save({"value": VALUES[name], "inner": [{}, VALUES[name]]}, path)
    target = {"value": copy.deepcopy(VALUES[name]), "inner": [{}, copy.deepcopy(VALUES[name])]}
    holdfast.load(target, path)
    same(target, {"value": VALUES[name], "inner": [{}, VALUES[name]]})


def test_all_values_come_back_together_with_tensors_between(path: str, same: Same) -> None:
    state: dict[str, Any] = {}
    for number, (name, value) in enumerate(VALUES.items()):
        state[name] = value
        state[f"tensor {number}"] = torch.full((number,), number)
    holdfast.save(state, path)
    same(holdfast.load(path), state)


STRUCTURES: dict[str, Any] = {
    "nothing": {},
    "empty containers": {"a": {}, "b": [], "c": (), "d": [[], {}, ()], "e": {"f": {"g": {}}}},
    "empty beside tensors": {"a": {}, "b": torch.ones(1), "c": [{}, torch.ones(2), []]},
    "order": {"z": 1, "a": torch.ones(1), "m": {"y": torch.zeros(1), "b": 2, "x": torch.ones(1)}, "c": 3},
    "order of a list": [3, torch.ones(1), "text", {"b": 1, "a": torch.ones(2)}, None],
    "int keys": {"state": {10: {"step": 1}, 2: {"step": torch.ones(1)}, 0: {}}},
    "typed keys": {None: 1, True: torch.ones(1), 2.5: 3, (1, "a"): torch.zeros(1), b"x": 4, frozenset({1}): 5},
    "keys with dots": {"a.b": {"c.d": torch.ones(1), "e": 1}, "a": {"x": 2}, ".": 3, "..": {"": 4}},
    "empty key": {"": torch.ones(1), "x": {"": 1, "y": {"": {"": 2}}}},
    "numeric text keys": {"0": torch.ones(1), "1": 2, "list": [torch.ones(1)]},
    "keys of other scripts": {"重み": {"ключ": torch.ones(1)}, "a b/c@[0:1]": torch.zeros(2), "__metadata__": 1},
    "tuples": {"pair": (torch.ones(1), {"a": (2, torch.zeros(1))}), "values": (1, (2, 3))},
    "lists in lists": {"x": [[torch.ones(1)], [[2, torch.zeros(1)], 3]]},
    "one-element tuple": {"x": (torch.ones(1),)},
    "numpy inside": {"x": [np.arange(3), {"y": (np.array(1.5), "z")}]},
}


@pytest.mark.parametrize("name", sorted(STRUCTURES))
def test_every_structure_comes_back_with_its_order(name: str, path: str, same: Same) -> None:
    state = {"state": STRUCTURES[name]}
    holdfast.save(state, path)
    same(holdfast.load(path), state)
    if isinstance(STRUCTURES[name], dict):
        holdfast.save(STRUCTURES[name], path)
        same(holdfast.load(path), STRUCTURES[name])


def test_other_mappings_come_back_as_dicts(path: str, same: Same) -> None:
    odd: defaultdict[str, int] = defaultdict(lambda: 1, b=2)
    state = {"own": Own(b=torch.ones(1), a=1), "odd": odd, "empty": Own(), "proxy": MappingProxyType({"a": 1})}
    holdfast.save(state, path)
    same(holdfast.load(path), {"own": {"b": torch.ones(1), "a": 1}, "odd": {"b": 2}, "empty": {}, "proxy": {"a": 1}})


def test_the_flat_keys_are_those_of_torch(path: str) -> None:
    state = {"model": {"w": torch.ones(1), 3: [torch.ones(1), {"x": 1}]}, "values": [1, 2], "pair": (1, torch.ones(1))}
    holdfast.save(state, path)
    with holdfast.open(path) as checkpoint:
        assert list(checkpoint) == ["model.w", "model.3.0", "model.3.1.x", "values", "pair.0", "pair.1"]


def test_values_are_set_in_the_containers_of_the_caller(path: str) -> None:
    holdfast.save({"step": 7, "nested": {"list": [1, {"x": 2}], "pair": (3, torch.ones(1)), "none": None}}, path)
    inner: dict[str, Any] = {"x": 0}
    target = {"step": 0, "nested": {"list": [0, inner], "pair": (0, torch.zeros(1)), "none": 5}}
    nested, entries, pair = target["nested"], target["nested"]["list"], target["nested"]["pair"]
    holdfast.load(target, path)
    assert target["step"] == 7
    assert target["nested"] is nested
    assert nested["list"] is entries
    assert entries[0] == 1
    assert entries[1] is inner
    assert inner == {"x": 2}
    assert nested["pair"][0] == 3
    assert nested["pair"][1] is pair[1]
    assert nested["none"] is None


def test_empty_containers_of_a_target_ask_for_nothing(path: str) -> None:
    holdfast.save({"x": torch.ones(1)}, path)
    target: dict[str, Any] = {"x": torch.zeros(1), "empty": {}, "list": []}
    report = holdfast.load(target, path)
    assert report.missing == ()
    assert target == {"x": torch.ones(1), "empty": {}, "list": []}


def test_empty_containers_of_a_target_get_all_that_is_stored_below_them(path: str, same: Same) -> None:
    weight = torch.arange(3.0)
    state = {
        "dict": {0: {"w": weight, "step": 1}, "x": [weight, {"tied": 2}]},
        "list": [torch.ones(1), {"y": (1, torch.ones(2))}],
        "tuple": (np.arange(2), "z"),
        "other": weight,
    }
    holdfast.save(state, path)
    target: dict[str, Any] = {"dict": {}, "list": [], "tuple": (), "other": torch.zeros(3)}
    containers = dict(target)
    report = holdfast.load(target, path)
    same(target, state)
    assert target["dict"] is containers["dict"]
    assert report.unexpected == report.differences == ()


def test_a_failed_load_leaves_empty_containers_empty(path: str) -> None:
    holdfast.save({"dict": {"w": torch.ones(1)}}, path)
    target: dict[str, Any] = {"dict": {}, "missing": torch.zeros(1)}
    with pytest.raises(holdfast.MismatchError):
        holdfast.load(target, path)
    assert target["dict"] == {}


def test_large_values_do_not_bloat_the_manifest(path: str) -> None:
    holdfast.save({"large": VALUES["large bytes"], "list": VALUES["large list"], "w": torch.ones(1)}, path)
    assert (Path(path) / "manifest.json").stat().st_size < 4096


class Custom:
    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


def test_pickles_need_permission_on_both_sides(path: str, assert_nothing_written: Callable[[], None]) -> None:
    state = {"plain": 1, "custom": Custom(5), "w": torch.ones(2)}
    with pytest.raises(holdfast.InvalidStateError, match=r"'custom' .*Custom.*allow_pickle=True") as refused:
        holdfast.save(state, path)
    assert refused.value.key == "custom"
    assert_nothing_written()
    holdfast.save(state, path, options=holdfast.SaveOptions(allow_pickle=True))
    opened = holdfast.open(path)
    for load in (
        lambda: holdfast.load(path),
        lambda: holdfast.load({"custom": None}, path),
        lambda: opened["custom"],
    ):
        with pytest.raises(holdfast.UnsafeError, match=r"'custom' is a pickle.*allow_pickle=True") as unsafe:
            load()
        assert unsafe.value.key == "custom"
    opened.close()
    assert holdfast.load(path, options=holdfast.LoadOptions(allow_pickle=True))["custom"] == Custom(5)
    target = {"custom": Custom(0), "plain": 0}
    holdfast.load(target, path, options=holdfast.LoadOptions(allow_pickle=True))
    assert target == {"custom": Custom(5), "plain": 1}
    with holdfast.open(path, allow_pickle=True) as checkpoint:
        assert checkpoint["custom"] == Custom(5)
    # What is no pickle can be had without permission.
    only_plain = {"plain": 0, "w": torch.zeros(2)}
    holdfast.load(only_plain, path)
    assert only_plain["plain"] == 1


def test_without_pickles_allow_pickle_changes_nothing(path: str) -> None:
    holdfast.save({"plain": [1, (2,)]}, path, options=holdfast.SaveOptions(allow_pickle=True))
    assert holdfast.load(path) == {"plain": [1, (2,)]}


def test_what_cannot_even_be_pickled_is_refused(path: str, assert_nothing_written: Callable[[], None]) -> None:
    with pytest.raises(holdfast.InvalidStateError, match="cannot be pickled"):
        holdfast.save({"w": torch.ones(1), "f": lambda: 1}, path, options=holdfast.SaveOptions(allow_pickle=True))
    assert_nothing_written()


def test_user_metadata_is_kept_beside_the_state(path: str) -> None:
    notes = {"run": "a", "tags": ("x", 1), "nested": {"when": 2.5, 3: None}}
    holdfast.save({"w": torch.ones(1)}, path, user_metadata=notes)
    with holdfast.open(path) as checkpoint:
        assert checkpoint.user_metadata == notes
        assert list(checkpoint) == ["w"]
    holdfast.save({"w": torch.ones(1)}, path)
    with holdfast.open(path) as checkpoint:
        assert checkpoint.user_metadata == {}


def test_user_metadata_that_cannot_be_stored_is_refused(path: str, assert_nothing_written: Callable[[], None]) -> None:
    with pytest.raises(holdfast.InvalidStateError, match="'user_metadata' at \\['x'\\] cannot be saved"):
        holdfast.save({"w": torch.ones(1)}, path, user_metadata={"x": object()})
    assert_nothing_written()
