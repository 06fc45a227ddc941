"""The connection between the ranks of one group: an inbox for each, on a TCPStore of our own.

Invariant: what is pushed into an inbox is popped once and kept nowhere else, so the store's memory is bounded by what
is under way; messages of an operation that is over are dropped, those of one that is still to come are kept for it.

A TCPStore client blocks without end when its server is stopped, so only threads that may be left behind touch one: the
receiver here, and each operation's courier. The receiver lives while an operation is open. The process group of the
training job is never used.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed

from holdfast._coord.wire import Assembler, Kind, Message

_JOIN_S = 1.0


def reason_of(error: Exception) -> str:
    """Why a connection broke, on one line."""
    return str(error).partition("\n")[0] or type(error).__name__


class Client(Protocol):
    """A connection to the store, for one thread at a time. A pop waits for as long as it takes."""

    def queue_push(self, key: str, value: bytes) -> None:
        """Put ``value`` at the end of a queue; does not wait for an answer."""
        ...

    def queue_pop(self, key: str) -> bytes:
        """The first value of a queue, which is then gone from it."""
        ...

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """The value of ``key``, after it was set to the desired one if it was the expected one, or "" and missing."""
        ...

    def add(self, key: str, amount: int) -> int:
        """The number at ``key``, after ``amount`` was added to it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """One open operation: where its messages go, and who is told when the connection breaks."""

    deliver: Callable[[Message], None]
    broken: Callable[[str], None]


class Mailbox:
    """Sorts messages by operation, whatever order operations open and close in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._open: dict[int, Listener | None] = {}
        self._kept: dict[int, list[Message]] = {}
        self._assembler = Assembler()

    def number(self) -> int:
        """The number of a new operation."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._open[number] = None
            return number

    def open(self, number: int, listener: Listener) -> None:
        """Let ``listener`` have the messages of an operation, those that came early first."""
        with self._lock:
            self._open[number] = listener
            for message in self._kept.pop(number, []):
                listener.deliver(message)

    def close(self, number: int) -> bool:
        """End an operation; True when no other is listening."""
        with self._lock:
            self._open.pop(number, None)
            self._kept.pop(number, None)
            self._assembler.forget(number)
            return not any(self._open.values())

    @property
    def listeners(self) -> list[Listener]:
        """Those of the operations that are open now."""
        with self._lock:
            return [listener for listener in self._open.values() if listener is not None]

    def take(self, data: bytes) -> None:
        """Put a piece, and the message that it completes, where they belong."""
        with self._lock:
            message = self._assembler.add(data)
            if message is None or message.kind is Kind.STOP:
                return
            number = message.operation
            listener = self._open.get(number)
            if listener is not None:
                listener.deliver(message)
            elif number in self._open or number >= self._next:
                self._kept.setdefault(number, []).append(message)


class Channel:
    """One rank's end of the connection between the ranks of a group.

    ``rank`` counts within the group, ``names`` are the ranks' numbers in the whole job, ``carrier`` is the rank whose
    process runs the store. When ``clients`` are used up or broken, ``dial`` makes new ones, after a look whether anyone
    listens if its argument is True; it blocks while the carrier is stopped, and raises OSError or RuntimeError when it
    is gone. ``dial_witness`` connects to a second store, at the last rank, and raises in the same way.
    ``kept`` is what this rank keeps from one operation to the next, by the rank that coordinates.
    """

    carrier = 0

    def __init__(
        self,
        *,
        rank: int,
        names: Sequence[int],
        dial: Callable[[bool], Client],
        dial_witness: Callable[[], Client] | None = None,
        clients: Sequence[Client] = (),
        servers: Sequence[object] = (),
    ) -> None:
        self.rank = rank
        self.names = tuple(names)
        self._dial = dial
        self._dial_witness = dial_witness
        self._servers = servers  # the stores of this rank live as long as the channel
        self._lock = threading.Lock()
        self._mailbox = Mailbox()
        self._receiver: _Receiver | None = None
        self._ended: _Receiver | None = None
        self._idle = list(clients)
        self._is_suspect = False
        self.kept: dict[int, dict[object, Any]] = {}

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.names)

    def number_operation(self) -> int:
        """The number of a new operation, the same on every rank as long as all of them make the same calls."""
        return self._mailbox.number()

    def open(self, number: int, listener: Listener) -> None:
        """Let ``listener`` have the messages of operation ``number``, from other threads, until it is closed."""
        self._mailbox.open(number, listener)
        with self._lock:
            if self._receiver is None or not self._receiver.thread.is_alive():
                self._receiver = _Receiver(self, self._mailbox)

    def close(self, number: int) -> None:
        """End operation ``number``; with the last one the receiver ends, at the next message into this rank's inbox."""
        with self._lock:
            if self._mailbox.close(number) and self._receiver is not None:
                self._receiver.stopping = True
                self._ended, self._receiver = self._receiver, None

    def join(self) -> None:
        """Wait for a receiver that was told to end; where the carrier does not answer, it is left behind."""
        with self._lock:
            ended, self._ended = self._ended, None
        if ended is not None:
            ended.thread.join(_JOIN_S)

    def take_client(self) -> Client:
        """A connection for the calling thread alone."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        client = self._dial(self._is_suspect)
        self._is_suspect = False
        return client

    def visit(self, rank: int) -> Client:
        """A connection to the store that ``rank`` runs, the carrier or the last one; blocks while that is stopped.

        OSError or RuntimeError where it is gone.
        """
        if rank == self.carrier:
            return self._dial(True)
        if self._dial_witness is None:
            raise ConnectionError(f"rank {self.names[rank]} runs no store")
        return self._dial_witness()

    def give_back(self, client: Client) -> None:
        """Keep a connection that works for the next operation."""
        with self._lock:
            self._idle.append(client)

    @staticmethod
    def inbox(rank: int) -> str:
        """The name of the queue that holds what is sent to ``rank``."""
        return f"inbox/{rank}"

    def broken(self, reason: str) -> None:
        """Tell every open operation that the connection is gone, and forget the connections."""
        with self._lock:
            self._idle.clear()
            self._is_suspect = True
        for listener in self._mailbox.listeners:
            listener.broken(reason)


class _Receiver:
    """The thread that empties this rank's inbox; one per channel, while operations are open."""

    def __init__(self, channel: Channel, mailbox: Mailbox) -> None:
        self._channel = channel
        self._mailbox = mailbox
        self.stopping = False
        self.thread = threading.Thread(target=self._run, name="holdfast-receiver", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        channel = self._channel
        try:
            client = channel.take_client()
            while not self.stopping:
                with contextlib.suppress(torch.distributed.QueueEmptyError):
                    self._mailbox.take(client.queue_pop(channel.inbox(channel.rank)))
            channel.give_back(client)
        except Exception as error:  # nobody else would hear of it
            if not self.stopping:
                channel.broken(reason_of(error))
