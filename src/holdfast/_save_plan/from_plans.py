"""What all ranks write together, from the plans of each. Runs on the coordinator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from holdfast._plan.balance import SPLIT_BYTES
from holdfast._plan.coverage import check_coverage, widened
from holdfast._plan.holdings import HeldRows, holding_of
from holdfast._plan.shares import box_words, scrambled
from holdfast._save_plan.together import JointPlan, chosen_columns, not_whole
from holdfast._values.digest import name_words
from holdfast._values.dtypes import MAX_FILE_BYTES
from holdfast._values.lazy import LazyDict, LazyList
from holdfast.errors import InvalidStateError, RankDisagreementError
from holdfast.metadata import STORAGE_TYPES, BytesStorageMetadata, ChunkColumns, Metadata, TensorStorageMetadata
from holdfast.planner import SavePlan, TensorHead, WriteColumns, padded, write_columns

_Heads = dict[str, TensorHead | None]


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
    if len(plans) == 1 and _is_whole(table := write_columns(plans[0].items)):
        entries = _Entries(table.heads, np.arange(len(table) + 1), table.lo, table.length)
        return plans, Metadata(LazyDict(table.keys, entries))
    tables, heads = _tables(plans)
    differing = check_contents(tables)
    plan = _planned(tables, heads, to_lowest_rank=to_lowest_rank, is_whole=is_whole, hosts=hosts)
    return _plans(plans, tables, plan), dataclasses.replace(plan.metadata(), differing=differing)


def without_replicas(plans: list[SavePlan], *, to_lowest_rank: bool = False) -> list[SavePlan]:
    """The plans without what another one writes: every box once, whole, bytes balanced over those that hold it."""
    tables, heads = _tables(plans)
    plan = _planned(tables, heads, to_lowest_rank=to_lowest_rank, is_whole=False, split_bytes=MAX_FILE_BYTES)
    return _plans(plans, tables, plan)


def as_planned(plans: list[SavePlan], *, rewrite_index_hints: bool = True) -> tuple[list[SavePlan], Metadata]:
    """``plans`` as they are, apart from their hints, and the metadata of what they write.

    InvalidStateError unless each tensor is tiled exactly and each value is there once.
    """
    tables, heads = _tables(plans)
    rows = _joined(tables, heads)
    counts = np.bincount(rows.key, minlength=len(heads))
    for (key, head), count in zip(heads.items(), counts.tolist(), strict=True):
        if head is None and count > 1:
            raise InvalidStateError(f"the plans have the value of {key!r} {count} times; keep it in one", key=key)
    metadata = _metadata(rows, heads)
    if not rewrite_index_hints:
        return plans, metadata
    order = rows.by_place()
    hint = np.empty(len(order), dtype=np.int64)
    hint[order] = np.arange(len(order)) - np.searchsorted(rows.key[order], np.arange(len(heads)))[rows.key[order]]
    hints = np.split(hint, np.cumsum([len(table) for table in tables])[:-1])
    return [
        dataclasses.replace(plan, items=LazyList(_with_heads(dataclasses.replace(table, hint=mine), heads)))
        for plan, table, mine in zip(plans, tables, hints, strict=True)
    ], metadata


def check_contents(tables: Sequence[WriteColumns]) -> dict[str, int]:
    """RankDisagreementError when ranks that hold one box, or one value, hold different contents and may not.

    Of keys that may differ, those that do, each with the rank whose contents are kept: the lowest that holds it.
    """
    lenient = _lenient(tables)
    said = np.concatenate(
        [np.zeros(len(table), np.uint64) if table.fingerprint is None else table.fingerprint for table in tables]
    )
    looked = np.flatnonzero(said)
    words = [name_words(table.keys)[table.key] ^ scrambled(box_words(table.lo, table.length)) for table in tables]
    rank = np.repeat(np.arange(len(tables)), [len(table) for table in tables])[looked]
    names = [table.keys[which] for table in tables for which in table.key.tolist()]
    said = said[looked]
    _, first, group = np.unique(np.concatenate(words)[looked], return_index=True, return_inverse=True)
    found = np.flatnonzero(said != said[first[group]]).tolist()
    wrong = next((row for row in found if names[looked[row]] not in lenient), None)
    if wrong is None:
        kept = sorted({int(first[group[row]]) for row in found})
        return {names[looked[row]]: int(rank[row]) for row in kept}
    members = np.flatnonzero(group == group[wrong])
    lowest, key = int(rank[members].min()), names[looked[wrong]]
    others = sorted({int(rank[member]) for member in members.tolist() if said[member] != said[members[0]]})
    raise RankDisagreementError(
        f"{key!r} has other contents on rank {', '.join(map(str, others))} than on rank {lowest}, though all of them "
        f"hold it; name what differs by rank, or pass SaveOptions(replica_check=[{key!r}]) to keep that of rank "
        f"{lowest}",
        said={int(rank[member]): f"{int(said[member]):016x}" for member in members.tolist()},
    )


def _lenient(tables: Sequence[WriteColumns]) -> frozenset[str]:
    """The keys that may differ, because a rank that has them says so."""
    return frozenset[str]().union(*(table.lenient for table in tables))


def _tables(plans: list[SavePlan]) -> tuple[list[WriteColumns], _Heads]:
    """What is in each plan, and what every key is."""
    tables = [write_columns(plan.items) for plan in plans]
    for table in tables:
        _check_values_once(table)
    return tables, _merged_heads(tables)


def _planned(
    tables: list[WriteColumns],
    heads: _Heads,
    *,
    to_lowest_rank: bool,
    is_whole: bool,
    hosts: np.ndarray | None = None,
    split_bytes: int = SPLIT_BYTES,
) -> JointPlan:
    rows = _joined(tables, heads)
    rank = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    order = np.argsort(rows.key, kind="stable")
    bounds = np.searchsorted(rows.key[order], np.arange(len(heads) + 1)).tolist()
    holdings = []
    for number, (key, head) in enumerate(heads.items()):
        mine = order[bounds[number] : bounds[number + 1]]
        wide = slice(0, 0 if head is None else len(head.size))
        held = HeldRows(rank=rank[mine], lo=rows.lo[mine, wide], length=rows.length[mine, wide])
        holdings.append(holding_of([held]))
        if holdings[-1].has_repetitions:
            raise InvalidStateError(f"the plan of a rank has a piece of {key!r} twice; save it once", key=key)
    return JointPlan(
        heads,
        holdings,
        len(tables),
        to_lowest_rank=to_lowest_rank,
        hosts=hosts,
        split_bytes=split_bytes,
        is_whole=is_whole,
        lenient=_lenient(tables),
    )


def _plans(plans: list[SavePlan], tables: list[WriteColumns], together: JointPlan) -> list[SavePlan]:
    """What each rank writes by ``together``, of what its plan has."""
    heads = dict(zip(together.keys, together.heads, strict=True))
    return [
        dataclasses.replace(plan, items=LazyList(chosen_columns(table, together.chosen(rank), heads)))
        for rank, (plan, table) in enumerate(zip(plans, tables, strict=True))
    ]


def _with_heads(table: WriteColumns, heads: _Heads) -> WriteColumns:
    return dataclasses.replace(table, heads=[heads[key] for key in table.keys])


def _is_whole(table: WriteColumns) -> bool:
    """Whether each key is there once, all of it, as most are where one process saves alone: then all is planned."""
    if not np.array_equal(table.key, np.arange(len(table.keys))) or table.lo.any():
        return False
    sizes = padded([() if head is None else head.size for head in table.heads], fill=1)
    width = table.length.shape[1]
    if sizes.shape[1] > width or not np.array_equal(widened(sizes, width, 1), table.length):
        return False
    tied = [head for head in table.heads if head is not None and head.alias_of is not None]
    heads = dict(zip(table.keys, table.heads, strict=True)) if tied else {}
    firsts = [heads.get(head.alias_of or "") for head in tied]
    return all(
        first is not None and first.alias_of is None and first.size == head.size
        for head, first in zip(tied, firsts, strict=True)
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


class _Rows(NamedTuple):
    """The rows of all plans, one plan after the other: which key (its number in the heads), which box."""

    key: np.ndarray
    lo: np.ndarray
    length: np.ndarray

    def by_place(self) -> np.ndarray:
        """The order of the rows by key and place."""
        return np.lexsort((*self.lo.T[::-1], self.key))


def _joined(tables: list[WriteColumns], heads: Mapping[str, TensorHead | None]) -> _Rows:
    ids = {key: number for number, key in enumerate(heads)}
    width = max((table.lo.shape[1] for table in tables), default=0)
    keys = [np.array([ids[key] for key in table.keys], dtype=np.int64)[table.key] for table in tables]
    return _Rows(
        key=np.concatenate(keys),
        lo=np.concatenate([widened(table.lo, width, 0) for table in tables]),
        length=np.concatenate([widened(table.length, width, 1) for table in tables]),
    )


def _metadata(rows: _Rows, heads: Mapping[str, TensorHead | None]) -> Metadata:
    """What a checkpoint of ``rows`` says of itself; InvalidStateError unless they make up all of each tensor."""
    order = rows.by_place()
    rows = _Rows(*(column[order] for column in rows))
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
    tensors = np.flatnonzero(is_tensor[rows.key])
    sizes = [head.size if head is not None else (0,) for head in heads.values()]  # without elements, nothing to tile
    width = max(rows.lo.shape[1], max(map(len, sizes), default=0))
    faults = check_coverage(
        rows.key[tensors],
        widened(rows.lo[tensors], width, 0),
        widened(rows.length[tensors], width, 1),
        widened(padded(sizes, fill=1), width, 1),
    )
    keys = list(heads)
    wrong = [(keys[fault.tensor], fault.detail) for fault in faults]
    if wrong:
        raise not_whole(wrong)
