"""Plans: what one rank has to write, and what all ranks write together, made from the plans of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from holdfast._plan.balance import SPLIT_BYTES
from holdfast._plan.coverage import HeldRows, holding_of, widened
from holdfast._save_plan.together import JointPlan, chosen_columns, entry_of, joint_plan
from holdfast._state.pieces import Pieces, Spread, is_sharded, pieces_of
from holdfast._state.tensors import (
    DTYPE_NAMES,
    ComposedTensor,
    as_tensor,
    check_savable,
    fingerprint_of_tensor,
    fingerprint_of_value,
    plain_address,
)
from holdfast._values.digest import row_words
from holdfast._values.dtypes import MAX_DIMENSIONS, MAX_FILE_BYTES
from holdfast._values.lazy import LazyDict, LazyList
from holdfast.errors import InvalidStateError, RankDisagreementError
from holdfast.metadata import STATE_DICT_TYPE, STORAGE_TYPES, Metadata, TensorProperties
from holdfast.planner import Memory, SavePlan, TensorHead, WriteColumns, padded, write_columns

_Memory = tuple[object, ...]
# Number of the key, offsets, lengths, whether it is a shard.
_Row = tuple[int, tuple[int, ...], tuple[int, ...], bool]
CheckValue = Callable[[str, object], None]
EVERYWHERE, UNKNOWN = "everywhere", "unknown"
_ZEROS = [(0,) * dimensions for dimensions in range(MAX_DIMENSIONS + 1)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalLeaves:
    """The leaves of one rank's state: ``columns`` to be planned, ``pieces`` of the leaves that are sharded.

    ``memory`` has those that are plain tensors, ``contents`` what each row stands for.
    ``spreads`` tells for each key how it is spread: EVERYWHERE where each rank has all of it, over a mesh, or UNKNOWN
    where only the rank itself knows what it holds.
    """

    columns: WriteColumns
    pieces: dict[str, Pieces]
    memory: dict[str, Memory]
    spreads: list[Spread | str]
    contents: list[object]

    def fingerprints(self, rows: np.ndarray, replica_check: str) -> np.ndarray:
        """What tells the contents of these rows apart, looked at as ``replica_check`` says; 0 where nobody looked."""
        found = np.zeros(len(rows), dtype=np.uint64)
        for place, row in enumerate(rows.tolist() if replica_check != "off" else ()):
            content = self.contents[row]
            if isinstance(content, torch.Tensor):
                found[place] = fingerprint_of_tensor(content, everything=replica_check == "all")
            else:
                found[place] = fingerprint_of_value(content)
        return found

    def looked_at(self, replica_check: str) -> WriteColumns:
        """The columns with the fingerprints of all rows."""
        return dataclasses.replace(
            self.columns, fingerprint=self.fingerprints(np.arange(len(self.contents)), replica_check)
        )


def local_leaves(
    leaves: STATE_DICT_TYPE, *, lenient: frozenset[str] = frozenset(), check_value: CheckValue | None = None
) -> LocalLeaves:
    """What one rank has to write; the contents of the keys ``lenient`` may differ between ranks.

    InvalidStateError for tensors that have nothing to store. It also names the values that ``check_value`` refuses,
    though these alone are no error here: whoever encodes them finds out.
    """
    heads: list[TensorHead | None] = []
    rows: list[_Row] = []
    contents: list[object] = []
    spreads: list[Spread | str] = []
    pieces: dict[str, Pieces] = {}
    memory: dict[str, Memory] = {}
    firsts: dict[int, list[tuple[str, torch.Tensor]]] = {}
    sharded_firsts: dict[_Memory, str] = {}
    refused: dict[str, InvalidStateError] = {}
    for number, (key, leaf) in enumerate(leaves.items()):
        head = None
        try:
            if isinstance(leaf, torch.Tensor):
                address = plain_address(leaf)
                if address and leaf.dtype in DTYPE_NAMES:
                    memory[key] = leaf, address
                elif is_sharded(leaf):
                    held = pieces[key] = pieces_of(key, leaf)
                    for piece in held.pieces:
                        check_savable(key, piece.tensor)
                        rows.append((number, piece.box.offsets, piece.box.lengths, True))
                        contents.append(piece.tensor)
                    spreads.append(held.spread or UNKNOWN)
                    heads.append(_sharded_head(key, held, sharded_firsts))
                    continue
                else:
                    check_savable(key, leaf)
                    address = leaf.data_ptr()
                head = _head_of(key, leaf, address, firsts)
            elif isinstance(leaf, np.ndarray):
                leaf = as_tensor(key, leaf)
                head = TensorHead(properties_of(leaf.dtype, False), leaf.shape, None, "numpy")
        except InvalidStateError as error:
            refused[key] = error
            continue
        shape: tuple[int, ...] = () if head is None else head.size
        heads.append(head)
        rows.append((number, _ZEROS[len(shape)], shape, False))
        contents.append(leaf)
        spreads.append(EVERYWHERE)
    if refused:
        for key, leaf in leaves.items():
            try:
                if check_value and not isinstance(leaf, (torch.Tensor, np.ndarray, ComposedTensor)):
                    check_value(key, leaf)
            except InvalidStateError as error:
                refused[key] = error
        raise InvalidStateError.of([refused[key] for key in leaves if key in refused])
    # One tuple for each row, and columns of them at the end: the cheapest way to thousands of rows.
    numbers, lows, lengths, is_shard = zip(*rows, strict=True) if rows else [()] * 4
    columns = WriteColumns(
        keys=list(leaves),
        heads=heads,
        key=np.array(numbers, dtype=np.int64),
        lo=padded(lows, fill=0),
        length=padded(lengths, fill=1),
        hint=np.zeros(len(rows), dtype=np.int64),
        is_shard=np.array(is_shard, dtype=bool),
        lenient=lenient,
    )
    return LocalLeaves(columns=columns, pieces=pieces, memory=memory, spreads=spreads, contents=contents)


def _sharded_head(key: str, pieces: Pieces, firsts: dict[_Memory, str]) -> TensorHead:
    """What a sharded tensor is; tied to the first one that has just the same pieces in the same memory."""
    alias_of = None
    if pieces.pieces:
        memory = tuple((piece.tensor.data_ptr(), piece.box, piece.tensor.stride()) for piece in pieces.pieces)
        first = firsts.setdefault((pieces.size, pieces.dtype, memory), key)
        alias_of = None if first == key else first
    return TensorHead(properties_of(pieces.dtype, pieces.requires_grad), pieces.size, alias_of)


def _head_of(
    key: str, tensor: torch.Tensor, address: int, firsts: dict[int, list[tuple[str, torch.Tensor]]]
) -> TensorHead:
    """What ``tensor`` is; tied to the first one that has just the same memory."""
    alias_of = None
    shape = tensor.shape
    if 0 not in shape:
        mine = key, tensor
        neighbours = firsts.setdefault(address, [mine])
        if neighbours[0] is not mine:
            alias_of = next((other for other, first in neighbours if _is_same_memory(first, tensor)), None)
            if alias_of is None:
                neighbours.append(mine)
    return TensorHead(properties_of(tensor.dtype, tensor.requires_grad), shape, alias_of)


def _is_same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors that start at the same address have the same elements and always will."""
    return (
        first.device == second.device
        and first.dtype == second.dtype
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.is_conj() == second.is_conj()
        and first.is_neg() == second.is_neg()
    )


@cache
def properties_of(dtype: torch.dtype, requires_grad: bool) -> TensorProperties:
    """One object for all tensors that are alike: whoever hands it out makes a copy."""
    return TensorProperties(dtype, torch.strided, requires_grad)


_Heads = dict[str, TensorHead | None]


def plan_together(
    plans: list[SavePlan], *, to_lowest_rank: bool = False, is_whole: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """The plan of each rank, and the metadata of what they write.

    InvalidStateError unless the boxes of each tensor tile it exactly, which is asked of them where ``is_whole``, that
    is, where these are all the plans there are; RankDisagreementError where ranks say different things of one key, or
    hold different contents where they should hold the same.
    """
    if len(plans) == 1 and _is_whole(table := write_columns(plans[0].items)):
        return plans, Metadata(LazyDict(table.keys, _Entries(table.heads, table.lo, table.length)))
    tables, heads = _tables(plans)
    differing = check_contents(tables)
    plan = _planned(tables, heads, to_lowest_rank=to_lowest_rank, is_whole=is_whole)
    return _plans(plans, tables, plan), Metadata(LazyDict(plan.keys, plan), differing=differing)


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
    plan = _planned(tables, heads, to_lowest_rank=True, is_whole=True)
    for key, head, holding in zip(plan.keys, plan.heads, plan.holdings, strict=True):
        if len(holding.shared):
            what, times = "the value" if head is None else "a piece", len(holding.holders_of(holding.shared[0]))
            raise InvalidStateError(f"the plans have {what} of {key!r} {times} times; keep it in one plan", key=key)
    return _plans(plans, tables, plan) if rewrite_index_hints else plans, Metadata(LazyDict(plan.keys, plan))


def check_contents(tables: Sequence[WriteColumns]) -> dict[str, int]:
    """RankDisagreementError when ranks that hold one box, or one value, hold different contents and may not.

    Of keys that may differ, those that do, each with the rank whose contents are kept: the lowest that holds it.
    """
    lenient = _lenient(tables)
    said = np.concatenate(
        [np.zeros(len(table), np.uint64) if table.fingerprint is None else table.fingerprint for table in tables]
    )
    looked = np.flatnonzero(said)
    words = [row_words(table.keys, table.key, table.lo, table.length) for table in tables]
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
        f"{key!r} has other contents on rank {', '.join(map(str, others))} than on rank {lowest}; use another key "
        f"on each rank, or pass SaveOptions(replica_check=[{key!r}]) to save that of rank {lowest}",
        said={int(rank[member]): f"{int(said[member]):016x}" for member in members.tolist()},
    )


def _lenient(tables: Sequence[WriteColumns]) -> frozenset[str]:
    """The keys that may differ, because a rank that has them says so."""
    return frozenset[str]().union(*(table.lenient for table in tables))


def _tables(plans: list[SavePlan]) -> tuple[list[WriteColumns], _Heads]:
    """The rows of all plans, and what every key is.

    InvalidStateError when a plan has a value twice; for tensors, the tiling shows it.
    """
    tables = [write_columns(plan.items) for plan in plans]
    said: list[tuple[int, str, TensorHead | None, bool]] = []
    for rank, table in enumerate(tables):
        counts = np.bincount(table.key, minlength=len(table.keys)).tolist()
        for key, head, count in zip(table.keys, table.heads, counts, strict=True):
            if head is None and count > 1:
                raise InvalidStateError(f"the plan has the value of {key!r} {count} times; save it once", key=key)
            said.append((rank, key, head, count > 0))
    return tables, agreed_heads(said)


def _planned(
    tables: list[WriteColumns], heads: _Heads, *, to_lowest_rank: bool, is_whole: bool, split_bytes: int = SPLIT_BYTES
) -> JointPlan:
    ids = {key: number for number, key in enumerate(heads)}
    width = max((table.lo.shape[1] for table in tables), default=0)
    keys = np.concatenate([np.array([ids[key] for key in table.keys], np.int64)[table.key] for table in tables])
    lo = np.concatenate([widened(table.lo, width, 0) for table in tables])
    length = np.concatenate([widened(table.length, width, 1) for table in tables])
    rank = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    order = np.argsort(keys, kind="stable")
    bounds = np.searchsorted(keys[order], np.arange(len(heads) + 1)).tolist()
    holdings = []
    for number, (key, head) in enumerate(heads.items()):
        mine = order[bounds[number] : bounds[number + 1]]
        wide = slice(0, 0 if head is None else len(head.size))
        held = HeldRows(rank=rank[mine], lo=lo[mine, wide], length=length[mine, wide])
        holdings.append(holding_of([held]))
        box = np.repeat(np.arange(len(holdings[-1].lo)), np.diff(holdings[-1].starts))
        if ((np.diff(holdings[-1].holder) == 0) & (np.diff(box) == 0)).any():
            raise InvalidStateError(f"the plan of a rank has a piece of {key!r} twice; save it once", key=key)
    return joint_plan(
        heads,
        holdings,
        len(tables),
        to_lowest_rank=to_lowest_rank,
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


def _is_whole(table: WriteColumns) -> bool:
    """Whether each key is there once, all of it, as most are where one process saves alone: then all is planned."""
    if not np.array_equal(table.key, np.arange(len(table.keys))) or table.lo.any():
        return False
    heads = dict(zip(table.keys, table.heads, strict=True))
    ones = [1] * table.length.shape[1]
    for head, length in zip(table.heads, table.length.tolist(), strict=True):
        size = [] if head is None else list(head.size)
        if length != size + ones[len(size) :]:
            return False
        first = heads.get(head.alias_of) if head is not None and head.alias_of is not None else head
        if first is not head and (
            first is None or first.alias_of is not None or head is None or first.size != head.size
        ):
            return False
    return True


def agreed_heads(said: Iterable[tuple[int, str, TensorHead | None, bool]]) -> _Heads:
    """What every key is, in the order in which ranks have them; a rank says what it is, and whether it holds any of it.

    Tied only where all ranks that hold it say so; it requires a gradient where any of them says so.
    """
    heads: _Heads = {}
    first_rank: dict[str, int] = {}
    is_held: set[str] = set()
    for rank, key, head, holds in said:
        known = heads.setdefault(key, head)
        lowest = first_rank.setdefault(key, rank)
        if known is not head:
            _check_same_head(key, known, lowest, head, rank)
        if holds and key not in is_held:
            is_held.add(key)
            heads[key] = head
        elif holds and known is not None and head is not None and known is not head:
            if known.alias_of != head.alias_of:
                known = known._replace(alias_of=None)
            if head.properties.requires_grad and not known.properties.requires_grad:
                known = known._replace(properties=dataclasses.replace(known.properties, requires_grad=True))
            heads[key] = known
    found = dict(heads)
    for key, head in heads.items():
        if head is not None and head.alias_of is not None:
            first = heads.get(head.alias_of)
            if first is None or first.alias_of is not None:
                found[key] = head._replace(alias_of=None)  # what it is tied to is not there, or is itself tied
    return found


def _check_same_head(key: str, known: TensorHead | None, known_rank: int, head: TensorHead | None, rank: int) -> None:
    """RankDisagreementError where a rank says another kind, dtype or size of a key than one before it."""

    def said(each: TensorHead | None) -> str:
        if each is None:
            return "a value"
        return f"{'' if each.kind is None else f'{each.kind} '}{each.properties.dtype} {list(each.size)}"

    if said(known) != said(head):
        raise RankDisagreementError(
            f"{key!r} is {said(known)} on rank {known_rank} but {said(head)} on rank {rank}; use different keys",
            said={known_rank: said(known), rank: said(head)},
        )


class _Entries(NamedTuple):
    """What the metadata says of each key, whose one chunk is box n of the boxes for key n."""

    heads: list[TensorHead | None]
    lo: np.ndarray
    length: np.ndarray

    def item(self, row: int) -> STORAGE_TYPES:
        return entry_of(self.heads[row], self.lo[row : row + 1], self.length[row : row + 1])
