"""Asynchronous saves on the CPU: what a call blocks against a memory copy, and what writing does to the steps.

    python3 benchmarks/async_cpu.py --dir /some/disk --gb 2 --ranks 1 2

The copy that the call is measured against has its target ready, as the call has, and the threads that torch has. Steps
are those of a small network on one thread; they run in pairs, without a save and while one is written, in turns. What
the disk's work alone does to them is measured in the same turns: another process writes as many bytes out of its
memory, and does nothing else. Of several ranks each has its own part of the state, and all do everything together.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

# So that it runs from a checkout where nothing is installed.
sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

from disk import empty_folder, huge_pages, require_space, write_raw
from holdfast._async_saver import AsyncCheckpointerType, async_save, prewarm, release
from machine import describe_machine
from states import State, large_shapes, random_state

PAIRS = 5
BLOCKING_ALLOWED = 1.3
STEP_ALLOWED = 1.15
_FILLED_AT_ONCE = 16 << 20


def meet() -> None:
    """Wait for the other ranks."""
    if dist.is_initialized():
        dist.barrier()


def state_for(rank: int, ranks: int, total: int) -> State:
    """A rank's own part of about ``total`` bytes in the shapes of a language model."""
    shapes = {f"rank{rank}.{key}": shape for key, shape in large_shapes(layers=16).items()}
    kept, size = {}, 0
    for key, shape in shapes.items():
        nbytes = 2 * torch.Size(shape).numel()
        if size + nbytes <= total // ranks:
            kept[key] = shape
            size += nbytes
    return random_state(kept, seed=rank)


class Training:
    """Steps of a small network on one thread."""

    def __init__(self) -> None:
        self._model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._input = torch.randn(64, 512)

    def run(self, goes_on: Callable[[], bool]) -> list[float]:
        """Seconds of each step while ``goes_on``."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        times: list[float] = []
        try:
            while goes_on():
                start = time.perf_counter()
                self._optimizer.zero_grad()
                self._model(self._input).square().mean().backward()
                self._optimizer.step()
                times.append(time.perf_counter() - start)
        finally:
            torch.set_num_threads(threads)
        return times

    def for_seconds(self, seconds: float) -> list[float]:
        """Seconds of each step for so long."""
        end = time.perf_counter() + seconds
        return self.run(lambda: time.perf_counter() < end)


class PlainWriter:
    """Another process, that holds ``nbytes`` and writes them to ``path`` with O_DIRECT when told to; hashes nothing."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_write_when_told, args=(theirs, path, nbytes), daemon=True)
        self._process.start()
        self._line.recv()

    def start(self) -> None:
        """Let it write."""
        self._line.send(True)

    def is_done(self) -> bool:
        """Whether it has written."""
        return self._line.poll()

    def end_turn(self) -> None:
        """Forget what it has written."""
        self._line.recv()
        self._path.unlink()

    def close(self) -> None:
        """End the process."""
        self._line.send(False)
        self._process.join()


def _write_when_told(line: Connection, path: Path, nbytes: int) -> None:
    memory = huge_pages(nbytes)
    for start in range(0, len(memory), _FILLED_AT_ONCE):
        part = memory[start : start + _FILLED_AT_ONCE]
        part[:] = os.urandom(len(part))
    line.send(True)
    while line.recv():
        write_raw(path, nbytes, threads=4, source=memory)
        line.send(True)


def blocking(state: State, folder: Path, kind: AsyncCheckpointerType) -> dict[str, list[float]]:
    """Seconds of a plain copy and of a call, in turns."""
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    seconds: dict[str, list[float]] = {"copy": [], "call": []}
    for number in range(PAIRS):
        meet()
        start = time.perf_counter()
        for key, tensor in state.items():
            target[key].copy_(tensor)
        seconds["copy"].append(time.perf_counter() - start)
        meet()
        start = time.perf_counter()
        handle = async_save(state, folder / f"blocking-{number}", async_checkpointer_type=kind)
        seconds["call"].append(time.perf_counter() - start)
        handle.result()
        remove(folder / f"blocking-{number}")
    return seconds


def steps(state: State, folder: Path, kind: AsyncCheckpointerType, plain: PlainWriter) -> dict[str, list[float]]:
    """Mean seconds of a step without a save, while one is written, and beside ``plain``; and how long those took."""
    training = Training()
    training.for_seconds(0.5)
    seconds: dict[str, list[float]] = {"alone": [], "beside": [], "durable": [], "beside_plain": [], "plain": []}
    last_s = 1.0
    for number in range(PAIRS):
        meet()
        seconds["alone"].append(statistics.mean(training.for_seconds(max(1.0, last_s))))
        meet()
        start = time.perf_counter()
        handle = async_save(state, folder / f"steps-{number}", async_checkpointer_type=kind)
        times = training.run(lambda: not handle.done())  # noqa: B023
        handle.result()
        last_s = time.perf_counter() - start
        seconds["durable"].append(last_s)
        seconds["beside"].append(statistics.mean(times))
        remove(folder / f"steps-{number}")
        start = time.perf_counter()
        plain.start()
        seconds["beside_plain"].append(statistics.mean(training.run(lambda: not plain.is_done())))
        seconds["plain"].append(time.perf_counter() - start)
        plain.end_turn()
    return seconds


def remove(path: Path) -> None:
    """Remove a checkpoint that nobody needs any more."""
    meet()
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(path)
    meet()


def measure(rank: int, ranks: int, total: int, folder: Path, answers: Path) -> None:
    """Everything, on one rank; its answer goes into a file."""
    if ranks > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
        store = f"file://{answers}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    state = state_for(rank, ranks, total)
    found: dict[str, object] = {"bytes": sum(tensor.nbytes for tensor in state.values())}
    plain = PlainWriter(folder / f"plain-{rank}", int(str(found["bytes"])))
    for kind in AsyncCheckpointerType:
        prewarm(state, async_checkpointer_type=kind)
        found[kind.value] = {"blocking": blocking(state, folder, kind), "steps": steps(state, folder, kind, plain)}
        release()
    plain.close()
    (answers / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    if ranks > 1:
        dist.destroy_process_group()


def summary(answers: list[dict[str, object]], ranks: int) -> dict[str, object]:
    """The ratios that are promised, of the rank that is worst."""
    found: dict[str, object] = {"ranks": ranks, "bytes": sum(int(str(each["bytes"])) for each in answers)}
    for kind in AsyncCheckpointerType:
        mine = [json.loads(json.dumps(each[kind.value])) for each in answers]
        call = max(
            statistics.median(each["blocking"]["call"]) / statistics.median(each["blocking"]["copy"]) for each in mine
        )
        step, plain = (
            max(statistics.mean(each["steps"][beside]) / statistics.mean(each["steps"]["alone"]) for each in mine)
            for beside in ("beside", "beside_plain")
        )
        found[kind.value] = {
            "blocking_over_copy": round(call, 3),
            "blocking_passed": call <= BLOCKING_ALLOWED,
            "step_over_alone": round(step, 3),
            "step_passed": step <= STEP_ALLOWED,
            "step_beside_plain_writes_over_alone": round(plain, 3),
            **{
                f"{name}_s": round(max(statistics.median(each["steps"][name]) for each in mine), 3)
                for name in ("durable", "plain")
            },
        }
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="folder on the disk to measure; made if missing")
    parser.add_argument("--gb", type=float, default=2.0, help="size of the whole state in GB (default 2)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks (default 1 2)")
    parser.add_argument("--json", type=Path, help="where to write the document, besides standard output")
    arguments = parser.parse_args()
    total = int(arguments.gb * 1e9)
    folder = arguments.dir / "holdfast-async-cpu"
    folder.mkdir(parents=True, exist_ok=True)
    require_space(folder, int(total * 1.2))
    rows: list[object] = []
    raw: list[object] = []
    for ranks in arguments.ranks:
        empty_folder(folder)
        with tempfile.TemporaryDirectory() as scratch:
            options = (ranks, total, folder, Path(scratch))
            if ranks == 1:
                measure(0, *options)
            else:
                spawn(measure, options, nprocs=ranks)
            answers = [json.loads((Path(scratch) / f"{rank}.json").read_text("utf-8")) for rank in range(ranks)]
        rows.append(summary(answers, ranks))
        raw.append(answers)
        print(json.dumps(rows[-1], indent=2), file=sys.stderr, flush=True)
    document = {"machine": asdict(describe_machine(folder)), "rows": rows, "seconds": raw}
    shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(document, indent=2)
    if arguments.json is not None:
        arguments.json.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
