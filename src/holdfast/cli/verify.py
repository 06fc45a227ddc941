"""``holdfast verify``: every byte of a checkpoint against its digests."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from holdfast._filesystem.remote import is_remote
from holdfast._filesystem.verify import verify_torch_checkpoint
from holdfast._native.verify import VerifyReport, verify_checkpoint
from holdfast.cli.terminal import counted, output_console, progress_bar, shown_bytes, shown_name
from holdfast.detect import is_torch_format

EXAMPLES = """\b
Examples:
  holdfast verify checkpoints/step-100
  holdfast verify checkpoints/step-100 || echo "use an older one"
  holdfast verify checkpoints/step-100 --level sizes
  holdfast verify checkpoints/step-100 --sample 5%
  holdfast verify --json checkpoints/step-100 | jq .damaged_keys"""


class Depth(str, enum.Enum):
    """The levels, as the command line offers them."""

    SIZES = "sizes"
    COVERAGE = "coverage"
    DIGESTS = "digests"


def verify_command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The directory of the checkpoint.", show_default=False)],
    level: Annotated[
        Depth,
        typer.Option(
            "--level",
            help="How closely: names and sizes of files; coverage, which reads the index too; or all digests.",
        ),
    ] = Depth.DIGESTS,
    sample: Annotated[
        str, typer.Option("--sample", metavar="PART", help="Read only a part of the data, such as 5%, chosen anew.")
    ] = "100%",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Check every byte of a checkpoint.

    Sizes, coverage, headers and all digests are checked, in parallel. Exits with 0 when it is whole. Exits with 1 when
    it is damaged or not there; the damaged keys and files are listed, and what is not listed can still be loaded.
    With --level or --sample less is checked, and the report says what was not.

    A checkpoint in torch's own format is checked as far as that goes; the report says what could not be.
    """
    part = _part(sample)
    if part < 1 and level is not Depth.DIGESTS:
        raise typer.BadParameter("a sample is of the digests; leave out --level", param_hint="--sample")
    if is_remote(path):
        raise typer.BadParameter("only files can be checked; copy the checkpoint from its URL to a directory first")
    is_torch = is_torch_format(path)
    if is_torch and (part < 1 or level is not Depth.DIGESTS):
        raise typer.BadParameter("torch's own format is checked as a whole; leave out --level and --sample")
    with progress_bar("verifying") as on_progress:
        if is_torch:
            report = verify_torch_checkpoint(path, on_progress=on_progress)
        else:
            report = verify_checkpoint(path, level=level.value, sample=part, on_progress=on_progress)
    if as_json:
        typer.echo(json.dumps(_as_json(path, report)))
    else:
        _print_report(output_console(), report)
    if not report.ok:
        raise typer.Exit(1)


def _part(text: str) -> float:
    """The part of a whole that ``text`` (5% or 0.05) says."""
    try:
        part = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        part = 0.0
    if not 0 < part <= 1:
        raise typer.BadParameter(f"{text!r} is no part of a whole, such as 5% or 0.05", param_hint="--sample")
    return part


def _as_json(path: str, report: VerifyReport) -> dict[str, object]:
    fields = dataclasses.asdict(report)
    if not report.unchecked:
        del fields["unchecked"]
    lists = {"damaged_keys": list(report.damaged_keys), "damaged_files": list(report.damaged_files)}
    return {"path": path, "ok": report.ok, **fields, **lists}


def _print_report(console: Console, report: VerifyReport) -> None:
    _print_damage(console, report)
    for line in report.unchecked:
        console.print(Text(f"not checked: {line}", "dim"), soft_wrap=True)


def _print_damage(console: Console, report: VerifyReport) -> None:
    speed = report.bytes / max(report.seconds, 1e-9) / 1e9
    effort = f"{shown_bytes(report.bytes)} in {report.seconds:.2f} s, {speed:.2f} GB/s"
    if report.ok:
        holding = f"{counted(report.keys, 'key')} in {counted(report.files, 'file')}"
        console.print(Text.assemble(("whole", "bold green"), f": {holding}, {effort}"), soft_wrap=True)
        return
    lost = f"{len(report.damaged_keys):,} of {counted(report.keys, 'key')}"
    places = f"{len(report.damaged_files):,} of {counted(report.files, 'file')}"
    console.print(Text.assemble(("damaged", "bold red"), f": {lost}, {places}; {effort}"), soft_wrap=True)
    file = None
    for damage in report.damage:
        if damage.file != file:
            file = damage.file
            console.print(Text(file), soft_wrap=True)
        what = ("the header", "italic") if damage.key is None else (shown_name(damage.key), "bold")
        where = f"  bytes {damage.span[0]} to {damage.span[1]}, {damage.problem}"
        console.print(Text.assemble("  ", what, (where, "dim")), soft_wrap=True)
