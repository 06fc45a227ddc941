"""Torch's own checkpoint modules, for those who need them at run time, and classes that are torch's and ours at once.

Importing this imports torch.distributed.checkpoint, which takes a second: import it where it is needed, not at the top.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import ClassVar

from torch.distributed import checkpoint
from torch.distributed.checkpoint import (
    _async_process_executor,
    _extension,
    _nested_dict,
    _traverse,
    filesystem,
    logger,
    metadata,
    optimizer,
    planner,
    resharding,
    staging,
    state_dict,
    state_dict_loader,
    state_dict_saver,
    storage,
)

from holdfast.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

__all__ = [
    "_async_process_executor",
    "_extension",
    "_nested_dict",
    "_traverse",
    "filesystem",
    "logger",
    "metadata",
    "optimizer",
    "planner",
    "resharding",
    "staging",
    "state_dict",
    "state_dict_loader",
    "state_dict_saver",
    "storage",
]

FSSPEC = "fsspec_filesystem" if hasattr(checkpoint, "fsspec_filesystem") else "_fsspec_filesystem"
"""The module of torch's storage at URLs: before torch 2.15 its name began with an underscore."""


def import_fsspec_storage() -> None:
    """Let torch derive its fsspec storage now: it must come from torch's file storage, whose names may be replaced."""
    with contextlib.suppress(ImportError):
        importlib.import_module(f"torch.distributed.checkpoint.{FSSPEC}")


class _AlsoTorchs:
    """To isinstance it is torch's as well; it compares, and travels to other processes, as what it is of ours."""

    ours: ClassVar[type]

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, self.ours) else NotImplemented

    __hash__ = None  # type: ignore[assignment] # as dataclasses that can be changed have it

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return self.ours, tuple(vars(self).values())


# The first __init__ is ours: fields are given by name, and are the same for both.


class MetadataOfBoth(_AlsoTorchs, Metadata, metadata.Metadata):  # type: ignore[misc]
    ours = Metadata


class TensorOfBoth(_AlsoTorchs, TensorStorageMetadata, metadata.TensorStorageMetadata):  # type: ignore[misc]
    ours = TensorStorageMetadata


class BytesOfBoth(_AlsoTorchs, BytesStorageMetadata, metadata.BytesStorageMetadata):
    ours = BytesStorageMetadata
