"""Saves of thousands of ranks, planned in one process: the promises, benchmarks/results/scale.json and scale.png.

    python benchmarks/scale.py                 up to 4096 ranks x 2000 tensors; torch's planner up to 1024 ranks
    python benchmarks/scale.py --torch 128     torch's planner up to 128 ranks, which saves minutes
    python benchmarks/scale.py --quick         small sizes; shows only that everything works

Every size runs in a process of its own, whose peak memory is the coordinator's and all that is played for it. What is
played and what is real is in scale_ranks.py. Linux only.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

# So that it runs from a checkout where nothing is installed.
sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

from holdfast._native.catalog import read_catalog
from holdfast._torch_codec.pickles import encode_message
from machine import describe_machine
from scale_ranks import Crew, Play, decide_seconds, fake_group, rank_seconds, read_plan_seconds, reports_of, sizes_of
from scale_torch import measure_torch

REPOSITORY = Path(__file__).resolve().parents[1]
MANY, LARGE, SMALL = (1024, 512), (4096, 2000), (256, 400)
SWEEP = [
    (8, 512),
    (32, 512),
    (64, 512),
    (128, 512),
    SMALL,
    (256, 512),
    (512, 512),
    MANY,
    (2048, 512),
    (4096, 512),
    LARGE,
]
QUICK = [(8, 20), (32, 20), (64, 20)]
_REPEATED_BELOW = 1 << 20  # chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one size costs; seconds are the least of three rounds, except at millions of chunks."""

    ranks: int
    tensors: int
    chunks: int
    received: int
    plan_s: float
    decide_s: float
    rank_s: float
    later_bytes: float
    later_s: float
    later_rank_s: float
    report_bytes: float
    publish_s: float
    stored: int
    read_s: float
    read_plan_s: float
    read_plan_across_s: float
    peak_memory: int

    @property
    def coordinator_s(self) -> float:
        """All that the coordinator does in a first save: plan, merge, index, manifest."""
        return self.plan_s + self.publish_s


def measure(ranks: int, tensors: int, folder: Path, *, distinct: bool) -> Cost:
    """The cost of a first save, of later ones, and of a load."""
    crew = Crew(ranks, sizes_of(ranks, tensors, distinct=distinct))
    rounds = 3 if ranks * tensors < _REPEATED_BELOW else 1
    offers = [encode_message(tuple(crew.offer(rank))) for rank in range(ranks)]
    plans, publishes = [], []
    for number in range(rounds):
        play = Play(crew, folder / str(number))
        seconds, finals, metadata = play.plan(offers)
        received = play.received
        plans.append(seconds)
        reports = reports_of(crew, finals)
        publishes.append(play.publish(metadata, reports))
    report_bytes = sum(map(len, reports))
    again = [encode_message(final.token + b"\7" * 8) for final in finals]
    later = min(play.plan(again)[0] for _ in range(3))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    del reports
    reads = []
    for _ in range(rounds):
        start = time.perf_counter()
        catalog = read_catalog(play.folder)
        reads.append(time.perf_counter() - start)
    fake_group(ranks)
    rank_s, later_rank_s = rank_seconds(crew, finals[1], folder / "rank")
    return Cost(
        ranks=ranks,
        tensors=tensors,
        chunks=len(catalog.index),
        received=received,
        plan_s=min(plans),
        decide_s=min(decide_seconds(crew) for _ in range(rounds)),
        rank_s=rank_s,
        later_bytes=sum(map(len, again)) / ranks,
        later_s=later,
        later_rank_s=later_rank_s,
        report_bytes=report_bytes / len(catalog.index),
        publish_s=min(publishes),
        stored=sum(path.stat().st_size for path in play.folder.iterdir() if not path.name.startswith("data-")),
        read_s=min(reads),
        read_plan_s=read_plan_seconds(crew, catalog.metadata(), -(-ranks * 3 // 4), 0),
        read_plan_across_s=read_plan_seconds(crew, catalog.metadata(), min(8, ranks), 1),
        peak_memory=peak,
    )


# --- promises ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What must be reached, what was, and whether that is enough."""

    size: str
    what: str
    measured: str
    required: str
    passed: bool


def promises(costs: list[Cost]) -> list[Promise]:
    """The promises that these sizes can judge."""
    found: list[Promise] = []

    def judge(cost: Cost, what: str, value: float, limit: float, unit: str, scale: float = 1.0) -> None:
        found.append(
            Promise(
                size=f"{cost.ranks} x {cost.tensors}",
                what=what,
                measured=f"{value / scale:.3g} {unit}",
                required=f"<= {limit / scale:g} {unit}",
                passed=value <= limit,
            )
        )

    by_size = {(cost.ranks, cost.tensors): cost for cost in costs}
    if many := by_size.get(MANY):
        judge(many, "first save: plan, merge, index, manifest at the coordinator", many.coordinator_s, 1.5, "s")
        judge(many, "first save: received to plan, one layout", many.received, 5e6, "MB", 1e6)
        judge(many, "first save: planning on another rank", many.rank_s, 0.2, "s")
        judge(many, "later saves: received to plan, for each rank", many.later_bytes, 64, "bytes")
        judge(many, "later saves: planning at the coordinator", many.later_s, 0.05, "ms", 1e-3)
        judge(many, "reports, for each chunk of one digest", many.report_bytes, 32, "bytes")
        judge(many, "index and manifest", many.stored, 30e6, "MB", 1e6)
        judge(many, "index and manifest read into columns, checked", many.read_s, 0.3, "s")
        judge(many, "one rank's read plan on 3/4 as many ranks", many.read_plan_s, 0.2, "s")
        judge(many, "one rank's read plan across, Shard(1) on 8", many.read_plan_across_s, 0.2, "s")
    if large := by_size.get(LARGE):
        judge(large, "first save: all of it at the coordinator", large.coordinator_s, 25, "s")
        judge(large, "peak memory of the coordinator", large.peak_memory, 3e9, "GB", 1e9)
        if small := by_size.get(SMALL):
            growth = (large.coordinator_s / large.chunks) / (small.coordinator_s / small.chunks)
            judge(large, f"time per chunk over that of {small.chunks} chunks", growth, 3, "x")
    return found


# --- what comes out ---------------------------------------------------------------------------------------------------


def cost_table(costs: list[Cost]) -> Table:
    """All sizes."""
    table = Table(title="holdfast", title_justify="left")
    columns = (
        "ranks",
        "tensors",
        "chunks",
        "plan",
        "decide",
        "rank",
        "later",
        "publish",
        "stored",
        "read",
        "read plan",
        "memory",
    )
    for name in columns:
        table.add_column(name, justify="right")
    for cost in costs:
        table.add_row(
            str(cost.ranks),
            str(cost.tensors),
            f"{cost.chunks:,}",
            f"{cost.plan_s:.3f} s",
            f"{cost.decide_s:.3f} s",
            f"{cost.rank_s:.3f} s",
            f"{cost.later_s * 1e3:.1f} ms",
            f"{cost.publish_s:.3f} s",
            f"{cost.stored / 1e6:.1f} MB",
            f"{cost.read_s:.3f} s",
            f"{cost.read_plan_s:.3f} s",
            f"{cost.peak_memory / 1e9:.2f} GB",
        )
    return table


def torch_table(costs: list[dict[str, Any]]) -> Table:
    """What torch's planner costs."""
    table = Table(title="torch DCP's planner", title_justify="left")
    for name in ("ranks", "tensors", "received", "unpickle", "plan", "stored", "read", "read plan"):
        table.add_column(name, justify="right")
    for cost in costs:
        seconds = [f"{cost[name]:.2f} s" for name in ("unpickle_s", "plan_s", "read_s", "read_plan_s")]
        received, stored = (f"{cost[name] / 1e6:.1f} MB" for name in ("received", "stored"))
        table.add_row(str(cost["ranks"]), str(cost["tensors"]), received, *seconds[:2], stored, *seconds[2:])
    return table


def promise_table(kept: list[Promise]) -> Table:
    """The promises, one by one."""
    table = Table(title="promises", title_justify="left")
    for name in ("ranks x tensors", "what", "measured", "required", ""):
        table.add_column(name)
    for each in kept:
        mark = "[green]PASS[/]" if each.passed else "[bold red]FAIL[/]"
        table.add_row(each.size, each.what, each.measured, each.required, mark)
    return table


def write_plot(path: Path, costs: list[Cost], torch_costs: list[dict[str, Any]]) -> None:
    """Cost against ranks, both axes in powers."""
    mpl.rcParams.update({"font.size": 9})
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    tensors = max({cost.tensors for cost in costs}, key=[cost.tensors for cost in costs].count)
    alike = [cost for cost in costs if cost.tensors == tensors]
    ranks = [cost.ranks for cost in alike]
    lines = {
        "coordinator, first save": ([cost.coordinator_s for cost in alike], "#0b6e4f", "-"),
        "coordinator, later saves: planning": ([cost.later_s for cost in alike], "#0b6e4f", ":"),
        "read index and manifest": ([cost.read_s for cost in alike], "#3d6fa5", "-"),
        "one rank's read plan": ([cost.read_plan_s for cost in alike], "#3d6fa5", ":"),
    }
    for name, (values, colour, style) in lines.items():
        axes.loglog(ranks, values, style, color=colour, marker="o", markersize=3, label=name)
    theirs = [each for each in torch_costs if each["tensors"] == tensors]
    if theirs:
        xs = [each["ranks"] for each in theirs]
        axes.loglog(
            xs,
            [each["unpickle_s"] + each["plan_s"] for each in theirs],
            "-",
            color="#c8553d",
            marker="s",
            markersize=3,
            label="torch DCP: unpickle and plan",
        )
        axes.loglog(
            xs,
            [each["read_plan_s"] for each in theirs],
            ":",
            color="#c8553d",
            marker="s",
            markersize=3,
            label="torch DCP: one rank's read plan",
        )
    axes.set_xlabel(f"ranks ({tensors} tensors, each sharded over all ranks)")
    axes.set_ylabel("seconds")
    axes.grid(True, which="major", color="#dddddd")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


# --- one process for each size ----------------------------------------------------------------------------------------


def run_alone(arguments: list[str]) -> dict[str, Any]:
    """What this script, run with ``arguments`` in a process of its own, measures."""
    command = [sys.executable, __file__, "--one", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_one(kind: str, ranks: int, tensors: int, folder: Path) -> None:
    """Measure one size and print it as JSON."""
    if kind == "torch":
        print(json.dumps(asdict(measure_torch(ranks, sizes_of(ranks, tensors, distinct=False)))))
        return
    with tempfile.TemporaryDirectory(dir=folder) as made:
        print(json.dumps(asdict(measure(ranks, tensors, Path(made), distinct=kind == "distinct"))))


def main() -> int:
    """Run everything; 1 where a promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: a smoke test, not a measurement")
    parser.add_argument(
        "--torch", type=int, default=1024, metavar="RANKS", help="run torch's planner up to so many ranks"
    )
    parser.add_argument("--distinct", action="store_true", help="give every tensor a size of its own")
    parser.add_argument("--dir", type=Path, default=REPOSITORY / ".bench", help="where files go (default .bench)")
    parser.add_argument("--output", type=Path, help="where JSON and picture go (default benchmarks/results)")
    parser.add_argument("--one", nargs=3, metavar=("KIND", "RANKS", "TENSORS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    if options.one:
        kind, ranks, tensors = options.one
        run_one(kind, int(ranks), int(tensors), options.dir)
        return 0
    output = options.output or (options.dir / "results" if options.quick else REPOSITORY / "benchmarks" / "results")
    output.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 130)
    machine = describe_machine(options.dir)
    for line in machine.lines():
        console.print(line)
    kind = "distinct" if options.distinct else "alike"
    where = ["--dir", str(options.dir)]
    sizes = QUICK if options.quick else SWEEP
    costs = [Cost(**run_alone([kind, str(ranks), str(tensors), *where])) for ranks, tensors in sizes]
    torch_costs = [
        run_alone(["torch", str(ranks), str(tensors), *where])
        for ranks, tensors in sizes
        if ranks <= options.torch and (ranks, tensors) != SMALL
    ]
    kept = promises(costs)
    console.print(cost_table(costs))
    console.print(torch_table(torch_costs))
    if kept:
        console.print(promise_table(kept))
    name = "scale-distinct" if options.distinct else "scale"
    results = {
        "machine": asdict(machine),
        "quick": options.quick,
        "holdfast": [asdict(cost) for cost in costs],
        "torch": torch_costs,
        "promises": [asdict(each) for each in kept],
    }
    (output / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    write_plot(output / f"{name}.png", costs, torch_costs)
    console.print(f"written: {output / name}.json, .png")
    return int(any(not each.passed for each in kept))


if __name__ == "__main__":
    sys.exit(main())
