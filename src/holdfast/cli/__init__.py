"""The command line: ``holdfast show``, ``verify``, ``convert`` and ``sweep``.

Results go to stdout, everything else to stderr. The exit code is 0 when all is well, 1 when a checkpoint is damaged or
missing, 2 when the command line is wrong. An error of the library is one line, never a traceback. Never changes a
published checkpoint, unless ``convert`` is told to replace its target.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer
import typer.core
from rich.text import Text

from holdfast._version import __version__
from holdfast.cli.commands import CONVERT_EXAMPLES as CONVERT_EXAMPLES
from holdfast.cli.commands import SWEEP_EXAMPLES as SWEEP_EXAMPLES
from holdfast.cli.commands import VERIFY_EXAMPLES as VERIFY_EXAMPLES
from holdfast.cli.commands import convert_command, sweep_command, verify_command
from holdfast.cli.show import EXAMPLES as SHOW_EXAMPLES
from holdfast.cli.show import show_command
from holdfast.cli.terminal import error_console, one_line
from holdfast.errors import CheckpointError

__all__ = ["app", "main"]

_EXAMPLES = """\b
Examples:
  holdfast show checkpoints/step-100
  holdfast verify checkpoints/step-100
  holdfast convert checkpoints/step-100 model.pt --to pt
  holdfast sweep checkpoints"""


class _ErrorsAsLines(typer.core.TyperGroup):
    """Commands whose library errors end as one line on stderr and exit code 1."""

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the command."""
        try:
            return super().invoke(*args, **kwargs)
        except CheckpointError as error:
            line = Text.assemble(("error: ", "bold red"), (one_line(error.message), "red"))
            error_console().print(line, soft_wrap=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    name="holdfast",
    cls=_ErrorsAsLines,
    epilog=_EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def holdfast(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Look at checkpoints, check that they are whole, convert them, and tidy up after saves that died."""
    _escape_what_cannot_be_printed()


def _escape_what_cannot_be_printed() -> None:
    """Make output of any key possible, whatever the encoding of the terminal or pipe."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


app.command("show", epilog=SHOW_EXAMPLES)(show_command)
app.command("verify", epilog=VERIFY_EXAMPLES)(verify_command)
app.command("convert", epilog=CONVERT_EXAMPLES)(convert_command)
app.command("sweep", epilog=SWEEP_EXAMPLES)(sweep_command)


def main() -> None:
    """Run the command line and exit with its code: the entry point of the ``holdfast`` script."""
    app(prog_name="holdfast")
