"""torch's own on-disk format over any file system, under the names of torch.distributed.checkpoint.filesystem."""

from __future__ import annotations

import io

import torch

from holdfast._torch_classes.translate import CURRENT_DCP_VERSION
from holdfast._torch_codec.metadata_file import DATA_SUFFIX as DEFAULT_SUFFIX
from holdfast._torch_codec.metadata_file import METADATA_NAME as _metadata_fn
from holdfast._torch_codec.metadata_file import StorageInfo as _StorageInfo
from holdfast._torch_codec.metadata_file import StoragePrefix as _StoragePrefix
from holdfast._torch_codec.pickles import serialize_object
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
from holdfast.planner import WriteItem
from holdfast.storage import WriteResult

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
    "_write_item",
]


def _write_item(
    transforms: _StorageWriterTransforms,
    stream: io.IOBase,
    data: io.BytesIO | torch.Tensor,
    write_item: WriteItem,
    storage_key: str,
    serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
) -> WriteResult:
    """Write ``data`` to ``stream`` as torch's writer does, for writers of others that import this; where it is."""
    if serialization_format is not SerializationFormat.TORCH_SAVE:
        raise ValueError(f"only items in the format TORCH_SAVE are written one by one, not {serialization_format}")
    begin = stream.tell()
    transformed, descriptors = transforms.transform_save_stream(write_item, stream)
    content = serialize_object(data, key=write_item.index.fqn) if isinstance(data, torch.Tensor) else data.getbuffer()
    transformed.write(content)
    transformed.close()
    length = stream.tell() - begin
    info = _StorageInfo(storage_key, begin, length, tuple(descriptors) or None)
    return WriteResult(write_item.index, length, info)
