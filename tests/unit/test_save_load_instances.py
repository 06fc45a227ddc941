"""Dataclasses and named tuples with tensors in them: under keys of their own, back as their class or as a Record."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import sys
from argparse import Namespace
from collections import OrderedDict, deque
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from holdfast.staging import DefaultStager


class Mode(enum.Enum):
    FAST = "f"
    SLOW = "s"


@dataclasses.dataclass
class Train:
    step: int
    weight: Any = None
    buffers: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any
    mode: Mode = Mode.FAST


class Pair(NamedTuple):
    first: Any
    second: Any = None


@dataclasses.dataclass
class Guarded:
    weight: Any

    def __post_init__(self) -> None:
        raise AssertionError("a class is filled without its __init__")


TYPES = [Train, Frozen, Pair, Mode]
INSTANCES: dict[str, Any] = {
    "dataclass": Train(3, torch.ones(2), {"a": torch.zeros(1), "empty": {}}),
    "frozen": Frozen(torch.ones(2), Mode.SLOW),
    "named tuple": Pair(torch.ones(2), Mode.SLOW),
    "arrays": Train(1, np.arange(3), {"x": Pair(np.ones(2), 1)}),
    "nested": Train(1, Pair(Frozen(torch.ones(1)), Frozen([torch.zeros(2), {"q": 1}])), {"no tensors": Frozen(5)}),
    "in a list": [Train(1, torch.ones(1)), 5, Frozen(2)],
    "in a tuple": (Pair(1, torch.ones(1)), (Frozen(torch.ones(2)),)),
    "in containers": OrderedDict(q=deque([Train(1, torch.ones(1))], maxlen=3), n=Namespace(p=Pair(torch.ones(1)))),
    "containers in it": Frozen(OrderedDict(w=torch.ones(1)), Mode.SLOW),
}


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return [torch.as_tensor(value)]
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    value = vars(value) if isinstance(value, Namespace) else value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, deque)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def stored(path: str) -> dict[str, Any]:
    """The manifest without what is another one in each save."""
    manifest: dict[str, Any] = msgspec.json.decode((Path(path) / "manifest.json").read_bytes())
    return {name: manifest[name] for name in ("requires", "tensors", "values", "metadata")}


def with_types(*types: type) -> holdfast.LoadOptions:
    return holdfast.LoadOptions(types=types)


@pytest.mark.parametrize("name", sorted(INSTANCES))
def test_instances_come_back_as_their_class(name: str, path: str) -> None:
    state = {"top": INSTANCES[name], "deep": [{"x": INSTANCES[name]}]}
    holdfast.save(state, path)
    assert repr(holdfast.read(path, types=TYPES)) == repr(state)
    assert repr(holdfast.read(path, ["deep"], types=TYPES)["deep"]) == repr(state["deep"])
    empty: dict[str, Any] = {"deep": []}
    holdfast.load(empty, path, options=with_types(*TYPES))
    assert repr(empty["deep"]) == repr(state["deep"])
    everything: dict[str, Any] = {}
    holdfast.load(everything, path, options=with_types(*TYPES))
    assert repr(everything) == repr(state)


@pytest.mark.parametrize("name", sorted(INSTANCES))
def test_instances_of_a_target_are_filled(name: str, path: str) -> None:
    holdfast.save({"x": INSTANCES[name]}, path)
    target = {"x": copy.deepcopy(INSTANCES[name])}
    held, tensors = target["x"], tensors_in(target["x"])
    for tensor in tensors:
        tensor.zero_()
    holdfast.load(target, path)
    assert repr(target["x"]) == repr(INSTANCES[name])
    assert [tensor.data_ptr() for tensor in tensors_in(target["x"])] == [tensor.data_ptr() for tensor in tensors]
    if not isinstance(held, tuple):
        assert target["x"] is held


@pytest.mark.parametrize("name", sorted(INSTANCES))
def test_a_record_with_tensors_is_saved_again_as_what_it_was(name: str, path: str) -> None:
    holdfast.save({"x": INSTANCES[name], "deep": [(INSTANCES[name],)]}, path)
    found = holdfast.read(path)
    assert "Record(" in repr(found)
    holdfast.save(found, f"{path}-again")
    assert stored(f"{path}-again") == stored(path)
    target = copy.deepcopy(found)
    for tensor in tensors_in(target):
        tensor.zero_()
    holdfast.load(target, path)
    assert repr(target) == repr(found)


def test_keys_are_those_of_a_dict_or_a_tuple(path: str) -> None:
    holdfast.save({"run": Train(3, torch.ones(2)), "pair": Pair(torch.ones(1), 2)}, path)
    found = holdfast.read(path)
    assert (found["run"].kind, found["run"].name) == ("dataclass", f"{__name__}.Train")
    assert list(found["run"].fields) == ["step", "weight", "buffers"]
    assert (found["pair"].kind, list(found["pair"].fields)) == ("namedtuple", ["first", "second"])
    with holdfast.open(path) as checkpoint:
        assert list(checkpoint) == ["run.step", "run.weight", "run.buffers", "pair.0", "pair.1"]
        assert torch.equal(checkpoint["run.weight"][1:], torch.ones(1))
    shown = CliRunner().invoke(app, ["show", path, "run.*", "--json"]).stdout
    assert '"run.weight"' in shown
    assert "pair" not in shown


def test_the_manifest_names_class_and_fields(path: str) -> None:
    holdfast.save({"pair": Pair(torch.ones(1), 2)}, path)
    record = ["namedtuple", f"{__name__}.Pair", [["first", None], ["second", None]]]
    containers = {"dict": [[{"tuple": ["pair"]}, {"record": record}]]}
    assert stored(path)["metadata"] == {"dict": [["holdfast.containers", containers]]}


def test_a_part_of_an_instance_is_a_record_of_that_part(path: str) -> None:
    holdfast.save({"run": Train(3, torch.ones(2)), "pair": Pair(torch.ones(1), 2), "other": 1}, path)
    for types in ((), TYPES):
        found = holdfast.read(path, ["run.step", "run.weight", "pair.1"], types=types)
        assert repr(found["run"]) == f"Record(dataclass {__name__}.Train: step=3, weight=tensor([1., 1.]))"
        assert repr(found["pair"]) == f"Record(namedtuple {__name__}.Pair: second=2)"


def test_objects_and_generators_in_a_dataclass_get_their_state(path: str) -> None:
    def made(seed: int) -> Train:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        optimizer = torch.optim.AdamW(model.parameters())
        if seed == 1:
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
        return Train(seed, Pair(model, optimizer), {"generator": torch.Generator().manual_seed(seed)})

    saved, run = made(1), made(0)
    holdfast.save({"run": saved}, path)
    model, optimizer, generator = *run.weight, run.buffers["generator"]
    state = {"run": run}
    holdfast.load(state, path)
    assert state["run"] is run
    assert run.step == 1
    assert (run.weight.first, run.weight.second, run.buffers["generator"]) == (model, optimizer, generator)
    assert repr(model.state_dict()) == repr(saved.weight.first.state_dict())
    assert repr(optimizer.state_dict()) == repr(saved.weight.second.state_dict())
    assert torch.equal(generator.get_state(), saved.buffers["generator"].get_state())
    versions = holdfast.read(path)["run"].fields["weight"].fields["first"]._metadata
    assert versions["1"] == {"version": 2}


def test_classes_are_filled_without_their_init(path: str) -> None:
    guarded = object.__new__(Guarded)
    guarded.weight = torch.ones(2)
    holdfast.save({"x": guarded}, path)
    assert torch.equal(holdfast.read(path, types=[Guarded])["x"].weight, torch.ones(2))
    guarded.weight = torch.zeros(2)
    holdfast.load({"x": guarded}, path)
    assert torch.equal(guarded.weight, torch.ones(2))


def made_class(name: str, fields: list[str], module: str = __name__) -> Any:
    cls = dataclasses.make_dataclass(name, fields)
    cls.__module__ = module
    return cls


def test_fields_and_classes_that_differ_are_named_before_anything_is_changed(path: str) -> None:
    holdfast.save({"run": Train(3, torch.ones(2)), "pair": Pair(torch.ones(2)), "w": torch.ones(1)}, path)
    other = made_class("Train", ["step", "weight", "new"])
    longer = collections.namedtuple("Pair", ["first", "second", "third"], module=__name__)
    for cls, fields in ((other, "step, weight, buffers"), (longer, "first, second")):
        with pytest.raises(holdfast.MismatchError, match=rf"has fields {fields} in the checkpoint but") as caught:
            holdfast.read(path, types=[cls])
        assert caught.value.differences[0].kind == "fields"
    target: dict[str, Any] = {"run": other(0, torch.zeros(2), 7), "w": torch.zeros(1)}
    with pytest.raises(
        holdfast.MismatchError, match=r"'run' has fields step, weight, buffers in .* step, weight, new in"
    ):
        holdfast.load(target, path)
    assert repr(target) == repr({"run": other(0, torch.zeros(2), 7), "w": torch.zeros(1)})
    report = holdfast.load(target, path, strict=False)
    assert [(each.key, each.kind) for each in report.differences] == [("run", "fields"), ("run.new", "missing")]
    assert repr(target) == repr({"run": other(3, torch.ones(2), 7), "w": torch.ones(1)})
    with pytest.raises(
        holdfast.MismatchError, match=r"'run' has type .*\.Train in the checkpoint but .*\.Other in the"
    ):
        holdfast.load({"run": made_class("Other", ["step", "weight", "buffers"])(0, torch.zeros(2), {})}, path)
    report = holdfast.load({}, path, planner=holdfast.DefaultLoadPlanner(strict=False, types=[other]))
    assert [(each.key, each.kind) for each in report.differences] == [("run", "fields")]


def test_the_script_itself_is_known_by_both_of_its_names(path: str) -> None:
    holdfast.save({"x": made_class("Settings", ["a"], "__main__")(torch.ones(1))}, path)
    here = made_class("Settings", ["a"], "train")
    assert type(holdfast.read(path, types=[here])["x"]) is here
    target = {"x": here(torch.zeros(1))}
    holdfast.load(target, path)
    assert torch.equal(target["x"].a, torch.ones(1))
    with pytest.raises(holdfast.MismatchError, match=r"'x' has type __main__\.Settings"):
        holdfast.load({"x": made_class("OtherSettings", ["a"], "train")(torch.zeros(1))}, path)


def test_nothing_is_imported_for_a_name_in_a_file(path: str) -> None:
    holdfast.save({"x": holdfast.Record("dataclass", "antigravity.Fly", (("a", torch.ones(1)),))}, path)
    assert holdfast.read(path)["x"].name == "antigravity.Fly"
    assert "antigravity" not in sys.modules


def test_a_target_gets_what_it_has_only_empty_containers_for(path: str) -> None:
    holdfast.save({"run": Train(3, 1, {"a": torch.ones(2)}), "pair": Pair({"b": torch.ones(1)})}, path)
    run, empty = Train(0, 0), Pair({})
    target: dict[str, Any] = {"run": run, "pair": empty}
    holdfast.load(target, path)
    assert target["run"] is run
    assert repr(target["run"]) == repr(Train(3, 1, {"a": torch.ones(2)}))
    assert repr(target["pair"]) == repr(Pair({"b": torch.ones(1)}))
    frozen = {"run": Train(0, None, {}), "other": 1}
    with pytest.raises(holdfast.MismatchError, match="'other' is not in the checkpoint"):
        holdfast.load(frozen, path)
    assert frozen["run"] == Train(0, None, {})
    holdfast.save({"run": Train(3, torch.ones(2))}, path)
    with pytest.raises(
        holdfast.MismatchError, match=r"'run\.weight' has kind a tensor in the checkpoint but a NoneType"
    ):
        holdfast.load({"run": Train(0)}, path)


def test_an_instance_that_had_no_tensors_is_loaded_over_one_that_has(path: str) -> None:
    holdfast.save({"run": Train(3), "pair": Pair(1, Mode.SLOW)}, path)
    run = Train(0, torch.ones(2))
    target: dict[str, Any] = {"run": run, "pair": Pair(torch.ones(2), Mode.FAST)}
    holdfast.load(target, path, options=with_types(Mode))
    assert target == {"run": Train(3), "pair": Pair(1, Mode.SLOW)}
    assert target["run"] is run
    with pytest.raises(holdfast.MismatchError, match=r"'run' has type .*\.Train in the checkpoint but .*\.Frozen"):
        holdfast.load({"run": Frozen(torch.ones(2))}, path)


def test_dicts_and_instances_are_loaded_into_each_other(path: str) -> None:
    holdfast.save({"run": Train(3, torch.ones(2)), "plain": {"value": torch.ones(1), "mode": 1}}, path)
    target: dict[str, Any] = {"run": {"step": 0, "weight": torch.zeros(2)}, "plain": Frozen(torch.zeros(1))}
    holdfast.load(target, path)
    assert repr(target["run"]) == repr({"step": 3, "weight": torch.ones(2)})
    assert repr(target["plain"]) == repr(Frozen(torch.ones(1), 1))  # type: ignore[arg-type]


def test_meta_tensors_and_ties_in_an_instance(path: str) -> None:
    weight = torch.ones(2, requires_grad=True)
    holdfast.save({"run": Train(3, weight), "tied": weight}, path)
    found = holdfast.read(path, types=TYPES)
    assert found["run"].weight is found["tied"]
    assert found["tied"].requires_grad
    run = Train(0, torch.empty(2, device="meta"))
    holdfast.load({"run": run}, path)
    assert torch.equal(run.weight, torch.ones(2))


def test_a_mapping_leads_into_instances(path: str) -> None:
    holdfast.save({"run": Train(3, torch.ones(2))}, path)
    target = {"module": {"run": Train(0, torch.zeros(2))}}
    holdfast.load(target, path, options=holdfast.LoadOptions(mapping={"module": ""}))
    assert repr(target["module"]["run"]) == repr(Train(3, torch.ones(2)))


@pytest.mark.parametrize("stager", [None, DefaultStager])
def test_asynchronous_saves_take_instances_apart(stager: Any, path: str) -> None:
    run = Train(3, torch.ones(2), {"pair": Pair(torch.ones(1))})
    handle = holdfast.async_save({"run": run}, path, async_stager=stager and stager())
    wanted = repr(run)
    run.weight.zero_()
    run.step = 0
    handle.result(timeout=300)
    assert repr(holdfast.read(path, types=TYPES)["run"]) == wanted


def test_planners_choose_what_is_saved_of_an_instance(path: str) -> None:
    class Half(holdfast.DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            data = super().transform_object(write_item, object)
            return data.half() if isinstance(data, torch.Tensor) else data

    holdfast.save({"run": Train(3, torch.ones(2))}, path, planner=Half())
    assert holdfast.read(path, types=TYPES)["run"].weight.dtype is torch.float16


class Strange:
    """What has no Record, each in its own way."""

    @dataclasses.dataclass
    class OwnNew:
        weight: Any

        def __new__(cls, *_: object) -> Strange.OwnNew:
            return object.__new__(cls)

    class Attributed(Pair):
        pass

    @staticmethod
    def all() -> dict[str, Any]:
        extra, attributed, cyclic, unset = (
            Train(1, torch.ones(1)),
            Strange.Attributed(torch.ones(1)),
            Train(1),
            Train(1),
        )
        extra.note = 1  # type: ignore[attr-defined]
        attributed.note = 1  # type: ignore[attr-defined]
        cyclic.weight = [torch.ones(1), cyclic]
        unset.weight = torch.ones(1)
        del unset.step
        return {
            "own new": (Strange.OwnNew(torch.ones(1)), "makes its instances in its own way"),
            "extra attribute": (extra, "has the attribute 'note', no field"),
            "attribute of a named tuple": (attributed, "has the attribute 'note', no field"),
            "in itself": (cyclic, "leads back to a container that it is in"),
            "unset field": (unset, "field 'step' of .* has no value"),
        }


def branching(make: Any, levels: int) -> Any:
    found = make(1, 1)
    for _ in range(levels):
        found = make(found, found)
    return found


@pytest.mark.parametrize("leaf", [None, torch.ones(1)])
def test_instances_that_are_in_each_other_without_end_are_refused_at_once(leaf: Any, path: str) -> None:
    for inside in (branching(Frozen, 60), branching(lambda *both: [*both], 60), branching(Pair, 60)):
        for instance in (Frozen(inside, leaf), Train(1, [leaf, inside]), [Frozen(inside, leaf)]):
            with pytest.raises(holdfast.InvalidStateError, match="same containers in so many places"):
                holdfast.save({"x": instance}, path)
    itself: list[Any] = [leaf]
    itself += [itself, itself]
    with pytest.raises(holdfast.InvalidStateError, match="leads back to a container that it is in"):
        holdfast.save({"x": Frozen(itself)}, path)


@pytest.mark.parametrize("name", sorted(Strange.all()))
def test_instances_that_cannot_be_taken_apart_are_refused_with_all_else(name: str, path: str) -> None:
    instance, said = Strange.all()[name]
    state = {"meta": torch.ones(2, device="meta"), "x": [instance], "odd": object()}
    with pytest.raises(holdfast.InvalidStateError, match=said) as caught:
        holdfast.save(state, path)
    assert len(caught.value.keys) == 3
    assert caught.value.keys[0] == "meta"
    assert caught.value.keys[1].startswith("x.0")
    assert caught.value.keys[2] == "odd"
    assert not Path(path).exists()


def test_what_only_a_pickle_can_keep_of_an_instance_is_pickled_where_allowed(path: str) -> None:
    @dataclasses.dataclass
    class Local:
        weight: Any

    state = {"run": Train(3, torch.ones(2), {"odd": frozenset({Mode.FAST})}), "cyclic": Strange.all()["in itself"][0]}
    holdfast.save(state, path, options=holdfast.SaveOptions(allow_pickle=True))
    with holdfast.open(path) as checkpoint:
        assert list(checkpoint) == ["run.step", "run.weight", "run.buffers.odd", "cyclic"]
    found = holdfast.read(path, types=TYPES, options=holdfast.LoadOptions(allow_pickle=True))
    assert repr(found["run"]) == repr(state["run"])
    assert found["cyclic"].weight[1] is found["cyclic"]


def test_attributes_that_are_computed_are_no_fields(path: str) -> None:
    @dataclasses.dataclass
    class Computed:
        weight: Any

        @cached_property
        def norm(self) -> float:
            return float(self.weight.sum())

    computed = Computed(torch.ones(2))
    assert computed.norm == 2.0
    holdfast.save({"x": computed}, path)
    assert holdfast.read(path, types=[Computed])["x"].norm == 2.0


def test_a_registered_class_is_stored_as_it_says(path: str) -> None:
    @dataclasses.dataclass
    class Table:
        weight: Any

    holdfast.register_type(
        Table, encode=lambda table: table.weight.tolist(), decode=lambda rows: Table(torch.tensor(rows)), name="table"
    )
    holdfast.save({"x": [Table(torch.ones(2))]}, path)
    assert torch.equal(holdfast.read(path)["x"][0].weight, torch.ones(2))


def test_a_mapping_that_is_a_dataclass_is_a_dict(path: str) -> None:
    @dataclasses.dataclass
    class Output(OrderedDict):  # type: ignore[type-arg]
        loss: Any = None

    output = Output()
    output["loss"] = torch.ones(1)
    holdfast.save({"x": output}, path)
    assert holdfast.read(path) == {"x": {"loss": torch.ones(1)}}


# --- torch's format: as torch sees it --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_in_torchs_format_a_dataclass_is_the_value_that_torch_makes_of_it(path: str) -> None:
    model = torch.nn.Linear(2, 2)
    state = {"run": Train(3, torch.ones(2), {"model": model}), "list": [Train(1, torch.ones(1))], "n": {"w": 1}}
    dcp.save(state, checkpoint_id=f"{path}-torch", no_dist=True)
    holdfast.save(state, storage_writer=holdfast.FileSystemWriter(path))
    with holdfast.open(path) as ours, holdfast.open(f"{path}-torch") as torchs:
        assert list(ours) == list(torchs) == ["run", "list", "n.w"]
    with pytest.raises(holdfast.UnsafeError, match="'run'"):
        holdfast.read(path)
    for place in (path, f"{path}-torch"):
        found = holdfast.read(place, options=holdfast.LoadOptions(allow_pickle=True))
        assert repr(found) == repr(state)
        target = {"run": Train(0, torch.zeros(2), {"model": torch.nn.Linear(2, 2)}), "list": [Train(0, torch.zeros(1))]}
        run = target["run"]
        holdfast.load(target, place, options=holdfast.LoadOptions(allow_pickle=True))
        assert target["run"] is run
        assert repr(target) == repr({"run": state["run"], "list": state["list"]})
        assert torch.equal(run.buffers["model"].weight, model.weight)  # type: ignore[union-attr]
    by_torch: dict[str, Any] = {"run": None, "list": None}
    dcp.load(by_torch, checkpoint_id=path, no_dist=True)
    assert repr(by_torch["run"]) == repr(state["run"])


@pytest.mark.parametrize("to", ["torch", "pt"])
def test_conversions_refuse_a_class_that_torch_could_not_load_without_code(to: str, path: str) -> None:
    holdfast.save({"w": torch.ones(1), "run": Train(3, torch.ones(2))}, path)
    with pytest.raises(holdfast.InvalidStateError, match=r"'run' is a Record.* only by running code"):
        holdfast.convert(path, f"{path}-{to}", to=to)  # type: ignore[arg-type]
    holdfast.convert(path, f"{path}-native", to="native")
    assert stored(f"{path}-native") == stored(path)
