"""``.metadata`` as torch writes it: a pickle of torch's own classes, made from ours.

Nothing of this library is in the pickle, so that it can be read where there is only torch. What torch has no field for
(which keys are tied, what a key was before it became a string) is left out.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from typing import Any

from holdfast._torchformat.places import StorageInfo
from holdfast._torchformat.translate import index_to_torch, metadata_to_torch, storage_meta_to_torch
from holdfast.metadata import Metadata

CURRENT_DCP_VERSION = "1.0.0"


def encode_metadata(metadata: Metadata) -> bytes:
    """``metadata`` as the contents of a ``.metadata`` file; ``storage_data`` maps each index to a StorageInfo."""
    meta = metadata.storage_meta
    if meta is not None and meta.checkpoint_id is not None:
        # A plain string: a Path could be read only by the Python and on the system that wrote it.
        meta = dataclasses.replace(meta, checkpoint_id=os.fspath(meta.checkpoint_id))
    places = {index_to_torch(index): _place(info) for index, info in (metadata.storage_data or {}).items()}
    whole = dataclasses.replace(
        metadata_to_torch(metadata),
        storage_data=places,
        storage_meta=storage_meta_to_torch(meta),
        version=metadata.version,
    )
    return pickle.dumps(whole)


def _place(info: StorageInfo) -> Any:
    from torch.distributed.checkpoint import filesystem as theirs

    descriptors = None if info.transform_descriptors is None else list(info.transform_descriptors)
    return theirs._StorageInfo(info.relative_path, info.offset, info.length, descriptors)
