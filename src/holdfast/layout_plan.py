"""What all ranks write together, from their layouts: nobody's rows are sent, and few are made. On the coordinator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast._plan.holdings import HeldRows, Holding, holding_of
from holdfast._plan.layout import box_words
from holdfast._values.digest import name_words
from holdfast._values.lazy import cached_property
from holdfast.global_plan import check_same_head, joined_head, untied_head
from holdfast.joint_plan import JointPlan
from holdfast.layouts import WHOLE, Members
from holdfast.planner import TensorHead, WriteColumns, padded

_Kind = tuple[int, int, tuple[int, ...]]  # class, rule, size


class LayoutPlan(JointPlan):
    """Who writes what, from the layouts of all ranks.

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
        self.names = names
        self._rows: dict[_Kind, HeldRows] = {}
        self._holdings: dict[tuple[_Kind, ...], Holding] = {}
        heads, holdings = self._gather(keys)
        lenient = frozenset[str]().union(*(members.layout.lenient for members in classes))
        super().__init__(heads, holdings, len(names), to_lowest_rank=to_lowest_rank, hosts=hosts, lenient=lenient)

    def _gather(self, keys: list[str]) -> tuple[dict[str, TensorHead | None], list[Holding]]:
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
        untied = {key: untied_head(heads[key], heads) for key in keys}
        return untied, [self._holding(tuple(kinds[key])) for key in keys]

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
