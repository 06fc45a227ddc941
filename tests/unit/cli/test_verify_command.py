"""holdfast verify: exit code 0 for whole checkpoints only, and the damaged keys by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import holdfast
from holdfast.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def data_file(path: Path) -> Path:
    (file,) = path.glob("data-*")
    return file


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    first, last = torch.ones(1024), torch.zeros(8, dtype=torch.int8)
    holdfast.save({"first": first, "tied": first, "last": last, "step": 1}, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_a_whole_checkpoint_is_one_line_and_exit_code_0(path: Path) -> None:
    result = run(path)
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    assert line.startswith("whole: 4 keys in 3 files, ")
    assert line.endswith(" GB/s")
    assert result.stderr == ""


def test_a_flipped_bit_of_data_names_the_key_and_the_file(path: Path) -> None:
    flip(data_file(path), -1)
    result = run(path)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("damaged: 1 of 4 keys, 1 of 3 files; ")
    assert lines[1] == data_file(path).name
    assert lines[2].startswith("  last  bytes ")
    assert len(lines) == 3


def test_tied_keys_are_all_named(path: Path) -> None:
    flip(data_file(path), 4096)
    result = run(path)
    assert result.exit_code == 1
    assert [line.split()[0] for line in result.stdout.splitlines()[2:]] == ["first", "tied"]


def test_a_flipped_bit_of_a_header_names_the_header(path: Path) -> None:
    flip(data_file(path), 20)
    result = run(path)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("damaged: 0 of 4 keys, 1 of 3 files; ")
    assert lines[2].startswith("  the header  bytes 0 to 4096, ")


def remove(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def extend(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


@pytest.mark.parametrize("damage", [remove, cut, extend])
def test_a_missing_truncated_or_extended_file_names_all_its_keys(path: Path, damage: Callable[[Path], None]) -> None:
    file = data_file(path)
    damage(file)
    result = run(path)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[1] == file.name
    assert {line.split()[0] for line in lines[2:]} == {"first", "tied", "last"}


@pytest.mark.parametrize("name", ["index-*", "manifest.json"])
@pytest.mark.parametrize("damage", [lambda file: flip(file, 50), cut, extend], ids=["flip", "cut", "extend"])
def test_a_damaged_index_or_manifest_is_one_line_on_stderr(
    path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    (file,) = path.glob(name)
    damage(file)
    result = run(path)
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert file.name in line


def test_json_of_a_whole_checkpoint(path: Path) -> None:
    result = run(path, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found.pop("seconds") > 0
    assert found == {
        "path": str(path),
        "ok": True,
        "files": 3,
        "bytes": sum(file.stat().st_size for file in path.iterdir()),
        "keys": 4,
        "damaged_keys": [],
        "damaged_files": [],
        "damage": [],
    }


def test_json_of_a_damaged_checkpoint(path: Path) -> None:
    file = data_file(path)
    flip(file, -1)
    flip(file, 8)
    result = run("--json", path)
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["ok"] is False
    assert found["damaged_keys"] == ["last"]
    assert found["damaged_files"] == [file.name]
    header, last = found["damage"]
    assert (header["file"], header["key"], header["span"]) == (file.name, None, [0, 4096])
    size = file.stat().st_size
    assert (last["file"], last["key"], last["span"]) == (file.name, "last", [size - 8, size])


@pytest.mark.parametrize(
    ("name", "shown"),
    [("[red]x[/red]", "[red]x[/red]"), ("日本", "日本"), ("a\nb", r"'a\nb'"), ("\x1b[1m", r"'\x1b[1m'")],
)
def test_odd_keys_are_not_interpreted(tmp_path: Path, name: str, shown: str) -> None:
    holdfast.save({name: torch.ones(3)}, tmp_path / "odd")
    flip(data_file(tmp_path / "odd"), -1)
    lines = run(tmp_path / "odd").stdout.splitlines()
    assert len(lines) == 3
    assert lines[2].startswith(f"  {shown}  bytes ")
    assert json.loads(run(tmp_path / "odd", "--json").stdout)["damaged_keys"] == [name]
