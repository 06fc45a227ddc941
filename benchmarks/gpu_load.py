"""Loading into CUDA tensors: from disk against its raw limit, and from memory (tmpfs); prints one JSON document.

    python3 benchmarks/gpu_load.py --dir /some/disk --gib 16

An 8-billion-parameter model's tensors are made on the GPU, saved from there by holdfast, and loaded back into other
tensors on the GPU: cold (caches dropped) from disk, then from a copy of the checkpoint in tmpfs. Every load is compared
on the device, outside the timed part. The raw limit is O_DIRECT with eight threads on a file of the same size, measured
before every cold load. Sixteen GiB take two to three minutes, and twice their size on disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

# So that it runs from a checkout where nothing is installed.
sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

import holdfast
from disk import cache_dropping, drop_caches, empty_folder, prepare_raw, read_raw, require_space, write_raw
from machine import describe_machine
from states import State, byte_count, clear, different_keys, eight_billion_shapes, empty_state, random_state

RAW_THREADS = 8
COLD_REQUIRED = 0.85
TMPFS_REQUIRED_GB_PER_S = 10.0


def timed(action: Callable[[], object]) -> float:
    """The seconds that the action takes, with everything that it left to the device done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def checked_load(state: State, target: State, checkpoint: Path) -> float:
    """The seconds that one load takes; exits when the target does not hold the state's bytes afterwards."""
    clear(target)
    seconds = timed(lambda: holdfast.load(target, checkpoint))
    wrong = different_keys(state, target)
    if wrong:
        raise SystemExit(f"{len(wrong)} tensors differ from what was saved, first {wrong[0]!r}")
    return seconds


def from_disk(state: State, target: State, folder: Path, *, rounds: int) -> dict[str, list[float]]:
    """Seconds of the raw write and the save, and of raw reads and cold loads in turn."""
    total = sum(tensor.nbytes for tensor in state.values())
    raw, checkpoint = folder / "raw.bin", folder / "checkpoint"
    prepare_raw(threads=RAW_THREADS)
    seconds: dict[str, list[float]] = {"raw write": [], "save": [], "raw read": [], "cold load": []}
    seconds["raw write"].append(timed(lambda: write_raw(raw, total, threads=RAW_THREADS)))
    seconds["save"].append(timed(lambda: holdfast.save(state, checkpoint)))
    for _ in range(rounds):
        drop_caches([folder])
        seconds["raw read"].append(timed(lambda: read_raw(raw, threads=RAW_THREADS)))
        drop_caches([folder])
        seconds["cold load"].append(checked_load(state, target, checkpoint))
    raw.unlink()
    return seconds


def from_tmpfs(
    state: State, target: State, checkpoint: Path, tmpfs: Path, *, rounds: int
) -> dict[str, list[float]] | None:
    """Seconds of loads from a copy in memory; nothing where it has no room for one."""
    total = sum(tensor.nbytes for tensor in state.values())
    if not tmpfs.is_dir() or shutil.disk_usage(tmpfs).free < total * 1.02:
        print(f"{tmpfs} has no room for {total / 1e9:.1f} GB: loads from memory are left out", file=sys.stderr)
        return None
    copy = tmpfs / "holdfast-gpu-load"
    shutil.rmtree(copy, ignore_errors=True)
    try:
        shutil.copytree(checkpoint, copy)
        return {"tmpfs load": [checked_load(state, target, copy) for _ in range(rounds)]}
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def summary(seconds: dict[str, list[float]], total: int) -> dict[str, object]:
    """Medians as GB/s, the ratios that are promised, and whether they hold."""
    speed = {what: total / statistics.median(times) / 1e9 for what, times in seconds.items()}
    cold = speed["cold load"] / speed["raw read"]
    tmpfs = speed.get("tmpfs load")
    return {
        "gb_per_s": {what: round(value, 3) for what, value in speed.items()},
        "save_over_raw_write": round(speed["save"] / speed["raw write"], 3),
        "cold_load_over_raw_read": round(cold, 3),
        "cold_load_passed": cold >= COLD_REQUIRED,
        "tmpfs_load_passed": None if tmpfs is None else tmpfs >= TMPFS_REQUIRED_GB_PER_S,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="folder on the disk to measure; made if missing")
    parser.add_argument("--gib", type=float, default=16.0, help="size of the state in GiB (default 16; at least 2.5)")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="folder in memory (default /dev/shm)")
    parser.add_argument("--rounds", type=int, default=3, help="loads of each kind; medians are reported (default 3)")
    arguments = parser.parse_args()
    if arguments.gib < 2.5:
        parser.error("--gib must be at least 2.5: the embeddings alone take 2")
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: this benchmark is about loading into one")

    shapes = eight_billion_shapes(total=int(arguments.gib * 2**30))
    total = byte_count(shapes)
    folder = arguments.dir / "holdfast-gpu-load"
    folder.mkdir(parents=True, exist_ok=True)
    require_space(folder, int(total * 2.05))
    empty_folder(folder)
    state, target = random_state(shapes, device="cuda"), empty_state(shapes, device="cuda")
    try:
        seconds = from_disk(state, target, folder, rounds=arguments.rounds)
        in_memory = from_tmpfs(state, target, folder / "checkpoint", arguments.tmpfs, rounds=arguments.rounds)
        seconds.update(in_memory or {})
        machine = asdict(describe_machine(folder)) | {"gpu": torch.cuda.get_device_name()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    document = {"machine": machine, "caches": cache_dropping(), "tensors": len(shapes), "bytes": total}
    print(json.dumps(document | summary(seconds, total) | {"seconds": seconds}, indent=2))


if __name__ == "__main__":
    main()
