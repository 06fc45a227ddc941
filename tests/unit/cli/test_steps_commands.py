"""holdfast steps, pin, unpin, report and delete: tables for people, JSON for programs, exit codes for both."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import holdfast
from holdfast.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 20, 300):
        kept = {"step": step, "metrics": {"loss": 1 / step}}
        holdfast.save({"w": torch.ones(3)}, tmp_path / f"step-{step}", user_metadata=kept)
    return tmp_path


def numbers(root: Path) -> list[int]:
    return [step.step for step in holdfast.Steps(root).steps()]


def test_steps_are_a_table(root: Path) -> None:
    assert run("pin", root, 1).exit_code == 0
    next((root / "step-20").glob("data-*")).unlink()
    os.truncate(root / "step-300" / "manifest.json", 10)
    result = run("steps", root)
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert rows[0] == ["step", "age", "size", "metrics", "whole"]
    assert rows[2][0] == "1"
    assert rows[2][2] == "s"
    assert rows[2][-3:] == ["1", "whole", "pinned"]
    assert rows[3][0] == "20"
    assert "files are missing" in result.stdout
    assert "does not start" in " ".join(result.stdout.split())


def test_a_held_step_is_marked(root: Path) -> None:
    followed = holdfast.follow(root)
    next(followed)
    (row,) = [line for line in run("steps", root).stdout.splitlines() if line.strip().startswith("300")]
    assert row.split()[-1] == "held"
    assert json.loads(run("steps", root, "--json").stdout)["steps"][-1]["held"] is True
    result = run("delete", root, 300, "--force")
    assert result.exit_code == 1
    assert "a reader holds step 300" in result.stderr


def test_steps_as_json(root: Path) -> None:
    holdfast.Steps(root).report(20, {"loss": math.nan, "val_loss": math.inf})
    found = json.loads(run("steps", root, "--json").stdout)
    assert found["root"] == str(root)
    assert [step["step"] for step in found["steps"]] == [1, 20, 300]
    step = found["steps"][1]
    assert step["metrics"] == {"loss": "nan", "val_loss": "inf"}
    assert (step["whole"], step["pinned"], step["held"], step["world_size"]) == (True, False, False, 1)
    assert step["path"] == str(root / "step-20")


def test_a_root_without_steps(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = run("steps", tmp_path / "empty")
    assert (result.exit_code, result.stdout) == (0, f"no steps in {tmp_path / 'empty'}\n")
    result = run("steps", tmp_path / "missing")
    assert (result.exit_code, result.stderr) == (3, f"error: there is no directory '{tmp_path / 'missing'}'\n")
    holdfast.save({"w": torch.ones(3)}, tmp_path / "checkpoint")
    result = run("steps", tmp_path / "checkpoint")
    assert result.exit_code == 3
    assert "is a checkpoint, not the directory of a run" in result.stderr
    (tmp_path / "file").touch()
    result = run("steps", tmp_path / "file")
    assert result.exit_code == 3
    assert "is a file" in result.stderr


def test_ages_are_in_the_largest_unit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datetime

    import holdfast.cli.steps

    now = datetime.datetime.now(datetime.timezone.utc)
    shown = []
    for seconds in (0, 119, 120, 7199, 7200, 172_799, 172_800, -50):
        saved = (now - datetime.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")

        class Clock(datetime.datetime):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
                return now.replace(microsecond=0)

        monkeypatch.setattr(holdfast.cli.steps, "datetime", Clock)
        shown.append(holdfast.cli.steps._age(saved))
    assert shown == ["0 s", "119 s", "2 min", "119 min", "2 h", "47 h", "2 d", "0 s"]


def test_metrics_are_reported(root: Path) -> None:
    assert run("report", root, 20, "val_loss=2.1", "loss=nan").exit_code == 0
    metrics = holdfast.Steps(root).steps()[1].metrics
    assert metrics["val_loss"] == 2.1
    assert math.isnan(metrics["loss"])
    assert run("report", root, 1, "val_loss=3").stdout == "step 1 has loss 1, val_loss 3\n"
    told = json.loads(run("report", root, 20, "accuracy=0.5", "--json").stdout)
    assert told == {"root": str(root), "step": 20, "metrics": {"loss": "nan", "val_loss": 2.1, "accuracy": 0.5}}
    for wrong in ("val_loss", "val_loss=low", "=1"):
        result = run("report", root, 20, wrong)
        assert result.exit_code == 2, wrong
    result = run("report", root, 21, "loss=1")
    assert result.exit_code == 3
    assert "there are (1, 20, 300)" in result.stderr


def test_pins(root: Path) -> None:
    assert run("pin", root, 20).stdout == "step 20 is pinned\n"
    assert json.loads(run("pin", root, 20, "--json").stdout) == {"root": str(root), "step": 20, "pinned": True}
    assert json.loads(run("unpin", root, 300, "--json").stdout)["pinned"] is False
    assert holdfast.Steps(root).steps()[1].pinned
    result = run("delete", root, 20)
    assert result.exit_code == 1
    assert "is pinned; unpin it first, or pass --force" in result.stderr
    assert run("unpin", root, 20).exit_code == 0
    assert run("delete", root, 20).exit_code == 0
    assert run("pin", root, 20).exit_code == 3


def test_steps_are_deleted_by_number_or_path(root: Path) -> None:
    result = run("delete", root, 1, 20)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].startswith("deleted: 3 files, ")
    assert numbers(root) == [300]
    result = run("delete", root / "step-300")
    assert result.exit_code == 1
    assert "the only one that is whole; --force deletes it" in result.stderr
    assert numbers(root) == [300]
    found = json.loads(run("delete", "--json", "--force", root / "step-300").stdout)
    assert found["deleted"][0]["path"] == str(root / "step-300")
    assert numbers(root) == []
    assert run("delete", root, 300).exit_code == 3


def test_other_checkpoints_are_deleted_by_path(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(3)}, tmp_path / "model")
    holdfast.save({"w": torch.ones(3)}, storage_writer=holdfast.FileSystemWriter(tmp_path / "torch"))
    assert run("delete", tmp_path / "model", tmp_path / "torch").exit_code == 0
    assert os.listdir(tmp_path) == []
    result = run("delete", "--json", tmp_path / "model")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["error"]["kind"] == "NotFoundError"


def test_what_stays_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.unlink

    def unlink(name: str, **kwargs: int | None) -> None:
        if os.path.basename(name).startswith("data-"):
            raise OSError(1, "Operation not permitted")
        real(name, **kwargs)

    monkeypatch.setattr(os, "unlink", unlink)
    result = run("delete", root, 1)
    assert result.exit_code == 4
    assert "problem: cannot remove" in result.stderr
