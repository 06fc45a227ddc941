"""kill -9 at every call of a save that changes the file system, before and after it."""

from __future__ import annotations

import random
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from torture import saves, torch_dcp
from torture.crew import Case, Child
from torture.part import Options, PartResult
from torture.shim import Action, Fault, armed, counts

NAME = "kill"
SHAPES = ("small", "blob", "values", "slabs")


def run(options: Options) -> PartResult:
    """Count the calls of each save, then kill one at each of them."""
    folder = str(options.folder)
    shapes = SHAPES[:1] if options.quick else SHAPES
    plain: list[Case] = [
        {"folder": folder, "mode": mode, "shape": shape, "library": "holdfast"}
        for mode in (*saves.MODES, *saves.ASYNC_MODES)
        for shape in shapes
    ]
    plain += [{"folder": folder, "mode": mode, "shape": "small", "library": "torch"} for mode in ("fresh", "replacing")]
    counted = [(case, outcome["calls"]) for case, outcome in options.crew.run(count_calls, plain)]
    cases = [
        {**case, "number": number, "action": int(action)}
        for case, calls in counted
        for number in range(1, calls + 1)
        for action in (Action.KILL_BEFORE, Action.KILL_AFTER)
    ]
    if options.quick:
        cases = random.Random(options.seed).sample([case for case in cases if case["library"] == "holdfast"], 40)
    violations: list[str] = []
    points: Counter[str] = Counter()
    torch_problems: Counter[str] = Counter()
    for done, (case, outcome) in enumerate(options.crew.run(kill_at, cases), start=1):
        options.progress(done, len(cases))
        points[case["library"]] += 1
        problem = outcome.get("problem") or outcome.get("failure")
        if problem and case["library"] == "torch" and "failure" not in outcome:
            torch_problems[problem] += 1
        elif problem:
            place = f"{case['mode']}, {case['shape']}, {Action(case['action']).name} call {case['number']}"
            violations.append(f"{case['library']}, {place}: {problem}")
    return PartResult(
        fault="kill -9 at every file-changing call of a save or async_save, 1 rank",
        must_hold="nothing torn visible, the previous checkpoint not lost, the next save succeeds",
        injected=points["holdfast"],
        required=400,
        violations=violations,
        counts={f"calls: {case['library']}, {case['mode']}, {case['shape']}": calls for case, calls in counted},
        torch=torch_dcp.in_words(torch_problems, points["torch"]) if points["torch"] else None,
    )


def count_calls(*, folder: str, mode: str, shape: str, library: str) -> Case:
    """How many calls a save that nothing happens to makes."""
    path = Path(folder) / "count" / f"{library}-{mode}-{shape}" / "checkpoint"
    _prepare(path, mode, shape, library)

    def child() -> int:
        with armed(path, Fault()):
            _save(path, mode, shape, library)
        return counts().calls

    calls = Child(child).end().told
    assert (torch_dcp.found_version(path) if library == "torch" else saves.found_version(path, shape)) == 2
    shutil.rmtree(path.parent)
    return {"calls": calls}


def kill_at(*, folder: str, mode: str, shape: str, library: str, number: int, action: int) -> Case:
    """Kill a save at a call, and judge what it leaves behind."""
    path = Path(folder) / "kill" / f"{library}-{mode}-{shape}-{number}-{action}" / "checkpoint"
    _prepare(path, mode, shape, library)

    def child() -> Any:
        with armed(path, Fault(action=Action(action), number=number)):
            _save(path, mode, shape, library)
        return None

    end = Child(child).end()
    if end.signal != signal.SIGKILL or end.hung:
        return {"failure": f"the fault did not strike: {end}"}
    problem = torch_dcp.problem_after(path, mode) if library == "torch" else saves.problem_after(path, mode, shape)
    shutil.rmtree(path.parent)
    return {"problem": problem}


def _prepare(path: Path, mode: str, shape: str, library: str) -> None:
    if library != "torch":
        saves.prepare(path, mode, shape)
        return
    path.parent.mkdir(parents=True)
    if mode == "replacing":
        torch_dcp.save(path, 1)


def _save(path: Path, mode: str, shape: str, library: str) -> None:
    if library == "torch":
        torch_dcp.save(path, 2)
    else:
        saves.save(path, mode, shape)
