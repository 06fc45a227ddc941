"""A ``Mapping`` at the public doors: save, async_save, load; ties, drops, offsets, meta tensors, reports, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemWriter,
    InvalidStateError,
    LoadOptions,
    Mapping,
    MismatchError,
    NativeWriter,
    SaveOptions,
)
from holdfast.mapping import Cast, Concat, Drop, Interleave, Move, Offset, Split, Stack, Tie, Transpose

FUSE = Mapping([Move(("m.q", "m.k"), "m.qk", (Concat(0, (2, 1)),)), Tie("m.head", "m.embed")])
FORMATS: dict[str, Any] = {"native": NativeWriter, "torch": FileSystemWriter}


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def state() -> dict[str, Any]:
    embed = numbered(4, 2)
    return {"m": {"qk": numbered(6, 2), "embed": embed, "head": embed, "steps": [1, 2]}, "epoch": 3, "empty": {}}


def blank() -> dict[str, Any]:
    embed = torch.zeros(4, 2)
    return {"m": {"qk": torch.zeros(6, 2), "embed": embed, "head": embed, "steps": [0, 0]}, "epoch": 0, "empty": {}}


def mapped(mapping: Any = FUSE) -> Any:
    return LoadOptions(mapping=mapping)


@pytest.mark.parametrize("form", FORMATS)
def test_there_and_back(form: str, path: str) -> None:
    holdfast.save(state(), storage_writer=FORMATS[form](path), options=SaveOptions(mapping=FUSE))
    read = holdfast.load(path)
    assert {"q", "k", "embed", "steps"} == {*read["m"]}
    assert torch.equal(read["m"]["k"], numbered(6, 2)[4:])
    target = blank()
    report = holdfast.load(target, path, options=mapped())
    assert torch.equal(target["m"]["qk"], numbered(6, 2))
    assert torch.equal(target["m"]["head"], numbered(4, 2))
    assert target["m"]["steps"] == [1, 2]
    assert target["epoch"] == 3
    assert {"m.q", "m.k", "m.embed", "epoch"} <= {*report.loaded}
    assert report.unexpected == report.differences == ()


def test_async_save_writes_what_save_writes(path: str) -> None:
    holdfast.save(state(), path, options=SaveOptions(mapping=FUSE))
    later = f"{path}-async"
    holdfast.async_save(state(), later, options=SaveOptions(mapping=FUSE, prove=True)).result()
    with holdfast.open(path) as one, holdfast.open(later) as other:
        assert list(one) == list(other)
        assert torch.equal(one["m.q"][...], other["m.q"][...])
    assert not holdfast.verify(later).damage


def test_async_save_of_parts_that_are_joined(path: str) -> None:
    mapping = Mapping([Move("ab", ("a", "b"), (Split(1),)), Move("t", "u", (Transpose(), Interleave(1)))])
    parts = {"a": numbered(3, 2), "b": numbered(3, 4), "u": numbered(3, 4)}
    holdfast.async_save(parts, path, options=SaveOptions(mapping=mapping)).result()
    with holdfast.open(path) as stored:
        assert torch.equal(stored["ab"][...], torch.cat([parts["a"], parts["b"]], 1))


def test_prefixes_and_functions_for_saves(path: str) -> None:
    holdfast.save({"module": {"w": numbered(2), "n": 1}}, path, options=SaveOptions(mapping={"module": ""}))
    assert holdfast.load(path)["n"] == 1
    holdfast.save({"w": numbered(2)}, path, options=SaveOptions(mapping=lambda key: f"model.{key}"))
    assert list(holdfast.open(path)) == ["model.w"]
    with pytest.raises(InvalidStateError, match="would be the name of 'a' and of 'b'"):
        holdfast.save({"a": 1, "b": 2}, path, options=SaveOptions(mapping=lambda key: "same"))
    assert list(holdfast.open(path)) == ["model.w"]


def test_ties_with_memory_of_their_own_are_both_filled(path: str) -> None:
    holdfast.save(state(), path, options=SaveOptions(mapping=FUSE))
    target = blank()
    target["m"]["head"] = torch.zeros(4, 2)
    report = holdfast.load(target, path, options=mapped())
    assert torch.equal(target["m"]["head"], numbered(4, 2))
    assert torch.equal(target["m"]["embed"], numbered(4, 2))
    assert report.loaded.count("m.embed") == 1
    assert report.unexpected == ()


def test_ties_that_are_none_are_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    wrong = state()
    wrong["m"]["head"] = torch.zeros(4, 2)
    wrong["m"]["qk"] = torch.zeros(5, 2)
    with pytest.raises(InvalidStateError, match=r"2 keys.*'m.head' is tied to 'm.embed'") as caught:
        holdfast.save(wrong, tmp_path / "a", options=SaveOptions(mapping=FUSE))
    assert {*caught.value.keys} == {"m.head", "m.qk"}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", FORMATS)
def test_meta_tensors_get_memory(form: str, path: str) -> None:
    holdfast.save(state(), storage_writer=FORMATS[form](path), options=SaveOptions(mapping=FUSE))
    with torch.device("meta"):
        target = blank()
    holdfast.load(target, path, options=mapped())
    assert torch.equal(target["m"]["qk"], numbered(6, 2))
    assert torch.equal(target["m"]["head"], numbered(4, 2))
    assert target["m"]["head"].data_ptr() == target["m"]["embed"].data_ptr()


def test_offsets_are_added_after_the_load(path: str) -> None:
    norm = numbered(3)
    holdfast.save({"norm": norm, "w": numbered(3), "half": numbered(4)}, path)
    mapping = Mapping([Offset("{name...}", 1.5), Move(("half",), "whole", (Interleave(0),)), Tie("twin", "norm")])
    shared = torch.zeros(3)
    target = {"norm": shared, "twin": shared, "same": shared, "w": torch.zeros(3), "whole": torch.zeros(4)}
    mapping = Mapping([*mapping.rules, Tie("same", "norm")])
    holdfast.load(target, path, options=mapped(mapping))
    assert target["norm"].tolist() == [1.5, 2.5, 3.5]
    assert target["w"].tolist() == [1.5, 2.5, 3.5]
    assert target["whole"].tolist() == [1.5, 3.5, 2.5, 4.5]


def test_an_offset_is_added_once_where_two_keys_have_one_memory(path: str) -> None:
    holdfast.save({"a": numbered(3), "b": numbered(3)}, path)
    shared = torch.zeros(3)
    holdfast.load({"a": shared, "b": shared}, path, options=mapped(Mapping([Offset("{name}", 1.5)])))
    assert shared.tolist() == [1.5, 2.5, 3.5]


def test_offsets_of_what_is_no_floating_tensor_are_refused(path: str) -> None:
    holdfast.save({"n": torch.ones(2, dtype=torch.int64), "epoch": 1}, path)
    with pytest.raises(MismatchError, match="gets an offset as 'n'") as caught:
        holdfast.load(
            {"n": torch.zeros(2, dtype=torch.int64), "epoch": 0}, path, options=mapped(Mapping([Offset("{name}", 1.0)]))
        )
    assert len(caught.value.differences) == 2


@pytest.mark.parametrize("rule", [Cast("a", "float16"), Offset("a", 1.0)])
def test_saves_refuse_rules_that_change_numbers(rule: Any) -> None:
    with pytest.raises(ValueError, match="changes numbers, and a checkpoint keeps them as they are"):
        SaveOptions(mapping=Mapping([rule]))


def test_dropped_keys(path: str) -> None:
    mapping = Mapping([Drop(inside="cache"), Drop(outside="old.{name...}")])
    holdfast.save({"w": numbered(2), "cache": numbered(3)}, path, options=SaveOptions(mapping=mapping))
    assert list(holdfast.open(path)) == ["w"]
    holdfast.save({"w": numbered(2), "old": {"x": 1}, "new": 2}, path)
    target = {"w": torch.zeros(2), "cache": numbered(3)}
    report = holdfast.load(target, path, options=mapped(mapping))
    assert report.unexpected == ("new",)
    assert target["cache"].tolist() == [0, 1, 2]


def test_one_error_has_the_faults_of_the_mapping_and_of_the_target(path: str) -> None:
    holdfast.save({"m": {"q": numbered(4, 2), "other": numbered(3)}}, path)
    wrong = {"m": {"qk": torch.zeros(6, 2), "odd": torch.zeros(5, 2), "other": torch.zeros(4)}}
    mapping = Mapping([*FUSE.rules[:1], Move(("m.x", "m.y"), "m.odd", (Concat(0),)), Tie("m.lone", "m.nobody")])
    with pytest.raises(MismatchError) as caught:
        holdfast.load(wrong, path, options=mapped(mapping))
    found = {(each.kind, each.key) for each in caught.value.differences}
    assert found == {("mapping", "m.odd"), ("missing", "m.k"), ("shape", "m.other")}
    assert "2 equal parts" in str(caught.value)
    assert not wrong["m"]["qk"].any()
    report = holdfast.load(wrong, path, strict=False, options=mapped(mapping))
    assert {(each.kind, each.key) for each in report.differences} == found
    assert report.loaded == ("m.q",)
    assert torch.equal(wrong["m"]["qk"][:4], numbered(4, 2))


def test_a_list_that_lacks_one_is_told(path: str) -> None:
    mapping = Mapping([Move("e.{e}", "all", (Stack(0),))])
    holdfast.save({"e.0": numbered(2), "e.2": numbered(2), "e.3": numbered(2)}, path)
    with pytest.raises(MismatchError, match=r"'e\.1' is not in the checkpoint"):
        holdfast.load({"all": torch.zeros(3, 2)}, path, options=mapped(mapping))


def test_empty_containers_take_what_no_rule_moves(path: str) -> None:
    holdfast.save(state(), path, options=SaveOptions(mapping=FUSE))
    target: dict[str, Any] = {"m": {}, "epoch": 0}
    report = holdfast.load(target, path, options=mapped())
    assert {"embed", "steps"} == {*target["m"]}
    assert {*report.unexpected} == {"m.q", "m.k", "empty"}


def test_flat_targets_and_planners(path: str) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False, mapping=FUSE)
    flat = {"m.qk": numbered(6, 2), "m.embed": numbered(4, 2), "m.head": numbered(4, 2)}
    holdfast.save(flat, path, planner=planner)
    assert {*holdfast.open(path)} == {"m.q", "m.k", "m.embed"}
    target = {key: torch.zeros_like(leaf, device="meta") for key, leaf in flat.items()}
    holdfast.load(target, path, planner=DefaultLoadPlanner(flatten_state_dict=False, mapping=FUSE))
    assert all(torch.equal(target[key], flat[key]) for key in flat)
    with pytest.raises(ValueError, match="mapping is an option of the planner"):
        holdfast.save(flat, path, planner=DefaultSavePlanner(), options=SaveOptions(mapping=FUSE))
    with pytest.raises(ValueError, match="mapping is an option of the planner"):
        holdfast.async_save(flat, path, planner=DefaultSavePlanner(), options=SaveOptions(mapping=FUSE))


def test_gradients_are_told_that_the_memory_changed(path: str) -> None:
    holdfast.save(state(), path, options=SaveOptions(mapping=FUSE))
    target = blank()
    weight = target["m"]["qk"] = torch.nn.Parameter(torch.zeros(6, 2))
    loss = (weight**2).sum()
    holdfast.load(target, path, options=mapped())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_casts_pass_through_views(path: str) -> None:
    holdfast.save({"ab": numbered(4, 2)}, path)
    mapping = Mapping([Move("ab", ("a", "b"), (Split(0),))])
    target = {"a": torch.zeros(2, 2, dtype=torch.float64), "b": torch.zeros(2, 2, dtype=torch.float64)}
    with pytest.raises(MismatchError, match="dtype"):
        holdfast.load(target, path, options=mapped(mapping))
    report = holdfast.load(target, path, options=LoadOptions(mapping=mapping, cast=True))
    assert torch.equal(torch.cat([target["a"], target["b"]]), numbered(4, 2).double())
    assert [each.key for each in report.casts] == ["ab"]
