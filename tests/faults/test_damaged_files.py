"""Every byte of every file is under a digest: whatever is flipped, cut, grown, lost or exchanged is found and named."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast

PADDING_STEP = 37  # most of a small file's header is blanks, all under one digest: some of them stand for all
SAMPLED_BYTES = 500


def save(state: dict[str, Any], path: Path, attempt: str = "one") -> Path:
    holdfast.save(state, storage_writer=holdfast.NativeWriter(path, attempt=attempt, user_metadata={"run": 7}))
    return path


def small_state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weights": torch.randn(7, 5, generator=generator),
        "nested": [torch.randn(3, generator=generator).to(torch.bfloat16), {"step": 12, "name": "täst"}],
        "flag": torch.tensor(True),
    }


def large_state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "first": torch.randint(0, 256, (3 << 20,), dtype=torch.uint8, generator=generator),
        "second": torch.randn(300, 411, generator=generator).T,
        "text": "x" * 200_000,
    }


def find_file(path: Path, kind: str) -> Path:
    (found,) = (path / name for name in os.listdir(path) if name.startswith(kind))
    return found


def flip(path: Path, position: int, mask: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ mask]))


def is_found_by_verify(path: Path, name: str) -> bool:
    return name in holdfast.verify(path).damaged_files


def header_bytes(file: Path) -> int:
    with open(file, "rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little")


@pytest.mark.parametrize("kind", ["manifest", "index"])
def test_no_byte_of_manifest_and_index_can_change_unnoticed(tmp_path: Path, kind: str) -> None:
    path = save(small_state(), tmp_path / "checkpoint")
    file = find_file(path, kind)
    random_bits = random.Random(1)
    flipped = 0
    for position in range(file.stat().st_size):
        mask = 1 << random_bits.randrange(8)
        flip(file, position, mask)
        with pytest.raises(holdfast.CorruptError) as caught:
            holdfast.load(path)
        assert caught.value.path == str(file)
        assert "\n" not in caught.value.message
        flip(file, position, mask)
        flipped += 1
    assert flipped == file.stat().st_size
    holdfast.load(path)


def test_no_byte_of_a_small_data_file_can_change_unnoticed(tmp_path: Path) -> None:
    path = save(small_state(), tmp_path / "checkpoint")
    file = find_file(path, "data")
    header, size = header_bytes(file), file.stat().st_size
    text = len(file.read_bytes()[:header].rstrip(b" "))
    assert text < header < size
    random_bits = random.Random(2)
    by_load = by_verify = 0
    for position in (*range(text), *range(text, header, PADDING_STEP), *range(header, size)):
        mask = 1 << random_bits.randrange(8)
        flip(file, position, mask)
        if position < header:
            assert is_found_by_verify(path, file.name), f"byte {position} is under no digest"
            by_verify += 1
        else:
            with pytest.raises(holdfast.CorruptError) as caught:
                holdfast.load(path)
            check_named(caught.value, file, position)
            by_load += 1
        flip(file, position, mask)
    assert (by_verify, by_load) == (text + len(range(text, header, PADDING_STEP)), size - header)
    holdfast.load(path)


def check_named(error: holdfast.CorruptError, file: Path, position: int) -> None:
    """Fail unless the error tells the file, the key and a range that has ``position``."""
    assert error.path == str(file)
    assert error.key is not None
    assert repr(error.key) in error.message
    assert error.span is not None
    assert error.span[0] <= position < error.span[1]
    assert "\n" not in error.message


def test_no_byte_of_a_larger_data_file_can_change_unnoticed(tmp_path: Path) -> None:
    path = save(large_state(), tmp_path / "checkpoint")
    file = find_file(path, "data")
    header, size = header_bytes(file), file.stat().st_size
    chosen = random.Random(3)
    edges = [header, size - 1, *(header + (block << 20) + edge for block in (1, 2, 3) for edge in (-1, 0))]
    positions = edges + [chosen.randrange(header, size) for _ in range(SAMPLED_BYTES)]
    for position in positions:
        flip(file, position, 0x10)
        with pytest.raises(holdfast.CorruptError) as caught:
            holdfast.load(path)
        check_named(caught.value, file, position)
        flip(file, position, 0x10)
    holdfast.load(path)


def test_damage_that_nobody_reads_is_nobodys_error(tmp_path: Path) -> None:
    path = save(large_state(), tmp_path / "checkpoint")
    file = find_file(path, "data")
    flip(file, header_bytes(file) + 100, 1)
    with holdfast.open(path) as checkpoint:
        assert torch.equal(checkpoint["first"][2 << 20 :], large_state()["first"][2 << 20 :])
        assert checkpoint["text"] == "x" * 200_000
        with pytest.raises(holdfast.CorruptError):
            checkpoint["first"][:1]
    holdfast.load(path, options=holdfast.LoadOptions(verify=False))
    assert is_found_by_verify(path, file.name)


def truncated(size: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        os.truncate(file, size if size >= 0 else file.stat().st_size + size)

    return damage


def extended(size: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        with open(file, "ab") as opened:
            opened.write(bytes(size))

    return damage


def replaced_by_a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replaced_by_a_link(file: Path) -> None:
    shutil.copyfile(file, file.parent.parent / "elsewhere")
    file.unlink()
    file.symlink_to(file.parent.parent / "elsewhere")


def replaced_by_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def overwritten_with_zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


DAMAGES = {
    **{f"cut to {size}": truncated(size) for size in (0, 1, 7, 8, 100, 4095, 4096, -1)},
    **{f"longer by {size}": extended(size) for size in (1, 8, 4096)},
    "directory": replaced_by_a_directory,
    "link": replaced_by_a_link,
    "pipe": replaced_by_a_pipe,
    "zeros": overwritten_with_zeros,
    "missing": os.unlink,
}


# The manifest is shorter than a page.
CASES = [
    (kind, damage)
    for kind in ("data", "index", "manifest")
    for damage in DAMAGES
    if (kind, damage) not in {("manifest", "cut to 4095"), ("manifest", "cut to 4096")}
]


@pytest.mark.parametrize(("kind", "damage"), CASES)
def test_a_damaged_file_is_named(tmp_path: Path, kind: str, damage: str) -> None:
    path = save(small_state(), tmp_path / "checkpoint")
    file = find_file(path, kind)
    DAMAGES[damage](file)
    if (kind, damage) == ("manifest", "missing"):
        with pytest.raises(holdfast.NotFoundError):
            holdfast.load(path)
        return
    with pytest.raises(holdfast.CorruptError) as caught:
        holdfast.load(path)
    assert caught.value.path == str(file)
    assert file.name in caught.value.message
    assert "\n" not in caught.value.message
    target = small_state(seed=9)
    with pytest.raises(holdfast.CorruptError):
        holdfast.load(target, path)


@pytest.mark.parametrize("kind", ["data", "index", "manifest"])
def test_a_file_of_another_checkpoint_is_found(tmp_path: Path, kind: str) -> None:
    """The names and sizes are all the same; the bytes are not."""
    path = save(small_state(), tmp_path / "checkpoint")
    other = save(small_state(seed=1), tmp_path / "other")
    assert sorted(os.listdir(path)) == sorted(os.listdir(other))
    file = find_file(path, kind)
    assert file.stat().st_size == find_file(other, kind).stat().st_size
    shutil.copyfile(find_file(other, kind), file)
    with pytest.raises(holdfast.CorruptError) as caught:
        holdfast.load(path)
    assert caught.value.path is not None
    assert os.path.dirname(caught.value.path) == str(path)


def test_exchanged_data_files_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast._native.packer.DataFile.takes", lambda file, chunk: not file.entries)
    path = save({"a": torch.zeros(1000), "b": torch.ones(1000)}, tmp_path / "checkpoint")
    first, second = sorted(path / name for name in os.listdir(path) if name.startswith("data"))
    assert first.stat().st_size == second.stat().st_size
    os.rename(first, path / "third")
    os.rename(second, first)
    os.rename(path / "third", second)
    with pytest.raises(holdfast.CorruptError) as caught:
        holdfast.load(path)
    assert caught.value.path in (str(first), str(second))


def test_a_file_cut_while_it_is_read(tmp_path: Path) -> None:
    path = save(large_state(), tmp_path / "checkpoint")
    file = find_file(path, "data")
    with holdfast.open(path) as checkpoint:
        assert len(checkpoint["first"][:5]) == 5
        os.truncate(file, header_bytes(file) + (1 << 20))
        assert len(checkpoint["first"][: 1 << 20]) == 1 << 20
        with pytest.raises(holdfast.CorruptError) as caught:
            checkpoint["first"][...]
        assert caught.value.path == str(file)


def test_saving_over_a_damaged_checkpoint_works(tmp_path: Path) -> None:
    path = save(small_state(), tmp_path / "checkpoint")
    flip(find_file(path, "manifest"), 40, 1)
    with pytest.raises(holdfast.CorruptError):
        holdfast.load(path)
    save(small_state(seed=2), path, attempt="two")
    assert torch.equal(holdfast.load(path)["weights"], small_state(seed=2)["weights"])
