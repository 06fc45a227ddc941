"""The server of the viewer: HTTP on the loopback interface, for one browser that knows the token.

Any web page may send requests to a loopback server, and by DNS rebinding under a name of its own: so the Host must be
a loopback name with the right port, and each request needs the token, from a cookie that other sites do not make the
browser send. What is served is a fixed list of names and of questions. Requests, connections and tasks are bounded.
"""

from __future__ import annotations

import gzip
import hmac
import logging
import secrets
import threading
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files as package_files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from holdfast._view.answers import Query, encoded, status_of
from holdfast._view.questions import Viewer
from holdfast.errors import CheckpointError, first_line

__all__ = ["ViewServer", "assets"]

logger = logging.getLogger("holdfast")

_MOST_LINE_BYTES = 8192
_MOST_CONNECTIONS = 48
_SOCKET_S = 60.0
_WORTH_PACKING = 4096
_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "txt": "text/plain; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def assets() -> dict[str, bytes]:
    """The files of the pages, by name."""
    found = package_files("holdfast._view").joinpath("assets").iterdir()
    return {each.name: each.read_bytes() for each in found if each.name.rpartition(".")[2] in _TYPES}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    status: int
    data: bytes = b""
    type: str = "application/json"
    cookie: str = ""


class ViewServer(ThreadingHTTPServer):
    """Serves ``viewer`` on the ``port`` of the loopback interface; 0 is any free one. OSError if that is in use."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, viewer: Viewer, *, port: int = 0) -> None:
        self.viewer = viewer
        self.token = secrets.token_urlsafe(24)
        self._once = [secrets.token_urlsafe(24)]
        self.assets = assets()
        self._room = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__(("127.0.0.1", port), _Handler)
        self.port: int = self.server_address[1]
        self.hosts = [f"{name}:{self.port}" for name in ("127.0.0.1", "localhost", "[::1]")]

    @property
    def url(self) -> str:
        """Where the pages are, for who has this text alone."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    @property
    def url_for_once(self) -> str:
        """The same, and it leads there only once: for a command line, which other users of the machine may see."""
        return f"http://127.0.0.1:{self.port}/?token={self._once[0]}"

    def admits(self, given: str) -> bool:
        """Whether ``given``, from a URL, is the token, or the one that counts once, and is used up by this."""
        if _is_same(given, self.token):
            return True
        if any(_is_same(given, once) for once in self._once):
            self._once = []
            return True
        return False

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request from the browser ended early", exc_info=True)

    def server_close(self) -> None:
        """End: no port, no task, nothing that waits."""
        self.viewer.close()
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    """One connection of the browser."""

    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version = "holdfast"
    sys_version = ""
    timeout = _SOCKET_S

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: a terminal is for the one line that says where the pages are."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library has found wrong with a request, in our form."""
        self.request_version = self.protocol_version
        self._send(_refused(code, message or "bad request"), is_last=True)

    def handle_one_request(self) -> None:
        self.requestline, self.request_version, self.command = "", self.protocol_version, ""
        try:
            self.raw_requestline = self.rfile.readline(_MOST_LINE_BYTES + 1)
            if not self.raw_requestline:
                self.close_connection = True
            elif len(self.raw_requestline) > _MOST_LINE_BYTES:
                self._send(_refused(HTTPStatus.REQUEST_URI_TOO_LONG, "the request is too long"), is_last=True)
            elif self.parse_request():
                if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
                    self._send(_refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "requests have no body"), is_last=True)
                else:
                    self._send(self._reply(), is_last=False)
        except (TimeoutError, ConnectionError):
            self.close_connection = True

    def _reply(self) -> _Reply:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            return _refused(HTTPStatus.FORBIDDEN, "this server answers at 127.0.0.1 and localhost only")
        try:
            url = urlsplit(self.path)
            query = Query(parse_qs(url.query, keep_blank_values=True, errors="surrogatepass", max_num_fields=16))
        except ValueError as error:
            return _failed(ValueError(first_line(error)))
        cookie = ""
        is_start = url.path == "/" and self.command == "GET"
        if is_start and self.server.admits(query.text("token")):
            cookie = f"{self._cookie_name}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
        elif not self._has_cookie() or not (is_start or self._is_of_these_pages()):
            return _refused(HTTPStatus.FORBIDDEN, "open the URL that holdfast view has printed: it has a token")
        if self.command == "GET" and (url.path == "/" or url.path.startswith("/assets/")):
            return self._asset(url.path, cookie)
        return self._answer(url.path, query)

    @property
    def _cookie_name(self) -> str:
        return f"holdfast-{self.server.port}"

    def _is_of_these_pages(self) -> bool:
        """Whether no other page asks: one of another local server is of the same site, and the cookie comes along."""
        origin = f"http://{self.headers['Host']}"
        is_own = self.headers.get("Sec-Fetch-Site", "none") in ("same-origin", "none")
        return is_own and self.headers.get("Origin", origin) == origin

    def _has_cookie(self) -> bool:
        # Ports share cookies, and other servers of this machine may have set any.
        cookies = (each.strip().partition("=") for each in self.headers.get("Cookie", "").split(";"))
        return any(name == self._cookie_name and _is_same(text, self.server.token) for name, _, text in cookies)

    def _asset(self, path: str, cookie: str) -> _Reply:
        name = "index.html" if path == "/" else path.removeprefix("/assets/")
        data = self.server.assets.get(name)
        if data is None:
            return _refused(HTTPStatus.NOT_FOUND, "there is no such page")
        return _Reply(status=200, data=data, type=_TYPES[name.rpartition(".")[2]], cookie=cookie)

    def _answer(self, path: str, query: Query) -> _Reply:
        questions = self.server.viewer.questions
        question = questions.get((self.command, path))
        if question is None:
            is_known = any(path == other for _, other in questions) or path == "/" or path.startswith("/assets/")
            status = HTTPStatus.METHOD_NOT_ALLOWED if is_known else HTTPStatus.NOT_FOUND
            return _refused(status, "there is nothing to ask here in this way")
        try:
            answer = question(query)
            if answer is None:
                return _Reply(status=HTTPStatus.NO_CONTENT)
            if isinstance(answer, bytes):
                return _Reply(status=HTTPStatus.OK, data=answer, type="application/octet-stream")
            return _Reply(status=HTTPStatus.OK, data=encoded(answer))
        except Exception as error:  # whatever a checkpoint makes of us: the next question is answered all the same
            return _failed(error)

    def _send(self, reply: _Reply, *, is_last: bool) -> None:
        data = reply.data
        is_packed = len(data) >= _WORTH_PACKING and "gzip" in self.headers.get("Accept-Encoding", "")
        if is_packed:
            data = gzip.compress(data, compresslevel=1, mtime=0)
        self.send_response(reply.status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if reply.cookie:
            self.send_header("Set-Cookie", reply.cookie)
        if reply.status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", reply.type)
            self.send_header("Content-Length", str(len(data)))
        if is_packed:
            self.send_header("Content-Encoding", "gzip")
        if is_last:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _is_same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), token.encode())


def _refused(status: int, why: str) -> _Reply:
    return _Reply(status=status, data=f"{why}\n".encode(), type=_TYPES["txt"])


def _failed(error: Exception) -> _Reply:
    if not isinstance(error, (CheckpointError, ValueError)):
        logger.error("the viewer cannot answer: %s", first_line(error), exc_info=error)
    message = {"kind": type(error).__name__, "message": str(error)[:_MOST_LINE_BYTES]}
    return _Reply(status=status_of(error), data=encoded({"error": message}))
