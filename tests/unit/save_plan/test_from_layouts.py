"""Planning from layouts is planning from rows: what ranks hold is computed right, and the same ranks write the same.

Ranks are played in one process; what they hold is told by torch's own DTensors, in a group where nobody else exists, or
by index sets that are split here. What comes of the plans of all ranks (``plan_together``) is the same, on few ranks
and on thousands.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast._plan.coverage import boxes_on_mesh
from holdfast._save_plan.from_layouts import (
    WHOLE,
    Layout,
    LayoutRows,
    Mesh,
    Rule,
    classes_of,
    described,
    head_text,
    layout_of,
    layout_rows,
    plan_layouts,
    row_digests,
)
from holdfast._save_plan.plans import LocalLeaves, local_leaves, plan_together, properties_of
from holdfast._save_plan.together import JointPlan
from holdfast._values.box import MeshSplit
from holdfast._values.digest import name_words, rows_digest
from holdfast._values.lazy import LazyDict, LazyList
from holdfast.errors import InvalidStateError, RankDisagreementError
from holdfast.metadata import Metadata, TensorStorageMetadata, chunk_columns
from holdfast.planner import SavePlan, TensorHead, WriteColumns, write_columns

DTYPES = (torch.uint8, torch.bfloat16, torch.float32)
Row = tuple[str, tuple[int, ...], tuple[int, ...], int]


# What members of a mesh hold.


def split_indices(size: int, splits: Sequence[MeshSplit], place: Sequence[int]) -> list[int]:
    """The indices that are left after each split in turn: of each block the part at the member's place."""
    left = list(range(size))
    for split in splits:
        kept = []
        for block in _cut(left, split.blocks):
            kept += _cut(block, split.parts)[place[split.mesh_dim]]
        left = kept
    return left


def _cut(indices: list[int], parts: int) -> list[list[int]]:
    step = -(-len(indices) // parts)
    return [indices[number * step : (number + 1) * step] for number in range(parts)]


@st.composite
def meshes_and_splits(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[MeshSplit, ...], ...]]:
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    size = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    splits: list[list[MeshSplit]] = [[] for _ in size]
    for mesh_dim in draw(st.permutations(range(len(mesh)))):
        if size and draw(st.booleans()):
            dimension = draw(st.integers(0, len(size) - 1))
            splits[dimension].append(MeshSplit(mesh_dim, mesh[mesh_dim], draw(st.integers(1, 3))))
    return size, mesh, tuple(map(tuple, splits))


@given(meshes_and_splits())
@settings(max_examples=300)
def test_every_member_holds_the_indices_that_are_left_to_it(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[MeshSplit, ...], ...]],
) -> None:
    size, mesh, splits = case
    found = boxes_on_mesh(size, mesh, splits)
    assert found.rank.tolist() == sorted(found.rank.tolist())
    for member, place in enumerate(itertools.product(*map(range, mesh))):
        expected = np.zeros(size, dtype=np.int64)
        indices = [split_indices(size[dimension], splits[dimension], place) for dimension in range(len(size))]
        expected[np.ix_(*indices)] = 1
        held = np.zeros(size, dtype=np.int64)
        rows = np.flatnonzero(found.rank == member)
        for low, length in zip(found.lo[rows].tolist(), found.length[rows].tolist(), strict=True):
            held[tuple(slice(a, a + b) for a, b in zip(low, length, strict=True))] += 1
        assert np.array_equal(held, expected)
        if 0 in size:
            assert found.length[rows].tolist() == [list(size)]
        else:
            assert (found.length[rows] > 0).all()


# What DTensors say.


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@st.composite
def placed_tensors(
    draw: st.DrawFn,
) -> tuple[int, tuple[int, ...], list[tuple[tuple[int, ...], tuple[Placement, ...], bool]]]:
    """A world, its mesh (which may leave ranks out), and tensors: size, placements, whether split as FSDP2 does."""
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    world = math.prod(mesh) + draw(st.integers(0, 1))
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        size = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=2)))
        dimension = st.integers(0, len(size) - 1)
        placements: list[Placement] = [draw(st.one_of(st.builds(Shard, dimension), st.just(Replicate()))) for _ in mesh]
        if len(mesh) == 2 and draw(st.booleans()):
            which = draw(dimension)
            placements = [_StridedShard(which, split_factor=mesh[1]), Shard(which)]
        tensors.append((size, tuple(placements), draw(st.booleans())))
    return world, mesh, tensors


@given(placed_tensors())
@settings(max_examples=60, deadline=None)
def test_the_coordinator_computes_what_each_rank_holds_of_its_dtensors(
    case: tuple[int, tuple[int, ...], list[tuple[tuple[int, ...], tuple[Placement, ...], bool]]],
) -> None:
    world, mesh_shape, tensors = case
    locals_: list[LocalLeaves] = []
    layouts: list[Layout] = []
    for rank in range(world):
        with rank_of(rank, world):
            mesh = DeviceMesh("cpu", torch.arange(math.prod(mesh_shape)).view(mesh_shape))
            state: dict[str, object] = {"step": 3, "plain": torch.ones(2)}
            for number, (size, placements, in_order) in enumerate(tensors):
                truth = torch.zeros(size)
                if in_order:
                    whole = DTensor.from_local(truth, mesh, [Replicate()] * mesh.ndim, run_check=False)
                    state[f"w{number}"] = whole.redistribute(mesh, placements)
                else:
                    state[f"w{number}"] = distribute_tensor(truth, mesh, placements, src_data_rank=None)
            local = local_leaves(state)
            found = layout_of(local, None)
        assert found is not None
        locals_.append(local)
        layouts.append(found)
    numbers: dict[bytes, int] = {}
    of_rank = np.array([numbers.setdefault(layout.fingerprint, len(numbers)) for layout in layouts])
    distinct = list({layout.fingerprint: layout for layout in layouts}.values())
    held = layout_rows(classes_of(distinct, of_rank), np.arange(world))
    try:
        plan = plan_layouts(held, keys_of(distinct))
    except InvalidStateError:
        # Left-to-right splits of a strided placement may overlap: then the rows say so too.
        with pytest.raises(InvalidStateError):
            plan_together([SavePlan(LazyList(local.columns)) for local in locals_])
        return
    digests = row_digests(plan)
    for rank, local in enumerate(locals_):
        columns = local.columns
        assert rows(held.of(rank)) == sorted(rows(columns), key=itemgetter(0))
        assert int(digests[rank]) == rows_digest(name_words(columns.keys), columns.key, columns.lo, columns.length)


def keys_of(layouts: list[Layout]) -> list[str]:
    return list(dict.fromkeys(key for layout in layouts for key in layout.said.keys))


def rows(columns: WriteColumns) -> list[Row]:
    found = []
    for which, low, length, hint, _ in columns.rows:
        head = columns.heads[which]
        dimensions = 0 if head is None else len(head.size)
        found.append((columns.keys[which], tuple(low[:dimensions]), tuple(length[:dimensions]), hint))
    return found


# Who writes what.


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A world of several layouts; names are what meshes call the ranks."""

    layouts: list[Layout]
    of_rank: np.ndarray
    names: np.ndarray


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Stages of a pipeline, each with ranks of its own, tensors of its own, and some that all of them have."""
    stages = draw(st.integers(1, 3))
    sizes = [draw(st.integers(1, 6)) for _ in range(stages)]
    ranks = sum(sizes)
    names = np.array(draw(st.permutations(range(ranks))), dtype=np.int64)
    firsts = np.cumsum([0, *sizes])
    common = draw(st.lists(tensors_of(), max_size=2))
    made = []
    for stage in range(stages):
        mine = tuple(int(name) for name in names[firsts[stage] : firsts[stage + 1]])
        own = draw(st.lists(tensors_of(), max_size=3))
        made.append(_layout(draw, stage, mine, common, own))
    return Job(layouts=made, of_rank=np.repeat(np.arange(stages), sizes), names=names)


def tensors_of() -> st.SearchStrategy[tuple[tuple[int, ...], torch.dtype]]:
    size = st.lists(st.integers(0, 12), max_size=2).map(tuple)
    large = st.tuples(st.integers(1, 4), st.integers(1 << 17, 1 << 21))
    return st.tuples(st.one_of(size, size, large), st.sampled_from(DTYPES))


def _layout(
    draw: st.DrawFn,
    stage: int,
    ranks: tuple[int, ...],
    common: list[tuple[tuple[int, ...], torch.dtype]],
    own: list[tuple[tuple[int, ...], torch.dtype]],
) -> Layout:
    factors = [each for each in range(1, len(ranks) + 1) if len(ranks) % each == 0]
    first = draw(st.sampled_from(factors))
    mesh = (first, len(ranks) // first)
    keys = ["step"]
    heads: list[TensorHead | None] = [None]
    rules, spreads = [WHOLE], []
    named = [(f"common.{number}", each) for number, each in enumerate(common)]
    named += [(f"stage.{stage}.{number}", each) for number, each in enumerate(own)]
    for key, (size, dtype) in named:
        keys.append(key)
        heads.append(
            TensorHead(properties_of(dtype, draw(st.booleans()) and dtype.is_floating_point), torch.Size(size))
        )
        splits: list[list[MeshSplit]] = [[] for _ in size]
        for mesh_dim in (0, 1):
            if size and draw(st.booleans()):
                splits[draw(st.integers(0, len(size) - 1))].append(MeshSplit(mesh_dim, mesh[mesh_dim]))
        if draw(st.booleans()):
            rules.append(WHOLE)
        else:
            rules.append(len(spreads))
            spreads.append(Rule(0, tuple(map(tuple, splits))))
        if draw(st.integers(0, 3)) == 0 and heads[-1] is not None:  # tied to what was just added
            keys.append(f"{key}.tied")
            heads.append(heads[-1]._replace(alias_of=key))
            rules.append(rules[-1])
    return described(keys, texts_of(heads), rules, spreads=spreads, meshes=[Mesh(mesh, ranks)])


def texts_of(heads: list[TensorHead | None]) -> list[Any]:
    return [None if head is None else head_text(head) for head in heads]


def assert_planned_alike(job: Job, *, to_lowest_rank: bool) -> None:
    """Both ways to plan give every rank the same rows and the same metadata, or the same error."""
    held = layout_rows(classes_of(job.layouts, job.of_rank), job.names)
    errors: list[str] = []
    try:
        plan = plan_layouts(held, keys_of(job.layouts), to_lowest_rank=to_lowest_rank)
    except (InvalidStateError, RankDisagreementError) as error:
        errors.append(str(error))
    plans = [
        SavePlan(LazyList(in_order(held.of(rank), job.layouts[layout].said.keys)))
        for rank, layout in enumerate(job.of_rank.tolist())
    ]
    if errors:
        with pytest.raises((InvalidStateError, RankDisagreementError)) as raised:
            plan_together(plans, to_lowest_rank=to_lowest_rank)
        assert str(raised.value) == errors[0]
        return
    expected, metadata = plan_together(plans, to_lowest_rank=to_lowest_rank)
    for rank in range(len(job.of_rank)):
        mine = rows(write_columns(expected[rank].items))
        assert sorted(mine) == sorted(written_by(plan, held, rank))
    assert described_by(Metadata(LazyDict(plan.keys, plan))) == described_by(metadata)


def in_order(columns: WriteColumns, keys: list[str]) -> WriteColumns:
    """The same with the keys, and their rows, in the order of ``keys``."""
    place = np.array([keys.index(key) for key in columns.keys], dtype=np.int64)
    key = place[columns.key]
    order = np.argsort(key, kind="stable")
    heads = dict(zip(columns.keys, columns.heads, strict=True))
    return dataclasses.replace(
        columns,
        keys=keys,
        heads=[heads[name] for name in keys],
        key=key[order],
        lo=columns.lo[order],
        length=columns.length[order],
        is_shard=columns.is_shard[order],
    )


def written_by(plan: JointPlan, rows_of: LayoutRows, rank: int) -> list[Row]:
    local, keys, numbers = plan.written.of(rank)
    held = rows(rows_of.of(rank))
    found = []
    for row, key, number in zip(local.tolist(), keys.tolist(), numbers.tolist(), strict=True):
        name, _, length, _ = held[row]
        assert name == plan.keys[key]
        chunks = plan.chunks[key]
        low, size = tuple(chunks.lo[number].tolist()), tuple(chunks.length[number].tolist())
        assert all(mine >= its for mine, its in zip(length, size, strict=True)), "a rank writes of what it holds"
        found.append((name, low, size, number if len(low) or plan.heads[key] is not None else 0))
    return found


def described_by(metadata: Metadata) -> list[object]:
    found: list[object] = []
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            columns = chunk_columns(entry.chunks, len(entry.size))
            boxes = columns.lo.tolist(), columns.length.tolist()
            found.append((key, entry.properties, entry.size, entry.alias_of, entry.kind, boxes))
        else:
            found.append((key, None))
    return found


@given(jobs(), st.booleans())
@settings(max_examples=250, deadline=None)
def test_planning_from_layouts_is_planning_from_rows(job: Job, to_lowest_rank: bool) -> None:
    assert_planned_alike(job, to_lowest_rank=to_lowest_rank)


@pytest.mark.parametrize("replicas", [1, 8, 2048])
def test_so_it_is_on_thousands_of_ranks(replicas: int) -> None:
    ranks = 2048
    mesh = (replicas, ranks // replicas)
    sizes = [(ranks, 8), (3 * ranks - 1, 4), (5, 7), (4096, 4096)]
    heads = [TensorHead(properties_of(torch.bfloat16, False), torch.Size(size)) for size in sizes]
    layout = described(
        [f"w{number}" for number in range(len(sizes))] + ["step"],
        texts_of([*heads, None]),
        [0, 0, 0, 0, WHOLE],
        spreads=[Rule(0, ((MeshSplit(1, mesh[1]),), ()))],
        meshes=[Mesh(mesh, tuple(range(ranks)))],
    )
    assert_planned_alike(
        Job(
            layouts=[layout],
            of_rank=np.zeros(ranks, dtype=np.int64),
            names=np.arange(ranks),
        ),
        to_lowest_rank=False,
    )
