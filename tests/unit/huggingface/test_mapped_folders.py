"""Mappings where there is no state: conversions in both directions, read, and loads into an empty target."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast import LoadOptions, Mapping, hf
from holdfast._checkpoint import Checkpoint, StoredTensor
from holdfast._values.box import Box
from holdfast.cli import app
from holdfast.interop.mapped import MappedCheckpoint
from holdfast.mapping import (
    Cast,
    Concat,
    Deinterleave,
    Drop,
    Interleave,
    Move,
    Offset,
    Split,
    Stack,
    Tie,
    Transpose,
    Unstack,
)

EMBED = torch.randn(10, 8)
LAYER = "layers.{i}"
MODEL = Mapping(
    (
        Move(tuple(f"model.{LAYER}.{name}" for name in "qkv"), f"{LAYER}.qkv", (Concat(0, (4, 1, 1)),)),
        Move((f"model.{LAYER}.e.{{e}}.gate", f"model.{LAYER}.e.{{e}}.up"), f"{LAYER}.gate_up", (Stack(0), Concat(1))),
        Move("model.embed", "embed"),
        Tie("head", "embed"),
        Drop(inside="cache"),
        Drop(outside="old.{name...}"),
        Offset(f"model.{LAYER}.norm", 0.5),
        Cast("model.embed", "bfloat16"),
        Move(f"model.{LAYER}.norm", f"{LAYER}.norm"),
    )
)
STATE: dict[str, Any] = {
    "embed": EMBED,
    "head": EMBED,
    "cache": torch.ones(3),
    "step": torch.tensor(7),
    "layers.0.qkv": torch.randn(12, 8),
    "layers.1.qkv": torch.randn(12, 8),
    "layers.0.gate_up": torch.randn(3, 10, 8),
    "layers.1.norm": torch.arange(5) / 4,
}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert one.keys() == other.keys()
    return all(one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one)


def inside() -> dict[str, Any]:
    """What a load has of the folder that the state is exported to."""
    return {key: value for key, value in STATE.items() if key != "cache"}


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    hf.export(STATE, tmp_path / "exported", mapping=MODEL)
    return tmp_path / "exported"


def test_a_conversion_writes_what_an_export_writes(tmp_path: Path, exported: Path) -> None:
    holdfast.save(STATE, tmp_path / "saved")
    done = holdfast.convert(tmp_path / "saved", tmp_path / "made", to="hf", mapping=MODEL)
    assert done.bytes == sum(tensor.nbytes for key, tensor in STATE.items() if key not in ("head", "cache"))
    assert same(holdfast.read(tmp_path / "made"), holdfast.read(exported))
    assert holdfast.verify(tmp_path / "made").ok
    told = [json.loads((folder / "holdfast.json").read_bytes())["mapping"] for folder in (tmp_path / "made", exported)]
    assert told[0] == told[1] == json.loads(MODEL.to_json())


@pytest.mark.parametrize("to", ["native", "torch", "pt"])
def test_a_folder_is_converted_to_what_a_load_has(tmp_path: Path, exported: Path, to: Any) -> None:
    target = {key: torch.zeros_like(value) for key, value in inside().items()}
    holdfast.load(target, exported, options=LoadOptions(mapping=MODEL, cast=True))
    holdfast.convert(exported, tmp_path / "made", to=to, mapping=MODEL)
    found = torch.load(tmp_path / "made") if to == "pt" else holdfast.read(tmp_path / "made")
    target["embed"] = target["head"] = target["embed"].bfloat16()  # the type that it has in the folder
    assert same(found, target)
    assert to == "torch" or found["head"].data_ptr() == found["embed"].data_ptr()


def test_an_empty_target_gets_all_that_is_inside(exported: Path) -> None:
    options = LoadOptions(mapping=MODEL)
    state: dict[str, Any] = {}
    report = holdfast.load(state, exported, options=options)
    assert {*report.loaded} == {*report.made} == {*holdfast.open(exported)}
    assert report.unexpected == report.differences == ()
    assert same({**state, "embed": EMBED, "head": EMBED}, inside())
    assert state["head"].data_ptr() == state["embed"].data_ptr()
    assert torch.equal(state["head"], EMBED.bfloat16())
    assert same(holdfast.read(exported, options=options), state)
    with pytest.raises(ValueError, match="read takes a Mapping of rules, and no keys"):
        holdfast.read(exported, ["embed"], options=options)


def test_values_and_nesting_stay(tmp_path: Path) -> None:
    state = {"m": {"a": torch.ones(2), "b": torch.zeros(2), "name": "x"}, "epoch": 3, "empty": []}
    mapping = Mapping([Move(("m.a", "m.b"), "m.ab", (Concat(0),))])
    holdfast.save(state, storage_writer=holdfast.NativeWriter(tmp_path / "apart", user_metadata={"step": 5}))
    holdfast.convert(tmp_path / "apart", tmp_path / "joined", to="native", mapping=mapping)
    assert holdfast.open(tmp_path / "joined").user_metadata["step"] == 5
    for found in (
        holdfast.read(tmp_path / "joined"),
        holdfast.read(tmp_path / "apart", options=LoadOptions(mapping=mapping)),
    ):
        assert found["m"].pop("ab").tolist() == [1, 1, 0, 0]
        assert found == {"m": {"name": "x"}, "epoch": 3, "empty": []}


@pytest.mark.parametrize(
    ("move", "shapes"),
    [
        (Move("a", "b", (Transpose(0, 1),)), [(5, 7)]),
        (Move("a", "b", (Interleave(0, 3, 2),)), [(12, 5)]),
        (Move("a", "b", (Deinterleave(1, 2, 3), Transpose(0, 2))), [(4, 12, 5)]),
        (Move("a.{e}", "b", (Stack(1), Interleave(0, 2))), [(8, 3, 2)]),
        (Move("a", "b.{e}", (Unstack(-1),)), [(3, 2), (3, 2), (3, 2)]),
        (Move("a", ("b", "c"), (Split(0, (2, 1)),)), [(8, 3), (4, 3)]),
        (Move(("a", "c"), "b", (Interleave(0, 2, only=(1,)), Concat(0, (1, 2)))), [(12, 3)]),
        (Move("a", "b"), [()]),
        (Move(("a", "c"), "b", (Concat(0),)), [(0, 3)]),
    ],
)
def test_each_operation_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: Move, shapes: list[tuple[int, ...]]
) -> None:
    mapping = Mapping([move])
    pattern = move.insides
    keys = [*pattern] if len(pattern) > 1 or "{e}" not in pattern[0] else [f"b.{number}" for number in range(3)]
    state = {key: torch.randn(shape) for key, shape in zip(keys, shapes, strict=True)}
    hf.export(state, tmp_path / "exported", mapping=mapping)
    holdfast.save(state, tmp_path / "saved")
    # Room for a few elements: every part has to be divided.
    monkeypatch.setattr("holdfast.interop.mapped._HELD_BYTES", 32)
    holdfast.convert(tmp_path / "saved", tmp_path / "out", to="hf", mapping=mapping)
    assert same(holdfast.read(tmp_path / "out"), holdfast.read(tmp_path / "exported"))
    holdfast.convert(tmp_path / "out", tmp_path / "in", to="native", mapping=mapping)
    holdfast.save(state, tmp_path / "flat")
    assert same(holdfast.read(tmp_path / "in"), {key: value for key, value in state.items()})
    assert same(holdfast.read(tmp_path / "out", options=LoadOptions(mapping=mapping)), state)


REFUSED: list[tuple[list[Any], str]] = [
    ([Move("a", ("x", "y"), (Split(0),))], "give it parts"),
    ([Move(("a", "b"), "x", (Concat(0, (1, 3)),))], "does not fit the rule|has shape"),
    ([Move(("a", "missing"), "x", (Concat(0),))], "'missing' is missing"),
    ([Move(("a", "n"), "x", (Concat(0),))], "different dtypes"),
    ([Tie("a", "b")], "'a' is not in the files of a model where it is tied to 'b'"),
    ([Drop(inside="a")], "'a' has no place inside"),
    ([Offset("n", 1.0)], "'n' gets an offset"),
    ([Move("a", "b")], "'b' would be the name of|named"),
]


@pytest.mark.parametrize(("rules", "said"), REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path, rules: list[Any], said: str) -> None:
    hf.export({"a": torch.ones(2, 2), "b": torch.ones(2, 2), "n": torch.ones(2, 2).int()}, tmp_path / "model")
    with pytest.raises((holdfast.CheckpointError, ValueError), match=said):
        holdfast.convert(tmp_path / "model", tmp_path / "made", to="native", mapping=Mapping(rules))
    assert os.listdir(tmp_path) == ["model"]
    target: dict[str, Any] = {}
    with pytest.raises((holdfast.CheckpointError, ValueError), match=said):
        holdfast.load(target, tmp_path / "model", options=LoadOptions(mapping=Mapping(rules)))
    assert target == {}


def test_the_parts_of_a_split_are_those_of_the_state() -> None:
    mapping = Mapping([Move("a", ("x", "y"), (Split(0, (1, 3)),))])
    assert mapping.check({"a": (8,)}, {"x": (2,), "y": (6,)}) == ()
    (fault,) = mapping.check(None, {"x": (4,), "y": (4,)})
    assert "[4, 4] long in dimension 0, not in the proportion (1, 3)" in fault.problem
    with pytest.raises(ValueError, match="3 parts for 2 tensors"):
        Move("a", ("x", "y"), (Split(0, (1, 1, 1)),))
    assert Mapping.from_json(mapping.to_json()) == mapping


def test_ties_are_compared_before_one_is_left_out(tmp_path: Path) -> None:
    mapping = Mapping([Tie("head", "embed")])
    holdfast.save({"embed": EMBED, "head": EMBED.clone()}, tmp_path / "equal")
    holdfast.convert(tmp_path / "equal", tmp_path / "model", to="hf", mapping=mapping)
    assert [*holdfast.open(tmp_path / "model")] == ["embed"]
    other = EMBED.clone()
    other[-1, -1] += 1
    holdfast.save({"embed": EMBED, "head": other}, tmp_path / "unequal")
    with pytest.raises(holdfast.InvalidStateError, match="'head' is tied to 'embed', but has other contents"):
        holdfast.convert(tmp_path / "unequal", tmp_path / "made", to="hf", mapping=mapping)
    chain = Mapping([Tie("head", "embed"), Drop(inside="embed")])
    with pytest.raises(holdfast.InvalidStateError, match="'head' is tied to 'embed', which is dropped"):
        holdfast.convert(tmp_path / "equal", tmp_path / "made", to="hf", mapping=chain)


def test_files_of_torch_are_exported_with_a_mapping(tmp_path: Path) -> None:
    torch.save({"embed": EMBED, "head": EMBED}, tmp_path / "model.pt")
    holdfast.convert(tmp_path / "model.pt", tmp_path / "model", to="hf", mapping=Mapping([Tie("head", "embed")]))
    assert [*holdfast.open(tmp_path / "model")] == ["embed"]
    with pytest.raises(ValueError, match="convert it to native first"):
        holdfast.convert(tmp_path / "model.pt", tmp_path / "made", to="native", mapping=Mapping())


def test_the_command_line_takes_a_mapping(tmp_path: Path, exported: Path) -> None:
    (tmp_path / "rules.json").write_text(MODEL.to_json())
    arguments = ["convert", str(exported), str(tmp_path / "made"), "--to", "native", "--mapping"]
    run = CliRunner().invoke(app, [*arguments, str(tmp_path / "rules.json")])
    assert run.exit_code == 0, run.output
    assert "layers.0.qkv" in holdfast.open(tmp_path / "made")
    (tmp_path / "odd.json").write_text("[]")
    for wrong in ("odd.json", "nothing.json"):
        run = CliRunner().invoke(app, [*arguments, str(tmp_path / wrong)])
        assert run.exit_code == 2
        assert "cannot be used" in run.output


@pytest.mark.parametrize(("kept", "times"), [(1 << 20, 1), (20_000, 4), (0, 16)])
def test_a_transposed_matrix_is_read_as_often_as_it_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int, times: int
) -> None:
    """With 64 kB of it, in parts of 4 kB."""
    matrix = torch.randn(128, 128)
    hf.export({"a": matrix, "e": torch.randn(3, 8, 4)}, tmp_path / "folder")
    monkeypatch.setattr("holdfast.interop.mapped._KEPT_BYTES", kept)
    read_into, elements = StoredTensor.read_into, {"a": 0, "e": 0}
    strips: list[Box] = []

    def count(self: StoredTensor, target: torch.Tensor, box: Box) -> None:
        if type(self._checkpoint) is Checkpoint:
            assert box.volume * 4 <= max(kept, 4096)
            elements[self.key] += box.volume
            strips.extend([box] * (self.key == "a"))
        read_into(self, target, box)

    monkeypatch.setattr(StoredTensor, "read_into", count)
    mapping = Mapping([Move("a", "b", (Transpose(0, 1),)), Move("e", "f", (Transpose(1, 2),))])
    with holdfast.open(tmp_path / "folder") as folder:
        made = MappedCheckpoint(folder, mapping, is_export=False)
        for low in range(0, 128, 8):
            part = torch.empty(8, 128)
            made["b"].read_into(part, Box((low, 0), (8, 128)))
            assert torch.equal(part, matrix.T[low : low + 8])
        experts = torch.empty(3, 4, 8)
        for number in range(12):
            row = Box((number // 4, number % 4, 0), (1, 1, 8))
            made["f"].read_into(experts[row.slices()], row)
        assert torch.equal(experts, folder["e"][...].transpose(1, 2))
    assert elements["a"] == 128 * 128, "no element twice; blocks are read as often as there are strips"
    assert elements["e"] == 3 * 8 * 4
    assert len(strips) == times
