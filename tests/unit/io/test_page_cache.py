"""Whether a file is in the page cache, as a file that is read says it."""

from __future__ import annotations

import errno
import mmap
import os
import random
import tempfile
from pathlib import Path

import pytest

from holdfast._io import page_cache
from holdfast._io.direct import ALIGNMENT, InputFile


def make_input(path: Path, size: int) -> None:
    path.write_bytes(os.urandom(size))


def drop_from_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def knows_the_cache(path: Path) -> bool:
    """Whether the file system answers reads that must not wait."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except (OSError, AttributeError):
        return False
    finally:
        os.close(descriptor)
    return True


def test_an_empty_file_counts_as_cached(directory: Path) -> None:
    (directory / "file").write_bytes(b"")
    with InputFile.open(directory / "file") as file:
        assert file.is_cached()


@pytest.mark.parametrize("size", [1, 3 * ALIGNMENT, 1 << 20])
def test_a_file_just_read_is_cached(tmp_path: Path, size: int) -> None:
    make_input(tmp_path / "file", size)
    if not knows_the_cache(tmp_path / "file"):
        pytest.skip("this file system does not tell")
    (tmp_path / "file").read_bytes()
    with InputFile.open(tmp_path / "file") as file:
        assert file.is_cached()
        assert file.bytes_read == 0


def test_a_dropped_file_is_not_cached_and_asking_does_not_bring_it_in(tmp_path: Path) -> None:
    make_input(tmp_path / "file", 8 << 20)
    if not knows_the_cache(tmp_path / "file"):
        pytest.skip("this file system does not tell")
    drop_from_cache(tmp_path / "file")
    with InputFile.open(tmp_path / "file") as file:
        assert [file.is_cached() for _ in range(20)] == [False] * 20


@pytest.mark.parametrize("name", ["RWF_NOWAIT", "preadv"])
def test_where_one_cannot_ask_nothing_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make_input(tmp_path / "file", ALIGNMENT)
    monkeypatch.delattr(os, name, raising=False)
    with InputFile.open(tmp_path / "file") as file:
        assert not file.is_cached()


def test_where_reads_that_do_not_wait_are_refused_a_mapping_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_input(tmp_path / "file", 8 << 20)
    asked = []

    def refusing(descriptor: int, views: list[bytearray], offset: int, flags: int) -> int:
        asked.append(flags)
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "preadv", refusing)
    with InputFile.open(tmp_path / "file") as file:
        assert file.is_cached()
        drop_from_cache(tmp_path / "file")
        assert [file.is_cached() for _ in range(20)] == [False] * 20
    assert set(asked) == {os.RWF_NOWAIT}


def test_what_cannot_be_mapped_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_input(tmp_path / "file", ALIGNMENT)

    def refusing(*_: object, **__: object) -> None:
        raise OSError(errno.ENODEV, "not here")

    monkeypatch.setattr(os, "preadv", refusing)
    monkeypatch.setattr(mmap, "mmap", refusing)
    with InputFile.open(tmp_path / "file") as file:
        assert not file.is_cached()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no tmpfs at /dev/shm")
def test_a_file_in_memory_is_cached() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as made:
        made.write(os.urandom(1 << 20))
        made.flush()
        with InputFile.open(made.name) as file:
            assert file.is_cached()


def test_readahead_is_off_while_asking_and_on_again_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_input(tmp_path / "file", ALIGNMENT * 100)
    events: list[object] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: events.append(arguments[3]))

    def present(descriptor: int, views: list[bytearray], offset: int, flags: int) -> int:
        events.append("read")
        return 1

    monkeypatch.setattr(os, "preadv", present)
    with InputFile.open(tmp_path / "file") as file:
        assert file.is_cached()
    assert events == [os.POSIX_FADV_RANDOM, *["read"] * 5, os.POSIX_FADV_NORMAL]


@pytest.mark.parametrize("size", [1, 4096, 4097, 3 * 4096, 100 * 4096, (1 << 40) + 1])
def test_probes_are_few_distinct_pages_of_the_file(size: int) -> None:
    for _ in range(50):
        offsets = page_cache._probe_offsets(size)
        assert 1 <= len(offsets) <= 5
        assert sorted(set(offsets)) == offsets
        assert all(offset % mmap.PAGESIZE == 0 and 0 <= offset < size for offset in offsets)


def test_probing_leaves_the_random_numbers_of_the_program_alone() -> None:
    before = random.getstate()
    page_cache._probe_offsets(1 << 30)
    assert random.getstate() == before
