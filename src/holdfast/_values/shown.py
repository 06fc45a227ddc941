"""How things are shown to people: on one screen, in text or as a small table for notebooks. Pure.

All text in HTML is escaped, and cut where it is long.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from html import escape
from typing import Any

_MOST_SHOWN = 6
_LONGEST_SHOWN, _LONGEST_CELL = 1000, 120
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def few(items: Iterable[object], count: int, brackets: str = "()") -> str:
    """The ``count`` items, or the first few and how many more there are: for a repr that fits on a screen."""
    most = _MOST_SHOWN if count <= _MOST_SHOWN else 3
    shown = [text if len(text) <= 200 else f"{text[:200]}..." for text in map(repr, itertools.islice(items, most))]
    more = [f"... {count - most:,} more"] if count > most else []
    return f"{brackets[0]}{', '.join(shown + more)}{brackets[1]}"


def short_repr(value: Any) -> str:
    """What ``repr`` says of a dataclass, only the first few of what may be many: it fits on a screen."""
    shown = []
    for each in fields(value):
        told = getattr(value, each.name)
        if isinstance(told, tuple):
            text = few(told, len(told)) if len(told) != 1 else repr(told)
        elif isinstance(told, Mapping):
            text = few(told, len(told), "{}")
        else:
            text = repr(told)
        shown.append(f"{each.name}={text if len(text) <= _LONGEST_SHOWN else f'{text[:_LONGEST_SHOWN]}...'}")
    return f"{type(value).__name__}({', '.join(shown)})"


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


def html_table(title: str, facts: Mapping[str, str], heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """``title``, a line for each of ``facts`` that is any, and ``rows`` below a ``heading``."""
    lines = "".join(_row("td", fact, span=len(heading) - 1) for fact in facts.items() if fact[1])
    body = "".join(_row("td", row) for row in rows)
    head = _row("th", heading) if body else ""
    return f"<table><caption>{_cell(title)}</caption>{lines}{head}{body}</table>"


def _row(tag: str, cells: Sequence[str], span: int = 1) -> str:
    *first, last = cells
    style = ' style="text-align:left"'
    told = "".join(f"<{tag}{style}>{_cell(cell)}</{tag}>" for cell in first)
    return f'<tr>{told}<{tag}{style} colspan="{max(1, span)}">{_cell(last)}</{tag}></tr>'


def _cell(text: str) -> str:
    shown = text if len(text) <= _LONGEST_CELL else f"{text[:_LONGEST_CELL]}..."
    # What is no text, or would turn the direction of what follows, is shown as its code.
    return escape("".join(each if each.isprintable() else f"\\u{ord(each):04x}" for each in shown))
