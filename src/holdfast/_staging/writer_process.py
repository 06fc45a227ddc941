"""The process that writes: it is given memory and says what became of it. It loads no torch and runs nobody's code.

What it and its parent say to each other: length-prefixed messages over a socket. Only numbers, names and digests
travel; the bytes lie in memory that both have.

It ends when its parent does, and then removes the files that it was writing. Those that it has reported as written it
leaves: they may be part of a published checkpoint.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable

import msgspec

from holdfast._engine.images import FileImage, ImageFiles, WrittenImage
from holdfast._io.mapping import attach
from holdfast._values.deadline import Progress
from holdfast.errors import StorageError

_LENGTH_BYTES = 8
_TELL_EVERY_S = 0.2


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
decode_order: Callable[[bytes], Order] = msgspec.msgpack.Decoder(Order).decode
decode_answer: Callable[[bytes], Answer] = msgspec.msgpack.Decoder(Answer).decode


def send(connection: socket.socket, message: Order | Answer) -> None:
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


class _Stopped(Exception):
    """The parent wants no more of this."""


class _Server:
    """Does what the parent orders, one thing after the other."""

    def __init__(self, connection: socket.socket, memory: memoryview) -> None:
        self._connection = connection
        self._memory = memory
        self._files: ImageFiles | None = None
        self._is_reported = False
        self._progress = Progress()
        self._told_at = 0.0

    def run(self) -> None:
        try:
            while True:
                order = decode_order(receive(self._connection))
                if isinstance(order, Write):
                    self._write(order)
                else:
                    self._end(is_abandoned=isinstance(order, Abandon))
                    send(self._connection, Done([]))
        except (EOFError, ConnectionError):
            self._end(is_abandoned=not self._is_reported)

    def _write(self, order: Write) -> None:
        self._end(is_abandoned=False)
        if order.umask is not None:
            os.umask(order.umask)
        self._progress = Progress(self._check)
        self._files, self._is_reported = ImageFiles(self._progress), False
        try:
            written = self._files.write(order.files, self._memory)
        except _Stopped:
            return  # the order that stopped it is read next
        except StorageError as error:
            path = None if error.path is None else os.fsencode(error.path)
            send(self._connection, Failed(_sendable(error.message), error.errno, path))
        except Exception as error:
            said = f"the process that writes failed: {type(error).__name__}: {error}"
            send(self._connection, Failed(_sendable(said)))
        else:
            self._is_reported = True
            send(self._connection, Done(written))

    def _check(self) -> None:
        """Tell the parent how far it is, now and then; raise if the parent has something else to say, or is gone."""
        if select.select([self._connection], [], [], 0)[0]:
            raise _Stopped
        now = time.monotonic()
        if now - self._told_at >= _TELL_EVERY_S:
            self._told_at = now
            send(self._connection, Moved(self._progress.done))

    def _end(self, *, is_abandoned: bool) -> None:
        files, self._files = self._files, None
        if files is not None:
            (files.abandon if is_abandoned else files.close)()


def _sendable(text: str) -> str:
    """``text``, with what is no Unicode (in names of files) escaped."""
    return text.encode(errors="backslashreplace").decode()


def serve(connection_number: int, memory_number: int, size: int) -> None:
    """Serve the parent that holds the other end of the socket."""
    memory, start = attach(memory_number, size)
    with socket.socket(fileno=connection_number) as connection:
        _Server(connection, memoryview(memory)[start : start + size]).run()
