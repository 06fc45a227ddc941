"""holdfast view: its URL, how it ends, the one file, and what it refuses; in a real process."""

from __future__ import annotations

import http.client
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from typer.testing import CliRunner, Result

import holdfast
from holdfast.cli import app


def view(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["view", *map(str, arguments)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    holdfast.save({"weight": torch.ones(3)}, tmp_path / "run" / "step-1", no_dist=True)
    return tmp_path / "run"


def test_it_serves_until_it_is_interrupted_without_a_word(path: Path) -> None:
    command = [sys.executable, "-m", "holdfast", "view", str(path), "--no-browser"]
    # What runs in the background of a shell ignores interrupts.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_take_interrupts
    ) as process:
        try:
            assert process.stdout is not None
            url, how_to_end = (process.stdout.readline().strip() for _ in range(2))
            assert how_to_end == "(Ctrl-C ends it)"
            assert re.fullmatch(r"http://127\.0\.0\.1:[0-9]+/\?token=[\w-]{32}", url)
            parts = urlsplit(url)
            connection = http.client.HTTPConnection("127.0.0.1", parts.port or 0, timeout=60)
            connection.request("GET", f"/?{parts.query}")
            response = connection.getresponse()
            assert response.headers["Set-Cookie"].startswith(f"holdfast-{parts.port}=")
            assert b"<html" in response.read()
            connection.close()
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, output, errors) == (0, "", "")


def _take_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_port_in_use_is_said(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = view(path, "--port", port, "--no-browser")
    assert result.exit_code == 2
    assert f"{port} is in use" in result.stderr


def test_where_nothing_is_it_ends(tmp_path: Path) -> None:
    result = view(tmp_path / "nothing", "--no-browser")
    assert result.exit_code == 3
    assert "there is no checkpoint" in result.stderr


def test_one_file_is_written(path: Path, tmp_path: Path) -> None:
    result = view(path, "--html", tmp_path / "out.html")
    assert result.exit_code == 0, result.output
    assert "holdfast-data" in (tmp_path / "out.html").read_text()
    assert re.search(r"out\.html: [0-9.]+ KiB, [0-9]+ answers\n", result.stdout)
    assert "not in it: elements of tensors" in result.stderr


def test_a_file_that_cannot_be_written_is_said(path: Path, tmp_path: Path) -> None:
    result = view(path, "--html", tmp_path / "nothing" / "out.html")
    assert result.exit_code == 4
    assert "nothing" in result.stderr
