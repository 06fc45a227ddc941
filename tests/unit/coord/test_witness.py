"""The word of those who have lost the coordinator: one for all of them, wherever a store is left."""

from __future__ import annotations

import math
import time
from collections import defaultdict

import pytest

from holdfast._coord.channel import Channel
from holdfast._coord.witness import Witness
from holdfast._values.deadline import Deadline

NEVER = Deadline(math.inf, time.monotonic)
NOW = Deadline(0, time.monotonic)


class Register:
    """What a store keeps by key; ``late`` ranks come one at a time, whenever somebody looks how many have."""

    def __init__(self, late: int = 0) -> None:
        self.words: dict[str, str] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self.late = late

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.words.get(key, "") == expected:
            self.words[key] = desired
        return self.words[key].encode()

    def add(self, key: str, amount: int) -> int:
        if amount == 0 and self.late:
            self.late -= 1
            self.counts[key] += 1
        self.counts[key] += amount
        return self.counts[key]


class Stores:
    """Those of a job of four ranks: the first and the last run one each."""

    def __init__(self, late: int = 0) -> None:
        self.carried, self.witnessed = Register(late), Register(late)

    def witness(self, rank: int, lost: list[int], operation: int = 7) -> Witness:
        channel = Channel(
            rank=rank, names=range(4), dial=lambda is_suspect: self.carried, dial_witness=lambda: self.witnessed
        )
        return Witness(channel, operation, lost)


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_the_first_word_is_everyones_and_is_not_asked_of_a_lost_rank(lost: int) -> None:
    stores = Stores()
    words = [stores.witness(rank, [lost]).settle(f"{rank} \xff".encode()) for rank in range(4) if rank != lost]
    assert words == [words[0]] * 3
    assert words[0] == ("1 \xff" if lost == 0 else "0 \xff").encode()
    assert bool(stores.carried.words) == (lost == 3)
    assert bool(stores.witnessed.words) == (lost != 3)


def test_operations_have_words_of_their_own() -> None:
    stores = Stores()
    assert [stores.witness(1, [0], operation).settle(b"%d" % operation) for operation in (7, 8)] == [b"7", b"8"]


@pytest.mark.parametrize(("lost", "keeper"), [(0, 3), (1, 3), (3, 0)])
def test_the_rank_with_the_store_stays_until_all_survivors_came(lost: int, keeper: int) -> None:
    stores = Stores(late=2)
    witness = stores.witness(keeper, [lost])
    witness.settle(b"lost")
    witness.stay(NEVER)
    assert (stores.carried if keeper == 0 else stores.witnessed).late == 0


def test_the_rank_with_the_store_does_not_stay_for_ever_and_the_others_not_at_all() -> None:
    stores = Stores()
    for rank, deadline in ((3, NOW), (1, NEVER)):
        witness = stores.witness(rank, [0])
        witness.settle(b"lost")
        witness.stay(deadline)


def test_where_no_second_store_runs_there_is_nothing_to_settle() -> None:
    channel = Channel(rank=1, names=range(4), dial=lambda is_suspect: Register())
    with pytest.raises(ConnectionError, match="rank 3 runs no store"):
        Witness(channel, 7, [0])
