"""How the ranks of a process group find each other: one connection per group, made once and kept with the group.

The first rank of the group starts a TCPStore and tells its address through the group's own store, or, where the group
has none, by one broadcast; so does the last, whose store is the witness for those who lose the first. After that the
process group is not used again.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Sequence
from functools import partial

import msgspec
import torch.distributed
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import ProcessGroup, distributed_c10d

from holdfast._coord.channel import Channel, reason_of
from holdfast.errors import RankLostError

_LOOPBACK = "127.0.0.1"
_CONNECT_S = 10.0
_LOOK_S = 2.0
_CLIENTS = 2  # one to send, one to receive
_NEVER = datetime.timedelta(days=30)

_channels: weakref.WeakKeyDictionary[ProcessGroup, Channel] = weakref.WeakKeyDictionary()
_meetings: weakref.WeakKeyDictionary[ProcessGroup, threading.Lock] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where the store of a channel listens; ``token`` tells it from whatever else answers there."""

    hostname: str
    candidates: list[str]
    port: int
    token: str


def connect(process_group: ProcessGroup | None = None, *, deadline_s: float = 120.0) -> Channel:
    """The channel between the ranks of ``process_group``, or of the default one.

    All ranks of the group call it together the first time; afterwards it costs nothing.
    """
    group = process_group or distributed_c10d._get_default_group()
    if not isinstance(group, ProcessGroup):
        raise ValueError("this process is not one of the ranks of the process group")
    with _lock:
        meeting = _meetings.setdefault(group, threading.Lock())
    with meeting:  # of this group alone: ranks may meet in different groups in different orders
        channel = _channels.get(group)
        if channel is None:
            channel = _channels[group] = _meet(group, deadline_s)
        return channel


def _meet(group: ProcessGroup, deadline_s: float) -> Channel:
    names = torch.distributed.get_process_group_ranks(group)
    rank = group.rank()
    served = {host: serve(names[host]) for host in hosts_of(len(names)) if host == rank}
    addresses = [
        _tell_address(group, served[host][1] if host == rank else None, names[host], deadline_s)
        for host in hosts_of(len(names))
    ]
    servers = [server for server, _ in served.values()]
    return join(addresses, rank=rank, names=names, servers=servers, deadline_s=deadline_s)


def hosts_of(size: int) -> list[int]:
    """The ranks that run a store: the carrier and, where it may leave several survivors, the witness."""
    return [Channel.carrier, size - 1] if size > 2 else [Channel.carrier]


def join(
    addresses: Sequence[Address], *, rank: int, names: Sequence[int], servers: Sequence[TCPStore], deadline_s: float
) -> Channel:
    """The end of ``rank`` of the channel whose stores are at ``addresses``; ``servers`` are those of this rank."""
    address, *witness = addresses
    host, clients = _reach(address, names[Channel.carrier], deadline_s)
    return Channel(
        rank=rank,
        names=names,
        dial=partial(dial, host, address.port),
        dial_witness=partial(_dial_witness, *witness) if witness else None,
        clients=clients,
        servers=servers,
    )


def _dial_witness(address: Address) -> TCPStore:
    _, client = _find(address, [], is_suspect=True)
    return client


def dial(host: str, port: int, is_suspect: bool = False) -> TCPStore:
    """A new connection to a store, on which a wait never ends by itself."""
    if is_suspect:
        # A TCPStore tries for long, and noisily, where nobody listens.
        with socket.create_connection((host, port), timeout=_LOOK_S):
            pass
    client = TCPStore(host, port, None, False, datetime.timedelta(seconds=_CONNECT_S), wait_for_workers=False)
    client.set_timeout(_NEVER)
    return client


def serve(name: int) -> tuple[TCPStore, Address]:
    """A new store, run by this process, which is rank ``name`` of the job, and where it listens."""
    server = TCPStore(_LOOPBACK, 0, None, True, wait_for_workers=False)
    token = secrets.token_hex(16)
    server.set(token, "")
    hostname = socket.gethostname()
    candidates = [hostname]
    # By this address the others of the job have reached its first rank already.
    if name == 0 and "MASTER_ADDR" in os.environ:
        candidates.insert(0, os.environ["MASTER_ADDR"])
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
        candidates.extend(str(entry[4][0]) for entry in found)
    return server, Address(hostname=hostname, candidates=list(dict.fromkeys(candidates)), port=server.port, token=token)


def _reach(address: Address, name: int, deadline_s: float) -> tuple[str, list[TCPStore]]:
    """The first host of ``address`` where the right store answers, and all connections to it that operations need.

    They are made ahead, because a TCPStore looks up names while it connects, which can take seconds. Loopback comes
    first where the host names are the same.
    """
    reasons: list[str] = []
    found: list[tuple[str, list[TCPStore]]] = []

    def try_all() -> None:
        with contextlib.suppress(OSError, RuntimeError):
            host, client = _find(address, reasons)
            found.append((host, [client, *(dial(host, address.port) for _ in range(_CLIENTS - 1))]))

    # A store that is stopped would hold its visitors for ever.
    thread = threading.Thread(target=try_all, name="holdfast-connect", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if not found:
        raise _unreachable(name, "; ".join(reasons) or f"no answer within {deadline_s:g} s")
    return found[0]


def _find(address: Address, reasons: list[str], is_suspect: bool = False) -> tuple[str, TCPStore]:
    """The first host of ``address`` where the right store answers, and a connection; else OSError, with ``reasons``."""
    is_same_host = socket.gethostname() == address.hostname
    for host in [_LOOPBACK, *address.candidates] if is_same_host else address.candidates:
        try:
            client = dial(host, address.port, is_suspect)
            if client.check([address.token]):
                return host, client
            reasons.append(f"{host}: something else answers")
        except (RuntimeError, OSError) as error:
            reasons.append(f"{host}: {reason_of(error)}")
    raise ConnectionError("; ".join(reasons))


def _tell_address(group: ProcessGroup, address: Address | None, name: int, deadline_s: float) -> Address:
    """The address of the store that rank ``name`` runs, on every rank of the group; that one has it to begin with."""
    store = _store_of(group)
    if store is None:
        box = [None if address is None else msgspec.json.encode(address)]
        torch.distributed.broadcast_object_list(box, src=name, group=group)
        assert box[0] is not None
        return msgspec.json.decode(box[0], type=Address)
    key, readers = (f"holdfast/{group.group_name}/{what}-{name}" for what in ("address", "readers"))
    if address is not None:
        if group.size() > 1:
            store.set(key, msgspec.json.encode(address).decode())
        return address
    try:
        store.wait([key], datetime.timedelta(seconds=deadline_s))
        found = msgspec.json.decode(store.get(key), type=Address)
        if store.add(readers, 1) == group.size() - 1:
            # A later group of the same name may use the same store.
            for used in (key, readers):
                store.delete_key(used)
    except RuntimeError as error:
        raise _unreachable(name, f"it told no address within {deadline_s:g} s: {error}".partition("\n")[0]) from error
    return found


def _store_of(group: ProcessGroup) -> Store | None:
    """The store by which the group itself was made; None for groups made without one."""
    try:
        return distributed_c10d._get_process_group_store(group)
    except (AttributeError, KeyError, ValueError, RuntimeError):
        return None


def _unreachable(name: int, reason: str) -> RankLostError:
    return RankLostError(
        f"rank {name} cannot be reached ({reason}); see whether it runs and whether a firewall is in between",
        rank=name,
        phase="connecting",
    )
