"""A save of thousands of ranks, played in one process: real planner, real codec, real manifest on disk, no data.

What ranks send is made and encoded one rank at a time, outside the timed parts; what the coordinator does with it is
timed: decode, plan, encode the answers; decode the reports, merge, publish. One rank is real: a member of a fake group
of that size, whose DTensors the real planner plans. Every tensor is a Shard(0) over all ranks, beside one value.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from holdfast._native.report import WriteReport, WrittenFile
from holdfast._native.writer import NativeWriter
from holdfast._process import collector_paused
from holdfast._save_plan.coordinator import Asked, Final, Offer, Outcome, coordinated
from holdfast._save_plan.from_layouts import (
    WHOLE,
    Layout,
    Members,
    Mesh,
    Rule,
    described,
    head_text,
    layout_rows,
    plan_layouts,
    row_digests,
)
from holdfast._save_plan.plans import properties_of
from holdfast._save_plan.rounds import plan_save
from holdfast._save_plan.together import chosen_columns
from holdfast._torch_codec.pickles import decode_message, encode_message
from holdfast._values.box import MeshSplit
from holdfast._values.digest import block_counts, name_words, rows_digest
from holdfast._values.lazy import LazyList
from holdfast.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan, TensorHead, WriteColumns

DTYPE = torch.bfloat16
ATTEMPT = "scale"
STEP = "step"
Sizes = dict[str, tuple[int, int]]


def sizes_of(ranks: int, tensors: int, *, distinct: bool) -> Sizes:
    """Keys and sizes: each tensor gives every rank rows; 40 different sizes, or as many as tensors."""
    rows = (4 * ranks, 2 * ranks, 8 * ranks, 3 * ranks - 1, ranks)
    return {
        f"model.layers.{number // 8}.block{number % 8}.weight": (
            rows[number % 5],
            16 + (number if distinct else number % 8),
        )
        for number in range(tensors)
    }


class Crew:
    """The ranks of one job, as far as the coordinator hears of them."""

    def __init__(self, ranks: int, sizes: Sizes) -> None:
        self.ranks = ranks
        self.sizes = sizes
        self._keys = [*sizes, STEP]
        self._heads = [*(TensorHead(properties_of(DTYPE, False), torch.Size(size)) for size in sizes.values()), None]
        self._size = np.array([*sizes.values(), (1, 1)], dtype=np.int64)
        self.layout: Layout = described(
            self._keys,
            [None if head is None else head_text(head) for head in self._heads],
            [0] * len(sizes) + [WHOLE],
            spreads=[Rule(0, ((MeshSplit(0, ranks),), ()))],
            meshes=[Mesh((ranks,), tuple(range(ranks)))],
            paths={key: (key,) for key in self._keys},
        )

    def columns(self, rank: int) -> WriteColumns:
        """What ``rank`` holds."""
        count = len(self._keys)
        lo, length = np.zeros_like(self._size), self._size.copy()
        rows = self._size[:-1, 0]
        step = -(-rows // self.ranks)
        lo[:-1, 0] = step * rank
        length[:-1, 0] = np.minimum(step, rows - lo[:-1, 0])
        return WriteColumns(
            keys=self._keys,
            heads=self._heads,
            key=np.arange(count),
            lo=lo,
            length=length,
            hint=np.zeros(count, dtype=np.int64),
            is_shard=np.arange(count) < count - 1,
        )

    def offer(self, rank: int) -> Offer:
        """What ``rank`` says first."""
        mine = self.columns(rank)
        return Offer(
            self.layout.fingerprint,
            rows_digest(name_words(mine.keys), mine.key, mine.lo, mine.length),
            rank,
            True,
        )

    def reply(self, rank: int, asked: Asked) -> Any:
        """What ``rank`` says when it is asked; all have the same contents."""
        if asked.what == "layout":
            return self.layout
        assert asked.what == "contents"
        assert asked.groups is not None
        return np.full(asked.groups.count, 7, dtype="<u8").tobytes()

    def report(self, rank: int, final: Final) -> WriteReport:
        """What ``rank`` sends after writing: its chunks one after the other in one file."""
        assert final.choice is not None
        plan = chosen_columns(self.columns(rank), final.choice.chosen, final.choice.heads, planning=final.token)
        assert plan.planned is not None
        row = np.flatnonzero([plan.heads[which] is not None for which in plan.key.tolist()])
        nbytes = plan.length[row].prod(axis=1) * DTYPE.itemsize
        header = 4096 * (1 + len(row) * 120 // 4096)
        ends = header + np.cumsum(nbytes)
        blocks = int(block_counts(nbytes).sum())
        name = f"data-{ATTEMPT}-{rank}-0.safetensors"
        return WriteReport(
            planning=final.token,
            files=[WrittenFile(name=name, bytes=int(ends[-1]), header=header, digest=rank)],
            row=plan.planned[row].astype(np.uint16),
            file=np.zeros(len(row), dtype=np.uint8),
            offset=(ends - nbytes).astype(np.uint32),
            digests=np.random.default_rng(rank).integers(1, 2**63, blocks, dtype=np.uint64),
            tensors={},
            values={} if STEP not in plan.keys else {STEP: 7},
            versions={},
        )


class Play:
    """The coordinator of one job, save after save, with its checkpoint in ``folder``."""

    def __init__(self, crew: Crew, folder: Path) -> None:
        self.crew = crew
        self.folder = folder
        self.outcomes: dict[bytes, Outcome] = {}
        self.received = 0
        folder.mkdir()  # storage makes it for the first file of data, which nobody writes here
        self._writer = NativeWriter(folder, attempt=ATTEMPT)
        self._writer.set_up_storage_writer(True)

    def plan(self, messages: list[bytes]) -> tuple[float, list[Final], Metadata]:
        """The seconds of the coordinator, what each rank is told in the end, and the metadata."""
        planner, layout, rounds = DefaultSavePlanner(), self.crew.layout, None
        seconds, self.received = 0.0, 0
        while True:
            self.received += sum(map(len, messages))
            start = time.perf_counter()
            parts = [decode_message(message) for message in messages]
            told: Sequence[Asked | Final | SavePlan]
            metadata = None
            try:
                if rounds is None:
                    rounds = coordinated(parts, planner, self._writer, outcomes=self.outcomes, layout=layout)
                    told = next(rounds)
                else:
                    told = rounds.send(parts)
            except StopIteration as end:
                told, metadata = end.value.answers, end.value.metadata
            answers = [encode_message(answer) for answer in told]
            seconds += time.perf_counter() - start
            finals = [decode_message(answer) for answer in answers]
            if metadata is not None:
                return seconds, finals, metadata
            messages = [encode_message(self.crew.reply(rank, asked)) for rank, asked in enumerate(finals)]

    def publish(self, metadata: Metadata, reports: list[bytes]) -> float:
        """The seconds from encoded reports to a published checkpoint; its data files are there, and empty of data."""
        for message in reports:
            for file in decode_message(message).columns.files:
                (self.folder / file.name).touch()
                os.truncate(self.folder / file.name, file.bytes)
        start = time.perf_counter()
        self._writer.finish(metadata, [decode_message(report) for report in reports])
        return time.perf_counter() - start


def decide_seconds(crew: Crew) -> float:
    """The seconds of ``Play.plan`` in which is found who holds and writes what, and whether that is everything.

    It is all that a plan taken from a checkpoint could save.
    """
    layout = Layout(text=crew.layout.text, paths=crew.layout.paths)  # nothing of it is known yet
    ranks = np.arange(crew.ranks)
    start = time.perf_counter()
    rows = layout_rows([Members(layout=layout, ranks=ranks)], ranks)
    row_digests(plan_layouts(rows, layout.said.keys))
    return time.perf_counter() - start


class PlayedRanks:
    """The group as one real rank sees it: it is told ``final`` whatever it says."""

    rank, is_coordinator = 1, False

    def __init__(self, size: int, final: Final) -> None:
        self.size = size
        self.kept: dict[object, Any] = {}
        self._final = final
        self.seconds: list[float] = []
        self.sent: list[Any] = []

    def reduce_scatter(self, phase: str, local: Callable[[], Any], merge: Callable[[list[Any]], list[Any]]) -> Any:
        """What the coordinator is taken to answer."""
        self.sent.append(local())
        known = isinstance(self.sent[-1], bytes)
        return Final(
            token=self._final.token,
            storage_data=self._final.storage_data,
            choice=None if known else self._final.choice,
        )


def fake_group(ranks: int) -> None:
    """Be rank 1 of a group of so many, of which nobody else is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=ranks, store=FakeStore())


def part_of(sizes: Sizes, mesh: DeviceMesh, dimension: int) -> dict[str, Any]:
    """What this rank holds of tensors that are sharded along ``dimension`` over ``mesh``."""
    (place,) = mesh.get_coordinate() or (0,)
    state: dict[str, Any] = {}
    for key, size in sizes.items():
        step = -(-size[dimension] // mesh.size())
        local = list(size)
        local[dimension] = max(0, min(step, size[dimension] - place * step))
        state[key] = DTensor.from_local(
            torch.zeros(local, dtype=DTYPE),
            mesh,
            [Shard(dimension)],
            run_check=False,
            shape=torch.Size(size),
            stride=(size[1], 1),
        )
    return state


@collector_paused  # as save is
def rank_seconds(crew: Crew, final: Final, folder: Path) -> tuple[float, float]:
    """The seconds of planning on a rank that is not the coordinator: in a first save, and in a later one."""
    state = {**part_of(crew.sizes, DeviceMesh("cpu", torch.arange(crew.ranks)), 0), STEP: 7}
    ranks = PlayedRanks(crew.ranks, final)
    seconds = []
    for _ in range(3):
        planner, writer = DefaultSavePlanner(), NativeWriter(folder)
        planner.ranks = crew.ranks

        start = time.perf_counter()
        plan_save(planner, writer, ranks, partial(planner.set_up_planner, state), job_rank=1)  # type: ignore[arg-type]
        seconds.append(time.perf_counter() - start)
    assert ranks.sent[0] == crew.offer(1), "the real rank must say what the played one says"
    assert all(isinstance(said, bytes) for said in ranks.sent[1:])
    return seconds[0], min(seconds[1:])


def read_plan_seconds(crew: Crew, metadata: Metadata, ranks: int, dimension: int) -> float:
    """The seconds in which one rank of so many, that shard along ``dimension``, plans to read its part."""
    state = part_of(crew.sizes, DeviceMesh("cpu", torch.arange(ranks)), dimension)
    found = []
    for _ in range(3):
        planner = DefaultLoadPlanner()
        start = time.perf_counter()
        planner.set_up_planner(dict(state), metadata)
        plan = planner.create_local_plan()
        found.append(time.perf_counter() - start)
        assert len(plan.items)
    return min(found)


def reports_of(crew: Crew, finals: list[Final]) -> list[bytes]:
    """The reports of all ranks, as they are sent."""
    return [encode_message(LazyList(crew.report(rank, final))) for rank, final in enumerate(finals)]
