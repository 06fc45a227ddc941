"""The ranks of a job in one save or load, talking over a channel.

Parts go to the coordinator, what it makes of them comes back. The coordinator also keeps watch: it alone decides that
the operation has failed and tells everyone, so that all ranks raise the same error. Ranks that have lost it speak for
themselves: all name it, each in the phase that it was in itself.

Two threads work on one operation: the caller's, which takes the steps, and the channel's, which delivers messages and
looks at the time. What both touch is changed under the lock of the channel. The caller waits for the other by a bell,
and wakes up at least four times a second all the same, to see whether to give up. No collective of the process group is
ever called.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import msgspec

from holdfast._ranks.channel import INTERRUPTED, Channel, Ended
from holdfast._ranks.connections import Bell, Kind, Message
from holdfast._ranks.ranks import Failure, Ranks, Watch, combine, describe, disagreement, pack, unpack
from holdfast._torch_codec.pickles import decode_message, encode_message
from holdfast._values.deadline import Deadline, Patience, Sign
from holdfast.errors import CheckpointError, InternalError, RankLostError
from holdfast.events.progress import Shown

Part = TypeVar("Part")
Whole = TypeVar("Whole")

_SLICE_S = 0.25
_ANNOUNCE_S = 0.1
_RETURN_S = 3.0  # for ranks that live and whose connections broke before
_STEPS = 1 << 16  # more than one round takes
_log = logging.getLogger("holdfast")
_sign_decoder = msgspec.msgpack.Decoder(Sign)


@dataclass(slots=True)
class _Round:
    """What has gone wrong since the operation began, or since ``again``; ranks by their numbers in the job.

    ``failures`` is what was told so far, ``verdict`` what all ranks raise, once that is decided, ``own`` the error of
    this rank. Other failures may join the first until ``settling``; whom the coordinator has not heard until
    ``unheard`` raises its own failure. ``unreceived`` has the ranks that have not confirmed our last word.
    """

    failures: dict[int, Failure] = field(default_factory=dict)
    verdict: dict[int, Failure] | None = None
    own: dict[int, BaseException] = field(default_factory=dict)
    settling: Deadline | None = None
    unheard: Deadline | None = None
    unreceived: set[int] = field(default_factory=set)


class ChannelRanks(Ranks):
    """All ranks of one operation on a channel, whose coordinator merges.

    Enter it for all phases; leaving it by an exception tells the others. ``key`` says which call this is, as
    "save '/path'": ranks whose keys are equal meet. ``call`` is its number on this rank. ``partners`` are the ranks
    that this one talks to: the coordinator, or, there, all that have come; with the number of the call on the one of
    both that is not the coordinator.
    """

    def __init__(self, channel: Channel, *, key: str = "", patience: Patience) -> None:
        super().__init__(rank=channel.rank, is_coordinator=channel.is_coordinator)
        self.size = channel.size
        self.job_ranks = channel.job_ranks
        self.kept = channel.kept
        self.deadline_s = patience.progress_s
        self.key = key
        self.call = next(channel.calls)
        self.partners = {} if channel.is_coordinator else {channel.coordinator: self.call}
        self._channel = channel
        self._patience = patience
        self._bell = Bell()
        self._watch = Watch(job_ranks=channel.job_ranks, patience=patience)
        self._number = self._step = 0
        self._rounds: defaultdict[int, _Round] = defaultdict(_Round)  # later ones of ranks that are ahead of this one
        self._round = self._rounds[0]
        self._next_beat = time.monotonic() + patience.beat_s
        self._returning = Deadline(min(_RETURN_S, patience.progress_s))
        self._awaited_since: float | None = None
        self._parts: dict[int, dict[int, Message]] = {}
        self._wholes: dict[int, bytes] = {}
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
            self._round.own = {}
            self._channel.leave(self, self._patience.farewell_s)

    def again(self) -> None:
        with self._channel.lock:
            del self._rounds[self._number]
            self._number += 1
            self._step = self._number * _STEPS
            self._round = self._rounds[self._number]
            if self._round.failures:  # of a rank that is ahead of this one
                self._round.settling = Deadline(self._patience.settle_s)

    def reduce_scatter(
        self, phase: str, local: Callable[[], Part], merge: Callable[[list[Part]], list[Whole]]
    ) -> Whole:
        whole: Whole = self._together(phase, local, merge, for_each=True)
        return whole

    def all_reduce(self, phase: str, local: Callable[[], Part], merge: Callable[[list[Part]], Whole]) -> Whole:
        whole: Whole = self._together(phase, local, merge, for_each=False)
        return whole

    def locally(self, phase: str, local: Callable[[], Part]) -> Part:
        # The others learn of it with the next beat: announcing it would take time.
        self.signs.phase = phase
        try:
            return local()
        except BaseException as error:
            self._give_up(error)

    def check(self) -> None:
        if self._round.verdict is not None:
            raise self._error()

    def look_until(self, look: Callable[[], bool]) -> None:
        try:
            self._awaited_since = time.monotonic()
            super().look_until(look)
        finally:
            with self._channel.lock:
                self._awaited_since = None

    def overview(self) -> Shown:
        signs = {**self._watch.signs(), self.job_ranks[self.rank]: self._sign()}
        part = {rank: sign.progress / (sign.total or 1) for rank, sign in signs.items() if sign.working}
        slowest = min(part, key=part.__getitem__, default=None)
        said = "" if slowest is None else f"slowest: rank {slowest} ({part[slowest]:.0%})"
        done, total = (
            sum(counts) for counts in zip(*((each.progress, each.total) for each in signs.values()), strict=True)
        )
        return Shown(self.signs.phase, done, total, said)

    # What the channel asks, with its lock held but for ``beat``.

    @property
    def has_failed(self) -> bool:
        return self._round.verdict is not None

    def ended(self, rank: int) -> Ended:
        """How it failed, for ``rank``, which has not come."""
        verdict = self._round.verdict or {}
        is_named = self.job_ranks[rank] in verdict
        return Ended(
            number=self.call,
            key=self.key,
            verdict=pack(verdict),
            is_error=not self._is_apart and not self._is_interrupted and not is_named,
            is_open=self._is_interrupted or is_named,
        )

    def welcome(self, rank: int, call: int) -> None:
        """Take it that ``rank`` has come; it is told that we are here, or that all is over."""
        self.partners[rank] = call
        self._ungreeted.append(rank)
        if self._round.verdict is not None:
            self._channel.post(self, [rank], Kind.VERDICT, step=self._number, payload=pack(self._round.verdict))

    def deliver(self, rank: int, message: Message) -> None:
        """Take a message, on the thread that receives."""
        if message.kind is Kind.BEAT:
            self._watch.see(rank, _sign_decoder.decode(message.payload))
        elif message.kind is Kind.PART:
            self._parts.setdefault(message.step, {})[rank] = message
        elif message.kind is Kind.WHOLE:
            self._wholes[message.step] = message.payload
            self._channel.post(self, [rank], Kind.RECEIPT, step=message.step)
        elif message.kind is Kind.FAILURE:
            self._is_interrupted |= message.phase == INTERRUPTED
            self._accuse(unpack(message.payload), number=message.step)
        elif message.kind is Kind.VERDICT:
            told = self._rounds[message.step]
            told.verdict = unpack(message.payload) if told.verdict is None else told.verdict
            self._channel.post(self, [rank], Kind.RECEIPT, step=-1)
        elif message.kind is Kind.RECEIPT:
            if message.step == (-1 if self._round.verdict is not None else self._step):
                self._round.unreceived.discard(rank)
        elif message.kind is Kind.LEFT:
            self._watch.left.add(rank)
        self._ring()

    def refuse(self, verdict: bytes) -> None:
        """Fail because the ranks are at different calls."""
        self._is_apart = True
        self._decide(unpack(verdict))

    def disagree(self, keys: Mapping[int, str]) -> bytes:
        """What ranks are told that are at different calls; a key is a function and a path."""
        is_path = len({key.partition(" ")[0] for key in keys.values()}) == 1
        said = {self.job_ranks[rank]: key.partition(" ")[2] if is_path else key for rank, key in sorted(keys.items())}
        return pack(self._described({self.rank: disagreement("checkpoint path" if is_path else "call", said)}))

    def tick(self) -> None:
        """Decide what has to be decided now: who is lost, and whether the operation has failed."""
        now = self._round
        if now.verdict is not None:
            return
        pause_s, phase = self._watch.look(), self.signs.phase
        if self._awaited_since is not None:
            self._awaited_since += pause_s
        gone: set[int] = self._channel.gone
        if self.is_coordinator and not self._returning.passed:
            gone = gone & set(self.partners)
        lost: dict[int, RankLostError] = {}
        if self._awaited_since is not None and not now.own:
            lost = self._watch.overdue(
                self._awaited(), phase=phase, since=self._awaited_since, excuse_waiting=not self.is_coordinator
            )
        if gone:
            lost |= self._watch.gone(gone, phase)
        if pause_s and self.is_coordinator:  # the others hear nothing from it and decide for themselves
            lost |= self._watch.given_up(self.rank, pause_s, phase)
        if lost:
            self._lose(lost)
        if now.unheard is not None and now.unheard.passed and not self._watch.present(self._channel.coordinator):
            now.verdict = dict(now.failures)
            self._ring()
        elif self.is_coordinator and now.failures and (self._everyone_told() or (now.settling and now.settling.passed)):
            self._decide(now.failures)

    def beat(self) -> None:
        """Give a sign of life, if it is time."""
        now = time.monotonic()
        new, self._ungreeted = self._ungreeted, []
        if now >= self._next_beat:
            self._next_beat = now + self._patience.beat_s
            self._send_sign(self.partners, is_urgent=True)
        elif new:
            self._send_sign(new)

    def _together(
        self, phase: str, local: Callable[[], Part], merge: Callable[[list[Part]], Any], *, for_each: bool
    ) -> Any:
        """What ``merge`` makes of all parts; this rank's element of it where it is ``for_each``."""
        if not self._is_entered:
            raise InternalError("the ranks take steps together only inside 'with ranks:'")
        self._step += 1
        self.signs.phase = phase
        # Before any work, so that whoever looks for a lost rank knows its phase.
        partners = list(self.partners)
        self._send_sign(partners)
        self._channel.see_sent(partners, _ANNOUNCE_S)
        try:
            self.check()
            part = local()
            self.check()
            if self.is_coordinator:
                whole = merge(self._gather(part))
                self._reply(whole, for_each=for_each)
                return whole[self.rank] if for_each else whole
            self._channel.post(self, partners, Kind.PART, step=self._step, phase=phase, payload=encode_message(part))
            self._wait_until(lambda: self._step in self._wholes)
            return decode_message(self._wholes.pop(self._step))
        except BaseException as error:
            self._give_up(error)

    def _gather(self, own: Part) -> list[Part]:
        """The parts of all ranks, by rank; every one made in this very phase."""
        with self._channel.lock:
            arrived = self._parts.setdefault(self._step, {})
        self._wait_until(lambda: len(arrived) == len(self._channel.others))
        said = {rank: message.phase for rank, message in arrived.items()} | {self.rank: self.signs.phase}
        if len(set(said.values())) > 1:
            raise disagreement("step to take", {self.job_ranks[rank]: repr(said[rank]) for rank in sorted(said)})
        return [own if rank == self.rank else decode_message(arrived[rank].payload) for rank in range(self.size)]

    def _reply(self, whole: Any, *, for_each: bool) -> None:
        others = self._channel.others
        if not for_each:
            replies = dict.fromkeys(others, encode_message(whole) if others else b"")
        elif len(whole) == self.size:
            replies = {rank: encode_message(whole[rank]) for rank in others}
        else:
            raise InternalError(f"{self.signs.phase} made {len(whole)} parts for {self.size} ranks")
        self._wait_until(lambda: True)  # or raise, if somebody failed in the meantime
        with self._channel.lock:
            self._parts.pop(self._step, None)
            self._round.unreceived = set(replies)
            for rank, payload in replies.items():
                self._channel.post(self, [rank], Kind.WHOLE, step=self._step, payload=payload)

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Return when ``ready``; raise when the operation has failed.

        The coordinator looks at failures first, because everyone is told of them; the others take an answer that has
        arrived even if the coordinator is gone by now.
        """
        begun = self._awaited_since = time.monotonic()
        try:
            while True:
                with self._channel.lock:
                    self.tick()
                    has_failed = self._round.verdict is not None
                    is_ready = ready() and not self._round.failures
                    notice = self._watch.notice(self._awaited(), since=self._awaited_since)
                if has_failed and (self.is_coordinator or not is_ready):
                    raise self._error()
                if is_ready:
                    return
                if notice:  # here, because handlers of the log are code of others
                    _log.warning("%s waits: %s", self.key.removesuffix(" None"), notice)
                self._wait(_SLICE_S)
        finally:
            self.waited_s += time.monotonic() - begun
            self._awaited_since = None

    def _awaited(self) -> Collection[int]:
        if self.is_coordinator:
            arrived = self._parts.get(self._step, {})
            return [rank for rank in self._channel.others if rank not in arrived]
        return [] if self._step in self._wholes else [self._channel.coordinator]

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
        with self._channel.lock:
            now = self._round
            if now.verdict is not None or now.own:
                return
            failures = self._described({self.rank: error})
            now.own[self.job_ranks[self.rank]] = error
            now.unheard = None if self.is_coordinator else Deadline(self._patience.farewell_s)
            now.failures.update(failures)
            self._is_interrupted |= not isinstance(error, Exception)
            self._accuse(failures, number=self._number)

    def _described(self, errors: Mapping[int, BaseException]) -> dict[int, Failure]:
        """Failures by the number of each rank in the job."""
        found = {}
        for rank, error in errors.items():
            phase = error.phase if isinstance(error, RankLostError) and error.phase else self.signs.phase
            found[self.job_ranks[rank]] = describe(error, rank=self.job_ranks[rank], phase=phase)
        return found

    def _accuse(self, failures: dict[int, Failure], *, number: int) -> None:
        """Bring failures of round ``number`` before the coordinator, which may be this rank."""
        if not self.is_coordinator:
            phase = INTERRUPTED if self._is_interrupted else ""
            self._channel.post(self, self.partners, Kind.FAILURE, step=number, phase=phase, payload=pack(failures))
            return
        accused = self._rounds[number]
        accused.failures = {**failures, **accused.failures}
        if accused is self._round and accused.settling is None:
            accused.settling = Deadline(self._patience.settle_s)

    def _error(self) -> CheckpointError:
        return combine(self._round.verdict or {}, self._round.own)

    def _sign(self) -> Sign:
        signs = self.signs
        return Sign(
            beat=signs.beats,
            phase=signs.phase,
            progress=signs.count(),
            total=signs.total(),
            moved=signs.moved,
            file=signs.file(),
            working=self._awaited_since is None,
        )

    def _send_sign(self, to: Collection[int], *, is_urgent: bool = False) -> None:
        self.signs.beats += 1
        payload = msgspec.msgpack.encode(self._sign())
        self._channel.post(self, to, Kind.BEAT, payload=payload, is_urgent=is_urgent)

    def _lose(self, lost: dict[int, RankLostError]) -> None:
        """Take ranks as lost; whoever has lost the coordinator fails with that, and tells it, should it still hear."""
        failures = self._described(lost)
        # A coordinator that has not come has nothing to do with it.
        if self.is_coordinator or self._watch.present(self._channel.coordinator):
            self._accuse(failures, number=self._number)
        if not self.is_coordinator:
            self._round.verdict = failures
            self._ring()

    def _everyone_told(self) -> bool:
        """Whether nobody is left who could fail in this phase too."""
        arrived = {self.job_ranks[rank] for rank in self._parts.get(self._step, ())}
        if self._awaited_since is not None:
            arrived.add(self.job_ranks[self.rank])
        return len(arrived | set(self._round.failures)) >= self.size

    def _decide(self, failures: Mapping[int, Failure]) -> None:
        """The coordinator's verdict: the operation has failed, for these reasons, on every rank."""
        verdict = self._round.verdict = dict(failures)
        self._round.unreceived = set(self.partners)
        self._channel.post(self, self.partners, Kind.VERDICT, step=self._number, payload=pack(verdict))
        self._ring()

    def _see_received(self) -> None:
        """Before the coordinator leaves, and perhaps its process ends: see that its last word has arrived."""
        if not self.is_coordinator:
            return
        now = self._round
        with self._channel.lock:
            if now.failures and now.verdict is None:
                self._decide(now.failures)
        has_failed = now.verdict is not None
        deadline = Deadline(self._patience.farewell_s if has_failed else self._patience.handover_s)
        while not deadline.passed and now.unreceived - self._watch.left - self._channel.gone:
            self._wait(min(_SLICE_S, deadline.remaining_s))
