"""Stateful objects, at any depth: state_dict when saving, load_state_dict with what was read when loading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import holdfast


class Counter:
    """A Stateful that tells when it was asked."""

    def __init__(self, value: Any, log: list[str] | None = None) -> None:
        self.value = value
        self.log = log if log is not None else []
        self.taken: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        self.log.append("state_dict")
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.log.append("load_state_dict")
        self.taken.append(dict(state_dict))
        self.value = state_dict["value"]


class Pair(NamedTuple):
    left: Any
    right: Any


def test_stateful_objects_at_any_depth(path: str) -> None:
    def build(fill: int) -> dict[str, Any]:
        return {
            "top": Counter(torch.full((2,), float(fill))),
            "list": [Counter(fill + 1), {"inner": Counter(fill + 2)}],
            "tuple": (Counter(fill + 3), Counter(torch.full((1,), fill))),
            "named": Pair(Counter(fill + 4), torch.full((1,), fill)),
            "nested": {"of": Counter({"deep": Counter(fill + 5)})},
        }

    holdfast.save(build(10), path)
    target = build(0)
    objects = dict(target)
    holdfast.load(target, path)
    assert target["top"] is objects["top"]
    assert target["top"].value.tolist() == [10.0, 10.0]
    assert target["list"] is objects["list"]
    assert target["list"][0].value == 11
    assert target["list"][1]["inner"].value == 12
    assert isinstance(target["tuple"], tuple)
    assert target["tuple"][0].value == 13
    assert target["tuple"][0] is objects["tuple"][0]
    assert target["tuple"][1].value.tolist() == [10]
    assert isinstance(target["named"], Pair)
    assert target["named"].left.value == 14
    assert target["named"].right.tolist() == [10]
    assert target["nested"]["of"].taken == [{"value": {"deep": {"value": 15}}}]


def test_states_are_asked_for_once_and_given_back_after_reading(path: str) -> None:
    log: list[str] = []
    holdfast.save({"counter": Counter(torch.ones(2), log)}, path)
    assert log == ["state_dict"]
    log.clear()
    counter = Counter(torch.zeros(2), log)
    holdfast.load({"counter": counter}, path)
    assert log == ["state_dict", "load_state_dict"]
    assert counter.taken[0]["value"].tolist() == [1.0, 1.0]


def test_a_load_that_fails_gives_nothing_back(path: str) -> None:
    holdfast.save({"counter": Counter(1)}, path)
    counter = Counter(0)
    with pytest.raises(holdfast.MismatchError):
        holdfast.load({"counter": counter, "other": 3}, path)
    assert counter.taken == []
    assert counter.value == 0


def test_a_state_comes_back_plain_without_a_target(path: str, same: Callable[..., None]) -> None:
    holdfast.save({"counters": [Counter(1), (Counter(torch.ones(1)),)]}, path)
    same(holdfast.load(path), {"counters": [{"value": 1}, ({"value": torch.ones(1)},)]})


def test_a_class_with_the_methods_is_no_stateful_object(path: str) -> None:
    with pytest.raises(holdfast.InvalidStateError, match="'kind' cannot be saved"):
        holdfast.save({"kind": Counter, "w": torch.ones(1)}, path)


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(count):
        batch = torch.randn(16, 4, generator=generator)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def test_training_goes_on_exactly_as_it_would_have(path: str) -> None:
    torch.manual_seed(0)
    model, optimizer, scheduler = training()
    steps(model, optimizer, scheduler, 3)
    holdfast.save({"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 3}, path)
    expected = steps(model, optimizer, scheduler, 4)
    torch.manual_seed(99)
    model, optimizer, scheduler = training()
    steps(model, optimizer, scheduler, 1)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    report = holdfast.load(state, path)
    assert report.unexpected == ()
    assert state["step"] == 3
    assert steps(model, optimizer, scheduler, 4) == expected


def test_a_fresh_optimizer_gets_the_state_it_does_not_have_yet(path: str) -> None:
    torch.manual_seed(0)
    model, optimizer, scheduler = training()
    steps(model, optimizer, scheduler, 3)
    holdfast.save({"model": model, "optimizer": optimizer, "scheduler": scheduler}, path)
    expected = steps(model, optimizer, scheduler, 4)
    model, optimizer, scheduler = training()
    report = holdfast.load({"model": model, "optimizer": optimizer, "scheduler": scheduler}, path)
    assert "optimizer.state.0.exp_avg" in report.loaded
    assert report.unexpected == ()
    assert steps(model, optimizer, scheduler, 4) == expected


def test_whole_states_can_be_given_to_a_fresh_optimizer(path: str) -> None:
    model, optimizer, scheduler = training()
    steps(model, optimizer, scheduler, 1)
    holdfast.save({"optimizer": optimizer}, path)
    state = holdfast.load(path)["optimizer"]
    assert list(state["state"]) == list(optimizer.state_dict()["state"])  # int keys
    _, fresh, _ = training()
    fresh.load_state_dict(state)
    for number, entry in optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            assert torch.equal(fresh.state_dict()["state"][number][name], value)


def test_a_module_on_the_meta_device_becomes_real(path: str) -> None:
    model, _, _ = training()
    model.double()
    holdfast.save({"model": model}, path)
    with torch.device("meta"):
        unreal, _, _ = training()
    unreal.double()
    holdfast.load({"model": unreal}, path)
    for (name, found), expected in zip(unreal.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name
    assert all(parameter.requires_grad for parameter in unreal.parameters())


def test_a_real_module_keeps_its_parameters(path: str) -> None:
    model, _, _ = training()
    holdfast.save({"model": model}, path)
    other, _, _ = training()
    before = list(other.parameters())
    holdfast.load({"model": other}, path)
    assert all(one is two for one, two in zip(other.parameters(), before, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(other.parameters(), model.parameters(), strict=True))


def test_a_state_that_is_no_dict_is_refused(path: str) -> None:
    with pytest.raises(holdfast.InvalidStateError, match="a state is a dict of names to values, not a Linear"):
        holdfast.save(torch.nn.Linear(1, 1), path)  # type: ignore[arg-type]
    holdfast.save({"w": torch.ones(1)}, path)
    with pytest.raises(holdfast.InvalidStateError, match="not a Linear"):
        holdfast.load(torch.nn.Linear(1, 1), path)  # type: ignore[call-overload]


class Watched(dict[str, Any]):
    """A dict that tells what is set in it."""

    def __init__(self, *entries: Any) -> None:
        super().__init__(*entries)
        self.was_set: list[str] = []

    def __setitem__(self, key: str, value: Any) -> None:
        self.was_set.append(key)
        super().__setitem__(key, value)


def test_objects_that_took_their_state_are_not_set_again_and_other_values_are(path: str) -> None:
    holdfast.save({"object": Counter(1), "step": 1, "inner": {"object": Counter(2), "step": 2}}, path)
    target = Watched({"object": Counter(0), "step": 0, "inner": Watched({"object": Counter(0), "step": 0})})
    holdfast.load(target, path)
    assert (target["object"].value, target["inner"]["object"].value) == (1, 2)
    assert (target["step"], target["inner"]["step"]) == (1, 2)
    assert "object" not in target.was_set
    assert "step" in target.was_set
    assert target["inner"].was_set == ["step"]
