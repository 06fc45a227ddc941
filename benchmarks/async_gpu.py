"""Asynchronous saves from a GPU: what they block, how long until they are durable, what they do to the steps.

    python3 benchmarks/async_gpu.py --dir /some/disk --size 4.3 --json small.json
    python3 benchmarks/async_gpu.py --dir /some/disk --size 16 --rows holdfast --json large.json
    python3 benchmarks/async_gpu.py --dir /some/disk --size 16 --rows torch --json large-torch.json
    python3 benchmarks/async_gpu.py --table small.json large.json large-torch.json

The state has the shapes of an 8-billion-parameter model in bf16. Limits are measured in the same run: the bandwidth of
copies to pinned memory, a clone on the device, and O_DIRECT writes of the same size. Steps are matrix products, timed
by CUDA events; nothing synchronises the device while a save is under way. Each kind of save is loaded and compared.
With --device cpu and a small --size everything runs without a GPU, which shows that the script works and nothing else.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

# So that it runs from a checkout where nothing is installed.
sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

import holdfast
from disk import empty_folder, prepare_raw, require_space, write_raw
from holdfast._async_saver import AsyncCheckpointerType, AsyncSave, async_save, prewarm, release
from holdfast._staging.copies import Mode
from machine import describe_machine
from states import (
    Shapes,
    State,
    byte_count,
    different_keys,
    eight_billion_shapes,
    empty_state,
    large_shapes,
    random_state,
)

RAW_THREADS = 8
MIB = 1 << 20
Seconds = dict[str, list[float]]


class Device:
    """The device under test, or the CPU in its place for a smoke run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_cuda = name == "cuda"

    def synchronize(self) -> None:
        """Wait for everything; outside of what is measured."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def timed(self, action: Callable[[], object]) -> float:
        """Seconds that ``action`` takes, with what it left to the device done."""
        self.synchronize()
        start = time.perf_counter()
        action()
        self.synchronize()
        return time.perf_counter() - start

    def copy_bandwidth(self) -> float:
        """Bytes per second of copies to pinned host memory."""
        source = torch.empty(512 * MIB, dtype=torch.uint8, device=self.name)
        target = torch.empty(512 * MIB, dtype=torch.uint8, pin_memory=self.is_cuda)
        times = [self.timed(partial(target.copy_, source, non_blocking=True)) for _ in range(8)]
        del target
        if self.is_cuda:
            getattr(torch._C, "_host_emptyCache", lambda: None)()
        return 512 * MIB / statistics.median(times[2:])

    def clone_seconds(self, state: State) -> float:
        """Seconds that a clone of the state takes on the device."""
        times = []
        for _ in range(3):
            clones: list[torch.Tensor] = []
            times.append(self.timed(partial(clone_into, clones, state)))
            del clones
        if self.is_cuda:
            torch.cuda.empty_cache()
        return min(times)

    def memory(self) -> tuple[int, int]:
        """Bytes that torch's tensors take at most since the last reset, and bytes that the device has not free."""
        if not self.is_cuda:
            return 0, 0
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.max_memory_allocated(), total - free

    def reset_memory(self) -> None:
        """Count the most from here on."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()


def clone_into(clones: list[torch.Tensor], state: State) -> None:
    """Clone every tensor of the state, in one go."""
    clones.extend(tensor.clone() for tensor in state.values())


class Steps:
    """A training loop of matrix products; each step's time is between two events, two steps are in flight."""

    def __init__(self, device: Device) -> None:
        size, self._products = (8192, 4) if device.is_cuda else (512, 1)
        dtype = torch.bfloat16 if device.is_cuda else torch.float32
        self._left = torch.randn(size, size, dtype=dtype, device=device.name)
        self._right = torch.randn(size, size, dtype=dtype, device=device.name)
        self._out = torch.empty_like(self._left)
        self._device = device

    def _step(self) -> Any:
        for _ in range(self._products):
            torch.mm(self._left, self._right, out=self._out)
        if not self._device.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def beside(self, handle: AsyncSave) -> dict[str, list[float]]:
        """Milliseconds of the steps until ``handle`` is done, by what the save did meanwhile."""
        return self.run(lambda: not handle.done(), lambda: phase_of(handle))

    def run(self, goes_on: Callable[[], bool], phase: Callable[[], str]) -> dict[str, list[float]]:
        """Milliseconds of the steps while ``goes_on``, by the phase in which they began and ended."""
        marks: list[tuple[str, Any]] = []
        while goes_on():
            marks.append((phase(), self._step()))
            if self._device.is_cuda and len(marks) > 2:
                marks[-3][1].synchronize()
        if self._device.is_cuda and marks:
            marks[-1][1].synchronize()
        found: dict[str, list[float]] = {}
        for (before, start), (after, end) in itertools.pairwise(marks):
            if before == after:
                milliseconds = start.elapsed_time(end) if self._device.is_cuda else (end - start) * 1e3
                found.setdefault(after, []).append(milliseconds)
        return found

    def for_seconds(self, seconds: float) -> list[float]:
        """Milliseconds of the steps of so many seconds, without a save."""
        end = time.perf_counter() + seconds
        return self.run(lambda: time.perf_counter() < end, lambda: "alone")["alone"][3:]


def status_bytes(name: str) -> int:
    """A line of /proc/self/status, such as VmRSS or VmHWM, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> None:
    """Count VmHWM from here on, where the kernel allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError as error:
        print(f"the peak of host memory cannot be reset: {error}", file=sys.stderr)


class Bench:
    """One state, one disk, and what was measured with them."""

    def __init__(self, device: Device, shapes: Shapes, folder: Path, *, rounds: int) -> None:
        self.device = device
        self.folder = folder
        self.rounds = rounds
        self.total = byte_count(shapes)
        self.shapes = shapes
        self.state = random_state(shapes, device=device.name)
        self.seconds: Seconds = {}
        self.numbers: dict[str, float] = {}

    def note(self, what: str, seconds: float) -> None:
        """Keep one measurement, and show it."""
        self.seconds.setdefault(what, []).append(seconds)
        print(f"{what}: {seconds:.4f} s", file=sys.stderr, flush=True)

    def limits(self) -> None:
        """What this machine can do."""
        self.numbers["d2h_gb_per_s"] = self.device.copy_bandwidth() / 1e9
        self.numbers["clone_s"] = self.device.clone_seconds(self.state)
        prepare_raw(threads=RAW_THREADS)
        print(f"limits: {self.numbers}", file=sys.stderr, flush=True)

    def raw_write(self) -> None:
        """One write of as many bytes as the state has, past the page cache."""
        path = self.folder / "raw.bin"
        start = time.perf_counter()
        write_raw(path, self.total, threads=RAW_THREADS)
        self.note("raw write", time.perf_counter() - start)
        path.unlink()

    def check(self, checkpoint: Path) -> None:
        """Exit unless the checkpoint holds the state's bytes."""
        target = empty_state(self.shapes, device=self.device.name)
        holdfast.load(target, checkpoint)
        wrong = different_keys(self.state, target)
        del target
        if self.device.is_cuda:
            torch.cuda.empty_cache()
        if wrong:
            raise SystemExit(f"{len(wrong)} tensors differ from what was saved, first {wrong[0]!r}")

    def save(self, name: str, *, is_checked: bool = False, stage: Mode = "copy", prove: bool = False) -> None:
        """One asynchronous save: seconds that it blocks, until it is staged, until it is durable."""
        checkpoint = empty_folder(self.folder / "checkpoint")
        self.device.synchronize()
        start = time.perf_counter()
        handle = async_save(self.state, checkpoint, options=holdfast.SaveOptions(stage=stage, prove=prove))
        self.note(f"{name} blocks", time.perf_counter() - start)
        handle.wait_staged()
        self.note(f"{name} staged", time.perf_counter() - start)
        handle.result()
        self.note(f"{name} durable", time.perf_counter() - start)
        if is_checked:
            self.check(checkpoint)
        shutil.rmtree(checkpoint)

    def holdfast(self) -> None:
        """The rows of this library."""
        gc.collect()
        reset_peak()
        host_before = status_bytes("VmRSS")
        self.device.reset_memory()
        tensors_before, device_before = self.device.memory()
        start = time.perf_counter()
        slab = prewarm(self.state)
        self.note("prewarm", time.perf_counter() - start)
        for _ in range(self.rounds + 1):  # the first one after prewarm is one of the results
            self.save("copy")
            self.raw_write()
        for _ in range(self.rounds):
            self.save("overlap", stage="overlap")
        tensors, on_device = self.device.memory()
        self.numbers["gpu_tensor_bytes"] = tensors - tensors_before
        self.numbers["gpu_device_bytes"] = on_device - device_before
        self.numbers["slab_bytes"] = slab
        self.numbers["host_bytes"] = status_bytes("VmHWM") - host_before
        for _ in range(self.rounds):
            self.save("device", stage="device")
        for stage in ("copy", "overlap", "device"):
            self.save(f"checked {stage}", is_checked=True, stage=stage, prove=True)

    def step_times(self) -> None:
        """Steps without a save and while one is written or staged, in turns: by a thread, then by a process."""
        steps = Steps(self.device)
        steps.for_seconds(1.0)
        for kind in AsyncCheckpointerType:
            release()
            prewarm(self.state, async_checkpointer_type=kind)
            alone: list[float] = []
            during: dict[str, list[float]] = {}
            for stage in ("copy", "overlap") * max(1, self.rounds - 1):
                alone += steps.for_seconds(2.0)
                checkpoint = empty_folder(self.folder / "checkpoint")
                handle = async_save(
                    self.state, checkpoint, async_checkpointer_type=kind, options=holdfast.SaveOptions(stage=stage)
                )
                found = steps.beside(handle)
                handle.result()
                shutil.rmtree(checkpoint)
                for phase, times in found.items():
                    during.setdefault(phase, []).extend(times)
                alone += steps.for_seconds(1.0)
            self.numbers[f"step_alone_ms_{kind.value}"] = statistics.mean(alone)
            for phase, times in during.items():
                self.numbers[f"step_{phase}_ms_{kind.value}"] = statistics.mean(times)
                self.numbers[f"steps_{phase}_{kind.value}"] = len(times)
            print({key: value for key, value in self.numbers.items() if kind.value in key}, file=sys.stderr, flush=True)
        release()

    def torch(self) -> None:
        """What torch's async_save does, with its defaults and with a DefaultStager that has every option on."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import async_save as torch_async_save

        warnings.simplefilter("ignore")
        for _ in range(2):
            self._torch_save("torch", lambda path: torch_async_save(self.state, checkpoint_id=path, no_dist=True))
        on = self.device.is_cuda
        stager = DefaultStager(StagingOptions(on, True, True, on))
        try:
            for _ in range(3):
                self._torch_save(
                    "torch stager",
                    lambda path: torch_async_save(self.state, checkpoint_id=path, no_dist=True, async_stager=stager),
                )
        except Exception as error:  # with some versions of torch a stager works only once
            print(f"torch's DefaultStager failed: {error!r}", file=sys.stderr)
        finally:
            stager.close()

    def _torch_save(self, name: str, save: Callable[[Path], Any]) -> None:
        checkpoint = empty_folder(self.folder / "checkpoint")
        self.device.synchronize()
        start = time.perf_counter()
        answer = save(checkpoint)
        self.note(f"{name} blocks", time.perf_counter() - start)
        staged: Future[Any] | None = getattr(answer, "staging_completion", None)
        if staged is not None:
            staged.result()
            self.note(f"{name} staged", time.perf_counter() - start)
        getattr(answer, "upload_completion", answer).result()
        os.sync()
        self.note(f"{name} durable", time.perf_counter() - start)
        shutil.rmtree(checkpoint)


def phase_of(handle: AsyncSave) -> str:
    """What the save is doing, as far as the steps are concerned."""
    return {"planned": "staging", "staging": "staging"}.get(handle.phase, "writing")


Row = tuple[str, float, float, bool]


def rows(total: int, seconds: Seconds, numbers: dict[str, float]) -> list[Row]:
    """Each promise: its name, what was measured, what is allowed, and whether it holds."""

    def median(what: str) -> float:
        return statistics.median(seconds[what])

    found: list[Row] = []

    def most(name: str, value: float, limit: float) -> None:
        found.append((name, round(value, 4), limit, value <= limit))

    if "copy blocks" in seconds:
        first, *others = seconds["copy blocks"]
        later = statistics.median(others)
        most("copy: blocking over bytes / D2H bandwidth", later / (total / (numbers["d2h_gb_per_s"] * 1e9)), 1.15)
        most("overlap: blocking, ms", median("overlap blocks") * 1e3, 10.0)
        most(
            "device: blocking over 1.5 x clone + 10 ms", median("device blocks") / (1.5 * numbers["clone_s"] + 0.01), 1
        )
        most("first save after prewarm over the later ones", first / later, 1.2)
        speed = median("raw write") / median("copy durable")
        found.append(("durable: share of the raw O_DIRECT limit", round(speed, 4), 0.85, speed >= 0.85))
        most("GPU memory of copy and overlap, MiB", numbers["gpu_tensor_bytes"] / MIB, 64)
        most("GPU memory by the device's own count, MiB", numbers["gpu_device_bytes"] / MIB, 64)
        most("host memory beside the slab, MiB", (numbers["host_bytes"] - numbers["slab_bytes"]) / MIB, 256)
    for kind in ("thread", "process"):
        alone = numbers.get(f"step_alone_ms_{kind}")
        if alone and f"step_writing_ms_{kind}" in numbers:
            most(f"mean step while written by a {kind}", numbers[f"step_writing_ms_{kind}"] / alone, 1.05)
        if alone and f"step_staging_ms_{kind}" in numbers:
            most(f"(reported) mean step while staged, {kind}", numbers[f"step_staging_ms_{kind}"] / alone, float("inf"))
    return found


def print_tables(paths: list[Path]) -> None:
    """Markdown tables of documents that earlier runs wrote."""
    for path in paths:
        document = json.loads(path.read_text(encoding="utf-8"))
        machine, total = document["machine"], document["bytes"]
        print(f"\n{total / 1e9:.1f} GB in {document['tensors']} tensors; {machine['date'][:10]}; {machine['gpu']}; "
              f"{machine['cores']} cores; {machine['file_system']}; Python {machine['python']}; "
              f"torch {machine['packages']['torch']}\n")  # fmt: skip
        if document["rows"]:
            print("| | measured | allowed | |\n|---|---|---|---|")
        for name, value, limit, passed in document["rows"]:
            print(f"| {name} | {value:g} | {'' if limit is None else f'{limit:g}'} | {'' if passed else 'missed'} |")
        print("\n| seconds | median | all |\n|---|---|---|")
        for name, times in document["seconds"].items():
            print(f"| {name} | {statistics.median(times):.4f} | {', '.join(f'{each:.4f}' for each in times)} |")
        print(f"\n{json.dumps(document['numbers'])}")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure; made if missing")
    parser.add_argument("--size", type=float, default=4.3, help="size of the state in GB (default 4.3)")
    parser.add_argument("--rows", nargs="+", choices=("holdfast", "steps", "torch"), help="what to measure (all)")
    parser.add_argument("--rounds", type=int, default=3, help="saves of each kind (default 3)")
    parser.add_argument("--json", type=Path, help="where to write the document, besides standard output")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is for smoke runs")
    parser.add_argument("--table", type=Path, nargs="+", help="print earlier documents as Markdown, measure nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print_tables(arguments.table)
        return
    if arguments.dir is None:
        parser.error("--dir is needed")
    device = Device(arguments.device)
    if device.is_cuda and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: this benchmark is about saving from one")
    total = int(arguments.size * 1e9)
    shapes = eight_billion_shapes(total=total) if total > 2_200_000_000 else large_shapes(layers=1)
    folder = arguments.dir / "holdfast-async-gpu"
    folder.mkdir(parents=True, exist_ok=True)
    require_space(folder, int(byte_count(shapes) * 1.2))
    chosen = arguments.rows or ["holdfast", "steps", "torch"]
    bench = Bench(device, shapes, folder, rounds=arguments.rounds)
    try:
        bench.limits()
        if "holdfast" in chosen:
            bench.holdfast()
        if "steps" in chosen:
            bench.step_times()
        release()
        if "torch" in chosen:
            bench.torch()
        gpu = torch.cuda.get_device_name() if device.is_cuda else "no GPU: a smoke run"
        machine = asdict(describe_machine(folder)) | {"gpu": gpu}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table = [
        (name, value, None if limit == float("inf") else limit, passed)
        for name, value, limit, passed in rows(bench.total, bench.seconds, bench.numbers)
    ]
    document = {"machine": machine, "bytes": bench.total, "tensors": len(shapes), "rows": table}
    text = json.dumps(document | {"numbers": bench.numbers, "seconds": bench.seconds}, indent=2)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
