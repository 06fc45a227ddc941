"""What a request asks, and how an answer is written: parameters, and JSON of numbers that JSON has no form for.

Whatever is wrong with a parameter is a ValueError. An answer is JSON, or bytes that are ready, or None: nothing new.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from fnmatch import translate
from typing import TypeVar

from holdfast._native.values import decode_value
from holdfast.errors import (
    BusyError,
    CheckpointError,
    CorruptError,
    NotFoundError,
    StorageError,
    UnsafeError,
    UnsupportedVersionError,
)

Answer = dict[str, object] | bytes | None

MOST_TEXT = 500
MOST_ROWS = 1000
_NUMBER = re.compile(r"[0-9]{1,18}")
_EXACT = 1 << 53  # JavaScript has no larger integers

Row = TypeVar("Row")


class Query:
    """The parameters of one request, each of which may come once."""

    def __init__(self, given: Mapping[str, Sequence[str]]) -> None:
        twice = [name for name, values in given.items() if len(values) > 1]
        if twice:
            raise ValueError(f"the parameter {twice[0][:40]!r} comes twice")
        self._given = {name: values[0] for name, values in given.items()}

    def check_names(self, names: Sequence[str]) -> None:
        """ValueError for a parameter that is none of ``names``."""
        for name in self._given:
            if name not in names:
                raise ValueError(f"there is no parameter {name[:40]!r} here; there are: {', '.join(names) or 'none'}")

    def text(self, name: str, default: str = "") -> str:
        return self._given.get(name, default)

    def number(self, name: str, default: int | None = None, *, most: int | None = None) -> int:
        """A whole number from 0 on; ``most`` is what a larger one is cut to."""
        if name not in self._given and default is not None:
            return default
        text = self._given.get(name, "")
        if _NUMBER.fullmatch(text) is None or not text.isascii():
            raise ValueError(f"the parameter {name!r} is a whole number, not {text[:40]!r}")
        return int(text) if most is None else min(int(text), most)

    def numbers(self, name: str) -> list[int]:
        """Whole numbers, with commas between them."""
        text = self._given.get(name, "")
        return [Query({name: [each]}).number(name) for each in text.split(",")] if text else []


def matcher(search: str) -> re.Pattern[str]:
    """What finds the keys that ``search`` means: a part of a key in any case, or, with * or ?, a pattern for all."""
    is_pattern = "*" in search or "?" in search
    return re.compile(rf"\A{translate(search)}" if is_pattern else re.escape(search), re.IGNORECASE)


def exactly(key: str) -> str:
    """A pattern that only ``key`` matches."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in key)


def page(query: Query, found: Sequence[Row], told: Callable[[Row], dict[str, object]]) -> dict[str, object]:
    """The part of ``found`` that was asked for, each row as it is ``told``."""
    first = query.number("first", 0)
    part = found[first : first + query.number("count", 200, most=MOST_ROWS)]
    return {"total": len(found), "first": first, "rows": [told(each) for each in part]}


def as_json(value: object) -> object:
    """``value`` in JSON's own forms: texts for NaN, infinities and integers beyond 2**53; pairs for complex numbers."""
    if isinstance(value, dict):
        return {str(name): as_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    if isinstance(value, complex):
        return [as_json(value.real), as_json(value.imag)]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if type(value) is int and abs(value) > _EXACT:
        return str(value)
    return value


def encoded(answer: dict[str, object]) -> bytes:
    """``answer`` as bytes of JSON, in ASCII alone: texts may have characters that no encoding has."""
    return json.dumps(as_json(answer), allow_nan=False, separators=(",", ":")).encode("ascii")


def shown(value: object) -> str:
    """The Python form of ``value``, cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python agrees to print
        text = f"<{type(value).__name__} too long to print>"
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"


def value_row(key: str, kind: str, typed: object) -> dict[str, object]:
    """A row for a value: of its typed JSON, or of what it is where ``kind`` says so."""
    if kind:
        name, _, rest = kind.partition(", ")
        return {"key": key, "kind": name, "shown": f"<{name}, {rest}>" if rest else f"<{name}>"}
    try:
        value = decode_value(typed, key=key)
    except (CheckpointError, ValueError, RecursionError) as error:
        return {"key": key, "kind": "damaged", "shown": shown(str(error))}
    return {"key": key, "kind": type(value).__name__, "shown": shown(value)}


def unix_seconds(saved_at: str | None) -> float | None:
    """A time as manifests have it, in seconds since the epoch."""
    with contextlib.suppress(ValueError):  # the 61st second of a minute
        return datetime.strptime(saved_at or "", "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc).timestamp()
    return None


def status_of(error: Exception) -> int:
    """The HTTP status that says what the caller would do about ``error``."""
    if isinstance(error, NotFoundError):
        return 404
    if isinstance(error, BusyError):
        return 503
    if isinstance(error, (CorruptError, UnsafeError, UnsupportedVersionError)):
        return 422
    if isinstance(error, StorageError):
        return 404 if error.errno == errno.ESTALE else 500
    return 400 if isinstance(error, ValueError) else 500
