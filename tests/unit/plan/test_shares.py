"""Bytes evened out: over hosts, then over the ranks of each."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast._plan.shares import UNKNOWN_HOST, Levels, fair_shares, host_numbers


@pytest.mark.parametrize(
    ("said", "numbers"),
    [
        ([7, 7, 3, 3], [0, 0, 1, 1]),
        ([3, 7, 3, 7], [0, 1, 0, 1]),
        ([3, UNKNOWN_HOST, 3, UNKNOWN_HOST], [0, 1, 0, 2]),
        ([7, 7, 7], None),
        ([1, 2, 3], None),
        ([UNKNOWN_HOST] * 3, None),
        ([], None),
    ],
)
def test_hosts_are_numbered_by_their_lowest_rank_where_they_make_a_difference(
    said: list[int], numbers: list[int] | None
) -> None:
    found = host_numbers(said)
    assert (None if found is None else found.tolist()) == numbers


def shares_of(loads: list[float], hosts: list[int] | None, *sets: tuple[list[int], float]) -> list[list[float]]:
    levels = Levels(np.array(loads, dtype=float), None if hosts is None else np.array(hosts))
    groups = [levels.holders(np.array(ranks)) for ranks, _ in sets]
    found = fair_shares(levels, groups, [amount for _, amount in sets])
    expected = np.array(loads, dtype=float)
    for (ranks, _), share in zip(sets, found, strict=True):
        expected[ranks] += share
    assert levels.ranks == pytest.approx(expected)
    return [share.tolist() for share in found]


def test_a_host_with_one_rank_takes_as_much_as_one_with_three() -> None:
    assert shares_of([0, 0, 0, 0], [0, 0, 1, 0], ([0, 1, 2, 3], 12)) == [[2, 2, 6, 2]]
    assert shares_of([0, 0, 0, 0], None, ([0, 1, 2, 3], 12)) == [[3, 3, 3, 3]]


def test_what_ranks_of_a_host_write_that_hold_nothing_of_a_set_counts() -> None:
    # Rank 1 is full; rank 0 holds the set, but shares the host with it.
    assert shares_of([0, 8, 0, 0], [0, 0, 1, 1], ([0, 2, 3], 8)) == [[0, 4, 4]]


def test_on_a_host_the_ranks_that_have_the_least_take_first() -> None:
    assert shares_of([4, 0, 0, 0], [0, 0, 1, 1], ([0, 1, 2, 3], 8)) == [[0, 2, 3, 3]]


def test_sets_that_overlap_even_out_over_hosts() -> None:
    first, second = shares_of([0, 0, 0], [0, 0, 1], ([0, 1], 6), ([1, 2], 6))
    assert first == [pytest.approx(3), pytest.approx(3)]
    assert second == [pytest.approx(0), pytest.approx(6)]


@pytest.mark.parametrize("replicas", [2, 64, 4096])
def test_thousands_of_ranks_on_hundreds_of_hosts_share_fairly(replicas: int) -> None:
    ranks = 4096
    shards = ranks // replicas
    levels = Levels(np.arange(ranks) % 5 * 1000.0, np.arange(ranks) // 8)
    groups = [levels.holders(np.arange(shard, ranks, shards)) for shard in range(shards)]
    fair_shares(levels, groups, [1e6] * shards)
    on_hosts = levels.ranks.reshape(-1, 8).sum(axis=1)
    assert on_hosts.max() - on_hosts.min() <= 0.1 * on_hosts.mean()
