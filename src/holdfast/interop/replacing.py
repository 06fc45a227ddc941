"""use_in_torch: native storage for code that names torch's FileSystemWriter and FileSystemReader.

They take torch's arguments and belong to torch's base classes, so that code which names torch's own can be given these.

Names are replaced, in torch and in every module that has imported them; torch's classes themselves are never changed,
and those that torch derives from them keep them.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from types import ModuleType
from typing import Any, cast

from torch.futures import Future

from holdfast._native.publish import format_at
from holdfast._native.reader import NativeReader
from holdfast._native.writer import NativeWriter
from holdfast._torch_classes.torchs import filesystem, import_fsspec_storage, metadata, planner, staging, storage

_Path = str | os.PathLike[str]

# Kept under names of their own: those in torch's modules may stand for the classes below.
TORCHS_WRITER = filesystem.FileSystemWriter
TORCHS_READER = filesystem.FileSystemReader
_TORCHS_PARAMETERS = inspect.signature(TORCHS_WRITER.__init__)

_options: list[dict[str, bool]] = [{"verify": True, "cast": False, "allow_pickle": False}]
"""What torch's arguments cannot say: the defaults, then those of each use in force. Storages are made by the last."""


class NativeWriterForTorch(NativeWriter, staging.BlockingAsyncStager, storage.StorageWriter):  # type: ignore[misc]
    """torch's FileSystemWriter, with its arguments, writing native checkpoints.

    ``overwrite`` means what it means there, but replaces atomically; ``cache_staged_state_dict`` is for staging. How
    torch lays out and syncs its files has no meaning here: native files are always synced and written by several
    threads. Stream transforms (``_extensions``) are refused.
    """

    def __init__(self, path: _Path, *arguments: object, **options: object) -> None:
        given = _TORCHS_PARAMETERS.bind(None, path, *arguments, **options)
        given.apply_defaults()
        if given.arguments.get("_extensions"):
            raise ValueError("native storage has no stream transforms; write this checkpoint outside of use_in_torch")
        overwrite, is_cached = given.arguments["overwrite"], given.arguments["cache_staged_state_dict"]
        NativeWriter.__init__(self, path, overwrite=overwrite, allow_pickle=_options[-1]["allow_pickle"])
        staging.BlockingAsyncStager.__init__(self, cache_staged_state_dict=is_cached)

    @property
    def checkpoint_id(self) -> str:
        return self.path


class NativeReaderForTorch(storage.StorageReader):
    """torch's FileSystemReader for native checkpoints; torch's own are read by torch's own class."""

    def __init__(self, path: _Path, _extension_registry: Any = None) -> None:
        self._native = NativeReader(path, **_options[-1])
        self._torchs = TORCHS_READER(path, _extension_registry)
        self._chosen: storage.StorageReader | None = None

    @property
    def path(self) -> str:
        return self._native.path

    checkpoint_id = path

    @property
    def behind(self) -> storage.StorageReader:
        """The reader for what is there: a native one, or torch's own."""
        if self._chosen is None:
            is_native = format_at(self.path) == "native"
            self._chosen = cast(storage.StorageReader, self._native) if is_native else self._torchs
        return self._chosen

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        self._chosen = None
        self._native.reset(checkpoint_id)
        self._torchs.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """What the checkpoint that is there now says of itself."""
        self._chosen = None
        return self.behind.read_metadata(*args, **kwargs)

    def set_up_storage_reader(
        self, metadata: metadata.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self.behind.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: planner.LoadPlan) -> planner.LoadPlan:
        return self.behind.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[planner.LoadPlan]) -> list[planner.LoadPlan]:
        return self.behind.prepare_global_plan(plans)

    def read_data(self, plan: planner.LoadPlan, planner: planner.LoadPlanner) -> Future[None]:
        return self.behind.read_data(plan, planner)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        return bool(TORCHS_READER.validate_checkpoint_id(checkpoint_id))


# Whoever made one of torch's before the names were replaced still has what the names stand for.
NativeWriterForTorch.register(TORCHS_WRITER)
NativeReaderForTorch.register(TORCHS_READER)


_log = logging.getLogger("holdfast")

_CLASSES: dict[type, type] = {
    TORCHS_WRITER: NativeWriterForTorch,
    TORCHS_READER: NativeReaderForTorch,
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
    return Replacement(verify=verify, cast=cast, allow_pickle=allow_pickle)


class Replacement:
    """One use of native storage under torch's names; ``replaced`` lists the names, as the log does."""

    def __init__(self, **options: bool) -> None:
        import_fsspec_storage()
        self._options = options
        self._is_undone = False
        _options.append(options)
        self.replaced = tuple(_replace(_CLASSES))
        _log.info("torch's file storage is native storage now, in %s", ", ".join(self.replaced) or "no further module")

    def undo(self) -> None:
        """Give the names back, unless another use still needs them; a second call does nothing."""
        if self._is_undone:
            return
        self._is_undone = True
        _options[:] = [each for each in _options if each is not self._options]
        if len(_options) > 1:
            return
        names = _replace({ours: torchs for torchs, ours in _CLASSES.items()})
        _log.info("torch's file storage is its own again, in %s", ", ".join(names))

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *error: object) -> None:
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
