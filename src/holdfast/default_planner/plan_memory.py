"""The plans of saves that are over, for planners that see plans: what ``enable_plan_caching`` means to them.

(Ranks that are given no planner compare layouts instead, in ``planning``. This here is part of the planner, because
torch's ``save`` may drive it too.)

A rank whose local plan is, in every respect, one of a recent save sends the name of that planning instead. Where all
ranks name the same one, its outcome is used again. A plan is remembered only when its save got as far as finish_plan,
and is forgotten while a save is under way, so that after a failure ranks send whole plans again; an outcome is kept for
as long as a rank may name it. Contents are not part of a plan: what tells them apart is sent and compared each time.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from holdfast._state.paths import path_mapping
from holdfast._values import forks
from holdfast._values.lazy import LazyList
from holdfast.errors import InvalidStateError
from holdfast.global_plan import check_contents
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan, WriteColumns, write_columns

_KEPT_ROUNDS = 4
"""So many saves back an unchanged plan is recognised: enough for a few models that take turns."""

_lock = forks.Lock()  # of all memories: planners are sent to other processes, and locks cannot be
PlanTogether = Callable[[list[SavePlan]], tuple[list[SavePlan], Metadata]]


@dataclass(frozen=True)
class NamedPlan(SavePlan):
    """A plan that belongs to the planning ``planning``; unusable, it stands for what that planning had."""

    planning: str = ""
    fingerprint: np.ndarray | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Remembered:
    """A local plan, and the final plan that came of it."""

    columns: WriteColumns
    planner_data: Any
    planning: str
    final: SavePlan
    round: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Outcome:
    """What was planned together, and in what manner: the plans of all ranks, and the metadata."""

    plans: list[SavePlan]
    metadata: Metadata
    manner: object
    round: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """A local plan between being made and being finished; ``known`` is the remembered one that is the same."""

    columns: WriteColumns
    planner_data: Any
    to_send: SavePlan
    known: _Remembered | None


class PlanMemory:
    """What one rank remembers; on the coordinator, also what was planned for all."""

    def __init__(self) -> None:
        self._drafts = 0
        self._remembered: list[_Remembered] = []
        self._plannings = 0
        self._outcomes: dict[str, _Outcome] = {}

    def draft(self, columns: WriteColumns, plan: SavePlan) -> Draft:
        """What this rank sends for ``plan``: itself, or the name of the planning that had the same one."""
        with _lock:
            self._drafts += 1
            recent = [each for each in self._remembered if self._drafts - each.round < _KEPT_ROUNDS]
            known = next((each for each in recent if _is_same(each, columns, plan.planner_data)), None)
            self._remembered = [each for each in recent if each is not known]
        if known is None:
            return Draft(columns=columns, planner_data=plan.planner_data, to_send=plan, known=None)
        named = NamedPlan([], usable=False, planning=known.planning, fingerprint=columns.fingerprint)
        return Draft(columns=columns, planner_data=plan.planner_data, to_send=named, known=known)

    def plan_once(
        self, plans: list[SavePlan], plan_together: PlanTogether, *, manner: object = None
    ) -> tuple[list[SavePlan], Metadata]:
        """What ``plan_together`` makes of ``plans``, or made of the same ones, in the same manner, in a recent save."""
        with _lock:
            return self._plan_once(plans, plan_together, manner)

    def _plan_once(
        self, plans: list[SavePlan], plan_together: PlanTogether, manner: object
    ) -> tuple[list[SavePlan], Metadata]:
        self._plannings += 1
        self._outcomes = {
            name: each for name, each in self._outcomes.items() if self._plannings - each.round < _KEPT_ROUNDS
        }
        whole = [self._whole(rank, plan) for rank, plan in enumerate(plans)]
        same = self._same_outcome(plans, manner)
        if same is not None:
            differing = check_contents(whole)
            self._outcomes[same] = outcome = dataclasses.replace(self._outcomes[same], round=self._plannings)
            answer: SavePlan = NamedPlan([], usable=False, planning=same)
            return [answer] * len(plans), dataclasses.replace(outcome.metadata, differing=differing)
        before = [_snapshot(plan) for plan in whole]
        finished, metadata = plan_together(whole)
        name = secrets.token_hex(8)
        self._outcomes[name] = _Outcome(
            plans=before, metadata=dataclasses.replace(metadata), manner=manner, round=self._plannings
        )
        return [
            NamedPlan(plan.items, plan.storage_data, plan.planner_data, plan.usable, planning=name) for plan in finished
        ], metadata

    def _same_outcome(self, plans: list[SavePlan], manner: object) -> str | None:
        """The planning that every rank names, unless its outcome would be another now."""
        named = {plan.planning if isinstance(plan, NamedPlan) and not plan.usable else "" for plan in plans}
        (name, *others) = named
        if others or not name or any(plan.planner_data is not None for plan in plans):
            return None
        outcome = self._outcomes[name]
        return name if outcome.manner == manner and len(outcome.plans) == len(plans) else None

    def _whole(self, rank: int, plan: SavePlan) -> SavePlan:
        """The plan that ``rank`` means."""
        if plan.usable:
            return plan
        outcome = self._outcomes.get(plan.planning) if isinstance(plan, NamedPlan) else None
        if not isinstance(plan, NamedPlan) or outcome is None or rank >= len(outcome.plans):
            raise InvalidStateError(
                f"rank {rank} says that its plan has not changed, but its coordinator has planned no such save; "
                "give each process group a planner of its own, or leave enable_plan_caching out"
            )
        before = outcome.plans[rank]
        columns = dataclasses.replace(write_columns(before.items), fingerprint=plan.fingerprint)
        data = before.planner_data if plan.planner_data is None else plan.planner_data
        return SavePlan(LazyList(columns), plan.storage_data, data)

    def finish(self, draft: Draft, plan: SavePlan) -> SavePlan:
        """The final plan of this rank, remembered for the saves to come."""
        planning = plan.planning if isinstance(plan, NamedPlan) else ""
        known = draft.known
        if not plan.usable:
            if known is None or planning not in ("", known.planning):
                raise InvalidStateError(
                    "the coordinator says that the plan of this rank has not changed, but it has; "
                    "leave enable_plan_caching out"
                )
            planning = known.planning
            plan = dataclasses.replace(known.final, storage_data=plan.storage_data)
        elif not planning and known is not None and len(known.final.items) > len(plan.items) == 0:
            raise InvalidStateError(
                "the storage made a new plan and left out that it is not usable; leave enable_plan_caching out"
            )
        final = _snapshot(plan)
        if planning:  # else storage made a new plan, without the name
            self._remembered.append(
                _Remembered(
                    columns=draft.columns,
                    planner_data=draft.planner_data,
                    planning=planning,
                    final=final,
                    round=self._drafts,
                )
            )
        return _snapshot(final)


def _snapshot(plan: SavePlan) -> SavePlan:
    """``plan`` with items of its own, which nobody has touched."""
    return dataclasses.replace(plan, items=LazyList(write_columns(plan.items)))


def _is_same(remembered: _Remembered, columns: WriteColumns, planner_data: Any) -> bool:
    """Whether two local plans are the same in all but the contents of what they would write."""
    known = remembered.columns
    return (
        known.keys == columns.keys
        and known.heads == columns.heads
        and known.lenient == columns.lenient
        and all(
            np.array_equal(getattr(known, name), getattr(columns, name))
            for name in ("key", "lo", "length", "hint", "is_shard")
        )
        and _steps(remembered.planner_data) == _steps(planner_data)
    )


def _steps(planner_data: Any) -> Any:
    """Paths with the types of their steps: an int key equals its text, and a tuple's position that of a list."""
    paths = path_mapping(planner_data)
    return None if paths is None else {key: [(type(step), repr(step)) for step in path] for key, path in paths.items()}
