"""How the command line writes: consoles, sizes for people, and text from checkpoints that stays text.

Keys and values come from files that may be anything. They are never taken for markup, and what a terminal would act
upon (newlines, escape sequences) is shown escaped.
"""

from __future__ import annotations

from rich.console import Console

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def output_console() -> Console:
    """The console of results: stdout, in colour only on a terminal."""
    return Console(highlight=False, markup=False, emoji=False)


def error_console() -> Console:
    """The console of everything else: stderr."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


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
