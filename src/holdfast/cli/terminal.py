"""How the command line writes: consoles, sizes for people, and text from checkpoints that stays text.

Keys and values come from files that may be anything. They are never taken for markup, and what a terminal would act
upon (newlines, escape sequences) is shown escaped.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def output_console() -> Console:
    """The console of results: stdout, in colour only on a terminal."""
    return Console(highlight=False, markup=False, emoji=False)


def error_console() -> Console:
    """The console of everything else: stderr."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


@contextlib.contextmanager
def progress_bar(doing: str) -> Iterator[Callable[[int, int], None] | None]:
    """What to call with the bytes that are done and all there are; None where nobody would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn(doing), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=error_console(), transient=True) as progress:
        task = progress.add_task(doing, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


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


def shown_bytes(count: int) -> str:
    """``count`` bytes in the largest binary unit that leaves at least one."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in _UNITS:
        size /= 1024
        if size < 1023.95 or unit == _UNITS[-1]:
            break
    return f"{size:.1f} {unit}"


def counted(count: int, noun: str) -> str:
    """``1 key``, ``2,000 keys``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
