"""What it takes to look at a checkpoint in the browser: from opening to the first page, and the memory of the server.

    python benchmarks/view.py --json benchmarks/results/view.json
    python benchmarks/view.py --quick          small sizes; shows only that everything works

The server is a real process, ``holdfast view``, which is asked as the pages ask: the list, the summary, the top of the
tree, the first rows of the table. One checkpoint has 100,000 tensors, the other one millions of chunks (see look.py).
Memory is what the process has when it has answered; while it reads a checkpoint, it has more.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import torch

import holdfast
from look import QUICK_RANKS, QUICK_TENSORS, RANKS, TENSORS, write_steps
from machine import describe_machine
from verdicts import Verdict

MANY, QUICK_MANY = 100_000, 1000
ROUNDS = 3
MOST_MANY_S, MOST_CHUNKS_S, MOST_MEMORY = 1.0, 3.0, 300
FIRST_PAGE = (
    "/api/run?source=0",
    "/api/checkpoint?checkpoint={0}",
    "/api/tree?checkpoint={0}",
    "/api/tensors?checkpoint={0}",
)


@dataclasses.dataclass(frozen=True)
class Seen:
    """What looking at one checkpoint took: seconds, processor seconds of the server, and its memory afterwards."""

    seconds: float
    processor_s: float
    memory_mib: float
    peak_mib: float


class Served:
    """A server as a process, and what to ask it with."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self._host, self._token = urlsplit(url).netloc, urlsplit(url).query.removeprefix("token=")

    def ask(self, path: str) -> dict[str, object]:
        connection = http.client.HTTPConnection(self._host, timeout=300)
        cookie = f"holdfast-{self._host.rpartition(':')[2]}={self._token}"
        connection.request("GET", path, headers={"Cookie": cookie, "Accept-Encoding": "gzip"})
        response = connection.getresponse()
        data = response.read()
        connection.close()
        if response.status != 200:
            raise SystemExit(f"{path}: {response.status} {data[:300]!r}")
        return {} if response.headers.get("Content-Encoding") else dict(json.loads(data))

    def memory_mib(self, name: str) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith(name)) / 1024

    def processor_s(self) -> float:
        times = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serving(path: Path) -> Iterator[Served]:
    command = [sys.executable, "-m", "holdfast", "view", str(path), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Served(process, process.stdout.readline().strip())
        finally:
            process.send_signal(signal.SIGTERM)


def look_at(run: Path, checkpoint: int = 0) -> Seen:
    """The least of some rounds, each with a server of its own, which has nothing in memory yet."""
    found = []
    for _ in range(ROUNDS):
        with serving(run) as server:
            processor_s, start = server.processor_s(), time.perf_counter()
            for path in FIRST_PAGE:
                server.ask(path.format(checkpoint))
            seconds = time.perf_counter() - start
            took = server.processor_s() - processor_s
            found.append(Seen(seconds, took, server.memory_mib("VmRSS"), server.memory_mib("VmHWM")))
    return min(found, key=lambda seen: seen.seconds)


def write_many(folder: Path, tensors: int) -> Path:
    state = {f"model.layers.{number // 10}.block{number % 10}.weight": torch.ones(4, 4) for number in range(tensors)}
    holdfast.save(state, folder / "step-1", no_dist=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ranks, tensors = (QUICK_RANKS, QUICK_TENSORS) if arguments.quick else (RANKS, TENSORS)
    many = QUICK_MANY if arguments.quick else MANY
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name:
        of_tensors = look_at(write_many(Path(name, "many"), many))
        (chunked := Path(name, "chunked")).mkdir()
        _, _, chunks = write_steps(chunked, ranks, tensors)
        of_chunks = look_at(chunked)
    verdicts = []
    for what, seen, most_s in (
        (f"{many:,} tensors", of_tensors, MOST_MANY_S),
        (f"{chunks:,} chunks", of_chunks, MOST_CHUNKS_S),
    ):
        verdicts += [
            Verdict(
                what=f"first page of a checkpoint with {what}",
                measured=f"{seen.seconds:.2f} s, {seen.processor_s:.2f} s of processor time",
                required=f"<= {most_s:g} s",
                passed=seen.seconds <= most_s,
            ),
            Verdict(
                what="memory of the server then",
                measured=f"{seen.memory_mib:.0f} MiB, {seen.peak_mib:.0f} MiB while it read",
                required=f"<= {MOST_MEMORY} MiB",
                passed=seen.memory_mib <= MOST_MEMORY,
            ),
        ]
    for verdict in verdicts:
        print(f"{'PASS' if verdict.passed else 'FAIL'}  {verdict.what}: {verdict.measured} ({verdict.required})")
    if arguments.json:
        result = {
            "machine": dataclasses.asdict(describe_machine(Path(os.environ.get("BENCH_DIR", tempfile.gettempdir())))),
            "tensors": dataclasses.asdict(of_tensors),
            "chunks": dataclasses.asdict(of_chunks),
            "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts],
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if not all(verdict.passed for verdict in verdicts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
