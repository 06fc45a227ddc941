"""holdfast sweep: lists by default, removes on demand, and tells both to people and to programs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import holdfast
from holdfast.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    holdfast.save({"w": torch.ones(3)}, tmp_path / "step")
    for name in ("data-dead-0-0.safetensors", "index-dead.safetensors"):
        (tmp_path / "step" / name).write_bytes(bytes(2048))
    return tmp_path


def test_nothing_to_do_is_one_line(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert (result.exit_code, result.stdout) == (0, "nothing dead in 1 directory\n")


def test_a_url_is_refused_by_name() -> None:
    result = run("ftp://bucket/checkpoints")
    assert result.exit_code == 2
    assert "only directories and object stores can be swept" in result.stderr


def test_a_dry_run_lists_what_is_dead_and_how_to_remove_it(root: Path) -> None:
    result = run(root)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "2 dead files, 4.0 KiB, in 2 directories; --delete removes them"
    assert "no writer" in result.stdout
    assert (root / "step" / "data-dead-0-0.safetensors").exists()


def test_delete_removes_and_says_how_many(root: Path) -> None:
    result = run(root, "--delete")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "removed 2 files in 2 directories"
    assert len(os.listdir(root / "step")) == 3
    holdfast.load(root / "step")


def test_json_is_one_object(root: Path) -> None:
    found = json.loads(run(root, "--json", "--delete").stdout)
    assert found["removed_files"] == 2
    (leftover,) = found["leftovers"]
    assert leftover["attempt"] == "dead"
    assert leftover["verdict"] == "dead"
    assert leftover["removed"] == ["data-dead-0-0.safetensors", "index-dead.safetensors"]


def test_attempts_that_are_named_go_even_where_locks_do_not_tell(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast._io.locks.are_reliable", lambda descriptor: (False, "nfs4"))
    assert "nfs4" in run(root, "--delete").stdout
    assert (root / "step" / "index-dead.safetensors").exists()
    assert run(root, "--delete", "--attempt", "dead").exit_code == 0
    assert not (root / "step" / "index-dead.safetensors").exists()


def test_what_cannot_be_looked_at_is_exit_code_4(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*args: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refusing)
    result = run(root, "--delete")
    assert result.exit_code == 4
    assert result.stderr.startswith("problem: cannot sync")


def test_a_missing_root_is_one_line_and_exit_code_3(tmp_path: Path) -> None:
    result = run(tmp_path / "nothing")
    assert result.exit_code == 3
    assert result.stderr.startswith("error: there is no directory")
    assert len(result.stderr.splitlines()) == 1
