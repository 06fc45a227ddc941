"""The listing is the truth: what is on disk is what there is, whatever its names look like."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from outside_views import locked_directory

import holdfast


def save(root: Path, *steps: int, attempt: str | None = None, **metrics: float) -> None:
    kept = {"metrics": metrics} if metrics else {}
    for step in steps:
        writer = holdfast.NativeWriter(root / f"step-{step}", attempt=attempt, user_metadata={"step": step, **kept})
        holdfast.save({"a": torch.ones(100), "step": step}, storage_writer=writer)


def numbers(root: Path) -> list[int]:
    return [step.step for step in holdfast.Steps(root).steps()]


def data_file(path: str | Path) -> Path:
    return next(Path(path).glob("data-*"))


def test_steps_are_listed_in_order_with_what_their_manifests_say(tmp_path: Path) -> None:
    save(tmp_path, 100, 9, 20, attempt="one", loss=0.5)
    steps = holdfast.Steps(tmp_path).steps()
    assert [step.step for step in steps] == [9, 20, 100]
    newest = steps[-1]
    path = tmp_path / "step-100"
    sizes = sum(file.stat().st_size for file in path.iterdir() if file.name != "manifest.json")
    assert newest == holdfast.Step(
        step=100,
        path=str(path),
        attempt="one",
        saved_at=newest.saved_at,
        bytes=sizes,
        world_size=1,
        metrics={"loss": 0.5},
        pinned=False,
        problem="",
    )
    assert newest.saved_at is not None
    assert newest.saved_at.endswith("Z")


def test_what_is_named_otherwise_is_no_step(tmp_path: Path) -> None:
    save(tmp_path, 7)
    for name in ("step-100.tmp", "step-backup", "step-007", "step-", "step--1", "step-1e3", "STEP-8", "step-٣", "x-9"):
        shutil.copytree(tmp_path / "step-7", tmp_path / name)
    (tmp_path / "step-9").symlink_to("step-7")
    (tmp_path / "step-11").write_text("a file")
    assert numbers(tmp_path) == [7]


def test_a_save_under_way_is_never_a_step(tmp_path: Path) -> None:
    save(tmp_path, 1)
    steps = holdfast.Steps(tmp_path)
    listed: list[list[int]] = []
    real_rename = os.rename

    def rename(source: Any, target: Any, **kwargs: Any) -> None:
        listed.append([step.step for step in steps.steps()])
        latest = steps.latest()
        assert latest is not None
        assert latest.step == 1
        real_rename(source, target, **kwargs)

    with mock.patch.object(os, "rename", rename):
        save(tmp_path, 2)
    assert listed == [[1]]
    assert numbers(tmp_path) == [1, 2]


def test_what_killed_saves_left_is_no_step(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    (tmp_path / "step-3" / "manifest.json").unlink()
    (tmp_path / "step-4").mkdir()
    assert numbers(tmp_path) == [1, 2]
    latest = holdfast.Steps(tmp_path).latest()
    assert latest is not None
    assert latest.step == 2


def test_a_root_that_is_not_there_is_empty_and_one_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    steps = holdfast.Steps(tmp_path / "later")
    assert steps.steps() == []
    assert steps.latest() is None
    assert steps.best("loss") is None
    (tmp_path / "file").write_text("x")
    with pytest.raises(holdfast.NotACheckpointError, match="is a file; the root of a run is a directory"):
        holdfast.Steps(tmp_path / "file").steps()
    with pytest.raises(ValueError, match="in a directory, or in an object store"):
        holdfast.Steps("ftp://bucket/run")
    save(tmp_path / "later", 5)
    assert [step.step for step in steps.steps()] == [5]


def test_a_manifest_that_cannot_be_read_is_told_and_is_never_the_latest(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    os.truncate(tmp_path / "step-2" / "manifest.json", 100)
    steps = holdfast.Steps(tmp_path)
    first, second = steps.steps()
    assert (first.problem, second.attempt, second.bytes) == ("", "", 0)
    assert "does not start and end like a manifest" in second.problem
    assert steps.latest() == first


def test_an_old_step_that_cannot_be_looked_at_does_not_hide_the_latest(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    real, refused = os.stat, []

    def stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if "step-1" in str(path):
            refused.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *args, **kwargs)

    with mock.patch.object(os, "stat", stat), mock.patch.object(os, "lstat", stat):
        latest = holdfast.Steps(tmp_path).latest()
        assert (latest is not None and latest.step, refused) == (2, [])
        with pytest.raises(holdfast.StorageError):
            holdfast.Steps(tmp_path).steps()
    assert refused


@pytest.mark.parametrize("damage", ["missing", "short", "index"])
def test_the_latest_has_all_its_files(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1, 2, loss=0.5)
    if damage == "missing":
        data_file(tmp_path / "step-2").unlink()
    elif damage == "short":
        os.truncate(data_file(tmp_path / "step-2"), 10)
    else:
        next((tmp_path / "step-2").glob("index-*")).unlink()
    steps = holdfast.Steps(tmp_path)
    assert numbers(tmp_path) == [1, 2]
    for found in (steps.latest(), steps.best("loss")):
        assert found is not None
        assert found.step == 1


def test_the_best_step(tmp_path: Path) -> None:
    for step, loss in ((1, 0.5), (2, 0.25), (3, math.nan), (4, 0.25), (5, math.inf)):
        save(tmp_path, step, loss=loss)
    save(tmp_path, 6)
    steps = holdfast.Steps(tmp_path)

    def best(metric: str, mode: Any = "min") -> int | None:
        found = steps.best(metric, mode)
        return None if found is None else found.step

    assert best("loss") == 4
    assert best("loss", "max") == 5
    assert best("accuracy") is None
    for step in (1, 2, 4, 5):
        steps.delete(step)
    assert best("loss") == best("loss", "max") == 3
    with pytest.raises(ValueError, match="mode is 'min' or 'max', not 'low'"):
        best("loss", "low")


def test_metrics_may_come_later_from_anywhere(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, loss=0.5)
    here, elsewhere = holdfast.Steps(tmp_path), holdfast.Steps(tmp_path)
    assert here.steps()[0].metrics == {"loss": 0.5}
    elsewhere.report(1, {"val_loss": 2, "accuracy": torch.tensor(0.75), "bleu": np.float32(0.25)})
    elsewhere.report(1, {"val_loss": math.inf, "loss": math.nan, "step": torch.tensor([3])})
    metrics = here.steps()[0].metrics
    assert math.isnan(metrics.pop("loss"))
    assert metrics == {"val_loss": math.inf, "accuracy": 0.75, "bleu": 0.25, "step": 3.0}
    assert all(type(value) is float for value in metrics.values())
    assert here.steps()[1].metrics == {"loss": 0.5}
    kept = json.loads((tmp_path / "step-1" / "metrics.json").read_text())
    assert kept["attempt"] == here.steps()[0].attempt
    assert (kept["metrics"]["val_loss"], kept["metrics"]["loss"], kept["metrics"]["bleu"]) == ("inf", "nan", 0.25)
    assert sorted(name.partition("-")[0] for name in os.listdir(tmp_path / "step-1")) == [
        "data",
        "index",
        "manifest.json",
        "metrics.json",
    ]


@pytest.mark.parametrize(
    "value", [True, "0.5", None, [1.0], torch.ones(2), np.ones(2), 1j, 10**400, b"1", torch.ones(0)]
)
def test_what_is_no_number_is_no_metric(tmp_path: Path, value: object) -> None:
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="the metric 'loss' is one number, not"):
        holdfast.Steps(tmp_path).report(1, {"good": 1.0, "loss": value})
    assert holdfast.Steps(tmp_path).steps()[0].metrics == {}
    with pytest.raises(ValueError, match="the name of a metric is a text"):
        holdfast.Steps(tmp_path).report(1, {3: 1.0})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="metrics is a dict of numbers by name"):
        holdfast.Steps(tmp_path).report(1, [("loss", 1.0)])  # type: ignore[arg-type]


def test_metrics_of_a_step_that_is_saved_again_no_longer_count(tmp_path: Path) -> None:
    save(tmp_path, 1, loss=0.5)
    steps = holdfast.Steps(tmp_path)
    steps.report(1, {"loss": 0.1, "val_loss": 0.2})
    save(tmp_path, 1, loss=0.75)
    assert steps.steps()[0].metrics == {"loss": 0.75}
    steps.report(1, {"val_loss": 0.3})
    assert steps.steps()[0].metrics == {"loss": 0.75, "val_loss": 0.3}


def test_metrics_that_nobody_here_wrote_do_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, loss=0.5)
    wrong = b'{"attempt":"x","metrics":{"loss":"low"}}'
    for contents in (b"", b"{", b'{"attempt":"x","metrics":{"loss":1}}', wrong, b"[" * 100_000, bytes(1 << 21)):
        (tmp_path / "step-1" / "metrics.json").write_bytes(contents)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="holdfast"):
            assert holdfast.Steps(tmp_path).steps()[0].metrics == {"loss": 0.5}
        assert bool(caplog.records) == (b'loss":1' not in contents)
    (tmp_path / "step-1" / "metrics.json").unlink()
    save(tmp_path, 2)
    holdfast.save({}, storage_writer=holdfast.NativeWriter(tmp_path / "step-3", user_metadata={"metrics": "mine"}))
    assert [step.metrics for step in holdfast.Steps(tmp_path).steps()] == [{"loss": 0.5}, {}, {}]


def test_pins_protect_a_step(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    steps = holdfast.Steps(tmp_path)
    steps.pin(1)
    steps.pin(1)
    assert [step.pinned for step in steps.steps()] == [True, False]
    with pytest.raises(holdfast.BusyError, match="pinned"):
        steps.delete(1)
    steps.unpin(1)
    steps.unpin(1)
    assert [step.pinned for step in steps.steps()] == [False, False]
    (tmp_path / "step-1" / "pinned").touch()
    assert holdfast.Steps(tmp_path).steps()[0].pinned
    assert steps.delete(1, force=True).path == str(tmp_path / "step-1")
    assert numbers(tmp_path) == [2]


def test_the_only_whole_step_stays_unless_forced(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    data_file(tmp_path / "step-3").unlink()
    os.truncate(tmp_path / "step-2" / "manifest.json", 10)
    steps = holdfast.Steps(tmp_path)
    with pytest.raises(holdfast.BusyError, match=r"step 1 of .* is the only one that is whole"):
        steps.delete(1)
    steps.delete(2)
    steps.delete(3)
    assert numbers(tmp_path) == [1]
    steps.delete(1, force=True)
    assert os.listdir(tmp_path) == []


def test_two_who_delete_come_one_after_the_other(tmp_path: Path) -> None:
    """Each would find the other's step whole, and none would be left."""
    save(tmp_path, 1, 2)
    with (
        locked_directory(tmp_path),
        mock.patch("time.monotonic", side_effect=itertools.count(0, 5)),
        mock.patch("time.sleep"),
        pytest.raises(holdfast.BusyError, match="another process is at work"),
    ):
        holdfast.Steps(tmp_path).delete(1)
    assert numbers(tmp_path) == [1, 2]


@pytest.mark.parametrize("call", ["report", "pin", "unpin", "delete"])
def test_a_step_that_is_not_there_is_named_with_those_that_are(tmp_path: Path, call: str) -> None:
    arguments = ({"loss": 1.0},) if call == "report" else ()
    with pytest.raises(holdfast.NotFoundError, match=r"there is no step 7 in .*; there are none"):
        getattr(holdfast.Steps(tmp_path / "root"), call)(7, *arguments)
    save(tmp_path, 1, 20)
    (tmp_path / "step-8").mkdir()
    for missing in (7, 8):
        with pytest.raises(holdfast.NotFoundError, match=rf"there is no step {missing} in .*; there are \(1, 20\)"):
            getattr(holdfast.Steps(tmp_path), call)(missing, *arguments)


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True, 10**18])
def test_what_is_no_number_is_no_step(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ValueError, match="a step is a whole number"):
        holdfast.Steps(tmp_path).pin(step)
    assert holdfast.Steps(tmp_path).path(np.int64(3)) == str(tmp_path / "step-3")


def test_a_root_may_be_moved(tmp_path: Path) -> None:
    save(tmp_path / "before", 1, 2, loss=0.5)
    steps = holdfast.Steps(tmp_path / "before")
    steps.report(1, {"loss": 0.25})
    steps.pin(2)
    (tmp_path / "before").rename(tmp_path / "after")
    moved = holdfast.Steps(tmp_path / "after")
    best = moved.best("loss")
    assert best is not None
    assert best.path == str(tmp_path / "after" / "step-1")
    assert holdfast.read(best.path)["step"] == 1
    assert [step.pinned for step in moved.steps()] == [False, True]
    assert steps.steps() == []


def test_manifests_are_read_once(tmp_path: Path) -> None:
    save(tmp_path, *range(5))
    steps = holdfast.Steps(tmp_path)
    opened: list[str] = []
    real = os.open

    def note(name: Any, *args: Any, **kwargs: Any) -> int:
        if os.path.basename(name) == "manifest.json":
            opened.append(os.path.basename(os.path.dirname(name)))
        return real(name, *args, **kwargs)

    with mock.patch.object(os, "open", note):
        steps.steps()
        assert len(opened) == 5
        steps.steps()
        assert len(opened) == 5
        save(tmp_path, 3)
        opened.clear()
        steps.steps()
        assert opened == ["step-3"]
        opened.clear()
        assert holdfast.Steps(tmp_path).latest() is not None
        assert set(opened) == {"step-4"}, "the latest of many is found without reading all"


@pytest.mark.parametrize("way", ["latest", "steps"])
def test_a_look_that_is_overtaken_by_all_looks_again(tmp_path: Path, way: str) -> None:
    """Steps come and go all the time, but there is always one."""
    save(tmp_path, 1, 2)
    steps, real = holdfast.Steps(tmp_path), os.open
    moved: list[object] = []

    def overtaken(name: Any, *args: Any, **kwargs: Any) -> int:
        if os.path.basename(name) == "manifest.json" and not moved:
            moved.append(name)
            with mock.patch.object(os, "open", real):
                save(tmp_path, 3, 4)
                for step in (1, 2):
                    holdfast.delete(tmp_path / f"step-{step}")
        return real(name, *args, **kwargs)

    with mock.patch.object(os, "open", overtaken):
        found = getattr(steps, way)()
    assert found is not None
    assert (found.step if way == "latest" else [step.step for step in found]) == (4 if way == "latest" else [3, 4])


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_what_cannot_be_looked_at_is_not_taken_for_damaged(tmp_path: Path, code: int) -> None:
    save(tmp_path, 1, 2)
    steps, real = holdfast.Steps(tmp_path), os.open

    def refused(name: Any, *args: Any, **kwargs: Any) -> int:
        if os.path.basename(name) in ("manifest.json", "metrics.json") and "step-2" in str(name):
            raise OSError(code, os.strerror(code))
        return real(name, *args, **kwargs)

    (tmp_path / "step-2" / "metrics.json").touch()
    with mock.patch.object(os, "open", refused):
        assert [bool(step.problem) for step in steps.steps()] == [False, True]
        for act in (steps.latest, lambda: steps.delete(1), lambda: steps.pin(2), lambda: steps.report(2, {"a": 1.0})):
            with pytest.raises(holdfast.StorageError) as caught:
                act()
            assert caught.value.errno == code
    assert [step.problem for step in steps.steps()] == ["", ""]


def test_metrics_that_cannot_be_read_now_are_not_written_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    steps, real = holdfast.Steps(tmp_path), os.open
    steps.report(1, {"loss": 1.0})

    def refused(name: Any, *args: Any, **kwargs: Any) -> int:
        if os.path.basename(name) == "metrics.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(name, *args, **kwargs)

    with mock.patch.object(os, "open", refused), pytest.raises(holdfast.StorageError, match=r"metrics\.json"):
        steps.report(1, {"accuracy": 0.5})
    assert steps.steps()[0].metrics == {"loss": 1.0}


def test_what_killed_deletions_left_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4)
    for step in (1, 2, 3):
        (tmp_path / f"step-{step}" / "metrics.json").write_text("{}")
        (tmp_path / f"step-{step}" / "manifest.json").rename(tmp_path / f"step-{step}" / "manifest-x.tmp")
    (tmp_path / "step-2" / "notes.txt").write_text("mine")
    (tmp_path / "step-5").mkdir()
    holdfast.save({"a": torch.ones(1)}, storage_writer=holdfast.FileSystemWriter(tmp_path / "step-6"))
    descriptor = os.open(data_file(tmp_path / "step-3"), os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        holdfast.Steps(tmp_path).finish_deletions()
    finally:
        os.close(descriptor)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3", "step-4", "step-6"]
    assert os.listdir(tmp_path / "step-2") == ["notes.txt"]
    assert len(os.listdir(tmp_path / "step-3")) == 4
    assert holdfast.verify(tmp_path / "step-6").ok
    assert numbers(tmp_path) == [4]
