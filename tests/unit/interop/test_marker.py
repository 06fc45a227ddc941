"""The marker of native checkpoints: programs that look for torch's .metadata find them, and torch says what it is."""

from __future__ import annotations

import errno
import os
import pickle
import pickletools
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from holdfast.interop import convert, use_in_torch

WORDS = "a native checkpoint of Holdfast is here, which torch cannot read by itself: use holdfast.load, or call"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((100,), float(step)), "step": step}


def newest_step(root: Path) -> int:
    """What training managers do: the last step that has a .metadata."""
    return max((int(each.parent.name[5:]) for each in root.glob("step-*/.metadata")), default=-1)


@pytest.fixture
def marked(tmp_path: Path) -> Path:
    with use_in_torch():
        dcp.save(state(1), checkpoint_id=tmp_path / "step-1")
    return tmp_path / "step-1"


def test_a_manager_that_looks_for_metadata_finds_the_last_step(tmp_path: Path) -> None:
    with use_in_torch():
        for step in (1, 2, 10):
            dcp.save(state(step), checkpoint_id=tmp_path / f"step-{step}")
        assert newest_step(tmp_path) == 10
        target = state(0)
        dcp.load(target, checkpoint_id=tmp_path / "step-10")
    assert target["step"] == 10
    holdfast.save(state(11), tmp_path / "step-11")
    assert newest_step(tmp_path) == 10  # whoever saves by our names is found by our functions


def test_torch_says_what_it_is_where_this_library_is_not(marked: Path) -> None:
    code = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
    done = subprocess.run([sys.executable, "-I", "-c", code, marked / ".metadata"], capture_output=True, text=True)
    assert done.returncode == 1
    assert WORDS in done.stderr
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(state(0), checkpoint_id=marked)
    assert WORDS in str(caught.value)


def test_whoever_unpickles_it_imports_and_calls_nothing(marked: Path) -> None:
    data = (marked / ".metadata").read_bytes()
    assert [opcode.name for opcode, _, _ in pickletools.genops(data.replace(data[1:-2], b"1.5"))] == ["FLOAT", "STOP"]
    for load in (pickle.loads, pickle._loads):  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=WORDS):
            load(data)
    assert len(data) < 200  # of which Python tells no more


def test_nothing_of_ours_takes_it_for_torchs_format(marked: Path, tmp_path: Path) -> None:
    assert holdfast.load(marked)["step"] == 1
    with holdfast.open(marked) as checkpoint:
        assert checkpoint["step"] == 1
    assert holdfast.verify(marked).ok
    assert holdfast.verify(marked, level="sizes").ok
    report = holdfast.sweep(tmp_path, delete=True)
    assert (report.problems, report.leftovers) == ((), ())
    shown = CliRunner().invoke(app, ["show", str(marked)])
    assert shown.exit_code == 0
    assert "torch.distributed.checkpoint" not in shown.output
    convert(marked, tmp_path / "converted", to="torch")
    assert holdfast.load(tmp_path / "converted")["step"] == 1
    convert(tmp_path / "converted", marked, to="native", overwrite=True)
    assert holdfast.load(marked)["step"] == 1
    with pytest.raises(holdfast.NotACheckpointError, match="only marks a native checkpoint"):
        holdfast.load(state(0), storage_reader=holdfast.FileSystemReader(marked))


def test_a_marker_alone_is_no_checkpoint(marked: Path) -> None:
    (marked / "manifest.json").unlink()
    with pytest.raises(holdfast.NotFoundError):
        holdfast.load(marked)
    holdfast.save(state(2), marked, overwrite=False)
    assert holdfast.load(marked)["step"] == 2


def test_formats_replace_each_other_over_a_marker(marked: Path) -> None:
    holdfast.save(state(2), storage_writer=holdfast.FileSystemWriter(marked))
    assert not (marked / "manifest.json").exists()
    target = state(0)
    dcp.load(target, checkpoint_id=marked)
    assert (target["step"], holdfast.load(marked)["step"]) == (2, 2)
    with use_in_torch():
        dcp.save(state(3), checkpoint_id=marked)
    assert sorted(name[:5] for name in os.listdir(marked)) == [".meta", "data-", "index", "manif"]
    assert holdfast.load(marked)["step"] == 3
    with pytest.raises(dcp.CheckpointException):
        dcp.load(target, checkpoint_id=marked)
    holdfast.save(state(4), marked)
    assert holdfast.load(marked)["step"] == 4
    with pytest.raises(holdfast.AlreadyPublishedError):
        holdfast.save(state(5), storage_writer=holdfast.FileSystemWriter(marked, overwrite=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(6), checkpoint_id=marked)  # by torch itself, which knows nothing of the native one
    with pytest.raises(holdfast.CorruptError, match="holds two checkpoints"):
        holdfast.load(marked)


def test_a_marker_that_cannot_be_written_is_told_and_the_checkpoint_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def link(source: Any, target: Any) -> None:
        if str(target).endswith(".metadata"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    writer = holdfast.NativeWriter(tmp_path / "x")
    writer.leaves_marker = True
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", link)
        with pytest.raises(holdfast.StorageError, match=r"is whole, but .* will not find it: .*; save again") as caught:
            holdfast.save(state(1), storage_writer=writer)
    assert caught.value.errno == errno.ENOSPC
    assert holdfast.load(tmp_path / "x")["step"] == 1
    assert sorted(name[:5] for name in os.listdir(tmp_path / "x")) == ["data-", "index", "manif"]
    holdfast.save(state(2), storage_writer=writer)
    assert (tmp_path / "x" / ".metadata").exists()


def test_a_copy_of_a_marked_checkpoint_is_one(marked: Path, tmp_path: Path) -> None:
    shutil.copytree(marked, tmp_path / "copy")
    assert holdfast.load(tmp_path / "copy")["step"] == 1
