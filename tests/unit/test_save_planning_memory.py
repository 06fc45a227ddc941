"""What ranks remember of the saves before: any change is noticed, whoever has forgotten is told again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from thread_ranks import Job, same_layout, states

import holdfast
from holdfast import DefaultSavePlanner


def changes() -> dict[str, Callable[[], list[dict[str, Any]]]]:
    def untied() -> list[dict[str, Any]]:
        return [{**state, "tied": state["weight"].clone()} for state in same_layout()]

    def of_one_rank() -> list[dict[str, Any]]:
        first, second, third = same_layout()
        return [first, second, {**third, "more": 1}]

    def in_another_order() -> list[dict[str, Any]]:
        return [dict(reversed(list(state.items()))) for state in same_layout()]

    return {
        "dtype": lambda: same_layout(weight=torch.ones(2, 3, dtype=torch.bfloat16)),
        "shape": lambda: same_layout(weight=torch.ones(3, 2)),
        "new key": lambda: same_layout(more=torch.ones(1)),
        "a key of one rank": of_one_rank,
        "a value for a tensor": lambda: same_layout(weight=3),
        "a tensor for a value": lambda: same_layout(step=torch.tensor(7)),
        "an array for a tensor": lambda: same_layout(weight=np.ones((2, 3), dtype=np.float32)),
        "a gradient": lambda: same_layout(weight=torch.nn.Parameter(torch.ones(2, 3))),
        "ties": untied,
        "the type of a dict key": lambda: same_layout(nested={"list": [torch.ones(2)], "5": "five"}),
        "a tuple for a list": lambda: same_layout(nested={"list": (torch.ones(2),), 5: "five"}),
        "order": in_another_order,
    }


@pytest.mark.parametrize("what", changes())
def test_a_change_is_noticed(tmp_path: Path, what: str) -> None:
    job = Job(3, tmp_path)
    job.save(same_layout())
    job.save(same_layout())
    assert not job.was_planned_again
    changed = changes()[what]()
    job.save(changed)
    assert job.was_planned_again
    found = job.loaded()
    alone = tmp_path / "alone"
    holdfast.save({**changed[0], **changed[-1]}, alone, no_dist=True)
    expected = holdfast.load(alone)
    assert repr(found) == repr(expected)
    assert (found["tied"] is found["weight"]) == (expected["tied"] is expected["weight"])
    job.save(changes()[what]())
    assert not job.was_planned_again
    assert repr(job.loaded()) == repr(expected)


def test_models_that_take_turns_are_all_remembered(tmp_path: Path) -> None:
    job = Job(2, tmp_path)
    models = [same_layout(2, **{f"model{number}": torch.ones(number + 1)}) for number in range(3)]
    again = []
    for _ in range(3):
        for model in models:
            job.save(model)
            again.append(job.was_planned_again)
    assert again == [True] * 3 + [False] * 6


def test_another_manner_is_planned_anew(tmp_path: Path) -> None:
    job = Job(2, tmp_path)
    job.save(same_layout(2))
    job.make = lambda: DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    job.save(same_layout(2))
    assert len(job.planners[1].plan.items) == 0
    assert repr(job.loaded()["weight"]) == repr(same_layout(1)[0]["weight"])


def test_a_coordinator_that_forgot_asks_again(tmp_path: Path) -> None:
    job = Job(3, tmp_path)
    job.save(states())
    job.kept[0].clear()
    job.save(states())
    assert job.sent(0) == ["Offer", "Again", "Again"]
    assert job.sent(1) == ["NoneType", "tuple", "tuple"]
    assert job.loaded()["step"] == 7


def test_a_rank_that_forgot_is_told_again(tmp_path: Path) -> None:
    job = Job(3, tmp_path)
    job.save(states())
    job.kept[2].clear()
    job.save(states())
    assert job.sent(0) == ["Again", "Again", "Offer"]
    assert job.loaded()["own.2"].tolist() == [2.0, 2.0]
    job.save(states())
    assert not job.was_planned_again
