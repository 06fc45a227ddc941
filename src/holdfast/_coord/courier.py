"""The thread of one operation that sends: messages in order, a sign of life every second in between.

Invariant: a sign of life never waits for more than one piece of a message. The thread is a daemon that is told to end
and, where the carrier of the messages does not answer, left behind; whoever posts a message never blocks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection

import msgspec

from holdfast._coord.channel import Channel, Client, reason_of
from holdfast._coord.wire import Kind, Message, cut
from holdfast._values.deadline import Clock, Sign

_TICK_S = 0.1
_sign_encoder = msgspec.msgpack.Encoder()
_sign_decoder = msgspec.msgpack.Decoder(Sign)


def read_sign(payload: bytes) -> Sign:
    """The sign of life in the payload of a beat."""
    return _sign_decoder.decode(payload)


class Courier:
    """Sends for one operation from its own thread.

    Args:
        channel: whose inboxes to push into.
        operation: the number that all messages carry.
        audience: the ranks that get our signs of life; we ourselves are always one, for the echo.
        beat_s: seconds between two of them.
        sign: makes the sign from (beat, pieces moved).
        tick: called at least ten times a second and after every nudge, to decide what has to be decided.
    """

    def __init__(
        self,
        channel: Channel,
        operation: int,
        *,
        audience: Collection[int],
        beat_s: float,
        sign: Callable[[int, int], Sign],
        tick: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._channel = channel
        self._operation = operation
        self._audience = sorted({*audience, channel.rank})
        self._beat_s = beat_s
        self._sign = sign
        self._tick = tick
        self._clock = clock
        self._outbox: deque[tuple[int, Message]] = deque()
        self._wake = threading.Event()
        self._announced = threading.Event()
        self._ending = False
        self._serial = self._beat = self._moved = 0
        self._next_beat = clock()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="holdfast-courier", daemon=True)

    def start(self) -> None:
        """Begin to send and to show life."""
        self._thread.start()

    def post(self, to: Collection[int], kind: Kind, *, step: int = 0, phase: str = "", payload: bytes = b"") -> None:
        """Have a message sent to each of the ranks ``to``, after all that was posted before."""
        with self._lock:
            message = self._message(kind, step=step, phase=phase, payload=payload)
            self._outbox.extend((rank, message) for rank in to)
        self._wake.set()

    def nudge(self) -> None:
        """Have a tick now."""
        self._wake.set()

    def announce(self) -> None:
        """Have a sign of life sent now: when this returns it is on its way, unless a long message holds it up."""
        self._announced.clear()
        self._next_beat = self._clock()
        self._wake.set()
        self._announced.wait(_TICK_S)

    def end(self, timeout_s: float) -> None:
        """Send what is left, say farewell and end; after ``timeout_s`` the thread is left behind."""
        self._ending = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _message(self, kind: Kind, *, step: int = 0, phase: str = "", payload: bytes = b"") -> Message:
        self._serial += 1
        return Message(
            operation=self._operation,
            sender=self._channel.rank,
            serial=self._serial,
            kind=kind,
            step=step,
            phase=phase,
            payload=payload,
        )

    def _run(self) -> None:
        try:
            client = self._channel.take_client()
            self._work(client)
            others = [rank for rank in self._audience if rank != self._channel.rank]
            self.post(others, Kind.LEFT)
            self.post([self._channel.rank], Kind.STOP)
            self._send_all(client)
            self._channel.give_back(client)
        except Exception as error:  # nobody else would hear of it
            if not self._ending:
                self._channel.broken(reason_of(error))

    def _work(self, client: Client) -> None:
        while True:
            ending = self._ending
            self._wake.clear()
            self._tick()
            self._send_all(client)
            if ending:
                return
            self._beat_when_due(client)
            self._wake.wait(min(_TICK_S, self._beat_s / 4))

    def _send_all(self, client: Client) -> None:
        while self._outbox:
            rank, message = self._outbox.popleft()
            for piece in cut(message):
                client.queue_push(self._channel.inbox(rank), piece)
                self._moved += 1
                self._beat_when_due(client)

    def _beat_when_due(self, client: Client) -> None:
        now = self._clock()
        if now < self._next_beat or self._ending:
            return
        self._next_beat = now + self._beat_s
        self._beat += 1
        with self._lock:
            payload = _sign_encoder.encode(self._sign(self._beat, self._moved))
            beat = self._message(Kind.BEAT, payload=payload)
        for rank in self._audience:
            for piece in cut(beat):
                client.queue_push(self._channel.inbox(rank), piece)
        self._announced.set()
