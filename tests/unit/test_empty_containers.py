"""Empty containers of a target: filled with all that the checkpoint has below them, or refused, never passed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.lr_scheduler import StepLR

import holdfast

Same = Callable[..., None]


def trained(*, steps: int = 2, width: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(steps)
    model = torch.nn.Sequential(torch.nn.Linear(width, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, steps, width)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, width: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(1, width)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(state: dict[str, Any], path: str, *, native: bool = True) -> None:
    if native:
        holdfast.save(state, path)
    else:
        holdfast.save(state, storage_writer=holdfast.FileSystemWriter(path))


# What the caller leaves empty.


def test_an_empty_target_gets_everything(path: str, same: Same) -> None:
    state = {
        "z": torch.nn.Parameter(torch.arange(3.0)),
        "a": {1: (torch.ones(1), "x"), "list": [torch.zeros(2), {}]},
        "model": torch.nn.Linear(2, 2),
        "step": 3,
    }
    holdfast.save(state, path)
    target: dict[str, Any] = {}
    report = holdfast.load(target, path)
    same(target, holdfast.load(path))
    assert list(target) == list(state)
    assert sorted(report.made) == sorted(report.loaded)
    assert report.unexpected == report.differences == ()


def test_an_empty_entry_gets_all_that_is_below_it(path: str, same: Same) -> None:
    model, optimizer = trained()
    holdfast.save({"model": model, "optimizer": optimizer, "step": 3}, path)
    target: dict[str, Any] = {"model": {}, "step": 0}
    report = holdfast.load(target, path)
    same(target["model"], dict(holdfast.load(path)["model"]))
    assert target["step"] == 3
    assert all(key.startswith("optimizer.") for key in report.unexpected)
    assert all(key.startswith("model.") for key in report.made)


def test_a_module_that_holds_nothing_wants_nothing(path: str) -> None:
    holdfast.save({"model": torch.nn.Linear(2, 2), "step": 1}, path)
    target: dict[str, Any] = {"model": torch.nn.Identity(), "step": 0}
    report = holdfast.load(target, path)
    assert (target["step"], report.made, report.unexpected) == (1, (), ("model.weight", "model.bias"))


class Late:
    """Has no state before it is used."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_an_object_without_state_yet_gets_what_it_had(path: str, same: Same) -> None:
    saved, loaded = Late(), Late()
    saved.state = {"mean": torch.ones(3), "seen": {7: [1, 2]}}
    holdfast.save({"late": saved}, path)
    holdfast.load({"late": loaded}, path)
    same(loaded.state, saved.state)


def test_keys_without_nesting_are_refused(path: str) -> None:
    class Own(holdfast.DefaultSavePlanner):
        """Keeps something else where the default planner keeps paths."""

        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            metadata.planner_data = "mine"
            return plans, metadata

    holdfast.save({"a": {"b": torch.ones(1)}}, storage_writer=holdfast.FileSystemWriter(path), planner=Own())
    with pytest.raises(holdfast.MismatchError, match=r"'a' of the checkpoint cannot be put .* how it is nested"):
        holdfast.load({"a": {}}, path)
    report = holdfast.load({"a": {}}, path, strict=False)
    assert [(each.key, each.kind) for each in report.differences] == [("a", "place")]
    assert report.unexpected == ("a.b",)


# Optimizers that have taken no step.


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("as_object", [True, False])
def test_a_new_optimizer_goes_on(path: str, *, native: bool, as_object: bool) -> None:
    model, optimizer = trained()
    scheduler = StepLR(optimizer, 1)
    save({"model": model, "optimizer": optimizer, "scheduler": scheduler}, path, native=native)
    expected = train(model, optimizer, 3)
    model, optimizer = trained(steps=0)
    scheduler = StepLR(optimizer, 1)
    state = optimizer if as_object else optimizer.state_dict()
    report = holdfast.load({"model": model, "optimizer": state, "scheduler": scheduler}, path)
    if not as_object:
        if not native:  # which has no keys that are numbers, and nobody here to say that they should be
            state["state"] = {int(number): entry for number, entry in state["state"].items()}
        optimizer.load_state_dict(state)
    assert train(model, optimizer, 3) == expected
    assert "optimizer.state.3.exp_avg_sq" in report.made
    assert report.unexpected == ()


def test_only_the_state_that_is_not_there_is_made(path: str) -> None:
    model, optimizer = trained()
    holdfast.save({"model": model, "optimizer": optimizer}, path)
    expected = train(model, optimizer, 3)
    model, optimizer = trained(steps=0)
    model[0].requires_grad_(False)
    train(model, optimizer, 1)
    model[0].requires_grad_()
    momentum = optimizer.state[model[1].weight]["exp_avg"]
    report = holdfast.load({"model": model, "optimizer": optimizer}, path)
    assert {key.partition(".state.")[2][0] for key in report.made} == {"0", "1"}
    assert optimizer.state[model[1].weight]["exp_avg"] is momentum
    assert train(model, optimizer, 3) == expected


def test_parameters_that_had_no_state_get_none(path: str) -> None:
    model, optimizer = trained(steps=0)
    model[0].requires_grad_(False)
    train(model, optimizer, 2)
    holdfast.save({"optimizer": optimizer}, path)
    _, optimizer = trained(steps=0)
    holdfast.load({"optimizer": optimizer}, path)
    assert list(optimizer.state_dict()["state"]) == [2, 3]


def test_state_of_no_parameter_comes_along(path: str) -> None:
    _, optimizer = trained()
    optimizer.state["calls"] = 7  # type: ignore[index, assignment]
    holdfast.save({"optimizer": optimizer}, path)
    _, optimizer = trained(steps=0)
    holdfast.load({"optimizer": optimizer}, path)
    assert list(optimizer.state_dict()["state"]) == [0, 1, 2, 3, "calls"]
    assert optimizer.state["calls"] == 7  # type: ignore[index, comparison-overlap]


def test_names_in_the_place_of_numbers_are_matched_by_their_order(path: str) -> None:
    model, optimizer = trained()
    holdfast.save({"model": model, "optimizer": get_optimizer_state_dict(model, optimizer)}, path)
    expected = train(model, optimizer, 3)
    model, optimizer = trained(steps=0)
    holdfast.load({"model": model, "optimizer": optimizer}, path)
    assert train(model, optimizer, 3) == expected


def test_an_optimizer_without_state_is_saved_as_such(path: str) -> None:
    _, optimizer = trained(steps=0)
    holdfast.async_save({"optimizer": optimizer}, path).result()
    _, other = trained(steps=0)
    report = holdfast.load({"optimizer": other}, path)
    assert not other.state
    assert report.made == report.differences == report.unexpected == ()


def test_made_state_lies_as_its_parameter_does(path: str) -> None:
    def made(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            model(torch.ones(1, 2, 5, 5)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = made(1)
    holdfast.save({"optimizer": optimizer}, path)
    other, fresh = made(0)
    holdfast.load({"optimizer": fresh}, path)
    found, expected = fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
    assert found.stride() == expected.stride() == other.weight.stride()
    assert torch.equal(found, expected)


# What cannot be placed.


def test_state_without_a_parameter_is_refused(path: str) -> None:
    _, optimizer = trained()
    holdfast.save({"optimizer": optimizer}, path)
    smaller = torch.optim.AdamW(torch.nn.Linear(3, 4).parameters(), lr=0.5)
    with pytest.raises(holdfast.MismatchError, match=r"'optimizer\.state\.2' .* has no such parameter") as caught:
        holdfast.load({"optimizer": smaller}, path)
    assert [(each.key, each.kind) for each in caught.value.differences] == [
        ("optimizer.state.2", "place"),
        ("optimizer.state.3", "place"),
    ]
    assert not smaller.state
    assert smaller.param_groups[0]["lr"] == 0.5


def test_parameters_on_the_meta_device_are_refused(path: str) -> None:
    _, optimizer = trained()
    holdfast.save({"optimizer": optimizer}, path)
    with torch.device("meta"):
        unreal = torch.optim.AdamW(trained(steps=0)[0].parameters())
    with pytest.raises(holdfast.MismatchError, match="meta device; make the optimizer after"):
        holdfast.load({"optimizer": unreal}, path)
    report = holdfast.load({"optimizer": unreal}, path, strict=False)
    assert [each.key for each in report.differences] == [f"optimizer.state.{number}" for number in range(4)]
    assert not unreal.state
    assert unreal.param_groups[0]["lr"] == 0.1  # what could be loaded was


class Wrapped(torch.Tensor):
    """A tensor inside of another."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        wrapper: Any = torch.Tensor._make_wrapper_subclass
        return wrapper(cls, inner.shape, dtype=inner.dtype)  # type: ignore[no-any-return]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_tensors_that_cannot_be_made_are_refused(path: str) -> None:
    model, optimizer = trained()
    optimizer.state[model[0].weight]["exp_avg"] = Wrapped(torch.zeros(4, 3))
    holdfast.save({"optimizer": optimizer}, path)
    _, fresh = trained(steps=0)
    with pytest.raises(holdfast.MismatchError, match=r"'optimizer\.state\.0' .* has tensor subclasses; have the opt"):
        holdfast.load({"optimizer": fresh}, path)
    assert not fresh.state


def test_an_empty_container_that_has_the_key_of_another_leaf_by_chance(path: str) -> None:
    save({"a": [torch.ones(2)], "a.0": [{}]}, path)
    target: dict[str, Any] = {"a": [], "a.0": []}
    report = holdfast.load(target, path)
    assert torch.equal(target["a"][0], torch.ones(2))
    assert target["a.0"] == [{}]
    assert set(report.made) == {"a.0", "a.0.0"}


def test_a_key_that_would_stand_for_two_entries_of_the_target_is_refused(path: str) -> None:
    save({"a": [torch.ones(2)]}, path)
    target: dict[str, Any] = {"a": [], "a.0": []}
    with pytest.raises(holdfast.InvalidStateError, match=r"'a\.0' stands for two entries of the target; rename one"):
        holdfast.load(target, path)
    assert target["a.0"] == []
