"""Ranks agree on the step at which all of them do something: once for each request, and with nothing at other steps.

A rank that wants something tells the coordinator, which asks all ranks how far they are. Each answers from the thread
of its connections, so one that computes answers too. From then on it begins no step, and passes none, before it has
heard the decision. That is the step after the furthest one; or the furthest itself, where that is saved anyway and
nobody is past it. Steps may jump: what is decided for a step is done at the first one from there on.

Invariant: all ranks that begin the same steps do the same at each of them. No collective is called. Whoever waits does
so until the deadline, and no longer than the rank that it waits for lives.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Collection
from queue import SimpleQueue
from typing import Literal

import msgspec

from holdfast._process import Event, Lock, forget_in_child
from holdfast._ranks.channel_ranks import ChannelRanks
from holdfast._ranks.ranks import Ranks
from holdfast._values.deadline import Deadline
from holdfast.errors import RankLostError

What = Literal["save", "stop"]

AGREEING = "agreeing on a step"
"""The phase of a rank that waits for a decision."""

_SLICE_S = 0.25
_FAREWELL_S = 1.0


class _Place(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last step that a rank has begun, whether it is saved whatever is decided, and whether the rank is past it."""

    step: int = -1
    is_saved: bool = False
    is_passed: bool = False


class _Word(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What ranks and coordinator say to each other; ``what`` has reasons, ``lost`` is the number of a rank in the job.

    "want" and "answer" are said to the coordinator, "ask" and "decide" by it, "leave" by anyone.
    """

    kind: Literal["want", "ask", "answer", "decide", "leave"]
    number: int = 0
    what: dict[What, str] = {}
    place: _Place = _Place()
    first_step: int = 0
    lost: int | None = None


_decoder = msgspec.msgpack.Decoder(_Word)


class Agreement:
    """What all ranks have agreed to do at which step, as one of them knows it.

    ``ranks`` are those of an operation, which may be over; ``topic`` is the same on all of them, and of no other
    agreement of theirs. One thread begins and passes steps; any thread may ``request``.

    What that one thread and the thread of the connections share changes by single steps. The one writes its place and
    then looks whether it was asked; the other notes that it was asked and then reads the place. So the answer has the
    place, or the rank waits. All else is under the lock of the channel.
    """

    def __init__(self, ranks: Ranks, topic: str) -> None:
        self._channel = ranks._channel if isinstance(ranks, ChannelRanks) else None
        self._lock = Lock() if self._channel is None else self._channel.lock
        self._topic = topic
        self._rank, self._job_ranks = ranks.rank, ranks.job_ranks
        self.is_coordinator, self.job_rank = ranks.is_coordinator, ranks.job_ranks[ranks.rank if ranks.size > 1 else 0]
        self._deadline_s = ranks.deadline_s
        self._place = _Place()
        self._deciding: Event | None = None
        self._decided: set[tuple[What, int]] = set()
        self._lost: int | None = None
        self._is_over = False
        self.reasons: dict[What, str] = {}
        """Why something is wanted, or was decided, as far as this rank knows; for "save", why the last time."""
        # The coordinator's: what is to be decided next, the number of the question, and the answers to it.
        self._wanted: dict[What, str] = {}
        self._number = 0
        self._answers: dict[int, _Place] = {}
        self._left: dict[int, _Place] = {}
        forget_in_child(self)
        if self._channel is not None:
            with self._lock:
                self._channel.notices.listen(topic, self)

    @property
    def is_waiting(self) -> bool:
        """Whether ranks were asked and nothing is decided yet."""
        return self._deciding is not None

    def request(self, what: What, reason: str) -> None:
        """Have all ranks do ``what`` at a common step; again, while that is open or to come, changes nothing."""
        done: SimpleQueue[None] = SimpleQueue()

        def want() -> None:
            try:
                with self._lock:
                    if not self._is_over and what not in self._to_come():
                        self._say_to_coordinator(_Word(kind="want", what={what: reason}))
            finally:
                done.put(None)

        if threading.current_thread() is threading.main_thread():
            # Interrupts come here alone; one in the middle of a question would leave that open.
            _thread.start_new_thread(want, ())
            done.get()
        else:
            want()

    def begin_step(self, step: int, *, is_saved: bool = False) -> frozenset[What]:
        """What all ranks do at ``step``, which this one begins; it waits only where ranks were asked.

        ``is_saved`` says that all ranks save the step whatever is decided. "stop" is due again at all later steps.

        Raises:
            RankLostError: a rank is gone, or has not answered until the deadline.
        """
        self._place = _Place(step, is_saved)
        self._settle()
        if not self._decided:
            return frozenset()
        due = [each for each in tuple(self._decided) if each[1] <= step]
        for each in due:
            if each[0] == "save":
                self._decided.discard(each)
        return frozenset(what for what, _ in due)

    def pass_step(self) -> bool:
        """Whether all ranks stop at the step that this one has begun last; if not, it is past that.

        Raises:
            RankLostError: a rank is gone, or has not answered until the deadline.
        """
        place = self._place
        self._place = _Place(place.step, place.is_saved, True)
        self._settle()
        return any(what == "stop" and first <= place.step for what, first in tuple(self._decided))

    def close(self) -> None:
        """Take no further part: those who wait for this rank are told, and nothing is decided without a coordinator."""
        if self._is_over:
            return
        with self._lock:
            word = _Word(kind="leave", place=_Place(self._place.step, self._place.is_saved, True))
            others = self._say(word)
            self._end()
        if self._channel is not None:
            self._channel.see_sent(others, _FAREWELL_S)

    def forget_parent(self) -> None:
        self._is_over, self._deciding = True, None

    # What the channel calls, with its lock held.

    def hear(self, rank: int, payload: bytes) -> None:
        """Take what ``rank`` has said."""
        if not self._is_over:
            self._take(rank, _decoder.decode(payload))

    def disconnected(self, rank: int) -> None:
        """Wait no longer for a rank that is gone."""
        if self._deciding is None:
            return
        if not self.is_coordinator:
            self._take(rank, _Word(kind="decide", lost=self._job_ranks[rank]))
        elif rank not in self._answers:
            self._decide(lost=self._job_ranks[rank])

    def _take(self, rank: int, word: _Word) -> None:
        if word.kind == "want":
            to_come = self._to_come()
            self._wanted = {what: why for what, why in word.what.items() if what not in to_come} | self._wanted
            self._ask()
        elif word.kind == "ask":
            self.reasons = {**self.reasons, **word.what}
            self._deciding = Event()
            self._say_to_coordinator(_Word(kind="answer", number=word.number, place=self._place))
        elif word.kind == "answer":
            self._take_answer(rank, word)
        elif word.kind == "decide":
            if word.lost is None:
                self.reasons = {**self.reasons, **word.what}
                self._decided.update((what, word.first_step) for what in word.what)
            self._lost = word.lost
            self._stop_waiting()
        elif self.is_coordinator:
            self._left[rank] = word.place
            self._take_answer(rank, _Word(kind="answer", number=self._number, place=word.place))
        else:
            self._end()

    def _ask(self) -> None:
        if not self._wanted or self._deciding is not None:
            return
        self._number += 1
        self._answers = dict(self._left)
        word = _Word(kind="ask", number=self._number, what=self._wanted)
        self._say(word)
        self._take(self._rank, word)
        for rank in () if self._channel is None else self._channel.gone:
            self.disconnected(rank)

    def _take_answer(self, rank: int, word: _Word) -> None:
        if self._deciding is not None and word.number == self._number:
            self._answers.setdefault(rank, word.place)
            if len(self._answers) == len(self._job_ranks):
                self._decide()

    def _decide(self, lost: int | None = None) -> None:
        step = max((place.step for place in self._answers.values()), default=-1)
        furthest = [place for place in self._answers.values() if place.step == step]
        is_last = "stop" in self._wanted and all(place.is_saved and not place.is_passed for place in furthest)
        word = _Word(kind="decide", what=self._wanted, first_step=step if is_last else step + 1, lost=lost)
        self._wanted = {}
        self._say(word)
        self._take(self._rank, word)

    def _to_come(self) -> set[What]:
        return {what for what, _ in tuple(self._decided)}

    def _say_to_coordinator(self, word: _Word) -> None:
        if self.is_coordinator:
            self._take(self._rank, word)
        else:
            self._say(word)

    def _say(self, word: _Word) -> Collection[int]:
        """The ranks to whom ``word`` is on its way: the coordinator, or all others from there."""
        channel = self._channel
        if channel is None:
            return ()
        to = channel.others if self.is_coordinator else [channel.coordinator]
        channel.notify(to, self._topic, msgspec.msgpack.encode(word))
        return to

    def _settle(self) -> None:
        """Return when nothing is open; raise if it will stay open."""
        if self._deciding is not None:
            deadline = Deadline(self._deadline_s)
            while (deciding := self._deciding) is not None:
                if not deciding.wait(_SLICE_S) and deadline.passed:
                    raise self._overdue()
        if self._lost is not None:
            lost, self._lost = self._lost, None
            said = f"rank {lost} is gone: its process or its host died, or the network broke, in {AGREEING!r}"
            raise RankLostError(said, rank=lost, phase=AGREEING)

    def _overdue(self) -> RankLostError:
        silent = 0 if self._channel is None else self._channel.coordinator
        if self.is_coordinator:
            silent = next((rank for rank in range(len(self._job_ranks)) if rank not in self._answers), silent)
        said = f"rank {self._job_ranks[silent]} has not answered for {self._deadline_s:g} s in {AGREEING!r}; find out "
        said += "where it hangs, or raise deadline_s"
        return RankLostError(said, rank=self._job_ranks[silent], phase=AGREEING)

    def _stop_waiting(self) -> None:
        deciding, self._deciding = self._deciding, None
        if deciding is not None:
            deciding.set()

    def _end(self) -> None:
        self._is_over = True
        self._stop_waiting()
