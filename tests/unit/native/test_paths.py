"""Paths of keys, as a manifest has them: those that bring a nesting back, and all that do not."""

from __future__ import annotations

from collections import OrderedDict, deque

import pytest

from holdfast._native.paths import (
    MAX_EMPTY_POSITIONS,
    check_key,
    check_paths,
    split_planner_data,
    stored_containers,
)
from holdfast._native.paths import StoredElement as PathElement
from holdfast._values.dtypes import MAX_KEY_BYTES, MAX_PATH_DEPTH
from holdfast.errors import CorruptError, InvalidStateError

NAN = {"float": "nan"}


def fault(*paths: list[PathElement] | None) -> str | None:
    found = check_paths([(f"key{number}", path) for number, path in enumerate(paths)])
    return None if found is None else found.problem


def key(json: object) -> PathElement:
    return {"key": json}


def at(index: object) -> PathElement:
    return {"list": index}


@pytest.mark.parametrize(
    "paths",
    [
        [],
        [None, None],
        [["a", "b"], ["a", "c"], ["b"]],
        [["a", at(0)], ["a", at(1), {"tuple": 0}], ["a", at(1), {"tuple": 1}]],
        [["a", key(1)], ["a", "1"], ["a", key(None)], ["a", key({"tuple": [1, "1"]})]],
        [["a", key(1), "x"], ["a", key(1), "y"]],
        [["a", key(NAN), "x"], ["a", key(NAN), "y"]],
        [["a", key({"int": "0x20000000000000"})], ["a", key(2**53 - 1)]],
        [["a", at(7)]],
        [["a", at(MAX_EMPTY_POSITIONS)]],
        [["x"] * MAX_PATH_DEPTH],
        [[""]],
    ],
    ids=range(12),
)
def test_good_trees_pass(paths: list[list[PathElement] | None]) -> None:
    assert fault(*paths) is None


@pytest.mark.parametrize(
    "paths",
    [
        [[]],
        [["key0"]],
        [["x"] * (MAX_PATH_DEPTH + 1)],
        [["a"], ["a"]],
        [["a", "b"], ["a", "b"]],
        [["a"], ["a", "b"]],
        [["a", "b"], ["a"]],
        [["a", "b", "c", "d"], ["a", "b"]],
        [None, ["key0"]],
        [["key1"], None],
        [None, ["key0", at(0)]],
        [["a", at(0)], ["a", "0"]],
        [["a", at(0)], ["a", {"tuple": 1}]],
        [["a", key(0)], ["a", at(0)]],
        [[at(0)]],
        [[{"tuple": 0}]],
        [["a", at(0)], ["a", at(0)]],
        [["a", at(-1)]],
        [["a", at(True)]],
        [["a", at(0.0)]],
        [["a", at("0")]],
        [["a", at(None)]],
        [["a", at(2**62)]],
        [["a", at(10**4000)]],
        [["a", at(MAX_EMPTY_POSITIONS + 1)]],
        [["a", at(MAX_EMPTY_POSITIONS)], ["b", {"tuple": 1}]],
        [["a", key("b")]],
        [["a", key([])]],
        [["a", key({"dict": []})]],
        [["a", key({"tuple": [[]]})]],
        [["a", key({"no type": 1})]],
        [["a", key({"int": "0x1"})]],
        [["a", key(2**53)]],
        [["a", key(1)], ["a", key(True)]],
        [["a", key(1), "x"], ["a", key(1.0), "y"]],
        [["a", key(0.0), "x"], ["a", key(-0.0), "y"]],
        [["a", "b"], ["a", key({"numpy": ["str", "b"]})]],
        [["a", key({"tuple": [1]}), "x"], ["a", key({"torch.Size": [1]}), "y"]],
        [["a", key(NAN)], ["a", key(NAN)]],
        [["a", {}]],
        [["a", {"list": 0, "tuple": 0}]],
        [["a", {"dict": "x"}]],
        [["a", {"attribute": "x"}]],
    ],
    ids=range(43),
)
def test_what_makes_no_tree_is_refused(paths: list[list[PathElement] | None]) -> None:
    assert fault(*paths) is not None


def test_the_leaf_at_fault_is_named() -> None:
    found = check_paths([("a", None), ("b", ["c", "d"]), ("e", ["c"]), ("f", ["c", "d"])])
    assert found is not None
    assert found.key == "e"


def test_many_leaves_of_one_container_and_of_many_take_no_time() -> None:
    # Anything quadratic in either direction would take minutes.
    one: list[tuple[str, list[PathElement]]] = [(str(i), ["a", {"list": i}]) for i in range(100_000)]
    many: list[tuple[str, list[PathElement]]] = [(str(i), [str(i), *["x"] * 200]) for i in range(1000)]
    assert check_paths(one) is None
    assert check_paths(many) is None
    assert check_paths([*one, ("last", ["a", {"list": 0}])]) is not None


def test_keys_of_one_hash_are_given_up() -> None:
    prime = (1 << 61) - 1
    paths = [["a", key({"int": hex(prime * number)})] for number in range(1 << 10, 12_000)]
    assert "slow" in str(fault(*paths))


def test_many_honest_keys_are_fine() -> None:
    assert fault(*(["a", key(number), name] for number in range(20_000) for name in ("x", "y"))) is None


@pytest.mark.parametrize(
    "paths",
    [
        [["a", key(1)], ["a", key(True)]],
        [["a", key(1), "x"], ["a", key({"tuple": []})], ["a", key(1.0), "y"]],
        [["a", "b"], ["a", key({"numpy": ["str", "b"]})]],
        [["a", key({"numpy": ["str", "b"]}), "x"], ["a", "b", "y"]],
    ],
    ids=range(4),
)
def test_equal_keys_of_one_dict_are_a_fault(paths: list[list[PathElement]]) -> None:
    assert "two equal dict keys" in str(fault(*paths))
    assert fault(*([f"b{number}", *path[1:]] for number, path in enumerate(paths))) is None


def test_a_key_of_too_many_digits_is_a_fault() -> None:
    assert "damaged" in str(fault(["a", key({"int": hex(10**5000)})]))


@pytest.mark.parametrize(
    "containers",
    ["x", {"a": OrderedDict()}, {(-1,): deque()}, {(1.0,): deque()}, {("a",): OrderedDict(b=1)}, {("a",): {}}],
    ids=str,
)
def test_containers_that_no_writer_has_put_there_are_damage(containers: object) -> None:
    with pytest.raises(CorruptError, match=r"'holdfast\.containers' in the metadata is damaged"):
        stored_containers({"holdfast.containers": containers})
    assert stored_containers({"holdfast.containers": {("a", 1): deque()}}) == {("a", 1): deque()}


def test_metadata_that_only_looks_like_versions_is_the_users() -> None:
    kept = {"holdfast.versions": {"model": {"": 2}}}
    assert split_planner_data(kept, {}) == (kept, {}, {})


@pytest.mark.parametrize("letter", ["x", "é"])
def test_keys_are_as_long_as_their_bytes(letter: str) -> None:
    most = MAX_KEY_BYTES // len(letter.encode())
    check_key(letter * most)
    with pytest.raises(InvalidStateError, match="more than 65536 bytes") as caught:
        check_key(letter * (most + 1))
    assert len(caught.value.message) < 500
