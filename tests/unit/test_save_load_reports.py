"""strict, cast, allow_partial_load and the report: all differences at once, and nothing touched before."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import holdfast


def stored_state() -> dict[str, Any]:
    return {
        "same": torch.arange(4.0),
        "shape": torch.ones(2, 3),
        "dtype": torch.ones(3),
        "tensor": torch.ones(2),
        "value": 5,
        "extra": {"tensor": torch.ones(1), "value": "x"},
    }


def target_state() -> dict[str, Any]:
    return {
        "same": torch.zeros(4),
        "shape": torch.zeros(3, 2),
        "dtype": torch.zeros(3, dtype=torch.int32),
        "tensor": "a value",
        "value": torch.zeros(2),
        "new": {"tensor": torch.zeros(1), "value": 1},
    }


def assert_untouched(target: dict[str, Any], same: Callable[..., None]) -> None:
    same(target, target_state())


def test_all_differences_in_one_error_and_nothing_touched(path: str, same: Callable[..., None]) -> None:
    holdfast.save(stored_state(), path)
    target = target_state()
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load(target, path)
    assert {(each.key, each.kind) for each in caught.value.differences} == {
        ("shape", "shape"),
        ("dtype", "dtype"),
        ("tensor", "kind"),
        ("value", "kind"),
        ("new.tensor", "missing"),
        ("new.value", "missing"),
    }
    message = caught.value.message
    assert "'shape' has shape [2, 3] in the checkpoint but [3, 2] in the target" in message
    assert "'dtype' has dtype float32 in the checkpoint but int32 in the target" in message
    assert "'new.tensor' is not in the checkpoint" in message
    assert "strict=False" in message
    assert "\n" not in message
    assert_untouched(target, same)


def test_what_fits_is_loaded_when_not_strict(path: str, same: Callable[..., None]) -> None:
    holdfast.save(stored_state(), path)
    target = target_state()
    report = holdfast.load(target, path, strict=False)
    expected = target_state()
    expected["same"] = torch.arange(4.0)
    same(target, expected)
    assert report.loaded == ("same",)
    assert report.missing == ("new.tensor", "new.value")
    assert {each.key for each in report.differences} == {
        "shape",
        "dtype",
        "tensor",
        "value",
        "new.tensor",
        "new.value",
    }
    assert {"extra.tensor", "extra.value"} <= set(report.unexpected)


def test_a_report_of_a_load_that_fits(path: str) -> None:
    holdfast.save({"w": torch.ones(1000), "unread": torch.ones(500), "step": 3}, path)
    report = holdfast.load({"w": torch.zeros(1000), "step": 0}, path)
    assert report.loaded == ("w", "step")
    assert report.unexpected == ("unread",)
    assert report.differences == report.casts == report.missing == ()
    assert report.bytes_read >= 4000
    assert report.seconds > 0


def test_keys_that_only_the_checkpoint_has_are_no_error(path: str) -> None:
    holdfast.save(stored_state(), path)
    assert holdfast.load({"same": torch.zeros(4)}, path).unexpected == (
        "shape",
        "dtype",
        "tensor",
        "value",
        "extra.tensor",
        "extra.value",
    )


def test_allow_partial_load_excuses_missing_keys_and_reports_them(path: str) -> None:
    holdfast.save({"w": torch.ones(2)}, path)
    target = {"w": torch.zeros(2), "new": torch.full((2,), 7.0), "value": 1}
    report = holdfast.load(target, path, planner=holdfast.DefaultLoadPlanner(allow_partial_load=True))
    assert target["w"].tolist() == [1.0, 1.0]
    assert target["new"].tolist() == [7.0, 7.0]
    assert target["value"] == 1
    assert set(report.missing) == {"new", "value"}


def test_allow_partial_load_excuses_nothing_else(path: str) -> None:
    holdfast.save({"w": torch.ones(2)}, path)
    planner = holdfast.DefaultLoadPlanner(allow_partial_load=True)
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load({"w": torch.zeros(3), "new": torch.zeros(1)}, path, planner=planner)
    assert [each.key for each in caught.value.differences] == ["w"]


REAL_FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize(("was", "wanted"), list(itertools.product(REAL_FLOATS, repeat=2)))
def test_floats_are_cast_as_torch_casts_them(was: torch.dtype, wanted: torch.dtype, path: str) -> None:
    values = torch.tensor([0.0, -1.5, 3.14159, 240.0, 1e-3, float("inf"), float("nan")]).to(was)
    holdfast.save({"plain": values, "strided": torch.stack([values, values])[:, ::2]}, path)
    target = {"plain": torch.zeros(7, dtype=wanted), "strided": torch.zeros(4, 2, dtype=wanted).t()}
    report = holdfast.load(target, path, options=holdfast.LoadOptions(cast=True))
    expected = values.to(wanted)
    # Which nan a cast gives depends on how many elements are cast at once; that it is one does not.
    assert torch.equal(target["plain"].double().nan_to_num(nan=9e9), expected.double().nan_to_num(nan=9e9))
    assert torch.equal(target["strided"][1].double().nan_to_num(nan=9e9), expected[::2].double().nan_to_num(nan=9e9))
    assert [each.key for each in report.casts] == ([] if was == wanted else ["plain", "strided"])
    if was != wanted:
        cast = report.casts[0]
        assert (cast.kind, cast.stored, cast.wanted) == ("dtype", str(was)[6:], str(wanted)[6:])


@pytest.mark.parametrize(
    ("was", "wanted"),
    [
        (torch.float32, torch.int32),
        (torch.int32, torch.float32),
        (torch.int32, torch.int64),
        (torch.bool, torch.uint8),
        (torch.float32, torch.complex64),
        (torch.complex64, torch.float32),
        (torch.complex64, torch.complex128),
    ],
)
def test_other_types_are_never_cast(was: torch.dtype, wanted: torch.dtype, path: str) -> None:
    holdfast.save({"w": torch.ones(3, dtype=was), "x": torch.ones(2)}, path)
    target = {"x": torch.zeros(2), "w": torch.zeros(3, dtype=wanted)}
    with pytest.raises(holdfast.MismatchError, match="'w' has dtype") as caught:
        holdfast.load(target, path, options=holdfast.LoadOptions(cast=True))
    assert "pass LoadOptions(cast=True)" not in caught.value.message
    assert target["x"].tolist() == [0.0, 0.0]


def test_without_cast_the_error_says_how_to_cast(path: str) -> None:
    holdfast.save({"w": torch.ones(3)}, path)
    with pytest.raises(holdfast.MismatchError, match="cast=True"):
        holdfast.load({"w": torch.zeros(3, dtype=torch.bfloat16)}, path)


def test_a_large_cast_goes_through_several_slabs(path: str) -> None:
    values = torch.linspace(-5, 5, 5_000_003, dtype=torch.float64)
    holdfast.save({"w": values}, path)
    target = torch.zeros(5_000_003, dtype=torch.float16)
    holdfast.load({"w": target}, path, options=holdfast.LoadOptions(cast=True))
    assert torch.equal(target, values.to(torch.float16))


def test_no_type_but_floats_is_cast_to_a_float(path: str) -> None:
    others = {
        str(dtype): torch.zeros(16, dtype=torch.uint8).view(dtype)
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not dtype.is_floating_point and "q" not in str(dtype)
    }
    holdfast.save(others, path)
    target = {key: torch.zeros(len(tensor)) for key, tensor in others.items()}
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load(target, path, options=holdfast.LoadOptions(cast=True))
    assert {each.key for each in caught.value.differences} == others.keys()
    assert len(others) > 20


def test_values_replace_values_of_any_type(path: str) -> None:
    holdfast.save({"a": 1, "b": "text", "c": [1, 2]}, path)
    target = {"a": None, "b": 5, "c": (1,)}
    holdfast.load(target, path)
    assert target == {"a": 1, "b": "text", "c": [1, 2]}


def test_lists_of_other_lengths_are_named(path: str) -> None:
    holdfast.save({"layers": [torch.ones(1), torch.ones(1)]}, path)
    with pytest.raises(holdfast.MismatchError, match=r"'layers\.2' is not in the checkpoint"):
        holdfast.load({"layers": [torch.zeros(1)] * 3}, path)
    report = holdfast.load({"layers": [torch.zeros(1)]}, path)
    assert report.unexpected == ("layers.1",)


def test_many_differences_make_a_short_message(path: str) -> None:
    holdfast.save({"w": torch.ones(1)}, path)
    with pytest.raises(holdfast.MismatchError, match="and 92 more") as caught:
        holdfast.load({f"key {number}": torch.zeros(1) for number in range(100)}, path)
    assert len(caught.value.differences) == 100


def test_damage_raises_and_says_that_the_target_is_undefined(path: str) -> None:
    holdfast.save({"w": torch.arange(4096.0)}, path)
    with holdfast.open(path) as checkpoint:
        (file,) = {name for name in checkpoint._reader.catalog.manifest.files}
    with open(f"{path}/{file.name}", "r+b") as data:
        data.seek(file.header + 100)
        data.write(b"\xff")
    with pytest.raises(holdfast.CorruptError, match=r"'w'.*undefined") as caught:
        holdfast.load({"w": torch.zeros(4096)}, path)
    assert caught.value.key == "w"
    unverified = {"w": torch.zeros(4096)}
    holdfast.load(unverified, path, options=holdfast.LoadOptions(verify=False))
    assert unverified["w"][1000].item() == 1000.0
