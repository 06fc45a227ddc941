"""Who takes part in a save or load, and how the ranks of a process group find each other.

The coordinator listens and tells its address through the group's own store, or, where the group has none, by one
broadcast. The others connect to it. After that the process group is not used again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch.distributed
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup, distributed_c10d

from holdfast._io.sharing import host_identity
from holdfast._process import reset_in_child
from holdfast._ranks.channel import Channel
from holdfast._ranks.connections import HELLO, MAGIC
from holdfast._ranks.ranks import Ranks, SoloRanks
from holdfast._torch_codec.pickles import decode_message, encode_message
from holdfast._values.deadline import Deadline, Patience
from holdfast._values.digest import digest
from holdfast.errors import CheckpointError, RankLostError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LOOPBACK = "127.0.0.1"
_CONNECT_S = 10.0
_LOOK_S = 0.05
_BACKLOG = 4096
_LONGEST_S = 86400.0

_channels: weakref.WeakKeyDictionary[ProcessGroup, dict[int, Channel]] = weakref.WeakKeyDictionary()
_meetings: weakref.WeakKeyDictionary[ProcessGroup, threading.Lock] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@reset_in_child
def _forget() -> None:
    global _channels, _meetings, _lock
    _channels, _meetings = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()
    _lock = threading.Lock()


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where the coordinator of a channel listens; whoever knows the ``token`` is taken in."""

    hostname: str
    candidates: list[str]
    port: int
    token: bytes


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
    names = torch.distributed.get_process_group_ranks(group)
    rank, name = group.rank(), names[coordinator]
    store = _store_of(group)
    key = f"holdfast/{group.group_name}/address-{name}"
    if rank != coordinator:
        find = partial(_find, store, key, name) if store is not None else partial(_told, _broadcast(group, name, None))
        return Channel(rank=rank, names=names, coordinator=coordinator, dial=caller(find, rank=rank, name=name))
    listener, address = serve(name)
    forget = None
    if store is None:
        _broadcast(group, name, address)
    elif group.size() > 1:
        store.set(key, msgspec.json.encode(address).decode())
        forget = partial(_forget_key, store, key)  # a later group of the same name may use the same store
    return Channel(
        rank=rank, names=names, coordinator=coordinator, listener=listener, token=address.token, when_met=forget
    )


def serve(name: int) -> tuple[socket.socket, Address]:
    """Where rank ``name`` of the job, which is this process, listens."""
    listener = _listen()
    hostname = socket.gethostname()
    candidates = [hostname]
    # By this address the others of the job have reached its first rank already.
    if name == 0 and "MASTER_ADDR" in os.environ:
        candidates.insert(0, os.environ["MASTER_ADDR"])
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
        candidates.extend(str(entry[4][0]) for entry in found)
    port, token = listener.getsockname()[1], secrets.token_bytes(32)
    return listener, Address(hostname=hostname, candidates=list(dict.fromkeys(candidates)), port=port, token=token)


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", 0), backlog=_BACKLOG)


def caller(find: Callable[[float], Address], *, rank: int, name: int) -> Callable[[float], socket.socket]:
    """What connects ``rank`` to the coordinator, which is rank ``name`` of the job, within so many seconds.

    ``find`` tells its address, of which it takes the first that works; RankLostError where there is none.
    """
    known: list[Address] = []

    def call(deadline_s: float) -> socket.socket:
        patience, deadline = Deadline(_CONNECT_S, time.monotonic), Deadline(deadline_s, time.monotonic)
        while True:
            address = known[0] if known else find(deadline.remaining_s)
            try:
                connection = _dial(address, rank, deadline)
                known[:] = [address]
                return connection
            except OSError as error:
                if known or patience.passed or deadline.passed:
                    raise _unreachable(name, str(error)) from error
            time.sleep(_LOOK_S)  # an interrupted coordinator may have told another address by now

    return call


def _dial(address: Address, rank: int, deadline: Deadline) -> socket.socket:
    """A connection to the first host of ``address`` where the right one answers; else OSError, with all reasons."""
    is_same_host = socket.gethostname() == address.hostname
    reasons: list[str] = []
    for host in [_LOOPBACK, *address.candidates] if is_same_host else address.candidates:
        try:
            connection = socket.create_connection((host, address.port), timeout=_CONNECT_S)
            # Whoever listens there may be busy for long.
            connection.settimeout(min(_LONGEST_S, max(_LOOK_S, deadline.remaining_s)))
            connection.sendall(HELLO.pack(MAGIC, address.token, rank))
            if connection.recv(len(MAGIC), socket.MSG_WAITALL) == MAGIC:
                return connection
            connection.close()
            reasons.append(f"{host}: something else answers")
        except OSError as error:
            reasons.append(f"{host}: {error}")
    raise ConnectionError("; ".join(reasons))


def _find(store: Store, key: str, name: int, deadline_s: float) -> Address:
    """The address that rank ``name`` has told through the store of the group."""
    deadline, pause_s = Deadline(deadline_s, time.monotonic), 0.001
    try:
        while not store.check([key]):  # a wait for it could not be interrupted
            if deadline.passed:
                raise _unreachable(name, f"it told no address within {deadline_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.25)
        return msgspec.json.decode(store.get(key), type=Address)
    except RuntimeError as error:
        raise _unreachable(name, str(error).partition("\n")[0]) from error


def _told(address: Address, deadline_s: float) -> Address:
    return address


def _broadcast(group: ProcessGroup, name: int, address: Address | None) -> Address:
    """The address of rank ``name``, on every rank of a group without a store; that one has it to begin with."""
    box = [None if address is None else msgspec.json.encode(address)]
    torch.distributed.broadcast_object_list(box, src=name, group=group)
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


def _unreachable(name: int, reason: str) -> RankLostError:
    phase = "meeting the coordinator"
    return RankLostError(
        f"rank {name} cannot be reached in {phase!r} ({reason}); see whether it runs and whether a firewall is between",
        rank=name,
        phase=phase,
    )


_inherited: list[object] = []  # the default group of the process that this one was forked from

DEADLINE_S = 120.0
"""Seconds without progress after which a rank that others wait for is given up."""


def mesh_rank() -> int:
    """The number that meshes have for this process."""
    is_there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if is_there else 0


def host_name() -> int:
    """A number that processes have in common when they are on one host."""
    return digest("\0".join(host_identity()).encode())


@reset_in_child
def _forget_parent() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _inherited[:] = [torch.distributed.group.WORLD]


def participants(
    process_group: ProcessGroup | None,
    *,
    no_dist: bool,
    call: str,
    place: object = None,
    coordinator_rank: int = 0,
    deadline_s: float = DEADLINE_S,
) -> Ranks:
    """The ranks of one operation, which meet where ``call`` and ``place``, the path if that is one, are the same.

    ``deadline_s`` may be infinite; ValueError unless it is positive.
    """
    if not deadline_s > 0:
        raise ValueError(f"deadline_s is a positive number of seconds, or math.inf for no deadline, not {deadline_s}")
    if no_dist or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return SoloRanks()
    if torch.distributed.get_world_size(process_group) == 1:
        return SoloRanks()
    if torch.distributed.group.WORLD in _inherited:
        raise CheckpointError(
            f"this process was forked from rank {mesh_rank()} and is no rank itself; pass no_dist=True to save or load "
            "in it alone"
        )
    # Only now: without a job of several ranks there is nothing to import it for.
    from holdfast._ranks.channel_ranks import ChannelRanks

    pass

    return ChannelRanks(
        connect(process_group, coordinator=coordinator_rank),
        key=f"{call} {_shown(place)}",
        encode=encode_message,
        decode=decode_message,
        patience=Patience.within(deadline_s),
    )


def _shown(place: object) -> str:
    try:
        return repr(os.fspath(place)) if isinstance(place, (str, bytes, os.PathLike)) else "None"
    except Exception:  # of a path of the caller's own making; the operation itself will say so
        return "None"
