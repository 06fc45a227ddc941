"""Tensors whose parts do not lie side by side in the file, as columns do not: put together by the ranks that have them.

Such a tensor is cut into stripes, which lie in one piece in the file. Each stripe has one writer, which has slots in
memory that all ranks of its host share. Every rank of the host that holds part of a stripe copies it into the writer's
slot; ranks of other hosts send theirs, over connections of their own with the writer, which checks what has arrived and
copies it there. When all parts are there, the writer hashes the stripe and writes it, and lets the slot be used again.

Invariant: every rank copies or sends its parts in the same order of stripes, and whoever waits, waits for a slot that
those before fill and empty without it. What is sent has its slot already, so whoever receives never waits for a slot.
So there is always one rank that can go on.
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from holdfast._io.slabs import Slab
from holdfast._ranks.carrier import Arrival, FrameConnection, exchange_frames, lost, unexpected
from holdfast._ranks.exchange import Link, SharedLayout, Visit
from holdfast._ranks.ranks import Ranks
from holdfast._ranks.rendezvous import Address, Greeting, Reception, Seat, seats
from holdfast._state.tensors import empty_tensor
from holdfast._values.box import Box
from holdfast._values.deadline import Deadline
from holdfast.errors import InvalidStateError, RankLostError

SLOTS_EACH = 6
SLOT_BYTES = 4 << 20
STRIPE_BYTES = SLOT_BYTES - 4096  # a stripe may begin inside of a page
_ON_THE_WAY_BYTES = SLOTS_EACH * SLOT_BYTES  # of what a rank sends, and of what it receives
_SLICE_S = 0.25
_CONNECT_S = 10.0
# The coordinator, who hears of all ranks, is to be the first to name the one that is stuck.
_PATIENCE = 2
_MESSAGE = struct.Struct("<iiii")  # as long as those of a load: what it is, the writer, its stripe, the sender
_COPIED, _FREE, _FAILED = range(3)
_PART, _EMPTIED = 3, 4  # kinds of frames
PHASE = "putting tensors together"
_ADVICE = "shard it by rows (redistribute), or save it and run holdfast convert SRC DST --to hf"


class Stripe(NamedTuple):
    """``box`` of the tensor ``key``, at ``offset`` of file number ``file``; number ``turn`` of those of its ``writer``.

    ``parts`` has the ranks that hold some of it.
    """

    key: str
    box: Box
    file: int
    offset: int
    writer: int
    turn: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """What a rank does with stripes: ``copy`` puts what it holds of one into a slot, ``write`` writes a full slot.

    ``pack`` is what it holds, to be sent: ``most`` says how many bytes that can be. ``unpack`` checks what has come
    from a rank, given by its number in the job, and puts it into the slot.
    """

    copy: Callable[[Stripe, Slab], None]
    write: Callable[[Stripe, Slab], None]
    pack: Callable[[Stripe], torch.Tensor]
    most: Callable[[Stripe], int]
    unpack: Callable[[Stripe, torch.Tensor, Slab, int], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Circle:
    """What one of ``ranks`` needs to put stripes together with others.

    ``link`` is shared with the ranks of its host; ``others`` are the connections with ranks of other hosts, by number.
    """

    ranks: Ranks
    link: Link
    others: Mapping[int, FrameConnection]

    def close(self) -> None:
        for other in self.others.values():
            other.close()
        self.link.close()


class StripeJobs:
    """One rank's part in it."""

    def __init__(self, circle: Circle, stripes: Sequence[Stripe], handling: Handling) -> None:
        self._ranks, self._link, self._others = circle.ranks, circle.link, circle.others
        self._rank = rank = circle.ranks.rank
        self._place = {member: place for place, member in enumerate(circle.link.seat.members)}
        self._handling = handling
        self._to_pass = deque(stripe for stripe in stripes if rank in stripe.parts)
        self._own = {stripe.turn: stripe for stripe in stripes if stripe.writer == rank}
        self._missing = {turn: set(stripe.parts) for turn, stripe in self._own.items()}
        self._unwritten = len(self._own)
        self._full: deque[int] = deque()
        self._freed: defaultdict[int, set[int]] = defaultdict(set)
        self._writing = 0
        self._sending = self._receiving = 0
        self._has_failed = False
        for stripe in self._own.values():
            for part in set(stripe.parts) - self._place.keys():
                self._others[part].owes += 1
        for stripe in self._to_pass:
            if stripe.writer not in self._place and stripe.turn >= SLOTS_EACH:
                self._others[stripe.writer].owes += 1

    def jobs(self, check: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """What there is for other threads to do: full stripes to write. The rest is done here.

        ``check`` raises what another rank has failed with.
        """
        while not self._is_done:
            check()
            self._take_what_came(0.0)
            if self._has_failed:
                return
            if self._full:
                self._unwritten, self._writing = self._unwritten - 1, self._writing + 1
                yield partial(self._write_own, self._own[self._full.popleft()])
            elif self._to_pass and self._can_pass(self._to_pass[0]):
                self._pass(self._to_pass.popleft())
            elif not self._is_done:
                patience_s = _PATIENCE * self._ranks.deadline_s
                look = partial(self._look, check, Deadline(patience_s), patience_s)
                if not self._writing:
                    self._ranks.look_until(look)
                while self._writing and not look():  # its own disk may be what all wait for
                    pass

    @property
    def _is_done(self) -> bool:
        return not (self._to_pass or self._unwritten or any(other.is_busy for other in self._others.values()))

    def _can_pass(self, stripe: Stripe) -> bool:
        return self._is_free(stripe) and (stripe.writer in self._place or self._sending < _ON_THE_WAY_BYTES)

    def _is_free(self, stripe: Stripe) -> bool:
        """Whether the stripe that was in its slot before has been written."""
        return stripe.turn < SLOTS_EACH or stripe.turn - SLOTS_EACH in self._freed[stripe.writer]

    def _pass(self, stripe: Stripe) -> None:
        """Copy what this rank has of a stripe into its slot, or send it there."""
        self._ranks.signs.moved += 1
        if stripe.writer in self._place:
            self._handling.copy(stripe, self._slot(stripe))
            self._post(self._place[stripe.writer], _COPIED, stripe)
            return
        data = self._handling.pack(stripe)
        self._sending += len(data)

        def sent() -> None:
            self._sending -= len(data)

        self._others[stripe.writer].send(_PART, stripe.turn, data.numpy().data, sent)

    def _admit(self, other: FrameConnection, kind: int, turn: int, nbytes: int) -> Arrival | None:
        """Room for what another host is about to send; None while there is none."""
        if kind == _EMPTIED and nbytes == 0:
            return Arrival(memoryview(b""), partial(self._freed[other.number].add, turn))
        stripe = self._own.get(turn)
        if kind != _PART or stripe is None or other.number not in self._missing[turn] or not self._is_free(stripe):
            raise unexpected(other.job_rank)
        if not 0 < nbytes <= self._handling.most(stripe):
            raise unexpected(other.job_rank)
        if self._receiving and self._receiving + nbytes > _ON_THE_WAY_BYTES:
            return None
        data = empty_tensor((nbytes,), torch.uint8)
        self._receiving += nbytes

        def arrived() -> None:
            self._handling.unpack(stripe, data, self._slot(stripe), other.job_rank)
            self._receiving -= nbytes
            self._note_part(turn, other.number)

        return Arrival(data.numpy().data, arrived)

    def _slot(self, stripe: Stripe) -> Slab:
        number = self._place[stripe.writer] * SLOTS_EACH + stripe.turn % SLOTS_EACH
        return self._link.memory.slab(*self._link.layout.slot(number))

    def _write_own(self, stripe: Stripe) -> None:
        try:
            self._handling.write(stripe, self._slot(stripe))
        except BaseException:
            self._link.outboxes[self._place[self._rank]].post(_MESSAGE.pack(_FAILED, 0, 0, 0))
            raise
        for place in self._place.values():
            self._post(place, _FREE, stripe)

    def _post(self, place: int, kind: int, stripe: Stripe) -> None:
        self._link.outboxes[place].post(_MESSAGE.pack(kind, stripe.writer, stripe.turn, self._rank))

    def _take_what_came(self, wait_s: float) -> bool:
        """Whether anything came or went within ``wait_s``."""
        inbox = self._link.inboxes[0]
        if not exchange_frames(self._others.values(), inbox, self._admit, wait_s):
            return False
        self._ranks.signs.moved += 1
        for kind, writer, turn, sender in map(_MESSAGE.unpack, inbox.collect()):
            if kind == _COPIED:
                self._note_part(turn, sender)
            elif kind == _FREE:
                self._freed[writer].add(turn)
                if writer == self._rank:
                    self._tell_freed(turn)
            else:
                self._has_failed = True
        return True

    def _tell_freed(self, turn: int) -> None:
        """Tell ranks of other hosts that the slot is free in which the next one comes that they have part of."""
        self._writing -= 1
        if (following := self._own.get(turn + SLOTS_EACH)) is not None:
            for part in set(following.parts) - self._place.keys():
                self._others[part].send(_EMPTIED, turn, memoryview(b""), lambda: None)

    def _note_part(self, turn: int, part: int) -> None:
        self._missing[turn].discard(part)
        if not self._missing[turn]:
            self._full.append(turn)

    def _look(self, check: Callable[[], None], deadline: Deadline, patience_s: float) -> bool:
        if self._take_what_came(_SLICE_S):
            return True
        check()
        for other in self._others.values():
            other.check_lost(PHASE)
        if deadline.passed:
            raise lost(self._ranks.job_ranks[self._awaited()], f"made no progress for {patience_s:g} s", PHASE)
        return False

    def _awaited(self) -> int:
        """The rank that this one waits for: it is to free a slot, to take what is sent, or has part of a stripe."""
        if self._to_pass and not self._is_free(self._to_pass[0]):
            return self._to_pass[0].writer
        taker = next((other.number for other in self._others.values() if other.sends), None)
        missing = next((parts for _, parts in sorted(self._missing.items()) if parts), {self._rank})
        return min(missing) if taker is None else taker


# How the ranks meet.

Sharing = Callable[[Sequence[int]], Sequence[Sequence[Stripe]]]


def meet(ranks: Ranks, stripes: Sequence[Stripe], shared_out: Sharing) -> tuple[Sequence[Stripe], Circle | None]:
    """The stripes of this rank, and what it needs to put them together with others; called on all ranks.

    ``stripes`` are those where all ranks are of one host. If they are not, the coordinator calls ``shared_out``, which
    has the stripes of each rank, given a number of each one's host. RankLostError on all of them where ranks cannot be
    connected, InvalidStateError where the system does not let the ranks of a host share memory.
    """
    with closing(Visit()) as visit:

        def seated(said: list[Greeting]) -> list[tuple[Seat, Sequence[Stripe] | None]]:
            found = [seat or Seat(members=(rank,), addresses=("",), place=0) for rank, seat in enumerate(seats(said))]
            hosts = [seat.members[0] for seat in found]
            told = shared_out(hosts) if len(set(hosts)) > 1 else [None] * len(said)
            return list(zip(found, told, strict=True))

        seat, told = ranks.reduce_scatter(PHASE, visit.greet, seated)
        stripes = stripes if told is None else told
        meeting = _Meeting(ranks, visit, seat, [stripe for stripe in stripes if len(stripe.parts) > 1])
        try:
            return stripes, meeting.circle()
        except BaseException:
            meeting.leave()
            raise


class _Said(NamedTuple):
    """What a rank says after inviting: whether it could, where others find it, and the others that it wants to find."""

    has_link: bool
    contact: Address | None
    partners: tuple[int, ...]


class _Meeting:
    """One rank's way to its circle, step by step."""

    def __init__(self, ranks: Ranks, visit: Visit, seat: Seat, stripes: Sequence[Stripe]) -> None:
        self._ranks = ranks
        self._visit = visit
        self._seat = seat
        self._takes_part = bool(stripes)
        known = {rank for each in stripes for rank in (each.parts if each.writer == ranks.rank else (each.writer,))}
        self._partners = tuple(sorted(known - set(seat.members)))
        self._limit_s = min(_CONNECT_S, ranks.deadline_s / 4)
        self._link: Link | None = None
        self._reception: Reception | None = None
        self._others: dict[int, FrameConnection] = {}

    def circle(self) -> Circle | None:
        """What this rank has in common with others in the end; None if it takes no part and shares nothing."""
        ranks = self._ranks
        goes_on, contacts = ranks.reduce_scatter(PHASE, self._invite, _invited)
        ranks.all_reduce(PHASE, partial(self._join, contacts), _check_connected)
        if goes_on:
            ranks.all_reduce(PHASE, self._answer, _check_connected)
        if self._reception is not None:
            for rank, each in self._reception.take_sockets().items():
                self._others[rank] = FrameConnection(rank, ranks.job_ranks[rank], each)
            self._reception.close()
        return None if self._link is None else Circle(ranks=ranks, link=self._link, others=self._others)

    def _invite(self) -> _Said:
        seat = self._seat
        if seat.leads:
            layout = SharedLayout(sections=(), slots=SLOTS_EACH * len(seat.members), slot_bytes=SLOT_BYTES)
            self._link = self._visit.invite(
                seat, layout, lambda memory: memory.make_huge(layout.slot(0)[0], layout.size)
            )
        if self._partners:
            self._reception = Reception(self._ranks.rank, self._partners)
        contact = None if self._reception is None else self._reception.contact
        return _Said(self._link is not None or not seat.leads, contact, self._partners)

    def _join(self, contacts: Mapping[int, Address]) -> tuple[bool, bool]:
        if not self._seat.leads:
            self._link = self._visit.join(self._seat)
        is_linked = self._link is not None or not self._takes_part
        return is_linked, self._reception is None or self._reception.call(contacts, self._limit_s)

    def _answer(self) -> tuple[bool, bool]:
        return True, self._reception is None or self._reception.answer(self._limit_s)

    def leave(self) -> None:
        for each in (self._reception, self._link, *self._others.values()):
            if each is not None:
                each.close()


def _invited(said: list[_Said]) -> list[tuple[bool, dict[int, Address]]]:
    """For each rank, whether any ranks are to be connected, and where those are that it is to be connected with."""
    _check_connected([(each.has_link, True) for each in said])
    goes_on = any(each.partners for each in said)
    return [
        (goes_on, {rank: contact for rank in each.partners if (contact := said[rank].contact) is not None})
        for each in said
    ]


def _check_connected(told: Sequence[tuple[bool, bool]]) -> None:
    """Raise unless all ranks share memory with those of their hosts, and are connected with those of others."""
    for rank, (is_linked, is_connected) in enumerate(told):
        if not is_linked:
            raise InvalidStateError(
                f"a tensor is sharded within its rows over ranks of one host, and the system does not let rank {rank} "
                f"share memory with others; {_ADVICE}"
            )
        if not is_connected:
            raise RankLostError(
                f"rank {rank} cannot be connected with ranks of other hosts that have parts of the same rows as it "
                f"has; check that no firewall is in between, or {_ADVICE}",
                rank=rank,
                phase=PHASE,
            )
