"""URLs as people write them: what names the same place, what is refused, and never a directory of that name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast import CheckpointManager, Every, Steps, Store
from holdfast.cli import app
from tests.stores.conftest import Place, settings_of
from tests.stores.test_errors import DOORS
from tests.stores.test_store import make_bucket
from tools.store_servers import StoreServer

State = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("door", [door for door in DOORS if door != "Store"])
def test_a_url_that_pathlib_cut_is_refused(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    """``Path("s3://bucket/run")`` is a directory named "s3:"."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, holdfast.CheckpointError), match="was a URL until pathlib took a slash"):
        DOORS[door](Path(f"s3://{prefix}/run"))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_files_are_not_written_to_a_directory_named_as_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(holdfast.CheckpointError, match="was a URL"):
        holdfast.save({"x": 1}, storage_writer=holdfast.FileSystemWriter("s3://bucket/run"))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_named_so_may_be_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    holdfast.save({"x": 1}, "./s3:/a")
    assert holdfast.read(tmp_path / "s3:" / "a") == {"x": 1}


@pytest.mark.parametrize("url", ["s3://bucket/a//b", "s3://bucket//a", "memory://a//b", "gs://bucket/a///b/"])
def test_an_empty_name_between_slashes_is_refused(url: str) -> None:
    """Stores and tools differ in whether that is a name."""
    for door in (holdfast.read, holdfast.sweep, Store, lambda url: holdfast.save({"x": 1}, url)):
        with pytest.raises((ValueError, holdfast.CheckpointError), match="// in between"):
            door(url)


@pytest.mark.parametrize("name", [".", "..", "a/../b"])
def test_dots_are_no_names(bucket: Place, name: str) -> None:
    with pytest.raises(holdfast.StorageError, match="another name"):
        holdfast.save({"x": 1}, f"{bucket.url}/{name}")


def test_slashes_at_the_end_change_nothing(bucket: Place) -> None:
    holdfast.save({"x": 1}, f"{bucket.url}/a///")
    assert holdfast.read(f"{bucket.url}/a") == holdfast.read(f"{bucket.url}/a/") == {"x": 1}
    assert [step.step for step in Steps(f"{bucket.url}//").steps()] == []


def test_all_that_is_in_memory_is_a_store(prefix: str) -> None:
    assert Store("memory://") / prefix == f"memory://{prefix}"
    holdfast.save({"x": 1}, Store("memory://") / prefix)
    assert holdfast.read(f"memory://{prefix}") == {"x": 1}


def test_a_bucket_alone_holds_a_checkpoint_or_a_run(moto: StoreServer, prefix: str, state: State) -> None:
    make_bucket(moto, prefix)
    url = f"s3://{prefix}"
    Store(url, config=settings_of(moto))
    with CheckpointManager(url, save=Every(steps=1), keep=[holdfast.Latest(1)], stop=None) as run:
        for step in (1, 2):
            run.save(step, state(step))
    assert [step.step for step in Steps(f"{url}/").steps()] == [2]
    holdfast.save(state(7), f"{url}/")
    assert holdfast.read(url)["step"] == 7
    assert holdfast.verify(url).ok
    assert holdfast.sweep(url).leftovers == ()
    holdfast.delete(url)
    assert Steps(url).latest() is not None


def test_long_names(place: Place, same: Callable[..., None]) -> None:
    url = f"{place.url}/{'k' * 200}/{'é' * 100}"
    holdfast.save({"x": 1}, url)
    same(holdfast.read(url), {"x": 1})


@pytest.mark.parametrize("door", [holdfast.read, holdfast.open, holdfast.verify])
def test_one_object_is_no_checkpoint(bucket: Place, tmp_path: Path, door: Callable[[str], object]) -> None:
    torch.save({"x": 1}, tmp_path / "a.pt")
    bucket.put("a.pt", (tmp_path / "a.pt").read_bytes())
    with pytest.raises(holdfast.NotACheckpointError, match="is one object"):
        door(f"{bucket.url}/a.pt")


def told(*words: str) -> tuple[int, Any]:
    done = CliRunner().invoke(app, [*words, "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_the_commands_tell_programs(place: Place, state: State) -> None:
    for step in (1, 2, 3):
        holdfast.save(state(step), f"{place.url}/step-{step}")
    assert told("report", place.url, "2", "loss=0.5")[1]["metrics"] == {"loss": 0.5}
    assert told("pin", place.url, "1") == (0, {"root": place.url, "step": 1, "pinned": True})
    code, found = told("delete", place.url, "1")
    assert (code, found["error"]["kind"]) == (1, "BusyError")
    assert told("unpin", place.url, "1")[0] == 0
    code, found = told("delete", place.url, "1", "2")
    assert (code, [each["path"] for each in found["deleted"]]) == (0, [f"{place.url}/step-1", f"{place.url}/step-2"])
    code, found = told("steps", place.url)
    assert (code, [(each["step"], each["whole"]) for each in found["steps"]]) == (0, [(3, True)])
    assert told("verify", f"{place.url}/step-3")[0] == 0
    place.put("step-3/data-0123456789abcdef-0-0.safetensors", b"left")
    code, found = told("sweep", place.url, "--delete", "--attempt", "0123456789abcdef")
    assert (code, found["removed_files"]) == (0, 1)
    place.remove(place.data_of("step-3"))  # as a rule of the store does that knows nothing of steps
    code, found = told("steps", place.url)
    assert (code, [(each["step"], each["whole"]) for each in found["steps"]]) == (0, [(3, False)])
    assert told("verify", f"{place.url}/step-3")[0] == 1


@pytest.mark.parametrize(
    ("command", "name", "code"),
    [
        *((command, "nothing", 3) for command in ("show", "verify", "sweep", "steps", "delete")),
        *((command, "a?sig=h1dden", 2) for command in ("show", "verify", "sweep", "steps", "delete")),
    ],
)
def test_the_exit_codes(bucket: Place, command: str, name: str, code: int) -> None:
    found, said = told(command, f"{bucket.url}/{name}")
    assert (found, said["exit_code"]) == (code, code)
    assert "h1dden" not in json.dumps(said)
