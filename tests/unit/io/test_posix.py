from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast._io import posix
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
