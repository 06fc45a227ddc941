"""Connections between the leaders of hosts: each with every other, made at the start of a load and closed with it.

Each leader listens, and tells where through the job's own channel, with a random token. Of two leaders the later one
connects and says the token of the other, which answers with the token of the one who called: whoever knows neither is
not of this job and is left standing. Nobody waits for a caller who has not called already. Nothing here is pickled.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field

from holdfast._values.deadline import Deadline
from holdfast._values.forks import forget_in_child

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
