"""Files read past the page cache where that can be, and through it where it holds them."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from holdfast._io.direct import ALIGNMENT, InputFile, LocalFiles
from holdfast.errors import CorruptError, InternalError, StorageError

PAGES = 8


def aligned(size: int, data: bytes = b"") -> memoryview:
    """``size`` bytes of page-aligned memory that begin with ``data``."""
    view = memoryview(mmap.mmap(-1, size))
    view[: len(data)] = data
    return view


def open_files() -> list[str]:
    names = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sorted(os.readlink(name) for name in names if os.path.lexists(name))


def make_input(path: Path, size: int) -> bytes:
    data = os.urandom(size)
    path.write_bytes(data)
    return data


@pytest.mark.parametrize("size", [0, 1, ALIGNMENT, ALIGNMENT * PAGES + 5])
def test_both_ways_of_reading_see_the_same_bytes(directory: Path, size: int) -> None:
    data = make_input(directory / "file", size)
    padded = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
    with InputFile.open(directory / "file") as file:
        assert file.size == size
        assert file.path == str(directory / "file")
        buffered = memoryview(bytearray(size))
        file.read_into(buffered, 0)
        past_cache = aligned(padded)
        file.read_direct_into(past_cache, 0)
        assert bytes(buffered) == data
        assert bytes(past_cache[:size]) == data
        assert file.bytes_read == 2 * size


def test_a_range_is_read_exactly(directory: Path) -> None:
    data = make_input(directory / "file", ALIGNMENT * PAGES)
    with InputFile.open(directory / "file") as file:
        view = memoryview(bytearray(777))
        file.read_into(view, 5001)
        assert bytes(view) == data[5001:5778]
        assert file.bytes_read == 777
        page = aligned(ALIGNMENT)
        file.read_direct_into(page, ALIGNMENT * 3)
        assert bytes(page) == data[ALIGNMENT * 3 : ALIGNMENT * 4]
        assert file.bytes_read == 777 + ALIGNMENT


def test_the_aligned_end_may_pass_the_end_of_the_file(directory: Path) -> None:
    data = make_input(directory / "file", ALIGNMENT + 10)
    with InputFile.open(directory / "file") as file:
        view = aligned(ALIGNMENT * 4)
        file.read_direct_into(view, ALIGNMENT)
        assert bytes(view[:10]) == data[ALIGNMENT:]
        file.read_direct_into(view, ALIGNMENT * 2)
        assert file.bytes_read == 10


def test_a_view_of_larger_items_is_filled(tmp_path: Path) -> None:
    data = make_input(tmp_path / "file", 80)
    with InputFile.open(tmp_path / "file") as file:
        memory = bytearray(80)
        file.read_into(np.frombuffer(memory, dtype=np.float64).data, 0)
        assert bytes(memory) == data


@pytest.mark.parametrize("way", ["read_into", "read_direct_into"])
def test_a_file_that_shrank_is_truncated(tmp_path: Path, way: str) -> None:
    make_input(tmp_path / "file", ALIGNMENT * 4)
    with InputFile.open(tmp_path / "file") as file:
        os.truncate(tmp_path / "file", ALIGNMENT * 2)
        with pytest.raises(CorruptError, match="is truncated: it ends before byte 16384") as caught:
            getattr(file, way)(aligned(ALIGNMENT * 4), 0)
    assert caught.value.path == str(tmp_path / "file")
    assert caught.value.span == (ALIGNMENT * 2, ALIGNMENT * 4)


def test_reading_past_the_end_is_truncation(directory: Path) -> None:
    make_input(directory / "file", 100)
    with InputFile.open(directory / "file") as file, pytest.raises(CorruptError) as caught:
        file.read_into(memoryview(bytearray(50)), 80)
    assert caught.value.span == (100, 130)


def test_short_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_input(tmp_path / "file", 10_000)
    preadv = os.preadv
    offsets = []

    def short(descriptor: int, views: list[memoryview], offset: int, flags: int = 0) -> int:
        offsets.append(offset)
        return preadv(descriptor, [views[0][:999]], offset, flags)

    monkeypatch.setattr(os, "preadv", short)
    with InputFile.open(tmp_path / "file") as file:
        view = memoryview(bytearray(10_000))
        file.read_into(view, 0)
        assert bytes(view) == data
        assert file.bytes_read == 10_000
    assert offsets == list(range(0, 10_000, 999))


@pytest.mark.parametrize("piece", [ALIGNMENT, 1000])
def test_short_direct_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    data = make_input(tmp_path / "file", ALIGNMENT * 4 + 7)
    preadv = os.preadv
    calls = []

    def short_first(descriptor: int, views: list[memoryview], offset: int, flags: int = 0) -> int:
        calls.append(offset)
        count = preadv(descriptor, views, offset, flags)
        return min(count, piece) if len(calls) == 1 else count

    monkeypatch.setattr(os, "preadv", short_first)
    with InputFile.open(tmp_path / "file") as file:
        view = aligned(ALIGNMENT * 5)
        file.read_direct_into(view, 0)
        assert bytes(view[: len(data)]) == data
        assert file.bytes_read == len(data)
    assert calls == [0, piece]


def refuse_direct_opens(monkeypatch: pytest.MonkeyPatch, code: int) -> list[str]:
    """The paths whose direct open was refused, from now on."""
    open_any = os.open
    refused: list[str] = []

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(code, os.strerror(code))
        return open_any(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    return refused


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_refusal_of_o_direct_at_open_means_buffered_for_good(
    directory: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    data = make_input(directory / "file", ALIGNMENT * 2)
    refused = refuse_direct_opens(monkeypatch, code)
    with InputFile.open(directory / "file") as file:
        view = aligned(ALIGNMENT * 2)
        file.read_direct_into(view[:ALIGNMENT], 0)
        file.read_direct_into(view[ALIGNMENT:], ALIGNMENT)
        assert bytes(view) == data
        assert not file.direct
        assert file.bytes_read == len(data)
    assert len(refused) == 1


def test_a_refusal_at_the_first_direct_read_means_buffered_for_good(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_input(directory / "file", ALIGNMENT * 2 - 9)
    preadv = os.preadv
    refused = []

    def refusing(descriptor: int, views: list[memoryview], offset: int, flags: int = 0) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return preadv(descriptor, views, offset, flags)

    monkeypatch.setattr(os, "preadv", refusing)
    with InputFile.open(directory / "file") as file:
        view = aligned(ALIGNMENT * 2)
        file.read_direct_into(view[:ALIGNMENT], 0)
        file.read_direct_into(view[ALIGNMENT:], ALIGNMENT)
        assert bytes(view[: len(data)]) == data
        assert not file.direct
        assert file.bytes_read == len(data)
    assert refused == [0]


@pytest.mark.parametrize("missing", [("O_DIRECT",), ("preadv",), ("O_DIRECT", "preadv", "RWF_NOWAIT", "posix_fadvise")])
def test_reading_works_without_what_a_system_may_lack(
    directory: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    data = make_input(directory / "file", ALIGNMENT * 2 + 1)
    for name in missing:
        monkeypatch.delattr(os, name, raising=False)
    with InputFile.open(directory / "file") as file:
        view = aligned(ALIGNMENT * 3)
        file.read_direct_into(view, 0)
        assert bytes(view[: len(data)]) == data
        exact = memoryview(bytearray(100))
        file.read_into(exact, 50)
        assert bytes(exact) == data[50:150]
        assert file.bytes_read == len(data) + 100
        file.is_cached()


def test_a_file_whose_name_is_gone_is_still_read(directory: Path) -> None:
    data = make_input(directory / "file", ALIGNMENT)
    with InputFile.open(directory / "file") as file:
        os.unlink(directory / "file")
        view = aligned(ALIGNMENT)
        file.read_direct_into(view, 0)
        assert bytes(view) == data


def test_another_file_under_the_name_is_not_read_instead(directory: Path) -> None:
    data = make_input(directory / "file", ALIGNMENT)
    with InputFile.open(directory / "file") as file:
        make_input(directory / "other", ALIGNMENT)
        os.rename(directory / "other", directory / "file")
        before = open_files()
        view = aligned(ALIGNMENT)
        file.read_direct_into(view, 0)
        assert bytes(view) == data
        assert open_files() == before


def test_a_read_error_keeps_its_errno(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_input(tmp_path / "file", ALIGNMENT)

    def failing(*arguments: object) -> int:
        raise OSError(errno.EIO, "bad sector")

    with InputFile.open(tmp_path / "file") as file:
        monkeypatch.setattr(os, "preadv", failing)
        for read in (file.read_into, file.read_direct_into):
            with pytest.raises(StorageError, match=r"cannot read .*: bad sector") as caught:
                read(aligned(ALIGNMENT), 0)
            assert caught.value.errno == errno.EIO
        assert file.bytes_read == 0


@pytest.mark.parametrize("kind", ["fifo", "link", "directory"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(sys.executable)
    else:
        path.mkdir()
    before = open_files()
    with pytest.raises(CorruptError, match="is not a regular file"):
        InputFile.open(path)
    assert open_files() == before


def test_a_missing_file_keeps_its_errno(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        InputFile.open(tmp_path / "nothing")
    assert caught.value.errno == errno.ENOENT


def test_closing_closes_both_descriptors_once(tmp_path: Path) -> None:
    before = open_files()
    make_input(tmp_path / "file", ALIGNMENT)
    file = InputFile.open(tmp_path / "file")
    file.read_direct_into(aligned(ALIGNMENT), 0)
    assert len(open_files()) == len(before) + 1 + file.direct
    file.close()
    file.close()
    assert open_files() == before


def test_an_error_at_close_is_reported_after_both_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()
    make_input(tmp_path / "file", ALIGNMENT)
    file = InputFile.open(tmp_path / "file")
    file.read_direct_into(aligned(ALIGNMENT), 0)
    expected = 1 + file.direct
    close = os.close
    closed = []

    def failing(descriptor: int) -> None:
        closed.append(descriptor)
        close(descriptor)
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(os, "close", failing)
    with pytest.raises(StorageError, match="cannot close"):
        file.close()
    monkeypatch.undo()
    assert len(closed) == expected
    assert open_files() == before


# --- which files the page cache holds ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_range_is_read_from_its_page_on_and_never_past_the_buffer(tmp_path: Path, is_cached: bool) -> None:
    data = make_input(tmp_path / "file", PAGES * ALIGNMENT)
    view = aligned(2 * ALIGNMENT)
    with InputFile.open(tmp_path / "file") as file:
        start, end = ALIGNMENT + 7, 3 * ALIGNMENT
        base = file.read_range(view, start, end, is_cached=is_cached)
        assert base == ALIGNMENT
        assert bytes(view[start - base : end - base]) == data[start:end]
        with pytest.raises(InternalError, match="larger than its buffer"):
            file.read_range(view, start, end + 1, is_cached=is_cached)


def test_a_file_that_cannot_be_opened_is_not_said_to_be_missing(tmp_path: Path) -> None:
    make_input(tmp_path / "file", 1)
    files = LocalFiles([str(tmp_path / "nothing"), str(tmp_path / "file" / "below")], [1, 1])
    with pytest.raises(CorruptError, match="is missing"), files.lend(0):
        pass
    with pytest.raises(StorageError) as caught, files.lend(1):
        pass
    assert caught.value.errno == errno.ENOTDIR


def test_all_files_are_closed_when_closing_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(tmp_path / name) for name in ("one", "two", "three")]
    files = LocalFiles(paths, [make_input(Path(path), 10) and 10 for path in paths])
    for number in range(len(paths)):
        with files.lend(number):
            pass
    close = InputFile.close

    def close_and_fail(file: InputFile) -> None:
        close(file)
        raise StorageError("cannot close", errno=errno.EIO)

    monkeypatch.setattr(InputFile, "close", close_and_fail)
    with pytest.raises(StorageError, match="cannot close"):
        files.close()
    assert not set(paths) & set(open_files())
