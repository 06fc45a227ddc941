"""Holdfast: distributed checkpoints for PyTorch that hold.

A save is whole or invisible, every byte is checked, nothing is pickled, and the disk is the limit.
"""

from __future__ import annotations

import importlib

from holdfast._async_saver import (
    AsyncCheckpointerType,
    AsyncSave,
    AsyncSaveResponse,
    async_save,
    guard,
    prewarm,
    release,
)
from holdfast._checkpoint import Checkpoint, StoredTensor, open
from holdfast._loader import LoadOptions, LoadReport, load, read
from holdfast._native.reader import NativeReader
from holdfast._native.writer import NativeWriter
from holdfast._saver import SaveOptions, save
from holdfast._version import __version__
from holdfast.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from holdfast.errors import (
    AlreadyPublishedError,
    BusyError,
    CheckpointError,
    CheckpointException,
    CorruptError,
    Difference,
    InternalError,
    InvalidStateError,
    MismatchError,
    NotACheckpointError,
    NotFoundError,
    RankDisagreementError,
    RankLostError,
    StorageError,
    UnsafeError,
    UnsupportedVersionError,
)
from holdfast.filesystem import FileSystem, FileSystemBase, FileSystemReader, FileSystemWriter, SerializationFormat
from holdfast.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
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
    "BlockingAsyncStager",
    "BusyError",
    "BytesIOWriteData",
    "BytesStorageMetadata",
    "Checkpoint",
    "CheckpointError",
    "CheckpointException",
    "ChunkStorageMetadata",
    "CorruptError",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "DefaultStager",
    "Difference",
    "FileSystem",
    "FileSystemBase",
    "FileSystemReader",
    "FileSystemWriter",
    "InternalError",
    "InvalidStateError",
    "LoadItemType",
    "LoadOptions",
    "LoadPlan",
    "LoadPlanner",
    "LoadReport",
    "Metadata",
    "MetadataIndex",
    "MismatchError",
    "NativeReader",
    "NativeWriter",
    "NotACheckpointError",
    "NotFoundError",
    "RankDisagreementError",
    "RankLostError",
    "ReadItem",
    "SaveOptions",
    "SavePlan",
    "SavePlanner",
    "SerializationFormat",
    "StagingOptions",
    "Stateful",
    "StorageError",
    "StorageMeta",
    "StorageReader",
    "StorageWriter",
    "StoredTensor",
    "TensorProperties",
    "TensorStorageMetadata",
    "TensorWriteData",
    "UnsafeError",
    "UnsupportedVersionError",
    "WriteItem",
    "WriteItemType",
    "WriteResult",
    "__version__",
    "async_save",
    "guard",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "open",
    "prewarm",
    "read",
    "release",
    "save",
    "save_state_dict",
]


def __getattr__(name: str) -> object:
    """Torch's loader of sharded optimizer states; its module takes longer to import than all of this package."""
    if name == "load_sharded_optimizer_state_dict":
        return importlib.import_module("holdfast.optimizer").load_sharded_optimizer_state_dict
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
