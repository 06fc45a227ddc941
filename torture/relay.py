"""An HTTP server on loopback that gives every request to a function, which may pass it on and answers what it likes.

Bodies are taken in whole before they go on: servers differ in what they keep of half a body, and half of one must not
come from us by chance. One request is one connection to the server behind. Whatever breaks there, the client's breaks
too.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, responses
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.1"
_ACCEPT_S = 0.02
_OF_THE_CONNECTION = frozenset({"connection", "content-length", "keep-alive", "transfer-encoding"})


@dataclass(frozen=True, slots=True)
class Call:
    """A request that has arrived whole."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client is sent; where it is cut, the connection ends in the middle of it."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    is_cut: bool = False

    def encoded(self, method: str) -> bytes:
        """All of it, or the part that is left, as it goes over the connection."""
        headers = [each for each in self.headers if each[0].lower() not in _OF_THE_CONNECTION]
        lengths = [value for name, value in self.headers if name.lower() == "content-length"]
        if self.status not in (204, 304):
            # The length in the reply to a HEAD is the object's.
            headers.append(("Content-Length", lengths[0] if method == "HEAD" and lengths else str(len(self.body))))
        lines = [f"HTTP/1.1 {self.status} {responses.get(self.status, '')}", *[f"{n}: {v}" for n, v in headers]]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        body = b"" if method == "HEAD" else self.body
        if self.is_cut:
            return head + body[: len(body) // 2] if body else head[: len(head) // 2]
        return head + body


Answer = Callable[[Call], Reply | None]  # None: the connection ends without a reply


class Relay:
    """The listening end. ``answer`` runs in a thread per connection; what breaks in it ends that connection."""

    def __init__(self, answer: Answer, port: int) -> None:
        self.answer = answer
        self.place = f"{HOST}:{port}"
        self.errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._is_closed = False

    def passed_on(self, call: Call, place: str) -> Reply:
        """What the server at ``place`` answers."""
        connection = HTTPConnection(place)
        with contextlib.closing(connection):
            connection.connect()
            with self.watching(connection.sock):
                connection.putrequest(call.method, call.target, skip_host=True, skip_accept_encoding=True)
                for name, value in call.headers:
                    if name.lower() not in _OF_THE_CONNECTION:
                        connection.putheader(name, value)
                if call.body or call.method in ("PUT", "POST"):
                    connection.putheader("Content-Length", str(len(call.body)))
                connection.putheader("Connection", "close")
                connection.endheaders()
                # A server that refuses a body does not wait for all of it.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.send(call.body)
                with connection.getresponse() as reply:
                    return Reply(reply.status, reply.getheaders(), reply.read())

    @contextlib.contextmanager
    def watching(self, each: socket.socket) -> Iterator[None]:
        """Whoever waits for this socket does so until we close, at most."""
        with self._lock:
            if self._is_closed:
                raise ConnectionAbortedError("the relay is closed")
            self._sockets.add(each)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(each)

    def close(self) -> None:
        """End every connection."""
        with self._lock:
            self._is_closed = True
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def relaying(answer: Answer) -> Iterator[Relay]:
    """A relay on a free port; at the end its connections are closed and its threads have ended."""
    with _Listener((HOST, 0), _Connection) as listener:
        relay = listener.relay = Relay(answer, listener.server_address[1])
        accepting = threading.Thread(target=listener.serve_forever, args=[_ACCEPT_S], name="relay")
        accepting.start()
        try:
            yield relay
        finally:
            listener.shutdown()
            accepting.join()
            relay.close()
    if relay.errors:
        raise RuntimeError("a request was not relayed") from relay.errors[0]


class _Listener(ThreadingHTTPServer):
    daemon_threads = False  # so that closing waits for them
    request_queue_size = 128
    relay: Relay

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # what matters is kept already


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def handle(self) -> None:
        relay = self.server.relay
        try:
            with relay.watching(self.connection):
                super().handle()
        except (OSError, HTTPException):
            pass  # the client is gone, or the server, or we are closing
        except BaseException as error:
            relay.errors.append(error)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _relay(self) -> None:
        reply = self.server.relay.answer(Call(self.command, self.path, self.headers.items(), self._body()))
        self.close_connection |= reply is None or reply.is_cut
        if reply is not None:
            self.wfile.write(reply.encoded(self.command))

    do_DELETE = do_GET = do_HEAD = do_POST = do_PUT = _relay

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
            return self._exactly(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self._line().split(b";")[0], 16):
            pieces.append(self._exactly(size))
            self._line()
        while self._line().strip():
            pass  # trailers
        return b"".join(pieces)

    def _line(self) -> bytes:
        line = self.rfile.readline()
        return line if line.endswith(b"\n") else self._ended()

    def _exactly(self, nbytes: int) -> bytes:
        body = self.rfile.read(nbytes)
        return body if len(body) == nbytes else self._ended()

    def _ended(self) -> bytes:
        raise ConnectionResetError("the client ended within a body")
