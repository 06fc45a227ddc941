"""One directory holds one checkpoint: native and torch's format replace each other, or are noticed side by side."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException
from typer.testing import CliRunner

import holdfast
from holdfast import sweep
from holdfast.cli import app
from holdfast.interop import convert, use_in_torch

KINDS = ("native", "torch")
DATA = (".distcp", ".safetensors")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def save(path: Path, kind: str, version: int, *, overwrite: bool = True) -> None:
    state = {"w": torch.full((1000,), float(version)), "step": version}
    writer: holdfast.StorageWriter = (
        holdfast.NativeWriter(path, overwrite=overwrite)
        if kind == "native"
        else holdfast.FileSystemWriter(path, overwrite=overwrite)
    )
    holdfast.save(state, storage_writer=writer)


def save_by_torch(path: Path, version: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.full((1000,), float(version)), "step": version}, checkpoint_id=path, no_dist=True)


def loaded(path: Path) -> int:
    state = holdfast.load(path)
    assert bool((state["w"] == state["step"]).all())
    return int(state["step"])


def format_at(path: Path) -> str:
    """The format of the checkpoint that counts there."""
    shown = CliRunner().invoke(app, ["show", str(path)])
    assert shown.exit_code == 0
    return "torch" if "in the format of torch.distributed.checkpoint" in " ".join(shown.output.split()) else "native"


@contextlib.contextmanager
def turn_of_another(path: Path) -> Iterator[None]:
    """Somebody else publishes there: who publishes holds the lock of the directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def loaded_by_torch(path: Path) -> int:
    target = {"w": torch.zeros(1000), "step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=path, no_dist=True)
    return int(target["w"][0])


class Killed(BaseException):
    """Stands for the end of the process: nothing is tidied up."""


# --- one replaces the other ------------------------------------------------------------------------------------------


def test_overwriting_as_torchs_own_test_does(path: Path) -> None:
    first, second = torch.randn(10), torch.randn(10)
    holdfast.save({"random": first}, checkpoint_id=path)
    holdfast.save({"random": second}, storage_writer=holdfast.FileSystemWriter(path, overwrite=True))
    target = {"random": torch.zeros(10)}
    holdfast.load(target, checkpoint_id=path)
    assert torch.equal(target["random"], second)
    with pytest.raises(holdfast.CheckpointException, match="already"):
        holdfast.save({"random": second}, storage_writer=holdfast.FileSystemWriter(path, overwrite=False))


@pytest.mark.parametrize("later", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_a_save_replaces_what_is_there_and_leaves_nothing_of_it(path: Path, first: str, later: str) -> None:
    save(path, first, 1)
    before = set(os.listdir(path))
    save(path, later, 2)
    assert loaded(path) == 2
    assert format_at(path) == later
    assert not before & set(os.listdir(path)) - {"manifest.json", ".metadata"}
    assert len(os.listdir(path)) == (3 if later == "native" else 2)
    if later == "torch":
        assert loaded_by_torch(path) == 2
    else:
        with pytest.raises(TorchCheckpointException):
            loaded_by_torch(path)  # rather than what was there before


@pytest.mark.parametrize("later", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_with_overwrite_off_either_format_is_in_the_way_of_either(path: Path, first: str, later: str) -> None:
    save(path, first, 1)
    before = sorted(os.listdir(path))
    with pytest.raises(holdfast.AlreadyPublishedError):
        save(path, later, 2, overwrite=False)
    assert sorted(os.listdir(path)) == before
    assert loaded(path) == 1


def test_under_use_in_torch_too(path: Path) -> None:
    save_by_torch(path, 1)
    with use_in_torch():
        save_by_torch(path, 2)
        assert loaded_by_torch(path) == 2
    assert format_at(path) == "native"
    assert loaded(path) == 2
    save_by_torch(path, 3)
    with use_in_torch(), pytest.raises(TorchCheckpointException, match="holds two checkpoints"):
        loaded_by_torch(path)


def test_what_ranks_saved_apart_is_replaced_as_a_whole(path: Path) -> None:
    writer = holdfast.FileSystemWriter(path)
    holdfast.save({"w": torch.zeros(3)}, storage_writer=writer, use_collectives=False)
    shutil.copy(path / "__0.metadata", path / "__1.metadata")
    assert format_at(path) == "torch"
    save(path, "native", 2)
    assert not [name for name in os.listdir(path) if name.endswith((".metadata", ".distcp"))]
    with pytest.raises(holdfast.AlreadyPublishedError, match="native format"):
        holdfast.save({"w": torch.zeros(3)}, storage_writer=writer, use_collectives=False)
    assert loaded(path) == 2


def test_other_file_systems_and_those_without_locks_refuse(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    save(path, "native", 1)
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refusing)
        with pytest.raises(holdfast.AlreadyPublishedError, match="may not replace"):
            save(path, "torch", 2)
        save(path, "native", 3)
    assert loaded(path) == 3
    writer = holdfast.FileSystemWriter(path)
    writer.fs = type("Other", (type(writer.fs),), {})()
    with pytest.raises(holdfast.AlreadyPublishedError, match="native format"):
        holdfast.save({"w": torch.zeros(3)}, storage_writer=writer)
    assert loaded(path) == 3


def steps_of(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None], stop_after: int) -> int:
    """How many files ``action`` made, named, removed or synced; a kill comes right after number ``stop_after``."""
    done = 0
    is_dead = False

    def counting(name: str) -> Any:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal done, is_dead
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            if is_dead:  # the dead tidy up nothing
                if name == "open":
                    raise Killed
                return None
            if done >= stop_after:
                is_dead = True
                raise Killed
            done += 1
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        for name in ("open", "rename", "link", "unlink", "fsync"):
            patched.setattr(os, name, counting(name))
        with contextlib.suppress(Killed):
            action()
    return done


@pytest.mark.parametrize(("first", "later"), [("native", "torch"), ("torch", "native")])
def test_killed_anywhere_one_of_them_is_whole_and_the_next_save_tidies_up(
    path: Path, monkeypatch: pytest.MonkeyPatch, first: str, later: str
) -> None:
    seen = []
    for stop_after in range(100):
        shutil.rmtree(path, ignore_errors=True)
        save(path, first, 1)
        if steps_of(monkeypatch, lambda: save(path, later, 2), stop_after) < stop_after:
            break
        seen.append((loaded(path), format_at(path)))
        if (path / ".metadata").exists():
            assert loaded_by_torch(path) in (1, 2)
        assert sweep(path, delete=True).problems == ()
        assert (loaded(path), format_at(path)) == seen[-1]
        for kind in KINDS:
            copy = path.with_name(f"copy-{kind}")
            shutil.copytree(path, copy)
            save(copy, kind, 3)
            assert (loaded(copy), format_at(copy)) == (3, kind)
            # What a killed save had staged is no checkpoint to anyone.
            staged = (".metadata-", "manifest-")
            heads = [name for name in os.listdir(copy) if not name.endswith(DATA) and not name.startswith(staged)]
            assert heads == ["manifest.json" if kind == "native" else ".metadata"]
            shutil.rmtree(copy)
    assert seen == sorted(seen)  # first all old, then all new
    assert {(1, first), (2, later)} == set(seen)
    assert len(seen) > 8


# --- what another program left --------------------------------------------------------------------------------------


@pytest.fixture
def both(path: Path) -> Path:
    save(path, "native", 1)
    save_by_torch(path, 2)
    return path


def test_two_that_another_program_left_are_noticed_by_everyone(both: Path, tmp_path: Path) -> None:
    target = {"w": torch.zeros(1000), "step": 0}
    for read in (
        lambda: holdfast.load(both),
        lambda: holdfast.load(target, both),
        lambda: holdfast.open(both),
        lambda: convert(both, tmp_path / "converted", to="native"),
    ):
        with pytest.raises(
            holdfast.CorruptError, match=r"holds two checkpoints, manifest.json .* and .metadata"
        ) as caught:
            read()
        assert "remove the one" in caught.value.message
        assert "FileSystemReader(path)" in caught.value.message
    assert not target["w"].any()
    for command, code in (("show", 1), ("verify", 1), ("sweep", 4)):
        result = CliRunner().invoke(app, [command, str(both)])
        assert result.exit_code == code, command
        assert "holds two checkpoints" in " ".join(result.output.split()), command


def test_naming_the_reader_removing_one_or_saving_again_settles_it(both: Path) -> None:
    for reader, version in ((holdfast.NativeReader(both), 1), (holdfast.FileSystemReader(both), 2)):
        target = {"w": torch.zeros(1000), "step": 0}
        holdfast.load(target, storage_reader=reader)
        assert target["step"] == version
    for name, version in (("manifest.json", 2), (".metadata", 1)):
        copy = both.with_name(name)
        shutil.copytree(both, copy)
        os.unlink(copy / name)
        assert loaded(copy) == version
    save(both, "native", 3)
    assert loaded(both) == 3


def test_a_note_counts_for_just_the_two_that_it_names(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(path, "torch", 1)
    monkeypatch.setattr(os, "unlink", lambda *args, **kwargs: None)
    save(path, "native", 2)
    assert {"manifest.json", ".metadata"} <= set(os.listdir(path))
    assert loaded(path) == 2
    save_by_torch(path, 3)
    with pytest.raises(holdfast.CorruptError, match="holds two checkpoints"):
        holdfast.load(path)


def test_a_reader_whose_note_goes_while_it_looks_looks_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(path, "torch", 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", lambda *args, **kwargs: None)
        save(path, "native", 2)
    real, removed = os.listdir, []

    def late(directory: str) -> list[str]:
        if not removed:
            removed.extend([".metadata", *(name for name in real(path) if name.startswith("replaces-"))])
            for name in removed:
                os.unlink(path / name)
        return real(directory)

    monkeypatch.setattr(os, "listdir", late)
    assert loaded(path) == 2
    assert len(removed) == 2


def test_a_note_that_nobody_needs_is_swept_unless_somebody_publishes(path: Path) -> None:
    save(path, "native", 1)
    note = path / "replaces-dead.tmp"
    note.write_text("native counts of native 1 and torch 2\n")
    with turn_of_another(path):
        assert sweep(path, delete=True).leftovers == ()
    assert sweep(path).dead[0].files == (note.name,)
    assert note.exists()
    assert sweep(path, delete=True).removed_files == 1
    assert not note.exists()


# --- a reader beside it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", KINDS)
@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("moment", ["before the metadata", "before the data"])
def test_a_load_beside_a_replacing_saver_starts_over(
    path: Path, monkeypatch: pytest.MonkeyPatch, first: str, later: str, moment: str
) -> None:
    save(path, first, 1)
    reader: Any = holdfast.NativeReader if first == "native" else holdfast.FileSystemReader
    method = "read_metadata" if moment == "before the metadata" else "read_data"
    real, replaced = getattr(reader, method), []

    def replacing(*args: Any, **kwargs: Any) -> Any:
        if not replaced:
            replaced.append(True)
            save(path, later, 2)
        return real(*args, **kwargs)

    monkeypatch.setattr(reader, method, replacing)
    assert loaded(path) == 2
    target = {"w": torch.zeros(1000), "step": 0}
    replaced.clear()
    save(path, first, 1)
    holdfast.load(target, path)
    assert target["step"] == 2
    assert bool((target["w"] == 2).all())


# --- torch's format, before anything is touched ---------------------------------------------------------------------


def test_a_value_where_an_array_should_be_is_known_before_anything_is_touched(path: Path) -> None:
    state = {"a": torch.ones(3), "b": 1, "c": torch.ones(30_000), "z": "text"}
    holdfast.save(state, storage_writer=holdfast.FileSystemWriter(path))
    target: dict[str, Any] = {"a": torch.zeros(3), "b": 0, "c": torch.zeros(30_000), "z": np.zeros(3)}
    with pytest.raises(holdfast.MismatchError, match="'z' has kind"):
        holdfast.load(target, path)
    assert not target["a"].any()
    assert not target["c"].any()
    assert target["b"] == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dtypes_are_compared_before_anything_is_touched_when_torch_drives(path: Path) -> None:
    state = {"a": torch.ones(3), "b": torch.ones(30_000), "step": 1}
    holdfast.save(state, storage_writer=holdfast.FileSystemWriter(path))
    target = {"a": torch.zeros(3), "b": torch.zeros(30_000, dtype=torch.float16), "step": 0}
    reader = holdfast.FileSystemReader(path)
    with pytest.raises(TorchCheckpointException, match="'b' has dtype float32"):
        dcp.load(target, storage_reader=reader, no_dist=True)
    assert not target["a"].any()
    assert target["step"] == 0


def test_keys_that_no_reader_of_ours_takes_are_refused_before_anything_is_written(path: Path) -> None:
    key = "k" * ((1 << 16) + 1)
    for state in ({key: torch.ones(3)}, {key: 1}):
        with pytest.raises(holdfast.InvalidStateError, match="shorten it"):
            holdfast.save(state, storage_writer=holdfast.FileSystemWriter(path))
    assert not path.exists()
    holdfast.save({key[1:]: torch.ones(3)}, storage_writer=holdfast.FileSystemWriter(path))
    assert list(holdfast.load(path)) == [key[1:]]


# --- two savers, many files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_two_savers_of_one_name_leave_nothing_of_what_they_replaced(
    path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The first one publishes while the second one is about to: who looked too early would miss its files."""
    save(path, kind, 1)
    rename, ready, goes_on = os.rename, threading.Event(), threading.Event()
    second = threading.Thread(target=save, args=(path, kind, 3))

    def renaming(*args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is second:
            ready.set()
            assert goes_on.wait(300)
        rename(*args, **kwargs)

    monkeypatch.setattr(os, "rename", renaming)
    second.start()
    assert ready.wait(300)
    first = threading.Thread(target=save, args=(path, kind, 2))
    first.start()
    first.join(0.2)  # which it may, or may not: it waits for its turn
    goes_on.set()
    second.join()
    first.join()
    assert loaded(path) in (2, 3)
    assert len(os.listdir(path)) == (3 if kind == "native" else 2)


def test_names_of_files_that_somebody_may_still_read_are_not_used_again(path: Path) -> None:
    """torch's format has no digests by which a reader of the old one could tell the new file from its own."""
    save(path, "torch", 1)
    with holdfast.open(path) as checkpoint:
        save(path, "native", 2)
        save(path, "torch", 3)
        with pytest.raises(holdfast.StorageError, match="open it again"):
            checkpoint["w"][...]


def test_a_saver_in_torchs_format_whose_names_another_one_took_meanwhile_uses_others(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taken = os.open, []

    def open_late(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT and not taken and str(name).endswith(".distcp"):
            taken.append(str(name))
            save(path, "torch", 1)
            assert os.path.exists(name)
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_late)
    save(path, "torch", 2)
    assert len(taken) == 1
    assert loaded(path) == loaded_by_torch(path) == 2
    assert len(os.listdir(path)) == 2


@contextlib.contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """Room for ``more`` open files than there are now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not tell which files are open")
def test_a_checkpoint_of_many_files_needs_few_open_ones(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{number}": torch.full((40_000,), float(number)) for number in range(300)}
    with monkeypatch.context() as patched:
        patched.setattr("holdfast._native.packer.DataFile.takes", lambda file, chunk: not file.entries)
        holdfast.save(state, path)
    files = len([name for name in os.listdir(path) if name.startswith("data-")])
    assert files > 100
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    with few_descriptors(100):
        holdfast.load(target, path)
        assert all(torch.equal(target[key], tensor) for key, tensor in state.items())
        for name in os.listdir(path):  # from the disk too, which takes two descriptors for each file
            descriptor = os.open(path / name, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        with holdfast.open(path) as checkpoint:
            assert all(float(checkpoint[key][7]) == tensor[7] for key, tensor in state.items())
        assert CliRunner().invoke(app, ["verify", str(path)]).exit_code == 0
        convert(path, tmp_path / "converted", to="torch")
        holdfast.load(target, tmp_path / "converted")


def test_a_saver_that_was_stopped_in_its_turn_does_not_stop_others(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(path, "native", 1)
    monkeypatch.setattr("holdfast._io.locks._WAIT_S", 0.0)
    with turn_of_another(path):
        save(path, "native", 2)
        with pytest.raises(holdfast.AlreadyPublishedError, match="may not replace"):
            save(path, "torch", 3)
    assert loaded(path) == 2
    save(path, "torch", 4)
    assert loaded(path) == 4
