"""Who takes part: this process alone unless it is one of several in a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import holdfast
from holdfast._ranks.ranks import SoloRanks, participants


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_without_a_process_group_this_process_is_all_there_is() -> None:
    assert isinstance(participants(None, no_dist=False, call="save"), SoloRanks)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("no_dist", [False, True])
def test_a_group_of_one_needs_no_channel(no_dist: bool) -> None:
    assert isinstance(participants(None, no_dist=no_dist, call="save"), SoloRanks)


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_saves_and_loads(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(3)}, tmp_path / "one")
    target = {"w": torch.zeros(3)}
    holdfast.load(target, tmp_path / "one")
    assert torch.equal(target["w"], torch.ones(3))


def test_no_dist_wins_over_a_group_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 8)
    assert isinstance(participants(None, no_dist=True, call="save"), SoloRanks)


def test_where_torch_has_no_distributed_this_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    assert isinstance(participants(None, no_dist=False, call="save"), SoloRanks)
