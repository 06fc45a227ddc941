"""The same faults from another hand: strace stops or fails the system calls themselves, whatever library makes them.

It is slow, a process for each fault, so that it only samples; and it counts, so that a call which the shim does not see
would show.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from torture import saves
from torture.crew import REPOSITORY, Case, Child
from torture.part import Options, PartResult
from torture.shim import Call, Fault, armed, counts

NAME = "strace"
SYSTEM_CALLS = {
    "fsync": Call.FSYNC,
    "pwrite64": Call.PWRITE,
    "ftruncate": Call.FTRUNCATE,
    "fallocate": Call.FALLOCATE,
    "rename": Call.RENAME,
    "link": Call.LINK,
}
"""Calls that importing everything does not make, so that all of them are the save's."""

_SAVE = """
import sys
from pathlib import Path
import holdfast
from torture import saves
try:
    saves.save(Path(sys.argv[1]), sys.argv[2])
except holdfast.StorageError as error:
    sys.exit(error.errno)
"""


def run(options: Options) -> PartResult:
    """Compare the counts, then kill and fail a save at each of these calls."""
    fault = "the same by strace: kill -9 and EIO at system calls of a save"
    must_hold = "as for the shim; both count the same calls"
    reason = why_not()
    if reason is not None:
        return PartResult(fault=fault, must_hold=must_hold, injected=0, required=0, violations=[], skipped=reason)
    folder = str(options.folder)
    plain: list[Case] = [{"folder": folder, "mode": mode} for mode in saves.MODES]
    violations: list[str] = []
    cases: list[Case] = []
    for case, outcome in options.crew.each(compare_counts, plain):
        if outcome.get("problem") or "failure" in outcome:
            violations.append(f"{case['mode']}: {outcome.get('problem') or outcome['failure']}")
        else:
            cases += [
                {**case, "call": call, "number": number, "kill": kill}
                for call, count in outcome["counts"].items()
                for number in range(1, count + 1)
                for kill in (True, False)
            ]
    if options.quick:
        cases = random.Random(options.seed).sample(cases, 4)
    for done, (case, outcome) in enumerate(options.crew.each(disturb, cases), start=1):
        options.progress(done, len(cases))
        if outcome.get("problem") or "failure" in outcome:
            what = "killed" if case["kill"] else "EIO"
            place = f"{case['mode']}, {what} at {case['call']} {case['number']}"
            violations.append(f"{place}: {outcome.get('problem') or outcome['failure']}")
    return PartResult(fault=fault, must_hold=must_hold, injected=len(cases), required=60, violations=violations)


def why_not() -> str | None:
    """Why strace cannot be used here; None where it can."""
    if shutil.which("strace") is None:
        return "there is no strace"
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True)
    return None if tried.returncode == 0 else f"strace may not trace: {tried.stderr.decode().strip()}"


def compare_counts(*, folder: str, mode: str) -> Case:
    """How often a save makes each call, if strace and the shim agree."""
    path = Path(folder) / "strace" / f"{mode}-shim" / "checkpoint"
    saves.prepare(path, mode)

    def child() -> dict[str, int]:
        with armed(path, Fault()):
            saves.save(path, mode)
        return {name: counts().by_call.get(call, 0) for name, call in SYSTEM_CALLS.items()}

    counted = Child(child).end().told
    traced = Path(folder) / "strace" / f"{mode}-strace" / "checkpoint"
    saves.prepare(traced, mode)
    log = traced.parent / "log"
    _run(traced, mode, ["-o", str(log), "-e", f"trace={','.join(SYSTEM_CALLS)}"])
    seen = re.findall(r"^\d+ +(\w+)\(", log.read_text(), flags=re.MULTILINE)
    found = {name: seen.count(name) for name in SYSTEM_CALLS}
    # The parent of a new checkpoint is synced too, outside of where the shim counts.
    if mode != "replacing":
        found["fsync"] -= 1
    if found != counted:
        return {"problem": f"strace counts {found}, the shim {counted}"}
    return {"counts": counted}


def disturb(*, folder: str, mode: str, call: str, number: int, kill: bool) -> Case:
    """Kill a save at a system call, or fail that; judge what is there."""
    path = Path(folder) / "strace" / f"{mode}-{call}-{number}-{kill}" / "checkpoint"
    saves.prepare(path, mode)
    what = "signal=KILL" if kill else "error=EIO"
    number += call == "fsync" and mode != "replacing"
    status = _run(path, mode, ["-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:{what}:when={number}"])
    # What is told of a rename or link that failed is whatever was asked for; strace does not do them then.
    expected = (-signal.SIGKILL, 128 + signal.SIGKILL) if kill else (errno.EIO,)
    if status not in expected:
        return {"problem": f"it ended with {status}"}
    problem = saves.problem_after(path, mode)
    shutil.rmtree(path.parent)
    return {"problem": problem}


def _run(path: Path, mode: str, options: list[str]) -> int:
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment["PYTHONPATH"] = os.pathsep.join((str(REPOSITORY / "src"), str(REPOSITORY)))
    # Quick where nothing is to be killed: with it, strace does not send the signal.
    quick = [] if any("signal=" in option for option in options) else ["--seccomp-bpf"]
    command = ["strace", "-f", *quick, *options, sys.executable, "-c", _SAVE, str(path), mode]
    return subprocess.run(command, env=environment, capture_output=True).returncode
