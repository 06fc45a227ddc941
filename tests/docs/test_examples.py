"""The examples do what they say: the reader without holdfast reads everything, the training job resumes exactly."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import holdfast

BLOCK_BYTES = 1 << 20
EXAMPLES = Path(__file__).parents[2] / "examples"


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class InPieces(holdfast.DefaultSavePlanner):
    """Saves the tensor ``key`` in boxes, as several ranks would."""

    def __init__(self, key: str, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        super().__init__()
        self._key = key
        self._boxes = boxes

    def create_local_plan(self) -> holdfast.SavePlan:
        plan = super().create_local_plan()
        items: list[holdfast.WriteItem] = []
        for item in plan.items:
            if item.index.fqn != self._key or item.tensor_data is None:
                items.append(item)
                continue
            for offsets, lengths in self._boxes:
                chunk = holdfast.ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
                items.append(
                    holdfast.WriteItem(
                        holdfast.MetadataIndex(self._key, torch.Size(offsets)),
                        holdfast.WriteItemType.SHARD,
                        tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk),
                    )
                )
        return dataclasses.replace(plan, items=items)


def rich_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(40, 24, generator=generator)
    return {
        "model": {"embedding": weight, "head": weight, "view": weight.t()[3:9, ::2]},
        "split": torch.randn(7, 10, generator=generator),
        "large": torch.randint(0, 255, (2 * BLOCK_BYTES + 77,), dtype=torch.uint8, generator=generator),
        "dtypes": {
            str(dtype).removeprefix("torch."): torch.randn(5, 3, generator=generator).to(dtype)
            for dtype in (
                torch.bfloat16,
                torch.float16,
                torch.float64,
                torch.float8_e4m3fn,
                torch.complex64,
                torch.bool,
            )
        },
        "bits": torch.arange(4, dtype=torch.int16).view(torch.bits16),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "odd@[0:1]": torch.arange(3),
        "step": 7,
        "betas": (0.9, 0.999),
        "history": [1.5, float("inf"), 2**70],
        "blob": b"\0" * 70_000,
        "words": ["holdfast"] * 10_000,
    }


# What stands there for values that JSON has not.
IN_THE_MANIFEST = {
    "betas": {"tuple": [0.9, 0.999]},
    "history": [1.5, {"float": "inf"}, {"int": "0x400000000000000000"}],
}


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return b"" if not flat.numel() else flat.view(torch.uint8).numpy().tobytes()


def leaves_of(checkpoint: Path) -> dict[str, Any]:
    with holdfast.open(checkpoint) as opened:
        keys = list(opened)
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if prefix in keys:
            flat[prefix] = value
        else:
            for name, entry in value.items():
                walk(f"{prefix}.{name}" if prefix else name, entry)

    walk("", holdfast.load(checkpoint))
    assert sorted(flat) == sorted(keys)
    return flat


def test_the_reader_without_holdfast_reads_what_holdfast_reads(tmp_path: Path) -> None:
    boxes = [((0, 0), (7, 4)), ((0, 4), (3, 6)), ((3, 4), (4, 6))]
    holdfast.save(rich_state(), tmp_path / "ck", planner=InPieces("split", boxes))
    with holdfast.open(tmp_path / "ck") as opened:
        assert opened["split"].chunks == 3
    expected = leaves_of(tmp_path / "ck")

    found = load_example("read_without_holdfast").read(tmp_path / "ck")

    assert sorted(found) == sorted(expected)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[key].shape == tuple(value.shape), key
            assert found[key].tobytes() == raw(value), key
        elif isinstance(value, np.ndarray):
            np.testing.assert_array_equal(found[key], value)
            assert found[key].dtype == value.dtype
        elif isinstance(value, bytes):
            assert found[key] == value
        else:
            assert found[key] == IN_THE_MANIFEST.get(key, value), key
    assert found["model.head"] is found["model.embedding"]
    assert found["dtypes.float64"].dtype == np.float64
    assert found["dtypes.bfloat16"].dtype == np.uint16
    np.testing.assert_array_equal(found["split"], rich_state()["split"].numpy())


def test_the_reader_without_holdfast_is_short_and_imports_only_numpy() -> None:
    source = (EXAMPLES / "read_without_holdfast.py").read_text()
    assert len(source.splitlines()) < 80
    imported = {
        line.split()[1].partition(".")[0] for line in source.splitlines() if line.startswith(("import", "from"))
    }
    assert imported == {"__future__", "json", "numpy", "pathlib", "struct", "sys", "typing"}


@pytest.mark.parametrize("change", [{"version": 2}, {"requires": ["compression"]}])
def test_the_reader_without_holdfast_refuses_what_it_does_not_know(tmp_path: Path, change: dict[str, Any]) -> None:
    holdfast.save({"a": torch.ones(3)}, tmp_path / "ck")
    manifest = tmp_path / "ck" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **change}))
    with pytest.raises(ValueError, match="another reader"):
        load_example("read_without_holdfast").read(tmp_path / "ck")


def test_the_reader_without_holdfast_refuses_a_truncated_file(tmp_path: Path) -> None:
    holdfast.save({"a": torch.ones(3000)}, tmp_path / "ck")
    (data,) = (tmp_path / "ck").glob("data-*")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ValueError, match="size"):
        load_example("read_without_holdfast").read(tmp_path / "ck")


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The training example, made small; global random state and determinism are as before afterwards."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    module = load_example("training")
    for name, value in {"WIDTH": 16, "STEPS": 8, "STEPS_BETWEEN_SAVES": 2, "EXAMPLES": 64}.items():
        monkeypatch.setattr(module, name, value)
    with torch.random.fork_rng():
        yield module
    torch.use_deterministic_algorithms(was_deterministic)


def losses(log: Path) -> dict[int, str]:
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    return {entry["step"]: entry["loss"].hex() for entry in entries if "loss" in entry}


def test_the_training_job_resumes_from_the_newest_step_with_the_same_losses(
    training: ModuleType, tmp_path: Path
) -> None:
    training.main(tmp_path / "ck", tmp_path / "whole.log")
    whole = losses(tmp_path / "whole.log")
    assert sorted(whole) == list(range(1, 9))
    steps = holdfast.Steps(tmp_path / "ck")
    assert [step.step for step in steps.steps()] == [4, 6, 8]
    (tmp_path / "ck" / "step-8" / "manifest.json").unlink()
    for file in (tmp_path / "ck" / "step-6").glob("data-*"):
        file.unlink()

    torch.manual_seed(random.randrange(1 << 30))
    training.main(tmp_path / "ck", tmp_path / "resumed.log")

    resumed = losses(tmp_path / "resumed.log")
    assert sorted(resumed) == [5, 6, 7, 8]
    assert resumed == {step: whole[step] for step in resumed}
    latest = steps.latest()
    assert latest is not None
    assert latest.step == 8
    assert latest.metrics == {"loss": float.fromhex(resumed[8])}
