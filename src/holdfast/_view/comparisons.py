"""Answers about two checkpoints: where they differ, by digests; and how far the elements of a key do."""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import get_args

from holdfast._look.diff import Diff, KeyDiff, Status, StoredAs, diff
from holdfast._view.answers import Query, exactly, matcher, page, value_row
from holdfast._view.sources import Sources
from holdfast._view.tables import Table, give_memory_back
from holdfast.errors import InvalidStateError, NotFoundError
from holdfast.events.progress import OnBytes

_MOST_SERIES = 50
_NONE = dict.fromkeys(("elements", "differing", "first_index", "max_abs", "relative_l2", "cosine"))


class Comparisons:
    """Diffs of the checkpoints of ``sources``; the last one is remembered, because its rows are asked for by pages."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._lock = threading.Lock()
        self._last: tuple[tuple[Table, Table], Diff, list[KeyDiff]] | None = None

    def _diff(self, a: int, b: int) -> tuple[tuple[Table, Table], Diff, list[KeyDiff]]:
        with self._lock:
            tables = self._sources.table(a), self._sources.table(b)
            if self._last is None or self._last[0] != tables:
                self._last = None  # before there are two of them
                found = diff(tables[0].path, tables[1].path)
                self._last = tables, found, list(found.keys.values())
                del found
                give_memory_back()
            return self._last

    def rows(self, query: Query) -> dict[str, object]:
        a, b = query.number("a"), query.number("b")
        wanted = set(filter(None, query.text("status").split(",")))
        unknown = wanted - set(get_args(Status))
        if unknown:
            raise ValueError(f"status is some of {', '.join(get_args(Status))}, not {min(unknown)[:40]!r}")
        tables, found, keys = self._diff(a, b)
        matches = matcher(query.text("search")).search
        rows = [row for row, each in enumerate(keys) if (not wanted or each.status in wanted) and matches(each.key)]
        return {
            "a": a,
            "b": b,
            "same": found.same,
            "counts": found.counts,
            "data_bytes_read": found.data_bytes_read,
            **page(query, rows, lambda row: _row(row, keys[row], tables)),
        }

    def elements(self, query: Query, progress: OnBytes) -> dict[str, object]:
        """How far one row differs, by its elements."""
        tables, _, keys = self._diff(query.number("a"), query.number("b"))
        row = query.number("row")
        if row >= len(keys):
            raise NotFoundError(f"there is no row {row}; there are {len(keys):,}")
        key = keys[row].key
        one, other = (table.rows.get(key) for table in tables)
        if one is None or other is None:
            raise InvalidStateError(f"{key[:200]!r} is not a tensor in both, so its elements cannot be compared")
        with tables[0].opened(one) as a, tables[1].opened(other) as b:
            known = diff(a, b, keys=exactly(key), values=True, progress=progress).keys[key]
        far = _NONE if known.elements is None else dataclasses.asdict(known.elements)
        return {"row": row, "key": key, "status": known.status, **far}


def _row(row: int, known: KeyDiff, tables: tuple[Table, Table]) -> dict[str, object]:
    both = (known.a, tables[0]), (known.b, tables[1])
    a, b = (None if stored is None else _stored(known.key, stored, table) for stored, table in both)
    fields = {name: getattr(known, name) for name in ("key", "status", "by", "why", "blocks", "changed_blocks")}
    return {"row": row, **fields, "a": a, "b": b}


def _stored(key: str, stored: StoredAs, table: Table) -> dict[str, object]:
    fields = {name: getattr(stored, name) for name in ("kind", "dtype", "shape", "bytes")}
    text = None if stored.value is None else value_row(key, "", json.loads(stored.value))["shown"]
    return {**fields, "shown": text, "tensor": table.rows.get(key)}
