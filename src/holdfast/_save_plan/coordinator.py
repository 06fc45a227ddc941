"""The coordinator's side of planning a save: what ranks say to it, what it asks for round by round, and what it tells
each.
"""

from __future__ import annotations

import dataclasses
import secrets
import struct
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from holdfast._plan.shares import host_numbers
from holdfast._save_plan.from_layouts import Layout, LayoutPlan, classes_of
from holdfast._save_plan.from_plans import check_contents
from holdfast._save_plan.together import Chosen, chosen_columns
from holdfast._torch_codec.pickles import encode_message
from holdfast._values.lazy import LazyList
from holdfast.default_planner.save_planner import DefaultSavePlanner
from holdfast.errors import InternalError
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan, SavePlanner, TensorHead, WriteColumns
from holdfast.storage import StorageWriter

_OFFER = struct.Struct("<c16sQI?Q")
_NAMED = struct.Struct("<c8s")


class Offer(NamedTuple):
    """What a rank says of its layout, and its number in meshes; whether it will look at contents; its host."""

    fingerprint: bytes
    rows: int
    name: int
    looks: bool
    host: int

    def encoded(self) -> bytes:
        """The offer as it is sent."""
        return _OFFER.pack(b"o", *self)


class Named(NamedTuple):
    """The planning that had the same offer, and the digests of what this rank has in common with others now."""

    token: bytes
    digests: bytes

    def encoded(self) -> bytes:
        """The same as it is sent."""
        return _NAMED.pack(b"n", self.token) + self.digests


class Whole(NamedTuple):
    """All that a rank plans to write, and its host."""

    plan: SavePlan
    host: int


def said_first(part: Any) -> Any:
    """What a rank sent first: an Offer, a Named, or a Whole."""
    if not isinstance(part, bytes):
        return part
    return Offer(*_OFFER.unpack(part)[1:]) if part[:1] == b"o" else Named(part[1 : _NAMED.size], part[_NAMED.size :])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """What the coordinator wants to know: "offer", "layout", "contents" of ``groups``, "details", "plan", "nothing"."""

    what: str
    groups: Groups | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Rows that a rank has in common with others; rows of the same ``group`` with the same others."""

    rows: np.ndarray
    group: np.ndarray
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """What the metadata of the whole is made of: the classes of ranks, encoded, and the order of their keys.

    Without ``classes`` all ranks have the receiver's layout.
    """

    classes: bytes | None
    order: np.ndarray
    names: np.ndarray
    to_lowest_rank: bool
    hosts: np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """What a rank writes, and ``heads``: the keys that all ranks together say something else of than this one."""

    chosen: Chosen
    heads: dict[str, TensorHead | None]
    groups: Groups
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Final:
    """The end of planning ``token``; without ``choice``, the rank writes what it wrote after it the last time."""

    token: bytes
    storage_data: Any
    choice: Choice | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sketch:
    """The metadata of planning ``token`` in so few words that every rank can make it of what it knows."""

    token: bytes
    rest: Metadata


KEPT_PLANNINGS = 4
"""So many plannings are remembered: enough for a few models that take turns."""

_TOKEN_BYTES = 8
_KEPT_LAYOUTS = 64
_Round = Generator[list[Asked | None], list[Any], list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What the coordinator keeps of a planning."""

    token: bytes
    offers: list[Offer]
    layouts: list[Layout]
    manner: object
    plan: LayoutPlan
    job: Job


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
        self._differing: dict[str, int] = {}
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
        if any(isinstance(part, Whole) for part in parts) or self._layout is None:
            return (yield from self._planned_whole(parts))
        parts = [said_first(part) for part in parts]
        outcome = self._named_by_all(parts)
        if outcome is not None:
            said = [part.digests for part in parts]
        else:
            offers = yield from self._offers(parts)
            layouts = yield from self._described(offers)
            plan = self._laid_out(offers, layouts)
            outcome = Outcome(
                token=secrets.token_bytes(_TOKEN_BYTES),
                offers=offers,
                layouts=[Layout(text=layout.text, paths=layout.paths) for layout in layouts[:_KEPT_LAYOUTS]],
                manner=self._manner,
                plan=plan,
                job=_job(plan),
            )
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

    def _described(self, offers: list[Offer]) -> Generator[list[Asked | None], list[Any], list[Layout]]:
        """The distinct layouts, by the lowest rank that has them: where one is not known, that rank describes it."""
        assert self._layout is not None
        lowest: dict[bytes, int] = {}
        for rank, offer in enumerate(offers):
            lowest.setdefault(offer.fingerprint, rank)
        before = (layout for outcome in self._outcomes for layout in outcome.layouts)
        known = {layout.fingerprint: layout for layout in (self._layout, *before)}
        asked: list[Asked | None] = [None] * len(offers)
        for fingerprint, rank in lowest.items():
            if fingerprint not in known:
                asked[rank] = Asked(what="layout")
        if any(asked):
            for layout in (yield asked):
                if layout is not None:
                    known[layout.fingerprint] = layout
        return [known[fingerprint] for fingerprint in lowest]

    def _laid_out(self, offers: list[Offer], layouts: list[Layout]) -> LayoutPlan:
        """The plan of all."""
        assert isinstance(self._planner, DefaultSavePlanner)
        numbers = {layout.fingerprint: number for number, layout in enumerate(layouts)}
        layout_of_rank = np.array([numbers[offer.fingerprint] for offer in offers])
        plan = LayoutPlan(
            classes_of(layouts, layout_of_rank),
            list(dict.fromkeys(key for layout in layouts for key in layout.keys)),
            np.array([offer.name for offer in offers], dtype=np.int64),
            to_lowest_rank=self._planner.dedup_save_to_lowest_rank,
            hosts=host_numbers([offer.host for offer in offers]),
        )
        said = np.array([offer.rows for offer in offers], dtype=np.uint64)
        if not np.array_equal(plan.row_digests(), said):
            raise InternalError("the rows of a rank are not what its layout says; please report it")
        return plan

    def _compared(self, plan: LayoutPlan, said: list[bytes]) -> Generator[list[Asked | None], list[Any], None]:
        """RankDisagreementError where ranks hold different contents and may not; only then is asked which."""
        differing = _differing(plan, said)
        if not len(differing):
            return
        groups = [_groups(plan, rank, differing) for rank in range(plan.ranks)]
        details = yield [Asked(what="details", groups=each) if each.count else None for each in groups]
        tables = []
        for rank, (each, found) in enumerate(zip(groups, details, strict=True)):
            columns = plan.rows_of(rank)
            if not each.count:
                tables.append(columns)
                continue
            fingerprint = np.zeros(len(columns), dtype=np.uint64)
            fingerprint[each.rows] = found
            # In the order of the state, so that the first key that differs there is the one to be named.
            order = np.argsort([plan.numbers[columns.keys[which]] for which in columns.key.tolist()], kind="stable")
            tables.append(_reordered(columns, fingerprint, order))
        self._differing = check_contents(tables)

    def _finals(self, outcome: Outcome, parts: list[Any]) -> list[Any]:
        """What every rank is told; ``planner`` and storage are told of the whole."""
        plan, planner = outcome.plan, self._planner
        assert isinstance(planner, DefaultSavePlanner)
        others = [each for each in self._outcomes if each.token != outcome.token]
        self._outcomes[:] = [*others[-KEPT_PLANNINGS + 1 :], outcome]
        metadata = planner.with_paths(plan.metadata(), [members.layout.paths for members in plan.classes])
        metadata = dataclasses.replace(metadata, differing=self._differing)
        made = [
            SavePlan(LazyList.later(partial(_columns_of, outcome, rank)), planner_data=metadata.planner_data)
            for rank in range(plan.ranks)
        ]
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
            choice = None if knows else _choice(outcome, rank)
            answers.append(Final(token=outcome.token, storage_data=final.storage_data, choice=choice))
        return answers

    def _planned_whole(self, parts: list[Any]) -> _Round:
        """What the planner decides when it sees the plans of all ranks."""
        if not all(isinstance(part, Whole) for part in parts):
            again = yield [None if isinstance(part, Whole) else Asked(what="plan") for part in parts]
            parts = [part if isinstance(part, Whole) else again[rank] for rank, part in enumerate(parts)]
        if isinstance(self._planner, DefaultSavePlanner):
            self._planner.hosts = host_numbers([part.host for part in parts])
        plans, self.metadata = self._planner.create_global_plan([part.plan for part in parts])
        return list(self._writer.prepare_global_plan(plans))


def _groups(plan: LayoutPlan, rank: int, chosen: np.ndarray | None = None) -> Groups:
    """What ``rank`` has in common with others, or of that what they hold in the ``chosen`` sets."""
    rows, _, sets = plan.compared.of(rank)
    if chosen is not None:
        mine = np.isin(sets, chosen)
        rows, sets = rows[mine], sets[mine]
    distinct, group = np.unique(sets, return_inverse=True)
    return Groups(
        rows=rows, group=group.astype(np.uint16 if len(distinct) <= 1 << 16 else np.uint32), count=len(distinct)
    )


def _differing(plan: LayoutPlan, said: list[bytes]) -> np.ndarray:
    """The sets of holders in which not all digests are the same; those that did not look do not count."""
    if not any(said):
        return np.zeros(0, dtype=np.int64)
    _, sets = plan.group_sets
    digests = np.concatenate([np.frombuffer(each, dtype="<u8") for each in said])
    if len(digests) != len(sets):
        raise InternalError("a rank sent digests of other contents than it holds; please report it")
    looked = digests != 0
    largest, smallest = (np.full(2 * len(plan.sets), start, dtype=np.uint64) for start in (0, 2**64 - 1))
    np.maximum.at(largest, sets[looked], digests[looked])
    np.minimum.at(smallest, sets[looked], digests[looked])
    return np.flatnonzero((largest > smallest) & (largest > 0))


def _job(plan: LayoutPlan) -> Job:
    """What ranks need to make the metadata."""
    keys = dict.fromkeys(key for members in plan.classes for key in members.layout.keys)
    place = {key: number for number, key in enumerate(keys)}
    # Ranks that have nothing are in no class.
    is_everyone = len(plan.classes) == 1 and len(plan.classes[0].ranks) == len(plan.names)
    return Job(
        classes=None if is_everyone else encode_message(list(plan.classes)),
        order=_narrow(np.array([place[key] for key in plan.keys], dtype=np.int64)),
        names=_narrow(plan.names),
        to_lowest_rank=plan.to_lowest_rank,
        hosts=None if plan.hosts is None else _narrow(plan.hosts),
    )


def _choice(outcome: Outcome, rank: int) -> Choice:
    """What ``rank`` writes, and what it needs to know to remember it."""
    plan = outcome.plan
    chosen = plan.chosen(rank)
    return Choice(
        chosen=dataclasses.replace(
            chosen,
            rows=None if chosen.rows is None else _narrow(chosen.rows),
            hint=_narrow(chosen.hint),
            cut=_narrow(chosen.cut),
        ),
        heads=plan.changed_heads(rank),
        groups=_groups(plan, rank),
        job=outcome.job,
    )


def _columns_of(outcome: Outcome, rank: int) -> WriteColumns:
    """What ``rank`` makes of what it is told; for planners and storage that look at the plans of all."""
    plan = outcome.plan
    return chosen_columns(plan.rows_of(rank), plan.chosen(rank), plan.changed_heads(rank), planning=outcome.token)


def _reordered(columns: WriteColumns, fingerprint: np.ndarray, order: np.ndarray) -> WriteColumns:
    return dataclasses.replace(
        columns,
        key=columns.key[order],
        lo=columns.lo[order],
        length=columns.length[order],
        is_shard=columns.is_shard[order],
        fingerprint=fingerprint[order],
    )


def _narrow(numbers: np.ndarray) -> np.ndarray:
    largest = int(numbers.max(initial=0))
    return numbers.astype(np.uint8 if largest < 1 << 8 else np.uint16 if largest < 1 << 16 else np.uint32)
