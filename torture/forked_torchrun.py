"""torchrun in copies of a process that has imported everything: starting the agent and its ranks costs next to nothing.

The agent is torchrun's own. So are its signals, the groups of processes it sends them to, and the end after 30 seconds.
Only, where it would start an interpreter, it forks.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler


class Forked(subprocess.Popen[bytes]):
    """A copy of this process that runs ``function``, in a session of its own; else like any that is started."""

    def __init__(self, function: Callable[[], object], environment: Mapping[str, str], log: Path | None = None) -> None:
        self._function = function
        self._log = log
        super().__init__([sys.executable], env=environment)

    def _execute_child(self, args: object, *others: object) -> None:
        sys.stdout.flush()
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            _run(self._function, os.environ if others[5] is None else others[5], self._log)  # type: ignore[arg-type]


def launch(ranks: int, main: Callable[[], object], argument: str, environment: Mapping[str, str], log: Path) -> Forked:
    """torchrun, with ``main`` on each of its ranks, which finds ``argument`` where a program has its first one."""

    def agent() -> None:
        # The store of the agent has a thread, which asks the resolver about every rank that connects. A copy that is
        # made meanwhile would wait for the resolver's lock for ever: no rank begins before the last one is there.
        waiting, begin = os.pipe()
        copies: list[Forked] = []

        def rank() -> None:
            os.close(begin)
            os.read(waiting, 1)
            sys.argv = [sys.argv[0], argument]
            main()

        def start_rank(handler: SubprocessHandler, args: Sequence[str], environment: dict[str, str]) -> Forked:
            copies.append(Forked(rank, environment))
            if len(copies) == ranks:
                os.close(begin)
            return copies[-1]

        SubprocessHandler._popen = start_rank  # type: ignore[assignment, method-assign]
        run.main(["--standalone", f"--nproc-per-node={ranks}", "--no-python", "a copy"])

    torch.set_num_threads(1)  # copies have no other threads
    return Forked(agent, environment, log)


def _run(function: Callable[[], object], environment: Mapping[str, str], log: Path | None) -> None:
    """What a copy does, from its beginning to its end."""
    status = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        faulthandler.unregister(signal.SIGUSR1)
        # As in an interpreter of its own. The one that was copied was spawned, and so would its loader workers be: they
        # would take seconds to begin.
        multiprocessing.set_start_method(None, force=True)
        os.environ.clear()
        os.environ.update(environment)
        if log is not None:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # What an interpreter does in the end.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
