"""How ranks plan a save together: what they send in which round, and what they compare of the contents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from thread_ranks import ATTEMPT, Job, same_layout, states

import holdfast
from holdfast import DefaultSavePlanner, NativeWriter, SavePlan
from holdfast._native.report import WriteReport
from holdfast._save_plan.rounds import Sketch
from holdfast._values.lazy import LazyList
from holdfast.planner import write_columns

# What is sent.


def test_one_rank_of_each_layout_describes_it(tmp_path: Path) -> None:
    job = Job(4, tmp_path)
    job.save([*same_layout(2, step=7), *same_layout(2, more=1)])
    assert job.sent(0) == ["Offer"] * 4
    assert job.sent(1) == ["NoneType", "NoneType", "Layout", "NoneType"]
    assert job.sent(2) == ["bytes"] * 4  # contents
    assert max(job.board.bytes[0]) <= 64
    assert len(job.board.rounds) == 4
    assert job.loaded()["more"] == 1


def test_a_layout_that_the_coordinator_has_is_not_described(tmp_path: Path) -> None:
    job = Job(3, tmp_path)
    job.save(same_layout())
    assert job.sent(0) == ["Offer"] * 3
    assert len(job.board.rounds) == 3  # offers, contents, reports
    assert job.board.rounds[1][1] == job.board.rounds[1][2]


def test_later_saves_send_the_name_of_the_planning_and_digests(tmp_path: Path) -> None:
    job = Job(3, tmp_path)
    for fill in (1.0, 2.0, 3.0):
        job.save(states(weight=torch.full((2, 3), fill), tied=0))
    assert len(job.board.rounds) == 2  # one to plan, one of reports
    assert not job.was_planned_again
    assert max(job.board.bytes[0]) <= 64
    assert job.loaded()["weight"].tolist() == [[3.0] * 3] * 2
    assert job.loaded()["own.2"].tolist() == [2.0, 2.0]


def test_reports_are_short(tmp_path: Path) -> None:
    job = Job(2, tmp_path)
    many = {f"w{number}": torch.ones(4) * number for number in range(400)}
    job.save([many, many])
    reports = [result.columns for result in job.board.rounds[-1] if isinstance(result, LazyList)]
    assert sum(len(report.row) for report in reports if isinstance(report, WriteReport)) == 400
    assert sum(job.board.bytes[-1]) <= 400 * (24 + 8) + 2 * 700
    for key, leaf in job.loaded().items():
        assert torch.equal(leaf, many[key])


def test_every_rank_gets_the_same_metadata_without_its_chunks_being_sent(tmp_path: Path) -> None:
    job = Job(3, tmp_path)
    first, *others = job.save(states())
    assert isinstance(job.board.wholes[1], Sketch)
    for other in others:
        assert other.state_dict_metadata == first.state_dict_metadata
        assert list(other.state_dict_metadata) == list(first.state_dict_metadata)
        assert other.paths == first.paths
        assert other.planner_data == first.planner_data


# Contents.


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("key", ["weight", "step", "array"])
def test_different_contents_name_key_and_ranks(tmp_path: Path, key: str, later: bool) -> None:
    job = Job(4, tmp_path)
    if later:
        job.save(states(4))
    wrong = states(4)
    other: dict[str, Any] = {"weight": torch.ones(2, 3), "step": 8, "array": np.ones(3, dtype=np.int64)}
    wrong[2][key] = other[key]
    wrong[2]["tied"] = wrong[2]["weight"]
    with pytest.raises(holdfast.RankDisagreementError, match=f"'{key}' has other contents on rank 2 than on rank 0"):
        job.save(wrong)
    job.save(states(4))
    assert not later or not job.was_planned_again


def test_contents_that_nobody_looks_at_may_differ(tmp_path: Path) -> None:
    job = Job(2, tmp_path, lambda: DefaultSavePlanner(replica_check="off"))
    for _ in range(2):
        job.save([{"w": torch.zeros(2)}, {"w": torch.ones(2)}])
    assert len(job.board.rounds) == 2


def test_values_that_cannot_be_compared_do_not_stop_a_save(tmp_path: Path) -> None:
    """A value that one rank can tell apart and another cannot makes digests differ, and nothing else."""
    job = Job(2, tmp_path)
    job.make_writer = lambda path: NativeWriter(path, attempt=ATTEMPT, allow_pickle=True)
    mine, yours = {"odd": torch.Size([1])}, {"odd": object}
    job.save([mine, yours])
    assert len(job.board.rounds) == 4  # offers, contents, details, reports


# Hosts.


def bytes_written(job: Job) -> list[int]:
    """The bytes of tensors in each rank's plan."""
    plans = [write_columns(planner.plan.items) for planner in job.planners]
    return [
        sum(
            int(length.prod()) * head.properties.dtype.itemsize
            for length, head in zip(plan.length, (plan.heads[which] for which in plan.key.tolist()), strict=True)
            if head is not None
        )
        for plan in plans
    ]


def replicated(ranks: int) -> list[dict[str, Any]]:
    state = {f"w{number}": torch.zeros(1000 + number % 7) for number in range(120)}
    return [dict(state) for _ in range(ranks)]


class OwnPlans(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        return super().create_local_plan()


@pytest.mark.parametrize("make", [DefaultSavePlanner, OwnPlans], ids=["layouts", "plans"])
def test_hosts_write_as_much_as_each_other_however_many_ranks_they_have(
    tmp_path: Path, make: Callable[[], DefaultSavePlanner]
) -> None:
    job = Job(4, tmp_path, make)
    job.hosts = [11, 11, 22, 11]
    for _ in range(2):
        first, *others = job.save(replicated(4))
        written = bytes_written(job)
        assert abs(written[2] - sum(written) / 2) <= 0.05 * sum(written) / 2
        together = [written[rank] for rank in (0, 1, 3)]
        assert max(together) - min(together) <= 0.1 * sum(together) / 3
        for other in others:
            assert other.state_dict_metadata == first.state_dict_metadata
    assert torch.equal(job.loaded()["w7"], torch.zeros(1000))


def test_later_saves_send_no_more_on_several_hosts(tmp_path: Path) -> None:
    job = Job(4, tmp_path)
    job.hosts = [11, 11, 22, 11]
    job.save(replicated(4))
    assert max(job.board.bytes[0]) <= 64
    job.save(replicated(4))
    assert not job.was_planned_again
    assert max(job.board.bytes[0]) <= 64


@pytest.mark.parametrize("hosts", [[0, 0, 0], [5, 5, 5], [1, 2, 3]])
def test_hosts_that_make_no_difference_change_no_byte(tmp_path: Path, hosts: list[int]) -> None:
    job = Job(3, tmp_path)
    job.save(replicated(3))
    other = Job(3, tmp_path / "other")
    other.hosts = hosts
    other.save(replicated(3))
    for name in (f"index-{ATTEMPT}.safetensors", "manifest.json"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "other" / "1" / name).read_bytes()


def test_ranks_that_moved_to_other_hosts_plan_anew(tmp_path: Path) -> None:
    job = Job(3, tmp_path)
    job.save(replicated(3))
    job.hosts = [1, 1, 2]
    job.save(replicated(3))
    assert job.was_planned_again
    written = bytes_written(job)
    assert abs(written[2] - sum(written) / 2) <= 0.05 * sum(written) / 2
