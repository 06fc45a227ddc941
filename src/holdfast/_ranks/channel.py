"""The connection between the ranks of one group and one coordinator, and which of their calls belong together.

Every rank numbers its own calls and joins the coordinator with them; the coordinator answers under that number. So no
operation has a number on which all would have to agree, and messages of one that is over are known to nobody and
dropped. The process group of the training job is never used.

Ranks are meant to make the same calls in the same order, and each call has a key: what is called, and for which
checkpoint. A rank that comes first waits in the lobby of the coordinator; a call of the coordinator takes the oldest
one of each rank that has the same key. A call that failed on the coordinator before a rank came is remembered for that
rank, which is told when it comes. So a call that a rank misses, or that fails on it early, costs itself alone.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast._ranks.connections import Bell, Connections, Kind, Message, cut
from holdfast._ranks.ranks import OwnSigns
from holdfast._values.deadline import Deadline

if TYPE_CHECKING:
    from holdfast._ranks.agreement import Agreement
    from holdfast._ranks.channel_ranks import ChannelRanks

INTERRUPTED = "interrupted"
"""What a failure says in place of a phase that was an interrupt."""

_SETTLE_S = 0.25  # calls of other threads may be under way
_GRACE_S = 5.0
_MOST_REMEMBERED = 16
_MOST_SPARED = 2


@dataclass(slots=True, kw_only=True, eq=False)
class Join:
    """A call of ``rank`` for which the coordinator has not come: what it has sent since, and whether it is over.

    ``has_failed`` is for errors, which the coordinator's next call raises too. Where a rank ``has_left``, it would wait
    no longer or was interrupted, and others may have been as well. While it is spared, the coordinator has given up a
    call of its own for it; ``verdict`` is what it is told if that was in vain.
    """

    rank: int
    call: int
    key: str
    messages: list[Message] = field(default_factory=list)
    has_failed: bool = False
    has_left: bool = False
    times_spared: int = 0
    verdict: bytes = b""
    spared: Deadline | None = None

    @property
    def is_waiting(self) -> bool:
        return not self.has_failed and not self.has_left

    def spare(self, verdict: bytes, until: Deadline) -> None:
        """Let it wait on, for the coordinator to come to it from another call."""
        self.times_spared += 1
        self.verdict, self.spared = verdict, until


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A call of the coordinator that failed before a rank came to it.

    After an error the rank must still come to it, whatever it says then. ``is_open`` are those of which that is not
    sure: it was awaited in vain and may have missed it, or the whole job was interrupted.
    """

    number: int
    key: str
    verdict: bytes
    is_error: bool
    is_open: bool


class Lobby:
    """The calls of ranks that wait for the coordinator, and those of the coordinator that ranks may still come to."""

    def __init__(self) -> None:
        self._joins: defaultdict[int, list[Join]] = defaultdict(list)
        self.ended: defaultdict[int, deque[Ended]] = defaultdict(lambda: deque(maxlen=_MOST_REMEMBERED))

    def add(self, join: Join) -> None:
        self._joins[join.rank].append(join)

    def hear(self, message: Message) -> None:
        """Keep a message of a call that waits; of one that is given up, only that it was, and what it failed with."""
        join = next((join for join in self._joins[message.guest] if join.call == message.call), None)
        if join is None or (join.has_left and message.kind is not Kind.LEFT):
            return
        if message.kind is Kind.BEAT:  # the last one says it all
            join.messages = [each for each in join.messages if each.kind is not Kind.BEAT]
        join.messages.append(message)
        if message.kind is Kind.FAILURE:
            join.has_failed = message.phase != INTERRUPTED
        if message.kind is Kind.LEFT:
            join.has_left = not join.has_failed
            join.messages = [each for each in join.messages if each.kind is not Kind.PART]
        for each in [each for each in self._joins[message.guest] if not each.is_waiting][:-_MOST_REMEMBERED]:
            self.drop(each)

    def drop(self, join: Join) -> None:
        self._joins[join.rank].remove(join)

    def empty(self, rank: int) -> None:
        self._joins.pop(rank, None)

    def take(self, rank: int, key: str, number: int) -> Join | None:
        """The call of ``rank`` that belongs to call ``number`` of the coordinator: the oldest with that key, or failed.

        What came before it, on either side, is over: the other side has missed it.
        """
        joins = self._joins[rank]
        for place, join in enumerate(joins):
            if join.has_failed or (join.is_waiting and join.key == key):
                # Other threads may be at the calls that wait.
                joins[: place + 1] = [each for each in joins[:place] if each.is_waiting]
                self.pass_by(rank, number)
                return join
        return None

    def take_left(self, rank: int, key: str) -> Join | None:
        found = next((join for join in self._joins[rank] if join.has_left and join.key == key), None)
        if found is not None:
            self.drop(found)
        return found

    def pass_by(self, rank: int, number: int) -> None:
        """Take it that ``rank`` has come as far as call ``number`` of the coordinator."""
        ended = self.ended[rank]
        while ended and ended[0].number < number:
            ended.popleft()

    def waiting(self, rank: int) -> Join | None:
        """The oldest call of ``rank`` that waits for the coordinator."""
        return next((join for join in self._joins[rank] if join.is_waiting), None)

    def recall(self, rank: int, key: str, *, is_at_another: bool = False) -> bytes | None:
        """How the call ended to which ``rank`` comes too late, if its call with that key is such a one.

        ``is_at_another`` says that the coordinator is at a call with another key by now.
        """
        for each in list(self.ended[rank]):
            if each.is_error or (each.key == key and (is_at_another or not each.is_open)):
                self.pass_by(rank, each.number + 1)
                return each.verdict
        return None

    def spared(self) -> list[tuple[Join, Deadline]]:
        """The calls that were spared and still wait, and for how long."""
        joins = itertools.chain.from_iterable(self._joins.values())
        return [(join, join.spared) for join in joins if join.is_waiting and join.spared is not None]


def losers(ours: int, others: Mapping[int, Join]) -> list[Join] | None:
    """Whose calls have to fail where ranks are at different ones; None for that of the coordinator, where ``ours`` are.

    Most ranks are at a call that the others have missed, so it is theirs that fails, and the others wait for them to
    come on. Where there are no more here than there, it is the coordinator's; but not for ever.
    """
    (key, count), *_ = Counter(join.key for join in others.values()).most_common(1)
    if count <= ours and any(join.times_spared < _MOST_SPARED for join in others.values()):
        return None
    return [join for join in others.values() if join.key == key]


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

    ``rank`` and ``coordinator`` count within the group, ``job_ranks`` are the ranks' numbers in the whole job. The
    coordinator has a ``listener`` and the ``token`` that others must know. They have ``dial``, which connects to it
    within so many seconds or raises RankLostError. ``when_met`` is called once all have connected. ``kept`` is what
    this rank keeps from one operation to the next, ``gone`` has the ranks whose connections ended, ``calls`` numbers
    what this rank calls. Notices belong to no call: they go to who listens to their topic, later if nobody does yet.

    Threads that save or load call it, and the thread of its connections does. ``lock`` guards it and its operations; it
    is never held while somebody waits, nor while code of others runs.
    """

    def __init__(
        self,
        *,
        rank: int,
        job_ranks: Sequence[int],
        coordinator: int = 0,
        listener: socket.socket | None = None,
        token: bytes = b"",
        dial: Callable[[float], socket.socket] | None = None,
        when_met: Callable[[], None] | None = None,
    ) -> None:
        self.rank = rank
        self.job_ranks = tuple(job_ranks)
        self.size = len(job_ranks)
        self.others = [other for other in range(self.size) if other != rank]
        self.coordinator = coordinator
        self.is_coordinator = rank == coordinator
        self.lock = threading.RLock()
        self.gone: set[int] = set()
        self.kept: dict[object, Any] = {}
        self._dial = dial
        self._dialing = threading.Lock()
        self._when_met = when_met
        self._met: set[int] = set()
        self._operations: list[ChannelRanks] = []
        self._sessions: dict[tuple[int, int], ChannelRanks] = {}
        self._waits: dict[int, _Wait] = {}
        self._lobby = Lobby()
        self._listeners: weakref.WeakValueDictionary[str, Agreement] = weakref.WeakValueDictionary()
        self._unheard: deque[Message] = deque(maxlen=_MOST_REMEMBERED)
        self.calls = itertools.count()
        self._serials = itertools.count()
        self._connections = Connections(self, listener=listener, token=token, size=self.size)
        weakref.finalize(self, self._connections.close)

    def enter(self, operation: ChannelRanks) -> None:
        """Begin a call of this rank, which then gets its messages; RankLostError where the coordinator is gone."""
        if not self.is_coordinator:
            with self._dialing:
                if not self._connections.has(self.coordinator):
                    assert self._dial is not None
                    connection = self._dial(operation.deadline_s)
                    self.connected(self.coordinator)
                    self._connections.add(self.coordinator, connection)
        with self.lock:
            self._operations.append(operation)
            if not self.is_coordinator:
                self._sessions[self.rank, operation.call] = operation
                self.post(operation, operation.partners, Kind.JOIN, phase=operation.key)
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
                partners = list(operation.partners)
                for rank, call in operation.partners.items():
                    self._sessions.pop((rank if self.is_coordinator else self.rank, call), None)
                self.post(operation, partners, Kind.LEFT)
            if self.is_coordinator and operation.has_failed:
                for rank in self._missing(operation):
                    if self._lobby.take_left(rank, operation.key) is None:  # else it is past that call
                        self._lobby.ended[rank].append(operation.ended(rank))
        self.see_sent(partners, farewell_s)
        if self._when_met is not None and len(self._met) == self.size - 1:
            self._when_met()
            self._when_met = None

    def post(
        self,
        operation: ChannelRanks,
        to: Collection[int],
        kind: Kind,
        *,
        step: int = 0,
        phase: str = "",
        payload: bytes = b"",
        is_urgent: bool = False,
    ) -> None:
        """Have a message sent to ranks that have come; pieces count as progress, but for signs of life."""
        for rank in list(to):  # another rank may come in between
            guest, call = rank if self.is_coordinator else self.rank, operation.partners[rank]
            serial = next(self._serials)
            message = Message(guest=guest, call=call, serial=serial, kind=kind, step=step, phase=phase, payload=payload)
            pieces = cut(message) if kind is Kind.BEAT else _counted(cut(message), operation.signs)
            self._connections.post(rank, pieces, is_urgent=is_urgent)

    def listen(self, topic: str, listener: Agreement) -> None:
        with self.lock:
            self._listeners[topic] = listener
            for message in [each for each in self._unheard if each.phase == topic]:
                listener.hear(message)

    def notify(self, to: Collection[int], topic: str, payload: bytes) -> None:
        """Have a notice sent; a rank that is gone misses it."""
        for rank in to:
            guest, serial = rank if self.is_coordinator else self.rank, next(self._serials)
            message = Message(guest=guest, serial=serial, kind=Kind.NOTICE, phase=topic, payload=payload)
            self._connections.post(rank, cut(message))

    def see_sent(self, ranks: Collection[int], limit_s: float) -> None:
        """Return when all that was posted to ``ranks`` so far is on its way, or the time is up."""
        bell = Bell()
        for rank in ranks:
            self._connections.post(rank, bell)
        deadline = Deadline(limit_s)
        with contextlib.suppress(queue.Empty):
            for _ in ranks:
                bell.get(timeout=deadline.remaining_s)

    def deliver(self, message: Message) -> None:
        """Take a message, on the thread of the connections."""
        guest, call = message.guest, message.call
        with self.lock:
            operation, listener = self._sessions.get((guest, call)), self._listeners.get(message.phase)
            if message.kind is Kind.NOTICE:
                (self._unheard.append if listener is None else listener.hear)(message)
            elif operation is not None:
                operation.deliver(guest if self.is_coordinator else self.coordinator, message)
            elif message.kind is Kind.JOIN:
                self._take_join(Join(rank=guest, call=call, key=message.phase))
            elif self.is_coordinator:
                self._lobby.hear(message)
                if message.kind is Kind.FAILURE:
                    self._pass_failure_on(guest)

    def connected(self, rank: int) -> None:
        with self.lock:
            self.gone.discard(rank)
            self._met.add(rank)

    def disconnected(self, rank: int) -> None:
        with self.lock:
            self.gone.add(rank)
            self._lobby.empty(rank)
            for operation in self._operations:
                operation.tick()
            for listener in list(self._listeners.values()):
                listener.lose(rank)

    def tick(self) -> bool:
        """Let everyone look at the time; whether there is anyone."""
        with self.lock:
            operations = list(self._operations)
            for operation in operations:
                operation.tick()
                if self.is_coordinator and not operation.has_failed:
                    self._settle(operation)
            spared = self._lobby.spared()
            for join, until in spared:
                if until.passed:
                    self._lobby.drop(join)
                    self._refuse(join, join.verdict)
        for operation in operations:
            operation.beat()  # without the lock: it asks others how far they are
        return bool(operations or spared)

    def _take_join(self, join: Join) -> None:
        verdict = self._lobby.recall(join.rank, join.key)
        if verdict is not None:
            self._refuse(join, verdict)
            return
        for operation in self._operations:
            if operation.key == join.key and join.rank not in operation.partners:
                self._lobby.pass_by(join.rank, operation.call)
                self._pair(operation, join)
                return
        self._lobby.add(join)

    def _pass_failure_on(self, rank: int) -> None:
        """Let whoever waits for ``rank`` know that a call failed on it."""
        for operation in self._operations:
            if rank not in operation.partners and not operation.has_failed:
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
        serial = next(self._serials)
        message = Message(guest=join.rank, call=join.call, serial=serial, kind=Kind.VERDICT, payload=verdict)
        self._connections.post(join.rank, cut(message))

    def _missing(self, operation: ChannelRanks) -> list[int]:
        return [rank for rank in self.others if rank not in operation.partners]

    def _settle(self, operation: ChannelRanks) -> None:
        """Decide who has to go on where ranks that should come to ``operation`` are at other calls."""
        missing, grace = self._missing(operation), Deadline(min(_GRACE_S, operation.deadline_s))
        if not missing:
            return
        wait = self._waits.setdefault(operation.call, _Wait(settling=Deadline(_SETTLE_S), grace=grace))
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
        keys = {rank: operation.key for rank in (self.rank, *operation.partners)}
        keys |= {rank: join.key for rank, join in others.items()}
        verdict = operation.disagree(keys)
        failing = losers(1 + len(operation.partners), others)
        if failing is None or wait.refusals == _MOST_SPARED:
            for join in others.values():
                join.spare(verdict, grace)
            operation.refuse(verdict)
            return
        wait.verdict, wait.grace, wait.refusals = verdict, grace, wait.refusals + 1
        for join in failing:
            join.has_left = True  # should the coordinator come to that call later, the rank is past it
            self._refuse(join, verdict)


def _counted(pieces: Iterator[bytes], signs: OwnSigns) -> Iterator[bytes]:
    for piece in pieces:
        signs.moved += 1
        yield piece
