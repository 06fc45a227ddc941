"""Files written past the page cache where that can be: created once, whole, synced, or removed."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from output_files import new_output

from holdfast._io.direct import ALIGNMENT, OutputFile
from holdfast._io.pipeline import run_bounded
from holdfast.errors import StorageError

PAGES = 8


def aligned(size: int, data: bytes = b"") -> memoryview:
    """``size`` bytes of page-aligned memory that begin with ``data``."""
    view = memoryview(mmap.mmap(-1, size))
    view[: len(data)] = data
    return view


def write_file(path: Path, data: bytes) -> OutputFile:
    """The closed file that got ``data`` in one aligned write."""
    padded = -(-len(data) // ALIGNMENT) * ALIGNMENT
    file = new_output(path, expected_bytes=len(data))
    file.write(aligned(padded, data), 0)
    file.finish(len(data))
    file.close()
    return file


def open_files() -> list[str]:
    names = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sorted(os.readlink(name) for name in names if os.path.lexists(name))


@pytest.mark.parametrize("size", [1, ALIGNMENT, ALIGNMENT * PAGES, ALIGNMENT * PAGES - 5])
def test_a_written_file_has_exactly_its_bytes(directory: Path, size: int) -> None:
    data = os.urandom(size)
    file = write_file(directory / "file", data)
    assert (directory / "file").read_bytes() == data
    assert file.path == str(directory / "file")


def test_this_system_writes_past_the_cache(directory: Path) -> None:
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("no O_DIRECT here")
    file = new_output(directory / "file", expected_bytes=0)
    flags = fcntl.fcntl(file._file.descriptor, fcntl.F_GETFL)
    file.abandon()
    assert file.direct == bool(flags & os.O_DIRECT)


def test_pieces_may_come_in_any_order(directory: Path) -> None:
    data = os.urandom(ALIGNMENT * PAGES)
    file = new_output(directory / "file", expected_bytes=len(data))
    memory = aligned(len(data), data)
    for page in (3, 0, 7, 1, 2, 6, 5, 4):
        begin = page * ALIGNMENT
        file.write(memory[begin : begin + ALIGNMENT], begin)
    file.finish(len(data))
    file.close()
    assert (directory / "file").read_bytes() == data


def test_room_beyond_the_end_is_given_back(directory: Path) -> None:
    file = new_output(directory / "file", expected_bytes=1 << 20)
    file.write(aligned(ALIGNMENT, b"abc"), 0)
    file.finish(3)
    file.close()
    assert (directory / "file").read_bytes() == b"abc"


def test_nothing_written_makes_an_empty_file(directory: Path) -> None:
    file = new_output(directory / "file", expected_bytes=0)
    file.write(memoryview(b""), 0)
    file.finish(0)
    file.close()
    assert (directory / "file").read_bytes() == b""


def test_what_exists_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(StorageError) as caught:
        new_output(tmp_path / "file", expected_bytes=10)
    assert caught.value.errno == errno.EEXIST
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("elsewhere")
    with pytest.raises(StorageError):
        new_output(tmp_path / "link", expected_bytes=10)
    assert not (tmp_path / "elsewhere").exists()


def test_a_missing_o_direct_means_buffered(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast._io.direct._O_DIRECT", 0)
    file = write_file(directory / "file", b"abc" * 3000)
    assert not file.direct
    assert (directory / "file").read_bytes() == b"abc" * 3000


def test_a_refusal_of_o_direct_by_fcntl_means_buffered(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = fcntl.fcntl
    refused = []

    def refusing(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return control(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    file = write_file(directory / "file", b"abc" * 3000)
    assert len(refused) == 1
    assert not file.direct
    assert (directory / "file").read_bytes() == b"abc" * 3000


def refuse_direct_writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets of direct writes that were refused, from now on."""
    write = os.pwrite
    refused: list[int] = []

    def refusing(descriptor: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    return refused


def test_a_refusal_at_the_first_write_means_buffered_for_good(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = refuse_direct_writes(monkeypatch)
    data = os.urandom(ALIGNMENT * 2)
    file = new_output(directory / "file", expected_bytes=len(data))
    was_direct = file.direct
    if not was_direct:
        file.abandon()
        pytest.skip("no O_DIRECT here")
    memory = aligned(len(data), data)
    file.write(memory[:ALIGNMENT], 0)
    assert not file.direct
    file.write(memory[ALIGNMENT:], ALIGNMENT)
    file.finish(len(data))
    file.close()
    assert refused == [0]
    assert (directory / "file").read_bytes() == data


def test_threads_that_are_refused_together_all_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(4)
    write = os.pwrite
    first_tries: list[int] = []

    def refusing_together(descriptor: int, data: memoryview, offset: int) -> int:
        if offset not in first_tries:
            first_tries.append(offset)
            barrier.wait(300)
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return write(descriptor, data, offset)

    data = os.urandom(ALIGNMENT * 4)
    memory = aligned(len(data), data)
    file = new_output(tmp_path / "file", expected_bytes=len(data))
    was_direct = file.direct
    if not was_direct:
        file.abandon()
        pytest.skip("no O_DIRECT here")
    monkeypatch.setattr(os, "pwrite", refusing_together)

    def job(begin: int) -> Callable[[], None]:
        return lambda: file.write(memory[begin : begin + ALIGNMENT], begin)

    run_bounded([job(page * ALIGNMENT) for page in range(4)], workers=4)
    file.finish(len(data))
    file.close()
    assert sorted(first_tries) == [0, ALIGNMENT, 2 * ALIGNMENT, 3 * ALIGNMENT]
    assert not file.direct
    assert (tmp_path / "file").read_bytes() == data


def test_an_invalid_buffered_write_is_an_error_not_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refusing(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        raise OSError(errno.EINVAL, "never")

    file = new_output(tmp_path / "file", expected_bytes=0)
    expected_calls = 2 if file.direct else 1
    monkeypatch.setattr(os, "pwrite", refusing)
    with pytest.raises(StorageError, match="cannot write") as caught:
        file.write(aligned(ALIGNMENT), 0)
    file.abandon()
    assert caught.value.errno == errno.EINVAL
    assert len(calls) == expected_calls


@pytest.mark.parametrize(("piece", "stays_direct"), [(ALIGNMENT, True), (1000, False)])
def test_short_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, stays_direct: bool) -> None:
    write = os.pwrite
    calls = []

    def short(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        is_direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        assert not is_direct or (offset | len(data)) % ALIGNMENT == 0
        if piece % ALIGNMENT and is_direct:
            # The kernel would refuse the odd length: the whole page is written, less is admitted.
            write(descriptor, data[:ALIGNMENT], offset)
            return piece
        return write(descriptor, data[:piece], offset)

    data = os.urandom(ALIGNMENT * 3)
    file = new_output(tmp_path / "file", expected_bytes=len(data))
    was_direct = file.direct
    monkeypatch.setattr(os, "pwrite", short)
    file.write(aligned(len(data), data), 0)
    monkeypatch.undo()
    file.finish(len(data))
    file.close()
    assert calls == list(range(0, len(data), piece))
    assert file.direct == (was_direct and stays_direct)
    assert (tmp_path / "file").read_bytes() == data


def test_a_write_that_takes_nothing_is_an_error_not_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = new_output(tmp_path / "file", expected_bytes=0)
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: 0)
    with pytest.raises(StorageError) as caught:
        file.write(aligned(ALIGNMENT), 0)
    file.abandon()
    assert caught.value.errno == errno.EIO


def test_buffered_writes_start_writeback_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advised = []
    monkeypatch.setattr("holdfast._io.direct._O_DIRECT", 0)
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: advised.append(arguments[1:]))
    write_file(tmp_path / "file", b"x" * ALIGNMENT)
    assert advised == [(0, ALIGNMENT, os.POSIX_FADV_DONTNEED)]


def test_direct_writes_need_no_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advised = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: advised.append(arguments))
    file = write_file(tmp_path / "file", b"x" * ALIGNMENT)
    assert advised == [] or not file.direct


@pytest.mark.parametrize("name", ["posix_fallocate", "posix_fadvise"])
def test_missing_functions_of_the_system_are_done_without(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr("holdfast._io.direct._O_DIRECT", 0)
    write_file(directory / "file", b"abc" * 3000)
    assert (directory / "file").read_bytes() == b"abc" * 3000


def test_a_refused_advice_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def refusing(*arguments: int) -> None:
        refused.append(arguments)
        raise OSError(errno.ESPIPE, "no advice")

    monkeypatch.setattr("holdfast._io.direct._O_DIRECT", 0)
    monkeypatch.setattr(os, "posix_fadvise", refusing)
    write_file(tmp_path / "file", b"abc")
    assert len(refused) == 1
    assert (tmp_path / "file").read_bytes() == b"abc"


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_room_that_cannot_be_reserved_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    asked = []

    def refusing(descriptor: int, offset: int, size: int) -> None:
        asked.append((offset, size))
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refusing)
    write_file(tmp_path / "file", b"abc")
    assert asked == [(0, 3)]
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_a_full_disk_is_noticed_at_creation_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = open_files()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"cannot reserve 12345 bytes for .*file.*: No space left") as caught:
        new_output(tmp_path / "file", expected_bytes=12345)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []
    assert open_files() == before


def test_a_full_disk_is_reported_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = new_output(tmp_path / "file", expected_bytes=0)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="cannot write") as caught:
        file.write(aligned(ALIGNMENT), 0)
    file.abandon()
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


def try_lock(path: Path) -> bool:
    """Whether someone else, who opens the file anew, gets its lock."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_the_lock_is_held_until_close(directory: Path) -> None:
    file = new_output(directory / "file", expected_bytes=0)
    assert not try_lock(directory / "file")
    file.finish(0)
    assert not try_lock(directory / "file")
    file.close()
    assert try_lock(directory / "file")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    refused = []

    def refusing(descriptor: int, operation: int) -> None:
        refused.append(operation)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refusing)
    write_file(tmp_path / "file", b"abc")
    assert len(refused) == 1
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_a_file_swept_away_before_its_lock_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: os.unlink(tmp_path / "file"))
    before = open_files()
    with pytest.raises(StorageError, match="removed while being created"):
        new_output(tmp_path / "file", expected_bytes=0)
    assert open_files() == before


def test_a_file_swept_away_before_its_lock_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, swept = fcntl.flock, []

    def sweeping_once(descriptor: int, operation: int) -> None:
        if not swept:
            swept.append(os.fstat(descriptor).st_ino)
            os.unlink(tmp_path / "file")
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", sweeping_once)
    write_file(tmp_path / "file", b"abc")
    assert len(swept) == 1
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_a_sweep_that_looks_at_a_new_file_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = fcntl.flock, []

    def held_at_first(descriptor: int, operation: int) -> None:
        if len(refused) < 3:
            refused.append(operation)
            raise BlockingIOError(errno.EWOULDBLOCK, "held")
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", held_at_first)
    file = new_output(tmp_path / "file", expected_bytes=0)
    assert len(refused) == 3
    assert not try_lock(tmp_path / "file")
    file.close()


def test_a_file_that_nobody_closes_is_closed_when_it_is_forgotten(tmp_path: Path) -> None:
    before = open_files()
    file = new_output(tmp_path / "file", expected_bytes=0)
    assert open_files() != before
    del file
    assert open_files() == before
    assert try_lock(tmp_path / "file")


def test_a_lock_that_someone_else_holds_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(descriptor: int, operation: int) -> None:
        raise BlockingIOError(errno.EWOULDBLOCK, "held")

    monkeypatch.setattr(fcntl, "flock", held)
    monkeypatch.setattr("holdfast._io.locks._WAIT_S", 0.02)
    with pytest.raises(StorageError, match="cannot lock"):
        new_output(tmp_path / "file", expected_bytes=0)
    assert os.listdir(tmp_path) == []


def test_an_fsync_that_fails_once_is_raised_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync
    calls = []

    def failing_once(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(errno.EIO, "lost")
        fsync(descriptor)

    file = new_output(tmp_path / "file", expected_bytes=0)
    monkeypatch.setattr(os, "fsync", failing_once)
    with pytest.raises(StorageError, match="cannot sync") as caught:
        file.finish(0)
    file.abandon()
    assert caught.value.errno == errno.EIO
    assert len(calls) == 1


def test_a_truncation_that_fails_is_reported(tmp_path: Path) -> None:
    file = new_output(tmp_path / "file", expected_bytes=0)
    with pytest.raises(StorageError, match="cannot truncate"):
        file.finish(-1)
    file.abandon()


def test_an_error_at_close_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = new_output(tmp_path / "file", expected_bytes=0)
    close = os.close

    def failing(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(os, "close", failing)
    with pytest.raises(StorageError, match="cannot close"):
        file.close()
    file.close()


def test_an_abandoned_file_is_gone(directory: Path) -> None:
    before = open_files()
    file = new_output(directory / "file", expected_bytes=1 << 20)
    file.write(aligned(ALIGNMENT), 0)
    file.abandon()
    file.abandon()
    assert os.listdir(directory) == []
    assert open_files() == before


def test_abandoning_a_file_that_is_gone_already_is_fine(tmp_path: Path) -> None:
    before = open_files()
    file = new_output(tmp_path / "file", expected_bytes=0)
    os.unlink(tmp_path / "file")
    file.abandon()
    assert open_files() == before


def test_an_abandoned_file_is_closed_even_if_it_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(path: str) -> None:
        raise OSError(errno.EROFS, "read-only")

    before = open_files()
    file = new_output(tmp_path / "file", expected_bytes=0)
    monkeypatch.setattr(os, "unlink", refusing)
    with pytest.raises(StorageError, match="cannot remove"):
        file.abandon()
    assert open_files() == before
