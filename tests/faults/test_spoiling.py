"""The proxy that spoils requests to a store: what a client sees and what the store truly has is what each way says."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tools import store_servers
from torture import relay, spoiling

CLIENT = Path(__file__).with_name("store_client.py")
BODY = bytes(range(250)).decode("latin-1") * 4
HALF = len(BODY) // 2
FLIPPED = BODY[:HALF] + chr(ord(BODY[HALF]) ^ 1) + BODY[HALF + 1 :]
ABSENT, EXISTS, FAILED, DENIED = "FileNotFoundError", "AlreadyExistsError", "GenericError", "PermissionDeniedError"

# What a conditional create is told, and what is there then: of a way that comes once, and of one that comes always.
CREATES = {
    "not arrived": [("put", BODY), (FAILED, ABSENT)],
    "no reply": [(EXISTS, BODY), (FAILED, BODY)],
    "cut reply": [(EXISTS, BODY), (FAILED, BODY)],
    "500 done": [(EXISTS, BODY), (FAILED, BODY)],
    "500 not done": [("put", BODY), (FAILED, ABSENT)],
    "503 not done": [("put", BODY), (FAILED, ABSENT)],
    "409 not done": [(EXISTS, ABSENT), (EXISTS, ABSENT)],
    "403": [(DENIED, ABSENT), (DENIED, ABSENT)],
    "expired token": [(FAILED, ABSENT), (FAILED, ABSENT)],
    "200 not done": [("put", ABSENT), ("put", ABSENT)],
    "half body up": [("put", BODY[:HALF]), ("put", BODY[:HALF])],
    "flipped bit up": [("put", FLIPPED), ("put", FLIPPED)],
}
# What a read is told, likewise.
READS = {
    "not arrived": [BODY, FAILED],
    "no reply": [BODY, FAILED],
    "cut reply": [BODY, FAILED],
    "500 done": [BODY, FAILED],
    "500 not done": [BODY, FAILED],
    "503 not done": [BODY, FAILED],
    "403": [DENIED, DENIED],
    "expired token": [FAILED, FAILED],
    "404 though there": [ABSENT, ABSENT],
    "half body down": [BODY[:HALF], BODY[:HALF]],
    "flipped bit down": [FLIPPED, FLIPPED],
}
ELSEWHERE = {"200 with an error", "stall", "late"}  # tests of their own


class Client:
    """Obstore in a process of its own; with ``direct`` a call goes past the proxy."""

    def __init__(self, server: store_servers.StoreServer, proxy: spoiling.Proxy) -> None:
        stores = [
            {"url": each.url, "config": dict(each.config), "client_options": dict(each.client_options)}
            for each in (server, proxy.server)
        ]
        self.process = subprocess.Popen(
            [sys.executable, str(CLIENT), json.dumps(stores)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, call: str, *arguments: object, direct: bool = False) -> None:
        assert self.process.stdin is not None
        print(json.dumps([call, not direct, arguments]), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def __call__(self, call: str, *arguments: object, direct: bool = False) -> Any:
        self.start(call, *arguments, direct=direct)
        return self.answer()

    def end(self) -> int:
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()
        return self.process.returncode


@contextlib.contextmanager
def clients_of(server: store_servers.StoreServer, proxy: spoiling.Proxy) -> Iterator[Client]:
    client = Client(server, proxy)
    try:
        yield client
    finally:
        client.process.kill()
        client.end()


def started(name: str) -> contextlib.AbstractContextManager[store_servers.StoreServer]:
    if importlib.util.find_spec("obstore") is None:
        pytest.skip("obstore is not installed")
    try:
        return store_servers.SERVERS[name]()
    except store_servers.NotInstalled as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def server() -> Iterator[store_servers.StoreServer]:
    with started("moto") as server:
        yield server


@pytest.fixture(scope="module")
def open_proxy(server: store_servers.StoreServer) -> Iterator[spoiling.Proxy]:
    with spoiling.proxy(server) as proxy:
        yield proxy


@pytest.fixture
def proxy(open_proxy: spoiling.Proxy) -> Iterator[spoiling.Proxy]:
    open_proxy.reset()
    yield open_proxy
    open_proxy.reset()


@pytest.fixture(scope="module")
def client(server: store_servers.StoreServer, open_proxy: spoiling.Proxy) -> Iterator[Client]:
    with clients_of(server, open_proxy) as client:
        yield client


@pytest.fixture
def own_client(server: store_servers.StoreServer, proxy: spoiling.Proxy) -> Iterator[Client]:
    """One that may be killed."""
    with clients_of(server, proxy) as client:
        yield client


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    name: str = request.node.name
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def is_put(request: spoiling.Request) -> bool:
    return request.operation == "put"


def outcomes(requests: list[spoiling.Request]) -> list[tuple[int | None, int | None]]:
    return [(request.status, request.told) for request in requests]


def test_every_way_has_a_test_here() -> None:
    assert CREATES.keys() | READS.keys() | ELSEWHERE == spoiling.WAYS.keys()


@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
@pytest.mark.parametrize("way", CREATES)
def test_a_create(way: str, always: bool, key: str, proxy: spoiling.Proxy, client: Client) -> None:
    told, there = CREATES[way][always]
    proxy.spoil(way, always=always)

    assert client("create", key, BODY) == told
    assert client("get", key, direct=True) == there

    requests, spoiled = proxy.requests(), proxy.spoiled()
    assert {request.condition for request in requests} == {"If-None-Match: *"}
    assert {request.path for request in requests} == {f"/{store_servers.BUCKET}/{key}"}
    assert [request.way for request in spoiled] == [way] * len(spoiled)
    assert spoiled == requests if always else spoiled == requests[:1]
    assert spoiled[0].status == (None if "not" in way or spoiling.WAYS[way].arrives == "nothing" else 200)


@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
@pytest.mark.parametrize("way", READS)
def test_a_read(way: str, always: bool, key: str, proxy: spoiling.Proxy, client: Client) -> None:
    told = READS[way][always]
    client("put", key, BODY, direct=True)
    proxy.spoil(way, always=always)

    assert client("get", key) == told
    requests, spoiled = proxy.requests(), proxy.spoiled()
    assert spoiled == requests if always else spoiled == requests[:1]
    assert all(request.operation == "get" for request in requests)


def test_a_range_is_spoiled_too_and_again_where_the_client_goes_on_with_the_rest(
    key: str, proxy: spoiling.Proxy, client: Client
) -> None:
    client("put", key, BODY, direct=True)
    proxy.spoil("cut reply", always=True)
    assert client("get range", key, 100, 600) == FAILED
    ranges = [request.range for request in proxy.spoiled()]
    assert ranges[:2] == ["bytes=100-599", "bytes=350-599"]
    assert len(ranges) == 4  # the first try and three more

    assert client("get range", key, 0, 100) == BODY[:100]  # another one


def test_an_upload_in_parts_that_fails_after_its_status_was_sent(
    key: str, proxy: spoiling.Proxy, client: Client
) -> None:
    for always, told, there in [(False, "put", BODY), (True, FAILED, ABSENT)]:
        proxy.reset()
        proxy.spoil("200 with an error", always=always)
        assert client("put in parts", f"{key}{always}", BODY) == told
        assert client("get", f"{key}{always}", direct=True) == there
        assert {request.operation for request in proxy.spoiled()} == {"complete"}
        assert outcomes(proxy.spoiled()) == [(None, 200)] * (4 if always else 1)


def test_a_stall_holds_the_reply_of_what_is_done(key: str, proxy: spoiling.Proxy, client: Client) -> None:
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(clients_of(proxy.server, proxy))
        proxy.spoil("stall")
        client.start("create", key, BODY)
        proxy.wait_held()
        assert outcomes(proxy.requests()) == [(200, None)]
        assert other("get", key) == BODY  # nobody else is held
    proxy.release()
    assert client.answer() == "put"
    assert outcomes(proxy.spoiled()) == [(200, 200)]


def test_a_late_request_is_done_when_its_client_is_long_gone(
    key: str, proxy: spoiling.Proxy, client: Client, own_client: Client
) -> None:
    proxy.spoil("late", where=is_put)
    own_client.start("put", key, BODY)
    proxy.wait_held()
    own_client.process.kill()
    assert own_client.end() == -9
    assert client("create", key, "of another one", direct=True) == "put"

    proxy.release()

    assert client("get", key, direct=True) == BODY
    assert [request.status for request in proxy.spoiled()] == [200]


@pytest.mark.parametrize(
    ("moment", "there", "status"), [("before", ABSENT, None), ("after", BODY, 200)], ids=["before", "after"]
)
def test_a_client_is_killed(
    moment: spoiling.Moment, there: str, status: int | None, key: str, proxy: spoiling.Proxy, own_client: Client
) -> None:
    proxy.kill_at(own_client.process.pid, at=2, moment=moment, where=is_put)
    assert own_client("put", f"{key}-first", BODY) == "put"
    own_client.start("put", key, BODY)
    assert own_client.end() == -9
    assert outcomes(proxy.spoiled()) == [(status, None)]
    with clients_of(proxy.server, proxy) as another:
        assert another("get", key) == there


def test_another_one_comes_in_between(key: str, proxy: spoiling.Proxy, client: Client, own_client: Client) -> None:
    def create() -> None:
        assert own_client("create", key, "of another one", direct=True) == "put"

    proxy.call_at(create, where=lambda request: bool(request.condition))
    assert client("create", key, BODY) == EXISTS
    assert client("get", key) == "of another one"
    assert outcomes(proxy.spoiled()) == [(412, 412)]


def test_requests_count_from_when_the_proxy_is_told_and_each_plan_counts_its_own(
    key: str, proxy: spoiling.Proxy, client: Client
) -> None:
    client("put", key, BODY)
    proxy.spoil("404 though there", at=2)
    proxy.spoil("403", at=3)
    assert [client("get", key), client("head", key), client("get", key), client("get", key)] == [
        BODY,
        ABSENT,
        DENIED,
        BODY,
    ]
    assert [(request.number, request.way) for request in proxy.spoiled()] == [(3, "404 though there"), (4, "403")]
    assert [request.operation for request in proxy.requests()] == ["put", "get", "head", "get", "get"]

    proxy.spoil("403", always=True)
    assert client("head", key) == DENIED
    proxy.reset()
    assert client("head", key) == len(BODY)
    assert [request.number for request in proxy.requests()] == [1]


def test_where_there_is_nothing_to_spoil_nothing_counts_as_spoiled(
    key: str, proxy: spoiling.Proxy, client: Client
) -> None:
    proxy.spoil("flipped bit down")
    assert client("get", key) == ABSENT
    assert proxy.spoiled() == []
    assert outcomes(proxy.requests()) == [(404, 404)]


@pytest.mark.parametrize("name", store_servers.SERVERS)
def test_every_server_is_itself_through_the_proxy_and_leaves_nothing(name: str, key: str) -> None:
    data = BODY * (11 << 10)  # three parts, the last one smaller
    with started(name) as server, spoiling.proxy(server) as proxy, clients_of(server, proxy) as client:
        assert client("create", f"{key}/a b", BODY) == "put"
        assert client("create", f"{key}/a b", "another one") == ("put" if name == "rclone" else EXISTS)
        assert client("put in parts", f"{key}/parts", data) == "put"
        assert client("head", f"{key}/parts") == len(data)
        assert client("get", f"{key}/parts") == data
        part = data[6_000_000:6_001_000]
        assert client("get range", f"{key}/parts", 6_000_000, 6_001_000) == (FAILED if name == "rclone" else part)
        assert client("list") == [f"{key}/a b", f"{key}/parts"]
        begun = set() if name == "Azurite" else {"begin"}
        assert {request.operation for request in proxy.requests()} == {
            *("put", "part", "complete", "head", "get", "list"),
            *begun,
        }
        assert all(request.status is not None for request in proxy.requests())
        assert proxy.spoiled() == []
        proxy.spoil("no reply", where=is_put)
        assert client("create", f"{key}/c", BODY) == ("put" if name == "rclone" else EXISTS)
        assert len(proxy.spoiled()) == 1
    assert not os.path.exists(f"/proc/{server.pid}")


@contextlib.contextmanager
def echo() -> Iterator[store_servers.StoreServer]:
    """A server that sends back what it gets."""
    with relay.relaying(lambda call: relay.Reply(200, [], call.body)) as server:
        yield store_servers.StoreServer(name="echo", pid=0, url="", endpoint=f"http://{server.place}", config={})


def test_a_body_in_chunks_goes_on_whole_and_one_that_ends_early_does_not() -> None:
    with echo() as server, spoiling.proxy(server) as proxy:
        place = urlsplit(proxy.endpoint)
        with contextlib.closing(http.client.HTTPConnection(place.netloc, timeout=60)) as connection:
            for _ in range(2):  # over one connection
                connection.request("PUT", "/bucket/key", body=iter([b"ab", b"c" * 100_000]))
                assert connection.getresponse().read() == b"ab" + b"c" * 100_000
        chunks = b"Transfer-Encoding: chunked\r\n\r\n5\r\n123"
        for head in (b"Content-Length: 10\r\n\r\n12345", chunks, chunks + b"45\r\n5"):
            with socket.create_connection((place.hostname, place.port), timeout=60) as raw:
                raw.sendall(b"PUT /bucket/key HTTP/1.1\r\n" + head)
                raw.shutdown(socket.SHUT_WR)
                assert raw.recv(1) == b""
        assert [request.nbytes for request in proxy.requests()] == [100_002] * 2


def test_the_end_of_the_proxy_ends_what_it_holds_and_its_threads() -> None:
    threads = set(threading.enumerate())
    replies: list[str] = []

    def put(place: str) -> None:
        try:
            with contextlib.closing(http.client.HTTPConnection(place, timeout=60)) as connection:
                connection.request("PUT", "/bucket/key", body=b"data")
                replies.append(str(connection.getresponse().status))
        except (OSError, http.client.HTTPException) as error:
            replies.append(type(error).__name__)

    with echo() as server:
        with spoiling.proxy(server) as proxy:
            proxy.spoil("late")
            client = threading.Thread(target=put, args=[urlsplit(proxy.endpoint).netloc])
            client.start()
            proxy.wait_held()
        client.join()
    assert replies == ["RemoteDisconnected"]
    assert [request.status for request in proxy.spoiled()] == [None]
    assert set(threading.enumerate()) <= threads


def test_a_call_that_fails_is_told_at_the_end() -> None:
    def fail() -> None:
        raise OSError("a mistake of the test")

    def call() -> None:
        with echo() as server, spoiling.proxy(server) as proxy:
            proxy.call_at(fail)
            place = urlsplit(proxy.endpoint).netloc
            with contextlib.closing(http.client.HTTPConnection(place, timeout=60)) as connection:
                connection.request("GET", "/bucket/key")
                with pytest.raises(http.client.RemoteDisconnected):
                    connection.getresponse()

    with pytest.raises(RuntimeError, match="was not relayed") as raised:
        call()
    assert str(raised.value.__cause__) == "a mistake of the test"
