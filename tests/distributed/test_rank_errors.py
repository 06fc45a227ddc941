"""What all ranks see when one of them fails, differs or dies; and that the next save works.

Each task runs several cases one after the other in the same processes, so that every case shows that the failure before
it has left nothing behind.
"""

from __future__ import annotations

import io
import math
import os
import signal
from collections.abc import Callable, Mapping, MutableSequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.futures import Future

import holdfast
from holdfast import (
    CheckpointError,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    InvalidStateError,
    LoadPlan,
    LoadPlanner,
    Metadata,
    NativeReader,
    NativeWriter,
    SavePlan,
    SavePlanner,
    StorageError,
    WriteItem,
    WriteResult,
)

if TYPE_CHECKING:
    from tools.crew import Crew

WORLD = 3
Told = dict[str, Any]


def numbered(*shape: int, start: float = 0.0) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + start


def rows_over_all(truth: torch.Tensor) -> DTensor:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    return distribute_tensor(truth.clone(), mesh, [Shard(0)], src_data_rank=None)


def told_by(action: Callable[[], object]) -> Told | None:
    """What the error of ``action`` says, as plain values; None when there was none."""
    try:
        action()
    except CheckpointError as error:
        return {
            "type": type(error).__name__,
            "message": str(error),
            "failures": {rank: type(each).__name__ for rank, (each, _) in error.failures.items()},
            "said": getattr(error, "said", None),
            "key": getattr(error, "key", None),
            "errno": getattr(error, "errno", None),
            "differences": [each.key for each in getattr(error, "differences", ())],
            "rank": getattr(error, "rank", None),
        }
    return None


def check_next_save_works(path: str) -> None:
    """The save after a failure: it publishes, and all of it is there."""
    truth = numbered(7, 2, start=3)
    holdfast.save({"weight": rows_over_all(truth), "step": 5}, path)
    target = {"weight": rows_over_all(torch.zeros(7, 2)), "step": 0}
    holdfast.load(target, path)
    weight = target["weight"]
    assert isinstance(weight, DTensor)
    assert torch.equal(weight.full_tensor(), truth)
    assert target["step"] == 5


def nothing_is_left(path: str) -> bool:
    """Whether a failed save has left neither a checkpoint nor files; all ranks have come so far."""
    dist.barrier()
    left = os.listdir(path) if os.path.isdir(path) else []
    dist.barrier()
    return not left


# One rank fails in one phase.


class _FailingSavePlanner(DefaultSavePlanner):
    """Raises ``error`` in the method ``where``."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__()
        self._where = where
        self._error = error

    def _visit(self, place: str) -> None:
        if place == self._where:
            raise self._error

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._visit("set_up_planner")
        super().set_up_planner(*args, **kwargs)

    def create_local_plan(self) -> SavePlan:
        self._visit("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self._visit("create_global_plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._visit("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self._visit("resolve_data")
        return super().resolve_data(write_item)


class _FailingWriter(NativeWriter):
    """Raises ``error`` in the method ``where``."""

    def __init__(self, path: str, where: str, error: Exception) -> None:
        super().__init__(path)
        self._where = where
        self._error = error

    def _visit(self, place: str) -> None:
        if place == self._where:
            raise self._error

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._visit("prepare_local_plan")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._visit("prepare_global_plan")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[MutableSequence[WriteResult]]:
        self._visit("write_data")
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[MutableSequence[WriteResult]]) -> None:
        self._visit("finish")
        super().finish(metadata, results)


PLANNER_PHASES = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data")
WRITER_PHASES = ("prepare_local_plan", "prepare_global_plan", "write_data", "finish")
COORDINATOR_ONLY = ("create_global_plan", "prepare_global_plan", "finish")


def error_of(kind: str) -> Exception:
    if kind == "storage":
        return StorageError("cannot write: no space left; free some", errno=28, path="/data")
    return ZeroDivisionError("odd")


def failing_saves(directory: str) -> list[tuple[str, str, int, Told | None, bool]]:
    """Where, what and on which rank it failed; what was told; whether nothing is left."""
    found = []
    for kind in ("storage", "foreign"):
        for where in (*PLANNER_PHASES, *WRITER_PHASES):
            failing = 0 if where in COORDINATOR_ONLY else 2
            path = os.path.join(directory, f"{where}-{kind}")
            place = where if dist.get_rank() == failing else ""
            planner = _FailingSavePlanner(place, error_of(kind))
            writer = _FailingWriter(path, place, error_of(kind))
            state = {"weight": rows_over_all(numbered(7, 2)), "plain": torch.ones(3), "step": 1}
            told = told_by(lambda s=state, w=writer, p=planner: holdfast.save(s, storage_writer=w, planner=p))  # type: ignore[misc]
            found.append((where, kind, failing, told, nothing_is_left(path)))
            check_next_save_works(path)
    return found


def test_a_failure_of_one_rank_in_any_phase_of_a_save_is_raised_on_all(pool: Crew, tmp_path: Path) -> None:
    results = pool.run(WORLD, failing_saves, str(tmp_path))
    assert len(results[0]) == 18
    for on_rank in results:
        for where, kind, failing, told, clean in on_rank:
            assert told is not None, where
            assert told["type"] == ("StorageError" if kind == "storage" else "CheckpointError"), where
            assert told["message"].startswith(f"rank {failing}: "), told["message"]
            assert told["errno"] == (28 if kind == "storage" else None)
            name = "StorageError" if kind == "storage" else "ZeroDivisionError"
            assert told["failures"] == {failing: name}, where
            assert clean, f"{where}: files of the failed save are still there"


class _FailingLoadPlanner(DefaultLoadPlanner):
    """Raises a StorageError in the method ``where``."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def _visit(self, place: str) -> None:
        if place == self._where:
            raise error_of("storage")

    def create_local_plan(self) -> LoadPlan:
        self._visit("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self._visit("create_global_plan")
        return super().create_global_plan(global_plan)

    def resolve_tensor(self, read_item: holdfast.ReadItem) -> torch.Tensor:
        self._visit("resolve_tensor")
        return super().resolve_tensor(read_item)


class _FailingReader(NativeReader):
    """Raises a StorageError in the method ``where``."""

    def __init__(self, path: str, where: str) -> None:
        super().__init__(path)
        self._where = where

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._where == "read_metadata":
            raise error_of("storage")
        return super().read_metadata(*args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._where == "read_data":
            raise error_of("storage")
        return super().read_data(plan, planner)


def failing_loads(path: str) -> list[tuple[str, int, Told | None]]:
    check_next_save_works(path)
    found = []
    for where in ("create_local_plan", "create_global_plan", "resolve_tensor", "read_metadata", "read_data"):
        failing = 0 if where == "create_global_plan" else 1
        place = where if dist.get_rank() == failing else ""
        planner, reader = _FailingLoadPlanner(place), _FailingReader(path, place)
        target = {"weight": rows_over_all(torch.zeros(7, 2)), "step": 0}
        told = told_by(lambda t=target, r=reader, p=planner: holdfast.load(t, storage_reader=r, planner=p))  # type: ignore[misc]
        found.append((where, failing, told))
        holdfast.load(target, path)
        assert torch.equal(target["weight"].full_tensor(), numbered(7, 2, start=3))  # type: ignore[attr-defined]
    return found


def test_a_failure_of_one_rank_in_any_phase_of_a_load_is_raised_on_all(pool: Crew, tmp_path: Path) -> None:
    for on_rank in pool.run(WORLD, failing_loads, str(tmp_path / "some")):
        assert len(on_rank) == 5
        for where, failing, told in on_rank:
            assert told is not None, where
            assert told["type"] == "StorageError", where
            assert told["message"].startswith(f"rank {failing}: "), told["message"]
            assert told["failures"] == {failing: "StorageError"}


# Ranks that differ.


def differing_states(rank: int) -> Mapping[str, dict[str, Any]]:
    """States that cannot be saved together, by what is wrong with them."""
    odd = rank == 1
    return {
        "shape": {"weight": torch.ones(3 if odd else 4)},
        "dtype": {"weight": torch.ones(4, dtype=torch.float64 if odd else torch.float32)},
        "kind": {"weight": 1.0 if odd else torch.ones(4)},
        "contents": {"fine": torch.ones(2), "weight": torch.full((300, 40), 2.0 if odd else 1.0)},
        "value": {"fine": 1, "step": 8 if odd else 7},
        "invalid": {"weight": torch.ones(4), **({"odd": object()} if odd else {})},
    }


def differing_saves(directory: str) -> tuple[dict[str, Told | None], dict[str, bool]]:
    rank = dist.get_rank()
    told: dict[str, Told | None] = {}
    clean: dict[str, bool] = {}
    for name, state in differing_states(rank).items():
        path = os.path.join(directory, name)
        told[name] = told_by(lambda s=state, p=path: holdfast.save(s, p))  # type: ignore[misc]
        clean[name] = nothing_is_left(path)
        check_next_save_works(path)
    mine = os.path.join(directory, f"path-{min(rank, 1)}")
    told["path"] = told_by(lambda: holdfast.save({"weight": torch.ones(3)}, mine))
    clean["path"] = nothing_is_left(mine)
    told["path to load"] = told_by(lambda: holdfast.load({"weight": torch.ones(3)}, mine))
    dist.barrier()  # who goes on at once may be told of a call that others have missed
    mesh = DeviceMesh("cpu", torch.arange(WORLD))
    unreduced = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    told["partial"] = told_by(lambda: holdfast.save({"sum": unreduced}, os.path.join(directory, "partial")))
    clean["partial"] = nothing_is_left(os.path.join(directory, "partial"))
    check_next_save_works(os.path.join(directory, "last"))
    return told, clean


@pytest.fixture(scope="module")
def differences(pool: Crew, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Told]]:
    """What each rank was told in each case; that nothing was left behind is checked here."""
    directory = str(tmp_path_factory.mktemp("differences"))
    results = pool.run(WORLD, differing_saves, directory)
    for told, clean in results:
        assert all(clean.values()), clean
        assert all(each is not None for each in told.values()), told
    return [told for told, _ in results]


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("shape", ["'weight'", "[4] on rank 0", "[3] on rank 1"]),
        ("dtype", ["'weight'", "torch.float32 [4] on rank 0", "torch.float64 [4] on rank 1"]),
        ("kind", ["'weight'", "torch.float32 [4] on rank 0", "a value on rank 1"]),
        ("contents", ["'weight'", "rank 1", "rank 0", "replica_check"]),
        ("value", ["'step'", "rank 1", "rank 0"]),
        ("path", ["path-0", "path-1"]),
        ("path to load", ["path-0", "path-1"]),
    ],
)
def test_ranks_that_differ_are_named(differences: list[dict[str, Told]], case: str, parts: list[str]) -> None:
    for told in differences:
        assert told[case]["type"] == "RankDisagreementError"
        assert {0, 1} <= set(told[case]["said"])
        for part in parts:
            assert part in told[case]["message"], told[case]["message"]


def test_what_cannot_be_saved_is_named_with_its_rank(differences: list[dict[str, Told]]) -> None:
    for told in differences:
        assert told["invalid"]["type"] == "InvalidStateError"
        assert told["invalid"]["message"].startswith("rank 1: ")
        assert told["invalid"]["key"] == "odd"
        assert told["partial"]["type"] == "InvalidStateError"
        assert "Partial" in told["partial"]["message"] or "P(sum)" in told["partial"]["message"]
        assert told["partial"]["key"] == "sum"
        assert set(told["partial"]["failures"]) == {0, 1, 2}


def checks_of_replicas(directory: str) -> dict[str, Told | None]:
    """One element differs where no sample looks; then a DTensor that claims to be replicated is not."""
    mesh = DeviceMesh("cpu", torch.arange(WORLD))
    hidden = torch.zeros(1001, 33)
    hidden[7, 5] = dist.get_rank()
    local = torch.full((6, 5), float(dist.get_rank() == 2))
    replicated = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    path = os.path.join(directory, "replicas")
    return {
        "sample": told_by(lambda: holdfast.save({"hidden": hidden}, path)),
        "all": told_by(
            lambda: holdfast.save({"hidden": hidden}, path, options=holdfast.SaveOptions(replica_check="all"))
        ),
        "dtensor": told_by(lambda: holdfast.save({"replicated": replicated}, path)),
        "off": told_by(
            lambda: holdfast.save(
                {"replicated": replicated, "hidden": hidden}, path, options=holdfast.SaveOptions(replica_check="off")
            )
        ),
    }


def test_how_closely_replicas_are_compared_is_the_callers_choice(pool: Crew, tmp_path: Path) -> None:
    for told in pool.run(WORLD, checks_of_replicas, str(tmp_path)):
        assert told["sample"] is None
        assert told["off"] is None
        assert told["all"]["type"] == told["dtensor"]["type"] == "RankDisagreementError"
        assert "'hidden' has other contents on rank 1, 2 than on rank 0" in told["all"]["message"]
        assert "'replicated' has other contents on rank 2 than on rank 0" in told["dtensor"]["message"]


def mismatched_loads(path: str) -> tuple[Told | None, Told | None]:
    """One rank asks for what is not there, then for another shape; no rank's target may be touched."""
    check_next_save_works(path)
    rank = dist.get_rank()
    target: dict[str, Any] = {"weight": rows_over_all(torch.full((7, 2), -1.0)), "step": -1}
    if rank == 2:
        target["missing"] = torch.zeros(3)
    missing = told_by(lambda: holdfast.load(target, path))
    other = {"weight": torch.full((7, 3 if rank == 1 else 2), -1.0)}
    shape = told_by(lambda: holdfast.load(other, path))
    assert target["step"] == -1
    assert bool((target["weight"].to_local() == -1).all())
    assert bool((other["weight"] == -1).all())
    return missing, shape


def test_a_target_that_does_not_fit_on_one_rank_leaves_all_targets_alone(pool: Crew, tmp_path: Path) -> None:
    for missing, shape in pool.run(WORLD, mismatched_loads, str(tmp_path / "some")):
        assert missing["type"] == shape["type"] == "MismatchError"
        assert missing["message"].startswith("rank 2: ")
        assert missing["differences"] == ["missing"]
        assert shape["message"].startswith("rank 1: ")
        assert shape["differences"] == ["weight"]


def misused_on_one_rank(path: str) -> tuple[Told | None, ...]:
    """One rank calls in a way that is refused before anything is planned."""
    rank = dist.get_rank()
    state = {"weight": torch.ones(3)}
    saved = told_or_refused(lambda: holdfast.save(state, None if rank == 1 else path))
    loaded = told_or_refused(lambda: holdfast.load(state, None if rank == 1 else path))
    check_next_save_works(path)
    return saved, loaded


def told_or_refused(action: Callable[[], object]) -> Told | None:
    """As ``told_by``; the rank that called in the wrong way gets its own ValueError."""
    try:
        return told_by(action)
    except ValueError as error:
        return {"type": "ValueError", "message": str(error)}


def test_a_wrong_call_on_one_rank_does_not_leave_the_others_waiting(pool: Crew, tmp_path: Path) -> None:
    results = pool.run(WORLD, misused_on_one_rank, str(tmp_path / "some"))
    for rank, both in enumerate(results):
        for told in both:
            assert "needs a checkpoint_id" in told["message"], told
            if rank != 1:
                assert told["type"] == "CheckpointError"
                assert told["message"].startswith("rank 1: ")


def load_nothing(path: str) -> Told | None:
    return told_by(lambda: holdfast.load({"weight": torch.ones(3)}, path))


def test_a_checkpoint_that_is_not_there_is_not_found_on_all_ranks(pool: Crew, tmp_path: Path) -> None:
    for told in pool.run(2, load_nothing, str(tmp_path / "none")):
        assert told["type"] == "NotFoundError"


# A rank that dies.


class _DyingPlanner(DefaultSavePlanner):
    """Kills its process when data is asked for."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")


def killed_while_writing(directory: str) -> Told | None:
    rank = dist.get_rank()
    survivors = dist.new_group([0, 2])
    path = os.path.join(directory, "killed")
    check_next_save_works(path)
    before = sorted(os.listdir(path))
    state = {"weight": rows_over_all(numbered(9, 2)), f"own.{rank}": torch.ones(3)}
    planner = _DyingPlanner() if rank == 1 else DefaultSavePlanner()
    endless = holdfast.SaveOptions(deadline_s=math.inf)
    told = told_by(lambda: holdfast.save(state, path, planner=planner, options=endless))
    published = holdfast.load(path)
    assert torch.equal(published["weight"], numbered(7, 2, start=3)), "the checkpoint of before is still the one"
    assert set(before) <= set(os.listdir(path))
    holdfast.save({"weight": torch.ones(4), f"own.{rank}": torch.ones(2)}, path, process_group=survivors)
    target = {"weight": torch.zeros(4), f"own.{2 - rank}": torch.zeros(2)}
    holdfast.load(target, path, process_group=survivors)
    assert all(bool((each == 1).all()) for each in target.values())
    return told


def test_a_rank_killed_while_it_writes_is_named_on_the_others(pool: Crew, tmp_path: Path) -> None:
    results = pool.run(WORLD, killed_while_writing, str(tmp_path), dies=[1])
    for told in (results[0], results[2]):
        assert told["type"] == "RankLostError"
        assert told["rank"] == 1
        assert "rank 1" in told["message"]
    assert set(holdfast.load(tmp_path / "killed")) == {"weight", "own.0", "own.2"}


def test_the_state_of_one_process_is_refused_in_the_same_words(tmp_path: Path) -> None:
    with pytest.raises(InvalidStateError, match="odd"):
        holdfast.save({"odd": object()}, tmp_path / "alone")
