"""Hugging Face folders: holdfast's export and loads beside its native format and torch's writer and reader, in one run.

    python3 benchmarks/hf.py --dir /some/disk --gb 2 --ranks 2 --rounds 3
    python3 benchmarks/hf.py --quick                              a smoke run: judges nothing
    python3 benchmarks/hf.py --contestants native torch-folder    the others alone
    python3 benchmarks/hf.py --only save memory                   some parts

Ratios are of medians within this run, whose rounds alternate. A time is that of the slowest rank, from a barrier to a
barrier. Loads are cold. torch reads what holdfast exported, and every load is compared, outside the timed part. The
exit code is 0 when every goal is reached.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

# So that it runs from a checkout where nothing is installed.
sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

from disk import bytes_under, cache_dropping, drop_caches, empty_folder, require_space
from hf_contestants import FOLDER, NAMES, NATIVE, TORCH_FOLDER, write_hub_folder
from machine import describe_machine
from rank_crew import Job, RankCrew
from states import Shapes, byte_count, random_state, shapes_of_size
from verdicts import MOST_READS_OF_A_BYTE, Verdict

ROWS, COLUMNS = "rows", "columns"
DIMS = {ROWS: 0, COLUMNS: 1}
SAVE, LOAD = "save", "cold load"
PARTS = ("save", "load", "replicas", "memory", "mapping")
REPLICATED_RANKS = 4  # each holds all of it, twice
MAPPED_LAYERS, EXPERTS = 64, 512  # 100,032 tensors
MOST_MAPPING_S = 1.0
MOST_MEMORY = 192 * 2**20
MOST_DISK = 1.01  # headers, the index and holdfast.json are little beside the tensors
# what is timed -> holdfast's speed with folders must be at least this many times that of ...
REQUIRED: dict[tuple[str, str], dict[str, float]] = {
    (SAVE, ROWS): {NATIVE: 0.9, TORCH_FOLDER: 5.0},
    (SAVE, COLUMNS): {NATIVE: 0.6, TORCH_FOLDER: 5.0},
    (LOAD, ROWS): {NATIVE: 0.95},
    (LOAD, COLUMNS): {TORCH_FOLDER: 1.5},
}


@dataclass(slots=True, kw_only=True)
class Measured:
    """Everything that was measured: seconds by phase, layout and contestant, and what was counted beside them."""

    total: int
    seconds: dict[tuple[str, str], dict[str, list[float]]] = field(default_factory=dict)
    disk: dict[tuple[str, str], float] = field(default_factory=dict)
    memory: dict[tuple[str, str], int] = field(default_factory=dict)
    fetched: dict[str, list[float]] = field(default_factory=dict)
    mapped_tensors: int = 0
    mapping_s: list[float] = field(default_factory=list)

    def add(self, phase: str, layout: str, short: str, seconds: float) -> None:
        """Note one time, and say it."""
        self.seconds.setdefault((phase, layout), {}).setdefault(NAMES[short], []).append(seconds)
        say(f"  {phase:9}  {layout:7}  {NAMES[short]:16} {self.total / seconds / 1e9:6.2f} GB/s")

    def ratio(self, phase: str, layout: str, other: str) -> float | None:
        """The speed of holdfast with folders over that of ``other``; nothing unless both took part."""
        times = self.seconds.get((phase, layout), {})
        if FOLDER not in times or other not in times:
            return None
        return statistics.median(times[other]) / statistics.median(times[FOLDER])


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Bench:
    """One run: its files are below ``folder``, and the parts are called one after the other."""

    def __init__(self, folder: Path, shapes: Shapes, *, ranks: int, rounds: int, field: list[str]) -> None:
        self._folder = folder
        self._shapes = shapes
        self._ranks = ranks
        self._rounds = rounds
        self._field = field
        self.measured = Measured(total=byte_count(shapes))
        write_hub_folder(random_state(shapes), empty_folder(folder / "hub") / "checkpoint")

    def race(self, layout: str, parts: list[str]) -> None:
        """Everyone saves a state of this layout, and loads into one, round after round."""
        say(f"{layout}: {len(self._shapes)} tensors, {self.measured.total / 1e9:.2f} GB on {self._ranks} ranks")
        with RankCrew(self._ranks, self._shapes) as crew:
            for short in self._field:
                self._save(crew, short, layout, is_warm_up=True)
                if "load" in parts:
                    self._load(crew, short, layout, self._place(short), is_warm_up=True)
            for short in self._field:  # whole, but not counted: memory for slabs is taken, and the disk has its place
                self._save(crew, short, layout)
                if short != "native":
                    self._check(crew, short, layout)
            for number in range(self._rounds):
                order = self._field if number % 2 == 0 else self._field[::-1]
                for short in order if "save" in parts else order[:0]:
                    self.measured.add(SAVE, layout, short, self._save(crew, short, layout))
                for short in order if "load" in parts else order[:0]:
                    source = self._place(short) if short == "native" else self._folder / "hub"
                    self.measured.add(LOAD, layout, short, self._load(crew, short, layout, source))

    def _check(self, crew: RankCrew, short: str, layout: str) -> None:
        """Whoever wrote a folder, torch reads it and has the right bytes."""
        self.measured.disk[layout, NAMES[short]] = bytes_under(self._place(short)) / self.measured.total
        self._load(crew, "torch-folder", layout, self._place(short))

    def peaks(self) -> Iterator[tuple[str, str, int]]:
        """The memory of the worst rank beyond the state, each in new processes that have done nothing else."""
        for phase in (SAVE, LOAD):
            for layout, dim in DIMS.items():
                place = empty_folder(self._place("folder")) if phase == SAVE else self._folder / "hub"
                with RankCrew(self._ranks, self._shapes) as crew:
                    drop_caches([place])
                    job = Job(contestant="folder", is_save=phase == SAVE, folder=place, dim=dim)
                    worst = max(outcome.beyond for outcome in crew.do(job))
                say(f"  memory beyond the state  {phase:9}  {layout:7}  {worst / 2**20:6.0f} MiB")
                yield phase, layout, worst

    def replicas(self, shapes: Shapes) -> None:
        """How often ranks that all want everything read each byte of a folder from the disk."""
        place = empty_folder(self._folder / "small-hub")
        write_hub_folder(random_state(shapes), place / "checkpoint")
        with RankCrew(REPLICATED_RANKS, shapes) as crew:
            for number in range(self._rounds + 1):
                for short in [short for short in self._field if short != "native"]:
                    drop_caches([place])
                    outcomes = crew.do(Job(contestant=short, is_save=False, folder=place, dim=None))
                    times = sum(outcome.fetched for outcome in outcomes) / bytes_under(place)
                    if number > 0:  # the first brings in the program's own pages too
                        self.measured.fetched.setdefault(NAMES[short], []).append(times)
                        say(f"  {REPLICATED_RANKS} replicas  {NAMES[short]:16} each byte read {times:.2f} times")

    def _save(self, crew: RankCrew, short: str, layout: str, *, is_warm_up: bool = False) -> float:
        place = empty_folder(self._place(short))
        job = Job(contestant=short, is_save=True, folder=place, dim=DIMS[layout], is_warm_up=is_warm_up)
        return max(outcome.seconds for outcome in crew.do(job))

    def _load(self, crew: RankCrew, short: str, layout: str, place: Path, *, is_warm_up: bool = False) -> float:
        drop_caches([place])
        job = Job(contestant=short, is_save=False, folder=place, dim=DIMS[layout], is_warm_up=is_warm_up)
        return max(outcome.seconds for outcome in crew.do(job))

    def _place(self, short: str) -> Path:
        return self._folder / short


def mapping_seconds(*, layers: int, rounds: int) -> tuple[int, list[float]]:
    """How many tensors a mixture of experts has in its files, and seconds to compile its mapping, by round."""
    from holdfast.mapping import Concat, Mapping, Move, Stack

    experts = "model.layers.{l}.mlp.experts"
    gate, up = (f"{experts}.{{e}}.{name}.weight" for name in ("gate_proj", "up_proj"))
    mapping = Mapping(
        (
            Move((gate, up), f"{experts}.gate_up_proj", (Stack(0), Concat(1))),
            Move(f"{experts}.{{e}}.down_proj.weight", f"{experts}.down_proj", (Stack(0),)),
        )
    )
    outside: dict[str, tuple[int, ...]] = {}
    inside: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        place = experts.replace("{l}", str(layer))
        inside |= {f"{place}.gate_up_proj": (EXPERTS, 64, 32), f"{place}.down_proj": (EXPERTS, 32, 32)}
        for expert in range(EXPERTS):
            outside |= {f"{place}.{expert}.{name}.weight": (32, 32) for name in ("gate_proj", "up_proj", "down_proj")}
        rest = {f"model.layers.{layer}.part{number}.weight": (32, 32) for number in range(27)}
        inside |= rest
        outside |= rest
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        faults = mapping.check(outside, inside)
        seconds.append(time.perf_counter() - begin)
        if faults:
            raise SystemExit(f"the mapping does not fit: {faults[0]}")
    return len(outside), seconds


def verdicts_of(measured: Measured) -> list[Verdict]:
    """A verdict for every goal that was measured."""

    def at_least(what: str, ratio: float, least: float) -> Verdict:
        return Verdict(what=what, measured=f"{ratio:.2f}x", required=f">= {least:g}x", passed=ratio >= least)

    verdicts = [
        at_least(f"{phase}, {layout}, against {other}", ratio, least)
        for (phase, layout), goals in REQUIRED.items()
        for other, least in goals.items()
        if (ratio := measured.ratio(phase, layout, other)) is not None
    ]
    verdicts += [
        Verdict(what=f"disk, {layout}", measured=f"{times:.3f}x", required="1.0x", passed=times <= MOST_DISK)
        for (layout, name), times in measured.disk.items()
        if name == FOLDER
    ]
    verdicts += [
        Verdict(
            what=f"memory of a rank beyond the state, {phase}, {layout}",
            measured=f"{beyond / 2**20:.0f} MiB",
            required=f"<= {MOST_MEMORY // 2**20} MiB",
            passed=beyond <= MOST_MEMORY,
        )
        for (phase, layout), beyond in measured.memory.items()
    ]
    if times := measured.fetched.get(FOLDER):
        often = statistics.median(times)
        what = f"how often {REPLICATED_RANKS} replicas read a byte from the disk"
        passed = often <= MOST_READS_OF_A_BYTE
        verdicts.append(Verdict(what=what, measured=f"{often:.2f}x", required="once", passed=passed))
    if measured.mapping_s:
        took = statistics.median(measured.mapping_s)
        what = f"a mapping compiled for {measured.mapped_tensors:,} tensors"
        required = f"<= {MOST_MAPPING_S:g} s"
        verdicts.append(Verdict(what=what, measured=f"{took:.2f} s", required=required, passed=took <= MOST_MAPPING_S))
    return verdicts


def print_results(measured: Measured, verdicts: list[Verdict], *, quick: bool) -> None:
    """Speeds, what was counted, and goals reached or not."""
    for (phase, layout), times in measured.seconds.items():
        speeds = [f"{name} {measured.total / statistics.median(each) / 1e9:.2f}" for name, each in times.items()]
        say(f"{phase}, {layout}, GB/s: {'; '.join(speeds)}")
    for (layout, name), ratio in measured.disk.items():
        say(f"disk, {layout}: {name} {ratio:.2f}x the state")
    for name, often in measured.fetched.items():
        say(f"bytes read by {REPLICATED_RANKS} replicas: {name} {statistics.median(often):.2f}x the folder")
    for verdict in verdicts:
        mark = "-" if quick else "reached" if verdict.passed else "MISSED"
        say(f"{verdict.what:64} {verdict.measured:>9}  {verdict.required:10} {mark}")


def document_of(measured: Measured, verdicts: list[Verdict]) -> dict[str, object]:
    """What was measured, for programs."""

    def flat(table: dict[tuple[str, str], object]) -> dict[str, object]:
        return {", ".join(key): value for key, value in table.items()}

    return {
        "bytes": measured.total,
        "seconds": flat(dict(measured.seconds)),
        "disk": flat(dict(measured.disk)),
        "memory": flat(dict(measured.memory)),
        "fetched": measured.fetched,
        "mapped_tensors": measured.mapped_tensors,
        "mapping_s": measured.mapping_s,
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dir", type=Path, default=Path(".bench"), help="folder on the disk to measure; made if missing"
    )
    parser.add_argument("--gb", type=float, help="size of the state in GB (default 2; with --quick 0.05)")
    parser.add_argument("--ranks", type=int, default=2, help="processes that hold it between them (default 2)")
    parser.add_argument("--rounds", type=int, help="how often everything is measured (default 3; with --quick 1)")
    parser.add_argument("--contestants", nargs="+", choices=list(NAMES), default=list(NAMES), metavar="NAME")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--quick", action="store_true", help="a small state, one round, no judgement")
    parser.add_argument("--json", type=Path, help="where to write the document, besides standard output")
    arguments = parser.parse_args()
    if arguments.gb is None:
        arguments.gb = 0.05 if arguments.quick else 2.0
    if arguments.rounds is None:
        arguments.rounds = 1 if arguments.quick else 3
    if arguments.rounds < 1 or arguments.ranks < 2 or arguments.gb < 0.01:
        parser.error("--rounds must be at least 1, --ranks at least 2, --gb at least 0.01")
    return arguments


def measure(arguments: argparse.Namespace, folder: Path) -> Measured:
    """Everything, part after part."""
    shapes = shapes_of_size(arguments.gb)
    require_space(folder, int(byte_count(shapes) * 4.3) + 2**28)
    field: list[str] = arguments.contestants
    parts: list[str] = arguments.only
    bench = Bench(folder, shapes, ranks=arguments.ranks, rounds=arguments.rounds, field=field)
    for layout in DIMS if {"save", "load"} & set(parts) else ():
        bench.race(layout, parts)
    if "replicas" in parts:
        bench.replicas(shapes_of_size(arguments.gb / REPLICATED_RANKS))
    if "memory" in parts and "folder" in field:
        for phase, layout, beyond in bench.peaks():
            bench.measured.memory[phase, layout] = beyond
    if "mapping" in parts and "folder" in field:
        layers = 1 if arguments.quick else MAPPED_LAYERS
        bench.measured.mapped_tensors, bench.measured.mapping_s = mapping_seconds(
            layers=layers, rounds=arguments.rounds
        )
    return bench.measured


def main() -> int:
    """Measure, print, write; the exit code says whether every goal is reached."""
    arguments = parse()
    folder: Path = arguments.dir / "holdfast-hf"
    folder.mkdir(parents=True, exist_ok=True)
    machine = describe_machine(folder)
    begin = time.monotonic()
    say("\n".join([*machine.lines(), f"caches are dropped by {cache_dropping()}"]))
    try:
        measured = measure(arguments, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    verdicts = verdicts_of(measured)
    print_results(measured, verdicts, quick=arguments.quick)
    head = {"machine": asdict(machine), "ranks": arguments.ranks, "rounds": arguments.rounds, "quick": arguments.quick}
    text = json.dumps({**head, "took_s": time.monotonic() - begin, **document_of(measured, verdicts)}, indent=2)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return int(not arguments.quick and not all(verdict.passed for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
