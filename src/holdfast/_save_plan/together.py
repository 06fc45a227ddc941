"""What all ranks write together: who writes which box, and the metadata of the whole. Runs on the coordinator.

Each distinct box has one writer; what several ranks hold is spread over them, so that all ranks write about
as much. The work follows what differs: tensors that are held alike share one holding, its boxes and who writes them;
nothing is made once per chunk but numpy columns, and those of a rank are made for that rank. The result depends on
what ranks hold, and on nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast._plan.balance import SPLIT_BYTES, Shared, choose_writers, same_runs
from holdfast._plan.coverage import Holding, KeyChunks, check_coverage, chunks_of, widened
from holdfast._values.lazy import LazyList, cached_property
from holdfast.errors import InvalidStateError
from holdfast.metadata import STORAGE_TYPES, BytesStorageMetadata, ChunkColumns, TensorStorageMetadata
from holdfast.planner import TensorHead, WriteColumns, padded

_FEW_HOLDERS = 64


def joint_plan(
    heads: Mapping[str, TensorHead | None],
    holdings: list[Holding],
    ranks: int,
    *,
    to_lowest_rank: bool = False,
    split_bytes: int = SPLIT_BYTES,
    is_whole: bool = True,
    lenient: frozenset[str] = frozenset(),
) -> JointPlan:
    """Who writes what.

    Args:
        heads: what every key is, in the order that the metadata has them in.
        holdings: what is held of each of them, and by whom.
        ranks: how many ranks there are.
        to_lowest_rank: what several ranks hold is written by the lowest of them.
        split_bytes: what several ranks hold may be split between them where it has more bytes than this.
        is_whole: these are all the ranks there are.
        lenient: keys whose contents may differ between ranks: the lowest rank's are written, all of them.

    Raises:
        InvalidStateError: the boxes of a tensor do not tile it exactly, which is asked of them where ``is_whole``.
    """
    sets, set_of_box = _sets_of(holdings)
    plain = {id(holding): KeyChunks(lo=holding.lo, length=holding.length) for holding in holdings}
    plan = JointPlan(
        keys=list(heads),
        heads=list(heads.values()),
        numbers={key: number for number, key in enumerate(heads)},
        holdings=holdings,
        chunks=[plain[id(holding)] for holding in holdings],
        ranks=ranks,
        lenient=lenient,
        sets=sets,
        set_of_box=set_of_box,
        is_cut=np.zeros(len(heads), dtype=bool),
    )
    tied = _tied(plan)
    if not to_lowest_rank:
        _choose_writers(plan, tied, split_bytes)
    for number, first in tied.items():
        is_like = holdings[number].is_like(holdings[first])
        plan.chunks[number] = plan.chunks[first] if is_like else _moved(plan, first, number)
        plan.is_cut[number] = plan.is_cut[first] or not is_like
    if is_whole:
        _check_tiling(plan)
    return plan


def _sets_of(holdings: Sequence[Holding]) -> tuple[list[np.ndarray], dict[int, np.ndarray]]:
    """The distinct sets of ranks that hold a box together; and, by the id of a holding, the set of each of its boxes.

    That is -1 for boxes with one holder or without elements; holdings that have no other boxes are left out.
    """
    sets: list[np.ndarray] = []
    known: dict[bytes, int] = {}
    found: dict[int, np.ndarray] = {}
    for holding in holdings:
        shared = holding.shared
        if id(holding) in found or not len(shared):
            continue
        counts = np.diff(holding.starts)[shared]
        ends = np.cumsum(counts)
        rows = np.repeat(holding.starts[shared] - (ends - counts), counts) + np.arange(ends[-1])
        number, firsts = same_runs(holding.holder[rows], ends - counts, counts)
        mine = []
        for first in shared[firsts].tolist():
            holders = holding.holders_of(first)
            mine.append(known.setdefault(holders.tobytes(), len(sets)))
            if mine[-1] == len(sets):
                sets.append(holders)
        found[id(holding)] = np.full(len(holding.lo), -1, dtype=np.int64)
        found[id(holding)][shared] = np.array(mine, dtype=np.int64)[number]
    return sets, found


def _tied(plan: JointPlan) -> dict[int, int]:
    """The keys that are tied, each with the one that it is tied to.

    What is tied to a tensor of which somebody holds more is taken for a tensor of its own.
    """
    tied: dict[int, int] = {}
    for number, head in enumerate(plan.heads):
        if head is not None and head.alias_of is not None:
            place = plan.numbers[head.alias_of]
            first, mine = plan.holdings[place], plan.holdings[number]
            if mine.is_like(first) or all(
                len(mine.boxes_around(low, length)) for low, length in zip(first.lo, first.length, strict=True)
            ):
                tied[number] = place
            else:
                plan.heads[number] = head._replace(alias_of=None)
    return tied


def _choose_writers(plan: JointPlan, tied: Mapping[int, int], split_bytes: int) -> None:
    """Have what several ranks hold written so that all ranks write about as many bytes."""
    loads = np.zeros(plan.ranks)  # the bytes that each rank writes because nobody else could
    bytes_alone: dict[int, tuple[Holding, int]] = {}
    shared: list[int] = []
    itemsizes: list[int] = []
    for number, (key, head, holding) in enumerate(zip(plan.keys, plan.heads, plan.holdings, strict=True)):
        if number in tied:
            continue
        itemsize = 1 if head is None else head.properties.dtype.itemsize
        _, before = bytes_alone.get(id(holding), (holding, 0))
        bytes_alone[id(holding)] = holding, before + itemsize
        if len(holding.shared) and key not in plan.lenient:
            shared.append(number)
            itemsizes.append(itemsize)
    if not shared:
        return
    for holding, nbytes in bytes_alone.values():
        alone = np.diff(holding.starts) == 1
        loads += np.bincount(holding.lowest[alone], weights=holding.volume[alone] * nbytes, minlength=plan.ranks)
    width = max([plan.holdings[number].lo.shape[1] for number in shared])
    sizes, lengths, sets = [], [], []
    for number, itemsize in zip(shared, itemsizes, strict=True):
        holding = plan.holdings[number]
        sizes.append(holding.volume[holding.shared] * itemsize)
        lengths.append(widened(holding.length[holding.shared], width, 1))
        sets.append(plan.set_of_box[id(holding)][holding.shared])
    bounds = np.cumsum([0, *map(len, sizes)])
    boxes = Shared(
        nbytes=np.concatenate(sizes), length=np.concatenate(lengths), itemsize=np.repeat(itemsizes, np.diff(bounds))
    )
    set_of_box = np.concatenate(sets)
    parts = choose_writers(boxes, plan.sets, set_of_box, loads, split_bytes=split_bytes)
    firsts = np.cumsum([0, *map(len, plan.sets)])
    writer = np.concatenate(plan.sets)[firsts[set_of_box[parts.box]] + parts.holder]
    ends = np.searchsorted(parts.box, bounds).tolist()
    for place, number in enumerate(shared):
        holding, rows = plan.holdings[number], slice(ends[place], ends[place + 1])
        mine = parts.take(rows)
        mine = mine._replace(box=holding.shared[mine.box - bounds[place]])
        plan.chunks[number] = chunks_of(holding, mine, writer[rows])
        plan.is_cut[number] = (mine.dimension >= 0).any()


def _moved(plan: JointPlan, first: int, number: int) -> KeyChunks:
    """The chunks of key ``first`` for ``number``, which is tied to it and held elsewhere.

    Each is written by the rank that has it there, if that has it here too, else by the lowest that has.
    """
    chunks, holding = plan.chunks[first], plan.holdings[number]
    writers = plan.holdings[first].lowest if chunks.writer is None else chunks.writer
    boxes, ranks = [], []
    for low, length, rank in zip(chunks.lo, chunks.length, writers.tolist(), strict=True):
        around = holding.boxes_around(low, length).tolist()
        holders = {holder: box for box in around for holder in holding.holders_of(box).tolist()}
        ranks.append(rank if rank in holders else min(holders))
        boxes.append(holders[ranks[-1]])
    return dataclasses.replace(chunks, box=np.array(boxes, np.int64), writer=np.array(ranks, np.int64))


def _check_tiling(plan: JointPlan) -> None:
    """InvalidStateError unless the chunks of each tensor tile it exactly; each distinct table is checked once."""
    tables: dict[int, tuple[KeyChunks, tuple[int, ...]]] = {}
    for head, chunks in zip(plan.heads, plan.chunks, strict=True):
        if head is not None:
            tables.setdefault(id(chunks.lo), (chunks, tuple(head.size)))
    sizes = [size for _, size in tables.values()]
    width = max(map(len, sizes), default=0)
    nothing = np.zeros((0, width), dtype=np.int64)
    faults = check_coverage(
        np.repeat(np.arange(len(tables)), [len(chunks.lo) for chunks, _ in tables.values()]),
        np.concatenate([nothing, *[widened(chunks.lo, width, 0) for chunks, _ in tables.values()]]),
        np.concatenate([nothing, *[widened(chunks.length, width, 1) for chunks, _ in tables.values()]]),
        padded(sizes, fill=1).reshape(len(sizes), width),
    )
    if not faults:
        return
    names = list(tables)
    details = {names[fault.tensor]: fault.detail for fault in faults}
    wrong = [
        (key, details[id(chunks.lo)])
        for key, head, chunks in zip(plan.keys, plan.heads, plan.chunks, strict=True)
        if head is not None and id(chunks.lo) in details
    ]
    key, detail = wrong[0]
    others = f" (and {len(wrong) - 1} more keys)" if len(wrong) > 1 else ""
    raise InvalidStateError(f"the pieces of {key!r} do not make up the whole tensor: {detail}{others}", key=key)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ByRank:
    """Columns of all ranks, one after the other: those of rank r are the rows from ``bounds[r]`` to ``bounds[r + 1]``.

    ``row`` is a rank's local row; ``key`` and ``number`` say what of it: a chunk of its key, or its set of holders.
    ``held`` is how many rows each rank has in all.
    """

    bounds: np.ndarray
    row: np.ndarray
    key: np.ndarray
    number: np.ndarray
    held: np.ndarray

    def of(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        mine = slice(int(self.bounds[rank]), int(self.bounds[rank + 1]))
        return self.row[mine], self.key[mine], self.number[mine]


_Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True, eq=False)
class JointPlan:
    """Who writes what: for each key, in the order of the metadata, what it is, who holds it, and its chunks.

    A rank's rows are numbered by the names of their keys, whatever order the rank has them in. ``numbers`` has the
    place of each key, ``is_cut`` whether any of its chunks is a part of what its writer holds. ``sets`` are the
    distinct sets of ranks that hold a box together, ``set_of_box`` tells which, by the id of a holding that has such.
    """

    keys: list[str]
    heads: list[TensorHead | None]
    numbers: dict[str, int]
    holdings: list[Holding]
    chunks: list[KeyChunks]
    ranks: int
    lenient: frozenset[str]
    sets: list[np.ndarray]
    set_of_box: dict[int, np.ndarray]
    is_cut: np.ndarray

    @cached_property
    def written(self) -> ByRank:
        """What every rank writes: its local rows, their keys, and of these the chunks."""
        return self._by_rank(self._written_rows)

    @cached_property
    def compared(self) -> ByRank:
        """What every rank has in common with others: its local rows, their keys, and the sets of holders.

        A set has two numbers: twice its own, and one more than that for what may differ.
        """
        return self._by_rank(self._compared_rows)

    def _by_rank(self, pick: Callable[[int, int], _Rows | None]) -> ByRank:
        """Columns of what ``pick`` finds in each part of each key: ranks, which of their rows of it, numbers."""
        narrow = np.uint16 if self.ranks <= 1 << 16 else np.uint32
        nothing = np.zeros(0, dtype=np.uint32)
        ranks, rows, numbers, owners = [nothing.astype(narrow)], [nothing], [nothing], [nothing]
        before = np.zeros(self.ranks, dtype=np.uint32)
        held_counts: dict[int, np.ndarray] = {}
        for which in sorted(range(len(self.keys)), key=self.keys.__getitem__):
            for place, part in enumerate(self.holdings[which].parts):
                found = pick(which, place)
                if found is not None:
                    rank, row, number = found
                    ranks.append(rank.astype(narrow))
                    rows.append(before[rank] + row.astype(np.uint32))
                    numbers.append(number.astype(np.uint32))
                    owners.append(np.full(len(rank), which, dtype=np.uint32))
                if len(part.rank) < _FEW_HOLDERS:
                    np.add.at(before, part.rank, np.uint32(1))
                    continue
                if id(part) not in held_counts:
                    held_counts[id(part)] = np.bincount(part.rank, minlength=self.ranks).astype(np.uint32)
                before += held_counts[id(part)]
        rank = np.concatenate(ranks)
        order = np.argsort(rank, kind="stable")
        return ByRank(
            bounds=np.concatenate([[0], np.cumsum(np.bincount(rank, minlength=self.ranks))]),
            row=np.concatenate(rows)[order],
            key=np.concatenate(owners)[order],
            number=np.concatenate(numbers)[order],
            held=before,
        )

    def _written_rows(self, which: int, place: int) -> _Rows:
        holding, chunks = self.holdings[which], self.chunks[which]
        part, boxes = holding.parts[place], holding.box_of[place]
        if chunks.writer is None:
            if len(holding.holder) == len(holding.lo):
                return part.rank, part.within, boxes
            mine = np.flatnonzero(holding.lowest[boxes] == part.rank)
            return part.rank[mine], part.within[mine], boxes[mine]
        assert chunks.box is not None
        # A row is found by its rank and its box.
        count = np.int64(len(holding.lo))
        code, wanted = part.rank * count + boxes, chunks.writer * count + chunks.box
        order = None if bool((code[1:] >= code[:-1]).all()) else np.argsort(code, kind="stable")
        found = np.minimum(np.searchsorted(code, wanted, sorter=order), max(len(code) - 1, 0))
        row = found if order is None else order[found]
        number = np.flatnonzero(code[row] == wanted) if len(code) else np.zeros(0, dtype=np.int64)
        return chunks.writer[number], part.within[row[number]], number

    def _compared_rows(self, which: int, place: int) -> _Rows | None:
        holding = self.holdings[which]
        if not len(holding.shared):
            return None
        part = holding.parts[place]
        sets = self.set_of_box[id(holding)][holding.box_of[place]]
        mine = np.flatnonzero(sets >= 0)
        return part.rank[mine], part.within[mine], 2 * sets[mine] + (self.keys[which] in self.lenient)

    @cached_property
    def compared_sets(self) -> np.ndarray:
        """The sets in which the ranks have anything in common with others: those of each rank, one rank after another.

        They are numbered as in ``compared``.
        """
        compared = self.compared
        owner = np.repeat(np.arange(self.ranks), np.diff(compared.bounds))
        count = 2 * max(len(self.sets), 1)
        return np.unique(owner * count + compared.number) % count

    def chosen(self, rank: int) -> Chosen:
        """What ``rank`` writes of the rows that it holds."""
        rows, keys, numbers = self.written.of(rank)
        cut = np.flatnonzero(self.is_cut[keys])
        lows, lengths = [], []
        for key, chunk in zip(keys[cut].tolist(), numbers[cut].tolist(), strict=True):
            lows.append(self.chunks[key].lo[chunk].tolist())
            lengths.append(self.chunks[key].length[chunk].tolist())
        is_everything = len(rows) == self.written.held[rank] and bool((np.diff(rows) == 1).all())
        return Chosen(
            rows=None if is_everything else rows,
            hint=numbers,
            cut=cut,
            lo=padded(lows, fill=0),
            length=padded(lengths, fill=1),
        )

    def __len__(self) -> int:
        return len(self.keys)

    def item(self, row: int) -> STORAGE_TYPES:
        """What the metadata says of key number ``row``."""
        return entry_of(self.heads[row], self.chunks[row].lo, self.chunks[row].length)


def entry_of(head: TensorHead | None, lo: np.ndarray, length: np.ndarray) -> STORAGE_TYPES:
    """What the metadata says of a key that has these chunks."""
    if head is None:
        return BytesStorageMetadata()
    chunks = ChunkColumns(lo, length, 0, len(lo), len(head.size))
    properties = dataclasses.replace(head.properties)
    return TensorStorageMetadata(properties, head.size, LazyList(chunks), head.alias_of, head.kind)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chosen:
    """What a rank writes of its rows, which are numbered by the names of their keys.

    It writes ``rows`` (all of them where that is None), as chunk ``hint`` of their tensors, those at ``cut`` cut to the
    boxes ``lo``, ``length``.
    """

    rows: np.ndarray | None
    hint: np.ndarray
    cut: np.ndarray
    lo: np.ndarray
    length: np.ndarray


def rows_by_name(columns: WriteColumns) -> np.ndarray:
    """The rows in the order of their keys' names, which all ranks know."""
    place = np.empty(len(columns.keys), dtype=np.int64)
    place[sorted(range(len(columns.keys)), key=columns.keys.__getitem__)] = np.arange(len(columns.keys))
    return np.argsort(place[columns.key], kind="stable")


def chosen_columns(
    local: WriteColumns, chosen: Chosen, heads: Mapping[str, TensorHead | None], *, planning: bytes = b""
) -> WriteColumns:
    """The rows that are written, of all that a rank holds, in its own order.

    ``heads`` has the keys that all ranks together say something else of than this one.
    """
    by_name = rows_by_name(local)
    rows = by_name if chosen.rows is None else by_name[chosen.rows]
    lo, length = local.lo[rows], local.length[rows]
    width = chosen.lo.shape[1]
    lo[chosen.cut, :width], length[chosen.cut, :width] = chosen.lo, chosen.length
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    used, key = np.unique(local.key[rows], return_inverse=True)
    names = [local.keys[number] for number in used.tolist()]
    return WriteColumns(
        keys=names,
        heads=[heads.get(name, local.heads[number]) for name, number in zip(names, used.tolist(), strict=True)],
        key=key.astype(np.int64),
        lo=lo[order],
        length=length[order],
        hint=chosen.hint[order].astype(np.int64),
        is_shard=local.is_shard[rows],
        planning=planning,
        planned=order,
    )
