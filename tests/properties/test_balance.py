"""Who writes what, against brute force: boxes of real sizes, because planning looks at no data."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from assigned_rows import Held, assign
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._plan import balance

MIB = 1 << 20
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


def held_of(found: list[Piece], order: npt.NDArray[np.int64] | None = None) -> Held:
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
    hosts: list[int] | None = None,
    split_bytes: int = 16 * MIB,
) -> list[Part]:
    assignment = assign(
        held,
        ranks=ranks,
        to_lowest_rank=to_lowest_rank,
        hosts=None if hosts is None else np.array(hosts),
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
    parts = parts_of(held_of(found), ranks=ranks, to_lowest_rank=to_lowest_rank, split_bytes=split_bytes)
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
    loads = loads_of(parts_of(held_of(found), ranks=ranks), ranks)
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
    parts = parts_of(held_of(found), ranks=ranks)
    check_tiles(found, parts, least=MIB // 4)
    loads = loads_of(parts, ranks)
    for shard in range(shards):
        theirs = loads[shard::shards]
        assert theirs.max() - theirs.min() <= max(MIB, 0.1 * theirs.mean())


@settings(max_examples=150)
@given(st.data(), st.integers(2, 6))
def test_no_rank_writes_much_more_than_any_plan_must_give_it(data: st.DataObject, ranks: int) -> None:
    found = data.draw(pieces(ranks))
    loads = loads_of(parts_of(held_of(found), ranks=ranks), ranks)
    assert loads.max() <= 1.1 * least_possible(found, ranks) + MIB


@settings(max_examples=100)
@given(st.data(), st.integers(1, 6))
def test_the_order_of_rows_does_not_matter(data: st.DataObject, ranks: int) -> None:
    found = data.draw(pieces(ranks))
    held = held_of(found)
    order = np.array(data.draw(st.permutations(range(len(held.rank)))), dtype=np.int64)
    assert parts_of(held_of(found, order), ranks=ranks) == parts_of(held, ranks=ranks)


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
        parts = parts_of(held_of(found), ranks=ranks)
    check_tiles(found, parts, least=MIB // 4)
    loads = loads_of(parts, ranks)
    assert loads.max() - loads.min() <= max(MIB, 0.1 * loads.mean())


# Over hosts.


def on_hosts(loads: npt.NDArray[np.int64], hosts: list[int]) -> npt.NDArray[np.int64]:
    return np.array([loads[np.array(hosts) == host].sum() for host in range(max(hosts) + 1)])


@st.composite
def hosts_of(draw: st.DrawFn, ranks: int) -> list[int]:
    """The host of each rank, by lowest rank; hosts have any number of ranks."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(draw(st.integers(0, 2)), len(numbers)) for _ in range(ranks)]


@settings(max_examples=100)
@given(st.data(), st.integers(1, 6), st.sampled_from([64, MIB, 16 * MIB]))
def test_every_box_is_written_once_on_any_hosts(data: st.DataObject, ranks: int, split_bytes: int) -> None:
    found = data.draw(pieces(ranks))
    hosts = data.draw(hosts_of(ranks))
    check_tiles(
        found, parts_of(held_of(found), ranks=ranks, hosts=hosts, split_bytes=split_bytes), least=split_bytes // 64
    )


@settings(max_examples=200)
@given(st.data(), st.integers(2, 9))
def test_what_all_ranks_hold_is_balanced_over_hosts_and_over_the_ranks_of_each(data: st.DataObject, ranks: int) -> None:
    found = data.draw(pieces(ranks, everywhere=True))
    hosts = data.draw(hosts_of(ranks))
    loads = loads_of(parts_of(held_of(found), ranks=ranks, hosts=hosts), ranks)
    theirs = on_hosts(loads, hosts)
    assert theirs.max() - theirs.min() <= max(2 * MIB, 0.1 * theirs.mean())
    for host in range(max(hosts) + 1):
        together = loads[np.array(hosts) == host]
        assert together.max() - together.min() <= max(MIB, 0.1 * together.mean())


@settings(max_examples=150)
@given(st.data(), st.integers(2, 6))
def test_no_host_writes_much_more_than_any_plan_must_give_it(data: st.DataObject, ranks: int) -> None:
    found = data.draw(pieces(ranks))
    hosts = data.draw(hosts_of(ranks))
    theirs = on_hosts(loads_of(parts_of(held_of(found), ranks=ranks, hosts=hosts), ranks), hosts)
    as_hosts = [
        dataclasses.replace(piece, holders=tuple(sorted({hosts[rank] for rank in piece.holders}))) for piece in found
    ]
    assert theirs.max() <= 1.1 * least_possible(as_hosts, len(theirs)) + 2 * MIB


@settings(max_examples=100)
@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_where_hosts_are_alike_ranks_are_balanced_as_well(data: st.DataObject, count: int, on_each: int) -> None:
    ranks = count * on_each
    found = data.draw(pieces(ranks, everywhere=True))
    loads = loads_of(parts_of(held_of(found), ranks=ranks, hosts=[rank // on_each for rank in range(ranks)]), ranks)
    assert loads.max() - loads.min() <= max(MIB, 0.1 * loads.mean())


@settings(max_examples=100)
@given(st.data(), st.integers(1, 6))
def test_one_host_or_one_for_each_rank_changes_nothing(data: st.DataObject, ranks: int) -> None:
    held = held_of(data.draw(pieces(ranks)))
    expected = parts_of(held, ranks=ranks)
    assert parts_of(held, ranks=ranks, hosts=[0] * ranks) == expected
    assert parts_of(held, ranks=ranks, hosts=list(range(ranks))) == expected
