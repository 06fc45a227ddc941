"""Ranks agree on the step at which all of them do something. Each request costs a few messages; other steps cost none.

A rank that wants something tells the coordinator. The coordinator asks all ranks how far they are. Each answers from
the thread of its connections, so a rank that computes answers too. Once it has answered, it begins no step and passes
none until it hears the decision. The decision is the step after the furthest one. To stop, it is the furthest one
itself, if that is saved anyway and no rank is past it. Steps may jump: what is decided for a step is done at the first
step from there on.

Invariant: ranks that begin the same steps do the same at each of them. No collective is called. A rank that waits does
so until the deadline at most, and not after the coordinator, or a rank that was asked, has died.
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
    """A message: ranks say "want" and "answer", the coordinator says "ask" and "decide", anyone says "leave".

    In a decision, ``step`` is the first for which it holds. Otherwise it is the last step that the rank has begun; that
    one ``is_open`` if it is saved anyway and the rank is not past it. ``lost`` is a rank that died before it answered.
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

    ``ranks`` are those of an operation, which may be over. ``topic`` is the same on all of them, and no other agreement
    has it. One thread begins and passes steps; that raises RankLostError if a rank is gone, or has not answered by the
    deadline. Any thread may ``request``. ``reasons`` says why something is wanted or decided, as far as is known here.

    The thread that steps first writes how far it is, and then looks whether there is a question. The thread of the
    connections first notes the question, and then reads how far the other thread is. So each step is either in the
    answer, or waits for the decision. All else is under the lock of the channel. After an interrupt, a question may
    never have been sent; another request sends it again.
    """

    def __init__(self, ranks: Ranks, topic: str) -> None:
        self._channel = ranks._channel if isinstance(ranks, ChannelRanks) else None
        self._lock = Lock() if self._channel is None else self._channel.lock
        self._topic, self._deadline_s = topic, ranks.deadline_s
        self._rank, self._job_ranks = ranks.rank, ranks.job_ranks
        self.is_coordinator = ranks.is_coordinator
        self.reasons: dict[What, str] = {}
        self._here = (-1, False)  # the last step that was begun, and whether it is open
        self._deciding: Once | None = None
        self._decided: set[tuple[What, int]] = set()
        self._lost: int | None = None
        self._is_over = False
        # Only the coordinator uses these: what is to be decided, the number of the question, and the answers by rank.
        # Its own answer is there while the question is open. Ranks that left have answered all questions to come.
        self._wanted, self._number = dict[What, str](), 0
        self._answers: dict[int, tuple[int, bool]] = {}
        self._left: dict[int, tuple[int, bool]] = {}
        forget_in_child(self)
        self._partners: list[int] = []
        if self._channel is not None:
            self._partners = self._channel.others if self.is_coordinator else [self._channel.coordinator]
            self._channel.listen(topic, self)

    def request(self, what: What, reason: str) -> None:
        """Have all ranks do ``what`` at a common step. A second request before that step changes nothing."""
        with self._lock:
            if not self._is_over and what not in self._to_come():
                (self._want if self.is_coordinator else self._say)(_Word(kind="want", what={what: reason}))

    def begin_step(self, step: int, *, is_saved: bool = False) -> frozenset[What]:
        """What all ranks do at ``step``, which this rank begins now. It waits only while a question is open.

        ``is_saved`` says that all ranks save the step, whatever is decided. "stop" is due again at all later steps.
        """
        self._here = (step, is_saved)
        self._settle()
        due = [each for each in tuple(self._decided) if each[1] <= step]
        self._decided.difference_update([each for each in due if each[0] == "save"])
        return frozenset(what for what, _ in due)

    def pass_step(self) -> bool:
        """Whether all ranks stop at the step that this rank began last. If not, this rank is past that step."""
        step, _ = self._here
        self._here = (step, False)
        self._settle()
        return any(what == "stop" and first <= step for what, first in tuple(self._decided))

    def close(self) -> None:
        """Leave: nobody waits for this rank any more. When the coordinator has left, nothing more is decided."""
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
        """Take a message. The lock is held here, and in all methods below but ``_settle``."""
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
        """Stop waiting for ``rank``, which is gone."""
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
        """Decide and tell all ranks, if all have answered or one is lost."""
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
        """Take a decision, or a message that the coordinator or this rank leaves."""
        if word.lost is None:
            self._decided.update((what, word.step) for what in word.what)
            self.reasons = {**self.reasons, **word.what}
        self._is_over = word.kind == "leave"
        self._lost = self._lost if self._is_over else word.lost  # one that was lost before is still to be raised
        deciding, self._deciding = self._deciding, None
        if deciding is not None:
            deciding.set()

    def _to_come(self) -> set[What]:
        return {what for what, _ in tuple(self._decided)}

    def _say(self, word: _Word) -> None:
        if self._channel is not None:
            self._channel.notify(self._partners, self._topic, msgspec.msgpack.encode(word))

    def _settle(self) -> None:
        """Return when no question is open; RankLostError if it cannot be decided."""
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
