"""Chunks put in order, and files laid out in memory that are those the packer writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._io import mapping as image_files
from holdfast._io.mapping import ImageFiles
from holdfast._native import file_layout as image_module
from holdfast._native import packer
from holdfast._native.file_layout import Image, pack_order
from holdfast._native.index import header_entry_bytes
from holdfast._native.packer import Chunk, DataFile, Lane, Packer
from holdfast._staging import copies
from holdfast._staging.copies import HostCopier
from holdfast._staging.memory import Region
from holdfast._state.tensor_bytes import MemorySource
from holdfast._values.deadline import Progress
from holdfast.errors import StorageError

# --- the order of chunks ----------------------------------------------------------------------------------------------


def test_page_multiples_go_first_and_order_is_kept() -> None:
    order = pack_order(np.array([5, 4096, 0, 8192, 4097, 4095, 4096]), 4096)
    assert order.tolist() == [1, 2, 3, 6, 0, 4, 5]
    assert order.dtype == np.int64


def test_nothing_to_pack() -> None:
    assert pack_order(np.empty(0, dtype=np.int64), 4096).tolist() == []


@given(st.lists(st.integers(0, 40), max_size=30), st.sampled_from([1, 4, 16]))
def test_every_page_multiple_starts_on_a_page(nbytes: list[int], page: int) -> None:
    order = pack_order(np.array(nbytes, dtype=np.int64), page).tolist()
    assert sorted(order) == list(range(len(nbytes)))
    offset = 0
    for index in order:
        if nbytes[index] % page == 0:
            assert offset % page == 0
        offset += nbytes[index]


@given(st.lists(st.integers(0, 40), max_size=30), st.sampled_from([1, 4, 16]))
def test_order_is_kept_among_multiples_and_among_the_rest(nbytes: list[int], page: int) -> None:
    order = pack_order(np.array(nbytes, dtype=np.int64), page).tolist()
    aligned = [index for index in order if nbytes[index] % page == 0]
    rest = [index for index in order if nbytes[index] % page]
    assert aligned == sorted(aligned)
    assert rest == sorted(rest)
    assert order == aligned + rest


# --- images: same places, same bytes, same digests --------------------------------------------------------------------


SIZES = [8192, 4096, 12288, 1 << 20, 0, 5000, 4095, 1, 3_000_001, 17, 0, 4096]


def chunks_of(sizes: list[int]) -> list[Chunk]:
    generator = np.random.default_rng(0)
    chunks = []
    for number, size in enumerate(sizes):
        data = generator.integers(0, 256, size, dtype=np.uint8)
        source = MemorySource(data, data.ctypes.data, size)
        name = f"chunk {number} of {'long ' * 120}names"
        chunks.append(Chunk(name, "U8", (size,), source, header_entry_bytes(name, (size,))))
    return chunks


def files_in(directory: Path, header_bytes: int) -> Callable[[int, int], DataFile]:
    directory.mkdir()

    def open_file(number: int, start: int) -> DataFile:
        name = f"data-{number}.safetensors"
        return DataFile(str(directory / name), name, header_bytes=header_bytes, expected_bytes=1 << 20)

    return open_file


@pytest.mark.parametrize("header_bytes", [400, 1 << 16], ids=["many files", "one file"])
@pytest.mark.parametrize("is_small", [False, True], ids=["real blocks", "small blocks"])
@pytest.mark.parametrize("is_hashed", [False, True], ids=["hashed when written", "hashed when copied"])
def test_the_image_is_what_the_packer_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header_bytes: int, is_small: bool, is_hashed: bool
) -> None:
    if is_small:
        for module in (image_module, packer, copies):
            monkeypatch.setattr(module, "BLOCK_BYTES", 3000)
        monkeypatch.setattr(copies, "_JOB_BYTES", 6000)
        monkeypatch.setattr(packer, "SLAB_BYTES", 3 * 4096)
        monkeypatch.setattr(image_files, "_JOB_BYTES", 2 * 4096)
    chunks = chunks_of(SIZES)
    packed = Packer()
    expected = packed.write([Lane(0, chunks)], files_in(tmp_path / "packed", header_bytes))
    packed.close()

    image = Image(files_in(tmp_path / "image", header_bytes), chunks)
    assert list((tmp_path / "image").iterdir()) == []
    assert image.data_bytes == sum(SIZES)
    region = Region(image.nbytes, is_shared=False)
    region.tensor.fill_(255)
    HostCopier(region, Progress(), image.known if is_hashed else None).copy(image.copies)
    image.fill_frames(region.view)
    progress = Progress()
    output = ImageFiles(progress)
    written = image.written(output.write(image.files, region.view))
    assert progress.done == image.nbytes
    output.close()

    assert written == expected
    assert (len(written) > 1) is (header_bytes < 4096)
    assert image.placed == packed.placed
    assert image.digests == packed.digests
    for file in expected:
        assert (tmp_path / "image" / file.name).read_bytes() == (tmp_path / "packed" / file.name).read_bytes()


def test_files_that_are_given_up_are_gone(tmp_path: Path) -> None:
    image = Image(files_in(tmp_path / "image", 1 << 16), chunks_of([1 << 20] * 40))
    region = Region(image.nbytes, is_shared=False)
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise StorageError("enough")

    output = ImageFiles(Progress(check))
    with pytest.raises(StorageError, match="enough"):
        output.write(image.files, region.view)
    assert len(list((tmp_path / "image").iterdir())) == 1
    output.abandon()
    assert list((tmp_path / "image").iterdir()) == []


def test_digests_are_those_of_the_copy_whatever_becomes_of_the_memory(tmp_path: Path) -> None:
    chunks = chunks_of([5000])
    image = Image(files_in(tmp_path / "image", 4096), chunks)
    region = Region(image.nbytes, is_shared=False)
    HostCopier(region, Progress(), image.known).copy(image.copies)
    (copied,) = image.known.values()
    region.view[image.copies[0].at] ^= 1
    image.fill_frames(region.view)
    output = ImageFiles(Progress())
    image.written(output.write(image.files, region.view))
    output.close()
    assert image.digests == [copied]
