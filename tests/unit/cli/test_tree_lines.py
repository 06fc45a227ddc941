"""The tree: nested as the state was, one line for each place in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.cli.leaves import Leaf
from holdfast.cli.show import tree_lines

LEAF = torch.ones(1)


def step_into(container: Any, tmp_path: Path) -> Any:
    """The last element of the path to the one tensor in ``container``, as a checkpoint has it."""
    metadata = holdfast.save({"a": container}, tmp_path / "checkpoint")
    (path,) = metadata.paths.values()
    return path[-1]


def value_at(*path: str | int) -> Leaf:
    return Leaf(key=".".join(map(str, path)), path=path, kind="value", value=1)


def tensor_at(path: tuple[str, ...], nbytes: int, alias_of: str | None = None) -> Leaf:
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


def test_the_parts_of_a_name_with_dots_are_branches() -> None:
    leaves = [value_at("model", "layers.0.weight"), value_at("model", "layers.0.bias"), value_at("a..b"), value_at(".")]
    assert drawn(leaves) == [
        *("├─ model", "│  └─ layers", "│     └─ 0", "│        ├─ weight", "│        └─ bias", "├─ a..b", "└─ ."),
    ]


def test_a_name_with_dots_and_a_dict_of_the_same_name_are_two_branches() -> None:
    assert drawn([value_at("a.b"), value_at("a", "c")]) == ["├─ a", "│  └─ b", "└─ a", "   └─ c"]


def test_levels_below_the_depth_are_counted() -> None:
    leaves = [tensor_at(("model", "a.x"), 3), tensor_at(("model", "a.y"), 4), value_at("step")]
    lines = list(tree_lines(leaves, depth=1))
    assert [(line.label, line.hidden, line.bytes) for line in lines] == [("model", 2, 7), ("step", 0, 0)]
    assert [line.label for line in tree_lines(leaves, depth=2)] == ["model", "a", "step"]


def test_the_order_of_the_state_is_kept() -> None:
    assert drawn([value_at("b"), value_at("a", "x"), value_at("c")]) == ["├─ b", "├─ a", "│  └─ x", "└─ c"]


@pytest.mark.parametrize(
    ("container", "label"),
    [
        ({"0": LEAF}, "'0'"),
        ({"-1": LEAF}, "'-1'"),
        ([LEAF], "[0]"),
        ((LEAF,), "(0)"),
        ({0: LEAF}, "0"),
        ({(1, "a"): LEAF}, "(1, 'a')"),
        ({None: LEAF}, "None"),
        ({"[red]": LEAF}, "[red]"),
        ({"a\nb": LEAF}, r"'a\nb'"),
        ({"": LEAF}, "''"),
    ],
)
def test_labels_tell_keys_and_positions_apart(tmp_path: Path, container: Any, label: str) -> None:
    assert drawn([value_at(step_into(container, tmp_path))]) == [f"└─ {label}"]


def test_keys_that_only_look_alike_are_two_branches(tmp_path: Path) -> None:
    leaves = [value_at("0", "a"), value_at(step_into({0: LEAF}, tmp_path), "b")]
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
