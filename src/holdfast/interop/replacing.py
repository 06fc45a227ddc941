"""use_in_torch: native storage for code that names torch's FileSystemWriter and FileSystemReader.

They take torch's arguments and belong to torch's base classes, so that code which names torch's own can be given these.

Names are replaced, in torch and in every module that has imported them; torch's classes themselves are never changed,
and those that torch derives from them keep them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

import torch.distributed.checkpoint.filesystem as torchs
from torch.distributed.checkpoint import storage as torch_protocol
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from holdfast._native.publish import format_at
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


_options_in_use: list[Options] = []
"""Those of every use that is in force; the last one counts for storages made from now on."""


def _current() -> Options:
    return _options_in_use[-1] if _options_in_use else Options()


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


_log = logging.getLogger("holdfast")

_CLASSES: dict[type, type] = {
    TORCHS_WRITER: FileSystemWriter,
    TORCHS_READER: FileSystemReader,
}
_KEEP_TORCHS = (
    "holdfast.",
    "torch.distributed.checkpoint.hf_storage.",
    "torch.distributed.checkpoint.quantized_hf_storage.",
    "torch.distributed.checkpoint._fsspec_filesystem.",
)


def use_in_torch(*, verify: bool = True, cast: bool = False, allow_pickle: bool = False) -> Replacement:
    """Make torch's FileSystemWriter and FileSystemReader stand for native storage, until undone.

    What is imported later gets the replacements too. Checkpoints that torch wrote before are still read. Uses may nest;
    the names come back with the end of the last one. The process that torch's async_save starts in its process mode
    knows nothing of it: give async_save a storage_writer there.

    Args:
        verify: check every byte that is read against its digest.
        cast: let a tensor of one floating type be loaded into one of another, as torch's own storage does.
        allow_pickle: write and load objects that only a pickle can hold, as torch's own storage does.

    Returns:
        The replacement, to be undone; as a context manager it undoes itself.
    """
    return Replacement(Options(verify=verify, cast=cast, allow_pickle=allow_pickle))


class Replacement:
    """One use of native storage under torch's names; ``replaced`` lists the names, as the log does."""

    def __init__(self, options: Options) -> None:
        # torch derives its fsspec storage when it first needs it: that has to have happened before.
        with contextlib.suppress(ImportError):
            import torch.distributed.checkpoint._fsspec_filesystem  # noqa: F401
        self._options = options
        self._is_undone = False
        _options_in_use.append(options)
        self.replaced = tuple(_replace(_CLASSES))
        _log.info("torch's file storage is native storage now, in %s", ", ".join(self.replaced) or "no further module")

    def undo(self) -> None:
        """Give the names back, unless another use still needs them; a second call does nothing."""
        if self._is_undone:
            return
        self._is_undone = True
        _options_in_use[:] = [each for each in _options_in_use if each is not self._options]
        if _options_in_use:
            return
        names = _replace({ours: torchs for torchs, ours in _CLASSES.items()})
        _log.info("torch's file storage is its own again, in %s", ", ".join(names))

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def _replace(classes: dict[type, type]) -> list[str]:
    """Let every name that stands for one class stand for the other; returns the names."""
    changed = []
    for module_name, module in sorted(sys.modules.items()):
        if not isinstance(module, ModuleType) or f"{module_name}.".startswith(_KEEP_TORCHS):
            continue
        for name, value in list(vars(module).items()):
            # By identity alone: asking an object of somebody's module anything else may run its code.
            for before, after in classes.items():
                if value is before:
                    setattr(module, name, after)
                    changed.append(f"{module_name}.{name}")
    return changed
