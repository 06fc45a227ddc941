"""Storage that is faster than one core, on a machine that says it has many: the same bytes, the same errors."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._io import direct
from holdfast._io.direct import InputFile

MEMORY = Path("/dev/shm")
MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory."""
    if not direct.lies_in_memory(str(MEMORY)):
        pytest.skip("there is no tmpfs at /dev/shm")
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are worth it from 4 MiB on, so that a test writes little."""
    monkeypatch.setattr("holdfast._native.writer._LEAST_FILE_BYTES", 4 * MIB)
    monkeypatch.setattr(direct, "_ASKED_BYTES", 4 * MIB)


def state() -> dict[str, object]:
    generator = torch.Generator().manual_seed(8)
    sizes = [3 * MIB + 4096 * number + number % 3 for number in range(20)]
    tensors = {
        f"part{number}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        for number, size in enumerate(sizes)
    }
    return {**tensors, "strided": torch.rand(700, 900, generator=generator).T, "text": "t" * 100_000, "step": 7}


def check(path: Path) -> None:
    expected, found = state(), holdfast.load(path)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value
    assert holdfast.verify(path).ok


def data_files(path: Path) -> list[Path]:
    return sorted(path.glob("data-*"))


@pytest.mark.parametrize(("cores", "files"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 4), (64, 4)])
def test_in_memory_a_rank_writes_as_many_files_as_it_has_cores_for(
    memory: Path, monkeypatch: pytest.MonkeyPatch, cores: int, files: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    threads = set(threading.enumerate())
    holdfast.save(state(), memory / "checkpoint")
    assert set(threading.enumerate()) <= threads
    sizes = [path.stat().st_size for path in data_files(memory / "checkpoint")]
    assert len(sizes) == files
    assert max(sizes) - min(sizes) < 8 * MIB
    check(memory / "checkpoint")


def test_statistics_are_of_the_tensors_of_all_files(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    holdfast.save(state(), memory / "checkpoint", options=holdfast.SaveOptions(statistics=True))
    with holdfast.open(memory / "checkpoint") as checkpoint:
        kept = checkpoint.statistics
        assert kept is not None
        for key, value in state().items():
            if isinstance(value, torch.Tensor):
                assert kept[key].sum == pytest.approx(value.double().sum().item()), key
                assert kept[key].max == value.max().item(), key


def test_where_files_do_not_lie_in_memory_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    if direct.lies_in_memory(str(tmp_path)):
        pytest.skip("the folder of the tests is in memory")
    holdfast.save(state(), tmp_path / "checkpoint")
    assert len(data_files(tmp_path / "checkpoint")) == 1
    check(tmp_path / "checkpoint")


def test_small_saves_have_one_file(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    holdfast.save({"a": torch.ones(MIB)}, memory / "checkpoint")
    assert len(data_files(memory / "checkpoint")) == 1


def test_one_large_tensor_has_one_file(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    large = torch.arange(8 * MIB)
    holdfast.save({"large": large, "empty": torch.empty(0)}, memory / "checkpoint")
    assert len(data_files(memory / "checkpoint")) <= 2
    assert torch.equal(holdfast.load(memory / "checkpoint")["large"], large)


def test_room_is_reserved_on_disks_alone(memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if direct.lies_in_memory(str(tmp_path)):
        pytest.skip("the folder of the tests is in memory")
    reserved: list[int] = []
    reserve = os.posix_fallocate

    def noted(descriptor: int, offset: int, nbytes: int) -> None:
        reserved.append(nbytes)
        reserve(descriptor, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", noted)
    holdfast.save(state(), memory / "checkpoint")
    assert reserved == []
    holdfast.save(state(), tmp_path / "checkpoint")
    assert len(reserved) == 1


def test_a_save_that_fails_leaves_none_of_its_files(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    write, written = os.pwrite, []

    def failing(descriptor: int, view: memoryview, offset: int) -> int:
        written.append(offset)
        if len(written) == 7:
            raise OSError(28, "No space left on device")
        return write(descriptor, view, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(holdfast.StorageError, match="No space"):
        holdfast.save(state(), memory / "checkpoint")
    monkeypatch.setattr(os, "pwrite", write)
    assert len(written) >= 7
    assert not (memory / "checkpoint").exists()
    holdfast.save(state(), memory / "checkpoint")
    check(memory / "checkpoint")


@pytest.mark.parametrize("answer", [None, OSError(95, "no such files here"), OSError(28, "no space")])
def test_where_nobody_can_tell_files_count_as_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: OSError | None
) -> None:
    monkeypatch.setattr(direct, "_in_memory", {})
    if answer is None:
        monkeypatch.delattr(os, "O_TMPFILE")
    else:
        real = os.open

        def refusing(path: str, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise answer
            return real(path, flags, mode)

        monkeypatch.setattr(os, "open", refusing)
    assert not direct.lies_in_memory(str(tmp_path))


def test_where_there_is_no_way_past_the_page_cache_files_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_in_memory", {})
    monkeypatch.setattr(direct, "_O_DIRECT", 0)
    assert direct.lies_in_memory(str(tmp_path))
    assert not direct.lies_in_memory(str(tmp_path / "missing"))


@pytest.mark.parametrize("cores", [2, 16])
def test_a_load_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    holdfast.save(state(), tmp_path / "checkpoint")
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(InputFile, "is_cached", lambda self: False)
    threads = set(threading.enumerate())
    check(tmp_path / "checkpoint")
    (file,) = data_files(tmp_path / "checkpoint")
    data = bytearray(file.read_bytes())
    data[40 * MIB] ^= 1
    file.write_bytes(data)
    with pytest.raises(holdfast.CorruptError, match="part"):
        holdfast.load(tmp_path / "checkpoint")
    assert set(threading.enumerate()) <= threads
