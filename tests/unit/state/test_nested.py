"""Nested states as keys and leaves, and back; containers that are in several places."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import holdfast
from holdfast._state.nested import TupleIndex, TypedKey, check_containers, flatten, is_one_value, set_element, unflatten
from holdfast.errors import InvalidStateError
from holdfast.metadata import BytesStorageMetadata, Metadata, path_key, restorable_paths

# --- keys and paths ---------------------------------------------------------------------------------------------------


ONE = torch.ones(1)


class Pair(NamedTuple):
    left: Any
    right: Any


def keys_of(state: dict[Any, Any]) -> list[str]:
    leaves, paths = flatten(state)
    assert list(leaves) == list(paths)
    return list(leaves)


@pytest.mark.parametrize(
    ("state", "keys"),
    [
        ({}, []),
        ({"a": ONE, "b": {"c": ONE, "d": 1}}, ["a", "b.c", "b.d"]),
        ({"l": [ONE, 2]}, ["l.0", "l.1"]),
        ({"l": [1, 2]}, ["l"]),
        ({"l": [{"a": 1}]}, ["l.0.a"]),
        ({"l": [[1], [2]]}, ["l"]),
        ({"l": [[1], [ONE]]}, ["l.0", "l.1.0"]),
        ({"t": (1, {"a": 2})}, ["t"]),
        ({"t": (1, {"a": ONE})}, ["t.0", "t.1.a"]),
        ({"t": Pair(1, ONE)}, ["t.0", "t.1"]),
        ({"t": [(1, {"a": 2})]}, ["t"]),
        ({"n": [np.ones(1), 1]}, ["n.0", "n.1"]),
        ({3: {None: ONE, (1, 2): 4}}, ["3.None", "3.(1, 2)"]),
        ({"e": {}, "f": [], "g": (), "h": [{}]}, ["e", "f", "g", "h.0"]),
        ({"": {"": ONE}}, ["."]),
        (OrderedDict(b=1, a=OrderedDict(c=2)), ["b", "a.c"]),
    ],
    ids=repr,
)
def test_keys_and_the_way_back(state: dict[Any, Any], keys: list[str]) -> None:
    assert keys_of(state) == keys
    assert unflatten(*flatten(state)) == state


def test_path_elements_equal_those_of_torch() -> None:
    _, paths = flatten({"a": {3: [ONE], "t": (ONE,)}})
    assert paths == {"a.3.0": ("a", "3", 0), "a.t.0": ("a", "t", 0)}
    element = paths["a.3.0"][1]
    assert isinstance(element, TypedKey)
    assert element.value == 3
    assert repr(element) == "3"
    assert isinstance(paths["a.t.0"][2], TupleIndex)
    assert not isinstance(paths["a.3.0"][2], TupleIndex)


def test_typed_paths_survive_pickling() -> None:
    path = (TypedKey(3), "x", TupleIndex(1), 2)
    again = pickle.loads(pickle.dumps(path))
    assert again == path
    assert again[0].value == 3
    assert [type(element) for element in again] == [TypedKey, str, TupleIndex, int]
    assert path_key(path) == "3.x.1.2"


def test_equal_keys_of_other_types_do_not_collide_when_they_read_differently() -> None:
    # 1 and True are one dict key; 1 and 1.5 are two, and read as two.
    assert keys_of({1: ONE, 1.5: ONE}) == ["1", "1.5"]


@pytest.mark.parametrize(
    ("state", "key"),
    [
        ({0: 1, "0": 2}, "0"),
        ({"a.b": 1, "a": {"b": 2}}, "a.b"),
        ({"a": [ONE], "a.0": 1}, "a.0"),
        ({None: 1, "None": 2}, "None"),
    ],
)
def test_collisions(state: dict[Any, Any], key: str) -> None:
    with pytest.raises(InvalidStateError, match="rename one") as caught:
        flatten(state)
    assert caught.value.key == key


def test_an_unflattened_key_without_a_path_stays_at_the_top() -> None:
    assert unflatten({"a.b": 1, "c": 2}, {}) == {"a.b": 1, "c": 2}


def test_positions_that_are_missing_become_none() -> None:
    assert unflatten({"l.2": 5}, {"l.2": ("l", 2)}) == {"l": [None, None, 5]}
    assert unflatten({"t.1": 5}, {"t.1": ("t", TupleIndex(1))}) == {"t": (None, 5)}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, [2, (3,)]], True),
        ([], True),
        ((), True),
        (({"a": [1]},), True),
        ([{"a": 1}], False),
        ([({"a": 1},)], True),
        ([ONE], False),
        ((1, [ONE]), False),
        (({"a": ONE},), False),
        ([np.ones(1)], False),
        ((torch.nn.Linear(1, 1),), False),
        (1, True),
    ],
    ids=repr,
)
def test_what_is_kept_as_one_value(value: Any, expected: bool) -> None:
    assert is_one_value(value) is expected


def test_what_contains_itself_is_never_one_value() -> None:
    loop: list[Any] = []
    loop.extend([loop, loop, loop])
    assert not is_one_value(loop)
    with pytest.raises(InvalidStateError, match="contain itself"):
        flatten({"x": loop})


CASES: list[tuple[Callable[[], Any], tuple[Any, ...], Any]] = [
    (lambda: {"a": 1}, ("a",), {"a": 9}),
    (lambda: {"a": {"b": 1}}, ("a", "b"), {"a": {"b": 9}}),
    (lambda: {"a": [1, 2]}, ("a", 1), {"a": [1, 9]}),
    (lambda: {"a": (1, 2)}, ("a", TupleIndex(0)), {"a": (9, 2)}),
    (lambda: {"a": Pair(1, [2])}, ("a", TupleIndex(1), 0), {"a": Pair(1, [9])}),
    (lambda: {3: 1}, (TypedKey(3),), {3: 9}),
    (lambda: {}, ("new",), {"new": 9}),
    (lambda: {}, ("new", "deep"), {"new": {"deep": 9}}),
]


@pytest.mark.parametrize(
    ("build", "path", "expected"), CASES, ids=lambda value: "build" if callable(value) else repr(value)
)
def test_elements_are_set_in_place(build: Callable[[], Any], path: tuple[Any, ...], expected: Any) -> None:
    container = build()
    inner = container.get("a")
    assert set_element(container, path, 9) is container
    assert container == expected
    if isinstance(inner, (dict, list)):
        assert container["a"] is inner
    if isinstance(inner, Pair):
        assert isinstance(container["a"], Pair)


# --- containers in several places, and in themselves: counted once each, refused where they would not end -------------


MAKERS: dict[str, Callable[[Any], Any]] = {
    "lists": lambda each: [each, each],
    "tuples": lambda each: (each, each),
    "dicts": lambda each: {"l": each, "r": each},
    "other mappings": lambda each: UserDict({"l": each, "r": each}),
    "mixed": lambda each: [{"a": (each,)}, [each]],
}


def shared(levels: int, make: Callable[[Any], Any], leaf: Any) -> Any:
    for _ in range(levels):
        leaf = make(leaf)
    return leaf


@pytest.mark.parametrize("leaf", [1, torch.ones(1), "text"], ids=["number", "tensor", "text"])
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_containers_without_end_are_refused_before_anything_is_written(name: str, leaf: Any, tmp_path: Path) -> None:
    state = {"a": 1, "x": shared(60, MAKERS[name], [leaf])}
    with pytest.raises(
        InvalidStateError, match=r"has the same containers in so many places that .* keep each"
    ) as caught:
        holdfast.save(state, tmp_path / "a")
    assert str(caught.value.key).startswith("x.")
    assert not (tmp_path / "a").exists()


def test_metadata_of_the_user_is_looked_at_too(tmp_path: Path) -> None:
    with pytest.raises(InvalidStateError, match="same containers"):
        holdfast.save({"s": 1}, tmp_path / "a", user_metadata={"m": shared(60, MAKERS["lists"], [1])})
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["lists", "tuples", "dicts"])
def test_containers_in_some_places_are_stored_in_each(name: str, tmp_path: Path) -> None:
    state = {"x": shared(5, MAKERS[name], [torch.ones(1)])}
    holdfast.save(state, tmp_path / "a")
    assert holdfast.load(tmp_path / "a") == state


def test_a_text_in_many_places_counts_as_often() -> None:
    check_containers({"x": ["x" * 100_000] * 100})
    check_containers({"x": [str(number) * 1000 for number in range(2000)]})
    with pytest.raises(InvalidStateError, match="same containers"):
        check_containers({"x": [["x" * 100_000] * 1000] * 100})


def test_large_honest_states_are_fine() -> None:
    config = {"betas": (0.9, 0.99), "names": ["a"] * 100}
    check_containers({"groups": [config] * 5000, "numbers": list(range(1 << 21)), "sets": {frozenset({1}), (1, 2)}})


def test_what_contains_itself_is_named() -> None:
    loop: dict[str, Any] = {"a": 1}
    loop["b"] = [0, (loop,)]
    with pytest.raises(InvalidStateError, match=r"'x\.b\.1\.0' leads back to a container that it is in") as caught:
        check_containers({"x": loop})
    assert caught.value.key == "x.b.1.0"


def test_what_a_stateful_object_gives_is_looked_at_too(tmp_path: Path) -> None:
    class Sharing:
        def state_dict(self) -> dict[str, Any]:
            return {"inner": shared(60, MAKERS["lists"], [1])}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(InvalidStateError, match="same containers") as caught:
        holdfast.save({"object": Sharing()}, tmp_path / "a")
    assert str(caught.value.key).startswith("object.inner.0")


def test_braces_in_keys_are_only_braces() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidStateError, match=r"'\{0\}\.0'"):
        check_containers({"{0}": loop})


# --- the nesting that metadata tells ----------------------------------------------------------------------------------


def nested_by(paths: dict[str, Any]) -> dict[Any, Any]:
    metadata = Metadata({key: BytesStorageMetadata() for key in paths}, planner_data=paths)
    return unflatten({key: key for key in paths}, restorable_paths(metadata))


def test_nesting_is_restored() -> None:
    assert nested_by({"a.0.x": ("a", 0, "x"), "a.1": ("a", 1), "b": ("b",)}) == {
        "a": [{"x": "a.0.x"}, "a.1"],
        "b": "b",
    }


def test_what_does_not_fit_together_stays_at_the_top() -> None:
    assert nested_by({"a.0": ("a", 0), "a.x": ("a", "x")}) == {"a": ["a.0"], "a.x": "a.x"}
    assert nested_by({"a": ("a",), "a.x": ("a", "x")}) == {"a": "a", "a.x": "a.x"}
    assert nested_by({"a.x": ("a", "x"), "a": ("a",)}) == {"a.x": "a.x", "a": "a"}
    assert nested_by({"a": None, "b": 7, "c": ()}) == {"a": "a", "b": "b", "c": "c"}


def test_without_paths_everything_is_at_the_top() -> None:
    metadata = Metadata({"a.b": BytesStorageMetadata()}, planner_data=None)
    assert restorable_paths(metadata) == {}
