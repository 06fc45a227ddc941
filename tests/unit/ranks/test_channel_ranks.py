"""Ranks as threads over loopback, and what their channels do: calls that belong together, messages in pieces.

Locks and events order everything; where a test needs time to pass for a rank, its limits are small.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from thread_ranks import channels

from holdfast._ranks.channel import INTERRUPTED, Ended, Join, Lobby, losers
from holdfast._ranks.channel_ranks import ChannelRanks
from holdfast._ranks.connections import HELLO, MAGIC, Assembler, Kind, Message, cut
from holdfast._ranks.ranks import Ranks
from holdfast._torch_codec.pickles import encode_message
from holdfast._values.deadline import Deadline, Patience
from holdfast.errors import (
    CheckpointError,
    InternalError,
    NotFoundError,
    RankDisagreementError,
    RankLostError,
    StorageError,
)

# --- phases, failures, ends of connections and leftovers, without processes -------------------------------------------


QUICK = Patience(beat_s=0.05, progress_s=4.0, settle_s=0.1, farewell_s=0.5)
LONG = Patience(beat_s=0.05, progress_s=math.inf, settle_s=0.1, farewell_s=0.5)


class Job:
    """So many ranks, each a thread, connected as ranks are."""

    def __init__(self, world: int, coordinator: int = 0) -> None:
        self.coordinator = coordinator
        self.channels, self.address = channels(world, coordinator)

    def ranks(self, rank: int, patience: Patience = LONG, key: str = "save 'a'") -> ChannelRanks:
        return ChannelRanks(self.channels[rank], key=key, patience=patience)

    def run(self, work: Callable[[ChannelRanks], Any], **options: Any) -> list[Any]:
        """What ``work`` returned or raised on each rank, within one operation."""

        def one(ranks: ChannelRanks) -> Any:
            try:
                with ranks:
                    return work(ranks)
            except BaseException as error:
                return error

        everyone = [self.ranks(rank, **options) for rank in range(len(self.channels))]
        with ThreadPoolExecutor(len(everyone)) as threads:
            return [future.result() for future in [threads.submit(one, ranks) for ranks in everyone]]

    def kill(self, rank: int) -> None:
        """End the connections of a rank, as the end of its process does."""
        self.channels[rank]._connections.close()


def fail_on(rank: int, error: BaseException, ranks: ChannelRanks) -> int:
    if ranks.rank == rank:
        raise error
    return ranks.rank


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("coordinator", [0, -1])
def test_scatter_and_share_see_all_parts_in_order(world: int, coordinator: int) -> None:
    job = Job(world, coordinator % world)

    def work(ranks: ChannelRanks) -> Any:
        spoken: Ranks = ranks
        own = spoken.reduce_scatter("planning", lambda: ranks.rank, lambda parts: [(part, parts) for part in parts])
        return own, spoken.all_reduce("writing", lambda: own[0] * 2, lambda parts: parts), spoken.is_coordinator

    everyone = list(range(world))
    found = job.run(work)
    assert found == [
        ((rank, everyone), [2 * one for one in everyone], rank == coordinator % world) for rank in everyone
    ]


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("coordinator", [0, 1])
def test_a_failure_anywhere_is_raised_everywhere(failing: int, coordinator: int) -> None:
    job = Job(3, coordinator)
    original = StorageError("full", errno=28)
    found = job.run(lambda ranks: ranks.all_reduce("writing", lambda: fail_on(failing, original, ranks), sum))
    for rank, error in enumerate(found):
        assert type(error) is StorageError
        assert str(error) == f"rank {failing}: full"
        assert error.errno == 28
        assert list(error.failures) == [failing]
        assert (error.__cause__ is original) == (rank == failing)
        assert error.failures[failing][1][-1].name == "fail_on"
    assert job.run(lambda ranks: ranks.all_reduce("writing", lambda: ranks.rank, sum)) == [3, 3, 3]


@pytest.mark.parametrize("early", [0, 1])
def test_whoever_waits_for_ranks_that_have_not_come_says_so_once(
    early: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(2)
    noticed, own_log = threading.Event(), logging.Handler()
    monkeypatch.setattr(own_log, "emit", lambda record: noticed.set())
    monkeypatch.setattr(logging.getLogger("holdfast"), "handlers", [own_log])
    at_once = Patience(beat_s=0.05, progress_s=math.inf, notice_s=0.0)

    def call(rank: int) -> int:
        assert rank == early or noticed.wait(300)
        with job.ranks(rank, at_once if rank == early else LONG) as ranks:
            ranks.all_reduce("planning", lambda: None, lambda parts: None)
            return ranks.all_reduce("writing", lambda: rank, sum)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(call, range(2))) == [1, 1]
    said = f"save 'a' waits: rank {1 - early} has not come after 0 s; call it on every rank, or pass no_dist=True"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", said)]


def test_failures_that_happen_together_are_told_together() -> None:
    job = Job(4)
    meet = threading.Barrier(4)

    def local(ranks: ChannelRanks) -> None:
        meet.wait(300)
        if ranks.rank in (1, 3):
            raise (NotFoundError if ranks.rank == 1 else ValueError)(f"of {ranks.rank}")

    until_all_have_told = Patience(beat_s=0.05, progress_s=math.inf, settle_s=math.inf)
    found = job.run(
        lambda ranks: ranks.all_reduce("reading", lambda: local(ranks), lambda parts: None),
        patience=until_all_have_told,
    )
    for error in found:
        assert type(error) is NotFoundError
        assert str(error) == "rank 1: of 1"
        assert {rank: type(one) for rank, (one, _) in error.failures.items()} == {1: NotFoundError, 3: ValueError}


@pytest.mark.parametrize("merged", [lambda parts: 1 / 0, lambda parts: threading.Lock()], ids=["raises", "unpicklable"])
def test_a_merge_that_fails_or_makes_what_cannot_be_sent_fails_everywhere(merged: Callable[[Any], Any]) -> None:
    found = Job(3).run(lambda ranks: ranks.all_reduce("publishing", lambda: None, merged))
    assert [type(error) for error in found] == [CheckpointError] * 3
    assert len({str(error) for error in found}) == 1
    assert str(found[0]).startswith("rank 0: publishing failed: ")


def test_a_part_that_cannot_be_sent_fails_everywhere() -> None:
    found = Job(2).run(lambda ranks: ranks.all_reduce("planning", threading.Lock, lambda parts: None))
    assert {str(error).partition(": TypeError")[0] for error in found} == {"rank 1: planning failed"}


def test_a_merge_for_too_few_ranks_is_a_bug_with_a_name() -> None:
    found = Job(2).run(lambda ranks: ranks.reduce_scatter("planning", lambda: 1, lambda parts: [1]))
    assert [type(error) for error in found] == [InternalError] * 2


def test_an_interrupt_stays_one_where_it_happens_and_is_told_to_the_others() -> None:
    for rank in (0, 1):

        def work(ranks: ChannelRanks, rank: int = rank) -> int:
            ranks.all_reduce("planning", lambda: None, lambda parts: None)
            return ranks.all_reduce("writing", lambda: fail_on(rank, SystemExit(3), ranks), sum)

        found = Job(2).run(work)
        assert type(found[rank]) is SystemExit
        assert str(found[1 - rank]) == f"rank {rank}: writing failed: SystemExit: 3"


def test_an_error_between_the_phases_is_told_too() -> None:
    for rank in (0, 1):

        def work(ranks: ChannelRanks, rank: int = rank) -> None:
            ranks.all_reduce("planning", lambda: None, lambda parts: None)
            fail_on(rank, ValueError("in between"), ranks)
            ranks.all_reduce("writing", lambda: None, lambda parts: None)

        found = Job(2).run(work)
        assert type(found[rank]) is ValueError
        assert str(found[1 - rank]) == f"rank {rank}: planning failed: ValueError: in between"


def test_work_hears_of_failures_elsewhere_by_check() -> None:
    busy = threading.Event()

    def local(ranks: ChannelRanks) -> None:
        if ranks.rank == 1:
            assert busy.wait(300)
            raise StorageError("full")
        busy.set()
        for step in range(10_000):
            ranks.follow(lambda step=step: step, str)
            ranks.check()
            threading.Event().wait(0.001)
        raise AssertionError("nobody told")

    for coordinator in (0, 1, 2):
        busy.clear()
        found = Job(3, coordinator).run(
            lambda ranks: ranks.all_reduce("writing", lambda: local(ranks), lambda parts: None)
        )
        assert [str(error) for error in found] == ["rank 1: full"] * 3


@pytest.mark.parametrize("failing", [0, 2])
def test_what_fails_on_one_alone_is_raised_on_every_rank(failing: int) -> None:
    job = Job(3)

    def work(ranks: ChannelRanks) -> int:
        mine = ranks.locally("staging", lambda: fail_on(failing, ValueError("odd"), ranks))
        return ranks.all_reduce("writing", lambda: mine, sum)

    for error in job.run(work):
        assert type(error) is CheckpointError
        assert str(error) == f"rank {failing}: staging failed: ValueError: odd"
    failing = -1
    assert job.run(work) == [3, 3, 3]


@pytest.mark.parametrize("stuck", [0, 2])
def test_a_rank_without_progress_is_named_with_its_phase_and_file(stuck: int) -> None:
    given_up = threading.Barrier(3)

    def local(ranks: ChannelRanks) -> None:
        if ranks.rank == stuck:
            ranks.follow(lambda: 4096, lambda: "data-1")
            given_up.wait(300)
            while True:  # until it hears what the others have said of it, which may still be on its way
                ranks.check()
                time.sleep(0.01)

    def work(ranks: ChannelRanks) -> None:
        try:
            ranks.all_reduce("writing", lambda: local(ranks), lambda parts: None)
        finally:
            if ranks.rank != stuck:
                given_up.wait(300)

    job = Job(3)
    for error in job.run(work, patience=QUICK):
        assert type(error) is RankLostError
        assert (error.rank, error.phase) == (stuck, "writing")
        said = f"rank {stuck} made no progress for 4 s in 'writing' (4,096 bytes done, at 'data-1'); "
        assert str(error).startswith(said)
    assert job.run(lambda ranks: ranks.all_reduce("writing", lambda: 1, sum)) == [3, 3, 3]


def test_a_slow_rank_that_makes_progress_is_left_alone() -> None:
    def local(ranks: ChannelRanks) -> int:
        for step in range(10 if ranks.rank == 1 else 0):
            ranks.follow(lambda step=step: step, str)
            threading.Event().wait(0.5)
            ranks.check()
        return 1

    assert Job(2).run(lambda ranks: ranks.all_reduce("writing", lambda: local(ranks), sum), patience=QUICK) == [2, 2]


def test_a_rank_that_never_comes_is_named() -> None:
    job = Job(3)
    job.channels.pop()
    found = job.run(lambda ranks: ranks.all_reduce("planning", lambda: 1, sum), patience=QUICK)
    said = "rank 2 did not come to 'planning' within 4 s; call it on every rank, or pass no_dist=True"
    assert [str(error) for error in found] == [said] * 2


def test_a_coordinator_that_never_comes_is_named() -> None:
    job = Job(2)
    ranks = job.ranks(1, patience=QUICK)
    with pytest.raises(RankLostError, match="rank 0 did not come to 'planning' within 4 s"), ranks:
        ranks.all_reduce("planning", lambda: 1, sum)


def test_a_failure_is_raised_soon_even_if_the_coordinator_never_comes_and_told_when_it_does() -> None:
    job = Job(2)
    ranks = job.ranks(1)
    with pytest.raises(CheckpointError, match="rank 1: planning failed: ZeroDivisionError"), ranks:
        ranks.all_reduce("planning", lambda: 1 // 0, sum)
    late = job.ranks(0)
    with pytest.raises(CheckpointError, match="rank 1: planning failed: ZeroDivisionError"), late:
        late.all_reduce("planning", lambda: 1, sum)


def test_a_rank_that_leaves_early_is_named_at_once() -> None:
    def work(ranks: ChannelRanks) -> None:
        ranks.all_reduce("planning", lambda: None, lambda parts: None)
        if ranks.rank == 0:
            ranks.all_reduce("writing", lambda: None, lambda parts: None)

    found = Job(2).run(work)
    assert found[1] is None
    assert str(found[0]) == "rank 1 left before 'writing'; make the same calls on every rank"


def test_a_coordinator_that_left_after_its_answer_is_not_lost() -> None:
    job = Job(2)
    ranks = job.ranks(1)
    with ranks:
        told = {"guest": 1, "call": ranks.call, "serial": 0}
        for kind, step in ((Kind.WHOLE, 1), (Kind.LEFT, 0)):
            ranks._channel.deliver(Message(**told, kind=kind, step=step, payload=encode_message("all")))
        assert ranks.all_reduce("writing", lambda: None, lambda parts: None) == "all"
        ranks.check()


def test_ranks_in_different_phases_are_told_apart() -> None:
    found = Job(3).run(lambda ranks: ranks.all_reduce("saving" if ranks.rank else "loading", lambda: 1, sum))
    for error in found:
        assert type(error) is RankDisagreementError
        assert str(error).startswith(
            "the ranks disagree on the step to take: ranks 1-2 say 'saving', rank 0 says 'loading'"
        )


@pytest.mark.parametrize("lost", [0, 1])
def test_a_connection_that_ends_is_a_rank_that_is_gone(lost: int) -> None:
    job = Job(3)

    def work(ranks: ChannelRanks) -> None:
        ranks.all_reduce("planning", lambda: None, lambda parts: None)
        if ranks.rank == lost:
            job.kill(lost)
        ranks.all_reduce("writing", lambda: None, lambda parts: None)

    found = job.run(work)
    for rank in {0, 1, 2} - {lost}:
        assert type(found[rank]) is RankLostError
        assert str(found[rank]).startswith(f"rank {lost} is gone: its process or its host died, or the network broke, ")
        assert list(found[rank].failures) == [lost]
    if lost == 0:
        again = job.ranks(1)
        with pytest.raises(RankLostError, match="rank 0 cannot be reached in 'meeting the other ranks' "), again:
            again.all_reduce("planning", lambda: None, lambda parts: None)


def test_a_connection_that_broke_is_made_again() -> None:
    job = Job(2)
    assert job.run(lambda ranks: ranks.all_reduce("writing", lambda: ranks.rank, sum)) == [1, 1]
    (peer,) = job.channels[0]._connections._peers.values()
    peer.socket.shutdown(socket.SHUT_RDWR)
    while job.channels[0]._connections.has(1) or job.channels[1]._connections.has(0):
        threading.Event().wait(0.01)
    assert job.run(lambda ranks: ranks.all_reduce("writing", lambda: ranks.rank, sum)) == [1, 1]


def test_strangers_are_left_standing() -> None:
    job = Job(2)
    for said in (b"GET / HTTP/1.1\r\n" * 9, HELLO.pack(MAGIC, bytes(32), 1), HELLO.pack(MAGIC, job.address.token, 7)):
        with socket.create_connection(("127.0.0.1", job.address.port), timeout=300) as stranger:
            stranger.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
    with socket.create_connection(("127.0.0.1", job.address.port)):  # says nothing at all
        assert job.run(lambda ranks: ranks.all_reduce("writing", lambda: ranks.rank, sum)) == [1, 1]


def test_ranks_go_on_after_a_failure_that_all_have_raised() -> None:
    job = Job(3)

    def work(ranks: ChannelRanks) -> list[str]:
        heard = []
        for number in range(4):
            try:
                ranks.all_reduce(
                    "reading", lambda number=number: fail_on(number % 3, StorageError(str(number)), ranks), sum
                )
            except StorageError as error:
                heard.append(str(error))
                ranks.again()
        return [*heard, ranks.all_reduce("reading", lambda: ranks.rank, str)]

    heard = ["rank 0: 0", "rank 1: 1", "rank 2: 2", "rank 0: 3", "[0, 1, 2]"]
    assert job.run(work) == [heard] * 3


def test_a_failed_operation_leaks_nothing_into_the_next() -> None:
    job = Job(3)
    for number in range(20):
        found = job.run(
            lambda ranks, number=number: ranks.all_reduce(
                "writing", lambda: fail_on(number % 3, ValueError(str(number)), ranks), sum
            )
        )
        assert {str(error) for error in found} == {f"rank {number % 3}: writing failed: ValueError: {number}"}
        assert (
            job.run(lambda ranks, number=number: ranks.all_reduce("writing", lambda: number, sum)) == [3 * number] * 3
        )
    for channel in job.channels:
        assert not channel._operations
        assert not channel._sessions
        assert not any(channel._lobby._joins.values())
        assert not any(channel._lobby.ended.values())


def test_two_operations_may_be_open_at_once() -> None:
    job = Job(2)

    def saving(rank: int) -> ChannelRanks:
        return job.ranks(rank, key="async_save 'a'")

    def loading(rank: int) -> ChannelRanks:
        return job.ranks(rank, key="load 'b'")

    def nested() -> tuple[int, int]:
        with saving(0) as outer:
            a = outer.all_reduce("saving", lambda: 1, sum)
            with loading(0) as inner:
                b = inner.all_reduce("loading", lambda: 10, sum)
            return a + outer.all_reduce("saving on", lambda: 2, sum), b

    with ThreadPoolExecutor(2) as threads:
        # The second operation is entered inside the first on one rank, the other way round on the other.
        one = threads.submit(nested)
        with loading(1) as second, saving(1) as first:
            a = first.all_reduce("saving", lambda: 1, sum)
            b = second.all_reduce("loading", lambda: 10, sum)
            a += first.all_reduce("saving on", lambda: 2, sum)
        assert one.result() == (a, b) == (6, 20)


def test_ranks_are_used_inside_with_and_once() -> None:
    ranks = Job(1).ranks(0)
    with pytest.raises(InternalError, match="only inside"):
        ranks.all_reduce("planning", lambda: 1, sum)
    with ranks:
        assert ranks.all_reduce("planning", lambda: 1, sum) == 1
    with pytest.raises(InternalError, match="entered once"):
        ranks.__enter__()


def test_work_that_took_longer_than_the_deadline_is_no_hang_once_it_is_done() -> None:
    def local(ranks: ChannelRanks) -> int:
        threading.Event().wait(6.5)  # nobody waits meanwhile, and nobody tells of progress
        while ranks.is_coordinator and 1 not in ranks._parts.get(1, {}):
            threading.Event().wait(0.01)
        return 1

    rarely = Patience(beat_s=3.0, progress_s=6.0)
    assert Job(2).run(lambda ranks: ranks.all_reduce("writing", lambda: local(ranks), sum), patience=rarely) == [2, 2]


# --- calls: by key, in order, with what was missed and what failed early left out -------------------------------------


def join(call: int, key: str = "save a", rank: int = 1) -> Join:
    return Join(rank=rank, call=call, key=key)


def said(call: int, kind: Kind, phase: str = "") -> Message:
    return Message(guest=1, call=call, serial=0, kind=kind, phase=phase)


def ended(number: int, key: str = "save a", *, is_error: bool = False, is_open: bool = False) -> Ended:
    return Ended(number=number, key=key, verdict=str(number).encode(), is_error=is_error, is_open=is_open)


def lobby_of(*joins: Join) -> Lobby:
    lobby = Lobby()
    for each in joins:
        lobby.add(each)
    return lobby


def test_the_oldest_with_the_same_key_is_taken_and_others_wait_on() -> None:
    lobby = lobby_of(join(0, "load b"), join(1), join(2))
    first = lobby.take(1, "save a", 0)
    assert first is not None
    assert first.call == 1
    waiting = lobby.waiting(1)
    assert waiting is not None
    assert waiting.call == 0
    assert lobby.take(1, "save c", 1) is None
    assert lobby.take(2, "save a", 1) is None
    second = lobby.take(1, "save a", 1)
    assert second is not None
    assert second.call == 2


def test_what_failed_belongs_to_the_next_call_whatever_its_key() -> None:
    lobby = lobby_of(join(0, "save None"), join(1))
    lobby.hear(said(0, Kind.FAILURE))
    lobby.hear(said(0, Kind.LEFT))
    first, second = lobby.take(1, "save a", 0), lobby.take(1, "save a", 1)
    assert first is not None
    assert second is not None
    assert (first.call, [each.kind for each in first.messages]) == (0, [Kind.FAILURE, Kind.LEFT])
    assert second.call == 1


@pytest.mark.parametrize("kinds", [[Kind.FAILURE, Kind.LEFT], [Kind.PART, Kind.LEFT]], ids=["interrupted", "gave up"])
def test_what_was_left_is_passed_over_for_one_that_waits(kinds: list[Kind]) -> None:
    lobby = lobby_of(join(0))
    for kind in kinds:
        lobby.hear(said(0, kind, INTERRUPTED))
    assert lobby.take(1, "save a", 0) is None
    assert lobby.waiting(1) is None
    left = lobby.take_left(1, "save a")
    assert left is not None
    assert Kind.PART not in [each.kind for each in left.messages]
    lobby.add(left)
    lobby.add(join(1))
    taken = lobby.take(1, "save a", 0)
    assert taken is not None
    assert taken.call == 1
    assert lobby.take_left(1, "save a") is None, "who came to the next call is past that one"


def test_of_beats_the_last_is_kept_and_of_strangers_nothing() -> None:
    lobby = lobby_of(join(0))
    for kind in (Kind.BEAT, Kind.PART, Kind.BEAT, Kind.BEAT):
        lobby.hear(said(0, kind))
    lobby.hear(said(9, Kind.PART))
    taken = lobby.take(1, "save a", 0)
    assert taken is not None
    assert [each.kind for each in taken.messages] == [Kind.PART, Kind.BEAT]


def test_what_was_left_does_not_pile_up() -> None:
    lobby = Lobby()
    for call in range(100):
        lobby.add(join(call, f"save {call}"))
        lobby.hear(said(call, Kind.LEFT))
    assert len(lobby._joins[1]) == 16
    lobby.empty(1)
    assert lobby.take_left(1, "save 99") is None


def test_a_call_that_ended_is_told_once_to_whom_comes_late() -> None:
    lobby = Lobby()
    lobby.ended[1].append(ended(3))
    assert lobby.recall(2, "save a") is None
    assert lobby.recall(1, "save b") is None
    assert lobby.recall(1, "save a") == b"3"
    assert lobby.recall(1, "save a") is None


def test_after_an_error_the_next_call_of_a_rank_is_the_one_that_failed() -> None:
    lobby = Lobby()
    lobby.ended[1].append(ended(3, is_error=True))
    assert lobby.recall(1, "save b") == b"3"


def test_who_was_awaited_in_vain_may_be_at_the_next_call_of_the_same_key() -> None:
    lobby = Lobby()
    lobby.ended[1].append(ended(3, is_open=True))
    assert lobby.recall(1, "save a") is None
    assert lobby.recall(1, "save b", is_at_another=True) is None
    assert lobby.recall(1, "save a", is_at_another=True) == b"3"


def test_what_a_rank_has_passed_by_is_forgotten() -> None:
    lobby = Lobby()
    lobby.ended[1].append(ended(3))
    lobby.add(join(0, "save b"))
    assert lobby.take(1, "save b", 4) is not None
    assert lobby.recall(1, "save a", is_at_another=True) is None


def test_whom_nobody_comes_to_is_not_spared_for_ever() -> None:
    now = [0.0]
    lobby = lobby_of(join(0), join(1))
    waiting = lobby.waiting(1)
    assert waiting is not None
    assert not lobby.spared()
    waiting.spare(b"verdict", Deadline(5.0, lambda: now[0]))
    ((spared, until),) = lobby.spared()
    assert (spared.call, until.passed) == (0, False)
    now[0] = 5.0
    assert until.passed
    lobby.drop(spared)
    assert not lobby.spared()


@pytest.mark.parametrize(
    ("ours", "keys", "failing"),
    [
        (3, "b", None),  # one of four has missed ours
        (1, "bbb", "bbb"),  # we have missed theirs
        (1, "b", None),  # nobody can tell
        (2, "bb", None),
        (1, "bbc", "bb"),
        (1, "bcd", None),
    ],
)
def test_the_larger_part_goes_on(ours: int, keys: str, failing: str | None) -> None:
    others = {rank: join(0, key, rank) for rank, key in enumerate(keys, start=1)}
    found = losers(ours, others)
    assert (None if found is None else "".join(each.key for each in found)) == failing


def test_in_a_tie_the_coordinator_goes_on_twice() -> None:
    other = join(0, "b")
    for _ in range(2):
        assert losers(1, {1: other}) is None
        other.spare(b"", Deadline(5.0, lambda: 0.0))
    assert losers(1, {1: other}) == [other]


# --- messages in pieces, and back from pieces in any order ------------------------------------------------------------


def message(serial: int = 1, size: int = 10) -> Message:
    payload = random.Random(serial).randbytes(size)
    return Message(guest=3, call=7, serial=serial, kind=Kind.PART, step=2, phase="écrire", payload=payload)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200, 1000])
def test_a_message_is_whole_after_its_last_piece(size: int) -> None:
    sent = message(size=size)
    pieces = list(cut(sent, 100))
    assert len(pieces) == max(1, -(-size // 100))
    assembler = Assembler()
    assert [found for piece in pieces[:-1] for found in assembler.add(piece)] == []
    assert list(assembler.add(pieces[-1])) == [sent]


@pytest.mark.parametrize("step", [1, 3, 1000, 100_000])
def test_bytes_may_come_in_any_portions(step: int) -> None:
    sent = [message(serial, size=950) for serial in range(5)]
    stream = b"".join(piece for one in sent for piece in cut(one, 100))
    assembler = Assembler()
    portions = [stream[start : start + step] for start in range(0, len(stream), step)]
    assert [found for portion in portions for found in assembler.add(portion)] == sent


def test_pieces_of_several_messages_may_mix_in_any_order() -> None:
    sent = [message(serial, size=950) for serial in range(5)]
    pieces = [piece for one in sent for piece in cut(one, 100)]
    random.Random(0).shuffle(pieces)
    assembler = Assembler()
    whole = [found for piece in pieces for found in assembler.add(piece)]
    assert sorted(whole, key=lambda one: one.serial) == sent
    assert not assembler._unfinished
    assert not assembler._received
