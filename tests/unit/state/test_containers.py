"""Containers in several places of a state, and in themselves: counted once each, refused where they would not end."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._state.nested import check_containers
from holdfast.errors import InvalidStateError

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
