"""How the command line writes, and ``holdfast show``: what a checkpoint holds, as a tree or as JSON.

Keys and values come from files that may be anything. They are never taken for markup, and what a terminal would act
upon (newlines, escape sequences) is shown escaped. In the tree, positions in lists read ``[0]``, in tuples ``(0)``, and
keys of dicts that are no str as Python writes them. A name with dots in it, as state_dicts have them, is a branch for
each of its parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from holdfast._values.shown import shown_bytes
from holdfast.errors import CheckpointError, NotFoundError
from holdfast.events.progress import OnBytes, following_bytes

if TYPE_CHECKING:  # they import torch, which --help does not need
    from holdfast import Conversion, VerifyReport
    from holdfast.cli.leaves import Contents, Leaf, ListedCheckpoint, StoredChunk, Totals
    from holdfast.metadata import Path, PathElement


def output_console() -> Console:
    """The console of results: stdout, in colour only on a terminal."""
    return _OutputConsole(highlight=False, markup=False, emoji=False)


class _OutputConsole(Console):
    def on_broken_pipe(self) -> None:
        """Let the error be told, as that of any other output that cannot be written."""
        raise  # what is being handled where this is called


def error_console() -> Console:
    """The console of everything else: stderr."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def progress_bar(doing: str) -> contextlib.AbstractContextManager[OnBytes]:
    """What to call with the bytes that are done and all there are; it shows a bar where somebody would see it."""
    return following_bytes(sys.stderr.isatty(), doing, is_transient=True)


# How messages of the library name what is an option here.
_OPTIONS = {
    "overwrite=True": "--overwrite",
    "force=True": "--force",
    "allow_pickle=True": "--allow-pickle",
    "verify=False": "--no-verify",
    "max_bytes=": "--max-bytes ",
    "the level": "--level",
    "level and sample": "--level and --sample",
}


@contextlib.contextmanager
def as_options() -> Iterator[None]:
    """Have errors name options of the command line; what is wrong with the arguments ends with exit code 2."""
    try:
        yield
    except (CheckpointError, ValueError) as error:
        message = str(error)
        for argument, option in _OPTIONS.items():
            message = message.replace(argument, option)
        if not isinstance(error, CheckpointError):
            raise typer.BadParameter(message) from None
        error.args = (message,)
        raise


def one_line(text: str) -> str:
    """``text`` with everything escaped that is not printable."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def shown_name(name: str) -> str:
    """``name`` as it is, or as a quoted Python string where bare it could not be told apart or would not print."""
    return name if name.isprintable() and name.strip() == name != "" else repr(name)


def shown_value(value: object, *, most: int) -> str:
    """The Python form of ``value``, cut to ``most`` characters."""
    try:
        text = one_line(repr(value))
    except ValueError:  # an integer of more digits than Python agrees to print
        text = f"<{type(value).__name__} too long to print>"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def effort(done: VerifyReport | Conversion) -> str:
    """How much a command has read or written, and how fast."""
    speed = done.bytes / max(done.seconds, 1e-9) / 1e9
    return f"{shown_bytes(done.bytes)} in {done.seconds:.2f} s, {speed:.2f} GB/s"


def counted(count: int, noun: str) -> str:
    """``1 key``, ``2,000 keys``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


# --- show ------------------------------------------------------------------------------------------------------------

_LOOKS_LIKE_A_NUMBER = re.compile(r"-?[0-9]+")
_LONGEST_KEY = 60


# Branches: to a child, to the last one, past a child, past the last one.
_DRAWN = "├─ ", "└─ ", "│  ", "   "
_ASCII = "|- ", "`- ", "|  ", "   "


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: ``guide`` draws the branches, ``under`` those of lines that belong below it.

    ``leaf`` is None for a container; ``bytes`` is what it holds, tied tensors counted where their data is. ``hidden``
    counts the leaves below it that are not shown.
    """

    guide: str
    under: str
    label: str
    leaf: Leaf | None
    bytes: int
    hidden: int = 0


class _NamePart(str):
    """A part of a name between dots."""

    __slots__ = ()


@dataclass(slots=True)
class _Node:
    label: str
    leaf: Leaf | None = None
    bytes: int = 0
    leaves: int = 0
    children: dict[tuple[type, str], _Node] = field(default_factory=dict)


def tree_lines(leaves: Iterable[Leaf], *, ascii_only: bool = False, depth: int = sys.maxsize) -> Iterator[Line]:
    """The lines of the tree of ``leaves``, parents before their children; of so many levels."""
    root = _Node("")
    for leaf in leaves:
        node = root
        for element in _parts(leaf.path):
            # By type too: the dict keys 0 and "0" are two branches.
            place = type(element), str(element)
            if place not in node.children:
                node.children[place] = _Node(_label(element))
            node = node.children[place]
            node.bytes += leaf.bytes if leaf.alias_of is None else 0
            node.leaves += 1
        node.leaf = leaf
    yield from _lines(root, "", _ASCII if ascii_only else _DRAWN, depth)


def _parts(path: Path) -> Iterator[PathElement]:
    for element in path:
        parts = element.split(".") if type(element) is str else []
        if len(parts) > 1 and all(part.isprintable() and part.strip() == part != "" for part in parts):
            yield from map(_NamePart, parts)
        else:
            yield element


def _label(element: PathElement) -> str:
    from holdfast._state.nested import TupleIndex, TypedKey

    if isinstance(element, TypedKey):
        return shown_value(element.value, most=_LONGEST_KEY)
    if isinstance(element, _NamePart):
        return str(element)
    if isinstance(element, str):
        return repr(element) if _LOOKS_LIKE_A_NUMBER.fullmatch(element) else shown_name(element)
    return f"({int(element)})" if isinstance(element, TupleIndex) else f"[{element}]"


def _lines(node: _Node, indent: str, guides: tuple[str, str, str, str], depth: int) -> Iterator[Line]:
    last = len(node.children) - 1
    for number, child in enumerate(node.children.values()):
        guide, under = guides[number == last], indent + guides[2 + (number == last)]
        hidden = child.leaves if depth <= 1 and child.children else 0
        line = Line(guide=indent + guide, under=under, label=child.label, leaf=child.leaf, bytes=child.bytes)
        yield dataclasses.replace(line, hidden=hidden) if hidden else line
        if depth > 1:
            yield from _lines(child, under, guides, depth - 1)


EXAMPLES = """\b
Examples:
  holdfast show checkpoints/step-100
  holdfast show checkpoints/step-100 'model.layers.0.*'
  holdfast show checkpoints/step-100 '*.weight' --chunks
  holdfast show checkpoints/step-100 --depth 2
  holdfast show checkpoints
  holdfast show --json checkpoints/step-100 | jq '.keys | keys'"""

_WIDEST_LABEL = 40
_WIDEST_SHAPE = 18
_LONGEST_VALUE = 40

_DIM = Style(dim=True)
_CONTAINER = Style(bold=True, color="blue")
_VALUE = Style(color="magenta")
_DTYPE = Style(color="cyan")
_BYTES = Style(color="green")
_TIED = Style(color="yellow")


def show_command(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="The directory of the checkpoint, or its URL.", show_default=False)
    ],
    pattern: Annotated[
        str | None,
        typer.Argument(
            metavar="PATTERN",
            help="Show only keys that match: * any text, ? any character, [ab] a or b.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    chunks: Annotated[bool, typer.Option("--chunks", help="Show where each chunk is stored.")] = False,
    depth: Annotated[
        int, typer.Option("--depth", min=1, metavar="N", help="Show so many levels of the tree.", show_default=False)
    ] = sys.maxsize,
) -> None:
    """Show what a checkpoint holds.

    Prints a tree of keys with dtype, shape, bytes and chunks, then totals. Tied weights are stored once; the others
    show "= key". Reads only the manifest and the index, or the metadata of a checkpoint in torch's own format. Of a
    directory of checkpoints, lists those: whether all files are there, bytes, and when they were saved.
    """
    from holdfast.cli.leaves import contents_of, steps_below

    try:
        with as_options():
            contents = contents_of(path, pattern)
    except NotFoundError:
        steps = steps_below(path)
        if not steps:
            raise
        _show_steps(path, steps, as_json=as_json)
        return
    if as_json:
        typer.echo(json.dumps(_as_json(path, contents, with_chunks=chunks)))
        return
    console = output_console()
    console.print(Text(shown_name(path), "bold"), soft_wrap=True)
    _print_tree(console, contents, with_chunks=chunks, depth=depth)
    _print_totals(console, contents, pattern)


def _show_steps(path: str, steps: list[ListedCheckpoint], *, as_json: bool) -> None:
    if as_json:
        listed = [{**dataclasses.asdict(step), "whole": step.problem is None} for step in steps]
        typer.echo(json.dumps({"path": path, "checkpoints": listed}))
        return
    console = output_console()
    console.print(Text(shown_name(path), "bold"), soft_wrap=True)
    width = max(cell_len(shown_name(step.name)) for step in steps)
    for step in steps:
        name = shown_name(step.name)
        state = ("whole", "green") if step.problem is None else (one_line(step.problem), "red")
        size = f"{shown_bytes(step.bytes):>10}  {step.saved_at or '-':<20}  "
        line = Text.assemble(name, " " * (width - cell_len(name) + 2), (size, _DIM), state)
        console.print(line, soft_wrap=True)


def _as_json(path: str, contents: Contents, *, with_chunks: bool) -> dict[str, object]:
    totals = dataclasses.asdict(contents.totals)
    fields: dict[str, object] = {
        "path": path,
        "keys": {leaf.key: _leaf_as_json(contents, leaf, with_chunks=with_chunks) for leaf in contents.leaves},
        "totals": {name: value for name, value in totals.items() if value is not None},
    }
    return fields if contents.user_metadata is None else {**fields, "user_metadata": contents.user_metadata}


def _leaf_as_json(contents: Contents, leaf: Leaf, *, with_chunks: bool) -> dict[str, object]:
    if leaf.kind == "value":
        return {"kind": "value", "value": leaf.value}
    if leaf.kind == "object":
        return {"kind": "object", "bytes": leaf.bytes}
    fields: dict[str, object] = {
        "kind": leaf.kind,
        "dtype": leaf.dtype,
        "shape": list(leaf.shape),
        "bytes": leaf.bytes,
        "chunks": len(leaf.rows),
        "alias_of": leaf.alias_of,
    }
    if with_chunks:
        fields["stored"] = [dataclasses.asdict(chunk) for chunk in contents.chunks_of(leaf)]
    return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class _Widths:
    """How wide the columns are; a cell that is wider pushes the rest of its line."""

    label: int
    dtype: int
    shape: int
    chunks: int


def _print_tree(console: Console, contents: Contents, *, with_chunks: bool, depth: int) -> None:
    lines = list(tree_lines(contents.leaves, ascii_only=not console.encoding.startswith("utf"), depth=depth))
    widths = _widths(lines)
    # Ready segments in one print, because laying out a Text per line takes a second for a large model.
    segments: list[Segment] = []
    for line in lines:
        segments += _line_segments(line, widths)
        segments.append(Segment.line())
        if with_chunks and line.leaf is not None and line.leaf.alias_of is None:
            for chunk in contents.chunks_of(line.leaf):
                segments += [Segment(_chunk_line(line, chunk), _DIM), Segment.line()]
    console.print(Segments(segments), soft_wrap=True, end="")


def _widths(lines: list[Line]) -> _Widths:
    stored = [line.leaf for line in lines if line.leaf is not None and line.leaf.kind not in ("value", "object")]
    return _Widths(
        label=min(max((cell_len(line.guide) + cell_len(line.label) for line in lines), default=0), _WIDEST_LABEL),
        dtype=max((len(_type_name(leaf)) for leaf in stored), default=0),
        shape=min(max((len(str(list(leaf.shape))) for leaf in stored), default=0), _WIDEST_SHAPE),
        chunks=max((len(counted(len(leaf.rows), "chunk")) for leaf in stored), default=0),
    )


def _type_name(leaf: Leaf) -> str:
    """The dtype, or the kind of what is only stored as numbers."""
    return leaf.dtype if leaf.kind in ("tensor", "numpy") else leaf.kind


def _line_segments(line: Line, widths: _Widths) -> list[Segment]:
    leaf = line.leaf
    padding = " " * max(2, widths.label - cell_len(line.guide) - cell_len(line.label) + 2)
    start = [Segment(line.guide, _DIM), Segment(line.label, _CONTAINER if leaf is None else None)]
    hidden = f"  {counted(line.hidden, 'key')}" if line.hidden else ""
    if leaf is None and not line.bytes:
        return [*start, Segment(hidden, _DIM)] if hidden else start
    if leaf is None:
        gap = " " * (widths.dtype + widths.shape + 4)
        return [*start, Segment(f"{padding}{gap}{shown_bytes(line.bytes):>10}{hidden}", _DIM)]
    start.append(Segment(padding))
    if leaf.kind == "value":
        text = shown_value(_decoded(leaf.value, leaf.key), most=_LONGEST_VALUE)
        return [*start, Segment(text, _VALUE)]
    if leaf.kind == "object":
        gap = " " * (widths.dtype - len(leaf.kind) + widths.shape + 4)
        return [*start, Segment(leaf.kind, _VALUE), Segment(f"{gap}{shown_bytes(leaf.bytes):>10}", _BYTES)]
    start.append(Segment(f"{_type_name(leaf):<{widths.dtype}}  ", _DTYPE))
    start.append(Segment(f"{list(leaf.shape)!s:<{widths.shape}}  "))
    if leaf.alias_of is not None:
        return [*start, Segment(f"= {shown_name(leaf.alias_of)}", _TIED)]
    chunks = counted(len(leaf.rows), "chunk")
    return [*start, Segment(f"{shown_bytes(leaf.bytes):>10}", _BYTES), Segment(f"  {chunks:>{widths.chunks}}", _DIM)]


def _decoded(json: object, key: str) -> object:
    from holdfast._native.values import decode_value

    return decode_value(json, key=key)


def _chunk_line(line: Line, chunk: StoredChunk) -> str:
    box = ", ".join(f"{low}:{low + length}" for low, length in zip(chunk.lo, chunk.length, strict=True))
    return f"{line.under}  [{box}] {shown_bytes(chunk.bytes)}, {chunk.file} at {chunk.offset}"


def _print_totals(console: Console, contents: Contents, pattern: str | None) -> None:
    totals = contents.totals
    if pattern is not None:
        keys = counted(totals.tensors + totals.values, "key")
        shown = f"{len(contents.leaves):,} of {keys} shown: those that match {shown_name(pattern)}"
        console.print(Text(shown), soft_wrap=True)
    for text in _totals_lines(totals):
        console.print(Text(text), soft_wrap=True)
    if contents.user_metadata is None:
        return
    user_metadata = _decoded(contents.user_metadata, "user_metadata")
    if user_metadata:
        console.print(Text(f"user metadata {shown_value(user_metadata, most=2 * _LONGEST_VALUE)}"), soft_wrap=True)


def _totals_lines(totals: Totals) -> list[str]:
    tied = f" ({totals.tied:,} tied)" if totals.tied else ""
    held = f"{counted(totals.tensors, 'tensor')}{tied}, {counted(totals.values, 'value')}"
    lines = [f"{held}, {shown_bytes(totals.bytes)} on disk in {counted(totals.files, 'file')}"]
    if str(totals.format_version).startswith("safetensors"):
        return [*lines, f"a Hugging Face folder: {totals.format_version}"]
    if totals.holdfast is None or totals.torch is None:
        attempt = "" if totals.attempt is None else f", save id {one_line(totals.attempt)}"
        return [*lines, f"in the format of torch.distributed.checkpoint{attempt}"]
    return [
        *lines,
        f"written by holdfast {one_line(totals.holdfast)} / torch {one_line(totals.torch)}",
        f"world size {totals.world_size}, attempt {totals.attempt}"
        + (f", saved at {totals.saved_at}" if totals.saved_at else ""),
    ]
