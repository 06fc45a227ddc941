"""What a save costs a training: every framework by itself, beside the same training with the adapter for it.

    .venv-integrations/bin/python benchmarks/adapters.py --dir /some/disk --rounds 3
    .venv-integrations/bin/python benchmarks/adapters.py --dir /some/disk --only transformers accelerate

All sides of a framework take turns, each in a job of two ranks of its own, on CPU: the framework's default, the adapter
in the background and not, and asynchronous saves of the framework where it has such. Scripts in ``integrations`` save
1 GB a few times. They tell how long training was blocked, how many files are published by themselves, and the peak of
memory above that before the first save (``integrations/measuring.py`` says how). Numbers are medians of the rounds;
ratios are within this run. A framework that is not installed, or whose script is not there, is named and left out. The
exit code is 0 when every goal is reached.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from disk import empty_folder, require_space
from machine import describe_machine
from verdicts import Verdict

FRAMEWORKS = ("accelerate", "lightning", "torchtitan", "transformers")  # Ray has no save of its own
SIDES = ("measure-framework", "measure-holdfast", "measure-holdfast-sync")
HAVE_ASYNCHRONOUS = ("lightning", "torchtitan")  # of their own, on the CPU
SCRIPTS = Path(__file__).resolve().parents[1] / "integrations"
TIMEOUT_S = 1200
MOST_BLOCKED = 0.1
NEEDED_BYTES = 8_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the saves of one job cost; ``files`` are published each by itself."""

    blocked_s: float
    files: int
    peak_rss_bytes: int
    save_alone_bytes: int
    steps_s: float

    def line(self) -> str:
        """The same for people."""
        peak, alone = self.peak_rss_bytes / 2**20, self.save_alone_bytes / 2**20
        return f"blocked {self.blocked_s:7.3f} s  {self.files:3} files  {peak:6.1f} MiB (a save alone {alone:.1f})"


def measured(framework: str, side: str, folder: Path) -> Cost:
    """The cost that a job tells; RuntimeError with its output if it does not."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    empty_folder(folder)
    try:
        done = subprocess.run(
            [sys.executable, *ranks, str(script_of(framework)), str(folder), side],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
            env=environment,
        )
    finally:
        empty_folder(folder)
    notes = [json.loads(line)["note"] for line in done.stdout.splitlines() if line.startswith('{"note": ')]
    if done.returncode != 0 or not notes:
        raise RuntimeError(f"{framework}, {side}: {done.stderr[-4000:]}")
    told = json.loads(notes[-1])
    return Cost(**{name: told[name] for name in Cost.__dataclass_fields__})


def script_of(framework: str) -> Path:
    """The script that measures this framework, whether it is there or not."""
    return SCRIPTS / f"{framework}_adapter.py"


def middle(costs: list[Cost]) -> Cost:
    """The median of each number."""
    return Cost(
        blocked_s=statistics.median(cost.blocked_s for cost in costs),
        files=max(cost.files for cost in costs),
        peak_rss_bytes=int(statistics.median(cost.peak_rss_bytes for cost in costs)),
        save_alone_bytes=int(statistics.median(cost.save_alone_bytes for cost in costs)),
        steps_s=statistics.median(cost.steps_s for cost in costs),
    )


def verdicts(framework: str, costs: dict[str, Cost]) -> list[Verdict]:
    """A verdict for each goal of an adapter: beside the default of the framework, and beside its own asynchronous."""
    theirs, ours, sync = costs["measure-framework"], costs["measure-holdfast"], costs["measure-holdfast-sync"]
    its_async = costs.get("measure-framework-async")

    def blocked(name: str, mine: Cost, its: Cost, most: float) -> Verdict:
        ratio = mine.blocked_s / its.blocked_s
        what = f"{framework}, {name}: training is blocked, as a part of what it is there"
        return Verdict(what=what, measured=f"{ratio:.3f}", required=f"<= {most:g}", passed=ratio <= most)

    def memory(name: str, mine: Cost, its: Cost) -> Verdict:
        what = f"{framework}, {name}: peak memory of a training with saves, above that before"
        measured, required = (f"{each.peak_rss_bytes / 2**20:.1f} MiB" for each in (mine, its))
        passed = mine.peak_rss_bytes <= its.peak_rss_bytes
        return Verdict(what=what, measured=measured, required=f"<= {required}", passed=passed)

    default, both_sync, both_async = "beside its default", "synchronous, beside its default", "beside its asynchronous"
    found = [
        blocked(default, ours, theirs, MOST_BLOCKED),
        memory(default, ours, theirs),
        blocked(both_sync, sync, theirs, 1),
        memory(both_sync, sync, theirs),
    ]
    if its_async is not None:
        found += [blocked(both_async, ours, its_async, 1), memory(both_async, ours, its_async)]
    what = f"{framework}: a save publishes once what were so many files by default"
    files = f"{ours.files} for {theirs.files}"
    return [*found, Verdict(what=what, measured=files, required="1", passed=ours.files == 1)]


def absent(framework: str) -> str:
    """Why a framework is left out; empty when it can be measured."""
    try:
        importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        return "it is not installed"
    return "" if script_of(framework).exists() else f"there is no {script_of(framework).name}"


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="folder on the disk to measure; made if missing")
    parser.add_argument("--rounds", type=int, default=3, help="how often both sides of a framework run (default 3)")
    parser.add_argument("--only", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS, help="some frameworks")
    parser.add_argument("--json", type=Path, help="where to write the document, besides standard output")
    arguments = parser.parse_args()
    folder = arguments.dir / "holdfast-adapters"
    folder.mkdir(parents=True, exist_ok=True)
    require_space(folder, NEEDED_BYTES)
    machine = describe_machine(folder)
    print("\n".join(machine.lines()), file=sys.stderr)
    left_out = {framework: why for framework in arguments.only if (why := absent(framework))}
    versions, costs, judged = {}, {}, []
    for framework in [each for each in arguments.only if each not in left_out]:
        versions[framework] = importlib.metadata.version(framework)
        sides = (*SIDES, "measure-framework-async") if framework in HAVE_ASYNCHRONOUS else SIDES
        rounds: dict[str, list[Cost]] = {side: [] for side in sides}
        for _ in range(arguments.rounds):
            for side, taken in rounds.items():
                taken.append(measured(framework, side, folder))
                print(f"  {framework:13} {side:24} {taken[-1].line()}", file=sys.stderr, flush=True)
        costs[framework] = {side: [asdict(cost) for cost in taken] for side, taken in rounds.items()}
        judged += verdicts(framework, {side: middle(taken) for side, taken in rounds.items()})
    folder.rmdir()
    for each in judged:
        print(f"{'ok  ' if each.passed else 'MISS'} {each.what}: {each.measured} ({each.required})", file=sys.stderr)
    for framework, why in left_out.items():
        print(f"{framework} is left out: {why}", file=sys.stderr)
    document = {
        "machine": asdict(machine),
        "versions": versions,
        "costs": costs,
        "verdicts": [asdict(each) for each in judged],
        "left_out": left_out,
    }
    text = json.dumps(document, indent=2)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return int(not all(each.passed for each in judged))


if __name__ == "__main__":
    sys.exit(main())
