"""Ranks as threads over a store in memory: phases, failures, silence and leftovers, without processes.

Locks and events order everything; where a test needs time to pass for a rank, its limits are small.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast._coord.channel import Channel, Listener, Mailbox
from holdfast._coord.channel_ranks import ChannelRanks
from holdfast._coord.ranks import Ranks
from holdfast._coord.wire import Kind, Message, cut
from holdfast._torchformat.messages import decode_message, encode_message
from holdfast._values.deadline import Patience
from holdfast.errors import (
    CheckpointError,
    InternalError,
    NotFoundError,
    RankDisagreementError,
    RankLostError,
    StorageError,
)

QUICK = Patience(beat_s=0.05, silence_s=1.0, progress_s=1.0, settle_s=0.1, farewell_s=0.5)


class MemoryStore:
    """The queues of a store; ``stop`` makes it answer nobody, ``die`` makes every call on it fail."""

    def __init__(self) -> None:
        self.queues: dict[str, queue.Queue[bytes | None]] = defaultdict(queue.Queue)
        self.running = threading.Event()
        self.running.set()
        self.dead = False

    def dial(self, is_suspect: bool) -> MemoryStore:
        self._answer()
        return self

    def _answer(self) -> None:
        assert self.running.wait(30)
        if self.dead:
            raise ConnectionResetError("the store is gone")

    def queue_push(self, key: str, value: bytes) -> None:
        self._answer()
        self.queues[key].put(value)

    def queue_pop(self, key: str) -> bytes:
        value = self.queues[key].get(timeout=30)
        self._answer()
        assert value is not None
        return value

    def die(self) -> None:
        self.dead = True
        for waiting in list(self.queues.values()):
            waiting.put(None)


class Job:
    """So many ranks, each a thread."""

    def __init__(self, world: int) -> None:
        self.store = MemoryStore()
        self.channels = [Channel(rank=rank, names=range(world), dial=self.store.dial) for rank in range(world)]

    def ranks(self, rank: int, coordinator: int = 0, patience: Patience = QUICK) -> ChannelRanks:
        return ChannelRanks(
            self.channels[rank],
            encode=encode_message,
            decode=decode_message,
            coordinator_rank=coordinator,
            patience=patience,
        )

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
            return [future.result(30) for future in [threads.submit(one, ranks) for ranks in everyone]]


def no_threads_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast")]


def fail_on(rank: int, error: BaseException, ranks: ChannelRanks) -> int:
    if ranks.rank == rank:
        raise error
    return ranks.rank


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("coordinator", [0, -1])
def test_scatter_and_share_see_all_parts_in_order(world: int, coordinator: int) -> None:
    job = Job(world)

    def work(ranks: ChannelRanks) -> Any:
        spoken: Ranks = ranks
        own = spoken.scatter("planning", lambda: ranks.rank, lambda parts: [(part, parts) for part in parts])
        return own, spoken.share("writing", lambda: own[0] * 2, lambda parts: parts), spoken.is_coordinator

    everyone = list(range(world))
    found = job.run(work, coordinator=coordinator % world)
    assert found == [
        ((rank, everyone), [2 * one for one in everyone], rank == coordinator % world) for rank in everyone
    ]
    assert no_threads_left()


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("coordinator", [0, 1])
def test_a_failure_anywhere_is_raised_everywhere(failing: int, coordinator: int) -> None:
    job = Job(3)
    original = StorageError("full", errno=28)
    found = job.run(
        lambda ranks: ranks.share("writing", lambda: fail_on(failing, original, ranks), sum), coordinator=coordinator
    )
    for rank, error in enumerate(found):
        assert type(error) is StorageError
        assert str(error) == f"rank {failing}: full"
        assert error.errno == 28
        assert list(error.failures) == [failing]
        assert (error.__cause__ is original) == (rank == failing)
        assert "StorageError: full" in error.tracebacks[failing]
    assert job.run(lambda ranks: ranks.share("writing", lambda: ranks.rank, sum)) == [3, 3, 3]
    assert no_threads_left()


def test_failures_that_happen_together_are_told_together() -> None:
    job = Job(4)
    meet = threading.Barrier(4)

    def local(ranks: ChannelRanks) -> None:
        meet.wait(10)
        if ranks.rank in (1, 3):
            raise (NotFoundError if ranks.rank == 1 else ValueError)(f"of {ranks.rank}")

    found = job.run(lambda ranks: ranks.share("reading", lambda: local(ranks), lambda parts: None))
    for error in found:
        assert type(error) is NotFoundError
        assert str(error) == "rank 1: of 1"
        assert {rank: type(one) for rank, one in error.failures.items()} == {1: NotFoundError, 3: ValueError}


@pytest.mark.parametrize("merged", [lambda parts: 1 / 0, lambda parts: threading.Lock()], ids=["raises", "unpicklable"])
def test_a_merge_that_fails_or_makes_what_cannot_be_sent_fails_everywhere(merged: Callable[[Any], Any]) -> None:
    found = Job(3).run(lambda ranks: ranks.share("publishing", lambda: None, merged))
    assert [type(error) for error in found] == [CheckpointError] * 3
    assert len({str(error) for error in found}) == 1
    assert str(found[0]).startswith("rank 0: publishing failed: ")


def test_a_part_that_cannot_be_sent_fails_everywhere() -> None:
    found = Job(2).run(lambda ranks: ranks.share("planning", threading.Lock, lambda parts: None))
    assert {str(error).partition(": TypeError")[0] for error in found} == {"rank 1: planning failed"}


def test_a_merge_for_too_few_ranks_is_a_bug_with_a_name() -> None:
    found = Job(2).run(lambda ranks: ranks.scatter("planning", lambda: 1, lambda parts: [1]))
    assert [type(error) for error in found] == [InternalError] * 2


def test_an_interrupt_stays_one_where_it_happens_and_is_told_to_the_others() -> None:
    for rank in (0, 1):
        found = Job(2).run(
            lambda ranks, rank=rank: ranks.share("writing", lambda: fail_on(rank, SystemExit(3), ranks), sum)
        )
        assert type(found[rank]) is SystemExit
        assert str(found[1 - rank]) == f"rank {rank}: writing failed: SystemExit: 3"


def test_an_error_between_the_phases_is_told_too() -> None:
    for rank in (0, 1):

        def work(ranks: ChannelRanks, rank: int = rank) -> None:
            ranks.share("planning", lambda: None, lambda parts: None)
            fail_on(rank, ValueError("in between"), ranks)
            ranks.share("writing", lambda: None, lambda parts: None)

        found = Job(2).run(work)
        assert type(found[rank]) is ValueError
        assert str(found[1 - rank]) == f"rank {rank}: planning failed: ValueError: in between"


def test_work_hears_of_failures_elsewhere_by_check() -> None:
    busy = threading.Event()

    def local(ranks: ChannelRanks) -> None:
        if ranks.rank == 1:
            assert busy.wait(10)
            raise StorageError("full")
        busy.set()
        for step in range(10_000):
            ranks.progress(step)
            ranks.check()
            threading.Event().wait(0.001)
        raise AssertionError("nobody told")

    for coordinator in (0, 1, 2):
        busy.clear()
        found = Job(3).run(
            lambda ranks: ranks.share("writing", lambda: local(ranks), lambda parts: None), coordinator=coordinator
        )
        assert [str(error) for error in found] == ["rank 1: full"] * 3


@pytest.mark.parametrize("failing", [0, 2])
def test_what_fails_on_one_alone_is_raised_on_every_rank(failing: int) -> None:
    job = Job(3)

    def work(ranks: ChannelRanks) -> int:
        mine = ranks.alone("staging", lambda: fail_on(failing, ValueError("odd"), ranks))
        return ranks.share("writing", lambda: mine, sum)

    for error in job.run(work):
        assert type(error) is CheckpointError
        assert str(error) == f"rank {failing}: staging failed: ValueError: odd"
    failing = -1
    assert job.run(work) == [3, 3, 3]


@pytest.mark.parametrize("stuck", [0, 2])
def test_a_rank_without_progress_is_named_with_its_phase_and_file(stuck: int) -> None:
    released = threading.Event()

    def local(ranks: ChannelRanks) -> None:
        if ranks.rank == stuck:
            ranks.follow(lambda: 4000, lambda: "data-1")
            ranks.progress(96)
            released.wait(10)

    job = Job(3)
    timer = threading.Timer(2.5, released.set)
    timer.start()
    found = job.run(lambda ranks: ranks.share("writing", lambda: local(ranks), lambda parts: None))
    timer.join()
    for error in found:
        assert type(error) is RankLostError
        assert (error.rank, error.phase) == (stuck, "writing")
        said = f"rank {stuck} made no progress for 1 s in 'writing' (4,096 bytes done, at 'data-1'); "
        assert str(error).startswith(said)
    assert job.run(lambda ranks: ranks.share("writing", lambda: 1, sum)) == [3, 3, 3]


def test_a_slow_rank_that_makes_progress_is_left_alone() -> None:
    def local(ranks: ChannelRanks) -> int:
        for step in range(8 if ranks.rank == 1 else 0):
            ranks.progress(step)
            threading.Event().wait(0.25)
            ranks.check()
        return 1

    assert Job(2).run(lambda ranks: ranks.share("writing", lambda: local(ranks), sum)) == [2, 2]


def test_a_rank_that_never_comes_is_named() -> None:
    job = Job(3)
    job.channels.pop()
    found = job.run(lambda ranks: ranks.share("planning", lambda: 1, sum))
    assert [str(error) for error in found] == ["rank 2 did not come to 'planning' within 1 s; look at that rank"] * 2


def test_a_coordinator_that_never_comes_is_named() -> None:
    job = Job(2)
    ranks = job.ranks(1)
    with pytest.raises(RankLostError, match="rank 0 did not come to 'planning' within 1 s"), ranks:
        ranks.share("planning", lambda: 1, sum)


def test_a_failure_is_raised_soon_even_if_the_coordinator_never_comes_and_told_when_it_does() -> None:
    job = Job(2)
    ranks = job.ranks(1)
    with pytest.raises(CheckpointError, match="rank 1: planning failed: ZeroDivisionError"), ranks:
        ranks.share("planning", lambda: 1 // 0, sum)
    late = job.ranks(0)
    with pytest.raises(CheckpointError, match="rank 1: planning failed: ZeroDivisionError"), late:
        late.share("planning", lambda: 1, sum)


def test_a_rank_that_leaves_early_is_named_at_once() -> None:
    long = Patience(beat_s=0.05, silence_s=60.0, progress_s=60.0)

    def work(ranks: ChannelRanks) -> None:
        ranks.share("planning", lambda: None, lambda parts: None)
        if ranks.rank == 0:
            ranks.share("writing", lambda: None, lambda parts: None)

    found = Job(2).run(work, patience=long)
    assert found[1] is None
    assert str(found[0]) == "rank 1 left before 'writing'; make the same calls on every rank"


def test_a_coordinator_that_left_after_its_answer_is_not_lost() -> None:
    job = Job(2)
    ranks = job.ranks(1)
    answer = Message(operation=0, sender=0, serial=1, kind=Kind.WHOLE, step=1, payload=encode_message("all"))
    for message in (answer, Message(operation=0, sender=0, serial=2, kind=Kind.LEFT)):
        for piece in cut(message):
            job.store.queue_push("inbox/1", piece)

    def see_it_leave() -> None:
        while 0 not in ranks._watch.left:
            threading.Event().wait(0.01)

    with ranks:
        assert ranks.share("writing", see_it_leave, lambda parts: None) == "all"
        ranks.check()


def test_ranks_in_different_phases_are_told_apart() -> None:
    found = Job(3).run(lambda ranks: ranks.share("saving" if ranks.rank else "loading", lambda: 1, sum))
    for error in found:
        assert type(error) is RankDisagreementError
        assert str(error).startswith(
            "the ranks disagree on the step to take: ranks 1-2 say 'saving', rank 0 says 'loading'"
        )


def test_agreement_is_silent_and_disagreement_names_who_said_what() -> None:
    assert Job(3).run(lambda ranks: ranks.agree("checkpoint path", "/a")) == [None] * 3
    found = Job(3).run(lambda ranks: ranks.agree("checkpoint path", "/b" if ranks.rank == 2 else "/a"))
    for error in found:
        assert type(error) is RankDisagreementError
        assert str(error).startswith(
            "the ranks disagree on the checkpoint path: ranks 0-1 say '/a', rank 2 says '/b'; "
        )
        assert error.said == {0: "'/a'", 1: "'/a'", 2: "'/b'"}
        assert list(error.failures) == [2]


def test_a_store_that_stops_answering_is_the_carriers_silence_and_later_operations_work() -> None:
    job = Job(2)

    def work(ranks: ChannelRanks) -> Any:
        ranks.share("planning", lambda: None, lambda parts: None)
        if ranks.rank == 0:
            job.store.running.clear()
        return ranks.share("writing", lambda: None, lambda parts: None)

    found = job.run(work)
    assert [type(error) for error in found] == [RankLostError] * 2
    assert [error.rank for error in found] == [0, 0]
    assert str(found[1]).startswith("rank 0 gave no sign of life for 1 s")
    job.store.running.set()
    assert job.run(lambda ranks: ranks.share("writing", lambda: ranks.rank, sum)) == [1, 1]


def test_a_store_that_dies_is_named_at_once_and_again() -> None:
    job = Job(2)

    def work(ranks: ChannelRanks) -> None:
        ranks.share("planning", lambda: None, lambda parts: None)
        if ranks.rank == 0:
            job.store.die()
        ranks.share("writing", lambda: None, lambda parts: None)

    found = job.run(work)
    assert type(found[1]) is RankLostError
    assert str(found[1]).startswith("rank 0 is gone: the connection to it broke in ")
    again = job.ranks(1)
    with pytest.raises(RankLostError, match="rank 0 is gone"), again:
        again.share("planning", lambda: None, lambda parts: None)


def test_a_failed_operation_leaks_nothing_into_the_next() -> None:
    job = Job(3)
    for number in range(20):
        found = job.run(
            lambda ranks, number=number: ranks.share(
                "writing", lambda: fail_on(number % 3, ValueError(str(number)), ranks), sum
            )
        )
        assert {str(error) for error in found} == {f"rank {number % 3}: writing failed: ValueError: {number}"}
        assert job.run(lambda ranks, number=number: ranks.share("writing", lambda: number, sum)) == [3 * number] * 3
    assert no_threads_left()
    for channel in job.channels:
        assert not channel._mailbox._open
        assert not channel._mailbox._kept


def test_two_operations_may_be_open_at_once() -> None:
    job = Job(2)
    first = [job.ranks(rank) for rank in range(2)]
    second = [job.ranks(rank) for rank in range(2)]

    def nested(outer: ChannelRanks, inner: ChannelRanks) -> tuple[int, int]:
        with outer:
            a = outer.share("saving", lambda: 1, sum)
            with inner:
                b = inner.share("loading", lambda: 10, sum)
            return a + outer.share("saving on", lambda: 2, sum), b

    with ThreadPoolExecutor(2) as threads:
        # The second operation is entered inside the first on one rank, the other way round on the other.
        one = threads.submit(nested, first[0], second[0])
        with second[1], first[1]:
            a = first[1].share("saving", lambda: 1, sum)
            b = second[1].share("loading", lambda: 10, sum)
            a += first[1].share("saving on", lambda: 2, sum)
        assert one.result(10) == (a, b) == (6, 20)
    assert no_threads_left()


def test_ranks_are_used_inside_with_and_once() -> None:
    ranks = Job(1).ranks(0)
    with pytest.raises(InternalError, match="only inside"):
        ranks.share("planning", lambda: 1, sum)
    with ranks:
        assert ranks.share("planning", lambda: 1, sum) == 1
    with pytest.raises(InternalError, match="entered once"):
        ranks.__enter__()
    with pytest.raises(ValueError, match="there is no rank 3 in a group of 1 ranks"):
        Job(1).ranks(0, coordinator=3)


def test_a_mailbox_keeps_what_is_early_and_drops_what_is_late() -> None:
    mailbox = Mailbox()
    heard: list[int] = []
    listener = Listener(deliver=lambda message: heard.append(message.operation), broken=lambda reason: None)

    def arrive(operation: int) -> None:
        for piece in cut(Message(operation=operation, sender=1, serial=1, kind=Kind.LEFT)):
            mailbox.take(piece)

    arrive(0)
    arrive(1)
    assert mailbox.number() == 0
    arrive(0)
    mailbox.open(0, listener)
    assert heard == [0, 0]
    arrive(0)
    assert heard == [0, 0, 0]
    assert mailbox.close(0)
    arrive(0)
    assert mailbox.number() == 1
    mailbox.open(1, listener)
    assert heard == [0, 0, 0, 1]
    assert mailbox.number() == 2
    mailbox.open(2, listener)
    assert not mailbox.close(1)
    assert mailbox.close(2)
    assert mailbox._kept == {}


def test_work_that_took_longer_than_the_deadline_is_no_hang_once_it_is_done() -> None:
    def local(ranks: ChannelRanks) -> int:
        threading.Event().wait(1.3)  # nobody waits meanwhile, and nobody tells of progress
        if ranks.is_coordinator:
            with ranks._changed:
                assert ranks._changed.wait_for(lambda: 1 in ranks._parts.get(1, {}), 10)
        return 1

    rarely = Patience(beat_s=4.9, silence_s=5.0, progress_s=1.2)
    assert Job(2).run(lambda ranks: ranks.share("writing", lambda: local(ranks), sum), patience=rarely) == [2, 2]
