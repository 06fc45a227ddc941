"""A viewer that really serves, on the loopback interface, and a browser of a few lines that asks it."""

from __future__ import annotations

import gzip
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._view.questions import Viewer
from holdfast._view.server import ViewServer

HOSTILE = '</script><script>alert("1")</script>\n\u202e\'&'


class Browser:
    """Asks one server, as a browser that has its cookie."""

    def __init__(self, server: ViewServer) -> None:
        self.server = server

    def request(self, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
        """What comes back; headers have underscores for dashes, and None in place of one that is left out."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        own = {"Cookie": f"holdfast-{self.server.port}={self.server.token}", "Accept-Encoding": "gzip"}
        given = own | {name.replace("_", "-"): text for name, text in headers.items()}
        try:
            connection.request(method, path, headers={name: text for name, text in given.items() if text})
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        packed = response.headers.get("Content-Encoding") == "gzip"
        return response.status, response.headers, gzip.decompress(data) if packed else data

    def ask(self, path: str, method: str = "GET", status: int = 200) -> Any:
        """The JSON that comes back with this status."""
        found, _, data = self.request(path, method)
        assert found == status, data
        return json.loads(data)

    def error(self, path: str, method: str = "GET") -> tuple[int, str, str]:
        """Status, kind and message of an error."""
        status, _, data = self.request(path, method)
        error = json.loads(data)["error"]
        return status, error["kind"], error["message"]

    def ended(self, path: str) -> Any:
        """The task that a POST to ``path`` begins, at its end."""
        task = self.ask(path, "POST")["task"]
        while (told := self.ask(f"/api/task?task={task}&wait=20"))["state"] == "running":
            pass
        return told


Serve = Callable[..., Browser]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves paths, until the end of the test."""
    servers: list[tuple[ViewServer, threading.Thread]] = []

    def begin(*paths: Path | str) -> Browser:
        server = ViewServer(Viewer(paths))
        server.assets.setdefault("index.html", b"<html></html>")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        servers.append((server, thread))
        return Browser(server)

    yield begin
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps, with tied and sharded tensors, values, and keys that are hostile."""
    root = tmp_path / "run"
    for number in (1, 2):
        weight = torch.arange(12, dtype=torch.float32).reshape(3, 4) * number
        state = {
            "model": {
                "weight": weight,
                "tied": weight,
                "layers": {"0": torch.ones(5), "10": torch.ones(5), "9": torch.ones(5)},
            },
            HOSTILE: torch.tensor([float("nan"), float("inf"), 1.0]),
            "": torch.zeros(2, dtype=torch.bfloat16),
            "step": number,
            "</script>": "</script>",
        }
        user = {"metrics": {"loss": 1.5 / number, "odd": float("nan")}, "note": HOSTILE}
        holdfast.save(state, root / f"step-{number}", no_dist=True, user_metadata=user)
    return root
