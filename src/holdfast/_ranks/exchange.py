"""Blocks that several ranks of a host want, passed on through shared memory by the one that read them.

Every rank has slots of its own there. It reads into one, verifies what it has read, tells the others who want some of
it, and reads into it again when all of them, and itself, are done. Where hosts pass blocks on to each other, the leader
also runs a carrier with slots of its own: to the ranks it is one more of them, which fills slots with what comes from
other hosts and takes what they want.

Invariant: only the thread that feeds the work waits, and it waits only when there is nothing left to do without the
others; taking what has been filled needs nobody's help. So whoever waits, waits for someone who works. Each wait looks
several times a second whether another rank has failed, and ends after the deadline without a message.
"""

from __future__ import annotations

import enum
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from holdfast._io.sharing import Inbox
from holdfast._io.slabs import Slab
from holdfast._plan.shared_reads import CommonReads
from holdfast._ranks.meeting import MESSAGE_BYTES, Layout, Link
from holdfast._values.deadline import Clock, Deadline
from holdfast.errors import InternalError, RankLostError

if TYPE_CHECKING:
    from holdfast._ranks.carrier import Job

WISHES = 2
"""The section of the shared memory where every rank, then every host, says which blocks it wants, a bit for each."""

_MOST_READERS = 16
# Enough for reads under way, for those that others have not taken yet, and to have left the processor's caches before
# the disk fills them again.
_MOST_SLOTS_EACH = 16
_RING_BYTES = 128 << 20
_LEAST_SLOT_BYTES = 2 << 20
_MESSAGE = struct.Struct("<iiii")
assert _MESSAGE.size == MESSAGE_BYTES
_SLICE_S = 0.25
# Whoever is waited for may wait for other hosts, once these share: the carriers, who know, are the first to name one.
_HOSTS_PATIENCE = 3


class _Kind(enum.IntEnum):
    WISHES = 1
    FILLED = 2
    TAKEN = 3
    HOSTS = 4
    READ = 5
    FAILED = 6


def most_readers(size: int) -> int:
    """How many of ``size`` ranks read for others: enough to keep a disk busy, few enough to have slots each."""
    return min(size, _MOST_READERS)


def layout_for(sections: tuple[int, int], wishes: int, size: int, slot_bytes: int, hosts: int = 0) -> Layout:
    """Room for two ``sections``, for wishes of ``wishes`` bytes each, and two slots or more for each that reads.

    Wishes are those of ``size`` ranks and of ``hosts`` hosts; with hosts there is also a carrier.
    """
    readers = most_readers(size) + bool(hosts)
    while slot_bytes > _LEAST_SLOT_BYTES and 2 * readers * slot_bytes > _RING_BYTES:
        slot_bytes //= 2
    each = max(2, min(_MOST_SLOTS_EACH, _RING_BYTES // (readers * slot_bytes)))
    rows = size + hosts
    return Layout(sections=(*sections, rows * wishes), slots=readers * each, slot_bytes=slot_bytes, hosts=hosts)


class Exchange:
    """One rank's part in the exchange between the ranks of its host, for one load.

    Args:
        link: what they share.
        names: the number in the whole job of each, for errors.
        check: raises what another rank has failed with.
        deadline_s: seconds without a message after which a rank that is waited for is given up.
        carries: be the carrier of this host rather than one of its ranks.
        job: what there is to know of other hosts, where blocks are passed on between them.
    """

    def __init__(
        self,
        link: Link,
        *,
        names: tuple[int, ...],
        check: Callable[[], None],
        deadline_s: float,
        carries: bool = False,
        job: Job | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._link = link
        self.job = job
        self._names = (*names, names[0])  # the carrier is the leader
        self._check = check
        self._deadline_s = deadline_s
        self._clock = clock
        self.size = len(link.seat.members)
        self.place = self.size if carries else link.seat.place
        self._carries = carries
        self._inbox = link.carrier_inbox if carries and link.carrier_inbox is not None else link.inbox
        self.slot_bytes = link.layout.slot_bytes
        self.most_readers = most_readers(self.size)
        self.slots_each = link.layout.slots // (self.most_readers + bool(link.layout.hosts))
        self.waits = 0
        self._heard: set[int] = set()
        self._hosts_heard = False
        self._reads: CommonReads | None = None
        self._files: Sequence[str] = ()
        self.has_failed = False
        self._to_fill: deque[int] = deque()
        self._untaken: set[int] = set()
        self._filled: deque[tuple[int, int]] = deque()
        self._unpassed: set[int] = set()
        self._read: deque[tuple[int, int]] = deque()
        self._free: deque[int] = deque()
        self._in_use: dict[int, set[int]] = {}
        self._told: set[int] = set()
        self._slabs: dict[int, Slab] = {}

    def gather_wishes(self, wanted: np.ndarray) -> np.ndarray:
        """The blocks that each rank of the host wants, as booleans [ranks, blocks], given those of this one."""
        room, bits = self._wishes(len(wanted)), np.packbits(wanted)
        room[self.place] = bits
        self._heard.add(self.place)
        for place in range(self.size):
            if place != self.place:
                self._post(place, _Kind.WISHES)
        deadline = self._deadline()
        while len(self._heard) < self.size:
            deadline = self._wait(deadline, lambda: (min(set(range(self.size)) - self._heard), ""))
        return np.unpackbits(room[: self.size], axis=1, count=len(wanted)).view(bool)

    def tell_hosts(self, wishes: Sequence[bytes], blocks: int) -> None:
        """The leader: let the ranks of the host know which of ``blocks`` each host wants."""
        room = self._wishes(blocks)
        for host, bits in enumerate(wishes):
            room[self.size + host] = np.frombuffer(bits, dtype=np.uint8)
        for place in range(self.size):
            self._post(place, _Kind.HOSTS)

    def gather_hosts(self, blocks: int) -> np.ndarray:
        """Which of ``blocks`` each host wants, as booleans [hosts, blocks], once the leader has told."""
        self._deadline_s *= _HOSTS_PATIENCE
        deadline = self._deadline()
        while not self._hosts_heard:
            deadline = self._wait(deadline, lambda: (0, ""))
        return np.unpackbits(self._wishes(blocks)[self.size :], axis=1, count=blocks).view(bool)

    def _wishes(self, blocks: int) -> np.ndarray:
        """The bytes that say who wants which of ``blocks``, [ranks and hosts, bytes]."""
        layout, nbytes = self._link.layout, -(-blocks // 8)
        room = np.frombuffer(self._link.section(WISHES), dtype=np.uint8).reshape(self.size + layout.hosts, -1)
        if nbytes > room.shape[1]:
            raise InternalError("the wishes of a rank do not fit where they belong; please report it")
        return room[:, :nbytes]

    def begin(self, reads: CommonReads, *, names: Sequence[str] = ()) -> None:
        """Take up the reads that all ranks of the host have agreed on, of files that errors name by ``names``."""
        self._reads = reads
        self._files = names
        mine = np.flatnonzero(reads.reader == self.place)
        if not self._carries:
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
        if not self._to_fill or not self._free:
            return None
        read = self._to_fill.popleft()
        return read, self._claim(read)

    def claim_slot(self, read: int) -> int | None:
        """The carrier's slot for a read that comes from another host; None while all its slots are in use."""
        return self._claim(read) if self._free else None

    def _claim(self, read: int) -> int:
        assert self._reads is not None
        slot = self._free.popleft()  # the one that was used longest ago
        self._in_use[slot] = set(np.flatnonzero(self._reads.takers[read]).tolist())
        return slot

    def slot(self, number: int) -> Slab:
        """The memory of a slot."""
        if number not in self._slabs:
            self._slabs[number] = self._link.memory.slab(*self._link.layout.slot(number))
        return self._slabs[number]

    @property
    def slots(self) -> Slab:
        """The memory of all slots of the host."""
        layout = self._link.layout
        return self._link.memory.slab(layout.slot(0)[0], layout.slot(layout.slots)[0])

    def tell_read(self, read: int, slot: int) -> None:
        """Tell the feeding thread of this rank that ``read`` lies in ``slot``; any thread."""
        self._post(self.place, _Kind.READ, read, slot)

    def tell_failed(self) -> None:
        """Tell the feeding thread of this rank not to wait any more, because this one has failed."""
        self._post(self.place, _Kind.FAILED)

    def tell_filled(self, read: int, slot: int) -> None:
        """Let the others who want some of ``read`` have it from ``slot``; any thread."""
        self._told.add(slot)
        self._unpassed.discard(read)
        for place in tuple(self._in_use[slot]):
            if place != self.place:
                self._post(place, _Kind.FILLED, read, slot)

    def tell_taken(self, read: int, slot: int) -> None:
        """Tell the one who read it, be it this rank, that this one needs ``slot`` no more; any thread."""
        assert self._reads is not None
        self._post(int(self._reads.reader[read]), _Kind.TAKEN, read, slot)

    def collect(self) -> None:
        """Take what messages there are, without waiting; raise what another rank has failed with."""
        self._check()
        for message in self._inbox.collect():
            self._take(message)

    def wait(self) -> None:
        """Return when a message has changed something; raise what another rank has failed with."""
        deadline = self._deadline()
        while True:
            before = self.waits
            deadline = self._wait(deadline, self._awaited)
            if self.waits == before:
                return

    def rest(self) -> None:
        """Show the others that this rank only waits, and raise what another one has failed with."""
        self.waits += 1
        self._check()

    @property
    def progress(self) -> int:
        """A number that changes while this rank passes on or waits, and so is not the one that is stuck."""
        carrier = None if self.job is None else self.job.carrier
        return self.waits + (0 if carrier is None else carrier.progress)

    def close(self) -> None:
        """Leave the others; what they still want is in their memory too."""
        if self.job is not None and self.job.carrier is not None:
            self.job.carrier.close()
        self._slabs.clear()
        self._link.close()

    @property
    def inbox(self) -> Inbox:
        """Where messages come in, to wait for them among other things."""
        return self._inbox

    @property
    def awaited_reader(self) -> int | None:
        """The number in the whole job of the rank that is to fill a slot for this one next, if any is."""
        read = self._awaited_read()
        return None if read is None or self._reads is None else self._names[int(self._reads.reader[read])]

    @property
    def awaited_taker(self) -> int | None:
        """The number in the whole job of a rank that uses one of this one's slots, if any does."""
        return next((self._names[place] for place in sorted(self._takers())), None)

    def _awaited(self) -> tuple[int, str]:
        """Who is waited for, and what file that one reads: whoever reads for this one, else who uses its slots."""
        read = self._awaited_read()
        if read is not None and self._reads is not None:
            return int(self._reads.reader[read]), self._file_of(read)
        takers = self._takers()
        if takers or not self._unpassed:
            return min(takers, default=self.place), ""
        return self.place, self._file_of(min(self._unpassed))  # its own disk

    def _awaited_read(self) -> int | None:
        """The read of another rank that this one is to be given next, if there is any."""
        return min(self._untaken, default=None)

    def _takers(self) -> set[int]:
        """The other ranks that can take something from this one's slots, and have not."""
        return set().union(*(self._in_use[slot] for slot in tuple(self._told))) - {self.place}

    def _deadline(self) -> Deadline:
        return Deadline(self._deadline_s, self._clock)

    def _file_of(self, read: int) -> str:
        """The name of the file that ``read`` is of; nothing where nobody has told the names."""
        assert self._reads is not None
        number = int(self._reads.blocks.file[self._reads.bounds[read]])
        return self._files[number] if self._files else ""

    def _wait(self, deadline: Deadline, awaited: Callable[[], tuple[int, str]]) -> Deadline:
        """Take messages, waiting a little for the first; the deadline, anew when one came.

        ``awaited`` tells who is waited for, and what file that one reads, if any.
        """
        messages = self._inbox.collect(_SLICE_S)
        if messages:
            for message in messages:
                self._take(message)
            return self._deadline()
        self.rest()
        if deadline.passed:
            place, file = awaited()
            name = self._names[place]
            phase = "passing on what was read"
            where = f"{phase!r} (at {file!r})" if file else repr(phase)
            raise RankLostError(
                f"rank {name} made no progress for {self._deadline_s:g} s in {where}; "
                "look at what it hangs on, or allow more with deadline_s",
                rank=name,
                phase=phase,
            )
        return deadline

    def _take(self, message: bytes) -> None:
        kind, sender, read, slot = _MESSAGE.unpack(message)
        if kind == _Kind.WISHES:
            self._heard.add(sender)
        elif kind == _Kind.FILLED:
            self._untaken.discard(read)
            self._filled.append((read, slot))
        elif kind == _Kind.HOSTS:
            self._hosts_heard = True
        elif kind == _Kind.TAKEN:
            takers = self._in_use[slot]
            takers.discard(sender)
            if not takers:
                self._told.discard(slot)
                del self._in_use[slot]
                self._free.append(slot)
        elif kind == _Kind.READ:
            self._read.append((read, slot))
        elif kind == _Kind.FAILED:
            self.has_failed = True

    def _post(self, place: int, kind: _Kind, read: int = 0, slot: int = 0) -> None:
        self._link.outboxes[place].post(_MESSAGE.pack(kind, self.place, read, slot))
