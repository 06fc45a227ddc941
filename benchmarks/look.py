"""What it takes to look at checkpoints: a diff by digests of two steps with millions of chunks, samples of tensors.

    python benchmarks/look.py --json benchmarks/results/look.json
    python benchmarks/look.py --quick          small sizes; shows only that everything works

The two steps are those of 1100 ranks with 2000 tensors: real manifests, written as such a job writes them (see
scale_ranks.py), and data files without data, of which a diff by digests must read nothing. Both are read from their
paths, decoded and checked within the time. The tensors that are sampled are real, one of each of a few types.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import holdfast
from holdfast._torch_codec.pickles import decode_message, encode_message
from holdfast._values.lazy import LazyList
from machine import describe_machine
from scale_ranks import Crew, Play, reports_of, sizes_of
from verdicts import Verdict

RANKS, TENSORS = 1100, 2000
QUICK_RANKS, QUICK_TENSORS = 20, 40
ROUNDS = 3
MOST_DIFF_S, MOST_SAMPLE_S = 2.0, 0.5
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex64)


def write_steps(folder: Path, ranks: int, tensors: int) -> tuple[Path, Path, int]:
    """Two steps of one job that differ in one block of one tensor, and how many chunks each has."""
    crew = Crew(ranks, sizes_of(ranks, tensors, distinct=False))
    steps = folder / "step-1", folder / "step-2"
    for step in steps:
        play = Play(crew, step)
        _, finals, metadata = play.plan([encode_message(tuple(crew.offer(rank))) for rank in range(ranks)])
        reports = reports_of(crew, finals)
        if step is steps[1]:
            report = decode_message(reports[1]).columns
            report = dataclasses.replace(report, digests=report.digests ^ (np.arange(len(report.digests)) == 0))
            reports[1] = encode_message(LazyList(report))
        play.publish(metadata, reports)
    with holdfast.open(steps[0]) as checkpoint:
        tensors_found = (checkpoint[key] for key in crew.sizes)
        return *steps, sum(tensor.chunks for tensor in tensors_found)


def diff_seconds(a: Path, b: Path) -> tuple[float, holdfast.Diff]:
    """The least of some rounds, from two paths to all that differs."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        found = holdfast.diff(a, b)
        seconds.append(time.perf_counter() - start)
    return min(seconds), found


def sample_seconds(folder: Path, nbytes: int) -> dict[str, float]:
    """The most of some rounds, from a path to the statistics of a tensor of each type: the first one reads the disk."""
    state = {
        str(dtype).removeprefix("torch."): torch.randint(0, 255, (nbytes >> 14, 1 << 14), dtype=torch.uint8).view(dtype)
        for dtype in DTYPES
    }
    holdfast.save(state, folder / "tensors", no_dist=True)
    found = {}
    for key in state:
        seconds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            told = holdfast.statistics(folder / "tensors", keys=key)
            seconds.append(time.perf_counter() - start)
        assert 0 < told.tensors[key].looked_at <= told.tensors[key].elements
        found[key] = max(seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ranks, tensors = (QUICK_RANKS, QUICK_TENSORS) if arguments.quick else (RANKS, TENSORS)
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name:
        a, b, chunks = write_steps(Path(name), ranks, tensors)
        diff_s, found = diff_seconds(a, b)
        samples = sample_seconds(Path(name), (4 if arguments.quick else 256) << 20)
    slowest = max(samples, key=lambda key: samples[key])
    verdicts = [
        Verdict(
            what=f"diff by digests of two steps with {chunks:,} chunks",
            measured=f"{diff_s:.2f} s",
            required=f"<= {MOST_DIFF_S:g} s",
            passed=diff_s <= MOST_DIFF_S,
        ),
        Verdict(
            what="data that it read",
            measured=f"{found.data_bytes_read} bytes",
            required="0 bytes",
            passed=found.data_bytes_read == 0,
        ),
        Verdict(
            what="the one block that changed",
            measured=str(found.counts),
            required="one key changed",
            passed=found.counts == {"changed": 1, "unchanged": tensors},
        ),
        Verdict(
            what=f"sampled statistics of a tensor, the slowest type: {slowest}",
            measured=f"{samples[slowest]:.2f} s",
            required=f"<= {MOST_SAMPLE_S:g} s",
            passed=samples[slowest] <= MOST_SAMPLE_S,
        ),
    ]
    for verdict in verdicts:
        print(f"{'PASS' if verdict.passed else 'FAIL'}  {verdict.what}: {verdict.measured} ({verdict.required})")
    if arguments.json:
        result = {
            "machine": dataclasses.asdict(describe_machine(Path(os.environ.get("BENCH_DIR", tempfile.gettempdir())))),
            "chunks": chunks,
            "diff_s": diff_s,
            "sample_s": samples,
            "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if not all(verdict.passed for verdict in verdicts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
