"""Processes with torch imported and the shim loaded, which run case after case.

A case is a function at the top level of a module, called with keyword arguments that JSON can say; what it returns is
JSON too. It runs in a worker, which starts no thread of its own, so that the case may fork children, arm the shim in
them and look at what they leave behind.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from torture.shim import preloading

REPOSITORY = Path(__file__).resolve().parents[1]
Case = dict[str, Any]


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    case: Case | None = None
    since: float = 0.0
    received: bytes = b""
    requests: IO[bytes] = field(init=False)
    replies: IO[bytes] = field(init=False)

    def __post_init__(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.replies = self.process.stdin, self.process.stdout


class Crew:
    """Workers that import the package from ``source``; started when first needed, ended by ``close``."""

    def __init__(self, source: Path = REPOSITORY / "src") -> None:
        self._source = source
        self._workers: list[_Worker] = []

    def run(
        self,
        function: Callable[..., Case],
        cases: Iterable[Case],
        *,
        workers: int | None = None,
        limit_s: float = 120.0,
    ) -> Iterator[tuple[Case, Case]]:
        """Each case and what ``function(**case)`` returned in a worker; {"failure": traceback} where it raised.

        RuntimeError when a worker dies, or a case takes longer than ``limit_s``.
        """
        name = f"{function.__module__}:{function.__qualname__}"
        waiting = deque(cases)
        count = min(workers or os.cpu_count() or 1, len(waiting))
        while len(self._workers) < count:
            self._workers.append(_start(self._source))
        crew = self._workers[:count]
        try:
            with selectors.DefaultSelector() as selector:
                for worker in crew:
                    selector.register(worker.replies, selectors.EVENT_READ, worker)
                    _give(worker, name, waiting)
                while busy := [worker for worker in crew if worker.case is not None]:
                    for key, _ in selector.select(timeout=1.0):
                        yield from _take(key.data, name, waiting)
                    for worker in busy:
                        if worker.case is not None and time.monotonic() - worker.since > limit_s:
                            raise RuntimeError(f"the case {worker.case} did not end within {limit_s:g} s")
        finally:
            if any(worker.case is not None for worker in crew):
                self.close()

    def close(self) -> None:
        """End the workers."""
        workers, self._workers = self._workers, []
        for worker in workers:
            # An interpreter with all of torch takes its time to end by itself, and has nothing to lose.
            worker.process.kill()
            worker.requests.close()
        for worker in workers:
            worker.process.wait()
            worker.replies.close()


def _start(source: Path) -> _Worker:
    environment = {
        **preloading(),
        "PYTHONPATH": os.pathsep.join((str(source), str(REPOSITORY))),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        # What torch says of broken connections is what the faults are for.
        "TORCH_CPP_LOG_LEVEL": "FATAL",
    }
    command = [sys.executable, "-m", "torture.crew"]
    return _Worker(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment))


def _give(worker: _Worker, name: str, waiting: deque[Case]) -> None:
    worker.case = waiting.popleft() if waiting else None
    worker.since = time.monotonic()
    if worker.case is not None:
        worker.requests.write(json.dumps([name, worker.case]).encode() + b"\n")
        worker.requests.flush()


def _take(worker: _Worker, name: str, waiting: deque[Case]) -> Iterator[tuple[Case, Case]]:
    data = os.read(worker.replies.fileno(), 1 << 20)
    if not data:
        raise RuntimeError(f"a worker died with {worker.process.wait()} at the case {worker.case}")
    worker.received += data
    if worker.received.endswith(b"\n"):
        outcome, case, worker.received = json.loads(worker.received), worker.case, b""
        _give(worker, name, waiting)
        assert case is not None
        yield case, outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a child ended: the signal that killed it, its exit status, what its function returned, or that it hung."""

    signal: int | None
    status: int | None
    told: Any
    hung: bool = False


class Child:
    """A forked copy of this process that runs ``function`` and tells what it returns; ``end`` waits for it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._pipe, writable = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._pipe)
                with open(writable, "wb") as pipe:
                    pipe.write(json.dumps(function()).encode())
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.close(writable)

    def end(self, timeout_s: float = 60.0) -> End:
        """How it ended; killed, and said to hang, if it has not after ``timeout_s``."""
        told, deadline, hung = b"", time.monotonic() + timeout_s, False
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while True:
                if not selector.select(timeout=max(0.0, deadline - time.monotonic())):
                    os.kill(self.pid, signal.SIGKILL)
                    hung = True
                data = os.read(self._pipe, 1 << 20)
                if not data:
                    break
                told += data
        os.close(self._pipe)
        _, status = os.waitpid(self.pid, 0)
        return End(
            signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            status=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            told=json.loads(told) if told else None,
            hung=hung,
        )


def _serve() -> None:
    # What libraries print must not get between the replies.
    replies = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        name, case = json.loads(line)
        module, _, function_name = name.partition(":")
        try:
            outcome = getattr(importlib.import_module(module), function_name)(**case)
        except Exception:
            outcome = {"failure": traceback.format_exc()}
        with open(replies, "wb", closefd=False) as stream:
            stream.write(json.dumps(outcome).encode() + b"\n")


if __name__ == "__main__":
    _serve()
