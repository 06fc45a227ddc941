"""Where torch's format keeps an item: the values behind ``Metadata.storage_data`` of a ``.metadata`` file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.metadata import MetadataIndex

METADATA_NAME = ".metadata"
DATA_SUFFIX = ".distcp"
NOTE_PREFIX = "replaces-"
"""How the names of notes begin, which savers leave while one format replaces another."""


def metadata_name(rank: int | None) -> str:
    """The name of the metadata of all ranks, or of what one rank wrote for itself alone."""
    return METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"


@dataclass(frozen=True)
class StorageInfo:
    """The bytes of one item; ``transform_descriptors`` name the stream transforms that they went through."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] | None = None


@dataclass(frozen=True)
class StoragePrefix:
    """How the names of one rank's files begin."""

    prefix: str


def find_place(storage_data: Mapping[Any, Any], key: str, offset: Sequence[int] | None) -> StorageInfo | None:
    """Where the chunk of ``key`` at ``offset`` is, or its value; the first chunk may be listed without an offset."""
    place = storage_data.get(MetadataIndex(key, offset))
    if place is None and offset is not None and not any(offset):
        place = storage_data.get(MetadataIndex(key))
    return place if isinstance(place, StorageInfo) else None


def is_of_a_save(name: str) -> bool:
    """Whether a save makes a file of that ``name`` before it is published; what has only such was never finished."""
    is_unfinished = name.endswith(".tmp") and (METADATA_NAME in name or name.startswith(NOTE_PREFIX))
    return is_unfinished or name.endswith(DATA_SUFFIX)
