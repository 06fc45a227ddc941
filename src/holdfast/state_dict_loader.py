"""Loading, under the names of torch.distributed.checkpoint.state_dict_loader."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast._loader import LoadOptions, State, Target, load, load_with, read_with, reader_finder
from holdfast._ranks.ranks import participants
from holdfast.default_planner import DefaultLoadPlanner
from holdfast.planner import LoadPlanner
from holdfast.storage import StorageReader

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["load", "load_state_dict"]


def load_state_dict(
    state_dict: Target,
    storage_reader: StorageReader,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """Load from ``storage_reader``, after a reset of it; deprecated in favour of ``load``.

    ``coordinator_rank`` counts within the group.
    """
    warnings.warn("load_state_dict is deprecated; use load", FutureWarning, stacklevel=2)
    storage_reader.reset()
    _load_state_dict(state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner)


def _load_state_dict(
    state_dict: Target,
    storage_reader: StorageReader,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """Load without a reset: what torch calls its engine, for those who import it."""
    ranks = participants(process_group, no_dist=no_dist, call="load_state_dict", coordinator_rank=coordinator_rank)
    with ranks:
        load_with(state_dict, lambda: storage_reader, DefaultLoadPlanner() if planner is None else planner, ranks)


def _load_state_dict_from_keys(
    keys: Iterable[str] | str | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    process_group: ProcessGroup | None = None,
) -> State:
    """What is stored at and below ``keys``, or everything, whole on every rank; see ``read``."""
    with participants(process_group, no_dist=False, call="load_keys", place=checkpoint_id) as ranks:
        return read_with(reader_finder(checkpoint_id, storage_reader, LoadOptions()), keys, ranks)
