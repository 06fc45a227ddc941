"""What all ranks write together, from their layouts: what ``global_plan`` plans, without anybody's rows.

The work follows what differs: tensors that are held alike share one holding, its boxes and who writes them; nothing is
made once per chunk but numpy columns, and those of a rank are made for that rank. Runs on the coordinator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from holdfast._plan.balance import Shared, same_segments, sets_of, share_out
from holdfast._plan.chunks import ByRank, KeyChunks, chunks_of, widened
from holdfast._plan.coverage import check_coverage
from holdfast._plan.holdings import HeldRows, Holding, holding_of
from holdfast._plan.layout import box_words
from holdfast._plan.shares import sums
from holdfast._values.digest import name_words
from holdfast._values.lazy import LazyDict, LazyList, cached_property
from holdfast.errors import InvalidStateError
from holdfast.global_plan import check_same_head, joined_head, untied_head
from holdfast.layouts import WHOLE, Members
from holdfast.metadata import STORAGE_TYPES, BytesStorageMetadata, ChunkColumns, Metadata, TensorStorageMetadata
from holdfast.planner import TensorHead, WriteColumns, padded

_Kind = tuple[int, int, tuple[int, ...]]  # class, rule, size

_FEW_HOLDERS = 64


class LayoutPlan:
    """Who writes what, from the layouts of all ranks.

    A rank's rows are numbered by the names of their keys, whatever order the rank has them in.

    Args:
        classes: what each rank has, as the classes that it is a member of.
        keys: all keys in the order that the metadata has them in.
        names: the number that meshes have for each rank.
        to_lowest_rank: what several ranks hold is written by the lowest of them.
        hosts: the number of each rank's host, where that makes a difference.

    Raises:
        InvalidStateError: the boxes of a tensor do not tile it exactly.
        RankDisagreementError: layouts say different things of one key.
    """

    def __init__(
        self,
        classes: Sequence[Members],
        keys: list[str],
        names: np.ndarray,
        *,
        to_lowest_rank: bool = False,
        hosts: np.ndarray | None = None,
    ) -> None:
        self.classes = classes
        self.keys = keys
        self.names = names
        self.ranks = len(names)
        self.to_lowest_rank = to_lowest_rank
        self.hosts = hosts
        self._rows: dict[_Kind, HeldRows] = {}
        self._holdings: dict[tuple[_Kind, ...], Holding] = {}
        self.numbers = {key: number for number, key in enumerate(keys)}
        self._gather_keys()
        self.has_odd_ties = self._has_odd_ties()
        if not self.has_odd_ties:
            self.chunks = self._assigned(to_lowest_rank)
            self._check_tiling()

    # --- what there is -----------------------------------------------------------------------------------------------

    def _gather_keys(self) -> None:
        """What every key is, and what is held of it."""
        heads: dict[str, TensorHead | None] = {}
        first_rank: dict[str, int] = {}
        kinds: dict[str, list[_Kind]] = {}
        is_held: set[str] = set()
        for number, members in enumerate(self.classes):
            rank, layout = int(members.ranks[0]), members.layout
            for key, head, rule in zip(layout.keys, layout.heads, layout.rules, strict=True):
                known = heads.setdefault(key, head)
                check_same_head(key, known, first_rank.setdefault(key, rank), head, rank)
                kind = (number, rule, () if head is None else tuple(head.size))
                kinds.setdefault(key, []).append(kind)
                if not len(self._held_rows(kind).rank):
                    continue
                if key not in is_held:
                    is_held.add(key)
                    heads[key] = head
                elif known is not None and head is not None and known is not head:
                    heads[key] = joined_head(known, head)
        self.heads = [untied_head(heads[key], heads) for key in self.keys]
        self.holdings = [self._holding(tuple(kinds[key])) for key in self.keys]
        self.lenient = frozenset[str]().union(*(members.layout.lenient for members in self.classes))

    def _held_rows(self, kind: _Kind) -> HeldRows:
        if kind not in self._rows:
            number, rule, size = kind
            members = self.classes[number].ranks
            found = self.classes[number].layout.boxes(rule, size, self.names[members])
            is_everyone = len(found.member) == len(members) and bool((np.diff(found.member) == 1).all())
            rank = members if is_everyone else members[found.member]
            self._rows[kind] = HeldRows(rank=rank, lo=found.lo, length=found.length)
        return self._rows[kind]

    def _holding(self, kinds: tuple[_Kind, ...]) -> Holding:
        if kinds not in self._holdings:
            self._holdings[kinds] = holding_of([self._held_rows(kind) for kind in kinds])
        return self._holdings[kinds]

    def row_digests(self) -> np.ndarray:
        """What ``rows_digest`` makes of each rank's local rows, if they are as its layout says."""
        digests = np.zeros(self.ranks, dtype=np.uint64)
        factors: dict[int, int] = {}
        parts: dict[int, HeldRows] = {}
        for factor, holding in zip(name_words(self.keys).tolist(), self.holdings, strict=True):
            for part in holding.parts:
                parts[id(part)] = part
                factors[id(part)] = (factors.get(id(part), 0) + factor) % (1 << 64)
        for number, part in parts.items():
            np.add.at(digests, part.rank, box_words(part.lo, part.length) * np.uint64(factors[number]))
        return digests

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
        key, detail = wrong[0]
        others = f" (and {len(wrong) - 1} more keys)" if len(wrong) > 1 else ""
        raise InvalidStateError(f"the pieces of {key!r} do not make up the whole tensor: {detail}{others}", key=key)

    def _has_odd_ties(self) -> bool:
        """Whether a key is tied to one that is held by other ranks or in other boxes: then rows have to be compared."""
        return any(
            head is not None
            and head.alias_of is not None
            and not self.holdings[self.numbers[head.alias_of]].is_like(self.holdings[number])
            for number, head in enumerate(self.heads)
        )

    # --- who writes what ---------------------------------------------------------------------------------------------

    def _itemsize(self, number: int) -> int:
        head = self.heads[number]
        return 1 if head is None else head.properties.dtype.itemsize

    def _assigned(self, to_lowest_rank: bool) -> list[KeyChunks]:
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
            for number, of_key in zip(shared, self._shared_out(own, shared), strict=True):
                chunks[number] = of_key
        for number, head in enumerate(self.heads):
            if head is not None and head.alias_of is not None:
                chunks[number] = chunks[self.numbers[head.alias_of]]
        return chunks

    def _shared_out(self, own: list[int], shared: list[int]) -> list[KeyChunks]:
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
        )
        firsts = np.cumsum([0, *(len(holders) for holders in self.sets)])
        writer = np.concatenate(self.sets)[firsts[number[parts.box]] + parts.holder]
        ends = np.searchsorted(parts.box, bounds)
        return [
            chunks_of(
                holding,
                dataclasses.replace(mine := parts.take(np.arange(start, stop)), box=holding.shared[mine.box - first]),
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

    @cached_property
    def sets(self) -> list[np.ndarray]:
        """The distinct sets of ranks that hold a box together; grows as ``set_of_box`` looks at holdings."""
        return []

    @cached_property
    def _set_numbers(self) -> dict[bytes, int]:
        return {}

    @cached_property
    def _sets_of_boxes(self) -> dict[int, np.ndarray]:
        return {}

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
                holders = holding.holder[holding.starts[first] : holding.starts[first + 1]]
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
        # Rows are by rank and box, so that a row is found by both.
        code, wanted = (
            rank * np.int64(len(holding.lo)) + box for rank, box in ((part.rank, boxes), (chunks.writer, chunks.box))
        )
        place_of = np.searchsorted(code, wanted)
        number = np.flatnonzero(code[np.minimum(place_of, len(code) - 1)] == wanted) if len(code) else np.zeros(0, int)
        return chunks.writer[number], part.within[place_of[number]], number

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
        """How many rows each rank holds."""
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

    def changed_heads(self, rank: int) -> dict[str, TensorHead | None]:
        """What all ranks together say of the keys of ``rank``, where that is not what it says itself."""
        changed: dict[str, TensorHead | None] = {}
        for number in self.classes_of_rank[rank]:
            changed.update(self._changed_in_class[number])
        return changed

    @cached_property
    def classes_of_rank(self) -> list[list[int]]:
        """The classes that each rank is a member of."""
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        for number, members in enumerate(self.classes):
            for rank in members.ranks.tolist():
                found[rank].append(number)
        return found

    @cached_property
    def _changed_in_class(self) -> list[dict[str, TensorHead | None]]:
        return [
            {
                key: together
                for key, head in zip(members.layout.keys, members.layout.heads, strict=True)
                if (together := self.heads[self.numbers[key]]) is not head and together != head
            }
            for members in self.classes
        ]

    def rows_of(self, rank: int) -> WriteColumns:
        """All that ``rank`` holds, by the names of its keys."""
        found: dict[str, tuple[TensorHead | None, int, HeldRows]] = {}
        for number in self.classes_of_rank[rank]:
            layout = self.classes[number].layout
            for key, head, rule in zip(layout.keys, layout.heads, layout.rules, strict=True):
                size = () if head is None else tuple(head.size)
                found[key] = head, rule, self._held_rows((number, rule, size))
        names = sorted(found)
        lows: list[list[int]] = []
        lengths: list[list[int]] = []
        owners: list[int] = []
        for which, name in enumerate(names):
            rows = found[name][2]
            start, stop = np.searchsorted(rows.rank, [rank, rank + 1]).tolist()
            lows += rows.lo[start:stop].tolist()
            lengths += rows.length[start:stop].tolist()
            owners += [which] * (stop - start)
        owner = np.array(owners, dtype=np.int64)
        is_shard = np.array([found[name][1] != WHOLE for name in names], dtype=bool)
        return WriteColumns(
            keys=names,
            heads=[found[name][0] for name in names],
            key=owner,
            lo=padded(lows, fill=0),
            length=padded(lengths, fill=1),
            hint=np.zeros(len(owner), dtype=np.int64),
            is_shard=is_shard[owner],
            lenient=self.lenient.intersection(names),
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
