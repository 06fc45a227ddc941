"""The process that writes: it is given memory and says what became of it. It loads no torch and runs nobody's code.

It ends when its parent does, and then removes the files that it was writing. Those that it has reported as written it
leaves: they may be part of a published checkpoint.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time

from holdfast._engine.write import ImageFiles
from holdfast._io.memory import attach
from holdfast._staging.process import Abandon, Done, Failed, Moved, Write, decode_order, receive, send
from holdfast.errors import StorageError

_TELL_EVERY_S = 0.2


class _Stopped(Exception):
    """The parent wants no more of this."""


class _Server:
    """Does what the parent orders, one thing after the other."""

    def __init__(self, connection: socket.socket, memory: memoryview) -> None:
        self._connection = connection
        self._memory = memory
        self._files: ImageFiles | None = None
        self._is_reported = False
        self._lock = threading.Lock()
        self._told_at = 0.0

    def run(self) -> None:
        """Serve until the parent closes the connection."""
        try:
            while True:
                order = decode_order(receive(self._connection))
                if isinstance(order, Write):
                    self._write(order)
                else:
                    self._let_go(is_abandoned=isinstance(order, Abandon))
                    send(self._connection, Done([]))
        except (EOFError, ConnectionError):
            self._let_go(is_abandoned=not self._is_reported)

    def _write(self, order: Write) -> None:
        self._let_go(is_abandoned=False)
        if order.umask is not None:
            os.umask(order.umask)
        self._files, self._is_reported = ImageFiles(check=self._check), False
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
        with self._lock:
            if select.select([self._connection], [], [], 0)[0]:
                raise _Stopped
            now = time.monotonic()
            if now - self._told_at >= _TELL_EVERY_S and self._files is not None:
                self._told_at = now
                send(self._connection, Moved(self._files.bytes_written))

    def _let_go(self, *, is_abandoned: bool) -> None:
        files, self._files = self._files, None
        if files is not None and is_abandoned:
            files.abandon()
        elif files is not None:
            files.close()


def _sendable(text: str) -> str:
    """``text``, with what is no Unicode (in names of files) escaped."""
    return text.encode(errors="backslashreplace").decode()


def serve(connection_number: int, memory_number: int, size: int) -> None:
    """Serve the parent that holds the other end of the socket."""
    memory, start = attach(memory_number, size)
    with socket.socket(fileno=connection_number) as connection:
        _Server(connection, memoryview(memory)[start : start + size]).run()
