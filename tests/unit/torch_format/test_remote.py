"""Checkpoints at URLs: torch's format over fsspec, read and written with the same care as files."""

from __future__ import annotations

import json
import os
import pickle
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from outside_views import torch_fsspec
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from holdfast.errors import (
    AlreadyPublishedError,
    CheckpointError,
    MismatchError,
    NotACheckpointError,
    NotFoundError,
    StorageError,
    UnsafeError,
)
from holdfast.fsspec_filesystem import FsspecReader, FsspecWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")


class Foreign:
    """Something that only a pickle keeps."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Foreign)

    __hash__ = None  # type: ignore[assignment]


def state() -> dict[str, Any]:
    return {"model": {"w": torch.arange(60.0).view(6, 10), "b": torch.arange(5, dtype=torch.bfloat16)}, "step": 7}


def target() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(6, 10), "b": torch.zeros(5, dtype=torch.bfloat16)}, "step": 0}


@pytest.fixture
def url() -> Iterator[str]:
    """A place in memory that nobody else has; nothing is there yet."""
    place = f"fsspec-memory://{uuid.uuid4()}/checkpoint"
    yield place
    memory = fsspec.filesystem("fsspec-memory")
    if memory.exists(os.path.dirname(place)):
        memory.rm(os.path.dirname(place), recursive=True)


def names(url: str) -> set[str]:
    return {os.path.basename(name) for name in fsspec.filesystem("fsspec-memory").ls(url, detail=False)}


def test_a_state_comes_back_without_allow_pickle(url: str, same: Callable[..., None]) -> None:
    holdfast.save(state(), url)
    into = target()
    report = holdfast.load(into, url)
    same(into, state())
    assert report.bytes_read > 0
    same(holdfast.load(url), state())
    assert names(url) == {".metadata", "__0_0.distcp"}


def test_torch_reads_what_was_written(url: str, same: Callable[..., None]) -> None:
    holdfast.save(state(), url)
    into = target()
    dcp.load(into, storage_reader=torch_fsspec.FsspecReader(url))
    same(into, state())


def test_what_torch_wrote_is_read(url: str, same: Callable[..., None]) -> None:
    dcp.save(state(), checkpoint_id=url)
    into = target()
    holdfast.load(into, url)
    same(into, state())
    with holdfast.open(url) as checkpoint:
        assert torch.equal(checkpoint["model.w"][2:4, 1], state()["model"]["w"][2:4, 1])
        assert checkpoint["step"] == 7


def test_async_save_goes_to_a_url(url: str, same: Callable[..., None]) -> None:
    saved = state()
    handle = holdfast.async_save(saved, url)
    saved["model"]["w"].zero_()
    handle.result()
    same(holdfast.load(url), state())


def test_the_metadata_runs_no_code(url: str, tmp_path: Path) -> None:
    """torch runs whatever is there."""
    holdfast.save(state(), url)
    ran = str(tmp_path / "ran")

    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.makedirs, (ran,)

    fsspec.filesystem("fsspec-memory").pipe_file(f"{url}/.metadata", pickle.dumps(Trap()))
    for read in (lambda: holdfast.load(url), lambda: holdfast.load(target(), url), lambda: holdfast.open(url)):
        with pytest.raises(UnsafeError, match=r"\.metadata"):
            read()
    assert not os.path.exists(ran)
    with pytest.raises(AttributeError):
        torch_fsspec.FsspecReader(url).read_metadata()
    assert os.path.exists(ran)


def test_objects_need_allow_pickle(url: str) -> None:
    dcp.save({"a": Foreign()}, checkpoint_id=url)
    with pytest.raises(UnsafeError, match="allow_pickle"):
        holdfast.load(url)
    assert holdfast.load(url, options=holdfast.LoadOptions(allow_pickle=True)) == {"a": Foreign()}


def test_strict_and_cast_are_those_of_files(url: str) -> None:
    holdfast.save({"a": torch.ones(3)}, url)
    half = {"a": torch.zeros(3, dtype=torch.float16)}
    with pytest.raises(MismatchError, match="dtype"):
        holdfast.load(half, url)
    holdfast.load(half, url, options=holdfast.LoadOptions(cast=True))
    assert half["a"].tolist() == [1, 1, 1]


def test_a_checkpoint_is_replaced_and_its_files_go(url: str) -> None:
    holdfast.save({"a": torch.zeros(3)}, url)
    holdfast.save({"a": torch.ones(3)}, url)
    assert holdfast.load(url)["a"].tolist() == [1, 1, 1]
    assert len(names(url)) == 2
    with pytest.raises(AlreadyPublishedError):
        holdfast.save({"a": torch.zeros(3)}, url, overwrite=False)
    assert holdfast.load(url)["a"].tolist() == [1, 1, 1]


def test_a_failed_save_leaves_the_old_checkpoint_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holdfast.save({"a": torch.zeros(3)}, url)
    before = names(url)
    failed = []

    def refuse(*args: Any, **kwargs: Any) -> None:
        failed.append(args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(fsspec.filesystem("fsspec-memory")), "mv", refuse)
    with pytest.raises(StorageError, match="No space left"):
        holdfast.save({"a": torch.ones(3)}, url)
    assert len(failed) == 1
    assert names(url) == before
    assert holdfast.load(url)["a"].tolist() == [0, 0, 0]


def test_a_stream_that_fails_leaves_no_file(url: str) -> None:
    fs = FsspecWriter(url).fs
    fs.mkdir(url)

    def fail() -> None:
        with fs.create_stream(f"{url}/half", "wb") as stream:
            stream.write(b"1234")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert names(url) == set()


def test_nothing_there_is_not_found(url: str) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint"):
        holdfast.load(url)
    fsspec.filesystem("fsspec-memory").makedirs(url)
    with pytest.raises(NotACheckpointError, match=r"\.metadata"):
        holdfast.load(url)


def test_file_urls_are_files(tmp_path: Path, same: Callable[..., None]) -> None:
    place = f"file://{tmp_path}/x"
    holdfast.save(state(), storage_writer=FsspecWriter(place, thread_count=2, auto_mkdir=True))
    assert {path.name for path in (tmp_path / "x").iterdir()} == {".metadata", "__0_0.distcp", "__0_1.distcp"}
    into = target()
    holdfast.load(into, storage_reader=FsspecReader(place))
    same(into, state())
    same(holdfast.load(tmp_path / "x"), state())


def test_a_writer_is_reset_to_another_url(url: str) -> None:
    writer = FsspecWriter(f"{url}/1")
    holdfast.save({"a": 1}, storage_writer=writer)
    holdfast.save({"a": 2}, f"{url}/2", storage_writer=writer)
    assert [holdfast.load(f"{url}/{number}")["a"] for number in (1, 2)] == [1, 2]


def test_ids_that_are_valid(tmp_path: Path) -> None:
    assert FsspecWriter.validate_checkpoint_id("fsspec-memory://a")
    assert not FsspecWriter.validate_checkpoint_id("no-such-scheme://a")
    assert not FsspecReader.validate_checkpoint_id(tmp_path)


def test_a_scheme_that_nobody_knows_is_named() -> None:
    for use in (lambda: holdfast.save({"a": 1}, "nosuch://a/b"), lambda: holdfast.load("nosuch://a/b")):
        with pytest.raises(RuntimeError, match=r"fsspec has no storage for 'nosuch://a/b' .*nosuch"):
            use()


def test_without_fsspec_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    for use in (lambda: holdfast.save({"a": 1}, "fsspec-memory://a"), lambda: holdfast.open("fsspec-memory://a")):
        with pytest.raises(RuntimeError, match="need fsspec; install it"):
            use()


def test_user_metadata_has_no_place_there(url: str) -> None:
    with pytest.raises(ValueError, match="user_metadata"):
        holdfast.save({"a": 1}, url, user_metadata={"b": 2})


def test_show_takes_a_url(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/x"
    holdfast.save(state(), place)
    shown = CliRunner().invoke(app, ["show", "--json", place])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert set(found["keys"]) == {"model.w", "model.b", "step"}
    assert found["path"] == place
    assert found["totals"]["files"] == 2
    assert found["totals"]["bytes"] == sum(path.stat().st_size for path in (tmp_path / "x").iterdir())


@pytest.mark.parametrize(
    "command",
    [["show", "nosuch://a"], ["verify", "fsspec-memory://a"], ["convert", "fsspec-memory://a", "b", "--to", "native"]],
    ids=lambda command: command[0],
)
def test_commands_refuse_what_they_cannot_do_at_a_url(command: list[str]) -> None:
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2, refused.output
    assert "URL" in refused.output or "fsspec has no storage" in refused.output


def test_a_truncated_file_is_corrupt(url: str) -> None:
    holdfast.save(state(), url)
    memory = fsspec.filesystem("fsspec-memory")
    memory.pipe_file(f"{url}/__0_0.distcp", memory.cat_file(f"{url}/__0_0.distcp")[:-40])
    with pytest.raises(CheckpointError, match="truncated"):
        holdfast.load(url)
