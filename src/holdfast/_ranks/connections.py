"""Messages over plain TCP, cut into frames, and what the kernel says of who is still there.

Invariant: a message is handed out only when all its frames are there. Payloads are opaque; nothing here knows how they
are made. Pieces of different messages may come in between, so that a long one holds up no sign of life.

One thread for each channel does all of it, for as long as the channel lives: it sends, receives, takes in ranks that
connect, and lets the operations look at the time. A connection that ends is a process that ended. A host that answers
nothing is one that died: the kernel says so of an idle connection by keep-alive, and counts for us what it has sent in
vain on others. A process that is merely busy or stopped keeps its connections, because its kernel answers for it.

Invariant: whoever posts never waits, and the thread waits for nothing but sockets and time. Nothing here survives a
fork: a child that kept a socket would hide that its parent has died.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import queue
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from holdfast._process import forget_in_child, start_thread

if TYPE_CHECKING:
    from holdfast._ranks.channel import Channel

FRAME_BYTES = 4 << 20

TOKEN_BYTES = 32
HELLO = struct.Struct(f"<8s{TOKEN_BYTES}sI")
"""What a rank says when it connects: ``MAGIC``, the token of the one who listens, its own number."""
MAGIC = b"holdfst2"

_LENGTH = struct.Struct("<I")


def said_by(hello: bytes | bytearray, token: bytes) -> int:
    """The number in a hello; -1 where it is of somebody who does not know the token."""
    magic, known, number = HELLO.unpack(hello)
    return int(number) if magic == MAGIC and hmac.compare_digest(known, token) else -1


class Kind(enum.Enum):
    """What a message is about."""

    JOIN = "join"
    BEAT = "beat"
    PART = "part"
    WHOLE = "whole"
    FAILURE = "failure"
    VERDICT = "verdict"
    RECEIPT = "receipt"
    LEFT = "left"
    NOTICE = "notice"


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message between the coordinator and rank ``guest``, about that rank's own ``call``; or a frame of one.

    ``serial`` tells it from all others of its sender. A notice is about no call, but about the topic ``phase``.
    """

    guest: int
    call: int = -1
    serial: int
    kind: Kind
    step: int = 0
    phase: str = ""
    payload: bytes = b""
    frame: int = 0
    frames: int = 1


_decoder = msgspec.msgpack.Decoder(Message)


def cut(message: Message, most: int = FRAME_BYTES) -> Iterator[bytes]:
    """The frames of ``message``, each of at most ``most`` bytes of it and a small header."""
    payload = message.payload
    count = max(1, -(-len(payload) // most))
    for number in range(count):
        if count > 1:
            part = payload[number * most : (number + 1) * most]
            message = msgspec.structs.replace(message, payload=part, frame=number, frames=count)
        data = msgspec.msgpack.encode(message)
        yield _LENGTH.pack(len(data)) + data


class Assembler:
    """Makes messages of the bytes that one connection brings."""

    __slots__ = ("_received", "_unfinished")

    def __init__(self) -> None:
        self._received = bytearray()
        self._unfinished: dict[int, dict[int, bytes]] = {}

    def add(self, data: bytes) -> Iterator[Message]:
        """The messages that ``data`` completes."""
        self._received += data
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            with memoryview(self._received) as view:
                message = _decoder.decode(view[_LENGTH.size : end])
            del self._received[:end]
            if message.frames > 1:
                parts = self._unfinished.setdefault(message.serial, {})
                parts[message.frame] = message.payload
                if len(parts) < message.frames:
                    continue
                payload = b"".join(parts[number] for number in range(message.frames))
                del self._unfinished[message.serial]
                message = msgspec.structs.replace(message, payload=payload, frame=0, frames=1)
            yield message


Bell = queue.SimpleQueue[None]
"""Rung for a thread that waits. It is written in C: unlike a condition, an interrupt at any moment leaves it usable."""

_TICK_S = 0.1
_LOOK_S = 1.0
_HELLO_S = 10.0
_BURST = 8  # frames to one rank, then it is the turn of the others
_CHUNK = 1 << 20
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_IN_VAIN = 6  # times that data was sent again without an answer, or probes: about 13 s


@dataclass(slots=True, eq=False)
class _RankConnection:
    """The connection to a rank: what is to be sent, and bells that are rung once everything before them is."""

    rank: int
    socket: socket.socket
    outbox: deque[Iterator[bytes] | Bell] = field(default_factory=deque)
    sending: memoryview = field(default_factory=lambda: memoryview(b""))
    assembler: Assembler = field(default_factory=Assembler)
    is_waiting: bool = False  # for the kernel to take more

    def next_frame(self) -> memoryview | None:
        """The frame to send now, if any; bells on the way are rung."""
        while self.outbox:
            entry = self.outbox[0]
            if not isinstance(entry, queue.SimpleQueue):
                frame = next(entry, None)
                if frame is not None:
                    return memoryview(frame)
            else:
                entry.put(None)
            self.outbox.popleft()
        return None

    def ring_all(self) -> None:
        """Keep nobody waiting for what will not be sent."""
        for entry in self.outbox.copy():
            if isinstance(entry, queue.SimpleQueue):
                entry.put(None)
        self.outbox.clear()


class Connections:
    """The connections of one rank: the coordinator's to all others, or that of another rank to the coordinator.

    ``receiver`` gets the messages, and is told who comes and goes; it is not kept alive by this. The coordinator has a
    ``listener``, where ``size`` ranks connect that know the ``token``; it is closed with the rest.

    All of it happens in a thread of its own, but that others ``add`` and ``post``: these change dicts and queues by
    single steps of C, so that no lock is needed, which an interrupt or a fork could leave held.
    """

    def __init__(
        self, receiver: Channel, *, listener: socket.socket | None = None, token: bytes = b"", size: int = 0
    ) -> None:
        self._receiver = weakref.ref(receiver)
        self._token = token
        self._size = size
        self._peers: dict[int, _RankConnection] = {}
        self._callers: dict[socket.socket, float] = {}
        self._new: deque[_RankConnection] = deque()
        self._wanting: deque[_RankConnection] = deque()
        self._is_closing = False
        self._look_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._waker, woken = socket.socketpair()
        self._own = [self._waker, woken, *([listener] if listener is not None else [])]
        for each in self._own:
            each.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ, lambda events: woken.recv(_CHUNK))
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
        forget_in_child(self)
        self._thread = threading.Thread(target=self._run, name="holdfast-channel", daemon=True)
        start_thread(self._thread)

    def add(self, rank: int, connection: socket.socket) -> None:
        """Use a connection to ``rank`` from now on."""
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with contextlib.suppress(OSError):  # not TCP, in tests
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        peer = self._peers[rank] = _RankConnection(rank, connection)
        self._new.append(peer)
        self._wake()

    def has(self, rank: int) -> bool:
        return rank in self._peers

    def post(self, rank: int, entry: Iterator[bytes] | Bell, *, is_urgent: bool = False) -> None:
        """Have frames sent to ``rank``, or a bell rung once everything before it is on its way; nobody there is fine.

        What is urgent comes before long messages; for the thread of the channel alone.
        """
        peer = self._peers.get(rank)
        if peer is None:
            if isinstance(entry, queue.SimpleQueue):
                entry.put(None)
            return
        if is_urgent:
            peer.outbox.appendleft(entry)
        else:
            peer.outbox.append(entry)
        self._wanting.append(peer)
        self._wake()

    def close(self) -> None:
        """End the thread, and with it all connections."""
        self._is_closing = True
        self._wake()

    def forget_parent(self) -> None:
        """Close the child's copies; the selector's registrations are the parent's and stay."""
        self._is_closing = True
        for each in [*self._own, *self._callers, *(peer.socket for peer in list(self._peers.values()))]:
            each.close()
        self._selector.close()

    def _wake(self) -> None:
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(OSError):  # full of wakes already, or closed
                self._waker.send(b"\0")

    def _run(self) -> None:
        is_busy = True
        try:
            while not self._is_closing:
                for key, events in self._selector.select(_TICK_S if is_busy else None):
                    key.data(events)
                receiver = self._receiver()
                is_busy = receiver is not None and receiver.tick()
                del receiver  # or it would live for as long as nothing happens
                while self._wanting:
                    peer = self._wanting.popleft()
                    self._register_new()  # which it may be
                    self._send(peer)
                self._register_new()
                if is_busy:
                    self._look()
        finally:
            self._is_closing = True
            for peer in list(self._peers.values()):
                self._lose(peer)
            for each in (*self._own, *self._callers):
                each.close()
            self._selector.close()

    def _register_new(self) -> None:
        while self._new:
            peer = self._new.popleft()
            self._selector.register(peer.socket, selectors.EVENT_READ, partial(self._move, peer))

    def _move(self, peer: _RankConnection, events: int) -> None:
        if events & selectors.EVENT_READ:
            self._receive(peer)
        if events & selectors.EVENT_WRITE:
            self._send(peer)

    def _receive(self, peer: _RankConnection) -> None:
        try:
            data = peer.socket.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        receiver = self._receiver()
        if receiver is not None:
            for message in peer.assembler.add(data):
                receiver.deliver(message)
        if not data:
            self._lose(peer)

    def _send(self, peer: _RankConnection) -> None:
        if self._peers.get(peer.rank) is not peer:
            return
        is_waiting = True
        try:
            for _ in range(_BURST):
                if not peer.sending:
                    frame = peer.next_frame()
                    if frame is None:
                        is_waiting = False
                        break
                    peer.sending = frame
                peer.sending = peer.sending[peer.socket.send(peer.sending) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._lose(peer)
            return
        if is_waiting != peer.is_waiting:
            peer.is_waiting = is_waiting
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_waiting else 0)
            self._selector.modify(peer.socket, events, partial(self._move, peer))

    def _lose(self, peer: _RankConnection) -> None:
        self._close(peer.socket)
        if self._peers.get(peer.rank) is peer:
            del self._peers[peer.rank]
            receiver = self._receiver()
            if receiver is not None:
                receiver.disconnected(peer.rank)
        peer.ring_all()

    def _close(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()

    def _look(self) -> None:
        """Lose whoever's host has answered nothing for long."""
        now = time.monotonic()
        if now < self._look_at or not hasattr(socket, "TCP_INFO"):
            return
        self._look_at = now + _LOOK_S
        for peer in list(self._peers.values()):
            with contextlib.suppress(OSError):
                _, _, retransmits, probes = peer.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)
                if max(retransmits, probes) >= _IN_VAIN:
                    self._lose(peer)

    def _accept(self, listener: socket.socket, events: int) -> None:
        now = time.monotonic()
        for caller in [caller for caller, since in self._callers.items() if now - since > _HELLO_S]:
            del self._callers[caller]
            self._close(caller)
        with contextlib.suppress(OSError):
            caller, _ = listener.accept()
            caller.setblocking(False)
            self._callers[caller] = now
            self._selector.register(caller, selectors.EVENT_READ, partial(self._greet, caller, bytearray()))

    def _greet(self, caller: socket.socket, said: bytearray, events: int) -> None:
        """Take in a caller that says the right thing."""
        try:
            heard = caller.recv(HELLO.size - len(said))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            heard = b""
        said += heard
        if heard and len(said) < HELLO.size:
            return
        del self._callers[caller]
        rank = said_by(said, self._token) if heard else -1
        if not 0 <= rank < self._size:
            self._close(caller)
            return
        self._selector.unregister(caller)
        before = self._peers.get(rank)
        if before is not None:
            self._lose(before)
        with contextlib.suppress(OSError):  # gone again: it is noticed like any end
            caller.send(MAGIC)
        self.add(rank, caller)
        receiver = self._receiver()
        if receiver is not None:
            receiver.connected(rank)
