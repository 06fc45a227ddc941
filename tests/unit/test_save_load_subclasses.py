"""Tensor subclasses: stored as their inner tensors and context, loaded into targets of the same making."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import holdfast


class Opaque(torch.Tensor):
    """Numbers and a scale behind the face of one tensor, which does not tell what it is made of."""

    numbers: torch.Tensor
    scale: torch.Tensor
    context: Any

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor, context: Any) -> Opaque:
        made: Opaque = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.shape, dtype=numbers.dtype, device=numbers.device
        )
        return made

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor, context: Any) -> None:
        self.numbers = numbers
        self.scale = scale
        self.context = context

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers.detach(), args[0].scale.detach(), args[0].context)
        raise NotImplementedError(f"{func} is nothing that a checkpoint needs")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.numbers!r}, {self.scale!r}, {self.context!r})"


class Scaled(Opaque):
    """A subclass that tells; ``context`` is whatever it keeps beside its tensors."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], self.context


class Misnamed(Opaque):
    """A subclass that names something that is no tensor."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "context"], None


def scaled(fill: float, context: Any = ("rows", 2)) -> Scaled:
    return Scaled(torch.full((3, 4), fill), torch.full((3,), fill + 1), context)


def test_a_subclass_is_filled_in_place(path: str) -> None:
    holdfast.save({"model": {"weight": scaled(5.0)}, "bias": torch.ones(2)}, path)
    with holdfast.open(path) as checkpoint:
        assert list(checkpoint) == ["model.weight.numbers", "model.weight.scale", "model.weight.__context__", "bias"]
    weight = scaled(0.0)
    target = {"model": {"weight": weight}, "bias": torch.zeros(2)}
    holdfast.load(target, path)
    assert target["model"]["weight"] is weight
    assert torch.equal(weight.numbers, torch.full((3, 4), 5.0))
    assert torch.equal(weight.scale, torch.full((3,), 6.0))


def test_without_a_target_the_parts_come_back_by_name(path: str, same: Callable[..., None]) -> None:
    holdfast.save({"weight": scaled(5.0, {"block": 32})}, path)
    parts = {"numbers": torch.full((3, 4), 5.0), "scale": torch.full((3,), 6.0), "__context__": {"block": 32}}
    same(holdfast.load(path), {"weight": parts})


def test_subclasses_nest_and_may_be_parameters(path: str) -> None:
    def build(fill: float) -> torch.nn.Parameter:
        inner = Scaled(torch.full((2,), fill), torch.full((1,), fill), "inner")
        return torch.nn.Parameter(Scaled(inner, torch.full((1,), fill + 1), "outer"), requires_grad=False)

    holdfast.save({"weight": build(7.0)}, path)
    target = build(0.0)
    holdfast.load({"weight": target}, path)
    assert target.numbers.numbers.tolist() == [7.0, 7.0]
    assert target.numbers.scale.tolist() == [7.0]
    assert target.scale.tolist() == [8.0]


def test_another_context_is_a_mismatch_and_touches_nothing(path: str) -> None:
    holdfast.save({"first": torch.ones(5), "weight": scaled(5.0), "last": 7}, path)
    target = {"first": torch.zeros(5), "weight": scaled(0.0, ("rows", 4)), "last": 0}
    with pytest.raises(holdfast.MismatchError, match=r"'weight.__context__' has context \('rows', 2\)") as caught:
        holdfast.load(target, path)
    (difference,) = caught.value.differences
    assert (difference.key, difference.kind) == ("weight.__context__", "context")
    assert torch.equal(target["first"], torch.zeros(5))
    assert torch.equal(target["weight"].numbers, torch.zeros(3, 4))
    assert target["last"] == 0


def targets() -> dict[str, Any]:
    return {
        "first": torch.zeros(5),
        "a": scaled(0.0, ("rows", 4)),
        "same": scaled(0.0),
        "b": scaled(0.0, ("columns", 2)),
        "shape": torch.zeros(4),
        "last": 0,
    }


@pytest.mark.parametrize("storage", ["native", "torch"])
def test_all_other_contexts_are_told_at_once(path: str, storage: str) -> None:
    saved = {
        **{key: scaled(5.0) for key in ("a", "b", "same")},
        "first": torch.ones(5),
        "shape": torch.ones(3),
        "last": 7,
    }
    writer = holdfast.NativeWriter(path) if storage == "native" else holdfast.FileSystemWriter(path)
    holdfast.save(saved, storage_writer=writer)
    target = targets()
    with pytest.raises(holdfast.MismatchError, match="context") as caught:
        holdfast.load(target, path)
    kinds = {difference.key: difference.kind for difference in caught.value.differences}
    assert kinds == {"a.__context__": "context", "b.__context__": "context", "shape": "shape"}
    assert torch.equal(target["first"], torch.zeros(5))
    assert torch.equal(target["same"].numbers, torch.zeros(3, 4))


@pytest.mark.parametrize("storage", ["native", "torch"])
def test_without_strict_other_contexts_are_reported_and_left_alone(path: str, storage: str) -> None:
    saved = {
        **{key: scaled(5.0) for key in ("a", "b", "same")},
        "first": torch.ones(5),
        "shape": torch.ones(3),
        "last": 7,
    }
    writer = holdfast.NativeWriter(path) if storage == "native" else holdfast.FileSystemWriter(path)
    holdfast.save(saved, storage_writer=writer)
    target = targets()
    report = holdfast.load(target, path, strict=False)
    kinds = {difference.key: difference.kind for difference in report.differences}
    assert kinds == {"a.__context__": "context", "b.__context__": "context", "shape": "shape"}
    assert report.unexpected == ()
    assert set(report.loaded) == {"first", "same.numbers", "same.scale", "same.__context__", "last"}
    assert torch.equal(target["first"], torch.ones(5))
    assert torch.equal(target["same"].numbers, torch.full((3, 4), 5.0))
    assert torch.equal(target["a"].numbers, torch.zeros(3, 4))
    assert torch.equal(target["b"].scale, torch.ones(3))
    assert target["last"] == 7


def test_other_shapes_of_inner_tensors_are_named(path: str) -> None:
    holdfast.save({"weight": scaled(5.0)}, path)
    target = Scaled(torch.zeros(3, 4), torch.zeros(7), ("rows", 2))
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load({"weight": target}, path)
    assert [difference.key for difference in caught.value.differences] == ["weight.scale"]


def test_a_plain_tensor_against_a_subclass_differs(path: str) -> None:
    holdfast.save({"weight": scaled(5.0)}, path)
    with pytest.raises(holdfast.MismatchError, match="'weight' is not in the checkpoint"):
        holdfast.load({"weight": torch.zeros(3, 4)}, path)
    holdfast.save({"weight": torch.zeros(3, 4)}, path)
    with pytest.raises(holdfast.MismatchError) as caught:
        holdfast.load({"weight": scaled(5.0)}, path)
    assert {difference.key for difference in caught.value.differences} == {
        "weight.numbers",
        "weight.scale",
        "weight.__context__",
    }


@pytest.mark.parametrize(
    ("tensor", "message", "key"),
    [
        (scaled(1.0, object()), "'model.weight.__context__' cannot be saved", "model.weight.__context__"),
        (Misnamed(torch.ones(2), torch.ones(1), 3), "names 'context', which is not a tensor", "model.weight"),
        (Opaque(torch.ones(2), torch.ones(1), 3), "'model.weight' is a Opaque without memory", "model.weight"),
    ],
)
def test_what_cannot_be_stored_is_named(
    tensor: torch.Tensor, message: str, key: str, path: str, assert_nothing_written: Callable[[], None]
) -> None:
    with pytest.raises(holdfast.InvalidStateError, match=message) as caught:
        holdfast.save({"ok": torch.ones(3), "model": {"weight": tensor}}, path)
    assert caught.value.key == key
    assert_nothing_written()


def test_a_target_without_memory_is_refused(path: str) -> None:
    holdfast.save({"weight": torch.ones(2), "w": torch.ones(2)}, path)
    target = {"w": torch.zeros(2), "weight": Opaque(torch.ones(2), torch.ones(1), 3)}
    with pytest.raises(holdfast.InvalidStateError, match="'weight' in the target is a Opaque without memory"):
        holdfast.load(target, path)
    assert torch.equal(target["w"], torch.zeros(2))


def test_a_subclass_with_memory_of_its_own_is_a_tensor(path: str) -> None:
    class Named(torch.Tensor):
        pass

    holdfast.save({"x": torch.arange(3.0).as_subclass(Named)}, path)
    target = torch.zeros(3).as_subclass(Named)
    holdfast.load({"x": target}, path)
    assert type(target) is Named
    assert target.tolist() == [0.0, 1.0, 2.0]
    assert type(holdfast.load(path)["x"]) is torch.Tensor
