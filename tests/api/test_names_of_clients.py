"""Every name that frameworks import from torch.distributed.checkpoint is at the same place here, and does its work.

The list was taken from the sources of accelerate 1.15, Lightning 2.6.6, transformers 5.23, torchtitan 0.3, torchtune
0.6.1, verl 0.9.1, megatron-core 0.16.1, Composer 0.32.1 and NeMo 3.0: imports, and attributes of modules they import.
"""

from __future__ import annotations

import importlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as TorchsWriter

import holdfast
from holdfast import MismatchError
from holdfast._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from holdfast._nested_dict import flatten_state_dict, unflatten_state_dict
from holdfast._traverse import OBJ_PATH, traverse_state_dict
from holdfast.api import _wrap_exception
from holdfast.filesystem import SerializationFormat, _StorageWriterTransforms, _write_item
from holdfast.format_utils import _EmptyStateDictLoadPlanner, _load_state_dict
from holdfast.hf_storage import HuggingFaceStorageWriter
from holdfast.planner_helpers import _create_write_items
from holdfast.state_dict import _init_optim_state
from holdfast.utils import _get_failure_dict

IMPORTED = {
    "": "BytesStorageMetadata CheckpointException DefaultLoadPlanner DefaultSavePlanner FileSystemReader "
    "FileSystemWriter HuggingFaceStorageReader HuggingFaceStorageWriter LoadPlan Metadata ReadItem SavePlan "
    "TensorStorageMetadata WriteItem async_save default_planner format_utils load load_state_dict "
    "save save_state_dict state_dict stateful",
    "_consolidate_hf_safetensors": "consolidate_safetensors_files consolidate_safetensors_files_on_every_rank",
    "_nested_dict": "FLATTEN_MAPPING unflatten_state_dict",
    "_traverse": "OBJ_PATH traverse_state_dict",
    "api": "WRAPPED_EXCEPTION _wrap_exception",
    "default_planner": "DefaultLoadPlanner DefaultSavePlanner",
    "filesystem": "DEFAULT_SUFFIX SerializationFormat _StoragePrefix _StorageWriterTransforms _write_item",
    "format_utils": "_EmptyStateDictLoadPlanner _load_state_dict",
    "hf_storage": "HuggingFaceStorageReader HuggingFaceStorageWriter",
    "metadata": "ChunkStorageMetadata Metadata MetadataIndex STATE_DICT_TYPE TensorProperties TensorStorageMetadata",
    "optimizer": "load_sharded_optimizer_state_dict",
    "planner": "LoadPlan LoadPlanner SavePlan SavePlanner TensorWriteData WriteItem WriteItemType",
    "planner_helpers": "_create_write_items",
    "quantized_hf_storage": "QuantizedHuggingFaceStorageReader",
    "staging": "DefaultStager StagingOptions",
    "state_dict": "StateDictOptions _init_optim_state get_model_state_dict get_optimizer_state_dict "
    "set_model_state_dict set_optimizer_state_dict set_state_dict",
    "state_dict_loader": "_load_state_dict",
    "state_dict_saver": "AsyncCheckpointerType AsyncSaveResponse",
    "stateful": "Stateful",
    "storage": "StorageReader WriteResult",
    "utils": "CheckpointException _DistWrapper _get_failure_dict",
}
NAMES = [(module, name) for module, names in IMPORTED.items() for name in names.split()]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_what_frameworks_import_is_at_the_same_place(module: str, name: str) -> None:
    ours = importlib.import_module(f"holdfast.{module}".rstrip("."))
    theirs = importlib.import_module(f"torch.distributed.checkpoint.{module}".rstrip("."))
    assert hasattr(ours, name) or importlib.import_module(f"{ours.__name__}.{name}")
    assert hasattr(theirs, name) or importlib.import_module(f"{theirs.__name__}.{name}"), (
        "torch does not have it any more"
    )


def test_the_guide_lists_the_modules_that_frameworks_import_from() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "migrate-from-dcp.md").read_text()
    section = guide[guide.index("## What frameworks import") :]
    listed = set(re.findall(r"`(\w+)`", section[: section.index("\n## ", 5)]))
    missing = {name for module, name in NAMES if name not in listed} | {m for m in IMPORTED if m and m not in listed}
    assert missing == set()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_accelerates_merge_of_weights_loads_everything_into_an_empty_state(tmp_path: Path) -> None:
    torch_dcp.save({"model": {"weight": torch.arange(6.0)}}, checkpoint_id=tmp_path, no_dist=True)
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=holdfast.FileSystemReader(tmp_path), planner=planner, no_dist=True)
    assert torch.equal(state["model"]["weight"], torch.arange(6.0))


def test_megatrons_flat_states_come_back_nested() -> None:
    state = {"a": {"b": [torch.ones(2), 3]}, "c": "text"}
    seen: list[OBJ_PATH] = []
    traverse_state_dict(state, lambda path, value: seen.append(path))
    flat, mapping = flatten_state_dict(state)
    assert set(seen) >= {("c",)}
    again = unflatten_state_dict(flat, mapping)
    assert again["c"] == "text"
    assert again["a"]["b"][1] == 3
    assert torch.equal(again["a"]["b"][0], torch.ones(2))


def test_torchtunes_optimizer_has_a_state_before_its_first_step() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    _init_optim_state(optimizer)
    assert torch.equal(optimizer.state[weight]["exp_avg"], torch.zeros(3))
    assert torch.equal(weight, torch.ones(3))


def test_megatrons_failures_of_ranks_are_found_among_their_results() -> None:
    failure = _wrap_exception(ValueError("no room"))
    assert _get_failure_dict(["fine", failure, None]) == {1: failure}


def test_an_item_that_megatron_and_verl_write_is_one_of_torchs(tmp_path: Path) -> None:
    tensor, stream = torch.arange(5.0), io.BytesIO()
    stream.write(b"before")
    (item,) = _create_write_items("weight", tensor)
    written = _write_item(
        _StorageWriterTransforms(), stream, tensor, item, "__0_0.distcp", SerializationFormat.TORCH_SAVE
    )
    where = written.storage_data
    assert (where.relative_path, where.offset, where.length) == ("__0_0.distcp", 6, stream.tell() - 6)
    assert (written.size_in_bytes, written.index.fqn) == (where.length, "weight")
    found = torch.load(io.BytesIO(stream.getvalue()[6:]), weights_only=True)
    assert torch.equal(found, tensor)
    with pytest.raises(ValueError, match="TORCH_SAVE"):
        _write_item(_StorageWriterTransforms(), stream, tensor, item, "", SerializationFormat.SAFETENSORS)


STATE = {"layer.weight": torch.arange(12.0).reshape(3, 4), "layer.bias": torch.ones(4), "head": torch.full((2,), 7.0)}
FILES = {"layer.weight": 1, "layer.bias": 1, "head": 2}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("consolidate", [consolidate_safetensors_files, consolidate_safetensors_files_on_every_rank])
@pytest.mark.parametrize("writer", [TorchsWriter, HuggingFaceStorageWriter])
def test_files_of_ranks_become_a_folder(tmp_path: Path, writer: Any, consolidate: Any) -> None:
    sharded, whole = tmp_path / "out" / "sharded", tmp_path / "out"
    save = torch_dcp.save if writer is TorchsWriter else holdfast.save
    save(
        dict(STATE),
        storage_writer=writer(str(sharded), save_distributed=True, enable_consolidation=False),
        no_dist=True,
    )
    consolidate(str(sharded), str(whole), FILES, num_threads=2)
    names = sorted(path.name for path in whole.glob("*.safetensors"))
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    found = holdfast.read(whole)
    assert all(torch.equal(found[key], tensor) for key, tensor in STATE.items())


def test_a_folder_of_ours_is_whole_as_it_is(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(tmp_path / "model", save_distributed=True)
    holdfast.save(dict(STATE), storage_writer=writer, no_dist=True)
    before = sorted((tmp_path / "model").iterdir())
    consolidate_safetensors_files(str(tmp_path / "model"), str(tmp_path / "model"), dict.fromkeys(STATE, 1))
    assert sorted((tmp_path / "model").iterdir()) == before


def test_a_mapping_that_names_other_keys_is_refused(tmp_path: Path) -> None:
    holdfast.save(dict(STATE), storage_writer=HuggingFaceStorageWriter(tmp_path / "model"), no_dist=True)
    with pytest.raises(MismatchError, match="head"):
        consolidate_safetensors_files(
            str(tmp_path / "model"), str(tmp_path / "out"), {"layer.weight": 1, "layer.bias": 1}
        )
