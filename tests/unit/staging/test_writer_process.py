"""The process that writes: what it imports, and that its files are named and protected as the saver's would be."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from outside_views import writer_processes

import holdfast
from holdfast import AsyncCheckpointerType

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the process needs anonymous shared memory")

THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
STATE = {"weight": torch.arange(1000.0)}
PLANTED = """
import os
with open({marker!r}, "a") as file:
    file.write(f"{{os.getpid()}} imports {{__file__}}\\n")
"""


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """Each test has a process of its own."""
    holdfast.release()
    yield
    holdfast.release()


def save(path: Path, kind: AsyncCheckpointerType = PROCESS) -> None:
    holdfast.async_save(STATE, path, async_checkpointer_type=kind).result()


def test_it_imports_nothing_from_the_working_directory_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, planted = tmp_path / "marker", tmp_path / "planted"
    planted.mkdir()
    names = ("json", "socket", "types", "numpy", "msgspec", "xxhash", "holdfast", "sitecustomize", "usercustomize")
    for name in names:
        (planted / f"{name}.py").write_text(PLANTED.format(marker=str(marker)))
    (planted / "site-packages").mkdir()
    (planted / "site-packages" / "odd.pth").write_text(f"import os; open({str(marker)!r}, 'a').write('pth')\n")
    monkeypatch.chdir(planted)
    monkeypatch.setenv("PYTHONPATH", str(planted))
    monkeypatch.setenv("PYTHONSTARTUP", str(planted / "json.py"))
    monkeypatch.setenv("PYTHONUSERBASE", str(planted))
    monkeypatch.setattr(sys, "path", ["", str(planted), *sys.path])
    save(tmp_path / "checkpoint")
    assert not marker.exists()
    assert [os.readlink(f"/proc/{number}/cwd") for number in writer_processes()] == ["/"]
    assert torch.equal(holdfast.load(tmp_path / "checkpoint")["weight"], STATE["weight"])


@pytest.mark.parametrize("kind", [THREAD, PROCESS])
def test_files_have_the_umask_of_the_save(tmp_path: Path, kind: AsyncCheckpointerType) -> None:
    save(tmp_path / "first", kind)  # the process has been started with another one
    before = os.umask(0o027)
    try:
        save(tmp_path / "second", kind)
        os.umask(0o007)
        save(tmp_path / "third", kind)
    finally:
        os.umask(before)
    for name, mode in (("second", 0o640), ("third", 0o660)):
        assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / name).iterdir()} == {mode}


@pytest.mark.parametrize("kind", [THREAD, PROCESS])
def test_names_need_not_be_unicode(tmp_path: Path, kind: AsyncCheckpointerType) -> None:
    path = tmp_path / os.fsdecode(b"odd-\xff")
    save(path, kind)
    assert torch.equal(holdfast.load(path)["weight"], STATE["weight"])
    full = tmp_path / os.fsdecode(b"full-\xff")
    full.mkdir()
    writer = holdfast.NativeWriter(full, attempt="taken")
    (full / "data-taken-0-0.safetensors").touch()
    with pytest.raises(holdfast.StorageError, match="full-") as caught:
        holdfast.async_save(STATE, storage_writer=writer, async_checkpointer_type=kind).result()
    assert caught.value.path == str(full / "data-taken-0-0.safetensors")
