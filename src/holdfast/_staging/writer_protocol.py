"""What a process and the process that writes for it say to each other: length-prefixed messages over a socket.

Only numbers, names and digests travel; the bytes lie in memory that both have.
"""

from __future__ import annotations

import socket

import msgspec

from holdfast._native.image_files import FileImage, WrittenImage

_LENGTH_BYTES = 8


class Write(msgspec.Struct, frozen=True, tag=True):
    """Write these files, with this umask where it is known, and keep them open."""

    files: list[FileImage]
    umask: int | None = None


class Close(msgspec.Struct, frozen=True, tag=True):
    """Close the files that were written."""


class Abandon(msgspec.Struct, frozen=True, tag=True):
    """Stop writing, if you are; close and remove the files."""


class Moved(msgspec.Struct, frozen=True, tag=True):
    """So many bytes are written by now."""

    nbytes: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """The files are written and durable; or, without any, closed or gone."""

    files: list[WrittenImage]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Writing failed; ``number`` is the system's for the reason, where it has one."""

    message: str
    number: int | None = None
    path: bytes | None = None


Order = Write | Close | Abandon
Answer = Moved | Done | Failed

_encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def send(connection: socket.socket, message: Order | Answer) -> None:
    """Send one message."""
    data = _encode(message)
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "little") + data)


def receive(connection: socket.socket) -> bytes:
    """The bytes of one message; EOFError when the other side is gone. The socket blocks."""
    length = int.from_bytes(_exactly(connection, _LENGTH_BYTES), "little")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        try:
            piece = connection.recv(min(count - len(data), 1 << 20))
        except ConnectionError as error:
            raise EOFError("the connection broke") from error
        if not piece:
            raise EOFError("the other side has closed the connection")
        data += piece
    return bytes(data)
