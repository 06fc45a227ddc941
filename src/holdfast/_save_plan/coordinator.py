"""The coordinator's side of planning a save: what ranks say to it, what it asks for round by round, and what it tells
each.
"""

from __future__ import annotations

import dataclasses
import secrets
import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from holdfast._plan.shares import host_numbers
from holdfast._save_plan.from_layouts import Layout, LayoutPlan, Members, all_keys, classes_of
from holdfast._save_plan.plans import check_contents
from holdfast._save_plan.together import Chosen, chosen_columns
from holdfast._torch_codec.pickles import encode_message
from holdfast._values.lazy import LazyList, cached_property
from holdfast.default_planner.save_planner import DefaultSavePlanner
from holdfast.errors import InternalError
from holdfast.metadata import STORAGE_TYPES, Metadata
from holdfast.planner import SavePlan, SavePlanner, TensorHead, WriteColumns
from holdfast.storage import StorageWriter

_OFFER = struct.Struct("<c16sQI?Q")
_AGAIN = struct.Struct("<c8s")


class Offer(NamedTuple):
    """What a rank says of its layout, and its number in meshes; whether it will look at contents; its host."""

    fingerprint: bytes
    rows: int
    job_rank: int
    looks: bool
    host: int

    def encoded(self) -> bytes:
        return _OFFER.pack(b"o", *self)


class Again(NamedTuple):
    """The planning that had the same offer, and the digests of what this rank has in common with others now."""

    token: bytes
    digests: bytes

    def encoded(self) -> bytes:
        return _AGAIN.pack(b"n", self.token) + self.digests


class LocalPlan(NamedTuple):
    """All that a rank plans to write, and its host."""

    plan: SavePlan
    host: int


def decoded(part: object) -> object:
    """What a rank said first: an Offer, an Again, or a LocalPlan."""
    if not isinstance(part, bytes):
        return part
    return Offer(*_OFFER.unpack(part)[1:]) if part[:1] == b"o" else Again(part[1 : _AGAIN.size], part[_AGAIN.size :])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Rows that a rank has in common with others; rows of the same ``group`` with the same others."""

    rows: np.ndarray
    group: np.ndarray
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """What the coordinator wants to know: "offer", "layout", "contents" of ``groups``, "details", "plan", "nothing"."""

    what: str
    groups: Groups | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """What the plan of all is made of, for ranks that did not make it: they do when somebody looks at the metadata."""

    classes: Sequence[Members] = ()
    order: np.ndarray
    job_ranks: np.ndarray
    to_lowest_rank: bool
    hosts: np.ndarray | None

    @cached_property
    def keys(self) -> list[str]:
        """All keys in the order that the metadata has them in."""
        keys = all_keys(members.layout for members in self.classes)
        return [keys[place] for place in self.order.tolist()]

    @cached_property
    def plan(self) -> LayoutPlan:
        """The plan, made again."""
        hosts = None if self.hosts is None else self.hosts.astype(np.int64)
        job_ranks = self.job_ranks.astype(np.int64)
        return LayoutPlan(self.classes, self.keys, job_ranks, to_lowest_rank=self.to_lowest_rank, hosts=hosts)

    def __len__(self) -> int:
        return len(self.order)

    def item(self, row: int) -> STORAGE_TYPES:
        """What the metadata says of key number ``row``."""
        return self.plan.item(row)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """What a rank writes, and ``heads``: the keys that all ranks together say something else of than this one.

    ``classes`` are those of the recipe, encoded once for all ranks; None where all ranks have the receiver's layout.
    """

    chosen: Chosen
    heads: dict[str, TensorHead | None]
    groups: Groups
    classes: bytes | None
    recipe: Recipe


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Final:
    """The end of planning ``token``; without ``choice``, the rank writes what it wrote after it the last time."""

    token: bytes
    storage_data: object
    choice: Choice | None


KEPT_PLANNINGS = 4
"""So many plannings are remembered: enough for a few models that take turns."""

_TOKEN_BYTES = 8
_KEPT_LAYOUTS = 64

Found = TypeVar("Found")
Rounds = Generator[list[Asked], list[object], Found]
"""Yields what is asked of each rank, is sent what they reply, and returns what came of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What the coordinator keeps of a planning."""

    token: bytes
    layouts: list[Layout]
    manner: object
    plan: LayoutPlan
    classes: bytes | None
    recipe: Recipe

    def columns_of(self, rank: int) -> WriteColumns:
        """What ``rank`` makes of what it is told; for planners and storage that look at the plans of all."""
        plan = self.plan
        return chosen_columns(plan.rows_of(rank), plan.chosen(rank), plan.changed_heads(rank), planning=self.token)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """What each rank is told, and the metadata of what they write; ``outcome`` where it was planned by layouts."""

    answers: Sequence[Final | SavePlan]
    metadata: Metadata
    outcome: Outcome | None = None


_NOTHING = Asked(what="nothing")


def coordinated(
    parts: list[object],
    planner: SavePlanner,
    writer: StorageWriter,
    *,
    outcomes: list[Outcome],
    layout: Layout | None,
) -> Rounds[Decision]:
    """Plan for all ranks, after what they said first.

    ``outcomes`` are those of plannings before, the newest last. ``layout`` is the coordinator's own, if it has one.
    """
    if not isinstance(planner, DefaultSavePlanner) or any(isinstance(part, LocalPlan) for part in parts):
        return (yield from _from_plans(parts, planner, writer))
    parts = [decoded(part) for part in parts]
    manner = planner.flatten_state_dict, planner.dedup_save_to_lowest_rank
    outcome = _planned_before(parts, outcomes, manner)
    if outcome is not None:
        digests = [part.digests for part in parts if isinstance(part, Again)]
    else:
        offers = yield from _offers(parts)
        before = [each for outcome in outcomes for each in outcome.layouts]
        layouts = yield from _layouts(offers, before if layout is None else [layout, *before])
        outcome = _planned(offers, layouts, planner, manner)
        digests = []
        if any(offer.looks for offer in offers) and len(outcome.plan.compared.row):
            replies = yield [Asked(what="contents", groups=_groups(outcome.plan, rank)) for rank in range(len(offers))]
            digests = [reply for reply in replies if isinstance(reply, bytes)]
    differing = yield from _compared(outcome.plan, digests)
    outcomes[:] = [*[each for each in outcomes if each.token != outcome.token][-KEPT_PLANNINGS + 1 :], outcome]
    knowing = [isinstance(part, Again) and part.token == outcome.token for part in parts]
    return _decided(outcome, planner, writer, knowing=knowing, differing=differing)


def _from_plans(parts: list[object], planner: SavePlanner, writer: StorageWriter) -> Rounds[Decision]:
    """What the planner decides when it sees the plans of all ranks."""
    if not all(isinstance(part, LocalPlan) for part in parts):
        replies = yield [_NOTHING if isinstance(part, LocalPlan) else Asked(what="plan") for part in parts]
        parts = [part if isinstance(part, LocalPlan) else reply for part, reply in zip(parts, replies, strict=True)]
    local = [part for part in parts if isinstance(part, LocalPlan)]
    if isinstance(planner, DefaultSavePlanner):
        planner.hosts = host_numbers([part.host for part in local]) if len(local) > 1 else None
    plans, metadata = planner.create_global_plan([part.plan for part in local])
    return Decision(answers=writer.prepare_global_plan(plans), metadata=metadata)


def _planned_before(parts: list[object], outcomes: list[Outcome], manner: object) -> Outcome | None:
    """The planning that every rank names, unless its outcome would be another now."""
    tokens = {part.token if isinstance(part, Again) else b"" for part in parts}
    known = (each for each in outcomes if {each.token} == tokens and each.manner == manner)
    return next(known, None)


def _offers(parts: list[object]) -> Rounds[list[Offer]]:
    """The offers of all ranks; those that named a planning are asked for them."""
    if not all(isinstance(part, Offer) for part in parts):
        replies = yield [_NOTHING if isinstance(part, Offer) else Asked(what="offer") for part in parts]
        parts = [
            part if isinstance(part, Offer) else decoded(reply) for part, reply in zip(parts, replies, strict=True)
        ]
    return [part for part in parts if isinstance(part, Offer)]


def _layouts(offers: list[Offer], before: list[Layout]) -> Rounds[list[Layout]]:
    """The distinct layouts, by the lowest rank that has them: where one is not known, that rank describes it."""
    lowest: dict[bytes, int] = {}
    for rank, offer in enumerate(offers):
        lowest.setdefault(offer.fingerprint, rank)
    known = {layout.fingerprint: layout for layout in before}
    unknown = {rank for fingerprint, rank in lowest.items() if fingerprint not in known}
    if unknown:
        replies = yield [Asked(what="layout") if rank in unknown else _NOTHING for rank in range(len(offers))]
        known |= {layout.fingerprint: layout for layout in replies if isinstance(layout, Layout)}
    return [known[fingerprint] for fingerprint in lowest]


def _planned(offers: list[Offer], layouts: list[Layout], planner: DefaultSavePlanner, manner: object) -> Outcome:
    numbers = {layout.fingerprint: number for number, layout in enumerate(layouts)}
    layout_of_rank = np.array([numbers[offer.fingerprint] for offer in offers])
    classes = classes_of(layouts, layout_of_rank)
    plan = LayoutPlan(
        classes,
        all_keys(layouts),
        np.array([offer.job_rank for offer in offers], dtype=np.int64),
        to_lowest_rank=planner.dedup_save_to_lowest_rank,
        hosts=host_numbers([offer.host for offer in offers]),
    )
    said = np.array([offer.rows for offer in offers], dtype=np.uint64)
    if not np.array_equal(plan.row_digests(), said):
        raise InternalError("the rows of a rank are not what its layout says; please report it")
    place = {key: number for number, key in enumerate(all_keys(members.layout for members in classes))}
    # Ranks that have nothing are in no class.
    is_everyone = len(classes) == 1 and len(classes[0].ranks) == len(offers)
    return Outcome(
        token=secrets.token_bytes(_TOKEN_BYTES),
        layouts=[Layout(text=layout.text, paths=layout.paths) for layout in layouts[:_KEPT_LAYOUTS]],
        manner=manner,
        plan=plan,
        classes=None if is_everyone else encode_message(classes),
        recipe=Recipe(
            order=_narrow(np.array([place[key] for key in plan.keys], dtype=np.int64)),
            job_ranks=_narrow(plan.job_ranks),
            to_lowest_rank=plan.to_lowest_rank,
            hosts=None if plan.hosts is None else _narrow(plan.hosts),
        ),
    )


def _compared(plan: LayoutPlan, digests: list[bytes]) -> Rounds[dict[str, int]]:
    """The keys that differ and may; RankDisagreementError for others. Only where digests differ is asked which."""
    differing = _differing(plan, digests)
    if not len(differing):
        return {}
    groups = [_groups(plan, rank, differing) for rank in range(plan.ranks)]
    details = yield [Asked(what="details", groups=each) if each.count else _NOTHING for each in groups]
    tables = []
    for rank, (each, found) in enumerate(zip(groups, details, strict=True)):
        columns = plan.rows_of(rank)
        if not isinstance(found, np.ndarray):
            tables.append(columns)
            continue
        fingerprint = np.zeros(len(columns), dtype=np.uint64)
        fingerprint[each.rows] = found
        # In the order of the state, so that the first key that differs there is the one to be named.
        order = np.argsort([plan.numbers[columns.keys[which]] for which in columns.key.tolist()], kind="stable")
        tables.append(_reordered(columns, fingerprint, order))
    return check_contents(tables)


def _decided(
    outcome: Outcome,
    planner: DefaultSavePlanner,
    writer: StorageWriter,
    *,
    knowing: list[bool],
    differing: dict[str, int],
) -> Decision:
    """What every rank is told, those ``knowing`` the outcome little; planner and storage are told of the whole."""
    plan = outcome.plan
    metadata = planner.with_paths(plan.metadata(), [members.layout.paths for members in plan.classes])
    metadata = dataclasses.replace(metadata, differing=differing)
    made = [
        SavePlan(LazyList.later(partial(outcome.columns_of, rank)), planner_data=metadata.planner_data)
        for rank in range(plan.ranks)
    ]
    planner.global_plan, planner.metadata = made, metadata
    answers: list[Final | SavePlan] = []
    for rank, final in enumerate(writer.prepare_global_plan(made)):
        items = final.items
        if items is made[rank].items and isinstance(items, LazyList) and items.is_unmade:
            choice = None if knowing[rank] else _choice(outcome, rank)
            answers.append(Final(token=outcome.token, storage_data=final.storage_data, choice=choice))
        else:
            answers.append(final)  # storage has looked at it, and may have changed it
    return Decision(answers=answers, metadata=metadata, outcome=outcome)


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
        classes=outcome.classes,
        recipe=outcome.recipe,
    )


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
