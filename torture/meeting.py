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

    Those that run a store leave its address beside ``place``.
    """
    servers, hosts = [], rendezvous.hosts_of(world)
    places = [place.with_suffix(f".{host}") for host in hosts]
    if rank in hosts:
        server, address = rendezvous.serve(rank)
        servers.append(server)
        draft = place.with_suffix(f".{rank}.draft")
        draft.write_bytes(msgspec.json.encode(address))
        draft.rename(places[hosts.index(rank)])
    while not all(one.exists() for one in places):
        time.sleep(0.005)
    addresses = [msgspec.json.decode(one.read_bytes(), type=rendezvous.Address) for one in places]
    channel = rendezvous.join(addresses, rank=rank, names=range(world), servers=servers, deadline_s=30.0)
    ranks = partial(ChannelRanks, channel, encode=encode_message, decode=decode_message, patience=patience)
    for name in ("holdfast.saver", "holdfast.async_saver", "holdfast.loader"):
        setattr(importlib.import_module(name), "participants", lambda *args, **kwargs: ranks())  # noqa: B010
