"""Which call of a rank belongs to which call of the coordinator, and which ranks are lost: gone, stuck, or never there.

Ranks are meant to make the same calls in the same order, and each call has a key: what is called, and for which
checkpoint. A rank that comes first waits in the lobby of the coordinator; a call of the coordinator takes the oldest
one of each rank that has the same key. A call that failed on the coordinator before a rank came is remembered for that
rank, which is told when it comes. So a call that a rank misses, or that fails on it early, costs itself alone.

Pure bookkeeping over an injected clock; the lock is the channel's.

Pure bookkeeping over signs of life and an injected clock. It decides nothing for others and sends nothing. Silence is
no death: whoever holds the interpreter's lock for long is silent too. It counts as work without progress.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast._ranks.connections import Kind, Message
from holdfast._values.deadline import Clock, Deadline, Patience, Pulse, Sign
from holdfast.errors import RankLostError

INTERRUPTED = "interrupted"
"""What a failure says in place of a phase that was an interrupt."""

_MOST_REMEMBERED = 16
MOST_SPARED = 2


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
        """Whether the rank is still there."""
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
        self._ended: defaultdict[int, deque[Ended]] = defaultdict(lambda: deque(maxlen=_MOST_REMEMBERED))

    def add(self, join: Join) -> None:
        """Let a call wait."""
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
        """Have a call wait no more."""
        self._joins[join.rank].remove(join)

    def empty(self, rank: int) -> None:
        """Forget the calls of a rank that is gone."""
        self._joins.pop(rank, None)

    def take(self, rank: int, key: str, number: int) -> Join | None:
        """The call of ``rank`` that belongs to call ``number`` of the coordinator: the oldest with that key, or failed.

        What came before it, on either side, is over: the other side has missed it.
        """
        for place, join in enumerate(self._joins[rank]):
            if join.has_failed or (join.is_waiting and join.key == key):
                # Other threads may be at the calls that wait.
                before = [each for each in self._joins[rank][:place] if each.is_waiting]
                self._joins[rank] = [*before, *self._joins[rank][place + 1 :]]
                self.pass_by(rank, number)
                return join
        return None

    def take_left(self, rank: int, key: str) -> Join | None:
        """A call with that key which ``rank`` has left."""
        found = next((join for join in self._joins[rank] if join.has_left and join.key == key), None)
        if found is not None:
            self.drop(found)
        return found

    def pass_by(self, rank: int, number: int) -> None:
        """Take it that ``rank`` has come as far as call ``number`` of the coordinator."""
        ended = self._ended[rank]
        while ended and ended[0].number < number:
            ended.popleft()

    def waiting(self, rank: int) -> Join | None:
        """The oldest call of ``rank`` that waits for the coordinator."""
        return next((join for join in self._joins[rank] if join.is_waiting), None)

    def remember(self, rank: int, ended: Ended) -> None:
        """Keep for ``rank`` how a call of the coordinator ended."""
        self._ended[rank].append(ended)

    def recall(self, rank: int, key: str, *, is_at_another: bool = False) -> bytes | None:
        """How the call ended to which ``rank`` comes too late, if its call with that key is such a one.

        ``is_at_another`` says that the coordinator is at a call with another key by now.
        """
        for each in list(self._ended[rank]):
            if each.is_error or (each.key == key and (is_at_another or not each.is_open)):
                self.pass_by(rank, each.number + 1)
                return each.verdict
        return None

    @property
    def has_spared(self) -> bool:
        """Whether there are calls that were spared."""
        return any(
            join.is_waiting and join.spared is not None for joins in list(self._joins.values()) for join in joins
        )

    def spared_in_vain(self) -> Iterator[Join]:
        """The calls that were spared, and to which the coordinator has not come; they are dropped."""
        for joins in list(self._joins.values()):
            for join in list(joins):
                if join.is_waiting and join.spared is not None and join.spared.passed:
                    self.drop(join)
                    yield join


def losers(ours: int, others: Mapping[int, Join]) -> list[Join] | None:
    """Whose calls have to fail where ranks are at different ones; None for that of the coordinator, where ``ours`` are.

    Most ranks are at a call that the others have missed, so it is theirs that fails, and the others wait for them to
    come on. Where there are no more here than there, it is the coordinator's; but not for ever.
    """
    (key, count), *_ = Counter(join.key for join in others.values()).most_common(1)
    if count <= ours and any(join.times_spared < MOST_SPARED for join in others.values()):
        return None
    return [join for join in others.values() if join.key == key]


_PAUSE_S = 1.0


class Watch:
    """What one rank knows of the others in one operation.

    Ranks are numbered as in the group; errors name them as ``names`` does, which is how the whole job numbers them.
    """

    def __init__(self, *, names: Sequence[int], patience: Patience, clock: Clock) -> None:
        self._names = names
        self._patience = patience
        self._clock = clock
        self._pulses: dict[int, Pulse] = {}
        self._left: set[int] = set()
        self._looked_at = clock()

    def look(self) -> float:
        """For how many seconds we ourselves were stopped; that is no delay of the others. To be called often."""
        now = self._clock()
        pause_s, self._looked_at = now - self._looked_at, now
        if pause_s < _PAUSE_S:
            return 0.0
        for pulse in self._pulses.values():
            pulse.excuse(pause_s)
        return pause_s

    def given_up(self, rank: int, pause_s: float, phase: str) -> dict[int, RankLostError]:
        """``rank``, which is ourselves, if the others have given us up while we were stopped."""
        if pause_s < _PAUSE_S or pause_s < self._patience.progress_s - 2 * self._patience.beat_s:
            return {}
        said = f"was stopped for {pause_s:.0f} s in {phase!r}, so the others have given it up; try again"
        return {rank: self._lost(rank, phase, said)}

    def see(self, rank: int, sign: Sign) -> None:
        """Take a beat of ``rank``."""
        pulse = self._pulses.get(rank)
        if pulse is None:
            self._pulses[rank] = Pulse(sign, self._clock)
        else:
            pulse.see(sign)

    def leave(self, rank: int) -> None:
        """Take it that ``rank`` is through with the operation."""
        self._left.add(rank)

    def present(self, rank: int) -> bool:
        """Whether ``rank`` has come and not left."""
        return rank in self._pulses and rank not in self._left

    @property
    def left(self) -> frozenset[int]:
        """The ranks that are through with the operation."""
        return frozenset(self._left)

    def gone(self, ranks: Collection[int], phase: str) -> dict[int, RankLostError]:
        """Those of ``ranks``, whose connections have ended, that were not through; we are in ``phase``."""
        lost: dict[int, RankLostError] = {}
        for rank in ranks:
            if rank not in self._left:
                pulse = self._pulses.get(rank)
                reached, place = (pulse.sign.phase, _place(pulse.sign)) if pulse is not None else (phase, repr(phase))
                lost[rank] = self._lost(
                    rank, reached, f"is gone: its process or its host died, or the network broke, in {place}"
                )
        return lost

    def overdue(
        self, awaited: Collection[int], *, phase: str, since: float, excuse_waiting: bool
    ) -> dict[int, RankLostError]:
        """The ranks that we have awaited in ``phase`` since then and that will not come.

        ``excuse_waiting`` is for those who watch the coordinator: while it says that it waits for a rank it is not to
        blame.
        """
        lost: dict[int, RankLostError] = {}
        waited_s, limit_s = self._clock() - since, self._patience.progress_s
        for rank in awaited:
            pulse = self._pulses.get(rank)
            if rank in self._left:
                lost[rank] = self._lost(rank, phase, f"left before {phase!r}; make the same calls on every rank")
            elif pulse is None:
                if waited_s >= limit_s:
                    said = f"did not come to {phase!r} within {limit_s:g} s; look at that rank"
                    lost[rank] = self._lost(rank, phase, said)
            else:
                is_excused = excuse_waiting and not pulse.sign.working
                # Work that took longer than that while nobody waited for it was fine.
                if min(pulse.silent_s if is_excused else pulse.stalled_s, waited_s) >= limit_s:
                    lost[rank] = self._stall(rank, pulse)
        return lost

    def _stall(self, rank: int, pulse: Pulse) -> RankLostError:
        limit_s = self._patience.progress_s
        said = (
            f"made no progress for {limit_s:g} s in {_place(pulse.sign)}; "
            "look at what it hangs on, or allow more with deadline_s"
        )
        return self._lost(rank, pulse.sign.phase, said)

    def _lost(self, rank: int, phase: str, said: str) -> RankLostError:
        name = self._names[rank]
        return RankLostError(f"rank {name} {said}", rank=name, phase=phase)


def _place(sign: Sign) -> str:
    known = [f"{sign.progress:,} bytes done"] if sign.progress else []
    known += [f"at {sign.file!r}"] if sign.file else []
    return f"{sign.phase!r} ({', '.join(known)})" if known else repr(sign.phase)
