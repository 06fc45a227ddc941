"""Which resource limits each path, as a model of a few lines: what it predicts, beside what was measured.

    python3 benchmarks/limits.py

A path is a row of stages that work at the same time. A stage is as fast as its threads together: their number over the
processor seconds that each GB takes them. Memory lets through only so many copies of a byte. The slowest decides. The
numbers are those of the machine with 16 cores in docs/performance.md. Ends with 1 when a row that is not known to be
missed is more than a fifth off.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
FIFTH = 0.2

# Processor seconds for a GB, of one thread on that machine.
READ = 0.23  # from the page cache or tmpfs: four threads read 15 to 20 GB/s
HASH = 0.08
COPY = 0.137  # from a slab: with the hash 0.217, as one thread delivers 4.6 GB/s
WRITE = 0.41  # to one file in memory: the kernel lets in one thread at a time
RESERVE = 0.14  # of its pages before they are written
MEMORY = 20.0  # GB/s of copies in memory, by however many threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A path: ``stages`` are threads and processor seconds for a GB, ``copies`` how often memory copies each byte."""

    what: str
    measured: float
    stages: tuple[tuple[int, float], ...] = ()
    copies: float = 0.0
    device: float = float("inf")
    is_missed: bool = False

    def limits(self) -> dict[str, float]:
        """GB/s that each resource allows."""
        found = {f"{threads} threads, {seconds:.2f} s/GB": threads / seconds for threads, seconds in self.stages}
        return found | {"copies in memory": MEMORY / (self.copies or 1e-9), "the disk": self.device}

    def predicted(self) -> tuple[float, str]:
        """GB/s, and what limits it."""
        return min((speed, name) for name, speed in self.limits().items())


def of_disks() -> list[Transfer]:
    """What bench.py measured on the disk of that machine, where raw transfers are the limit."""
    paths = []
    for race in json.loads((RESULTS / "bench_16_cores.json").read_text(encoding="utf-8"))["races"]:
        for phase, speeds in race["bytes_per_second"].items():
            if race["state"] == "small" or "raw O_DIRECT" not in speeds:
                continue
            ranks, raw = race["ranks"], speeds["raw O_DIRECT"] / 1e9
            stages = ((ranks, HASH + COPY),)
            what = f"disk, {ranks} ranks: {phase}"
            paths.append(Transfer(what=what, measured=speeds["holdfast"] / 1e9, stages=stages, copies=2, device=raw))
    return paths


def of_memory() -> list[Transfer]:
    """What was measured on tmpfs and in the page cache before more than one thread delivered and a rank wrote several
    files; and what the model expects since then has no measurement yet.
    """
    races = json.loads((RESULTS / "bench_16_cores.json").read_text(encoding="utf-8"))["races"]
    warm = next(race for race in races if race["state"] == "large")["bytes_per_second"]["warm load"]["holdfast"] / 1e9
    gpu = json.loads((RESULTS / "gpu_load.json").read_text(encoding="utf-8"))["gb_per_s"]["tmpfs load"]
    each = READ + HASH
    return [
        Transfer(what="page cache: load", measured=warm, stages=((8, each),), copies=1),
        Transfer(what="tmpfs: load, known to be in memory", measured=17.7, stages=((8, each),), copies=1),
        Transfer(what="tmpfs: load, one delivers", measured=4.6, stages=((4, READ), (1, HASH + COPY)), copies=2),
        Transfer(
            what="tmpfs, 8 ranks: load, one of each delivers", measured=11.2, stages=((8, HASH + COPY),), copies=2
        ),
        Transfer(what="tmpfs: save, one file", measured=1.8, stages=((1, HASH + COPY), (1, WRITE + RESERVE)), copies=3),
        Transfer(what="tmpfs, 8 ranks: save", measured=5.7, stages=((8, WRITE + RESERVE),), copies=3),
        Transfer(what="tmpfs into a GPU, 17 GB", measured=gpu, stages=((8, each),), copies=1),
        Transfer(what="tmpfs into a GPU, 4 GB", measured=12.5, stages=((8, each),), copies=1, is_missed=True),
        Transfer(
            what="tmpfs, 8 ranks: Shard(0) to Shard(1)",
            measured=4.7,
            stages=((8, READ), (8, HASH + COPY)),
            copies=2,
            is_missed=True,
        ),
    ]


EXPECTED = [
    Transfer(what="past the page cache, in memory", measured=0, stages=((4, READ), (8, HASH + COPY)), copies=2),
    Transfer(what="past the page cache, a disk array", measured=0, stages=((8, HASH + COPY),), copies=1, device=30.0),
    Transfer(what="tmpfs: save, four files", measured=0, stages=((8, HASH + COPY + WRITE), (4, WRITE)), copies=2),
    Transfer(what="tmpfs, 8 ranks: save", measured=0, stages=((8, WRITE),), copies=2),
    Transfer(what="tmpfs into a GPU", measured=0, stages=((16, READ + HASH),), copies=1, device=55.0),
]


def main() -> None:
    """Print the table."""
    wrong = 0
    for path in (*of_disks(), *of_memory()):
        predicted, limit = path.predicted()
        off = predicted / path.measured - 1
        is_wrong = abs(off) > FIFTH
        wrong += is_wrong and not path.is_missed
        note = "missed" if is_wrong else ""
        print(f"{path.what:45} {path.measured:6.2f}  {predicted:6.2f}  {off:+5.0%}  {limit:24} {note}")
    for path in EXPECTED:
        predicted, limit = path.predicted()
        print(f"{path.what:45}      -  {predicted:6.2f}         {limit:24} expected")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
