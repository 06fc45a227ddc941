"""Saving, under the names of torch.distributed.checkpoint.state_dict_saver."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from holdfast._async_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save
from holdfast._ranks.ranks import participants
from holdfast._saver import State, save, save_with
from holdfast.default_planner import DefaultSavePlanner
from holdfast.metadata import Metadata
from holdfast.planner import SavePlanner
from holdfast.storage import StorageWriter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["AsyncCheckpointerType", "AsyncSaveResponse", "async_save", "save", "save_state_dict"]


def save_state_dict(
    state_dict: State,
    storage_writer: StorageWriter,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """Save to ``storage_writer``, after a reset of it; deprecated in favour of ``save``.

    ``coordinator_rank`` counts within the group.
    """
    warnings.warn("save_state_dict is deprecated; use save", FutureWarning, stacklevel=2)
    storage_writer.reset()
    return _save_state_dict(state_dict, storage_writer, process_group, coordinator_rank, no_dist, planner)


def _save_state_dict(
    state_dict: State,
    storage_writer: StorageWriter,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
    use_collectives: bool = True,
) -> Metadata:
    """Save without a reset: what torch calls its engine, for those who import it."""
    ranks = participants(process_group, no_dist=no_dist, call="save_state_dict", coordinator_rank=coordinator_rank)
    with ranks:
        planner = DefaultSavePlanner() if planner is None else planner
        return save_with(state_dict, storage_writer, planner, ranks, use_collectives=use_collectives)
