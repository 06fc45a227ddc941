"""The ranks of a job in one save or load, talking over a channel.

Parts go to the coordinator, what it makes of them comes back. The coordinator also keeps watch: it alone decides that
the operation has failed and tells everyone, so that all ranks raise the same error. Ranks that have lost it speak for
themselves: all name it, each in the phase that it was in itself.

Invariant: whoever waits wakes up at least four times a second to see whether to give up. No collective of the process
group is ever called.
"""

from __future__ import annotations

import contextlib
import queue
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import NoReturn, TypeVar

import msgspec

from holdfast._ranks.channel import Channel
from holdfast._ranks.connections import Bell, Kind, Message
from holdfast._ranks.lobby import INTERRUPTED, Ended, Watch
from holdfast._ranks.ranks import Decode, Encode, Failure, agreed, combine, describe, different_calls, pack, unpack
from holdfast._values.deadline import Deadline, Patience, Sign
from holdfast.errors import CheckpointError, InternalError, RankLostError

Part = TypeVar("Part")
Whole = TypeVar("Whole")

_SLICE_S = 0.25
_ANNOUNCE_S = 0.1
_RETURN_S = 3.0  # for ranks that live and whose connections broke before
_STEPS = 1 << 16  # more than one round takes
_sign_encoder = msgspec.msgpack.Encoder()
_sign_decoder = msgspec.msgpack.Decoder(Sign)


class ChannelRanks:
    """All ranks of one operation on a channel, whose coordinator merges.

    Enter it for all phases; leaving it by an exception tells the others.

    Args:
        channel: the connection of this rank.
        key: which call this is, as "save '/path'"; ranks whose keys are equal meet.
        encode: what makes bytes of a part or an error.
        decode: the reverse.
        patience: how long to wait for what.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        key: str = "",
        encode: Encode,
        decode: Decode,
        patience: Patience,
    ) -> None:
        self.rank = channel.rank
        self.size = channel.size
        self.names = channel.names
        self.kept = channel.kept
        self.is_coordinator = channel.is_coordinator
        self.key = key
        self.call = channel.number()
        self.guests: dict[int, int] = {}
        self._channel = channel
        self._coordinator = channel.coordinator
        self._encode = encode
        self._decode = decode
        self._patience = patience
        self.deadline_s = patience.progress_s
        self._clock = clock = channel.clock
        self._others = [rank for rank in range(channel.size) if rank != channel.rank]
        self._lock = channel.lock
        self._bell = Bell()
        self._watch = Watch(names=channel.names, patience=patience, clock=clock)
        self._round = self._step = 0
        self._phase = "starting"
        self.moved = self._beats = self._progress = 0
        self._next_beat = clock() + patience.beat_s
        self._returning = Deadline(min(_RETURN_S, patience.progress_s), clock)
        self._count: Callable[[], int] = int
        self._file: Callable[[], str] = str
        self._awaited_since: float | None = None
        self._parts: dict[int, dict[int, Message]] = {}
        self._wholes: dict[int, bytes] = {}
        self._unreceived: set[int] = set()
        self._failures: defaultdict[int, dict[int, Failure]] = defaultdict(dict)
        self._verdicts: dict[int, dict[int, Failure]] = {}
        self._settling: Deadline | None = None
        self._own: dict[int, BaseException] = {}
        self._unheard: Deadline | None = None
        self._is_entered = self._is_interrupted = self._is_apart = False
        self._ungreeted: list[int] = []

    def __enter__(self) -> ChannelRanks:
        if self._is_entered:
            raise InternalError("an operation is entered once; make another for the next save or load")
        self._is_entered = True
        try:
            self._channel.enter(self)
            return self
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._tell(error)
            self._see_received()
        finally:
            # By its traceback an error holds all that the caller's frames hold: files, a writer, and so on.
            self._own = {}
            self._channel.leave(self, self._patience.farewell_s)

    def again(self) -> None:
        """Go on after a failure that every rank has raised, as if it had not been; all ranks do so, or none."""
        with self._lock:
            self._round += 1
            self._step = self._round * _STEPS
            self._own, self._unheard, self._unreceived = {}, None, set()
            has_failed = bool(self._failures[self._round])  # on a rank that is ahead of this one
            self._settling = Deadline(self._patience.settle_s, self._clock) if has_failed else None

    def scatter(self, phase: str, local: Callable[[], Part], merge: Callable[[list[Part]], list[Whole]]) -> Whole:
        """This rank's element of what ``merge`` makes of all parts."""

        def merge_for_each(parts: list[Part]) -> tuple[Whole, dict[int, bytes]]:
            wholes = merge(parts)
            if len(wholes) != self.size:
                raise InternalError(f"{phase} made {len(wholes)} parts for {self.size} ranks")
            return wholes[self.rank], {rank: self._encode(wholes[rank]) for rank in self._others}

        return self._together(phase, local, merge_for_each)

    def share(self, phase: str, local: Callable[[], Part], merge: Callable[[list[Part]], Whole]) -> Whole:
        """What ``merge`` makes of all parts, the same on every rank."""

        def merge_for_all(parts: list[Part]) -> tuple[Whole, dict[int, bytes]]:
            whole = merge(parts)
            return whole, dict.fromkeys(self._others, self._encode(whole) if self._others else b"")

        return self._together(phase, local, merge_for_all)

    def alone(self, phase: str, local: Callable[[], Part]) -> Part:
        """What ``local`` returns, without a word to the others unless it fails; that is raised on every rank.

        They learn of the phase with the next sign of life: announcing it would take the caller's time.
        """
        self._phase, self._progress = phase, 0
        try:
            return local()
        except BaseException as error:
            self._give_up(error)

    def check(self) -> None:
        """Raise what another rank has failed with, if one has; cheap, any thread."""
        if self._round in self._verdicts:
            raise self._error()

    def progress(self, bytes_done: int) -> None:
        """Show the others that the work of this phase goes on; any thread."""
        self._progress = bytes_done

    def follow(self, count: Callable[[], int], file: Callable[[], str]) -> None:
        """Ask at every heartbeat how far the work is, and at which file; any thread may be asked to run them."""
        self._count, self._file = count, file

    # What the channel asks, with its lock held but for ``beat``.

    @property
    def verdict(self) -> bytes | None:
        """What the operation failed with, if it has."""
        failures = self._verdicts.get(self._round)
        return None if failures is None else pack(failures)

    def ended(self, rank: int) -> Ended:
        """How it failed, for ``rank``, which has not come."""
        verdict = self._verdicts[self._round]
        return Ended(
            number=self.call,
            key=self.key,
            verdict=pack(verdict),
            is_error=not self._is_apart and not self._is_interrupted and self.names[rank] not in verdict,
            is_open=self._is_interrupted or self.names[rank] in verdict,
        )

    def welcome(self, rank: int, call: int) -> None:
        """Take it that ``rank`` has come; it is told that we are here, or that all is over."""
        self.guests[rank] = call
        self._ungreeted.append(rank)
        if self._round in self._verdicts:
            self._post([rank], Kind.VERDICT, step=self._round, payload=pack(self._verdicts[self._round]))

    def deliver(self, rank: int, message: Message) -> None:
        """Take a message, on the thread that receives."""
        if message.kind is Kind.BEAT:
            self._watch.see(rank, _sign_decoder.decode(message.payload))
        elif message.kind is Kind.PART:
            self._parts.setdefault(message.step, {})[rank] = message
        elif message.kind is Kind.WHOLE:
            self._wholes[message.step] = message.payload
            self._post([rank], Kind.RECEIPT, step=message.step)
        elif message.kind is Kind.FAILURE:
            self._is_interrupted |= message.phase == INTERRUPTED
            self._accuse(unpack(message.payload), round_=message.step)
        elif message.kind is Kind.VERDICT:
            self._verdicts.setdefault(message.step, unpack(message.payload))
            self._post([rank], Kind.RECEIPT, step=-1)
        elif message.kind is Kind.RECEIPT:
            if message.step == (-1 if self._round in self._verdicts else self._step):
                self._unreceived.discard(rank)
        elif message.kind is Kind.LEFT:
            self._watch.leave(rank)
        self._ring()

    def disagree(self, said: Mapping[int, str]) -> bytes:
        """What ranks are told that are at different calls, by the key of each."""
        return pack(self._described({self.rank: different_calls({self.names[rank]: said[rank] for rank in said})}))

    def refuse(self, verdict: bytes) -> None:
        """Fail with that."""
        self._is_apart = True
        self._decide(unpack(verdict))

    def tick(self) -> None:
        """Decide what has to be decided now: who is lost, and whether the operation has failed."""
        if self._round in self._verdicts:
            return
        pause_s = self._watch.look()
        if self._awaited_since is not None:
            self._awaited_since += pause_s
        is_returning = self.is_coordinator and not self._returning.passed
        gone = self._channel.gone & set(self.guests) if is_returning else self._channel.gone
        lost = self._watch.gone(gone, self._phase)
        if self.is_coordinator:  # the others hear nothing from it and decide for themselves
            lost |= self._watch.given_up(self.rank, pause_s, self._phase)
        self._lose({**self._overdue(), **lost})
        failures = self._failures[self._round]
        if self._unheard is not None and self._unheard.passed and not self._is_heard():
            self._verdicts[self._round] = dict(failures)
            self._ring()
        elif self.is_coordinator and failures and (self._everyone_told() or (self._settling and self._settling.passed)):
            self._decide(failures)

    def beat(self) -> None:
        """Give a sign of life, if it is time."""
        now = self._clock()
        new, self._ungreeted = self._ungreeted, []
        if now >= self._next_beat:
            self._next_beat = now + self._patience.beat_s
            self._send_sign(self._audience(), is_urgent=True)
        elif new:
            self._send_sign(new)

    def _together(
        self, phase: str, local: Callable[[], Part], merge: Callable[[list[Part]], tuple[Whole, dict[int, bytes]]]
    ) -> Whole:
        if not self._is_entered:
            raise InternalError("the ranks take steps together only inside 'with ranks:'")
        self._step += 1
        self._phase, self._progress = phase, 0
        # Before any work, so that whoever looks for a lost rank knows its phase.
        self._send_sign(self._audience())
        self._channel.see_sent(self._audience(), _ANNOUNCE_S)
        try:
            self.check()
            part = local()
            self.check()
            if self.is_coordinator:
                whole, replies = merge(self._gather(part))
                self._reply(replies)
                return whole
            payload = self._encode(part)
            self._post([self._coordinator], Kind.PART, step=self._step, phase=phase, payload=payload)
            self._wait_until(lambda: self._step in self._wholes)
            result: Whole = self._decode(self._wholes.pop(self._step))
            return result
        except BaseException as error:
            self._give_up(error)

    def _gather(self, own: Part) -> list[Part]:
        """The parts of all ranks, by rank; every one made in this very phase."""
        with self._lock:
            arrived = self._parts.setdefault(self._step, {})
        self._wait_until(lambda: len(arrived) == len(self._others))
        elsewhere = {rank: message.phase for rank, message in arrived.items() if message.phase != self._phase}
        if elsewhere:
            said = {self.rank: self._phase, **elsewhere}
            agreed("step to take", {self.names[rank]: repr(said[rank]) for rank in sorted(said)})
        return [own if rank == self.rank else self._decode(arrived[rank].payload) for rank in range(self.size)]

    def _reply(self, replies: dict[int, bytes]) -> None:
        self._wait_until(lambda: True)  # or raise, if somebody failed in the meantime
        with self._lock:
            self._parts.pop(self._step, None)
            self._unreceived = set(replies)
            for rank, payload in replies.items():
                self._post([rank], Kind.WHOLE, step=self._step, payload=payload)

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Return when ``ready``; raise when the operation has failed.

        The coordinator looks at failures first, because everyone is told of them; the others take an answer that has
        arrived even if the coordinator is gone by now.
        """
        self._awaited_since = self._clock()
        try:
            while True:
                with self._lock:
                    self.tick()
                    has_failed = self._round in self._verdicts
                    is_ready = ready() and not self._failures[self._round]
                if has_failed and (self.is_coordinator or not is_ready):
                    raise self._error()
                if is_ready:
                    return
                self._wait(_SLICE_S)
        finally:
            self._awaited_since = None

    def _wait(self, limit_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._bell.get(timeout=limit_s)

    def _ring(self) -> None:
        if self._bell.empty():
            self._bell.put(None)

    def _give_up(self, error: BaseException) -> NoReturn:
        """Tell the others of ``error``, then raise what everyone raises; interrupts are raised at once."""
        self._tell(error)
        if not isinstance(error, Exception):
            raise error
        self._wait_until(lambda: False)
        raise InternalError("waiting for a verdict ended without one")

    def _tell(self, error: BaseException) -> None:
        """Make ``error`` known as this rank's failure, unless the operation has failed already."""
        with self._lock:
            if self._round in self._verdicts or self._own:
                return
            failures = self._described({self.rank: error})
            self._own[self.names[self.rank]] = error
            self._unheard = Deadline(self._patience.farewell_s, self._clock)
            self._failures[self._round].update(failures)
            self._is_interrupted |= not isinstance(error, Exception)
            self._accuse(failures, round_=self._round)

    def _described(self, errors: Mapping[int, BaseException]) -> dict[int, Failure]:
        """Failures by the name of each rank."""
        found = {}
        for rank, error in errors.items():
            phase = error.phase if isinstance(error, RankLostError) and error.phase else self._phase
            found[self.names[rank]] = describe(error, rank=self.names[rank], phase=phase, encode=self._encode)
        return found

    def _accuse(self, failures: dict[int, Failure], *, round_: int) -> None:
        """Bring failures before the coordinator, which may be this rank."""
        if not self.is_coordinator:
            phase = INTERRUPTED if self._is_interrupted else ""
            self._post([self._coordinator], Kind.FAILURE, step=round_, phase=phase, payload=pack(failures))
            return
        for rank, failure in failures.items():
            self._failures[round_].setdefault(rank, failure)
        if round_ == self._round and self._settling is None:
            self._settling = Deadline(self._patience.settle_s, self._clock)

    def _error(self) -> CheckpointError:
        return combine(self._verdicts[self._round], decode=self._decode, own=self._own)

    def _post(self, to: Collection[int], kind: Kind, *, step: int = 0, phase: str = "", payload: bytes = b"") -> None:
        for rank in to:
            self._channel.post(self, rank, kind, step=step, phase=phase, payload=payload)

    def _audience(self) -> list[int]:
        """The ranks that get our signs of life."""
        return list(self.guests) if self.is_coordinator else [self._coordinator]

    def _send_sign(self, to: Collection[int], *, is_urgent: bool = False) -> None:
        self._beats += 1
        sign = Sign(
            beat=self._beats,
            phase=self._phase,
            progress=self._progress + self._count(),
            moved=self.moved,
            file=self._file(),
            working=self._awaited_since is None,
        )
        payload = _sign_encoder.encode(sign)
        for rank in to:
            self._channel.post(self, rank, Kind.BEAT, payload=payload, is_urgent=is_urgent)

    def _is_heard(self) -> bool:
        return self.is_coordinator or self._watch.present(self._coordinator)

    def _overdue(self) -> dict[int, RankLostError]:
        if self._awaited_since is None or self._own:
            return {}
        awaited: Collection[int] = [] if self._step in self._wholes else [self._coordinator]
        if self.is_coordinator:
            arrived = self._parts.get(self._step, {})
            awaited = [rank for rank in self._others if rank not in arrived]
        excuse = not self.is_coordinator
        return self._watch.overdue(awaited, phase=self._phase, since=self._awaited_since, excuse_waiting=excuse)

    def _lose(self, lost: dict[int, RankLostError]) -> None:
        """Take ranks as lost; whoever has lost the coordinator fails with that, and tells it, should it still hear."""
        if not lost:
            return
        failures = self._described(lost)
        if self._is_heard():  # one that has not come has nothing to do with it
            self._accuse(failures, round_=self._round)
        if not self.is_coordinator:
            self._verdicts[self._round] = failures
            self._ring()

    def _everyone_told(self) -> bool:
        """Whether nobody is left who could fail in this phase too."""
        arrived = {self.names[rank] for rank in self._parts.get(self._step, ())}
        if self._awaited_since is not None:
            arrived.add(self.names[self.rank])
        return len(arrived | set(self._failures[self._round])) >= self.size

    def _decide(self, failures: Mapping[int, Failure]) -> None:
        """The coordinator's verdict: the operation has failed, for these reasons, on every rank."""
        verdict = self._verdicts[self._round] = dict(failures)
        self._unreceived = set(self.guests)
        self._post(self.guests, Kind.VERDICT, step=self._round, payload=pack(verdict))
        self._ring()

    def _see_received(self) -> None:
        """Before the coordinator leaves, and perhaps its process ends: see that its last word has arrived."""
        if not self.is_coordinator:
            return
        with self._lock:
            if self._failures[self._round] and self._round not in self._verdicts:
                self._decide(self._failures[self._round])
        has_failed = self._round in self._verdicts
        deadline = Deadline(self._patience.farewell_s if has_failed else self._patience.handover_s, self._clock)
        while not deadline.passed and self._unreceived - self._watch.left - self._channel.gone:
            self._wait(min(_SLICE_S, deadline.remaining_s))
