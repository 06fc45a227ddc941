"""``holdfast verify``, ``holdfast sweep`` and ``holdfast convert``."""

from __future__ import annotations

import dataclasses
import enum
import json
from enum import Enum
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast._checkpoint import is_torch_format
from holdfast._native.sweep import Leftover, SweepReport, sweep
from holdfast._native.verify import VerifyReport, verify_checkpoint
from holdfast._torch_format.file_systems import is_remote
from holdfast._torch_format.verify import verify_torch_checkpoint
from holdfast.cli.terminal import (
    counted,
    error_console,
    one_line,
    output_console,
    progress_bar,
    shown_bytes,
    shown_name,
)
from holdfast.errors import CheckpointError

VERIFY_EXAMPLES = """\b
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
        typer.echo(json.dumps(_verify_json(path, report)))
    else:
        _print_verified(output_console(), report)
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


def _verify_json(path: str, report: VerifyReport) -> dict[str, object]:
    fields = dataclasses.asdict(report)
    if not report.unchecked:
        del fields["unchecked"]
    lists = {"damaged_keys": list(report.damaged_keys), "damaged_files": list(report.damaged_files)}
    return {"path": path, "ok": report.ok, **fields, **lists}


def _print_verified(console: Console, report: VerifyReport) -> None:
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


SWEEP_EXAMPLES = """\b
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
        typer.echo(json.dumps(_sweep_json(report, delete=delete)))
    else:
        _print_swept(output_console(), report, delete=delete)
    if report.problems:
        raise typer.Exit(1)


def _sweep_json(report: SweepReport, *, delete: bool) -> dict[str, object]:
    return {
        "root": report.root,
        "deleted": delete,
        "directories": report.directories,
        "leftovers": [dataclasses.asdict(leftover) for leftover in report.leftovers],
        "removed_files": report.removed_files,
        "problems": list(report.problems),
    }


def _print_swept(console: Console, report: SweepReport, *, delete: bool) -> None:
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


CONVERT_EXAMPLES = """\b
Examples:
  holdfast convert checkpoints/step-100 model.pt --to pt
  holdfast convert model.pt checkpoints/imported --to native
  holdfast convert old-dcp-checkpoint checkpoints/imported --to native"""

# How messages of the library name what is an option here.
_OPTIONS = {
    "overwrite=True": "--overwrite",
    "allow_pickle=True": "--allow-pickle",
    "verify=False": "--no-verify",
    "max_bytes=": "--max-bytes ",
}


class TargetFormat(str, Enum):
    """What a conversion can write."""

    NATIVE = "native"
    TORCH = "torch"
    PT = "pt"


def convert_command(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="The directory of a checkpoint, or a .pt file.", show_default=False)
    ],
    target: Annotated[
        str,
        typer.Argument(metavar="DST", help="Where the result goes; new, unless with --overwrite.", show_default=False),
    ],
    to: Annotated[
        TargetFormat,
        typer.Option(
            "--to", help="native, torch (torch.distributed.checkpoint) or pt (torch.save).", show_default=False
        ),
    ],
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read and write pickled values; reading them runs code from SRC.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DST, if it is a checkpoint of the same format.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Check the digests or checksums of SRC.")] = True,
    max_bytes: Annotated[
        int | None,
        typer.Option("--max-bytes", help="The most bytes of tensors to write, where SRC is much smaller."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Write a checkpoint in another format.

    What SRC is, is found out. Tensors pass through in pieces, so memory stays small; values keep their types. DST
    appears whole or not at all. Exits with 1 when SRC is damaged or not there, or something in it cannot be kept.
    """
    # Late, because only this command needs it.
    from holdfast.interop.conversions import convert

    try:
        with progress_bar("converting") as on_progress:
            done = convert(
                source,
                target,
                to=to.value,
                allow_pickle=allow_pickle,
                overwrite=overwrite,
                verify=verify,
                max_bytes=max_bytes,
                on_progress=on_progress,
            )
    except CheckpointError as error:
        for argument, option in _OPTIONS.items():
            error.args = (error.message.replace(argument, option),)
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps({"source": source, "target": target, "to": to.value, **dataclasses.asdict(done)}))
        return
    speed = done.bytes / max(done.seconds, 1e-9) / 1e9
    held = f"{counted(done.tensors, 'tensor')}, {counted(done.values, 'value')}"
    effort = f"{shown_bytes(done.bytes)} in {done.seconds:.2f} s, {speed:.2f} GB/s"
    line = Text.assemble(("converted", "bold green"), f": {held}, {effort} -> ", (shown_name(target), "bold"))
    output_console().print(line, soft_wrap=True)
