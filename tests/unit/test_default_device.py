"""A default device or dtype of the program's is none of ours: every tensor that the library makes says where it is."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.interop import convert

FACTORIES = {
    *("empty", "zeros", "ones", "full", "tensor", "arange", "as_tensor", "asarray", "scalar_tensor", "empty_strided"),
    *("_empty_affine_quantized", "_empty_per_channel_affine_quantized", "rand", "randn", "eye", "linspace"),
}


@contextlib.contextmanager
def everywhere_else() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def state() -> dict[str, Any]:
    return {
        "weight": torch.arange(24.0, dtype=torch.float32).reshape(4, 6),
        "columns": torch.arange(24.0, dtype=torch.float32).reshape(4, 6).t()[1:],
        "quantised": torch.quantize_per_tensor(torch.ones(4), 0.5, 1, torch.qint8),
        "channels": torch.quantize_per_channel(
            torch.ones(3, 4), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.qint8
        ),
        "half": torch.ones(3, dtype=torch.complex32),
        "empty": torch.zeros(0, 3),
        "tied": [torch.ones(2, dtype=torch.bfloat16)] * 2,
        "value": {"step": 3, "betas": (0.9, 0.99)},
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in ("weight", "columns", "empty", "quantised", "channels"):
        assert found[key].device.type == "cpu"
        assert found[key].dtype is expected[key].dtype
        left, right = (each.int_repr() if each.is_quantized else each for each in (found[key], expected[key]))
        assert torch.equal(left, right)
    assert found["half"].view(torch.int16).tolist() == expected["half"].view(torch.int16).tolist()
    assert found["tied"][1].tolist() == [1, 1]
    assert found["value"] == expected["value"]


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_made_on_the_default_device(tmp_path: Path) -> None:
    saved, target = state(), state()
    for key in ("weight", "columns"):
        target[key] = torch.zeros_like(target[key])
    with everywhere_else():
        holdfast.save(saved, tmp_path / "a")
        holdfast.async_save(saved, tmp_path / "b", options=holdfast.SaveOptions(prove=True)).result()
        holdfast.save(saved, storage_writer=holdfast.FileSystemWriter(tmp_path / "c"))
        for name in "abc":
            holdfast.load(target, tmp_path / name)
            loaded = holdfast.load(tmp_path / name)
            with holdfast.open(tmp_path / name) as checkpoint:
                rows = checkpoint["weight"][1:3]
            assert torch.equal(rows, saved["weight"][1:3])
            for found in (target, loaded):
                assert_same(found, saved)
        for source, to in (("a", "torch"), ("c", "native"), ("a", "pt")):
            convert(tmp_path / source, tmp_path / f"{source}-{to}", to=to)  # type: ignore[arg-type]
        convert(tmp_path / "a-pt", tmp_path / "from-pt", to="native")
    for name in ("a-torch", "c-native", "from-pt"):
        assert_same(holdfast.load(tmp_path / name), saved)


def test_a_meta_target_is_filled_on_the_cpu(tmp_path: Path) -> None:
    holdfast.save({"model": torch.nn.Linear(3, 2).state_dict()}, tmp_path / "a")
    with torch.device("meta"):
        target = {"model": torch.nn.Linear(3, 2)}
        holdfast.load(target, tmp_path / "a")
    assert target["model"].weight.device.type == "cpu"


def test_every_tensor_of_the_library_names_its_device() -> None:
    source = Path(holdfast.__file__).parent
    unnamed = [
        f"{file.relative_to(source)}:{call.lineno}"
        for file in source.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and call.func.attr in FACTORIES
        and not any(keyword.arg == "device" for keyword in call.keywords)
    ]
    assert not unnamed
