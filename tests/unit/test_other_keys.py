"""Targets whose keys are not those of the checkpoint: LoadOptions(mapping=...), and the hint to pass it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import holdfast
from holdfast import FileSystemWriter, LoadOptions, MismatchError, NativeWriter

FORMATS = {"native": NativeWriter, "torch": FileSystemWriter}


@pytest.fixture(params=FORMATS)
def save(request: pytest.FixtureRequest, path: str) -> Callable[[Mapping[str, Any]], None]:
    return lambda state: void(holdfast.save(state, storage_writer=FORMATS[request.param](path)))


def void(_: object) -> None:
    return None


def numbered(count: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + count, dtype=torch.float32)


def load(target: dict[Any, Any], path: str, mapping: Any, *, strict: bool = True) -> holdfast.LoadReport:
    return holdfast.load(target, path, strict=strict, options=LoadOptions(mapping=mapping))


Save = Callable[[Mapping[str, Any]], None]


@pytest.mark.parametrize(
    ("stored", "wanted", "mapping"),
    [
        ("w", "module.w", {"module": ""}),
        ("w", "module.w", {"module.": ""}),
        ("module.w", "w", {"": "module"}),
        ("module.w", "w", {"": "module."}),
        ("model.w", "model._orig_mod.w", {"model._orig_mod": "model"}),
        ("old.deep.w", "new.w", {"new": "old.deep"}),
        ("exact", "other", {"other": "exact"}),
        ("w", "module.w", lambda key: key.removeprefix("module.")),
    ],
)
def test_prefixes_are_stripped_added_and_exchanged(
    path: str, save: Save, stored: str, wanted: str, mapping: Any
) -> None:
    save({stored: numbered(5, 3)})
    target = {wanted: torch.zeros(5)}
    report = load(target, path, mapping)
    assert target[wanted].tolist() == [3, 4, 5, 6, 7]
    assert report.loaded == (stored,)
    assert report.unexpected == report.differences == ()


def test_prefixes_end_at_dots_and_the_longest_counts(path: str, save: Save) -> None:
    save({"a.w": numbered(1, 1), "b.w": numbered(1, 2), "modelx.w": numbered(1, 3)})
    target = {"model.w": torch.zeros(1), "model.deep.w": torch.zeros(1), "modelx.w": torch.zeros(1)}
    load(target, path, {"model": "a", "model.deep": "b"})
    assert [leaf.item() for leaf in target.values()] == [1, 2, 3]


def test_nested_targets_get_tensors_and_values(path: str, save: Save) -> None:
    save({"module": {"layer": {"w": numbered(4), "note": "text"}}, "step": 7})
    target: dict[str, Any] = {"model": {"layer": {"w": torch.zeros(4), "note": ""}}, "step": 0}
    report = load(target, path, {"model": "module"})
    assert target["model"]["layer"]["w"].tolist() == [0, 1, 2, 3]
    assert (target["model"]["layer"]["note"], target["step"]) == ("text", 7)
    assert set(report.loaded) == {"module.layer.w", "module.layer.note", "step"}


def test_modules_get_their_own(path: str, save: Save) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    save({"model": model})
    wrapped = torch.nn.ModuleDict({"module": torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))})
    load({"model": wrapped}, path, {"model.module": "model"})
    assert torch.equal(wrapped["module"][0].weight, model[0].weight)


def test_versions_of_modules_follow_their_keys(path: str) -> None:
    told: list[dict[str, Any]] = []

    class Versioned(torch.nn.Linear):
        _version = 5

        def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
            told.append(dict(local_metadata))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    holdfast.save({"model": torch.nn.Sequential(Versioned(2, 2))}, path)
    Versioned._version = 6
    target = {"model": torch.nn.ModuleDict({"module": torch.nn.Sequential(Versioned(2, 2))})}
    load(target, path, {"model.module": "model"})
    assert told == [{"version": 5}]


def test_what_does_not_fit_is_told_by_the_stored_key(path: str, save: Save) -> None:
    save({"m.w": numbered(3), "m.half": numbered(3), "rest": numbered(1)})
    target = {"w": torch.zeros(4), "half": torch.zeros(3, dtype=torch.float64), "none": torch.zeros(1)}
    with pytest.raises(MismatchError) as caught:
        load(dict(target), path, {"": "m"})
    assert [each.key for each in caught.value.differences] == ["m.w", "m.half", "m.none"]
    assert "'m.none' is not in the checkpoint" in str(caught.value)
    options = LoadOptions(mapping={"": "m"}, cast=True)
    report = holdfast.load(target, path, strict=False, options=options)
    assert report.loaded == ("m.half",)
    assert [each.key for each in report.casts] == ["m.half"]
    assert report.missing == ("m.none",)
    assert report.unexpected == ("rest",)
    assert target["half"].tolist() == [0, 1, 2]


def test_two_keys_may_have_one_stored_key(path: str, save: Save) -> None:
    save({"embedding": numbered(3)})
    target = {"embedding": torch.zeros(3), "head": torch.zeros(3)}
    report = load(target, path, {"head": "embedding"})
    assert target["head"].tolist() == target["embedding"].tolist() == [0, 1, 2]
    assert report.loaded == ("embedding",)


@pytest.mark.parametrize("same", [True, False])
def test_tied_targets_are_loaded_once_and_told(path: str, save: Save, same: bool) -> None:
    save({"m.a": numbered(3), "m.b": numbered(3, 0 if same else 5)})
    shared = torch.zeros(3)
    report = load({"a": shared, "b": shared}, path, {"": "m"}, strict=False)
    assert shared.tolist() == ([0, 1, 2] if same else [5, 6, 7])
    assert [each.key for each in report.differences] == ([] if same else ["m.a"])
    if not same:
        with pytest.raises(MismatchError, match=r"'m\.a' has other data"):
            load({"a": shared, "b": shared}, path, {"": "m"})


def test_a_target_that_overlaps_itself_is_settled(path: str, save: Save) -> None:
    save({"m.a": numbered(4), "m.b": numbered(2, 2)})
    memory = torch.zeros(4)
    load({"a": memory, "b": memory[2:]}, path, {"": "m"})
    assert memory.tolist() == [0, 1, 2, 3]


def test_empty_containers_are_filled_by_prefixes(path: str, save: Save) -> None:
    weight = numbered(3)
    save({"module": {"w": weight, "tied": weight, "deep": {"n": 1}}, "other": 2})
    target: dict[str, Any] = {"model": {}}
    report = load(target, path, {"model": "module"})
    assert target["model"]["w"].tolist() == [0, 1, 2]
    assert target["model"]["deep"] == {"n": 1}
    assert set(report.made) == {"module.w", "module.tied", "module.deep.n"}
    assert report.unexpected == ("other",)


def test_a_fresh_optimizer_beside_a_renamed_model(path: str, save: Save) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save({"old": model, "optimizer": optimizer})
    other = torch.nn.Linear(2, 2)
    fresh = torch.optim.Adam(other.parameters())
    load({"new": other, "optimizer": fresh}, path, {"new": "old"})
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_tensor_subclasses_follow_the_map(path: str, save: Save) -> None:
    save({"m": {"x": TwoTensor(numbered(3), numbered(3, 5))}})
    target = {"x": TwoTensor(torch.zeros(3), torch.zeros(3))}
    load(target, path, {"": "m"})
    assert (target["x"].a.tolist(), target["x"].b.tolist()) == ([0, 1, 2], [5, 6, 7])


def test_planners_of_ours_take_a_map(path: str, save: Save) -> None:
    save({"m.w": numbered(3)})

    class Planner(holdfast.DefaultLoadPlanner):
        def transform_tensor(self, read_item: holdfast.ReadItem, tensor: torch.Tensor) -> torch.Tensor:
            assert (read_item.dest_index.fqn, read_item.storage_index.fqn) == ("w", "m.w")
            return super().transform_tensor(read_item, tensor)

    target = {"w": torch.zeros(3)}
    holdfast.load(target, path, planner=Planner(mapping={"": "m"}))
    assert target["w"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="options of the planner; pass them to the planner"):
        holdfast.load(target, path, planner=Planner(), options=LoadOptions(mapping={"": "m"}))


def test_what_is_no_map_is_refused(path: str) -> None:
    holdfast.save({"w": numbered(3)}, path)
    wrong: Any
    for wrong in ("module", {"a": 1}, {1: "a"}, 5):
        with pytest.raises(ValueError, match=r"mapping is a holdfast\.Mapping"):
            LoadOptions(mapping=wrong)
    with pytest.raises(ValueError, match="read takes a Mapping of rules"):
        holdfast.read(path, options=LoadOptions(mapping={"a": "b"}))
    with pytest.raises(holdfast.InvalidStateError, match="mapping gave a NoneType for 'w'"):
        load({"w": torch.zeros(3)}, path, lambda key: None)


LAYERS = [f"layers.{number}.{part}" for number in range(4) for part in ("attention.weight", "mlp.weight", "bias")]


@pytest.mark.parametrize(
    ("stored", "wanted", "mapping"),
    [
        ("{}", "module.{}", {"module": ""}),
        ("module.{}", "{}", {"": "module"}),
        ("model.{}", "model._orig_mod.{}", {"model._orig_mod": "model"}),
        ("model.module.{}", "model.{}", {"model": "model.module"}),
        ("teacher.{}", "student.net.{}", {"student.net": "teacher"}),
    ],
)
def test_keys_that_nearly_fit_are_hinted_at(path: str, stored: str, wanted: str, mapping: dict[str, str]) -> None:
    holdfast.save({**{stored.format(key): numbered(2) for key in LAYERS}, "step": 1}, path)
    target = {wanted.format(key): torch.zeros(2) for key in LAYERS}
    hint = f"Did you mean {stored.format(LAYERS[0])!r} for {wanted.format(LAYERS[0])!r}? "
    with pytest.raises(MismatchError, match=re.escape(f"{hint}Pass LoadOptions(mapping={mapping}).")):
        holdfast.load(target, path)
    load(target, path, mapping)


def test_wrappers_in_the_middle_of_keys_are_hinted_at(path: str) -> None:
    holdfast.save({key: numbered(2) for key in LAYERS}, path)
    target = {key.replace("layers.", "layers._orig_mod.").replace(".bias", "._orig_mod.bias"): 0 for key in LAYERS}
    target = {key: torch.zeros(2) for key in target}
    with pytest.raises(MismatchError, match=r"mapping=lambda key: key\.replace\('_orig_mod\.', ''\)\)\.$"):
        holdfast.load(target, path)
    load(target, path, lambda key: key.replace("_orig_mod.", ""))


def test_there_is_no_hint_where_nothing_is_near(path: str) -> None:
    holdfast.save({"a.weight": numbered(2), "b.bias": numbered(2)}, path)
    for keys in (["other"], ["x.y", "a.weight"], ["x.weight", "y.thing", "z.thing"]):
        with pytest.raises(MismatchError) as caught:
            holdfast.load({key: torch.zeros(2) for key in keys}, path)
        assert "Did you mean" not in str(caught.value)


def test_a_hint_does_not_break_what_fits(path: str) -> None:
    holdfast.save({"module.w": numbered(2), **{f"optimizer.{n}": numbered(2) for n in range(5)}}, path)
    with pytest.raises(MismatchError) as caught:
        holdfast.load({"w": torch.zeros(2), **{f"optimizer.{n}": torch.zeros(2) for n in range(5)}}, path)
    assert "{'': 'module'}" not in str(caught.value)
