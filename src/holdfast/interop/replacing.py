"""use_in_torch: native storage, and our save, load and async_save, for code that names torch's.

They take torch's arguments and the classes belong to torch's base classes, so that code which names torch's own can be
given these. Native checkpoints that are made so have a marker, by which programs that know only torch's format find
them.

Names are replaced, in torch and in every module that has imported them; torch's classes themselves are never changed,
and those that torch derives from them keep them.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import inspect
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeGuard, cast

from torch.futures import Future

from holdfast._async_saver import AsyncCheckpointerType, AsyncSave, async_save
from holdfast._io.urls import is_store_url
from holdfast._loader import LoadOptions, LoadReport, load
from holdfast._native.publish import format_at
from holdfast._native.reader import NativeReader
from holdfast._native.writer import NativeWriter
from holdfast._saver import save
from holdfast._torch_classes.torchs import (
    FSSPEC,
    _async_process_executor,
    filesystem,
    import_fsspec_storage,
    metadata,
    planner,
    staging,
    state_dict_loader,
    state_dict_saver,
    storage,
)
from holdfast.metadata import Metadata

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

    leaves_marker = True

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
        self._registry = _extension_registry
        self._chosen: storage.StorageReader | None = None

    @property
    def path(self) -> str:
        return self._native.path

    checkpoint_id = path

    @property
    def behind(self) -> storage.StorageReader:
        """The reader for what is there: a native one, or torch's own."""
        if self._chosen is None and format_at(self.path) == "native":
            self._chosen = cast(storage.StorageReader, self._native)
        elif self._chosen is None and is_store_url(self.path):
            self._chosen = importlib.import_module(f"torch.distributed.checkpoint.{FSSPEC}").FsspecReader(self.path)
        elif self._chosen is None:
            self._chosen = TORCHS_READER(self.path, self._registry)
        return self._chosen

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        self._chosen = None
        self._native.reset(checkpoint_id)

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
        is_url = "://" in os.fspath(checkpoint_id)
        return is_store_url(checkpoint_id) if is_url else bool(TORCHS_READER.validate_checkpoint_id(checkpoint_id))


# Whoever made one of torch's before the names were replaced still has what the names stand for.
NativeWriterForTorch.register(TORCHS_WRITER)
NativeReaderForTorch.register(TORCHS_READER)


class NativeProcessExecutor(_async_process_executor._ProcessBasedAsyncCheckpointExecutor):
    """torch's process mode, which knows nothing of names that were replaced: it is given the storage."""

    def execute_save(
        self,
        staging_future_or_state_dict: Any,
        *,
        checkpoint_id: _Path | None = None,
        storage_writer: storage.StorageWriter | None = None,
        **options: Any,
    ) -> concurrent.futures.Future[Any]:
        if storage_writer is None and _is_local(checkpoint_id):
            storage_writer = NativeWriterForTorch(checkpoint_id)
        return super().execute_save(
            staging_future_or_state_dict, checkpoint_id=checkpoint_id, storage_writer=storage_writer, **options
        )


def _is_local(checkpoint_id: object) -> TypeGuard[_Path]:
    return isinstance(checkpoint_id, (str, os.PathLike)) and NativeWriter.validate_checkpoint_id(checkpoint_id)


def _with_writer(options: dict[str, Any], checkpoint_id: object) -> dict[str, Any]:
    """``options`` of a save with the storage for ``checkpoint_id``, where none is given: native, with a marker."""
    if options.get("storage_writer") is None and _is_local(checkpoint_id):
        options["storage_writer"] = writer = NativeWriter(checkpoint_id, allow_pickle=_options[-1]["allow_pickle"])
        writer.leaves_marker = True
    return options


def save_for_torch(state_dict: dict[str, Any], checkpoint_id: Any = None, **options: Any) -> Metadata:
    """``holdfast.save`` in the place of torch's."""
    return save(state_dict, checkpoint_id, **_with_writer(options, checkpoint_id))


def async_save_for_torch(state_dict: dict[str, Any], checkpoint_id: Any = None, **options: Any) -> AsyncSave:
    """``holdfast.async_save`` in the place of torch's."""
    kind = options.pop("async_checkpointer_type", AsyncCheckpointerType.THREAD)
    options["async_checkpointer_type"] = AsyncCheckpointerType(kind.value)  # which may be torch's
    return async_save(state_dict, checkpoint_id, **_with_writer(options, checkpoint_id))


def load_for_torch(state_dict: dict[str, Any], checkpoint_id: Any = None, **options: Any) -> LoadReport:
    """``holdfast.load`` in the place of torch's."""
    chosen = _options[-1]
    verify = chosen["verify"] or options.get("storage_reader") is not None  # which has an option of its own
    how = LoadOptions(verify=verify, cast=chosen["cast"], allow_pickle=chosen["allow_pickle"])
    return load(state_dict, checkpoint_id, options=how, **options)


_log = logging.getLogger("holdfast")

_Names = dict[object, object]
_STORAGE: _Names = {
    TORCHS_WRITER: NativeWriterForTorch,
    TORCHS_READER: NativeReaderForTorch,
    _async_process_executor._ProcessBasedAsyncCheckpointExecutor: NativeProcessExecutor,
}
_FUNCTIONS: _Names = {
    state_dict_saver.save: save_for_torch,
    state_dict_saver.async_save: async_save_for_torch,
    state_dict_loader.load: load_for_torch,
}
_KEEP_TORCHS = (
    "holdfast.",
    "torch.distributed.checkpoint.hf_storage.",
    "torch.distributed.checkpoint.quantized_hf_storage.",
    f"torch.distributed.checkpoint.{FSSPEC}.",
)


def use_in_torch(
    *, functions: bool = False, verify: bool = True, cast: bool = False, allow_pickle: bool = False
) -> Replacement:
    """Make torch's FileSystemWriter and FileSystemReader stand for native storage, until undone.

    What is imported later gets the replacements too. Checkpoints that torch wrote before are still read. Uses may nest;
    the names come back with the end of the last one that replaced them.

    Args:
        functions: replace torch's ``save``, ``async_save`` and ``load`` too, by those of this library.
        verify: check every byte that is read against its digest.
        cast: let a tensor of one floating type be loaded into one of another, as torch's own storage does.
        allow_pickle: write and load objects that only a pickle can hold, as torch's own storage does.

    Returns:
        The replacement, to be undone; as a context manager it undoes itself.
    """
    return Replacement(functions, verify=verify, cast=cast, allow_pickle=allow_pickle)


class Replacement:
    """One use of native storage under torch's names; ``replaced`` lists the names, as the log does."""

    def __init__(self, functions: bool = False, **options: bool) -> None:
        import_fsspec_storage()
        self._options = options
        self._names = {**_STORAGE, **(_FUNCTIONS if functions else {})}
        self._is_undone = False
        _options.append(options)
        _uses.append(self._names)
        self.replaced = tuple(_replace(self._names))
        _log.info("torch's checkpoints are native now, in %s", ", ".join(self.replaced) or "no further module")

    def undo(self) -> None:
        """Give the names back, unless another use still needs them; a second call does nothing."""
        if self._is_undone:
            return
        self._is_undone = True
        _options[:] = [each for each in _options if each is not self._options]
        _uses[:] = [each for each in _uses if each is not self._names]
        unused = {ours: torchs for torchs, ours in self._names.items() if not any(torchs in each for each in _uses)}
        names = _replace(unused)
        if names:
            _log.info("torch's checkpoints are its own again, in %s", ", ".join(names))

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


_uses: list[_Names] = []


def _replace(names: _Names) -> list[str]:
    """Let every name that stands for one thing stand for the other; returns the names."""
    by_identity = {id(before): after for before, after in names.items()}
    changed = []
    for module_name, module in sorted(sys.modules.items()):
        if not isinstance(module, ModuleType) or f"{module_name}.".startswith(_KEEP_TORCHS):
            continue
        for name, value in list(vars(module).items()):
            # By identity alone: asking an object of somebody's module anything else may run its code.
            if id(value) in by_identity:
                setattr(module, name, by_identity[id(value)])
                changed.append(f"{module_name}.{name}")
    return changed


VARIABLE = "HOLDFAST_IN_TORCH"
_CHOICES = ("functions", "cast", "allow_pickle")


def use_as_environment_says() -> None:
    """Do what the variable HOLDFAST_IN_TORCH asks for: 1, or options of ``use_in_torch`` with commas."""
    value = os.environ.get(VARIABLE, "")
    chosen = [each for each in value.split(",") if each not in ("", "0", "1")]
    if not set(chosen) <= set(_CHOICES):
        raise ValueError(f"{VARIABLE} is 0, 1, or some of {', '.join(_CHOICES)} with commas, not {value!r}")
    if value not in ("", "0"):
        use_in_torch(**dict.fromkeys(chosen, True))


def run_script(arguments: Sequence[str]) -> None:
    """Run a Python script, or ``-m`` and a module, with its arguments, as Python would; torch's checkpoints are native.

    The variable HOLDFAST_IN_TORCH, which is 1 if it is not set, was looked at when this library was imported.
    """
    is_module = list(arguments[:1]) == ["-m"]
    sys.argv[:] = rest = list(arguments[is_module:])
    if not rest:
        raise ValueError("name a script, or -m and a module: holdfast run train.py --its --arguments")
    if not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = "1"
        use_as_environment_says()
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(rest[0]))
    if is_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(rest[0], run_name="__main__")
