"""Names, durability and refusals of the file system, and which file this process is at."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from output_files import new_output

from holdfast._io import posix
from holdfast._io.direct import InputFile
from holdfast._io.mapping import FileImage
from holdfast._staging.process import Answer, Done, Moved, ProcessOutput, WriterProcess
from holdfast._values.deadline import Progress
from holdfast.errors import AlreadyPublishedError, CorruptError, StorageError


class Refusal:
    """Stands in for a function of ``os``: fails with ``code`` the first ``times`` times, and counts its calls."""

    def __init__(self, original: Callable[..., object], code: int, times: int = 1_000_000) -> None:
        self.original = original
        self.code = code
        self.times = times
        self.calls = 0

    def __call__(self, *arguments: object, **options: object) -> object:
        self.calls += 1
        if self.calls <= self.times:
            raise OSError(self.code, os.strerror(self.code))
        return self.original(*arguments, **options)


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, code: int, times: int = 1_000_000) -> Refusal:
    refusal = Refusal(getattr(os, name), code, times)
    monkeypatch.setattr(os, name, refusal)
    return refusal


def open_descriptors() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)}


def _is_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


# read_whole and write_new


@pytest.mark.parametrize("size", [0, 1, 4096, 100_000])
def test_what_is_written_is_read(directory: Path, size: int) -> None:
    data = os.urandom(size)
    posix.write_new(directory / "file", data)
    assert posix.read_whole(directory / "file", limit=size) == data
    assert (directory / "file").read_bytes() == data


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_written(tmp_path: Path, kind: Callable[[bytes], bytes | bytearray | memoryview]) -> None:
    posix.write_new(tmp_path / "file", kind(b"abc"))
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_writes_that_take_one_byte_at_a_time_still_write_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    calls = []

    def one_byte(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        return write(descriptor, data[:1])

    monkeypatch.setattr(os, "write", one_byte)
    posix.write_new(tmp_path / "file", b"abcde")
    assert (tmp_path / "file").read_bytes() == b"abcde"
    assert calls == [5, 4, 3, 2, 1]


def test_a_write_that_takes_nothing_is_an_error_not_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda descriptor, data: 0)
    with pytest.raises(StorageError) as caught:
        posix.write_new(tmp_path / "file", b"abc")
    assert caught.value.errno == errno.EIO
    assert os.listdir(tmp_path) == []


def test_reads_that_give_one_byte_at_a_time_still_read_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"abcde")
    read = os.read
    calls = []

    def one_byte(descriptor: int, count: int) -> bytes:
        calls.append(count)
        return read(descriptor, 1)

    monkeypatch.setattr(os, "read", one_byte)
    assert posix.read_whole(tmp_path / "file", limit=100) == b"abcde"
    assert len(calls) == 6


def test_a_file_over_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcde")
    assert posix.read_whole(tmp_path / "file", limit=5) == b"abcde"
    with pytest.raises(CorruptError, match="larger than 4 bytes") as caught:
        posix.read_whole(tmp_path / "file", limit=4)
    assert caught.value.path == str(tmp_path / "file")


def test_a_file_that_grows_past_the_limit_while_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"a")
    asked = []

    def endless(descriptor: int, count: int) -> bytes:
        asked.append(count)
        return b"x" * count

    monkeypatch.setattr(os, "read", endless)
    with pytest.raises(CorruptError, match="larger than 10 bytes"):
        posix.read_whole(tmp_path / "file", limit=10)
    assert sum(asked) <= 11


def test_a_missing_file_keeps_its_errno(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot open .*nothing.*: No such file") as caught:
        posix.read_whole(tmp_path / "nothing", limit=10)
    assert caught.value.errno == errno.ENOENT
    assert caught.value.path == str(tmp_path / "nothing")


def test_a_read_error_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"abcde")
    refusal = refuse(monkeypatch, "read", errno.EIO)
    with pytest.raises(StorageError, match="cannot read") as caught:
        posix.read_whole(tmp_path / "file", limit=10)
    assert caught.value.errno == errno.EIO
    assert refusal.calls == 1


def _make_fifo(path: Path) -> None:
    os.mkfifo(path)


def _make_link(path: Path) -> None:
    path.with_name("target").write_bytes(b"secret")
    path.symlink_to("target")


def _make_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("make", [_make_fifo, _make_link, _make_dangling_link, _make_socket, Path.mkdir])
def test_only_regular_files_are_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "file")
    before = open_descriptors()
    with pytest.raises(CorruptError, match="is not a regular file"):
        posix.read_whole(tmp_path / "file", limit=100)
    assert open_descriptors() == before


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(StorageError) as caught:
        posix.write_new(tmp_path / "file", b"new")
    assert caught.value.errno == errno.EEXIST
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to("elsewhere")
    with pytest.raises(StorageError):
        posix.write_new(tmp_path / "file", b"new")
    assert sorted(os.listdir(tmp_path)) == ["file"]


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = open_descriptors()
    refusal = refuse(monkeypatch, name, errno.ENOSPC)
    with pytest.raises(StorageError) as caught:
        posix.write_new(tmp_path / "file", b"abc")
    assert caught.value.errno == errno.ENOSPC
    assert refusal.calls == 1
    assert os.listdir(tmp_path) == []
    assert open_descriptors() == before


def test_an_fsync_that_fails_once_is_raised_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = refuse(monkeypatch, "fsync", errno.EIO, times=1)
    with pytest.raises(StorageError, match="cannot sync") as caught:
        posix.write_new(tmp_path / "file", b"abc")
    assert caught.value.errno == errno.EIO
    assert refusal.calls == 1


def test_an_error_at_close_is_reported_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = os.close
    calls = []

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        close(descriptor)
        raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr(os, "close", failing)
    with pytest.raises(StorageError, match="cannot close") as caught:
        posix.write_new(tmp_path / "file", b"abc")
    monkeypatch.undo()
    assert caught.value.errno == errno.EDQUOT
    assert len(calls) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["missing", "with\0nul"])
def test_an_error_that_is_handled_keeps_nothing(name: str) -> None:
    """Nor does it wait for the cycle collector, which a training may have turned off."""
    gc.disable()
    try:
        held = posix.open_regular(__file__)
        before = len(os.listdir("/proc/self/fd"))

        def fail(kept: object) -> None:
            with posix.reporting("open", name):
                os.stat(name)

        with contextlib.suppress(StorageError):
            fail(held)
        del held
        assert len(os.listdir("/proc/self/fd")) == before - 1
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["with\0nul", "with\ud800surrogate"])
def test_names_that_the_system_cannot_take_are_storage_errors(tmp_path: Path, name: str) -> None:
    path = os.path.join(tmp_path, name)
    for attempt in (
        lambda: posix.read_whole(path, limit=1),
        lambda: posix.write_new(path, b""),
        lambda: posix.make_directories(path),
        lambda: posix.remove(path),
        lambda: posix.list_names(path),
        lambda: posix.exists(path),
        lambda: posix.sync_directory(path),
        lambda: posix.link_new(path, path),
        lambda: posix.replace(path, path),
    ):
        with pytest.raises(StorageError) as caught:
            attempt()
        assert caught.value.errno == errno.EINVAL


# link_new and replace


def test_publishing_moves_the_file(directory: Path) -> None:
    (directory / "temporary").write_bytes(b"new")
    posix.link_new(directory / "temporary", directory / "final")
    assert os.listdir(directory) == ["final"]
    assert (directory / "final").read_bytes() == b"new"


def test_publishing_never_replaces(directory: Path) -> None:
    (directory / "temporary").write_bytes(b"new")
    (directory / "final").write_bytes(b"old")
    with pytest.raises(AlreadyPublishedError, match="exists already"):
        posix.link_new(directory / "temporary", directory / "final")
    assert (directory / "final").read_bytes() == b"old"
    assert (directory / "temporary").read_bytes() == b"new"


def test_a_link_that_an_earlier_try_made_is_success(tmp_path: Path) -> None:
    (tmp_path / "temporary").write_bytes(b"new")
    os.link(tmp_path / "temporary", tmp_path / "final")
    posix.link_new(tmp_path / "temporary", tmp_path / "final")
    assert os.listdir(tmp_path) == ["final"]


def test_a_source_name_that_stays_does_not_fail_what_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").write_bytes(b"new")
    refusal = refuse(monkeypatch, "unlink", errno.EIO)
    posix.link_new(tmp_path / "temporary", tmp_path / "final")
    assert refusal.calls == 1
    assert (tmp_path / "final").read_bytes() == b"new"


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.ENOENT, errno.EIO])
def test_a_second_name_is_given_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    (tmp_path / "one").touch()
    assert posix.link(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two").samefile(tmp_path / "one")
    refuse(monkeypatch, "link", code)
    if code in (errno.EPERM, errno.EXDEV):
        assert not posix.link(tmp_path / "one", tmp_path / "three")
        return
    with pytest.raises(StorageError) as caught:
        posix.link(tmp_path / "one", tmp_path / "three")
    assert caught.value.errno == code


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS])
def test_where_links_are_refused_a_rename_publishes(
    directory: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (directory / "temporary").write_bytes(b"new")
    refusal = refuse(monkeypatch, "link", code)
    posix.link_new(directory / "temporary", directory / "final")
    assert refusal.calls == 1
    assert os.listdir(directory) == ["final"]
    assert (directory / "final").read_bytes() == b"new"


def test_where_links_are_refused_a_rename_never_replaces(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "temporary").write_bytes(b"new")
    (directory / "final").write_bytes(b"old")
    refuse(monkeypatch, "link", errno.EPERM)
    with pytest.raises(AlreadyPublishedError):
        posix.link_new(directory / "temporary", directory / "final")
    assert (directory / "final").read_bytes() == b"old"
    assert (directory / "temporary").read_bytes() == b"new"


def test_other_link_errors_are_reported(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot publish") as caught:
        posix.link_new(tmp_path / "nothing", tmp_path / "final")
    assert caught.value.errno == errno.ENOENT


def test_other_rename_errors_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "link", errno.EPERM)
    with pytest.raises(StorageError, match="cannot publish") as caught:
        posix.link_new(tmp_path / "nothing", tmp_path / "final")
    assert caught.value.errno == errno.ENOENT


def test_where_neither_link_nor_rename_works_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LibraryWithout:
        def __init__(self, name: str | None, *, use_errno: bool) -> None:
            pass

    (tmp_path / "temporary").write_bytes(b"new")
    refuse(monkeypatch, "link", errno.EPERM)
    monkeypatch.setattr(ctypes, "CDLL", LibraryWithout)
    with pytest.raises(StorageError, match="can neither link nor rename") as caught:
        posix.link_new(tmp_path / "temporary", tmp_path / "final")
    assert caught.value.errno == errno.ENOSYS
    assert os.listdir(tmp_path) == ["temporary"]


def test_replacing_takes_the_place_of_what_is_there(directory: Path) -> None:
    (directory / "temporary").write_bytes(b"new")
    (directory / "final").write_bytes(b"old")
    posix.replace(directory / "temporary", directory / "final")
    assert os.listdir(directory) == ["final"]
    assert (directory / "final").read_bytes() == b"new"


def test_a_replacement_that_fails_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot replace") as caught:
        posix.replace(tmp_path / "nothing", tmp_path / "final")
    assert caught.value.errno == errno.ENOENT


# syncing


def test_macos_syncs_down_to_the_medium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda descriptor, command: asked.append(command))
    refusal = refuse(monkeypatch, "fsync", errno.EIO)
    posix.sync_file(0, tmp_path)
    assert asked == [51]
    assert refusal.calls == 0


@pytest.mark.parametrize(("code", "synced"), [(errno.ENOTSUP, 1), (errno.ENOTTY, 1), (errno.EIO, 0)])
def test_a_full_sync_falls_back_only_where_it_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, synced: int
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", Refusal(fcntl.fcntl, code))
    monkeypatch.setattr(os, "fsync", calls.append)
    if synced:
        posix.sync_file(7, tmp_path)
    else:
        with pytest.raises(StorageError) as caught:
            posix.sync_file(7, tmp_path)
        assert caught.value.errno == code
    assert calls == [7] * synced


def test_directories_are_synced(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync
    synced = []

    def watched(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    posix.sync_directory(directory)
    assert synced == [os.path.realpath(directory)]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_directory_sync_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refusal = refuse(monkeypatch, "fsync", code)
    posix.sync_directory(tmp_path)
    assert refusal.calls == 1


def test_a_failed_directory_sync_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors()
    refusal = refuse(monkeypatch, "fsync", errno.EIO, times=1)
    with pytest.raises(StorageError) as caught:
        posix.sync_directory(tmp_path)
    assert caught.value.errno == errno.EIO
    assert refusal.calls == 1
    assert open_descriptors() == before


def test_syncing_a_file_as_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError) as caught:
        posix.sync_directory(tmp_path / "file")
    assert caught.value.errno == errno.ENOTDIR


# directories and names


def test_missing_parents_are_created_and_each_parent_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(posix, "sync_directory", lambda path: synced.append(os.fspath(path)))
    posix.make_directories(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    synced.clear()
    posix.make_directories(tmp_path / "a" / "b")
    assert synced == []


@pytest.mark.parametrize("path", ["a", "a/b/", "./a", "a/../b/c", "a//b"])
def test_relative_paths_of_any_spelling_are_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    posix.make_directories(path)
    assert os.path.isdir(path)


@pytest.mark.parametrize("below", ["file", "file/a", "file/a/b"])
def test_a_file_in_the_way_of_a_directory_is_an_error(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(StorageError, match="Not a directory") as caught:
        posix.make_directories(tmp_path / below)
    assert caught.value.errno == errno.ENOTDIR
    assert (tmp_path / "file").read_bytes() == b"kept"


def test_a_linked_directory_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    posix.make_directories(tmp_path / "link" / "a")
    assert (tmp_path / "real" / "a").is_dir()


def test_a_dangling_link_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(StorageError) as caught:
        posix.make_directories(tmp_path / "link")
    assert caught.value.errno == errno.EEXIST


def test_a_directory_that_someone_else_makes_meanwhile_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = os.mkdir
    lost_races = []

    def slower(path: str) -> None:
        lost_races.append(path)
        mkdir(path)
        mkdir(path)

    monkeypatch.setattr(os, "mkdir", slower)
    posix.make_directories(tmp_path / "a" / "b")
    assert len(lost_races) == 2
    assert (tmp_path / "a" / "b").is_dir()


def test_no_path_at_all_is_an_error() -> None:
    with pytest.raises(StorageError) as caught:
        posix.make_directories("")
    assert caught.value.errno == errno.ENOENT


def test_a_directory_that_cannot_be_made_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "mkdir", errno.EROFS)
    with pytest.raises(StorageError, match="cannot create") as caught:
        posix.make_directories(tmp_path / "a")
    assert caught.value.errno == errno.EROFS


def test_removing_makes_sure_that_the_name_is_gone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    posix.remove(tmp_path / "file")
    posix.remove(tmp_path / "file")
    assert os.listdir(tmp_path) == []
    with pytest.raises(StorageError) as caught:
        posix.remove(tmp_path / "file", missing_ok=False)
    assert caught.value.errno == errno.ENOENT


def test_a_removal_that_is_refused_is_reported(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(StorageError, match="cannot remove"):
        posix.remove(tmp_path / "directory")


def test_names_are_listed_in_order(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / name).write_bytes(b"")
    assert posix.list_names(tmp_path) == ["a", "b", "c"]
    with pytest.raises(StorageError) as caught:
        posix.list_names(tmp_path / "nothing")
    assert caught.value.errno == errno.ENOENT


def test_status_is_that_of_the_name_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("nowhere")
    status = posix.file_status(tmp_path / "file")
    assert status is not None
    assert status.st_size == 3
    assert posix.exists(tmp_path / "file")
    assert posix.exists(tmp_path / "link")
    assert not posix.exists(tmp_path / "nothing")
    assert not posix.exists(tmp_path / "file" / "below")
    assert posix.file_status(tmp_path / "nothing") is None


def test_a_status_that_is_refused_is_reported_not_taken_for_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "lstat", errno.EACCES)
    with pytest.raises(StorageError) as caught:
        posix.exists(tmp_path)
    assert caught.value.errno == errno.EACCES


# --- calls that a signal cuts short: tried again, or known to have been done, but never an error ----------------------


ACTIONS: dict[str, Callable[[Path], object]] = {
    "link": lambda path: posix.link_new(path / "source", path / "target"),
    "rename": lambda path: posix.replace(path / "source", path / "target"),
    "unlink": lambda path: posix.remove(path / "source"),
    "mkdir": lambda path: posix.make_directories(path / "new"),
    "lstat": lambda path: posix.file_status(path / "source"),
    "stat": lambda path: posix.make_directories(path),
    "listdir": lambda path: posix.list_names(path),
    "close": lambda path: posix.sync_directory(path),
}


def interrupt(monkeypatch: pytest.MonkeyPatch, name: str, *, times: int, is_done: bool) -> list[int]:
    """Lets a call of ``os`` be interrupted that often, though what it is for may be done."""
    real, interrupted = getattr(os, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        if interrupted[0] == times:
            return real(*args, **kwargs)
        interrupted[0] += 1
        if is_done:
            real(*args, **kwargs)
        raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

    monkeypatch.setattr(os, name, call)
    return interrupted


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("name", [name for name in ACTIONS if name != "close"])
def test_an_interrupted_call_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, times: int
) -> None:
    (tmp_path / "source").write_bytes(b"bytes")
    with monkeypatch.context() as patch:
        interrupted = interrupt(patch, name, times=times, is_done=False)
        ACTIONS[name](tmp_path)
        assert interrupted == [times]
    if name in ("link", "rename"):
        assert (tmp_path / "target").read_bytes() == b"bytes"
    if name in ("link", "rename", "unlink"):
        assert not (tmp_path / "source").exists()


@pytest.mark.parametrize("name", ACTIONS)
def test_a_call_that_is_done_though_it_was_interrupted_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "source").write_bytes(b"bytes")
    with monkeypatch.context() as patch:
        interrupt(patch, name, times=1, is_done=True)
        ACTIONS[name](tmp_path)
    if name in ("link", "rename"):
        assert (tmp_path / "target").read_bytes() == b"bytes"
        assert not (tmp_path / "source").exists()


def test_a_rename_of_nothing_is_an_error_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        posix.replace(tmp_path / "nothing", tmp_path / "target")
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize(("code", "done"), [(0, True), (errno.ENOENT, True), (errno.EEXIST, False)])
def test_an_interrupted_rename_that_refuses_to_replace(monkeypatch: pytest.MonkeyPatch, code: int, done: bool) -> None:
    answers = [errno.EINTR, code]

    class Function:
        argtypes: object = None
        restype: object = None

        def __call__(self, *args: object) -> int:
            return 0 if answers[0] == 0 else -1

    class Library:
        renameat2 = Function()

    monkeypatch.setattr(posix.ctypes, "CDLL", lambda *args, **kwargs: Library())
    monkeypatch.setattr(posix.ctypes, "get_errno", lambda: answers.pop(0))
    assert (posix.renameat2("source", "target", 1) == 0) is done


def test_closing_that_fails_too_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    real_close = os.close

    def refuse(*args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def close(descriptor: int) -> None:
        real_close(descriptor)
        refuse()

    for function in (InputFile.open, posix.open_regular):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", refuse)
            patch.setattr(os, "close", close)
            caught: BaseException | None = None
            try:
                function(path)
            except StorageError as error:
                caught = error
        assert isinstance(caught, StorageError)
        assert caught.errno == errno.EIO


def test_a_second_descriptor_that_cannot_be_looked_at_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with InputFile.open(path) as file:
        before = os.listdir("/proc/self/fd")
        real = os.path.samestat

        def refuse(*args: object) -> bool:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        monkeypatch.setattr(os.path, "samestat", refuse)
        memory = memoryview(bytearray(8192))
        file.read_direct_into(memory, 0)
        monkeypatch.setattr(os.path, "samestat", real)
        assert os.listdir("/proc/self/fd") == before
        assert not file.direct


def test_an_error_past_the_page_cache_is_not_taken_for_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with InputFile.open(path) as file:
        if file._open_direct() < 0:
            pytest.skip("this file system reads through the page cache only")
        real = os.preadv

        def refuse(descriptor: int, *args: Any) -> int:
            if descriptor == file._direct_descriptor:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(descriptor, *args)

        monkeypatch.setattr(os, "preadv", refuse)
        with pytest.raises(StorageError) as caught:
            file.read_direct_into(memoryview(bytearray(8192)), 0)
        assert caught.value.errno == errno.EIO


def test_a_link_that_fails_is_not_tried_as_a_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").write_bytes(b"bytes")

    def refuse(*args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageError) as caught:
        posix.link_new(tmp_path / "source", tmp_path / "target")
    assert caught.value.errno == errno.EIO
    assert os.listdir(tmp_path) == ["source"]


# --- which file this process is at: what other ranks are told of one that hangs ---------------------------------------


def test_it_is_the_one_of_the_last_call(tmp_path: Path) -> None:
    posix.write_new(tmp_path / "first", b"1")
    posix.write_new(tmp_path / "second", b"2")
    assert posix.file_at_work(tmp_path) == "second"
    posix.read_whole(tmp_path / "first", limit=10)
    assert posix.file_at_work(tmp_path) == "first"
    assert posix.file_at_work(f"{tmp_path}/") == "first"
    posix.sync_directory(tmp_path)
    assert posix.file_at_work(tmp_path) == tmp_path.name


def test_files_elsewhere_are_not_told_of(tmp_path: Path) -> None:
    beside = tmp_path / "checkpoint-2"
    beside.mkdir()
    posix.write_new(beside / "file", b"1")
    assert posix.file_at_work(tmp_path / "checkpoint") == ""


@pytest.mark.parametrize("call", ["os.pwrite", "os.preadv", "os.fsync"])
def test_a_call_that_hangs_goes_before_later_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    output = new_output(tmp_path / "stuck", expected_bytes=0)
    posix.write_new(tmp_path / "early", b"1")
    with InputFile.open(tmp_path / "stuck") as source:
        work = {
            "os.pwrite": lambda: output.write(memoryview(bytearray(10)), 0),
            "os.preadv": lambda: source.read_into(memoryview(bytearray(10)), 0),
            "os.fsync": lambda: output.finish(0),
        }[call]
        entered, leave = threading.Event(), threading.Event()

        def hang(*arguments: object) -> int:
            entered.set()
            leave.wait(300)
            return 10

        with monkeypatch.context() as patched:
            patched.setattr(call, hang)
            thread = threading.Thread(target=work)
            thread.start()
            assert entered.wait(300)
        posix.write_new(tmp_path / "later", b"1")
        assert posix.file_at_work(tmp_path) == "stuck"
        leave.set()
        thread.join()
        assert posix.file_at_work(tmp_path) != "early"
    output.close()


def test_a_call_within_another_leaves_it_under_way(tmp_path: Path) -> None:
    with posix.reporting("write", tmp_path / "outer"):
        with posix.reporting("open", tmp_path / "inner"):
            assert posix.file_at_work(tmp_path) == "inner"
        assert posix.file_at_work(tmp_path) == "outer"


def test_any_name_can_be_sent_and_is_short(tmp_path: Path) -> None:
    with posix.reporting("write", tmp_path / ("x" * 200 + ".distcp")):
        name = posix.file_at_work(tmp_path)
    assert len(name) == 100
    assert name.startswith("...x")
    assert name.endswith("x.distcp")
    with posix.reporting("write", bytes(tmp_path) + b"/odd\xff"):  # type: ignore[arg-type]
        assert msgspec.msgpack.encode(posix.file_at_work(tmp_path)) == msgspec.msgpack.encode("odd\\udcff")


def test_the_process_that_writes_is_at_the_file_that_its_bytes_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [
        FileImage(path=bytes(tmp_path / name), begin=0, size=100, header=0, starts=[], stops=[], known=[])
        for name in ("a", "b")
    ]
    answers: list[Answer] = [Moved(0), Moved(99), Moved(100), Moved(200), Done([])]
    seen = []

    def answer(process: WriterProcess) -> Answer:
        seen.append(posix.file_at_work(tmp_path))
        return answers.pop(0)

    monkeypatch.setattr(WriterProcess, "order", lambda process, order: None)
    monkeypatch.setattr(WriterProcess, "answer", answer)
    ProcessOutput(WriterProcess(), Progress()).write(images, memoryview(b""))
    assert seen == ["a", "a", "a", "b", "b"]
