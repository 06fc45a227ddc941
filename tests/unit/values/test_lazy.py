"""LazyList: a list to everyone, columns to this library until somebody touches an element."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from holdfast._values.lazy import LazyList


@dataclass
class Squares:
    """Columns whose item is the square, and which count how often they were asked."""

    count: int
    asked: int = 0

    def __len__(self) -> int:
        return self.count

    def item(self, row: int) -> int:
        self.asked += 1
        return row * row


def test_its_length_costs_nothing() -> None:
    columns = Squares(5)
    lazy = LazyList(columns)
    assert len(lazy) == 5
    assert bool(lazy)
    assert not LazyList(Squares(0))
    assert columns.asked == 0
    assert lazy.columns is columns


READS: dict[str, Callable[[LazyList[int]], Any]] = {
    "iteration": list,
    "index": lambda lazy: lazy[3],
    "negative index": lambda lazy: lazy[-1],
    "slice": lambda lazy: lazy[1:3],
    "membership": lambda lazy: 9 in lazy,
    "position": lambda lazy: lazy.index(9),
    "count": lambda lazy: lazy.count(4),
    "reversed": lambda lazy: list(reversed(lazy)),
    "addition": lambda lazy: lazy + [7],  # noqa: RUF005 - the operator is what is tested
    "addition to a list": lambda lazy: [7] + lazy,  # noqa: RUF005 - the operator is what is tested
    "text": repr,
    "equality": lambda lazy: (lazy == [0, 1, 4, 9, 16], lazy != [1], lazy == LazyList(Squares(5))),
    "not a list": lambda lazy: lazy == 5,
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "set": lambda items: items.__setitem__(1, 7),
    "set a slice": lambda items: items.__setitem__(slice(1, 3), [7]),
    "delete": lambda items: items.__delitem__(0),
    "delete a slice": lambda items: items.__delitem__(slice(None, None, 2)),
    "insert": lambda items: items.insert(2, 7),
    "append": lambda items: items.append(7),
    "extend": lambda items: items.extend([7, 8]),
    "pop": lambda items: items.pop(),
    "remove": lambda items: items.remove(4),
    "reverse": lambda items: items.reverse(),
    "clear": lambda items: items.clear(),
}


@pytest.mark.parametrize("name", sorted(READS))
def test_it_reads_like_a_list(name: str) -> None:
    columns = Squares(5)
    lazy = LazyList(columns)
    assert READS[name](lazy) == READS[name]([0, 1, 4, 9, 16])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(set(READS) - {"not a list", "text"}))
def test_a_touch_makes_the_objects_the_truth_once(name: str) -> None:
    columns = Squares(5)
    lazy = LazyList(columns)
    READS[name](lazy)
    assert lazy.columns is None
    assert columns.asked == 5
    READS[name](lazy)
    assert columns.asked == 5
    assert len(lazy) == 5


@pytest.mark.parametrize("name", sorted(WRITES))
def test_it_changes_like_a_list(name: str) -> None:
    lazy, plain = LazyList(Squares(5)), [0, 1, 4, 9, 16]
    WRITES[name](lazy)
    WRITES[name](plain)
    assert lazy.columns is None
    assert list(lazy) == plain
    assert len(lazy) == len(plain)


def test_an_object_stays_the_same_object() -> None:
    class Boxes:
        def __len__(self) -> int:
            return 1

        def item(self, row: int) -> dict[str, int]:
            return {"row": row}

    lazy = LazyList(Boxes())
    lazy[0]["changed"] = 1
    assert lazy[0] == {"row": 0, "changed": 1}


def test_it_is_not_hashable_like_a_list() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(LazyList(Squares(1)))


@pytest.mark.parametrize("touched", [False, True])
@pytest.mark.parametrize("through", [lambda lazy: pickle.loads(pickle.dumps(lazy)), copy.copy, copy.deepcopy])
def test_it_travels_in_the_form_it_has(touched: bool, through: Callable[[LazyList[int]], LazyList[int]]) -> None:
    lazy = LazyList(Squares(4))
    if touched:
        lazy[2] = 7
    other = through(lazy)
    assert (other.columns is None) == touched
    assert list(other) == ([0, 1, 7, 9] if touched else [0, 1, 4, 9])
