"""When a step is due, which steps stay, and what nobody can mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from holdfast import Best, Every, EverySteps, Latest
from holdfast._steps.listing import Step
from holdfast._steps.policies import checked_policies, kept


def step(number: int, *, pinned: bool = False, problem: str = "", **metrics: float) -> Step:
    return Step(
        step=number,
        path=f"/runs/a/step-{number}",
        attempt=f"attempt-{number}",
        saved_at=None,
        bytes=1,
        world_size=1,
        metrics=metrics,
        pinned=pinned,
        problem=problem,
    )


def numbers(*given: int, **metrics: float) -> list[Step]:
    return [step(number, **metrics) for number in given]


def test_multiples_seconds_and_single_steps_combine() -> None:
    every = Every(steps=10, seconds=5.0, at=(1, 3))
    assert [number for number in range(25) if every.is_due(number)] == [1, 3, 10, 20]
    assert [number for number in range(25) if Every(at=[0, 7]).is_due(number)] == [0, 7]
    assert not any(Every(seconds=1).is_due(number) for number in range(25))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Every(),
        lambda: Every(steps=0),
        lambda: Every(steps=-5),
        lambda: Every(steps=2.5),  # type: ignore[arg-type]
        lambda: Every(steps=True),
        lambda: Every(seconds=0),
        lambda: Every(seconds=math.nan),
        lambda: Every(seconds=math.inf),
        lambda: Every(at=(-1,)),
        lambda: Every(at=("1",)),  # type: ignore[arg-type]
        lambda: Latest(0),
        lambda: Latest(-1),
        lambda: Latest(1.0),  # type: ignore[arg-type]
        lambda: EverySteps(0),
        lambda: Best(0, "loss"),
        lambda: Best(1, ""),
        lambda: Best(1, "loss", mode="lowest"),  # type: ignore[arg-type]
        lambda: Best(1, "loss", awaits=-1),
        lambda: checked_policies(["latest"]),  # type: ignore[list-item]
        lambda: checked_policies([Latest(1), Latest(2)]),
        lambda: checked_policies([Best(1, "loss"), Best(2, "loss", mode="max")]),
        lambda: checked_policies([EverySteps(5), EverySteps(5)]),
    ],
)
def test_a_policy_that_nobody_can_satisfy_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"not |never|two policies"):
        make()


def test_one_policy_needs_no_list() -> None:
    assert checked_policies(Latest(2)) == (Latest(2),)


def test_without_policies_all_stay() -> None:
    assert kept(numbers(1, 2, 3), [], newest=3) == {1, 2, 3}


def test_a_step_stays_if_any_policy_says_so() -> None:
    steps = [step(n, loss=float(n % 4)) for n in range(1, 13)]
    assert kept(steps, [Latest(2), EverySteps(5), Best(2, "loss")], newest=12) == {11, 12, 5, 10, 8}


def test_the_newest_the_pinned_and_the_held_stay() -> None:
    steps = [step(1), step(2, pinned=True), step(3), step(4), step(5), step(6)]
    assert kept(steps, [Best(1, "loss", awaits=0)], newest=6, held={3}) == {2, 3, 6}


def test_nan_is_worst_and_ties_go_to_the_later_step() -> None:
    steps = [step(1, loss=math.nan), step(2, loss=1.0), step(3, loss=1.0), step(4, loss=math.inf), step(5, loss=2.0)]
    assert kept(steps, [Best(1, "loss")], newest=5) == {3, 5}
    assert kept(steps, [Best(2, "loss")], newest=5) == {2, 3, 5}
    assert kept(steps, [Best(4, "loss")], newest=5) == {2, 3, 4, 5}
    assert kept(steps, [Best(5, "loss")], newest=5) == {1, 2, 3, 4, 5}
    assert kept(steps, [Best(1, "loss", mode="max")], newest=5) == {4, 5}


def test_steps_whose_metric_is_awaited_stay_up_to_a_number() -> None:
    steps = [step(1, loss=3.0), *numbers(2, 3, 4, 5, 6)]
    assert kept(steps, [Best(1, "loss", awaits=2)], newest=6) == {1, 5, 6}
    assert kept(steps, [Best(1, "loss", awaits=0)], newest=6) == {1, 6}


def test_retention_counts_no_step_that_cannot_be_read() -> None:
    steps = [step(1), step(2), step(3, problem="its manifest is damaged"), step(4)]
    assert kept(steps, [Latest(2)], newest=4) == {2, 3, 4}


def test_steps_after_the_newest_published_are_another_runs_and_take_no_place() -> None:
    steps = numbers(70, 80, 90, 100, 110)
    assert kept(steps, [Latest(2)], newest=90) == {80, 90, 100, 110}
