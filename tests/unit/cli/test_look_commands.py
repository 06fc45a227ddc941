"""holdfast diff and holdfast stats: exit codes, JSON, and hostile keys as text."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import holdfast
from holdfast.cli import app

HOSTILE = "[red]\x1b[31m\nkey"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def steps(tmp_path: Path) -> tuple[Path, Path]:
    weight = torch.ones(1000)
    for number in (1, 2):
        state = {HOSTILE: weight * number, "same": weight, "step": number, "nan": torch.tensor([math.nan, number])}
        holdfast.save(state, tmp_path / f"step-{number}", no_dist=True)
    return tmp_path / "step-1", tmp_path / "step-2"


def test_the_same_is_exit_code_0(steps: tuple[Path, Path]) -> None:
    result = run("diff", steps[0], steps[0])
    assert (result.exit_code, result.stdout) == (0, "4 keys: 4 unchanged; 0 B of data read\n")


def test_differences_are_lines_and_exit_code_1(steps: tuple[Path, Path]) -> None:
    result = run("diff", *steps)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].split(maxsplit=1) == ["changed", f"{HOSTILE!r}  float32 [1000]; 1 of 1 block"]
    assert lines[1].split() == ["changed", "step", "1", "→", "2"]
    assert lines[-1] == "4 keys: 3 changed, 1 unchanged; 0 B of data read"
    assert "\x1b" not in result.stdout


def test_values_are_told(steps: tuple[Path, Path]) -> None:
    result = run("diff", *steps, "--values")
    assert "1,000 of 1,000 elements, first at [0], relative L2 1, max 1, cosine 1" in result.stdout
    assert "NaN 1 → 1, 1 not measured" in result.stdout


def test_what_was_not_compared_is_not_exit_code_0(steps: tuple[Path, Path]) -> None:
    copy = steps[0].with_name("copy")
    state = holdfast.load(steps[0])
    assert isinstance(state, dict)
    holdfast.save(state, copy, no_dist=True, storage_writer=holdfast.FileSystemWriter(copy))
    result = run("diff", steps[0], copy)
    assert result.exit_code == 1
    assert "not compared" in result.stdout
    assert result.stdout.splitlines()[-1] == "--values reads and compares tensors that are not compared"
    assert run("diff", steps[0], copy, "--values").exit_code == 0


def test_json_has_every_key(steps: tuple[Path, Path]) -> None:
    result = run("diff", *steps, "--values", "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["same"] is False
    assert {each["key"]: each["status"] for each in told["keys"]} == {
        HOSTILE: "changed",
        "same": "unchanged",
        "step": "changed",
        "nan": "changed",
    }
    assert told["keys"][0]["elements"]["first_index"] == [0]
    assert told["data_bytes_read"] > 0


def test_exit_codes_of_errors(steps: tuple[Path, Path], tmp_path: Path) -> None:
    assert run("diff", steps[0], tmp_path / "nothing").exit_code == 3
    assert run("diff", *steps, "no such key").exit_code == 2
    assert run("stats", tmp_path / "nothing").exit_code == 3
    result = run("stats", "--json", steps[0], "no such key")
    assert (result.exit_code, json.loads(result.stdout)["exit_code"]) == (2, 2)


def test_statistics_are_a_table_and_json(steps: tuple[Path, Path]) -> None:
    result = run("stats", steps[1])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == re.split(" ", "key dtype norm mean std min max zeros nan inf looked at")
    assert lines[1].startswith(repr(HOSTILE))
    assert lines[-1].startswith("3 tensors, 1 with NaN or infinity; looked at all, ")
    told = json.loads(run("stats", steps[1], "nan", "--exact", "--json").stdout)
    (tensor,) = told["tensors"]
    assert (tensor["nan"], tensor["sum"], tensor["is_exact"], tensor["norm"]) == (1, 2.0, True, 2.0)
