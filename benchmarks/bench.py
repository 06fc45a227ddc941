"""Holdfast beside the raw disk, torch and safetensors, in one run: tables, benchmarks/results/bench.json and bench.png.

    python benchmarks/bench.py                      everything, some twenty minutes, 18 GB of disk and 14 GB of memory
    python benchmarks/bench.py --quick              a minute or two; shows only that everything works
    python benchmarks/bench.py --only small --contestants holdfast safetensors

The promises it judges are in verdicts.py, the contestants in contestants.py, what is timed in race.py and
rank_race.py. Linux only.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from contestants import HOLDFAST, MAKERS, Contestant, contestants
from disk import cache_dropping
from machine import describe_machine
from peak_memory import Peak, measure_peaks
from race import Race, run_race
from rank_race import RANK_CONTESTANTS, run_rank_race, run_replica_race
from report import Results, print_results, write_json, write_plot
from states import Shapes, large_shapes, small_shapes
from verdicts import LARGE, ON_RANKS, ON_REPLICAS, SMALL

MEMORY = "memory"
PARTS = (LARGE, SMALL, ON_RANKS, ON_REPLICAS, MEMORY)
REPLICA_LAYERS = 8  # every one of four ranks holds all of it, twice
REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run, and where."""

    folder: Path
    output: Path
    rounds: int
    quick: bool
    parts: tuple[str, ...]
    contestants: tuple[str, ...]


def parse_options() -> Options:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small states, one round: a smoke test, not a measurement")
    parser.add_argument("--rounds", type=int, help="rounds of each race (default 3; with --quick 1)")
    parser.add_argument("--dir", type=Path, default=REPOSITORY / ".bench", help="where files go (default .bench)")
    parser.add_argument(
        "--output", type=Path, help="where JSON and picture go (default benchmarks/results; with --quick DIR/results)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--contestants", nargs="+", choices=list(MAKERS), default=(), metavar="NAME", help=f"of {', '.join(MAKERS)}"
    )
    arguments = parser.parse_args()
    quick: bool = arguments.quick
    rounds = arguments.rounds if arguments.rounds is not None else (1 if quick else 3)
    if rounds < 1:
        parser.error("--rounds must be at least 1")
    return Options(
        folder=arguments.dir,
        output=arguments.output or (arguments.dir / "results" if quick else REPOSITORY / "benchmarks" / "results"),
        rounds=rounds,
        quick=quick,
        parts=tuple(arguments.only),
        contestants=tuple(arguments.contestants),
    )


def shapes_of(part: str, *, quick: bool) -> Shapes:
    """The shapes that the race ``part`` runs over."""
    if part == SMALL:
        return small_shapes(tensors=300) if quick else small_shapes()
    shapes = large_shapes(layers=1 if quick else REPLICA_LAYERS if part == ON_REPLICAS else 16)
    return {key: shape for key, shape in shapes.items() if not quick or not key.startswith(("embedding", "head"))}


def run(options: Options, console: Console) -> Results:
    """Every chosen part, one after the other; its files are gone afterwards, whatever happened."""
    field = take_part(options)
    files = options.folder / "holdfast-bench"
    files.mkdir(parents=True, exist_ok=True)
    machine = describe_machine(files)

    def say(line: str) -> None:
        console.print(line, highlight=False)

    for line in (*machine.lines(), f"caches are dropped by {cache_dropping()}"):
        say(line)
    races: list[Race] = []
    peaks: list[Peak] = []
    try:
        for part in (part for part in (LARGE, SMALL) if part in options.parts):
            shapes = shapes_of(part, quick=options.quick)
            races.append(run_race(part, shapes, field, folder=files, rounds=options.rounds, say=say))
        on_ranks = take_part_on_ranks(options)
        if on_ranks and ON_RANKS in options.parts:
            shapes = shapes_of(ON_RANKS, quick=options.quick)
            race, rank_peaks = run_rank_race(ON_RANKS, shapes, on_ranks, folder=files, rounds=options.rounds, say=say)
            races.append(race)
            peaks += rank_peaks
        if on_ranks and ON_REPLICAS in options.parts:
            shapes = shapes_of(ON_REPLICAS, quick=options.quick)
            races.append(run_replica_race(ON_REPLICAS, shapes, on_ranks, folder=files, rounds=options.rounds, say=say))
        if MEMORY in options.parts and any(contestant.name == HOLDFAST for contestant in field):
            peaks += measure_peaks(files, quick=options.quick, say=say)
    finally:
        shutil.rmtree(files, ignore_errors=True)
    return Results(machine=machine, caches=cache_dropping(), quick=options.quick, races=races, peaks=peaks)


def take_part(options: Options) -> list[Contestant]:
    """The chosen contestants; exits with one line where holdfast is wanted but cannot be imported."""
    try:
        return contestants(list(options.contestants))
    except ImportError as error:
        raise SystemExit(
            f"cannot import holdfast ({error}); run 'make setup', or leave it out by --contestants"
        ) from None


def take_part_on_ranks(options: Options) -> list[str]:
    """The short names of the chosen contestants that can run on several ranks."""
    return [short for short in RANK_CONTESTANTS if not options.contestants or short in options.contestants]


def main() -> None:
    """Run, print and write."""
    options = parse_options()
    console = Console()
    results = run(options, console)
    print_results(results, console)
    write_json(results, options.output / "bench.json")
    write_plot(results, options.output / "bench.png")
    console.print(f"written: {options.output / 'bench.json'} and bench.png", highlight=False)


if __name__ == "__main__":
    main()
