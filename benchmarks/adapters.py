"""What a save costs a training: every framework by itself, beside the same training with the adapter for it.

    .venv-integrations/bin/python benchmarks/adapters.py --dir /some/disk --rounds 3
    .venv-integrations/bin/python benchmarks/adapters.py --dir /some/disk --only transformers accelerate

Both sides of a framework take turns, each in a job of two ranks of its own, on CPU. Scripts in ``integrations`` save
1 GB three times, and tell how long training was blocked, how many files are published by themselves, and the peak of
memory above that before the first save. Numbers are medians of the rounds; ratios are within this run. A framework that
is not installed, or whose script is not there, is named and left out. The exit code is 0 when every goal is reached.
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

FRAMEWORKS = ("accelerate", "lightning", "ray", "torchtitan", "transformers")
STARTS_RANKS_ITSELF = ("ray",)
SIDES = ("measure-framework", "measure-holdfast")
SCRIPTS = Path(__file__).resolve().parents[1] / "integrations"
TIMEOUT_S = 600
MOST_BLOCKED = 0.1
FEWEST_FILES = 3
NEEDED_BYTES = 8_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the saves of one job cost; ``files`` are published each by itself."""

    blocked_s: float
    files: int
    peak_rss_bytes: int

    def line(self) -> str:
        """The same for people."""
        return f"blocked {self.blocked_s:7.3f} s  {self.files:3} files  {self.peak_rss_bytes / 2**20:6.0f} MiB"


def measured(framework: str, side: str, folder: Path) -> Cost:
    """The cost that a job tells; RuntimeError with its output if it does not."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    ranks = (
        ()
        if framework in STARTS_RANKS_ITSELF
        else ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    )
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
    return Cost(**{name: told[name] for name in ("blocked_s", "files", "peak_rss_bytes")})


def script_of(framework: str) -> Path:
    """The script that measures this framework, whether it is there or not."""
    return SCRIPTS / f"{framework}_adapter.py"


def middle(costs: list[Cost]) -> Cost:
    """The median of each number."""
    return Cost(
        blocked_s=statistics.median(cost.blocked_s for cost in costs),
        files=max(cost.files for cost in costs),
        peak_rss_bytes=int(statistics.median(cost.peak_rss_bytes for cost in costs)),
    )


def verdicts(framework: str, theirs: Cost, ours: Cost) -> list[Verdict]:
    """A verdict for each goal of an adapter."""
    ratio = ours.blocked_s / theirs.blocked_s
    mine, its = ours.peak_rss_bytes / 2**20, theirs.peak_rss_bytes / 2**20
    return [
        Verdict(
            what=f"{framework}: training is blocked by a save, as a part of what it is by default",
            measured=f"{ratio:.3f}",
            required=f"<= {MOST_BLOCKED:g}",
            passed=ratio <= MOST_BLOCKED,
        ),
        Verdict(
            what=f"{framework}: a save publishes once what was so many files by default",
            measured=f"{ours.files} for {theirs.files}",
            required=f"1 for {FEWEST_FILES} or more",
            passed=ours.files == 1 and theirs.files >= FEWEST_FILES,
        ),
        Verdict(
            what=f"{framework}: peak memory above that before the first save",
            measured=f"{mine:.0f} MiB",
            required=f"<= {its:.0f} MiB",
            passed=mine <= its,
        ),
    ]


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
        rounds: dict[str, list[Cost]] = {side: [] for side in SIDES}
        for _ in range(arguments.rounds):
            for side, taken in rounds.items():
                taken.append(measured(framework, side, folder))
                print(f"  {framework:13} {side:18} {taken[-1].line()}", file=sys.stderr, flush=True)
        costs[framework] = {side: [asdict(cost) for cost in taken] for side, taken in rounds.items()}
        judged += verdicts(framework, *(middle(taken) for taken in rounds.values()))
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
