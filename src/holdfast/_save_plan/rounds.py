"""How the ranks of a save plan together: they say what differs, and nothing twice.

A rank of the default planner first sends the fingerprint of its layout and a digest of its rows; one of each layout is
asked to describe it, and the coordinator plans for all from the descriptions. What several ranks hold is then compared
by one digest for each set of holders, and looked at closely only where those differ. Every rank gets what it writes as
columns of its own rows. Both sides remember that: in the next save a rank whose layout is the same sends the name of
that planning and its digests, and nothing is planned again.

A planner that makes plans of its own, or storage that changes them: then all ranks send their plans whole, and the
planner's create_global_plan decides. A round is one ``scatter``; ``Asked`` is answered in the next one, anything else
ends it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from holdfast._plan.shares import box_words, rows_digest, scrambled
from holdfast._ranks.ranks import Ranks
from holdfast._save_plan.coordinator import (
    KEPT_PLANNINGS,
    Asked,
    Choice,
    Coordinator,
    Final,
    Groups,
    Job,
    Named,
    Offer,
    Outcome,
    Sketch,
    Whole,
)
from holdfast._save_plan.from_layouts import Layout, LayoutPlan, Members, layout_of
from holdfast._save_plan.local import LocalLeaves
from holdfast._save_plan.together import chosen_columns, rows_by_name
from holdfast._state.nested import path_mapping
from holdfast._torch_codec.pickles import decode_message
from holdfast._values.digest import name_words
from holdfast._values.lazy import LazyDict, LazyList
from holdfast.default_planner.save_planner import DefaultSavePlanner
from holdfast.errors import InternalError
from holdfast.metadata import STORAGE_TYPES, Metadata
from holdfast.planner import SavePlan, SavePlanner, WriteColumns, write_columns
from holdfast.storage import PlannedReport, StorageWriter, WriteResult

_PHASE = "planning the save"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Remembered:
    """What a rank keeps of a planning: its offer, what it wrote, what it compared, and how to make the metadata."""

    offer: Offer
    token: bytes
    columns: WriteColumns
    groups: Groups
    words: np.ndarray
    classes: list[Members]
    job: Job


class _Memory:
    """What one rank keeps of plannings, the newest last; on the coordinator, also what was planned for all."""

    def __init__(self) -> None:
        self.remembered: list[_Remembered] = []
        self.outcomes: list[Outcome] = []


class SavePlanning:
    """One planning of a save, on one rank: ``run`` gives its plan, then ``metadata`` what they write together."""

    def __init__(self, planner: SavePlanner, writer: StorageWriter, ranks: Ranks, *, name: int, host: int) -> None:
        self._planner = planner
        self._writer = writer
        self._ranks = ranks
        self._name = name
        self._host = host
        self._memory: _Memory = ranks.kept.setdefault(_Memory, _Memory())
        self._local: LocalLeaves | None = None
        self._whole: SavePlan | None = None
        self._layout: Layout | None = None
        self._offer: Offer | None = None
        self._known: _Remembered | None = None
        self._coordinator: Coordinator | None = None
        self._token = b""

    def run(self, set_up: Callable[[], None]) -> SavePlan:
        """What this rank writes; ``set_up`` makes planner and storage ready, and may fail like all else here."""

        def first() -> Any:
            set_up()
            return self._said_first()

        answer = self._ranks.scatter(_PHASE, first, self._merged)
        while isinstance(answer, Asked):
            answer = self._ranks.scatter(_PHASE, partial(self._reply, answer), self._merged)
        return self._finished(answer) if isinstance(answer, Final) else answer

    def _merged(self, parts: list[Any]) -> list[Any]:
        if self._coordinator is None:
            layout = None if self._offer is None else self._layout
            self._coordinator = Coordinator(self._planner, self._writer, self._memory.outcomes, layout=layout)
        return self._coordinator.merge(parts)

    # --- every rank --------------------------------------------------------------------------------------------------

    def _said_first(self) -> Any:
        """The plan; or, where a layout says as much, an offer of it; or the name of the planning that had the same."""
        surveyed = None
        if self._ranks.size > 1 and isinstance(self._planner, DefaultSavePlanner):
            surveyed = self._planner.survey()
        if surveyed is None:
            return Whole(self._writer.prepare_local_plan(self._planner.create_local_plan()), self._host)
        self._local, plan = surveyed
        columns = self._local.columns
        self._whole = self._writer.prepare_local_plan(plan)
        self._layout = layout_of(self._local, path_mapping(plan.planner_data))
        if self._whole is not plan or write_columns(plan.items) is not columns:
            return self._whole_plan()
        rows = rows_digest(name_words(columns.keys), columns.key, columns.lo, columns.length)
        self._offer = Offer(self._layout.fingerprint, rows, self._name, self._looks, self._host)
        self._known = next((each for each in self._memory.remembered if each.offer == self._offer), None)
        if self._known is None:
            return self._offer.encoded()
        return Named(self._known.token, self._digests(self._known.groups, self._known.words).tobytes()).encoded()

    @property
    def _looks(self) -> bool:
        return isinstance(self._planner, DefaultSavePlanner) and self._planner.replica_check != "off"

    def _reply(self, asked: Asked) -> Any:
        if asked.what == "offer":
            return None if self._offer is None else self._offer.encoded()
        if asked.what == "layout":
            return self._layout
        if asked.what == "plan":
            return self._whole_plan()
        if asked.what == "nothing":
            return None
        assert asked.groups is not None
        groups = self._own(asked.groups)
        if asked.what == "contents":
            return self._digests(groups, self._words(groups)).tobytes()
        return self._fingerprints(groups)

    def _own(self, groups: Groups) -> Groups:
        """The same with rows as this rank counts them."""
        assert self._local is not None
        return dataclasses.replace(groups, rows=rows_by_name(self._local.columns)[groups.rows])

    def _whole_plan(self) -> Whole:
        """The plan with what tells its contents apart, as far as storage has left it as it was."""
        assert self._whole is not None
        assert self._local is not None
        columns = self._local.columns
        if not isinstance(self._whole.items, LazyList) or self._whole.items.columns is not columns:
            return Whole(self._whole, self._host)
        everything = Groups(rows=np.arange(len(columns)), group=np.zeros(len(columns), np.int64), count=1)
        columns = dataclasses.replace(columns, fingerprint=self._fingerprints(everything))
        return Whole(dataclasses.replace(self._whole, items=LazyList(columns)), self._host)

    def _fingerprints(self, groups: Groups) -> np.ndarray:
        assert self._local is not None
        assert isinstance(self._planner, DefaultSavePlanner)
        return self._local.fingerprints(groups.rows, self._planner.replica_check)

    def _words(self, groups: Groups) -> np.ndarray:
        """A word for the key and the box of each of these rows, the same on every rank."""
        assert self._local is not None
        columns = self._local.columns
        rows = groups.rows
        boxes = scrambled(box_words(columns.lo[rows], columns.length[rows]))
        words: np.ndarray = name_words(columns.keys)[columns.key[rows]] ^ boxes
        return words

    def _digests(self, groups: Groups, words: np.ndarray) -> np.ndarray:
        """One digest for each group: of all its contents, whatever order they are in; 0 where nobody looked."""
        digests = np.zeros(groups.count, dtype="<u8")
        if self._looks:
            np.add.at(digests, groups.group, scrambled(words ^ self._fingerprints(groups)))
        return digests

    def _finished(self, final: Final) -> SavePlan:
        """The plan of this rank, remembered for the saves to come."""
        assert self._offer is not None
        assert self._whole is not None
        self._token, known = final.token, self._known
        if final.choice is not None:
            known = self._chosen(final.token, final.choice)
        if known is None or known.token != final.token:
            raise InternalError("the coordinator names a planning that this rank does not know; please report it")
        # The same offer once only, and the newest last.
        others = [each for each in self._memory.remembered if each.offer != self._offer]
        self._memory.remembered = [*others[-KEPT_PLANNINGS + 1 :], known]
        self._known = known
        return dataclasses.replace(self._whole, items=LazyList(known.columns), storage_data=final.storage_data)

    def _chosen(self, token: bytes, choice: Choice) -> _Remembered:
        assert self._local is not None
        assert self._layout is not None
        assert self._offer is not None
        everyone = Members(layout=self._layout, ranks=np.arange(self._ranks.size))
        groups = self._own(choice.groups)
        return _Remembered(
            offer=self._offer,
            token=token,
            columns=chosen_columns(self._local.columns, choice.chosen, choice.heads, planning=token),
            groups=groups,
            words=self._words(groups),
            classes=[everyone] if choice.job.classes is None else decode_message(choice.job.classes),
            job=dataclasses.replace(choice.job, classes=None),
        )

    # --- the metadata, which all ranks return ------------------------------------------------------------------------

    @property
    def planned(self) -> Metadata:
        """What was planned together; on the coordinator."""
        assert self._coordinator is not None
        assert self._coordinator.metadata is not None
        return self._coordinator.metadata

    def bound(self, results: list[MutableSequence[WriteResult]]) -> list[MutableSequence[WriteResult]]:
        """``results``; reports that say only what the plan does not say are told of the plan."""
        assert self._coordinator is not None
        outcome = self._coordinator.outcome
        bound = list(results)
        for rank, result in enumerate(results):
            report: object = result.columns if isinstance(result, LazyList) else None
            if outcome is not None and isinstance(report, PlannedReport) and report.planning == outcome.token:
                bound[rank] = LazyList(report.with_plan(partial(self._coordinator.plan_of, rank)))
        return bound

    def sketched(self) -> Metadata | Sketch:
        """What the coordinator tells the others of the metadata: few words where nobody has changed it."""
        metadata, entries = self.planned, self.planned.state_dict_metadata
        known = isinstance(entries, LazyDict) and isinstance(entries.source, LayoutPlan) and entries.is_untouched
        if not self._token or not known or metadata.storage_data is not None:
            return metadata
        return Sketch(
            token=self._token, rest=dataclasses.replace(metadata, state_dict_metadata={}, planner_data=None, paths={})
        )

    def metadata(self, told: Metadata | Sketch) -> Metadata:
        """The metadata that ``sketched`` stands for; chunks are computed when somebody looks at them."""
        if isinstance(told, Metadata):
            return told
        if self._coordinator is not None:
            return self.planned
        known = self._known
        if known is None or known.token != told.token:
            raise InternalError("the coordinator's metadata is of another planning; please report it")
        named = list(dict.fromkeys(key for members in known.classes for key in members.layout.keys))
        keys = [named[place] for place in known.job.order.tolist()]
        metadata = dataclasses.replace(told.rest, state_dict_metadata=LazyDict(keys, _LaterPlan(known, keys)))
        assert isinstance(self._planner, DefaultSavePlanner)
        return self._planner.with_paths(metadata, [members.layout.paths for members in known.classes])


class _LaterPlan:
    """The metadata's entries on a rank that planned nothing: planned again, from the layouts, if somebody looks."""

    def __init__(self, known: _Remembered, keys: list[str]) -> None:
        self._known = known
        self._keys = keys
        self._plan: LayoutPlan | None = None

    def __len__(self) -> int:
        return len(self._made)

    def item(self, row: int) -> STORAGE_TYPES:
        """What the metadata says of key number ``row``."""
        return self._made.item(row)

    @property
    def _made(self) -> LayoutPlan:
        if self._plan is None:
            job = self._known.job
            self._plan = LayoutPlan(
                self._known.classes,
                self._keys,
                job.names.astype(np.int64),
                to_lowest_rank=job.to_lowest_rank,
                hosts=None if job.hosts is None else job.hosts.astype(np.int64),
            )
        return self._plan
