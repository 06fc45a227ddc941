"""Reading a checkpoint that torch wrote: torch beside holdfast, in one run; a table of ratios, and JSON.

    python benchmarks/torch_format_read.py                       2 GB in 150 tensors, on 1 rank and on 2
    python benchmarks/torch_format_read.py --megabytes 300       smaller
    python benchmarks/torch_format_read.py --small               7,500 tensors of 2 to 32 KB instead

torch's dcp.save writes the state once for each number of ranks. Then both load it, cold (caches dropped) and warm, in
alternating order, round after round; every load is compared with what was saved, outside the timed part. A time is that
of all ranks, from a barrier to a barrier. The promise: holdfast is at least twice as fast, in each. Linux only.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import TCPStore
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh

import holdfast
from disk import cache_dropping, drop_caches, empty_folder, read_through_cache, require_space
from holdfast._checkpoint import reader_for
from holdfast._torch_format.reader import FileSystemReader
from machine import describe_machine
from shards import local_parts, sharded_state, sharded_target
from states import Shapes, State, byte_count, clear, different_keys, large_shapes, small_shapes

TORCH, HOLDFAST, VERIFIED = "torch", "holdfast", "holdfast, verify=True"
COLD, WARM = "cold", "warm"
RESHARDED = "resharded, "
REQUIRED = 2.0
REPOSITORY = Path(__file__).resolve().parents[1]
Seconds = dict[str, dict[str, list[float]]]


def load_with_torch(target: State, path: Path) -> None:
    """As torch's users do."""
    state_dict_loader.load(dict(target), checkpoint_id=path)


def load_with_holdfast(target: State, path: Path) -> None:
    """The same with holdfast."""
    holdfast.load(dict(target), storage_reader=reader_for(path))


def load_verified(target: State, path: Path) -> None:
    """The same with all checksums, also of what the page cache holds; torch looks at none."""
    holdfast.load(dict(target), storage_reader=FileSystemReader(path, verify=True))


LOADERS: dict[str, Callable[[State, Path], None]] = {
    TORCH: load_with_torch,
    HOLDFAST: load_with_holdfast,
    VERIFIED: load_verified,
}


def shapes_of(*, megabytes: int, small: bool) -> Shapes:
    """The shapes of at most so many megabytes of bf16 in up to 150 tensors; or of small ones.

    Less is fewer tensors, not smaller ones: how long torch takes for a byte depends on the size of its tensor.
    """
    if small:
        return small_shapes()
    shapes = large_shapes()
    if byte_count(shapes) <= megabytes * 1e6:
        return shapes
    for layers in range(16, 0, -1):
        names = {key: shape for key, shape in large_shapes(layers=layers).items() if "embedding" not in key}
        shapes = {key: shape for key, shape in names.items() if not key.startswith("head")}
        if byte_count(shapes) <= megabytes * 1e6:
            break
    return shapes


def race(rank: int, ranks: int, shapes: Shapes, path: Path, rounds: int) -> Seconds:
    """The times of one rank's side of the race, by what was loaded and by whom."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    mesh = DeviceMesh("cpu", list(range(ranks)))
    state_dict_saver.save(dict(sharded_state(shapes, mesh, dim=0)), checkpoint_id=path)
    seconds: Seconds = {}
    for dim in (0,) if ranks == 1 else (0, 1):
        expected = local_parts(sharded_state(shapes, mesh, dim=dim))
        target = sharded_target(shapes, mesh, dim=dim)
        for load in LOADERS.values():
            load(target, path)  # what is done once in a process
        for number in range(rounds):
            order = list(LOADERS) if number % 2 == 0 else list(LOADERS)[::-1]
            for cache in (COLD, WARM):
                what = f"{RESHARDED if dim else ''}{cache}"
                for name in order:
                    clear(local_parts(target))
                    taken = _timed(LOADERS[name], target, path, cache=cache, is_first=rank == 0)
                    wrong = different_keys(expected, local_parts(target))
                    if wrong:
                        raise SystemExit(f"{name} loaded other bytes than were saved: first {wrong[0]!r}")
                    seconds.setdefault(what, {}).setdefault(name, []).append(taken)
    return seconds


def _timed(load: Callable[[State, Path], None], target: State, path: Path, *, cache: str, is_first: bool) -> float:
    gc.collect()
    torch.distributed.barrier()
    if is_first:
        if cache == COLD:
            drop_caches([path])
        else:
            read_through_cache(path)
    torch.distributed.barrier()
    start = time.perf_counter()
    load(target, path)
    torch.distributed.barrier()
    return time.perf_counter() - start


def _serve(answer: Connection, port: int, rank: int, ranks: int, shapes: Shapes, path: Path, rounds: int) -> None:
    """The life of one rank."""
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        answer.send(race(rank, ranks, shapes, path, rounds))
        torch.distributed.destroy_process_group()
    except BaseException:
        answer.send(traceback.format_exc())


def run_on(ranks: int, shapes: Shapes, folder: Path, *, rounds: int) -> Seconds:
    """The race on that many processes; of each time, that of the slowest rank."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    path = empty_folder(folder / f"by-{ranks}-ranks") / "checkpoint"
    processes, answers = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        arguments = (theirs, store.port, rank, ranks, shapes, path, rounds)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        answers.append(ours)
    try:
        found = [_received(answer) for answer in answers]
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    shutil.rmtree(path.parent)
    return {
        what: {name: list(map(max, zip(*(each[what][name] for each in found), strict=True))) for name in times}
        for what, times in found[0].items()
    }


def _received(answer: Connection) -> Seconds:
    try:
        found: Seconds | str = answer.recv()
    except EOFError:
        raise SystemExit("a rank died") from None
    if isinstance(found, str):
        raise SystemExit(f"a rank failed:\n{found}")
    return found


def print_table(results: dict[int, Seconds], total: int, console: Console) -> bool:
    """Print speeds and ratios; whether every promised ratio holds."""
    table = Table("ranks", "load", *(f"{name}, GB/s" for name in LOADERS), "holdfast / torch", "required")
    is_kept = True
    for ranks, seconds in results.items():
        for what, times in seconds.items():
            speeds = {name: total / statistics.median(times[name]) / 1e9 for name in LOADERS}
            ratio = speeds[HOLDFAST] / speeds[TORCH]
            is_promised = not what.startswith(RESHARDED)
            is_kept = is_kept and (ratio >= REQUIRED or not is_promised)
            shown = (f"{speeds[name]:.2f}" for name in LOADERS)
            table.add_row(str(ranks), what, *shown, f"{ratio:.2f}", f"{REQUIRED:.1f}" if is_promised else "")
    console.print(table)
    return is_kept


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--megabytes", type=int, default=2500, help="at most this size of the state (default 2500: all)"
    )
    parser.add_argument("--small", action="store_true", help="7,500 small tensors instead")
    parser.add_argument("--rounds", type=int, default=3, help="loads of each kind; medians are reported (default 3)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks (default 1 2)")
    parser.add_argument("--dir", type=Path, default=REPOSITORY / ".bench", help="where files go (default .bench)")
    parser.add_argument("--output", type=Path, help="where the JSON goes (default DIR/torch_format_read.json)")
    arguments = parser.parse_args()
    shapes = shapes_of(megabytes=arguments.megabytes, small=arguments.small)
    total = byte_count(shapes)
    folder = arguments.dir / "torch-format-read"
    folder.mkdir(parents=True, exist_ok=True)
    require_space(folder, int(total * 1.1) + 2**28)
    machine = describe_machine(folder)
    console = Console()
    for line in (*machine.lines(), f"{len(shapes)} tensors, {total / 1e9:.2f} GB", f"caches: {cache_dropping()}"):
        console.print(line, highlight=False)
    try:
        results = {ranks: run_on(ranks, shapes, folder, rounds=arguments.rounds) for ranks in arguments.ranks}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    is_kept = print_table(results, total, console)
    output = arguments.output or arguments.dir / "torch_format_read.json"
    document = {"machine": asdict(machine), "tensors": len(shapes), "bytes": total, "seconds": results}
    output.write_text(json.dumps(document | {"passed": is_kept}, indent=2) + "\n", encoding="utf-8")
    console.print(f"written: {output}", highlight=False)
    raise SystemExit(0 if is_kept else 1)


if __name__ == "__main__":
    main()
