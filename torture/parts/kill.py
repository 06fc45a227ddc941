"""kill -9 at every call that changes the file system, before and after it: of a save, and of what is done to a run."""

from __future__ import annotations

import random
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import holdfast
from holdfast._async_saver import release
from holdfast._staging.one_at_a_time import TURNS
from torture import libraries, saves, stepping, torch_dcp
from torture.crew import Case, Child
from torture.part import Options, PartResult
from torture.shim import CHANGING, Action, Fault, armed, children_armed, counts, read_trace

NAME = "kill"
SHAPES = ("small", "blob", "values", "slabs")
_ACTIONS = {
    "saver": (Action.KILL_BEFORE, Action.KILL_AFTER),
    "writer": (Action.KILL_BEFORE, Action.KILL_AFTER),
    "saver, as the writer writes": (Action.ORPHAN_BEFORE, Action.ORPHAN_AFTER),
}
"""Who is killed: the process that saves or the one that writes for it, each at calls of its own, or the first at calls
of the second; and how, before and after the call."""


def run(options: Options) -> PartResult:
    """Count the calls of each save, then kill one at each of them."""
    folder = str(options.folder)
    shapes = SHAPES[:1] if options.quick else SHAPES
    plain: list[Case] = [
        {"folder": folder, "mode": mode, "shape": shape, "library": "holdfast"}
        for mode in saves.BEFORE
        for shape in shapes
    ]
    plain += [{"folder": folder, "mode": mode, "shape": "small", "library": "holdfast"} for mode in stepping.MODES]
    baseline = ("fresh", "replacing", stepping.RETIRE)
    plain += [{"folder": folder, "mode": mode, "shape": "small", "library": "torch"} for mode in baseline]
    counted = [(case, outcome["calls"]) for case, outcome in options.crew.each(count_calls, plain)]
    cases = [
        {**case, "victim": victim, "number": number, "after": after}
        for case, calls_of in counted
        for victim, calls in calls_of.items()
        for number in range(1, calls + 1)
        for after in (False, True)
    ]
    if options.quick:
        cases = random.Random(options.seed).sample([case for case in cases if case["library"] == "holdfast"], 40)
    violations: list[str] = []
    points: Counter[str] = Counter()
    torch_problems: Counter[str] = Counter()
    for done, (case, outcome) in enumerate(options.crew.each(kill_at, cases), start=1):
        options.progress(done, len(cases))
        points[case["library"]] += 1
        problem = outcome.get("problem") or outcome.get("failure")
        if problem and case["library"] == "torch" and "failure" not in outcome:
            torch_problems[problem] += 1
        elif problem:
            moment = f"{'after' if case['after'] else 'before'} call {case['number']}"
            place = f"{case['mode']}, {case['shape']}, {case['victim']} killed {moment}"
            violations.append(f"{case['library']}, {place}: {problem}")
    return PartResult(
        fault="kill -9 at every file-changing call of a save or async_save, of its writer process, "
        "of a save in torch's format, of one format over the other, of an export, "
        f"and of what is done to the steps of a run ({'; '.join(stepping.MODES)}), 1 rank",
        must_hold="nothing torn visible, the previous checkpoint not lost, the next save succeeds",
        injected=points["holdfast"],
        required=400,
        violations=violations,
        counts={
            f"calls: {case['library']}, {case['mode']}, {case['shape']}, {victim}": calls
            for case, calls_of in counted
            for victim, calls in calls_of.items()
        },
        torch=torch_dcp.in_words(torch_problems, points["torch"]) if points["torch"] else None,
    )


def count_calls(*, folder: str, mode: str, shape: str, library: str) -> Case:
    """How many calls the processes of a save that nothing happens to make."""
    path = Path(folder) / "count" / f"{library}-{mode}-{shape}" / "checkpoint"
    _prepare(path, mode, shape, library)

    def child() -> int:
        reach = saves.reach(path, mode)
        with armed(reach, Fault()), children_armed(reach, Fault(), trace=path.parent / "trace"):
            libraries.save(path, mode, shape, library)
            release()
        return counts().calls

    calls = {"saver": Child(child).end().told}
    if mode in saves.PROCESS_MODES:
        trace = read_trace(path.parent / "trace")
        calls["writer"] = calls["saver, as the writer writes"] = sum(record.call in CHANGING for record in trace)
    problem = libraries.problem_after(path, mode, shape, library, acknowledged=True)
    assert problem is None, problem
    shutil.rmtree(path.parent)
    return {"calls": calls}


def kill_at(*, folder: str, mode: str, shape: str, library: str, victim: str, number: int, after: bool) -> Case:
    """Kill a process of a save at a call, and judge what it leaves behind."""
    path = Path(folder) / "kill" / f"{library}-{mode}-{shape}-{victim}-{number}-{after}" / "checkpoint"
    _prepare(path, mode, shape, library)
    own, theirs = Fault(), Fault(action=_ACTIONS[victim][after], number=number)
    if victim == "saver":
        own, theirs = theirs, own

    def child() -> Any:
        error, reach = None, saves.reach(path, mode)
        with armed(reach, own), children_armed(reach, theirs, trace=path.parent / "trace"):
            try:
                libraries.save(path, mode, shape, library, (path.parent / "published").touch)
            except holdfast.CheckpointError as raised:
                error = str(raised)
        died = TURNS.process is not None and TURNS.process.number is None
        if victim == "writer":
            saves.save(path.parent / "next", mode, shape)  # another process is started for it
        return {"error": error, "died": died}

    end = Child(child).end()
    acknowledged = False
    if victim != "writer" and (end.signal != signal.SIGKILL or end.hung):
        return {"failure": f"the fault did not strike: {end}"}
    if victim == "writer":
        if end.told is None or not end.told["died"]:
            return {"failure": f"the fault did not strike, or the next save failed: {end}"}
        error = end.told["error"]
        acknowledged = error is None
        if error is not None and "the process that writes checkpoints died" not in error:
            return {"problem": f"the death of the writer is told as: {error}"}
    problem = libraries.problem_after(
        path, mode, shape, library, acknowledged=acknowledged, published=(path.parent / "published").exists()
    )
    shutil.rmtree(path.parent, ignore_errors=True)  # a writer without its parent may be removing files here too
    return {"problem": problem}


def _prepare(path: Path, mode: str, shape: str, library: str) -> None:
    if mode in stepping.MODES:
        stepping.prepare(path, mode, library)
        return
    if library != "torch":
        saves.prepare(path, mode, shape)
        return
    path.parent.mkdir(parents=True)
    if mode == "replacing":
        torch_dcp.save(path, 1)
