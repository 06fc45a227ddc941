"""A file system that says no, at every call: one error with its errno, what was there stays, the next save succeeds."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast

StartChild = Callable[..., Callable[[str], dict[str, Any]]]
StateOf = Callable[..., dict[str, Any]]
VersionOf = Callable[[dict[str, Any]], int]

NOBODY = 65534
CALLS = {
    "close": errno.EIO,
    "fsync": errno.EIO,
    "ftruncate": errno.EIO,
    "link": errno.EIO,
    "mkdir": errno.ENOSPC,
    "open": errno.EACCES,
    "posix_fallocate": errno.ENOSPC,
    "pwrite": errno.ENOSPC,
    "rename": errno.EIO,
    "unlink": errno.EIO,
    "write": errno.EDQUOT,
}


class Failing:
    """Calls of ``os`` that fail from the ``number``-th on, ``times`` times; 0 only counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str, code: int, *, number: int, times: int = 1) -> None:
        self.calls = 0
        self.injected = 0
        self._real: Callable[..., Any] = getattr(os, call)
        self._plan = call, code, number, times
        self._lock = threading.Lock()
        monkeypatch.setattr(os, call, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, code, number, times = self._plan
        with self._lock:
            self.calls += 1
            fails = number != 0 and number <= self.calls < number + times
            self.injected += fails
        if not fails:
            return self._real(*args, **kwargs)
        if call == "close":
            # A descriptor is gone even where closing it tells of a failure.
            self._real(*args, **kwargs)
        raise OSError(code, os.strerror(code))


def prepare(path: Path, mode: str, state_of: StateOf) -> Path:
    if mode == "replacing":
        holdfast.save(state_of(1), path)
    return path


def calls_of_a_save(path: Path, mode: str, call: str, state_of: StateOf) -> int:
    with pytest.MonkeyPatch.context() as patch:
        counter = Failing(patch, call, 0, number=0)
        holdfast.save(state_of(2), path, overwrite=mode == "replacing")
    return counter.calls


def check_nothing_visible(path: Path, mode: str, version_of: VersionOf, before: list[str]) -> None:
    names = sorted(os.listdir(path)) if path.exists() else []
    assert names == before, "a failed save left files behind"
    if mode == "replacing":
        assert version_of(holdfast.load(path)) == 1
    else:
        assert not (path / "manifest.json").exists()
        with pytest.raises(holdfast.NotFoundError):
            holdfast.load(path)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", ["fresh", "replacing"])
def test_a_save_that_fails_at_any_call_costs_only_itself(
    tmp_path: Path, mode: str, call: str, state_of: StateOf, version_of: VersionOf
) -> None:
    count = calls_of_a_save(prepare(tmp_path / "count", mode, state_of), mode, call, state_of)
    if count == 0:
        assert (mode, call) in {("fresh", "rename"), ("replacing", "link"), ("replacing", "mkdir")}
    injected = failed = 0
    for number in range(1, count + 1):
        path = prepare(tmp_path / str(number), mode, state_of)
        before = sorted(os.listdir(path)) if path.exists() else []
        open_before = descriptors()
        error: holdfast.StorageError | None = None
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, call, CALLS[call], number=number)
            try:
                holdfast.save(state_of(2), path, overwrite=mode == "replacing")
            except holdfast.StorageError as raised:
                error = raised
        injected += failing.injected
        assert descriptors() == open_before
        if error is None:
            assert version_of(holdfast.load(path)) == 2
        else:
            failed += 1
            assert error.errno == CALLS[call]
            assert "\n" not in error.message
            assert str(path.parent) in error.message
            assert error.path is not None
            # After the manifest has its name, only the promise of durability can fail.
            if not is_published(path, before):
                check_nothing_visible(path, mode, version_of, before)
        holdfast.save(state_of(3), path)
        assert version_of(holdfast.load(path)) == 3
    assert injected == count
    assert failed == count or call in TOLERATED, f"{count - failed} of {count} failures were not reported"


# A name that cannot be removed after publishing is litter; a manifest that cannot be looked at may still be replaced.
TOLERATED = {"unlink", "open", "close"}


def is_published(path: Path, before: list[str]) -> bool:
    """Whether a manifest other than the one from before is there; then it must be whole."""
    if not (path / "manifest.json").exists():
        return False
    manifest = holdfast.open(path).metadata.storage_meta
    assert manifest is not None
    if f"index-{manifest.save_id}.safetensors" in before:
        return False
    assert holdfast.load(path)["step"] == 2
    return True


@pytest.mark.parametrize("mode", ["fresh", "replacing"])
def test_a_directory_that_cannot_be_synced_after_publishing_keeps_a_whole_checkpoint(
    tmp_path: Path, mode: str, state_of: StateOf, version_of: VersionOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prepare(tmp_path / "checkpoint", mode, state_of)
    real_sync, real_publish = os.fsync, getattr(os, "link" if mode == "fresh" else "rename")
    injected = []

    def publishing(*args: Any, **kwargs: Any) -> None:
        real_publish(*args, **kwargs)

        def failing_sync(descriptor: int) -> None:
            injected.append(descriptor)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fsync", failing_sync)

    monkeypatch.setattr(os, "link" if mode == "fresh" else "rename", publishing)
    with pytest.raises(holdfast.StorageError) as caught:
        holdfast.save(state_of(2), path, overwrite=mode == "replacing")
    monkeypatch.undo()
    assert os.fsync is real_sync
    assert len(injected) == 1
    assert caught.value.errno == errno.EIO
    # Whichever of the two the disk keeps, readers find one of them, whole.
    if mode == "replacing" or (path / "manifest.json").exists():
        assert version_of(holdfast.load(path)) in (1, 2)
    holdfast.save(state_of(3), path)
    assert version_of(holdfast.load(path)) == 3


@pytest.mark.parametrize("call", ["link", "rename"])
def test_publishing_that_succeeds_and_then_fails_leaves_a_whole_checkpoint(
    tmp_path: Path, call: str, state_of: StateOf, version_of: VersionOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt right after the call, or a network file system that lost the answer."""
    path = prepare(tmp_path / "checkpoint", "fresh" if call == "link" else "replacing", state_of)
    real = getattr(os, call)
    interrupts = []

    def interrupted(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        interrupts.append(args)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        holdfast.save(state_of(2), path, overwrite=call == "rename")
    monkeypatch.undo()
    assert len(interrupts) == 1
    if call == "rename" or (path / "manifest.json").exists():
        assert version_of(holdfast.load(path)) in (1, 2)
    holdfast.save(state_of(3), path)
    assert version_of(holdfast.load(path)) == 3


def test_the_first_error_is_the_one_that_is_told(
    tmp_path: Path, state_of: StateOf, version_of: VersionOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that turns read-only refuses the write, and then the removal of what was written."""
    path = prepare(tmp_path / "checkpoint", "replacing", state_of)
    writes = Failing(monkeypatch, "pwrite", errno.ENOSPC, number=1, times=100)
    removals = Failing(monkeypatch, "unlink", errno.EROFS, number=1, times=100)
    with pytest.raises(holdfast.StorageError) as caught:
        holdfast.save(state_of(2), path)
    monkeypatch.undo()
    assert writes.injected == 1
    assert removals.injected >= 1
    assert caught.value.errno == errno.ENOSPC
    assert version_of(holdfast.load(path)) == 1


def test_a_failure_among_many_slabs_and_threads(
    tmp_path: Path, state_of: StateOf, version_of: VersionOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prepare(tmp_path / "checkpoint", "replacing", state_of)
    before = sorted(os.listdir(path))
    threads = threading.active_count()
    failing = Failing(monkeypatch, "pwrite", errno.ENOSPC, number=3, times=100)
    with pytest.raises(holdfast.StorageError, match="No space left on device") as caught:
        holdfast.save(state_of(2, 24 << 20), path)
    monkeypatch.undo()
    assert failing.injected >= 1
    assert caught.value.errno == errno.ENOSPC
    assert threading.active_count() == threads
    check_nothing_visible(path, "replacing", version_of, before)


def test_a_file_system_without_links_publishes_without_replacing(
    tmp_path: Path, state_of: StateOf, version_of: VersionOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint"
    failing = Failing(monkeypatch, "link", errno.EPERM, number=1, times=100)
    try:
        holdfast.save(state_of(2), path, overwrite=False)
    except holdfast.StorageError as error:
        pytest.skip(f"this file system cannot rename without replacing either: {error}")
    assert failing.injected == 1
    assert version_of(holdfast.load(path)) == 2
    with pytest.raises(holdfast.AlreadyPublishedError):
        holdfast.save(state_of(3), path, overwrite=False)
    assert sorted(name.split("-")[0] for name in os.listdir(path)) == ["data", "index", "manifest.json"]


def test_a_process_that_may_not_write_so_much_fails_and_leaves_nothing(
    tmp_path: Path, state_of: StateOf, version_of: VersionOf, start_child: StartChild
) -> None:
    path = prepare(tmp_path / "checkpoint", "replacing", state_of)
    before = sorted(os.listdir(path))
    end = start_child(path=str(path), versions=[2], elements=100_000, file_size_limit=64 << 10)("end")
    assert (end["error"], end["errno"]) == ("StorageError", errno.EFBIG)
    assert "\n" not in end["message"]
    check_nothing_visible(path, "replacing", version_of, before)
    holdfast.save(state_of(3), path)
    assert version_of(holdfast.load(path)) == 3


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    if os.getuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("reserves", [True, False])
def test_a_full_disk(
    full_disk: Path, reserves: bool, state_of: StateOf, version_of: VersionOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reserves:
        monkeypatch.delattr(os, "posix_fallocate")
    path = full_disk / "checkpoint"
    with pytest.raises(holdfast.StorageError) as caught:
        holdfast.save(state_of(1, 4 << 20), path)
    assert caught.value.errno == errno.ENOSPC
    assert not os.path.exists(path)
    with pytest.raises(holdfast.NotFoundError):
        holdfast.load(path)
    holdfast.save(state_of(1, 1 << 20), path)
    before = sorted(os.listdir(path))
    with pytest.raises(holdfast.StorageError, match="No space left on device") as caught:
        holdfast.save(state_of(2, 1 << 20), path)
    assert "\n" not in caught.value.message
    check_nothing_visible(path, "replacing", version_of, before)
    holdfast.save(state_of(3), path)
    assert version_of(holdfast.load(path)) == 3


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory that every user can reach, unlike those of pytest."""
    path = Path(tempfile.mkdtemp(prefix="holdfast-test-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            (path / "checkpoint").chmod(0o755)
        shutil.rmtree(path)


def unprivileged(start_child: StartChild, path: Path, version: int) -> dict[str, Any]:
    """How a save by someone who is not root ends."""
    user = {"user": NOBODY} if os.getuid() == 0 else {}
    return start_child(path=str(path), versions=[version], **user)("end")


def test_a_read_only_directory(
    public_directory: Path, state_of: StateOf, version_of: VersionOf, start_child: StartChild
) -> None:
    path = public_directory / "checkpoint"
    holdfast.save(state_of(1), path)
    before = sorted(os.listdir(path))
    path.chmod(0o555)
    end = unprivileged(start_child, path, 2)
    assert (end["error"], end["errno"]) == ("StorageError", errno.EACCES)
    assert "\n" not in end["message"]
    assert str(path) in end["message"]
    check_nothing_visible(path, "replacing", version_of, before)
    path.chmod(0o777)
    assert unprivileged(start_child, path, 3)["error"] is None
    assert version_of(holdfast.load(path)) == 3


def test_a_parent_in_which_nothing_can_be_made(
    public_directory: Path, state_of: StateOf, start_child: StartChild
) -> None:
    public_directory.chmod(0o555)
    path = public_directory / "checkpoint"
    end = unprivileged(start_child, path, 1)
    public_directory.chmod(0o755)
    assert (end["error"], end["errno"]) == ("StorageError", errno.EACCES)
    assert not path.exists()


def test_a_checkpoint_that_may_not_be_read(tmp_path: Path, state_of: StateOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is not "nothing there": a job that resumes must not start fresh."""
    path = tmp_path / "checkpoint"
    holdfast.save(state_of(1), path)
    failing = Failing(monkeypatch, "open", errno.EACCES, number=1)
    with pytest.raises(holdfast.StorageError) as caught:
        holdfast.load(path)
    assert failing.injected == 1
    assert caught.value.errno == errno.EACCES


@pytest.mark.parametrize("number", range(1, 6))
def test_a_disk_that_fails_while_reading(
    tmp_path: Path, number: int, state_of: StateOf, version_of: VersionOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint"
    holdfast.save(state_of(1), path)
    monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)
    with pytest.MonkeyPatch.context() as patch:
        readers = [Failing(patch, name, errno.EIO, number=0) for name in ("read", "preadv")]
        holdfast.load(path)
    reads = readers[0].calls
    total = sum(reader.calls for reader in readers)
    assert total == 5, "the parameters of this test cover every read"
    name, at = ("read", number) if number <= reads else ("preadv", number - reads)
    with pytest.MonkeyPatch.context() as patch:
        failing = Failing(patch, name, errno.EIO, number=at)
        with pytest.raises(holdfast.StorageError) as caught:
            holdfast.load(path)
    assert failing.injected == 1
    assert caught.value.errno == errno.EIO
    assert version_of(holdfast.load(path)) == 1
