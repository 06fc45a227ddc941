"""The manager on several ranks: all of them save, resume, fall back and stop alike; each has what is its own."""

from __future__ import annotations

import errno
import os
import random
import signal
import warnings
from itertools import chain, islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast
from holdfast import CheckpointManager, Every, Latest, PerRank, Rng, StopOn
from tools.crew import Crew

LIMIT_S = 240.0
EXAMPLES = 64


def manager(root: str, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, **{"save": Every(steps=2), "stop": None, **options})


def state(step: int) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    values = torch.arange(24.0).reshape(8, 3) + 100 * step
    return {
        "rows": distribute_tensor(values, mesh, [Shard(0)]),
        "same": distribute_tensor(values, mesh, [Replicate()]),
        "step": step,
    }


def values(found: dict[str, Any]) -> tuple[float, float, int]:
    return found["rows"].full_tensor().sum().item(), found["same"].to_local().sum().item(), found["step"]


def numbers(root: Any) -> list[int]:
    return [step.step for step in holdfast.Steps(root).steps()]


def save_steps(root: str, first: int, last: int, options: dict[str, Any]) -> list[int]:
    with manager(root, **options) as checkpoints:
        found = checkpoints.resume(state(0))
        assert found.next_step == first
        return [step for step in range(first, last + 1) if checkpoints.save(step, state(step), metrics={"at": step})]


def load_newest(root: str) -> tuple[Any, Any, Any]:
    target = state(0)
    with manager(root) as checkpoints:
        found = checkpoints.resume(target)
    return found.step, values(target), [each.step for each in found.skipped]


@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 2), (2, 4)])
def test_a_run_goes_on_on_as_many_ranks_and_on_others(pool: Crew, tmp_path: Path, before: int, after: int) -> None:
    root = str(tmp_path)
    options = {"keep": [Latest(2)]}
    assert pool.run(before, save_steps, root, 0, 7, options, timeout_s=LIMIT_S) == [[2, 4, 6]] * before
    assert numbers(root) == [4, 6]
    assert pool.run(after, load_newest, root, timeout_s=LIMIT_S) == [(6, (14676.0, 14676.0, 6), [])] * after
    assert pool.run(after, save_steps, root, 7, 9, options, timeout_s=LIMIT_S) == [[8]] * after
    assert numbers(root) == [6, 8]


def flip_a_bit(step: Path) -> None:
    file = max(step.glob("data-*"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-8] ^= 1
    file.write_bytes(data)


def remove_one_file(step: Path) -> None:
    next(step.glob("data-*")).unlink()


def tear_manifest(step: Path) -> None:
    os.truncate(step / "manifest.json", 200)


@pytest.mark.parametrize("damage", [flip_a_bit, remove_one_file, tear_manifest], ids=lambda damage: damage.__name__)
def test_all_ranks_pass_over_the_same_damaged_step(pool: Crew, tmp_path: Path, damage: Any) -> None:
    pool.run(2, save_steps, str(tmp_path), 0, 6, {}, timeout_s=LIMIT_S)
    damage(tmp_path / "step-6")
    expected = 4, (24 * 400.0 + 276, 24 * 400.0 + 276, 4), [6]
    assert pool.run(4, load_newest, str(tmp_path), timeout_s=LIMIT_S) == [expected] * 4


def refused(root: str, options: dict[str, Any], resume: bool) -> str:
    try:
        with manager(root, **options) as checkpoints:
            if resume:
                checkpoints.resume(state(0))
    except (holdfast.CheckpointError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_steps_of_which_none_is_whole_are_an_error_on_every_rank(pool: Crew, tmp_path: Path) -> None:
    pool.run(2, save_steps, str(tmp_path), 0, 4, {}, timeout_s=LIMIT_S)
    for step in (2, 4):
        flip_a_bit(tmp_path / f"step-{step}")
    for said in pool.run(2, refused, str(tmp_path), {}, True, timeout_s=LIMIT_S):
        assert said.startswith("CorruptError: rank 0: no step of ")


def test_a_second_manager_is_refused_on_every_rank(pool: Crew, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save=Every(steps=1), stop=None):
        for said in pool.run(3, refused, str(tmp_path), {}, False, timeout_s=LIMIT_S):
            assert said.startswith("BusyError: rank 0: another CheckpointManager has ")
    assert pool.run(3, refused, str(tmp_path), {}, False, timeout_s=LIMIT_S) == ["", "", ""]


def disagree(root: str) -> str:
    return refused(root, {"keep": Latest(1 + (dist.get_rank() == 1))}, False)


def test_ranks_that_do_not_have_the_same_policies_are_told(pool: Crew, tmp_path: Path) -> None:
    for said in pool.run(3, disagree, str(tmp_path), timeout_s=LIMIT_S):
        assert said.startswith("RankDisagreementError: the ranks disagree on the arguments of CheckpointManager")
    assert pool.run(3, refused, str(tmp_path), {}, False, timeout_s=LIMIT_S) == ["", "", ""]


def crash(root: str) -> int | str | None:
    checkpoints = manager(root)
    try:
        return checkpoints.resume(state(0)).step
    except holdfast.CrashLoopError as error:
        return str(error)
    finally:
        checkpoints._ending.close()  # as the system does when a process ends


def test_a_crash_loop_is_known_on_every_rank(pool: Crew, tmp_path: Path) -> None:
    pool.run(2, save_steps, str(tmp_path), 0, 2, {}, timeout_s=LIMIT_S)
    assert [pool.run(2, crash, str(tmp_path), timeout_s=LIMIT_S) for _ in range(2)] == [[2, 2], [2, 2]]
    for said in pool.run(2, crash, str(tmp_path), timeout_s=LIMIT_S):
        assert said.startswith("rank 0: the run was resumed 2 times from step 2")


def save_by_the_clock(root: str) -> list[int]:
    with manager(root, save=Every(seconds=1e-9), asynchronous=False) as checkpoints:
        return [step for step in range(10) if checkpoints.save(step, state(step))]


def test_the_clock_of_the_coordinator_says_when_it_is_time_and_all_save_the_same_steps(
    pool: Crew, tmp_path: Path
) -> None:
    begun = pool.run(3, save_by_the_clock, str(tmp_path), timeout_s=LIMIT_S)
    assert begun[0] == begun[1] == begun[2] == numbers(tmp_path)
    assert begun[0]


def save_with_failures(root: str) -> list[bool]:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with manager(root, save=Every(steps=1), on_error="warn", asynchronous=False) as checkpoints:
        begun = [checkpoints.save(1, state(1))]
        if dist.get_rank() == 1:
            with mock.patch("os.fsync", refuse):
                begun += [checkpoints.save(step, state(step)) for step in (2, 3, 4)]
        else:
            begun += [checkpoints.save(step, state(step)) for step in (2, 3, 4)]
        begun.append(checkpoints.save(5, state(5)))
    return begun


def test_a_save_that_fails_on_one_rank_ends_no_run_with_warn(pool: Crew, tmp_path: Path) -> None:
    expected = [True, False, False, False, True]
    assert pool.run(3, save_with_failures, str(tmp_path), timeout_s=LIMIT_S) == [expected] * 3
    assert numbers(tmp_path) == [1, 5]


def train_until_stopped(root: str, signalled: int, at: int, save_every: int) -> tuple[int, bool]:
    """The step at which this rank stopped; one of them gets a signal from within its own work."""
    options = {"save": Every(steps=save_every), "stop": StopOn(signals=("SIGTERM",)), "keep": [Latest(2)]}
    with manager(root, **options) as checkpoints:
        for step in range(2000):
            if dist.get_rank() == signalled and step == at:
                os.kill(os.getpid(), signal.SIGTERM)
            checkpoints.save(step, state(step))
            if checkpoints.should_stop(step):
                return step, (Path(root) / f"step-{step}" / "manifest.json").exists()
    return -1, False


@pytest.mark.parametrize("signalled", [0, 2])
@pytest.mark.parametrize("save_every", [1, 5, 10_000])
def test_a_signal_to_one_rank_stops_all_at_one_step_which_is_published(
    pool: Crew, tmp_path: Path, signalled: int, save_every: int
) -> None:
    stopped = pool.run(3, train_until_stopped, str(tmp_path), signalled, 7, save_every, timeout_s=LIMIT_S)
    step = stopped[0][0]
    assert stopped == [(step, True)] * 3
    assert step >= 6
    assert numbers(tmp_path)[-1] == step
    assert holdfast.verify(tmp_path / f"step-{step}").ok


def seed() -> None:
    for one in (random.seed, np.random.seed, torch.manual_seed):
        one(100 + dist.get_rank())


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


def save_rng(root: str) -> tuple[float, float, float]:
    seed()
    draw()
    with manager(root) as checkpoints:
        checkpoints.save(2, {"rng": Rng()})
        return draw()


def load_rng(root: str, on_resize: Any) -> tuple[Any, Any]:
    seed()
    with manager(root) as checkpoints:
        try:
            found = checkpoints.resume({"rng": Rng(on_resize=on_resize)})
        except holdfast.MismatchError as error:
            return str(error), draw()
    return dict(found.per_rank), draw()


def first_of(values: list[Any], rank: int, world: int) -> Any:
    return values[rank]


def test_every_rank_has_its_own_random_numbers_back_and_never_anothers_unasked(pool: Crew, tmp_path: Path) -> None:
    root = str(tmp_path)
    expected = pool.run(4, save_rng, root, timeout_s=LIMIT_S)
    assert len(set(expected)) == 4
    same = pool.run(4, load_rng, root, "raise", timeout_s=LIMIT_S)
    assert same == [({"rng": "restored"}, drawn) for drawn in expected]
    for said, _ in pool.run(2, load_rng, root, "raise", timeout_s=LIMIT_S):
        assert "'rng' has values of 4 ranks in the checkpoint but 2 ranks in the target" in said
    fresh = pool.run(2, load_rng, root, "fresh", timeout_s=LIMIT_S)
    assert [told for told, _ in fresh] == [{"rng": "fresh"}] * 2
    assert not {drawn for _, drawn in fresh} & set(expected)
    split = pool.run(2, load_rng, root, first_of, timeout_s=LIMIT_S)
    assert split == [({"rng": "re-split"}, drawn) for drawn in expected[:2]]


def loader(seen: list[int] | None = None) -> Any:
    """The examples of this rank, in an order of its own; ``seen`` are left out."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    rank, world = dist.get_rank(), dist.get_world_size()
    mine = [number for number in range(EXAMPLES) if number not in (seen or ())][rank::world]
    order = torch.Generator().manual_seed(rank)
    return StatefulDataLoader(mine, batch_size=2, shuffle=True, generator=order)  # type: ignore[var-annotated]


class Examples:
    """A loader, and what it has given so far: enough to go on, and to deal out again what is left."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.loader = loader()
        self.batches: Any = None

    def take(self, batches: int | None = None) -> list[int]:
        """The next so many batches, or all that are left."""
        self.batches = iter(self.loader) if self.batches is None else self.batches
        given = [number for batch in islice(self.batches, batches) for number in batch.tolist()]
        self.seen += given
        return given

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
        if state["loader"] is None:
            self.loader = loader(self.seen)
        else:
            self.loader.load_state_dict(state["loader"])


def deal_out_what_is_left(states: list[Any], rank: int, world: int) -> Any:
    return {"seen": sorted(number for state in states for number in state["seen"]), "loader": None}


def take_examples(root: str, batches: int | None, on_resize: Any) -> tuple[Any, list[int], list[int]]:
    """What became of the loader, what it gave before the save, and all that it gave after."""
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # which torchdata calls
    examples = Examples()
    target = {"loader": PerRank(examples, on_resize=on_resize)}
    with manager(root, save=Every(steps=1)) as checkpoints:
        try:
            found = checkpoints.resume(target)
        except holdfast.MismatchError as error:
            return str(error), [], []
        before = examples.take(batches) if batches else []
        if batches:
            checkpoints.save(found.next_step, target, force=True)
        return dict(found.per_rank), before, examples.take()


def test_torchdatas_loader_goes_on_exactly_is_refused_or_dealt_out_again(pool: Crew, tmp_path: Path) -> None:
    root = str(tmp_path)
    first = pool.run(4, take_examples, root, 3, "raise", timeout_s=LIMIT_S)
    assert sorted(chain(*(before + after for _, before, after in first))) == list(range(EXAMPLES))

    again = pool.run(4, take_examples, root, None, "raise", timeout_s=LIMIT_S)
    assert [after for _, _, after in again] == [after for _, _, after in first]
    assert [told for told, _, _ in again] == [{"loader": "restored"}] * 4

    for said, _, after in pool.run(2, take_examples, root, None, "raise", timeout_s=LIMIT_S):
        assert "'loader' has values of 4 ranks in the checkpoint but 2 ranks" in said
        assert after == []

    split = pool.run(2, take_examples, root, None, deal_out_what_is_left, timeout_s=LIMIT_S)
    assert [told for told, _, _ in split] == [{"loader": "re-split"}] * 2
    left = set(range(EXAMPLES)).difference(*(before for _, before, _ in first))
    assert sorted(chain(*(after for _, _, after in split))) == sorted(left)
