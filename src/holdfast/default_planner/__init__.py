"""The planners used when none is given: the whole state out, the whole target in; and the functions that torch has
beside them, for planners that are made of those.
"""

from __future__ import annotations

from holdfast._save_plan.plans import as_planned, local_leaves, without_replicas
from holdfast._values.lazy import LazyList
from holdfast.default_planner.load_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from holdfast.default_planner.save_planner import DefaultSavePlanner
from holdfast.metadata import STATE_DICT_TYPE, Metadata
from holdfast.planner import LoadPlan, SavePlan
from holdfast.planner_helpers import tiling_faults

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "_EmptyStateDictLoadPlanner",
    "_validate_global_plan",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
    "dedup_save_plans",
    "dedup_tensors",
]


def create_default_local_save_plan(state_dict: STATE_DICT_TYPE, is_coordinator: bool) -> SavePlan:
    """An item for each leaf of the flat ``state_dict`` that this rank holds, whether or not it coordinates."""
    return SavePlan(LazyList(local_leaves(state_dict).columns))


def create_default_global_save_plan(
    all_plans: list[SavePlan], rewrite_index_hints: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """``all_plans``, with hints of where each item is in the metadata, and that metadata.

    The plans must have no duplicates (see ``dedup_save_plans``) and make every tensor up exactly: InvalidStateError.
    """
    return as_planned(all_plans, rewrite_index_hints=rewrite_index_hints)


def create_default_local_load_plan(state_dict: STATE_DICT_TYPE, metadata: Metadata, strict: bool = True) -> LoadPlan:
    """What to read for each leaf of the flat ``state_dict``; MismatchError where it differs from the checkpoint.

    Without ``strict``, keys that the checkpoint does not have are left out.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, allow_partial_load=not strict)
    planner.set_up_planner(dict(state_dict), metadata)
    return planner.create_local_plan()


def create_default_global_load_plan(all_plans: list[LoadPlan]) -> list[LoadPlan]:
    """``all_plans``: every rank reads for itself."""
    return all_plans


def dedup_save_plans(all_plans: list[SavePlan], save_to_lowest_rank: bool = False) -> list[SavePlan]:
    """The plans with every item in one of those that have it: so that all write about as much, or in the first."""
    return without_replicas(all_plans, to_lowest_rank=save_to_lowest_rank)


def dedup_tensors(all_plans: list[SavePlan]) -> list[SavePlan]:
    """The plans with every item in the first of those that have it."""
    return without_replicas(all_plans, to_lowest_rank=True)


def _validate_global_plan(global_plan: list[SavePlan], metadata: Metadata) -> list[str]:
    """What is wrong with the chunks of ``metadata``, one message for each key: outside, overlapping, or not enough."""
    return [f"key:{key} {detail}" for key, detail in tiling_faults(metadata)]
