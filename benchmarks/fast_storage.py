"""Storage that is faster than one core: tmpfs as the memory tier, past the page cache, ranks, a GPU; goals beside what
was measured, and one JSON document.

    python3 benchmarks/fast_storage.py --dir /some/disk --json fast.json           all, 6 to 8 minutes on 16 cores
    python3 benchmarks/fast_storage.py --dir /some/disk --gb 0.3 --rounds 1        shows only that it works

Everything is one run on one machine: raw reads and writes, safetensors and torch beside Holdfast, in turns. Goals are
for 16 cores and an H200. What a load brings is compared outside the timed part. "Past the page cache" has Holdfast
believe that no file is in memory, so that it reads as from a disk that is as fast as memory. The rows named "try" are
no promises: they tell what a change of the path into the GPU would give. Needs tmpfs with room for twice --gb.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch

# So that it runs from a checkout where nothing is installed.
sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

import holdfast
from contestants import MAKERS
from disk import SLAB, drop_caches, empty_folder, files_under, huge_pages, read_through_cache, require_space
from holdfast._io import slabs
from holdfast._io.direct import InputFile
from machine import describe_machine
from peak_memory import high_water_mark, reset_high_water_mark, resident
from rank_crew import Job, RankCrew
from states import Shapes, State, clear, different_keys, empty_state, random_state, shapes_of_size
from verdicts import Verdict

MIB = 1 << 20
RANKS = 8
PEERS = {"holdfast": "holdfast", "dcp4": "DCP, 4 threads", "safetensors": "safetensors"}
OURS = "holdfast", "ranks", "GPU"
SAVE, LOAD, PAST = "tmpfs save", "tmpfs load", "past the page cache"


class Times:
    """Seconds of everything that was timed, by name; each moved so many bytes."""

    def __init__(self, *, beyond: dict[str, int] | None = None) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.total: dict[str, int] = {}
        self.beyond = {} if beyond is None else beyond
        self._is_first = beyond is not None

    def note(self, what: str, seconds: float, total: int) -> None:
        self.seconds.setdefault(what, []).append(seconds)
        self.total[what] = total
        print(f"  {what:52} {total / seconds / 1e9:7.2f} GB/s", flush=True)

    def measure(self, what: str, action: Callable[[], object], total: int) -> None:
        """Time ``action``, with all that it leaves to a device, and note its peak of memory."""
        if self._is_first:
            holdfast.release()  # so that all memory that is needed counts
        gc.collect()
        reset_high_water_mark()
        before = resident()
        synchronize()
        start = time.perf_counter()
        action()
        synchronize()
        self.note(what, time.perf_counter() - start, total)
        self.beyond[what] = max(self.beyond.get(what, 0), high_water_mark() - before)

    def speed(self, what: str) -> float | None:
        """GB/s, the median; None where it was not measured."""
        times = self.seconds.get(what)
        return self.total[what] / statistics.median(times) / 1e9 if times else None


def synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def in_threads(work: Callable[[tuple[Path, int], memoryview], None], jobs: list[tuple[Path, int]], count: int) -> None:
    """All ``jobs`` in ``count`` threads, each with memory of its own."""
    left = iter(jobs)

    def run(memory: memoryview) -> None:
        for job in left:  # one step of C
            work(job, memory)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run, [raw_memory(number) for number in range(count)]))


_raw_memory: list[memoryview] = []


def raw_memory(number: int) -> memoryview:
    while len(_raw_memory) <= number:
        _raw_memory.append(huge_pages(SLAB))
        _raw_memory[-1][:] = os.urandom(MIB) * (SLAB // MIB)
    return _raw_memory[number]


def pieces(paths: list[Path], size: Callable[[Path], int]) -> list[tuple[Path, int]]:
    """Where slabs begin, of all files in turn."""
    offsets = [(offset, path) for path in paths for offset in range(0, size(path), SLAB)]
    return [(path, offset) for offset, path in sorted(offsets, key=lambda each: each[0])]


def raw_read(paths: list[Path], threads: int) -> None:
    """Read the files through the page cache, in so many threads, and forget what was read."""
    opened = {path: os.open(path, os.O_RDONLY) for path in paths}

    def read(job: tuple[Path, int], memory: memoryview) -> None:
        os.preadv(opened[job[0]], [memory], job[1])

    in_threads(read, pieces(paths, lambda path: path.stat().st_size), threads)
    for descriptor in opened.values():
        os.close(descriptor)


def raw_write(paths: list[Path], total: int, threads: int) -> None:
    """Write ``total`` bytes to new files, in so many threads."""
    opened = {path: os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY) for path in paths}

    def write(job: tuple[Path, int], memory: memoryview) -> None:
        os.pwrite(opened[job[0]], memory, job[1])

    in_threads(write, pieces(paths, lambda path: total // len(paths)), threads)
    for descriptor in opened.values():
        os.close(descriptor)


@contextmanager
def past_the_page_cache() -> Iterator[None]:
    """Have Holdfast believe that no file is in memory."""
    with mock.patch.object(InputFile, "is_cached", return_value=False):
        yield


def checked(state: State, target: State, load: Callable[[], object]) -> None:
    """Exits unless ``load`` fills ``target`` with the bytes of ``state``."""
    clear(target)
    load()
    if wrong := different_keys(state, target):
        raise SystemExit(f"{len(wrong)} tensors differ from what was saved, first {wrong[0]!r}")


def one_process(times: Times, shapes: Shapes, memory: Path, rounds: int) -> None:
    """Saves to and loads from tmpfs, by everyone in turn."""
    state, target = random_state(shapes), empty_state(shapes)
    total = sum(tensor.nbytes for tensor in state.values())
    field = {short: MAKERS[short]() for short in PEERS}
    for number in range(-1, rounds):  # the first is not counted
        noted = times if number >= 0 else Times(beyond=times.beyond)
        for short in list(field)[:: -1 if number % 2 else 1]:
            place = empty_folder(memory / short)
            noted.measure(f"{SAVE}: {PEERS[short]}", partial(field[short].save, state, place), total)
            load = partial(field[short].load, target, place)
            if number < 0:
                checked(state, target, load)
            noted.measure(f"{LOAD}: {PEERS[short]}", load, total)
            if short == "holdfast":
                for threads in (4, 16):
                    read = partial(raw_read, data_files(place), threads)
                    noted.measure(f"{LOAD}: raw, {threads} threads", read, total)
                with past_the_page_cache():
                    noted.measure(f"{PAST}: holdfast", load, total)
            empty_folder(place)
        for count in (1, 4):
            place = empty_folder(memory / "raw")
            files = [place / str(each) for each in range(count)]
            noted.measure(f"{SAVE}: raw, 4 threads, {count} files", partial(raw_write, files, total, 4), total)
            empty_folder(place)


def data_files(place: Path) -> list[Path]:
    return [path for path in files_under(place) if path.name.startswith("data-")]


def ranks(times: Times, shapes: Shapes, memory: Path, disk: Path, rounds: int) -> None:
    """Eight ranks on tmpfs, and resharding from a cold disk."""
    with RankCrew(RANKS, shapes) as crew:

        def do(what: str, short: str, place: Path, *, is_save: bool = False, dim: int = 0) -> None:
            outcomes = crew.do(Job(contestant=short, is_save=is_save, folder=place, dim=dim))
            times.note(what, max(each.seconds for each in outcomes), sum(each.total for each in outcomes))
            times.beyond[what] = max(times.beyond.get(what, 0), *(each.beyond for each in outcomes))

        for name, folder in (("tmpfs", memory), ("disk, cold", disk)):
            place = empty_folder(folder / "ranks")
            for number in range(rounds):
                if name == "tmpfs" or number == 0:
                    do(f"{RANKS} ranks, {name}: save", "holdfast", empty_folder(place), is_save=True)
                for what, short, dim in (
                    ("load", "holdfast", 0),
                    ("Shard(0) to Shard(1)", "holdfast", 1),
                    ("raw reads", "raw", 0),
                ):
                    if name != "tmpfs":
                        drop_caches([place])
                    do(f"{RANKS} ranks, {name}: {what}", short, place, dim=dim)
            empty_folder(place)


def into_the_gpu(times: Times, shapes: Shapes, memory: Path, disk: Path, rounds: int) -> None:
    """Loads into tensors of a GPU, from tmpfs and from the page cache, and what other ways would give."""
    state, target = random_state(shapes, device="cuda"), empty_state(shapes, device="cuda")
    total = sum(tensor.nbytes for tensor in state.values())
    for name, folder in (("tmpfs", memory), ("page cache", disk)):
        place = empty_folder(folder / "gpu")
        holdfast.save(state, place)
        read_through_cache(place)
        load = partial(holdfast.load, target, place)
        checked(state, target, load)
        for _ in range(rounds):
            times.measure(f"{name} into the GPU, verify=True", load, total)
            unverified = partial(load, options=holdfast.LoadOptions(verify=False))
            times.measure(f"{name} into the GPU, verify=False", unverified, total)
            times.measure(f"{name}: raw, 16 threads", partial(raw_read, data_files(place), 16), total)
            for workers, pinned in ((8, 128), (16, 256), (12, 96), (16, 64)):
                with (
                    mock.patch("holdfast._engine._MOST_CUDA_WORKERS", workers),
                    mock.patch("holdfast._engine._PINNED_BYTES", pinned * MIB),
                ):
                    times.measure(f"try {name}: {workers} threads, {pinned} MiB pinned", load, total)
        registered(times, name, data_files(place))
        empty_folder(place)


def registered(times: Times, name: str, paths: list[Path]) -> None:
    """What it takes to map the files, to pin the mappings, and to copy from them without any read."""
    target = torch.empty(SLAB * 8, dtype=torch.uint8, device="cuda")
    for path in paths:
        size = path.stat().st_size
        with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
            source = torch.from_numpy(np.frombuffer(mapped, np.uint8))
            start = time.perf_counter()
            reason = slabs.pin(source.data_ptr(), size)
            if reason:
                print(f"  try {name}: the device refuses to pin a mapped file (error {reason})")
            else:
                times.note(f"try {name}: to pin mapped files", time.perf_counter() - start, size)
                synchronize()
                start = time.perf_counter()
                for number, offset in enumerate(range(0, size - SLAB, SLAB)):
                    place = number % 8 * SLAB
                    target[place : place + SLAB].copy_(source[offset : offset + SLAB], non_blocking=True)
                synchronize()
                times.note(f"try {name}: copies from pinned mappings", time.perf_counter() - start, size)
                slabs.unpin(source.data_ptr())
            del source


def asynchronous(disk: Path, size: float) -> list[Verdict]:
    """The goals of asynchronous saves, as async_gpu.py measures them."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "async.json")
        script = Path(__file__).with_name("async_gpu.py")
        command = [sys.executable, str(script), "--dir", str(disk), "--size", str(size), "--rows", "holdfast", "steps"]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([*command, "--json", str(out), "--rounds", "2"], stdout=subprocess.DEVNULL, timeout=240)
        if not out.exists():
            return [Verdict(what="async saves", measured="did not end", required="in 240 s", passed=False)]
        document = json.loads(out.read_text(encoding="utf-8"))
    found = [
        Verdict(what=f"async: {name}", measured=f"{value:g}", required=f"<= {limit}", passed=passed)
        for name, value, limit, passed in document["rows"]
    ]
    if blocks := document["seconds"].get("device blocks"):
        limit = 1.3 * document["numbers"]["clone_s"] + 0.005
        found.append(at_most("async: device, ms", statistics.median(blocks) * 1e3, limit * 1e3))
    return found


def at_least(what: str, measured: float | None, required: float | None) -> list[Verdict]:
    """One verdict in GB/s, where both were measured."""
    if measured is None or required is None:
        return []
    told, asked = f"{measured:.2f}", f">= {required:.2f} GB/s"
    return [Verdict(what=what, measured=told, required=asked, passed=measured >= required)]


def at_most(what: str, measured: float, required: float) -> Verdict:
    return Verdict(what=what, measured=f"{measured:.1f}", required=f"<= {required:.1f}", passed=measured <= required)


def verdicts(times: Times) -> list[Verdict]:
    """Each goal that this run can judge."""

    def of(what: str, *, share: float) -> float | None:
        speed = times.speed(what)
        return None if speed is None else share * speed

    load, past, save = (times.speed(f"{each}: holdfast") for each in (LOAD, PAST, SAVE))
    found = [
        *at_least("tmpfs load over 0.8 of raw 4-thread reads", load, of(f"{LOAD}: raw, 4 threads", share=0.8)),
        *at_least("tmpfs load over 1.2 of safetensors", load, of(f"{LOAD}: safetensors", share=1.2)),
        *at_least("past the page cache over 0.8 of raw reads", past, of(f"{LOAD}: raw, 4 threads", share=0.8)),
        *at_least("tmpfs save over 1.2 of DCP with 4 threads", save, of(f"{SAVE}: DCP, 4 threads", share=1.2)),
    ]
    for what, goal in (("save", 8.0), ("load", 15.0), ("Shard(0) to Shard(1)", 8.0)):
        found += at_least(f"{RANKS} ranks, tmpfs: {what}", times.speed(f"{RANKS} ranks, tmpfs: {what}"), goal)
    for name in ("tmpfs", "page cache"):
        raw = of(f"{name}: raw, 16 threads", share=0.8)
        for verify, goal in ((True, 25.0), (False, 40.0)):
            what = f"{name} into the GPU, verify={verify}"
            found += at_least(what, times.speed(what), None if raw is None else min(goal, raw))
    most = 512 if (os.cpu_count() or 1) > 2 else 256
    ours = {what: nbytes for what, nbytes in times.beyond.items() if any(map(what.__contains__, OURS))}
    if ours:
        worst = max(ours, key=lambda what: ours[what])
        found.append(at_most(f"memory beyond state or target, MiB, the most ({worst})", ours[worst] / MIB, most))
    return found


def main() -> None:
    """Measure, print, write."""
    # For the processes of ranks, too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), sys.path[-1]]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="folder on a disk; made if missing")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="folder in memory (default /dev/shm)")
    parser.add_argument("--gb", type=float, default=4.0, help="size of the state in GB (default 4)")
    parser.add_argument("--async-gb", type=float, default=16.0, help="of the state of asynchronous saves; 0 for none")
    parser.add_argument("--rounds", type=int, default=3, help="of everything; medians are reported (default 3)")
    parser.add_argument("--only", nargs="+", choices=("one", "ranks", "gpu", "async"), help="parts (default all)")
    parser.add_argument("--json", type=Path, help="where to write the document")
    arguments = parser.parse_args()
    parts = arguments.only or ("one", "ranks", "gpu", "async")
    shapes, times, found = shapes_of_size(arguments.gb), Times(), list[Verdict]()
    memory, disk = arguments.memory / "holdfast-fast-storage", arguments.dir / "holdfast-fast-storage"
    for folder in (empty_folder(memory), empty_folder(disk)):
        require_space(folder, int(arguments.gb * 1.2e9))
    has_gpu = torch.cuda.is_available()
    try:
        if "one" in parts:
            one_process(times, shapes, memory, arguments.rounds)
        if "ranks" in parts:
            ranks(times, shapes, memory, disk, arguments.rounds)
        if "gpu" in parts and has_gpu:
            into_the_gpu(times, shapes, memory, disk, arguments.rounds)
        found = verdicts(times)
        if "async" in parts and has_gpu and arguments.async_gb:
            found += asynchronous(disk, arguments.async_gb)
        machine = asdict(describe_machine(disk)) | {"gpu": torch.cuda.get_device_name() if has_gpu else None}
    finally:
        for folder in (memory, disk):
            empty_folder(folder).rmdir()
    for verdict in found:
        print(f"{'PASS' if verdict.passed else 'FAIL'}  {verdict.what:60} {verdict.measured:>10}  {verdict.required}")
    if arguments.json:
        document: dict[str, object] = {
            "machine": machine,
            "gb_per_s": {what: times.speed(what) for what in times.seconds},
        }
        document |= {"seconds": times.seconds, "memory_beyond": times.beyond, "verdicts": list(map(asdict, found))}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
