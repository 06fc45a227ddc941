"""What ranks say to each other while they plan a save: offers, questions, and what each of them writes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from holdfast.joint_plan import Chosen
from holdfast.metadata import Metadata
from holdfast.planner import SavePlan, TensorHead

_OFFER = struct.Struct("<c16sQI?Q")
_NAMED = struct.Struct("<c8s")


class Offer(NamedTuple):
    """What a rank says of its layout, and its number in meshes; whether it will look at contents; its host."""

    fingerprint: bytes
    rows: int
    name: int
    looks: bool
    host: int

    def encoded(self) -> bytes:
        """The offer as it is sent."""
        return _OFFER.pack(b"o", *self)


class Named(NamedTuple):
    """The planning that had the same offer, and the digests of what this rank has in common with others now."""

    token: bytes
    digests: bytes

    def encoded(self) -> bytes:
        """The same as it is sent."""
        return _NAMED.pack(b"n", self.token) + self.digests


class Whole(NamedTuple):
    """All that a rank plans to write, and its host."""

    plan: SavePlan
    host: int


def said_first(part: Any) -> Any:
    """What a rank sent first: an Offer, a Named, or a Whole."""
    if not isinstance(part, bytes):
        return part
    return Offer(*_OFFER.unpack(part)[1:]) if part[:1] == b"o" else Named(part[1 : _NAMED.size], part[_NAMED.size :])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """What the coordinator wants to know: "offer", "layout", "contents" of ``groups``, "details", "plan", "nothing"."""

    what: str
    groups: Groups | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Rows that a rank has in common with others; rows of the same ``group`` with the same others."""

    rows: np.ndarray
    group: np.ndarray
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """What the metadata of the whole is made of: the classes of ranks, encoded, and the order of their keys.

    Without ``classes`` all ranks have the receiver's layout.
    """

    classes: bytes | None
    order: np.ndarray
    names: np.ndarray
    to_lowest_rank: bool
    hosts: np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """What a rank writes, and ``heads``: the keys that all ranks together say something else of than this one."""

    chosen: Chosen
    heads: dict[str, TensorHead | None]
    groups: Groups
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Final:
    """The end of planning ``token``; without ``choice``, the rank writes what it wrote after it the last time."""

    token: bytes
    storage_data: Any
    choice: Choice | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sketch:
    """The metadata of planning ``token`` in so few words that every rank can make it of what it knows."""

    token: bytes
    rest: Metadata
