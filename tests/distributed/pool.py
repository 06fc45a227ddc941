"""Real worker processes for tests, started once and used for task after task.

A task is a function at the top level of a test file; it runs on the first n workers, in a gloo process group of its own
over loopback. Workers come from a fork server that has torch imported, so a new one costs little: those that took part
in a task that failed, died or hung are killed and replaced. Only processes started here are ever killed.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib.util
import itertools
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

MOST_WORKERS = 8
_PRELOAD = ["torch", "torch.distributed", "torch.distributed.tensor", "torch.distributed.fsdp", "holdfast"]
_WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
_FAREWELL_S = 5.0
_AFTER_FAILURE_S = 20.0  # the others may need a moment to notice


class TaskFailed(AssertionError):
    """A task did not return on every rank; the message has the tracebacks of all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a worker is asked to do."""

    number: int
    rank: int
    world: int
    store_port: int
    path: str
    module: str
    function: str
    arguments: tuple[Any, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it: the value, or the traceback."""

    value: Any = None
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    stacks: Path


class Pool:
    """Up to eight workers; ``run`` is all that tests need."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._context = multiprocessing.get_context("forkserver")
        self._workers: list[_Worker] = []
        self._tasks = itertools.count()
        self._names = itertools.count()
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def start(self, workers: int) -> None:
        """Have at least that many workers."""
        self._context.set_forkserver_preload(_PRELOAD)
        with _environment(_WORKER_ENVIRONMENT):
            while len(self._workers) < workers:
                self._workers.append(self._start_one())

    def run(
        self,
        world: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = 300.0,
        dies: Collection[int] = (),
    ) -> list[Any]:
        """The results of ``function(*arguments)`` on ``world`` ranks, by rank; TaskFailed unless all returned.

        Ranks in ``dies`` are not waited for (they kill or stop themselves); their result is None, and all workers of
        the task are thrown away.
        """
        assert 1 <= world <= MOST_WORKERS
        self.start(world)
        workers = self._workers[:world]
        number = next(self._tasks)
        for rank, worker in enumerate(workers):
            task = self._task(number, rank, world, function, arguments, timeout_s)
            worker.connection.send(task)
        outcomes = self._collect(workers, set(dies), timeout_s)
        failed = {rank: outcome.failure for rank, outcome in outcomes.items() if outcome.failure is not None}
        if failed or dies:
            self._throw_away(workers)
        if failed:
            reports = "\n".join(f"--- rank {rank} of {world}:\n{failed[rank]}" for rank in sorted(failed))
            raise TaskFailed(f"{function.__name__} failed on ranks {sorted(failed)}\n{reports}")
        return [outcomes[rank].value if rank in outcomes else None for rank in range(world)]

    def close(self) -> None:
        """End all workers; those that do not end by themselves are killed."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.connection.send(None)
        deadline = time.monotonic() + _FAREWELL_S
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self._throw_away(list(self._workers))

    @property
    def pids(self) -> list[int]:
        """The processes of the pool, as they are now."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def _task(
        self,
        number: int,
        rank: int,
        world: int,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        timeout_s: float,
    ) -> Task:
        path = sys.modules[function.__module__].__file__
        assert path is not None
        assert "<" not in function.__qualname__, "a task is a function at the top level of a test file"
        return Task(
            number=number,
            rank=rank,
            world=world,
            store_port=self._store.port,
            path=path,
            module=function.__module__,
            function=function.__qualname__,
            arguments=arguments,
            timeout_s=timeout_s,
        )

    def _start_one(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        stacks = self._directory / f"stacks-{next(self._names)}"
        process = self._context.Process(target=serve, args=(theirs, str(stacks)), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process=process, connection=ours, stacks=stacks)

    def _collect(self, workers: list[_Worker], dies: set[int], timeout_s: float) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        missing = {workers[rank].connection: rank for rank in range(len(workers)) if rank not in dies}
        deadline = time.monotonic() + timeout_s
        while missing:
            ready = wait(list(missing), timeout=max(0.0, deadline - time.monotonic()))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = missing.pop(connection)
                outcomes[rank] = _receive(workers[rank])
                if outcomes[rank].failure is not None:
                    deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
            if not ready:
                for rank in missing.values():
                    stacks = _stacks_of(workers[rank])
                    outcomes[rank] = Outcome(failure=f"did not return within its time; its stacks:\n{stacks}")
                break
        return outcomes

    def _throw_away(self, workers: list[_Worker]) -> None:
        for worker in workers:
            if worker.process.is_alive():
                worker.process.kill()
            worker.process.join(_FAREWELL_S)
            worker.connection.close()
            worker.process.close()
            self._workers.remove(worker)


def _receive(worker: _Worker) -> Outcome:
    try:
        outcome = worker.connection.recv()
    except (EOFError, ConnectionError):
        worker.process.join(_FAREWELL_S)
        return Outcome(failure=f"the process died, exit code {worker.process.exitcode}")
    except Exception as error:  # a result that cannot be unpickled
        return Outcome(failure=f"its result could not be read: {error!r}")
    assert isinstance(outcome, Outcome)
    return outcome


def _stacks_of(worker: _Worker) -> str:
    """Where a worker hangs; asked for by a signal that its fault handler answers."""
    pid = worker.process.pid
    if pid is None or not worker.process.is_alive():
        return "the process died"
    os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + _FAREWELL_S
    while time.monotonic() < deadline and not worker.stacks.read_text():
        worker.process.join(0.05)
    return worker.stacks.read_text()


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Any:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def serve(connection: Connection, stacks: str) -> None:
    """What a worker process does: task after task until told to stop, or until the tests are gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                task = connection.recv()
            except (EOFError, ConnectionError):
                return
            except Exception:  # arguments that cannot be unpickled here
                connection.send(Outcome(failure=traceback.format_exc()))
                continue
            if task is None:
                return
            outcome = perform(task)
            try:
                connection.send(outcome)
            except Exception:  # a result that cannot be pickled
                connection.send(Outcome(failure=traceback.format_exc()))


def perform(task: Task) -> Outcome:
    """The outcome of a task, inside a process group that exists for it alone."""
    try:
        function = load(task)
        timeout = datetime.timedelta(seconds=task.timeout_s)
        own = dist.PrefixStore(f"task-{task.number}", store_at(task.store_port))
        dist.init_process_group("gloo", store=own, rank=task.rank, world_size=task.world, timeout=timeout)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                value = function(*task.arguments)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()
        return Outcome(value=value)
    except BaseException:
        return Outcome(failure=traceback.format_exc())


@functools.cache
def store_at(port: int) -> dist.TCPStore:
    """The pool's store; one connection per worker, because connecting looks up names, which can take seconds."""
    return dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)


def load(task: Task) -> Callable[..., Any]:
    """The function of a task; its file is loaded once, under the name it has where the tests run."""
    module = sys.modules.get(task.module)
    if module is None:
        spec = importlib.util.spec_from_file_location(task.module, task.path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[task.module] = module
        spec.loader.exec_module(module)
    found = module
    for name in task.function.split("."):
        found = getattr(found, name)
    return found  # type: ignore[return-value]
