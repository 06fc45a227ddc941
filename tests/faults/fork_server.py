"""A process with everything imported that forks a child per request: to be killed, limited, or run beside another one.

Requests come as one line of JSON each on the standard input, events go the same way to the standard output. A child
counts its calls into ``os`` and stops, dies or fails at the one that the request names, so that a fault hits the same
instant every time. Nothing here starts a thread before a fork.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
from collections.abc import Callable
from typing import Any

import torch

import holdfast
import holdfast.state_dict_saver  # imported here once, not in every child

COUNTED = (
    "close",
    "fsync",
    "ftruncate",
    "link",
    "mkdir",
    "open",
    "posix_fallocate",
    "pwrite",
    "rename",
    "unlink",
    "write",
)


def state_of(version: int, elements: int = 300) -> dict[str, Any]:
    """A small state in which every tensor and value tells the version."""
    return {
        "model": {"weight": torch.full((elements,), float(version)), "layers": [torch.full((2, 3), version)]},
        "step": version,
    }


def main() -> None:
    """Fork a child per request and tell how each one ended, until no more requests can come and no child is left."""
    received = b""
    is_open = True
    running: dict[int, tuple[int, int, list[bytes]]] = {}
    while is_open or running:
        readable, _, _ = select.select([*([0] if is_open else []), *running], [], [])
        for descriptor in readable:
            data = os.read(descriptor, 1 << 16)
            if descriptor != 0:
                running[descriptor][2].append(data)
                if not data:
                    tell_end(descriptor, *running.pop(descriptor))
                continue
            is_open = bool(data)
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pipe, child = fork_child(request)
                running[pipe] = request["id"], child, []


def fork_child(request: dict[str, Any]) -> tuple[int, int]:
    """Where the child will tell what became of the request, and its process id."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writable, json.dumps(attempt(request)).encode())
        os._exit(0)
    os.close(writable)
    return readable, child


def tell_end(pipe: int, number: int, child: int, told: list[bytes]) -> None:
    os.close(pipe)
    _, status = os.waitpid(child, 0)
    killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    emit({"id": number, "event": "end", "signal": killed, **json.loads(b"".join(told) or b"{}")})


def emit(event: dict[str, Any]) -> None:
    # One write of less than PIPE_BUF bytes: lines of several children do not mix.
    os.write(1, json.dumps(event).encode() + b"\n")


def attempt(request: dict[str, Any]) -> dict[str, Any]:
    """What became of the request: the error, if there was one, and how often each call was made."""
    limit_process(request)
    counts = install_faults(request)
    outcome: dict[str, Any] = {"error": None}
    try:
        for version in request["versions"]:
            writer = holdfast.NativeWriter(
                request["path"], overwrite=request.get("overwrite", True), attempt=request.get("attempt")
            )
            writer.leaves_marker = request.get("marks", False)
            holdfast.save(state_of(version, request.get("elements", 300)), storage_writer=writer)
    except Exception as error:
        outcome = {
            "error": type(error).__name__,
            "message": str(error),
            "errno": getattr(error, "errno", None),
            "path": getattr(error, "path", None),
        }
    return {**outcome, "counts": dict(counts)}


def limit_process(request: dict[str, Any]) -> None:
    if "file_size_limit" in request:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size_limit"], request["file_size_limit"]))
    if "user" in request:
        os.setgroups([])
        os.setgid(request["user"])
        os.setuid(request["user"])


def install_faults(request: dict[str, Any]) -> dict[str, int]:
    """Count the calls; at the one named by the request's fault, die before or after it, or wait at the gate."""
    fault = request.get("fault", {})
    counts = dict.fromkeys(COUNTED, 0)

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            is_chosen = fault.get("call") == name and fault.get("number") == counts[name]
            if is_chosen and fault["kind"] == "gate":
                wait_at_gate(request)
            if is_chosen and fault["kind"] == "kill before":
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return function(*args, **kwargs)
            finally:
                if is_chosen and fault["kind"] == "kill after":
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in COUNTED:
        setattr(os, name, counting(name, getattr(os, name)))
    return counts


def wait_at_gate(request: dict[str, Any]) -> None:
    """Tell that this child has come to the gate, and stand there until whoever locked it lets go."""
    with open(request["fault"]["gate"], "rb") as gate:
        emit({"id": request["id"], "event": "gate"})
        fcntl.flock(gate, fcntl.LOCK_SH)


if __name__ == "__main__":
    main()
