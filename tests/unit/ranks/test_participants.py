"""Who takes part: this process alone, without a connection, unless it is one of several in a job."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import holdfast


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wants to talk to others fails."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a connection of a process that is alone")

    monkeypatch.setattr(socket, "socket", refuse)


def save_and_load(path: Path, *, no_dist: bool = False) -> None:
    holdfast.save({"w": torch.ones(3)}, path, no_dist=no_dist)
    target = {"w": torch.zeros(3)}
    holdfast.load(target, path, no_dist=no_dist)
    assert torch.equal(target["w"], torch.ones(3))


def test_without_a_process_group_this_process_is_all_there_is(tmp_path: Path) -> None:
    save_and_load(tmp_path)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("no_dist", [False, True])
def test_a_group_of_one_needs_no_channel(tmp_path: Path, no_dist: bool) -> None:
    save_and_load(tmp_path, no_dist=no_dist)


@pytest.mark.usefixtures("group_of_one")
def test_no_dist_wins_over_a_group_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 8)
    save_and_load(tmp_path, no_dist=True)
    with pytest.raises(AssertionError, match="a connection"):  # which is what the others wait for in vain
        save_and_load(tmp_path)


def test_where_torch_has_no_distributed_this_process_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    save_and_load(tmp_path)
