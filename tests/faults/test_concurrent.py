"""Savers and readers at one name at the same time: nobody sees a mixture, and with overwrite=False exactly one wins."""

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

StartChild = Callable[..., Callable[[str], dict[str, Any]]]
StateOf = Callable[..., dict[str, Any]]
VersionOf = Callable[[dict[str, Any]], int]


@contextmanager
def closed_gate(path: Path) -> Iterator[None]:
    """Children that come to the gate wait until this block ends."""
    path.touch()
    with open(path, "rb") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield


def race(start_child: StartChild, tmp_path: Path, *, call: str, overwrite: bool) -> list[dict[str, Any]]:
    """How two savers, of versions 2 and 3, ended that both had written everything before either could publish."""
    gate = tmp_path / "gate"
    fault = {"kind": "gate", "call": call, "number": 1, "gate": str(gate)}
    with closed_gate(gate):
        waits = [
            start_child(path=str(tmp_path / "checkpoint"), versions=[version], overwrite=overwrite, fault=fault)
            for version in (2, 3)
        ]
        arrivals = [wait("gate") for wait in waits]
    assert len(arrivals) == 2
    return [wait("end") for wait in waits]


def attempt_of(path: Path) -> str:
    with holdfast.open(path) as checkpoint:
        assert checkpoint.metadata.storage_meta is not None
        assert checkpoint.metadata.storage_meta.save_id is not None
        return checkpoint.metadata.storage_meta.save_id


def files_of(path: Path) -> list[str]:
    attempt = attempt_of(path)
    return sorted([f"data-{attempt}-0-0.safetensors", f"index-{attempt}.safetensors", "manifest.json"])


def test_of_two_savers_that_may_not_overwrite_exactly_one_wins(
    tmp_path: Path, start_child: StartChild, version_of: VersionOf
) -> None:
    ends = race(start_child, tmp_path, call="link", overwrite=False)
    errors = [end["error"] for end in ends]
    assert sorted(errors, key=str) == ["AlreadyPublishedError", None]
    path = tmp_path / "checkpoint"
    assert version_of(holdfast.load(path)) == (2, 3)[errors.index(None)]
    assert sorted(os.listdir(path)) == files_of(path), "the loser left files behind"


def test_of_two_savers_that_may_overwrite_the_last_one_is_there_whole(
    tmp_path: Path, start_child: StartChild, version_of: VersionOf, state_of: StateOf
) -> None:
    holdfast.save(state_of(1), tmp_path / "checkpoint")
    ends = race(start_child, tmp_path, call="rename", overwrite=True)
    assert [end["error"] for end in ends] == [None, None]
    assert version_of(holdfast.load(tmp_path / "checkpoint")) in (2, 3)


def test_many_savers_at_once_leave_one_whole_checkpoint(
    tmp_path: Path, start_child: StartChild, version_of: VersionOf
) -> None:
    path = tmp_path / "checkpoint"
    waits = [start_child(path=str(path), versions=[10 * child + i for i in range(5)]) for child in range(1, 5)]
    assert [wait("end")["error"] for wait in waits] == [None] * 4
    assert version_of(holdfast.load(path)) % 10 == 4


def test_many_savers_at_once_that_may_not_overwrite_have_one_winner(
    tmp_path: Path, start_child: StartChild, version_of: VersionOf
) -> None:
    for trial in range(5):
        path = tmp_path / str(trial)
        waits = [start_child(path=str(path), versions=[version], overwrite=False) for version in (1, 2, 3)]
        errors = [wait("end")["error"] for wait in waits]
        assert sorted(errors, key=str) == ["AlreadyPublishedError", "AlreadyPublishedError", None]
        assert version_of(holdfast.load(path)) == 1 + errors.index(None)
        assert sorted(os.listdir(path)) == files_of(path)


def test_threads_of_one_process_may_save_to_one_name(tmp_path: Path, state_of: StateOf, version_of: VersionOf) -> None:
    path = tmp_path / "checkpoint"
    failures: list[BaseException] = []

    def save_often(first: int) -> None:
        try:
            for version in range(first, first + 5):
                holdfast.save(state_of(version), path)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=save_often, args=(10 * number,)) for number in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert version_of(holdfast.load(path)) % 10 == 4


def test_a_reader_beside_a_writer_always_sees_a_whole_version(
    tmp_path: Path, start_child: StartChild, state_of: StateOf, version_of: VersionOf
) -> None:
    path = tmp_path / "checkpoint"
    elements = 500_000
    holdfast.save(state_of(1, elements), path)
    seen: list[int] = []
    target = state_of(0, elements)

    def look() -> None:
        seen.append(version_of(holdfast.load(path)))
        holdfast.load(target, path)
        seen.append(version_of(target))

    gate = tmp_path / "gate"
    fault = {"kind": "gate", "call": "rename", "number": 3, "gate": str(gate)}
    with closed_gate(gate):
        wait = start_child(path=str(path), versions=list(range(2, 22)), elements=elements, fault=fault)
        wait("gate")
        look()  # while the writer is about to publish version 4
    assert seen == [3, 3]
    ends: list[dict[str, Any]] = []
    waiter = threading.Thread(target=lambda: ends.append(wait("end")))
    waiter.start()
    while waiter.is_alive():
        look()
    waiter.join()
    assert ends[0]["error"] is None
    assert ends[0]["counts"]["rename"] == 20
    assert version_of(holdfast.load(path)) == 21
    assert seen == sorted(seen), "an older version came back"


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("step", ["index", "data"])
def test_a_reader_overtaken_at_every_step_starts_again(
    tmp_path: Path,
    step: str,
    rounds: int,
    state_of: StateOf,
    version_of: VersionOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "checkpoint"
    holdfast.save(state_of(1), path)
    real = os.open
    overtaken: list[Any] = []

    def overtaking(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        is_step = os.path.basename(os.fspath(name)).startswith(step) and not flags & os.O_CREAT
        if is_step and len(overtaken) < rounds:
            overtaken.append(name)
            holdfast.save(state_of(1 + len(overtaken)), path)
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", overtaking)
    state = holdfast.load(path)
    assert len(overtaken) == rounds
    assert version_of(state) == 1 + rounds


def test_overwriting_replaces_and_removes_only_what_was_its_own(
    tmp_path: Path, state_of: StateOf, version_of: VersionOf
) -> None:
    path = tmp_path / "checkpoint"
    holdfast.save(state_of(1), path)
    (path / "notes.txt").write_text("mine")
    (path / "data-else.safetensors").write_text("not of this checkpoint")
    for version in (2, 3, 4):
        holdfast.save(state_of(version), path)
        assert version_of(holdfast.load(path)) == version
        assert sorted(os.listdir(path)) == sorted([*files_of(path), "notes.txt", "data-else.safetensors"])
    assert (path / "notes.txt").read_text() == "mine"


def test_a_published_checkpoint_is_refused_before_anything_is_written(
    tmp_path: Path, state_of: StateOf, version_of: VersionOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint"
    holdfast.save(state_of(1), path)
    changes: list[str] = []
    real = os.open

    def recording(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            changes.append(str(name))
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", recording)
    before = os.stat(path).st_mtime_ns, sorted(os.listdir(path))
    with pytest.raises(holdfast.AlreadyPublishedError) as caught:
        holdfast.save(state_of(2), path, overwrite=False)
    assert changes == []
    assert (os.stat(path).st_mtime_ns, sorted(os.listdir(path))) == before
    assert "\n" not in caught.value.message
    assert str(path) in caught.value.message
    assert version_of(holdfast.load(path)) == 1


def two_files(path: Path, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of two data files, each with one tensor."""
    with monkeypatch.context() as patch:
        patch.setattr("holdfast._native.file_layout._MOST_HEADER_BYTES", 1)
        patch.setattr("holdfast._native.packer.DataFile.takes", lambda file, chunk: not file.entries)
        holdfast.save({"a": torch.full((3000,), version), "b": torch.full((3000,), version)}, path)


def test_an_open_checkpoint_stays_the_one_it_was_as_far_as_its_files_were_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint"
    two_files(path, 1, monkeypatch)
    with holdfast.open(path) as checkpoint:
        assert checkpoint["a"][:10].tolist() == [1] * 10
        two_files(path, 2, monkeypatch)
        assert checkpoint["a"][...].tolist() == [1] * 3000
        assert checkpoint["a"].shape == (3000,)
        with pytest.raises(holdfast.StorageError, match="was replaced by another one") as caught:
            checkpoint["b"][...]
        assert caught.value.path == str(path)
    with holdfast.open(path) as checkpoint:
        assert checkpoint["b"][...].tolist() == [2] * 3000
