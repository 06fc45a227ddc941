"""By a path alone either format is read, with the options that were asked for."""

from __future__ import annotations

import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast import LoadOptions
from holdfast.errors import CorruptError, MismatchError, NotFoundError, UnsafeError

KINDS = ("native", "torch")


class Thing:
    """Something that only a pickle keeps."""


@pytest.fixture
def thing(monkeypatch: pytest.MonkeyPatch) -> Thing:
    """One whose class can be imported, as that of a program's own."""
    monkeypatch.setattr(Thing, "__module__", "things")
    module = types.ModuleType("things")
    module.Thing = Thing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "things", module)
    return Thing()


def save(path: Path, kind: str, state: dict[str, object]) -> None:
    if kind == "native":
        holdfast.save(state, path, options=holdfast.SaveOptions(allow_pickle=True))
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_format_is_told_by_what_is_there(tmp_path: Path, kind: str) -> None:
    save(tmp_path, kind, {"w": torch.ones(2), "step": 3})
    assert (tmp_path / "manifest.json").exists() is (kind == "native")
    assert holdfast.load(tmp_path)["w"].tolist() == [1.0, 1.0]
    target = {"w": torch.zeros(2), "step": 0}
    holdfast.load(target, tmp_path)
    assert target["step"] == 3
    with holdfast.open(tmp_path) as checkpoint:
        assert checkpoint["step"] == 3
    assert not holdfast.verify(tmp_path).damage


@pytest.mark.parametrize("kind", KINDS)
def test_pickles_need_permission_in_either_format(tmp_path: Path, kind: str, thing: Thing) -> None:
    save(tmp_path, kind, {"thing": thing})
    for read in (
        lambda **options: holdfast.load(tmp_path, **options),
        lambda **options: holdfast.load({"thing": None}, tmp_path, **options),
    ):
        with pytest.raises(UnsafeError, match="thing"):
            read()
        read(options=LoadOptions(allow_pickle=True))
    assert isinstance(holdfast.load(tmp_path, options=LoadOptions(allow_pickle=True))["thing"], Thing)


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_are_cast_where_that_is_asked_for(tmp_path: Path, kind: str) -> None:
    save(tmp_path, kind, {"w": torch.ones(2)})
    target = {"w": torch.zeros(2, dtype=torch.float64)}
    with pytest.raises(MismatchError):
        holdfast.load(target, tmp_path)
    holdfast.load(target, tmp_path, options=LoadOptions(cast=True))
    assert target["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_contents_are_verified_unless_that_is_not_asked_for(tmp_path: Path, kind: str) -> None:
    weight = torch.arange(1.0, 1001.0)
    save(tmp_path, kind, {"w": weight})
    (file,) = (each for each in tmp_path.iterdir() if each.name.startswith("data-") or each.suffix == ".distcp")
    data = bytearray(file.read_bytes())
    data[data.index(weight.numpy().tobytes()) + 400] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError):
        holdfast.load(tmp_path)
    assert holdfast.load(tmp_path, options=LoadOptions(verify=False))["w"].ne(weight).sum() == 1


def test_native_wins_where_both_were(tmp_path: Path) -> None:
    save(tmp_path, "torch", {"w": torch.ones(2)})
    save(tmp_path, "native", {"w": torch.zeros(2)})
    assert holdfast.load(tmp_path)["w"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["missing", "empty", "file"])
def test_where_nothing_is_reading_says_so(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    for read in (holdfast.load, holdfast.open, holdfast.verify):
        with pytest.raises(NotFoundError):
            read(tmp_path / name)
