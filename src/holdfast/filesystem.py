"""torch's own on-disk format over any file system, under the names of torch.distributed.checkpoint.filesystem."""

from __future__ import annotations

from holdfast._torch_classes.translate import CURRENT_DCP_VERSION
from holdfast._torch_codec.metadata_file import DATA_SUFFIX as DEFAULT_SUFFIX
from holdfast._torch_codec.metadata_file import METADATA_NAME as _metadata_fn
from holdfast._torch_codec.metadata_file import StorageInfo as _StorageInfo
from holdfast._torch_codec.metadata_file import StoragePrefix as _StoragePrefix
from holdfast._torch_format.file_systems import FileSystem, FileSystemBase
from holdfast._torch_format.items import (
    _item_size,
    _OverlappingCpuLoader,
    _SerialCpuLoader,
    _split_by_size_and_type,
    _TensorLoader,
)
from holdfast._torch_format.packing import _StorageWriterTransforms
from holdfast._torch_format.reader import FileSystemReader
from holdfast._torch_format.writer import FileSystemWriter, SerializationFormat, _FileSystemWriter, _generate_uuid

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
