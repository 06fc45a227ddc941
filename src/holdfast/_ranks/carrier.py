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
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from holdfast._plan.shared_reads import CommonReads
from holdfast._process import forget_in_child, start_thread
from holdfast._ranks.exchange import Exchange
from holdfast._values.deadline import Clock
from holdfast.errors import InternalError, RankLostError

_HEADER = struct.Struct("<4sIQQ")
_MAGIC = b"hold"
_WISHES, _READ = 1, 2
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
class Job:
    """What a rank must know of the hosts that pass blocks on: the number of its own, and how large a read may be.

    The leader of a host also has its carrier.
    """

    host: int
    slot_bytes: int
    carrier: Carrier | None


class Carrier:
    """One host's carrier, for one load.

    Args:
        exchange: that of the carrier with the ranks of its host.
        sockets: the connections to the leaders of the other hosts, by the numbers of these; never waiting.
        names: the number in the whole job of each host's leader, for errors.
        host: the number of this host.
        check: raises what another rank has failed with.
        deadline_s: seconds without a byte after which a host that is waited for is given up.
    """

    def __init__(
        self,
        exchange: Exchange,
        sockets: dict[int, socket.socket],
        *,
        names: tuple[int, ...],
        host: int,
        check: Callable[[], None],
        deadline_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._exchange = exchange
        self._peers = [_Peer(number, names[number], each, clock) for number, each in sorted(sockets.items())]
        self._by_host = {peer.host: peer for peer in self._peers}
        self._host = host
        self._check = check
        self._deadline_s = deadline_s
        self._clock = clock
        self._freight: Freight | None = None
        self._awaited: dict[int, int] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._moved_at = clock()
        self._failure: BaseException | None = None
        self.progress = 0

    def gather_wishes(self, own: bytes) -> list[bytes]:
        """What every host wants, by host, given what this one does; all are of the same length."""
        rows = {peer.host: bytearray(len(own)) for peer in self._peers}

        def admit(peer: _Peer, kind: int, number: int, nbytes: int) -> _Arrival:
            if kind != _WISHES or number != peer.host or nbytes != len(own):
                raise _unexpected(peer.name)
            return _Arrival(memoryview(rows[peer.host]), lambda: None)

        for peer in self._peers:
            peer.owes = 1
            peer.send(_WISHES, self._host, memoryview(own), lambda: None)
        self._moved_at = self._clock()
        while any(peer.is_busy for peer in self._peers):
            self._check()
            self._round(admit)
            self.progress += 1  # others see that this rank is not the one that is stuck
        rows[self._host] = bytearray(own)
        return [bytes(rows[host]) for host in sorted(rows)]

    def start(self, reads: CommonReads, freight: Freight) -> None:
        """Begin to carry, in a thread of its own."""
        self._freight = freight
        self._exchange.begin(reads)
        self._moved_at = self._clock()
        for read in np.flatnonzero(reads.reader == self._exchange.place).tolist():
            number = int(freight.number[read])
            self._awaited[number] = read
            self._by_host[int(freight.job.reader[number])].owes += 1
        self._thread = threading.Thread(target=self._run, name="holdfast-carrier", daemon=True)
        start_thread(self._thread)

    def check(self) -> None:
        """Raise what the carrier has failed with; any thread."""
        if self._failure is not None:
            raise self._failure

    def finish(self, rest: Callable[[], None]) -> None:
        """Return when everything is carried, calling ``rest`` now and then; raise what the carrier has failed with."""
        assert self._thread is not None
        while self._thread.is_alive():
            self._thread.join(_SLICE_S)
            rest()
        self.check()

    def stop(self) -> None:
        """Carry no more, and wait until that is so."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop carrying and close the connections."""
        self.stop()
        for peer in self._peers:
            peer.close()
        self._failure = self._freight = None

    def _run(self) -> None:
        try:
            exchange = self._exchange
            while not self._stopping:
                exchange.collect()
                while (filled := exchange.next_filled()) is not None:
                    self._ship(*filled)
                if exchange.is_done and not self._awaited and not any(peer.is_busy for peer in self._peers):
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
        targets = [
            self._by_host[host] for host in np.flatnonzero(freight.job.takers[number]).tolist() if host != self._host
        ]
        left = len(targets)

        def sent() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._exchange.tell_taken(read, slot)

        view = self._exchange.slot(slot).view[start:stop]
        for peer in targets:
            peer.send(_READ, number, view, sent)

    def _admit(self, peer: _Peer, kind: int, number: int, nbytes: int) -> _Arrival | None:
        """Room for what a host is about to send; None while there is none."""
        freight, read = self._freight, self._awaited.get(number, -1)
        assert freight is not None
        if kind != _READ or read < 0 or int(freight.job.reader[number]) != peer.host:
            raise _unexpected(peer.name)
        start, stop = freight.place(read)
        if nbytes != stop - start:
            raise _unexpected(peer.name)
        slot = self._exchange.claim_slot(read)
        if slot is None:
            return None
        view = self._exchange.slot(slot).view[start:stop]

        def arrived() -> None:
            freight.check(read, view, peer.name)
            self._exchange.tell_filled(read, slot)

        del self._awaited[number]
        return _Arrival(view, arrived)

    def _round(self, admit: _Admit) -> None:
        """Wait a little for something to happen, and do what is then possible; RankLostError after too long a wait."""
        moved = sum(peer.receive(admit) for peer in self._peers if peer.waits_for_room)
        poll, polled = select.poll(), {}
        for peer in self._peers:
            if peer.events:
                poll.register(peer.socket, peer.events)
                polled[peer.socket.fileno()] = peer
        poll.register(self._exchange.inbox, select.POLLIN)
        happened = poll.poll(0 if moved else _SLICE_S * 1000)
        for descriptor, events in happened:
            if (at := polled.get(descriptor)) is not None:
                moved += at.transmit() if events & ~select.POLLIN else 0
                moved += at.receive(admit) if events & ~select.POLLOUT and at.owes else 0
        self.progress += moved
        if moved or happened:
            self._moved_at = self._clock()
        else:
            self._check()
            self._look_at_the_clock()

    def _look_at_the_clock(self) -> None:
        """RankLostError when the one that is waited for has had its time."""
        now, deadline_s = self._clock(), self._deadline_s
        for peer in self._peers:
            if peer.lost_at is not None and peer.is_busy and now - peer.lost_at > _NAMING_S:
                raise _lost(peer.name, "closed its connection before it was done")
        name = None
        if any(peer.waits_for_room for peer in self._peers):
            name = self._exchange.awaited_taker
        elif not any(peer.sends for peer in self._peers):
            name = self._exchange.awaited_reader
        if name is None:
            deadline_s *= _HOST_PATIENCE
            busy = sorted((not peer.sends, peer.name) for peer in self._peers if peer.is_busy)
            name = busy[0][1] if busy else None
        if name is not None and now - self._moved_at > deadline_s:
            raise _lost(name, f"made no progress for {deadline_s:g} s")


class _Arrival:
    """Room for what is being received, and what to do when it is there."""

    def __init__(self, room: memoryview, arrived: Callable[[], None]) -> None:
        self.room = room
        self.arrived = arrived


_Admit = Callable[["_Peer", int, int, int], _Arrival | None]


class _Peer:
    """The connection to the leader of another host: frames that go out, and how many are still to come in."""

    def __init__(self, host: int, name: int, connection: socket.socket, clock: Clock) -> None:
        self.host = host
        self.name = name
        self.socket = connection
        self._clock = clock
        self.owes = 0
        self.lost_at: float | None = None
        self._outgoing: deque[tuple[list[memoryview], Callable[[], None]]] = deque()
        self._header = bytearray(_HEADER.size)
        self._header_room = memoryview(self._header)
        self._arrival: _Arrival | None = None
        forget_in_child(self)

    @property
    def is_busy(self) -> bool:
        """Whether something is still to go out or to come in."""
        return bool(self.owes or self._outgoing)

    @property
    def sends(self) -> bool:
        """Whether something is still to go out."""
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
                self._lose()
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

    def receive(self, admit: _Admit) -> int:
        """Take what is there of the next frame, into the room that ``admit`` gives it; how many bytes that was."""
        total = 0
        while True:
            if self._arrival is None and not self._header_room:
                magic, kind, number, nbytes = _HEADER.unpack(self._header)
                if magic != _MAGIC or not self.owes:
                    raise _unexpected(self.name)
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
                self._lose()
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

    def _lose(self) -> None:
        self.lost_at = self._clock()


def _unexpected(name: int) -> InternalError:
    return InternalError(f"rank {name} has sent something else than was agreed on; please report it")


def _lost(name: int, what: str) -> RankLostError:
    phase = "passing blocks on between hosts"
    return RankLostError(
        f"rank {name} {what} in {phase!r}; look at what it hangs on and at the network, or allow more with deadline_s",
        rank=name,
        phase=phase,
    )
