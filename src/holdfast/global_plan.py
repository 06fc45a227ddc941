"""What all ranks write together: who writes which box, and the metadata of the whole. Runs on the coordinator.

Each distinct box has one writer; what several ranks hold is spread over them so that all write about as much. The
result depends on what the plans say and on nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from holdfast._plan.balance import Held, assign, replica_groups
from holdfast._plan.coverage import check_coverage
from holdfast._values.lazy import LazyDict, LazyList
from holdfast.errors import InvalidStateError, RankDisagreementError
from holdfast.metadata import STORAGE_TYPES, BytesStorageMetadata, ChunkColumns, Metadata, TensorStorageMetadata
from holdfast.planner import SavePlan, TensorHead, WriteColumns, padded, write_columns


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """The rows of all plans: which rank, which key (number in ``heads``), which box."""

    rank: np.ndarray
    key: np.ndarray
    lo: np.ndarray
    length: np.ndarray
    is_shard: np.ndarray
    fingerprint: np.ndarray

    def take(self, chosen: np.ndarray) -> _Rows:
        return _Rows(**{each.name: getattr(self, each.name)[chosen] for each in dataclasses.fields(self)})


def plan_together(plans: list[SavePlan], *, to_lowest_rank: bool = False) -> tuple[list[SavePlan], Metadata]:
    """The plan of each rank, and the metadata of what they write.

    InvalidStateError unless the boxes of each tensor tile it exactly; RankDisagreementError where ranks say different
    things of one key, or hold different contents where they should hold the same.
    """
    tables = [write_columns(plan.items) for plan in plans]
    for table in tables:
        _check_values_once(table)
    heads = _merged_heads(tables)
    rows = _joined(tables, heads)
    if len(plans) > 1:
        _check_replicas(rows, list(heads))
        rows = _assigned(rows, heads, len(plans), to_lowest_rank)
        keys = list(heads)
        plans = [
            dataclasses.replace(plan, items=LazyList(_table(rows.take(np.flatnonzero(rows.rank == rank)), keys, heads)))
            for rank, plan in enumerate(plans)
        ]
    return plans, _metadata(rows, heads)


def _check_values_once(table: WriteColumns) -> None:
    """InvalidStateError when a plan has a value twice; for tensors, the tiling shows it."""
    counts = np.bincount(table.key, minlength=len(table.keys))
    for which in np.flatnonzero(counts > 1).tolist():
        if table.heads[which] is None:
            key = table.keys[which]
            raise InvalidStateError(f"the plan has the value of {key!r} {counts[which]} times; save it once", key=key)


def _merged_heads(tables: list[WriteColumns]) -> dict[str, TensorHead | None]:
    """What every key is, in the order in which ranks have them; tied only where all ranks that hold it say so."""
    heads: dict[str, TensorHead | None] = {}
    first_rank: dict[str, int] = {}
    is_held: set[str] = set()
    for rank, table in enumerate(tables):
        held = set(table.key.tolist())
        for which, (key, head) in enumerate(zip(table.keys, table.heads, strict=True)):
            known = heads.setdefault(key, head)
            _check_same(key, known, first_rank.setdefault(key, rank), head, rank)
            if which not in held:
                continue
            if key not in is_held:
                is_held.add(key)
                heads[key] = head
            elif known is not None and head is not None and known.alias_of != head.alias_of:
                heads[key] = known._replace(alias_of=None)
    return {key: _untied(head, heads) for key, head in heads.items()}


def _untied(head: TensorHead | None, heads: Mapping[str, TensorHead | None]) -> TensorHead | None:
    if head is None or head.alias_of is None:
        return head
    first = heads.get(head.alias_of)
    return head if first is not None and first.alias_of is None else head._replace(alias_of=None)


def _check_same(key: str, known: TensorHead | None, known_rank: int, head: TensorHead | None, rank: int) -> None:
    def said(each: TensorHead | None) -> str:
        return "a value" if each is None else f"{each.properties.dtype} {list(each.size)}"

    if known is not head and said(known) != said(head):
        raise RankDisagreementError(
            f"{key!r} is {said(known)} on rank {known_rank} but {said(head)} on rank {rank}; give it one name per kind",
            said={known_rank: said(known), rank: said(head)},
        )


def _joined(tables: list[WriteColumns], heads: Mapping[str, TensorHead | None]) -> _Rows:
    ids = {key: number for number, key in enumerate(heads)}
    width = max((table.lo.shape[1] for table in tables), default=0)
    keys = [np.array([ids[key] for key in table.keys], dtype=np.int64)[table.key] for table in tables]
    return _Rows(
        rank=np.repeat(np.arange(len(tables)), [len(table) for table in tables]),
        key=np.concatenate(keys),
        lo=np.concatenate([_widened(table.lo, width, 0) for table in tables]),
        length=np.concatenate([_widened(table.length, width, 1) for table in tables]),
        is_shard=np.concatenate([table.is_shard for table in tables]),
        fingerprint=np.concatenate(
            [np.zeros(len(table), np.uint64) if table.fingerprint is None else table.fingerprint for table in tables]
        ),
    )


def _widened(table: np.ndarray, width: int, fill: int) -> np.ndarray:
    missing = width - table.shape[1]
    return np.pad(table, ((0, 0), (0, missing)), constant_values=fill) if missing else table


def _held(rows: _Rows, heads: list[TensorHead | None]) -> Held:
    itemsize = np.array([1 if head is None else head.properties.dtype.itemsize for head in heads], dtype=np.int64)
    itemsize = itemsize[rows.key]
    nbytes = rows.length.prod(axis=1, dtype=np.int64) * itemsize
    return Held(rank=rows.rank, tensor=rows.key, lo=rows.lo, length=rows.length, nbytes=nbytes, itemsize=itemsize)


def _check_replicas(rows: _Rows, keys: list[str]) -> None:
    """RankDisagreementError when ranks that hold one box, or one value, hold different contents."""
    looked_at = np.flatnonzero(rows.fingerprint != 0)
    seen = rows.take(looked_at)
    groups, sizes = replica_groups(_held(seen, [None] * len(keys)))
    first = np.full(len(sizes), np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(first, groups, np.arange(len(groups)))
    differs = seen.fingerprint != seen.fingerprint[first[groups]]
    if not differs.any():
        return
    group = groups[np.flatnonzero(differs)[0]]
    members = np.flatnonzero(groups == group)
    said = {int(seen.rank[row]): f"{int(seen.fingerprint[row]):016x}" for row in members.tolist()}
    ranks = sorted({int(seen.rank[row]) for row in members.tolist() if differs[row]})
    raise RankDisagreementError(
        f"{keys[int(seen.key[members[0]])]!r} has other contents on rank {', '.join(map(str, ranks))} than on rank "
        f"{min(said)}, though all of them hold it; name what differs by rank, or pass replica_check='off'",
        said=said,
    )


def _assigned(rows: _Rows, heads: Mapping[str, TensorHead | None], ranks: int, to_lowest_rank: bool) -> _Rows:
    """The rows to be written, each by its rank; tied keys are written where the one they are tied to is."""
    kinds = list(heads.values())
    ids = {key: number for number, key in enumerate(heads)}
    is_tied = np.array([head is not None and head.alias_of is not None for head in kinds], dtype=bool)[rows.key]
    own = rows.take(np.flatnonzero(~is_tied))
    assignment = assign(_held(own, kinds), ranks=ranks, to_lowest_rank=to_lowest_rank)
    chosen = own.take(assignment.row)
    written = [dataclasses.replace(chosen, lo=assignment.lo, length=assignment.length)]
    for number, head in enumerate(kinds):
        if head is not None and head.alias_of is not None:
            follows = written[0].take(np.flatnonzero(written[0].key == ids[head.alias_of]))
            written.append(dataclasses.replace(follows, key=np.full(len(follows.key), number, dtype=np.int64)))
    return _Rows(
        **{
            each.name: np.concatenate([getattr(part, each.name) for part in written])
            for each in dataclasses.fields(_Rows)
        }
    )


def _table(rows: _Rows, keys: list[str], heads: Mapping[str, TensorHead | None]) -> WriteColumns:
    """One rank's rows, with just the keys that they need."""
    used, key = np.unique(rows.key, return_inverse=True)
    names = [keys[number] for number in used.tolist()]
    return WriteColumns(
        keys=names,
        heads=[heads[name] for name in names],
        key=key.astype(np.int64),
        lo=rows.lo,
        length=rows.length,
        hint=np.full(len(key), -1, dtype=np.int64),
        is_shard=rows.is_shard,
    )


def _metadata(rows: _Rows, heads: Mapping[str, TensorHead | None]) -> Metadata:
    if (np.diff(rows.key) <= 0).any():  # else every key has one row, in order
        rows = rows.take(np.lexsort((*rows.lo.T[::-1], rows.key)))
    _check_tiling(rows, heads)
    bounds = np.searchsorted(rows.key, np.arange(len(heads) + 1))
    return Metadata(LazyDict(heads, _Entries(list(heads.values()), bounds, rows.lo, rows.length)))


class _Entries(NamedTuple):
    """What the metadata says of each key: chunks from ``bounds[n]`` to ``bounds[n + 1]`` of the boxes for key n."""

    heads: list[TensorHead | None]
    bounds: np.ndarray
    lo: np.ndarray
    length: np.ndarray

    def item(self, row: int) -> STORAGE_TYPES:
        head = self.heads[row]
        if head is None:
            return BytesStorageMetadata()
        first, stop = self.bounds[row : row + 2].tolist()
        chunks = ChunkColumns(self.lo, self.length, first, stop, len(head.size))
        return TensorStorageMetadata(head.properties.duplicate(), head.size, LazyList(chunks), head.alias_of, head.kind)


def _check_tiling(rows: _Rows, heads: Mapping[str, TensorHead | None]) -> None:
    is_tensor = np.array([head is not None for head in heads.values()], dtype=bool)
    rows = rows.take(np.flatnonzero(is_tensor[rows.key]))
    sizes = [head.size if head is not None else () for head in heads.values()]
    width = max(rows.lo.shape[1], max(map(len, sizes), default=0))
    faults = [
        fault
        for fault in check_coverage(
            rows.key,
            _widened(rows.lo, width, 0),
            _widened(rows.length, width, 1),
            _widened(padded(sizes, fill=1), width, 1),
        )
        if is_tensor[fault.tensor]
    ]
    if faults:
        key = list(heads)[faults[0].tensor]
        raise InvalidStateError(
            f"the pieces of {key!r} do not make up the whole tensor: {faults[0].detail}"
            + (f" (and {len(faults) - 1} more keys)" if len(faults) > 1 else ""),
            key=key,
        )
