"""Which reader a checkpoint gets, and the nesting that its metadata tells."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast import Metadata, NativeReader
from holdfast._checkpoint import is_torch_format, reader_for
from holdfast._state.nested import restorable_paths, unflatten
from holdfast._torch_format.reader import FileSystemReader
from holdfast.errors import NotFoundError
from holdfast.metadata import BytesStorageMetadata


def save_with_torch(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({"w": torch.ones(2)}, checkpoint_id=path)


def test_the_format_is_told_by_what_is_there(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(2)}, tmp_path / "native")
    save_with_torch(tmp_path / "torch")
    assert isinstance(reader_for(tmp_path / "native"), NativeReader)
    reader = reader_for(tmp_path / "torch", verify=False, cast=True, allow_pickle=True)
    assert isinstance(reader, FileSystemReader)
    assert (reader.verify, reader.cast, reader.allow_pickle) == (False, True, True)
    assert reader_for(tmp_path / "torch").verify is None
    assert is_torch_format(tmp_path / "torch")
    assert not is_torch_format(tmp_path / "native")


def test_native_wins_where_both_are(tmp_path: Path) -> None:
    save_with_torch(tmp_path)
    holdfast.save({"w": torch.ones(2)}, tmp_path)
    assert isinstance(reader_for(tmp_path), NativeReader)


@pytest.mark.parametrize("name", ["missing", "empty", "file"])
def test_where_nothing_is_reading_says_so(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(NotFoundError):
        reader_for(tmp_path / name).read_metadata()


def nested(paths: dict[str, Any]) -> dict[Any, Any]:
    metadata = Metadata({key: BytesStorageMetadata() for key in paths}, planner_data=paths)
    return unflatten({key: key for key in paths}, restorable_paths(metadata))


def test_nesting_is_restored() -> None:
    assert nested({"a.0.x": ("a", 0, "x"), "a.1": ("a", 1), "b": ("b",)}) == {
        "a": [{"x": "a.0.x"}, "a.1"],
        "b": "b",
    }


def test_what_does_not_fit_together_stays_at_the_top() -> None:
    assert nested({"a.0": ("a", 0), "a.x": ("a", "x")}) == {"a": ["a.0"], "a.x": "a.x"}
    assert nested({"a": ("a",), "a.x": ("a", "x")}) == {"a": "a", "a.x": "a.x"}
    assert nested({"a.x": ("a", "x"), "a": ("a",)}) == {"a.x": "a.x", "a": "a"}
    assert nested({"a": None, "b": 7, "c": ()}) == {"a": "a", "b": "b", "c": "c"}


def test_without_paths_everything_is_at_the_top() -> None:
    metadata = Metadata({"a.b": BytesStorageMetadata()}, planner_data=None)
    assert restorable_paths(metadata) == {}
