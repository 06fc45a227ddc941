"""verify, sweep and convert in Python: what the command line does, with values for reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast

STATE = {"weight": torch.arange(300_000.0), "step": 3}


@pytest.fixture(params=["native", "torch"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    if request.param == "native":
        holdfast.save(STATE, path)
    else:
        holdfast.save(STATE, storage_writer=holdfast.FileSystemWriter(path))
    return path


def test_a_whole_checkpoint_of_either_format_is_verified(checkpoint: Path) -> None:
    told: list[tuple[int, int]] = []
    report = holdfast.verify(checkpoint, progress=lambda done, total: told.append((done, total)))
    assert isinstance(report, holdfast.VerifyReport)
    assert report.ok
    assert report.keys == 2
    assert told[-1][0] == told[-1][1] > 1_000_000


def test_damage_of_either_format_is_named(checkpoint: Path) -> None:
    largest = max(checkpoint.iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    report = holdfast.verify(checkpoint)
    assert (report.ok, report.damaged_keys, report.damaged_files) == (False, ("weight",), (largest.name,))


def test_less_may_be_asked_for_of_a_native_checkpoint(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path / "a")
    assert holdfast.verify(tmp_path / "a", level="sizes").unchecked
    assert holdfast.verify(tmp_path / "a", sample=0.5).unchecked
    assert not holdfast.verify(tmp_path / "a").unchecked


def test_sizes_of_either_format_are_looked_at_without_reading_data(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [
        file for file in checkpoint.iterdir() if file.suffix in (".safetensors", ".distcp") and "index" not in file.name
    ]
    before = {file: file.read_bytes() for file in files}
    with monkeypatch.context() as patched:
        patched.setattr("holdfast._io.direct.LocalFiles.lend", None)  # who reads data asks for this
        report = holdfast.verify(checkpoint, level="sizes")
    assert report.ok
    assert report.unchecked
    for file in files:
        file.write_bytes(before[file][:-1])
        assert holdfast.verify(checkpoint, level="sizes").damaged_files == (file.name,)
        file.unlink()
        assert holdfast.verify(checkpoint, level="sizes").damaged_files == (file.name,)
        file.write_bytes(before[file])


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("ftp://a", {}, "URL"),
        ("native", {"level": "sizes", "sample": 0.5}, "only level 'digests' reads a sample"),
        ("native", {"level": "bytes"}, "level must be one of"),
        ("native", {"sample": 0}, "and sample more than 0"),
        ("torch", {"level": "bytes"}, "level must be one of"),
        ("torch", {"sample": 0.5}, "no sample to choose"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(tmp_path: Path, path: str, options: dict[str, Any], message: str) -> None:
    holdfast.save(STATE, tmp_path / "native")
    holdfast.save(STATE, storage_writer=holdfast.FileSystemWriter(tmp_path / "torch"))
    with pytest.raises(ValueError, match=message):
        holdfast.verify(path if "://" in path else tmp_path / path, **options)


def test_there_must_be_something_to_verify_or_to_sweep(tmp_path: Path) -> None:
    with pytest.raises(holdfast.NotFoundError):
        holdfast.verify(tmp_path / "nothing")
    with pytest.raises(holdfast.NotFoundError):
        holdfast.sweep(tmp_path / "nothing")
    with pytest.raises(ValueError, match="only directories and object stores"):
        holdfast.sweep("ftp://a")


def test_a_sweep_lists_and_removes_what_is_dead(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path / "a")
    dead = tmp_path / "a" / "data-0123456789abcdef-0-0.safetensors"
    dead.write_bytes(b"left")
    report = holdfast.sweep(tmp_path)
    assert isinstance(report, holdfast.SweepReport)
    assert [leftover.files for leftover in report.dead] == [(dead.name,)]
    assert dead.exists()
    assert holdfast.sweep(tmp_path, delete=True).removed_files == 1
    assert not dead.exists()
    assert holdfast.verify(tmp_path / "a").ok


def test_a_conversion_there_and_back(checkpoint: Path, tmp_path: Path) -> None:
    for source, target, to in ((checkpoint, "file.pt", "pt"), (tmp_path / "file.pt", "native", "native")):
        done = holdfast.convert(source, tmp_path / target, to=to)  # type: ignore[arg-type]
        assert isinstance(done, holdfast.Conversion)
        assert (done.tensors, done.values) == (1, 1)
    found = holdfast.read(tmp_path / "native")
    assert found["step"] == 3
    assert torch.equal(found["weight"], STATE["weight"])
