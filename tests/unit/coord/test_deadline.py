"""Deadlines, patience and pulses, by a clock that only moves when told."""

from __future__ import annotations

import math

import pytest

from holdfast._values.deadline import Deadline, Patience, Pulse, Sign


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
