"""Keep policies against a small model, at random: a whole run of saves, reports, pins and readers, step by step."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from holdfast import Best, EverySteps, Latest
from holdfast._steps.listing import Step
from holdfast._steps.policies import Keep, kept

METRICS = "loss", "accuracy"
VALUES = st.sampled_from([0.0, -0.0, 1.0, 2.0, math.inf, -math.inf, math.nan])
POLICIES = st.lists(
    st.one_of(
        st.builds(Latest, st.integers(1, 4)),
        st.builds(EverySteps, st.integers(1, 6)),
        st.builds(
            Best,
            st.integers(1, 3),
            st.sampled_from(METRICS),
            mode=st.sampled_from(["min", "max"]),
            awaits=st.integers(0, 3),
        ),
    ),
    max_size=4,
)


@st.composite
def steps_of_a_run(draw: st.DrawFn) -> list[Step]:
    numbers = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=12)))
    return [
        Step(
            step=number,
            path=f"step-{number}",
            attempt=str(number),
            saved_at=None,
            bytes=1,
            world_size=1,
            metrics=draw(st.dictionaries(st.sampled_from(METRICS), VALUES)),
            pinned=draw(st.booleans()) and draw(st.booleans()),
            problem=draw(st.sampled_from(["", "", "", "damaged"])),
        )
        for number in numbers
    ]


def is_better(one: float, other: float, mode: str) -> bool:
    if math.isnan(one) or math.isnan(other):
        return not math.isnan(one)
    return one < other if mode == "min" else one > other


def model_says_kept(step: Step, steps: list[Step], policies: list[Keep], newest: int) -> bool:
    """One step at a time, each policy as a sentence."""
    others = [each for each in steps if not each.problem and each.step <= newest and each.step != step.step]
    later = [each for each in others if each.step > step.step]
    for policy in policies:
        if isinstance(policy, Latest) and len(later) < policy.count:
            return True
        if isinstance(policy, EverySteps) and step.step % policy.steps == 0:
            return True
        if isinstance(policy, Best):
            if policy.metric not in step.metrics:
                if sum(policy.metric not in each.metrics for each in later) < policy.awaits:
                    return True
                continue
            value, beaten_by = step.metrics[policy.metric], 0
            for each in others:
                if policy.metric in each.metrics:
                    found = each.metrics[policy.metric]
                    is_tie = not is_better(value, found, policy.mode) and not is_better(found, value, policy.mode)
                    is_tie = is_tie or (math.isnan(value) and math.isnan(found))
                    beaten_by += each.step > step.step if is_tie else is_better(found, value, policy.mode)
            if beaten_by < policy.count:
                return True
    return False


@given(steps_of_a_run(), POLICIES, st.data())
def test_what_is_kept_is_what_the_model_says(steps: list[Step], policies: list[Keep], data: st.DataObject) -> None:
    numbers = [step.step for step in steps]
    newest = data.draw(st.sampled_from(numbers))
    held = data.draw(st.sets(st.sampled_from(numbers), max_size=2))
    found = kept(steps, policies, newest=newest, held=held)
    always = {newest, *held}
    for step in steps:
        is_safe = step.step in always or step.pinned or step.problem or step.step > newest or not policies
        assert (step.step in found) == bool(is_safe or model_says_kept(step, steps, policies, newest)), step


@given(steps_of_a_run(), POLICIES)
def test_what_is_deleted_once_never_changes_what_is_kept_of_the_rest(steps: list[Step], policies: list[Keep]) -> None:
    newest = max(step.step for step in steps)
    first = kept(steps, policies, newest=newest)
    left = [step for step in steps if step.step in first]
    assert kept(left, policies, newest=newest) == first


@given(steps_of_a_run(), POLICIES)
def test_a_run_never_has_more_than_its_policies_ask_for(steps: list[Step], policies: list[Keep]) -> None:
    steps = [replace(step, pinned=False, problem="") for step in steps]
    newest = max(step.step for step in steps)
    if not policies or any(isinstance(policy, EverySteps) for policy in policies):
        return
    most = sum(policy.count + (policy.awaits if isinstance(policy, Best) else 0) for policy in policies)  # type: ignore[union-attr]
    assert len(kept(steps, policies, newest=newest)) <= most + 1
