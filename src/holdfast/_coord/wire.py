"""What travels between ranks: messages, cut into pieces that a TCPStore takes.

Invariant: a message is handed out only when all its pieces are there, in whatever order they came. Payloads are opaque;
nothing here knows how they are made.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import msgspec

PIECE = 4 << 20  # a TCPStore resets the connection at values over 8 MiB


class Kind(enum.Enum):
    """What a message is about."""

    BEAT = "beat"
    PART = "part"
    WHOLE = "whole"
    FAILURE = "failure"
    VERDICT = "verdict"
    RECEIPT = "receipt"
    LEFT = "left"
    STOP = "stop"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of ``sender`` about ``operation``; ``serial`` tells it from all others of that sender."""

    operation: int
    sender: int
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
    """The pieces of ``message``, each of at most ``piece`` bytes and a small header."""
    payload = message.payload
    count = max(1, -(-len(payload) // piece))
    for number in range(count):
        part = payload if count == 1 else payload[number * piece : (number + 1) * piece]
        yield _encoder.encode(_Piece(msgspec.structs.replace(message, payload=part), number, count))


class Assembler:
    """Puts pieces together again."""

    __slots__ = ("_unfinished",)

    def __init__(self) -> None:
        self._unfinished: dict[tuple[int, int, int], dict[int, bytes]] = {}

    def add(self, data: bytes) -> Message | None:
        """The message that the piece in ``data`` completes, or None while others are missing."""
        piece = _decoder.decode(data)
        message = piece.message
        if piece.count == 1:
            return message
        key = message.operation, message.sender, message.serial
        parts = self._unfinished.setdefault(key, {})
        parts[piece.number] = message.payload
        if len(parts) < piece.count:
            return None
        del self._unfinished[key]
        payload = b"".join(parts[number] for number in range(piece.count))
        return msgspec.structs.replace(message, payload=payload)

    def forget(self, operation: int) -> None:
        """Drop the pieces of ``operation``: the rest of them will not come, or nobody wants them."""
        self._unfinished = {key: parts for key, parts in self._unfinished.items() if key[0] != operation}
