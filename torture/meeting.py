"""Forked processes as the ranks of one save or load, talking over the library's own control channel."""

from __future__ import annotations

import importlib
import time
from functools import partial
from pathlib import Path

import msgspec

from holdfast._ranks import rendezvous
from holdfast._ranks.channel import Channel
from holdfast._ranks.channel_ranks import ChannelRanks
from holdfast._values.deadline import Patience


def meet(place: Path, *, rank: int, world: int, patience: Patience) -> None:
    """Make this process a rank of ``world``: every save and load from here on is one of all of them.

    The first rank leaves its address at ``place``.
    """
    if rank == 0:
        listener, address = rendezvous.serve(is_first=True)
        draft = place.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(address))
        draft.rename(place)
        channel = Channel(rank=rank, job_ranks=range(world), listener=listener, token=address.token)
    else:
        dial = rendezvous.caller(partial(_find, place), rank=rank, coordinator=0)
        channel = Channel(rank=rank, job_ranks=range(world), dial=dial)

    make = partial(ChannelRanks, channel)

    def participants(*args: object, call: str, place: object = None, **kwargs: object) -> ChannelRanks:
        return make(key=f"{call} {place}", patience=patience)

    with make(key="meet", patience=Patience()) as ranks:  # what happens later happens to ranks that know each other
        ranks.all_reduce("meeting", lambda: None, lambda parts: None)
    for name in ("holdfast._saver", "holdfast._async_saver", "holdfast._loader"):
        setattr(importlib.import_module(name), "participants", participants)  # noqa: B010


def _find(place: Path, limit_s: float) -> rendezvous.Address:
    while not place.exists():
        time.sleep(0.005)
    return msgspec.json.decode(place.read_bytes(), type=rendezvous.Address)
