"""Deadlines, patience, pulses and effort, by clocks that only move when told."""

from __future__ import annotations

import math
from typing import Any

import pytest

from holdfast._values.deadline import FLOOR_S, KEY_S, Deadline, Effort, Patience, Pulse, Sign, TooMuchEffort

# --- deadlines, patience and pulses -----------------------------------------------------------------------------------


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_deadline_passes_when_its_time_is_up() -> None:
    clock = HandClock()
    deadline = Deadline(5.0, clock)
    assert (deadline.remaining_s, deadline.passed) == (5.0, False)
    clock.now += 4.5
    assert (deadline.remaining_s, deadline.passed) == (0.5, False)
    clock.now += 0.5
    assert (deadline.remaining_s, deadline.passed) == (0.0, True)
    clock.now += 10
    assert (deadline.remaining_s, deadline.passed) == (0.0, True)


def test_the_limits_are_those_promised() -> None:
    patience = Patience()
    assert (patience.beat_s, patience.progress_s) == (1.0, 120.0)


@pytest.mark.parametrize("deadline_s", [0.1, 5.0, 1e12, math.inf])
def test_signs_of_life_come_more_often_than_any_deadline(deadline_s: float) -> None:
    patience = Patience.within(deadline_s)
    assert patience.beat_s == min(1.0, deadline_s / 4)
    assert patience.progress_s == deadline_s


@pytest.mark.parametrize("limits", [{"beat_s": 0.0}, {"beat_s": 120.0}, {"progress_s": 0.0}, {"progress_s": math.nan}])
def test_limits_that_make_no_sense_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must beat more often|positive number of seconds"):
        Patience(**limits)


def test_a_beat_is_life_but_no_progress() -> None:
    clock = HandClock()
    pulse = Pulse(Sign(beat=1, phase="writing"), clock)
    clock.now += 3
    pulse.see(Sign(beat=2, phase="writing"))
    assert (pulse.silent_s, pulse.stalled_s) == (0.0, 3.0)
    clock.now += 1
    assert (pulse.silent_s, pulse.stalled_s) == (1.0, 4.0)


@pytest.mark.parametrize(
    "sign",
    [
        Sign(beat=2, phase="reading"),
        Sign(beat=2, phase="writing", progress=1),
        Sign(beat=2, phase="writing", moved=1),
        Sign(beat=2, phase="writing", file="manifest.json"),
        Sign(beat=2, phase="writing", working=False),
    ],
)
def test_any_change_but_the_beat_is_progress(sign: Sign) -> None:
    clock = HandClock()
    pulse = Pulse(Sign(beat=1, phase="writing"), clock)
    clock.now += 3
    pulse.see(sign)
    assert (pulse.silent_s, pulse.stalled_s, pulse.sign) == (0.0, 0.0, sign)


def test_the_same_sign_again_is_neither() -> None:
    clock = HandClock()
    pulse = Pulse(Sign(beat=1, phase="writing"), clock)
    clock.now += 3
    pulse.see(Sign(beat=1, phase="writing"))
    assert (pulse.silent_s, pulse.stalled_s) == (3.0, 3.0)


def test_a_pause_of_the_listener_is_left_out() -> None:
    clock = HandClock()
    pulse = Pulse(Sign(beat=1, phase="writing"), clock)
    clock.now += 30
    pulse.excuse(29.0)
    assert (pulse.silent_s, pulse.stalled_s) == (1.0, 1.0)


# --- keys may take only so long ---------------------------------------------------------------------------------------


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
