"""What all ranks write together: who writes which box, and the metadata of the whole. Runs on the coordinator.

Each distinct box has one writer; what several ranks hold is spread over them, so that all hosts and ranks write about
as much. The work follows what differs: tensors that are held alike share one holding, its boxes and who writes them;
nothing is made once per chunk but numpy columns, and those of a rank are made for that rank. The result depends on
what ranks hold and on their hosts, and on nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from holdfast._plan.balance import SPLIT_BYTES, Shared, same_segments, sets_of, share_out
from holdfast._plan.coverage import check_coverage, widened
from holdfast._plan.holdings import ByRank, Holding, KeyChunks, chunks_of
from holdfast._plan.shares import sums
from holdfast._values.lazy import LazyDict, LazyList, cached_property
from holdfast.errors import InvalidStateError
from holdfast.metadata import STORAGE_TYPES, BytesStorageMetadata, ChunkColumns, Metadata, TensorStorageMetadata
from holdfast.planner import TensorHead, WriteColumns, padded

_FEW_HOLDERS = 64


class JointPlan:
    """Who writes what.

    A rank's rows are numbered by the names of their keys, whatever order the rank has them in.

    Args:
        heads: what every key is, in the order that the metadata has them in.
        holdings: what is held of each of them, and by whom.
        ranks: how many ranks there are.
        to_lowest_rank: what several ranks hold is written by the lowest of them.
        hosts: the number of each rank's host, where that makes a difference.
        split_bytes: what several ranks hold may be split between them where it has more bytes than this.
        is_whole: these are all the ranks there are.
        lenient: keys whose contents may differ between ranks: the lowest rank's are written, all of them.

    Raises:
        InvalidStateError: the boxes of a tensor do not tile it exactly, which is asked of them where ``is_whole``.
    """

    def __init__(
        self,
        heads: Mapping[str, TensorHead | None],
        holdings: list[Holding],
        ranks: int,
        *,
        to_lowest_rank: bool = False,
        hosts: np.ndarray | None = None,
        split_bytes: int = SPLIT_BYTES,
        is_whole: bool = True,
        lenient: frozenset[str] = frozenset(),
    ) -> None:
        self.lenient = lenient
        self.keys = list(heads)
        self.heads = list(heads.values())
        self.holdings = holdings
        self.ranks = ranks
        self.to_lowest_rank = to_lowest_rank
        self.hosts = hosts
        self.numbers = {key: number for number, key in enumerate(self.keys)}
        # The distinct sets of ranks that hold a box together; they grow as ``set_of_box`` looks at holdings.
        self.sets: list[np.ndarray] = []
        self._set_numbers: dict[bytes, int] = {}
        self._sets_of_boxes: dict[int, np.ndarray] = {}
        self._untie_what_is_elsewhere()
        self.chunks = self._assigned(to_lowest_rank=to_lowest_rank, split_bytes=split_bytes)
        if is_whole:
            self._check_tiling()

    def _check_tiling(self) -> None:
        """InvalidStateError unless the chunks of each tensor tile it exactly; each distinct table is checked once."""
        numbers: dict[int, int] = {}
        tables: list[KeyChunks] = []
        sizes: list[tuple[int, ...]] = []
        for head, chunks in zip(self.heads, self.chunks, strict=True):
            if head is not None and numbers.setdefault(id(chunks.lo), len(tables)) == len(tables):
                tables.append(chunks)
                sizes.append(tuple(head.size))
        width = max(map(len, sizes), default=0)
        nothing = np.zeros((0, width), dtype=np.int64)
        faults = check_coverage(
            np.repeat(np.arange(len(tables)), [len(chunks.lo) for chunks in tables]),
            np.concatenate([nothing, *(widened(chunks.lo, width, 0) for chunks in tables)]),
            np.concatenate([nothing, *(widened(chunks.length, width, 1) for chunks in tables)]),
            padded(sizes, fill=1).reshape(len(sizes), width),
        )
        if not faults:
            return
        details = {fault.tensor: fault.detail for fault in faults}
        wrong = [
            (key, details[numbers[id(chunks.lo)]])
            for key, head, chunks in zip(self.keys, self.heads, self.chunks, strict=True)
            if head is not None and numbers[id(chunks.lo)] in details
        ]
        raise not_whole(wrong)

    def _untie_what_is_elsewhere(self) -> None:
        """Take for a tensor of its own what is tied to one of which somebody holds more."""
        for number, head in enumerate(self.heads):
            if head is not None and head.alias_of is not None:
                first, mine = self.holdings[self.numbers[head.alias_of]], self.holdings[number]
                if not mine.is_like(first) and not all(
                    len(mine.boxes_around(low, length)) for low, length in zip(first.lo, first.length, strict=True)
                ):
                    self.heads[number] = head._replace(alias_of=None)

    # --- who writes what ---------------------------------------------------------------------------------------------

    def _itemsize(self, number: int) -> int:
        head = self.heads[number]
        return 1 if head is None else head.properties.dtype.itemsize

    def _assigned(self, *, to_lowest_rank: bool, split_bytes: int) -> list[KeyChunks]:
        """The chunks of every key; those of a tied one are those of the one it is tied to."""
        plain = {id(holding): KeyChunks(lo=holding.lo, length=holding.length) for holding in self.holdings}
        chunks = [plain[id(holding)] for holding in self.holdings]
        own = [number for number, head in enumerate(self.heads) if head is None or head.alias_of is None]
        shared = [
            number
            for number in own
            if not to_lowest_rank and self.keys[number] not in self.lenient and len(self.holdings[number].shared)
        ]
        if shared:
            for number, of_key in zip(shared, self._shared_out(own, shared, split_bytes), strict=True):
                chunks[number] = of_key
        for number, head in enumerate(self.heads):
            if head is not None and head.alias_of is not None:
                first = self.numbers[head.alias_of]
                is_like = self.holdings[number].is_like(self.holdings[first])
                chunks[number] = chunks[first] if is_like else self._moved(chunks[first], first, number)
        return chunks

    def _moved(self, chunks: KeyChunks, first: int, number: int) -> KeyChunks:
        """The chunks of key ``first`` for ``number``, which is tied to it and held elsewhere.

        Each is written by the rank that has it there, if that has it here too, else by the lowest that has.
        """
        holding = self.holdings[number]
        writers = self.holdings[first].lowest if chunks.writer is None else chunks.writer
        boxes, ranks = [], []
        for low, length, rank in zip(chunks.lo, chunks.length, writers.tolist(), strict=True):
            around = holding.boxes_around(low, length).tolist()
            holders = {holder: box for box in around for holder in holding.holders_of(box).tolist()}
            ranks.append(rank if rank in holders else min(holders))
            boxes.append(holders[ranks[-1]])
        return dataclasses.replace(chunks, box=np.array(boxes, np.int64), writer=np.array(ranks, np.int64), is_cut=True)

    def _shared_out(self, own: list[int], shared: list[int], split_bytes: int) -> list[KeyChunks]:
        """The chunks of the keys ``shared``, so that all hosts and ranks write about as many bytes."""
        holdings = [self.holdings[number] for number in shared]
        itemsizes = [self._itemsize(number) for number in shared]
        width = max(holding.lo.shape[1] for holding in holdings)
        bounds = np.cumsum([0, *(len(holding.shared) for holding in holdings)])
        sizes = [holding.volume[holding.shared] * size for holding, size in zip(holdings, itemsizes, strict=True)]
        number = np.concatenate([self.set_of_box(holding)[holding.shared] for holding in holdings])
        parts = share_out(
            Shared(
                nbytes=np.concatenate(sizes),
                length=np.concatenate([widened(holding.length[holding.shared], width, 1) for holding in holdings]),
                itemsize=np.repeat(itemsizes, np.diff(bounds)),
            ),
            sets_of(self.sets, number),
            self._fixed_loads(own),
            hosts=self.hosts,
            split_bytes=split_bytes,
        )
        firsts = np.cumsum([0, *(len(holders) for holders in self.sets)])
        writer = np.concatenate(self.sets)[firsts[number[parts.box]] + parts.holder]
        ends = np.searchsorted(parts.box, bounds)
        return [
            chunks_of(
                holding,
                (mine := parts.take(np.arange(start, stop)))._replace(box=holding.shared[mine.box - first]),
                writer[start:stop],
            )
            for holding, first, start, stop in zip(holdings, bounds[:-1], ends[:-1], ends[1:], strict=True)
        ]

    def _fixed_loads(self, own: list[int]) -> np.ndarray:
        """The bytes that each rank writes because nobody else could."""
        loads = np.zeros(self.ranks)
        bytes_of: dict[int, int] = {}
        for number in own:
            holding = self.holdings[number]
            bytes_of[id(holding)] = bytes_of.get(id(holding), 0) + self._itemsize(number)
        for holding in {id(holding): holding for holding in self.holdings}.values():
            alone = holding.holders == 1
            if id(holding) in bytes_of:
                loads += sums(holding.lowest[alone], holding.volume[alone] * bytes_of[id(holding)], self.ranks)
        return loads

    def set_of_box(self, holding: Holding) -> np.ndarray:
        """The number of the set of holders of each box; -1 for those with one holder or without elements."""
        known = self._sets_of_boxes.get(id(holding))
        if known is not None:
            return known
        numbers = np.full(len(holding.lo), -1, dtype=np.int64)
        shared = holding.shared
        if len(shared):
            counts = holding.holders[shared]
            ends = np.cumsum(counts)
            rows = np.repeat(holding.starts[shared] - (ends - counts), counts) + np.arange(ends[-1])
            number, firsts = same_segments(holding.holder[rows], ends - counts, counts)
            mine = []
            for first in shared[firsts].tolist():
                holders = holding.holders_of(first)
                name = holders.tobytes()
                if name not in self._set_numbers:
                    self._set_numbers[name] = len(self.sets)
                    self.sets.append(holders)
                mine.append(self._set_numbers[name])
            numbers[shared] = np.array(mine, dtype=np.int64)[number]
        self._sets_of_boxes[id(holding)] = numbers
        return numbers

    # --- for each rank -----------------------------------------------------------------------------------------------

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

    def _by_rank(self, pick: Callable[[int, int], tuple[np.ndarray, np.ndarray, np.ndarray] | None]) -> ByRank:
        """Columns of what ``pick`` finds in each part of each key: ranks, which of their rows of it, numbers."""
        narrow = np.uint16 if self.ranks <= 1 << 16 else np.uint32
        ranks, rows, numbers, owners, counts = [], [], [], [], []
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
                    owners.append(which)
                    counts.append(len(rank))
                if len(part.rank) < _FEW_HOLDERS:
                    np.add.at(before, part.rank, np.uint32(1))
                    continue
                if id(part) not in held_counts:
                    held_counts[id(part)] = np.bincount(part.rank, minlength=self.ranks).astype(np.uint32)
                before += held_counts[id(part)]
        nothing = np.zeros(0, dtype=np.uint32)
        rank = np.concatenate(ranks) if ranks else nothing
        order = np.argsort(rank, kind="stable")
        owner = np.repeat(np.array(owners, dtype=np.uint32), counts)
        return ByRank(
            bounds=np.concatenate([[0], np.cumsum(np.bincount(rank, minlength=self.ranks))]),
            row=(np.concatenate(rows) if rows else nothing)[order],
            key=owner[order],
            number=(np.concatenate(numbers) if numbers else nothing)[order],
        )

    def _written_rows(self, which: int, place: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        holding, chunks = self.holdings[which], self.chunks[which]
        part, boxes = holding.parts[place], holding.box_of[place]
        if chunks.writer is None:
            if holding.is_single:
                return part.rank, part.within, boxes
            mine = np.flatnonzero(holding.lowest[boxes] == part.rank)
            return part.rank[mine], part.within[mine], boxes[mine]
        assert chunks.box is not None
        # A row is found by its rank and its box.
        code, wanted = (
            rank * np.int64(len(holding.lo)) + box for rank, box in ((part.rank, boxes), (chunks.writer, chunks.box))
        )
        order = None if bool((code[1:] >= code[:-1]).all()) else np.argsort(code, kind="stable")
        found = np.minimum(np.searchsorted(code, wanted, sorter=order), max(len(code) - 1, 0))
        row = found if order is None else order[found]
        number = np.flatnonzero(code[row] == wanted) if len(code) else np.zeros(0, dtype=np.int64)
        return chunks.writer[number], part.within[row[number]], number

    def _compared_rows(self, which: int, place: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        holding = self.holdings[which]
        if not len(holding.shared):
            return None
        part, boxes = holding.parts[place], holding.box_of[place]
        sets = self.set_of_box(holding)[boxes]
        mine = np.flatnonzero(sets >= 0)
        return part.rank[mine], part.within[mine], 2 * sets[mine] + (self.keys[which] in self.lenient)

    @cached_property
    def group_sets(self) -> tuple[np.ndarray, np.ndarray]:
        """The ranks that have anything in common with others, each once for each set of holders, and these numbers."""
        compared = self.compared
        owner = np.repeat(np.arange(self.ranks), np.diff(compared.bounds))
        count = 2 * max(len(self.sets), 1)
        code = np.unique(owner * count + compared.number) if len(owner) else np.zeros(0, dtype=np.int64)
        return code // count, code % count

    @cached_property
    def held_rows(self) -> np.ndarray:
        counts = np.zeros(self.ranks, dtype=np.int64)
        times: dict[int, int] = {}
        parts = {id(part): part for holding in self.holdings for part in holding.parts}
        for holding in self.holdings:
            for part in holding.parts:
                times[id(part)] = times.get(id(part), 0) + 1
        for number, part in parts.items():
            counts += np.bincount(part.rank, minlength=self.ranks) * times[number]
        return counts

    @cached_property
    def is_cut(self) -> np.ndarray:
        """Whether any chunk of each key is a part of what its writer holds."""
        return np.array([chunks.is_cut for chunks in self.chunks], dtype=bool)

    def chosen(self, rank: int) -> Chosen:
        """What ``rank`` writes of the rows that it holds."""
        rows, keys, numbers = self.written.of(rank)
        cut = np.flatnonzero(self.is_cut[keys])
        boxes = [
            (self.chunks[key].lo[chunk].tolist(), self.chunks[key].length[chunk].tolist())
            for key, chunk in zip(keys[cut].tolist(), numbers[cut].tolist(), strict=True)
        ]
        is_everything = len(rows) == self.held_rows[rank] and bool((np.diff(rows) == 1).all())
        return Chosen(
            rows=None if is_everything else rows,
            hint=numbers,
            cut=cut,
            lo=padded([low for low, _ in boxes], fill=0),
            length=padded([size for _, size in boxes], fill=1),
        )

    # --- the whole ---------------------------------------------------------------------------------------------------

    def metadata(self) -> Metadata:
        """What a checkpoint of all this says of itself."""
        return Metadata(LazyDict(self.keys, self))

    def __len__(self) -> int:
        return len(self.keys)

    def item(self, row: int) -> STORAGE_TYPES:
        """What the metadata says of key number ``row``."""
        head, chunks = self.heads[row], self.chunks[row]
        if head is None:
            return BytesStorageMetadata()
        table = ChunkColumns(chunks.lo, chunks.length, 0, len(chunks.lo), len(head.size))
        return TensorStorageMetadata(head.properties.duplicate(), head.size, LazyList(table), head.alias_of, head.kind)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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


def not_whole(wrong: Sequence[tuple[str, str]]) -> InvalidStateError:
    """What to raise where the pieces of these keys do not tile them; each with what is wrong with it."""
    key, detail = wrong[0]
    others = f" (and {len(wrong) - 1} more keys)" if len(wrong) > 1 else ""
    return InvalidStateError(f"the pieces of {key!r} do not make up the whole tensor: {detail}{others}", key=key)
