"""What lies on the disk after a save, seen with the eyes of the safetensors library and of the operating system."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import holdfast
from tools.timeless import timeless

PAGE = 4096
MOST_INLINE = 1 << 16  # bytes of a value in the manifest

STRANGE_KEYS = [
    "plain",
    "with@[0:2]",
    "with@[",
    "@[0:1]@[0:1]",
    "__metadata__",
    "quotes \" and \\ and '",
    "ünïcödé 漢字 🙂",
    "line\nbreak\ttab\x00nul\x7f",
    "",
    " ",
    "a/b/../c",
]

SAFETENSORS_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


def save(state: dict[str, Any], path: Path, attempt: str = "one") -> Path:
    holdfast.save(state, storage_writer=holdfast.NativeWriter(path, attempt=attempt))
    return path


def data_files(path: Path) -> list[Path]:
    return sorted(path.glob("data-*.safetensors"), key=lambda file: int(file.stem.rsplit("-", 1)[1]))


def read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file starts, and its entries, parsed by hand."""
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return 8 + length, json.loads(opened.read(length))


def read_manifest(path: Path) -> dict[str, Any]:
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert isinstance(manifest, dict)
    return manifest


def read_index(path: Path) -> dict[str, Any]:
    """The columns of the index."""
    with safe_open(path / read_manifest(path)["index"]["name"], framework="np") as opened:
        assert opened.metadata() == {"format": "holdfast-index", "version": "1"}
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def test_every_data_file_opens_with_safetensors_and_has_the_tensors_under_their_names(tmp_path: Path) -> None:
    state = {str(dtype): torch.arange(-3, 9).to(dtype).reshape(3, 4) for dtype in SAFETENSORS_DTYPES}
    state |= {"zero dimensions": torch.tensor(7.5), "empty": torch.empty(0, 3), "strided": torch.rand(9, 8).T[::2]}
    (file,) = data_files(save({"model": state}, tmp_path / "checkpoint"))
    with safe_open(file, framework="pt") as opened:
        assert set(opened.keys()) == {f"model.{name}" for name in state}
        for name, tensor in state.items():
            stored = opened.get_tensor(f"model.{name}")
            assert (stored.dtype, stored.shape) == (tensor.dtype, tensor.shape)
            assert bits(stored) == bits(tensor)


def test_data_files_open_with_numpy_too(tmp_path: Path) -> None:
    state = {"a": torch.rand(3, 4), "b": torch.arange(5), "c": torch.tensor([True, False])}
    (file,) = data_files(save(state, tmp_path / "checkpoint"))
    with safe_open(file, framework="np") as opened:
        for name, tensor in state.items():
            assert np.array_equal(opened.get_tensor(name), tensor.numpy())


def test_dtypes_that_safetensors_lacks_are_bytes_with_one_more_dimension(tmp_path: Path) -> None:
    state = {"wide": torch.randn(3, 2, dtype=torch.complex128), "narrow": torch.rand(5).to(torch.float8_e5m2fnuz)}
    (file,) = data_files(save(state, tmp_path / "checkpoint"))
    with safe_open(file, framework="pt") as opened:
        wide, narrow = opened.get_tensor("wide"), opened.get_tensor("narrow")
    assert (wide.dtype, wide.shape, narrow.dtype, narrow.shape) == (torch.uint8, (3, 2, 16), torch.uint8, (5,))
    assert torch.equal(wide.view(torch.complex128).reshape(3, 2), state["wide"])
    assert bits(narrow) == bits(state["narrow"])


@pytest.mark.parametrize("key", STRANGE_KEYS)
def test_strange_keys_have_a_name_in_the_file_and_come_back(tmp_path: Path, key: str) -> None:
    tensor = torch.rand(2, 3)
    path = save({key: tensor}, tmp_path / "checkpoint")
    (file,) = data_files(path)
    with safe_open(file, framework="pt") as opened:
        (name,) = opened.keys()
        assert torch.equal(opened.get_tensor(name), tensor)
    assert name == (key if "@[" not in key and key != "__metadata__" else f"{key}@[0:2,0:3]")
    assert torch.equal(holdfast.load(path)[key], tensor)


def test_strange_keys_together_do_not_collide(tmp_path: Path) -> None:
    state: dict[str, Any] = {key: torch.full((2,), float(number)) for number, key in enumerate(STRANGE_KEYS)}
    state["with@[0:2]@[0:2]"] = torch.full((2,), -1.0)
    path = save(state, tmp_path / "checkpoint")
    loaded = holdfast.load(path)
    assert list(loaded) == list(state)
    assert all(torch.equal(loaded[key], state[key]) for key in state)


def test_the_index_opens_with_safetensors_and_says_where_everything_is(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": torch.rand(700, 1000), "b": torch.arange(9), "n": 4}
    path = save(state, tmp_path / "checkpoint")
    assert [file.name for file in path.glob("index-*")] == [read_manifest(path)["index"]["name"]]
    columns = read_index(path)
    assert set(columns) == {"tensor", "file", "offset", "bytes", "lo", "length", "digests"}
    assert columns["bytes"].tolist() == [2_800_000, 72]
    assert len(columns["digests"]) == 3 + 1
    manifest = read_manifest(path)
    for row, number in enumerate(columns["tensor"].tolist()):
        data = (path / manifest["files"][columns["file"][row]]["name"]).read_bytes()
        begin = int(columns["offset"][row])
        stored = data[begin : begin + int(columns["bytes"][row])]
        assert list(stored) == bits(state[manifest["tensors"][number]["key"]])


def test_data_starts_on_a_page_and_tensors_are_aligned(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    dtypes = (torch.int8, torch.complex128, torch.float64, torch.bfloat16, torch.float32, torch.complex64)
    state = {
        f"{number}": torch.zeros(int(torch.randint(0, 5000, (), generator=generator)), dtype=dtypes[number % 6])
        for number in range(60)
    }
    state |= {f"page {number}": torch.zeros(1024 * number, dtype=torch.float32) for number in range(5)}
    path = save({**state, "text": "z" * 100_000}, tmp_path / "checkpoint")
    (file,) = data_files(path)
    start, entries = read_header(file)
    assert start % PAGE == 0
    pages = 0
    for name, entry in entries.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        if name in state:
            assert begin % state[name].dtype.itemsize == 0, name
        if (end - begin) % 4096 == 0 and name in state:
            assert begin % 4096 == 0, name
            pages += 1
    assert pages >= 5
    assert file.stat().st_size == max(start + entry["data_offsets"][1] for entry in entries.values())


def test_there_are_no_bytes_but_those_of_header_and_chunks(tmp_path: Path) -> None:
    path = save({"a": torch.rand(1000), "b": torch.rand(3, dtype=torch.float64), "c": 1}, tmp_path / "checkpoint")
    manifest = read_manifest(path)
    (file,) = manifest["files"]
    size = (path / file["name"]).stat().st_size
    assert size == file["bytes"] == file["header"] + int(read_index(path)["bytes"].sum())
    assert sorted(os.listdir(path)) == sorted([file["name"], manifest["index"]["name"], "manifest.json"])
    start, entries = read_header(path / file["name"])
    assert start == file["header"]
    assert list(entries) == ["b", "a"]


def test_a_state_without_tensors_needs_no_data_file(tmp_path: Path) -> None:
    path = save({"step": 3, "nothing": {}}, tmp_path / "checkpoint")
    assert data_files(path) == []
    assert holdfast.load(path) == {"step": 3, "nothing": {}}


def test_many_long_names_make_several_data_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast._native.file_layout._MOST_HEADER_BYTES", 4096)
    state = {f"{'layer' * 30}.{number}": torch.full((number * 7 % 50, 3), float(number)) for number in range(100)}
    path = save({**state, "large": torch.rand(2 << 20), "text": "y" * 100_000}, tmp_path / "checkpoint")
    files = data_files(path)
    assert len(files) >= 3
    assert [file.name for file in files] == [f"data-one-0-{number}.safetensors" for number in range(len(files))]
    names: list[str] = []
    for file in files:
        start, _ = read_header(file)
        assert start <= 2 * 4096
        with safe_open(file, framework="pt") as opened:
            names += opened.keys()
            for name in set(opened.keys()) & set(state):
                assert torch.equal(opened.get_tensor(name), state[name])
    assert sorted(names) == sorted([*state, "large", "text"])
    loaded = holdfast.load(path)
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    assert loaded["text"] == "y" * 100_000


def test_every_file_of_several_that_is_damaged_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast._native.file_layout._MOST_HEADER_BYTES", 4096)
    state = {f"{'layer' * 30}.{number}": torch.full((3,), float(number)) for number in range(50)}
    path = save(state, tmp_path / "checkpoint")
    files = data_files(path)
    assert len(files) >= 3
    for file in files:
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(holdfast.CorruptError) as caught:
            holdfast.load(path)
        assert caught.value.path == str(file)
        file.write_bytes(data)
    holdfast.load(path)


LARGE_VALUES = {
    "bytes": os.urandom(MOST_INLINE + 1),
    "str": "ä" * MOST_INLINE,
    "tuple": tuple(range(MOST_INLINE // 2)),
    "set": {str(number) for number in range(20_000)},
    "float": tuple(math.sqrt(number) for number in range(10_000)),
}


def test_large_values_go_to_data_files_and_come_back(tmp_path: Path) -> None:
    state: dict[str, Any] = {"values": LARGE_VALUES, "small": b"x" * 100, "tensor": torch.rand(3)}
    path = save(state, tmp_path / "checkpoint")
    assert (path / "manifest.json").stat().st_size < 8192
    (file,) = data_files(path)
    _, entries = read_header(file)
    assert set(entries) == {"tensor", *(f"values.{name}" for name in LARGE_VALUES)}
    with safe_open(file, framework="np") as opened:
        assert opened.get_tensor("values.bytes").tobytes() == LARGE_VALUES["bytes"]
    loaded = holdfast.load(path)
    assert loaded["values"] == LARGE_VALUES
    assert {name: type(value) for name, value in loaded["values"].items()} == {
        name: type(value) for name, value in LARGE_VALUES.items()
    }
    assert loaded["small"] == b"x" * 100
    with holdfast.open(path) as checkpoint:
        assert checkpoint["values.tuple"] == LARGE_VALUES["tuple"]


@pytest.mark.parametrize("length", [MOST_INLINE, MOST_INLINE + 1])
def test_bytes_are_inline_up_to_the_limit(tmp_path: Path, length: int) -> None:
    path = save({"value": bytes(length)}, tmp_path / "checkpoint")
    assert holdfast.load(path) == {"value": bytes(length)}


def deterministic_state() -> dict[str, Any]:
    return {
        "weights": [torch.arange(5000.0), torch.arange(300, dtype=torch.int16).reshape(20, 15).T],
        "names": {"zeta", "alpha", "mu", "12", "omega"},
        "mixed": {1: (2, "three"), "four": None},
        "text": "t" * 100_000,
    }


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: timeless(file) for file in path.iterdir()}


def test_the_same_state_and_attempt_make_the_same_bytes(tmp_path: Path) -> None:
    first = contents(save(deterministic_state(), tmp_path / "first"))
    second = contents(save(deterministic_state(), tmp_path / "second"))
    assert first == second
    other = contents(save(deterministic_state(), tmp_path / "third", attempt="two"))
    assert other.keys() != first.keys()
    assert other["data-two-0-0.safetensors"] == first["data-one-0-0.safetensors"]


def test_another_process_makes_the_same_bytes(tmp_path: Path) -> None:
    """Sets iterate in another order there."""
    script = (
        f"import importlib.util, pathlib; spec = importlib.util.spec_from_file_location('me', {__file__!r});"
        "me = importlib.util.module_from_spec(spec); spec.loader.exec_module(me);"
        f"me.save(me.deterministic_state(), pathlib.Path({str(tmp_path / 'there')!r}))"
    )
    source = str(Path(holdfast.__file__).parents[1])
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": source, "PYTHONHASHSEED": "4"}
    )
    assert contents(tmp_path / "there") == contents(save(deterministic_state(), tmp_path / "here"))


def test_published_files_are_not_touched_by_loading(tmp_path: Path) -> None:
    path = save(deterministic_state(), tmp_path / "checkpoint")
    before = {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in path.iterdir()}
    holdfast.load(path)
    target = deterministic_state()
    holdfast.load(target, path)
    assert {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in path.iterdir()} == before
