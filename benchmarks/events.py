"""What events cost a save: with nobody listening, and with lines of JSON; a table and one JSON document.

    python benchmarks/events.py --dir /some/disk --gb 1

The cost does not depend on the size of a save. So it is measured where it can be seen: on many small saves in memory,
in turns with saves from which the taking of times is left out. The medians of the differences, divided by the time of a
real save on the disk, are what counts. The real saves are compared directly too; there the noise of the disk is larger
than what is looked for. Lines of JSON count until the last one is written, as if nothing went on beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

# So that it runs from a checkout where nothing is installed.
sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

import holdfast
from disk import require_space
from holdfast import events
from holdfast._saver import Saving
from machine import describe_machine

LEFT_OUT, NOBODY, LINES = "left out", "nobody listens", "JSON lines"
ALLOWED = {NOBODY: 0.005, LINES: 0.01}
CLOCKS = 10
"""How often a save looks at the clock for events where they cannot be left out."""

State = dict[str, Any]


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Saves that take no times: what is left are some looks at the clock."""
    nothing = ("", 0, dict.fromkeys(("plan", "stage", "write", "sync"), 0.0))

    def only_write(self: Saving, write: Callable[[], Any]) -> Any:
        return write(), nothing

    with mock.patch.object(Saving, "_timed", only_write):
        yield


def took(who: str, state: State, path: Path, lines: Path) -> float:
    """The seconds of one save."""
    with contextlib.ExitStack() as stack:
        if who == LEFT_OUT:
            stack.enter_context(left_out())
        if who == LINES:
            stack.enter_context(events.subscribe(events.jsonl(lines)))
        begun = time.perf_counter()
        holdfast.save(state, path, user_metadata={"step": 1})
        if who == LINES:
            events.flush()
        return time.perf_counter() - begun


def race(state: State, folder: Path, *, rounds: int) -> dict[str, list[float]]:
    """The seconds of each in every round, in alternating order, after two rounds that do not count."""
    names = (LEFT_OUT, NOBODY, LINES)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 2):
        for shift in range(len(names)):
            name = names[(number + shift) % len(names)]
            seconds[name].append(took(name, state, folder / "checkpoint", folder / "events.jsonl"))
    return {name: each[2:] for name, each in seconds.items()}


def difference_s(seconds: dict[str, list[float]], name: str) -> float:
    """By how much a save of ``name`` takes longer than one of the same round where events are left out."""
    return statistics.median(one - other for one, other in zip(seconds[name], seconds[LEFT_OUT], strict=True))


def clocks_s() -> float:
    """The seconds of the looks at the clock that every save takes for events."""
    count = 100_000
    begun = time.perf_counter()
    for _ in range(count):
        time.monotonic()
    return CLOCKS * (time.perf_counter() - begun) / count


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(".bench/events"), help="folder on the disk to measure")
    parser.add_argument("--gb", type=float, default=0.25, help="size of a real save in GB (default 0.25)")
    parser.add_argument("--rounds", type=int, default=15, help="real saves of each kind (default 15)")
    parser.add_argument("--small", type=int, default=600, help="small saves of each kind (default 600)")
    parser.add_argument("--output", type=Path, help="where the JSON goes (default: printed)")
    arguments = parser.parse_args()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    require_space(arguments.dir, int(2.2e9 * arguments.gb) + 2**28)
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    make = partial(tempfile.TemporaryDirectory, prefix="holdfast-events-")
    with make(dir=memory) as small, make(dir=arguments.dir) as large:
        quick = race({"weight": torch.ones(1000), "epoch": 1}, Path(small), rounds=arguments.small)
        state = {f"layer.{number}": torch.ones(int(arguments.gb * 1e9 / 4 / 16)) for number in range(16)}
        real = race(state, Path(large), rounds=arguments.rounds)
    save_s = statistics.median(real[LEFT_OUT])
    rows: list[dict[str, Any]] = []
    table = Table(title=f"a save of {arguments.gb:g} GB, {save_s:.3f} s", title_justify="left")
    for heading in ("events", "cost of a save", "part of it", "allowed", "measured directly", ""):
        table.add_column(heading, justify="right")
    for name, allowed in ALLOWED.items():
        cost_s = max(difference_s(quick, name), 0.0) + clocks_s()
        ratio = statistics.median(real[name]) / save_s
        rows.append({"events": name, "cost_s": cost_s, "part": cost_s / save_s, "allowed": allowed, "ratio": ratio})
        cells = (f"{cost_s * 1e6:.0f} µs", f"{cost_s / save_s:.3%}", f"{allowed:.1%}", f"{ratio:.3f}")
        table.add_row(name, *cells, "kept" if cost_s / save_s <= allowed else "missed")
    Console(stderr=True).print(table)
    document = {
        "machine": asdict(describe_machine(arguments.dir)),
        "save_s": save_s,
        "results": rows,
        "small_save_s": {name: statistics.median(each) for name, each in quick.items()},
        "seconds": real,
    }
    shutil.rmtree(arguments.dir, ignore_errors=True)
    if arguments.output is None:
        print(json.dumps(document, indent=2))
    else:
        arguments.output.write_text(json.dumps(document, indent=2) + "\n")
    if any(row["part"] > row["allowed"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
