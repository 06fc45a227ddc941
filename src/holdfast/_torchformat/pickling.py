"""``.metadata`` as torch writes it: a pickle of torch's own classes, made from ours.

Nothing of this library is in the pickle, so that it can be read where there is only torch. What torch has no field for
(which keys are tied, what a key was before it became a string) is left out.
"""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

from holdfast._torchformat.places import StorageInfo
from holdfast.metadata import Metadata, MetadataIndex, StorageMeta

if TYPE_CHECKING:
    from torch.distributed.checkpoint import metadata as torch_metadata

CURRENT_DCP_VERSION = "1.0.0"


def encode_metadata(metadata: Metadata) -> bytes:
    """``metadata`` as the contents of a ``.metadata`` file; ``storage_data`` maps each index to a StorageInfo."""
    # Late, because it takes longer to import than all of this library.
    from torch.distributed.checkpoint import metadata as theirs

    entries = {key: _entry(theirs, entry) for key, entry in metadata.state_dict_metadata.items()}
    places = {_index(theirs, index): _place(info) for index, info in (metadata.storage_data or {}).items()}
    whole = theirs.Metadata(
        state_dict_metadata=entries,
        planner_data=_plain(metadata.planner_data),
        storage_data=places,
        storage_meta=_storage_meta(theirs, metadata.storage_meta),
        version=metadata.version,
    )
    return pickle.dumps(whole)


def _entry(theirs: Any, entry: Any) -> torch_metadata.STORAGE_TYPES:
    if not hasattr(entry, "chunks"):  # by shape, not by class: torch may be the one who drives
        bytes_entry: torch_metadata.BytesStorageMetadata = theirs.BytesStorageMetadata()
        return bytes_entry
    ours = entry.properties
    properties = theirs.TensorProperties(
        ours.dtype, ours.layout, ours.requires_grad, ours.memory_format, ours.pin_memory
    )
    chunks = [theirs.ChunkStorageMetadata(offsets=chunk.offsets, sizes=chunk.sizes) for chunk in entry.chunks]
    tensor_entry: torch_metadata.TensorStorageMetadata = theirs.TensorStorageMetadata(properties, entry.size, chunks)
    return tensor_entry


def _index(theirs: Any, index: MetadataIndex) -> torch_metadata.MetadataIndex:
    named: torch_metadata.MetadataIndex = theirs.MetadataIndex(index.fqn, index.offset, index.index)
    return named


def _place(info: StorageInfo) -> Any:
    from torch.distributed.checkpoint import filesystem as theirs

    descriptors = None if info.transform_descriptors is None else list(info.transform_descriptors)
    return theirs._StorageInfo(info.relative_path, info.offset, info.length, descriptors)


def _storage_meta(theirs: Any, meta: StorageMeta | None) -> torch_metadata.StorageMeta | None:
    if meta is None:
        return None
    # A plain string: a Path could be read only by the Python and on the system that wrote it.
    path = None if meta.checkpoint_id is None else os.fspath(meta.checkpoint_id)
    said: torch_metadata.StorageMeta = theirs.StorageMeta(path, meta.save_id, meta.load_id, list(meta.modules))
    return said


def _plain(value: Any) -> Any:
    """``value`` with the steps of paths as torch knows them: str and int, and no subclass of these."""
    if isinstance(value, dict):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    for kind in (bool, str, int):
        if isinstance(value, kind):
            return kind(value)
    return value
