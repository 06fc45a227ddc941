"""Short transfers, a sync that fails once, files that may not grow, a file system that is full."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import holdfast
from tools.timeless import timeless
from torture import exports, saves
from torture.crew import Case, Child
from torture.part import Options, PartResult
from torture.shim import EVERY, SHORT_BY, TRANSFERS, Action, Call, Fault, armed, counts, read_trace

NAME = "short"
_ATTEMPT = "0123456789abcdef"
_PAGE = 4096
_LOADS = {"load": "replacing", "load of an export": saves.EXPORT_MODES[1]}
_OPERATIONS = (*saves.MODES, *saves.EXPORT_MODES[:2], *_LOADS)
_SHAPES = ("small", "blob")


def run(options: Options) -> PartResult:
    """Shorten each transfer in each way, fail each sync, and let files and file systems be too small."""
    folders = [str(options.folder), *([] if options.quick else [str(options.disk)])]
    plain = [
        {"folder": folder, "operation": operation, "shape": shape}
        for folder in folders
        for operation in _OPERATIONS
        for shape in (_SHAPES if "export" not in operation else ("small",))
    ]
    cases: list[Case] = []
    for case, outcome in options.crew.each(count_calls, plain):
        cases += [
            {**case, "kind": "shorten", "number": number, "how": how, "times": times}
            for how in SHORT_BY
            for number, times in [*((number, 1) for number in range(1, outcome["transfers"] + 1)), (1, 1 << 20)]
        ]
        cases += [{**case, "kind": "sync", "number": number} for number in range(1, outcome["syncs"] + 1)]
    saving = [case for case in plain if case["operation"] not in _LOADS and case["folder"] == folders[0]]
    limits = [0, 1, 100, 511, 512, 2000, _PAGE, _PAGE + 1, 2 * _PAGE, 3 * _PAGE, 20 * _PAGE]
    cases += [{**case, "kind": "limit", "limit": limit} for case in saving for limit in limits]
    notes = []
    if os.geteuid() == 0:
        cases += [{**case, "kind": "full", "pages": pages} for case in saving for pages in range(1, 11)]
    else:
        notes.append("not root: no small tmpfs was mounted")
    if options.quick:
        cases = random.Random(options.seed).sample(cases, 60)
    violations: list[str] = []
    struck = {"shorten": 0, "sync": 0, "limit": 0, "full": 0}
    for done, (case, outcome) in enumerate(options.crew.each(disturb, cases), start=1):
        options.progress(done, len(cases))
        struck[case["kind"]] += outcome.get("struck", 0)
        if outcome.get("problem") or "failure" in outcome:
            place = ", ".join(f"{name} {value}" for name, value in case.items() if name != "folder")
            violations.append(f"{place}: {outcome.get('problem') or outcome['failure']}")
    return PartResult(
        fault="short reads and writes at each call of a save, an export or a load; each fsync failing once; "
        "RLIMIT_FSIZE; a full tmpfs",
        must_hold="identical bytes; a failed fsync is reported and never retried; nothing published after an error",
        injected=sum(struck.values()),
        required=500,
        violations=violations,
        notes=notes,
        counts=struck,
    )


def count_calls(*, folder: str, operation: str, shape: str) -> Case:
    """How many transfers and syncs an operation makes when nothing happens."""
    with _prepared(Path(folder) / "count" / f"{operation}-{shape}", operation, shape) as path:

        def child() -> dict[str, int]:
            with armed(_reach(path, operation), Fault(counted=EVERY)):
                _operate(path, operation, shape)
            by_call = counts().by_call
            transfers = sum(by_call.get(call, 0) for call in TRANSFERS)
            return {"transfers": transfers, "syncs": by_call.get(Call.FSYNC, 0)}

        told: dict[str, int] = Child(child).end().told
        return told


def disturb(*, folder: str, operation: str, shape: str, kind: str, **fault: Any) -> Case:
    """Do one kind of fault, and judge the outcome."""
    faults: dict[str, Callable[..., Case]]
    faults = {"shorten": shorten, "sync": fail_sync, "limit": limit_size, "full": fill_up}
    name = f"{operation}-{shape}-{kind}-{'-'.join(map(str, fault.values()))}"
    with _prepared(Path(folder) / "case" / name, operation, shape) as path:
        return faults[kind](path, operation, shape, **fault)


def shorten(path: Path, operation: str, shape: str, *, number: int, how: str, times: int) -> Case:
    """Shorten one transfer, or every one: nobody must notice."""
    parameter = SHORT_BY[how]
    fault = Fault(counted=TRANSFERS, action=Action.SHORTEN, number=number, times=times, parameter=parameter)

    def child() -> Any:
        with armed(_reach(path, operation), fault):
            _operate(path, operation, shape)
        return counts().struck

    end = Child(child).end()
    if end.status != 0 or not end.told:
        return {"problem": f"it failed: {end}"}
    if operation not in _LOADS:
        reference = path.parent / "another" / "reference"
        saves.prepare(reference, operation, shape)
        _operate(reference, operation, shape)
        if _contents(path) != _contents(reference):
            return {"problem": "the bytes are not the same"}
    return {"struck": end.told if times == 1 else 1, "problem": None}


def fail_sync(path: Path, operation: str, shape: str, *, number: int) -> Case:
    """Fail one sync: an error, and nobody tries it again."""
    log = path.parent / "log"
    fault = Fault(counted={Call.FSYNC}, action=Action.FAIL, number=number, parameter=errno.EIO)

    def child() -> Any:
        with open(log, "wb", buffering=0) as stream, armed(_reach(path, operation), fault, trace=stream.fileno()):
            return _error_of(path, operation, shape)

    end = Child(child).end()
    synced = [record for record in read_trace(log) if record.call is Call.FSYNC]
    failed = [place for place, record in enumerate(synced) if record.error]
    problem = None
    if len(failed) != 1:
        problem = f"{len(failed)} syncs failed instead of one"
    elif any(record.path == synced[failed[0]].path for record in synced[failed[0] + 1 :]):
        problem = f"{synced[failed[0]].path} was synced again after that had failed"
    elif end.told != ["StorageError", errno.EIO]:
        problem = f"the failed sync was not reported: {end}"
    return {"struck": len(failed), "problem": problem or saves.problem_after(path, operation, shape)}


def limit_size(path: Path, operation: str, shape: str, *, limit: int) -> Case:
    """Save while no file may be larger than ``limit``."""

    def child() -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return _error_of(path, operation, shape)

    end = Child(child).end()
    return _refused(path, operation, shape, end.told, errno.EFBIG)


def fill_up(path: Path, operation: str, shape: str, *, pages: int) -> Case:
    """Save onto a file system with that many free pages."""
    mount = path.parent / "full"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], check=True)
    try:
        target = mount / "checkpoint"
        if path.exists():
            shutil.copytree(path, target)
        used = shutil.disk_usage(mount).used
        _resize(mount, used + pages * _PAGE)
        told = Child(lambda: _error_of(target, operation, shape)).end().told
        _resize(mount, 2 << 20)
        return _refused(target, operation, shape, told, errno.ENOSPC)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def _resize(mount: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(mount)], check=True)


def _refused(path: Path, mode: str, shape: str, told: Any, code: int) -> Case:
    """Judge a save for which there may have been too little room."""
    if told not in (["StorageError", code], None):
        return {"problem": f"the error is another one: {told}"}
    if told is None:
        return {"struck": 0, "problem": saves.problem_after(path, mode, shape, acknowledged=True)}
    version = saves.found_version(path, shape)
    if version != saves.BEFORE[mode]:
        return {"problem": f"after the error version {version} is there"}
    names = set(os.listdir(path)) if path.exists() else set()
    if any(_ATTEMPT in name for name in names) or exports.leftovers(path):
        return {"problem": f"files were left behind: {names}, {exports.leftovers(path)}"}
    return {"struck": 1, "problem": saves.problem_after(path, mode, shape)}


def _error_of(path: Path, operation: str, shape: str) -> list[Any] | None:
    try:
        _operate(path, operation, shape)
    except holdfast.CheckpointError as error:
        return [type(error).__name__, getattr(error, "errno", None)]
    return None


def _reach(path: Path, operation: str) -> Path:
    return saves.reach(path, _LOADS.get(operation, operation))


def _operate(path: Path, operation: str, shape: str) -> None:
    if operation not in _LOADS:
        saves.save(path, operation, shape, attempt=_ATTEMPT)
    elif saves.version_of(holdfast.load(path), shape) != 1:
        raise AssertionError("the load gave another version")


def _contents(path: Path) -> dict[str, bytes]:
    """What the save wrote, but for its time."""
    if (path / "holdfast.json").exists():
        return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "holdfast.json"}
    return {file.name: timeless(file) for file in path.iterdir() if _ATTEMPT in file.name or file.stem == "manifest"}


@contextlib.contextmanager
def _prepared(folder: Path, operation: str, shape: str) -> Iterator[Path]:
    path = folder / "checkpoint"
    saves.prepare(path, _LOADS.get(operation, operation), shape)
    try:
        yield path
    finally:
        shutil.rmtree(folder)
