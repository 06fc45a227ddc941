"""Every decoder of bytes from a checkpoint, fed a million inputs that are nearly right."""

from __future__ import annotations

import os
import random
import resource
import time
from collections import Counter
from functools import partial
from typing import Any

import holdfast
from torture import fuzzing
from torture.crew import Child
from torture.part import Options, PartResult
from torture.samples import get_ready_to_fork

NAME = "fuzz"
INPUTS = {
    "manifest": 400_000,
    "index": 80_000,
    "header": 220_000,
    "value": 220_000,
    "metadata": 40_000,
    "archive": 60_000,
}
BATCH = 5_000
SLOW_S = 1.0
GROWTH_BYTES = 64 << 20


def run(options: Options) -> PartResult:
    """Feed batches to children, one for each processor at a time."""
    get_ready_to_fork()
    share = 0.002 if options.quick else 1.0
    batches = [
        (name, min(BATCH, int(count * share) - start), options.seed * 1_000_003 + start)
        for name, count in INPUTS.items()
        for start in range(0, int(count * share), BATCH)
    ]
    total = sum(size for _, size, _ in batches)
    for name in fuzzing.TARGETS:
        fed(name, 20, 0)  # whatever is imported and cached at first is there for all children
    violations: list[str] = []
    counts: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    running: list[tuple[tuple[str, int, int], Child]] = []
    waiting = batches[::-1]
    done = 0
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            batch = waiting.pop()
            running.append((batch, Child(partial(fed_under_limits, *batch))))
        (name, size, seed), child = running.pop(0)
        end = child.end(timeout_s=300.0)
        done += size
        options.progress(done, total)
        if end.told is None:
            violations.append(f"{name}, batch {seed} of {size}: {'hung' if end.hung else f'died of {end.signal}'}")
            continue
        violations += [f"{name}, batch {seed} of {size}: {problem}" for problem in end.told["problems"]]
        counts[f"{name} inputs"] += size
        counts[f"{name} accepted"] += end.told["accepted"]
        seconds[name] += end.told["seconds"]
    speeds = [f"{name} {counts[f'{name} inputs'] / max(spent, 1e-9):,.0f}" for name, spent in seconds.items()]
    return PartResult(
        fault="fuzz of the manifest, index, header, value, torch-metadata and archive decoders",
        must_hold="no crash, hang, over-allocation or foreign exception; what is accepted is written in one way",
        injected=sum(counts[f"{name} inputs"] for name in INPUTS),
        required=1_000_000,
        violations=violations,
        notes=[f"inputs per second and process: {', '.join(speeds)}"],
        counts=dict(counts),
    )


def fed_under_limits(name: str, size: int, seed: int) -> dict[str, Any]:
    """As ``fed``, with little memory to be had beyond what is used now."""
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    told = fed(name, size, seed)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    if grown > GROWTH_BYTES:
        told["problems"].append(f"grew by {grown >> 20} MiB")
    return told


def fed(name: str, size: int, seed: int) -> dict[str, Any]:
    """What came of ``size`` inputs for the decoder ``name``."""
    target = fuzzing.TARGETS[name]
    chosen = random.Random(f"{name} {seed}")
    problems: list[str] = []
    accepted = 0
    started = time.perf_counter()
    for number in range(size):
        data = target.mutate(chosen)
        before = time.thread_time()  # other processes may stop this one for seconds
        try:
            target.decode(data)
            accepted += 1
        except holdfast.InternalError as error:
            problems.append(f"input {number}: InternalError: {error}")
        except holdfast.CheckpointError:
            pass
        except Exception as error:
            problems.append(f"input {number}: {type(error).__name__}: {str(error)[:200]}: {data[:2000]!r}")
        if time.thread_time() - before > SLOW_S:
            problems.append(f"input {number}: took {time.thread_time() - before:.1f} s: {data[:2000]!r}")
        if len(problems) > 20:
            break
    return {"problems": problems, "accepted": accepted, "seconds": time.perf_counter() - started}
