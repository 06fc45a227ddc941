"""The command ``holdfast convert``."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

import holdfast
from holdfast.cli.show import as_options, counted, effort, output_console, progress_bar, shown_name

if TYPE_CHECKING:  # it imports torch, which --help does not need
    import torch

EXAMPLES = """\b
Examples:
  holdfast convert checkpoints/step-100 model.pt --to pt
  holdfast convert model.pt checkpoints/imported --to native
  holdfast convert old-dcp-checkpoint checkpoints/imported --to native
  holdfast convert checkpoints/final tuned --to hf --assets Qwen3-8B"""


class _Format(str, Enum):
    NATIVE = "native"
    TORCH = "torch"
    PT = "pt"
    HF = "hf"


def convert_command(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="What to convert; see above.", show_default=False),
    ],
    target: Annotated[
        str,
        typer.Argument(metavar="DST", help="The result; must not exist, except with --overwrite.", show_default=False),
    ],
    to: Annotated[
        _Format,
        typer.Option(
            "--to",
            help="native, torch (torch.distributed.checkpoint), pt (torch.save) or hf (a Hugging Face folder).",
            show_default=False,
        ),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="With --to hf: the floating type of all tensors, as bfloat16.", show_default=False
        ),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option("--like", help="With --to hf: a folder whose files and types are taken.", show_default=False),
    ] = None,
    assets: Annotated[
        str | None,
        typer.Option("--assets", help="With --to hf: a folder; all but its weights is copied.", show_default=False),
    ] = None,
    mapping: Annotated[
        str | None,
        typer.Option("--mapping", help="A file with a holdfast.Mapping as JSON; see above.", show_default=False),
    ] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read and write pickled values. This runs code from SRC.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DST, if it is a checkpoint of the same format.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Check the digests or checksums of SRC.")] = True,
    max_bytes: Annotated[
        int | None,
        typer.Option("--max-bytes", help="Allow DST to have so many bytes of tensors, even if SRC is much smaller."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Write a checkpoint in another format.

    SRC is a checkpoint of any format, a Hugging Face folder, or a .pt or .safetensors file; which, is found out. Copies
    tensors in pieces, so it needs little memory. Values keep their types. DST appears whole or not at all.

    A mapping says how tensors outside, in files, and inside, in a state, belong together. With --to hf it leads from
    the inside, which SRC has, to the outside; else from the outside to the inside.
    """
    form = {"dtype": dtype, "like": like, "assets": assets}
    if to is not _Format.HF and any(value is not None for value in form.values()):
        given = ", ".join(f"--{name}" for name, value in form.items() if value is not None)
        raise typer.BadParameter(f"only --to hf takes {given}", param_hint="--to")
    with as_options(), progress_bar("converting") as progress:
        done = holdfast.convert(
            source,
            target,
            to=_folder_form(form) if to is _Format.HF else to.value,
            mapping=None if mapping is None else _mapping(mapping),
            allow_pickle=allow_pickle,
            overwrite=overwrite,
            verify=verify,
            max_bytes=max_bytes,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps({"source": source, "target": target, "to": to.value, **dataclasses.asdict(done)}))
        return
    held = f"{counted(done.tensors, 'tensor')}, {counted(done.values, 'value')}"
    line = Text.assemble(("converted", "bold green"), f": {held}, {effort(done)} -> ", (shown_name(target), "bold"))
    output_console().print(line, soft_wrap=True)


def _mapping(name: str) -> holdfast.Mapping:
    try:
        return holdfast.Mapping.from_json(Path(name).read_bytes())
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{name!r} cannot be used: {error}", param_hint="--mapping") from error


def _folder_form(options: dict[str, Any]) -> holdfast.hf.FolderForm:
    from holdfast import hf  # late, because it imports torch

    return hf.FolderForm(**{**options, "dtype": _dtype(options["dtype"])})


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    found = None if name is None else getattr(torch, name, None)
    if name is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise typer.BadParameter(f"{name!r} is no floating type of torch, such as bfloat16", param_hint="--dtype")
    return found
