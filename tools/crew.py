"""Processes that are started once and run function after function: as ranks together, or case by case each on its own.

Tests, torture and benchmarks use it. A function is one at the top level of a file. Ranks are in a gloo group over
loopback. Processes that took part in something that failed, died or hung are killed and replaced; only processes
started here are ever killed, by their ids.
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
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh

_HOST = "127.0.0.1"
_SLOW_TO_IMPORT = [
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "holdfast.interop",
    "holdfast.state_dict_loader",
    "holdfast.state_dict_saver",
]
_END_S = 60.0  # of a process that was told to end, or killed
_AFTER_FAILURE_S = 20.0  # the others may need a moment to notice
Case = dict[str, Any]
_AnyCrew = TypeVar("_AnyCrew", bound="Crew")


class TaskFailed(AssertionError):
    """A task did not return on every rank; the message has the tracebacks of all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The process group of a task; one that is kept is that of all tasks to come."""

    number: int
    is_kept: bool
    rank: int
    world: int
    store_port: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a worker is asked to do, as a rank of a group or alone."""

    path: str
    module: str
    function: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    is_strict: bool
    group: Group | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it: the value, or the traceback."""

    value: Any = None
    failure: str | None = None


class _Worker:
    def __init__(self, context: Any, stacks: Path, environment: Mapping[str, str]) -> None:
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.stacks = stacks
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, str(stacks)), daemon=True)
        with _environment(environment):
            self.process.start()
        theirs.close()

    def outcome(self) -> Outcome:
        """What it sent, or how it died."""
        try:
            outcome = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(_END_S)
            return Outcome(failure=f"the process died, exit code {self.process.exitcode}")
        except Exception as error:  # a result that cannot be unpickled
            return Outcome(failure=f"its result could not be read: {error!r}")
        assert isinstance(outcome, Outcome)
        return outcome

    def end_of_hang(self) -> Outcome:
        """Kill it, and tell where it hung: its fault handler answers the signal, then lets it end the process."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        self.process.join(_END_S)
        return Outcome(failure=f"did not return within its time; its stacks:\n{self.stacks.read_text()}")

    def throw_away(self) -> None:
        if self.process.is_alive() and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # with what it has forked
            self.process.kill()
        self.process.join(_END_S)
        self.connection.close()
        if not self.process.is_alive():  # else the kernel holds it in a call, for minutes where the machine is busy
            self.process.close()


class Crew:
    """Workers, started when first needed; gone after ``close``, or with this process.

    Those for tests come from a server that has everything imported, so a new one costs little; each of their tasks has
    a process group of its own, and warnings are errors.
    """

    def __init__(self, *, for_tests: bool = False) -> None:
        self._for_tests = for_tests
        self._context = multiprocessing.get_context("forkserver" if for_tests else "spawn")
        self._context.set_forkserver_preload(_SLOW_TO_IMPORT)
        self._folder = tempfile.TemporaryDirectory(prefix="crew-")
        self._workers: list[_Worker] = []
        self._numbers = itertools.count()

    def environment(self) -> dict[str, str]:
        """What the workers have in their environment, beside what this process has."""
        return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    @functools.cached_property
    def _store(self) -> TCPStore:  # served from here, so that there is no port to guess
        return TCPStore(_HOST, 0, None, True, wait_for_workers=False)

    def run(
        self,
        world: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = 300.0,
        after_failure_s: float = _AFTER_FAILURE_S,
        dies: Collection[int] = (),
    ) -> list[Any]:
        """The results of ``function(*arguments)`` on ``world`` ranks, by rank; TaskFailed unless all returned.

        Ranks in ``dies`` are not waited for (they kill or stop themselves); their result is None, and all workers of
        the task are thrown away. Once a rank has failed, the others have ``after_failure_s``.
        """
        workers = self._at_least(world)
        group = Group(
            number=next(self._numbers),
            is_kept=not self._for_tests,
            rank=0,
            world=world,
            store_port=self._store.port,
            timeout_s=timeout_s,
        )
        task = self._task(function, arguments, {})
        for rank, worker in enumerate(workers):
            with contextlib.suppress(BrokenPipeError):  # it has died, which will be seen
                worker.connection.send(replace(task, group=replace(group, rank=rank)))
        waited_for = {rank: worker for rank, worker in enumerate(workers) if rank not in dies}
        outcomes = _collect(waited_for, timeout_s, after_failure_s)
        failed = {rank: outcome.failure for rank, outcome in outcomes.items() if outcome.failure is not None}
        if failed or dies:
            self._throw_away(workers)
        if failed:
            reports = "\n".join(f"--- rank {rank} of {world}:\n{failed[rank]}" for rank in sorted(failed))
            raise TaskFailed(f"{function.__name__} failed on ranks {sorted(failed)}\n{reports}")
        return [outcomes[rank].value if rank in outcomes else None for rank in range(world)]

    def each(
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
        waiting = deque(cases)
        free = self._at_least(min(workers or os.cpu_count() or 1, len(waiting)))
        busy: dict[Any, tuple[_Worker, Case, float]] = {}
        try:
            while waiting or busy:
                while waiting and free:
                    worker, case = free.pop(), waiting.popleft()
                    worker.connection.send(self._task(function, (), case))
                    busy[worker.connection] = worker, case, time.monotonic() + limit_s
                first = min(deadline for _, _, deadline in busy.values())
                ready = wait(list(busy), timeout=max(0.0, first - time.monotonic()))
                if not ready:
                    late = next((worker, case) for worker, case, deadline in busy.values() if deadline == first)
                    raise RuntimeError(f"the case {late[1]} {late[0].end_of_hang().failure}")
                for connection in ready:
                    worker, case, _ = busy.pop(connection)
                    outcome = worker.outcome()
                    if not worker.process.is_alive():
                        raise RuntimeError(f"{outcome.failure} at the case {case}")
                    free.append(worker)
                    yield case, outcome.value if outcome.failure is None else {"failure": outcome.failure}
        finally:
            self._throw_away([worker for worker, _, _ in busy.values()])

    def close(self) -> None:
        """End all workers."""
        # An interpreter with all of torch takes its time to end by itself, and has nothing to lose.
        self._throw_away(list(self._workers))
        self._folder.cleanup()

    def __enter__(self: _AnyCrew) -> _AnyCrew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _at_least(self, count: int) -> list[_Worker]:
        self._throw_away([worker for worker in self._workers if not worker.process.is_alive()])
        while len(self._workers) < count:
            stacks = Path(self._folder.name, str(next(self._numbers)))
            self._workers.append(_Worker(self._context, stacks, self.environment()))
        return self._workers[:count]

    def _task(self, function: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Task:
        path = sys.modules[function.__module__].__file__
        assert path is not None
        assert "<" not in function.__qualname__, "a task is a function at the top level of a file"
        return Task(
            path=path,
            module=function.__module__,
            function=function.__qualname__,
            arguments=arguments,
            options=options,
            is_strict=self._for_tests,
        )

    def _throw_away(self, workers: list[_Worker]) -> None:
        for worker in workers:
            self._workers.remove(worker)
            worker.throw_away()


def _collect(workers: dict[int, _Worker], timeout_s: float, after_failure_s: float) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    missing: dict[Any, int] = {worker.connection: rank for rank, worker in workers.items()}
    deadline = time.monotonic() + timeout_s
    while missing:
        ready = wait(list(missing), timeout=max(0.0, deadline - time.monotonic()))
        for connection in ready or list(missing):
            rank = missing.pop(connection)
            outcomes[rank] = workers[rank].outcome() if ready else workers[rank].end_of_hang()
            if outcomes[rank].failure is not None:
                deadline = min(deadline, time.monotonic() + after_failure_s)
    return outcomes


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
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


def _serve(connection: Connection, stacks: str) -> None:
    """What a worker does: task after task, until whoever started it is gone."""
    os.setpgrp()  # whoever started it decides what an interrupt from the terminal means
    # Shells let what they start in the background ignore interrupts; Python then has no handler for them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # It ends with its parent, as daemons do, and may start processes of its own, as daemons may not.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    gc.freeze()  # what was imported before it was forked need not be looked through after every task
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=True)
        while True:
            try:
                task: Task = connection.recv()
            except (EOFError, ConnectionError):
                return
            except Exception:  # arguments that cannot be unpickled here
                connection.send(Outcome(failure=traceback.format_exc()))
                continue
            try:
                connection.send(_perform(task))
            except ConnectionError:
                return
            except Exception:  # a result that cannot be pickled
                connection.send(Outcome(failure=traceback.format_exc()))


def _perform(task: Task) -> Outcome:
    try:
        function = _load(task)
        with contextlib.nullcontext() if task.group is None else _in_group(task.group), warnings.catch_warnings():
            if task.is_strict:
                warnings.simplefilter("error")
            return Outcome(value=function(*task.arguments, **task.options))
    except BaseException:
        return Outcome(failure=traceback.format_exc())


@contextlib.contextmanager
def _in_group(group: Group) -> Iterator[None]:
    if not dist.is_initialized():
        timeout = datetime.timedelta(seconds=group.timeout_s)
        store = PrefixStore(f"group-{group.number}", _store_at(group.store_port))
        dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.world, timeout=timeout)
        # A rank that is done at once and leaves would break the connections that others are still making.
        store.set(f"joined-{group.rank}", "")
        store.wait([f"joined-{rank}" for rank in range(group.world)], timeout)
    try:
        yield
    finally:
        if not group.is_kept and dist.is_initialized():
            dist.destroy_process_group()
            gc.collect()
            # torch's caches keep every mesh, a mesh its groups, and a group of gloo three threads that never rest.
            for mesh in [each for each in gc.get_objects() if type(each) is DeviceMesh]:
                getattr(mesh, "_pg_registry", {}).clear()


@functools.cache
def _store_at(port: int) -> TCPStore:
    """One connection per worker, because connecting looks up names, which can take seconds."""
    return TCPStore(_HOST, port, None, False, wait_for_workers=False)


def _load(task: Task) -> Callable[..., Any]:
    """The function of a task; its file is loaded once, under the name it has where it comes from."""
    if task.module not in sys.modules:
        spec = importlib.util.spec_from_file_location(task.module, task.path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[task.module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found: Any = sys.modules[task.module]
    for name in task.function.split("."):
        found = getattr(found, name)
    function: Callable[..., Any] = found
    return function
