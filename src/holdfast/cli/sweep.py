"""``holdfast sweep``: what saves that died left behind, listed, and removed on demand."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast._filesystem.remote import is_remote
from holdfast._native.sweep import Leftover, SweepReport, sweep
from holdfast.cli.terminal import counted, error_console, one_line, output_console, shown_bytes, shown_name

EXAMPLES = """\b
Examples:
  holdfast sweep checkpoints
  holdfast sweep checkpoints --delete
  holdfast sweep /nfs/checkpoints --delete --attempt 3f0a9c1d22e4b567
  holdfast sweep --json checkpoints | jq '.leftovers[] | select(.verdict == "dead") | .bytes'"""

_STYLES = {"dead": "yellow", "living": "green", "unknown": "red"}


def sweep_command(
    root: Annotated[
        str,
        typer.Argument(metavar="ROOT", help="A checkpoint, or a directory with checkpoints below.", show_default=False),
    ],
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove what is proven dead; without it, only list.")
    ] = False,
    attempt: Annotated[
        list[str] | None,
        typer.Option(
            "--attempt",
            metavar="ID",
            help="Take this attempt for dead where locks cannot tell, as on shared file systems. May be repeated.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """List what saves that died left in ROOT and below, and remove it with --delete.

    Only files named like ours that no published checkpoint needs and whose writer is proven dead are removed: a living
    writer holds locks, which the kernel drops when it dies. Links are not followed. Exits with 0, or with 1 when ROOT
    is missing or something could not be looked at or removed.
    """
    if is_remote(root):
        raise typer.BadParameter("only directories can be swept; at a URL nothing tells a dead save from a living one")
    report = sweep(root, delete=delete, attempts=attempt or ())
    if as_json:
        typer.echo(json.dumps(_as_json(report, delete=delete)))
    else:
        _print_report(output_console(), report, delete=delete)
    if report.problems:
        raise typer.Exit(1)


def _as_json(report: SweepReport, *, delete: bool) -> dict[str, object]:
    return {
        "root": report.root,
        "deleted": delete,
        "directories": report.directories,
        "leftovers": [dataclasses.asdict(leftover) for leftover in report.leftovers],
        "removed_files": report.removed_files,
        "problems": list(report.problems),
    }


def _print_report(console: Console, report: SweepReport, *, delete: bool) -> None:
    if report.leftovers:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("directory", "attempt", "files", "bytes", "verdict", "why"):
            table.add_column(heading, justify="right" if heading in ("files", "bytes") else "left", overflow="fold")
        for leftover in report.leftovers:
            table.add_row(*_row(leftover))
        console.print(table)
    for problem in report.problems:
        error_console().print(Text.assemble(("problem: ", "bold red"), one_line(problem)), soft_wrap=True)
    dead = report.dead
    files, size = sum(len(each.files) for each in dead), shown_bytes(sum(each.bytes for each in dead))
    looked = "in 1 directory" if report.directories == 1 else f"in {report.directories:,} directories"
    if delete:
        console.print(f"removed {counted(report.removed_files, 'file')} {looked}", soft_wrap=True)
    elif dead:
        console.print(f"{counted(files, 'dead file')}, {size}, {looked}; --delete removes them", soft_wrap=True)
    else:
        console.print(f"nothing dead {looked}", soft_wrap=True)


def _row(leftover: Leftover) -> list[Text]:
    verdict = "removed" if leftover.removed == leftover.files else leftover.verdict
    return [
        Text(shown_name(leftover.directory)),
        Text(leftover.attempt),
        Text(f"{len(leftover.files):,}"),
        Text(shown_bytes(leftover.bytes)),
        Text(verdict, _STYLES[leftover.verdict]),
        Text(one_line(leftover.reason), "dim"),
    ]
