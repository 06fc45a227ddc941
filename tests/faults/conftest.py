"""What fault tests share: children forked off a warm process, and states that tell which version they are."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import holdfast

SERVER = Path(__file__).with_name("fork_server.py")


def _load_server_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("holdfast_fork_server", SERVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def state_of() -> Callable[..., dict[str, Any]]:
    """The state of a version, as the children make it."""
    function: Callable[..., dict[str, Any]] = _load_server_module().state_of
    return function


@pytest.fixture(scope="session")
def version_of() -> Callable[[dict[str, Any]], int]:
    """The version of a loaded state; fails unless it is whole and all of one version."""

    def version(state: dict[str, Any]) -> int:
        step: int = state["step"]
        assert list(state) == ["model", "step"]
        assert list(state["model"]) == ["weight", "layers"]
        assert state["model"]["weight"].unique().tolist() == [step]
        assert state["model"]["layers"][0].unique().tolist() == [step]
        return step

    return version


@pytest.fixture(scope="session")
def start_child() -> Iterator[Callable[..., Callable[[str], dict[str, Any]]]]:
    """Starts a child of the fork server; what it returns waits for an event of that child."""
    source = str(Path(holdfast.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert server.stdin is not None
    assert server.stdout is not None
    requests, replies = server.stdin, server.stdout
    numbers = itertools.count()
    events: list[dict[str, Any]] = []

    def start(**request: Any) -> Callable[[str], dict[str, Any]]:
        number = next(numbers)
        requests.write(json.dumps({"id": number, **request}) + "\n")
        requests.flush()

        def wait(event: str) -> dict[str, Any]:
            while True:
                for known in events:
                    if known["id"] == number and known["event"] in (event, "end"):
                        assert known["event"] == event, f"the child ended before the event {event!r}: {known}"
                        events.remove(known)
                        return known
                line = replies.readline()
                assert line, "the fork server died"
                events.append(json.loads(line))

        return wait

    with server:
        try:
            yield start
        finally:
            requests.close()
