"""What travels between the coordinator and the other ranks: messages, cut into pieces, framed for a stream.

Invariant: a message is handed out only when all its pieces are there. Payloads are opaque; nothing here knows how they
are made. Pieces of different messages may come in between, so that a long one holds up no sign of life.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator

import msgspec

PIECE = 4 << 20

HELLO = struct.Struct("<8s32sI")
"""What a rank says when it connects: ``MAGIC``, the token of the channel, its number; it is answered with ``MAGIC``."""
MAGIC = b"holdfst2"

_LENGTH = struct.Struct("<I")


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


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message between the coordinator and rank ``guest``, about that rank's own ``call``.

    ``serial`` tells it from all others of its sender.
    """

    guest: int
    call: int
    serial: int
    kind: Kind
    step: int = 0
    phase: str = ""
    payload: bytes = b""


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    message: Message
    number: int
    count: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Piece)


def cut(message: Message, piece: int = PIECE) -> Iterator[bytes]:
    """The pieces of ``message`` in their frames, each of at most ``piece`` bytes and a small header."""
    payload = message.payload
    count = max(1, -(-len(payload) // piece))
    for number in range(count):
        part = payload if count == 1 else payload[number * piece : (number + 1) * piece]
        data = _encoder.encode(_Piece(msgspec.structs.replace(message, payload=part), number, count))
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
                piece = _decoder.decode(view[_LENGTH.size : end])
            del self._received[:end]
            message = self._complete(piece)
            if message is not None:
                yield message

    def _complete(self, piece: _Piece) -> Message | None:
        message = piece.message
        if piece.count == 1:
            return message
        parts = self._unfinished.setdefault(message.serial, {})
        parts[piece.number] = message.payload
        if len(parts) < piece.count:
            return None
        del self._unfinished[message.serial]
        payload = b"".join(parts[number] for number in range(piece.count))
        return msgspec.structs.replace(message, payload=payload)
