"""What torch's writer gets wrong and this one does not: each beside the other, with the same fault."""

from __future__ import annotations

import errno
import io
import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException as TorchException
from torch.distributed.checkpoint.filesystem import FileSystem as TorchFileSystem
from torch.distributed.checkpoint.filesystem import FileSystemWriter as TorchWriter

import holdfast
from holdfast.default_planner import DefaultSavePlanner
from holdfast.errors import CheckpointError, StorageError
from holdfast.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from holdfast.planner import WriteItem

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]

KEYS = [f"w{number}" for number in range(8)]


def state_of(version: int) -> dict[str, Any]:
    return {**{key: torch.full((2000,), float(version)) for key in KEYS}, "version": version}


def loaded_by_torch(path: str) -> dict[str, Any]:
    target = state_of(0)
    dcp.load(target, checkpoint_id=path)
    return target


def is_whole(path: str, version: int) -> bool:
    found = loaded_by_torch(path)
    return found["version"] == version and all(bool((found[key] == version).all()) for key in KEYS)


class FullDisk:
    """Streams of a disk that is full for all files but the first of a rank; the first write to each tells it."""

    def __init__(self, fs: Any, *, whose: Callable[[str], bool]) -> None:
        self._fs = fs
        self._whose = whose
        self.injected = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def create_stream(self, path: Any, mode: str) -> Any:
        if mode == "wb" and self._whose(os.path.basename(path)):
            with self._lock:
                self.injected += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._fs.create_stream(path, mode)


def fail_some_writes(monkeypatch: pytest.MonkeyPatch, *, from_number: int) -> list[int]:
    """Make os.pwrite fail from the given call on; returns what was injected."""
    injected: list[int] = []
    calls = 0
    lock = threading.Lock()
    real = os.pwrite

    def failing(descriptor: int, data: Any, offset: int) -> int:
        nonlocal calls
        with lock:
            calls += 1
            if calls >= from_number:
                injected.append(calls)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    return injected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_torch_reports_success_after_a_writer_thread_failed(path: str) -> None:
    writer = TorchWriter(path, thread_count=4)
    # Nobody waits for the threads' errors: all of theirs fail, that of the calling thread does not.
    me = threading.get_ident()
    full = FullDisk(writer.fs, whose=lambda name: threading.get_ident() != me)
    writer.fs = full
    dcp.save(state_of(1), storage_writer=writer)
    assert full.injected >= 1
    assert os.path.exists(os.path.join(path, ".metadata"))
    with pytest.raises(TorchException):
        loaded_by_torch(path)


def test_ours_reports_the_failure_of_any_thread(path: str) -> None:
    writer = FileSystemWriter(path, thread_count=4)
    full = FullDisk(FileSystem(), whose=lambda name: name == "__0_3.distcp")
    writer.fs = full  # type: ignore[assignment]
    with pytest.raises(StorageError, match=r"__0_3\.distcp") as caught:
        holdfast.save(state_of(1), storage_writer=writer)
    assert caught.value.errno == errno.ENOSPC
    assert full.injected == 1
    assert os.listdir(path) == []


@pytest.mark.parametrize("from_number", [1, 3])
def test_ours_reports_a_full_disk_under_local_files(
    path: str, from_number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    injected = fail_some_writes(monkeypatch, from_number=from_number)
    with pytest.raises(StorageError) as caught:
        holdfast.save(state_of(1), storage_writer=FileSystemWriter(path, thread_count=4))
    assert caught.value.errno == errno.ENOSPC
    assert injected
    assert not os.path.exists(path)
    monkeypatch.undo()
    holdfast.save(state_of(2), storage_writer=FileSystemWriter(path, thread_count=4))
    assert is_whole(path, 2)


@pytest.mark.parametrize("number", [1, 2, 4, 6])
def test_a_failure_while_bytes_are_summed_ends_the_save(
    path: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The end of an archive waits for the sums of all its pieces; one that never comes must not be waited for.
    real, calls = zlib.crc32, []

    def failing(data: Any, value: int = 0) -> int:
        if len(data) > 1 << 20:
            calls.append(len(data))
            if len(calls) == number:
                raise MemoryError("no memory")
        return real(data, value)

    monkeypatch.setattr(zlib, "crc32", failing)
    state = {"a": torch.zeros(40 << 20, dtype=torch.uint8), "b": torch.zeros(60 << 20, dtype=torch.uint8)}
    with pytest.raises((CheckpointError, MemoryError), match="no memory"):
        holdfast.save(state, storage_writer=FileSystemWriter(path))
    assert len(calls) >= number
    assert not os.path.exists(path)


class FailsInTheMiddle(DefaultSavePlanner):
    """Gives out two tensors, then fails: a save that was interrupted while it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self.given += 1
        if self.given > 2:
            raise RuntimeError("interrupted")
        return super().resolve_data(write_item)


class TorchFailsInTheMiddle(dcp.DefaultSavePlanner):
    given = 0

    def resolve_data(self, write_item: Any) -> Any:
        self.given += 1
        if self.given > 2:
            raise RuntimeError("interrupted")
        return super().resolve_data(write_item)


def test_torch_loses_the_old_checkpoint_when_overwriting_fails(path: str) -> None:
    dcp.save(state_of(1), checkpoint_id=path)
    with pytest.raises(TorchException):
        dcp.save(state_of(2), checkpoint_id=path, planner=TorchFailsInTheMiddle())
    with pytest.raises(TorchException):
        loaded_by_torch(path)


@pytest.mark.parametrize("written_by", ["torch", "ours"])
@pytest.mark.parametrize("over", ["local files", "streams"])
def test_ours_keeps_the_old_checkpoint_until_the_new_one_is_whole(path: str, written_by: str, over: str) -> None:
    if written_by == "torch":
        dcp.save(state_of(1), checkpoint_id=path)
    else:
        holdfast.save(state_of(1), storage_writer=FileSystemWriter(path))
    before = {name: (Path(path) / name).read_bytes() for name in os.listdir(path)}

    def writer() -> FileSystemWriter:
        made = FileSystemWriter(path)
        if over == "streams":
            made.fs = TorchFileSystem()  # type: ignore[assignment]
        return made

    with pytest.raises(CheckpointError, match="interrupted"):
        holdfast.save(state_of(2), storage_writer=writer(), planner=FailsInTheMiddle())
    assert {name: (Path(path) / name).read_bytes() for name in os.listdir(path)} == before
    assert is_whole(path, 1)
    holdfast.save(state_of(3), storage_writer=writer())
    assert is_whole(path, 3)
    assert not set(os.listdir(path)) & {"__0_0.distcp"}  # files of the old one are gone, whoever wrote it


def test_only_files_of_the_replaced_checkpoint_are_removed(path: str, tmp_path: Path) -> None:
    holdfast.save(state_of(1), storage_writer=FileSystemWriter(path, thread_count=2))
    kept = {"notes.txt", "__0_7.distcp", "__0_0.distcp.bak", "mine.distcp"}
    for name in kept:
        (Path(path) / name).write_bytes(b"not of any checkpoint")
    holdfast.save(state_of(2), storage_writer=FileSystemWriter(path))
    found = set(os.listdir(path))
    assert kept < found
    assert not {"__0_0.distcp", "__0_1.distcp"} & found
    assert len(found) == len(kept) + 2
    assert is_whole(path, 2)


@pytest.mark.parametrize("old", [b"", b"no pickle", b"cos\nsystem\n(S'touch hacked'\ntR."])
def test_metadata_that_cannot_be_trusted_costs_no_file(path: str, old: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    os.makedirs(path)
    monkeypatch.chdir(path)
    (Path(path) / ".metadata").write_bytes(old)
    (Path(path) / "__0_0.distcp").write_bytes(b"of whom?")
    holdfast.save(state_of(1), storage_writer=FileSystemWriter(path))
    assert (Path(path) / "__0_0.distcp").read_bytes() == b"of whom?"
    assert not os.path.exists("hacked")
    assert is_whole(path, 1)


def test_what_a_killed_save_left_does_not_block_the_next(path: str) -> None:
    os.makedirs(path)
    (Path(path) / "__0_0.distcp").write_bytes(b"half")
    holdfast.save(state_of(1), storage_writer=FileSystemWriter(path))
    assert (Path(path) / "__0_0.distcp").read_bytes() == b"half"  # no metadata names it: nobody knows whose it is
    assert is_whole(path, 1)


def visible_length_at_sync(monkeypatch: pytest.MonkeyPatch, save: Callable[[], None]) -> int:
    """How many bytes of the metadata the system had when it was told to make them durable."""
    lengths: list[int] = []
    real = os.fsync

    def recording(descriptor: int) -> None:
        if ".metadata" in os.readlink(f"/proc/self/fd/{descriptor}"):
            lengths.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    save()
    assert len(lengths) == 1
    return lengths[0]


@pytest.mark.skipif(torch.__version__ >= (2, 15), reason="this torch syncs all of it")
def test_torch_syncs_metadata_that_it_has_not_written_yet(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"x": torch.zeros(2)}
    synced = visible_length_at_sync(monkeypatch, lambda: dcp.save(state, checkpoint_id=path))
    assert synced < (Path(path) / ".metadata").stat().st_size


def test_ours_syncs_all_of_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"x": torch.zeros(2)}
    synced = visible_length_at_sync(
        monkeypatch, lambda: holdfast.save(state, storage_writer=FileSystemWriter(path)) and None
    )
    assert synced == (Path(path) / ".metadata").stat().st_size


def test_torch_leaves_files_of_a_failed_save_behind(path: str) -> None:
    with pytest.raises(TorchException):
        dcp.save(state_of(1), checkpoint_id=path, planner=TorchFailsInTheMiddle())
    assert os.listdir(path) == ["__0_0.distcp"]


@pytest.mark.parametrize("single_file", [True, False])
def test_ours_leaves_none(path: str, single_file: bool) -> None:
    writer = FileSystemWriter(path, single_file_per_rank=single_file)
    with pytest.raises(CheckpointError, match="interrupted"):
        holdfast.save(state_of(1), storage_writer=writer, planner=FailsInTheMiddle())
    assert not os.path.exists(path)
    holdfast.save(state_of(2), storage_writer=writer)
    assert is_whole(path, 2)


@pytest.mark.parametrize("call", ["rename", "fsync"])
def test_a_failed_commit_leaves_what_was_there(path: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holdfast.save(state_of(1), storage_writer=FileSystemWriter(path))
    before = sorted(os.listdir(path))
    injected: list[Any] = []

    def failing(*arguments: Any) -> None:
        injected.append(arguments)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(StorageError) as caught:
        holdfast.save(state_of(2), storage_writer=FileSystemWriter(path))
    monkeypatch.undo()
    assert caught.value.errno == errno.EIO
    assert injected
    assert sorted(os.listdir(path)) == before
    assert is_whole(path, 1)


def test_a_commit_that_is_visible_keeps_its_files(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holdfast.save(state_of(1), storage_writer=FileSystemWriter(path))
    real = os.fsync
    directory_syncs = 0

    def failing(descriptor: int) -> None:
        nonlocal directory_syncs
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            directory_syncs += 1
            if directory_syncs == 2:  # the first is that of the data files' names
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageError):
        holdfast.save(state_of(2), storage_writer=FileSystemWriter(path))
    assert directory_syncs == 2
    assert is_whole(path, 2)


def test_of_two_savers_who_must_not_replace_one_wins(path: str) -> None:
    class Meanwhile(DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            holdfast.save(state_of(1), storage_writer=FileSystemWriter(path, overwrite=False))
            return super().finish_plan(new_plan)

    with pytest.raises(CheckpointError):
        holdfast.save(state_of(2), storage_writer=FileSystemWriter(path, overwrite=False), planner=Meanwhile())
    assert is_whole(path, 1)
    assert len(os.listdir(path)) == 2


def test_holdfast_reads_it_too(path: str) -> None:
    holdfast.save(state_of(1), storage_writer=FileSystemWriter(path, thread_count=3))
    target = state_of(0)
    holdfast.load(target, storage_reader=FileSystemReader(path))
    assert target["version"] == 1
    assert all(bool((target[key] == 1).all()) for key in KEYS)
