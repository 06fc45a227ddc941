"""Containers, generators and instances of classes in a state: back as what they were, or said to be something else."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import io
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

import holdfast


class Mode(enum.Enum):
    FAST = "f"
    SLOW = "s"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    rate: float
    mode: Mode
    points: tuple[Point, ...] = ()
    inner: Config | None = None


@dataclasses.dataclass
class Guarded:
    size: int

    def __post_init__(self) -> None:
        if self.size > 1:
            raise AssertionError("a class is filled without its __init__")


class Ratio:
    def __init__(self, top: int, bottom: int = 1) -> None:
        self.top = top
        self.bottom = bottom

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ratio) and (self.top, self.bottom) == (other.top, other.bottom)

    __hash__ = None  # type: ignore[assignment]


CONFIG = Config(0.1, Mode.SLOW, (Point(1), Point(2, [Mode.FAST])), Config(0.2, Mode.FAST))
TYPES = [Mode, Rights, Point, Config]

CONTAINERS: dict[str, Any] = {
    "ordered": OrderedDict(w=torch.ones(2), n=3),
    "ordered in ordered": OrderedDict(z=OrderedDict(w=torch.ones(2)), a=OrderedDict()),
    "default": defaultdict(dict, {1: {"m": torch.ones(1)}, "x": {}}),
    "default of nothing": defaultdict(None, {"a": torch.ones(1)}),
    "counter": Counter({"t": torch.ones(1), 3: 2}),
    "counter of numbers": Counter("abca"),
    "deque": deque([torch.ones(2), 5, {"a": torch.zeros(1)}], maxlen=4),
    "deque of values": deque([1, {"a": (2,)}], maxlen=2),
    "namespace": Namespace(w=torch.ones(3), name="n", inner=OrderedDict(z=torch.zeros(1)), empty=deque()),
    "namespace of values": Namespace(lr=0.1, out=Path("runs"), betas=[0.9, 0.99]),
    "in a tuple": (OrderedDict(a=1), defaultdict(int, a=2), Counter("b"), deque([3], maxlen=3)),
    "in a list of tensors": [torch.ones(1), deque([torch.ones(1)]), OrderedDict(a=torch.ones(1))],
}


def same(found: Any, wanted: Any) -> bool:
    """Whether both are the same, types and tensors included."""
    if type(found) is not type(wanted) or repr(found) != repr(wanted):
        return False
    return not isinstance(found, dict) or list(found) == list(wanted)


@pytest.mark.parametrize("name", sorted(CONTAINERS))
def test_containers_keep_their_class(name: str, path: str) -> None:
    holdfast.save({"top": CONTAINERS[name], "deep": [{"x": CONTAINERS[name], "t": torch.ones(1)}]}, path)
    found = holdfast.read(path)
    assert same(found["top"], CONTAINERS[name])
    assert same(found["deep"][0]["x"], CONTAINERS[name])
    empty: dict[str, Any] = {"deep": []}
    holdfast.load(empty, path)
    assert same(empty["deep"][0]["x"], CONTAINERS[name])
    assert same(holdfast.read(path, ["deep"])["deep"][0]["x"], CONTAINERS[name])


@pytest.mark.parametrize("name", sorted(CONTAINERS))
def test_containers_of_a_target_are_filled(name: str, path: str) -> None:
    holdfast.save({"x": CONTAINERS[name]}, path)
    target = {"x": copy.deepcopy(CONTAINERS[name])}
    held = target["x"]
    for tensor in tensors_in(held):
        tensor.zero_()
    holdfast.load(target, path)
    assert same(target["x"], CONTAINERS[name])
    if list(tensors_in(held)) and not isinstance(held, tuple):
        assert target["x"] is held


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    value = vars(value) if isinstance(value, Namespace) else value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, deque)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def test_objects_in_a_namespace_and_a_deque_get_their_state(path: str) -> None:
    layers = [torch.nn.Linear(2, 2) for _ in range(4)]
    holdfast.save({"run": Namespace(model=layers[0], step=3), "last": deque([layers[1]])}, path)
    run, last = Namespace(model=layers[2], step=0), deque([layers[3]])
    holdfast.load({"run": run, "last": last}, path)
    assert run.model is layers[2]
    assert run.step == 3
    assert last[0] is layers[3]
    assert torch.equal(layers[2].weight, layers[0].weight)
    assert torch.equal(layers[3].weight, layers[1].weight)
    assert hasattr(holdfast.read(path)["run"].model, "_metadata")


def test_a_plain_state_says_nothing_of_containers(path: str) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    holdfast.save({"m": module.state_dict(), "o": optimizer, "r": torch.nn.ReLU().state_dict(), "x": [(1,), {}]}, path)
    assert b"holdfast.containers" not in (Path(path) / "manifest.json").read_bytes()
    assert msgspec.json.decode((Path(path) / "manifest.json").read_bytes())["requires"] == []


def test_the_class_of_a_container_is_not_the_users_metadata(path: str) -> None:
    holdfast.save({"x": OrderedDict(a=torch.ones(1))}, path, user_metadata={"note": 1})
    with holdfast.open(path) as checkpoint:
        assert checkpoint.user_metadata == {"note": 1}
    with pytest.raises(holdfast.InvalidStateError, match="reserved"):
        holdfast.save({}, path, user_metadata={"holdfast.containers": {}})


def test_a_namespace_with_tensors_and_a_name_of_python_is_refused(path: str) -> None:
    state = {"run": Namespace(w=torch.ones(1))}
    vars(state["run"])["__class__"] = 1
    with pytest.raises(holdfast.InvalidStateError, match=r"'run' is a Namespace with the name '__class__'"):
        holdfast.save(state, path)


def test_a_generator_goes_on_where_it_was(path: str) -> None:
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    holdfast.save({"g": generator, "pair": (generator, 1)}, path)
    wanted = torch.rand(4, generator=generator)
    assert torch.equal(torch.rand(4, generator=holdfast.read(path)["g"]), wanted)
    mine, other = torch.Generator(), torch.Generator()
    target = {"g": mine, "pair": (other, 0)}
    holdfast.load(target, path)
    assert target["g"] is mine
    assert target["pair"][0] is other  # type: ignore[index]
    assert torch.equal(torch.rand(4, generator=mine), wanted)
    assert torch.equal(torch.rand(4, generator=other), wanted)


def test_a_generator_of_a_device_that_is_not_there_is_a_record(path: str) -> None:
    state = torch.Generator().get_state().numpy().tobytes()
    items = (("device", torch.device("cuda:0")), ("state", state))
    record = holdfast.Record("torch.Generator", "torch.Generator", items)
    holdfast.save({"g": record}, path)
    if not torch.cuda.is_available():
        assert holdfast.read(path)["g"] == record
    with pytest.raises(holdfast.MismatchError, match=r"'g' has type torch.Generator.*torch.Generator of cpu"):
        holdfast.load({"g": torch.Generator()}, path)


def test_a_generator_with_a_state_that_is_none_is_damage(path: str) -> None:
    items = (("device", torch.device("cpu")), ("state", b"abc"))
    holdfast.save({"g": holdfast.Record("torch.Generator", "torch.Generator", items)}, path)
    with pytest.raises(holdfast.CorruptError, match=r"'g' is damaged: no state of a torch.Generator"):
        holdfast.read(path)


def test_a_buffer_comes_back_as_a_buffer(path: str) -> None:
    large = io.BytesIO(bytes(range(256)) * 600)
    large.seek(3)
    holdfast.save({"small": io.BytesIO(b"abc"), "large": large}, path)
    found = holdfast.read(path)
    assert (type(found["small"]), found["small"].read()) == (io.BytesIO, b"abc")
    assert (found["large"].tell(), found["large"].getvalue()) == (3, large.getvalue())


def test_instances_are_records_without_their_class(path: str) -> None:
    holdfast.save({"config": CONFIG, "mode": Mode.FAST, "rights": Rights.READ | Rights.WRITE, "point": Point(1)}, path)
    found = holdfast.read(path)
    assert type(found["config"]) is holdfast.Record
    assert (found["config"].kind, found["config"].name) == ("dataclass", f"{__name__}.Config")
    assert list(found["config"].fields) == ["rate", "mode", "points", "inner"]
    assert repr(found["mode"]) == f"Record(enum {__name__}.Mode: name='FAST', value='f')"
    assert found["point"].fields == {"x": 1, "y": None}
    holdfast.save(found, f"{path}-again")
    assert holdfast.read(f"{path}-again", types=TYPES)["config"] == CONFIG


def test_instances_are_rebuilt_with_types_that_the_caller_gives(path: str) -> None:
    state = {"config": CONFIG, "mode": Mode.FAST, "rights": Rights.READ | Rights.WRITE, "point": Point(1, [2])}
    holdfast.save(state, path)
    assert holdfast.read(path, types=TYPES) == state
    assert holdfast.load(path, options=holdfast.LoadOptions(types=TYPES)) == state
    target: dict[str, Any] = {}
    holdfast.load(target, path, options=holdfast.LoadOptions(types=TYPES))
    assert target == state
    options = holdfast.LoadOptions(types=TYPES)
    with pytest.raises(ValueError, match="types are options of the planner"):
        holdfast.load(target, path, planner=holdfast.DefaultLoadPlanner(), options=options)


def test_instances_are_rebuilt_as_those_of_the_target(path: str) -> None:
    holdfast.save({"config": CONFIG, "modes": [Mode.SLOW], "guarded": Guarded(1), "point": Point(1)}, path)
    target = {"config": dataclasses.replace(CONFIG, rate=5.0), "modes": [Mode.FAST], "guarded": 0, "point": Point(0)}
    holdfast.load(target, path)
    assert target["config"] == CONFIG
    assert target["modes"] == [Mode.SLOW]
    assert target["point"] == Point(1)
    assert type(target["guarded"]) is holdfast.Record


def test_a_dataclass_is_filled_without_its_init(path: str) -> None:
    guarded = Guarded(1)
    guarded.size = 5
    holdfast.save({"x": guarded}, path)
    assert holdfast.read(path, types=[Guarded])["x"].size == 5


def made_class(name: str, fields: list[str], module: str) -> Any:
    cls = dataclasses.make_dataclass(name, fields)
    cls.__module__ = module
    return cls


def test_fields_that_do_not_fit_are_named(path: str) -> None:
    holdfast.save({"config": CONFIG, "mode": Mode.FAST, "point": Point(1)}, path)
    other = made_class("Config", ["rate", "new"], __name__)
    shorter = collections.namedtuple("Point", ["x"], module=__name__)
    renamed = enum.Enum("Mode", {"OTHER": "f"}, module=__name__)
    revalued = enum.Enum("Mode", {"FAST": "z"}, module=__name__)
    with pytest.raises(
        holdfast.MismatchError, match=r"'config' has fields rate, mode, points, inner in .* rate, new in"
    ):
        holdfast.read(path, types=[other])
    with pytest.raises(holdfast.MismatchError, match="has fields x, y in the checkpoint but x in the target"):
        holdfast.read(path, types=[shorter])
    for changed in (renamed, revalued):
        with pytest.raises(holdfast.MismatchError, match=r"has member \w+ of .*Mode = '\w'"):
            holdfast.read(path, types=[changed])
    target = {"config": other(1, 2), "point": Point(7)}
    report = holdfast.load(target, path, strict=False)
    assert [(each.key, each.kind) for each in report.differences] == [("config", "fields")]
    assert target["config"] == other(1, 2)
    assert target["point"] == Point(1)


def test_another_class_in_the_target_is_a_mismatch(path: str) -> None:
    holdfast.save({"x": CONFIG}, path)
    with pytest.raises(
        holdfast.MismatchError, match=r"'x' has type .*Config in the checkpoint but .*Guarded in the target"
    ):
        holdfast.load({"x": Guarded(1)}, path)


def test_the_script_itself_is_known_by_both_of_its_names(path: str) -> None:
    there = made_class("Settings", ["a"], "__main__")
    holdfast.save({"x": there(1)}, path)
    here = made_class("Settings", ["a"], "train")
    assert holdfast.read(path, types=[here])["x"] == here(1)


def test_nothing_is_imported_for_a_name_in_a_file(path: str) -> None:
    holdfast.save({"x": holdfast.Record("dataclass", "antigravity.Fly", (("a", 1),))}, path)
    assert holdfast.read(path)["x"].name == "antigravity.Fly"
    assert "antigravity" not in sys.modules


def test_pickles_bring_back_the_instance_where_both_sides_allow_them(path: str) -> None:
    holdfast.save({"x": CONFIG}, path, options=holdfast.SaveOptions(allow_pickle=True))
    assert holdfast.load(path, options=holdfast.LoadOptions(allow_pickle=True))["x"] == CONFIG


def test_a_registered_type_is_encoded_and_decoded(path: str) -> None:
    holdfast.register_type(
        Ratio,
        encode=lambda value: (value.top, value.bottom),
        decode=lambda stored: Ratio(*stored),
        name="ratio",
    )
    holdfast.save({"x": Ratio(1, 3), "in": ({"y": Ratio(2, 5)},)}, path)
    assert holdfast.read(path) == {"x": Ratio(1, 3), "in": ({"y": Ratio(2, 5)},)}
    holdfast.register_type(Ratio, encode=str, decode=lambda stored: 1 / 0, name="ratio")
    with pytest.raises(holdfast.InvalidStateError, match=r"'x': decode of the registered type 'ratio' failed: Zero"):
        holdfast.read(path)
    holdfast.register_type(Ratio, encode=lambda value: 1 / 0, decode=Ratio, name="ratio")
    with pytest.raises(holdfast.InvalidStateError, match="encode of the registered type 'ratio' failed: Zero"):
        holdfast.save({"x": Ratio(1, 3)}, path)
    holdfast.register_type(Ratio, encode=lambda value: object(), decode=Ratio, name="ratio")
    with pytest.raises(holdfast.InvalidStateError, match=r"'x' at \['value'\] .*object is not a type"):
        holdfast.save({"x": Ratio(1, 3)}, path)
    with pytest.raises(ValueError, match="class of your own"):
        holdfast.register_type(dict, encode=list, decode=dict)
    with pytest.raises(ValueError, match=r"'ratio' is registered for .*Ratio; choose another"):
        holdfast.register_type(Path, encode=str, decode=Path, name="ratio")


def test_a_type_that_is_not_registered_any_more_is_a_record(path: str) -> None:
    holdfast.save({"x": holdfast.Record("registered", "gone", (("value", (1, 3)),))}, path)
    assert repr(holdfast.read(path)["x"]) == "Record(registered gone: value=(1, 3))"


@pytest.mark.parametrize("to", ["torch", "pt"])
def test_conversions_keep_what_torch_loads_without_code_and_refuse_the_rest(to: str, path: str) -> None:
    holdfast.save({"c": Counter(a=2), "o": OrderedDict(w=torch.ones(1))}, path)
    holdfast.convert(path, f"{path}-fine", to=to)
    for name, value in {
        "p": Path("x"),
        "d": deque([torch.ones(1)]),
        "n": Namespace(w=torch.ones(1)),
        "e": CONFIG,
    }.items():
        holdfast.save({"key": value}, path)
        with pytest.raises(holdfast.InvalidStateError, match=r"'key' is a .* only by running code"):
            holdfast.convert(path, f"{path}-{name}", to=to)
    if to == "pt":
        loaded = torch.load(f"{path}-fine", weights_only=True)
        assert type(loaded["c"]) is Counter
        assert type(loaded["o"]) is OrderedDict


def test_a_conversion_to_the_native_format_keeps_all(path: str) -> None:
    state = {name.replace(" ", "_"): value for name, value in CONTAINERS.items()}
    holdfast.save({**state, "config": CONFIG}, path)
    holdfast.convert(path, f"{path}-copy", to="native")
    found = holdfast.read(f"{path}-copy", types=TYPES)
    assert same(found, {**state, "config": CONFIG})
