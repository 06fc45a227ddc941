"""Processes with the shim loaded, which run case after case, and the children that a case forks."""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import crew
from torture.shim import built_shim

REPOSITORY = Path(__file__).resolve().parents[1]
Case = dict[str, Any]


class Crew(crew.Crew):
    """Workers with the shim loaded, which start no thread of their own: a case may fork children and arm it in them."""

    def environment(self) -> dict[str, str]:
        """With the shim, and with everything the same in every run."""
        return {
            **super().environment(),
            "LD_PRELOAD": str(built_shim()),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONHASHSEED": "0",
            # What torch says of broken connections is what the faults are for.
            "TORCH_CPP_LOG_LEVEL": "FATAL",
        }


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
