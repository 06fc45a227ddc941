"""Data files as the packer writes them: header, chunks one after the other, digests of what was written."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import holdfast
from holdfast._io.direct import ALIGNMENT
from holdfast._native.index import decode_header, file_digest, header_entry_bytes
from holdfast._native.packer import Chunk, DataFile, Lane, Packer, Slabs
from holdfast._native.report import WrittenFile
from holdfast._state.tensor_bytes import Buffer
from holdfast._values.digest import digest, to_hex

SMALL_BLOCK = 10_000
SMALL_SLAB = 64 << 10


class BytesSource:
    """Bytes that count how often each of them was taken."""

    def __init__(self, data: bytes) -> None:
        self.nbytes = len(data)
        self.taken = np.zeros(len(data), dtype=np.int64)
        self._data = np.frombuffer(data, dtype=np.uint8)

    def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        self.taken[start:stop] += 1
        buffer.tensor[at : at + stop - start] = torch.from_numpy(self._data[start:stop].copy())


class ChangingSource(BytesSource):
    """Memory that someone writes to all the time: no two copies of it are the same."""

    copies = 0

    def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        self.copies += 1
        buffer.tensor[at : at + stop - start] = self.copies % 251


class FailingSource(BytesSource):
    def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        raise RuntimeError("the device is gone")


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and jobs so small that little data makes many of them."""
    monkeypatch.setattr("holdfast._native.packer.BLOCK_BYTES", SMALL_BLOCK)
    monkeypatch.setattr("holdfast._native.packer.SLAB_BYTES", SMALL_SLAB)


def chunk_of(name: str, source: BytesSource) -> Chunk:
    shape = (source.nbytes,)
    return Chunk(name=name, dtype="U8", shape=shape, source=source, header_bytes=header_entry_bytes(name, shape))


def files_in(directory: Path, *, header_bytes: int) -> Callable[[int, int], DataFile]:
    def open_file(number: int, start: int) -> DataFile:
        name = f"data-{number}.safetensors"
        return DataFile(str(directory / name), name, header_bytes=header_bytes, expected_bytes=1 << 20)

    return open_file


def write(
    directory: Path, sources: Sequence[BytesSource], *, header_bytes: int = 1 << 16
) -> tuple[Packer, list[WrittenFile]]:
    packer = Packer()
    chunks = [chunk_of(f"chunk {number}", source) for number, source in enumerate(sources)]
    files = packer.write([Lane(0, chunks)], files_in(directory, header_bytes=header_bytes))
    packer.close()
    return packer, files


def blocks_of(data: bytes) -> list[int]:
    return [digest(data[start : start + SMALL_BLOCK]) for start in range(0, len(data), SMALL_BLOCK)]


def random_sizes(seed: int) -> list[int]:
    generator = random.Random(seed)
    edges = [0, 1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1, SMALL_BLOCK, SMALL_SLAB, SMALL_SLAB - 1, 3 * SMALL_SLAB + 7]
    return [generator.choice(edges) if generator.random() < 0.5 else generator.randrange(30_000) for _ in range(40)]


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("seed", range(8))
def test_a_file_has_its_header_and_then_the_chunks_one_after_the_other(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    contents = [generator.randbytes(size) for size in random_sizes(seed)]
    packer, (file,) = write(tmp_path, [BytesSource(content) for content in contents])
    data = (tmp_path / file.name).read_bytes()
    assert len(data) == file.bytes
    assert data[file.header :] == b"".join(contents)
    assert packer.digests == [block for content in contents for block in blocks_of(content)]
    position = file.header
    for place, content in zip(packer.placed, contents, strict=True):
        assert (place.file, place.offset) == (0, position)
        position += len(content)
    entries = decode_header(data[: file.header])
    assert [(entry.name, entry.end - entry.begin) for entry in entries] == [
        (f"chunk {number}", len(content)) for number, content in enumerate(contents)
    ]
    assert to_hex(file.digest) == file_digest(data[: file.header], np.array(packer.digests, dtype=np.uint64))


@pytest.mark.usefixtures("small_slabs")
def test_a_full_header_begins_another_file(tmp_path: Path) -> None:
    contents = [bytes([number]) * 1000 for number in range(200)]
    packer, files = write(tmp_path, [BytesSource(content) for content in contents], header_bytes=ALIGNMENT)
    assert len(files) >= 3
    assert sorted(os.listdir(tmp_path)) == sorted(file.name for file in files)
    stored = []
    for file in files:
        assert file.header == ALIGNMENT
        with safe_open(tmp_path / file.name, framework="np") as opened:
            stored += [opened.get_tensor(entry.name).tobytes() for entry in decode_header(header_of(tmp_path, file))]
    assert stored == contents
    assert [place.file for place in packer.placed] == sorted(place.file for place in packer.placed)
    bounds = np.searchsorted([place.file for place in packer.placed], range(len(files) + 1))
    for number, file in enumerate(files):
        digests = np.array(packer.digests[bounds[number] : bounds[number + 1]], dtype=np.uint64)
        assert to_hex(file.digest) == file_digest(header_of(tmp_path, file), digests)


def header_of(directory: Path, file: WrittenFile) -> bytes:
    return (directory / file.name).read_bytes()[: file.header]


def test_no_chunks_make_no_file(tmp_path: Path) -> None:
    packer, files = write(tmp_path, [])
    assert files == []
    assert packer.digests == []
    assert os.listdir(tmp_path) == []


def test_empty_chunks_make_a_file_that_is_all_header(tmp_path: Path) -> None:
    packer, (file,) = write(tmp_path, [BytesSource(b""), BytesSource(b"")])
    assert file.bytes == file.header == (tmp_path / file.name).stat().st_size
    assert packer.digests == []
    with safe_open(tmp_path / file.name, framework="np") as opened:
        assert sorted(opened.keys()) == ["chunk 0", "chunk 1"]


@pytest.mark.usefixtures("small_slabs")
def test_only_bytes_on_a_page_that_two_jobs_share_are_taken_twice(tmp_path: Path) -> None:
    source = BytesSource(random.Random(1).randbytes(10 * SMALL_SLAB + 123))
    write(tmp_path, [source])
    assert source.taken.min() == 1
    assert source.taken.max() <= 2
    assert int((source.taken == 2).sum()) < ALIGNMENT * 15


@pytest.mark.usefixtures("small_slabs")
def test_digests_are_of_the_bytes_on_disk_even_where_memory_changes_meanwhile(tmp_path: Path) -> None:
    """Who trains on during a save gets a mixture of values, but not a checkpoint that calls itself damaged."""
    packer, (file,) = write(tmp_path, [ChangingSource(bytes(5 * SMALL_SLAB + 77))])
    data = (tmp_path / file.name).read_bytes()
    assert packer.digests == blocks_of(data[file.header :])


def test_an_error_of_a_source_is_raised_and_abandon_removes_the_files(tmp_path: Path) -> None:
    packer = Packer()
    sources: list[BytesSource] = [BytesSource(bytes(1000)) for _ in range(60)]
    sources[50] = FailingSource(bytes(1000))
    chunks = (chunk_of(f"chunk {number}", source) for number, source in enumerate(sources))
    with pytest.raises(RuntimeError, match="the device is gone"):
        packer.write([Lane(0, chunks)], files_in(tmp_path, header_bytes=ALIGNMENT))
    assert len(os.listdir(tmp_path)) >= 2
    packer.abandon()
    assert os.listdir(tmp_path) == []
    packer.abandon()


def test_an_error_of_the_chunks_is_raised_and_abandon_removes_the_files(tmp_path: Path) -> None:
    packer = Packer()

    def chunks() -> Iterator[Chunk]:
        yield chunk_of("good", BytesSource(bytes(1000)))
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        packer.write([Lane(0, chunks())], files_in(tmp_path, header_bytes=ALIGNMENT))
    packer.abandon()
    assert os.listdir(tmp_path) == []


def test_a_header_that_outgrows_its_room_does_not_reach_into_the_data(tmp_path: Path) -> None:
    """A file takes any first chunk, also one whose entry is longer than was planned."""
    source = BytesSource(b"\xab" * 10_000)
    packer = Packer()
    try:
        (file,) = packer.write([Lane(0, [chunk_of("n" * 5000, source)])], files_in(tmp_path, header_bytes=16))
    except holdfast.CheckpointError:
        packer.abandon()
        return
    packer.close()
    assert (tmp_path / file.name).read_bytes()[file.header :] == b"\xab" * 10_000


def test_a_planner_that_gives_more_dimensions_than_planned_is_saved_right_or_refused(tmp_path: Path) -> None:
    class Unfolding(holdfast.DefaultSavePlanner):
        def resolve_data(self, write_item: holdfast.WriteItem) -> torch.Tensor:
            tensor = super().resolve_data(write_item)
            assert isinstance(tensor, torch.Tensor)
            return tensor.reshape(*[1] * 60, -1)

    key = "k" * (4096 - 8 - 170)
    try:
        holdfast.save({key: torch.arange(5000)}, tmp_path / "checkpoint", planner=Unfolding())
    except holdfast.CheckpointError:
        assert not (tmp_path / "checkpoint" / "manifest.json").exists()
        return
    assert holdfast.load(tmp_path / "checkpoint")[key].flatten().tolist() == list(range(5000))


def test_slabs_of_full_size(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    state = {
        "a": torch.randint(0, 256, (17_000_001,), dtype=torch.uint8, generator=generator),
        "b": torch.randint(0, 256, (3000, 6001), dtype=torch.uint8, generator=generator).T,
        "c": torch.randint(0, 256, (16 << 20,), dtype=torch.uint8, generator=generator),
    }
    path = tmp_path / "checkpoint"
    holdfast.save(state, path)
    (file,) = path.glob("data-*")
    with safe_open(file, framework="pt") as opened:
        assert all(torch.equal(opened.get_tensor(key), tensor) for key, tensor in state.items())
    loaded = holdfast.load(path)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("slabs", [None, 2, 5])
@pytest.mark.parametrize(("count", "header_bytes"), [(2, 1 << 16), (4, 1 << 16), (3, ALIGNMENT)])
def test_lanes_are_written_to_files_of_their_own(
    tmp_path: Path, slabs: int | None, count: int, header_bytes: int
) -> None:
    generator = random.Random(count)
    contents = [generator.randbytes(size) for size in random_sizes(count)]
    names = [f"chunk {number} of {'long ' * 120}names" for number in range(len(contents))]
    chunks = [chunk_of(name, BytesSource(content)) for name, content in zip(names, contents, strict=True)]
    bounds = [len(chunks) * lane // count for lane in range(count + 1)]
    opened: list[tuple[int, int]] = []

    def open_file(number: int, start: int) -> DataFile:
        opened.append((number, start))
        return files_in(tmp_path, header_bytes=header_bytes)(number, start)

    packer = Packer(slabs=None if slabs is None else Slabs(slabs, SMALL_SLAB))
    files = packer.write([Lane(first, chunks[first:stop]) for first, stop in pairwise(bounds)], open_file)
    packer.close()
    assert [number for number, _ in opened] == list(range(len(files)))
    assert [start for _, start in opened[:count]] == bounds[:-1]
    assert (len(files) > count) is (header_bytes == ALIGNMENT)
    assert packer.digests == [block for content in contents for block in blocks_of(content)]
    assert [place.file for place in packer.placed] == sorted(place.file for place in packer.placed)
    digests = iter(packer.digests)
    for number, file in enumerate(files):
        data = (tmp_path / file.name).read_bytes()
        mine = [content for place, content in zip(packer.placed, contents, strict=True) if place.file == number]
        assert data[file.header :] == b"".join(mine)
        blocks = [next(digests) for content in mine for _ in blocks_of(content)]
        assert to_hex(file.digest) == file_digest(data[: file.header], np.array(blocks, dtype=np.uint64))


@pytest.mark.usefixtures("small_slabs")
def test_an_error_in_one_lane_ends_all(tmp_path: Path) -> None:
    packer = Packer(slabs=Slabs(2, SMALL_SLAB))
    sources: list[BytesSource] = [BytesSource(bytes(50_000)) for _ in range(60)]
    sources[40] = FailingSource(bytes(50_000))
    chunks = [chunk_of(f"chunk {number}", source) for number, source in enumerate(sources)]
    with pytest.raises(RuntimeError, match="the device is gone"):
        packer.write([Lane(0, chunks[:30]), Lane(30, chunks[30:])], files_in(tmp_path, header_bytes=1 << 16))
    assert len(os.listdir(tmp_path)) == 2
    packer.abandon()
    assert os.listdir(tmp_path) == []
