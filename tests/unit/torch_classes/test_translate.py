"""Which things are torch's own, and what becomes of its items and metadata on the way to ours and back."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint import planner as torch_planner

import holdfast
from holdfast._torch_classes import translate
from holdfast._torch_classes.adapt import as_load_planner, as_reader, as_save_planner, as_writer, is_torchs
from holdfast.interop import replacing as interop_storage

# What is torch's.


class Mine(dcp.DefaultSavePlanner):
    pass


def test_torchs_things_are_told_by_the_names_of_their_classes(tmp_path: Path) -> None:
    assert is_torchs(Mine())
    assert is_torchs(dcp.FileSystemReader(tmp_path))
    assert is_torchs(dcp.HuggingFaceStorageWriter(str(tmp_path)))
    for ours in (
        holdfast.DefaultSavePlanner(),
        holdfast.NativeWriter(tmp_path),
        interop_storage.NativeWriterForTorch(tmp_path),
        object(),
    ):
        assert not is_torchs(ours)
        assert as_save_planner(ours) is ours
        assert as_load_planner(ours, allow_pickle=False) is ours
        assert as_writer(ours) is ours
        assert as_reader(ours) is ours


# Items that travel.


def torch_items() -> tuple[Any, Any]:
    index = torch_metadata.MetadataIndex("a", torch.Size([1]), 3)
    chunk = torch_metadata.ChunkStorageMetadata(torch.Size([1]), torch.Size([2]))
    data = torch_planner.TensorWriteData(chunk, torch_metadata.TensorProperties(), torch.Size([4]))
    write = torch_planner.WriteItem(index, torch_planner.WriteItemType.SHARD, tensor_data=data)
    sizes = torch.Size([0]), index, torch.Size([0]), torch.Size([2])
    return write, torch_planner.ReadItem(torch_planner.LoadItemType.TENSOR, index, *sizes)


def test_items_travel_with_their_originals_until_they_are_changed() -> None:
    write, read = torch_items()
    ours, ours_read = translate.write_item_from_torch(write), translate.read_item_from_torch(read)
    assert translate.write_item_to_torch(ours) is write
    assert translate.read_item_to_torch(ours_read) is read
    assert translate.write_item_from_torch(ours) is ours
    assert translate.read_item_from_torch(ours_read) is ours_read
    for item, back in ((ours, translate.write_item_to_torch), (ours_read, translate.read_item_to_torch)):
        assert back(pickle.loads(pickle.dumps(item))) == back(item)  # type: ignore[operator]
    index = holdfast.MetadataIndex("b", torch.Size([1]))
    changed = dataclasses.replace(ours, index=index)
    changed_read = dataclasses.replace(ours_read, dest_index=index)
    assert translate.write_item_to_torch(changed).index.fqn == "b"
    assert translate.read_item_to_torch(changed_read).dest_index.fqn == "b"
    assert pickle.loads(pickle.dumps(changed)).index == index
    assert pickle.loads(pickle.dumps(changed_read)).dest_index == index
    assert translate.write_item_to_torch(changed).tensor_data == write.tensor_data


def test_metadata_of_torch_travels_as_ours() -> None:
    theirs = torch_metadata.Metadata({"a": torch_metadata.BytesStorageMetadata()}, version="1", storage_data={"x": 1})
    ours = translate.metadata_from_torch(theirs)
    assert translate.metadata_to_torch(ours) is theirs
    assert translate.metadata_from_torch(ours) is ours
    assert translate.metadata_for_both(ours) is ours
    for travelled in (pickle.loads(pickle.dumps(ours)), copy.copy(ours)):
        assert type(travelled) is holdfast.Metadata
        assert (travelled.version, travelled.storage_data) == ("1", {"x": 1})


def test_metadata_of_older_torch_lacks_fields() -> None:
    theirs = torch_metadata.Metadata({})
    del theirs.__dict__["storage_meta"], theirs.__dict__["version"]
    old = type("Old", (), dict(theirs.__dict__))()
    assert translate.metadata_from_torch(old).version is None
