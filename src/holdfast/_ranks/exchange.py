"""What the ranks of a host share, and blocks that several of them want, passed on by the one that read them.

The first rank of a host, its leader, makes what is to be shared and leaves it on the others' doorsteps without waiting
for anybody; whether that worked is known to all before anyone looks there. So nobody waits for what will not come.

Every rank has slots of its own in the shared memory. It reads into one, verifies what it has read, tells the others who
want some of it, and reads into it again when all of them, and itself, are done. Where hosts pass blocks on to each
other, the leader also runs a carrier with slots of its own: to the ranks it is one more of them, which fills slots with
what comes from other hosts and takes what they want.

Invariant: only the thread that feeds the work waits, and it waits only when there is nothing left to do without the
others; taking what has been filled needs nobody's help. So whoever waits, waits for someone who works. Each wait looks
several times a second whether another rank has failed, and ends after the deadline without a message.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from holdfast._io import sharing
from holdfast._io.mapping import HUGE_PAGE
from holdfast._io.sharing import Doorstep, Inbox, Outbox, SharedMemory
from holdfast._io.slabs import Slab
from holdfast._plan.reads import CommonReads
from holdfast._process import Descriptor
from holdfast._ranks.rendezvous import Greeting, Seat
from holdfast._values.deadline import Clock, Deadline
from holdfast.errors import InternalError, RankLostError

if TYPE_CHECKING:
    from holdfast._ranks.carrier import OtherHosts

WISHES = 2
"""The section of the shared memory where every rank, then every host, says which blocks it wants, a bit for each."""

_HANDOVER_S = 10.0
_PAGE = 4096
_MOST_READERS = 16  # of a host, for the others: enough to keep a disk busy, few enough to have slots each
# Enough for reads under way, for those that others have not taken yet, and to have left the processor's caches before
# the disk fills them again.
_MOST_SLOTS_EACH = 16
_RING_BYTES = 128 << 20
_LEAST_SLOT_BYTES = 2 << 20
_MESSAGE = struct.Struct("<iiii")  # what it is, the place of the sender, a read, a slot: too short for a pipe to cut
_WISHED, _FILLED, _TAKEN, _HOSTS, _READ, _FAILED = range(6)
_SLICE_S = 0.25
# Whoever is waited for may wait for other hosts, once these share: the carriers, who know, are the first to name one.
_HOSTS_PATIENCE = 3


class SharedLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What lies where in the shared memory: sections of these sizes, each on pages, then the slots, on huge ones.

    Where blocks are passed on to other ``hosts``, there is a pipe more than ranks: that of the carrier.
    """

    sections: tuple[int, ...]
    slots: int
    slot_bytes: int
    hosts: int = 0

    def section(self, number: int) -> tuple[int, int]:
        """Start and end of a section."""
        start = sum(-(-size // _PAGE) * _PAGE for size in self.sections[:number])
        return start, start + self.sections[number]

    def slot(self, number: int) -> tuple[int, int]:
        """Start and end of a slot."""
        sections = sum(-(-size // _PAGE) * _PAGE for size in self.sections)
        start = (-(-sections // HUGE_PAGE) + number * -(-self.slot_bytes // HUGE_PAGE)) * HUGE_PAGE
        return start, start + self.slot_bytes

    @property
    def size(self) -> int:
        return max(_PAGE, self.slot(self.slots)[0])


def layout_for(sections: tuple[int, int], wishes: int, size: int, slot_bytes: int, hosts: int = 0) -> SharedLayout:
    """Room for two ``sections``, for wishes of ``wishes`` bytes each, and two slots or more for each that reads.

    Wishes are those of ``size`` ranks and of ``hosts`` hosts; with hosts there is also a carrier.
    """
    readers = min(size, _MOST_READERS) + bool(hosts)
    while slot_bytes > _LEAST_SLOT_BYTES and 2 * readers * slot_bytes > _RING_BYTES:
        slot_bytes //= 2
    each = max(2, min(_MOST_SLOTS_EACH, _RING_BYTES // (readers * slot_bytes)))
    room = (size + hosts) * wishes
    return SharedLayout(sections=(*sections, room), slots=readers * each, slot_bytes=slot_bytes, hosts=hosts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Link:
    """One rank's end of what the ranks of a host share; the leader also has the carrier's inbox, where there is one."""

    seat: Seat
    layout: SharedLayout
    memory: SharedMemory
    inboxes: tuple[Inbox, ...]
    outboxes: tuple[Outbox, ...]

    def section(self, number: int) -> memoryview:
        return self.memory.view[slice(*self.layout.section(number))]

    def close(self) -> None:
        """Give back what the system counts; the others keep theirs."""
        ends: tuple[SharedMemory | Inbox | Outbox, ...] = (self.memory, *self.inboxes, *self.outboxes)
        for end in ends:
            end.close()


class Visit:
    """One rank's way to a link: greet, then, the leader, invite the others, or, the others, join.

    There is no link where the system does not let them share.
    """

    def __init__(self, identify: Callable[[], tuple[str, ...]] = sharing.host_identity) -> None:
        self._identify = identify
        self._doorstep: Doorstep | None = None

    def greet(self) -> Greeting:
        """Where this rank is, and where things can be left for it."""
        with contextlib.suppress(OSError, AttributeError):  # a system without such sockets
            self._doorstep = Doorstep()
        return Greeting(host=self._identify(), address=None if self._doorstep is None else self._doorstep.address)

    def invite(self, seat: Seat, layout: SharedLayout, fill: Callable[[SharedMemory], None]) -> Link | None:
        """The leader's link, after ``fill`` has put into the memory what the others find there."""
        with contextlib.suppress(OSError, AttributeError, ValueError), contextlib.ExitStack() as failed:
            memory = SharedMemory.create(layout.size)
            failed.callback(memory.close)
            fill(memory)
            pipes = sharing.make_pipes(len(seat.members) + bool(layout.hosts))
            failed.callback(sharing.close_all, [end for pipe in pipes for end in pipe])
            writers = [writer for _, writer in pipes]
            for place, address in enumerate(seat.addresses):
                if place != seat.place:
                    passed = [memory.descriptor, pipes[place][0], *writers]
                    sharing.leave_at(address, msgspec.json.encode(layout), passed, _HANDOVER_S)
            failed.pop_all()
            own = {seat.place, len(seat.members)}  # the pipe after the ranks' is the carrier's
            sharing.close_all([reader for place, (reader, _) in enumerate(pipes) if place not in own])
            inboxes = [reader for place, (reader, _) in enumerate(pipes) if place in own]
            return _link(seat, layout, memory, inboxes, writers)
        return None

    def join(self, seat: Seat) -> Link | None:
        """The link of one that was invited."""
        errors = (OSError, AttributeError, ValueError, msgspec.DecodeError)
        with contextlib.suppress(*errors), contextlib.ExitStack() as failed:
            assert self._doorstep is not None
            message, descriptors = self._doorstep.pick_up(_HANDOVER_S)
            failed.callback(sharing.close_all, descriptors)
            layout = msgspec.json.decode(message, type=SharedLayout)
            if len(descriptors) != 2 + len(seat.members) + bool(layout.hosts):
                raise OSError("the message is not from the ranks of this host")
            memory = SharedMemory.attach(descriptors.pop(0), layout.size)
            failed.pop_all()
            return _link(seat, layout, memory, descriptors[:1], descriptors[1:])
        return None

    def close(self) -> None:
        if self._doorstep is not None:
            self._doorstep.close()


def _link(
    seat: Seat, layout: SharedLayout, memory: SharedMemory, readers: list[Descriptor], writers: list[Descriptor]
) -> Link:
    inboxes = tuple(Inbox(descriptor, _MESSAGE.size) for descriptor in readers)
    return Link(seat=seat, layout=layout, memory=memory, inboxes=inboxes, outboxes=tuple(map(Outbox, writers)))


class _Mail:
    """The pipes by which a rank of a host hears of the others and tells them; ``post`` is for any thread."""

    def __init__(
        self,
        link: Link,
        place: int,
        job_ranks: tuple[int, ...],
        check: Callable[[], None],
        deadline_s: float,
        clock: Clock,
    ) -> None:
        self.inbox = link.inboxes[place == len(link.seat.members)]
        self.job_ranks = (*job_ranks, job_ranks[0])  # the carrier is the leader
        self.check = check
        self.deadline_s = deadline_s
        self._place = place
        self._outboxes = link.outboxes
        self._clock = clock

    def post(self, place: int, kind: int, read: int = 0, slot: int = 0) -> None:
        self._outboxes[place].post(_MESSAGE.pack(kind, self._place, read, slot))

    def wait(self, awaited: Callable[[], tuple[int, str]]) -> list[bytes]:
        """Messages, once there are any; raise what another rank has failed with.

        RankLostError after the deadline: ``awaited`` tells who is waited for, and what file that one reads, if any.
        """
        deadline = Deadline(self.deadline_s, self._clock)
        while not (messages := self.inbox.collect(_SLICE_S)):
            self.check()
            if deadline.passed:
                place, file = awaited()
                job_rank, phase = self.job_ranks[place], "passing on what was read"
                where = f"{phase!r} (at {file!r})" if file else repr(phase)
                raise RankLostError(
                    f"rank {job_rank} made no progress for {self.deadline_s:g} s in {where}; "
                    "find out where it hangs, or raise deadline_s",
                    rank=job_rank,
                    phase=phase,
                )
        return messages


class Exchange:
    """One rank's part in the exchange between the ranks of its host, for one load; the carrier's, if it ``carries``.

    ``job_ranks`` has the number in the whole job of each, for errors; ``check`` raises what another rank failed with. A
    rank that is waited for is given up after ``deadline_s`` without a message.
    """

    def __init__(
        self,
        link: Link,
        *,
        job_ranks: tuple[int, ...],
        check: Callable[[], None],
        deadline_s: float,
        carries: bool = False,
        hosts: OtherHosts | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._link = link
        self.hosts = hosts
        self.size = len(link.seat.members)
        self.place = self.size if carries else link.seat.place
        self.mail = _Mail(link, self.place, job_ranks, check, deadline_s, clock)
        self.slot_bytes = link.layout.slot_bytes
        self.most_readers = min(self.size, _MOST_READERS)
        self.slots_each = link.layout.slots // (self.most_readers + bool(link.layout.hosts))
        self._wished: set[int] = set()
        self._is_told_hosts = False
        self._reads: CommonReads  # from ``begin`` on
        self._files: Sequence[str] = ()
        self.has_failed = False
        self._to_fill: deque[int] = deque()
        self._unpassed: set[int] = set()
        self._untaken: set[int] = set()
        self._read: deque[tuple[int, int]] = deque()
        self._filled: deque[tuple[int, int]] = deque()
        self._free: deque[int] = deque()
        self._takers: dict[int, set[int]] = {}
        self._told: set[int] = set()
        self._slabs: dict[int, Slab] = {}

    def gather_wishes(self, wanted: np.ndarray) -> np.ndarray:
        """The blocks that each rank of the host wants, as booleans [ranks, blocks], given those of this one."""
        room, everyone = self._wishes(len(wanted)), set(range(self.size))
        room[self.place] = np.packbits(wanted)
        self._wished.add(self.place)
        for place in everyone - {self.place}:
            self.mail.post(place, _WISHED)
        while missing := everyone - self._wished:
            self._take(self.mail.wait(lambda missing=missing: (min(missing), "")))  # type: ignore[misc]
        return np.unpackbits(room[: self.size], axis=1, count=len(wanted)).view(bool)

    def tell_hosts(self, wishes: Sequence[bytes], blocks: int) -> None:
        """The leader: let the ranks of the host know which of ``blocks`` each host wants."""
        room = self._wishes(blocks)
        for host, bits in enumerate(wishes):
            room[self.size + host] = np.frombuffer(bits, dtype=np.uint8)
        for place in range(self.size):
            self.mail.post(place, _HOSTS)

    def gather_hosts(self, blocks: int) -> np.ndarray:
        """Which of ``blocks`` each host wants, as booleans [hosts, blocks], once the leader has told."""
        self.mail.deadline_s *= _HOSTS_PATIENCE
        while not self._is_told_hosts:
            self._take(self.mail.wait(lambda: (0, "")))
        return np.unpackbits(self._wishes(blocks)[self.size :], axis=1, count=blocks).view(bool)

    def _wishes(self, blocks: int) -> np.ndarray:
        """The bytes that say who wants which of ``blocks``, [ranks and hosts, bytes]."""
        layout, nbytes = self._link.layout, -(-blocks // 8)
        room = np.frombuffer(self._link.section(WISHES), dtype=np.uint8).reshape(self.size + layout.hosts, -1)
        if nbytes > room.shape[1]:
            raise InternalError("the wishes of a rank do not fit where they belong; please report it")
        return room[:, :nbytes]

    def begin(self, reads: CommonReads, *, files: Sequence[str] = ()) -> None:
        """Take up the reads that all ranks of the host have agreed on, of files that errors name by ``files``."""
        self._reads = reads
        self._files = files
        mine = np.flatnonzero(reads.reader == self.place)
        if self.place < self.size:  # the carrier fills its slots with what other hosts send
            self._to_fill.extend(mine.tolist())
            self._unpassed.update(self._to_fill)
        wants = reads.takers[:, self.place] & (reads.reader != self.place)
        self._untaken.update(np.flatnonzero(wants).tolist())
        self._untaken.difference_update(read for read, _ in self._filled)  # by ranks that began before this one
        if len(mine):
            first = sorted(set(reads.reader.tolist())).index(self.place) * self.slots_each
            count = min(self.slots_each, len(mine))
            self._free.extend(range(first, first + count))
            # At once, because every request has the kernel wait for all processors.
            layout = self._link.layout
            self._link.memory.make_huge(layout.slot(first)[0], layout.slot(first + count)[0])

    @property
    def is_done(self) -> bool:
        """Whether this rank has passed on all its reads and has been told of everything it wants."""
        return not self._unpassed and not self._untaken and not self._filled

    def next_filled(self) -> tuple[int, int] | None:
        """A read of another rank that this one wants and can take now, and the slot it lies in."""
        return self._filled.popleft() if self._filled else None

    def next_read(self) -> tuple[int, int] | None:
        """A read of this rank's own that is there to be passed on, and the slot it lies in."""
        return self._read.popleft() if self._read else None

    def next_to_fill(self) -> tuple[int, int] | None:
        """A read that is this rank's to do, and the slot for it; None while all its slots are in use."""
        slot = self.claim_slot(self._to_fill[0]) if self._to_fill else None
        return None if slot is None else (self._to_fill.popleft(), slot)

    def claim_slot(self, read: int) -> int | None:
        """A slot for ``read``, until all who want it have taken it; None while all are in use."""
        if not self._free:
            return None
        slot = self._free.popleft()  # the one that was used longest ago
        self._takers[slot] = set(np.flatnonzero(self._reads.takers[read]).tolist())
        return slot

    def slot(self, number: int) -> Slab:
        if number not in self._slabs:
            self._slabs[number] = self._link.memory.slab(*self._link.layout.slot(number))
        return self._slabs[number]

    @property
    def slots(self) -> Slab:
        """The memory of all slots of the host."""
        layout = self._link.layout
        return self._link.memory.slab(layout.slot(0)[0], layout.slot(layout.slots)[0])

    # Threads that read, check and copy call these four. They only post, also to this rank itself, so that what the
    # feeding thread knows changes in that thread alone; ``tell_filled`` changes sets, each by one step of C.

    def tell_read(self, read: int, slot: int) -> None:
        """Tell the feeding thread of this rank that ``read`` lies in ``slot``."""
        self.mail.post(self.place, _READ, read, slot)

    def tell_failed(self) -> None:
        """Tell the feeding thread of this rank not to wait any more, because this one has failed."""
        self.mail.post(self.place, _FAILED)

    def tell_filled(self, read: int, slot: int) -> None:
        """Let the others who want some of ``read`` have it from ``slot``."""
        self._told.add(slot)
        self._unpassed.discard(read)
        for place in tuple(self._takers[slot]):
            if place != self.place:
                self.mail.post(place, _FILLED, read, slot)

    def tell_taken(self, read: int, slot: int) -> None:
        """Tell the one who read it, be it this rank, that this one needs ``slot`` no more."""
        self.mail.post(int(self._reads.reader[read]), _TAKEN, read, slot)

    def collect(self) -> None:
        """Take what messages there are, without waiting; raise what another rank has failed with."""
        self.mail.check()
        self._take(self.mail.inbox.collect())

    def wait(self) -> None:
        """Return when a message has changed something; raise what another rank has failed with."""
        self._take(self.mail.wait(self._awaited))

    def close(self) -> None:
        """Leave the others; what they still want is in their memory too."""
        if self.hosts is not None and self.hosts.carrier is not None:
            self.hosts.carrier.close()
        self._slabs.clear()
        self._link.close()

    def awaited_reader(self) -> int | None:
        """The place of the rank that is to fill a slot for this one next, if any is."""
        read = min(self._untaken, default=None)
        return None if read is None else int(self._reads.reader[read])

    def awaited_taker(self) -> int | None:
        """The place of another rank that can take something from this one's slots, and has not, if any does."""
        return min(set().union(*(self._takers[slot] for slot in tuple(self._told))) - {self.place}, default=None)

    def _awaited(self) -> tuple[int, str]:
        """Who is waited for, and what file that one reads: whoever reads for this one, else who uses its slots."""
        reader, taker = self.awaited_reader(), self.awaited_taker()
        if reader is not None:
            return reader, self._file_of(min(self._untaken))
        if taker is not None or not self._unpassed:
            return self.place if taker is None else taker, ""
        return self.place, self._file_of(min(self._unpassed))  # its own disk

    def _file_of(self, read: int) -> str:
        """The name of the file that ``read`` is of; nothing where nobody has told the names."""
        return self._files[int(self._reads.blocks.file[self._reads.bounds[read]])] if self._files else ""

    def _take(self, messages: list[bytes]) -> None:
        for kind, sender, read, slot in map(_MESSAGE.unpack, messages):
            if kind == _WISHED:
                self._wished.add(sender)
            elif kind == _FILLED:
                self._untaken.discard(read)
                self._filled.append((read, slot))
            elif kind == _HOSTS:
                self._is_told_hosts = True
            elif kind == _TAKEN:
                self._takers[slot].discard(sender)
                if not self._takers[slot]:
                    self._told.discard(slot)
                    del self._takers[slot]
                    self._free.append(slot)
            elif kind == _READ:
                self._read.append((read, slot))
            elif kind == _FAILED:
                self.has_failed = True
