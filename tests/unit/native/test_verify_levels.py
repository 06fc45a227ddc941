"""Verify at each level finds what that level looks at, says what it did not look at, and reads no more than it says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._native.verify import verify_checkpoint

LEVELS = ("sizes", "coverage", "digests")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("holdfast._native.packer.DataFile.takes", lambda file, chunk: not file.entries)
    state = {"small": torch.arange(10), "large": torch.zeros(40 << 20, dtype=torch.uint8), "step": 1}
    holdfast.save(state, storage_writer=holdfast.NativeWriter(tmp_path / "checkpoint", attempt="a"))
    return tmp_path / "checkpoint"


def data_file(path: Path, *, large: bool) -> Path:
    return sorted(path.glob("data-*"), key=lambda file: file.stat().st_size)[-1 if large else 0]


def flip(file: Path, offset: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(offset)
        (byte,) = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(("level", "unchecked"), [("sizes", 2), ("coverage", 1), ("digests", 0)])
def test_a_whole_checkpoint_is_whole_at_every_level(path: Path, level: Any, unchecked: int) -> None:
    report = verify_checkpoint(path, level=level)
    assert report.ok
    assert len(report.unchecked) == unchecked
    assert (report.files, report.keys) == (4, 3)
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    read = {"sizes": ("manifest",), "coverage": ("manifest", "index"), "digests": ("",)}[level]
    assert report.bytes == sum(size for name, size in sizes.items() if name.startswith(read))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("damage", ["missing", "cut", "grown", "directory"])
def test_every_level_finds_and_names_files_that_are_not_there_in_their_size(
    path: Path, level: Any, damage: str
) -> None:
    file = data_file(path, large=False)
    if damage == "missing":
        file.unlink()
    elif damage == "directory":
        file.unlink()
        file.mkdir()
    else:
        os.truncate(file, file.stat().st_size + (-1 if damage == "cut" else 1))
    report = verify_checkpoint(path, level=level)
    assert report.damaged_files == (file.name,)
    assert report.damaged_keys == ("small",)


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_finds_an_index_of_another_size(path: Path, level: Any) -> None:
    (index,) = path.glob("index-*")
    os.truncate(index, index.stat().st_size - 1)
    with pytest.raises(holdfast.CorruptError) as caught:
        verify_checkpoint(path, level=level)
    assert caught.value.path == str(index)


def test_coverage_reads_the_index_and_sizes_do_not(path: Path) -> None:
    (index,) = path.glob("index-*")
    flip(index, 4100)
    assert verify_checkpoint(path, level="sizes").ok
    for level in LEVELS[1:]:
        with pytest.raises(holdfast.CorruptError):
            verify_checkpoint(path, level=level)  # type: ignore[arg-type]


def test_only_digests_find_a_flipped_bit_of_data(path: Path) -> None:
    flip(data_file(path, large=True), -1 + data_file(path, large=True).stat().st_size)
    assert [verify_checkpoint(path, level=level).ok for level in LEVELS] == [True, True, False]  # type: ignore[arg-type]


def test_a_sample_reads_about_that_part_and_all_headers(path: Path) -> None:
    whole = verify_checkpoint(path).bytes
    told: list[tuple[int, int]] = []
    report = verify_checkpoint(path, sample=0.25, on_progress=lambda done, total: told.append((done, total)))
    assert report.ok
    assert "25 %" in report.unchecked[0]
    assert 0.02 * whole < report.bytes < 0.7 * whole
    assert told[-1] == (report.bytes, report.bytes)
    flip(data_file(path, large=True), 20)
    assert not verify_checkpoint(path, sample=1e-9).ok, "headers are always read"


def test_samples_differ_and_find_damage_sooner_or_later(path: Path) -> None:
    file = data_file(path, large=True)
    flip(file, 8192)
    found = [verify_checkpoint(path, sample=0.3).ok for _ in range(40)]
    assert False in found
    assert True in found


@pytest.mark.parametrize("options", [{"level": "all"}, {"sample": 0}, {"sample": 1.5}, {"sample": -1}])
def test_other_levels_and_samples_are_refused(path: Path, options: Any) -> None:
    with pytest.raises(ValueError, match="level"):
        verify_checkpoint(path, **options)


def test_a_replaced_checkpoint_is_looked_at_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast._native import verify as module

    real = module._has_its_files
    calls: list[bool] = []

    def overtaken(directory: str, manifest: Any) -> bool:
        if not calls:
            holdfast.save({"small": torch.ones(2)}, path)
        calls.append(real(directory, manifest))
        return calls[-1]

    monkeypatch.setattr(module, "_has_its_files", overtaken)
    report = verify_checkpoint(path, level="sizes")
    assert report.ok
    assert calls[0] is False
