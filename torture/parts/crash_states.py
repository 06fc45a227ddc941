"""The states that a crash may leave on a file system that keeps no more than it must, judged by the real reader."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import holdfast
from torture import exports, libraries, managing, saves, stepping, torch_dcp
from torture.crew import Case, Child
from torture.part import Options, PartResult
from torture.shim import CHANGING, Fault, Record, armed, counts, read_trace
from torture.weak_disk import Disk, Files, materialise

NAME = "crash-states"
IN_SLICES = True
_SHAPES = ("small", "blob", "values")
_CHOICES = 20_000  # at each call
_STATES = 8000  # of which distinct
_IN_VAIN = 1500  # choices that give nothing new: then there is hardly anything left
_EXPORTED = 500  # where each is verified too
_RESUMED = 100  # where a manager goes on in each of them
_TORCH = 400  # for comparison
_CHECKPOINT = "run/checkpoint"
_BASELINE = ("fresh", "replacing", stepping.RETIRE)


def run(options: Options) -> PartResult:
    """Record each save, and judge the states after each of its calls."""
    shapes = _SHAPES[:1] if options.quick else _SHAPES
    plain: list[Case] = [
        {"folder": str(options.folder), "mode": mode, "shape": shape, "library": "holdfast"}
        for mode in (*saves.MODES, *saves.ASYNC_MODES, *saves.ACROSS_MODES, *saves.EXPORT_MODES)
        for shape in (shapes if mode not in saves.EXPORT_MODES else shapes[:1])
    ]
    folder = str(options.folder)
    plain += [{"folder": folder, "mode": mode, "shape": "small", "library": "holdfast"} for mode in stepping.MODES]
    plain += [{"folder": folder, "mode": mode, "shape": "small", "library": "torch"} for mode in _BASELINE]
    choices = 60 if options.quick else _CHOICES
    cases = [
        {**case, "point": point, "choices": choices, "most": _most(case, options), "seed": options.seed}
        for case, outcome in options.crew.each(record_save, plain)
        for point in range(outcome["calls"] + 1)
    ]
    cases = options.share_of(cases)
    if options.quick:
        cases = random.Random(options.seed).sample(cases, min(100, len(cases)))
    violations: list[str] = []
    of_torch: Counter[str] = Counter()
    of_modes: Counter[str] = Counter()
    chosen = states = torch_states = 0
    for done, (case, outcome) in enumerate(options.crew.each(judge_point, cases, limit_s=600.0), start=1):
        options.progress(done, len(cases))
        if case["library"] == "torch" and "failure" not in outcome:
            of_torch.update(outcome["found"])
            torch_states += outcome["states"]
            continue
        chosen += outcome.get("chosen", 0)
        states += outcome.get("states", 0)
        of_modes[case["mode"]] += outcome.get("states", 0)
        for problem in [*outcome.get("problems", []), *([outcome["failure"]] if "failure" in outcome else [])]:
            violations.append(f"{case['mode']}, {case['shape']}, after call {case['point']}: {problem}")
    return PartResult(
        fault="crash states of a weak file-system model: lost, torn and zeroed writes, names lost independently; of "
        f"saves, exports, and of what is done to the steps of a run ({'; '.join(stepping.MODES)})",
        must_hold="nothing torn visible, the previous checkpoint not lost, nothing acknowledged lost; the next manager "
        "resumes",
        injected=states,
        required=100_000,
        violations=violations,
        notes=[]
        if importlib.util.find_spec("torchtitan")
        else ["torchtitan is not installed: its manager was not tried"],
        counts={"choices": chosen, **{f"states: {mode}": count for mode, count in of_modes.items()}},
        torch=torch_dcp.in_words(of_torch, torch_states) if torch_states else None,
    )


def _most(case: Case, options: Options) -> int:
    """How many distinct states are judged at each call."""
    if options.quick:
        return 20 if case["mode"] in managing.MODES else 60
    if case["library"] == "torch":
        return _TORCH
    if case["mode"] in saves.EXPORT_MODES:
        return _EXPORTED
    return _RESUMED if case["mode"] in managing.MODES else _STATES


def record_save(*, folder: str, mode: str, shape: str, library: str) -> Case:
    """Record the calls of a save, and what was there before it."""
    place = _place(folder, mode, shape, library)
    path = place / "root" / _CHECKPOINT
    if mode in stepping.MODES:
        stepping.prepare(path, mode, library)
    elif saves.BEFORE[mode] is None:
        (place / "root").mkdir(parents=True)
    elif library == "torch":
        torch_dcp.save(path, 1)
    else:
        saves.save(path, saves.first_mode(mode), shape, version=1)
        if mode in saves.EXPORT_MODES:
            exports.add_own(path)
    shutil.copytree(place / "root", place / "before")

    def child() -> list[int]:
        published: list[int] = []
        with open(place / "log", "wb", buffering=0) as log, armed(place / "root", Fault(), trace=log.fileno()):
            libraries.save(path, mode, shape, library, lambda: published.append(counts().calls))
        return published

    end = Child(child).end()
    assert end.status == 0, end
    (place / "published").write_text("".join(map(str, end.told)))
    return {"calls": len(_changes(place))}


def judge_point(
    *, folder: str, mode: str, shape: str, library: str, point: int, choices: int, most: int, seed: int
) -> Case:
    """Judge the states after ``point`` calls, each distinct one once, until there are ``most``."""
    place = _place(folder, mode, shape, library)
    records = _changes(place)
    disk = Disk(str(place / "root"), _files(place / "before"))
    for record in records[:point]:
        disk.play(record)
    scratch = Path(folder) / f"scratch-{os.getpid()}-{library}-{mode}-{shape}-{point}"
    scratch.mkdir()
    told = (place / "published").read_text()
    known: dict[str, bytes | None] = {}
    seen: set[bytes] = set()
    found: Counter[str] = Counter()
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
        problem = _problem(
            scratch / _CHECKPOINT,
            mode,
            shape,
            library,
            acknowledged=point == len(records),
            published=told != "" and point >= int(told),
        )
        if problem is not None:
            found[problem] += 1
            problems.append(f"{problem}, with {sorted(state)}")
    shutil.rmtree(scratch)
    return {"chosen": chosen, "states": len(seen), "problems": problems[:3], "found": found}


def _problem(path: Path, mode: str, shape: str, library: str, *, acknowledged: bool, published: bool) -> str | None:
    if mode in stepping.MODES:
        problem = stepping.problem_found(path, mode, library, acknowledged=acknowledged, published=published)
        if problem is not None or mode not in managing.MODES:
            return problem
        after = path.parent.with_name(f"{path.parent.name}-next")  # the state itself is what the next one is made of
        shutil.copytree(path, after)
        problem = managing.problem_next(after, mode)
        shutil.rmtree(after)
        return problem
    if library == "torch":
        return torch_dcp.problem_after(path, mode, shape, acknowledged=acknowledged)
    try:
        version = saves.found_version(path, shape)
    except (saves.Torn, holdfast.CheckpointError) as error:
        return f"torn: {type(error).__name__}: {error}"
    if acknowledged and version != 2:
        return f"acknowledged but lost: version {version} is there"
    if version not in (saves.BEFORE[mode], 2):
        return f"the previous one is lost: version {version} is there"
    if mode in saves.EXPORT_MODES and version is not None:
        return exports.mixture(path, version, has_own=saves.BEFORE[mode] is not None)
    return None


def _digest(state: Files) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for name, data in sorted(state.items()):
        found.update(f"{name} {-1 if data is None else len(data)} ".encode())
        found.update(data or b"")
    return found.digest()


def _place(folder: str, mode: str, shape: str, library: str) -> Path:
    return Path(folder) / f"{library}-{mode}-{shape}"


def _changes(place: Path) -> list[Record]:
    return [record for record in read_trace(place / "log") if record.call in CHANGING]


def _files(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }
