"""Blocks that several ranks of a host want, passed on through shared memory by the one that read them.

Every rank has slots of its own there. It fills one with what it has read and verified, tells those who want some of it,
and fills it again when all of them are done.

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

import numpy as np

from holdfast._host.meeting import MESSAGE_BYTES, Layout, Link
from holdfast._io.buffers import Slab
from holdfast._plan.host_reads import CommonReads
from holdfast._values.deadline import Clock, Deadline
from holdfast.errors import InternalError, RankLostError

WISHES = 2
"""The section of the shared memory where every rank says which blocks it wants, a bit for each."""

_MOST_READERS = 16
_MOST_SLOTS_EACH = 4
_RING_BYTES = 96 << 20
_LEAST_SLOT_BYTES = 2 << 20
_MESSAGE = struct.Struct("<iiii")
assert _MESSAGE.size == MESSAGE_BYTES
_SLICE_S = 0.25


class _Kind(enum.IntEnum):
    WISHES = 1
    FILLED = 2
    TAKEN = 3


def most_readers(size: int) -> int:
    """How many of ``size`` ranks read for others: enough to keep a disk busy, few enough to have slots each."""
    return min(size, _MOST_READERS)


def layout_for(sections: tuple[int, int], wishes: int, size: int, slot_bytes: int) -> Layout:
    """Room for two ``sections``, the wishes of ``size`` ranks of ``wishes`` bytes each, and two slots each or more."""
    readers = most_readers(size)
    while slot_bytes > _LEAST_SLOT_BYTES and 2 * readers * slot_bytes > _RING_BYTES:
        slot_bytes //= 2
    each = max(2, min(_MOST_SLOTS_EACH, _RING_BYTES // (readers * slot_bytes)))
    return Layout(sections=(*sections, size * wishes), slots=readers * each, slot_bytes=slot_bytes)


class Exchange:
    """One rank's part in the exchange between the ranks of its host, for one load.

    Args:
        link: what they share.
        names: the number in the whole job of each, for errors.
        check: raises what another rank has failed with.
        deadline_s: seconds without a message after which a rank that is waited for is given up.
    """

    def __init__(
        self,
        link: Link,
        *,
        names: tuple[int, ...],
        check: Callable[[], None],
        deadline_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._link = link
        self._names = names
        self._check = check
        self._deadline_s = deadline_s
        self._clock = clock
        self.place = link.seat.place
        self.size = len(link.seat.members)
        self.slot_bytes = link.layout.slot_bytes
        self.most_readers = most_readers(self.size)
        self._slots_each = link.layout.slots // self.most_readers
        self.waits = 0
        self._heard: set[int] = set()
        self._reads: CommonReads | None = None
        self._files: Sequence[str] = ()
        self._takes_own = False
        self._to_fill: deque[int] = deque()
        self._untaken: set[int] = set()
        self._filled: deque[tuple[int, int]] = deque()
        self._free: list[int] = []
        self._in_use: dict[int, tuple[int, set[int]]] = {}

    def gather_wishes(self, wanted: np.ndarray) -> np.ndarray:
        """The blocks that each rank of the host wants, as booleans [ranks, blocks], given those of this one."""
        room = np.frombuffer(self._link.section(WISHES), dtype=np.uint8).reshape(self.size, -1)
        bits = np.packbits(wanted)
        if len(bits) > room.shape[1]:
            raise InternalError("the wishes of a rank do not fit where they belong; please report it")
        room[self.place, : len(bits)] = bits
        self._heard.add(self.place)
        for place in range(self.size):
            if place != self.place:
                self._post(place, _Kind.WISHES)
        deadline = self._deadline()
        while len(self._heard) < self.size:
            deadline = self._wait(deadline, set(range(self.size)) - self._heard)
        return np.unpackbits(room[:, : len(bits)], axis=1, count=len(wanted)).view(bool)

    def begin(self, reads: CommonReads, *, takes_own: bool = False, names: Sequence[str] = ()) -> None:
        """Take up the reads that all ranks of the host have agreed on, of files that errors name by ``names``.

        With ``takes_own`` this rank is told of its own reads too, and takes them from their slots like everyone else.
        """
        self._reads = reads
        self._files = names
        self._takes_own = takes_own
        mine = np.flatnonzero(reads.reader == self.place)
        self._to_fill.extend(mine.tolist())
        wants = reads.takers[:, self.place] & (takes_own | (reads.reader != self.place))
        self._untaken.update(np.flatnonzero(wants).tolist())
        self._untaken.difference_update(read for read, _ in self._filled)  # by ranks that began before this one
        if len(mine):
            first = sorted(set(reads.reader.tolist())).index(self.place) * self._slots_each
            self._free.extend(range(first, first + self._slots_each))

    @property
    def is_done(self) -> bool:
        """Whether this rank has begun all its reads and has been told of everything it wants."""
        return not self._to_fill and not self._untaken and not self._filled

    def next_filled(self) -> tuple[int, int] | None:
        """A read of another rank that this one wants and can take now, and the slot it lies in."""
        return self._filled.popleft() if self._filled else None

    def next_to_fill(self) -> tuple[int, int] | None:
        """A read that is this rank's to do, and the slot for it; None while all its slots are in use."""
        if not self._to_fill or not self._free:
            return None
        assert self._reads is not None
        read, slot = self._to_fill.popleft(), self._free.pop()
        takers = set(np.flatnonzero(self._reads.takers[read]).tolist())
        if not self._takes_own:
            takers.discard(self.place)
        self._in_use[slot] = read, takers
        return read, slot

    def slot(self, number: int) -> Slab:
        """The memory of a slot."""
        return self._link.memory.slab(*self._link.layout.slot(number))

    @property
    def slots(self) -> Slab:
        """The memory of all slots of the host."""
        layout = self._link.layout
        return self._link.memory.slab(layout.slot(0)[0], layout.slot(layout.slots)[0])

    def tell_filled(self, read: int, slot: int) -> None:
        """Let those who want some of ``read`` have it from ``slot``; any thread."""
        for place in tuple(self._in_use[slot][1]):
            self._post(place, _Kind.FILLED, read, slot)

    def tell_taken(self, read: int, slot: int) -> None:
        """Tell the one who read it that this rank needs ``slot`` no more; any thread."""
        assert self._reads is not None
        self._post(int(self._reads.reader[read]), _Kind.TAKEN, read, slot)

    def collect(self) -> None:
        """Take what messages there are, without waiting; raise what another rank has failed with."""
        self._check()
        for message in self._link.inbox.collect():
            self._take(message)

    def wait(self) -> None:
        """Return when a message has changed something; raise what another rank has failed with."""
        assert self._reads is not None
        deadline, file = self._deadline(), ""
        if self._untaken:
            read = min(self._untaken)
            awaited = {int(self._reads.reader[read])}
            file = self._file_of(read)
        else:
            awaited = set().union(*(takers for _, takers in self._in_use.values()))
        while True:
            before = self.waits
            deadline = self._wait(deadline, awaited, file)
            if self.waits == before:
                return

    def close(self) -> None:
        """Leave the others; what they still want is in their memory too."""
        self._link.close()

    def _deadline(self) -> Deadline:
        return Deadline(self._deadline_s, self._clock)

    def _file_of(self, read: int) -> str:
        """The name of the file that ``read`` is of; nothing where nobody has told the names."""
        assert self._reads is not None
        number = int(self._reads.blocks.file[self._reads.bounds[read]])
        return self._files[number] if self._files else ""

    def _wait(self, deadline: Deadline, awaited: set[int], file: str = "") -> Deadline:
        """Take messages, waiting a little for the first; the deadline, anew when one came.

        ``file`` is what the ranks that are ``awaited`` read.
        """
        messages = self._link.inbox.collect(_SLICE_S)
        if messages:
            for message in messages:
                self._take(message)
            return self._deadline()
        self.waits += 1  # others see that this rank is not the one that is stuck
        self._check()
        if deadline.passed:
            name = self._names[min(awaited)]
            phase = "passing on what was read"
            place = f"{phase!r} (at {file!r})" if file else repr(phase)
            raise RankLostError(
                f"rank {name} made no progress for {self._deadline_s:g} s in {place}; "
                "look at what it hangs on, or allow more time",
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
        elif kind == _Kind.TAKEN:
            takers = self._in_use[slot][1]
            takers.discard(sender)
            if not takers:
                del self._in_use[slot]
                self._free.append(slot)

    def _post(self, place: int, kind: _Kind, read: int = 0, slot: int = 0) -> None:
        self._link.outboxes[place].post(_MESSAGE.pack(kind, self.place, read, slot))
