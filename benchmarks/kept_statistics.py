"""What it costs that a save keeps statistics: saves with and without them, in turns.

    python3 benchmarks/kept_statistics.py --dir /some/disk --device cuda --size 16 --json kept.json
    python3 benchmarks/kept_statistics.py --dir /some/disk --size 1

The state has the shapes of a language model in bf16, and its optimizer's in float32. Measured are what ``async_save``
blocks, the seconds of ``save``, and the processor's seconds of both; the medians of rounds that take turns. On a GPU
what blocks has a limit. Without one, statistics are reckoned by the processors that also copy, hash and write: there is
no limit, and the figures say how much that is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

# So that it runs from a checkout where nothing is installed.
sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

import holdfast
from disk import empty_folder
from holdfast._staging.copies import Mode
from machine import describe_machine
from states import State, large_shapes
from verdicts import Verdict

MOST_BLOCKED = 1.02
GIB = 1 << 30
_BYTES_PER_WEIGHT = 2 + 4 + 4
Seconds = dict[str, list[float]]


def state_of(nbytes: int, device: str) -> State:
    """Weights in bf16 and two moments of each in float32, about so many bytes in all."""
    state: State = {}
    made = torch.Generator(device).manual_seed(1)
    for key, shape in large_shapes(layers=64).items():
        if _BYTES_PER_WEIGHT * torch.Size(shape).numel() > nbytes:
            continue
        nbytes -= _BYTES_PER_WEIGHT * torch.Size(shape).numel()
        weight = torch.randn(shape, generator=made, device=device)
        state |= {f"model.{key}": weight.bfloat16(), f"exp_avg.{key}": weight, f"exp_avg_sq.{key}": weight.square()}
    return state


def timed(found: Seconds, name: str, action: Callable[[], object]) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun, used = time.perf_counter(), time.process_time()
    action()
    found.setdefault(name, []).append(time.perf_counter() - begun)
    found.setdefault(f"{name}, processor", []).append(time.process_time() - used)


def measure(state: State, folder: Path, rounds: int, stage: Mode) -> dict[bool, Seconds]:
    found: dict[bool, Seconds] = {False: {}, True: {}}
    for number in range(rounds + 1):
        for kept in (False, True):
            options = holdfast.SaveOptions(statistics=kept, stage=stage, warn_unchanged=False)
            handles: list[holdfast.AsyncSave] = []
            seconds: Seconds = {}
            begin = lambda options=options, handles=handles: handles.append(  # noqa: E731 - of this round
                holdfast.async_save(state, empty_folder(folder / "a"), no_dist=True, options=options)
            )
            timed(seconds, "blocked", begin)
            timed(seconds, "behind", handles[0].result)
            save = lambda options=options: holdfast.save(  # noqa: E731 - of this round
                state, empty_folder(folder / "b"), no_dist=True, options=options
            )
            timed(seconds, "save", save)
            if number:  # the first one allocates
                for name, each in seconds.items():
                    found[kept].setdefault(name, []).extend(each)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", type=float, default=1.0, help="GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage", choices=("copy", "overlap", "device"), default="copy")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    state = state_of(int(arguments.size * GIB), arguments.device)
    nbytes = sum(each.nbytes for each in state.values())
    found = measure(state, arguments.dir, arguments.rounds, arguments.stage)
    medians = {kept: {name: statistics.median(each) for name, each in found[kept].items()} for kept in found}
    print(f"{len(state)} tensors, {nbytes / GIB:.2f} GiB on {arguments.device}, stage {arguments.stage}")
    for name, without in medians[False].items():
        more = medians[True][name] - without
        rate = f", {nbytes / more / 1e9:.2f} GB/s of the state" if more > 0 else ""
        print(f"{name:20} {without:8.3f} s without, {without + more:8.3f} s with statistics: {more:+.3f} s{rate}")
    ratio = medians[True]["blocked"] / medians[False]["blocked"]
    verdict = Verdict(
        what="what a call blocks with statistics, against without",
        measured=f"{ratio:.3f}",
        required=f"<= {MOST_BLOCKED:g}" if arguments.device == "cuda" else "no limit without a GPU",
        passed=arguments.device != "cuda" or ratio <= MOST_BLOCKED,
    )
    print(f"{'PASS' if verdict.passed else 'FAIL'}  {verdict.what}: {verdict.measured} ({verdict.required})")
    if arguments.json:
        result = {
            "machine": asdict(describe_machine(arguments.dir)),
            "tensors": len(state),
            "bytes": nbytes,
            "device": arguments.device,
            "stage": arguments.stage,
            "seconds": {"without": found[False], "with": found[True]},
            "verdicts": [asdict(verdict)],
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if not verdict.passed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
