"""Which ranks share a host, how they come to share memory and pipes there, and connections between hosts.

Everyone tells the coordinator where it is; each learns who is with it. The first rank of a host, its leader, makes what
is to be shared and leaves it on the others' doorsteps without waiting for anybody; whether that worked is known to all
of them before anyone looks there. So no rank ever waits for something that will not come, and where sharing is
impossible everyone knows it.

Hosts of which there are enough are told of each other too: their leaders then pass blocks on between them.

Each leader listens, and tells where through the job's own channel, with a random token. Of two leaders the later one
connects and says the token of the other, which answers with the token of the one who called: whoever knows neither is
not of this job and is left standing. Nobody waits for a caller who has not called already. Nothing here is pickled.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast._io import sharing
from holdfast._io.mapping import HUGE_PAGE
from holdfast._io.sharing import Doorstep, Inbox, Outbox, SharedMemory
from holdfast._plan import shared_reads as job_reads
from holdfast._process import Descriptor, forget_in_child
from holdfast._values.deadline import Deadline

MESSAGE_BYTES = 16
# With more, the messages that can be under way to one of them might not fit into the smallest pipe there is.
MOST_MEMBERS = 32
# Each of so many hosts is connected with every other; more of them are split.
MOST_HOSTS = 64
_HANDOVER_S = 10.0
_PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """Where a rank is; without an ``address`` it cannot share."""

    host: tuple[str, ...]
    address: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The ranks of one host that may share, by number in the group, and this one's ``place`` among them.

    ``hosts`` has the leaders of all hosts that pass blocks on to each other, this one's at ``host``; none where each
    host reads for itself.
    """

    members: tuple[int, ...]
    addresses: tuple[str, ...]
    place: int
    hosts: tuple[int, ...] = ()
    host: int = 0

    @property
    def leads(self) -> bool:
        """Whether this rank makes what all share."""
        return self.place == 0


def seats(greetings: Sequence[Greeting], *, between_hosts: bool = False) -> list[Seat | None]:
    """For each rank, with whom it may share; None for one that is alone. Large hosts are split.

    With ``between_hosts`` the hosts share too, if there are enough of them; then none of their ranks is alone.
    """
    hosts: dict[tuple[str, ...], list[int]] = {}
    for rank, greeting in enumerate(greetings):
        if greeting.address is not None:
            hosts.setdefault(greeting.host, []).append(rank)
    groups = [
        tuple(ranks[start : start + MOST_MEMBERS])
        for ranks in hosts.values()
        for start in range(0, len(ranks), MOST_MEMBERS)
    ]
    found: list[Seat | None] = [None] * len(greetings)
    for members, (leaders, host) in zip(groups, _neighbours(groups, between_hosts=between_hosts), strict=True):
        addresses = tuple(greetings[rank].address or "" for rank in members)
        for place, rank in enumerate(members if leaders or len(members) > 1 else ()):
            found[rank] = Seat(members=members, addresses=addresses, place=place, hosts=leaders, host=host)
    return found


def _neighbours(groups: list[tuple[int, ...]], *, between_hosts: bool) -> list[tuple[tuple[int, ...], int]]:
    """For each host the leaders of those it shares with, itself among them, and its place there."""
    if not between_hosts or len(groups) < job_reads.LEAST_HOSTS:
        return [((), 0)] * len(groups)
    parts = -(-len(groups) // MOST_HOSTS)
    bounds = [part * len(groups) // parts for part in range(parts + 1)]
    leaders = [members[0] for members in groups]
    return [
        (tuple(leaders[start:stop]), host) for start, stop in itertools.pairwise(bounds) for host in range(stop - start)
    ]


class Layout(msgspec.Struct, frozen=True, kw_only=True):
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
        """All of it."""
        return max(_PAGE, self.slot(self.slots)[0])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Link:
    """One rank's end of what the ranks of a host share; the leader also has the carrier's inbox, where there is one."""

    seat: Seat
    layout: Layout
    memory: SharedMemory
    inbox: Inbox
    outboxes: tuple[Outbox, ...]
    carrier_inbox: Inbox | None = None

    def section(self, number: int) -> memoryview:
        """The memory of a section."""
        start, stop = self.layout.section(number)
        return self.memory.view[start:stop]

    def close(self) -> None:
        """Give back what the system counts; the others keep theirs."""
        self.memory.close()
        self.inbox.close()
        if self.carrier_inbox is not None:
            self.carrier_inbox.close()
        for outbox in self.outboxes:
            outbox.close()


class Visit:
    """One rank's way to a link: greet, then, the leader, invite the others, or, the others, join."""

    def __init__(self, identify: Callable[[], tuple[str, ...]] = sharing.host_identity) -> None:
        self._identify = identify
        self._doorstep: Doorstep | None = None

    def greet(self) -> Greeting:
        """Where this rank is, and where things can be left for it."""
        with contextlib.suppress(OSError, AttributeError):  # a system without such sockets
            self._doorstep = Doorstep()
        return Greeting(host=self._identify(), address=None if self._doorstep is None else self._doorstep.address)

    def invite(self, seat: Seat, layout: Layout, fill: Callable[[SharedMemory], None]) -> Link | None:
        """The leader's link, after ``fill`` has put into the memory what the others find there.

        None where the system does not let them share.
        """
        with contextlib.suppress(OSError, AttributeError, ValueError):
            return _invite(seat, layout, fill)
        return None

    def join(self, seat: Seat) -> Link | None:
        """The link of one that was invited; None where the system does not let it share."""
        with contextlib.suppress(OSError, AttributeError, ValueError, msgspec.DecodeError):
            assert self._doorstep is not None
            return _join(seat, *self._doorstep.pick_up(_HANDOVER_S))
        return None

    def close(self) -> None:
        """Leave the doorstep."""
        if self._doorstep is not None:
            self._doorstep.close()


def _invite(seat: Seat, layout: Layout, fill: Callable[[SharedMemory], None]) -> Link:
    memory = SharedMemory.create(layout.size)
    pipes: list[tuple[Descriptor, Descriptor]] = []
    try:
        fill(memory)
        pipes = sharing.make_pipes(len(seat.members) + bool(layout.hosts))
        message = msgspec.json.encode(layout)
        writers = [writer for _, writer in pipes]
        for place, address in enumerate(seat.addresses):
            if place != seat.place:
                sharing.leave_at(address, message, [memory.descriptor, pipes[place][0], *writers], _HANDOVER_S)
    except BaseException:
        memory.close()
        sharing.close_all([end for pipe in pipes for end in pipe])
        raise
    own = {seat.place, len(seat.members)}  # the pipe after the ranks' is the carrier's
    inboxes = [reader for place, (reader, _) in enumerate(pipes) if place in own]
    sharing.close_all([reader for place, (reader, _) in enumerate(pipes) if place not in own])
    return _link(seat, layout, memory, inboxes, writers)


def _join(seat: Seat, message: bytes, descriptors: list[Descriptor]) -> Link:
    try:
        layout = msgspec.json.decode(message, type=Layout)
        if len(descriptors) != 2 + len(seat.members) + bool(layout.hosts):
            raise OSError("what was left is not what the ranks of a host share")
        memory = SharedMemory.attach(descriptors.pop(0), layout.size)
    except BaseException:
        sharing.close_all(descriptors)
        raise
    return _link(seat, layout, memory, descriptors[:1], descriptors[1:])


def _link(
    seat: Seat, layout: Layout, memory: SharedMemory, inboxes: list[Descriptor], outboxes: list[Descriptor]
) -> Link:
    inbox, *carriers = (Inbox(descriptor, MESSAGE_BYTES) for descriptor in inboxes)
    return Link(
        seat=seat,
        layout=layout,
        memory=memory,
        inbox=inbox,
        outboxes=tuple(Outbox(descriptor) for descriptor in outboxes),
        carrier_inbox=carriers[0] if carriers else None,
    )


_LOOPBACK = "127.0.0.1"
_TOKEN_BYTES = 32
_CALL = struct.Struct(f"<8sI{_TOKEN_BYTES}s")
_MAGIC = b"holdfst1"
_ANSWER_S = 1.0  # what a caller, who has said all it had to say before, may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """Where a leader listens, what proves that one knows it from the job, and how large the slots of its host are."""

    hostname: str
    addresses: tuple[str, ...]
    port: int
    token: bytes = field(repr=False)
    slot_bytes: int


class Reception:
    """One leader's way to its connections: its ``contact`` is told, it ``call``s leaders before it, ``answer``s others.

    Args:
        host: the number of this host.
        hosts: how many there are.
        slot_bytes: how large the slots of this host are.
    """

    def __init__(self, host: int, hosts: int, slot_bytes: int) -> None:
        self._host = host
        self._hosts = hosts
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = _listen(backlog=2 * hosts)
        self._sockets: dict[int, socket.socket] = {}
        self._contacts: tuple[Contact, ...] = ()
        self.contact = Contact(
            hostname=socket.gethostname(),
            addresses=_addresses(),
            port=self._listener.getsockname()[1],
            token=self._token,
            slot_bytes=slot_bytes,
        )
        forget_in_child(self)

    def call(self, contacts: tuple[Contact, ...], limit_s: float) -> bool:
        """Whether all leaders before this one could be connected to within ``limit_s``; they need not answer yet."""
        self._contacts = contacts
        deadline = Deadline(limit_s, time.monotonic)
        with contextlib.suppress(OSError):
            for host, contact in enumerate(contacts[: self._host]):
                self._sockets[host] = visitor = _connect(contact, deadline)
                visitor.sendall(_CALL.pack(_MAGIC, self._host, contact.token))
            return True
        return False

    def answer(self, limit_s: float) -> bool:
        """Whether all leaders after this one have called, and those that were called are who they should be."""
        deadline = Deadline(limit_s, time.monotonic)
        called = range(self._host)
        with contextlib.suppress(OSError):
            while len(self._sockets) < self._hosts - 1:
                self._listener.settimeout(_left(deadline))
                self._take_in(self._listener.accept()[0], deadline)
            for host in called:
                caller = self._sockets[host]
                caller.settimeout(_left(deadline))
                if not hmac.compare_digest(_receive(caller, _TOKEN_BYTES), self._token):
                    return False
            return True
        return False

    def take_sockets(self) -> dict[int, socket.socket]:
        """The connections by host, which are the caller's from now on and never wait."""
        sockets, self._sockets = self._sockets, {}
        for each in sockets.values():
            each.setblocking(False)
        return sockets

    def close(self) -> None:
        """Close what nobody took."""
        self._listener.close()
        sockets, self._sockets = self._sockets, {}
        for each in sockets.values():
            each.close()

    forget_parent = close

    def _take_in(self, visitor: socket.socket, deadline: Deadline) -> None:
        """Keep the connection of a leader that has the token, and answer it; close any other."""
        with contextlib.ExitStack() as stack:
            stack.callback(visitor.close)
            visitor.settimeout(min(_ANSWER_S, _left(deadline)))
            with contextlib.suppress(OSError):
                magic, host, token = _CALL.unpack(_receive(visitor, _CALL.size))
                knows = magic == _MAGIC and hmac.compare_digest(token, self._token)
                if knows and self._host < host < self._hosts and host not in self._sockets:
                    visitor.sendall(self._contacts[host].token)
                    visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._sockets[host] = visitor
                    stack.pop_all()


def _listen(backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)


def _addresses() -> tuple[str, ...]:
    """Where others may reach this host, best first: on the way by which the ranks of the job met, then by its name."""
    found = []
    with contextlib.suppress(OSError, KeyError):
        family, _, _, _, meeting_point = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(meeting_point)  # sends nothing, and chooses an address of ours
            found.append(str(probe.getsockname()[0]))
    with contextlib.suppress(OSError):
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found.extend(str(entry[4][0]) for entry in entries)
    return tuple(dict.fromkeys(each for each in found if not each.startswith("127.") and each != "::1"))


def _connect(contact: Contact, deadline: Deadline) -> socket.socket:
    """A connection to whoever listens at the contact; OSError when nobody does."""
    is_same_host = contact.hostname == socket.gethostname()
    error = OSError("no address to try")
    for address in (*contact.addresses, *([_LOOPBACK] if is_same_host else [])):
        try:
            visitor = socket.create_connection((address, contact.port), timeout=_left(deadline))
        except OSError as reason:
            error = reason
            continue
        visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return visitor
    raise error


def _receive(visitor: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = visitor.recv(count - len(data))
        if not piece:
            raise OSError("the other end has left")
        data += piece
    return data


def _left(deadline: Deadline) -> float:
    """The seconds that are left; OSError when there are none."""
    if deadline.passed:
        raise OSError("it took too long")
    return deadline.remaining_s
