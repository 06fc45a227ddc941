"""Writing torch's own format: torch's dcp.save against holdfast's FileSystemWriter; a table and one JSON document.

    python benchmarks/torch_format_write.py --dir /some/disk --gb 2

Both save the same state into an empty folder, durable on return: torch does not sync the names of its files, so that
is added to its time. Default against default, and four threads against four; rounds alternate, medians count. The first
checkpoint of each is read back by torch and compared, outside the timed part.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter as TorchWriter

# So that it runs from a checkout where nothing is installed.
sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

import holdfast
from disk import drop_caches, empty_folder, fsync_path, require_space
from holdfast.filesystem import FileSystemWriter
from machine import describe_machine
from states import State, byte_count, different_keys, empty_state, random_state, shapes_of_size, small_shapes

REQUIRED = 1.5
THREADS = (1, 4)
TORCH, HOLDFAST = "torch", "holdfast"

Save = Callable[[State, Path], None]


def torch_save(threads: int) -> Save:
    """The writer of torch, with its files' names made durable too."""

    def save(state: State, path: Path) -> None:
        state_dict_saver.save(dict(state), storage_writer=TorchWriter(path, thread_count=threads))
        fsync_path(path)
        fsync_path(path.parent)

    return save


def holdfast_save(threads: int) -> Save:
    """Holdfast's writer of the same format."""

    def save(state: State, path: Path) -> None:
        holdfast.save(state, storage_writer=FileSystemWriter(path, thread_count=threads))

    return save


CONTESTANTS: dict[tuple[str, int], Save] = {
    (who, threads): make(threads)
    for threads in THREADS
    for who, make in ((TORCH, torch_save), (HOLDFAST, holdfast_save))
}


def timed(save: Save, state: State, path: Path) -> float:
    """The seconds that one save into a new folder takes; nothing waits to be written back when it begins."""
    empty_folder(path.parent)
    drop_caches([path.parent])
    gc.collect()
    start = time.perf_counter()
    save(state, path)
    return time.perf_counter() - start


def check(state: State, path: Path, *, who: str) -> None:
    """Exit unless torch reads the very bytes that were saved."""
    target = empty_state({key: tuple(tensor.shape) for key, tensor in state.items()})
    state_dict_loader.load(dict(target), checkpoint_id=path)
    wrong = different_keys(state, target)
    if wrong:
        raise SystemExit(f"torch reads other bytes than {who} saved: {len(wrong)} keys, first {wrong[0]!r}")


def race(state: State, folder: Path, *, rounds: int) -> dict[tuple[str, int], list[float]]:
    """The seconds of every contestant in every round, after one that does not count."""
    seconds: dict[tuple[str, int], list[float]] = {each: [] for each in CONTESTANTS}
    path = folder / "checkpoint"
    for number in range(rounds + 1):
        order = list(CONTESTANTS) if number % 2 == 0 else list(CONTESTANTS)[::-1]
        for each in order:
            took = timed(CONTESTANTS[each], state, path)
            if number == 0:
                check(state, path, who=each[0])
            else:
                seconds[each].append(took)
    return seconds


def summary(seconds: dict[tuple[str, int], list[float]], total: int) -> list[dict[str, object]]:
    """For each number of threads: GB/s of both, holdfast's ratio, and whether that is what is promised."""
    rows: list[dict[str, object]] = []
    for threads in THREADS:
        medians = {who: statistics.median(seconds[who, threads]) for who in (TORCH, HOLDFAST)}
        ratio = medians[TORCH] / medians[HOLDFAST]
        rows.append(
            {
                "threads": threads,
                "torch_gb_per_s": round(total / medians[TORCH] / 1e9, 3),
                "holdfast_gb_per_s": round(total / medians[HOLDFAST] / 1e9, 3),
                "ratio": round(ratio, 2),
                "required": REQUIRED,
                "passed": ratio >= REQUIRED,
                "seconds": {who: seconds[who, threads] for who in (TORCH, HOLDFAST)},
            }
        )
    return rows


def table_of(name: str, total: int, tensors: int, rounds: int, rows: list[dict[str, object]]) -> Table:
    """The summary for people."""
    title = f"{name}: {tensors} tensors, {total / 1e9:.2f} GB; GB/s, medians of {rounds}"
    table = Table(title=title, title_justify="left")
    for heading in ("thread_count", "torch", "holdfast", "ratio", ""):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = (row["threads"], row["torch_gb_per_s"], row["holdfast_gb_per_s"], row["ratio"])
        table.add_row(*map(str, cells), "kept" if row["passed"] else "missed")
    return table


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(".bench"), help="folder on the disk to measure")
    parser.add_argument("--gb", type=float, default=2.0, help="size of the large state in GB (default 2, at least 0.1)")
    parser.add_argument("--small", type=int, default=5000, help="tensors of the small state (default 5000; 0: none)")
    parser.add_argument("--rounds", type=int, default=3, help="saves of each kind that count (default 3)")
    parser.add_argument("--output", type=Path, help="where the JSON goes (default: printed)")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.gb < 0.1:
        parser.error("--rounds must be at least 1, --gb at least 0.1")
    # torch says on every call that there is no process group; that is what is measured here.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

    console = Console(stderr=True)
    folder = arguments.dir / "holdfast-torch-format"
    folder.mkdir(parents=True, exist_ok=True)
    document: dict[str, object] = {"machine": asdict(describe_machine(folder)), "rounds": arguments.rounds}
    shapes = {"large": shapes_of_size(arguments.gb), "small": small_shapes(tensors=arguments.small)}
    try:
        for name, each in shapes.items():
            if not each:
                continue
            total = byte_count(each)
            require_space(folder, int(total * 1.1) + 2**28)
            rows = summary(race(random_state(each), folder / name, rounds=arguments.rounds), total)
            console.print(table_of(name, total, len(each), arguments.rounds, rows))
            document[name] = {"bytes": total, "tensors": len(each), "results": rows}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(document, indent=2)
    if arguments.output is None:
        print(text)
    else:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
