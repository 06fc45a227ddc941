"""Interrupts: at every point of the calling thread where the interpreter lets one in, and real signals at any instant.

After each the operation has ended with the interrupt, nothing is left behind, and the same operation works.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import random
import select
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import holdfast
from torture import interrupted_ranks
from torture.crew import Case, Child
from torture.interrupting import Interruption, Point, points_of
from torture.operations import OPERATIONS, Place, Standing, work_in_small_pieces
from torture.part import Options, PartResult
from torture.samples import get_ready_to_fork

NAME = "interrupts"

_LIMIT_S = 30.0
_POINTS = 7_200
_SIGNALS = 600
_RANK_POINTS = 30
_TOGETHER = 60
# Where things are held. The rest of the package only computes: a sample will do.
_HOLDING = (
    *(
        "_io/",
        "_engine.py",
        "_huggingface/",
        "_staging/",
        "_steps/",
        "_torch_format/",
        "events/",
        "interop/",
        contextlib.__file__,
    ),
    *("_async_saver.py", "_background.py", "_saver.py", "_loader.py", "_checkpoint.py", "_process.py"),
    *(f"_native/{name}.py" for name in ("delete", "packer", "publish", "reader", "sweep", "verify", "writer")),
)


class Alarm(BaseException):
    """What a handler raises; an Exception would be told as what went wrong, like any other."""


_RAISED: dict[int, type[BaseException]] = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGTERM: SystemExit,
    signal.SIGALRM: Alarm,
}


def run(options: Options) -> PartResult:
    """Find the points of each operation, interrupt at each of them, then send signals."""
    folder, chance = str(options.folder), random.Random(options.seed)
    names = chance.sample(list(OPERATIONS), min(8, len(OPERATIONS))) if options.quick else list(OPERATIONS)
    found = options.crew.each(find_points, [{"folder": folder, "operation": name} for name in names])
    points = {case["operation"]: [Point(*point) for point in outcome["points"]] for case, outcome in found}
    cases: list[Case] = [
        {"folder": folder, "operation": name, "points": some}
        for name in names
        for some in _portions(_chosen(points[name], chance, len(names), quick=options.quick))
    ]
    signals = 24 if options.quick else _SIGNALS
    wounds: list[Case] = [
        {"folder": folder, "operation": name, "number": -(-signals // len(names)), "seed": chance.randrange(1 << 30)}
        for name in names
    ]
    ranks: list[Case] = [
        {
            "folder": folder,
            "operation": name,
            "victim": victim,
            "number": 2 if options.quick else _RANK_POINTS,
            "seed": 1,
        }
        for name in interrupted_ranks.OPERATIONS
        for victim in range(interrupted_ranks.WORLD)
    ]
    total = sum(len(case["points"]) for case in cases) + sum(case["number"] for case in (*wounds, *ranks))
    counts: Counter[str] = Counter()
    violations: list[str] = []
    work_of = ((interrupt_at, cases), (send_signals, wounds), (interrupted_ranks.interrupt_rank, ranks))
    for function, work in work_of:
        for case, outcome in options.crew.each(function, work, limit_s=600.0):
            problems = outcome.get("problems", [outcome.get("failure")])
            violations += [f"{case['operation']}: {problem}" for problem in problems]
            counts.update(outcome.get("counts", {}))
            options.progress(sum(counts.values()), total)
    struck = {name: counts[name] for name in ("bytecodes", "signals", "ranks")}
    return PartResult(
        fault="KeyboardInterrupt wherever the interpreter lets it in, SIGINT, SIGTERM and SIGALRM at any instant, in "
        f"{len(names)} operations, and in one of two ranks",
        must_hold="it ends with the interrupt; no thread, descriptor, lock, file, turn or process is left; old or new "
        "checkpoint whole; the same operation works",
        injected=sum(struck.values()),
        required=5_000,
        violations=violations,
        notes=[f"{counts['late']} signals came when the operation was over, {counts['missed']} points were not met"],
        counts=struck,
    )


def _chosen(points: list[Point], chance: random.Random, operations: int, *, quick: bool) -> list[Point]:
    """All points where something is held, and of the others as many as there is time for."""
    most = 12 if quick else _POINTS // operations
    held = [point for point in points if point.file.startswith(_HOLDING)]
    others = [point for point in points if not point.file.startswith(_HOLDING)]
    chance.shuffle(held)
    chance.shuffle(others)
    return (held + others)[:most]


def _portions(points: list[Point]) -> Iterable[list[Point]]:
    return (points[start : start + _TOGETHER] for start in range(0, len(points), _TOGETHER))


def find_points(*, folder: str, operation: str) -> Case:
    """The points that an operation comes to."""

    def look(place: Place) -> list[Point]:
        OPERATIONS[operation].run(place)  # whatever is only done once is done
        return list(points_of(lambda: OPERATIONS[operation].run(place)))

    return {"points": _in_child(folder, look)}


def interrupt_at(*, folder: str, operation: str, points: list[list[Any]]) -> Case:
    """Interrupt an operation at each point, and judge it."""
    log = Path(folder) / f"log-{os.getpid()}"
    left = [Point(*point) for point in points]
    problems: list[str] = []
    counts: Counter[str] = Counter()
    while left:
        log.write_text("")

        def suffer(place: Place, left: list[Point] = left) -> None:
            OPERATIONS[operation].run(place)
            holdfast.release()
            for point in left:
                interruption = Interruption(point)

                def interrupted(interruption: Interruption = interruption) -> type[BaseException] | None:
                    with interruption:
                        OPERATIONS[operation].run(place)
                    return KeyboardInterrupt if interruption.has_struck else None

                problem = _judged(place, operation, interrupted, log)
                _tell(log, interruption.has_struck, problem)

        said = _in_child(folder, suffer, log)
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("[")]
        for point, (has_struck, problem) in zip(left, lines, strict=False):
            counts["bytecodes" if has_struck else "missed"] += 1
            problems += [f"{_place(point)}: {problem}"] if problem else []
        if said is not None or len(lines) < len(left):
            problems.append(f"{_place(left[len(lines)])}: did not end: {log.read_text()[-3000:]}")
        left = left[len(lines) + 1 :]
    return {"problems": problems, "counts": counts}


def send_signals(*, folder: str, operation: str, number: int, seed: int) -> Case:
    """Send signals to a process that runs an operation again and again, and let it judge each outcome."""
    chance, counts = random.Random(seed), Counter[str]()
    log = Path(folder) / f"log-{os.getpid()}"
    log.write_text("")
    readable, writable = os.pipe()

    def suffer(place: Place) -> None:
        OPERATIONS[operation].run(place)
        holdfast.release()
        is_awaited = has_struck = False

        def raise_it(signal_number: int, frame: FrameType | None) -> None:
            nonlocal is_awaited, has_struck
            if is_awaited:
                is_awaited, has_struck = False, True
                raise _RAISED[signal_number]

        for each in _RAISED:
            signal.signal(each, raise_it)

        def interrupted() -> type[BaseException] | None:
            nonlocal is_awaited
            try:
                is_awaited = True
                os.write(writable, b"!")
                OPERATIONS[operation].run(place)
            finally:
                is_awaited = False
            return None

        for _ in range(number):
            has_struck = False
            problem = _judged(place, operation, interrupted, log)
            _tell(log, has_struck, problem)

    os.set_blocking(readable, False)
    os.set_inheritable(writable, False)
    started = time.monotonic()

    def disturb(child: Child) -> None:
        """Signal at some instant of each operation: most take some milliseconds."""
        while select.select([readable], [], [], 0.2)[0] or _is_alive(child.pid):
            with contextlib.suppress(BlockingIOError):
                for _ in os.read(readable, 16):
                    time.sleep(chance.random() ** 2 * 0.03)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, chance.choice(list(_RAISED)))

    said = _in_child(folder, suffer, log, meanwhile=disturb)
    os.close(readable)
    os.close(writable)
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("[")]
    problems = [f"signal {place}: {problem}" for place, (_, problem) in enumerate(lines) if problem]
    counts.update("signals" if has_struck else "late" for has_struck, _ in lines)
    if said is not None or len(lines) < number:
        seconds = time.monotonic() - started
        problems.append(f"signal {len(lines)}: did not end ({seconds:.0f} s): {log.read_text()[-3000:]}")
    return {"problems": problems, "counts": counts}


def _judged(place: Place, name: str, interrupted: Callable[[], type[BaseException] | None], log: Path) -> str | None:
    """What is wrong after an operation that was interrupted, and after the same one that is not."""
    operation = OPERATIONS[name]
    with open(log, "a") as stream:
        faulthandler.dump_traceback_later(_LIMIT_S, exit=True, file=stream)
        standing = Standing(place, operation)
        problem = None
        try:
            expected = interrupted()
            problem = None if expected is None else "the interrupt was swallowed"
        except tuple(_RAISED.values()):
            pass
        except BaseException as error:
            problem = f"another error came: {''.join(traceback.format_exception(error))[-1500:]}"
        problem = problem or standing.change(is_released=False)
        try:
            operation.run(place)
            holdfast.release()
        except BaseException as error:
            problem = problem or f"the next one failed: {''.join(traceback.format_exception(error))[-1500:]}"
        problem = problem or standing.change(is_released=True)
        faulthandler.cancel_dump_traceback_later()
    return problem


def _tell(log: Path, has_struck: bool, problem: str | None) -> None:
    with open(log, "a") as stream:
        stream.write(json.dumps([has_struck, problem]) + "\n")


def _place(point: Point) -> str:
    return f"{point.file}, {point.function} (line {point.line}), at {point.offset}"


def _in_child(
    folder: str,
    function: Callable[[Place], Any],
    log: Path | None = None,
    meanwhile: Callable[[Child], None] = lambda child: None,
) -> Any:
    """What ``function`` returned in a process of its own, with a place of its own; how it died, if it did."""
    home = Path(folder) / f"place-{os.getpid()}"
    get_ready_to_fork()

    def act() -> Any:
        work_in_small_pieces()
        gc.collect()
        gc.freeze()  # the many objects of torch need not be looked at again
        return function(Place(home))

    child = Child(act)
    meanwhile(child)
    end = child.end(_TOGETHER * 10.0)
    shutil.rmtree(home, ignore_errors=True)
    return end.told if end.status == 0 else str(end)


def _is_alive(number: int) -> bool:
    return os.path.exists(f"/proc/{number}") and "\nState:\tZ" not in Path(f"/proc/{number}/status").read_text()
