"""Which ranks of a job share a host, and how they get to share memory and pipes there.

Everyone tells the coordinator where it is; each learns who is with it. The first rank of a host, its leader, makes what
is to be shared and leaves it on the others' doorsteps without waiting for anybody; whether that worked is known to all
of them before anyone looks there. So no rank ever waits for something that will not come, and where sharing is
impossible everyone knows it.

Hosts of which there are enough are told of each other too: their leaders then pass blocks on between them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from holdfast._io import sharing
from holdfast._io.descriptor import Descriptor
from holdfast._io.mapping import HUGE_PAGE
from holdfast._io.sharing import Doorstep, Inbox, Outbox, SharedMemory
from holdfast._plan import job_reads

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
