"""Tensors whose parts do not lie side by side in the file, as columns do not: put together by the ranks of a host.

Such a tensor is cut into stripes, which lie in one piece in the file. Each stripe has one writer, which has slots in
memory that all ranks of the host share. Every rank that holds part of a stripe copies it into the writer's slot; when
all of them have, the writer hashes the stripe and writes it, and lets the slot be used again.

Invariant: every rank copies its parts in the same order of stripes, and whoever waits, waits for a slot that those
before fill and empty without it. So there is always one rank that can go on.
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

from holdfast._io.slabs import Slab
from holdfast._ranks.exchange import Link, SharedLayout, Visit
from holdfast._ranks.ranks import Ranks
from holdfast._ranks.rendezvous import Greeting, Seat, seats
from holdfast._values.box import Box
from holdfast._values.deadline import Deadline
from holdfast.errors import InvalidStateError, RankLostError

SLOTS_EACH = 6
SLOT_BYTES = 4 << 20
STRIPE_BYTES = SLOT_BYTES - 4096  # a stripe may begin inside of a page
_SLICE_S = 0.25
_MESSAGE = struct.Struct(
    "<iiii"
)  # as long as those of a load: what it is, the place of the writer, its stripe, nothing
_COPIED, _FREE, _FAILED = range(3)
PHASE = "putting tensors together"


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


Copy = Callable[[Stripe, Slab], None]


def meet(ranks: Ranks, stripes: Sequence[Stripe]) -> Link | None:
    """This rank's end of what the ranks of its host share, for ``stripes`` that it takes part in; called on all ranks.

    InvalidStateError on all of them if a stripe has parts on two hosts, or the system does not let ranks share memory.
    """
    with closing(Visit()) as visit:

        def seated(said: list[tuple[Greeting, tuple[tuple[str, tuple[int, ...]], ...]]]) -> list[Seat | None]:
            found = seats([greeting for greeting, _ in said])
            host = {rank: seat.members for rank, seat in enumerate(found) if seat is not None}
            for key, parts in {each for _, groups in said for each in groups}:
                if any(host.get(rank, (rank,)) != host.get(parts[0], (parts[0],)) for rank in parts):
                    raise _apart(key, f"ranks {', '.join(map(str, parts))}, which share no memory")
            return found

        groups = tuple({stripe.key: (stripe.key, stripe.parts) for stripe in stripes}.values())
        seat = ranks.reduce_scatter(PHASE, lambda: (visit.greet(), groups), seated)
        link: Link | None = None
        layout = SharedLayout(sections=(), slots=SLOTS_EACH * (len(seat.members) if seat else 1), slot_bytes=SLOT_BYTES)
        try:

            def invite() -> bool:
                nonlocal link
                if seat is not None and seat.leads:
                    link = visit.invite(seat, layout, lambda memory: memory.make_huge(layout.slot(0)[0], layout.size))
                return seat is None or not seat.leads or link is not None

            def join() -> bool:
                nonlocal link
                if seat is not None and not seat.leads:
                    link = visit.join(seat)
                return link is not None or not stripes

            def is_complete(told: list[bool]) -> None:
                if not all(told):
                    raise _apart("a tensor", "ranks of one host, which the system does not let share memory")

            ranks.all_reduce(PHASE, invite, is_complete)
            ranks.all_reduce(PHASE, join, is_complete)
        except BaseException:
            if link is not None:
                link.close()
            raise
    return link


def _apart(key: str, where: str) -> InvalidStateError:
    return InvalidStateError(
        f"{key!r} is sharded within its rows over {where}, so that no rank can write it in one piece; shard it by "
        "rows (redistribute), or save it and run holdfast convert SRC DST --to hf",
        key=key,
    )


class StripeJobs:
    """One rank's part: ``copy`` puts what this rank holds of a stripe into a slot, ``write`` writes a full one.

    ``check`` raises what another rank has failed with; who is waited for is given up after ``deadline_s`` without a
    message. ``job_ranks`` has the numbers of the ranks in the job, for errors.
    """

    def __init__(self, link: Link, rank: int, stripes: Sequence[Stripe], *, copy: Copy, write: Copy) -> None:
        self._link = link
        self._place = {member: place for place, member in enumerate(link.seat.members)}
        self._rank = rank
        self._copy = copy
        self._write = write
        self._to_copy = deque(stripe for stripe in stripes if rank in stripe.parts)
        self._own = {stripe.turn: stripe for stripe in stripes if stripe.writer == rank}
        self._missing = {turn: len(stripe.parts) for turn, stripe in self._own.items()}
        self._unwritten = len(self._own)
        self._full: deque[int] = deque()
        self._freed: defaultdict[int, set[int]] = defaultdict(set)
        self._has_failed = False

    def jobs(
        self, check: Callable[[], None], deadline_s: float, job_ranks: Sequence[int]
    ) -> Iterator[Callable[[], None]]:
        """What there is for other threads to do: full stripes to write. The copying is done here."""
        while self._to_copy or self._unwritten:
            check()
            self._take(self._link.inboxes[0].collect())
            if self._has_failed:
                return
            if self._full:
                self._unwritten -= 1
                yield partial(self._write_own, self._own[self._full.popleft()])
            elif self._to_copy and self._is_free(self._to_copy[0]):
                stripe = self._to_copy.popleft()
                self._copy(stripe, self._slot(stripe))
                self._post(self._place[stripe.writer], _COPIED, stripe)
            else:
                self._wait(check, Deadline(deadline_s), deadline_s, job_ranks)

    def _is_free(self, stripe: Stripe) -> bool:
        """Whether the stripe that was in its slot before has been written."""
        return stripe.turn < SLOTS_EACH or stripe.turn - SLOTS_EACH in self._freed[self._place[stripe.writer]]

    def _slot(self, stripe: Stripe) -> Slab:
        number = self._place[stripe.writer] * SLOTS_EACH + stripe.turn % SLOTS_EACH
        return self._link.memory.slab(*self._link.layout.slot(number))

    def _write_own(self, stripe: Stripe) -> None:
        try:
            self._write(stripe, self._slot(stripe))
        except BaseException:
            self._link.outboxes[self._place[self._rank]].post(_MESSAGE.pack(_FAILED, 0, 0, 0))
            raise
        for place in self._place.values():
            self._post(place, _FREE, stripe)

    def _post(self, place: int, kind: int, stripe: Stripe) -> None:
        self._link.outboxes[place].post(_MESSAGE.pack(kind, self._place[stripe.writer], stripe.turn, 0))

    def _take(self, messages: list[bytes]) -> None:
        for kind, place, turn, _ in map(_MESSAGE.unpack, messages):
            if kind == _COPIED:
                self._missing[turn] -= 1
                if not self._missing[turn]:
                    self._full.append(turn)
            elif kind == _FREE:
                self._freed[place].add(turn)
            else:
                self._has_failed = True

    def _wait(self, check: Callable[[], None], deadline: Deadline, deadline_s: float, job_ranks: Sequence[int]) -> None:
        while not (messages := self._link.inboxes[0].collect(_SLICE_S)):
            check()
            if deadline.passed:
                waits_for = self._to_copy[0].writer if self._to_copy else self._slowest()
                rank = job_ranks[waits_for]
                raise RankLostError(
                    f"rank {rank} made no progress for {deadline_s:g} s in {PHASE!r}; "
                    "find out where it hangs, or raise deadline_s",
                    rank=rank,
                    phase=PHASE,
                )
        self._take(messages)

    def _slowest(self) -> int:
        """A rank that has part of a stripe which this one waits for."""
        stripe = self._own[min(turn for turn, count in self._missing.items() if count)]
        return next((rank for rank in stripe.parts if rank != self._rank), self._rank)
