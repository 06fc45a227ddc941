"""``holdfast convert``: a checkpoint in another format, without loading it."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import Annotated

import typer
from rich.text import Text

from holdfast.cli.terminal import counted, output_console, progress_bar, shown_bytes, shown_name
from holdfast.errors import CheckpointError

EXAMPLES = """\b
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
