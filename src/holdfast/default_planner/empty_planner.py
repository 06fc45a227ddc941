"""Loading without a template: the target is made of what the checkpoint says of itself."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from holdfast._state.nested import stored_paths, unflatten
from holdfast.default_planner.empty_targets import chosen_keys, empty_state
from holdfast.default_planner.load_planner import DefaultLoadPlanner
from holdfast.errors import InvalidStateError
from holdfast.metadata import STATE_DICT_TYPE, Metadata


class _EmptyStateDictLoadPlanner(DefaultLoadPlanner):
    """Fills an empty dict with ``keys`` of the checkpoint, nested as they were saved, on the CPU; None means all.

    A key stands for itself and all below it: "model" and "model.layers.0" are good names. MismatchError for a name that
    stands for nothing, unless ``allow_partial_load``. The options are those of DefaultLoadPlanner.
    """

    def __init__(self, keys: Collection[str] | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keys = keys

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Fill ``state_dict``, which must be empty, with what is to be read."""
        if state_dict:
            raise InvalidStateError("a target that is made from the checkpoint must be empty; give an empty dict")
        if metadata is None:
            raise InvalidStateError("a load planner needs the metadata of the checkpoint; call set_up_planner with it")
        chosen = chosen_keys(metadata, self.keys, allow_missing=self.allow_partial_load)
        leaves, paths = empty_state(metadata, chosen), stored_paths(metadata)
        super().set_up_planner({}, None, is_coordinator)
        self.metadata = metadata
        self.mappings = {key: paths.get(key, (key,)) for key in chosen}
        self.state_dict = leaves
        self.original_state_dict = state_dict
        state_dict.update(unflatten(leaves, self.mappings) if self.flatten_state_dict else leaves)
