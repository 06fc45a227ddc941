"""kill -9 at every call of a save that changes the file system, before and after it."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

from torture import saves
from torture.crew import Case, Child, run_cases
from torture.part import Options, PartResult
from torture.shim import Action, Fault, armed, counts

NAME = "kill"
SHAPES = ("small", "blob", "values", "slabs")


def run(options: Options) -> PartResult:
    """Count the calls of each save, then kill one at each of them."""
    shapes = SHAPES[:1] if options.quick else SHAPES
    plain = [{"folder": str(options.folder), "mode": mode, "shape": shape} for mode in saves.MODES for shape in shapes]
    counted = [(case, outcome["calls"]) for case, outcome in run_cases(count_calls, plain)]
    actions = [Action.KILL_BEFORE, Action.KILL_AFTER]
    cases = [
        {**case, "number": number, "action": int(action)}
        for case, calls in counted
        for number in range(1, calls + 1)
        for action in actions
    ]
    violations: list[str] = []
    for done, (case, outcome) in enumerate(run_cases(kill_at, cases), start=1):
        options.progress(done, len(cases))
        if outcome.get("problem") or "failure" in outcome:
            place = f"{case['mode']}, {case['shape']}, {Action(case['action']).name} call {case['number']}"
            violations.append(f"{place}: {outcome.get('problem') or outcome['failure']}")
    return PartResult(
        fault="kill -9 at every file-changing call of a save, 1 rank",
        must_hold="nothing torn visible, the previous checkpoint not lost, the next save succeeds",
        injected=len(cases),
        required=400,
        violations=violations,
        counts={f"calls of a save: {case['mode']}, {case['shape']}": calls for case, calls in counted},
    )


def count_calls(*, folder: str, mode: str, shape: str) -> Case:
    """How many calls a save that nothing happens to makes."""
    path = Path(folder) / "count" / f"{mode}-{shape}" / "checkpoint"
    saves.prepare(path, mode, shape)

    def child() -> int:
        with armed(path, Fault()):
            saves.save(path, mode, shape)
        return counts().calls

    calls = Child(child).end().told
    assert saves.found_version(path, shape) == 2
    shutil.rmtree(path.parent)
    return {"calls": calls}


def kill_at(*, folder: str, mode: str, shape: str, number: int, action: int) -> Case:
    """Kill a save at a call, and judge what it leaves behind."""
    path = Path(folder) / "kill" / f"{mode}-{shape}-{number}-{action}" / "checkpoint"
    saves.prepare(path, mode, shape)

    def child() -> Any:
        with armed(path, Fault(action=Action(action), number=number)):
            saves.save(path, mode, shape)
        return None

    end = Child(child).end()
    problem = None
    if end.signal != signal.SIGKILL or end.hung:
        problem = f"the fault did not strike: {end}"
    problem = problem or saves.problem_after(path, mode, shape)
    shutil.rmtree(path.parent)
    return {"problem": problem}
