"""Children that are forked off a process at every call that it makes to the system while it saves or loads."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import holdfast
from holdfast._native.sweep import sweep
from holdfast._staging.one_at_a_time import TURNS
from torture import exports, saves
from torture.crew import Case, Child
from torture.part import Options, PartResult
from torture.samples import get_ready_to_fork

NAME = "forks"
REQUIRED = 400
_INSTANTS = {"small": 3, "slabs": 2}
_PATIENCE_S = 30.0
_LOAD, _OPEN, _OVERLAP = "load", "open", "async, overlap"
OPERATIONS = (
    *(*saves.MODES[1:], *saves.ASYNC_MODES, _OVERLAP, *saves.PROCESS_MODES, *saves.TORCH_FORMAT_MODES),
    *(*saves.TOLD_MODES, *saves.EXPORT_MODES[1:]),
)
READS = (_LOAD, _OPEN)

AT_CALLS = (
    *("exits", "ends at once", "is killed", "is one of multiprocessing's", "forks another"),
    *("saves", "saves in the background", "saves by a process", "loads", "asks for the save", "outlives its parent"),
)
"""What children do that are forked, by whichever thread makes it, at a call to the system."""

IN_STATE_DICT = ("exits", "leaves by an exception", "returns", "saves", "saves in the background")
"""And those that are forked by a ``state_dict()``."""

_COUNTED = (
    *("close", "fsync", "fstat", "ftruncate", "getpid", "link", "lstat", "mkdir", "open", "posix_fallocate", "preadv"),
    *("pwrite", "read", "rename", "stat", "umask", "unlink", "write"),
)


def run(options: Options) -> PartResult:
    """Count the calls of each operation; then fork at some of them a child of each kind."""
    chosen = random.Random(options.seed)
    plain: list[Case] = [
        {"folder": str(options.folder), "operation": operation, "shape": shape}
        for operation in (*OPERATIONS, *READS)
        for shape in (("small",) if options.quick else ("small", "slabs"))
    ]
    cases: list[Case] = []
    for case, outcome in options.crew.each(count_calls, plain):
        for kind in AT_CALLS:
            if kind == "asks for the save" and ("async" not in case["operation"] or "export" in case["operation"]):
                continue
            instants = chosen.sample(range(1, outcome["calls"] + 1), _INSTANTS[case["shape"]])
            cases += [{**case, "kind": kind, "number": number} for number in instants]
        cases += [{**case, "kind": kind, "number": 0} for kind in IN_STATE_DICT if case["operation"] != _OPEN]
    if options.quick:
        cases = chosen.sample(cases, 20)
    violations: list[str] = []
    kinds: Counter[str] = Counter()
    for done, (case, outcome) in enumerate(options.crew.each(fork_at, cases), start=1):
        options.progress(done, len(cases))
        kinds[case["kind"]] += outcome.get("is_forked", True)
        if problem := outcome.get("problem") or outcome.get("failure"):
            where = f"at call {case['number']}" if case["number"] else "in state_dict()"
            violations.append(f"{case['operation']} ({case['shape']}), a child that {case['kind']}, {where}: {problem}")
    return PartResult(
        fault="a child forked at a call of save, async_save, export, load or open, or in a state_dict()",
        must_hold="the parent's checkpoint is whole, right and alone; so is the child's; nobody hangs, no lock is kept",
        injected=kinds.total(),
        required=REQUIRED,
        violations=violations,
        counts=dict(kinds),
    )


def count_calls(folder: str, operation: str, shape: str) -> Case:
    """How many calls ``operation`` makes where nothing is forked."""
    get_ready_to_fork()
    with _place(folder, operation, shape) as path:
        end = Child(lambda: _parent(path, operation, shape, "", -1)).end()
    return {"calls": end.told["calls"]}


def fork_at(folder: str, operation: str, shape: str, kind: str, number: int) -> Case:
    """What is wrong after a child of that kind was forked at call ``number``, or, for 0, in a state_dict()."""
    get_ready_to_fork()
    with _place(folder, operation, shape) as path:
        end = Child(lambda: _parent(path, operation, shape, kind, number)).end(2 * _PATIENCE_S)
        if end.hung:
            return {"problem": "the parent hangs"}
        if end.told is not None:
            return {"problem": end.told["problem"], "is_forked": end.told["is_forked"]}
        if kind == "outlives its parent":
            return {"problem": _after_death(path, operation, shape), "is_forked": True}
        return {"problem": f"the parent ended with {end.status or -(end.signal or 0)}"}


@contextlib.contextmanager
def _place(folder: str, operation: str, shape: str) -> Iterator[Path]:
    """Where the operation works: what is there before it is made."""
    path = Path(folder) / f"of-{os.getpid()}" / "checkpoint"
    mode = saves.MODES[-1] if operation in READS else operation
    if operation == _OVERLAP:
        mode = saves.ASYNC_MODES[-1]
    saves.prepare(path, mode, shape)
    saves.save(path.parent / "others", saves.MODES[0], version=5)
    saves.save(path.parent / "warm", saves.TORCH_FORMAT_MODES[0])  # so that its modules are there
    holdfast.release()
    try:
        yield path
    finally:
        shutil.rmtree(path.parent)


class _Forking:
    """Forks once, in the parent alone, at the counted call ``number``; the child does what its ``kind`` says."""

    def __init__(self, path: Path, kind: str, number: int) -> None:
        self.path = path
        self.kind = kind
        self._number = number
        self._parent = os.getpid()
        self._calls = itertools.count(1)
        self.calls = 0
        self.is_begun = False
        self.child = 0
        self.handles: list[Any] = []
        self._process: Any = None

    def install(self) -> None:
        """Count the calls from here on."""
        for module, name in (*((os, name) for name in _COUNTED), (fcntl, "flock")):
            setattr(module, name, self._counting(getattr(module, name)))

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls = number = next(self._calls)
            is_chosen = number == self._number
            if is_chosen:
                self.is_begun = True
            if is_chosen and number % 2 == 0:
                self.fork()
            try:
                return function(*arguments, **options)
            finally:
                if is_chosen and number % 2 == 1:
                    self.fork()

        return call

    def fork(self) -> None:
        """Make the child."""
        if self.kind == "is one of multiprocessing's":
            process = multiprocessing.get_context("fork").Process(target=self._save, args=("fresh",))
            process.start()
            self._process = process
            return
        child = os.fork()
        if child:
            self.child = child
            if self.kind == "outlives its parent":
                (self.path.parent / "pid").write_text(str(child))
                os.kill(os.getpid(), signal.SIGKILL)
            return
        if self.kind == "leaves by an exception":
            raise SystemExit
        if self.kind != "returns":
            self._behave()

    def _behave(self) -> NoReturn:
        signal.alarm(int(_PATIENCE_S))
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}").startswith("pipe:") and number > 2:
                    os.close(number)  # at whose end somebody waits for the parent
        status = 1
        try:
            self._do()
            status = 0
        except BaseException as error:
            (self.path.parent / "why").write_text(f"{type(error).__name__}: {error}")
        if self.kind == "exits":
            ctypes.pythonapi.Py_Exit(status)  # as the end of a program does, wherever this one is; torch takes its time
        if self.kind != "ends at once":
            atexit._run_exitfuncs()
        os._exit(status)

    def _do(self) -> None:
        if self.kind in ("is killed", "outlives its parent"):
            signal.pause()
        elif self.kind == "forks another":
            child = os.fork()
            if child == 0:
                self.kind = "saves"
                self._behave()
            _check(os.waitpid(child, 0)[1] == 0, "its own child failed")
        elif self.kind == "loads":
            _check(saves.found_version(self.path.parent / "others") == 5, "what it loaded is another version")
        elif self.kind == "asks for the save":
            for handle in self.handles[:1]:
                _check(isinstance(handle.exception(), (holdfast.CheckpointError, type(None))), "no clear answer")
        elif self.kind.startswith("saves"):
            self._save({"saves": "fresh", "saves in the background": "async, fresh"}.get(self.kind, "process, fresh"))

    def _save(self, mode: str) -> None:
        path = self.path.parent / "own"
        saves.save(path, mode, version=7)
        _check(saves.found_version(path) == 7, "what it saved is not there")
        _check(gc.isenabled(), "its collector stands still")
        if TURNS.process is not None:
            (self.path.parent / "writer").write_text(str(TURNS.process.number))

    def problem(self) -> str | None:
        """What is wrong with the child, once it has ended."""
        self._number = -1  # what comes now is not to be disturbed
        while self.is_begun and not self.child and self._process is None:
            time.sleep(0.001)  # another thread is about to
        if self._process is not None:
            self._process.join(_PATIENCE_S)
            if self._process.exitcode != 0:
                return f"the child of multiprocessing ended with {self._process.exitcode}"
        if self.child:
            wanted = 0
            if self.kind == "is killed":
                os.kill(self.child, signal.SIGKILL)
                wanted = -signal.SIGKILL
            status = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])  # it has an alarm
            if status != wanted:
                why = self.path.parent / "why"
                return f"the child ended with {status}: {why.read_text() if why.exists() else ''}"
        writer = self.path.parent / "writer"
        if writer.exists() and not _ends(int(writer.read_text())):
            return "the child's writer process lives on"
        return None


def _check(is_so: bool, problem: str) -> None:
    if not is_so:
        raise AssertionError(problem)


def _ends(process: int) -> bool:
    """Whether a process that is not a child of this one ends soon."""
    until = time.monotonic() + _PATIENCE_S / 2
    while os.path.exists(f"/proc/{process}"):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


class _Part:
    """A part of the state that forks when it is asked for what it has."""

    def __init__(self, forking: _Forking, value: Any) -> None:
        self._forking = forking
        self._value = value

    def state_dict(self) -> Any:
        """Its value; the first time it forks."""
        if self._forking.kind and not self._forking.is_begun:
            self._forking.is_begun = True
            self._forking.fork()
        return self._value

    def load_state_dict(self, value: Any) -> None:
        """Take the value."""
        self._value = value


def _parent(path: Path, operation: str, shape: str, kind: str, number: int) -> Case:
    """The operation, and what is wrong after it."""
    me = os.getpid()
    forking = _Forking(path, kind, number)
    try:
        state = saves.state_of(2, shape)
        if operation in saves.EXPORT_MODES:
            state = exports.tensors_of(state)
        if number == 0:
            state["model"] = _Part(forking, state["model"])
        if number != 0:
            forking.install()
        with saves.told_on_a_full_disk() if operation in saves.TOLD_MODES else contextlib.nullcontext():
            found = _operate(path, operation, shape, state, forking)
    finally:
        if os.getpid() != me:
            os._exit(0)  # a child that came back from where it was forked
    calls = forking.calls
    problem = found or forking.problem() or _problem(path, operation, shape)
    if problem is None and (path.parent / "own").exists():
        problem = _alone(path.parent / "own")
    return {"calls": calls, "problem": problem, "is_forked": forking.is_begun}


def _operate(path: Path, operation: str, shape: str, state: dict[str, Any], forking: _Forking) -> str | None:
    if operation in READS:
        if operation == _OPEN:
            with holdfast.open(path) as checkpoint:
                model = {"weight": checkpoint["model.weight"][...], "layers": [checkpoint["model.layers.0"][...]]}
                state = {"step": checkpoint["step"], "model": model}
        else:
            holdfast.load(state, path)
        if isinstance(state["model"], _Part):
            state["model"] = state["model"].state_dict()
        return None if saves.version_of(state, shape) == 1 else "what was loaded is another version"
    if operation in saves.EXPORT_MODES:
        exports.save(path, state, 2, overwrite=True, in_background="async" in operation)
        return None
    writer: holdfast.StorageWriter = holdfast.NativeWriter(path)
    if operation in saves.TORCH_FORMAT_MODES:
        writer = holdfast.FileSystemWriter(path, thread_count=2)
    if "async" in operation or operation in saves.PROCESS_MODES:
        kind = "process" if operation in saves.PROCESS_MODES else "thread"
        handle = holdfast.async_save(
            state,
            storage_writer=writer,
            async_checkpointer_type=holdfast.AsyncCheckpointerType(kind),
            options=holdfast.SaveOptions(
                stage="overlap" if operation == _OVERLAP else "copy", progress=forking.handles.append
            ),
        )
        handle.result(_PATIENCE_S)
    else:
        holdfast.save(state, storage_writer=writer)
    return None


def _problem(path: Path, operation: str, shape: str) -> str | None:
    """What is wrong with what is there, and with the next save, after the operation was acknowledged."""
    if operation in READS:
        return _alone(path)
    if (problem := _alone(path)) is not None:
        return problem
    mode = saves.ASYNC_MODES[-1] if operation == _OVERLAP else operation
    if (problem := saves.problem_after(path, mode, shape, acknowledged=True)) is not None:
        return problem
    writer = None if TURNS.process is None else TURNS.process.number
    holdfast.release()
    return None if writer is None or _ends(writer) else "the writer process lives on"


def _alone(path: Path) -> str | None:
    """What is there that no checkpoint needs."""
    names = sorted(os.listdir(path))
    if "holdfast.json" in names:
        return f"left beside {path.name}: {exports.leftovers(path)}" if exports.leftovers(path) else None
    if "manifest.json" in names:
        return None if len(names) == 3 else f"left over among {names}"
    return None if len(names) == 1 + sum(name.endswith(".distcp") for name in names) <= 3 else f"left over in {names}"


def _after_death(path: Path, operation: str, shape: str) -> str | None:
    """What is wrong when the parent is dead and its child lives: whatever was left must be proven dead, and go."""
    child = int((path.parent / "pid").read_text()) if (path.parent / "pid").exists() else 0
    try:
        until = time.monotonic() + _PATIENCE_S / 2
        place = saves.reach(path, operation)
        while place.exists() and any(found.verdict != "dead" for found in sweep(place).leftovers):
            if time.monotonic() > until:  # a writer process needs a moment to notice
                return f"kept alive: {[(found.verdict, found.reason) for found in sweep(place).leftovers]}"
            time.sleep(0.01)
        if place.exists():
            sweep(place, delete=True)
        if operation in READS:
            return None if saves.found_version(path, shape) == 1 else "what was there is another version"
        mode = saves.ASYNC_MODES[-1] if operation == _OVERLAP else operation
        return saves.problem_after(path, mode, shape)
    finally:
        if child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        sys.stderr.flush()
