"""Ranks agree on a step: in every order in which messages and steps may come, and over real channels."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import random
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import channels

from holdfast._ranks.agreement import AGREEING, Agreement
from holdfast._ranks.channel import Channel
from holdfast._ranks.channel_ranks import ChannelRanks
from holdfast._ranks.connections import Kind, Message
from holdfast._ranks.ranks import Ranks
from holdfast._values.deadline import Patience
from holdfast.errors import RankLostError

LONG, SHORT = Patience(progress_s=300.0), Patience(progress_s=0.3, beat_s=0.1)

# --- one process ------------------------------------------------------------------------------------------------------


def test_one_process_stops_at_the_step_after_the_one_it_has_begun() -> None:
    agreement = Agreement(Ranks(), "t")
    assert agreement.begin_step(3) == frozenset()
    agreement.request("stop", "a reason")
    assert agreement.reasons == {"stop": "a reason"}
    assert not agreement.pass_step()
    assert agreement.begin_step(10) == {"stop"}  # steps may jump
    assert agreement.pass_step()


def test_a_step_that_is_saved_anyway_is_the_last() -> None:
    agreement = Agreement(Ranks(), "t")
    agreement.begin_step(3, is_saved=True)
    agreement.request("stop", "a reason")
    assert agreement.pass_step()


def test_a_step_that_is_passed_is_not_the_last() -> None:
    agreement = Agreement(Ranks(), "t")
    agreement.begin_step(3, is_saved=True)
    assert not agreement.pass_step()
    agreement.request("stop", "a reason")
    assert not agreement.pass_step()  # asked for the same step again
    assert agreement.begin_step(4) == {"stop"}


def test_a_stop_before_the_first_step_is_at_the_first() -> None:
    agreement = Agreement(Ranks(), "t")
    agreement.request("stop", "a reason")
    assert not agreement.pass_step()
    assert agreement.begin_step(0) == {"stop"}


def test_a_stop_stays_due_where_its_step_could_not_be_saved() -> None:
    agreement = Agreement(Ranks(), "t")
    agreement.request("stop", "a reason")
    assert agreement.begin_step(7) == {"stop"}
    assert agreement.begin_step(8) == {"stop"}


def test_a_save_is_due_once_and_may_be_asked_for_again() -> None:
    agreement = Agreement(Ranks(), "t")
    agreement.begin_step(1, is_saved=True)
    for _ in range(2):
        agreement.request("save", "it is time")
    assert agreement.begin_step(2) == {"save"}
    assert agreement.begin_step(3) == frozenset()
    agreement.request("save", "it is time again")
    agreement.request("stop", "a reason")
    assert agreement.begin_step(4) == {"save", "stop"}


def test_after_the_end_nothing_is_decided() -> None:
    agreement = Agreement(Ranks(), "t")
    agreement.close()
    agreement.close()
    agreement.request("stop", "a reason")
    assert agreement.begin_step(1) == frozenset()
    assert not agreement.pass_step()


# --- every order ------------------------------------------------------------------------------------------------------


class Blocked(Exception):
    """A rank would wait here."""


class Stepwise(Agreement):
    def _settle(self) -> None:
        if self._deciding is not None:
            raise Blocked
        super()._settle()


class Wires(Channel):
    """A channel whose messages lie in ``posted``, by sender and receiver, until the test delivers them."""

    def __init__(self, rank: int, world: int, posted: dict[tuple[int, int], deque[Any]], coordinator: int) -> None:
        self.rank, self.size, self.job_ranks = rank, world, tuple(range(world))
        self.others = [other for other in range(world) if other != rank]
        self.coordinator, self.is_coordinator = coordinator, rank == coordinator
        self.lock, self.gone, self.kept, self.calls = threading.RLock(), set(), {}, itertools.count()
        self.posted = posted

    def listen(self, topic: str, listener: Agreement) -> None:
        return None

    def notify(self, to: Collection[int], topic: str, payload: bytes) -> None:
        for rank in to:
            self.posted[self.rank, rank].append(Message(guest=self.rank, serial=0, kind=Kind.NOTICE, payload=payload))

    def see_sent(self, ranks: Collection[int], limit_s: float) -> None:
        return None


class Rank:
    """A training loop, one move at a time."""

    def __init__(self, channel: Channel, steps: Sequence[int], saved: Collection[int]) -> None:
        self.channel, self.steps, self.saved = channel, deque(steps), saved
        self.agreement = Stepwise(ChannelRanks(channel, patience=LONG), "t")
        self.done: list[tuple[int, bool]] = []
        self.is_begun = self.has_stopped = self.is_over = self.is_blocked = False

    def move(self) -> None:
        """Begin a step or end it; after the last one, leave."""
        self.is_blocked = False
        try:
            if not self.is_begun and self.steps:
                is_saved = self.steps[0] in self.saved
                due = self.agreement.begin_step(self.steps[0], is_saved=is_saved)
                self.done.append((self.steps[0], is_saved or bool(due)))
                self.is_begun = True
            elif self.is_begun:
                self.has_stopped = self.agreement.pass_step()
                self.steps.popleft()
                self.is_begun = False
        except Blocked:
            self.is_blocked = True
        except RankLostError:
            self.is_over = True
        if self.has_stopped or self.is_over or (not self.steps and not self.is_begun):
            self.is_over = True
            self.agreement.close()

    @property
    def furthest(self) -> int:
        return self.agreement._here[0]


class World:
    """Ranks whose moves and messages come in an order of the test's choice."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        world = chance.randint(1, 4)
        self.steps = sorted(chance.sample(range(40), chance.randint(1, 8)))
        saved = chance.sample(self.steps, chance.randint(0, len(self.steps)))
        self.posted: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self.coordinator = chance.randrange(world)
        self.ranks = [
            Rank(Wires(rank, world, self.posted, self.coordinator), self.steps, saved) for rank in range(world)
        ]
        self.dead: set[int] = set()
        self.latest_stop: int | None = None

    def moves(self) -> list[Callable[[], None]]:
        """Everything that may happen next."""
        alive = [rank for number, rank in enumerate(self.ranks) if number not in self.dead]
        waiting = [pair for pair, messages in self.posted.items() if messages and self.dead.isdisjoint(pair)]
        ready = [
            rank
            for rank in alive
            if not rank.is_over and not (rank.is_blocked and rank.agreement._deciding is not None)
        ]
        return [*(rank.move for rank in ready), *(lambda pair=pair: self.deliver(*pair) for pair in waiting)]

    def deliver(self, sender: int, receiver: int) -> None:
        self.ranks[receiver].agreement.hear(self.posted[sender, receiver].popleft())

    def kill(self, number: int) -> None:
        self.dead.add(number)
        for rank in self.ranks if number == self.coordinator else [self.ranks[self.coordinator]]:
            rank.channel.gone.add(number)
            rank.agreement.lose(number)

    def run(self, events: Sequence[Callable[[], None]]) -> None:
        """Let everything happen, with ``events`` in between, until nothing is left to happen."""
        to_come = deque(sorted((self.chance.randint(0, 60), number) for number in range(len(events))))
        for turn in itertools.count():
            while to_come and to_come[0][0] <= turn:
                events[to_come.popleft()[1]]()
            moves = self.moves()
            if moves:
                self.chance.choice(moves)()
            elif not to_come:
                return
            leader = self.ranks[self.coordinator].agreement
            if self.latest_stop is None and "stop" in leader._to_come():
                furthest = max(rank.furthest for rank in self.ranks)
                self.latest_stop = next((step for step in self.steps if step > furthest), self.steps[-1])


@settings(max_examples=500, deadline=None)
@given(st.randoms(use_true_random=False))
def test_all_ranks_do_the_same_at_the_same_steps_in_whatever_order(chance: random.Random) -> None:
    world = World(chance)
    wishes = [lambda: chance.choice(world.ranks).agreement.request("stop", "s") for _ in range(chance.randint(0, 3))]
    leader = world.ranks[world.coordinator].agreement
    wishes += [lambda: leader.request("save", "t") for _ in range(chance.randint(0, 4))]
    world.run(wishes)
    assert all(rank.is_over for rank in world.ranks), "somebody waits for ever"
    first, *others = world.ranks
    assert all((rank.done, rank.has_stopped) == (first.done, first.has_stopped) for rank in others)
    assert [step for step, _ in first.done] == world.steps[: len(first.done)]
    assert not first.has_stopped or first.done[-1][1], "it stops at a step that is saved"
    assert world.latest_stop is None or first.done[-1][0] <= world.latest_stop


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_nobody_waits_for_a_rank_that_died(chance: random.Random) -> None:
    world = World(chance)
    victim = chance.randrange(len(world.ranks))
    wishes = [lambda: chance.choice(world.ranks).agreement.request("stop", "s") for _ in range(chance.randint(1, 3))]
    world.run([*wishes, lambda: world.kill(victim)])
    assert all(rank.is_over for number, rank in enumerate(world.ranks) if number not in world.dead)


def test_an_answer_that_comes_too_late_is_none_to_the_next_question() -> None:
    posted: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
    ranks = [Rank(Wires(rank, 3, posted, 0), range(10), ()) for rank in range(3)]

    def deliver(sender: int, receiver: int, times: int = 1) -> None:
        for _ in range(times):
            ranks[receiver].agreement.hear(posted[sender, receiver].popleft())

    ranks[0].agreement.request("stop", "s")
    deliver(0, 1)  # its answer is long on its way
    ranks[0].agreement.lose(2)
    deliver(0, 1)
    with pytest.raises(RankLostError):
        ranks[1].agreement.begin_step(4)
    ranks[0].agreement.request("stop", "s")  # rank 2 is connected again
    deliver(0, 1)
    deliver(0, 2, times=3)
    deliver(2, 0, times=2)
    deliver(1, 0, times=2)
    deliver(0, 1)
    assert ranks[1].agreement._decided == {("stop", 5)}


# --- real channels ----------------------------------------------------------------------------------------------------


class Job:
    """Threads as ranks, each with its agreement, that have met."""

    def __init__(self, world: int, patience: Patience = LONG, coordinator: int = 0) -> None:
        self.channels, _ = channels(world, coordinator)
        self.agreements: list[Agreement] = []
        self.coordinator = coordinator

        def meet(rank: int) -> Agreement:
            with ChannelRanks(self.channels[rank], key="meet", patience=patience) as ranks:
                ranks.all_reduce("meeting", lambda: None, lambda parts: None)
                return Agreement(ranks, "topic")

        self.agreements = self.each(meet)

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        """What ``work`` returned or raised on each rank."""

        def caught(rank: int) -> Any:
            try:
                return work(rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self.channels)) as threads:
            return list(threads.map(caught, range(len(self.channels))))

    def train(self, rank: int, steps: int = 100_000) -> int | None:
        """The step at which the rank stopped."""
        agreement = self.agreements[rank]
        for step in range(steps):
            agreement.begin_step(step)
            if agreement.pass_step():
                return step
        return None


def until(happened: Callable[[], object]) -> None:
    while not happened():
        time.sleep(0.001)


@contextlib.contextmanager
def deaf(channel: Channel) -> Iterator[None]:
    """Within the block, a rank whose interpreter is held by another thread: it hears nothing and answers nothing."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with channel.lock:
            held.set()
            over.wait(300)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(300)
    try:
        yield
    finally:
        over.set()
        thread.join(300)


@pytest.mark.parametrize(("asked", "coordinator"), [(0, 0), (2, 0), (0, 2)])
def test_a_request_to_one_rank_stops_all_at_one_step(asked: int, coordinator: int) -> None:
    job = Job(3, coordinator=coordinator)

    def work(rank: int) -> int | None:
        if rank == asked:
            job.agreements[rank].begin_step(0)
            job.agreements[rank].request("stop", "told so")
        return job.train(rank)

    stopped = job.each(work)
    assert len(set(stopped)) == 1
    assert isinstance(stopped[0], int)
    assert all(agreement.reasons == {"stop": "told so"} for agreement in job.agreements)


def test_a_rank_that_is_gone_is_named_on_all_that_wait() -> None:
    job = Job(3)
    with deaf(job.channels[2]):
        job.agreements[1].request("stop", "told so")
        waiting = [job.agreements[rank] for rank in (0, 1)]
        with ThreadPoolExecutor(2) as threads:
            until(lambda: all(agreement._deciding for agreement in waiting))
            errors = [threads.submit(agreement.begin_step, 5) for agreement in waiting]
            job.channels[0]._connections._peers[2].socket.shutdown(2)
            for error in errors:
                with pytest.raises(RankLostError, match="rank 2 is gone") as raised:
                    error.result()
                assert (raised.value.rank, raised.value.phase) == (2, AGREEING)
    assert [agreement.begin_step(6) for agreement in waiting] == [frozenset()] * 2  # told once


def test_a_coordinator_that_is_gone_is_named() -> None:
    job = Job(2)
    with deaf(job.channels[0]):
        job.agreements[1].request("stop", "told so")
        assert job.agreements[1].begin_step(5) == frozenset()  # nobody has asked
    steps = itertools.count(6)
    until(lambda: job.agreements[1].begin_step(next(steps)) == {"stop"})
    lost = Job(2)
    with deaf(lost.channels[0]):
        lost.agreements[1].hear(Message(guest=1, serial=0, kind=Kind.NOTICE, payload=b"\x81\xa4kind\xa3ask"))
        lost.channels[0]._connections._peers[1].socket.shutdown(2)
        with pytest.raises(RankLostError, match="rank 0 is gone"):
            lost.agreements[1].begin_step(7)


def test_who_does_not_answer_until_the_deadline_is_named() -> None:
    job = Job(3, SHORT)
    with deaf(job.channels[2]):
        job.agreements[1].request("stop", "told so")
        until(lambda: job.agreements[1]._deciding)
        for rank, named in [(0, 2), (1, 0)]:
            with pytest.raises(RankLostError, match=f"rank {named} has not answered for 0.3 s"):
                job.agreements[rank].begin_step(5)
    assert len(set(job.each(job.train))) == 1  # it answers in the end


def test_an_interrupt_ends_the_wait_and_no_more() -> None:
    job = Job(2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell has said
    try:
        with deaf(job.channels[1]):
            job.agreements[0].request("stop", "told so")
            with pytest.raises(KeyboardInterrupt), ThreadPoolExecutor(1) as threads:  # noqa: PT012
                threads.submit(_thread.interrupt_main)
                job.agreements[0].begin_step(3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert job.agreements[0].begin_step(3) == job.agreements[1].begin_step(3) == {"stop"}


def test_ranks_that_are_through_do_not_keep_others_waiting() -> None:
    job = Job(3)
    for agreement in job.agreements[1:]:
        agreement.begin_step(4)
        assert not agreement.pass_step()
        agreement.close()
    for rank in (1, 2):
        job.channels[rank]._connections.close()
    job.agreements[0].begin_step(4)
    job.agreements[0].request("stop", "too late")
    assert not job.agreements[0].pass_step()


def test_a_coordinator_that_is_through_decides_nothing_more() -> None:
    job = Job(3)
    with deaf(job.channels[2]):
        job.agreements[1].request("stop", "told so")
        until(lambda: job.agreements[1]._deciding)
        job.agreements[0].close()
        assert job.agreements[1].begin_step(5) == frozenset()
    assert job.agreements[2].begin_step(5) == frozenset()


def test_what_is_said_before_a_rank_listens_waits_for_it() -> None:
    ends, _ = channels(2)

    def meet(rank: int) -> ChannelRanks:
        with ChannelRanks(ends[rank], key="meet", patience=LONG) as ranks:
            ranks.all_reduce("meeting", lambda: None, lambda parts: None)
        return ranks

    with ThreadPoolExecutor(2) as threads:
        everyone = list(threads.map(meet, range(2)))
    first = Agreement(everyone[0], "topic")
    first.request("stop", "told so")
    until(lambda: ends[1]._unheard)
    second = Agreement(everyone[1], "topic")
    assert first.begin_step(0) == second.begin_step(0) == {"stop"}
    assert second.reasons == {"stop": "told so"}
