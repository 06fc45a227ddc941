"""Who writes what several ranks hold."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from assigned_rows import Assignment, Held, assign
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._plan import balance
from holdfast._plan.balance import fair_shares, holder_sets

MIB = 1 << 20

Row = tuple[int, int, Sequence[int], Sequence[int]]
"""Rank, tensor, lower corner, lengths."""


def held_of(rows: Sequence[Row], *, itemsize: int = 1, dimensions: int = 1) -> Held:
    count = len(rows)
    length = np.array([row[3] for row in rows], dtype=np.int64).reshape(count, dimensions)
    return Held(
        rank=np.array([row[0] for row in rows], dtype=np.int64),
        tensor=np.array([row[1] for row in rows], dtype=np.int64),
        lo=np.array([row[2] for row in rows], dtype=np.int64).reshape(count, dimensions),
        length=length,
        itemsize=np.full(count, itemsize, dtype=np.int64),
    )


def replicated(lengths: Sequence[Sequence[int]], ranks: int, *, itemsize: int = 1) -> Held:
    rows = [(rank, number, [0] * len(one), one) for rank in range(ranks) for number, one in enumerate(lengths)]
    return held_of(rows, itemsize=itemsize, dimensions=len(lengths[0]))


def written(held: Held, assignment: Assignment) -> list[tuple[int, int, list[int], list[int]]]:
    return [
        (int(held.rank[row]), int(held.tensor[row]), lo.tolist(), length.tolist())
        for row, lo, length in zip(assignment.row, assignment.lo, assignment.length, strict=True)
    ]


def loads(held: Held, assignment: Assignment, ranks: int) -> npt.NDArray[np.int64]:
    whole = held.length[assignment.row].prod(axis=1)
    share = assignment.length.prod(axis=1) * held.nbytes[assignment.row] // np.maximum(whole, 1)
    return np.bincount(held.rank[assignment.row], weights=share, minlength=ranks).astype(np.int64)


def test_nothing_held_is_nothing_written() -> None:
    held = held_of([], dimensions=3)
    assignment = assign(held, ranks=4)
    assert (assignment.row.shape, assignment.lo.shape, assignment.length.shape) == ((0,), (0, 3), (0, 3))


def test_boxes_of_one_rank_stay_there_in_the_order_of_tensor_and_box() -> None:
    held = held_of([(1, 1, [4], [4]), (0, 1, [0], [4]), (1, 0, [0], [9])])
    assignment = assign(held, ranks=2)
    assert assignment.row.tolist() == [2, 1, 0]
    assert written(held, assignment) == [(1, 0, [0], [9]), (0, 1, [0], [4]), (1, 1, [4], [4])]


def test_scalars_without_dimensions_have_one_writer_each() -> None:
    held = replicated([[], [], []], 2, itemsize=8)
    assignment = assign(held, ranks=2, split_bytes=16)
    assert held.tensor[assignment.row].tolist() == [0, 1, 2]
    assert assignment.lo.shape == (3, 0)
    assert sorted(loads(held, assignment, 2).tolist()) == [8, 16]


def test_small_replicas_go_to_the_least_loaded_holder() -> None:
    rows: list[Row] = [(rank, number, [0], [size]) for number, size in enumerate([30, 20, 10]) for rank in range(3)]
    held = held_of([*rows, (0, 3, [0], [40])])
    assert written(held, assign(held, ranks=3)) == [
        (1, 0, [0], [30]),
        (2, 1, [0], [20]),
        (2, 2, [0], [10]),
        (0, 3, [0], [40]),
    ]


def test_to_the_lowest_holder_when_asked_whole_and_unbalanced() -> None:
    held = held_of([(2, 0, [0], [64 * MIB]), (1, 0, [0], [64 * MIB]), (2, 1, [0], [5]), (3, 1, [0], [5])])
    assignment = assign(held, ranks=4, to_lowest_rank=True)
    assert written(held, assignment) == [(1, 0, [0], [64 * MIB]), (2, 1, [0], [5])]


def test_boxes_without_bytes_go_to_their_lowest_holder() -> None:
    held = held_of([(rank, number, [7], [0]) for rank in (3, 1, 2) for number in range(4)])
    assert held.rank[assign(held, ranks=4).row].tolist() == [1, 1, 1, 1]


def test_boxes_that_overlap_or_share_a_corner_are_no_replicas() -> None:
    rows: list[Row] = [(0, 0, [0], [4]), (1, 0, [0], [5]), (2, 0, [1], [4]), (3, 0, [0], [0])]
    held = held_of(rows)
    assert len(assign(held, ranks=4).row) == 4


def test_a_large_replica_is_split_along_its_first_dimension() -> None:
    held = replicated([[4096, 8192]], 4, itemsize=2)
    assert written(held, assign(held, ranks=4)) == [(rank, 0, [1024 * rank, 0], [1024, 8192]) for rank in range(4)]


def test_dimensions_of_length_one_are_passed_over() -> None:
    held = replicated([[1, 1, 64 * MIB]], 2)
    assert written(held, assign(held, ranks=2)) == [
        (0, 0, [0, 0, 0], [1, 1, 32 * MIB]),
        (1, 0, [0, 0, 32 * MIB], [1, 1, 32 * MIB]),
    ]


def test_a_first_dimension_too_short_for_the_holders_leaves_it_to_the_next() -> None:
    held = replicated([[2, 10 * MIB]], 5)
    assignment = assign(held, ranks=5)
    assert assignment.length.tolist() == [[2, 2 * MIB]] * 5


def test_parts_go_where_room_is_left() -> None:
    private = (0, 1, [0], [50 * MIB])
    held = held_of([(0, 0, [0], [64 * MIB]), (1, 0, [0], [64 * MIB]), (2, 0, [0], [64 * MIB]), private])
    assignment = assign(held, ranks=3)
    assert loads(held, assignment, 3).tolist() == [50 * MIB, 32 * MIB, 32 * MIB]


def test_only_boxes_on_a_border_between_holders_are_split() -> None:
    held = replicated([[64 * MIB]] * 30, 4)
    assignment = assign(held, ranks=4)
    assert len(assignment.row) <= 30 + 3
    assert loads(held, assignment, 4).tolist() == [480 * MIB] * 4


def test_boxes_up_to_the_limit_stay_whole_where_ranks_write_much() -> None:
    held = replicated([[16 * MIB]] * 90, 4)
    assert len(assign(held, ranks=4).row) == 90
    assert len(assign(held, ranks=4, split_bytes=15 * MIB).row) > 90


def test_parts_are_not_tiny_and_not_more_than_holders() -> None:
    held = replicated([[40 * MIB], [3 * MIB]], 64)
    assignment = assign(held, ranks=64)
    assert assignment.length.min() >= MIB // 4
    assert np.bincount(held.tensor[assignment.row]).max() <= 64
    assert loads(held, assignment, 64).max() <= MIB
    much = replicated([[400 * MIB]] * 3, 7)
    assert assign(much, ranks=7).length.min() >= MIB


def test_a_box_that_can_only_just_be_halved_is_shared() -> None:
    held = replicated([[5, 512, 52]], 2, itemsize=8)
    assert sorted(assign(held, ranks=2).length[:, 0].tolist()) == [2, 3]


def test_what_a_set_of_holders_leaves_uneven_the_next_evens_out() -> None:
    rows: list[Row] = [(rank, rank // 2, [0], [900_000]) for rank in range(16)]
    rows += [(rank, number, [0], [100_000]) for rank in range(16) for number in range(8, 96)]
    held = held_of(rows)
    assert loads(held, assign(held, ranks=16), 16).tolist() == [1_000_000] * 16


def test_replicas_within_pairs_are_balanced_within_them() -> None:
    rows: list[Row] = [
        (replica * 4 + shard, number, [shard * 1000], [1000])
        for replica in range(2)
        for shard in range(4)
        for number in range(200)
    ]
    held = held_of(rows, itemsize=4)
    assignment = assign(held, ranks=8)
    assert len(assignment.row) == 800
    assert loads(held, assignment, 8).tolist() == [400_000] * 8


def test_a_chain_of_overlapping_holder_sets_evens_out() -> None:
    # All that rank 0 gives away must pass on from neighbour to neighbour.
    rows: list[Row] = [(0, 100, [0], [120 * MIB])]
    for left in range(5):
        size = 240 * MIB if left == 4 else 90 * MIB
        rows += [(left, left, [0], [size]), (left + 1, left, [0], [size])]
    held = held_of(rows)
    assignment = assign(held, ranks=6)
    assert loads(held, assignment, 6).max() <= 1.1 * 120 * MIB
    assert loads(held, assignment, 6).min() >= 0.9 * 120 * MIB


def test_thousands_of_scalars_are_not_left_to_one_rank() -> None:
    held = replicated([[MIB]] * 51 + [[4 + number % 3] for number in range(4000)], 4)
    counts = np.bincount(held.rank[assign(held, ranks=4).row])
    assert counts.min() >= 1000
    assert counts.max() <= 1030


def test_many_small_boxes_are_balanced_without_placing_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "_PLACED_ONE_BY_ONE", 0)
    sizes = np.random.default_rng(3).integers(1, 200_000, size=3000).tolist()
    rows: list[Row] = [(rank, number, [0], [size]) for number, size in enumerate(sizes) for rank in range(5)]
    held = held_of([*rows, (4, 9999, [0], [30 * MIB])])
    assignment = assign(held, ranks=5)
    assert np.sort(held.tensor[assignment.row]).tolist() == [*range(3000), 9999]
    result = loads(held, assignment, 5)
    assert result.max() - result.min() <= MIB // 20
    counts = np.bincount(held.rank[assignment.row])
    assert counts[:4].min() >= 0.8 * counts[:4].mean()


def test_different_holder_sets_with_the_same_sum_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    scrambled = balance.scrambled

    def alike_at_first(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        calls.append(int(words[0]))
        return np.ones_like(words) if len(calls) == 1 else scrambled(words)

    monkeypatch.setattr(balance, "scrambled", alike_at_first)
    held = held_of([(rank, 0, [10 * (rank // 2)], [10]) for rank in range(6)])
    assert held.rank[assign(held, ranks=6).row].tolist() == [0, 2, 4]
    assert calls == [0, 6]


def test_coordinates_too_wide_for_one_sorting_key() -> None:
    far = 1 << 55
    rows: list[Row] = [(rank, 0, [far * i, far * j], [1 + i, 1 + j]) for rank in (1, 0) for i in (1, 0) for j in (0, 1)]
    held = held_of(rows, dimensions=2)
    assert assign(held, ranks=2).lo.tolist() == [[0, 0], [0, far], [far, 0], [far, far]]


@pytest.mark.parametrize("replicas", [1, 2, 128])
def test_many_ranks_write_as_much_as_each_other(replicas: int) -> None:
    ranks, tensors = 128, 64
    shards = ranks // replicas
    rank = np.repeat(np.arange(ranks), tensors)
    tensor = np.tile(np.arange(tensors), ranks)
    rows = np.tile(np.random.default_rng(0).integers(1, 9, size=tensors), ranks) * (4096 // shards + 1)
    length = np.stack([rows, np.full(len(rank), 1024)], axis=1)
    lo = np.stack([rows * (rank % shards), np.zeros_like(rank)], axis=1)
    held = Held(
        rank=rank,
        tensor=tensor,
        lo=lo,
        length=length,
        itemsize=np.full(len(rank), 2),
    )
    assignment = assign(held, ranks=ranks)
    result = loads(held, assignment, ranks)
    assert result.max() - result.min() <= max(MIB, 0.1 * result.mean())


# --- against brute force: boxes of real sizes, because planning looks at no data --------------------------------------


DIMENSIONS = 3

Corner = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box of one tensor and the ranks that hold it."""

    tensor: int
    lo: Corner
    length: Corner
    itemsize: int
    holders: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.length) * self.itemsize


@st.composite
def lengths(draw: st.DrawFn) -> Corner:
    """Lengths of up to 256 MiB or so, any number of them 1, the small as likely as the large."""
    sizes = [1 << draw(st.integers(0, 9)) for _ in range(DIMENSIONS)]
    return tuple(draw(st.integers(size, 2 * size - 1)) if size > 1 else draw(st.integers(0, 1)) for size in sizes)


@st.composite
def pieces(draw: st.DrawFn, ranks: int, *, everywhere: bool = False) -> list[Piece]:
    """Tensors cut in up to three boxes along one dimension, each held by any ranks, or by all."""
    result: list[Piece] = []
    everyone = tuple(range(ranks))
    some = st.sets(st.integers(0, ranks - 1), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    usual = draw(st.lists(some, min_size=1, max_size=4))
    for tensor in range(draw(st.integers(1, 12))):
        length = draw(lengths())
        itemsize = draw(st.sampled_from([1, 2, 4, 8]))
        axis = draw(st.integers(0, DIMENSIONS - 1))
        for shard in range(draw(st.integers(1, 3))):
            lo = tuple(shard * length[axis] if number == axis else 0 for number in range(DIMENSIONS))
            holders = everyone if everywhere else draw(st.sampled_from([everyone, *usual]))
            piece = Piece(tensor=tensor, lo=lo, length=length, itemsize=itemsize, holders=holders)
            if all(piece.lo != other.lo or piece.tensor != other.tensor for other in result):
                result.append(piece)
    return result


def holders_of(found: list[Piece], order: npt.NDArray[np.int64] | None = None) -> Held:
    rows = [(rank, piece) for piece in found for rank in piece.holders]
    rows = rows if order is None else [rows[index] for index in order]
    return Held(
        rank=np.array([rank for rank, _ in rows], dtype=np.int64),
        tensor=np.array([piece.tensor for _, piece in rows], dtype=np.int64),
        lo=np.array([piece.lo for _, piece in rows], dtype=np.int64).reshape(len(rows), DIMENSIONS),
        length=np.array([piece.length for _, piece in rows], dtype=np.int64).reshape(len(rows), DIMENSIONS),
        itemsize=np.array([piece.itemsize for _, piece in rows], dtype=np.int64),
    )


@dataclass(frozen=True)
class Part:
    rank: int
    tensor: int
    held_lo: Corner
    lo: Corner
    length: Corner
    nbytes: int


def parts_of(
    held: Held,
    *,
    ranks: int,
    to_lowest_rank: bool = False,
    split_bytes: int = 16 * MIB,
) -> list[Part]:
    assignment = assign(
        held,
        ranks=ranks,
        to_lowest_rank=to_lowest_rank,
        split_bytes=split_bytes,
    )
    return [
        Part(
            rank=int(held.rank[row]),
            tensor=int(held.tensor[row]),
            held_lo=tuple(held.lo[row].tolist()),
            lo=tuple(lo),
            length=tuple(length),
            nbytes=math.prod(length) * int(held.itemsize[row]),
        )
        for row, lo, length in zip(
            assignment.row.tolist(), assignment.lo.tolist(), assignment.length.tolist(), strict=True
        )
    ]


def loads_of(parts: list[Part], ranks: int) -> npt.NDArray[np.int64]:
    result = np.zeros(ranks, dtype=np.int64)
    for part in parts:
        result[part.rank] += part.nbytes
    return result


def meet(one: Part, other: Part) -> bool:
    return all(
        max(low, other_low) < min(low + length, other_low + other_length)
        for low, length, other_low, other_length in zip(one.lo, one.length, other.lo, other.length, strict=True)
    )


def check_tiles(found: list[Piece], parts: list[Part], *, least: int) -> None:
    """Every piece is tiled by its parts, each by another rank that holds it, and no part is small but a small piece."""
    by_box = defaultdict(list)
    for part in parts:
        by_box[part.tensor, part.held_lo].append(part)
    assert by_box.keys() == {(piece.tensor, piece.lo) for piece in found}
    for piece in found:
        mine = by_box[piece.tensor, piece.lo]
        assert {part.rank for part in mine} <= set(piece.holders)
        assert len({part.rank for part in mine}) == len(mine)
        assert sum(part.nbytes for part in mine) == piece.nbytes
        assert not any(meet(one, other) for one, other in itertools.combinations(mine, 2))
        for part in mine:
            ends = zip(part.lo, part.length, piece.lo, piece.length, strict=True)
            assert all(low >= low_held and low + size <= low_held + held for low, size, low_held, held in ends)
            assert len(mine) == 1 or part.nbytes >= least
        if piece.nbytes == 0:
            assert [part.rank for part in mine] == [piece.holders[0]]


def least_possible(found: list[Piece], ranks: int) -> float:
    """The bytes of the fullest rank if bytes were water: some ranks have to hold what nobody else does."""
    bounds = [0.0]
    for size in range(1, ranks + 1):
        for chosen in itertools.combinations(range(ranks), size):
            theirs = sum(piece.nbytes for piece in found if set(piece.holders) <= set(chosen))
            bounds.append(theirs / size)
    return max(bounds)


@settings(max_examples=200)
@given(st.data(), st.integers(1, 6), st.sampled_from([64, 4096, MIB, 16 * MIB]), st.booleans())
def test_every_box_is_written_once_by_ranks_that_hold_it(
    data: st.DataObject, ranks: int, split_bytes: int, to_lowest_rank: bool
) -> None:
    found = data.draw(pieces(ranks))
    parts = parts_of(holders_of(found), ranks=ranks, to_lowest_rank=to_lowest_rank, split_bytes=split_bytes)
    check_tiles(found, parts, least=split_bytes // 64)
    order = [(part.tensor, part.lo) for part in parts]
    assert order == sorted(order)
    if to_lowest_rank:
        assert sorted((part.tensor, part.lo, part.rank) for part in parts) == sorted(
            (piece.tensor, piece.lo, piece.holders[0]) for piece in found
        )


@settings(max_examples=200)
@given(st.data(), st.integers(2, 9))
def test_what_all_ranks_hold_is_balanced(data: st.DataObject, ranks: int) -> None:
    found = data.draw(pieces(ranks, everywhere=True))
    loads = loads_of(parts_of(holders_of(found), ranks=ranks), ranks)
    assert loads.max() - loads.min() <= max(MIB, 0.1 * loads.mean())


@settings(max_examples=100)
@given(st.data(), st.integers(1, 4), st.integers(2, 3))
def test_replicas_of_shards_are_balanced_among_their_holders(data: st.DataObject, shards: int, replicas: int) -> None:
    ranks = shards * replicas
    tensors = data.draw(pieces(1, everywhere=True))
    found = []
    for shard in range(shards):
        holders = tuple(replica * shards + shard for replica in range(replicas))
        for piece in tensors:
            lo = (*piece.lo[:-1], piece.lo[-1] + 10_000 * shard)
            found.append(
                Piece(tensor=piece.tensor, lo=lo, length=piece.length, itemsize=piece.itemsize, holders=holders)
            )
    parts = parts_of(holders_of(found), ranks=ranks)
    check_tiles(found, parts, least=MIB // 4)
    loads = loads_of(parts, ranks)
    for shard in range(shards):
        theirs = loads[shard::shards]
        assert theirs.max() - theirs.min() <= max(MIB, 0.1 * theirs.mean())


@settings(max_examples=150)
@given(st.data(), st.integers(2, 6))
def test_no_rank_writes_much_more_than_any_plan_must_give_it(data: st.DataObject, ranks: int) -> None:
    found = data.draw(pieces(ranks))
    loads = loads_of(parts_of(holders_of(found), ranks=ranks), ranks)
    assert loads.max() <= 1.1 * least_possible(found, ranks) + MIB


@settings(max_examples=100)
@given(st.data(), st.integers(1, 6))
def test_the_order_of_rows_does_not_matter(data: st.DataObject, ranks: int) -> None:
    found = data.draw(pieces(ranks))
    held = holders_of(found)
    order = np.array(data.draw(st.permutations(range(len(held.rank)))), dtype=np.int64)
    assert parts_of(holders_of(found, order), ranks=ranks) == parts_of(held, ranks=ranks)


@settings(max_examples=60)
@given(st.data(), st.integers(2, 6))
def test_placing_most_boxes_at_once_keeps_the_balance(data: st.DataObject, ranks: int) -> None:
    sizes = data.draw(st.lists(st.integers(1, MIB), min_size=1, max_size=40))
    repeats = data.draw(st.integers(1, 20))
    everyone = tuple(range(ranks))
    found = [
        Piece(tensor=number, lo=(0, 0, 0), length=(size, 1, 1), itemsize=1, holders=everyone)
        for number, size in enumerate(sizes * repeats)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, "_PLACED_ONE_BY_ONE", 0)
        parts = parts_of(holders_of(found), ranks=ranks)
    check_tiles(found, parts, least=MIB // 4)
    loads = loads_of(parts, ranks)
    assert loads.max() - loads.min() <= max(MIB, 0.1 * loads.mean())


# Bytes evened out.


def shares_of(loads: list[float], *sets: tuple[list[int], float]) -> list[list[float]]:
    reached = np.array(loads, dtype=float)
    groups = holder_sets([np.array(ranks) for ranks, _ in sets], np.arange(len(sets)))
    found = fair_shares(reached, groups, [amount for _, amount in sets])
    expected = np.array(loads, dtype=float)
    for (ranks, _), share in zip(sets, found, strict=True):
        expected[ranks] += share
    assert reached == pytest.approx(expected)
    return [share.tolist() for share in found]


def test_the_ranks_that_have_the_least_take_first() -> None:
    assert shares_of([0, 0, 0, 0], ([0, 1, 2, 3], 12)) == [[3, 3, 3, 3]]
    assert shares_of([4, 0, 0, 0], ([0, 1, 2, 3], 8)) == [
        [0, pytest.approx(8 / 3), pytest.approx(8 / 3), pytest.approx(8 / 3)]
    ]


def test_sets_that_overlap_even_out() -> None:
    first, second = shares_of([0, 0, 0], ([0, 1], 6), ([1, 2], 6))
    assert first == [pytest.approx(4, abs=0.1), pytest.approx(2, abs=0.1)]
    assert second == [pytest.approx(2, abs=0.1), pytest.approx(4, abs=0.1)]


@pytest.mark.parametrize("replicas", [2, 64, 4096])
def test_thousands_of_ranks_share_fairly(replicas: int) -> None:
    ranks = 4096
    shards = ranks // replicas
    loads = np.arange(ranks) % 5 * 10.0
    holders = [np.arange(shard, ranks, shards) for shard in range(shards)]
    fair_shares(loads, holder_sets(holders, np.arange(shards)), [1e6] * shards)
    assert loads.max() - loads.min() <= 0.1 * loads.mean()
