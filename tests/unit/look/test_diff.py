"""holdfast.diff: what it says of each key, what told, and how much it read for that."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast import FileSystemWriter


def saved(path: Path, state: dict[str, Any], *, in_torchs: bool = False) -> Path:
    holdfast.save(state, path, no_dist=True, storage_writer=FileSystemWriter(path) if in_torchs else None)
    return path


def statuses(found: holdfast.Diff) -> dict[str, str]:
    return {key: each.status for key, each in found.keys.items()}


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.arange(600_000, dtype=torch.float32).view(300, 2000)


def test_every_status_is_told_without_reading_data(tmp_path: Path, weight: torch.Tensor) -> None:
    other = weight.clone()
    other[299, 1999] += 1
    a = {
        "same": weight,
        "one": weight,
        "shape": torch.ones(4),
        "type": torch.ones(4),
        "gone": 1,
        "step": 1,
        "text": "x",
    }
    b = {"same": weight, "one": other, "shape": torch.ones(2, 2), "type": torch.ones(4).half(), "step": 2, "text": "x"}
    found = holdfast.diff(saved(tmp_path / "a", a), saved(tmp_path / "b", {**b, "new": torch.ones(1)}))
    assert statuses(found) == {
        "same": "unchanged",
        "one": "changed",
        "shape": "reshaped",
        "type": "retyped",
        "gone": "removed",
        "step": "changed",
        "text": "unchanged",
        "new": "added",
    }
    assert found.data_bytes_read == 0
    assert not found.same
    assert found.counts == {"unchanged": 2, "changed": 2, "reshaped": 1, "retyped": 1, "removed": 1, "added": 1}
    one = found.keys["one"]
    assert (one.by, one.blocks, one.changed_blocks, one.elements) == ("digests", 3, 1, None)
    assert [each.key for each in found.of("added", "removed")] == ["gone", "new"]
    step = found.keys["step"]
    assert step.a is not None
    assert step.b is not None
    assert (step.a.value, step.b.value, step.by) == ("1", "2", "values")


def test_values_tell_how_far_tensors_differ(tmp_path: Path, weight: torch.Tensor) -> None:
    other = weight.clone()
    other[2, 7] -= 3
    other[299, 1999] += 4
    a, b = (
        saved(tmp_path / "a", {"w": weight, "same": weight + 1}),
        saved(tmp_path / "b", {"w": other, "same": weight + 1}),
    )
    found = holdfast.diff(a, b, values=True)
    elements = found.keys["w"].elements
    assert elements is not None
    assert (elements.elements, elements.differing, elements.first_index) == (600_000, 2, (2, 7))
    assert elements.max_abs == 4
    assert elements.relative_l2 == pytest.approx(5 / float(weight.double().norm()), rel=1e-12)
    cosine = torch.nn.functional.cosine_similarity(weight.double().view(-1), other.double().view(-1), dim=0)
    assert elements.cosine == pytest.approx(float(cosine), rel=1e-12)
    # What digests show to be the same is not read.
    assert weight.nbytes <= found.data_bytes_read // 2 <= weight.nbytes + (1 << 20)
    assert found.keys["same"].elements is None


def test_nan_is_counted_and_left_out_of_distances(tmp_path: Path) -> None:
    a = torch.tensor([math.nan, 1.0, 2.0, math.inf, 5.0])
    b = torch.tensor([math.nan, math.nan, 2.0, math.inf, 6.0])
    found = holdfast.diff(saved(tmp_path / "a", {"w": a}), saved(tmp_path / "b", {"w": b}), values=True)
    elements = found.keys["w"].elements
    assert elements is not None
    assert (elements.differing, elements.first_index, elements.max_abs) == (2, (1,), 1.0)
    assert (elements.nan_a, elements.nan_b, elements.unmeasured) == (1, 2, 3)
    assert elements.relative_l2 == pytest.approx(1 / math.sqrt(29))


def test_without_digests_nothing_counts_as_the_same_until_it_is_read(tmp_path: Path, weight: torch.Tensor) -> None:
    state = {"w": weight, "scalar": torch.tensor(3.0), "empty": torch.ones(0, 3), "step": 5, "nan": math.nan}
    a, b = saved(tmp_path / "a", state), saved(tmp_path / "b", state, in_torchs=True)
    found = holdfast.diff(a, b)
    assert not found.same
    assert found.of("not compared") == (found.keys["w"], found.keys["scalar"])
    assert found.keys["w"].by is None
    assert "digests" in found.keys["w"].why
    read = holdfast.diff(a, b, values=True)
    assert read.same
    assert read.keys["w"].by == "values"
    assert holdfast.diff(b, a, values=True).same


def test_a_folder_of_safetensors_compares_with_a_checkpoint(tmp_path: Path, weight: torch.Tensor) -> None:
    (tmp_path / "folder").mkdir()
    save_file({"w": weight.bfloat16(), "v": weight + 1}, tmp_path / "folder" / "model.safetensors")
    checkpoint = saved(tmp_path / "a", {"w": weight, "v": weight + 1})
    found = holdfast.diff(checkpoint, tmp_path / "folder", values=True)
    assert statuses(found) == {"w": "retyped", "v": "unchanged"}
    elements = found.keys["w"].elements
    assert elements is not None
    assert elements.relative_l2 is not None
    assert 0 < elements.relative_l2 < 2**-8
    holdfast.hf.export({"w": weight, "v": weight + 1}, tmp_path / "exported")
    by_digests = holdfast.diff(checkpoint, tmp_path / "exported")
    assert by_digests.same
    assert by_digests.data_bytes_read == 0


def test_large_values_and_pickles_compare_by_digests(tmp_path: Path) -> None:
    a, b = {"text": "x" * 100_000, "array": np.arange(5)}, {"text": "y" * 100_000, "array": np.arange(5)}
    found = holdfast.diff(saved(tmp_path / "a", a), saved(tmp_path / "b", b))
    assert statuses(found) == {"text": "changed", "array": "unchanged"}
    assert found.data_bytes_read == 0
    # Arrays are pickles in torch's format: nobody can tell without running code.
    both = holdfast.diff(saved(tmp_path / "c", a), saved(tmp_path / "d", a, in_torchs=True), values=True)
    assert statuses(both) == {"text": "unchanged", "array": "not compared"}
    assert "pickle" in both.keys["array"].why
    pickles = holdfast.diff(tmp_path / "d", tmp_path / "d", values=True)
    assert statuses(pickles) == {"text": "unchanged", "array": "not compared"}
    assert "pickle" in pickles.keys["array"].why


def test_true_is_not_one(tmp_path: Path) -> None:
    found = holdfast.diff(saved(tmp_path / "a", {"x": True, "y": 1}), saved(tmp_path / "b", {"x": 1, "y": 1.0}))
    assert statuses(found) == {"x": "changed", "y": "changed"}


def test_tied_tensors_compare_with_their_copies(tmp_path: Path, weight: torch.Tensor) -> None:
    a = saved(tmp_path / "a", {"one": weight, "tied": weight})
    b = saved(tmp_path / "b", {"one": weight, "tied": weight.clone()})
    found = holdfast.diff(a, b)
    assert found.same
    assert found.data_bytes_read == 0


def test_keys_choose_and_a_pattern_without_a_match_is_an_error(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", {"x": 1, "y.z": 1, "w": 1}), saved(tmp_path / "b", {"x": 2, "y.z": 1, "v": 1})
    assert list(holdfast.diff(a, b, keys="y.*").keys) == ["y.z"]
    assert list(holdfast.diff(a, b, keys=["[vw]", "x"]).keys) == ["x", "w", "v"]
    with pytest.raises(ValueError, match="no key matches 'nothing'"):
        holdfast.diff(a, b, keys=["x", "nothing"])


def test_open_checkpoints_are_taken_and_stay_open(tmp_path: Path, weight: torch.Tensor) -> None:
    path = saved(tmp_path / "a", {"w": weight})
    with holdfast.open(path) as one, holdfast.open(path) as other:
        assert holdfast.diff(one, other).same
        assert torch.equal(one["w"][0], weight[0])
    with pytest.raises(ValueError, match="closed"):
        holdfast.diff(one, path)


def test_damage_is_an_error_and_not_a_difference(tmp_path: Path, weight: torch.Tensor) -> None:
    a, b = saved(tmp_path / "a", {"w": weight}), saved(tmp_path / "b", {"w": weight + 1})
    (file,) = b.glob("data-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(holdfast.CorruptError, match="'w'"):
        holdfast.diff(a, b, values=True)
    with pytest.raises(holdfast.NotFoundError):
        holdfast.diff(a, tmp_path / "nothing")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64, torch.uint8])
def test_types_that_are_no_plain_floats(tmp_path: Path, dtype: torch.dtype) -> None:
    a = torch.zeros(6, 5).to(dtype)
    b = a.clone()
    b[3, 2] = 1
    found = holdfast.diff(saved(tmp_path / "a", {"w": a}), saved(tmp_path / "b", {"w": b}), values=True)
    elements = found.keys["w"].elements
    assert elements is not None
    assert (elements.differing, elements.first_index, elements.max_abs) == (1, (3, 2), 1.0)
    assert elements.relative_l2 == math.inf
    assert elements.cosine is None


def test_zeros_of_both_signs_differ_by_nothing(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", {"w": torch.zeros(3)}), saved(tmp_path / "b", {"w": -torch.zeros(3)})
    elements = holdfast.diff(a, b, values=True).keys["w"].elements
    assert elements is not None
    assert (elements.differing, elements.max_abs, elements.relative_l2) == (3, 0.0, 0.0)


def test_a_checkpoint_in_an_object_store_compares_with_one_in_a_directory(tmp_path: Path, weight: torch.Tensor) -> None:
    url = f"memory://look-{tmp_path.name}/a"
    holdfast.save({"w": weight, "step": 1}, url, no_dist=True)
    found = holdfast.diff(saved(tmp_path / "a", {"w": weight, "step": 1}), url)
    assert found.same
    assert found.data_bytes_read == 0
    assert holdfast.statistics(url).tensors["w"].max == 599_999.0


def test_bytes_that_are_no_numbers_have_no_distance(tmp_path: Path) -> None:
    a, b = (torch.tensor([[1, 2], [3, last]], dtype=torch.uint8).view(torch.bits8) for last in (4, 5))
    found = holdfast.diff(saved(tmp_path / "a", {"w": a}), saved(tmp_path / "b", {"w": b}), values=True)
    elements = found.keys["w"].elements
    assert elements is not None
    assert (elements.differing, elements.first_index, elements.max_abs, elements.cosine) == (1, (1, 1), None, None)


def test_values_with_and_without_a_typed_form_in_torchs_format(tmp_path: Path) -> None:
    state = {"name": "x", "when": {"epoch": 3}, "array": np.arange(3), "rate": 0.5}
    a = saved(tmp_path / "a", state, in_torchs=True)
    b = saved(tmp_path / "b", {**state, "rate": 0.25}, in_torchs=True)
    found = holdfast.diff(a, b)
    assert statuses(found) == {
        "name": "unchanged",
        "when.epoch": "unchanged",
        "array": "not compared",
        "rate": "changed",
    }
