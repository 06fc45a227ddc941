"""Ranks agree on the step at which all of them do something: once for each request, and with nothing at other steps.

A rank that wants something tells the coordinator, which asks all ranks how far they are. Each answers from the thread
of its connections, so one that computes answers too. From then on it begins no step, and passes none, before it has
heard the decision. That is the step after the furthest one; or the furthest itself, where that is saved anyway and
nobody is past it. Steps may jump: what is decided for a step is done at the first one from there on.

Invariant: ranks that begin the same steps do the same at each of them. No collective is called. Who waits does so until
the deadline, and no longer than the coordinator and the ranks that it asked live.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast._process import Lock, Once, forget_in_child
from holdfast._ranks.channel_ranks import ChannelRanks
from holdfast._ranks.connections import Message
from holdfast._ranks.ranks import Ranks
from holdfast._values.deadline import Deadline
from holdfast.errors import RankLostError

What = Literal["save", "stop"]

AGREEING = "agreeing on a step"
_SLICE_S = 0.25
_FAREWELL_S = 1.0


class _Word(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is said: "want" and "answer" to the coordinator, "ask" and "decide" by it, "leave" by anyone.

    ``step`` is the last that a rank has begun, ``is_open`` if it is saved anyway and the rank is not past it; or the
    first for which something is decided.
    """

    kind: Literal["want", "ask", "answer", "decide", "leave"]
    number: int = 0
    what: dict[What, str] = {}
    step: int = -1
    is_open: bool = False
    lost: int | None = None


_decoder = msgspec.msgpack.Decoder(_Word)


class Agreement:
    """What all ranks do at which step, as one of them knows it.

    ``ranks`` are those of an operation, which may be over; ``topic`` is the same on all of them, and of no other
    agreement of theirs. One thread begins and passes steps, which raises RankLostError where a rank is gone or has not
    answered until the deadline; any may ``request``. ``reasons`` has why something is wanted or decided, as far as this
    rank has heard.

    The one thread writes how far it is and then looks whether it was asked; the thread of the connections notes that it
    was asked and then reads how far the other is. So it is in the answer, or waits for the decision. All else is under
    the lock of the channel. An interrupt may leave a question that nobody hears of; to request it again asks it again.
    """

    def __init__(self, ranks: Ranks, topic: str) -> None:
        self._channel = ranks._channel if isinstance(ranks, ChannelRanks) else None
        self._lock = Lock() if self._channel is None else self._channel.lock
        self._topic, self._deadline_s = topic, ranks.deadline_s
        self._rank, self._job_ranks = ranks.rank, ranks.job_ranks
        self.is_coordinator, self.job_rank = ranks.is_coordinator, ranks.job_ranks[ranks.rank if self._channel else 0]
        self.reasons: dict[What, str] = {}
        self._here = (-1, False)  # the last step that was begun, and whether it is open
        self._deciding: Once | None = None
        self._decided: set[tuple[What, int]] = set()
        self._lost: int | None = None
        self._is_over = False
        # The coordinator's: what is to be decided, the number of the question, and the answers, by rank; its own is
        # there while the question is open. Those who left have answered all that are to come.
        self._wanted, self._number = dict[What, str](), 0
        self._answers: dict[int, tuple[int, bool]] = {}
        self._left: dict[int, tuple[int, bool]] = {}
        forget_in_child(self)
        self._partners: list[int] = []
        if self._channel is not None:
            self._partners = self._channel.others if self.is_coordinator else [self._channel.coordinator]
            self._channel.listen(topic, self)

    def request(self, what: What, reason: str) -> None:
        """Have all ranks do ``what`` at a common step; again, while that is to come, changes nothing."""
        with self._lock:
            if not self._is_over and what not in self._to_come():
                (self._want if self.is_coordinator else self._say)(_Word(kind="want", what={what: reason}))

    def begin_step(self, step: int, *, is_saved: bool = False) -> frozenset[What]:
        """What all ranks do at ``step``, which this one begins; it waits only where ranks were asked.

        ``is_saved`` says that all ranks save the step whatever is decided. "stop" is due again at all later steps.
        """
        self._here = (step, is_saved)
        self._settle()
        due = [each for each in tuple(self._decided) if each[1] <= step]
        self._decided.difference_update([each for each in due if each[0] == "save"])
        return frozenset(what for what, _ in due)

    def pass_step(self) -> bool:
        """Whether all ranks stop at the step that this one has begun last; if not, it is past that."""
        step, _ = self._here
        self._here = (step, False)
        self._settle()
        return any(what == "stop" and first <= step for what, first in tuple(self._decided))

    def close(self) -> None:
        """Take no further part; nobody waits for this rank any more, and without a coordinator nothing is decided."""
        if self._is_over:
            return
        with self._lock:
            word = _Word(kind="leave", step=self._here[0])
            self._say(word)
            self._take(word)
        if self._channel is not None:
            self._channel.see_sent(self._partners, _FAREWELL_S)

    def forget_parent(self) -> None:
        self._is_over, self._deciding = True, None

    def hear(self, message: Message) -> None:
        """Take what the coordinator or, there, another rank has said; with the lock held, as all that follows."""
        word = _decoder.decode(message.payload)
        if self._is_over:
            pass
        elif word.kind == "ask":
            self._deciding = Once()
            self.reasons = {**self.reasons, **word.what}
            step, is_open = self._here
            self._say(_Word(kind="answer", number=word.number, step=step, is_open=is_open))
        elif not self.is_coordinator:
            self._take(word)
        elif word.kind == "want":
            self._want(word)
        else:
            if word.kind == "leave":
                self._left[message.guest] = (word.step, False)
            if word.kind == "leave" or word.number == self._number:
                self._answers.setdefault(message.guest, (word.step, word.is_open))
            self._decide()

    def lose(self, rank: int) -> None:
        """Wait no longer for ``rank``, which is gone."""
        if self._deciding is not None and not self.is_coordinator:
            self._take(_Word(kind="decide", lost=self._job_ranks[rank]))
        elif self._rank in self._answers and rank not in self._answers:
            self._decide(lost=self._job_ranks[rank])

    def _want(self, word: _Word) -> None:
        self._wanted = {what: why for what, why in word.what.items() if what not in self._to_come()} | self._wanted
        if not self._wanted or self._rank in self._answers:
            return
        self._number, self._answers = self._number + 1, dict(self._left)
        self._say(_Word(kind="ask", number=self._number, what=self._wanted))
        if len(self._answers) < len(self._job_ranks) - 1:
            self._deciding = Once()
        self._answers[self._rank] = self._here
        self._decide()
        for rank in () if self._channel is None else self._channel.gone:
            self.lose(rank)

    def _decide(self, lost: int | None = None) -> None:
        """Tell all ranks, once all have answered, or one is lost."""
        if lost is None and len(self._answers) < len(self._job_ranks):
            return
        step = max(step for step, _ in self._answers.values())
        if "stop" not in self._wanted or (step, False) in self._answers.values():
            step += 1
        word = _Word(kind="decide", what=self._wanted, step=step, lost=lost)
        self._say(word)
        self._wanted, self._answers = {}, {}
        self._take(word)

    def _take(self, word: _Word) -> None:
        """Take a decision, or the end."""
        if word.lost is None:
            self._decided.update((what, word.step) for what in word.what)
            self.reasons = {**self.reasons, **word.what}
        self._is_over = word.kind == "leave"
        self._lost = self._lost if self._is_over else word.lost  # which is yet to be raised here
        deciding, self._deciding = self._deciding, None
        if deciding is not None:
            deciding.set()

    def _to_come(self) -> set[What]:
        return {what for what, _ in tuple(self._decided)}

    def _say(self, word: _Word) -> None:
        if self._channel is not None:
            self._channel.notify(self._partners, self._topic, msgspec.msgpack.encode(word))

    def _settle(self) -> None:
        """Return when nothing is to be decided; raise if that cannot be."""
        if self._deciding is not None:
            deadline = Deadline(self._deadline_s)
            while (deciding := self._deciding) is not None:
                if not deciding.wait(_SLICE_S) and deadline.passed:
                    silent = set(self._partners) - self._answers.keys()
                    said = f"has not answered for {self._deadline_s:g} s; find out where it hangs, or raise deadline_s"
                    raise self._error(self._job_ranks[min(silent, default=0)], said)
        if self._lost is not None:
            rank, self._lost = self._lost, None
            raise self._error(rank, "is gone: its process or its host died, or the network broke")

    def _error(self, rank: int, said: str) -> RankLostError:
        return RankLostError(f"rank {rank} {said}, in {AGREEING!r}", rank=rank, phase=AGREEING)
