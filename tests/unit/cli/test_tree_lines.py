"""The tree: nested as the state was, one line for each place in it."""

from __future__ import annotations

import pytest

from holdfast._state.nested import Path, TupleIndex, TypedKey
from holdfast.cli.leaves import Leaf
from holdfast.cli.show import tree_lines


def value_at(*path: str | int) -> Leaf:
    return Leaf(key=".".join(map(str, path)), path=path, kind="value", value=1)


def tensor_at(path: Path, nbytes: int, alias_of: str | None = None) -> Leaf:
    return Leaf(
        key=".".join(map(str, path)),
        path=path,
        kind="tensor",
        dtype="uint8",
        shape=(nbytes,),
        bytes=nbytes,
        alias_of=alias_of,
        rows=range(1),
    )


def drawn(leaves: list[Leaf], *, ascii_only: bool = False) -> list[str]:
    return [line.guide + line.label for line in tree_lines(leaves, ascii_only=ascii_only)]


def test_no_leaves_make_no_lines() -> None:
    assert drawn([]) == []


def test_branches_join_where_paths_do() -> None:
    leaves = [value_at("a", "x"), value_at("a", "y", "z"), value_at("b")]
    assert drawn(leaves) == ["├─ a", "│  ├─ x", "│  └─ y", "│     └─ z", "└─ b"]
    assert drawn(leaves, ascii_only=True) == ["|- a", "|  |- x", "|  `- y", "|     `- z", "`- b"]


def test_dots_in_a_name_do_not_nest() -> None:
    assert drawn([value_at("model", "layers.0.weight")]) == ["└─ model", "   └─ layers.0.weight"]


def test_the_order_of_the_state_is_kept() -> None:
    assert drawn([value_at("b"), value_at("a", "x"), value_at("c")]) == ["├─ b", "├─ a", "│  └─ x", "└─ c"]


@pytest.mark.parametrize(
    ("element", "label"),
    [
        ("0", "'0'"),
        ("-1", "'-1'"),
        (0, "[0]"),
        (TupleIndex(0), "(0)"),
        (TypedKey(0), "0"),
        (TypedKey((1, "a")), "(1, 'a')"),
        (TypedKey(None), "None"),
        ("[red]", "[red]"),
        ("a\nb", r"'a\nb'"),
        ("", "''"),
    ],
)
def test_labels_tell_keys_and_positions_apart(element: str | int, label: str) -> None:
    assert drawn([value_at(element)]) == [f"└─ {label}"]


def test_keys_that_only_look_alike_are_two_branches() -> None:
    leaves = [value_at("0", "a"), value_at(TypedKey(0), "b")]
    assert drawn(leaves) == ["├─ '0'", "│  └─ a", "└─ 0", "   └─ b"]


def test_containers_hold_the_bytes_of_what_is_below_and_tied_tensors_count_once() -> None:
    leaves = [
        tensor_at(("model", "a"), 10),
        tensor_at(("model", "deep", "b"), 5),
        tensor_at(("tied", "a"), 10, alias_of="model.a"),
        value_at("model", "step"),
    ]
    assert {line.label: line.bytes for line in tree_lines(leaves) if line.leaf is None} == {
        "model": 15,
        "deep": 5,
        "tied": 0,
    }


def test_the_deepest_possible_path_is_drawn() -> None:
    assert len(drawn([value_at(*(["x"] * 256))])) == 256
