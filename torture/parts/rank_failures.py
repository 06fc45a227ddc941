"""A rank fails in any way, is slow or busy, in each phase of a save, an async_save, a load and an export; or misses it.

In an export the ranks are of two hosts, which have parts of the same rows: they pass them on, over connections that may
be cut. The ranks are real processes. The limits are the library's own but for the deadline without progress, which is
short enough to be waited for.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import math
import os
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableSequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast import hf
from holdfast._async_saver import async_save
from holdfast._huggingface.writer import FolderWriter
from holdfast._ranks import carrier
from holdfast._ranks.exchange import Visit
from holdfast._staging.copies import HostCopier
from holdfast._values.deadline import Patience
from torture import exports
from torture.crew import Case, Child, End
from torture.meeting import meet
from torture.part import Options, PartResult

NAME = "rank-failures"

DEADLINE_S = 5.0
_PLANNING = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve")
PHASES = {
    "save": (*_PLANNING, "write", "finish"),
    "async_save": (*_PLANNING, "stage", "write", "finish"),
    "load": ("read_metadata", *_PLANNING, "read", "hand_back"),
    "export": ("pass", "write", "finish"),
}
COORDINATOR_ONLY = ("create_global_plan", "finish")
PIECEWISE = ("resolve", "stage", "write", "read", "pass")
"""The phases that have many pieces: the trouble is in the middle, and one can be slow in them and still progress."""
FAULTS = ("raise", "interrupt", "kill", "stop", "hang", "slow", "lock")
WAITED_FOR = ("slow", "lock")
_PHASE_WORDS = (
    "plan",
    "laying out",
    "staging",
    "writing",
    "reading",
    "comparing",
    "opening",
    "meeting",
    "handing back",
    "putting",
)
_NAMING_S = 3.0
"""So long a cut connection may be that of a rank which died, whom others are to name."""
_AWAITED_S = {"raise": 0.0, "interrupt": 0.0, "kill": 0.0, "stop": DEADLINE_S, "hang": DEADLINE_S, "cut": _NAMING_S}
_ALLOWED_S = {"raise": 2.0, "interrupt": 2.0, "kill": 2.0, "stop": 5.0, "hang": 5.0, "cut": 5.0}
"""What it may take until all know, beyond what is waited: on a machine that has a processor for everyone."""
_LOCK_S = 11  # more than any silence that was ever taken for death
_ITEMS = 5
_COLUMNS = (68, 1 << 18)  # which are many stripes
_ELEMENTS = (17 << 20) // 4  # more than one slab each, so that a slow rank shows progress after every one
_PAUSE_S = 1.6
_SLOW_PIECES = 5
_HANG_S = DEADLINE_S + 6.0
_PATIENCE = {"lock": Patience(progress_s=6.0 * DEADLINE_S)}
_USUAL_PATIENCE = Patience(progress_s=DEADLINE_S)
_WORKERS = 6  # cases mostly wait
_MOST_SLOWNESS = 4.0  # ranks wait more than they work: 2.9 s were needed, for 2.0 s, where 17 processes shared one
_MEASURE_EVERY_S = 0.2
_MEASURE_S = 0.02  # longer than the scheduler lets a process that has slept go before the others


def run(options: Options) -> PartResult:
    """Let one rank fail in every way and phase, and judge what the others say of it, and when."""
    cases = [{**case, "folder": str(options.folder)} for case in all_cases()]
    if options.quick:
        cases = cases[options.seed % 7 :: 12]
    violations: list[str] = []
    slowest = dict.fromkeys(_ALLOWED_S, 0.0)
    with _Yardstick() as yardstick:
        for done, (case, outcome) in enumerate(options.crew.each(suffer, cases, workers=_WORKERS), start=1):
            options.progress(done, len(cases))
            name, fault = "{operation} on {world} ranks, rank {rank}, {fault} in {phase}".format(**case), case["fault"]
            problems = outcome.get("problems", [outcome.get("failure")])
            if fault in slowest and (known := outcome.get("known")):
                struck, last = known
                slowest[fault] = max(slowest[fault], last - struck)
                slowness = min(yardstick.slowness(struck, last), _MOST_SLOWNESS)
                allowed_s = _AWAITED_S[fault] + _ALLOWED_S[fault] * slowness
                if last - struck > allowed_s:
                    problems.append(f"known after {last - struck:.1f} s, {allowed_s:.1f} s are allowed")
            violations += [f"{name}: {problem}" for problem in problems]
    return PartResult(
        fault="a rank raises, is interrupted, killed, stopped, hangs, is slow or holds the interpreter's lock for "
        f"{_LOCK_S} s, in each phase of save, async_save, load and an export from two hosts, or misses the call; or "
        "connections between the hosts are cut; 2 and 4 ranks",
        must_hold="every survivor gets the same error naming rank and phase in time, one that is slow or busy is "
        "waited for, nothing is published with missing data, the next save works",
        injected=len(cases),
        counts=dict(Counter(case["operation"] for case in cases)),
        required=100,
        violations=violations,
        notes=[
            *(f"{fault}: known to all after {seconds:.1f} s at most" for fault, seconds in slowest.items()),
            f"a busy process took {yardstick.slowness():.1f} times its processor time",
        ],
    )


class _Yardstick:
    """Measures all the time how much longer than its processor time a busy process takes, beside all others.

    Where several share a processor, each gets its part of it, and what ranks do takes so many times as long.
    """

    def __init__(self) -> None:
        self._measured: list[tuple[float, float, float]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def __enter__(self) -> _Yardstick:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def slowness(self, begin: float = 0.0, end: float = math.inf) -> float:
        """How many times as long it took between ``begin`` and ``end``, or just before and after that."""
        some = [
            (took_s, busy_s)
            for at, took_s, busy_s in tuple(self._measured)
            if begin - 2 * _MEASURE_EVERY_S < at < end + took_s + 2 * _MEASURE_EVERY_S
        ]
        return max(1.0, sum(took_s for took_s, _ in some) / (sum(busy_s for _, busy_s in some) or math.inf))

    def _measure(self) -> None:
        while not self._is_over.wait(_MEASURE_EVERY_S):
            began, before = time.monotonic(), time.thread_time()
            while time.thread_time() - before < _MEASURE_S:
                pass
            now = time.monotonic()
            self._measured.append((now, now - began, time.thread_time() - before))


def all_cases() -> list[Case]:
    """Every phase of every operation, on the coordinator and elsewhere, with every fault."""
    in_phases = [
        {"operation": operation, "world": world, "rank": rank, "fault": fault, "phase": phase}
        for operation, phases in PHASES.items()
        for world, phase, fault in itertools.product((2, 4), phases, FAULTS)
        for rank in ((0,) if phase in COORDINATOR_ONLY else (0, world - 1))
        if (fault not in WAITED_FOR or phase in PIECEWISE) and (fault not in ("interrupt", "lock") or world == 2)
        # The bytes of a load may all be read before the planner is asked where they go.
        if (operation, fault, phase) != ("load", "slow", "resolve")
    ]
    missed = [
        {"operation": operation, "world": world, "rank": rank, "fault": "miss", "phase": "call"}
        for operation, (world, rank) in itertools.product(PHASES, ((2, 1), (4, 0), (4, 3)))
    ]
    cut = [
        {"operation": "export", "world": world, "rank": rank, "fault": "cut", "phase": "pass"}
        for world, rank in ((2, 0), (2, 1), (4, 0), (4, 3))
    ]
    return in_phases + missed + cut


def suffer(*, folder: str, operation: str, world: int, rank: int, fault: str, phase: str) -> Case:
    """One case: how the ranks ended, judged."""
    home = Path(folder) / f"{operation}-{world}-{rank}-{fault}-{phase}"
    home.mkdir()
    path = home / "checkpoint"
    if operation == "load":
        holdfast.save(_state(1, range(world)), path)
    children = [
        Child(partial(_act, home, operation, world, each, fault if each == rank else "", phase))
        for each in range(world)
    ]
    ends = {each: child.end(60.0) for each, child in enumerate(children) if each != rank or fault != "stop"}
    if fault == "stop":
        os.kill(children[rank].pid, signal.SIGKILL)
        children[rank].end()
    survivors = {each: end for each, end in ends.items() if each != rank or fault not in ("kill", "stop")}
    known, problems = _judge(home, survivors, rank=rank, fault=fault)
    if fault == "hang" and phase in ("write", "read"):
        problems += [
            f"the file is not named: {end.told['message']}" for end in survivors.values() if not _names_file(end)
        ]
    problems += _judge_files(path, operation, range(world), fault=fault)
    shutil.rmtree(home)
    return {"problems": problems, "known": known}


def _judge(home: Path, survivors: Mapping[int, End], *, rank: int, fault: str) -> tuple[list[float], list[str]]:
    """When the fault struck and when the last survivor knew, and what is wrong with what they were told."""
    told = {each: end.told for each, end in survivors.items()}
    if any(end.hung or end.told is None for end in survivors.values()):
        return [], [f"a rank did not end properly: {survivors}"]
    problems = [f"the next save failed on rank {each}: {said['next']}" for each, said in told.items() if said["next"]]
    if fault == "miss":
        others = {
            (said["error"], f"rank {rank} says " in str(said["message"])) for each, said in told.items() if each != rank
        }
        return [], problems + ([] if others == {("RankDisagreementError", True)} else [f"it was not named: {told}"])
    if fault in WAITED_FOR:
        return [], problems + [
            f"rank {each} was not waited for: {said}" for each, said in told.items() if said["error"]
        ]
    if not (home / "struck").exists():
        return [], [*problems, f"the fault did not strike: {told}"]
    struck = float((home / "struck").read_text())
    known = [struck, max(said["at"] for each, said in told.items() if each != rank or fault == "raise")]
    if fault == "interrupt":
        own = told.pop(rank)
        problems += [] if own["error"] == "KeyboardInterrupt" else [f"the interrupt was swallowed: {own}"]
    errors = {(said["error"], said["message"]) for said in told.values()}
    # Survivors of the coordinator speak for themselves, each of the phase that it is in.
    if len(errors) != 1 and (fault in ("raise", "interrupt") or rank != 0):
        return known, [*problems, f"the ranks say different things: {sorted(map(str, errors))}"]
    for error, message in errors:
        if error != ("CheckpointError" if fault in ("raise", "interrupt") else "RankLostError"):
            problems.append(f"the error is {error}: {message}")
        # Of a connection that is cut, each end may name the other.
        if f"rank {rank}" not in (message or "") and (fault != "cut" or "closed its connection" not in (message or "")):
            problems.append(f"the rank is not named: {message}")
        if not any(name in (message or "") for name in _PHASE_WORDS):
            problems.append(f"the phase is not named: {message}")
    return known, problems


def _names_file(end: End) -> bool:
    said = (end.told or {}).get("message") or ""
    return " bytes done, at 'data-" in said or " bytes done, at 'model" in said


def _judge_files(path: Path, operation: str, ranks: range, *, fault: str) -> list[str]:
    """What is wrong with what is published now."""
    expected = 1 if operation == "load" else None
    if fault not in ("kill", "stop"):
        expected = 3  # by the next save of the same ranks
    try:
        state = holdfast.load(path)
    except holdfast.NotFoundError:
        state = None
    version = None if state is None else int(state["step"])
    if version != expected and not (operation != "load" and expected is None and version == 2):
        return [f"version {version} is published instead of {expected}"]
    found, wanted = state or {}, {}
    if version is not None:
        wanted = _state(version, ranks) if operation != "export" else _exported(version, ranks)
    torn = found.keys() ^ wanted.keys()
    torn |= {key for key in wanted.keys() - torn - {"step", "held"} if not torch.equal(found[key], wanted[key])}
    return [f"torn: {sorted(torn)}"] if torn else []


def _state(version: int, ranks: range) -> dict[str, Any]:
    state: dict[str, Any] = {"step": version, "held": {"version": version}}
    for rank in ranks:
        state.update({f"rank {rank}.{n}": torch.full((_ELEMENTS,), float(version)) for n in range(_ITEMS)})
    return state


def _exported(version: int, ranks: range, world: int = 0) -> dict[str, Any]:
    """What an export of ``ranks``, of so many if it is one rank's, has beside columns: these are last."""
    state = {key: torch.tensor(each) if isinstance(each, int) else each for key, each in _state(version, ranks).items()}
    del state["held"]
    columns = exports.Shard(version, 1, ranks[0], world, _COLUMNS) if world else torch.full(_COLUMNS, float(version))
    return {**state, "columns": columns}


def _act(home: Path, operation: str, world: int, rank: int, fault: str, phase: str) -> Any:
    """What a rank does and tells: the operation, and a save after it."""
    meet(home / "address", rank=rank, world=world, patience=_PATIENCE.get(fault_of(home), _USUAL_PATIENCE))
    trouble = _Trouble(home / "struck", fault, phase)
    trouble.come_by()
    path = home / "checkpoint"
    own = range(rank, rank + 1)
    state = _state(2, own) if operation != "export" else _exported(2, own, world)
    said: dict[str, Any] = {"error": None, "message": None, "next": None}
    try:
        if fault == "miss":
            pass
        elif operation == "save":
            holdfast.save(state, storage_writer=_Writer(path, trouble), planner=_SavePlanner(trouble))
        elif operation == "async_save":
            async_save(state, storage_writer=_Writer(path, trouble), planner=_SavePlanner(trouble)).result()
        elif operation == "export":
            Visit.__init__.__defaults__ = (lambda: (f"host {rank % 2}",),)
            carrier._NAMING_S = _NAMING_S
            holdfast.save(state, storage_writer=_FolderWriter(path, trouble), planner=_SavePlanner(trouble))
        else:
            state["held"] = _Holder(trouble)
            holdfast.load(state, storage_reader=_Reader(path, trouble), planner=_LoadPlanner(trouble))
    except (holdfast.CheckpointError, KeyboardInterrupt) as error:
        said.update(error=type(error).__name__, message=str(error))
    said["at"] = time.monotonic()
    if fault_of(home) not in ("kill", "stop"):
        if fault_of(home) == "hang":  # one that hangs on cannot take part in the next save
            time.sleep(max(0.0, float((home / "struck").read_text()) + _HANG_S + 0.5 - time.monotonic()))
        try:
            state = _state(3, own)
            if operation == "async_save":
                async_save(state, path).result()
            elif operation == "export":
                hf.export(_exported(3, own, world), path, overwrite=True)
            else:
                holdfast.save(state, path)
        except holdfast.CheckpointError as error:
            said["next"] = f"{type(error).__name__}: {error}"
    return said


def fault_of(home: Path) -> str:
    """The fault that the name of a case's folder tells."""
    return home.name.split("-")[3]


class _Trouble:
    """What happens to this rank when it comes to the phase."""

    def __init__(self, place: Path, fault: str, phase: str) -> None:
        self._place = place
        self._fault = fault
        self._phase = phase
        self._visits = 0
        self._one_at_a_time = threading.Lock()

    def come_by(self) -> None:
        """Have the trouble at a piece that this process copies, writes or reads from here on, if it is for that."""
        jobs, pwrite, preadv, send = HostCopier._jobs, os.pwrite, os.preadv, carrier.FrameConnection.send

        def pass_on(connection: carrier.FrameConnection, *arguments: Any) -> None:
            self.connection = connection.socket
            self.visit("pass")
            send(connection, *arguments)

        def copy_piece(job: Callable[[], None]) -> None:
            self.visit("stage")
            job()

        def write_piece(*arguments: Any) -> int:
            self.visit("write")
            return pwrite(*arguments)

        def read_piece(*arguments: Any) -> int:
            if len(arguments) == 3:  # probes of the page cache have flags too
                self.visit("read")
            return preadv(*arguments)

        HostCopier._jobs = lambda *arguments: (partial(copy_piece, job) for job in jobs(*arguments))  # type: ignore[method-assign]
        os.pwrite, os.preadv = write_piece, read_piece
        carrier.FrameConnection.send = pass_on  # type: ignore[method-assign, assignment]

    def visit(self, phase: str) -> None:
        """Have the trouble, if it is for this phase; in the middle of the work where that has a middle."""
        if not self._fault or phase != self._phase:
            return
        with self._one_at_a_time:
            self._visits += 1
            is_time = self._visits == (3 if phase in PIECEWISE else 1)
            if self._fault == "slow" and self._visits <= _SLOW_PIECES:
                self._note()
                time.sleep(_PAUSE_S)
        if is_time and self._fault != "slow":
            self._note()
            if self._fault == "raise":
                raise ZeroDivisionError("odd")
            if self._fault == "interrupt":
                raise KeyboardInterrupt
            if self._fault == "cut":
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if self._fault == "lock":
                ctypes.PyDLL(None).sleep(_LOCK_S)  # which does not let go of it, as an extension may not
                return
            if self._fault == "hang":
                time.sleep(_HANG_S)
            else:
                os.kill(os.getpid(), signal.SIGKILL if self._fault == "kill" else signal.SIGSTOP)
                time.sleep(_HANG_S)  # another thread may take the signal, a moment later

    def _note(self) -> None:
        draft = self._place.with_suffix(".draft2")
        draft.write_text(str(time.monotonic()))
        draft.rename(self._place)


class _Holder:
    """A Stateful object that has the trouble when it gets its state back."""

    def __init__(self, trouble: _Trouble) -> None:
        self._trouble = trouble

    def state_dict(self) -> dict[str, int]:
        return {"version": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._trouble.visit("hand_back")


class _SavePlanner(holdfast.DefaultSavePlanner):
    def __init__(self, trouble: _Trouble) -> None:
        super().__init__()
        self._trouble = trouble

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._trouble.visit("set_up_planner")
        super().set_up_planner(*args, **kwargs)

    def create_local_plan(self) -> holdfast.SavePlan:
        self._trouble.visit("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(
        self, all_plans: list[holdfast.SavePlan]
    ) -> tuple[list[holdfast.SavePlan], holdfast.Metadata]:
        self._trouble.visit("create_global_plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: holdfast.SavePlan) -> holdfast.SavePlan:
        self._trouble.visit("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: holdfast.WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.tensor_data is not None:
            self._trouble.visit("resolve")
        return super().resolve_data(write_item)


class _Writer(holdfast.NativeWriter):
    def __init__(self, path: Path, trouble: _Trouble) -> None:
        super().__init__(path)
        self._trouble = trouble

    def finish(self, metadata: holdfast.Metadata, results: list[MutableSequence[holdfast.WriteResult]]) -> None:
        self._trouble.visit("finish")
        super().finish(metadata, results)


class _FolderWriter(FolderWriter):
    def __init__(self, path: Path, trouble: _Trouble) -> None:
        super().__init__(path)
        self._trouble = trouble

    def finish(self, metadata: holdfast.Metadata, results: list[MutableSequence[holdfast.WriteResult]]) -> None:
        self._trouble.visit("finish")
        super().finish(metadata, results)


class _LoadPlanner(holdfast.DefaultLoadPlanner):
    def __init__(self, trouble: _Trouble) -> None:
        super().__init__()
        self._trouble = trouble

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._trouble.visit("set_up_planner")
        super().set_up_planner(*args, **kwargs)

    def create_local_plan(self) -> holdfast.LoadPlan:
        self._trouble.visit("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[holdfast.LoadPlan]) -> list[holdfast.LoadPlan]:
        self._trouble.visit("create_global_plan")
        return super().create_global_plan(global_plan)

    def finish_plan(self, central_plan: holdfast.LoadPlan) -> holdfast.LoadPlan:
        self._trouble.visit("finish_plan")
        return super().finish_plan(central_plan)

    def resolve_tensor(self, read_item: holdfast.ReadItem) -> torch.Tensor:
        self._trouble.visit("resolve")
        return super().resolve_tensor(read_item)


class _Reader(holdfast.NativeReader):
    def __init__(self, path: Path, trouble: _Trouble) -> None:
        super().__init__(path)
        self._trouble = trouble

    def read_metadata(self, *args: Any, **kwargs: Any) -> holdfast.Metadata:
        self._trouble.visit("read_metadata")
        return super().read_metadata(*args, **kwargs)
