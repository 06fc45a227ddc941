"""The main job, end to end: train on 4 ranks, be killed in the middle of a save, resume on 4 and on 2, lose nothing.

The same training, FSDP2 and AdamW on the CPU, is started four times; all ranks are forked from here, so that torch is
imported once. One run is left alone. Another gets SIGKILL on every rank while it writes a checkpoint.
What that leaves is resumed on 4 ranks, which must give the same losses bit by bit, and on 2 ranks, which must give them
up to rounding. Exits with 0 only when all of that was seen to be so. Writes to ./demo-output, and leaves there the last
checkpoint and a plot; no process is left.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch._dynamo  # FSDP2 imports it at its first use: here once, not on every rank
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import TCPStore

import elastic_training
import holdfast.interop  # with all that ranks need, so that it is imported once
from elastic_training import STEPS, STEPS_BETWEEN_SAVES
from tiny_transformer import process_group

FORK = multiprocessing.get_context("fork")
OUTPUT = Path("demo-output")
SAVES_BEFORE_THE_KILL = 2
PAUSE_INSIDE_THE_SAVE_S = 0.005
"""From the first sight of a save's files to the kill: long enough to have written a lot, too short to be done."""
LIMIT_S = 120.0
"""How long one run may take."""
ROUNDING = 1e-3
"""How far losses may be apart where another number of ranks adds them up in another order, relative to the loss."""

console = Console(highlight=False, soft_wrap=True)


@dataclass(slots=True, kw_only=True)
class Run:
    """What the ranks of one run did, as the log of the first one tells."""

    name: str
    seconds: float
    losses: dict[int, float] = field(default_factory=dict)
    save_seconds: list[float] = field(default_factory=list)
    resumed_at: int | None = None
    load_seconds: float | None = None


@dataclass(slots=True, kw_only=True)
class Kill:
    """A save that was cut short."""

    directory: Path
    leftover_bytes: int


def rank(name: str, rank: int, ranks: int, port: Connection) -> None:
    """What ``torchrun elastic_training.py`` does on one rank, once it is known where the ranks meet."""
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": port.recv(), "RANK": rank, "WORLD_SIZE": ranks}
    os.environ.update({key: str(value) for key, value in place.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)
    with process_group():
        elastic_training.main(OUTPUT / name, OUTPUT / f"{name}.log")


def launch(name: str, ranks: int) -> None:
    """What ``torchrun --standalone`` does; what it and its ranks have to complain about goes to a file."""
    with (OUTPUT / f"{name}.errors").open("wb") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    pipes = [FORK.Pipe(duplex=False) for _ in range(ranks)]
    processes = [FORK.Process(target=rank, args=(name, at, ranks, pipes[at][0])) for at in range(ranks)]
    try:
        for process in processes:
            process.start()
        # The store has a thread of its own, so that it begins after the last fork.
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        for _, port in pipes:
            port.send(store.port)
        while running := [process.sentinel for process in processes if process.exitcode is None]:
            wait(running)
            if any(process.exitcode for process in processes):
                sys.exit(1)
    finally:
        for process in processes:
            process.kill()


@contextmanager
def started(name: str, ranks: int) -> Iterator[BaseProcess]:
    """A launcher and ``ranks`` ranks that train, their checkpoints in ``OUTPUT/name``. All have ended afterwards."""
    (OUTPUT / name).mkdir(exist_ok=True)
    process = FORK.Process(target=launch, args=(name, ranks))
    process.start()
    try:
        yield process
    finally:
        if process.is_alive():
            process.terminate()  # it ends its ranks then; with SIGKILL it could not
            process.join(LIMIT_S)


def read_log(name: str, title: str, seconds: float) -> Run:
    """The run that wrote the log of ``name``; a last line that was cut off does not count."""
    run = Run(name=title, seconds=seconds)
    for line in (OUTPUT / f"{name}.log").read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        entry = json.loads(line)
        if "loss" in entry:
            run.losses[entry["step"]] = entry["loss"]
        elif "saved" in entry:
            run.save_seconds.append(entry["seconds"])
        else:
            run.resumed_at, run.load_seconds = entry["resumed"], entry["seconds"]
    return run


def run_to_the_end(name: str, title: str, ranks: int) -> Run:
    """A run that nobody disturbs."""
    began = time.perf_counter()
    with started(name, ranks) as process:
        process.join(LIMIT_S)
    assert process.exitcode == 0, f"the training failed: {(OUTPUT / f'{name}.errors').read_text()}"
    return read_log(name, title, time.perf_counter() - began)


def wait_for_a_save(process: BaseProcess, root: Path, first_step: int) -> Path:
    """The directory of a save in progress, of ``first_step`` or a later one: data files and no manifest."""
    until = time.monotonic() + LIMIT_S
    for step in range(first_step, STEPS + 1, STEPS_BETWEEN_SAVES):
        directory = root / f"step-{step}"
        while not any(directory.glob("data-*.safetensors")):
            assert process.is_alive(), f"the training ended with exit code {process.exitcode}, and was not killed"
            assert time.monotonic() < until, f"no save of step {step} within {LIMIT_S:.0f} s"
            time.sleep(0.001)
        time.sleep(PAUSE_INSIDE_THE_SAVE_S)
        if not (directory / "manifest.json").exists():
            return directory
    raise AssertionError("every save was faster than the kill; this disk is too fast for the demonstration")


def killed_run(name: str, ranks: int) -> tuple[Run, Kill]:
    """A run whose ranks got SIGKILL inside a save; where a save wins the race, it is resumed until the next one."""
    began = time.perf_counter()
    for saves in range(SAVES_BEFORE_THE_KILL, STEPS // STEPS_BETWEEN_SAVES):
        with started(name, ranks) as process:
            directory = wait_for_a_save(process, OUTPUT / name, (saves + 1) * STEPS_BETWEEN_SAVES)
            for rank in range(ranks):  # SIGKILL: no handler runs, nothing is flushed
                os.kill(int((OUTPUT / f"{name}.log.{rank}.pid").read_text()), signal.SIGKILL)
            process.join(LIMIT_S)
        assert process.exitcode, "the launcher did not see that its ranks were killed"
        if not (directory / "manifest.json").exists():
            leftover_bytes = sum(file.stat().st_size for file in directory.iterdir())
            run = read_log(name, f"killed on {ranks}", time.perf_counter() - began)
            return run, Kill(directory=directory, leftover_bytes=leftover_bytes)
    raise AssertionError("every save was faster than the kill; this disk is too fast for the demonstration")


def check(whole: Run, killed: Run, resumed: Run, kill: Kill) -> float:
    """The largest relative difference of a resumed loss from the uninterrupted run's, after all else is asserted."""
    last_saved = int(kill.directory.name.removeprefix("step-")) - STEPS_BETWEEN_SAVES
    assert sorted(whole.losses) == list(range(1, STEPS + 1)), "the uninterrupted run did not take every step"
    assert resumed.resumed_at == last_saved, f"resumed at {resumed.resumed_at}, and {last_saved} was the last whole one"
    assert sorted(resumed.losses) == list(range(last_saved + 1, STEPS + 1)), "the resumed run skipped steps"
    for step, loss in killed.losses.items():
        assert loss.hex() == whole.losses[step].hex(), f"{killed.name}: another loss at step {step}"
    return max(abs(loss - whole.losses[step]) / whole.losses[step] for step, loss in resumed.losses.items())


def plot(whole: Run, killed: Run, resumed: list[Run], path: Path) -> None:
    """Draw the loss curves, and where the one was cut."""
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    axes.plot(list(whole.losses), list(whole.losses.values()), color="#c9ced6", linewidth=9, label=whole.name)
    axes.plot(list(killed.losses), list(killed.losses.values()), color="#d1495b", linewidth=3, label=killed.name)
    for run, color, style in zip(resumed, ("#1f77b4", "#edae49"), ("-", "--"), strict=True):
        axes.plot(
            list(run.losses), list(run.losses.values()), color=color, linestyle=style, linewidth=2, label=run.name
        )
    axes.axvline(max(killed.losses), color="#d1495b", linewidth=1, linestyle=":")
    axes.annotate("SIGKILL inside a save", (max(killed.losses), max(whole.losses.values())), (6, -4),
                  textcoords="offset points", color="#d1495b")  # fmt: skip
    axes.set(xlabel="step", ylabel="loss", title="Killed inside a save and resumed on 4 and on 2 ranks")
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=130)


def timings(runs: list[Run], checkpoint_bytes: int) -> Table:
    """What each run did and how long it took."""
    table = Table(title=f"Timings ({checkpoint_bytes / 1e6:.0f} MB per checkpoint)", title_justify="left")
    for column in ("run", "steps", "seconds", "saves", "median save", "load"):
        table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for run in runs:
        save_s = statistics.median(run.save_seconds) if run.save_seconds else None
        table.add_row(
            run.name,
            f"{min(run.losses)}-{max(run.losses)}",
            f"{run.seconds:.1f}",
            str(len(run.save_seconds)),
            "" if save_s is None else f"{save_s * 1e3:.0f} ms, {checkpoint_bytes / save_s / 1e9:.2f} GB/s",
            "" if run.load_seconds is None else f"{run.load_seconds * 1e3:.0f} ms",
        )
    return table


def command(*arguments: str) -> None:
    """Show a command of holdfast and its output; it must succeed."""
    console.print(f"\n[bold]$ holdfast {' '.join(arguments)}[/bold]")
    sys.stdout.flush()
    subprocess.run([sys.executable, "-m", "holdfast", *arguments], check=True, timeout=LIMIT_S)


def check_that_nothing_is_found(kill: Kill) -> None:
    """Assert that what the kill left cannot be mistaken for a checkpoint."""
    try:
        holdfast.load(kill.directory)
    except holdfast.NotFoundError as error:
        console.print(f"   it left {kill.leftover_bytes / 1e6:.0f} MB and no manifest, so: [italic]{error}[/italic]")
    else:
        raise AssertionError("the save that was cut short can be loaded")


def four_runs() -> tuple[Run, Run, list[Run]]:
    """The uninterrupted run, the killed one, and those that resumed it; everything this program claims is asserted."""
    console.print(f"[bold]1[/bold]  4 ranks train {STEPS} steps, a checkpoint every {STEPS_BETWEEN_SAVES}, undisturbed")
    whole = run_to_the_end("undisturbed", "uninterrupted on 4", 4)
    console.print("[bold]2[/bold]  the same again, all ranks killed with SIGKILL in the middle of a save")
    killed, kill = killed_run("interrupted", 4)
    check_that_nothing_is_found(kill)
    shutil.copytree(OUTPUT / "interrupted", OUTPUT / "on-2-ranks")
    newest = holdfast.Steps(OUTPUT / "interrupted").latest()
    assert newest is not None, "no whole checkpoint is left"
    console.print(
        f"[bold]3[/bold]  started again on 4 ranks; the newest whole checkpoint is that of step {newest.step}"
    )
    on_4_ranks = run_to_the_end("interrupted", "resumed on 4", 4)
    difference = check(whole, killed, on_4_ranks, kill)
    assert difference == 0, f"losses on 4 ranks differ by {difference:.1e}"
    count = len(on_4_ranks.losses)
    console.print(f"   [green]all {count} losses after the crash are bit-equal to the uninterrupted run's[/green]")
    console.print("[bold]4[/bold]  started again on 2 ranks, from the same checkpoint")
    on_2_ranks = run_to_the_end("on-2-ranks", "resumed on 2", 2)
    difference = check(whole, killed, on_2_ranks, kill)
    assert difference < ROUNDING, f"losses on 2 ranks differ by {difference:.1e}"
    console.print(f"   [green]all {count} losses are those of 4 ranks, within {difference:.1e} of rounding[/green]")
    return whole, killed, [on_4_ranks, on_2_ranks]


def main() -> None:
    """Run the demonstration."""
    began = time.perf_counter()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()
    whole, killed, resumed = four_runs()
    last = OUTPUT / "on-2-ranks" / f"step-{STEPS}"
    checkpoint_bytes = sum(file.stat().st_size for file in last.iterdir())
    command("steps", str(last.parent))
    command("show", str(last))
    command("verify", str(last))
    console.print()
    console.print(timings([whole, killed, *resumed], checkpoint_bytes))
    plot(whole, killed, resumed, OUTPUT / "loss.png")
    for path in {*OUTPUT.iterdir(), *last.parent.iterdir()} - {last, last.parent, OUTPUT / "loss.png"}:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    console.print(f"The loss curves: [bold]{OUTPUT / 'loss.png'}[/bold]. Last checkpoint: [bold]{last}[/bold].")
    console.print(f"[green]Everything held[/green], in {time.perf_counter() - began:.0f} s.")


if __name__ == "__main__":
    main()
