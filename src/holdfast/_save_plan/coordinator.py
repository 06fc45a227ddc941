"""The coordinator's side of planning a save: what ranks say to it, what it asks for round by round, and what it tells
each.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from holdfast._save_plan.from_layouts import (
    Layout,
    LayoutRows,
    Members,
    all_keys,
    classes_of,
    layout_rows,
    plan_layouts,
    row_digests,
)
from holdfast._save_plan.plans import check_contents
from holdfast._save_plan.together import Chosen, JointPlan, chosen_columns
from holdfast._torch_codec.pickles import encode_message
from holdfast._values.lazy import LazyDict, LazyList, cached_property
from holdfast.default_planner import DefaultSavePlanner
from holdfast.errors import InternalError
from holdfast.metadata import STORAGE_TYPES, Metadata
from holdfast.planner import SavePlan, SavePlanner, TensorHead, WriteColumns
from holdfast.storage import StorageWriter

TOKEN_BYTES = 8
"""The name of a planning. A rank that remembers one says that name and its digests: few bytes, in every save."""


class Offer(NamedTuple):
    """What a rank says of its layout, and its number in meshes; and whether it will look at contents.

    It is sent as a plain tuple, which takes few bytes.
    """

    fingerprint: bytes
    rows: int
    job_rank: int
    looks: bool


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

    @cached_property
    def keys(self) -> list[str]:
        """All keys in the order that the metadata has them in."""
        keys = all_keys(members.layout for members in self.classes)
        return [keys[place] for place in self.order.tolist()]

    @cached_property
    def plan(self) -> JointPlan:
        """The plan, made again."""
        rows = layout_rows(self.classes, self.job_ranks.astype(np.int64))
        return plan_layouts(rows, self.keys, to_lowest_rank=self.to_lowest_rank)

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

_KEPT_LAYOUTS = 64

Found = TypeVar("Found")
Rounds = Generator[list[Asked], list[object], Found]
"""Yields what is asked of each rank, is sent what they reply, and returns what came of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What the coordinator keeps of a planning.

    ``changed`` has for each class of ``rows`` the keys that all ranks together say something else of.
    """

    token: bytes
    layouts: list[Layout]
    manner: object
    plan: JointPlan
    rows: LayoutRows
    changed: list[dict[str, TensorHead | None]]
    classes: bytes | None
    recipe: Recipe

    def changed_heads(self, rank: int) -> dict[str, TensorHead | None]:
        """What all ranks together say of the keys of ``rank``, where that is not what it says itself."""
        heads: dict[str, TensorHead | None] = {}
        for number in self.rows.classes_of_rank[rank]:
            heads.update(self.changed[number])
        return heads

    def columns_of(self, rank: int) -> WriteColumns:
        """What ``rank`` makes of what it is told; for planners and storage that look at the plans of all."""
        chosen, heads = self.plan.chosen(rank), self.changed_heads(rank)
        return chosen_columns(self.rows.of(rank), chosen, heads, planning=self.token)


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
    outcomes: dict[bytes, Outcome],
    layout: Layout | None,
) -> Rounds[Decision]:
    """Plan for all ranks, after what they said first.

    ``outcomes`` are those of plannings before, the newest last. ``layout`` is the coordinator's own, if it has one.
    """
    if not isinstance(planner, DefaultSavePlanner) or any(isinstance(part, SavePlan) for part in parts):
        return (yield from _from_plans(parts, planner, writer))
    manner = planner.flatten_state_dict, planner.dedup_save_to_lowest_rank
    tokens = [part[:TOKEN_BYTES] if isinstance(part, bytes) else b"" for part in parts]
    outcome = outcomes.get(tokens[0]) if len(set(tokens)) == 1 else None
    if outcome is not None and outcome.manner == manner:
        digests = [part[TOKEN_BYTES:] for part in parts if isinstance(part, bytes)]
    else:
        known = {} if layout is None else {layout.fingerprint: layout}
        for before in outcomes.values():
            known.update((each.fingerprint, each) for each in before.layouts)
        offers, layouts = yield from _offers(parts, known)
        outcome = _planned(offers, layouts, planner, manner)
        digests = []
        if any(offer.looks for offer in offers) and len(outcome.plan.compared.row):
            replies = yield [Asked(what="contents", groups=_groups(outcome.plan, rank)) for rank in range(len(offers))]
            digests = [reply for reply in replies if isinstance(reply, bytes)]
    differing = yield from _compared(outcome, digests)
    outcomes.pop(outcome.token, None)
    outcomes[outcome.token] = outcome
    while len(outcomes) > KEPT_PLANNINGS:
        del outcomes[next(iter(outcomes))]
    knowing = [token == outcome.token for token in tokens]
    return _decided(outcome, planner, writer, knowing=knowing, differing=differing)


def _from_plans(parts: list[object], planner: SavePlanner, writer: StorageWriter) -> Rounds[Decision]:
    """What the planner decides when it sees the plans of all ranks."""
    if not all(isinstance(part, SavePlan) for part in parts):
        replies = yield [_NOTHING if isinstance(part, SavePlan) else Asked(what="plan") for part in parts]
        parts = [part if isinstance(part, SavePlan) else reply for part, reply in zip(parts, replies, strict=True)]
    plans, metadata = planner.create_global_plan([part for part in parts if isinstance(part, SavePlan)])
    return Decision(answers=writer.prepare_global_plan(plans), metadata=metadata)


def _offers(parts: list[object], known: dict[bytes, Layout]) -> Rounds[tuple[list[Offer], list[Layout]]]:
    """The offers of all ranks, and the distinct layouts by the lowest rank that has them.

    Ranks that named a planning are asked for their offers. Where a layout is not ``known``, by its fingerprint, the
    lowest rank that has it describes it.
    """
    if not all(isinstance(part, tuple) for part in parts):
        replies = yield [_NOTHING if isinstance(part, tuple) else Asked(what="offer") for part in parts]
        parts = [part if isinstance(part, tuple) else reply for part, reply in zip(parts, replies, strict=True)]
    offers = [Offer(*part) for part in parts if isinstance(part, tuple)]
    lowest: dict[bytes, int] = {}
    for rank, offer in enumerate(offers):
        lowest.setdefault(offer.fingerprint, rank)
    asked = [_NOTHING] * len(offers)
    for fingerprint, rank in lowest.items():
        if fingerprint not in known:
            asked[rank] = Asked(what="layout")
    if len(lowest.keys() - known.keys()):
        replies = yield asked
        known.update((layout.fingerprint, layout) for layout in replies if isinstance(layout, Layout))
    return offers, [known[fingerprint] for fingerprint in lowest]


def _planned(offers: list[Offer], layouts: list[Layout], planner: DefaultSavePlanner, manner: object) -> Outcome:
    numbers = {layout.fingerprint: number for number, layout in enumerate(layouts)}
    classes = classes_of(layouts, np.array([numbers[offer.fingerprint] for offer in offers]))
    job_ranks = np.array([offer.job_rank for offer in offers], dtype=np.int64)
    to_lowest_rank = planner.dedup_save_to_lowest_rank
    rows = layout_rows(classes, job_ranks)
    plan = plan_layouts(rows, all_keys(layouts), to_lowest_rank=to_lowest_rank)
    if not np.array_equal(row_digests(plan), np.array([offer.rows for offer in offers], dtype=np.uint64)):
        raise InternalError("the rows of a rank are not what its layout says; please report it")
    place = {key: number for number, key in enumerate(all_keys(members.layout for members in classes))}
    changed: list[dict[str, TensorHead | None]] = []
    for members in classes:
        changed.append({})
        for key, head in zip(members.layout.said.keys, members.layout.heads, strict=True):
            together = plan.heads[plan.numbers[key]]
            if together is not head and together != head:
                changed[-1][key] = together
    # Ranks that have nothing are in no class.
    is_everyone = len(classes) == 1 and len(classes[0].ranks) == len(offers)
    return Outcome(
        token=secrets.token_bytes(TOKEN_BYTES),
        layouts=[Layout(text=layout.text, paths=layout.paths) for layout in layouts[:_KEPT_LAYOUTS]],
        manner=manner,
        plan=plan,
        rows=rows,
        changed=changed,
        classes=None if is_everyone else encode_message(classes),
        recipe=Recipe(
            order=_narrow(np.array([place[key] for key in plan.keys], dtype=np.int64)),
            job_ranks=_narrow(job_ranks),
            to_lowest_rank=to_lowest_rank,
        ),
    )


def _compared(outcome: Outcome, said: list[bytes]) -> Rounds[dict[str, int]]:
    """The keys that differ and may, by the digests that ranks ``said``; RankDisagreementError for others.

    Only where the digests of a set of holders differ is asked which of its contents do. Ranks that did not look do not
    count.
    """
    if not any(said):
        return {}
    plan, sets = outcome.plan, outcome.plan.compared_sets
    digests = np.frombuffer(b"".join(said), dtype="<u8")
    if len(digests) != len(sets):
        raise InternalError("a rank sent digests of other contents than it holds; please report it")
    looked = digests != 0
    largest = np.zeros(2 * len(plan.sets), dtype=np.uint64)
    smallest = np.full(2 * len(plan.sets), 2**64 - 1, dtype=np.uint64)
    np.maximum.at(largest, sets[looked], digests[looked])
    np.minimum.at(smallest, sets[looked], digests[looked])
    differing = np.flatnonzero((largest > smallest) & (largest > 0))
    if not len(differing):
        return {}
    groups = [_groups(plan, rank, differing) for rank in range(plan.ranks)]
    details = yield [Asked(what="details", groups=each) if each.count else _NOTHING for each in groups]
    tables = []
    for rank, (each, found) in enumerate(zip(groups, details, strict=True)):
        columns = outcome.rows.of(rank)
        if isinstance(found, np.ndarray):
            fingerprint = np.zeros(len(columns), dtype=np.uint64)
            fingerprint[each.rows] = found
            # In the order of the state, so that the first key that differs there is the one to be named.
            order = np.argsort([plan.numbers[columns.keys[which]] for which in columns.key.tolist()], kind="stable")
            columns = dataclasses.replace(
                columns,
                key=columns.key[order],
                lo=columns.lo[order],
                length=columns.length[order],
                is_shard=columns.is_shard[order],
                fingerprint=fingerprint[order],
            )
        tables.append(columns)
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
    metadata = Metadata(LazyDict(plan.keys, plan), differing=differing)
    metadata = planner.with_paths(metadata, [members.layout.paths for members in outcome.rows.classes])
    made = [
        SavePlan(LazyList(None, make=partial(outcome.columns_of, rank)), planner_data=metadata.planner_data)
        for rank in range(plan.ranks)
    ]
    planner.global_plan, planner.metadata = made, metadata
    answers: list[Final | SavePlan] = []
    for rank, final in enumerate(writer.prepare_global_plan(made)):
        items = final.items
        if items is not made[rank].items or not isinstance(items, LazyList) or items.make is None:
            answers.append(final)  # storage has looked at it, and may have changed it
            continue
        choice = None
        if not knowing[rank]:
            chosen = plan.chosen(rank)
            chosen = dataclasses.replace(
                chosen,
                rows=None if chosen.rows is None else _narrow(chosen.rows),
                hint=_narrow(chosen.hint),
                cut=_narrow(chosen.cut),
            )
            choice = Choice(
                chosen=chosen,
                heads=outcome.changed_heads(rank),
                groups=_groups(plan, rank),
                classes=outcome.classes,
                recipe=outcome.recipe,
            )
        answers.append(Final(token=outcome.token, storage_data=final.storage_data, choice=choice))
    return Decision(answers=answers, metadata=metadata, outcome=outcome)


def _groups(plan: JointPlan, rank: int, chosen: np.ndarray | None = None) -> Groups:
    """What ``rank`` has in common with others, or of that what they hold in the ``chosen`` sets."""
    rows, _, sets = plan.compared.of(rank)
    if chosen is not None:
        mine = np.isin(sets, chosen)
        rows, sets = rows[mine], sets[mine]
    distinct, group = np.unique(sets, return_inverse=True)
    return Groups(
        rows=rows, group=group.astype(np.uint16 if len(distinct) <= 1 << 16 else np.uint32), count=len(distinct)
    )


def _narrow(numbers: np.ndarray) -> np.ndarray:
    largest = int(numbers.max(initial=0))
    return numbers.astype(np.uint8 if largest < 1 << 8 else np.uint16 if largest < 1 << 16 else np.uint32)
