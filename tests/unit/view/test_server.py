"""What the server refuses: other hosts, other pages, no token, paths that are names of files, what is too long."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

import holdfast


def raw(port: int, data: bytes) -> bytes:
    """What a connection that sends ``data`` gets back until the server closes it, or has said all."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.fixture
def browser(serve, run):
    return serve(run)


def test_the_url_gives_a_cookie_and_nothing_else_does(browser):
    token = urlsplit(browser.server.url).query
    status, headers, data = browser.request(f"/?{token}", Cookie="")
    assert status == 200
    assert b"<html" in data
    cookie = headers["Set-Cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert browser.request("/api/sources", Cookie=cookie.partition(";")[0])[0] == 200
    for path in ("/", "/?token=", "/?token=wrong", f"/api/sources?{token}", "/assets/index.html", "/?token=%ff"):
        status, headers, data = browser.request(path, Cookie="")
        assert status == (400 if path.endswith("%ff") else 403), path
        assert "Set-Cookie" not in headers


def test_the_url_for_a_command_line_counts_once(browser):
    once = urlsplit(browser.server.url_for_once).query
    assert browser.request(f"/?{once}", Cookie="")[0] == 200
    assert browser.request(f"/?{once}", Cookie="")[0] == 403
    assert browser.request(f"/?{urlsplit(browser.server.url).query}", Cookie="")[0] == 200


@pytest.mark.parametrize(
    "cookie", ["holdfast-{port}=", "holdfast-{port}=wrong", "holdfast-1={token}", "holdfast-{port}", ";;=\x80", "a[=1"]
)
def test_another_cookie_is_refused(browser, cookie):
    text = cookie.format(port=browser.server.port, token=browser.server.token)
    assert browser.request("/api/sources", Cookie=text)[0] == 403


def test_cookies_of_other_servers_do_no_harm(browser):
    own = f"holdfast-{browser.server.port}={browser.server.token}"
    assert browser.request("/api/sources", Cookie=f'a b={{"x";; ="; {own}; user="\x80')[0] == 200
    request = f"GET http://[/ HTTP/1.1\r\nHost: localhost:{browser.server.port}\r\nCookie: {own}\r\n\r\n"
    assert b" 400 " in raw(browser.server.port, request.encode()).splitlines()[0]


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", "[::]:{port}"],
)
def test_another_host_is_refused_whatever_it_knows(browser, host):
    token = urlsplit(browser.server.url).query
    for path in (f"/?{token}", "/api/sources"):
        assert browser.request(path, Host=host.format(port=browser.server.port))[0] == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_the_names_of_this_machine_are_taken(browser, host):
    assert browser.request("/api/sources", Host=f"{host}:{browser.server.port}")[0] == 200


def test_one_host_is_needed(browser):
    cookie = f"Cookie: holdfast-{browser.server.port}={browser.server.token}\r\n"
    host = f"Host: 127.0.0.1:{browser.server.port}\r\n"
    for hosts in ("", host + "Host: evil.example\r\n"):
        request = f"GET /api/sources HTTP/1.1\r\n{hosts}{cookie}\r\n".encode()
        assert b" 403 " in raw(browser.server.port, request).splitlines()[0]


@pytest.mark.parametrize(
    "header",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_other_pages_are_refused_even_with_the_cookie(browser, header):
    assert browser.request("/api/verify?checkpoint=0", "POST", **header)[0] == 403
    assert browser.request("/api/sources", **header)[0] == 403


def test_the_first_page_may_be_opened_by_a_link(browser):
    assert browser.request("/", Sec_Fetch_Site="cross-site")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/assets/../server.py",
        "/assets/..%2fserver.py",
        "/assets/%2e%2e/server.py",
        "/assets//etc/passwd",
        "/assets/",
        "/assets/server.py",
        "//etc/passwd",
        "/api/../etc/passwd",
        "/api",
        "/api/nothing",
        "/index.html",
        "//x]",
    ],
)
def test_paths_are_no_files(browser, path):
    status, headers, data = browser.request(path)
    assert (status, headers["Content-Type"]) == (404, "text/plain; charset=utf-8")
    assert b"there is no" in data


@pytest.mark.parametrize("method", ["HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT"])
def test_other_methods_are_refused(browser, method):
    status, _, data = browser.request("/api/sources", method)
    assert status == 405
    assert bool(data) == (method != "HEAD")


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/api/checkpoint", "'checkpoint'"),
        ("/api/checkpoint?checkpoint=", "'checkpoint'"),
        ("/api/checkpoint?checkpoint=-1", "'-1'"),
        ("/api/checkpoint?checkpoint=../..", "'../..'"),
        ("/api/checkpoint?checkpoint=0&checkpoint=1", "twice"),
        ("/api/checkpoint?checkpoint=0&path=/etc", "'path'"),
        ("/api/checkpoint?checkpoint=%D9%A1", "'checkpoint'"),
        ("/api/tree?checkpoint=0&under=model", "dot"),
        ("/api/tensors?checkpoint=0&sort=__class__", "sort"),
        ("/api/tensors?checkpoint=0&count=1e9", "count"),
        ("/api/slice?checkpoint=0&tensor=0&at=9,9", "[3, 4]"),
        ("/api/slice?checkpoint=0&tensor=0&at=1", "[3, 4]"),
        ("/api/slice?checkpoint=0&tensor=0&at=x,y", "'at'"),
        ("/api/diff?a=0&b=1&status=good", "status"),
        ("/api/sources?" + "&".join(f"x{number}=1" for number in range(99)), ""),
    ],
)
def test_bad_parameters_are_said(browser, path, word):
    browser.ask("/api/run?source=0")
    status, kind, message = browser.error(path)
    assert (status, kind) == (400, "ValueError")
    assert word in message


@pytest.mark.parametrize(
    "path",
    [
        "/api/checkpoint?checkpoint=99",
        f"/api/checkpoint?checkpoint={10**17}",
        "/api/tensor?checkpoint=0&tensor=99",
        "/api/tree?checkpoint=0&under=no.",
        "/api/run?source=1",
        "/api/task?task=1",
    ],
)
def test_unknown_numbers_are_not_found(browser, path):
    browser.ask("/api/run?source=0")
    assert browser.error(path)[:2] == (404, "NotFoundError")


def test_what_is_too_long_or_has_a_body_is_refused(browser):
    cookie = f"holdfast-{browser.server.port}={browser.server.token}"
    host = f"Host: 127.0.0.1:{browser.server.port}\r\nCookie: {cookie}\r\n"
    long = raw(browser.server.port, f"GET /api/sources?search={'x' * 9000} HTTP/1.1\r\n{host}\r\n".encode())
    assert b" 414 " in long.splitlines()[0]
    assert b"Connection: close" in long
    body = raw(
        browser.server.port, f"POST /api/verify?checkpoint=0 HTTP/1.1\r\n{host}Content-Length: 5\r\n\r\nhello".encode()
    )
    assert b" 413 " in body.splitlines()[0]
    many = "".join(f"X-{number}: y\r\n" for number in range(500))
    assert b" 431 " in raw(browser.server.port, f"GET / HTTP/1.1\r\n{many}\r\n".encode()).splitlines()[0]
    assert b" 400 " in raw(browser.server.port, b"nonsense\x00 \xff\r\n\r\n").splitlines()[0]
    assert browser.request("/api/sources")[0] == 200


def test_every_answer_has_the_headers_that_keep_browsers_careful(browser):
    for path in ("/", "/api/sources", "/api/nothing", "/api/checkpoint"):
        _, headers, _ = browser.request(path)
        assert headers["Content-Security-Policy"].startswith("default-src 'self'; ")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
    _, headers, _ = browser.request("/api/sources", Host="evil.example")
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_connections_are_bounded_and_others_are_closed_at_once(browser):
    address = "127.0.0.1", browser.server.port
    held = [socket.create_connection(address, timeout=60) for _ in range(48)]
    try:
        for each in held:  # each has its thread when it has had an answer
            each.sendall(f"GET / HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\n\r\n".encode())
            assert each.recv(12) == b"HTTP/1.1 403"
        with socket.create_connection(address, timeout=60) as more:
            assert more.recv(1) == b""
    finally:
        for each in held:
            each.close()


def test_many_ask_at_once(browser):
    browser.ask("/api/run?source=0")
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(browser.ask, ["/api/checkpoint?checkpoint=0", "/api/tensors?checkpoint=1"] * 20))
    assert [each == found[number % 2] for number, each in enumerate(found)] == [True] * 40


def test_only_the_loopback_interface_is_listened_to(browser):
    assert browser.server.server_address[0] == "127.0.0.1"


def test_large_answers_are_packed_and_small_ones_are_not(serve, tmp_path: Path):
    holdfast.save({f"layer.{number}": torch.ones(1) for number in range(200)}, tmp_path / "a", no_dist=True)
    browser = serve(tmp_path / "a")
    assert browser.request("/api/tensors?checkpoint=0")[1]["Content-Encoding"] == "gzip"
    assert "Content-Encoding" not in browser.request("/api/sources")[1]
    assert "Content-Encoding" not in browser.request("/api/tensors?checkpoint=0", Accept_Encoding="identity")[1]
