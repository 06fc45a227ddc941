"""holdfast convert: results, refusals and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import holdfast
from holdfast.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


class Custom:
    pass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    weight = torch.ones(1000)
    holdfast.save({"first": weight, "tied": weight, "step": 1}, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_a_checkpoint_becomes_a_file_and_comes_back(path: Path, tmp_path: Path) -> None:
    result = run(path, tmp_path / "a.pt", "--to", "pt")
    assert (result.exit_code, result.stderr) == (0, "")
    (line,) = result.stdout.splitlines()
    assert line.startswith("converted: 2 tensors, 1 value, 3.9 KiB in ")
    assert line.endswith(f" GB/s -> {tmp_path / 'a.pt'}")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["step"] == 1

    assert run(tmp_path / "a.pt", tmp_path / "back", "--to", "native").exit_code == 0
    assert holdfast.load(tmp_path / "back")["first"].sum() == 1000


def test_torchs_format_is_written_and_recognised(path: Path, tmp_path: Path) -> None:
    assert run(path, tmp_path / "torch", "--to", "torch").exit_code == 0
    assert (tmp_path / "torch" / ".metadata").exists()
    assert run(tmp_path / "torch", tmp_path / "native", "--to", "native").exit_code == 0
    assert holdfast.load(tmp_path / "native")["step"] == 1


def test_json(path: Path, tmp_path: Path) -> None:
    result = run(path, tmp_path / "a.pt", "--to", "pt", "--json")
    found = json.loads(result.stdout)
    assert found.pop("seconds") > 0
    assert found == {
        "source": str(path),
        "target": str(tmp_path / "a.pt"),
        "to": "pt",
        "tensors": 2,
        "values": 1,
        "bytes": 4000,
    }


def test_an_existing_target_is_kept_until_told_otherwise(path: Path, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_text("precious")
    result = run(path, tmp_path / "a.pt", "--to", "pt")
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line == f"error: {str(tmp_path / 'a.pt')!r} exists already; use another name or --overwrite"
    assert (tmp_path / "a.pt").read_text() == "precious"
    assert run(path, tmp_path / "a.pt", "--to", "pt", "--overwrite").exit_code == 0
    assert torch.load(tmp_path / "a.pt", weights_only=True)["step"] == 1


def test_a_pickle_needs_permission(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3), "object": Custom()}, tmp_path / "a.pt")
    result = run(tmp_path / "a.pt", tmp_path / "native", "--to", "native")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.endswith("pass --allow-pickle if you trust it")
    assert not (tmp_path / "native").exists()
    assert run(tmp_path / "a.pt", tmp_path / "native", "--to", "native", "--allow-pickle").exit_code == 0


def test_damage_is_one_line_and_can_be_overlooked(path: Path, tmp_path: Path) -> None:
    (file,) = path.glob("data-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    result = run(path, tmp_path / "a.pt", "--to", "pt")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "'first'" in line
    assert file.name in line
    assert not (tmp_path / "a.pt").exists()
    assert run(path, tmp_path / "a.pt", "--to", "pt", "--no-verify").exit_code == 0


def test_a_missing_source_is_exit_code_3(tmp_path: Path) -> None:
    result = run(tmp_path / "missing", tmp_path / "a.pt", "--to", "pt")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "missing" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["a"], ["a", "b"], ["a", "b", "--to", "zip"], ["a", "a", "--to", "pt"]])
def test_a_wrong_command_line_is_exit_code_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage: " in result.stderr
