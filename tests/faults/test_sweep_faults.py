"""Sweeping after savers that died and beside savers that live: what is dead goes, a living save is never harmed."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import sweep

StartChild = Callable[..., Callable[[str], dict[str, Any]]]
StateOf = Callable[..., dict[str, Any]]
VersionOf = Callable[[dict[str, Any]], int]

CALLS = [
    *(("open", number) for number in range(1, 8)),
    *(("fsync", number) for number in range(1, 6)),
    *(("pwrite", 1), ("pwrite", 2), ("ftruncate", 1), ("write", 1), ("write", 2), ("posix_fallocate", 1)),
    *(("link", 1), ("rename", 1), ("unlink", 1), ("unlink", 2)),
]


@contextmanager
def closed_gate(path: Path) -> Iterator[None]:
    path.touch()
    with open(path, "rb") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield


def expected_files(path: Path) -> list[str]:
    with holdfast.open(path) as checkpoint:
        assert checkpoint.metadata.storage_meta is not None
        attempt = checkpoint.metadata.storage_meta.save_id
    return sorted([f"data-{attempt}-0-0.safetensors", f"index-{attempt}.safetensors", "manifest.json"])


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_a_killed_saver_left_is_swept_and_what_is_published_stays(
    tmp_path: Path, start_child: StartChild, state_of: StateOf, version_of: VersionOf, overwrite: bool
) -> None:
    killed = removed = 0
    for call, number in CALLS:
        path = tmp_path / f"{call}-{number}"
        if overwrite:
            holdfast.save(state_of(1), path)
        else:
            path.mkdir()
        fault = {"kind": "kill before", "call": call, "number": number}
        wait = start_child(path=str(path), versions=[2], overwrite=overwrite, fault=fault)
        killed += wait("end")["signal"] == 9
        report = sweep(path, delete=True)
        assert report.problems == ()
        assert all(leftover.verdict == "dead" for leftover in report.leftovers)
        removed += report.removed_files
        if overwrite or (path / "manifest.json").exists():
            assert version_of(holdfast.load(path)) in (1, 2)
            assert sorted(os.listdir(path)) == expected_files(path)
        else:
            assert os.listdir(path) == []
    assert killed >= 12
    assert removed >= 12


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_save_under_way_is_never_swept(
    tmp_path: Path, start_child: StartChild, state_of: StateOf, version_of: VersionOf, overwrite: bool
) -> None:
    """The saver stands still before each of its calls in turn while a sweep passes, and then succeeds all the same."""
    stopped = 0
    for call, number in CALLS:
        path = tmp_path / f"{call}-{number}"
        if overwrite:
            holdfast.save(state_of(1), path)
        gate = tmp_path / f"gate-{call}-{number}"
        fault = {"kind": "gate", "call": call, "number": number, "gate": str(gate)}
        with closed_gate(gate):
            wait = start_child(path=str(path), versions=[2], overwrite=overwrite, fault=fault)
            try:
                wait("gate")
            except AssertionError:
                continue  # this save makes fewer such calls
            stopped += 1
            sweep(tmp_path, delete=True)
        assert wait("end")["error"] is None, f"{call} {number}"
        assert version_of(holdfast.load(path)) == 2
    assert stopped >= 12


def test_a_save_waits_for_a_sweep_that_took_it_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data file is there, and its lock not yet taken: the sweep makes an index, so that nobody else can publish."""
    path = tmp_path / "checkpoint"
    problems: list[str] = []
    real_open, real_lock = os.open, fcntl.flock
    is_made, is_claimed, has_come_on = threading.Event(), threading.Event(), threading.Event()

    def save() -> None:
        try:
            holdfast.save({"weight": torch.ones(300)}, path)
        except holdfast.CheckpointError as error:
            problems.append(error.message)
        finally:
            is_made.set()
            has_come_on.set()

    def lock(descriptor: int, how: int) -> None:
        if threading.current_thread() is saver:
            is_made.set()
            assert is_claimed.wait(300)
        try:
            real_lock(descriptor, how)
        except BlockingIOError:
            has_come_on.set()
            raise

    def open_file(name: Any, flags: int, *args: Any, **options: Any) -> int:
        descriptor = real_open(name, flags, *args, **options)
        if threading.current_thread() is not saver and flags & os.O_CREAT and str(name).startswith("index-"):
            is_claimed.set()
            assert has_come_on.wait(300)
        return descriptor

    saver = threading.Thread(target=save)
    monkeypatch.setattr(fcntl, "flock", lock)
    monkeypatch.setattr(os, "open", open_file)
    saver.start()
    assert is_made.wait(300)
    (leftover,) = sweep(path, delete=True).leftovers
    is_claimed.set()
    saver.join(300)
    assert (leftover.verdict, problems) == ("dead", [])
    assert sorted(os.listdir(path)) == expected_files(path)
    assert torch.equal(holdfast.load(path)["weight"], torch.ones(300))


def test_a_save_without_tensors_is_not_swept_while_it_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no data file whose lock could tell that it lives: that of the index does."""
    path = tmp_path / "checkpoint"
    seen: list[str] = []
    for name in ("open", "fsync", "rename"):
        real = getattr(os, name)

        def sweeping(*args: Any, _real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            with monkeypatch.context() as patch:
                for other, function in originals.items():
                    patch.setattr(os, other, function)
                if path.exists():
                    seen.extend(leftover.verdict for leftover in sweep(path, delete=True).leftovers)
            return _real(*args, **kwargs)

        monkeypatch.setattr(os, name, sweeping)
    originals = {"open": posix_open, "fsync": posix_fsync, "rename": posix_rename}
    holdfast.save({"step": 3}, path)
    monkeypatch.undo()
    assert set(seen) == {"living"}
    assert len(seen) >= 4
    assert holdfast.load(path) == {"step": 3}


posix_open, posix_fsync, posix_rename = os.open, os.fsync, os.rename


def test_a_rank_that_died_is_missed_by_the_publisher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is gone, its data file is swept; the coordinator, which has reports of all, must not publish."""
    real, is_late = os.open, []

    def late(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if not is_late and os.path.basename(name).startswith("index-"):  # the first file of the publisher
            is_late.append(name)
            writer.close()
            assert sweep(tmp_path, delete=True).removed_files == 1
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", late)
    writer = holdfast.NativeWriter(tmp_path / "checkpoint", attempt="a")
    with pytest.raises(holdfast.StorageError, match="not what was written"):
        holdfast.save({"w": torch.ones(3)}, storage_writer=writer)
    assert len(is_late) == 1
    assert not os.path.exists(tmp_path / "checkpoint")
