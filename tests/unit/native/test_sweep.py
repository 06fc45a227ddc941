"""Sweeping removes what is proven dead, and nothing else: not what lives, is published, foreign, or cannot be told."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import io
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast


def save(path: Path, attempt: str = "now", state: dict[str, Any] | None = None) -> None:
    writer = holdfast.NativeWriter(path, attempt=attempt)
    holdfast.save({"a": torch.ones(300), "step": 1} if state is None else state, storage_writer=writer)


def plant(path: Path, *names: str, size: int = 10) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        (path / name).write_bytes(bytes(size))


DEAD = ("data-dead-0-0.safetensors", "data-dead-1-0.safetensors", "index-dead.safetensors", "manifest-dead.tmp")
FOREIGN = (
    "notes.txt",
    "data-dead-0.safetensors",
    "data-dead-0-00.safetensors",
    "data--0-0.safetensors.bak",
    "data-" + "x" * 65 + "-0-0.safetensors",
    "index-dead.safetensors.old",
    "manifest-dead.json",
    "data-däad-0-0.safetensors",
    ".metadata-1.tmp",
    "__0_0.distcp",
    "model.safetensors",
)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def only(root: Path, **options: Any) -> Any:
    report = holdfast.sweep(root, **options)
    (leftover,) = report.leftovers
    assert report.problems == ()
    return leftover


def test_a_dry_run_lists_and_removes_nothing(tmp_path: Path) -> None:
    save(tmp_path / "step")
    plant(tmp_path / "step", *DEAD)
    before = sorted(os.listdir(tmp_path / "step"))
    assert dataclasses.asdict(only(tmp_path)) == {
        "directory": str(tmp_path / "step"),
        "attempt": "dead",
        "files": tuple(sorted(DEAD)),
        "bytes": 40,
        "verdict": "dead",
        "reason": "no writer holds a lock",
        "removed": (),
    }
    assert sorted(os.listdir(tmp_path / "step")) == before


def test_what_is_dead_goes_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a" / "step"
    save(path)
    before = sorted(os.listdir(path))
    plant(path, *DEAD, *FOREIGN)
    report = holdfast.sweep(tmp_path, delete=True)
    assert [leftover.removed for leftover in report.leftovers] == [
        tuple(sorted(DEAD, key=DEAD.index))[:2] + DEAD[3:] + DEAD[2:3]
    ]
    assert (report.removed_files, report.directories, report.problems) == (4, 4, ())
    assert sorted(os.listdir(path)) == sorted([*before, *FOREIGN])
    assert holdfast.load(path)["step"] == 1
    assert holdfast.sweep(tmp_path).leftovers == ()


def test_a_directory_without_a_checkpoint_is_swept_too(tmp_path: Path) -> None:
    plant(tmp_path, *DEAD)
    assert only(tmp_path, delete=True).verdict == "dead"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("names", [DEAD[:1], DEAD[2:3], DEAD[3:], DEAD[2:], DEAD[:2]], ids=",".join)
def test_parts_of_an_attempt_are_as_dead_as_all_of_it(tmp_path: Path, names: tuple[str, ...]) -> None:
    plant(tmp_path, *names)
    assert only(tmp_path, delete=True).removed == tuple(sorted(names, key=lambda name: name.startswith("index")))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", DEAD[:3])
def test_one_held_lock_keeps_the_whole_attempt(tmp_path: Path, name: str) -> None:
    plant(tmp_path, *DEAD)
    with locked(tmp_path / name):
        for delete in (False, True):
            leftover = only(tmp_path, delete=delete, attempts=["dead"])
            assert (leftover.verdict, leftover.removed) == ("living", ())
            assert name in leftover.reason
    assert sorted(os.listdir(tmp_path)) == sorted(DEAD)
    assert only(tmp_path).verdict == "dead"


def test_what_a_replaced_checkpoint_left_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "one")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda *args, **kwargs: (_ for _ in ()).throw(OSError(errno.EBUSY, "busy")))
        save(tmp_path, "two")
    assert only(tmp_path, delete=True).attempt == "one"
    assert sorted(os.listdir(tmp_path)) == ["data-two-0-0.safetensors", "index-two.safetensors", "manifest.json"]
    holdfast.load(tmp_path)


def test_the_temporary_name_of_a_published_manifest_is_dead(tmp_path: Path) -> None:
    save(tmp_path, "one")
    os.link(tmp_path / "manifest.json", tmp_path / "manifest-one.tmp")
    leftover = only(tmp_path, delete=True)
    assert (leftover.files, leftover.removed) == (("manifest-one.tmp",), ("manifest-one.tmp",))
    holdfast.load(tmp_path)


@pytest.mark.parametrize("damage", ["flipped", "newer", "directory", "link"])
def test_where_the_manifest_cannot_be_read_nothing_is_touched(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "step"
    save(path)
    plant(path, *DEAD)
    manifest = path / "manifest.json"
    data = manifest.read_bytes()
    manifest.unlink()
    if damage == "directory":
        manifest.mkdir()
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        manifest.symlink_to(tmp_path / "elsewhere")
    else:
        manifest.write_bytes(data.replace(b'"version":1', b'"version":2' if damage == "newer" else b'"version":3'))
    before = sorted(os.listdir(path))
    report = holdfast.sweep(tmp_path, delete=True, attempts=["dead", "now"])
    assert {leftover.verdict for leftover in report.leftovers} == {"unknown"}
    assert {leftover.attempt for leftover in report.leftovers} == {"dead", "now"}
    assert sorted(os.listdir(path)) == before


@pytest.mark.parametrize("kind", ["directory", "link", "pipe"])
@pytest.mark.parametrize("name", DEAD)
def test_what_is_no_regular_file_keeps_the_whole_attempt(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / "step"
    plant(path, *DEAD)
    plant(tmp_path, "outside")
    (path / name).unlink()
    if kind == "directory":
        (path / name).mkdir()
    elif kind == "pipe":
        os.mkfifo(path / name)
    else:
        (path / name).symlink_to(tmp_path / "outside")
    assert only(path, delete=True).verdict == "unknown"
    assert sorted(os.listdir(path)) == sorted(DEAD)
    assert (tmp_path / "outside").exists()


def test_links_to_directories_are_not_followed(tmp_path: Path) -> None:
    plant(tmp_path / "outside", *DEAD)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    report = holdfast.sweep(tmp_path / "root", delete=True)
    assert (report.leftovers, report.directories) == ((), 1)
    assert sorted(os.listdir(tmp_path / "outside")) == sorted(DEAD)


def test_a_directory_exchanged_for_a_link_meanwhile_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path / "outside", *DEAD)
    plant(tmp_path / "root" / "step", *DEAD)
    real = os.listdir

    def exchanging(directory: Any) -> list[str]:
        names = real(directory)
        if DEAD[0] in names and not (tmp_path / "root" / "step").is_symlink():
            os.rename(tmp_path / "root" / "step", tmp_path / "moved")
            (tmp_path / "root" / "step").symlink_to(tmp_path / "outside")
        return names

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", exchanging)
        holdfast.sweep(tmp_path / "root", delete=True)
    assert sorted(os.listdir(tmp_path / "outside")) == sorted(DEAD)
    assert os.listdir(tmp_path / "moved") == []


def mount_all_as(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system tells of its mounts: all file systems are of that kind."""
    real = open

    def opening(name: Any, *args: Any, **kwargs: Any) -> Any:
        if name != "/proc/self/mountinfo":
            return real(name, *args, **kwargs)
        return io.BytesIO(re.sub(rb" - (\S+) ", f" - {kind} ".encode(), Path(name).read_bytes()))

    monkeypatch.setattr("builtins.open", opening)


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs"])
def test_where_locks_may_not_show_only_what_is_named_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    plant(tmp_path, *DEAD, "data-other-0-0.safetensors")
    mount_all_as(kind, monkeypatch)
    report = holdfast.sweep(tmp_path, delete=True)
    assert {leftover.verdict for leftover in report.leftovers} == {"unknown"}
    assert kind in report.leftovers[0].reason
    holdfast.sweep(tmp_path, delete=True, attempts=["dead"])
    assert os.listdir(tmp_path) == ["data-other-0-0.safetensors"]


def test_without_locks_only_what_is_named_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, *DEAD, "data-other-0-0.safetensors")

    def refusing(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refusing)
    report = holdfast.sweep(tmp_path, delete=True, attempts=["dead"])
    assert [(leftover.attempt, leftover.verdict) for leftover in report.leftovers] == [
        ("dead", "dead"),
        ("other", "unknown"),
    ]
    assert os.listdir(tmp_path) == ["data-other-0-0.safetensors"]


def test_the_file_system_here_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, *DEAD)
    mount_all_as(r"shared.\1", monkeypatch)
    told = only(tmp_path).reason.rpartition(" on shared.")[2]
    assert told in {line.split()[2] for line in Path("/proc/self/mounts").read_text().splitlines()}


def test_an_attempt_published_meanwhile_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are unlocked from the instant it is published; the manifest that was read before does not know it."""
    save(tmp_path, "one")
    shutil.copytree(tmp_path, tmp_path.parent / "two")
    real, calls = os.open, 0

    def late(name: Any, *args: Any, **options: Any) -> int:
        nonlocal calls
        if name == "manifest.json":
            calls += 1
            if calls == 1:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return real(name, *args, **options)

    monkeypatch.setattr(os, "open", late)
    assert holdfast.sweep(tmp_path, delete=True).leftovers == ()
    assert calls == 2
    holdfast.load(tmp_path)


@pytest.mark.parametrize("grows", ["data-dead-7-0.safetensors", None])
def test_an_attempt_that_goes_on_between_looking_and_removing_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: str | None
) -> None:
    plant(tmp_path, *DEAD[:2])
    real, claims = os.open, 0

    def growing(name: Any, flags: int, *args: Any, **options: Any) -> int:
        nonlocal claims
        if name == "index-dead.safetensors" and flags & os.O_CREAT:  # the first step of removing
            claims += 1
            if grows is not None:
                plant(tmp_path, grows)
            else:
                save(tmp_path, "dead", {"step": 5})
        return real(name, flags, *args, **options)

    monkeypatch.setattr(os, "open", growing)
    leftover = only(tmp_path, delete=True)
    assert claims == 1
    assert (leftover.verdict, leftover.removed) == ("living", ())
    extra = [grows] if grows is not None else ["index-dead.safetensors", "manifest.json"]
    assert sorted(os.listdir(tmp_path)) == sorted([*DEAD[:2], *extra])


def test_the_directory_is_synced_before_anything_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "one")
    plant(tmp_path, *DEAD)

    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(os, "fsync", failing)
    report = holdfast.sweep(tmp_path, delete=True)
    assert report.removed_files == 0
    assert len(report.problems) == 1
    assert set(DEAD) <= set(os.listdir(tmp_path))


def test_what_cannot_be_removed_is_a_problem_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, *DEAD)
    real = os.unlink

    def refusing(name: Any, **options: Any) -> None:
        if str(name).startswith("data-dead-1"):
            raise PermissionError(errno.EACCES, "Permission denied")
        real(name, **options)

    monkeypatch.setattr(os, "unlink", refusing)
    report = holdfast.sweep(tmp_path, delete=True)
    assert report.leftovers[0].removed == ("data-dead-0-0.safetensors",)
    assert "data-dead-1-0.safetensors" in report.problems[0]


def test_a_root_that_is_missing_or_no_directory_is_an_error(tmp_path: Path) -> None:
    plant(tmp_path, "file")
    for root in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(holdfast.NotFoundError, match="no directory"):
            holdfast.sweep(root)


def test_trees_of_any_depth_end(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d"] * 70)
    deep.mkdir(parents=True)
    plant(deep, *DEAD)
    report = holdfast.sweep(tmp_path, delete=True)
    assert report.leftovers == ()
    assert len(report.problems) == 1
    assert "too deep" in report.problems[0]


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    plant(tmp_path / "a" / "b", *DEAD)
    before = len(os.listdir("/proc/self/fd"))
    holdfast.sweep(tmp_path)
    holdfast.sweep(tmp_path, delete=True)
    assert len(os.listdir("/proc/self/fd")) <= before
