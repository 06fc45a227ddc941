"""A checkpoint in torch's format at a URL of an object store is found out, and read by fsspec."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import obstore
import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from holdfast.fsspec_filesystem import FsspecReader, FsspecWriter
from tests.stores.conftest import Place

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")
State = Callable[..., dict[str, Any]]


@pytest.fixture
def url(place: Place, tmp_path: Path, state: State) -> str:
    """Where a checkpoint of torch's own lies."""
    dcp.save(state(3), checkpoint_id=tmp_path / "torch")
    for file in (tmp_path / "torch").iterdir():
        place.put(f"a/{file.name}", file.read_bytes())
    return f"{place.url}/a"


def test_fsspec_is_asked_for_it(bucket: Place, tmp_path: Path, state: State) -> None:
    assert importlib.util.find_spec("s3fs") is None, "it would read it then: have this test compare what it reads"
    dcp.save(state(3), checkpoint_id=tmp_path / "torch")
    for file in (tmp_path / "torch").iterdir():
        bucket.put(f"a/{file.name}", file.read_bytes())
    for door in (
        holdfast.read,
        holdfast.open,
        lambda url: holdfast.load({"w": torch.zeros(64, 3), "step": 0}, url),
    ):
        with pytest.raises((ImportError, holdfast.CheckpointError, ValueError), match="s3fs") as caught:
            door(f"{bucket.url}/a")
        assert not isinstance(caught.value, holdfast.NotFoundError)


@pytest.fixture
def in_memory(prefix: str, tmp_path: Path, state: State) -> str:
    """Where fsspec's memory has a checkpoint in torch's format, and the store of the same URL has it too."""
    url = f"memory://{prefix}/a"
    holdfast.save(state(3), storage_writer=FsspecWriter(url))
    client = holdfast.Store(f"memory://{prefix}").client
    folder = fsspec.filesystem("memory")
    for name in folder.ls(f"/{prefix}/a", detail=False):
        obstore.put(client, name.lstrip("/"), folder.cat(name))
    return url


def test_it_is_written_by_an_explicit_writer_and_found(in_memory: str, state: State, same: Callable[..., None]) -> None:
    same(holdfast.read(in_memory), state(3))
    for how in ({"checkpoint_id": in_memory}, {"storage_reader": FsspecReader(in_memory)}):
        target = {"w": torch.zeros(64, 3), "step": 0}
        holdfast.load(target, **how)
        same(target, state(3))
    with holdfast.open(in_memory) as checkpoint:
        assert checkpoint["w"][:2].equal(state(3)["w"][:2])
    shown = CliRunner().invoke(app, ["show", in_memory], env={"COLUMNS": "250"})
    assert (shown.exit_code, "torch.distributed.checkpoint" in shown.output) == (0, True)
    with pytest.raises(ValueError, match="copy it to a directory, and convert it there"):
        holdfast.convert(in_memory, f"{in_memory}-native", to="native")


def test_programs_of_torch_have_native_checkpoints_there_where_names_are_replaced(
    in_memory: str, place: Place, state: State, same: Callable[..., None]
) -> None:
    """They write native ones to a URL. They could not read them again."""
    with holdfast.interop.use_in_torch():
        dcp.save(state(4), checkpoint_id=f"{place.url}/b")
        dcp.async_save(state(5), checkpoint_id=f"{place.url}/c").result()
        for url, number in ((f"{place.url}/b", 4), (f"{place.url}/c", 5), (in_memory, 3)):
            target = {"w": torch.zeros(64, 3), "step": 0}
            dcp.load(target, checkpoint_id=url)
            same(target, state(number))
            if url != in_memory:
                same(holdfast.read(url), state(number))


def test_verify_says_what_to_do(url: str) -> None:
    with pytest.raises(ValueError, match="torch's format; copy it to a directory"):
        holdfast.verify(url)


@pytest.mark.parametrize("overwrite", [False, True])
def test_it_is_not_replaced_by_a_native_one(place: Place, url: str, state: State, overwrite: bool) -> None:
    before = place.objects("a")
    with pytest.raises(holdfast.AlreadyPublishedError, match="torch's format"):
        holdfast.save(state(4), url, overwrite=overwrite)
    assert place.objects("a") == before


def test_it_is_not_deleted_or_swept(place: Place, url: str) -> None:
    before = place.objects("a")
    with pytest.raises(holdfast.CheckpointError):
        holdfast.delete(url)
    assert holdfast.sweep(place.url, delete=True).leftovers == ()
    assert place.objects("a") == before


def test_the_marker_of_a_native_checkpoint_is_no_checkpoint(place: Place, state: State, tmp_path: Path) -> None:
    """A directory that torch's programs wrote with our storage has one. Copied up, it is native still."""
    writer = holdfast.NativeWriter(tmp_path / "here")
    writer.leaves_marker = True
    holdfast.save(state(1), storage_writer=writer)
    assert (tmp_path / "here" / ".metadata").exists()
    for file in (tmp_path / "here").iterdir():
        place.put(f"a/{file.name}", file.read_bytes())
    assert holdfast.read(f"{place.url}/a")["step"] == 1
    holdfast.save(state(2), f"{place.url}/a")
    assert holdfast.read(f"{place.url}/a")["step"] == 2
    holdfast.delete(f"{place.url}/a")
    assert list(place.objects("a")) == ["manifest.json"]


def test_both_formats_are_nobodys_choice(place: Place, url: str, state: State, tmp_path: Path) -> None:
    holdfast.save(state(1), tmp_path / "native")
    for file in (tmp_path / "native").iterdir():
        place.put(f"a/{file.name}", file.read_bytes())
    with pytest.raises(holdfast.CorruptError, match="two checkpoints"):
        holdfast.read(url)
