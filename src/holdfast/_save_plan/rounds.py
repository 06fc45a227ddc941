"""How the ranks of a save plan together: they say what differs, and nothing twice.

A process that saves alone plans at once. With several ranks, a rank of the default planner first sends the fingerprint
of its layout and a digest of its rows; one of each layout is asked to describe it, and the coordinator plans for all
from the descriptions. What several ranks hold is then compared by one digest for each set of holders, and looked at
closely only where those differ. Every rank gets what it writes as columns of its own rows. Both sides remember that: in
the next save a rank whose layout is the same sends the name of that planning and its digests, and nothing is planned
again.

A planner that makes plans of its own, or storage that changes them: then all ranks send their plans, and the planner's
create_global_plan decides. A round is one ``scatter``; ``Asked`` is answered in the next one, anything else ends it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from holdfast._ranks.ranks import Ranks
from holdfast._save_plan.coordinator import (
    KEPT_PLANNINGS,
    Asked,
    Decision,
    Final,
    Groups,
    Offer,
    Outcome,
    Recipe,
    Rounds,
    coordinated,
)
from holdfast._save_plan.from_layouts import Layout, Members, layout_of
from holdfast._save_plan.plans import LocalLeaves
from holdfast._save_plan.together import chosen_columns, rows_by_name
from holdfast._state.nested import path_mapping
from holdfast._torch_codec.pickles import decode_message
from holdfast._values.digest import name_words, row_words, rows_digest, scrambled
from holdfast._values.lazy import LazyDict, LazyList
from holdfast.default_planner import DefaultSavePlanner
from holdfast.errors import InternalError
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan, SavePlanner, WriteColumns, write_columns
from holdfast.storage import PlannedReport, StorageWriter, WriteResult

_PHASE = "planning the save"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Remembered:
    """What a rank keeps of a planning: what it wrote, what it compared, and how to make the metadata."""

    token: bytes
    columns: WriteColumns
    groups: Groups
    words: np.ndarray
    recipe: Recipe


@dataclass(slots=True)
class _PlanMemory:
    """What one rank keeps of plannings, the newest last; on the coordinator, also what was planned for all."""

    remembered: dict[Offer, _Remembered] = field(default_factory=dict)
    outcomes: dict[bytes, Outcome] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sketch:
    """The metadata of planning ``token`` in so few words that every rank can make it of what it knows."""

    token: bytes
    rest: Metadata


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedSave:
    """What this rank writes; ``metadata``, on the coordinator, is of what all of them write."""

    plan: SavePlan
    metadata: Metadata | None = None
    outcome: Outcome | None = None
    known: _Remembered | None = None

    def with_plans(self, results: list[MutableSequence[WriteResult]]) -> list[MutableSequence[WriteResult]]:
        """``results``; those that leave out what was planned here get the plan."""
        found = list(results)
        for rank, result in enumerate(results):
            report: object = result.columns if isinstance(result, LazyList) else None
            if self.outcome is not None and isinstance(report, PlannedReport) and report.planning == self.outcome.token:
                found[rank] = LazyList(report.with_plan(partial(self.outcome.columns_of, rank)))
        return found

    def told(self) -> Metadata | Sketch:
        """What the coordinator tells the others of the metadata: few words where nobody has changed it."""
        assert self.metadata is not None
        entries = self.metadata.state_dict_metadata
        plan = None if self.outcome is None else self.outcome.plan
        is_planned = isinstance(entries, LazyDict) and entries.source is plan and entries.is_untouched
        if self.known is None or not is_planned or self.metadata.storage_data is not None:
            return self.metadata
        rest = dataclasses.replace(self.metadata, state_dict_metadata={}, planner_data=None, paths={})
        return Sketch(token=self.known.token, rest=rest)

    def metadata_of(self, told: Sketch, planner: SavePlanner) -> Metadata:
        """The metadata that the coordinator told of; chunks are computed when somebody looks at them."""
        if self.metadata is not None:
            return self.metadata
        if self.known is None or self.known.token != told.token:
            raise InternalError("the coordinator's metadata is of another planning; please report it")
        recipe = self.known.recipe
        metadata = dataclasses.replace(told.rest, state_dict_metadata=LazyDict(recipe.keys, recipe))
        assert isinstance(planner, DefaultSavePlanner)
        return planner.with_paths(metadata, [members.layout.paths for members in recipe.classes])


def plan_save(
    planner: SavePlanner, writer: StorageWriter, ranks: Ranks, set_up: Callable[[], None], *, job_rank: int
) -> PlannedSave:
    """What all ranks write; ``set_up`` makes planner and storage ready, and may fail like all else here.

    ``job_rank`` is the number of this rank in meshes.
    """
    if ranks.size == 1:
        return ranks.locally(_PHASE, partial(_planned_alone, planner, writer, set_up))
    part = RankPlanning(
        planner=planner,
        writer=writer,
        memory=ranks.kept.setdefault(_PlanMemory, _PlanMemory()),
        job_rank=job_rank,
        size=ranks.size,
    )
    answer = ranks.reduce_scatter(_PHASE, partial(part.said_first, set_up), part.merged)
    while isinstance(answer, Asked):
        answer = ranks.reduce_scatter(_PHASE, partial(part.reply, answer), part.merged)
    return part.planned(answer)


def _planned_alone(planner: SavePlanner, writer: StorageWriter, set_up: Callable[[], None]) -> PlannedSave:
    set_up()
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    return PlannedSave(plan=plan, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Surveyed:
    """What a rank of the default planner has: its leaves, its plan as storage left it, its layout."""

    local: LocalLeaves
    plan: SavePlan
    layout: Layout
    replica_check: str

    def local_plan(self) -> SavePlan:
        """The plan with what tells its contents apart, as far as storage has left it as it was."""
        items = self.plan.items
        if not isinstance(items, LazyList) or items.columns is not self.local.columns:
            return self.plan
        columns = self.local.looked_at(self.replica_check)
        return dataclasses.replace(self.plan, items=LazyList(columns))

    def own(self, groups: Groups) -> tuple[Groups, np.ndarray]:
        """The same with rows as this rank counts them; and a word for each row, the same on every rank."""
        columns = self.local.columns
        rows = rows_by_name(columns)[groups.rows]
        words = row_words(columns.keys, columns.key[rows], columns.lo[rows], columns.length[rows])
        return dataclasses.replace(groups, rows=rows), words

    def digests(self, groups: Groups, words: np.ndarray) -> bytes:
        """One digest for each group: of all its contents, whatever order they are in; 0 where nobody looked."""
        digests = np.zeros(groups.count, dtype="<u8")
        if self.replica_check != "off":
            fingerprints = self.local.fingerprints(groups.rows, self.replica_check)
            np.add.at(digests, groups.group, scrambled(words ^ fingerprints))
        return digests.tobytes()


@dataclass(slots=True, kw_only=True, eq=False)
class RankPlanning:
    """One planning as one of ``size`` ranks takes part in it."""

    planner: SavePlanner
    writer: StorageWriter
    memory: _PlanMemory
    job_rank: int
    size: int
    _surveyed: _Surveyed | None = None
    _offer: Offer | None = None
    _coordinated: Rounds[Decision] | None = None
    _decision: Decision | None = None

    def said_first(self, set_up: Callable[[], None]) -> object:
        """The plan; or, where a layout says as much, an offer of it; or the name of the planning that had the same."""
        set_up()
        planner = self.planner
        found = planner.survey() if isinstance(planner, DefaultSavePlanner) else None
        if found is None:
            return self.writer.prepare_local_plan(planner.create_local_plan())
        local, plan = found
        assert isinstance(planner, DefaultSavePlanner)
        prepared = self.writer.prepare_local_plan(plan)
        layout = layout_of(local, path_mapping(plan.planner_data))
        self._surveyed = _Surveyed(local=local, plan=prepared, layout=layout, replica_check=planner.replica_check)
        columns = local.columns
        if prepared is not plan or write_columns(plan.items) is not columns:
            return self._surveyed.local_plan()
        rows = rows_digest(name_words(columns.keys), columns.key, columns.lo, columns.length)
        self._offer = Offer(layout.fingerprint, rows, self.job_rank, planner.replica_check != "off")
        known = self.memory.remembered.get(self._offer)
        return tuple(self._offer) if known is None else known.token + self._surveyed.digests(known.groups, known.words)

    def reply(self, asked: Asked) -> object:
        if asked.what == "nothing":
            return None
        if asked.what == "offer":
            return None if self._offer is None else tuple(self._offer)
        surveyed = self._surveyed
        assert surveyed is not None
        if asked.what == "layout":
            return surveyed.layout
        if asked.what == "plan":
            return surveyed.local_plan()
        assert asked.groups is not None
        groups, words = surveyed.own(asked.groups)
        if asked.what == "contents":
            return surveyed.digests(groups, words)
        return surveyed.local.fingerprints(groups.rows, surveyed.replica_check)

    def merged(self, parts: list[object]) -> list[object]:
        """What each rank is told, or asked, after what all of them have said; on the coordinator."""
        try:
            if self._coordinated is None:
                layout = None if self._surveyed is None else self._surveyed.layout
                outcomes = self.memory.outcomes
                self._coordinated = coordinated(parts, self.planner, self.writer, outcomes=outcomes, layout=layout)
                return list(next(self._coordinated))
            return list(self._coordinated.send(parts))
        except StopIteration as end:
            self._decision = end.value
            return list(end.value.answers)

    def planned(self, answer: object) -> PlannedSave:
        """What this rank writes, after the last answer; remembered for the saves to come."""
        metadata = None if self._decision is None else self._decision.metadata
        outcome = None if self._decision is None else self._decision.outcome
        if not isinstance(answer, Final):
            assert isinstance(answer, SavePlan)
            return PlannedSave(plan=answer, metadata=metadata, outcome=outcome)
        surveyed, choice, memory = self._surveyed, answer.choice, self.memory.remembered
        assert surveyed is not None
        assert self._offer is not None
        known = memory.pop(self._offer, None)
        if choice is not None:
            everyone = Members(layout=surveyed.layout, ranks=np.arange(self.size))
            classes = [everyone] if choice.classes is None else decode_message(choice.classes)
            groups, words = surveyed.own(choice.groups)
            known = _Remembered(
                token=answer.token,
                columns=chosen_columns(surveyed.local.columns, choice.chosen, choice.heads, planning=answer.token),
                groups=groups,
                words=words,
                recipe=dataclasses.replace(choice.recipe, classes=classes),
            )
        if known is None or known.token != answer.token:
            raise InternalError("the coordinator names a planning that this rank does not know; please report it")
        memory[self._offer] = known
        while len(memory) > KEPT_PLANNINGS:
            del memory[next(iter(memory))]
        plan = dataclasses.replace(surveyed.plan, items=LazyList(known.columns), storage_data=answer.storage_data)
        return PlannedSave(plan=plan, metadata=metadata, outcome=outcome, known=known)
