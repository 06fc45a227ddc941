"""kill -9 of one of four ranks at each of its calls that change the file system.

The ranks are processes that talk over the library's own control channel; only its limits are shorter, so that a dead
rank is noticed after a second.
"""

from __future__ import annotations

import random
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import holdfast
from holdfast._values.deadline import Patience
from torture import saves
from torture.crew import Case, Child
from torture.meeting import meet
from torture.part import Options, PartResult
from torture.shim import Action, Fault, armed, counts

NAME = "kill-ranks"
_PATIENCE = Patience(beat_s=0.2, progress_s=20.0, farewell_s=0.5)
_WORKERS = 6  # cases mostly wait
_SPARE = 3  # who makes the directory is decided by a race, and whoever does makes that many calls more


def run(options: Options) -> PartResult:
    """Count the calls of each rank, then kill one rank at each of its own."""
    modes = (saves.MODES[2], saves.EXPORT_MODES[1]) if options.quick else (*saves.MODES, *saves.EXPORT_MODES[:2])
    plain = [{"folder": str(options.folder), "mode": mode} for mode in modes]
    counted = {case["mode"]: outcome["calls"] for case, outcome in options.crew.each(count_calls, plain)}
    cases = [
        {"folder": str(options.folder), "mode": mode, "rank": rank, "number": number, "action": int(action)}
        for mode in modes
        for rank in range(saves.RANKS)
        for number in range(1, counted[mode][rank] + (_SPARE if mode != "replacing" else 0) + 1)
        for action in (Action.KILL_BEFORE, Action.KILL_AFTER)
    ]
    if options.quick:
        cases = random.Random(options.seed).sample(cases, 12)
    violations: list[str] = []
    struck = 0
    workers = None if options.quick else _WORKERS
    for done, (case, outcome) in enumerate(options.crew.each(kill_at, cases, workers=workers), start=1):
        options.progress(done, len(cases))
        struck += outcome.get("struck", 0)
        if outcome.get("problem") or "failure" in outcome:
            place = f"{case['mode']}, {Action(case['action']).name} call {case['number']} of rank {case['rank']}"
            violations.append(f"{place}: {outcome.get('problem') or outcome['failure']}")
    return PartResult(
        fault="kill -9 of one of 4 ranks at every file-changing call of its save, or of its export of rows and columns",
        must_hold="nothing torn visible, the previous checkpoint not lost, all other ranks end, a sweep removes what "
        "is left of an export and nothing else, the next save succeeds",
        injected=struck,
        required=200,
        violations=violations,
        counts={f"calls: {mode}, rank {rank}": calls for mode in modes for rank, calls in enumerate(counted[mode])},
    )


def count_calls(*, folder: str, mode: str) -> Case:
    """How many calls each rank makes when nothing happens."""
    path = Path(folder) / "count" / mode / "checkpoint"
    saves.prepare(path, mode, "ranks")
    ends = [child.end() for child in _start(path, mode, {})]
    assert all(end.told and end.told["error"] is None for end in ends), ends
    assert saves.found_version(path, "ranks") == 2
    shutil.rmtree(path.parent)
    return {"calls": [end.told["calls"] for end in ends]}


def kill_at(*, folder: str, mode: str, rank: int, number: int, action: int) -> Case:
    """Kill a rank at a call, and judge how the others end and what is left behind."""
    path = Path(folder) / "kill" / f"{mode}-{rank}-{number}-{action}" / "checkpoint"
    saves.prepare(path, mode, "ranks")
    ends = [child.end(30.0) for child in _start(path, mode, {rank: Fault(action=Action(action), number=number)})]
    struck = ends[rank].signal == signal.SIGKILL and not ends[rank].hung
    survivors = [end for other, end in enumerate(ends) if other != rank or not struck]
    problem = None
    if any(end.hung for end in survivors):
        problem = f"a rank did not end: {ends}"
    elif any(end.told is None or not _is_ours(end.told["error"]) for end in survivors):
        problem = f"a rank ended with something else than an error of the library: {ends}"
    acknowledged = any(end.told is not None and end.told["error"] is None for end in survivors)
    problem = problem or saves.problem_after(path, mode, "ranks", acknowledged=acknowledged)
    shutil.rmtree(path.parent)
    return {"problem": problem, "struck": int(struck)}


def _is_ours(error: str | None) -> bool:
    return error is None or (
        hasattr(holdfast, error) and issubclass(getattr(holdfast, error), holdfast.CheckpointError)
    )


def _start(path: Path, mode: str, faults: dict[int, Fault]) -> list[Child]:
    return [Child(partial(_save, path, mode, rank, faults.get(rank, Fault()))) for rank in range(saves.RANKS)]


def _save(path: Path, mode: str, rank: int, fault: Fault) -> Any:
    """What a rank does: meet the others, save, and tell how that ended."""
    try:
        meet(path.parent.parent / f"{path.parent.name}.address", rank=rank, world=saves.RANKS, patience=_PATIENCE)
    except holdfast.RankLostError as raised:  # on a machine that is too busy
        return {"error": type(raised).__name__, "calls": 0}
    error = None
    with armed(saves.reach(path, mode), fault):
        try:
            if mode in saves.EXPORT_MODES:
                saves.save(path, mode, f"rank {rank}")
            else:
                writer = holdfast.NativeWriter(path, overwrite=mode != "fresh")
                holdfast.save(saves.state_of(2, f"rank {rank}"), storage_writer=writer)
        except Exception as raised:
            error = type(raised).__name__
    return {"error": error, "calls": counts().calls}
