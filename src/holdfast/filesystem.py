"""torch's own on-disk format over any file system, under the names of torch.distributed.checkpoint.filesystem."""

from __future__ import annotations

from holdfast._filesystem.base import FileSystem, FileSystemBase
from holdfast._filesystem.items import _item_size, _split_by_size_and_type
from holdfast._filesystem.loaders import _OverlappingCpuLoader, _SerialCpuLoader, _TensorLoader
from holdfast._filesystem.reader import FileSystemReader
from holdfast._filesystem.stream_packer import _StorageWriterTransforms
from holdfast._filesystem.writer import FileSystemWriter, SerializationFormat, _FileSystemWriter, _generate_uuid
from holdfast._torchformat.pickling import CURRENT_DCP_VERSION
from holdfast._torchformat.places import DATA_SUFFIX as DEFAULT_SUFFIX
from holdfast._torchformat.places import METADATA_NAME as _metadata_fn
from holdfast._torchformat.places import StorageInfo as _StorageInfo
from holdfast._torchformat.places import StoragePrefix as _StoragePrefix

__all__ = [
    "CURRENT_DCP_VERSION",
    "DEFAULT_SUFFIX",
    "FileSystem",
    "FileSystemBase",
    "FileSystemReader",
    "FileSystemWriter",
    "SerializationFormat",
    "_FileSystemWriter",
    "_OverlappingCpuLoader",
    "_SerialCpuLoader",
    "_StorageInfo",
    "_StoragePrefix",
    "_StorageWriterTransforms",
    "_TensorLoader",
    "_generate_uuid",
    "_item_size",
    "_metadata_fn",
    "_split_by_size_and_type",
]
