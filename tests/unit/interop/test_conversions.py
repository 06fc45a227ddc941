"""Conversions: every format to every other, values and types kept, nothing half done, little memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import holdfast
from holdfast.errors import (
    AlreadyPublishedError,
    CorruptError,
    InvalidStateError,
    NotACheckpointError,
    NotFoundError,
    UnsafeError,
)
from holdfast.interop import convert

Same = Callable[..., None]

# torch says so whenever it works alone.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def plain_state() -> dict[str, Any]:
    """What every format can hold."""
    torch.manual_seed(0)
    weight = torch.randn(13, 7)
    return {
        "model": {"weight": weight, "tied": weight, "turned": torch.randn(5, 3).t(), "low": torch.ones(3).bfloat16()},
        "small": torch.tensor(3, dtype=torch.int8),
        "empty": torch.empty(0, 4),
        "eighths": torch.ones(6).to(torch.float8_e4m3fn),
        "optimizer": {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "step": 10**30},
        "values": [None, True, "ä", float("inf"), b"\0"],
        "dtype": torch.float16,
    }


def as_native(path: Path, state: dict[str, Any]) -> Path:
    holdfast.save(state, path)
    return path


def as_torch(path: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def as_pt(path: Path, state: dict[str, Any]) -> Path:
    torch.save(state, path)
    return path


MAKERS = {"native": as_native, "torch": as_torch, "pt": as_pt}


def loaded(path: Path, kind: str) -> dict[str, Any]:
    """What is there, by the readers of those whose format it is."""
    if kind == "pt":
        found: dict[str, Any] = torch.load(path, weights_only=True)
        return found
    if kind == "native":
        return holdfast.load(path)
    result: dict[str, Any] = _load_state_dict_from_keys(checkpoint_id=path)
    return result


@pytest.mark.parametrize(
    ("source", "target"),
    [(source, target) for source in MAKERS for target in MAKERS if (source, target) != ("pt", "pt")],
)
def test_every_format_becomes_every_other(tmp_path: Path, same: Same, source: str, target: str) -> None:
    state = plain_state()
    done = convert(MAKERS[source](tmp_path / "source", state), tmp_path / "target", to=target)  # type: ignore[arg-type]
    found = loaded(tmp_path / "target", target)
    same({key: found[key] for key in state}, state)
    assert done.tensors == 7
    assert done.values > 0
    if "torch" not in (source, target):  # torch's format does not know which keys are tied
        assert found["model"]["weight"].data_ptr() == found["model"]["tied"].data_ptr()
        stored = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors(state)}
        assert done.bytes == sum(stored.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors(entry)


def test_what_only_the_native_format_knows_survives_there(tmp_path: Path, same: Same) -> None:
    parameter = torch.ones(3, requires_grad=True)
    state = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "numbers": {1: torch.ones(2), (1, 2): {3}},
        "pair": (torch.ones(1), torch.zeros(1)),
        "parameter": parameter,
        "shared": parameter.detach(),
        "nothing": {},
        "numpy": np.float32(1.5),
    }
    holdfast.save(state, tmp_path / "source", user_metadata={"run": 7})
    convert(tmp_path / "source", tmp_path / "target", to="native")
    same(holdfast.load(tmp_path / "target"), state)
    with holdfast.open(tmp_path / "target") as checkpoint:
        assert checkpoint.user_metadata == {"run": 7}
        assert checkpoint["shared"].alias_of == "parameter"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("source", ["native", "torch"])
@pytest.mark.parametrize("target", ["native", "torch", "pt"])
def test_quantised_tensors_go_along(tmp_path: Path, same: Same, source: str, target: Any) -> None:
    state = {
        "one": torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.qint8),
        "each": torch.quantize_per_channel(torch.randn(2, 3), torch.ones(2), torch.zeros(2), 0, torch.quint8),
    }
    writer = holdfast.NativeWriter if source == "native" else holdfast.FileSystemWriter
    holdfast.save(state, storage_writer=writer(tmp_path / "source"))
    convert(tmp_path / "source", tmp_path / "target", to=target)
    # torch itself reads them only into a target.
    found = loaded(tmp_path / "target", "native" if target == "torch" else target)
    for key, tensor in state.items():
        assert torch.equal(found[key].int_repr(), tensor.int_repr())
        assert found[key].qscheme() == tensor.qscheme()
    assert found["one"].q_scale() == state["one"].q_scale()


def test_gradients_and_ties_reach_a_pt_file(tmp_path: Path) -> None:
    parameter = torch.ones(3, requires_grad=True)
    holdfast.save({"a": parameter, "b": parameter, "c": parameter.detach()}, tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "a.pt", to="pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert found["a"] is found["b"]
    assert found["a"].requires_grad
    assert not found["c"].requires_grad
    assert found["a"].data_ptr() == found["c"].data_ptr()


# Pickles.


class Custom:
    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("target", ["torch", "pt"])
@pytest.mark.parametrize("value", [np.arange(3), np.float32(2), frozenset({1})], ids=lambda value: type(value).__name__)
def test_what_torch_would_have_to_unpickle_is_refused_by_name(tmp_path: Path, target: Any, value: Any) -> None:
    holdfast.save({"a": torch.ones(2), "odd": value}, tmp_path / "source")
    with pytest.raises(InvalidStateError, match=r"'odd' is a .*allow_pickle=True") as caught:
        convert(tmp_path / "source", tmp_path / "target", to=target)
    assert caught.value.key == "odd"
    assert os.listdir(tmp_path) == ["source"]
    convert(tmp_path / "source", tmp_path / "target", to=target, allow_pickle=True)
    if target == "pt":
        found = torch.load(tmp_path / "target", weights_only=False)["odd"]
        assert type(found) is type(value)
        assert np.array_equal(found, value)


def test_a_pickle_needs_permission_on_its_way_into_the_native_format(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "object": Custom(3)}, tmp_path / "a.pt")
    with pytest.raises(UnsafeError, match="allow_pickle=True"):
        convert(tmp_path / "a.pt", tmp_path / "target", to="native")
    assert os.listdir(tmp_path) == ["a.pt"]
    convert(tmp_path / "a.pt", tmp_path / "target", to="native", allow_pickle=True)
    with pytest.raises(UnsafeError):
        convert(tmp_path / "target", tmp_path / "b.pt", to="pt")
    convert(tmp_path / "target", tmp_path / "b.pt", to="pt", allow_pickle=True)
    assert torch.load(tmp_path / "b.pt", weights_only=False)["object"] == Custom(3)


# Refusals and failures.


@pytest.mark.parametrize("target", ["native", "torch", "pt"])
def test_an_existing_target_is_kept(tmp_path: Path, target: Any) -> None:
    holdfast.save({"a": torch.ones(2)}, tmp_path / "source")
    MAKERS[target](tmp_path / "target", {"old": torch.zeros(3)})
    with pytest.raises(AlreadyPublishedError, match="overwrite=True"):
        convert(tmp_path / "source", tmp_path / "target", to=target)
    assert list(loaded(tmp_path / "target", target)) == ["old"]
    convert(tmp_path / "source", tmp_path / "target", to=target, overwrite=True)
    assert list(loaded(tmp_path / "target", target)) == ["a"]


@pytest.mark.parametrize(
    ("to", "there"), [("native", "torch"), ("torch", "native"), ("pt", "native"), ("native", "pt"), ("torch", "pt")]
)
def test_what_is_of_another_format_is_never_replaced(tmp_path: Path, to: Any, there: str) -> None:
    holdfast.save({"a": torch.ones(2)}, tmp_path / "source")
    MAKERS[there](tmp_path / "target", {"old": torch.zeros(3)})
    with pytest.raises(AlreadyPublishedError, match="remove it first"):
        convert(tmp_path / "source", tmp_path / "target", to=to, overwrite=True)
    assert list(loaded(tmp_path / "target", there)) == ["old"]


@pytest.mark.parametrize("to", ["native", "torch", "pt"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_damaged_source_leaves_the_target_as_it_was(tmp_path: Path, to: Any, overwrite: bool) -> None:
    holdfast.save({"a": torch.ones(1000), "b": torch.zeros(1000)}, tmp_path / "source")
    (file,) = (tmp_path / "source").glob("data-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    if overwrite:
        MAKERS[to](tmp_path / "target", {"old": torch.zeros(3)})
    with pytest.raises(CorruptError, match="'b'"):
        convert(tmp_path / "source", tmp_path / "target", to=to, overwrite=overwrite)
    if overwrite:
        assert list(loaded(tmp_path / "target", to)) == ["old"]
    else:
        assert os.listdir(tmp_path) == ["source"]
    convert(tmp_path / "source", tmp_path / "target", to=to, overwrite=overwrite, verify=False)
    assert loaded(tmp_path / "target", to)["b"][-1] != 0


def test_nonsense_is_refused(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "a.pt")
    torch.save(torch.ones(3), tmp_path / "bare.pt")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "readme").write_text("x")
    with pytest.raises(ValueError, match="already"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", to="pt")
    with pytest.raises(ValueError, match="no format"):
        convert(tmp_path / "a.pt", tmp_path / "b", to="zip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="both"):
        convert(tmp_path / "a.pt", tmp_path / "other" / ".." / "a.pt", to="native", overwrite=True)
    with pytest.raises(NotFoundError):
        convert(tmp_path / "missing", tmp_path / "b", to="native")
    with pytest.raises(NotACheckpointError):
        convert(tmp_path / "other", tmp_path / "b", to="native")
    with pytest.raises(InvalidStateError, match="a state is a dict"):
        convert(tmp_path / "bare.pt", tmp_path / "b", to="native")
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "bare.pt", "other"]


def test_progress_reaches_its_end(tmp_path: Path) -> None:
    state = {"a": torch.ones(10_000_000), "b": torch.ones(5)}
    seen: list[tuple[int, int]] = []
    total = 4 * 10_000_005
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "native", to="native", progress=lambda *counts: seen.append(counts))
    assert len(seen) >= 3
    assert seen[-1] == (total, total)
    convert(tmp_path / "native", tmp_path / "b.pt", to="pt", progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (total, total)


# Memory.

LIMIT = 256 << 20
SCRIPT = """
import json, sys
import torch
import holdfast
from holdfast.interop import convert

def memory():
    # Without pages of mapped files, which the system takes back when it needs them.
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon:", "RssShmem:")))

# What a first use allocates for good, threads and tables, is no matter of size.
convert(sys.argv[1] + "/first.pt", sys.argv[1] + "/first-native", to="native")
convert(sys.argv[1] + "/first-native", sys.argv[1] + "/first-again.pt", to="pt")
convert(sys.argv[1] + "/first-native", sys.argv[1] + "/first-torch", to="torch")

found = {}
for source, target, to in json.loads(sys.argv[2]):
    seen = [memory()]
    convert(source, target, to=to, progress=lambda done, total: seen.append(memory()))
    found[f"{source.rpartition('/')[2]} -> {to}"] = max(seen) - seen[0]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_memory_stays_below_a_quarter_gibibyte(tmp_path: Path) -> None:
    if not os.path.exists("/proc/self/status"):
        pytest.skip("no way to measure resident memory here")
    if shutil.disk_usage(tmp_path).free < 4 << 30:
        pytest.skip("not enough disk here")
    largest = 96 << 20  # the promise is this much more than the limit; reading in pieces keeps more
    state = {f"layer.{number}": torch.full((largest // 4,), float(number)) for number in range(4)}  # 384 MiB
    state["turned"] = torch.arange(6 << 20, dtype=torch.float32).view(2048, -1).t()
    torch.save(state, tmp_path / "source.pt")
    torch.save({"a": torch.ones(3)}, tmp_path / "first.pt")
    steps = [
        ("source.pt", "native", "native"),
        ("native", "again.pt", "pt"),
        ("native", "torch", "torch"),
        ("torch", "native-again", "native"),
        ("source.pt", "torch-again", "torch"),
    ]
    named = [(str(tmp_path / source), str(tmp_path / target), to) for source, target, to in steps]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), json.dumps(named)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(holdfast.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    assert len(found) == len(steps)
    # The pages of a mapped file count as resident, though the system takes them back when it needs them.
    sizes = {step: size for step, size in found.items() if not step.startswith("source.pt")}
    over = {step: size >> 20 for step, size in sizes.items() if size > LIMIT}
    assert not over, f"MiB of {found}"
    last = torch.load(tmp_path / "again.pt", weights_only=True, mmap=True)
    assert all(torch.equal(last[key], tensor) for key, tensor in state.items())
