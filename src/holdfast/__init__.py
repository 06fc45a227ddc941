"""Holdfast: distributed checkpoints for PyTorch that hold.

A save is whole or invisible. Every byte is checked. Nothing is pickled. Only the disk limits the speed.
"""

from __future__ import annotations

import importlib as _importlib
import os as _os
import typing as _typing

from holdfast._values.records import Record, register_type
from holdfast._version import __version__
from holdfast.errors import (
    AlreadyPublishedError,
    BusyError,
    CheckpointError,
    CheckpointException,
    CorruptError,
    CrashLoopError,
    Difference,
    InternalError,
    InvalidStateError,
    MismatchError,
    NotACheckpointError,
    NotFoundError,
    RankDisagreementError,
    RankLostError,
    StorageError,
    UncertainError,
    UnsafeError,
    UnsupportedVersionError,
)

if _typing.TYPE_CHECKING:
    from holdfast import (  # noqa: F401
        api,
        cli,
        events,
        format_utils,
        hf,
        integrations,
        interop,
        logger,
        mapping,
        optimizer,
        resharding,
        state_dict,
        utils,
    )
    from holdfast._async_saver import (
        AsyncCheckpointerType,
        AsyncSave,
        AsyncSaveResponse,
        async_save,
        guard,
        prewarm,
        release,
    )
    from holdfast._checkpoint import Checkpoint, StoredTensor, VerifyReport, open, verify
    from holdfast._io.stores import Store
    from holdfast._loader import LoadOptions, LoadReport, load, read
    from holdfast._look.diff import Diff, KeyDiff, StoredAs, diff
    from holdfast._look.elements import ElementsDiff
    from holdfast._look.statistics import Statistics, statistics
    from holdfast._mapping.mappings import Mapping
    from holdfast._native.delete import DeleteReport, delete
    from holdfast._native.reader import NativeReader
    from holdfast._native.sweep import SweepReport, sweep
    from holdfast._native.writer import NativeWriter
    from holdfast._saver import SaveOptions, save
    from holdfast._state.per_rank import PerRank, Rng
    from holdfast._steps.following import HeldStep, follow
    from holdfast._steps.listing import Step, Steps
    from holdfast._steps.manager import CheckpointManager
    from holdfast._steps.policies import Best, Every, EverySteps, Latest
    from holdfast._steps.resuming import Resumed
    from holdfast._steps.stopping import StopOn, ignore_stop_signals
    from holdfast._values.statistics import TensorStatistics
    from holdfast.default_planner import DefaultLoadPlanner, DefaultSavePlanner
    from holdfast.events import SaveReport
    from holdfast.filesystem import FileSystem, FileSystemBase, FileSystemReader, FileSystemWriter, SerializationFormat
    from holdfast.fsspec_filesystem import FsspecReader, FsspecWriter
    from holdfast.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
    from holdfast.interop import Conversion, convert
    from holdfast.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )
    from holdfast.optimizer import load_sharded_optimizer_state_dict
    from holdfast.planner import (
        BytesIOWriteData,
        LoadItemType,
        LoadPlan,
        LoadPlanner,
        ReadItem,
        SavePlan,
        SavePlanner,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )
    from holdfast.quantized_hf_storage import QuantizedHuggingFaceStorageReader
    from holdfast.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
    from holdfast.state_dict_loader import load_state_dict
    from holdfast.state_dict_saver import save_state_dict
    from holdfast.stateful import Stateful
    from holdfast.storage import StorageReader, StorageWriter, WriteResult

__all__ = [
    "AlreadyPublishedError",
    "AsyncCheckpointerType",
    "AsyncSave",
    "AsyncSaveResponse",
    "AsyncStager",
    "Best",
    "BlockingAsyncStager",
    "BusyError",
    "BytesIOWriteData",
    "BytesStorageMetadata",
    "Checkpoint",
    "CheckpointError",
    "CheckpointException",
    "CheckpointManager",
    "ChunkStorageMetadata",
    "Conversion",
    "CorruptError",
    "CrashLoopError",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "DefaultStager",
    "DeleteReport",
    "Diff",
    "Difference",
    "ElementsDiff",
    "Every",
    "EverySteps",
    "FileSystem",
    "FileSystemBase",
    "FileSystemReader",
    "FileSystemWriter",
    "FsspecReader",
    "FsspecWriter",
    "HeldStep",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "InternalError",
    "InvalidStateError",
    "KeyDiff",
    "Latest",
    "LoadItemType",
    "LoadOptions",
    "LoadPlan",
    "LoadPlanner",
    "LoadReport",
    "Mapping",
    "Metadata",
    "MetadataIndex",
    "MismatchError",
    "NativeReader",
    "NativeWriter",
    "NotACheckpointError",
    "NotFoundError",
    "PerRank",
    "QuantizedHuggingFaceStorageReader",
    "RankDisagreementError",
    "RankLostError",
    "ReadItem",
    "Record",
    "Resumed",
    "Rng",
    "SaveOptions",
    "SavePlan",
    "SavePlanner",
    "SaveReport",
    "SerializationFormat",
    "StagingOptions",
    "Stateful",
    "Statistics",
    "Step",
    "Steps",
    "StopOn",
    "StorageError",
    "StorageMeta",
    "StorageReader",
    "StorageWriter",
    "Store",
    "StoredAs",
    "StoredTensor",
    "SweepReport",
    "TensorProperties",
    "TensorStatistics",
    "TensorStorageMetadata",
    "TensorWriteData",
    "UncertainError",
    "UnsafeError",
    "UnsupportedVersionError",
    "VerifyReport",
    "WriteItem",
    "WriteItemType",
    "WriteResult",
    "__version__",
    "async_save",
    "convert",
    "delete",
    "diff",
    "follow",
    "guard",
    "ignore_stop_signals",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "open",
    "prewarm",
    "read",
    "register_type",
    "release",
    "save",
    "save_state_dict",
    "statistics",
    "sweep",
    "verify",
]

# Imported when somebody asks for them: torch takes a second or two, and ``holdfast --help`` does not need it.
_LATER = {
    name: module
    for module, names in {
        "_async_saver": "AsyncCheckpointerType AsyncSave AsyncSaveResponse async_save guard prewarm release",
        "_checkpoint": "Checkpoint StoredTensor VerifyReport open verify",
        "_io.stores": "Store",
        "_loader": "LoadOptions LoadReport load read",
        "_look.diff": "Diff KeyDiff StoredAs diff",
        "_look.elements": "ElementsDiff",
        "_look.statistics": "Statistics statistics",
        "_mapping.mappings": "Mapping",
        "_native.delete": "DeleteReport delete",
        "_native.reader": "NativeReader",
        "_native.sweep": "SweepReport sweep",
        "_native.writer": "NativeWriter",
        "_saver": "SaveOptions save",
        "_state.per_rank": "PerRank Rng",
        "_steps.following": "HeldStep follow",
        "_steps.listing": "Step Steps",
        "_steps.manager": "CheckpointManager",
        "_steps.policies": "Best Every EverySteps Latest",
        "_steps.resuming": "Resumed",
        "_steps.stopping": "StopOn ignore_stop_signals",
        "_values.statistics": "TensorStatistics",
        "default_planner": "DefaultLoadPlanner DefaultSavePlanner",
        "events": "SaveReport",
        "filesystem": "FileSystem FileSystemBase FileSystemReader FileSystemWriter SerializationFormat",
        "fsspec_filesystem": "FsspecReader FsspecWriter",
        "hf_storage": "HuggingFaceStorageReader HuggingFaceStorageWriter",
        "interop": "Conversion convert",
        "metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
        "TensorStorageMetadata",
        "optimizer": "load_sharded_optimizer_state_dict",
        "planner": "BytesIOWriteData LoadItemType LoadPlan LoadPlanner ReadItem SavePlan SavePlanner TensorWriteData "
        "WriteItem WriteItemType",
        "quantized_hf_storage": "QuantizedHuggingFaceStorageReader",
        "staging": "AsyncStager BlockingAsyncStager DefaultStager StagingOptions",
        "state_dict_loader": "load_state_dict",
        "state_dict_saver": "save_state_dict",
        "stateful": "Stateful",
        "storage": "StorageReader StorageWriter WriteResult",
    }.items()
    for name in names.split()
}
_MODULES = (
    *("api", "cli", "default_planner", "errors", "events", "filesystem", "format_utils", "fsspec_filesystem"),
    *("hf", "hf_storage", "integrations", "interop", "logger", "mapping", "metadata", "optimizer", "planner"),
    *("planner_helpers", "quantized_hf_storage", "resharding", "staging", "state_dict", "state_dict_loader"),
    *("state_dict_saver", "stateful", "storage", "utils"),
)


del annotations  # the import leaves its name here


def __getattr__(name: str) -> object:
    """Names and modules that are imported when they are asked for, as ``holdfast.state_dict``."""
    if name in _LATER:
        globals()[name] = found = getattr(_importlib.import_module(f"holdfast.{_LATER[name]}"), name)
        return found
    if name in _MODULES:
        return _importlib.import_module(f"holdfast.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *_MODULES))


if _os.environ.get("HOLDFAST_IN_TORCH", "0") not in ("", "0"):
    _importlib.import_module("holdfast.interop.replacing").use_as_environment_says()
