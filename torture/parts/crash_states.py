"""The states that a crash may leave on a file system that keeps no more than it must, judged by the real reader."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from pathlib import Path

import holdfast
from torture import libraries, saves, stepping
from torture.crew import Case, Child
from torture.part import Options, PartResult
from torture.shim import CHANGING, Fault, Record, armed, read_trace
from torture.weak_disk import Disk, Files, materialise

NAME = "crash-states"
_SHAPES = ("small", "blob", "values")
_CHOICES = 20_000  # at each call
_STATES = 8000  # of which distinct
_IN_VAIN = 1500  # choices that give nothing new: then there is hardly anything left
_CHECKPOINT = "run/checkpoint"


def run(options: Options) -> PartResult:
    """Record each save, and judge the states after each of its calls."""
    shapes = _SHAPES[:1] if options.quick else _SHAPES
    plain: list[Case] = [
        {"folder": str(options.folder), "mode": mode, "shape": shape}
        for mode in (*saves.MODES, *saves.ASYNC_MODES, *saves.ACROSS_MODES)
        for shape in shapes
    ]
    plain += [{"folder": str(options.folder), "mode": mode, "shape": "small"} for mode in stepping.MODES]
    choices, most = (60, 60) if options.quick else (_CHOICES, _STATES)
    cases = [
        {**case, "point": point, "choices": choices, "most": most, "seed": options.seed}
        for case, outcome in options.crew.each(record_save, plain)
        for point in range(outcome["calls"] + 1)
    ]
    violations: list[str] = []
    chosen = states = 0
    for done, (case, outcome) in enumerate(options.crew.each(judge_point, cases, limit_s=600.0), start=1):
        options.progress(done, len(cases))
        chosen += outcome.get("chosen", 0)
        states += outcome.get("states", 0)
        for problem in [*outcome.get("problems", []), *([outcome["failure"]] if "failure" in outcome else [])]:
            violations.append(f"{case['mode']}, {case['shape']}, after call {case['point']}: {problem}")
    return PartResult(
        fault="crash states of a weak file-system model: lost, torn and zeroed writes, names lost independently; of "
        f"saves, and of what is done to the steps of a run ({'; '.join(stepping.MODES)})",
        must_hold="nothing torn visible, the previous checkpoint not lost, nothing acknowledged lost",
        injected=states,
        required=100_000,
        violations=violations,
        notes=[f"{chosen:,} choices of what is lost made {states:,} distinct states, each given to the reader"],
        counts={"choices": chosen},
    )


def record_save(*, folder: str, mode: str, shape: str) -> Case:
    """Record the calls of a save, and what was there before it."""
    place = _place(folder, mode, shape)
    path = place / "root" / _CHECKPOINT
    if mode in stepping.MODES:
        stepping.prepare(path, mode)
    elif saves.BEFORE[mode] is not None:
        saves.save(path, saves.first_mode(mode), shape, version=1)
    else:
        (place / "root").mkdir(parents=True)
    shutil.copytree(place / "root", place / "before")

    def child() -> None:
        with open(place / "log", "wb", buffering=0) as log, armed(place / "root", Fault(), trace=log.fileno()):
            libraries.save(path, mode, shape, "holdfast")

    assert Child(child).end().status == 0
    return {"calls": len(_changes(place))}


def judge_point(*, folder: str, mode: str, shape: str, point: int, choices: int, most: int, seed: int) -> Case:
    """Judge the states after ``point`` calls, each distinct one once, until there are ``most``."""
    place = _place(folder, mode, shape)
    records = _changes(place)
    disk = Disk(str(place / "root"), _files(place / "before"))
    for record in records[:point]:
        disk.play(record)
    scratch = Path(folder) / f"scratch-{os.getpid()}-{mode}-{shape}-{point}"
    scratch.mkdir()
    known: dict[str, bytes | None] = {}
    seen: set[bytes] = set()
    problems: list[str] = []
    chosen = in_vain = 0
    for state in disk.states(random.Random(f"{seed} {mode} {shape} {point}"), choices):
        if len(seen) == most or in_vain == _IN_VAIN:
            break
        chosen += 1
        in_vain += 1
        key = _digest(state)
        if key in seen:
            continue
        seen.add(key)
        in_vain = 0
        materialise(state, scratch, known)
        problem = _problem(scratch / _CHECKPOINT, mode, shape, acknowledged=point == len(records))
        if problem is not None and len(problems) < 3:
            problems.append(f"{problem}, with {sorted(state)}")
    shutil.rmtree(scratch)
    return {"chosen": chosen, "states": len(seen), "problems": problems}


def _problem(path: Path, mode: str, shape: str, *, acknowledged: bool) -> str | None:
    if mode in stepping.MODES:
        return stepping.problem_found(path, mode, acknowledged=acknowledged)
    try:
        version = saves.found_version(path, shape)
    except (saves.Torn, holdfast.CheckpointError) as error:
        return f"torn: {type(error).__name__}: {error}"
    if acknowledged and version != 2:
        return f"acknowledged but lost: version {version} is there"
    if version not in (saves.BEFORE[mode], 2):
        return f"the previous one is lost: version {version} is there"
    return None


def _digest(state: Files) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for name, data in sorted(state.items()):
        found.update(f"{name} {-1 if data is None else len(data)} ".encode())
        found.update(data or b"")
    return found.digest()


def _place(folder: str, mode: str, shape: str) -> Path:
    return Path(folder) / f"{mode}-{shape}"


def _changes(place: Path) -> list[Record]:
    return [record for record in read_trace(place / "log") if record.call in CHANGING]


def _files(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }
