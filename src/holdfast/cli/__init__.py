"""The command line: ``holdfast show``, ``view``, ``verify``, ``convert``, ``sweep``, ``run``, and those for steps.

Results go to stdout, everything else to stderr; with ``--json``, errors go to stdout too, as an object. ``_CODES`` has
the exit codes. An error of the library, or of the output, is one line, never a traceback. Never changes a published
checkpoint, unless ``convert`` is told to replace its target, or ``delete`` to delete it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.exceptions import TyperException

import holdfast
from holdfast._io import posix
from holdfast._values.shown import shown_bytes
from holdfast.cli.convert import EXAMPLES as CONVERT_EXAMPLES
from holdfast.cli.convert import convert_command
from holdfast.cli.look import add_look_commands
from holdfast.cli.show import EXAMPLES as SHOW_EXAMPLES
from holdfast.cli.show import (
    as_options,
    counted,
    effort,
    error_console,
    one_line,
    output_console,
    progress_bar,
    show_command,
    shown_name,
)
from holdfast.cli.steps import add_step_commands
from holdfast.cli.view import EXAMPLES as VIEW_EXAMPLES
from holdfast.cli.view import view_command
from holdfast.errors import CheckpointError, NotFoundError, StorageError

if TYPE_CHECKING:  # it imports torch, which --help and --version do not need
    from holdfast._native.sweep import Leftover

__all__ = ["app", "main"]

_EXAMPLES = """\b
Examples:
  holdfast show checkpoints/step-100
  holdfast verify checkpoints/step-100
  holdfast convert checkpoints/step-100 model.pt --to pt
  holdfast sweep checkpoints
  holdfast steps checkpoints"""

_CODES = """\b
Exit codes:
  0  all is well
  1  damaged, or something in it is refused; diff: not all is the same
  2  the command line is wrong
  3  there is no checkpoint
  4  no permission, or a file or the output cannot be read or written"""


def _exit_code(error: Exception) -> int:
    if isinstance(error, CheckpointError):
        return 3 if isinstance(error, NotFoundError) else 4 if isinstance(error, StorageError) else 1
    return 2 if isinstance(error, TyperException) else 4


def _error_json(error: Exception) -> dict[str, object]:
    message = error.format_message() if isinstance(error, TyperException) else getattr(error, "message", str(error))
    return {"error": {"kind": type(error).__name__, "message": message}, "exit_code": _exit_code(error)}


def _print_error(message: str) -> None:
    line = Text.assemble(("error: ", "bold red"), (one_line(message), "red"))
    with contextlib.suppress(OSError):
        error_console().print(line, soft_wrap=True)


class _ErrorsAsLines(typer.core.TyperGroup):
    """Commands whose errors end as one line on stderr, or one object on stdout, and an exit code."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        self._as_json = "--json" in args
        with self._told():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> object:
        with self._told():
            done = super().invoke(ctx)
            sys.stdout.flush()
            return done

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # others of ours are StorageErrors, so this is the output
            if not isinstance(error, BrokenPipeError):  # whoever read has seen enough, as ``| head`` does
                _print_error(f"cannot write the output: {error.strerror or error}; look at where it goes")
            with contextlib.suppress(OSError, ValueError):  # or Python would say so once more when it exits
                posix.discard(sys.stdout.fileno())
            raise typer.Exit(4) from None
        except (CheckpointError, TyperException) as error:
            if self._as_json:
                with self._told():
                    typer.echo(json.dumps(_error_json(error)))
            elif isinstance(error, CheckpointError):
                _print_error(error.message)
            else:
                raise
            raise typer.Exit(_exit_code(error)) from None


app = typer.Typer(
    name="holdfast",
    cls=_ErrorsAsLines,
    epilog=f"{_EXAMPLES}\n\n{_CODES}",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
"""The commands, as typer has them: for completion, documentation and tests."""


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"holdfast {holdfast.__version__}")
        raise typer.Exit


@app.callback()
def every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Show checkpoints, verify, convert and delete them, and remove what killed saves left behind."""
    # Output of any key is possible, whatever the encoding of the terminal or pipe.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


app.command("show", epilog=f"{SHOW_EXAMPLES}\n\n{_CODES}")(show_command)
add_look_commands(app, _CODES)
app.command("view", epilog=f"{VIEW_EXAMPLES}\n\n{_CODES}")(view_command)
add_step_commands(app, _CODES)
app.command("convert", epilog=f"{CONVERT_EXAMPLES}\n\n{_CODES}")(convert_command)


class _Level(str, Enum):
    SIZES = "sizes"
    COVERAGE = "coverage"
    DIGESTS = "digests"


_VERIFY_EXAMPLES = """\b
Examples:
  holdfast verify checkpoints/step-100
  holdfast verify checkpoints/step-100 || echo "use an older one"
  holdfast verify checkpoints/step-100 checkpoints/step-200
  holdfast verify checkpoints/step-100 --level sizes
  holdfast verify checkpoints/step-100 --sample 5%
  holdfast verify --json checkpoints/step-100 | jq .damaged_keys"""


@app.command("verify", epilog=f"{_VERIFY_EXAMPLES}\n\n{_CODES}")
def verify_command(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="The directories of checkpoints.", show_default=False)
    ],
    level: Annotated[
        _Level,
        typer.Option(
            "--level",
            help="What to check: sizes of files; coverage, which also reads the index; or digests, which reads all.",
        ),
    ] = _Level.DIGESTS,
    sample: Annotated[
        str, typer.Option("--sample", metavar="PART", help="Read only a random part of the data, such as 5%.")
    ] = "100%",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, or a list for several paths, and nothing else.")
    ] = False,
) -> None:
    """Check every byte of a checkpoint.

    Checks sizes, coverage, headers and all digests, in parallel. Lists the damaged keys and files. You can still load
    what is not listed. With --level or --sample it checks less, and says what it did not check. Of several checkpoints,
    the exit code is the highest.

    Not everything in torch's own format, or in a Hugging Face folder, can be checked; the report says what was not.
    """
    results: list[dict[str, object]] = []
    code = 0
    for path in paths:
        if len(paths) > 1 and not as_json:
            output_console().print(Text(shown_name(path), "bold"), soft_wrap=True)
        try:
            with as_options(), progress_bar("verifying") as progress:
                report = holdfast.verify(path, level=level.value, sample=_part(sample), progress=progress)
        except CheckpointError as error:
            if len(paths) == 1:
                raise
            code = max(code, _exit_code(error))
            results.append({"path": path, "ok": False, **_error_json(error)})
            if not as_json:
                _print_error(error.message)
            continue
        code = max(code, 0 if report.ok else 1)
        results.append(_verify_json(path, report))
        if not as_json:
            _print_damage(output_console(), report)
            for line in report.unchecked:
                output_console().print(Text(f"not checked: {line}", "dim"), soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(results if len(paths) > 1 else results[0]))
    if code:
        raise typer.Exit(code)


def _part(text: str) -> float:
    """The part of a whole that ``text`` (5% or 0.05) says."""
    try:
        part = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        part = 0.0
    if not 0 < part <= 1:
        raise typer.BadParameter(f"{text!r} is not a part such as 5% or 0.05", param_hint="--sample")
    return part


def _verify_json(path: str, report: holdfast.VerifyReport) -> dict[str, object]:
    fields = dataclasses.asdict(report)
    if not report.unchecked:
        del fields["unchecked"]
    lists = {"damaged_keys": list(report.damaged_keys), "damaged_files": list(report.damaged_files)}
    return {"path": path, "ok": report.ok, **fields, **lists}


def _print_damage(console: Console, report: holdfast.VerifyReport) -> None:
    took = effort(report)
    if report.ok:
        holding = f"{counted(report.keys, 'key')} in {counted(report.files, 'file')}"
        console.print(Text.assemble(("whole", "bold green"), f": {holding}, {took}"), soft_wrap=True)
        return
    lost = f"{len(report.damaged_keys):,} of {counted(report.keys, 'key')}"
    places = f"{len(report.damaged_files):,} of {counted(report.files, 'file')}"
    console.print(Text.assemble(("damaged", "bold red"), f": {lost}, {places}; {took}"), soft_wrap=True)
    file = None
    for damage in report.damage:
        if damage.file != file:
            file = damage.file
            console.print(Text(file), soft_wrap=True)
        what = ("the header", "italic") if damage.key is None else (shown_name(damage.key), "bold")
        where = f"  bytes {damage.span[0]} to {damage.span[1]}, {damage.problem}"
        console.print(Text.assemble("  ", what, (where, "dim")), soft_wrap=True)


# --- sweep -----------------------------------------------------------------------------------------------------------

_SWEEP_EXAMPLES = """\b
Examples:
  holdfast sweep checkpoints
  holdfast sweep checkpoints --delete
  holdfast sweep /nfs/checkpoints --delete --attempt 3f0a9c1d22e4b567
  holdfast sweep --json checkpoints | jq '.leftovers[] | select(.verdict == "dead") | .bytes'"""

_STYLES = {"dead": "yellow", "living": "green", "unknown": "red"}


@app.command("sweep", epilog=f"{_SWEEP_EXAMPLES}\n\n{_CODES}")
def sweep_command(
    root: Annotated[
        str,
        typer.Argument(metavar="ROOT", help="A checkpoint, or a directory that holds some.", show_default=False),
    ],
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove files whose writer is proven dead. Without it, only list them.")
    ] = False,
    attempt: Annotated[
        list[str] | None,
        typer.Option(
            "--attempt",
            metavar="ID",
            help="Treat this attempt as dead if locks cannot show it, as on shared file systems. May be repeated.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """List or remove the files that killed saves left behind.

    Looks in ROOT and below. Removes a file only with --delete, and only if it has a name of ours, no published
    checkpoint needs it, and its writer is proven dead: a living writer holds locks, which the kernel drops when it
    dies. Does not follow links.
    """
    with as_options():
        report = holdfast.sweep(root, delete=delete, attempts=attempt or ())
    if as_json:
        fields = {"deleted": delete, **dataclasses.asdict(report), "removed_files": report.removed_files}
        typer.echo(json.dumps(fields))
    else:
        _print_swept(output_console(), report, delete=delete)
    if report.problems:
        raise typer.Exit(4)


def _print_swept(console: Console, report: holdfast.SweepReport, *, delete: bool) -> None:
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


# --- run -------------------------------------------------------------------------------------------------------------

_RUN_EXAMPLES = """\b
Examples:
  holdfast run train.py --steps 1000
  torchrun --nproc-per-node 8 -m holdfast run train.py --steps 1000
  HOLDFAST_IN_TORCH=functions torchrun --nproc-per-node 8 -m holdfast run -m package.train"""


@app.command("run", epilog=_RUN_EXAMPLES, context_settings={"ignore_unknown_options": True})
def run_command(
    script: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="A Python script, or -m MODULE.", show_default=False)
    ],
) -> None:
    """Run a script whose checkpoints torch.distributed.checkpoint writes; they become native.

    The script stays as it is. HOLDFAST_IN_TORCH chooses options of holdfast.interop.use_in_torch, with commas between
    them: functions, cast, allow_pickle.
    """
    _run(script)


def _run(arguments: list[str]) -> None:
    # Late, because it imports torch's checkpoint classes, which no other command needs.
    from holdfast.interop.replacing import run_script

    run_script(arguments)


def main() -> None:
    """Run the command line and exit with its code: the entry point of the ``holdfast`` script."""
    if sys.argv[1:2] == ["run"] and sys.argv[2:3] not in ([], ["-h"], ["--help"]):
        _run(sys.argv[2:])  # whose errors are to be shown as Python shows them
    else:
        app(prog_name="holdfast")
