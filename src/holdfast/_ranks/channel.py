"""The connection between the ranks of one group and one coordinator: a star of plain TCP connections.

Every rank names its own calls and joins the coordinator with them; the coordinator answers under that name. So no
operation has a number on which all would have to agree, and messages of one that is over are known to nobody and
dropped. The process group of the training job is never used.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast._ranks.connections import Bell, Connections, Kind, Message, cut
from holdfast._ranks.lobby import MOST_SPARED, Join, Lobby, losers
from holdfast._values.deadline import Clock, Deadline

if TYPE_CHECKING:
    from holdfast._ranks.channel_ranks import ChannelRanks

_SETTLE_S = 0.25  # calls of other threads may be under way
_GRACE_S = 5.0


@dataclass(slots=True, kw_only=True)
class _Wait:
    """How long a call of the coordinator waits for ranks that are at other calls.

    Once some of these were refused for it there is a ``verdict``: what it fails with itself if they do not come.
    """

    settling: Deadline
    grace: Deadline
    verdict: bytes = b""
    refusals: int = 0


class Channel:
    """One rank's end of the connection between the ranks of a group.

    ``rank`` and ``coordinator`` count within the group, ``names`` are the ranks' numbers in the whole job. The
    coordinator has a ``listener`` and the ``token`` that others must know. They have ``dial``, which connects to it
    within so many seconds or raises RankLostError. ``when_met`` is called once all have connected. ``kept`` is what
    this rank keeps from one operation to the next, ``gone`` has the ranks whose connections ended.
    """

    def __init__(
        self,
        *,
        rank: int,
        names: Sequence[int],
        coordinator: int = 0,
        listener: socket.socket | None = None,
        token: bytes = b"",
        dial: Callable[[float], socket.socket] | None = None,
        when_met: Callable[[], None] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.rank = rank
        self.names = tuple(names)
        self.coordinator = coordinator
        self.is_coordinator = rank == coordinator
        self.lock = threading.RLock()
        self.gone: set[int] = set()
        self.kept: dict[object, Any] = {}
        self._dial = dial
        self._dialing = threading.Lock()
        self._when_met = when_met
        self._met: set[int] = set()
        self.clock = clock
        self._operations: list[ChannelRanks] = []
        self._sessions: dict[tuple[int, int], ChannelRanks] = {}
        self._waits: dict[int, _Wait] = {}
        self._lobby = Lobby()
        self._calls = itertools.count()
        self._serials = itertools.count()
        self._connections = Connections(self, listener=listener, token=token, size=len(self.names))
        weakref.finalize(self, self._connections.close)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.names)

    def number(self) -> int:
        """What this rank calls its next call."""
        return next(self._calls)

    def enter(self, operation: ChannelRanks) -> None:
        """Begin a call of this rank, which then gets its messages; RankLostError where the coordinator is gone."""
        if not self.is_coordinator:
            self._reach_coordinator(operation.deadline_s)
        with self.lock:
            self._operations.append(operation)
            if not self.is_coordinator:
                self._sessions[self.rank, operation.call] = operation
                self.post(operation, self.coordinator, Kind.JOIN, phase=operation.key)
            for rank in range(self.size):  # nobody waits but at the coordinator
                join = self._lobby.take(rank, operation.key, operation.call)
                if join is not None:
                    self._pair(operation, join)

    def leave(self, operation: ChannelRanks, farewell_s: float) -> None:
        """End a call of this rank; when this returns, what it had to say is on its way, or the time is up."""
        partners: list[int] = []
        with self.lock:
            if operation in self._operations:
                self._operations.remove(operation)
                self._waits.pop(operation.call, None)
                self._sessions = {name: each for name, each in self._sessions.items() if each is not operation}
                partners = list(operation.guests) if self.is_coordinator else [self.coordinator]
                for rank in partners:
                    self.post(operation, rank, Kind.LEFT)
            if self.is_coordinator and operation.verdict is not None:
                for rank in self._missing(operation):
                    if self._lobby.take_left(rank, operation.key) is None:  # else it is past that call
                        self._lobby.remember(rank, operation.ended(rank))
        self.see_sent(partners, farewell_s)
        if self._when_met is not None and len(self._met) == self.size - 1:
            self._when_met()
            self._when_met = None

    def post(
        self,
        operation: ChannelRanks,
        rank: int,
        kind: Kind,
        *,
        step: int = 0,
        phase: str = "",
        payload: bytes = b"",
        is_urgent: bool = False,
    ) -> None:
        """Have a message sent to a rank that has come; pieces count as progress, but for signs of life."""
        guest, call = (rank, operation.guests[rank]) if self.is_coordinator else (self.rank, operation.call)
        serial = next(self._serials)
        message = Message(guest=guest, call=call, serial=serial, kind=kind, step=step, phase=phase, payload=payload)
        pieces = cut(message) if kind is Kind.BEAT else _counted(cut(message), operation)
        self._connections.post(rank, pieces, is_urgent=is_urgent)

    def see_sent(self, ranks: Collection[int], limit_s: float) -> None:
        """Return when all that was posted to ``ranks`` so far is on its way, or the time is up."""
        bell = Bell()
        for rank in ranks:
            self._connections.post(rank, bell)
        deadline = Deadline(limit_s, self.clock)
        with contextlib.suppress(queue.Empty):
            for _ in ranks:
                bell.get(timeout=deadline.remaining_s)

    def deliver(self, message: Message) -> None:
        """Take a message, on the thread of the connections."""
        guest, call = message.guest, message.call
        with self.lock:
            operation = self._sessions.get((guest, call))
            if operation is not None:
                operation.deliver(guest if self.is_coordinator else self.coordinator, message)
            elif message.kind is Kind.JOIN:
                self._take_join(Join(rank=guest, call=call, key=message.phase))
            elif self.is_coordinator:
                self._lobby.hear(message)
                if message.kind is Kind.FAILURE:
                    self._pass_failure_on(guest)

    def connected(self, rank: int) -> None:
        """Take it that ``rank`` is there, perhaps again."""
        with self.lock:
            self.gone.discard(rank)
            self._met.add(rank)

    def disconnected(self, rank: int) -> None:
        """Take it that ``rank`` is gone."""
        with self.lock:
            self.gone.add(rank)
            self._lobby.empty(rank)
            for operation in self._operations:
                operation.tick()

    def tick(self) -> bool:
        """Let everyone look at the time; whether there is anyone."""
        with self.lock:
            operations = list(self._operations)
            for operation in operations:
                operation.tick()
                if self.is_coordinator and operation.verdict is None:
                    self._settle(operation)
            for join in self._lobby.spared_in_vain():
                self._refuse(join, join.verdict)
        for operation in operations:
            operation.beat()  # without the lock: it asks others how far they are
        return bool(operations) or self._lobby.has_spared

    def _reach_coordinator(self, deadline_s: float) -> None:
        with self._dialing:
            if not self._connections.has(self.coordinator):
                assert self._dial is not None
                connection = self._dial(deadline_s)
                self.connected(self.coordinator)
                self._connections.add(self.coordinator, connection)

    def _take_join(self, join: Join) -> None:
        verdict = self._lobby.recall(join.rank, join.key)
        if verdict is not None:
            self._refuse(join, verdict)
            return
        for operation in self._operations:
            if operation.key == join.key and join.rank not in operation.guests:
                self._lobby.pass_by(join.rank, operation.call)
                self._pair(operation, join)
                return
        self._lobby.add(join)

    def _pass_failure_on(self, rank: int) -> None:
        """Let whoever waits for ``rank`` know that a call failed on it."""
        for operation in self._operations:
            if rank not in operation.guests and operation.verdict is None:
                wait = self._waits.get(operation.call)
                if wait is not None and wait.verdict:  # it was told to come here, and went elsewhere
                    operation.refuse(wait.verdict)
                    continue
                join = self._lobby.take(rank, operation.key, operation.call)
                if join is not None:
                    self._pair(operation, join)

    def _pair(self, operation: ChannelRanks, join: Join) -> None:
        self._sessions[join.rank, join.call] = operation
        operation.welcome(join.rank, join.call)
        for message in join.messages:
            operation.deliver(join.rank, message)

    def _refuse(self, join: Join, verdict: bytes) -> None:
        message = Message(
            guest=join.rank, call=join.call, serial=next(self._serials), kind=Kind.VERDICT, payload=verdict
        )
        self._connections.post(join.rank, cut(message))

    def _missing(self, operation: ChannelRanks) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank and rank not in operation.guests]

    def _settle(self, operation: ChannelRanks) -> None:
        """Decide who has to go on where ranks that should come to ``operation`` are at other calls."""
        missing, grace_s = self._missing(operation), min(_GRACE_S, operation.deadline_s)
        if not missing:
            return
        settling, grace = Deadline(_SETTLE_S, self.clock), Deadline(grace_s, self.clock)
        wait = self._waits.setdefault(operation.call, _Wait(settling=settling, grace=grace))
        if not wait.settling.passed:
            return
        if wait.verdict and wait.grace.passed:
            operation.refuse(wait.verdict)
            return
        others: dict[int, Join] = {}
        for rank in missing:
            join = self._lobby.waiting(rank)
            is_past = join is not None or wait.grace.passed
            left = self._lobby.take_left(rank, operation.key) if is_past else None
            late = None if join is None else self._lobby.recall(rank, join.key, is_at_another=True)
            if left is not None:
                self._pair(operation, left)
                return
            if join is not None and late is not None:
                self._lobby.drop(join)
                self._refuse(join, late)
            elif join is not None:
                others[rank] = join
        if not others or (len(others) < len(missing) and not wait.grace.passed):
            return
        keys = {rank: operation.key for rank in (self.rank, *operation.guests)}
        keys |= {rank: join.key for rank, join in others.items()}
        verdict = operation.disagree(keys)
        failing = losers(1 + len(operation.guests), others)
        if failing is None or wait.refusals == MOST_SPARED:
            for join in others.values():
                join.spare(verdict, grace)
            operation.refuse(verdict)
            return
        wait.verdict, wait.grace, wait.refusals = verdict, grace, wait.refusals + 1
        for join in failing:
            join.has_left = True  # should the coordinator come to that call later, the rank is past it
            self._refuse(join, verdict)


def _counted(pieces: Iterator[bytes], operation: ChannelRanks) -> Iterator[bytes]:
    for piece in pieces:
        operation.moved += 1
        yield piece
