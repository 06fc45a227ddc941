"""The main job, end to end: train, be killed in the middle of a save, resume, and lose nothing.

The same training runs twice. One run is left alone. The other gets SIGKILL while it is writing a checkpoint, is started
again, and must then produce the same losses, bit by bit. Exits with 0 only when all of that was seen to be so. Writes
to ./demo-output, and leaves there the last checkpoint and a plot.
"""

from __future__ import annotations

import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

import holdfast
from training import STEPS, STEPS_BETWEEN_SAVES, newest_whole_checkpoint

OUTPUT = Path("demo-output")
TRAINING = Path(__file__).with_name("training.py")
SAVES_BEFORE_THE_KILL = 2
PAUSE_INSIDE_THE_SAVE_S = 0.005
"""From the first sight of a save's files to the kill: long enough to have written a lot, too short to be done."""

console = Console(highlight=False, soft_wrap=True)


@dataclass(slots=True, kw_only=True)
class Run:
    """What one process did, as its log tells."""

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


def start(name: str) -> subprocess.Popen[bytes]:
    """A training process whose checkpoints are in ``OUTPUT/name``."""
    (OUTPUT / name).mkdir(exist_ok=True)
    return subprocess.Popen([sys.executable, str(TRAINING), str(OUTPUT / name), str(OUTPUT / f"{name}.log")])


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


def run_to_the_end(name: str, title: str) -> Run:
    """A run that nobody disturbs."""
    started = time.perf_counter()
    code = start(name).wait()
    assert code == 0, f"the training ended with exit code {code}"
    return read_log(name, title, time.perf_counter() - started)


def kill_inside_a_save(name: str, first_step: int) -> Kill | None:
    """Start a run and SIGKILL it while it saves ``first_step`` or a later one; None when the save was faster.

    Data files without a manifest are a save in progress: that is what is waited for, and what must be left.
    """
    process = start(name)
    try:
        for step in range(first_step, STEPS + 1, STEPS_BETWEEN_SAVES):
            directory = OUTPUT / name / f"step-{step:06d}"
            while process.poll() is None and not any(directory.glob("data-*.safetensors")):
                time.sleep(0.001)
            time.sleep(PAUSE_INSIDE_THE_SAVE_S)
            if not (directory / "manifest.json").exists():
                break
    finally:
        process.kill()  # SIGKILL: no handler runs, nothing is flushed
        code = process.wait()
    assert code == -signal.SIGKILL, f"the training ended with exit code {code} before it could be killed"
    if (directory / "manifest.json").exists():
        return None
    return Kill(directory=directory, leftover_bytes=sum(file.stat().st_size for file in directory.iterdir()))


def killed_run(name: str) -> tuple[Run, Kill]:
    """A run that was killed inside a save; where a save wins the race, it goes on to the next one."""
    started = time.perf_counter()
    step = (SAVES_BEFORE_THE_KILL + 1) * STEPS_BETWEEN_SAVES
    while step <= STEPS:
        kill = kill_inside_a_save(name, step)
        if kill is not None:
            return read_log(name, "killed", time.perf_counter() - started), kill
        step += STEPS_BETWEEN_SAVES
    raise AssertionError("every save was faster than the kill; this disk is too fast for the demonstration")


def check(whole: Run, killed: Run, resumed: Run, kill: Kill) -> None:
    """Assert everything that this program claims."""
    last_saved = int(kill.directory.name.removeprefix("step-")) - STEPS_BETWEEN_SAVES
    assert sorted(whole.losses) == list(range(1, STEPS + 1)), "the uninterrupted run did not take every step"
    assert resumed.resumed_at == last_saved, f"resumed at {resumed.resumed_at}, and {last_saved} was the last whole one"
    assert sorted(resumed.losses) == list(range(last_saved + 1, STEPS + 1)), "the resumed run skipped steps"
    for run in (killed, resumed):
        for step, loss in run.losses.items():
            assert loss.hex() == whole.losses[step].hex(), f"{run.name}: another loss at step {step}"


def plot(whole: Run, killed: Run, resumed: Run, path: Path) -> None:
    """Draw both loss curves, and where the one was cut."""
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    axes.plot(list(whole.losses), list(whole.losses.values()), color="#c9ced6", linewidth=7, label="uninterrupted")
    axes.plot(list(killed.losses), list(killed.losses.values()), color="#d1495b", label="until the kill")
    axes.plot(list(resumed.losses), list(resumed.losses.values()), color="#1f77b4", linestyle="--", label="resumed")
    axes.axvline(max(killed.losses), color="#d1495b", linewidth=1, linestyle=":")
    axes.annotate("SIGKILL inside a save", (max(killed.losses), max(whole.losses.values())), (6, -4),
                  textcoords="offset points", color="#d1495b")  # fmt: skip
    axes.set(xlabel="step", ylabel="loss", title="Killed inside a save and resumed: the same losses")
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=130)


def timings(runs: list[Run], checkpoint_bytes: int) -> Table:
    """What each run did and how long it took."""
    table = Table(title=f"Timings ({checkpoint_bytes / 1e6:.0f} MB per checkpoint)", title_justify="left")
    for column in ("run", "steps", "seconds", "whole saves", "median save", "load"):
        table.add_column(column, justify="left" if column == "run" else "right")
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
    subprocess.run([sys.executable, "-m", "holdfast", *arguments], check=True)


def main() -> None:
    """Run the demonstration."""
    started = time.perf_counter()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir()
    console.print(f"[bold]1[/bold]  training {STEPS} steps, a checkpoint every {STEPS_BETWEEN_SAVES}, undisturbed")
    whole = run_to_the_end("undisturbed", "uninterrupted")
    console.print("[bold]2[/bold]  the same again, killed with SIGKILL in the middle of a save")
    killed, kill = killed_run("interrupted")
    try:
        holdfast.load(kill.directory)
    except holdfast.NotFoundError as error:
        console.print(f"   it left {kill.leftover_bytes / 1e6:.0f} MB and no manifest, so: [italic]{error}[/italic]")
    else:
        raise AssertionError("the save that was cut short can be loaded")
    newest = newest_whole_checkpoint(OUTPUT / "interrupted")
    console.print(f"[bold]3[/bold]  started again; the newest whole checkpoint is {newest}")
    resumed = run_to_the_end("interrupted", "resumed")
    check(whole, killed, resumed, kill)
    console.print(
        f"   [green]all {len(resumed.losses)} losses after the crash are bit-equal to the uninterrupted run's[/green]"
    )

    last = OUTPUT / "interrupted" / f"step-{STEPS:06d}"
    checkpoint_bytes = sum(file.stat().st_size for file in last.iterdir())
    command("show", str(last))
    command("verify", str(last))
    console.print()
    console.print(timings([whole, killed, resumed], checkpoint_bytes))
    plot(whole, killed, resumed, OUTPUT / "loss.png")
    shutil.rmtree(OUTPUT / "undisturbed")
    for directory in set((OUTPUT / "interrupted").iterdir()) - {last}:
        shutil.rmtree(directory)
    console.print(f"Both loss curves: [bold]{OUTPUT / 'loss.png'}[/bold]. Last checkpoint: [bold]{last}[/bold].")
    console.print(f"[green]Everything held[/green], in {time.perf_counter() - started:.0f} s.")


if __name__ == "__main__":
    main()
