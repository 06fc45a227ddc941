"""Who takes part in a save or load: all ranks of a process group, or this process alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed

from holdfast._coord.ranks import Ranks, SoloRanks
from holdfast._io.sharing import host_identity
from holdfast._torchformat.messages import decode_message, encode_message
from holdfast._values.deadline import Patience
from holdfast._values.digest import digest
from holdfast._values.forks import reset_in_child
from holdfast.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_inherited: list[object] = []  # the default group of the process that this one was forked from

DEADLINE_S = 120.0
"""Seconds without progress after which a rank that others wait for is given up."""


def mesh_rank() -> int:
    """The number that meshes have for this process."""
    is_there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if is_there else 0


def host_name() -> int:
    """A number that processes have in common when they are on one host."""
    return digest("\0".join(host_identity()).encode())


@reset_in_child
def _forget_parent() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _inherited[:] = [torch.distributed.group.WORLD]


def participants(
    process_group: ProcessGroup | None,
    *,
    no_dist: bool,
    call: str,
    place: object = None,
    coordinator_rank: int = 0,
    deadline_s: float = DEADLINE_S,
) -> Ranks:
    """The ranks of one operation, which meet where ``call`` and ``place``, the path if that is one, are the same.

    ``deadline_s`` may be infinite; ValueError unless it is positive.
    """
    if not deadline_s > 0:
        raise ValueError(f"deadline_s is a positive number of seconds, or math.inf for no deadline, not {deadline_s}")
    if no_dist or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return SoloRanks()
    if torch.distributed.get_world_size(process_group) == 1:
        return SoloRanks()
    if torch.distributed.group.WORLD in _inherited:
        raise CheckpointError(
            f"this process was forked from rank {mesh_rank()} and is no rank itself; pass no_dist=True to save or load "
            "in it alone"
        )
    # Only now: without a job of several ranks there is nothing to import it for.
    from holdfast._coord.channel_ranks import ChannelRanks
    from holdfast._coord.rendezvous import connect

    return ChannelRanks(
        connect(process_group, coordinator=coordinator_rank),
        key=f"{call} {_shown(place)}",
        encode=encode_message,
        decode=decode_message,
        patience=Patience.within(deadline_s),
    )


def _shown(place: object) -> str:
    try:
        return repr(os.fspath(place)) if isinstance(place, (str, bytes, os.PathLike)) else "None"
    except Exception:  # of a path of the caller's own making; the operation itself will say so
        return "None"
