"""What the manager of a run costs: beside a bare asynchronous save, at steps that are not due, and to stop.

    python3 benchmarks/steps.py --dir /some/disk --gb 1 --rounds 9

Ratios are of medians within this run. A bare and a managed save take turns; the call that is timed comes right after
the save before was published, when the manager has twenty old steps to delete, each as large as the new one. A stop is
timed from the signal until ``should_stop`` is True, and compared with a save until it is durable, in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

# So that it runs from a checkout where nothing is installed.
sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

from disk import empty_folder, require_space
from holdfast import CheckpointManager, Every, Latest, Steps, async_save, prewarm, release, save
from machine import describe_machine
from states import State, large_shapes, random_state

OLD_STEPS = 20
LISTED_STEPS = 1000
CALLS = 2000
STEP_S = 0.05
LIMITS = {
    "save that is not due, us": 20.0,
    "should_stop, us": 5.0,
    "blocked by a managed save / by a bare one": 1.02,
    "latest() among 1,000 steps, s": 0.1,
    "(stop to durable - one step) / save to durable": 1.1,
}


def seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def state_of(nbytes: int) -> State:
    """About so many bytes in the shapes of a language model."""
    kept, size = {}, 0
    for key, shape in large_shapes().items():
        if size < nbytes:
            kept[key] = shape
            size += 2 * math.prod(shape)
    return random_state(kept)


def copies(source: Path, root: Path, numbers: range) -> None:
    """The checkpoint ``source`` as so many steps of a run."""
    for number in numbers:
        shutil.copytree(source, root / f"step-{number}")


def idle_calls(folder: Path, rounds: int) -> tuple[list[float], list[float]]:
    """The median seconds of a ``save`` that is not due, and of a ``should_stop``, in each round."""
    saves, stops = [], []
    with CheckpointManager(folder / "idle", save=Every(steps=10**9, seconds=10**6), keep=Latest(3)) as run:
        step = 0
        for _ in range(rounds):
            taken: list[tuple[float, float]] = []
            for _ in range(CALLS):
                step += 1
                begin = time.perf_counter()
                run.save(step, {})
                between = time.perf_counter()
                run.should_stop(step)
                taken.append((between - begin, time.perf_counter() - between))
            saves.append(statistics.median(call for call, _ in taken))
            stops.append(statistics.median(call for _, call in taken))
    return saves, stops


def blocked(folder: Path, state: State, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds that a bare and a managed call block, in turns, each right after the save before was published."""
    bare, managed = [], []
    save(state, folder / "old")
    prewarm(state)
    for _ in range(rounds):
        async_save(state, folder / "bare" / "step-100").result()
        bare.append(seconds(lambda: async_save(state, folder / "bare" / "step-101").wait_staged()))
        async_save(state, folder / "bare" / "step-102").result()
        empty_folder(folder / "bare")

        root = empty_folder(folder / "managed")
        copies(folder / "old", root, range(1, OLD_STEPS + 1))
        with CheckpointManager(root, save=Every(steps=1), keep=Latest(1)) as run:
            run.resume(dict(state), strict=False)
            run.save(100, state)
            assert run._under_way is not None
            run._under_way.handle.result()  # wait() would wait for the deletions too
            managed.append(seconds(lambda run=run: run.save(101, state)))  # type: ignore[misc]
            run.wait()
        left = [step.step for step in Steps(root).steps()]
        assert left == [101], left
    return bare, managed


def listed(folder: Path, rounds: int) -> list[float]:
    """Seconds of ``latest()`` by one who has seen none of the steps before."""
    save({f"layer.{number}.weight": torch.ones(8) for number in range(150)}, folder / "one")
    copies(folder / "one", folder / "many", range(LISTED_STEPS))
    return [seconds(Steps(folder / "many").latest) for _ in range(rounds)]


def stops(folder: Path, state: State, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds from the begin of a save until it is durable, and from a signal until the run has stopped, in turns."""
    durable, stopped = [], []
    for _ in range(rounds):
        with CheckpointManager(empty_folder(folder / "stops"), save=Every(steps=10**9)) as run:
            run.save(1, state, force=True)
            run.wait()
            begin = time.perf_counter()
            run.save(2, state, force=True)
            run.wait()
            durable.append(time.perf_counter() - begin)
            for step in range(3, 10**6):
                begin_step = time.perf_counter()
                if step == 6:  # right after a step has begun: all of it is still to come
                    signal.raise_signal(signal.SIGUSR1)
                    begin = begin_step
                time.sleep(STEP_S)
                run.save(step, state)
                if run.should_stop(step):
                    break
            stopped.append(time.perf_counter() - begin)
    return durable, stopped


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="folder on the disk to measure; made if missing")
    parser.add_argument("--gb", type=float, default=1.0, help="size of a step in GB (default 1)")
    parser.add_argument("--rounds", type=int, default=9, help="how often everything is measured (default 9)")
    parser.add_argument("--json", type=Path, help="where to write the document, besides standard output")
    arguments = parser.parse_args()
    folder = arguments.dir / "holdfast-steps"
    folder.mkdir(parents=True, exist_ok=True)
    total, rounds = int(arguments.gb * 1e9), arguments.rounds
    require_space(folder, int(total * (OLD_STEPS + 4)))
    machine = describe_machine(folder)
    print("\n".join(machine.lines()), file=sys.stderr)
    state = state_of(total)
    try:
        saves, asked = idle_calls(folder, rounds)
        bare, managed = blocked(folder, state, rounds)
        latest = listed(folder, rounds)
        durable, stopped = stops(folder, state, rounds)
    finally:
        release()
        shutil.rmtree(folder, ignore_errors=True)
    middle = statistics.median
    numbers = {
        "save that is not due, us": 1e6 * middle(saves),
        "should_stop, us": 1e6 * middle(asked),
        "blocked by a managed save / by a bare one": middle(managed) / middle(bare),
        "latest() among 1,000 steps, s": middle(latest),
        "(stop to durable - one step) / save to durable": (middle(stopped) - STEP_S) / middle(durable),
    }
    for name, number in numbers.items():
        print(f"{name}: {number:.3g} (at most {LIMITS[name]:g})", file=sys.stderr)
    raw = {"saves": saves, "should_stop": asked, "bare": bare, "managed": managed, "latest": latest}
    document = {
        "machine": asdict(machine),
        "step_bytes": sum(tensor.nbytes for tensor in state.values()),
        "numbers": numbers,
        "limits": LIMITS,
        "seconds": {**raw, "durable": durable, "stopped": stopped},
    }
    text = json.dumps(document, indent=2)
    if arguments.json is not None:
        arguments.json.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
