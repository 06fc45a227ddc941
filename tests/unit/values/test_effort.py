"""Keys may take only so long; time is a number that the tests set."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast._values.deadline import FLOOR_S, KEY_S, Effort, TooMuchEffort


class Clock:
    """Goes on by ``step_s`` each time that somebody looks."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s, self.looks = 0.0, step_s, 0

    def __call__(self) -> float:
        self.now += self.step_s
        self.looks += 1
        return self.now


def filled(effort: Effort, keys: list[Any]) -> dict[Any, Any]:
    return effort.fill({}, [(key, None) for key in keys], keys)


def test_what_keeps_to_its_time_is_filled_in_order() -> None:
    keys = [*range(5000, 0, -1)]
    assert list(filled(Effort(Clock(KEY_S)), keys)) == keys
    elements: set[int] = set()
    assert Effort(Clock(KEY_S)).fill(elements, keys, keys) == set(keys)


def test_what_takes_longer_is_given_up_on_the_way() -> None:
    table: dict[Any, Any] = {}
    with pytest.raises(TooMuchEffort, match="chosen to make reading slow"):
        Effort(Clock(FLOOR_S)).fill(table, [(key, None) for key in range(100_000)], range(100_000))
    assert 0 < len(table) < 100_000


def test_time_adds_up_over_tables() -> None:
    effort = Effort(Clock(0.4 * FLOOR_S))
    filled(effort, list(range(100)))
    filled(effort, list(range(100)))
    with pytest.raises(TooMuchEffort):
        filled(effort, list(range(100)))


def test_one_after_the_other_counts_like_all_at_once() -> None:
    effort, table = Effort(Clock(2 * KEY_S)), dict[int, None]()

    def fill_slowly() -> None:
        for key in range(1 << 17):
            effort.fill(table, [(key, None)], (key,))

    with pytest.raises(TooMuchEffort):
        fill_slowly()


@pytest.mark.parametrize("keys", [[str(number) for number in range(10_000)], list(range(64)), []], ids=len)
def test_text_and_a_few_numbers_are_not_looked_at(keys: list[Any]) -> None:
    clock = Clock(FLOOR_S)
    assert list(filled(Effort(clock), keys)) == keys
    assert clock.looks == 0


def test_keys_that_hold_others_are_looked_at_one_by_one() -> None:
    clock = Clock(0)
    filled(Effort(clock), [(number, frozenset({number})) for number in range(10)])
    assert clock.looks == 11
