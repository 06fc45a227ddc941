"""The commands for the steps of a run: ``holdfast steps``, ``pin``, ``unpin``, ``report`` and ``delete``."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

import holdfast
from holdfast._values.shown import shown_bytes
from holdfast.cli.show import as_options, counted, error_console, one_line, output_console, shown_name

Root = Annotated[str, typer.Argument(metavar="ROOT", help="The directory of a run.", show_default=False)]
StepNumber = Annotated[int, typer.Argument(metavar="STEP", help="The number of a step.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

_EXAMPLES = {
    "steps": ("holdfast steps runs/a", "holdfast steps --json runs/a | jq '.steps[-1].metrics'"),
    "pin": ("holdfast pin runs/a 100",),
    "unpin": ("holdfast unpin runs/a 100",),
    "report": ("holdfast report runs/a 100 val_loss=2.1 accuracy=0.75",),
    "delete": (
        "holdfast delete runs/a 100 200",
        "holdfast delete checkpoints/old",
        "holdfast delete --force runs/a 100",
    ),
}


def add_step_commands(app: typer.Typer, codes: str) -> None:
    """Add these commands to ``app``. ``codes`` is the help on exit codes."""
    for function in (steps, pin, unpin, report, delete):
        examples = "\n".join(f"  {example}" for example in _EXAMPLES[function.__name__])
        app.command(function.__name__, epilog=f"\b\nExamples:\n{examples}\n\n{codes}")(function)


def steps(root: Root, as_json: AsJson = False) -> None:
    """List the steps of a run.

    A step is whole if it has all its files, in their sizes. A step that is pinned, or held by a reader, is not deleted.
    """
    from holdfast._io import files
    from holdfast._native.publish import format_at  # late, because they import torch

    with as_options():
        run = holdfast.Steps(root)
        found, held = run.steps(), run.held()
        if not found and not files.exists(run.root):
            raise holdfast.NotFoundError(f"there is no directory {root!r}")
        if not found and format_at(run.root) is not None:
            raise holdfast.NotFoundError(f"{root!r} is a checkpoint, not the directory of a run; see holdfast show")
    wholes = {step.step for step in found if not step.problem and run.is_whole(step)}
    if as_json:
        listed = [
            {
                **dataclasses.asdict(step),
                "metrics": _as_json(step.metrics),
                "whole": step.step in wholes,
                "held": step.step in held,
            }
            for step in found
        ]
        typer.echo(json.dumps({"root": root, "steps": listed}))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("step", "age", "size", "metrics", "whole", ""):
        table.add_column(heading, justify="right" if heading in ("step", "age", "size") else "left", overflow="fold")
    for step in found:
        metrics = ", ".join(f"{shown_name(name)} {value:.6g}" for name, value in sorted(step.metrics.items()))
        notes = [note for note, is_so in (("pinned", step.pinned), ("held", step.step in held)) if is_so]
        whole = ("whole", "green") if step.step in wholes else (one_line(step.problem) or "files are missing", "red")
        size = shown_bytes(step.bytes) if step.attempt else "-"
        table.add_row(str(step.step), _age(step.saved_at), size, metrics, Text(*whole), ", ".join(notes))
    if found:
        output_console().print(table)
    else:
        output_console().print(f"no steps in {shown_name(root)}", soft_wrap=True)


def _as_json(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """``metrics`` with texts for what JSON has no numbers for."""
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def _age(saved_at: str | None) -> str:
    """How long ago that was: in days, hours or minutes if there are two of them or more, otherwise in seconds."""
    if saved_at is None:
        return "-"
    saved = datetime.strptime(saved_at, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    seconds = max(datetime.now(timezone.utc) - saved, timedelta()).total_seconds()
    units = ((172_800, 86_400, "d"), (7_200, 3_600, "h"), (120, 60, "min"), (0, 1, "s"))
    return next(f"{seconds // unit:.0f} {name}" for least, unit, name in units if seconds >= least)


def pin(root: Root, step: StepNumber, as_json: AsJson = False) -> None:
    """Protect a step from being deleted, until you unpin it."""
    with as_options():
        holdfast.Steps(root).pin(step)
    _tell(f"step {step} is pinned", as_json, root=root, step=step, pinned=True)


def unpin(root: Root, step: StepNumber, as_json: AsJson = False) -> None:
    """Let a step be deleted again."""
    with as_options():
        holdfast.Steps(root).unpin(step)
    _tell(f"step {step} is not pinned", as_json, root=root, step=step, pinned=False)


def _tell(said: str, as_json: bool, **facts: object) -> None:
    """Print what was done: for people, or as JSON."""
    typer.echo(json.dumps(facts) if as_json else said)


def report(
    root: Root,
    step: StepNumber,
    metrics: Annotated[
        list[str], typer.Argument(metavar="NAME=NUMBER...", help="Metrics, such as val_loss=2.1.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Add metrics to a step that was saved, for `holdfast steps` and for keeping the best ones."""
    numbers: dict[str, float] = {}
    for metric in metrics:
        name, _, number = metric.partition("=")
        try:
            numbers[name] = float(number)
        except ValueError:
            raise typer.BadParameter(f"{metric!r} is not like val_loss=2.1", param_hint="NAME=NUMBER") from None
    with as_options():
        steps = holdfast.Steps(root)
        steps.report(step, numbers)
        known = next(found.metrics for found in steps.steps() if found.step == step)
    shown = ", ".join(f"{shown_name(name)} {value:.6g}" for name, value in sorted(known.items()))
    _tell(f"step {step} has {shown}", as_json, root=root, step=step, metrics=_as_json(known))


def delete(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH... or ROOT STEP...", help="Checkpoints, or a run and steps.", show_default=False),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Also delete what is pinned, or the last step of a run that is whole.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete checkpoints, of any format.

    Each is gone in one step, and then its files are removed. Whoever reads it meanwhile finds no checkpoint, and not a
    damaged one. A step of a run stays if it is pinned, held by a reader, or the only one that is whole.
    """
    if len(paths) > 1 and all(re.fullmatch("[0-9]+", path) for path in paths[1:]):
        paths = [os.path.join(paths[0], f"step-{int(step)}") for step in paths[1:]]
    from holdfast._io import posix

    reports = []
    for path in paths:
        root, _, number = posix.absolute(path).rstrip(os.sep).rpartition(f"{os.sep}step-")
        with as_options():
            if re.fullmatch("0|[1-9][0-9]*", number):
                done = holdfast.Steps(root).delete(int(number), force=force)
            else:
                done = holdfast.delete(path, force=force)
        reports.append(done)
        if not as_json:
            removed = f"{counted(len(done.files), 'file')}, {shown_bytes(done.bytes)}"
            line = Text.assemble(("deleted", "bold green"), f": {removed} of ", (shown_name(path), "bold"))
            output_console().print(line, soft_wrap=True)
        for problem in done.problems:
            error_console().print(Text.assemble(("problem: ", "bold red"), one_line(problem)), soft_wrap=True)
    if as_json:
        typer.echo(json.dumps({"deleted": [dataclasses.asdict(done) for done in reports]}))
    if any(done.problems for done in reports):
        raise typer.Exit(4)
