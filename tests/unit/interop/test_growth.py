"""What a conversion may make of its source: in proportion to it, unless the caller says how much."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from holdfast.errors import InvalidStateError
from holdfast.interop import convert

MIB = 1 << 20

STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "expanded": lambda: {"small": torch.ones(2), "large": torch.ones(1).expand(1 << 40)},
    "parameter": lambda: {"large": torch.nn.Parameter(torch.ones(3).expand(1 << 30, 3))},
    "views": lambda: {f"large{n}": torch.ones(1).expand(MIB, n) for n in range(1, 40)},
    "views of one memory": (
        lambda: (lambda one: {f"large{n}": one.expand(MIB, n) for n in range(1, 40)})(torch.ones(1))
    ),
}


@pytest.mark.parametrize("to", ["native", "torch"])
@pytest.mark.parametrize("name", sorted(STATES))
def test_an_expanded_tensor_is_refused_before_anything_is_written(tmp_path: Path, name: str, to: Any) -> None:
    torch.save(STATES[name](), tmp_path / "a.pt")
    size = os.path.getsize(tmp_path / "a.pt")
    assert size < 20_000
    told = rf"a\.pt' has {size} bytes, but the result would have \d+, .* pass max_bytes"
    with pytest.raises(InvalidStateError, match=told) as caught:
        convert(tmp_path / "a.pt", tmp_path / "b", to=to)
    assert str(caught.value.key).startswith("large")
    assert sorted(os.listdir(tmp_path)) == ["a.pt"]


def test_the_caller_may_want_it(tmp_path: Path) -> None:
    state = {"large": torch.ones(1).expand(20 * MIB)}
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(InvalidStateError, match=f"pass max_bytes={80 * MIB} to allow"):
        convert(tmp_path / "a.pt", tmp_path / "b", to="native")
    with pytest.raises(InvalidStateError, match=r"more than 1000$"):
        convert(tmp_path / "a.pt", tmp_path / "b", to="native", max_bytes=1000)
    assert convert(tmp_path / "a.pt", tmp_path / "b", to="native", max_bytes=80 * MIB).bytes == 80 * MIB
    with holdfast.open(tmp_path / "b") as checkpoint:
        assert checkpoint["large"][-2:].tolist() == [1, 1]


def test_on_the_command_line_it_is_an_option(tmp_path: Path) -> None:
    torch.save({"large": torch.ones(1).expand(20 * MIB)}, tmp_path / "a.pt")
    arguments = ["convert", str(tmp_path / "a.pt"), str(tmp_path / "b"), "--to", "native"]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 1
    assert f"pass --max-bytes {80 * MIB} to allow" in " ".join(refused.stderr.split())
    assert CliRunner().invoke(app, [*arguments, "--max-bytes", str(80 * MIB)]).exit_code == 0


def test_what_is_in_proportion_passes(tmp_path: Path) -> None:
    base = torch.arange(1000.0)
    state = {"windows": base.unfold(0, 500, 1), "columns": base.view(100, 10).t(), "rows": base.expand(50, 1000)}
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", to="native")
    found = holdfast.load(tmp_path / "b")
    assert all(torch.equal(found[key], state[key]) for key in state)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_keys_that_stand_for_the_same_bytes_are_counted_each(tmp_path: Path) -> None:
    """torch's metadata may name one place for any number of keys."""
    path = tmp_path / "a"
    dcp.save({"k0": torch.ones(MIB)}, checkpoint_id=path, no_dist=True)
    metadata = FileSystemReader(path).read_metadata()
    ((index, place),) = metadata.storage_data.items()
    for number in range(1, 40):
        key = f"k{number}"
        metadata.state_dict_metadata[key] = metadata.state_dict_metadata["k0"]
        metadata.storage_data[MetadataIndex(key, index.offset, index.index)] = place
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InvalidStateError, match="max_bytes"):
        convert(path, tmp_path / "b", to="native")
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_save_itself_takes_what_the_program_has_expanded(tmp_path: Path) -> None:
    holdfast.save({"rows": torch.arange(3.0).expand(1000, 3)}, tmp_path / "a")
    assert torch.equal(holdfast.load(tmp_path / "a")["rows"], torch.arange(3.0).expand(1000, 3))


def test_lists_that_share_lists_end(tmp_path: Path) -> None:
    for leaf in (1, torch.ones(1)):
        shared: Any = [leaf]
        for _ in range(60):
            shared = [shared, shared]
        torch.save({"x": shared}, tmp_path / "a.pt")
        with pytest.raises(InvalidStateError, match="same containers") as caught:
            convert(tmp_path / "a.pt", tmp_path / "b", to="native")
        assert str(caught.value.key).startswith("x.0.0")
        assert sorted(os.listdir(tmp_path)) == ["a.pt"]
