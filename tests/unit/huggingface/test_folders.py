"""Hugging Face folders and safetensors files: what is read of them, what is refused, what is checked."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import holdfast
from holdfast import CorruptError, LoadOptions, MismatchError, NotFoundError, hf
from holdfast._huggingface.folder import read_folder
from holdfast._io.direct import InputFile
from holdfast.cli import app
from torture import hostile_folders
from torture.hostile_folders import FIRST, INDEX, NOTES, SECOND, file_bytes, header_of, write_folder, write_notes

LOOKS: dict[str, Callable[[Path], Any]] = {
    "load": holdfast.load,
    "open": lambda path: holdfast.open(path).close(),
    "verify": holdfast.verify,
    "convert": lambda path: holdfast.convert(path, f"{path}-converted", to="native"),
}

TENSORS = {
    "float64": torch.randn(3, 5, dtype=torch.float64),
    "float32": torch.randn(7, 2, 3),
    "float16": torch.randn(9).half(),
    "bfloat16": torch.randn(4, 4).bfloat16(),
    "float8": torch.randn(5, 3).to(torch.float8_e4m3fn),
    "float8 wide": torch.randn(5).to(torch.float8_e5m2),
    "complex": torch.randn(3, dtype=torch.complex64),
    "int64": torch.arange(-3, 3),
    "int32": torch.arange(5, dtype=torch.int32),
    "int16": torch.arange(5, dtype=torch.int16),
    "int8": torch.arange(5, dtype=torch.int8),
    "uint8": torch.arange(5, dtype=torch.uint8),
    "uint16": torch.arange(5).to(torch.uint16),
    "uint32": torch.arange(5).to(torch.uint32),
    "uint64": torch.arange(5).to(torch.uint64),
    "bool": torch.tensor([[True], [False]]),
    "nothing": torch.empty(0, 4),
    "number": torch.tensor(3.5),
}


def zeros_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in tensors.items()}


@pytest.mark.parametrize("name", hostile_folders.CASES)
def test_hostile_folders_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "case"
    hostile_folders.CASES[name](path)
    for look in LOOKS.values():
        with pytest.raises(CorruptError) as caught:
            look(path)
        assert "\n" not in caught.value.message
        assert "; " in caught.value.message, "what to do"


def test_what_the_safetensors_library_wrote_comes_back_bit_by_bit(
    tmp_path: Path, same: Callable[..., None], bits: Callable[[torch.Tensor], bytes]
) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt", "other": 'quotes "\\'})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        target = zeros_like(TENSORS)
        report = holdfast.load(target, path)
        same(target, TENSORS)
        assert set(report.loaded) == set(TENSORS)
        same(dict(sorted(holdfast.read(path).items())), dict(sorted(TENSORS.items())))
        with holdfast.open(path) as checkpoint:
            assert set(checkpoint) == set(TENSORS)
            for key, tensor in TENSORS.items():
                assert bits(checkpoint[key][...]) == bits(tensor), key


@pytest.mark.parametrize("pad", range(9))
def test_elements_that_lie_anywhere(tmp_path: Path, pad: int) -> None:
    """A header of any length, and tensors of a few bytes in between: nothing is aligned."""
    tensors = {
        "one": torch.ones(1, dtype=torch.uint8),
        "wide": torch.randn(513, 3000),
        "two": torch.ones(2, dtype=torch.bool),
        "long": torch.arange(400_003),
        "half": torch.randn(1000, 11).bfloat16(),
    }
    write_folder(tmp_path / "folder", {"model.safetensors": tensors}, pad=pad)
    target = zeros_like(tensors)
    holdfast.load(target, tmp_path / "folder")
    assert all(torch.equal(target[key], tensors[key]) for key in tensors)
    cast = {"wide": torch.zeros(513, 3000, dtype=torch.float64), "half": torch.zeros(11, 1000).t()}
    holdfast.load(cast, tmp_path / "folder", options=LoadOptions(cast=True))
    assert torch.equal(cast["wide"], tensors["wide"].double())
    assert torch.equal(cast["half"], tensors["half"].float())
    with holdfast.open(tmp_path / "folder") as checkpoint:
        assert torch.equal(checkpoint["wide"][:, 7:2000], tensors["wide"][:, 7:2000])
        assert torch.equal(checkpoint["long"][5:399_000:3], tensors["long"][5:399_000:3])
    write_notes(tmp_path / "folder", rows=100)
    checked = zeros_like(tensors)
    holdfast.load(checked, tmp_path / "folder")
    assert all(torch.equal(checked[key], tensors[key]) for key in tensors)


def test_a_part_reads_only_its_bytes(tmp_path: Path) -> None:
    save_file({"w": torch.arange(3_000_000.0).view(3000, 1000)}, tmp_path / "model.safetensors")
    with holdfast.open(tmp_path) as checkpoint:
        assert checkpoint.bytes_read == 0
        assert checkpoint["w"][:128][-1, -1] == 127_999
        assert checkpoint.bytes_read in (512_000, 512_000 // 4096 * 4096 + 4096, 512_000 // 4096 * 4096 + 8192)


def test_the_index_decides(tmp_path: Path) -> None:
    write_folder(tmp_path, {FIRST: {"a": torch.ones(2)}, SECOND: {"b": torch.ones(3)}})
    for stray in ("consolidated.safetensors", "model.safetensors", "model.fp16.safetensors", "x.safetensors"):
        (tmp_path / stray).write_bytes(b"garbage")
    assert set(holdfast.read(tmp_path)) == {"a", "b"}
    os.rename(tmp_path / INDEX, tmp_path / "unet.safetensors.index.json")
    assert set(holdfast.read(tmp_path / "unet.safetensors.index.json")) == {"a", "b"}
    (tmp_path / "model.safetensors").unlink()
    assert set(holdfast.read(tmp_path)) == {"a", "b"}


def test_without_an_index_the_whole_model_or_files_that_share_nothing(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "y.safetensors")
    assert set(holdfast.read(tmp_path)) == {"a", "b"}
    save_file({"a": torch.zeros(2)}, tmp_path / "z.safetensors")
    with pytest.raises(CorruptError, match=r"'a' is in each of 'x\.safetensors', 'z\.safetensors'; pass the path"):
        holdfast.read(tmp_path)
    assert holdfast.read(tmp_path / "z.safetensors")["a"].sum() == 0
    save_file({"a": torch.full((2,), 5.0)}, tmp_path / "model.safetensors")
    assert holdfast.read(tmp_path)["a"].sum() == 10


def test_a_checkpoint_in_the_folder_counts_before_the_files(path: str) -> None:
    holdfast.save({"mine": 1}, path)
    save_file({"theirs": torch.ones(2)}, f"{path}/model.safetensors")
    assert set(holdfast.read(path)) == {"mine"}
    holdfast.delete(path)
    assert set(holdfast.read(path)) == {"theirs"}


def test_what_a_killed_save_left_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "data-0123456789abcdef-0-0.safetensors").write_bytes(b"")
    (tmp_path / "index-0123456789abcdef.safetensors").write_bytes(b"")
    with pytest.raises(NotFoundError, match="no save to it was published"):
        holdfast.load(tmp_path)


def test_reports_say_that_nothing_could_be_checked(tmp_path: Path) -> None:
    write_folder(tmp_path, {FIRST: {"a": torch.ones(2)}})
    report = holdfast.load({"a": torch.zeros(2)}, tmp_path)
    assert report.unchecked == ("the data, because there are no digests of it (no holdfast.json)",)
    assert "unchecked=" in repr(report)
    for level in ("sizes", "coverage", "digests"):
        checked = holdfast.verify(tmp_path, level=level)
        assert (checked.ok, checked.unchecked, checked.keys, checked.files) == (True, report.unchecked, 1, 2)
    write_notes(tmp_path)
    one_file = holdfast.load({"a": torch.zeros(2)}, tmp_path / FIRST)
    assert one_file.unchecked == ("the data, because digests are for whole folders, and this is a file",)
    report = holdfast.load({"a": torch.zeros(2)}, tmp_path)
    assert report.unchecked == ()
    assert "unchecked" not in repr(report)
    assert holdfast.verify(tmp_path).unchecked == ()
    assert holdfast.verify(tmp_path, level="sizes").unchecked == ("the digests of the data",)


def test_differences_are_known_before_anything_is_touched(tmp_path: Path) -> None:
    write_folder(tmp_path, {FIRST: {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}})
    target = {"a": torch.zeros(3), "b": torch.zeros(3).half(), "missing": torch.zeros(1)}
    with pytest.raises(MismatchError) as caught:
        holdfast.load(target, tmp_path)
    assert {each.key: each.kind for each in caught.value.differences} == {
        "a": "shape",
        "b": "dtype",
        "missing": "missing",
    }
    report = holdfast.load(target, tmp_path, strict=False, options=LoadOptions(cast=True))
    assert report.loaded == ("b",)
    assert report.unexpected == ("c",)
    assert target["b"].tolist() == [1, 1, 1]
    with pytest.raises(MismatchError):
        holdfast.load({"a": torch.zeros(2, dtype=torch.int8)}, tmp_path, options=LoadOptions(cast=True))


def test_meta_targets_and_prefixes(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    state = {"model": dict(other.state_dict())}
    holdfast.load(state, tmp_path, options=LoadOptions(mapping={"model": ""}))
    assert all(torch.equal(state["model"][key], tensor) for key, tensor in model.state_dict().items())


# What an export leaves.


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    hostile_folders.exported(tmp_path / "exported")
    return tmp_path / "exported"


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << at % 8
    path.write_bytes(data)


def test_damage_anywhere_in_a_file_is_noticed(exported: Path) -> None:
    truth = holdfast.read(exported)
    injected = 0
    for name in (FIRST, SECOND):
        intact = (exported / name).read_bytes()
        begin = 8 + int.from_bytes(intact[:8], "little")
        header = json.loads(intact[8:begin])
        for at in range(len(intact)):
            flipped(exported / name, at)
            with pytest.raises(CorruptError) as caught:
                holdfast.read(exported)
            error = caught.value
            if at >= begin:
                first, stop = next(
                    (begin + each["data_offsets"][0], begin + each["data_offsets"][1])
                    for each in header.values()
                    if each["data_offsets"][0] <= at - begin < each["data_offsets"][1]
                )
                assert error.path == str(exported / name)
                assert error.span == (first, stop)
                assert error.key in header
                (damage,) = holdfast.verify(exported).damage
                assert (damage.file, damage.key, damage.span) == (name, error.key, error.span)
            else:
                assert name in error.message or "holdfast.json" in error.message
            injected += 1
            (exported / name).write_bytes(intact)
    assert injected > 300
    assert set(holdfast.read(exported)) == set(truth)


def test_damage_anywhere_in_holdfast_json_or_the_index_changes_nothing_silently(exported: Path) -> None:
    truth = holdfast.read(exported)
    noticed = 0
    for name in (NOTES, INDEX):
        intact = (exported / name).read_bytes()
        for at in range(0, len(intact), 11 if name == NOTES else 1):
            flipped(exported / name, at)
            try:
                found = holdfast.read(exported)
            except (CorruptError, holdfast.UnsupportedVersionError):
                noticed += 1
            else:
                assert name == INDEX, at
                assert all(torch.equal(found[key], tensor) for key, tensor in truth.items())
            (exported / name).write_bytes(intact)
    assert noticed > 200


def test_who_writes_a_file_anew_is_told_what_to_do(exported: Path) -> None:
    (exported / SECOND).write_bytes(file_bytes(*header_of({"c": torch.ones(6)})))
    with pytest.raises(CorruptError, match=r"does not fit the files beside it.*or remove holdfast\.json to load"):
        holdfast.load(exported)
    (exported / NOTES).unlink()
    assert holdfast.load(exported)["c"].sum() == 6


def test_verify_can_be_left_out(exported: Path) -> None:
    flipped(exported / SECOND, (exported / SECOND).stat().st_size - 1)
    target = {"c": torch.zeros(5)}
    with pytest.raises(CorruptError):
        holdfast.load(target, exported)
    holdfast.load(target, exported, options=LoadOptions(verify=False))
    assert target["c"].count_nonzero() == 1


def test_a_folder_that_is_replaced_while_it_is_open(exported: Path, tmp_path: Path) -> None:
    checkpoint = holdfast.open(exported)
    shutil.rmtree(exported)
    write_folder(exported, {FIRST: {"a": torch.ones(1)}})
    with pytest.raises(holdfast.StorageError, match="was replaced by another one"):
        checkpoint["c"][...]
    checkpoint.close()
    checkpoint = holdfast.open(exported)
    shutil.rmtree(exported)
    with pytest.raises(NotFoundError, match="was deleted since"):
        checkpoint["a"][...]
    checkpoint.close()


# Conversions, and where a run begins.


def test_conversions_from_a_folder(exported: Path, tmp_path: Path, same: Callable[..., None]) -> None:
    truth = holdfast.read(exported)
    for to in ("native", "torch", "pt"):
        done = holdfast.convert(exported, tmp_path / to, to=to)
        assert (done.tensors, done.values, done.bytes) == (3, 0, 128)
    same(holdfast.read(tmp_path / "native"), truth)
    same(holdfast.read(tmp_path / "torch"), truth)
    same(torch.load(io.BytesIO((tmp_path / "pt").read_bytes())), truth)
    holdfast.convert(exported / FIRST, tmp_path / "one.pt", to="pt")
    assert set(torch.load(tmp_path / "one.pt")) == {"a", "b"}
    flipped(exported / FIRST, (exported / FIRST).stat().st_size - 1)
    with pytest.raises(CorruptError):
        holdfast.convert(exported, tmp_path / "damaged", to="native")
    with pytest.raises(NotFoundError):
        holdfast.read(tmp_path / "damaged")


def test_a_folder_that_cannot_be_looked_at_is_not_taken_for_a_file(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = os.stat

    def fail(path: Any, *rest: Any, **options: Any) -> os.stat_result:
        if path == str(exported):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return look(path, *rest, **options)

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(holdfast.StorageError, match="Input/output error"):
        read_folder(str(exported))


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("moment", ["a header", "a tensor"])
def test_a_folder_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool, moment: str
) -> None:
    def export(value: float) -> None:
        tensors = {name: torch.full((300,), value) for name in "ab"}
        options = hf.ExportOptions(shard_bytes=1200)
        hf.export(tensors, tmp_path / "model", overwrite=True, options=options)

    export(1.0)
    opened, calls = InputFile.open, []

    def replaced_at(path: str) -> InputFile:
        calls.append(path)
        file = opened(path)
        if len(calls) == (1 if moment == "a header" else 3):
            export(2.0)
        return file

    monkeypatch.setattr(InputFile, "open", replaced_at)
    state = holdfast.load(tmp_path / "model", options=LoadOptions(verify=verify))
    assert {key: set(tensor.tolist()) for key, tensor in state.items()} == {"a": {2.0}, "b": {2.0}}
    assert len(calls) > 4


def test_a_run_begins_with_a_folder(tmp_path: Path) -> None:
    save_file({"w": torch.full((3,), 2.0)}, tmp_path / "model.safetensors")
    state = {"w": torch.zeros(3)}
    with holdfast.CheckpointManager(tmp_path / "run", save=holdfast.Every(steps=1)) as manager:
        resumed = manager.resume(state, initial=tmp_path)
    assert (resumed.step, resumed.path, resumed.next_step) == (None, str(tmp_path), 0)
    assert resumed.report is not None
    assert resumed.report.unchecked
    assert state["w"].tolist() == [2, 2, 2]


def test_what_the_command_line_says_of_a_folder(exported: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, list(map(str, arguments)))
        assert result.exit_code == 0, result.output
        return result.stdout

    shown = run("show", exported)
    assert "3 tensors, 0 values, " in shown
    assert shown.rstrip().endswith("a Hugging Face folder: safetensors with digests")
    listed = json.loads(run("show", exported / SECOND, "--json"))
    assert list(listed["keys"]) == ["c"]
    assert listed["totals"]["format_version"] == "safetensors without digests"
    assert "not checked" not in run("verify", exported)
    assert "not checked: the data, because digests are for whole folders" in run("verify", exported / FIRST)
    assert "converted: 3 tensors" in run("convert", exported, tmp_path / "made", "--to", "native")


def test_the_cache_of_the_hub_is_read_through_its_own_links(tmp_path: Path) -> None:
    state = {name: torch.rand(300) for name in "abc"}
    hf.export(state, tmp_path / "model", options=hf.ExportOptions(shard_bytes=1200))
    blobs, revision = tmp_path / "models--me--tiny" / "blobs", tmp_path / "models--me--tiny" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    revision.mkdir(parents=True)
    for number, path in enumerate(sorted((tmp_path / "model").iterdir())):
        name = f"{number:064x}"
        path.rename(blobs / name)
        (revision / path.name).symlink_to(f"../../blobs/{name}")
    found = holdfast.read(revision)
    assert all(torch.equal(found[key], tensor) for key, tensor in state.items())
    assert holdfast.verify(revision).ok
    hf.export(state, tmp_path / "like", like=revision)
    assert len(list((tmp_path / "like").glob("model-0000?-of-00003.safetensors"))) == 3
    # Any other link is refused, and so is such a link elsewhere.
    (revision / "model-00001-of-00003.safetensors").unlink()
    (revision / "model-00001-of-00003.safetensors").symlink_to("../../../model")
    with pytest.raises(CorruptError, match="is a link, which may lead anywhere"):
        holdfast.read(revision)
