"""Thousands of random layouts, planned in one process: every element is written once and read back once.

Simulated ranks hold what random meshes and placements give them. The shards are made here, from index sets, not by the
code under test; , as where a rank does not hold a key.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._save_plan.plans import plan_together
from holdfast._values.box import Box
from holdfast._values.lazy import LazyList
from holdfast.errors import InvalidStateError
from holdfast.metadata import ChunkColumns, Metadata, TensorProperties, TensorStorageMetadata, chunk_columns
from holdfast.planner import SavePlan, TensorHead, WriteColumns, padded, write_columns
from holdfast.planner_helpers import ReadRows

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A tensor over a mesh: ``placements`` has a tensor dimension for each mesh dimension, or None for replicas."""

    size: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[int | None, ...]

    def boxes(self, rank: int) -> list[Box]:
        """What the rank holds: one split after the other; nothing where the rank is outside the mesh."""
        if rank >= math.prod(self.mesh):
            return []
        low, length = [0] * len(self.size), list(self.size)
        for place, parts, dimension in zip(np.unravel_index(rank, self.mesh), self.mesh, self.placements, strict=True):
            if dimension is not None:
                step = -(-length[dimension] // parts)
                start = min(int(place) * step, length[dimension])
                low[dimension] += start
                length[dimension] = min(step, length[dimension] - start)
        box = Box(tuple(low), tuple(length))
        return [box] if box.volume or not math.prod(self.size) else []


@st.composite
def layouts(draw: st.DrawFn, ranks: int) -> Layout:
    size = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    mesh: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        mesh.append(draw(st.integers(1, max(1, ranks // math.prod(mesh)))))
    dimension = st.none() | st.integers(0, len(size) - 1) if size else st.none()
    return Layout(size=size, mesh=tuple(mesh), placements=tuple(draw(dimension) for _ in mesh))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A world: the layout and dtype of every tensor, and which ranks have each value."""

    ranks: int
    tensors: tuple[tuple[Layout, torch.dtype], ...]
    values: tuple[frozenset[int], ...]

    def plan_of(self, rank: int) -> SavePlan:
        keys: list[str] = []
        heads: list[TensorHead | None] = []
        rows: list[tuple[int, Box, bool]] = []
        for number, (layout, dtype) in enumerate(self.tensors):
            rows.extend((len(keys), box, True) for box in layout.boxes(rank))
            keys.append(f"tensor.{number}")
            heads.append(TensorHead(TensorProperties(dtype), torch.Size(layout.size)))
        for number, holders in enumerate(self.values):
            if rank in holders:
                rows.append((len(keys), Box((), ()), False))
                keys.append(f"value.{number}")
                heads.append(None)
        return SavePlan(LazyList(_columns(keys, heads, rows)))

    def plans(self) -> list[SavePlan]:
        return [self.plan_of(rank) for rank in range(self.ranks)]


def _columns(keys: list[str], heads: list[TensorHead | None], rows: list[tuple[int, Box, bool]]) -> WriteColumns:
    return WriteColumns(
        keys=keys,
        heads=heads,
        key=np.array([number for number, _, _ in rows], dtype=np.int64),
        lo=padded([box.offsets for _, box, _ in rows], fill=0),
        length=padded([box.lengths for _, box, _ in rows], fill=1),
        hint=np.zeros(len(rows), dtype=np.int64),
        is_shard=np.array([is_shard for _, _, is_shard in rows], dtype=bool),
        fingerprint=np.ones(len(rows), dtype=np.uint64),
    )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    ranks = draw(st.integers(1, 12))
    tensors = draw(st.lists(st.tuples(layouts(ranks), st.sampled_from(DTYPES)), max_size=5))
    holders = st.frozensets(st.integers(0, ranks - 1), min_size=1)
    return Job(ranks=ranks, tensors=tuple(tensors), values=tuple(draw(st.lists(holders, max_size=3))))


def written(plans: list[SavePlan]) -> list[tuple[int, str, Box]]:
    """Rank, key and box of everything that is written; a value has a box without dimensions."""
    found = []
    for rank, plan in enumerate(plans):
        columns = write_columns(plan.items)
        for which, low, length, _, _ in columns.rows:
            head = columns.heads[which]
            dimensions = 0 if head is None else len(head.size)
            found.append((rank, columns.keys[which], Box(tuple(low[:dimensions]), tuple(length[:dimensions]))))
    return found


def stored(metadata: Metadata, key: str) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


@given(jobs(), st.booleans())
@settings(max_examples=1200)
def test_every_element_is_written_once_by_a_rank_that_holds_it(job: Job, to_lowest_rank: bool) -> None:
    plans, _ = plan_together(job.plans(), to_lowest_rank=to_lowest_rank)
    found = written(plans)
    for number, (layout, _) in enumerate(job.tensors):
        counts = np.zeros(layout.size, dtype=np.int64)
        for rank, key, box in found:
            if key != f"tensor.{number}":
                continue
            counts[box.slices()] += 1
            held = layout.boxes(rank)
            assert any(each.contains(box) for each in held), f"rank {rank} does not hold {box}"
            if to_lowest_rank:
                assert rank == min(other for other in range(job.ranks) if held[0] in layout.boxes(other))
        assert (counts == 1).all()
    for number, holders in enumerate(job.values):
        writers = [rank for rank, key, _ in found if key == f"value.{number}"]
        assert len(writers) == 1
        assert writers[0] in holders


@given(jobs())
@settings(max_examples=300)
def test_the_metadata_tells_what_is_written(job: Job) -> None:
    plans, metadata = plan_together(job.plans())
    found = written(plans)
    assert set(metadata.state_dict_metadata) == {key for _, key, _ in found}
    for number, (layout, dtype) in enumerate(job.tensors):
        key = f"tensor.{number}"
        entry = stored(metadata, key)
        assert tuple(entry.size) == layout.size
        assert entry.properties.dtype == dtype
        told = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        assert told == sorted((box.offsets, box.lengths) for _, name, box in found if name == key)


@given(jobs())
@settings(max_examples=150)
def test_the_same_plans_give_the_same_result(job: Job) -> None:
    first, second = (written(plan_together(job.plans())[0]) for _ in range(2))
    assert first == second


@given(jobs(), st.data())
@settings(max_examples=600)
def test_every_wanted_element_is_read_once_from_where_it_was_written(job: Job, data: st.DataObject) -> None:
    """Into another random layout of each tensor, on another number of ranks, with numbered contents."""
    _, metadata = plan_together(job.plans())
    ranks = data.draw(st.integers(1, 12), label="ranks of the target")
    for number, (layout, _) in enumerate(job.tensors):
        entry = stored(metadata, f"tensor.{number}")
        truth = np.arange(math.prod(layout.size)).reshape(layout.size)
        chunks = chunk_columns(entry.chunks, len(layout.size))
        wanted = data.draw(target_boxes(layout.size, ranks), label="target boxes")
        for box in wanted:
            rows = ReadRows()
            rows.add_tensor("tensor", entry, box)
            columns = rows.columns()
            target = np.full(box.lengths, -1)
            times = np.zeros(box.lengths, dtype=np.int64)
            for row in range(len(columns)):
                item = columns.item(row)
                hint = item.storage_index.index
                assert hint is not None
                low = tuple(chunks.lo[hint].tolist())
                assert tuple(item.storage_index.offset or ()) == low
                chunk = truth[Box(low, tuple(chunks.length[hint].tolist())).slices()]
                place = Box(tuple(item.dest_offsets), tuple(item.lengths)).slices()
                target[place] = chunk[Box(tuple(item.storage_offsets), tuple(item.lengths)).slices()]
                times[place] += 1
            assert (times == 1).all()
            assert (target == truth[box.slices()]).all()


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 3), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_few_rows_and_many_make_the_same_read_items(chunks: int, wide: int, scalars: int, random: Random) -> None:
    """Rows are kept one by one or as a table, whichever is cheaper; both in the order they were asked for."""
    tables = [(chunks, (chunks, 3)), (1, (4,)), (wide, (2, wide)), *[(1, ())] * scalars]
    random.shuffle(tables)
    rows = ReadRows()
    expected: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for number, (parts, size) in enumerate(tables):
        key = f"w{number}"
        dimension = int(np.argmax(size)) if parts > 1 else 0
        lo = np.zeros((parts, len(size)), dtype=np.int64)
        length = np.tile(np.array(size, dtype=np.int64), (parts, 1)).reshape(parts, len(size))
        if parts > 1:
            lo[:, dimension], length[:, dimension] = np.arange(parts), 1
        columns = ChunkColumns(lo, length, 0, parts, len(size))
        rows.add_tensor(key, TensorStorageMetadata(TensorProperties(), torch.Size(size), LazyList(columns)), None)
        expected += [(key, tuple(a), tuple(b)) for a, b in zip(lo.tolist(), length.tolist(), strict=True)]
        rows.add_value(f"value{number}")
        expected.append((f"value{number}", (), (0,)))
    columns_of_all = rows.columns()
    items = [columns_of_all.item(row) for row in range(len(rows))]
    assert [
        (item.dest_index.fqn, tuple(item.storage_index.offset or ()), tuple(item.lengths)) for item in items
    ] == expected
    assert all(item.dest_offsets == item.storage_index.offset for item in items if item.storage_index.offset)


@st.composite
def target_boxes(draw: st.DrawFn, size: tuple[int, ...], ranks: int) -> list[Box]:
    """The boxes of all ranks in some layout of a tensor of that size."""
    dimension = st.none() | st.integers(0, len(size) - 1) if size else st.none()
    layout = Layout(size=size, mesh=(ranks,), placements=(draw(dimension),))
    return list(itertools.chain.from_iterable(layout.boxes(rank) for rank in range(ranks)))


@given(
    st.integers(2, 16),
    st.lists(st.integers(1, 1 << 22), min_size=40, max_size=120),
    st.integers(0, 3),
)
@settings(max_examples=60)
def test_what_everybody_holds_is_spread_evenly(ranks: int, lengths: list[int], large: int) -> None:
    sizes = [*lengths, *([1 << 26] * large)]
    keys = [f"tensor.{number}" for number in range(len(sizes))]
    heads: list[TensorHead | None] = [TensorHead(TensorProperties(torch.float32), torch.Size([size])) for size in sizes]
    rows = [(number, Box((0,), (size,)), False) for number, size in enumerate(sizes)]
    plans, _ = plan_together([SavePlan(LazyList(_columns(keys, heads, rows))) for _ in range(ranks)])
    loads = [0] * ranks
    for rank, _, box in written(plans):
        loads[rank] += 4 * box.volume
    assert sum(loads) == 4 * sum(sizes)
    # A rank writes a tenth more than another at most, or as much as the smallest part that is worth a cut.
    assert max(loads) - min(loads) <= max(0.1 * max(loads), 1 << 20)


@given(jobs().filter(lambda job: any(math.prod(layout.size) for layout, _ in job.tensors)), st.data())
@settings(max_examples=200)
def test_a_box_that_nobody_brings_is_missed(job: Job, data: st.DataObject) -> None:
    """Without one of its boxes on all ranks that hold it, a tensor has a hole, which must not go unnoticed."""
    full = [number for number, (layout, _) in enumerate(job.tensors) if math.prod(layout.size)]
    number = data.draw(st.sampled_from(full), label="tensor")
    layout = job.tensors[number][0]
    lost = data.draw(st.sampled_from([box for rank in range(job.ranks) for box in layout.boxes(rank)]), label="lost")
    plans = []
    for plan in job.plans():
        columns = write_columns(plan.items)
        items = [columns.item(row) for row in range(len(columns))]
        kept = [
            item
            for item in items
            if item.index.fqn != f"tensor.{number}"
            or item.tensor_data is None
            or Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)) != lost
        ]
        plans.append(SavePlan(kept))
    # When it was all there was, no plan names the tensor any more.
    named = any(f"tensor.{number}" in write_columns(plan.items).keys for plan in plans)
    if not named:
        assert f"tensor.{number}" not in plan_together(plans)[1].state_dict_metadata
        return
    with pytest.raises(InvalidStateError) as caught:
        plan_together(plans)
    assert caught.value.key == f"tensor.{number}"
