"""Which ranks of a job share a host, and how they get to share memory and pipes there.

Everyone tells the coordinator where it is; each learns who is with it. The first rank of a host, its leader, makes what
is to be shared and leaves it on the others' doorsteps without waiting for anybody; whether that worked is known to all
of them before anyone looks there. So no rank ever waits for something that will not come, and where sharing is
impossible everyone knows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from holdfast._io import sharing
from holdfast._io.sharing import Doorstep, Inbox, Outbox, SharedMemory

MESSAGE_BYTES = 16
# With more, the messages that can be under way to one of them might not fit into the smallest pipe there is.
MOST_MEMBERS = 32
_HANDOVER_S = 10.0
_PAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """Where a rank is; without an ``address`` it cannot share."""

    host: tuple[str, ...]
    address: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The ranks of one host that may share, by number in the group, and this one's ``place`` among them."""

    members: tuple[int, ...]
    addresses: tuple[str, ...]
    place: int

    @property
    def leads(self) -> bool:
        """Whether this rank makes what all share."""
        return self.place == 0


def seats(greetings: Sequence[Greeting]) -> list[Seat | None]:
    """For each rank, with whom it may share; None for one that is alone. Large hosts are split."""
    hosts: dict[tuple[str, ...], list[int]] = {}
    for rank, greeting in enumerate(greetings):
        if greeting.address is not None:
            hosts.setdefault(greeting.host, []).append(rank)
    found: list[Seat | None] = [None] * len(greetings)
    for ranks in hosts.values():
        for start in range(0, len(ranks), MOST_MEMBERS):
            members = tuple(ranks[start : start + MOST_MEMBERS])
            addresses = tuple(greetings[rank].address or "" for rank in members)
            for place, rank in enumerate(members if len(members) > 1 else ()):
                found[rank] = Seat(members=members, addresses=addresses, place=place)
    return found


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What lies where in the shared memory: sections of these sizes, each starting on a page, then the slots."""

    sections: tuple[int, ...]
    slots: int
    slot_bytes: int

    def section(self, number: int) -> tuple[int, int]:
        """Start and end of a section."""
        start = sum(-(-size // _PAGE) * _PAGE for size in self.sections[:number])
        return start, start + self.sections[number]

    def slot(self, number: int) -> tuple[int, int]:
        """Start and end of a slot."""
        start = sum(-(-size // _PAGE) * _PAGE for size in self.sections) + number * self.slot_bytes
        return start, start + self.slot_bytes

    @property
    def size(self) -> int:
        """All of it."""
        return max(_PAGE, self.slot(self.slots)[0])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Link:
    """One rank's end of what the ranks of a host share."""

    seat: Seat
    layout: Layout
    memory: SharedMemory
    inbox: Inbox
    outboxes: tuple[Outbox, ...]

    def section(self, number: int) -> memoryview:
        """The memory of a section."""
        start, stop = self.layout.section(number)
        return self.memory.view[start:stop]

    def close(self) -> None:
        """Give back what the system counts; the others keep theirs."""
        self.memory.close()
        self.inbox.close()
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
    pipes: list[tuple[int, int]] = []
    try:
        fill(memory)
        pipes = sharing.make_pipes(len(seat.members))
        message = msgspec.json.encode(layout)
        writers = [writer for _, writer in pipes]
        for place, address in enumerate(seat.addresses):
            if place != seat.place:
                sharing.leave_at(address, message, [memory.descriptor, pipes[place][0], *writers], _HANDOVER_S)
    except BaseException:
        memory.close()
        sharing.close_all([end for pipe in pipes for end in pipe])
        raise
    sharing.close_all([reader for place, (reader, _) in enumerate(pipes) if place != seat.place])
    return _link(seat, layout, memory, pipes[seat.place][0], writers)


def _join(seat: Seat, message: bytes, descriptors: list[int]) -> Link:
    try:
        layout = msgspec.json.decode(message, type=Layout)
        if len(descriptors) != 2 + len(seat.members):
            raise OSError("what was left is not what the ranks of a host share")
        memory = SharedMemory.attach(descriptors.pop(0), layout.size)
    except BaseException:
        sharing.close_all(descriptors)
        raise
    return _link(seat, layout, memory, descriptors[0], descriptors[1:])


def _link(seat: Seat, layout: Layout, memory: SharedMemory, inbox: int, outboxes: list[int]) -> Link:
    return Link(
        seat=seat,
        layout=layout,
        memory=memory,
        inbox=Inbox(inbox, MESSAGE_BYTES),
        outboxes=tuple(Outbox(descriptor) for descriptor in outboxes),
    )
