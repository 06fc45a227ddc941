"""Real processes, one for each rank, that do one job after the other together: gloo over loopback, no launcher.

A job is one save or load of one contestant. It is timed from a barrier to a barrier, with its peak of memory, and what
a load brought is compared with what the seed says, outside the timed part. A rank that fails or dies ends the run.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from contestants import MAKERS, RAW, RAW_THREADS, Contestant
from disk import bytes_from_disk, prepare_raw, read_raw, write_raw
from hf_contestants import FOLDER_MAKERS
from peak_memory import high_water_mark, reset_high_water_mark, resident
from shards import local_parts, sharded_state, sharded_target
from states import Shapes, State, clear, different_keys

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tools.crew import Crew, TaskFailed

_LIMIT_S = 3600.0
_WARM_UP: Shapes = {"warm.up": (64, 64)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One save of, or load into, a state that is sharded along ``dim``, or replicated where that is None.

    ``contestant`` is a short name.
    """

    contestant: str
    is_save: bool
    folder: Path
    dim: int | None = 0
    is_warm_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One rank's side of a job: seconds between the barriers, its bytes, memory beyond them, keys with wrong bytes.

    ``fetched`` is how many bytes the kernel read from the disk for it.
    """

    seconds: float
    total: int
    beyond: int
    fetched: int = 0
    wrong: list[str] = field(default_factory=list)


class RankCrew(Crew):
    """``ranks`` processes that hold the state of ``shapes`` between them; gone when the ``with`` block is left."""

    def __init__(self, ranks: int, shapes: Shapes) -> None:
        super().__init__()
        self._ranks = ranks
        self._shapes = shapes

    def do(self, job: Job) -> list[Outcome]:
        """What every rank has to say of the job, by rank; exits with what failed, if anything did."""
        what = f"{'saving' if job.is_save else 'loading'} with {job.contestant}"
        try:
            outcomes: list[Outcome] = self.run(self._ranks, do, self._shapes, job, timeout_s=_LIMIT_S)
        except TaskFailed as failure:
            raise SystemExit(f"{what}: {failure}") from None
        for rank, outcome in enumerate(outcomes):
            if wrong := outcome.wrong:
                raise SystemExit(f"rank {rank}, {what}, got other bytes: {len(wrong)} keys, first {wrong[0]!r}")
        return outcomes


_rank: _Rank | None = None


def do(shapes: Shapes, job: Job) -> Outcome:
    """Do the job as the rank that this process is."""
    global _rank
    if _rank is None:
        ranks = torch.distributed.get_world_size()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
        _rank = _Rank(torch.distributed.get_rank(), ranks, shapes)
    return _rank.do(job)


class _Rank:
    """One rank's contestants, states and targets, each made when it is first needed and kept."""

    def __init__(self, rank: int, ranks: int, shapes: Shapes) -> None:
        self._rank = rank
        self._mesh = DeviceMesh("cpu", list(range(ranks)))
        self._shapes = shapes
        self._contestants: dict[str, Contestant] = {}
        self._states: dict[tuple[int | None, bool], State] = {}
        self._targets: dict[tuple[int | None, bool], State] = {}

    def do(self, job: Job) -> Outcome:
        """Do the job with all other ranks; a load is compared afterwards, unless it forgets what it read."""
        contestant = self._contestant(job.contestant)
        if job.is_save:
            state = self._state(job)
            return _measured(lambda: contestant.save(state, job.folder), state)
        target = self._target(job)
        clear(local_parts(target))
        outcome = _measured(lambda: contestant.load(target, job.folder), target)
        if contestant.loads_data:
            outcome.wrong.extend(different_keys(local_parts(self._state(job)), local_parts(target)))
        return outcome

    def _contestant(self, short: str) -> Contestant:
        if short not in self._contestants:
            is_raw = short == "raw"
            made = _raw_share(self._rank, self._mesh.size()) if is_raw else {**MAKERS, **FOLDER_MAKERS}[short]()
            self._contestants[short] = made
        return self._contestants[short]

    def _state(self, job: Job) -> State:
        which = (job.dim, job.is_warm_up)
        if which not in self._states:
            self._states[which] = sharded_state(self._shapes_of(job), self._mesh, dim=job.dim)
        return self._states[which]

    def _target(self, job: Job) -> State:
        which = (job.dim, job.is_warm_up)
        if which not in self._targets:
            self._targets[which] = sharded_target(self._shapes_of(job), self._mesh, dim=job.dim)
        return self._targets[which]

    def _shapes_of(self, job: Job) -> Shapes:
        return _WARM_UP if job.is_warm_up else self._shapes


def _raw_share(rank: int, ranks: int) -> Contestant:
    """The limit: every rank writes its share of the bytes, reads its share of the files, and forgets them."""
    prepare_raw(threads=RAW_THREADS)

    def save(state: State, folder: Path) -> None:
        is_sharded = any(isinstance(tensor, DTensor) for tensor in state.values())
        share = _local_bytes(state) if is_sharded else _local_bytes(state) // ranks
        write_raw(folder / f"raw-{rank}.bin", share, threads=RAW_THREADS)

    def load(state: State, folder: Path) -> None:
        files = sorted([*folder.rglob("raw-*"), *folder.rglob("data-*")])
        for path in files[rank::ranks]:
            read_raw(path, threads=RAW_THREADS)

    return Contestant(name=RAW, save=save, load=load, loads_data=False)


def _measured(action: Callable[[], None], state: State) -> Outcome:
    gc.collect()
    torch.distributed.barrier()
    reset_high_water_mark()
    before, fetched = resident(), bytes_from_disk()
    torch.distributed.barrier()
    start = time.perf_counter()
    action()
    torch.distributed.barrier()
    seconds = time.perf_counter() - start
    return Outcome(
        seconds=seconds,
        total=_local_bytes(state),
        beyond=max(0, high_water_mark() - before),
        fetched=bytes_from_disk() - fetched,
    )


def _local_bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in local_parts(state).values())
