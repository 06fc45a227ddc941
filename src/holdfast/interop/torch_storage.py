"""Native storage in the shape of torch's FileSystemWriter and FileSystemReader.

They take torch's arguments and belong to torch's base classes, so that code which names torch's own can be given these.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed.checkpoint.filesystem as torchs
from torch.distributed.checkpoint import storage as torch_protocol
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from holdfast._native.formats import format_at
from holdfast._native.reader import NativeReader
from holdfast._native.writer import NativeWriter

# Kept under names of their own: those in torch's modules may stand for the classes below.
TORCHS_WRITER = torchs.FileSystemWriter
TORCHS_READER = torchs.FileSystemReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What torch's arguments cannot say."""

    verify: bool = True
    cast: bool = False
    allow_pickle: bool = False


options: list[Options] = []
"""Those of every use that is in force; the last one counts for storages made from now on."""


def _current() -> Options:
    return options[-1] if options else Options()


class FileSystemWriter(NativeWriter, BlockingAsyncStager, torch_protocol.StorageWriter):  # type: ignore[misc]
    """torch's FileSystemWriter, writing native checkpoints.

    ``overwrite`` means what it means there, but replaces atomically; ``cache_staged_state_dict`` is for staging. How
    torch lays out and syncs its files has no meaning here: native files are always synced and written by several
    threads. Stream transforms (``_extensions``) are refused.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Any = None,
        serialization_format: Any = None,
    ) -> None:
        if _extensions:
            raise ValueError("native storage has no stream transforms; write this checkpoint outside of use_in_torch")
        NativeWriter.__init__(self, path, overwrite=overwrite, allow_pickle=_current().allow_pickle)
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint goes."""
        return self.path


class FileSystemReader(torch_protocol.StorageReader):
    """torch's FileSystemReader for native checkpoints; torch's own are read by torch's own class."""

    def __init__(self, path: str | os.PathLike[str], _extension_registry: Any = None) -> None:
        current = _current()
        self._native = NativeReader(path, verify=current.verify, cast=current.cast, allow_pickle=current.allow_pickle)
        self._torchs = TORCHS_READER(path, _extension_registry)
        self._chosen: torch_protocol.StorageReader | None = None

    @property
    def path(self) -> str:
        """Where the checkpoint is."""
        return self._native.path

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint is."""
        return self._native.path

    @property
    def behind(self) -> Any:
        """The reader for what is there: a native one, or torch's own."""
        if self._chosen is None:
            is_native = format_at(self.path) == "native"
            self._chosen = self._native if is_native else self._torchs  # type: ignore[assignment]
        return self._chosen

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new load, from ``checkpoint_id`` when it is given."""
        self._chosen = None
        self._native.reset(checkpoint_id)
        self._torchs.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """What the checkpoint that is there now says of itself."""
        self._chosen = None
        return self.behind.read_metadata(*args, **kwargs)

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Get ready to read the checkpoint that ``metadata`` describes."""
        self.behind.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: Any) -> Any:
        """The local plan, with what the storage wants to add to it."""
        return self.behind.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """All plans, with what the storage wants to tell each rank."""
        prepared: list[Any] = self.behind.prepare_global_plan(plans)
        return prepared

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read every item of ``plan`` into what ``planner`` gives for it."""
        return self.behind.read_data(plan, planner)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether torch's own reader would take it."""
        return bool(TORCHS_READER.validate_checkpoint_id(checkpoint_id))


# Whoever made one of torch's before the names were replaced still has what the names stand for.
FileSystemWriter.register(TORCHS_WRITER)
FileSystemReader.register(TORCHS_READER)
