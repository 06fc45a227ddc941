"""The coordinator's side of planning a save: what it asks for, round by round, and what it tells each rank."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from holdfast._values.lazy import LazyList
from holdfast.default_planner.plan_messages import (
    Asked,
    Choice,
    Final,
    Groups,
    Job,
    Named,
    Offer,
    chosen_columns,
    said_first,
)
from holdfast.default_planner.save_planner import DefaultSavePlanner
from holdfast.errors import InternalError
from holdfast.global_plan import check_contents
from holdfast.layout_plan import LayoutPlan
from holdfast.layouts import Layout
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan, SavePlanner, WriteColumns
from holdfast.storage import StorageWriter

KEPT_PLANNINGS = 4
"""So many plannings are remembered: enough for a few models that take turns."""

_TOKEN_BYTES = 8
_Round = Generator[list[Asked | None], list[Any], list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What the coordinator keeps of a planning."""

    token: bytes
    offers: list[Offer]
    manner: object
    plan: LayoutPlan


class Coordinator:
    """One planning, as the coordinator sees it; ``layout`` is its own, None where it has none to offer.

    ``outcomes`` are those of plannings before, the newest last.
    """

    def __init__(
        self, planner: SavePlanner, writer: StorageWriter, outcomes: list[Outcome], *, layout: Layout | None
    ) -> None:
        self._planner = planner
        self._writer = writer
        self._outcomes = outcomes
        self._layout = layout
        self._round: _Round | None = None
        self.metadata: Metadata | None = None
        self.outcome: Outcome | None = None

    def plan_of(self, rank: int) -> WriteColumns:
        """The plan of ``rank``, where all was planned by layout."""
        assert self.outcome is not None
        return _columns_of(self.outcome, rank)

    def merge(self, parts: list[Any]) -> list[Any]:
        """What each rank is told, or asked, after what all of them have said."""
        try:
            if self._round is None:
                self._round = self._coordinated(parts)
                asked = next(self._round)
            else:
                asked = self._round.send(parts)
        except StopIteration as end:
            answers: list[Any] = end.value
            return answers
        return [each or Asked(what="nothing") for each in asked]

    def _coordinated(self, parts: list[Any]) -> _Round:
        if any(isinstance(part, SavePlan) for part in parts) or self._layout is None:
            return (yield from self._planned_whole(parts))
        parts = [said_first(part) for part in parts]
        outcome = self._named_by_all(parts)
        if outcome is not None:
            said = [part.digests for part in parts]
        else:
            offers = yield from self._offers(parts)
            plan = yield from self._laid_out(offers)
            if plan is None:
                return (yield from self._planned_whole([None] * len(parts)))
            outcome = Outcome(token=secrets.token_bytes(_TOKEN_BYTES), offers=offers, manner=self._manner, plan=plan)
            said = []
            if any(offer.looks for offer in offers) and len(plan.compared.row):
                said = yield [Asked(what="contents", groups=_groups(plan, rank)) for rank in range(len(parts))]
        yield from self._compared(outcome.plan, said)
        return self._finals(outcome, parts)

    @property
    def _manner(self) -> object:
        assert isinstance(self._planner, DefaultSavePlanner)
        return self._planner.flatten_state_dict, self._planner.dedup_save_to_lowest_rank

    def _named_by_all(self, parts: list[Any]) -> Outcome | None:
        """The planning that every rank names, unless its outcome would be another now."""
        token = parts[0].token if isinstance(parts[0], Named) else b""
        if not all(isinstance(part, Named) and part.token == token for part in parts):
            return None
        known = next((each for each in self._outcomes if each.token == token), None)
        return known if known is not None and known.manner == self._manner else None

    def _offers(self, parts: list[Any]) -> Generator[list[Asked | None], list[Any], list[Offer]]:
        """The offers of all ranks: where a rank names a planning, the one that it made then."""
        before = {outcome.token: outcome.offers for outcome in self._outcomes}
        offers = [
            part if isinstance(part, Offer) else before[part.token][rank] if part.token in before else None
            for rank, part in enumerate(parts)
        ]
        if None in offers:
            again = yield [Asked(what="offer") if offer is None else None for offer in offers]
            offers = [offer or said_first(again[rank]) for rank, offer in enumerate(offers)]
        return [offer for offer in offers if offer is not None]

    def _laid_out(self, offers: list[Offer]) -> Generator[list[Asked | None], list[Any], LayoutPlan | None]:
        """The plan of all, from one description of each layout; None where the rows of a rank are others."""
        assert self._layout is not None
        numbers: dict[bytes, int] = {}
        layout_of_rank = np.array([numbers.setdefault(offer.fingerprint, len(numbers)) for offer in offers])
        known = {
            layout.fingerprint: layout
            for layout in (self._layout, *(each for outcome in self._outcomes for each in outcome.plan.layouts))
        }
        asked: list[Asked | None] = [None] * len(offers)
        for rank, offer in enumerate(offers):
            if offer.fingerprint not in known and layout_of_rank[rank] not in layout_of_rank[:rank]:
                asked[rank] = Asked(what="layout")
        if any(asked):
            for layout in (yield asked):
                if layout is not None:
                    known[layout.fingerprint] = layout
        assert isinstance(self._planner, DefaultSavePlanner)
        plan = LayoutPlan(
            [known[fingerprint] for fingerprint in numbers],
            layout_of_rank,
            np.array([offer.name for offer in offers], dtype=np.int64),
            to_lowest_rank=self._planner.dedup_save_to_lowest_rank,
        )
        said = np.array([offer.rows for offer in offers], dtype=np.uint64)
        return plan if not plan.has_odd_ties and np.array_equal(plan.row_digests(), said) else None

    def _compared(self, plan: LayoutPlan, said: list[bytes]) -> Generator[list[Asked | None], list[Any], None]:
        """RankDisagreementError where ranks hold different contents; only then is asked which."""
        differing = _differing(plan, said)
        if not differing:
            return
        groups = [_groups(plan, rank) if rank in differing else None for rank in range(plan.ranks)]
        details = yield [None if each is None else Asked(what="details", groups=each) for each in groups]
        plans = []
        for rank, (each, found) in enumerate(zip(groups, details, strict=True)):
            if each is None:
                plans.append(SavePlan([]))
                continue
            columns = plan.rows_of(rank)
            fingerprint = np.zeros(len(columns), dtype=np.uint64)
            fingerprint[each.rows] = found
            plans.append(SavePlan(LazyList(dataclasses.replace(columns, fingerprint=fingerprint))))
        check_contents(plans)

    def _finals(self, outcome: Outcome, parts: list[Any]) -> list[Any]:
        """What every rank is told; ``planner`` and storage are told of the whole."""
        plan, planner = outcome.plan, self._planner
        assert isinstance(planner, DefaultSavePlanner)
        others = [each for each in self._outcomes if each.token != outcome.token]
        self._outcomes[:] = [*others[-KEPT_PLANNINGS + 1 :], outcome]
        made: list[SavePlan] = [
            SavePlan(
                LazyList.later(partial(_columns_of, outcome, rank)),
                planner_data=plan.layouts[plan.layout_of[rank]].paths if planner.flatten_state_dict else None,
            )
            for rank in range(plan.ranks)
        ]
        metadata = planner.with_paths(plan.metadata(), [layout.paths for layout in plan.layouts])
        planner.global_plan, planner.metadata = made, metadata
        prepared = self._writer.prepare_global_plan(made)
        self.metadata, self.outcome = metadata, outcome
        answers: list[Any] = []
        for rank, final in enumerate(prepared):
            if (
                final.items is not made[rank].items
                or not isinstance(final.items, LazyList)
                or not final.items.is_unmade
            ):
                answers.append(final)  # storage has looked at it, and may have changed it
                continue
            part = parts[rank]
            knows = isinstance(part, Named) and part.token == outcome.token
            choice = None if knows else _choice(plan, rank, to_lowest_rank=planner.dedup_save_to_lowest_rank)
            answers.append(Final(token=outcome.token, storage_data=final.storage_data, choice=choice))
        return answers

    def _planned_whole(self, parts: list[Any]) -> _Round:
        """What the planner decides when it sees the plans of all ranks."""
        if not all(isinstance(part, SavePlan) for part in parts):
            again = yield [None if isinstance(part, SavePlan) else Asked(what="plan") for part in parts]
            parts = [part if isinstance(part, SavePlan) else again[rank] for rank, part in enumerate(parts)]
        plans, self.metadata = self._planner.create_global_plan(parts)
        return list(self._writer.prepare_global_plan(plans))


def _groups(plan: LayoutPlan, rank: int) -> Groups:
    """What ``rank`` has in common with others."""
    rows, _, sets = plan.compared.of(rank)
    distinct, group = np.unique(sets, return_inverse=True)
    return Groups(
        rows=rows, group=group.astype(np.uint16 if len(distinct) <= 1 << 16 else np.uint32), count=len(distinct)
    )


def _differing(plan: LayoutPlan, said: list[bytes]) -> set[int]:
    """The ranks of the sets of holders in which not all digests are the same; those that did not look do not count."""
    if not any(said):
        return set()
    owners, sets = plan.group_sets
    digests = np.concatenate([np.frombuffer(each, dtype="<u8") for each in said])
    if len(digests) != len(sets):
        raise InternalError("a rank sent digests of other contents than it holds; please report it")
    looked = digests != 0
    largest, smallest = (np.full(len(plan.sets), start, dtype=np.uint64) for start in (0, 2**64 - 1))
    np.maximum.at(largest, sets[looked], digests[looked])
    np.minimum.at(smallest, sets[looked], digests[looked])
    wrong = (largest > smallest)[sets] & looked
    return set(owners[wrong].tolist())


def _choice(plan: LayoutPlan, rank: int, *, to_lowest_rank: bool) -> Choice:
    """What ``rank`` writes, and what it needs to know to remember it."""
    rows, keys, numbers = plan.written.of(rank)
    number = int(plan.layout_of[rank])
    layout = plan.layouts[number]
    cut = np.flatnonzero(plan.is_cut[keys])
    boxes = [
        (plan.chunks[key].lo[chunk].tolist(), plan.chunks[key].length[chunk].tolist())
        for key, chunk in zip(keys[cut].tolist(), numbers[cut].tolist(), strict=True)
    ]
    is_everything = np.array_equal(rows, np.arange(plan.held_rows[rank]))
    width = max((len(low) for low, _ in boxes), default=0)
    return Choice(
        rows=None if is_everything else rows,
        hint=_narrow(numbers),
        cut=cut.astype(np.uint32),
        lo=np.array([low + [0] * (width - len(low)) for low, _ in boxes], dtype=np.int64).reshape(len(cut), width),
        length=np.array([size + [1] * (width - len(size)) for _, size in boxes], np.int64).reshape(len(cut), width),
        heads=plan.changed_heads(number),
        groups=_groups(plan, rank),
        job=Job(
            others=[each for each in plan.layouts if each is not layout],
            own=number,
            layout_of=_narrow(plan.layout_of),
            names=plan.names,
            to_lowest_rank=to_lowest_rank,
        ),
    )


def _columns_of(outcome: Outcome, rank: int) -> WriteColumns:
    """What ``rank`` makes of what it is told; for planners and storage that look at the plans of all."""
    plan = outcome.plan
    return chosen_columns(plan.rows_of(rank), _choice(plan, rank, to_lowest_rank=False), outcome.token)


def _narrow(numbers: np.ndarray) -> np.ndarray:
    largest = int(numbers.max(initial=0))
    return numbers.astype(np.uint8 if largest < 1 << 8 else np.uint16 if largest < 1 << 16 else np.uint32)
