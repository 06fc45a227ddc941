"""Ranks that have nothing to save or load, and Stateful objects that fail on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import holdfast

if TYPE_CHECKING:
    from tools.crew import Crew


def fully(keeper: int) -> dict[str, Any]:
    return {"weight": torch.arange(6.0), "nested": {"step": 7}} if dist.get_rank() == keeper else {}


def empty(keeper: int) -> dict[str, Any]:
    return {"weight": torch.zeros(6), "nested": {"step": 0}} if dist.get_rank() == keeper else {}


def save_on_one(folder: str, keeper: int, reader: int, how: str) -> Any:
    """Only ``keeper`` has anything to save, twice; only ``reader`` says what to load, the others get everything."""
    path = f"{folder}/checkpoint"
    keys = []
    for _ in range(2):
        state = fully(keeper)
        if how == "async_save":
            metadata = holdfast.async_save(state, path).result()
        elif how == "torch":
            metadata = holdfast.save(state, storage_writer=holdfast.FileSystemWriter(path))
        else:
            metadata = holdfast.save(state, path)
        keys.append(sorted(metadata.state_dict_metadata))
    target = empty(reader)
    options: dict[str, Any] = {"storage_reader": holdfast.FileSystemReader(path)} if how == "torch" else {}
    report = holdfast.load(target, None if how == "torch" else path, **options)
    values = (target["weight"].tolist(), target["nested"]["step"]) if target else None
    return keys, values, sorted(report.loaded)


@pytest.mark.parametrize("how", ["save", "async_save", "torch"])
@pytest.mark.parametrize(("world", "keeper", "reader"), [(2, 0, 1), (2, 1, 0), (4, 0, 0), (4, 2, 3), (3, -1, -1)])
def test_a_rank_with_nothing_takes_part(
    pool: Crew, tmp_path: Path, world: int, keeper: int, reader: int, how: str
) -> None:
    results = pool.run(world, save_on_one, str(tmp_path), keeper, reader, how)
    everything = [] if keeper < 0 else ["nested.step", "weight"]
    for rank, (keys, values, loaded) in enumerate(results):
        assert keys == [everything] * 2
        assert values == (([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 7) if everything else None), rank
        assert loaded == everything


class Fragile:
    """A Stateful object that cannot take its state back, if that is what is wanted."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": torch.zeros(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._error is not None:
            raise self._error
        self.loaded = state


def refuse_state(folder: str, failing: int) -> Any:
    """load_state_dict raises on one rank; all are told, and the next load works."""
    holdfast.save({"fragile": Fragile(None)}, folder)
    error = ZeroDivisionError("odd") if dist.get_rank() == failing else None
    told = None
    try:
        holdfast.load({"fragile": Fragile(error)}, folder)
    except holdfast.CheckpointError as raised:
        told = str(raised)
    fine = Fragile(None)
    holdfast.load({"fragile": fine}, folder)
    return told, fine.loaded["value"].tolist()


@pytest.mark.parametrize(("world", "failing"), [(2, 0), (2, 1), (4, 2)])
def test_a_state_that_cannot_be_handed_back_on_one_rank_is_told_to_all(
    pool: Crew, tmp_path: Path, world: int, failing: int
) -> None:
    said = f"rank {failing}: handing back the state failed: ZeroDivisionError: odd"
    assert pool.run(world, refuse_state, str(tmp_path / "some"), failing) == [(said, [0.0, 0.0])] * world
