"""show, verify and open of checkpoints that torch wrote."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner, Result

import holdfast
from holdfast.cli import app


def run(command: str, *arguments: object) -> Result:
    return CliRunner().invoke(app, [command, *map(str, arguments)])


def save(state: dict[str, Any], path: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    state = {
        "model": {"weight": torch.arange(600_000.0).view(600, 1000), "bias": torch.ones(3, dtype=torch.bfloat16)},
        "groups": [{"lr": 0.5}, torch.ones(2)],
        "step": 7,
    }
    return save(state, tmp_path / "checkpoint")


def place_of(path: Path, key: str) -> Any:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (place,) = [place for index, place in metadata.storage_data.items() if index.fqn == key]
    return place


def overwrite(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)


# show


def test_show_draws_the_tree(path: Path) -> None:
    result = run("show", path)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["│", "├─", "weight", "float32", "[600,", "1000]", "2.3", "MiB", "1", "chunk"] in lines
    assert ["│", "└─", "bias", "bfloat16", "[3]", "6", "B", "1", "chunk"] in lines
    assert any(line[-4:-2] == ["lr", "object"] for line in lines)
    assert any(line[:2] == ["└─", "step"] and line[2] == "object" for line in lines)
    assert lines[-2][:5] == ["3", "tensors,", "2", "values,", "2.3"]
    assert lines[-1][:5] == ["in", "the", "format", "of", "torch.distributed.checkpoint,"]
    chunks = run("show", path, "*.weight", "--chunks").stdout
    place = place_of(path, "model.weight")
    assert f"[0:600, 0:1000] 2.3 MiB, {place.relative_path} at {place.offset}" in chunks


def test_show_finds_chunks_that_are_listed_without_their_offset(path: Path) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.storage_data = {type(index)(index.fqn): place for index, place in metadata.storage_data.items()}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    place = place_of(path, "model.weight")
    chunks = run("show", path, "*.weight", "--chunks").stdout
    assert f"[0:600, 0:1000] 2.3 MiB, {place.relative_path} at {place.offset}" in chunks


def test_show_as_json_leaves_out_what_does_not_exist(path: Path) -> None:
    found = json.loads(run("show", path, "--json", "--chunks").stdout)
    assert list(found["keys"]) == ["model.weight", "model.bias", "groups.0.lr", "groups.1", "step"]
    weight = found["keys"]["model.weight"]
    assert (weight["kind"], weight["dtype"], weight["shape"], weight["bytes"]) == (
        "tensor",
        "float32",
        [600, 1000],
        2_400_000,
    )
    assert weight["stored"][0]["file"] == "__0_0.distcp"
    assert found["keys"]["step"]["kind"] == "object"
    totals = found["totals"]
    assert (totals["tensors"], totals["values"], totals["files"]) == (3, 2, 2)
    assert totals["bytes"] == sum(file.stat().st_size for file in path.iterdir())
    assert totals["format_version"] == "torch 1.0.0"
    assert not {"holdfast", "world_size", "python"} & set(totals)
    assert "user_metadata" not in found


def test_show_of_a_hostile_one_is_one_line(path: Path) -> None:
    (path / ".metadata").write_bytes(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.")
    for command in ("show", "verify"):
        result = run(command, path)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert "names 'posix.system'" in result.stderr


# verify


def test_a_whole_checkpoint(path: Path) -> None:
    result = run("verify", path)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("whole: 5 keys in 2 files, ")
    assert lines[1:] == ["not checked: the metadata has no checksum"]
    found = json.loads(run("verify", path, "--json").stdout)
    assert found["ok"]
    assert found["unchecked"] == ["the metadata has no checksum"]


def flip_data(path: Path) -> None:
    place = place_of(path, "model.weight")
    file = path / place.relative_path
    at = place.offset + 1_000_000
    overwrite(file, at, bytes([file.read_bytes()[at] ^ 1]))


def cut_file(path: Path) -> None:
    place = place_of(path, "model.weight")
    os.truncate(path / place.relative_path, place.offset + place.length - 1)


def break_archive(path: Path) -> None:
    place = place_of(path, "model.weight")
    overwrite(path / place.relative_path, place.offset + place.length - 300, bytes(250))


def change(alter: Callable[[Any], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        alter(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return damage


def place_in(metadata: Any) -> Any:
    return next(key for key in metadata.storage_data if key.fqn == "model.weight")


def overlap(metadata: Any) -> None:
    places = metadata.storage_data
    place = places[place_in(metadata)]
    before = max((other for other in places.values() if other.offset < place.offset), key=lambda other: other.offset)
    object.__setattr__(before, "length", before.length + 10)


def shrink(metadata: Any) -> None:
    stored = metadata.state_dict_metadata["model.weight"]
    stored.chunks[0].sizes = torch.Size([599, 1000])


def resize(metadata: Any) -> None:
    stored = metadata.state_dict_metadata["model.weight"]
    stored.size = stored.chunks[0].sizes = torch.Size([601, 1000])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (flip_data, "not the bytes that were written"),
        (cut_file, "the file ends at byte"),
        (break_archive, "is not a whole torch.save archive"),
        (change(shrink), "gap at [599, 0]"),
        (change(resize), "[600, 1000] elements instead of [601, 1000]"),
        (change(lambda metadata: metadata.storage_data.pop(place_in(metadata))), "does not say where"),
        (change(overlap), "it overlaps what is stored before it"),
    ],
)
def test_damage_is_named(path: Path, damage: Callable[[Path], None], problem: str) -> None:
    damage(path)
    result = run("verify", path, "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert not found["ok"]
    assert "model.weight" in found["damaged_keys"]
    assert any(problem in each["problem"] for each in found["damage"]), found["damage"]
    text = run("verify", path)
    assert text.exit_code == 1
    assert "model.weight" in text.stdout


def test_a_missing_file_damages_all_keys_in_it(path: Path) -> None:
    (path / "__0_0.distcp").unlink()
    found = json.loads(run("verify", path, "--json").stdout)
    assert len(found["damaged_keys"]) == 5
    assert {each["problem"] for each in found["damage"]} == {"the file is missing"}


def test_what_each_rank_saved_apart_is_checked(tmp_path: Path) -> None:
    """All have it under one key, and rank 0's is not what rank 1 loads."""
    path = tmp_path / "checkpoint"
    for rank in range(2):
        writer, planner = holdfast.FileSystemWriter(path), holdfast.DefaultSavePlanner()
        planner.set_up_planner({"own": torch.full((1000,), float(rank))}, writer.storage_meta(), True)
        writer.set_up_storage_writer(True, rank=rank, use_collectives=False)
        (plan,), metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])
    assert sorted(os.listdir(path)) == ["__0.metadata", "__0_0.distcp", "__1.metadata", "__1_0.distcp"]
    result = run("verify", "--json", path)
    assert result.exit_code == 0, result.output
    assert (found := json.loads(result.stdout))["files"] == 4
    assert found["bytes"] > 2 * 4000
    overwrite(path / "__1_0.distcp", (path / "__1_0.distcp").stat().st_size // 2, b"!!!!")
    result = run("verify", "--json", path)
    assert result.exit_code == 1, result.output
    assert json.loads(result.stdout)["damaged_files"] == ["__1_0.distcp"]
    metadata = pickle.loads((path / "__1.metadata").read_bytes())
    metadata.storage_data.clear()
    (path / "__1.metadata").write_bytes(pickle.dumps(metadata))
    assert json.loads(run("verify", "--json", path).stdout)["damaged_files"] == ["__1.metadata"]


def test_what_cannot_be_checked_is_said(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = save({"w": torch.ones(4), "step": 1}, tmp_path / "checkpoint")
    finally:
        torch.serialization.set_crc32_options(True)
    result = run("verify", path)
    assert result.exit_code == 0
    assert "not checked: 2 items were written without checksums" in result.stdout.splitlines()


# open


def test_open_reads_slices_and_values(path: Path) -> None:
    with holdfast.open(path) as checkpoint:
        assert list(checkpoint) == ["model.weight", "model.bias", "groups.0.lr", "groups.1", "step"]
        weight = checkpoint["model.weight"]
        assert (weight.shape, weight.dtype, weight.nbytes) == ((600, 1000), torch.float32, 2_400_000)
        assert torch.equal(weight[1, 5:7], torch.tensor([1005.0, 1006.0]))
        assert checkpoint.bytes_read < 20_000
        assert checkpoint["step"] == 7
        assert checkpoint["groups.0.lr"] == 0.5
        assert checkpoint["model.bias"][...].tolist() == [1, 1, 1]
        assert str(path) in repr(checkpoint)
    with pytest.raises(ValueError, match="closed"):
        weight[0]
