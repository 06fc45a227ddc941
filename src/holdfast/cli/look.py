"""The commands ``holdfast diff`` and ``holdfast stats``: where checkpoints differ, and the numbers of their tensors."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.cells import cell_len
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

import holdfast
from holdfast._values.shown import shown_bytes
from holdfast.cli.show import as_options, counted, output_console, progress_bar, shown_name, shown_value

if TYPE_CHECKING:  # they import torch, which --help does not need
    from holdfast import Diff, ElementsDiff, KeyDiff, StoredAs, TensorStatistics

_EXAMPLES = {
    "diff": (
        "holdfast diff runs/a/step-100 runs/a/step-200",
        "holdfast diff runs/a/step-100 my-model --values",
        "holdfast diff checkpoints/a checkpoints/b 'model.*'",
        "holdfast diff --json checkpoints/a checkpoints/b | jq .same",
    ),
    "stats": (
        "holdfast stats checkpoints/step-100",
        "holdfast stats checkpoints/step-100 'model.layers.0.*' --exact",
        "holdfast stats --json checkpoints/step-100 | jq '.tensors[0].norm'",
    ),
}
_STYLES = {"added": "green", "removed": "red", "reshaped": "magenta", "retyped": "magenta", "changed": "yellow"}
_WIDEST = 60
_SAMPLE = 16  # blocks of each tensor
_LONGEST_VALUE = 40
_DERIVED = "is_exact", "mean", "rms", "std", "norm"

Pattern = Annotated[
    str | None,
    typer.Argument(
        metavar="PATTERN",
        help="Only keys that match: * any text, ? any character, [ab] a or b.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def add_look_commands(app: typer.Typer, codes: str) -> None:
    """Add these commands to ``app``. ``codes`` is the help on exit codes."""
    for function in (diff, stats):
        examples = "\n".join(f"  {example}" for example in _EXAMPLES[function.__name__])
        app.command(function.__name__, epilog=f"\b\nExamples:\n{examples}\n\n{codes}")(function)


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, of any format, or its URL.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    pattern: Pattern = None,
    values: Annotated[
        bool, typer.Option("--values", help="Read what digests do not show to be the same; tell how far it differs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show where two checkpoints differ.

    Formats and shardings may differ too. Tensors in the same chunks are compared by their digests, without reading
    data; others with --values only, and are listed as not compared without it. Exit code 0 says that all was compared
    and is the same.
    """
    with as_options(), progress_bar("comparing") as progress:
        found = holdfast.diff(a, b, keys=pattern, values=values, progress=progress)
    if as_json:
        keys = [dataclasses.asdict(each) for each in found.keys.values()]
        fields = {"a": a, "b": b, "same": found.same, "keys": keys, "data_bytes_read": found.data_bytes_read}
        typer.echo(json.dumps(_as_json(fields)))
    else:
        _print_diff(found, with_values=values)
    if not found.same:
        raise typer.Exit(1)


def stats(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A checkpoint, of any format, or its URL.", show_default=False)
    ],
    pattern: Pattern = None,
    exact: Annotated[bool, typer.Option("--exact", help="Look at every element, not at a sample.")] = False,
    read: Annotated[bool, typer.Option("--read", help="Look at the data even if the save kept its numbers.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the numbers of tensors: norm, mean, deviation, range, zeros, what is not finite.

    If the save kept them (statistics=True), these are shown: they are exact, and no data is read. Else looks at 16
    blocks of each tensor, spread over it, and says how much that is; the norm is what it would be if the rest were like
    it. With --exact, reads everything.
    """
    with as_options(), progress_bar("statistics") as progress:
        sample = None if exact else _SAMPLE
        found = holdfast.statistics(path, keys=pattern, sample=sample, stored=not read, progress=progress)
    tensors = list(found.tensors.values())
    if as_json:
        told = [{**dataclasses.asdict(each), **{name: getattr(each, name) for name in _DERIVED}} for each in tensors]
        typer.echo(json.dumps(_as_json({"path": path, "tensors": told, "bytes_read": found.bytes_read})))
        return
    console = output_console()
    heading = ("key", "dtype", "norm", "mean", "std", "min", "max", "zeros", "nan", "inf", "looked at")
    styles = ["dim", *("red" if each.nan or each.inf else "" for each in tensors)]
    console.print(Segments(_table([heading, *map(_row, tensors)], styles)), soft_wrap=True, end="")
    looked = "all" if all(each.is_exact for each in tensors) else "a sample"
    odd = f"{len(found.non_finite_keys):,} with NaN or infinity"
    by_save = sum(each.source == "save" for each in tensors)
    source = f" ({'all' if by_save == len(tensors) else f'{by_save:,} of them'} kept by the save)" if by_save else ""
    said = f"{counted(len(tensors), 'tensor')}, {odd}; looked at {looked}{source}"
    console.print(Text(f"{said}, {shown_bytes(found.bytes_read)} read"), soft_wrap=True)


def _as_json(value: object) -> object:
    """``value`` with texts for what JSON has no numbers for, and pairs for complex numbers."""
    if isinstance(value, dict):
        return {name: _as_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(each) for each in value]
    if isinstance(value, complex):
        return [_as_json(value.real), _as_json(value.imag)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _row(tensor: TensorStatistics) -> tuple[str, ...]:
    numbers = (tensor.norm, tensor.mean, tensor.std, tensor.min, tensor.max)
    part = tensor.looked_at / tensor.elements if tensor.elements else 1.0
    return (
        shown_name(tensor.key),
        tensor.dtype,
        *("-" if number is None else f"{number:.4g}" for number in numbers),
        *(f"{count:,}" for count in (tensor.zeros, tensor.nan, tensor.inf)),
        "all" if tensor.is_exact else f"{part:.2%}" if part else "no numbers",
    )


def _table(rows: Sequence[Sequence[str]], styles: Sequence[str]) -> Iterable[Segment]:
    """The rows as lines, names to the left and numbers to the right: ready segments, because there may be many."""
    # A longer key, which anybody may have written, pushes its own line only.
    widths = [min(max(map(cell_len, column)), _WIDEST) for column in zip(*rows, strict=True)]
    for row, style in zip(rows, styles, strict=True):
        rooms = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [cell + room if at < 2 else room + cell for at, (cell, room) in enumerate(zip(row, rooms, strict=True))]
        yield Segment("  ".join(cells), Style.parse(style))
        yield Segment.line()


def _print_diff(found: Diff, *, with_values: bool) -> None:
    console = output_console()
    segments: list[Segment] = []
    for each in found.keys.values():
        if each.status == "unchanged":
            continue
        style = Style.parse(_STYLES.get(each.status, "dim"))
        segments += [Segment(f"{each.status:<12}  ", style), Segment(shown_name(each.key)), Segment(_told(each))]
        segments.append(Segment.line())
    console.print(Segments(segments), soft_wrap=True, end="")
    counts = ", ".join(f"{count:,} {status}" for status, count in found.counts.items())
    said = f"{counted(len(found.keys), 'key')}: {counts or 'none'}"
    console.print(Text(f"{said}; {shown_bytes(found.data_bytes_read)} of data read"), soft_wrap=True)
    if not with_values and any(known.a and known.a.kind != "value" for known in found.of("not compared")):
        console.print(Text("--values reads and compares tensors that are not compared", "dim"), soft_wrap=True)


def _told(known: KeyDiff) -> str:
    """What is to be said of a key beside its status."""
    one, other = (None if each is None else _described(each) for each in (known.a, known.b))
    said = [one or other or ""] if one == other or one is None or other is None else [f"{one} → {other}"]
    if known.changed_blocks:
        said.append(f"{known.changed_blocks:,} of {counted(known.blocks, 'block')}")
    if known.elements is not None:
        said.append(_distance(known.elements))
    if known.why:
        said.append(known.why)
    return "  " + "; ".join(said)


def _described(stored: StoredAs) -> str:
    if stored.kind != "value":
        dtype = stored.dtype if stored.kind == "tensor" else f"{stored.kind} {stored.dtype}"
        return f"{dtype} {list(stored.shape)}"
    if stored.value is None:
        return f"a value of {shown_bytes(stored.bytes)}" if stored.bytes else "a value"
    from holdfast._native.values import decode_value

    return shown_value(decode_value(json.loads(stored.value), key="the value"), most=_LONGEST_VALUE)


def _distance(elements: ElementsDiff) -> str:
    said = [f"{elements.differing:,} of {counted(elements.elements, 'element')}"]
    if elements.first_index is not None:
        said.append(f"first at {list(elements.first_index)}")
    measures = (("relative L2", elements.relative_l2), ("max", elements.max_abs), ("cosine", elements.cosine))
    said += [f"{name} {number:.6g}" for name, number in measures if number is not None]
    if elements.unmeasured:
        said.append(f"NaN {elements.nan_a:,} → {elements.nan_b:,}, {elements.unmeasured:,} not measured")
    return ", ".join(said)
