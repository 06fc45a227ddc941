"""FileSystemReader on damaged checkpoints of torch's format: what is wrong is found and named, nothing is guessed."""

from __future__ import annotations

import math
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.errors import CorruptError, NotACheckpointError, NotFoundError
from holdfast.filesystem import FileSystemReader


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


def drop_from_cache(path: Path) -> None:
    for file in path.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def place_of(path: Path, key: str) -> tuple[Path, int, int]:
    """File, offset and length of the item of ``key``."""
    storage_data = FileSystemReader(path).read_metadata().storage_data
    (place,) = [place for index, place in storage_data.items() if index.fqn == key]
    return path / place.relative_path, place.offset, place.length


def overwrite(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    state = {"big": numbered(2_000_000), "small": numbered(5), "step": 1}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def target_of_plain() -> dict[str, Any]:
    return {"big": torch.zeros(2_000_000), "small": torch.zeros(5), "step": None}


@pytest.mark.parametrize("at", [0, 3_000_000, 7_999_999])
def test_a_flipped_bit_of_a_large_tensor_is_found(plain: Path, at: int) -> None:
    file, offset, length = place_of(plain, "big")
    data = file.read_bytes()[offset : offset + length]
    begin = offset + data.index(numbered(2_000_000).numpy().tobytes()[:64])
    overwrite(file, begin + at, bytes([file.read_bytes()[begin + at] ^ 4]))
    with pytest.raises(CorruptError, match="'big'") as caught:
        holdfast.load(target_of_plain(), storage_reader=FileSystemReader(plain, verify=True))
    assert caught.value.key == "big"
    assert caught.value.span == (begin, begin + 8_000_000)
    drop_from_cache(plain)
    with pytest.raises(CorruptError, match="'big'"):
        holdfast.load(target_of_plain(), storage_reader=FileSystemReader(plain, verify=True))
    holdfast.load(target_of_plain(), storage_reader=FileSystemReader(plain, verify=False))


def test_a_flipped_bit_of_a_small_tensor_is_found(plain: Path) -> None:
    file, offset, length = place_of(plain, "small")
    begin = offset + file.read_bytes()[offset : offset + length].index(numbered(5).numpy().tobytes())
    overwrite(file, begin + 4, b"\x01")
    with pytest.raises(CorruptError, match="'small'"):
        holdfast.load(target_of_plain(), storage_reader=FileSystemReader(plain))
    holdfast.load(target_of_plain(), storage_reader=FileSystemReader(plain, verify=False))


@pytest.mark.parametrize("key", ["big", "small", "step"])
def test_a_broken_archive_is_named(plain: Path, key: str) -> None:
    file, offset, length = place_of(plain, key)
    overwrite(file, offset + length - 200, b"\x00" * 150)
    with pytest.raises(CorruptError, match=f"'{key}'"):
        holdfast.load(target_of_plain(), storage_reader=FileSystemReader(plain))


@pytest.mark.parametrize("is_cold", [False, True])
def test_truncated_and_missing_files(plain: Path, is_cold: bool) -> None:
    file, _, _ = place_of(plain, "big")
    os.truncate(file, file.stat().st_size - 10)
    if is_cold:
        drop_from_cache(plain)
    with pytest.raises(CorruptError, match="truncated"):
        holdfast.load(target_of_plain(), storage_reader=FileSystemReader(plain))
    file.unlink()
    with pytest.raises(CorruptError, match="missing"):
        holdfast.load(target_of_plain(), storage_reader=FileSystemReader(plain))


def test_a_link_to_elsewhere_is_not_followed(plain: Path, tmp_path: Path) -> None:
    file, _, _ = place_of(plain, "big")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptError, match="not a regular file"):
        holdfast.load(target_of_plain(), storage_reader=FileSystemReader(plain))


def rewrite_metadata(path: Path, change: Any) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_chunk_without_a_place_and_one_of_another_size(plain: Path) -> None:
    def other_size(metadata: Any) -> None:
        for key in ("big", "small"):
            stored = metadata.state_dict_metadata[key]
            stored.size = stored.chunks[0].sizes = torch.Size([stored.size[0] + 1])

    rewrite_metadata(plain, other_size)
    for key, size in (("big", 2_000_001), ("small", 6)):
        with pytest.raises(CorruptError, match=f"of '{key}'.*fewer than its metadata says"):
            holdfast.load({key: torch.zeros(size)}, storage_reader=FileSystemReader(plain))
    rewrite_metadata(plain, lambda metadata: metadata.storage_data.clear())
    with pytest.raises(CorruptError, match="does not say where 'step' is stored"):
        holdfast.load({"step": None}, storage_reader=FileSystemReader(plain))


def test_chunks_that_do_not_tile_are_refused_before_anything_is_read(plain: Path) -> None:
    def shrink(metadata: Any) -> None:
        metadata.state_dict_metadata["big"].chunks[0].sizes = torch.Size([1_999_999])

    rewrite_metadata(plain, shrink)
    for attempt in (
        lambda: holdfast.open(plain),
        lambda: holdfast.load(target_of_plain(), storage_reader=FileSystemReader(plain)),
    ):
        with pytest.raises(CorruptError, match="'big' do not make up"):
            attempt()


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such directory"):
        FileSystemReader(tmp_path / "none").read_metadata()
    for name in ("", "__0_0.distcp", ".metadata-0123.tmp", "__0.metadata-0123.tmp", ".metadata.tmp"):
        (tmp_path / name).exists() or (tmp_path / name).touch()
        with pytest.raises(NotFoundError, match="no finished checkpoint") as caught:
            FileSystemReader(tmp_path).read_metadata()
        assert type(caught.value) is NotFoundError
    for other in ("notes.txt", "notes.txt/below"):
        (tmp_path / "notes.txt").touch()
        with pytest.raises(NotFoundError, match=r"no \.metadata|no such directory"):
            FileSystemReader(tmp_path / other).read_metadata()
    with pytest.raises(NotACheckpointError, match=r"no \.metadata"):
        FileSystemReader(tmp_path).read_metadata()
    (tmp_path / ".metadata").mkdir()
    with pytest.raises(CorruptError, match="not a regular file"):
        FileSystemReader(tmp_path).read_metadata()
