"""The carrier of a host: sends what its ranks have read to other hosts that want it, and takes what these have read.

To the ranks of its host it is one more of them (see exchange.py). It runs in a thread of the leader's, over one
connection to the leader of each other host. What it sends goes out from the slot it lies in; what it receives goes into
a slot of its own, is checked there, and only then passed on. So memory is bounded by the slots, whatever is under way.

Invariant: receiving needs a free slot of the carrier, which the ranks of its host give back without anybody's help;
sending needs only that the other side receives. So whoever waits, waits for someone who works. A lost connection is
not an error by itself: whoever dies is named by those who watch over the ranks, and if they do not, soon by this one.
Frames are a header and what it announces, which must be exactly what is expected of that host; nothing is pickled.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from holdfast._io.sharing import Inbox
from holdfast._plan.reads import CommonReads
from holdfast._process import forget_in_child, start_thread
from holdfast._ranks.exchange import Exchange
from holdfast.errors import InternalError, RankLostError

_HEADER = struct.Struct("<4sIQQ")
_MAGIC = b"hold"
_WISHES, _READ = 1, 2
_PHASE = "passing blocks on between hosts"
_SLICE_S = 0.25
# Those who watch over the ranks need so long to tell that one of them is dead.
_NAMING_S = 20.0
# Who waits for another host, which may wait for its ranks, waits so many times as long: who is stuck is named first.
_HOST_PATIENCE = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Freight:
    """What the carrier must know of the reads of its host.

    ``job`` has the reads that hosts share, ``number`` which of them a read of this host is, -1 for one that stays here;
    ``place`` says where in a slot the bytes of a read of this host begin and end. ``check(read, view, rank)`` raises
    unless what the leader ``rank`` of another host has sent is right.
    """

    job: CommonReads
    number: np.ndarray
    place: Callable[[int], tuple[int, int]]
    check: Callable[[int, memoryview, int], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OtherHosts:
    """What a rank must know of the hosts that pass blocks on: the number of its own, and how large a read may be.

    The leader of a host also has its carrier.
    """

    host: int
    slot_bytes: int
    carrier: Carrier | None


class Carrier:
    """The carrier of host number ``host``, for one load.

    ``exchange`` is its own with the ranks of the host. By host, ``sockets`` has the connections to the leaders of the
    others, which never wait, and ``job_ranks`` the number in the whole job of each leader, for errors.
    """

    def __init__(
        self,
        exchange: Exchange,
        sockets: dict[int, socket.socket],
        *,
        job_ranks: tuple[int, ...],
        host: int,
    ) -> None:
        self._exchange = exchange
        self._others = {other: FrameConnection(other, job_ranks[other], sockets[other]) for other in sorted(sockets)}
        self._host = host
        self._check = exchange.mail.check
        self._freight: Freight | None = None
        self._awaited: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._moved_at = time.monotonic()
        self._failure: BaseException | None = None

    def gather_wishes(self, own: bytes) -> list[bytes]:
        """What every host wants, by host, given what this one does; all are of the same length."""
        rows = {host: bytearray(len(own)) for host in self._others}

        def admit(other: FrameConnection, kind: int, number: int, nbytes: int) -> Arrival:
            if kind != _WISHES or number != other.number or nbytes != len(own):
                raise unexpected(other.job_rank)
            return Arrival(memoryview(rows[other.number]), lambda: None)

        for other in self._others.values():
            other.owes = 1
            other.send(_WISHES, self._host, memoryview(own), lambda: None)
        self._moved_at = time.monotonic()
        while any(other.is_busy for other in self._others.values()):
            self._check()
            self._round(admit)
        rows[self._host] = bytearray(own)
        return [bytes(rows[host]) for host in sorted(rows)]

    def start(self, reads: CommonReads, freight: Freight) -> None:
        """Begin to carry, in a thread of its own."""
        self._freight = freight
        self._exchange.begin(reads)
        self._moved_at = time.monotonic()
        for read in np.flatnonzero(reads.reader == self._exchange.place).tolist():
            number = int(freight.number[read])
            self._awaited[number] = read
            self._others[int(freight.job.reader[number])].owes += 1
        self._thread = threading.Thread(target=self._run, name="holdfast-carrier", daemon=True)
        start_thread(self._thread)

    def check(self) -> None:
        """Raise what the carrier has failed with; any thread."""
        if self._failure is not None:
            raise self._failure

    def wait(self, check: Callable[[], None]) -> None:
        """Return when everything is carried, calling ``check`` now and then; raise what the carrier has failed with."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_SLICE_S)
            check()
        self.check()

    def close(self) -> None:
        """Carry no more, wait until that is so, and close the connections."""
        self._is_closing = True
        if self._thread is not None:
            self._thread.join()
        for other in self._others.values():
            other.close()
        self._failure = self._freight = None

    def _run(self) -> None:
        try:
            exchange, others = self._exchange, self._others.values()
            while not self._is_closing:
                exchange.collect()
                while (filled := exchange.next_filled()) is not None:
                    self._ship(*filled)
                if exchange.is_done and not self._awaited and not any(other.is_busy for other in others):
                    return
                self._round(self._admit)
        except BaseException as error:  # the leader raises it
            self._failure = error

    def _ship(self, read: int, slot: int) -> None:
        """Send a read that lies in a slot to all hosts that want it, then give the slot back."""
        freight = self._freight
        assert freight is not None
        start, stop = freight.place(read)
        number = int(freight.number[read])
        targets = [host for host in np.flatnonzero(freight.job.takers[number]).tolist() if host != self._host]
        left = len(targets)

        def sent() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._exchange.tell_taken(read, slot)

        view = self._exchange.slot(slot).view[start:stop]
        for host in targets:
            self._others[host].send(_READ, number, view, sent)

    def _admit(self, other: FrameConnection, kind: int, number: int, nbytes: int) -> Arrival | None:
        """Room for what a host is about to send; None while there is none."""
        freight, read = self._freight, self._awaited.get(number, -1)
        assert freight is not None
        if kind != _READ or read < 0 or int(freight.job.reader[number]) != other.number:
            raise unexpected(other.job_rank)
        start, stop = freight.place(read)
        if nbytes != stop - start:
            raise unexpected(other.job_rank)
        slot = self._exchange.claim_slot(read)
        if slot is None:
            return None
        view = self._exchange.slot(slot).view[start:stop]

        def arrived() -> None:
            freight.check(read, view, other.job_rank)
            self._exchange.tell_filled(read, slot)

        del self._awaited[number]
        return Arrival(view, arrived)

    def _round(self, admit: Admit) -> None:
        """Wait a little for something to happen, and do what is then possible; RankLostError after too long a wait."""
        if exchange_frames(self._others.values(), self._exchange.mail.inbox, admit, _SLICE_S):
            self._moved_at = time.monotonic()
        else:
            self._check()
            self._look_at_the_clock()

    def _look_at_the_clock(self) -> None:
        """RankLostError when the one that is waited for has had its time."""
        now, exchange, others = time.monotonic(), self._exchange, self._others.values()
        deadline_s = exchange.mail.deadline_s
        for other in others:
            other.check_lost(_PHASE)
        place = None
        if any(other.waits_for_room for other in others):
            place = exchange.awaited_taker()
        elif not any(other.sends for other in others):
            place = exchange.awaited_reader()
        awaited = None if place is None else exchange.mail.job_ranks[place]
        if awaited is None:
            deadline_s *= _HOST_PATIENCE
            busy = sorted((not other.sends, other.job_rank) for other in others if other.is_busy)
            awaited = busy[0][1] if busy else None
        if awaited is not None and now - self._moved_at > deadline_s:
            raise lost(awaited, f"made no progress for {deadline_s:g} s", _PHASE)


@dataclass(slots=True)
class Arrival:
    """Room for what is being received, and what to do when it is there."""

    room: memoryview
    arrived: Callable[[], None]


Admit = Callable[["FrameConnection", int, int, int], Arrival | None]


class FrameConnection:
    """A connection to a process of another host: frames that go out, and how many are still to come in.

    ``number`` is that of the other end, ``job_rank`` its rank in the whole job, for errors.
    """

    def __init__(self, number: int, job_rank: int, connection: socket.socket) -> None:
        self.number = number
        self.job_rank = job_rank
        self.socket = connection
        self.owes = 0
        self.lost_at: float | None = None
        self._outgoing: deque[tuple[list[memoryview], Callable[[], None]]] = deque()
        self._header = bytearray(_HEADER.size)
        self._header_room = memoryview(self._header)
        self._arrival: Arrival | None = None
        forget_in_child(self)

    @property
    def is_busy(self) -> bool:
        """Whether something is still to go out or to come in."""
        return bool(self.owes or self._outgoing)

    @property
    def sends(self) -> bool:
        return bool(self._outgoing)

    @property
    def waits_for_room(self) -> bool:
        """Whether a header has come, and there was no room yet for what it announces."""
        return self._arrival is None and not self._header_room and self.lost_at is None

    @property
    def events(self) -> int:
        """What to poll the connection for; 0 for nothing."""
        if self.lost_at is not None:
            return 0
        return (select.POLLOUT if self._outgoing else 0) | (
            select.POLLIN if self.owes and not self.waits_for_room else 0
        )

    def send(self, kind: int, number: int, payload: memoryview, sent: Callable[[], None]) -> None:
        """Put a frame in the queue; ``sent`` is called when all of it has been handed to the system."""
        header = _HEADER.pack(_MAGIC, kind, number, len(payload))
        self._outgoing.append(([memoryview(header), payload], sent))

    def check_lost(self, phase: str) -> None:
        """RankLostError if the connection has ended before it was done, and nobody has named whoever died."""
        if self.lost_at is not None and self.is_busy and time.monotonic() - self.lost_at > _NAMING_S:
            raise lost(self.job_rank, "closed its connection before it was done", phase)

    def transmit(self) -> int:
        """Send as much as the connection takes now; how many bytes that was."""
        total = 0
        while self._outgoing:
            parts, sent = self._outgoing[0]
            try:
                count = self.socket.sendmsg(parts)
            except BlockingIOError:
                break
            except OSError:
                self.lost_at = time.monotonic()
                break
            total += count
            while parts and count >= len(parts[0]):
                count -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][count:]
            else:
                self._outgoing.popleft()
                sent()
        return total

    def receive(self, admit: Admit) -> int:
        """Take what is there of the next frame, into the room that ``admit`` gives it; how many bytes that was."""
        total = 0
        while True:
            if self._arrival is None and not self._header_room:
                magic, kind, number, nbytes = _HEADER.unpack(self._header)
                if magic != _MAGIC or not self.owes:
                    raise unexpected(self.job_rank)
                self._arrival = admit(self, kind, number, nbytes)
                if self._arrival is None:
                    return total
            arrival = self._arrival
            room = self._header_room if arrival is None else arrival.room
            if arrival is not None and not room:
                self.owes -= 1
                self._arrival, self._header_room = None, memoryview(self._header)
                arrival.arrived()
                return total
            try:
                count = self.socket.recv_into(room)
            except BlockingIOError:
                return total
            except OSError:
                count = 0
            if count == 0:
                self.lost_at = time.monotonic()
                return total
            total += count
            if arrival is None:
                self._header_room = room[count:]
            else:
                arrival.room = room[count:]

    def close(self) -> None:
        """Close the connection and let go of what was still to be sent or received."""
        self.socket.close()
        self._outgoing.clear()
        self._arrival = None

    forget_parent = close


def exchange_frames(others: Collection[FrameConnection], inbox: Inbox, admit: Admit, wait_s: float) -> bool:
    """Whether something came or went over the connections, or came into the inbox, within ``wait_s``."""
    # Room may have come since a header did: no event of the connection tells of that.
    moved = sum(other.receive(admit) for other in others if other.waits_for_room)
    poll, polled = select.poll(), {}
    for other in others:
        if other.events:
            poll.register(other.socket, other.events)
            polled[other.socket.fileno()] = other
    poll.register(inbox, select.POLLIN)
    happened = poll.poll(0 if moved else wait_s * 1000)
    for descriptor, events in happened:
        if (at := polled.get(descriptor)) is not None:
            moved += at.transmit() if events & ~select.POLLIN else 0
            moved += at.receive(admit) if events & ~select.POLLOUT and at.owes else 0
    return bool(moved or happened)


def unexpected(job_rank: int) -> InternalError:
    return InternalError(f"rank {job_rank} sent unexpected data; please report it")


def lost(job_rank: int, what: str, phase: str) -> RankLostError:
    """The error of a rank of another host that does not do its part."""
    return RankLostError(
        f"rank {job_rank} {what} in {phase!r}; find out where it hangs, check the network, or raise deadline_s",
        rank=job_rank,
        phase=phase,
    )
