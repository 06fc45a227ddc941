"""Answers about one checkpoint: what it is, its tree, its tables, who wrote it. No data is read."""

from __future__ import annotations

import os
from collections import defaultdict

import numpy as np

from holdfast._native.paths import split_planner_data
from holdfast._native.values import decode_value
from holdfast._view.answers import Query, matcher, page, shown, unix_seconds, value_row
from holdfast._view.sources import ShownCheckpoint
from holdfast._view.tables import Table
from holdfast._view.timings import SaveTimes
from holdfast.errors import CheckpointError, NotFoundError

_MOST_CHILDREN = 500
_MOST_LISTED = 200
_SORTS = ("state", "key", "bytes", "dtype", "chunks", "elements")


def summary(asked: ShownCheckpoint, table: Table) -> dict[str, object]:
    ties, writer = _ties(table), table.manifest.writer
    torchs = f"torch.distributed.checkpoint, version {writer.torch}" if writer.torch else None
    return {
        "checkpoint": asked.number,
        "path": asked.path,
        "name": os.path.basename(asked.path.rstrip("/")),
        "source": asked.source,
        "step": asked.step,
        "format": table.format,
        "written_by": f"holdfast {writer.holdfast} / torch {writer.torch}" if writer.holdfast else torchs,
        "saved_at": unix_seconds(writer.saved_at),
        "bytes": table.bytes,
        "tensors": len(table.keys),
        "values": len(table.manifest.values) + len(table.runs),
        "elements": int(table.elements.sum()),
        "chunks": int(table.chunks[table.storing == np.arange(len(table.keys))].sum()),
        "ranks": writer.world_size if writer.holdfast else len(set(table.file_ranks.tolist()) - {-1}) or None,
        "files": len(table.file_ranks),
        "dtypes": _dtypes(table),
        "ties": [[table.keys[row] for row in rows[:_MOST_LISTED]] for rows in list(ties.values())[:_MOST_LISTED]],
        "tied": sum(len(rows) - 1 for rows in ties.values()),
        "user_metadata": _user_metadata(table),
        "has_digests": table.has_digests,
        "has_statistics": table.statistics is not None,
        "statistics_problem": table.statistics_problem or None,
    }


def _ties(table: Table) -> dict[int, list[int]]:
    """The rows that share bytes, by the row that has them."""
    ties: dict[int, list[int]] = defaultdict(list)
    for row in np.flatnonzero(table.storing != np.arange(len(table.keys))).tolist():
        owner = int(table.storing[row])
        ties[owner] += [row] if ties[owner] else [owner, row]
    return ties


def _dtypes(table: Table) -> list[dict[str, object]]:
    count = len(table.dtypes)
    tensors = np.bincount(table.dtype, minlength=count)
    elements, nbytes = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    np.add.at(elements, table.dtype, table.elements)
    np.add.at(nbytes, table.dtype, table.nbytes)
    return [
        {
            "dtype": table.dtypes[at],
            "tensors": tensors[at].item(),
            "elements": elements[at].item(),
            "bytes": nbytes[at].item(),
        }
        for at in np.argsort(-nbytes, kind="stable").tolist()
    ]


def _user_metadata(table: Table) -> list[dict[str, object]]:
    try:
        user, _, _ = split_planner_data(decode_value(table.manifest.metadata, key="user_metadata"), {})
    except CheckpointError as error:
        return [{"key": "user_metadata", "kind": "damaged", "shown": shown(error.message)}]
    rows = [(name if isinstance(name, str) else shown(name), value) for name, value in user.items()]
    return [{"key": key, "kind": type(value).__name__, "shown": shown(value)} for key, value in rows[:_MOST_LISTED]]


def tree(table: Table, query: Query) -> dict[str, object]:
    under = query.text("under")
    if under and not under.endswith("."):
        raise ValueError(f"under ends with a dot, or is empty; it is {under[:80]!r}")
    found = table.levels.below(under)
    if not found and under:
        raise NotFoundError(f"there is no key below {under[:80]!r}")
    rest = found[_MOST_CHILDREN:]
    children = []
    for each in found[:_MOST_CHILDREN]:
        row = None if each.leaf is None else int(table.levels.rows[each.leaf])
        children.append(
            {
                "name": each.name,
                "under": f"{under}{each.name}." if each.stop > each.first else None,
                "tensor": row,
                "tensors": each.tensors,
                "bytes": each.bytes,
                "dtype": None if row is None else table.dtypes[table.dtype[row]],
                "shape": None if row is None else table.entries[row].shape,
            }
        )
    return {
        "under": under,
        "tensors": sum(each.tensors for each in found),
        "bytes": sum(each.bytes for each in found),
        "children": children,
        "rest": {
            "children": len(rest),
            "tensors": sum(each.tensors for each in rest),
            "bytes": sum(each.bytes for each in rest),
        },
    }


def tensors(table: Table, query: Query) -> dict[str, object]:
    rows = _sorted(table, query.text("sort", "state"), descending=bool(query.number("descending", 0)))
    search = query.text("search")
    if search:
        found, keys = matcher(search).search, table.keys
        rows = np.array([row for row in rows.tolist() if found(keys[row])], dtype=np.int64)
    return page(query, rows.tolist(), lambda row: tensor_row(table, row))


def _sorted(table: Table, sort: str, *, descending: bool) -> np.ndarray:
    if sort not in _SORTS:
        raise ValueError(f"sort is one of {', '.join(_SORTS)}, not {sort[:40]!r}")
    if sort in ("state", "key"):
        rows = np.arange(len(table.keys)) if sort == "state" else table.levels.rows
        return rows[::-1] if descending else rows
    columns = {"bytes": table.nbytes, "chunks": table.chunks, "elements": table.elements}
    column = np.array(table.dtypes)[table.dtype] if sort == "dtype" else columns[sort]
    number = np.unique(column, return_inverse=True)[1]
    order: np.ndarray = np.argsort(-number if descending else number, kind="stable")
    return order


def tensor_row(table: Table, row: int) -> dict[str, object]:
    return {
        "tensor": row,
        "key": table.keys[row],
        "dtype": table.dtypes[table.dtype[row]],
        "shape": table.entries[row].shape,
        "bytes": int(table.nbytes[row]),
        "elements": int(table.elements[row]),
        "chunks": int(table.chunks[row]),
        "sharded": int(table.chunks[row]) > 1,
        "alias_of": table.keys[int(table.storing[row])] if table.is_tied(row) else None,
    }


def values(table: Table, query: Query) -> dict[str, object]:
    found = matcher(query.text("search")).search
    every = [*((each.key, "", each.value) for each in table.manifest.values), *((*run, None) for run in table.runs)]
    rows = [row for row in every if found(row[0])]
    return page(query, rows, lambda row: value_row(*row))


def ranks(table: Table, times: SaveTimes | None) -> dict[str, object]:
    if (table.file_ranks < 0).any():
        return {"ranks": [], "slowest": None, "why": "the files of this format do not say which rank wrote them"}
    found, of = np.unique(table.file_ranks, return_inverse=True)
    sizes = np.array([file.bytes for file in table.manifest.files], dtype=np.int64)
    nbytes = np.zeros(len(found), dtype=np.int64)
    np.add.at(nbytes, of, sizes)
    columns = zip(found.tolist(), nbytes.tolist(), np.bincount(of, minlength=len(found)).tolist(), strict=True)
    took = {} if times is None else times.ranks
    rows: list[dict[str, object]] = []
    for rank, size, files in columns:
        host, seconds, sync_s = took.get(rank, (None, None, None))
        rows.append({"rank": rank, "host": host, "bytes": size, "seconds": seconds, "sync_s": sync_s, "files": files})
    slowest = max(took, key=lambda rank: took[rank][1], default=None)
    return {"ranks": rows, "slowest": slowest, "why": None if rows else "there are no data files"}
