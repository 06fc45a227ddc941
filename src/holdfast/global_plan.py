"""What all ranks write together: who writes which box, and the metadata of the whole. Runs on the coordinator.

Each distinct box has one writer; what several ranks hold is spread over them so that all hosts and ranks write about
as much. The result depends on what the plans and hosts say and on nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from holdfast._plan.balance import SPLIT_BYTES, Held, assign, replica_groups
from holdfast._plan.chunks import widened
from holdfast._plan.coverage import check_coverage
from holdfast._values.lazy import LazyDict, LazyList
from holdfast._values.limits import MAX_FILE_BYTES
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
    hint: np.ndarray
    is_shard: np.ndarray
    fingerprint: np.ndarray

    def take(self, chosen: np.ndarray) -> _Rows:
        return _Rows(**{each.name: getattr(self, each.name)[chosen] for each in dataclasses.fields(self)})


def plan_together(
    plans: list[SavePlan],
    *,
    to_lowest_rank: bool = False,
    is_whole: bool = True,
    hosts: np.ndarray | None = None,
) -> tuple[list[SavePlan], Metadata]:
    """The plan of each rank, and the metadata of what they write.

    InvalidStateError unless the boxes of each tensor tile it exactly, which is asked of them where ``is_whole``, that
    is, where these are all the plans there are; RankDisagreementError where ranks say different things of one key, or
    hold different contents where they should hold the same. ``hosts`` has the number of each rank's host, where known.
    """
    rows, heads = _all_rows(plans)
    if len(plans) > 1:
        lenient = _lenient(plans)
        differing = _check_replicas(rows, list(heads), lenient)
        rows = _assigned(rows, heads, len(plans), to_lowest_rank, hosts=hosts, lenient=lenient)
        plans, metadata = _placed(plans, rows, heads)
        return plans, dataclasses.replace(metadata, differing=differing)
    if _ties_differ(plans[0], heads):
        return _placed(plans, rows, heads, is_whole=is_whole)
    order = _by_place(rows)
    return plans, _metadata(rows if order is None else rows.take(order), heads, is_whole=is_whole)


def check_contents(plans: list[SavePlan]) -> dict[str, int]:
    """RankDisagreementError when ranks hold different contents where they should hold the same.

    Of keys that may differ, those that do, each with the rank whose contents are kept.
    """
    rows, heads = _all_rows(plans)
    return _check_replicas(rows, list(heads), _lenient(plans))


def _lenient(plans: list[SavePlan]) -> frozenset[str]:
    """The keys that may differ, because a rank that has them says so."""
    return frozenset[str]().union(*(write_columns(plan.items).lenient for plan in plans))


def without_replicas(plans: list[SavePlan], *, to_lowest_rank: bool = False) -> list[SavePlan]:
    """The plans without what another one writes: every box once, whole, bytes balanced over those that hold it."""
    rows, heads = _all_rows(plans)
    rows = _assigned(rows, heads, len(plans), to_lowest_rank, split_bytes=MAX_FILE_BYTES)
    return _plans(plans, rows, heads)


def as_planned(plans: list[SavePlan], *, rewrite_index_hints: bool = True) -> tuple[list[SavePlan], Metadata]:
    """``plans`` as they are, apart from their hints, and the metadata of what they write.

    InvalidStateError unless each tensor is tiled exactly and each value is there once.
    """
    rows, heads = _all_rows(plans)
    counts = np.bincount(rows.key, minlength=len(heads))
    for (key, head), count in zip(heads.items(), counts.tolist(), strict=True):
        if head is None and count > 1:
            raise InvalidStateError(f"the plans have the value of {key!r} {count} times; keep it in one", key=key)
    placed, metadata = _placed(plans, rows, heads)
    return placed if rewrite_index_hints else plans, metadata


def _all_rows(plans: list[SavePlan]) -> tuple[_Rows, dict[str, TensorHead | None]]:
    """What is in all plans, and what every key is."""
    tables = [write_columns(plan.items) for plan in plans]
    for table in tables:
        _check_values_once(table)
    heads = _merged_heads(tables)
    rows = _joined(tables, heads)
    return rows, _truly_tied(rows, heads)


def _placed(
    plans: list[SavePlan], rows: _Rows, heads: Mapping[str, TensorHead | None], *, is_whole: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """Plans of just ``rows``, each with its position among the chunks of its tensor as hint; and the metadata."""
    order = _by_place(rows)
    if order is None:
        plans = _plans(plans, dataclasses.replace(rows, hint=np.zeros_like(rows.hint)), heads)
        return plans, _metadata(rows, heads, is_whole=is_whole)
    in_place = rows.take(order)
    starts = np.searchsorted(in_place.key, np.arange(len(heads)))
    hint = np.empty(len(order), dtype=np.int64)
    hint[order] = np.arange(len(order)) - starts[in_place.key]
    plans = _plans(plans, dataclasses.replace(rows, hint=hint), heads)
    return plans, _metadata(in_place, heads, is_whole=is_whole)


def _plans(plans: list[SavePlan], rows: _Rows, heads: Mapping[str, TensorHead | None]) -> list[SavePlan]:
    keys = list(heads)
    return [
        dataclasses.replace(plan, items=LazyList(_table(rows.take(np.flatnonzero(rows.rank == rank)), keys, heads)))
        for rank, plan in enumerate(plans)
    ]


def _ties_differ(plan: SavePlan, heads: Mapping[str, TensorHead | None]) -> bool:
    """Whether a key of ``plan`` is tied to one that is not there, so that it has to be written itself."""
    columns = write_columns(plan.items)
    return any(
        head is not None and head.alias_of is not None and heads[key] != head
        for key, head in zip(columns.keys, columns.heads, strict=True)
    )


def _check_values_once(table: WriteColumns) -> None:
    """InvalidStateError when a plan has a value twice; for tensors, the tiling shows it."""
    counts = np.bincount(table.key, minlength=len(table.keys))
    for which in np.flatnonzero(counts > 1).tolist():
        if table.heads[which] is None:
            key = table.keys[which]
            raise InvalidStateError(f"the plan has the value of {key!r} {counts[which]} times; save it once", key=key)


def _merged_heads(tables: list[WriteColumns]) -> dict[str, TensorHead | None]:
    """What every key is, in the order in which ranks have them.

    Tied only where all ranks that hold it say so; it requires a gradient where any of them says so.
    """
    heads: dict[str, TensorHead | None] = {}
    first_rank: dict[str, int] = {}
    is_held: set[str] = set()
    if len(tables) == 1:  # nobody to agree with
        heads.update(zip(tables[0].keys, tables[0].heads, strict=True))
        tables = []
    for rank, table in enumerate(tables):
        held = set(table.key.tolist())
        for which, (key, head) in enumerate(zip(table.keys, table.heads, strict=True)):
            known = heads.setdefault(key, head)
            check_same_head(key, known, first_rank.setdefault(key, rank), head, rank)
            if which not in held:
                continue
            if key not in is_held:
                is_held.add(key)
                heads[key] = head
            elif known is not None and head is not None and known is not head:
                heads[key] = joined_head(known, head)
    return {key: untied_head(head, heads) for key, head in heads.items()}


def joined_head(known: TensorHead, head: TensorHead) -> TensorHead:
    """What two ranks that hold one key say of it, in one."""
    if known.alias_of != head.alias_of:
        known = known._replace(alias_of=None)
    if head.properties.requires_grad and not known.properties.requires_grad:
        known = known._replace(properties=dataclasses.replace(known.properties, requires_grad=True))
    return known


def untied_head(head: TensorHead | None, heads: Mapping[str, TensorHead | None]) -> TensorHead | None:
    """``head``; on its own where what it is tied to is not there, or is itself tied."""
    if head is None or head.alias_of is None:
        return head
    first = heads.get(head.alias_of)
    return head if first is not None and first.alias_of is None else head._replace(alias_of=None)


def check_same_head(key: str, known: TensorHead | None, known_rank: int, head: TensorHead | None, rank: int) -> None:
    """RankDisagreementError where a rank says another kind, dtype or size of a key than one before it."""

    def said(each: TensorHead | None) -> str:
        if each is None:
            return "a value"
        return f"{'' if each.kind is None else f'{each.kind} '}{each.properties.dtype} {list(each.size)}"

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
        lo=np.concatenate([widened(table.lo, width, 0) for table in tables]),
        length=np.concatenate([widened(table.length, width, 1) for table in tables]),
        hint=np.concatenate([table.hint for table in tables]),
        is_shard=np.concatenate([table.is_shard for table in tables]),
        fingerprint=np.concatenate(
            [np.zeros(len(table), np.uint64) if table.fingerprint is None else table.fingerprint for table in tables]
        ),
    )


def _held(rows: _Rows, heads: list[TensorHead | None]) -> Held:
    itemsize = np.array([1 if head is None else head.properties.dtype.itemsize for head in heads], dtype=np.int64)
    itemsize = itemsize[rows.key]
    nbytes = rows.length.prod(axis=1, dtype=np.int64) * itemsize
    return Held(rank=rows.rank, tensor=rows.key, lo=rows.lo, length=rows.length, nbytes=nbytes, itemsize=itemsize)


def _check_replicas(rows: _Rows, keys: list[str], lenient: frozenset[str]) -> dict[str, int]:
    """RankDisagreementError when ranks that hold one box, or one value, hold different contents.

    The keys that differ and may, each with the lowest rank that holds it.
    """
    looked_at = np.flatnonzero(rows.fingerprint != 0)
    seen = rows.take(looked_at)
    groups, sizes = replica_groups(_held(seen, [None] * len(keys)))
    first = np.full(len(sizes), np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(first, groups, np.arange(len(groups)))
    differs = seen.fingerprint != seen.fingerprint[first[groups]]
    may_differ = np.array([key in lenient for key in keys], dtype=bool)[seen.key]
    excused = np.sort(first[np.unique(groups[differs & may_differ])])
    differs &= ~may_differ
    if not differs.any():
        return {keys[int(seen.key[row])]: int(seen.rank[row]) for row in excused.tolist()}
    group = groups[np.flatnonzero(differs)[0]]
    members = np.flatnonzero(groups == group)
    said = {int(seen.rank[row]): f"{int(seen.fingerprint[row]):016x}" for row in members.tolist()}
    ranks = sorted({int(seen.rank[row]) for row in members.tolist() if differs[row]})
    key = keys[int(seen.key[members[0]])]
    raise RankDisagreementError(
        f"{key!r} has other contents on rank {', '.join(map(str, ranks))} than on rank {min(said)}, though all of them "
        f"hold it; name what differs by rank, or pass replica_check=[{key!r}] to keep that of rank {min(said)}",
        said=said,
    )


class _ByKey:
    """The rows of each key, found without going through all of them."""

    def __init__(self, rows: _Rows, keys: int) -> None:
        self._rows = rows
        self._order = np.argsort(rows.key, kind="stable")
        self._bounds = np.searchsorted(rows.key[self._order], np.arange(keys + 1)).tolist()

    def __getitem__(self, key: int) -> _Rows:
        return self._rows.take(self._order[self._bounds[key] : self._bounds[key + 1]])


def _truly_tied(rows: _Rows, heads: dict[str, TensorHead | None]) -> dict[str, TensorHead | None]:
    """``heads``; a key that nobody holds where the one it is tied to is held is on its own."""
    tied = {key: head for key, head in heads.items() if head is not None and head.alias_of is not None}
    if not tied:
        return heads
    ids = {key: number for number, key in enumerate(heads)}
    by_key = _ByKey(rows, len(heads))
    untied: dict[str, TensorHead | None] = {}
    for key, head in tied.items():
        first, mine = by_key[ids[head.alias_of or ""]], by_key[ids[key]]
        if not _are_alike(first, mine) and not all(len(_holders(mine, first, row)) for row in range(len(first.key))):
            untied[key] = head._replace(alias_of=None)
    return {**heads, **untied}


def _are_alike(first: _Rows, second: _Rows) -> bool:
    """Whether the same ranks hold the same boxes of both."""
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in ("rank", "lo", "length"))


def _holders(mine: _Rows, other: _Rows, row: int) -> np.ndarray:
    """The ranks of those of ``mine`` in which the box of ``row`` of ``other`` lies."""
    lo, end = other.lo[row], other.lo[row] + other.length[row]
    ranks: np.ndarray = mine.rank[(mine.lo <= lo).all(axis=1) & (end <= mine.lo + mine.length).all(axis=1)]
    return ranks


def _assigned(
    rows: _Rows,
    heads: Mapping[str, TensorHead | None],
    ranks: int,
    to_lowest_rank: bool,
    *,
    hosts: np.ndarray | None = None,
    split_bytes: int = SPLIT_BYTES,
    lenient: frozenset[str] = frozenset(),
) -> _Rows:
    """The rows to be written, each by its rank; a tied key in the same boxes as the one it is tied to.

    What may differ between ranks is the lowest rank's, so that what belongs together stays together.
    """
    kinds = list(heads.values())
    ids = {key: number for number, key in enumerate(heads)}
    is_tied = np.array([head is not None and head.alias_of is not None for head in kinds], dtype=bool)[rows.key]
    is_lenient = np.array([key in lenient for key in heads], dtype=bool)[rows.key] & ~is_tied
    written = []
    for mine, to_lowest in ((~is_tied & ~is_lenient, to_lowest_rank), (is_lenient, True)):
        own = rows.take(np.flatnonzero(mine))
        assigned = assign(
            _held(own, kinds), ranks=ranks, to_lowest_rank=to_lowest, hosts=hosts, split_bytes=split_bytes
        )
        written.append(dataclasses.replace(own.take(assigned.row), lo=assigned.lo, length=assigned.length))
    written = [_concatenated(written) if is_lenient.any() else written[0]]
    if is_tied.any():
        held, first = _ByKey(rows, len(kinds)), _ByKey(written[0], len(kinds))
        for number, head in enumerate(kinds):
            if head is not None and head.alias_of is not None:
                where = ids[head.alias_of]
                follows = dataclasses.replace(first[where], key=np.full(len(first[where].key), number))
                is_alike = _are_alike(held[where], held[number])
                written.append(follows if is_alike else _moved(follows, held[number]))
    return _concatenated(written)


def _concatenated(parts: list[_Rows]) -> _Rows:
    return _Rows(
        **{
            each.name: np.concatenate([getattr(part, each.name) for part in parts])
            for each in dataclasses.fields(_Rows)
        }
    )


def _moved(follows: _Rows, mine: _Rows) -> _Rows:
    """``follows``, each by a rank that holds it according to ``mine``: the one it has, or else the lowest."""
    ranks = follows.rank.copy()
    for row in range(len(ranks)):
        holders = _holders(mine, follows, row)
        if ranks[row] not in holders:
            ranks[row] = holders.min()
    return dataclasses.replace(follows, rank=ranks)


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
        hint=rows.hint,
        is_shard=rows.is_shard,
    )


def _by_place(rows: _Rows) -> np.ndarray | None:
    """The order of ``rows`` by key and place; None when every key has one row and they are in order."""
    return None if (np.diff(rows.key) > 0).all() else np.lexsort((*rows.lo.T[::-1], rows.key))


def _metadata(rows: _Rows, heads: Mapping[str, TensorHead | None], *, is_whole: bool) -> Metadata:
    """What a checkpoint of ``rows``, which are in order, says of itself; all of each tensor where ``is_whole``."""
    if is_whole:
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
            widened(rows.lo, width, 0),
            widened(rows.length, width, 1),
            widened(padded(sizes, fill=1), width, 1),
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
