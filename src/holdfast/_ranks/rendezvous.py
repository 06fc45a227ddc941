"""How ranks of a process group find each other, and which of them share a host.

The coordinator listens and tells its address through the group's own store, or, where the group has none, by one
broadcast. The others connect to it. After that the process group is not used again.

Where hosts pass blocks on to each other, the leader of each, its first rank, listens too, and tells where through the
channel. Of two leaders the later one connects and says the token of the other, which answers with the token of the one
who called: whoever knows neither is not of this job and is left standing. Nobody waits for a caller who has not called
already. Nothing here is pickled.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import torch.distributed
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup, distributed_c10d

from holdfast._plan import reads as shared_reads
from holdfast._process import forget_in_child, reset_in_child
from holdfast._ranks.channel import Channel
from holdfast._ranks.channel_ranks import ChannelRanks
from holdfast._ranks.connections import HELLO, MAGIC, TOKEN_BYTES, said_by
from holdfast._ranks.ranks import MEETING, ON_EVERY_RANK
from holdfast._values.deadline import NOTICE_S, Deadline, Patience
from holdfast.errors import CheckpointError, RankLostError, first_line

# With more ranks, the messages that can be under way to one of them might not fit into the smallest pipe there is.
MOST_MEMBERS = 32
# Each of so many hosts is connected with every other; more of them are split.
MOST_HOSTS = 64

_LOOPBACK = "127.0.0.1"
_CONNECT_S = 10.0
_LOOK_S = 0.05
_BACKLOG = 4096
_LONGEST_S = 86400.0
_ANSWER_S = 1.0  # what a caller, who has said all it had to say before, may take
_log = logging.getLogger("holdfast")

_channels: weakref.WeakKeyDictionary[ProcessGroup, dict[int, Channel]] = weakref.WeakKeyDictionary()
_meetings: weakref.WeakKeyDictionary[ProcessGroup, threading.Lock] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_inherited: list[object] = []  # the default group of the process that this one was forked from


@reset_in_child
def _forget_parent() -> None:
    global _channels, _meetings, _lock
    _channels, _meetings = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()
    _lock = threading.Lock()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _inherited[:] = [torch.distributed.group.WORLD]


def several(process_group: ProcessGroup | None, *, coordinator: int, key: str, patience: Patience) -> ChannelRanks:
    """The ranks of a group of several processes in the operation ``key``; CheckpointError in a child of one of them."""
    if torch.distributed.group.WORLD in _inherited:
        raise CheckpointError(
            f"this process was forked from rank {torch.distributed.get_rank()} and is no rank itself; pass "
            "no_dist=True to save or load in it alone"
        )
    return ChannelRanks(connect(process_group, coordinator=coordinator), key=key, patience=patience)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a process listens: its host by several names, best first; whoever knows the ``token`` is taken in.

    ``slot_bytes`` is of a leader: how large the slots of its host are.
    """

    hostname: str
    candidates: tuple[str, ...]
    port: int
    token: bytes = field(repr=False)
    slot_bytes: int = 0


def connect(process_group: ProcessGroup | None = None, *, coordinator: int = 0) -> Channel:
    """The channel between the ranks of ``process_group``, or of the default one, and its rank ``coordinator``.

    It does not wait: ranks connect to the coordinator when they first have something to say to it.
    """
    group = process_group or distributed_c10d._get_default_group()
    if not isinstance(group, ProcessGroup):
        raise ValueError("this process is not one of the ranks of the process group")
    if not 0 <= coordinator < group.size():
        raise ValueError(f"there is no rank {coordinator} in a group of {group.size()} ranks")
    with _lock:
        meeting = _meetings.setdefault(group, threading.Lock())
    with meeting:  # of this group alone: ranks may meet in different groups in different orders
        channels = _channels.setdefault(group, {})
        if coordinator not in channels:
            channels[coordinator] = _meet(group, coordinator)
        return channels[coordinator]


def _meet(group: ProcessGroup, coordinator: int) -> Channel:
    rank, job_ranks = group.rank(), torch.distributed.get_process_group_ranks(group)
    make = partial(Channel, rank=rank, job_ranks=job_ranks, coordinator=coordinator)
    job_rank = job_ranks[coordinator]
    store = _store_of(group)
    key = f"holdfast/{group.group_name}/address-{job_rank}"
    if rank != coordinator:
        if store is None:
            told = _broadcast(group, job_rank, None)
            return make(dial=caller(lambda limit_s: told, rank=rank, coordinator=job_rank))
        return make(dial=caller(partial(_find, store, key, job_rank), rank=rank, coordinator=job_rank))
    listener, address = serve(is_first=job_rank == 0)
    forget = None
    if store is None:
        _broadcast(group, job_rank, address)
    elif group.size() > 1:
        store.set(key, msgspec.json.encode(address).decode())
        forget = partial(_forget_key, store, key)  # a later group of the same name may use the same store
    return make(listener=listener, token=address.token, when_met=forget)


def serve(*, is_first: bool, backlog: int = _BACKLOG, slot_bytes: int = 0) -> tuple[socket.socket, Address]:
    """Where this process listens, and how others find it; ``is_first`` says that it is rank 0 of the job."""
    listener = None
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    listener = listener or socket.create_server(("", 0), backlog=backlog)
    hostname, master, found = socket.gethostname(), os.environ.get("MASTER_ADDR"), []
    with contextlib.suppress(OSError):
        if master is not None:
            family, _, _, _, meeting_point = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(meeting_point)  # sends nothing, and chooses an address of ours
                found.append(str(probe.getsockname()[0]))
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)]
    # By the first the others of the job have reached its first rank already.
    candidates = [master] if is_first and master is not None else []
    candidates += [hostname, *[each for each in found if not each.startswith("127.") and each != "::1"]]
    return listener, Address(
        hostname=hostname,
        candidates=tuple(dict.fromkeys(candidates)),
        port=listener.getsockname()[1],
        token=secrets.token_bytes(TOKEN_BYTES),
        slot_bytes=slot_bytes,
    )


def caller(find: Callable[[float], Address], *, rank: int, coordinator: int) -> Callable[[float], socket.socket]:
    """What connects ``rank`` to the coordinator, whose number in the job is given, within so many seconds.

    ``find`` tells its address; RankLostError where nobody answers there.
    """
    known: list[Address] = []

    def call(deadline_s: float) -> socket.socket:
        patience, deadline = Deadline(_CONNECT_S), Deadline(deadline_s)
        while True:
            address = known[0] if known else find(deadline.remaining_s)
            try:
                connection = _dial(address, rank, deadline)
                known[:] = [address]
                return connection
            except OSError as error:
                if known or patience.passed or deadline.passed:
                    raise _unreachable(coordinator, str(error)) from error
            time.sleep(_LOOK_S)  # an interrupted coordinator may have told another address by now

    return call


def _dial(address: Address, number: int, deadline: Deadline, *, is_answered: bool = True) -> socket.socket:
    """A connection to the first host of ``address`` where the right one answers; else OSError, with all reasons.

    Where that takes its time the answer is left to the caller: then it is the first where somebody listens.
    """
    is_same_host = socket.gethostname() == address.hostname
    reasons: list[str] = []
    for host in [_LOOPBACK, *address.candidates] if is_same_host else address.candidates:
        try:
            connection = socket.create_connection((host, address.port), min(_CONNECT_S, deadline.remaining_s))
        except OSError as error:
            reasons.append(f"{host}: {error}")
            continue
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(min(_LONGEST_S, deadline.remaining_s))  # whoever listens there may be busy for long
            connection.sendall(HELLO.pack(MAGIC, address.token, number))
            if not is_answered or _receive(connection, len(MAGIC)) == MAGIC:
                return connection
            reasons.append(f"{host}: another program answers")
        except OSError as error:
            reasons.append(f"{host}: {error}")
        connection.close()
    raise ConnectionError("; ".join(reasons))


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionError("the other end has closed the connection")
        data += piece
    return data


def _find(store: Store, key: str, job_rank: int, deadline_s: float, notice_s: float = NOTICE_S) -> Address:
    """The address that rank ``job_rank`` has told through the store of the group."""
    deadline, notice, pause_s = Deadline(deadline_s), Deadline(notice_s), 0.001
    try:
        while not store.check([key]):  # a wait for it could not be interrupted
            if deadline.passed:
                raise _unreachable(job_rank, f"it published no address within {deadline_s:g} s", call_it=True)
            if notice.passed:
                notice = deadline
                _log.warning("rank %d has not come after %g s; %s", job_rank, notice_s, ON_EVERY_RANK)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.25)
        return msgspec.json.decode(store.get(key), type=Address)
    except RuntimeError as error:
        raise _unreachable(job_rank, first_line(error)) from error


def _broadcast(group: ProcessGroup, job_rank: int, address: Address | None) -> Address:
    """The address of rank ``job_rank``, on every rank of a group without a store; that one has it to begin with."""
    box = [None if address is None else msgspec.json.encode(address)]
    torch.distributed.broadcast_object_list(box, src=job_rank, group=group)
    assert box[0] is not None
    return msgspec.json.decode(box[0], type=Address)


def _forget_key(store: Store, key: str) -> None:
    with contextlib.suppress(RuntimeError):  # the group's store is gone, and the key with it
        store.delete_key(key)


def _store_of(group: ProcessGroup) -> Store | None:
    """The store by which the group itself was made; None for groups made without one."""
    try:
        return distributed_c10d._get_process_group_store(group)
    except (AttributeError, KeyError, ValueError, RuntimeError):
        return None


def _unreachable(job_rank: int, reason: str, *, call_it: bool = False) -> RankLostError:
    advice = ON_EVERY_RANK if call_it else "check that it runs and that no firewall is in between"
    said = f"rank {job_rank} cannot be reached in {MEETING!r} ({reason}); {advice}"
    return RankLostError(said, rank=job_rank, phase=MEETING)


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
    is_shared = between_hosts and len(groups) >= shared_reads.LEAST_HOSTS
    parts = -(-len(groups) // MOST_HOSTS)  # of the hosts; those of one share
    bounds = [part * len(groups) // parts for part in range(parts + 1)] if is_shared else [0, len(groups)]
    found: list[Seat | None] = [None] * len(greetings)
    for start, stop in itertools.pairwise(bounds):
        leaders = tuple(members[0] for members in groups[start:stop]) if is_shared else ()
        for host, members in enumerate(groups[start:stop]):
            addresses = tuple(greetings[rank].address or "" for rank in members)
            for place, rank in enumerate(members if is_shared or len(members) > 1 else ()):
                mine = host if is_shared else 0
                found[rank] = Seat(members=members, addresses=addresses, place=place, hosts=leaders, host=mine)
    return found


class Reception:
    """One process's way to its connections: its ``contact`` is told, it ``call``s those before it, ``answer``s others.

    It is number ``own``; ``others`` has the numbers of those that it connects with. A leader's ``slot_bytes`` are told.
    """

    def __init__(self, own: int, others: Collection[int], slot_bytes: int = 0) -> None:
        self._own = own
        self._others = frozenset(others) - {own}
        self._sockets: dict[int, socket.socket] = {}
        self._contacts: Mapping[int, Address] = {}
        self._listener, self.contact = serve(is_first=False, backlog=2 * (len(self._others) + 1), slot_bytes=slot_bytes)
        forget_in_child(self)

    def call(self, contacts: Mapping[int, Address], limit_s: float) -> bool:
        """Whether all before this one could be connected to within ``limit_s``; they need not answer yet."""
        self._contacts = contacts
        deadline = Deadline(limit_s)
        with contextlib.suppress(OSError):
            for number in sorted(other for other in self._others if other < self._own):
                self._sockets[number] = _dial(contacts[number], self._own, deadline, is_answered=False)
            return True
        return False

    def answer(self, limit_s: float) -> bool:
        """Whether all after this one have called, and those that were called are who they should be."""
        deadline = Deadline(limit_s)
        called = tuple(self._sockets.values())
        with contextlib.suppress(OSError):  # a timeout is one too
            while len(self._sockets) < len(self._others):
                self._listener.settimeout(deadline.remaining_s)
                self._take_in(self._listener.accept()[0], deadline)
            for connection in called:
                connection.settimeout(deadline.remaining_s)
                if not hmac.compare_digest(_receive(connection, TOKEN_BYTES), self.contact.token):
                    return False
            return True
        return False

    def _take_in(self, visitor: socket.socket, deadline: Deadline) -> None:
        """Keep the connection of one that has the token, and answer it; close any other."""
        with contextlib.ExitStack() as stack:
            stack.callback(visitor.close)
            visitor.settimeout(min(_ANSWER_S, deadline.remaining_s))
            with contextlib.suppress(OSError):
                number = said_by(_receive(visitor, HELLO.size), self.contact.token)
                if self._own < number and number in self._others and number not in self._sockets:
                    visitor.sendall(self._contacts[number].token)
                    visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._sockets[number] = visitor
                    stack.pop_all()

    def take_sockets(self) -> dict[int, socket.socket]:
        """The connections by number, which are the caller's from now on and never wait."""
        sockets, self._sockets = self._sockets, {}
        for each in sockets.values():
            each.setblocking(False)
        return sockets

    def close(self) -> None:
        self._listener.close()
        sockets, self._sockets = self._sockets, {}
        for each in sockets.values():
            each.close()

    forget_parent = close
