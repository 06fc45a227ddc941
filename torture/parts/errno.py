"""Every error that a file system can give, at each call of a save, of a load, and of what is done to a run."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast
from torture import managing, saves, stepping, torch_dcp
from torture.crew import Case, Child, End
from torture.part import Options, PartResult
from torture.shim import EVERY, Action, Call, Fault, armed, counts, read_trace

NAME = "errno"
IN_SLICES = True
CODES = ("ENOSPC", "EIO", "EDQUOT", "EACCES", "EROFS", "EMFILE", "ENOMEM", "ESTALE", "EINTR", "EAGAIN")
_LOADS = {"load": "replacing", "load, not cached": "replacing", "load of an export": saves.EXPORT_MODES[1]}
OPERATIONS = (
    *(*saves.MODES, *saves.TOLD_MODES[:1], *saves.EXPORT_MODES[:2], *_LOADS),
    *("delete", "report", "pin", "follow"),
    *managing.MODES,
)
"""Loads, with what is there to be loaded; saves; and what is done to a run."""
_DAMAGE = ("EIO", "ESTALE")
"""What a resume takes for a damaged file: it goes on to an older step, and fails where none is left."""

_FOREVER = 0
_LONGEST_END_S = 5.0


def run(options: Options) -> PartResult:
    """Record the calls of each operation, then let each of them fail with each error."""
    # What is in memory is always cached.
    folders = {name: str(options.disk if name == "load, not cached" else options.folder) for name in OPERATIONS}
    plain = [{"folder": folder, "operation": operation} for operation, folder in folders.items()]
    traced = {case["operation"]: outcome["calls"] for case, outcome in options.crew.each(trace_calls, plain)}
    cases: list[Case] = [
        {
            "folder": folders[operation],
            "operation": operation,
            "number": number,
            "call": call,
            "code": code,
            "times": times,
        }
        for operation, calls in traced.items()
        for number, call in enumerate(calls, start=1)
        for code in CODES
        for times in (1, 3 if code == "EINTR" else _FOREVER)
    ]
    cases = options.share_of(cases)
    if options.quick:
        cases = random.Random(options.seed).sample(cases, 100)
    violations: list[str] = []
    tolerated = unmet = 0
    for done, (case, outcome) in enumerate(options.crew.each(fail_at, cases), start=1):
        options.progress(done, len(cases))
        tolerated += outcome.get("succeeded", 0) and case["code"] != "EINTR"
        unmet += outcome.get("unmet", 0)
        if outcome.get("problem") or "failure" in outcome:
            place = f"{case['operation']}, {case['code']} at call {case['number']} ({Call(case['call']).name})"
            forever = " and ever after" if case["times"] == _FOREVER else ""
            violations.append(f"{place}{forever}: {outcome.get('problem') or outcome['failure']}")
    return PartResult(
        fault=f"{', '.join(CODES)} at each call of {', '.join(OPERATIONS)}, once or from then on",
        must_hold="right error with errno, nothing published, no thread, descriptor or file left; EINTR invisible",
        injected=len(cases) - unmet,
        required=1000,
        violations=violations,
        counts={
            "no reason to fail, and the outcome was whole": tolerated,
            **Counter(f"faults: {case['operation']}" for case in cases),
        },
        torch=_torch_in_words(options) if options.compares else None,
    )


def _torch_in_words(options: Options) -> str:
    """What torch's writer does when one of its calls, in any of four threads, finds the disk full."""
    plain: list[Case] = [{"folder": str(options.folder), "number": 0}]
    (_, counted), *_ = options.crew.each(fill_torch_at, plain)
    cases: list[Case] = [{**plain[0], "number": number} for number in range(1, counted["calls"] + 1)]
    outcomes = [outcome for _, outcome in options.crew.each(fill_torch_at, cases)]
    silent = sum(outcome.get("problem") is not None for outcome in outcomes)
    return f"ENOSPC, thread_count=4, {len(cases)} points: {silent} saves returned and are not whole"


def fill_torch_at(*, folder: str, number: int) -> Case:
    """Let a call of torch's save find the disk full; whether it returned and what it returned of is not there."""
    path = Path(folder) / "torch" / str(number) / "checkpoint"
    path.parent.mkdir(parents=True)

    def child() -> Any:
        threading.excepthook = lambda details: None  # where such errors end there
        action = Action.FAIL if number else Action.NOTHING
        with armed(path, Fault(action=action, number=number, parameter=errno.ENOSPC)):
            try:
                torch_dcp.save(path, 2, threads=4)
            except BaseException as error:  # torch's own error is no Exception
                return {"error": type(error).__name__, "calls": counts().calls}
        return {"error": None, "calls": counts().calls}

    told = Child(child).end().told
    problem = None if told["error"] else torch_dcp.problem_after(path, "fresh", acknowledged=True)
    shutil.rmtree(path.parent)
    return {"calls": told["calls"], "problem": problem}


def trace_calls(*, folder: str, operation: str) -> Case:
    """The kinds of calls that an operation makes, in order."""
    path = _prepare(Path(folder) / "trace" / operation / "checkpoint", operation)
    log = path.parent / "log"

    def child() -> None:
        with (
            open(log, "wb", buffering=0) as stream,
            armed(_reach(path, operation), Fault(counted=EVERY), trace=stream.fileno()),
        ):
            _operate(path, operation)

    assert Child(child).end().status == 0
    calls = [int(record.call) for record in read_trace(log)]
    shutil.rmtree(path.parent)
    return {"calls": calls}


def fail_at(*, folder: str, operation: str, number: int, call: int, code: str, times: int) -> Case:
    """Let one call fail, and judge the error and what is left behind."""
    path = _prepare(Path(folder) / "fail" / f"{operation}-{number}-{code}-{times}" / "checkpoint", operation)
    before = _names(path, operation)
    fault = Fault(
        counted=EVERY,
        action=Action.FAIL,
        number=number,
        times=times or 1 << 40,
        parameter=getattr(errno, code),
    )

    def child() -> Any:
        threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
        told: dict[str, Any] = {"error": None}
        published: list[None] = []
        with armed(_reach(path, operation), fault):
            try:
                _operate(path, operation, lambda: published.append(None))
            except holdfast.CheckpointError as error:
                told = {
                    "error": type(error).__name__,
                    "errno": getattr(error, "errno", None),
                    "path": getattr(error, "path", None),
                    "message": error.message,
                }
            except managing.PassedOver as error:
                told = {"error": None if code in _DAMAGE else f"passed over: {error}"}
            except BaseException as error:
                told = {"error": f"not one of the library's: {type(error).__name__}: {error}"}
        deadline = time.monotonic() + _LONGEST_END_S
        while threading.active_count() > threads and time.monotonic() < deadline:
            time.sleep(0.001)  # who waits for a thread goes on a moment before it is gone
        told["threads"] = threading.active_count() - threads
        told["descriptors"] = len(os.listdir("/proc/self/fd")) - descriptors
        told["published"] = bool(published)
        told["struck"] = counts().struck
        return told

    end = Child(child).end()
    if operation == managing.SAVE_BEHIND and end.told is not None and not end.told["struck"]:
        shutil.rmtree(path.parent)
        return {"unmet": 1}  # its threads do not make as many calls each time
    problem = _judge(end, path, operation, before, call=Call(call), code=code, forever=times == _FOREVER)
    shutil.rmtree(path.parent)
    return {"problem": problem, "succeeded": int(end.told is not None and end.told["error"] is None)}


def _judge(
    end: End, path: Path, operation: str, before: list[str], *, call: Call, code: str, forever: bool
) -> str | None:
    told = end.told
    if told is None:
        return f"the process died: {end}"
    if not told["struck"]:
        return "the fault did not strike"
    if told["threads"] or told["descriptors"]:
        return f"{told['threads']} threads and {told['descriptors']} descriptors were left: {told}"
    if code == "EINTR" and not forever and told["error"] is not None:
        return f"EINTR was not invisible: {told}"
    # Who cannot have a lock, or tell whether a reader or a writer lives, takes it to live.
    is_refused = operation in stepping.MODES and told["error"] == "BusyError"
    is_refused |= operation in managing.MODES and told["error"] == "CorruptError" and code in _DAMAGE
    if told["error"] is not None and not is_refused:
        problem = _wrong_error(told, path, code)
        if problem is not None:
            return problem
    if operation in managing.MODES:  # deletions that fail are logged, and tried again
        return stepping.problem_after(path, operation, published=told["published"])
    if operation in stepping.MODES:
        return stepping.problem_after(path, operation, acknowledged=told["error"] is None)
    if operation in _LOADS:
        return None if _names(path, operation) == before else "a load changed the files"
    return _wrong_files(told, path, operation, before, forever=forever, call=call)


def _wrong_error(told: dict[str, Any], path: Path, code: str) -> str | None:
    if told["error"] != "StorageError" or told["errno"] != getattr(errno, code):
        return f"the error is another one: {told}"
    if "\n" in told["message"] or str(path.parent) not in told["message"] or told["path"] is None:
        return f"the error does not say where: {told}"
    return None


def _wrong_files(
    told: dict[str, Any], path: Path, mode: str, before: list[str], *, forever: bool, call: Call
) -> str | None:
    """What is wrong with the files after a save that failed, or did not."""
    version = saves.found_version(path)
    names = _names(path, mode)
    if told["error"] is None:
        if version != 2:
            return f"the save returned, and version {version} is there"
    elif version == 2:
        # The directory could not be synced (or closed) after the manifest got its name: visible, and said not to be
        # known as durable. Everything that belongs to it has to be there, which found_version has shown.
        if call not in (Call.OPEN, Call.FSYNC, Call.CLOSE) and not forever:
            return f"a failed save is visible: {told}"
    elif version != saves.BEFORE[mode]:
        return f"the previous one is lost: version {version} is there"
    elif names != before and not forever:
        return f"files were left behind: {sorted(set(names) - set(before))}: {told}"
    return saves.problem_after(path, mode, acknowledged=told["error"] is None)


def _reach(path: Path, operation: str) -> Path:
    return saves.reach(path, _LOADS.get(operation, operation))


def _names(path: Path, operation: str) -> list[str]:
    """What is in the folder, and beside it where the operation works there."""
    found = []
    for place in {path, _reach(path, operation)}:
        with contextlib.suppress(FileNotFoundError):
            found += [name for name in os.listdir(place) if place == path or name.startswith(path.name)]
    return sorted(found)


def _prepare(path: Path, operation: str) -> Path:
    if operation in stepping.MODES:
        stepping.prepare(path, operation)
        return path
    saves.prepare(path, _LOADS.get(operation, operation))
    if operation == "load, not cached":
        for name in path.iterdir():
            descriptor = os.open(name, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    return path


def _operate(path: Path, operation: str, acknowledge: Callable[[], None] = lambda: None) -> None:
    if operation in stepping.MODES:
        stepping.operate(path, operation, acknowledge=acknowledge)
    elif operation not in _LOADS:
        saves.save(path, operation)
    elif saves.version_of(holdfast.load(path)) != 1:
        raise AssertionError("the load gave another version")
