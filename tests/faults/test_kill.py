"""A saver that is killed, at every call that touches the file system: what was there stays, or the new is whole."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast

StartChild = Callable[..., Callable[[str], dict[str, Any]]]
StateOf = Callable[..., dict[str, Any]]
VersionOf = Callable[[dict[str, Any]], int]

COMMON_CALLS = ("close", "fsync", "ftruncate", "open", "posix_fallocate", "pwrite", "write")
CALLS = {
    "fresh": (*COMMON_CALLS, "mkdir", "link", "unlink"),
    "fresh, may overwrite": (*COMMON_CALLS, "mkdir", "rename"),
    "replacing": (*COMMON_CALLS, "rename", "unlink"),
}
PUBLISHING = {"fresh": "link", "fresh, may overwrite": "rename", "replacing": "rename"}
CASES = [(mode, call) for mode, calls in CALLS.items() for call in calls]


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory, state_of: StateOf) -> Path:
    path = tmp_path_factory.mktemp("kill") / "previous"
    holdfast.save(state_of(1), path)
    return path


@pytest.fixture(scope="module")
def counts(
    tmp_path_factory: pytest.TempPathFactory, previous: Path, start_child: StartChild
) -> dict[str, dict[str, int]]:
    """How often a save that nothing happens to makes each call, by mode."""
    found = {}
    for mode in CALLS:
        path = prepare(tmp_path_factory.mktemp("counts") / "checkpoint", mode, previous)
        end = start_child(path=str(path), versions=[2], overwrite=mode != "fresh")("end")
        assert end["error"] is None
        found[mode] = end["counts"]
    return found


def prepare(path: Path, mode: str, previous: Path) -> Path:
    if mode == "replacing":
        shutil.copytree(previous, path)
    return path


def loaded_version(path: Path, version_of: VersionOf) -> int | None:
    """The version that is there, whole; None when nobody would find a checkpoint."""
    try:
        return version_of(holdfast.load(path))
    except holdfast.NotACheckpointError:
        pytest.fail("a job that resumes must be told to start fresh")
    except holdfast.NotFoundError:
        return None


@pytest.mark.parametrize(("mode", "call"), CASES)
def test_a_killed_save_leaves_the_old_or_the_new(
    tmp_path: Path,
    mode: str,
    call: str,
    previous: Path,
    counts: dict[str, dict[str, int]],
    start_child: StartChild,
    state_of: StateOf,
    version_of: VersionOf,
) -> None:
    before = 1 if mode == "replacing" else None
    assert counts[mode][call] > 0
    kills = 0
    seen = []
    for number in range(1, counts[mode][call] + 1):
        for kind in ("kill before", "kill after"):
            path = prepare(tmp_path / f"{number}-{kind}", mode, previous)
            fault = {"call": call, "number": number, "kind": kind}
            end = start_child(path=str(path), versions=[2], overwrite=mode != "fresh", fault=fault)("end")
            assert end["signal"] == signal.SIGKILL, f"the fault did not strike: {end}"
            kills += 1
            version = loaded_version(path, version_of)
            assert version in (before, 2)
            seen.append(version)
            # What is not visible does not forbid a save either.
            holdfast.save(state_of(3), path, overwrite=version is not None)
            assert loaded_version(path, version_of) == 3
    assert kills == 2 * counts[mode][call]
    if call == PUBLISHING[mode]:
        assert seen == [before, 2]
    if call in ("mkdir", "posix_fallocate", "pwrite", "ftruncate", "write"):
        assert set(seen) == {before}


def test_every_call_that_a_save_makes_is_tried(counts: dict[str, dict[str, int]]) -> None:
    for mode, calls in CALLS.items():
        assert {call for call, count in counts[mode].items() if count} == set(calls)


def test_a_save_of_several_slabs_killed_among_its_threads(
    tmp_path: Path, previous: Path, start_child: StartChild, state_of: StateOf, version_of: VersionOf
) -> None:
    elements = 10 << 20
    end = start_child(path=str(tmp_path / "count"), versions=[2], elements=elements)("end")
    writes = end["counts"]["pwrite"]
    assert writes > 3
    path = prepare(tmp_path / "checkpoint", "replacing", previous)
    for number in range(1, writes + 1):
        fault = {"call": "pwrite", "number": number, "kind": "kill after"}
        end = start_child(path=str(path), versions=[2], elements=elements, fault=fault)("end")
        assert end["signal"] == signal.SIGKILL
        assert loaded_version(path, version_of) == 1
    holdfast.save(state_of(3, elements), path)
    assert loaded_version(path, version_of) == 3
    shutil.rmtree(path)
    shutil.rmtree(tmp_path / "count")


def test_a_saver_killed_again_and_again_never_takes_the_checkpoint_away(
    tmp_path: Path, start_child: StartChild, version_of: VersionOf
) -> None:
    path = tmp_path / "checkpoint"
    versions: list[int | None] = []
    for round_number in range(1, 9):
        fault = {"call": "fsync", "number": 4 * round_number, "kind": "kill before"}
        end = start_child(path=str(path), versions=list(range(10 * round_number, 10 * round_number + 9)), fault=fault)
        assert end("end")["signal"] == signal.SIGKILL
        version = loaded_version(path, version_of)
        if versions and versions[-1] is not None:
            assert version is not None
            assert version >= versions[-1]
        versions.append(version)
    assert len(set(versions)) > 4


# --- programs that look for torch's .metadata -------------------------------------------------------------------------


def save_before(path: Path, before: str, state: dict[str, Any]) -> None:
    if before == "torch":
        holdfast.save(state, storage_writer=holdfast.FileSystemWriter(path))
    elif before != "nothing":
        writer = holdfast.NativeWriter(path)
        writer.leaves_marker = before == "marked"
        holdfast.save(state, storage_writer=writer)


@pytest.mark.parametrize("before", ["nothing", "native", "marked", "torch"])
def test_a_program_that_looks_for_a_marker_never_finds_a_save_that_is_not_whole(
    tmp_path: Path, before: str, start_child: StartChild, state_of: StateOf, version_of: VersionOf
) -> None:
    save_before(tmp_path / "count", before, state_of(1))
    counts = start_child(path=str(tmp_path / "count"), versions=[2], marks=True)("end")["counts"]
    assert (tmp_path / "count" / ".metadata").exists()
    seen: set[tuple[int | None, bool]] = set()
    for call in ("fsync", "link", "rename", "unlink", "write"):  # what others do changes nothing that can be seen
        for number in range(1, counts[call] + 1):
            path = tmp_path / f"{call}-{number}"
            save_before(path, before, state_of(1))
            fault = {"call": call, "number": number, "kind": "kill after"}
            assert start_child(path=str(path), versions=[2], marks=True, fault=fault)("end")["signal"]
            is_marked = (path / ".metadata").exists()
            version = loaded_version(path, version_of)
            seen.add((version, is_marked))
            assert holdfast.sweep(path, delete=True).problems == ()
            assert is_marked == (path / ".metadata").exists()
            assert version == loaded_version(path, version_of)
    was_marked = before in ("marked", "torch")
    old = None if before == "nothing" else 1
    # Never (None, True); and a marker comes only after what it marks.
    assert seen == {(old, was_marked), (2, True)} | ({(2, False)} if before != "marked" else set())
