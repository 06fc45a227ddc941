"""A proxy on loopback between clients and one object store, which spoils chosen requests and tells what it saw.

    with store_servers.moto() as server, spoiling.proxy(server) as proxy:
        through = proxy.server  # what a client needs to go through it, in this process or another one
        proxy.spoil("500 done", at=7)  # the seventh request from now
        proxy.spoil("no reply", always=True, where=lambda request: request.operation == "complete")
        ...
        assert [request.way for request in proxy.spoiled()] == ["500 done", "no reply", "no reply"]

A request counts when it has arrived whole. Nothing here imports obstore, so a process that has a proxy may start others
as it likes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

from tools.store_servers import StoreServer
from torture.relay import Call, Relay, Reply, relaying

Moment = Literal["before", "after"]
Where = Callable[["Request"], bool]

_RANGE = re.compile(r"bytes=(\d+)-(\d*)$")
_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as it came. ``status`` is the server's answer, ``told`` what was sent to the client whole."""

    number: int
    method: str
    path: str
    operation: str
    query: str
    condition: str  # as in "If-None-Match: *"
    range: str
    nbytes: int
    status: int | None = None
    told: int | None = None
    way: str = ""

    def is_tried_again_by(self, other: Request) -> bool:
        """Whether ``other`` is the same request, or asks for what is left of its bytes."""
        same = (self.method, self.path, self.query) == (other.method, other.path, other.query)
        (start, end), (other_start, other_end) = _bounds(self.range), _bounds(other.range)
        return same and start <= other_start and other_end <= end


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to spoil a request: what the server gets of it, and what the client gets of the reply, or instead of it."""

    says: str
    operations: frozenset[str] = frozenset()  # none: it fits every request
    arrives: Literal["whole", "nothing", "half", "flipped"] = "whole"
    reply: Literal["whole", "nothing", "cut", "half", "flipped"] = "whole"
    instead: tuple[int, str] | None = None  # a status and the code of an error, which may be empty
    held: Literal["never", "request", "reply"] = "never"

    def applies(self, request: Request) -> bool:
        """Whether it makes sense for the request."""
        return not self.operations or request.operation in self.operations


def _error(status: int, code: str, says: str, *operations: str) -> Way:
    """The server does nothing and answers this."""
    return Way(says=says, operations=frozenset(operations), arrives="nothing", instead=(status, code))


_UP, _DOWN = frozenset({"put", "part"}), frozenset({"get"})

WAYS: Mapping[str, Way] = {
    "not arrived": Way(says="The connection ends before the server has it.", arrives="nothing", reply="nothing"),
    "no reply": Way(says="The server did it, and the connection ends without a reply.", reply="nothing"),
    "cut reply": Way(says="The server did it, and the connection ends in the middle of the reply.", reply="cut"),
    "stall": Way(says="The server did it, and the reply comes only when we let it.", held="reply"),
    "late": Way(says="The server gets it only when we let it, even if the client is gone.", held="request"),
    "500 done": Way(says="The server did it, and the client is told it failed.", instead=(500, "InternalError")),
    "500 not done": _error(500, "InternalError", "The server failed."),
    "503 not done": _error(503, "SlowDown", "The server wants fewer requests."),
    "403": _error(403, "AccessDenied", "The client may not do that."),
    "expired token": _error(400, "ExpiredToken", "The client might have, until a moment ago."),
    "409 not done": _error(
        409, "ConditionalRequestConflict", "A put met another one, and neither is there.", "put", "complete"
    ),
    "404 though there": _error(404, "NoSuchKey", "A read that does not see the object yet.", "get", "head"),
    "200 not done": _error(200, "", "The server says that it keeps the bytes, and does not.", "put", "part"),
    "200 with an error": _error(
        200, "InternalError", "An upload in parts fails after its status was sent, as on S3.", "complete"
    ),
    "half body up": Way(
        says="The server gets the first half of the bytes, with a length that fits.", operations=_UP, arrives="half"
    ),
    "flipped bit up": Way(says="One bit changes on its way up.", operations=_UP, arrives="flipped"),
    "half body down": Way(
        says="The client gets the first half of the bytes, with a length that fits.", operations=_DOWN, reply="half"
    ),
    "flipped bit down": Way(says="One bit changes on its way down.", operations=_DOWN, reply="flipped"),
}
"""All of them by name. Bytes can be changed on their way up to S3 with unsigned payloads; Azure signs their length."""


@dataclass(slots=True, kw_only=True)
class _Plan:
    """What is to happen to the request number ``at`` of those that fit, and with ``always`` to its later tries."""

    name: str
    way: Way = Way(says="Nothing is done to it.")
    at: int
    always: bool = False
    where: Where
    action: Callable[[], object] | None = None
    moment: Moment = "before"
    count: int = 0
    hit: Request | None = None

    def takes(self, request: Request) -> bool:
        if self.hit is not None:
            return self.always and self.hit.is_tried_again_by(request)
        if self.way.applies(request) and self.where(request):
            self.count += 1
            self.hit = request if self.count == self.at else None
        return self.hit is not None


@dataclass(slots=True)
class _Period:
    """From one reset to the next: the requests that came, what is planned, and whether what was held may go on."""

    requests: list[Request] = field(default_factory=list)
    plans: list[_Plan] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    held: int = 0


def _every(request: Request) -> bool:
    return True


_NO_PLAN = _Plan(name="", at=0, where=_every)


class Proxy:
    """Counts the requests to a server and spoils those that it was told to. Any thread may call it."""

    endpoint: str
    server: StoreServer  # the same one for a client that goes through us

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._period = _Period()

    def requests(self) -> list[Request]:
        """All requests since the last reset, as they arrived."""
        with self._changed:
            return list(self._period.requests)

    def spoiled(self) -> list[Request]:
        """Those of them that something was done to."""
        return [request for request in self.requests() if request.way]

    def reset(self) -> None:
        """Nothing is spoiled any more, what is held goes on, and the count begins again."""
        with self._changed:
            self._period.released.set()
            self._period = _Period()

    def spoil(self, way: str, *, at: int = 1, always: bool = False, where: Where = _every) -> None:
        """Spoil request ``at`` from now, of those that the way applies to and ``where`` is true of.

        With ``always`` all later tries of this request are spoiled too, whoever makes them.
        """
        self._add(_Plan(name=way, way=WAYS[way], at=at, always=always, where=where))

    def kill_at(self, pid: int, *, at: int = 1, moment: Moment = "after", where: Where = _every) -> None:
        """Kill a process before the server has request ``at``, which never arrives, or before its reply goes on."""
        way, name = WAYS["not arrived" if moment == "before" else "no reply"], f"killed {moment}"

        def kill() -> None:
            os.kill(pid, signal.SIGKILL)

        self._add(_Plan(name=name, way=way, at=at, where=where, action=kill, moment=moment))

    def call_at(
        self, action: Callable[[], object], *, at: int = 1, moment: Moment = "before", where: Where = _every
    ) -> None:
        """Call ``action`` in a thread of ours before the server has request ``at``, or before its reply goes on."""
        self._add(_Plan(name=f"called {moment}", at=at, where=where, action=action, moment=moment))

    def wait_held(self, count: int = 1) -> None:
        """Return when ``count`` requests are held."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._period.held >= count, _WAIT_S):
                raise TimeoutError(f"{self._period.held} of {count} requests are held")

    def release(self) -> None:
        """Let go on what is held, and return when the server has answered it. Nothing is held from now on."""
        with self._changed:
            period = self._period
            period.released.set()
            if not self._changed.wait_for(lambda: not period.held, _WAIT_S):
                raise TimeoutError("what was held did not go on")

    def _add(self, plan: _Plan) -> None:
        with self._changed:
            self._period.plans.append(plan)

    def _arrived(self, request: Request) -> tuple[_Period, Request, _Plan]:
        with self._changed:
            period = self._period
            request = replace(request, number=len(period.requests) + 1)
            # Each plan counts every request, also those that another one takes.
            plans = [plan for plan in period.plans if plan.takes(request)]
            plan = plans[0] if plans else _NO_PLAN
            request = replace(request, way=plan.name)
            period.requests.append(request)
            return period, request, plan

    def _note(self, period: _Period, request: Request) -> None:
        with self._changed:
            period.requests[request.number - 1] = request
            self._changed.notify_all()

    @contextlib.contextmanager
    def _holding(self, period: _Period, *, is_held: bool) -> Iterator[None]:
        """Wait until what is held may go on; until the block has ended it counts as held."""
        with self._changed:
            period.held += is_held
            self._changed.notify_all()
        try:
            if is_held:
                period.released.wait()
            yield
        finally:
            with self._changed:
                period.held -= is_held
                self._changed.notify_all()

    def _answer(self, relay: Relay, place: str, call: Call) -> Reply | None:
        """What the client is sent."""
        period, request, plan = self._arrived(_request(call))
        way, reply = plan.way, None
        _act(plan, "before", relay)
        if way.arrives != "nothing":
            sent = replace(call, body=_changed(call.body, way.arrives))
            with self._holding(period, is_held=way.held == "request"):
                reply = relay.passed_on(sent, place)
            if way.reply in ("half", "flipped") and (reply.status not in (200, 206) or not reply.body):
                request, way = replace(request, way=""), _NO_PLAN.way  # there was nothing to spoil
            request = replace(request, status=reply.status)
            self._note(period, request)
        _act(plan, "after", relay)
        with self._holding(period, is_held=way.held == "reply"):
            pass
        if way.instead:
            reply = _made_up(*way.instead)
        if reply is None or way.reply == "nothing":
            return None
        if way.reply == "cut":
            return replace(reply, is_cut=True)
        # Before it is sent: whoever has the reply finds it noted.
        self._note(period, replace(request, told=reply.status))
        return replace(reply, body=_changed(reply.body, way.reply))


@contextlib.contextmanager
def proxy(server: StoreServer) -> Iterator[Proxy]:
    """A proxy to the server; at the end its connections are closed and its threads have ended."""
    place, made = urlsplit(server.endpoint), Proxy()
    with relaying(lambda call: made._answer(relay, place.netloc, call)) as relay:
        made.endpoint = f"http://{relay.place}{place.path}"
        made.server = server.through(made.endpoint)
        try:
            yield made
        finally:
            relay.close()  # first, so that what is held goes nowhere
            made._period.released.set()


def _act(plan: _Plan, moment: Moment, relay: Relay) -> None:
    if plan.action is not None and plan.moment == moment:
        try:
            plan.action()
        except Exception as error:
            relay.errors.append(error)
            raise ConnectionAbortedError from error


def _changed(body: bytes, how: str) -> bytes:
    if how == "half":
        return body[: len(body) // 2]
    if how == "flipped" and body:
        changed = bytearray(body)
        changed[len(body) // 2] ^= 1
        return bytes(changed)
    return body


def _made_up(status: int, code: str) -> Reply:
    """An error as S3 words it, with its code where Azure has it; without a code what answers a put."""
    if not code:
        return Reply(status, [("ETag", f'"{"0" * 32}"')], b"")
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>Spoiled</Message></Error>'
    return Reply(status, [("Content-Type", "application/xml"), ("x-ms-error-code", code)], body.encode())


def _request(call: Call) -> Request:
    place = urlsplit(call.target)
    low = {name.lower(): value for name, value in call.headers}
    conditions = [f"{name}: {low[name.lower()]}" for name in ("If-None-Match", "If-Match") if name.lower() in low]
    return Request(
        number=0,
        method=call.method,
        path=unquote(place.path),
        operation=_operation(call.method, parse_qs(place.query, keep_blank_values=True)),
        query=place.query,
        condition="; ".join(conditions),
        range=low.get("range") or low.get("x-ms-range") or "",
        nbytes=len(call.body),
    )


def _operation(method: str, query: Mapping[str, list[str]]) -> str:
    """What a request is for: get, head, list, put, part, begin, complete, abort or delete, on S3 and Azure alike."""
    of_azure = {"block": "part", "blocklist": "complete", "list": "list", "batch": "delete"}
    names = {"list-type": "list", "delete": "delete", "uploads": "begin", "partNumber": "part"}
    for name, operation in names.items():
        if name in query:
            return operation
    if "uploadId" in query:
        return {"POST": "complete", "DELETE": "abort"}.get(method, "list")
    return of_azure.get(query.get("comp", [""])[0], method.lower())


def _bounds(asked: str) -> tuple[int, float]:
    found = _RANGE.match(asked)
    if found is None:
        return 0, float("inf")
    return int(found[1]), int(found[2]) if found[2] else float("inf")
