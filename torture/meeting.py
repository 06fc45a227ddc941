"""Forked processes as the ranks of one save or load, talking over the library's own control channel."""

from __future__ import annotations

import importlib
import time
from functools import partial
from pathlib import Path

import msgspec

from holdfast._coord import rendezvous
from holdfast._coord.channel_ranks import ChannelRanks
from holdfast._torchformat.messages import decode_message, encode_message
from holdfast._values.deadline import Patience


def meet(place: Path, *, rank: int, world: int, patience: Patience) -> None:
    """Make this process a rank of ``world``: every save and load from here on is one of all of them.

    The first rank runs the store and leaves its address at ``place``.
    """
    server = None
    if rank == 0:
        server, address = rendezvous._serve(0)
        draft = place.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(address))
        draft.rename(place)
    else:
        while not place.exists():
            time.sleep(0.005)
        address = msgspec.json.decode(place.read_bytes(), type=rendezvous.Address)
    channel = rendezvous.join(address, rank=rank, names=range(world), server=server, deadline_s=30.0)
    ranks = partial(ChannelRanks, channel, encode=encode_message, decode=decode_message, patience=patience)
    for name in ("holdfast.saver", "holdfast.async_saver", "holdfast.loader"):
        setattr(importlib.import_module(name), "participants", lambda *args, **kwargs: ranks())  # noqa: B010
