"""The public names: one sorted list, all of it there, torch's names among them with torch's signatures."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint import planner as torch_planner

import holdfast

EXPECTED = [
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


def test_the_list_of_public_names() -> None:
    # A name that goes or comes is a change for users: it belongs in the changelog, and then here.
    assert sorted(holdfast.__all__) == sorted(EXPECTED)
    assert holdfast.__all__ == sorted(holdfast.__all__)
    assert len(set(holdfast.__all__)) == len(holdfast.__all__)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(holdfast, name)
    if name != "__version__":
        assert inspect.getdoc(value), f"{name} has no docstring"


MODULES = [
    "api",
    "cli",
    "default_planner",
    "errors",
    "events",
    "filesystem",
    "format_utils",
    "fsspec_filesystem",
    "hf",
    "hf_storage",
    "integrations",
    "interop",
    "logger",
    "mapping",
    "metadata",
    "optimizer",
    "planner",
    "planner_helpers",
    "quantized_hf_storage",
    "resharding",
    "staging",
    "state_dict",
    "state_dict_loader",
    "state_dict_saver",
    "stateful",
    "storage",
    "utils",
]


def test_nothing_else_is_public_but_modules() -> None:
    assert dir(holdfast) == sorted([*EXPECTED, *MODULES])
    assert [name for name in vars(holdfast) if not name.startswith("_") and name not in dir(holdfast)] == []
    for name in ("importlib", "annotations", "typing", "nothing"):
        with pytest.raises(AttributeError, match=name):
            getattr(holdfast, name)


def test_modules_are_there_after_one_import() -> None:
    code = f"import holdfast as dcp; print([getattr(dcp, name).__name__ for name in {MODULES}])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([f"holdfast.{name}" for name in MODULES])
    assert holdfast.state_dict.get_model_state_dict.__name__ == "get_model_state_dict"


@pytest.mark.parametrize(
    "module",
    [
        "_checkpoint",
        "default_planner",
        "errors",
        "_loader",
        "metadata",
        "planner",
        "_saver",
        "stateful",
        "storage",
    ],
)
def test_the_names_of_each_module_are_sorted_and_there(module: str) -> None:
    imported = importlib.import_module(f"holdfast.{module}")
    assert list(imported.__all__) == sorted(imported.__all__)
    assert all(hasattr(imported, name) for name in imported.__all__)


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (holdfast.WriteItem, torch_planner.WriteItem),
        (holdfast.ReadItem, torch_planner.ReadItem),
        (holdfast.SavePlan, torch_planner.SavePlan),
        (holdfast.LoadPlan, torch_planner.LoadPlan),
        (holdfast.TensorWriteData, torch_planner.TensorWriteData),
        (holdfast.BytesIOWriteData, torch_planner.BytesIOWriteData),
        (holdfast.ChunkStorageMetadata, torch_metadata.ChunkStorageMetadata),
        (holdfast.TensorStorageMetadata, torch_metadata.TensorStorageMetadata),
        (holdfast.BytesStorageMetadata, torch_metadata.BytesStorageMetadata),
        (holdfast.TensorProperties, torch_metadata.TensorProperties),
        (holdfast.MetadataIndex, torch_metadata.MetadataIndex),
        (holdfast.Metadata, torch_metadata.Metadata),
        (holdfast.StorageMeta, torch_metadata.StorageMeta),
    ],
    ids=lambda cls: cls.__name__,
)
def test_values_have_the_fields_of_torch_first(ours: type, torchs: type) -> None:
    # Strides of the memory, which torch keeps since 2.14, say nothing of a file.
    theirs = [field.name for field in dataclasses.fields(torchs) if field.name != "strides"]
    mine = [field.name for field in dataclasses.fields(ours)]
    assert mine[: len(theirs)] == theirs
    # Whatever comes after has a default, so that code written for torch still makes them.
    for field in dataclasses.fields(ours)[len(theirs) :]:
        assert field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING, field.name


@pytest.mark.parametrize("name", ["SavePlanner", "LoadPlanner", "StorageWriter", "StorageReader", "Stateful"])
def test_protocols_have_the_methods_and_arguments_of_torch(name: str) -> None:
    ours, torchs = getattr(holdfast, name), getattr(importlib.import_module(f"{dcp.__name__}"), name, None)
    if torchs is None:
        torchs = importlib.import_module("torch.distributed.checkpoint.stateful").Stateful
    for method, function in inspect.getmembers(torchs, inspect.isroutine):
        if method.startswith("_") or method == "register":
            continue
        mine = list(inspect.signature(getattr(ours, method)).parameters)
        theirs = list(inspect.signature(function).parameters)
        assert mine == theirs, f"{name}.{method}"


@pytest.mark.parametrize("name", ["WriteItemType", "LoadItemType"])
def test_enums_have_the_members_of_torch(name: str) -> None:
    ours, torchs = getattr(holdfast, name), getattr(torch_planner, name)
    assert {member.name: member.value for member in ours} == {member.name: member.value for member in torchs}


@pytest.mark.parametrize(("ours", "torchs"), [(holdfast.save, dcp.save), (holdfast.load, dcp.load)])
def test_the_first_arguments_are_those_of_torch(ours: object, torchs: object) -> None:
    mine = list(inspect.signature(ours).parameters.values())  # type: ignore[arg-type]
    theirs = list(inspect.signature(torchs).parameters.values())  # type: ignore[arg-type]
    assert mine[0].name == theirs[0].name == "state_dict"
    assert {"checkpoint_id", "planner"} <= {parameter.name for parameter in mine}
    assert {parameter.name for parameter in mine if parameter.name.startswith("storage_")} == {
        parameter.name for parameter in theirs if parameter.name.startswith("storage_")
    }


def test_importing_is_quiet_and_leaves_torch_distributed_alone() -> None:
    code = (
        "import sys, threading, holdfast; "
        "assert 'torch.distributed.checkpoint' not in sys.modules; "
        "assert 'typer' not in sys.modules and 'rich' not in sys.modules; "
        "assert threading.active_count() == 1"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
