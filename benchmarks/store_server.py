"""A loopback S3 server that costs next to nothing, so that what is measured against it is the client.

    with serving(keep=True) as server:
        store = from_url("s3://bucket/run", config=server.config, client_options=server.client_options)

It is a process of its own and ends with the ``with`` block or its parent. Bodies of more than 4 MiB are thrown away in
the kernel, and such an object cannot be read; with ``keep`` they are received into memory and sent from it. Nothing is
verified: no signature, no checksum. Every request is noted, so that a benchmark can count them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from html import escape, unescape
from http.client import HTTPConnection, responses
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote

from store_contents import Arena, Bucket, Piece, Refused, Request, StoredObject

SMALL = 4 << 20  # bodies of at most so many bytes are always kept
MOST_LISTED = 1000
_MOST_HEAD = 64 << 10
_START_S, _STOP_S, _ANSWER_S, _IDLE_S = 60.0, 5.0, 10.0, 600
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class StoreServer:
    """A server that runs: where it is, what it was asked, what it cost."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.endpoint = f"http://127.0.0.1:{port}"
        # obstore panics where allow_http stands among these.
        self.config = {
            "endpoint": self.endpoint,
            "access_key_id": "any",
            "secret_access_key": "any",
            "region": "us-east-1",
            "unsigned_payload": "true",
        }
        self.client_options = {"allow_http": True}

    def requests(self) -> list[Request]:
        """Every request since the last reset, in the order in which they were answered."""
        return [Request(*each) for each in self._ask("GET", "/_requests")]

    def counts(self) -> Counter[tuple[str, str]]:
        """How often each operation was asked for of each name since the last reset."""
        return Counter((request.operation, request.name) for request in self.requests())

    def cpu_s(self) -> float:
        """The processor seconds that the server's process has taken since it began."""
        return float(self._ask("GET", "/_cpu"))

    def reset(self, *, objects: bool = False) -> None:
        """Forget the requests, and with ``objects`` every object and upload too."""
        self._ask("POST", "/_clear" if objects else "/_reset")

    def _ask(self, method: str, path: str) -> Any:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_S)
        try:
            connection.request(method, path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


@contextmanager
def serving(*, keep: bool = False, reserve: int = 0) -> Iterator[StoreServer]:
    """A server that is gone when the block is left; so many bytes of memory are touched before it answers."""
    command = [sys.executable, "-E", "-S", __file__, "--reserve", str(reserve), *(["--keep"] if keep else [])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    too_late = threading.Timer(_START_S, process.kill)
    too_late.start()
    try:
        line = process.stdout.readline()
        too_late.cancel()
        if not line:
            raise SystemExit("the store server did not start")
        yield StoreServer(int(line))
    finally:
        too_late.cancel()
        process.stdin.close()  # it ends when it sees that
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_S)
        process.stdout.close()


class _Call(NamedTuple):
    """What was asked: the head of a request, taken apart."""

    method: str
    path: str
    query: dict[str, str]
    head: dict[str, str]


class _Reply(NamedTuple):
    """An answer; its body is made of views of memory. A ``length`` without views is said and not sent."""

    status: int = 200
    head: str = ""
    views: tuple[memoryview, ...] = ()
    length: int | None = None


def _xml(root: str, inner: str, status: int = 200) -> _Reply:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{root}>{inner}</{root}>'.encode()
    return _Reply(status, "Content-Type: application/xml\r\n", (memoryview(text),))


def _tags(name: str, text: str) -> list[str]:
    return [unescape(each) for each in re.findall(f"<{name}>(.*?)</{name}>", text, re.DOTALL)]


class _Connection:
    """One client's connection, served until it closes."""

    def __init__(self, connection: socket.socket, bucket: Bucket, arena: Arena, *, keep: bool) -> None:
        self._socket = connection
        self._bucket = bucket
        self._arena = arena
        self._keep = keep
        self._body = 0  # bytes of it that are still to come
        self._early = b""  # what came with the head

    def serve(self) -> None:
        """Answer one request after the other; a client that goes away ends it."""
        with self._socket:
            limit = struct.pack("ll", _IDLE_S, 0)  # not settimeout(), which makes every call two
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(ConnectionError, BlockingIOError):
                while (call := self._read_head()) is not None:
                    self._answer(call)

    def _answer(self, call: _Call) -> None:
        if call.path.startswith("/_"):
            self._send(self._control(call), is_head=False)
            return
        sent = self._body
        operation, serve = self._operation(call)
        try:
            reply = serve(call)
        except Refused as refusal:
            reply = _xml("Error", f"<Code>{refusal.code}</Code><Message>{refusal.code}</Message>", refusal.status)
        except Exception:
            traceback.print_exc()
            reply = _xml("Error", "<Code>InternalError</Code>", 500)
        self._discard()
        listed = call.query.get("prefix", "") if operation == "ListObjectsV2" else ""
        received = sum(map(len, reply.views))
        name = call.path[1:].rstrip("/") + (f"/{listed}" if listed else "")
        self._bucket.requests.append(Request(operation, name, reply.status, sent + received))
        self._send(reply, is_head=call.method == "HEAD")

    def _operation(self, call: _Call) -> tuple[str, Callable[[_Call], _Reply]]:
        """The name that S3 has for it, and who does it."""
        is_key = "/" in call.path[1:].rstrip("/")
        match call.method:
            case "GET" if not is_key:
                return "ListObjectsV2", self._list
            case "GET":
                return "GetObject", self._get
            case "HEAD":
                return ("HeadObject", self._head) if is_key else ("HeadBucket", lambda _: _Reply())
            case "PUT" if "uploadId" in call.query:
                return "UploadPart", self._put_part
            case "PUT" if "x-amz-copy-source" in call.head:
                return "CopyObject", self._copy
            case "PUT" if is_key:
                return "PutObject", self._put
            case "POST" if "uploads" in call.query:
                return "CreateMultipartUpload", self._create_upload
            case "POST" if "uploadId" in call.query:
                return "CompleteMultipartUpload", self._complete_upload
            case "POST" if "delete" in call.query:
                return "DeleteObjects", self._delete_many
            case "DELETE" if "uploadId" in call.query:
                return "AbortMultipartUpload", self._abort_upload
            case "DELETE" if is_key:
                return "DeleteObject", self._delete
        return call.method, self._refuse

    def _control(self, call: _Call) -> _Reply:
        answer: object = None
        match call.method, call.path:
            case "GET", "/_requests":
                answer = self._bucket.requests
            case "GET", "/_cpu":
                answer = time.process_time()
            case "POST", "/_reset":
                self._bucket.requests = []
            case "POST", "/_clear":
                self._bucket.clear()
        return _Reply(views=(memoryview(json.dumps(answer).encode()),))

    def _refuse(self, call: _Call) -> _Reply:
        raise Refused(501, "NotImplemented")

    def _put(self, call: _Call) -> _Reply:
        e_tag = self._bucket.put(call.path[1:], (self._receive(call),), call.head)
        return _Reply(head=f"ETag: {e_tag}\r\n")

    def _copy(self, call: _Call) -> _Reply:
        source = unquote(call.head["x-amz-copy-source"]).lstrip("/")
        e_tag = self._bucket.copy(source, call.path[1:], call.head)
        return _xml("CopyObjectResult", f"<ETag>{escape(e_tag)}</ETag><LastModified>{_iso(time.time())}</LastModified>")

    def _put_part(self, call: _Call) -> _Reply:
        piece = self._receive(call)
        e_tag = self._bucket.put_part(call.query["uploadId"], int(call.query["partNumber"]), piece)
        return _Reply(head=f"ETag: {e_tag}\r\n")

    def _create_upload(self, call: _Call) -> _Reply:
        upload = f"<UploadId>{self._bucket.create_upload()}</UploadId>"
        bucket, _, key = call.path[1:].partition("/")
        return _xml("InitiateMultipartUploadResult", f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>{upload}")

    def _complete_upload(self, call: _Call) -> _Reply:
        parts = _tags("Part", self._receive_text(call))
        wanted = [(int(_tags("PartNumber", part)[0]), _tags("ETag", part)[0]) for part in parts]
        e_tag = self._bucket.complete_upload(call.path[1:], call.query["uploadId"], wanted, call.head)
        return _xml("CompleteMultipartUploadResult", f"<ETag>{escape(e_tag)}</ETag>")

    def _abort_upload(self, call: _Call) -> _Reply:
        self._bucket.abort_upload(call.query["uploadId"])
        return _Reply(204)

    def _delete(self, call: _Call) -> _Reply:
        self._bucket.delete(call.path[1:])
        return _Reply(204)

    def _delete_many(self, call: _Call) -> _Reply:
        keys = _tags("Key", self._receive_text(call))
        for key in keys:
            self._bucket.delete(f"{call.path[1:].rstrip('/')}/{key}")
        return _xml("DeleteResult", "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys))

    def _list(self, call: _Call) -> _Reply:
        query, bucket = call.query, call.path[1:].rstrip("/") + "/"
        after = query.get("continuation-token") or query.get("start-after", "")
        most = min(MOST_LISTED, int(query.get("max-keys", MOST_LISTED)))
        names, folders, token = self._bucket.page(
            bucket + query.get("prefix", ""), bucket + after, query.get("delimiter", ""), most
        )
        spelled = quote if query.get("encoding-type") == "url" else escape
        found = [(name, self._bucket.find(name)) for name in names]
        inner = "".join(
            f"<Contents><Key>{spelled(name[len(bucket) :])}</Key><LastModified>{_iso(each.modified_s)}</LastModified>"
            f"<ETag>{escape(each.e_tag)}</ETag><Size>{each.size}</Size></Contents>"
            for name, each in found
        )
        inner += "".join(
            f"<CommonPrefixes><Prefix>{spelled(each[len(bucket) :])}</Prefix></CommonPrefixes>" for each in folders
        )
        if token:
            inner += f"<NextContinuationToken>{escape(token[len(bucket) :])}</NextContinuationToken>"
        cut = str(bool(token)).lower()
        return _xml("ListBucketResult", f"<IsTruncated>{cut}</IsTruncated><KeyCount>{len(names)}</KeyCount>{inner}")

    def _head(self, call: _Call) -> _Reply:
        found = self._bucket.find(call.path[1:])
        return _Reply(head=_about(found), length=found.size)

    def _get(self, call: _Call) -> _Reply:
        found = self._bucket.find(call.path[1:])
        if call.head.get("if-match", found.e_tag) != found.e_tag:
            raise Refused(412, "PreconditionFailed")
        if call.head.get("if-none-match") == found.e_tag:
            return _Reply(304, _about(found))
        asked = _RANGE.fullmatch(call.head.get("range", ""))
        if asked is None:
            return _Reply(200, _about(found), tuple(self._views(found, 0, found.size)))
        first, last = asked.groups()
        begin = int(first) if first else max(0, found.size - int(last))
        end = min(found.size, int(last) + 1) if first and last else found.size
        if begin >= end:
            raise Refused(416, "InvalidRange")
        where = f"Content-Range: bytes {begin}-{end - 1}/{found.size}\r\n"
        return _Reply(206, _about(found) + where, tuple(self._views(found, begin, end)))

    def _views(self, found: StoredObject, begin: int, end: int) -> Iterator[memoryview]:
        """The memory that holds these bytes of an object, piece by piece."""
        offset = 0
        for piece in found.pieces:
            at, stop = max(begin - offset, 0), min(end - offset, piece.length)
            offset += piece.length
            while at < stop:
                if piece.contents is not None:
                    view = memoryview(piece.contents)[at:stop]
                elif piece.place is not None:
                    view = self._arena.view[piece.place + at : piece.place + stop]
                else:
                    raise Refused(410, "ThrownAway")
                yield view
                at += len(view)

    def _read_head(self) -> _Call | None:
        """The next request, without more of its body than came with it; nothing when the client has closed."""
        raw = b""
        while (end := raw.find(b"\r\n\r\n")) < 0:
            got = self._socket.recv(4096)
            if not got or len(raw) > _MOST_HEAD:
                return None
            raw += got
        first, *lines = raw[:end].decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        head = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        path, _, query = target.partition("?")
        self._early = raw[end + 4 :]
        self._body = int(head.get("content-length", 0)) - len(self._early)
        if head.get("expect") == "100-continue":
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        return _Call(method, unquote(path), dict(parse_qsl(query, keep_blank_values=True)), head)

    def _receive(self, call: _Call) -> Piece:
        """The body, where it belongs."""
        if "aws-chunked" in call.head.get("content-encoding", "") or "transfer-encoding" in call.head:
            raise Refused(501, "NotImplemented")
        length = self._body + len(self._early)
        if length <= SMALL:
            contents = bytearray(length)
            self._fill(memoryview(contents))
            return Piece(length, bytes(contents))
        if not self._keep:
            self._discard()
            return Piece(length)
        place = self._arena.take(length)
        self._fill(self._arena.view[place : place + length])
        return Piece(length, place=place)

    def _receive_text(self, call: _Call) -> str:
        contents = self._receive(call).contents
        assert contents is not None
        return contents.decode()

    def _fill(self, view: memoryview) -> None:
        view[: len(self._early)] = self._early
        at, self._early = len(self._early), b""
        while at < len(view):
            at += self._got(self._socket.recv_into(view[at:], 0, socket.MSG_WAITALL))

    def _discard(self) -> None:
        """Take the rest of the body off the connection: the kernel frees it and copies nothing."""
        while self._body > 0:
            nowhere = self._arena.view[: self._body]  # not written to
            self._got(self._socket.recv_into(nowhere, 0, socket.MSG_TRUNC | socket.MSG_WAITALL))

    def _got(self, count: int) -> int:
        if count == 0:
            raise ConnectionError
        self._body -= count
        return count

    def _send(self, reply: _Reply, *, is_head: bool) -> None:
        length = sum(map(len, reply.views)) if reply.length is None else reply.length
        said = "" if reply.status in (204, 304) else f"Content-Length: {length}\r\n"
        text = f"HTTP/1.1 {reply.status} {responses[reply.status]}\r\n{reply.head}{said}\r\n"
        views = () if is_head else reply.views
        self._socket.sendall(text.encode(), socket.MSG_MORE if views else 0)
        for view in views:
            self._socket.sendall(view)


def _about(found: StoredObject) -> str:
    modified = formatdate(found.modified_s, usegmt=True)
    return f"ETag: {found.e_tag}\r\nLast-Modified: {modified}\r\nAccept-Ranges: bytes\r\n"


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


def _accept(listener: socket.socket, bucket: Bucket, arena: Arena, *, keep: bool) -> None:
    while True:
        connection, _ = listener.accept()
        served = _Connection(connection, bucket, arena, keep=keep)
        threading.Thread(target=served.serve, daemon=True).start()


def main() -> None:
    """Serve until standard input closes, which it does when whoever started this is gone; print the port first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep what is put, however large")
    parser.add_argument("--reserve", type=int, default=0, help="bytes of memory to touch before the first request")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; it ends with its parent
    arena = Arena(arguments.reserve)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    accepting = threading.Thread(
        target=_accept, args=(listener, Bucket(arena), arena), kwargs={"keep": arguments.keep}, daemon=True
    )
    accepting.start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
