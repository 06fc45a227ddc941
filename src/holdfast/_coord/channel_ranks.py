"""The ranks of a job in one save or load, talking over a channel.

Parts go to the coordinator, what it makes of them comes back. The coordinator also keeps watch: it alone decides that
the operation has failed and tells everyone, so that all ranks raise the same error. Ranks that have lost it, or the
process that carries the messages, all raise what the first of them says; where they cannot meet, each its own.

Invariant: whoever waits wakes up at least four times a second to see whether to give up. No collective of the process
group is ever called.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import NoReturn, TypeVar

from holdfast._coord.agreement import agreed
from holdfast._coord.channel import Channel, Listener
from holdfast._coord.courier import Courier, read_sign
from holdfast._coord.failures import Decode, Encode, Failure, combine, describe, pack, unpack
from holdfast._coord.watch import Watch
from holdfast._coord.wire import Kind, Message
from holdfast._coord.witness import Witness
from holdfast._values.deadline import Clock, Deadline, Patience, Sign
from holdfast.errors import CheckpointError, InternalError, RankLostError

Part = TypeVar("Part")
Whole = TypeVar("Whole")

_SLICE_S = 0.25


def _nothing_done() -> int:
    return 0


def _no_file() -> str:
    return ""


class ChannelRanks:
    """All ranks of one operation on a channel.

    Making one takes the operation's number: do it in the same order on every rank, before anything can fail. Enter it
    for all phases; leaving it by an exception tells the others.

    Args:
        channel: the connection of this rank.
        encode: what makes bytes of a part or an error.
        decode: the reverse.
        coordinator_rank: who merges, counted within the group.
        deadline_s: seconds without progress after which a rank that others wait for is given up.
        patience: all the limits instead of just ``deadline_s``.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        encode: Encode,
        decode: Decode,
        coordinator_rank: int = 0,
        deadline_s: float = 120.0,
        patience: Patience | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        if not 0 <= coordinator_rank < channel.size:
            raise ValueError(f"there is no rank {coordinator_rank} in a group of {channel.size} ranks")
        self.rank = channel.rank
        self.size = channel.size
        self.is_coordinator = channel.rank == coordinator_rank
        self.kept = channel.kept.setdefault(coordinator_rank, {})
        self._coordinator = coordinator_rank
        self._channel = channel
        self._encode = encode
        self._decode = decode
        self._patience = patience or Patience(progress_s=deadline_s)
        self.names = channel.names
        self.deadline_s = self._patience.progress_s
        self._clock = clock
        self._number = channel.number_operation()
        self._others = [rank for rank in range(channel.size) if rank != channel.rank]
        self._courier: Courier | None = None
        self._changed = threading.Condition()
        self._step = 0
        self._phase = "starting"
        self._progress = 0
        self._count: Callable[[], int] = _nothing_done
        self._file: Callable[[], str] = _no_file
        self._awaited_since: float | None = None
        self._parts: dict[int, dict[int, Message]] = {}
        self._wholes: dict[int, bytes] = {}
        self._unreceived: set[int] = set()
        self._failures: dict[int, Failure] = {}
        self._settling: Deadline | None = None
        self._verdict: dict[int, Failure] | None = None
        self._own: dict[int, BaseException] = {}
        self._own_failures: dict[int, Failure] = {}
        self._unheard: Deadline | None = None
        self._word: dict[int, Failure] = {}
        self._word_due: Deadline | None = None

    def __enter__(self) -> ChannelRanks:
        if self._courier is not None:
            raise InternalError("an operation is entered once; make another for the next save or load")
        channel, patience = self._channel, self._patience
        self._watch = Watch(names=channel.names, carrier=channel.carrier, patience=patience, clock=self._clock)
        self._courier = Courier(
            channel,
            self._number,
            audience=self._others if self.is_coordinator else [self._coordinator],
            beat_s=patience.beat_s,
            sign=self._sign,
            tick=self._tick,
            clock=self._clock,
        )
        self._courier.start()
        channel.open(self._number, Listener(deliver=self._deliver, broken=self._broken))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        courier = self._running()
        try:
            if error is not None:
                self._tell(error)
            self._see_received()
        finally:
            self._channel.close(self._number)
            courier.end(self._patience.farewell_s)
            self._channel.join()

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

    def agree(self, name: str, value: object) -> None:
        """Raise RankDisagreementError on every rank unless all of them gave a ``value`` that prints the same."""

        def compare(said: list[str]) -> None:
            agreed(name, dict(zip(self._channel.names, said, strict=True)))

        self.share(f"comparing the {name}", lambda: repr(value), compare)

    def check(self) -> None:
        """Raise what another rank has failed with, if one has; cheap, any thread."""
        if self._watch.is_stale:  # the courier hangs on a carrier that does not answer
            self._tick()
        if self._verdict is not None:
            raise self._error()

    def progress(self, bytes_done: int) -> None:
        """Show the others that the work of this phase goes on; any thread."""
        self._progress = bytes_done

    def follow(self, count: Callable[[], int], file: Callable[[], str]) -> None:
        """Ask at every heartbeat how far the work is, and at which file; any thread may be asked to run them."""
        self._count, self._file = count, file

    def _together(
        self,
        phase: str,
        local: Callable[[], Part],
        merge: Callable[[list[Part]], tuple[Whole, dict[int, bytes]]],
    ) -> Whole:
        courier = self._running()
        self._step += 1
        self._phase, self._progress = phase, 0
        courier.announce()  # before any work, so that whoever looks for a lost rank knows its phase
        try:
            self.check()
            part = local()
            self.check()
            if self.is_coordinator:
                whole, replies = merge(self._gather(part))
                self._reply(replies)
                return whole
            payload = self._encode(part)
            courier.post([self._coordinator], Kind.PART, step=self._step, phase=phase, payload=payload)
            result: Whole = self._decode(self._receive())
            return result
        except BaseException as error:
            self._give_up(error)

    def _gather(self, own: Part) -> list[Part]:
        """The parts of all ranks, by rank; every one made in this very phase."""
        arrived = self._parts.setdefault(self._step, {})
        self._wait_until(lambda: len(arrived) == len(self._others))
        elsewhere = {rank: message.phase for rank, message in arrived.items() if message.phase != self._phase}
        if elsewhere:
            said = {self.rank: self._phase, **elsewhere}
            agreed("step to take", {self._channel.names[rank]: repr(said[rank]) for rank in sorted(said)})
        parts = (own if rank == self.rank else self._decode(arrived[rank].payload) for rank in range(self.size))
        return list(parts)

    def _reply(self, replies: dict[int, bytes]) -> None:
        with self._changed:
            self._wait_until(lambda: True)  # or raise, if somebody failed in the meantime
            del self._parts[self._step]
            self._unreceived = set(replies)
            for rank, payload in replies.items():
                self._running().post([rank], Kind.WHOLE, step=self._step, payload=payload)

    def _receive(self) -> bytes:
        self._wait_until(lambda: self._step in self._wholes)
        return self._wholes.pop(self._step)

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Return when ``ready``; raise when the operation has failed.

        The coordinator looks at failures first, because everyone is told of them; the others take an answer that has
        arrived even if the coordinator is gone by now.
        """
        with self._changed:
            self._awaited_since = self._clock()
            try:
                while True:
                    self._tick()
                    is_ready = ready() and not self._failures
                    if self._verdict is not None and (self.is_coordinator or not is_ready):
                        raise self._error()
                    if is_ready:
                        return
                    self._changed.wait(_SLICE_S)
            finally:
                self._awaited_since = None

    def _give_up(self, error: BaseException) -> NoReturn:
        """Tell the others of ``error``, then raise what everyone raises; interrupts are raised at once."""
        if not isinstance(error, Exception):
            self._tell(error)
            raise error
        self._tell(error)
        self._wait_until(lambda: False)
        raise InternalError("waiting for a verdict ended without one")

    def _tell(self, error: BaseException) -> None:
        """Make ``error`` known as this rank's failure, unless the operation has failed already."""
        name = self._channel.names[self.rank]
        with self._changed:
            if self._verdict is not None or self._own:
                return
            failure = describe(error, rank=name, phase=self._phase, encode=self._encode)
            self._own[name] = error
            self._own_failures = {name: failure}
            self._unheard = Deadline(self._patience.farewell_s, self._clock)
            self._accuse(self._own_failures)

    def _accuse(self, failures: dict[int, Failure]) -> None:
        """Bring failures before the coordinator, which may be this rank."""
        if self.is_coordinator:
            for rank, failure in failures.items():
                self._failures.setdefault(rank, failure)
            if self._settling is None:
                self._settling = Deadline(self._patience.settle_s, self._clock)
            self._running().nudge()
        else:
            self._running().post([self._coordinator], Kind.FAILURE, payload=pack(failures))

    def _error(self) -> CheckpointError:
        assert self._verdict is not None
        return combine(self._verdict, decode=self._decode, own=self._own)

    def _deliver(self, message: Message) -> None:
        """Take a message, on the thread that receives."""
        with self._changed:
            if message.kind is Kind.BEAT:
                self._take_sign(message)
            elif message.kind is Kind.PART:
                self._parts.setdefault(message.step, {})[message.sender] = message
            elif message.kind is Kind.WHOLE:
                self._wholes[message.step] = message.payload
                self._running().post([message.sender], Kind.RECEIPT, step=message.step)
            elif message.kind is Kind.FAILURE:
                self._accuse(unpack(message.payload))
            elif message.kind is Kind.VERDICT:
                if self._verdict is None:
                    self._verdict = unpack(message.payload)
                self._running().post([message.sender], Kind.RECEIPT, step=-1)
            elif message.kind is Kind.RECEIPT:
                if message.step == (self._step if self._verdict is None else -1):
                    self._unreceived.discard(message.sender)
            elif message.kind is Kind.LEFT:
                self._watch.leave(message.sender)
            self._changed.notify_all()

    def _take_sign(self, message: Message) -> None:
        if message.sender == self.rank:
            self._watch.echo()
        else:
            self._watch.see(message.sender, read_sign(message.payload))

    def _broken(self, reason: str) -> None:
        """Take it that the connection is gone, on a thread that used it."""
        with self._changed:
            # The system gives each rank another reason; the error is to be the same on all.
            self._lose(self._watch.broken(self._phase))
            self._changed.notify_all()

    def _sign(self, beat: int, moved: int) -> Sign:
        working = self._awaited_since is None
        progress = self._progress + self._count()
        return Sign(beat=beat, phase=self._phase, progress=progress, moved=moved, file=self._file(), working=working)

    def _tick(self) -> None:
        """Decide what has to be decided now: who is lost, and whether the operation has failed."""
        with self._changed:
            if self._verdict is not None:
                return
            if self._word_due is not None:
                if self._word_due.passed:
                    self._conclude()
                return
            pause_s = self._watch.look()
            if self.is_coordinator:  # the others hear nothing from it and decide for themselves
                self._lose(self._watch.given_up(self.rank, pause_s, self._phase))
            if self._watch.is_cut_off:
                self._lose(self._watch.unreachable(self._phase))
            else:
                self._lose({**self._overdue(), **self._watch.silent(self._phase)})
            if self._unheard is not None and self._unheard.passed and not self._heard():
                self._verdict = self._own_failures
                self._changed.notify_all()
            elif self._failures and (self._everyone_told() or (self._settling is not None and self._settling.passed)):
                self._decide()

    def _heard(self) -> bool:
        """Whether the coordinator is there to take our failure, or has yet to answer it."""
        return self.is_coordinator or self._verdict is not None or self._watch.present(self._coordinator)

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
        """Take ranks as lost; whoever has lost the coordinator or the carrier settles that with the other survivors."""
        names = self._channel.names
        failures = {
            names[rank]: describe(error, rank=names[rank], phase=error.phase or self._phase, encode=self._encode)
            for rank, error in lost.items()
        }
        if not failures or self._verdict is not None or self._word_due is not None:
            return
        if self.is_coordinator and (self._channel.carrier not in lost or self.rank in lost):
            self._accuse(failures)
            return
        self._word, self._word_due = failures, Deadline(self._patience.witness_s, self._clock)
        if self.size - len(lost) == 1:
            self._conclude()
        else:
            threading.Thread(target=self._settle, args=(list(lost),), name="holdfast-witness", daemon=True).start()

    def _settle(self, lost: Collection[int]) -> None:
        """Take the word of the first survivor, on a thread that is left behind if the witness does not answer."""
        assert self._word_due is not None
        with contextlib.suppress(OSError, RuntimeError):  # the witness is lost too
            witness = Witness(self._channel, self._number, lost)
            word = unpack(witness.settle(pack(self._word)))
            with self._changed:
                self._word = word
            witness.stay(self._word_due)
        with self._changed:
            self._conclude()

    def _conclude(self) -> None:
        """Fail with the word of the survivors; the coordinator is told, should it still hear."""
        if self._verdict is None:
            if not self.is_coordinator:
                self._accuse(self._word)
            self._verdict = self._word
            self._changed.notify_all()

    def _everyone_told(self) -> bool:
        """Whether nobody is left who could fail in this phase too."""
        arrived = {self._channel.names[rank] for rank in self._parts.get(self._step, ())}
        if self._awaited_since is not None:
            arrived.add(self._channel.names[self.rank])
        return len(arrived | set(self._failures)) >= self.size

    def _decide(self) -> None:
        """The coordinator's verdict: the operation has failed, for these reasons, on every rank."""
        self._verdict = dict(self._failures)
        self._unreceived = set(self._others)
        self._running().post(self._others, Kind.VERDICT, payload=pack(self._verdict))
        self._changed.notify_all()

    def _see_received(self) -> None:
        """Before the coordinator leaves, and perhaps its process ends: see that its last word has arrived."""
        if not self.is_coordinator:
            return
        with self._changed:
            if self._failures and self._verdict is None:
                self._decide()
            limit_s = self._patience.silence_s if self._verdict is None else self._patience.farewell_s
            deadline = Deadline(limit_s, self._clock)
            while not deadline.passed:
                if not self._unreceived - self._watch.left - set(self._watch.silent(self._phase)):
                    return
                self._changed.wait(min(_SLICE_S, deadline.remaining_s))

    def _running(self) -> Courier:
        if self._courier is None:
            raise InternalError("the ranks take steps together only inside 'with ranks:'")
        return self._courier
