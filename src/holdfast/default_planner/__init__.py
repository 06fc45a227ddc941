"""The planners used when none is given: the whole state out, the whole target in; and torch's functions around them."""

from __future__ import annotations

from holdfast.default_planner.default_plans import (
    _validate_global_plan,
    create_default_global_load_plan,
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
    dedup_save_plans,
    dedup_tensors,
)
from holdfast.default_planner.empty_planner import _EmptyStateDictLoadPlanner
from holdfast.default_planner.empty_targets import chosen_keys, empty_state, require_gradients
from holdfast.default_planner.load_planner import DefaultLoadPlanner, WholeLoadPlanner
from holdfast.default_planner.save_planner import DefaultSavePlanner

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "WholeLoadPlanner",
    "_EmptyStateDictLoadPlanner",
    "_validate_global_plan",
    "chosen_keys",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
    "dedup_save_plans",
    "dedup_tensors",
    "empty_state",
    "require_gradients",
]
