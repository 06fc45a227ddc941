"""use_in_torch: native storage under torch's names, given back at the end."""

from __future__ import annotations

import logging
import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from outside_views import torch_fsspec
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver, storage
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import holdfast
from holdfast.interop import replacing as torch_storage
from holdfast.interop import use_in_torch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def names() -> tuple[type, ...]:
    return dcp.FileSystemWriter, dcp.FileSystemReader, filesystem.FileSystemWriter, filesystem.FileSystemReader


# In tuples, for names of this module would be replaced like all others.
TORCHS_OWN = names()
REPLACED = (torch_storage.NativeWriterForTorch, torch_storage.NativeReaderForTorch) * 2


@pytest.fixture(autouse=True)
def nothing_stays_replaced() -> Iterator[None]:
    yield
    assert names() == TORCHS_OWN


def is_native(path: Path) -> bool:
    return (path / "manifest.json").exists()


def test_torchs_names_stand_for_native_storage_until_the_end(tmp_path: Path) -> None:
    original = names()
    with use_in_torch() as replacement:
        assert names() == REPLACED
        dcp.save({"a": torch.ones(3), "n": 4}, checkpoint_id=tmp_path / "by id")
        dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "by writer", thread_count=3))
        loaded = {"a": torch.zeros(3), "n": 0}
        dcp.load(loaded, checkpoint_id=tmp_path / "by id")
        dcp.load({"a": torch.zeros(3)}, storage_reader=dcp.FileSystemReader(str(tmp_path / "by writer")))
    assert names() == original
    assert loaded["n"] == 4
    assert loaded["a"].sum() == 3
    assert is_native(tmp_path / "by id")
    assert is_native(tmp_path / "by writer")
    assert "torch.distributed.checkpoint.FileSystemWriter" in replacement.replaced
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "after")
    assert not is_native(tmp_path / "after")


def test_checkpoints_of_torch_are_still_read(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3), "n": 4}, checkpoint_id=tmp_path / "old")
    with use_in_torch():
        for reader in (None, dcp.FileSystemReader(tmp_path / "old")):
            loaded = {"a": torch.zeros(3), "n": 0}
            dcp.load(loaded, checkpoint_id=None if reader else tmp_path / "old", storage_reader=reader)
            assert loaded["n"] == 4
        by_holdfast = {"a": torch.zeros(3), "n": 0}
        stands_for_both: Any = dcp.FileSystemReader(tmp_path / "old")
        holdfast.load(by_holdfast, storage_reader=stands_for_both)
        assert by_holdfast["n"] == 4
        with pytest.raises(dcp.CheckpointException, match=r"\.metadata"):
            dcp.load({"a": torch.zeros(3)}, checkpoint_id=tmp_path / "nothing")
        # The same reader goes on to another one, which is native.
        dcp.save({"a": torch.ones(3), "n": 5}, checkpoint_id=tmp_path / "new")
        dcp.load(by_holdfast, checkpoint_id=tmp_path / "new", storage_reader=stands_for_both)
        assert by_holdfast["n"] == 5
        assert stands_for_both.checkpoint_id == str(tmp_path / "new")


def test_names_that_others_have_imported_are_replaced_and_given_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    framework = ModuleType("some_framework.checkpointing")
    framework.Writer = TORCHS_OWN[0]  # type: ignore[attr-defined]
    framework.dcp = dcp  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_framework.checkpointing", framework)
    monkeypatch.setitem(sys.modules, "some_framework.broken", object())  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, logger="holdfast"):
        replacement = use_in_torch()
        assert framework.Writer is REPLACED[0]
        late = ModuleType("some_framework.late")
        late.Reader = dcp.FileSystemReader  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "some_framework.late", late)
        replacement.undo()
        replacement.undo()
    assert framework.Writer is TORCHS_OWN[0]
    assert late.Reader is TORCHS_OWN[1]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "some_framework.checkpointing.Writer" in told[0]
    assert "some_framework.late.Reader" in told[1]


@pytest.mark.parametrize("first_undone", [0, 1])
def test_uses_may_nest_and_end_in_any_order(first_undone: int) -> None:
    uses = [use_in_torch(), use_in_torch(allow_pickle=True)]
    assert torch_storage.NativeWriterForTorch("x").allow_pickle is True
    uses.pop(first_undone).undo()
    assert names() == REPLACED
    assert torch_storage.NativeWriterForTorch("x").allow_pickle is (first_undone == 0)
    uses.pop().undo()
    assert names() == TORCHS_OWN
    assert torch_storage.NativeWriterForTorch("x").allow_pickle is False


def test_isinstance_goes_on_to_work(tmp_path: Path) -> None:
    before = dcp.FileSystemWriter(tmp_path), dcp.FileSystemReader(tmp_path)
    with use_in_torch():
        during = dcp.FileSystemWriter(tmp_path), dcp.FileSystemReader(tmp_path)
        for writer, reader in (before, during):
            assert isinstance(writer, dcp.FileSystemWriter)
            assert isinstance(writer, storage.StorageWriter)
            assert isinstance(reader, dcp.FileSystemReader)
            assert isinstance(reader, storage.StorageReader)
        assert isinstance(dcp.HuggingFaceStorageWriter(str(tmp_path)), dcp.FileSystemWriter)
        assert not isinstance(during[0], dcp.FileSystemReader)
        assert during[0].checkpoint_id == str(tmp_path)


def test_what_torch_derives_from_its_storage_stays_its_own(tmp_path: Path) -> None:
    with use_in_torch():
        assert TORCHS_OWN[0] in dcp.HuggingFaceStorageWriter.__mro__
        assert TORCHS_OWN[0] in torch_fsspec.FsspecWriter.__mro__
        dcp.save({"a": torch.ones(2)}, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "hf")))
        dcp.save({"a": torch.ones(2)}, checkpoint_id=f"fsspec-memory://{tmp_path.name}")
        loaded = {"a": torch.zeros(2)}
        dcp.load(loaded, checkpoint_id=f"fsspec-memory://{tmp_path.name}")
    assert loaded["a"].sum() == 2
    assert "model.safetensors.index.json" in os.listdir(tmp_path / "hf")


def test_a_module_of_torch_that_is_loaded_already_writes_native_checkpoints_too(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "in.pt")
    with use_in_torch():
        torch_save_to_dcp(tmp_path / "in.pt", tmp_path / "checkpoint")
        assert is_native(tmp_path / "checkpoint")
        dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["a"].sum() == 2


def test_options_that_torchs_arguments_do_not_have(tmp_path: Path) -> None:
    weight = {"a": torch.ones(2, dtype=torch.bfloat16)}
    with use_in_torch():
        dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "x")
        with pytest.raises(dcp.CheckpointException, match="dtype"):
            dcp.load(weight, checkpoint_id=tmp_path / "x")
    with use_in_torch(cast=True, verify=False):
        dcp.load(weight, checkpoint_id=tmp_path / "x")
        reader = dcp.FileSystemReader(tmp_path / "x")
        assert reader.behind.verify is False  # type: ignore[attr-defined]
        with pytest.raises(dcp.CheckpointException, match="already"):
            dcp.save({"a": 1}, storage_writer=dcp.FileSystemWriter(tmp_path / "x", overwrite=False))
        with pytest.raises(ValueError, match="stream transforms"):
            dcp.FileSystemWriter(tmp_path / "x", _extensions=["zstd"])  # type: ignore[list-item]
        assert dcp.FileSystemReader.validate_checkpoint_id("a://b") is False


def test_writers_stage_and_are_pickled_like_torchs(tmp_path: Path) -> None:
    with use_in_torch():
        weight = torch.ones(5)
        writer = dcp.FileSystemWriter(tmp_path / "x")
        future = dcp.async_save({"a": weight}, storage_writer=writer)
        weight.zero_()
        future.result()  # type: ignore[union-attr]
        assert holdfast.load(tmp_path / "x")["a"].sum() == 5
        again = pickle.loads(pickle.dumps(writer))
        dcp.save({"a": weight}, storage_writer=again)
        assert holdfast.load(tmp_path / "x")["a"].sum() == 0


# --- torch's functions too --------------------------------------------------------------------------------------------


def functions() -> tuple[Any, ...]:
    return (
        dcp.save,
        dcp.async_save,
        dcp.load,
        state_dict_saver.save,
        state_dict_saver.async_save,
        state_dict_loader.load,
    )


TORCHS_FUNCTIONS = functions()


def test_torchs_functions_stand_for_ours_until_the_end(tmp_path: Path) -> None:
    with use_in_torch():
        assert functions() == TORCHS_FUNCTIONS
        with use_in_torch(functions=True) as replacement:
            assert {function.__module__ for function in functions()} == {"holdfast.interop.replacing"}
            assert "torch.distributed.checkpoint.async_save" in replacement.replaced
            saved = dcp.save({"a": torch.ones(3), "n": 4}, checkpoint_id=tmp_path / "a")
            assert isinstance(saved, holdfast.Metadata)
            weight = torch.ones(3)
            for kind in state_dict_saver.AsyncCheckpointerType:
                future: Any = dcp.async_save(
                    {"a": weight, "n": 5}, checkpoint_id=tmp_path / kind.value, async_checkpointer_type=kind
                )
                assert isinstance(future, holdfast.AsyncSave)
                future.result()
            loaded = {"a": torch.zeros(3), "n": 0}
            report: Any = dcp.load(loaded, checkpoint_id=tmp_path / "process")
            assert isinstance(report, holdfast.LoadReport)
            dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path / "a"))
            assert loaded["n"] == 4
            with pytest.raises(holdfast.MismatchError):
                dcp.load({"a": torch.zeros(3, dtype=torch.bfloat16)}, checkpoint_id=tmp_path / "a")
        assert functions() == TORCHS_FUNCTIONS
        assert names() == REPLACED
    for name in ("a", "thread", "process"):
        assert is_native(tmp_path / name)
        assert (tmp_path / name / ".metadata").exists()
    holdfast.release()


def test_functions_come_back_with_the_last_use_that_replaced_them(tmp_path: Path) -> None:
    first, second = use_in_torch(functions=True, cast=True), use_in_torch(functions=True, allow_pickle=True)
    first.undo()
    assert functions() != TORCHS_FUNCTIONS
    dcp.save({"object": pathlib.PurePosixPath, "a": torch.ones(2)}, checkpoint_id=tmp_path / "x")
    second.undo()
    assert functions() == TORCHS_FUNCTIONS
    with use_in_torch(functions=True, cast=True, verify=False):
        half = {"a": torch.zeros(2, dtype=torch.bfloat16)}
        dcp.load(half, checkpoint_id=tmp_path / "x", planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert half["a"].sum() == 2


def test_functions_take_urls_and_storages_as_torchs_do(tmp_path: Path) -> None:
    with use_in_torch(functions=True):
        dcp.save({"a": torch.ones(2)}, checkpoint_id=f"fsspec-memory://functions-{tmp_path.name}")
        loaded = {"a": torch.zeros(2)}
        dcp.load(loaded, checkpoint_id=f"fsspec-memory://functions-{tmp_path.name}")
        assert loaded["a"].sum() == 2
        dcp.save({"a": torch.ones(2)}, storage_writer=TORCHS_OWN[0](tmp_path / "torch's"))
        assert not is_native(tmp_path / "torch's")
        dcp.save(state_dict={"a": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path / "x"), no_dist=True)
        assert is_native(tmp_path / "x")


# --- other processes --------------------------------------------------------------------------------------------------


def run(code: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", **variables}
    command = [sys.executable, "-W", "ignore", *code.split(), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_torchs_process_mode_writes_native_checkpoints_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import os, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from holdfast.interop import use_in_torch

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with use_in_torch():
        for step in (1, 2):
            dcp.async_save(
                {"a": torch.full((3,), float(step))},
                checkpoint_id=f"{sys.argv[1]}/step-{step}",
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            ).result()
    dist.destroy_process_group()
""")
    done = run(str(script), tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    for step in (1, 2):
        assert is_native(tmp_path / f"step-{step}")
        assert (tmp_path / f"step-{step}" / ".metadata").exists()
        assert holdfast.load(tmp_path / f"step-{step}")["a"].sum() == 3 * step


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("", "torch.distributed.checkpoint.filesystem torch.distributed.checkpoint.state_dict_saver False"),
        ("0", "torch.distributed.checkpoint.filesystem torch.distributed.checkpoint.state_dict_saver False"),
        ("1", "holdfast.interop.replacing torch.distributed.checkpoint.state_dict_saver False"),
        ("functions,allow_pickle", "holdfast.interop.replacing holdfast.interop.replacing True"),
    ],
)
def test_the_environment_chooses_when_the_library_is_imported(tmp_path: Path, value: str, told: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import holdfast
import torch.distributed.checkpoint as dcp
allows = getattr(dcp.FileSystemWriter("x"), "allow_pickle", False)
print(dcp.FileSystemWriter.__module__, dcp.save.__module__, allows)
""")
    done = run(str(script), HOLDFAST_IN_TORCH=value)
    assert done.stdout.strip() == told, done.stderr


def test_an_unknown_choice_is_refused() -> None:
    done = run("-c", "import holdfast", HOLDFAST_IN_TORCH="function")
    assert done.returncode == 1
    assert "HOLDFAST_IN_TORCH is 0, 1, or some of functions, cast, allow_pickle" in done.stderr


def test_scripts_and_modules_are_run_as_python_runs_them(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("name = 'beside'")
    for name in ("script", "module"):
        (tmp_path / f"{name}.py").write_text("""
import sys
import torch.distributed.checkpoint as dcp
from beside import name
print(__name__, name, sys.argv[1:], dcp.FileSystemWriter.__module__)
sys.exit(7)
""")
    expected = "__main__ beside ['--help', '-x'] holdfast.interop.replacing"
    done = run("-m holdfast run", tmp_path / "script.py", "--help", "-x")
    assert (done.stdout.strip(), done.returncode) == (expected, 7), done.stderr
    done = run("-m holdfast run -m module --help -x", PYTHONPATH=f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}")
    assert (done.stdout.strip(), done.returncode) == (expected, 7), done.stderr
    (tmp_path / "failing.py").write_text("import holdfast\nholdfast.load('nowhere')")
    done = run("-m holdfast run", tmp_path / "failing.py")
    assert "Traceback" in done.stderr  # of the script, whole
    assert "failing.py" in done.stderr
    assert "SCRIPT [ARGS]" in run("-m holdfast run --help").stdout
    assert run("-m holdfast run").returncode == 2
