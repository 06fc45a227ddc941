"""States that cannot be saved: an error that names the key, before a byte is written."""

from __future__ import annotations

import enum
import math
import os
import pathlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import holdfast

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")


class Colour(enum.Enum):
    RED = 1


@dataclass
class Holder:
    tensor: torch.Tensor


def noted(holder: Holder) -> Holder:
    holder.note = 1  # type: ignore[attr-defined]
    return holder


class Text(str):
    __slots__ = ()


def meta() -> torch.Tensor:
    return torch.zeros(2, device="meta")


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


def compressed() -> torch.Tensor:
    return torch.eye(3).to_sparse_csr()


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(3)


def functional() -> torch.Tensor:
    made: torch.Tensor = torch._to_functional_tensor(torch.zeros(3))
    return made


def uninitialised() -> torch.Tensor:
    return torch.nn.LazyLinear(3).weight


BAD_LEAVES: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (meta, "meta tensor"),
    "sparse": (sparse, "sparse_coo"),
    "compressed": (compressed, "sparse_csr"),
    "nested": (nested, "nested"),
    "jagged": (jagged, "nested"),
    "fake": (fake, "fake tensor"),
    "functional": (functional, "without memory"),
    "uninitialised": (uninitialised, "uninitialised"),
    "class of an enum": (lambda: Colour, "EnumType|EnumMeta"),
    "defaultdict of a function, in a tuple": (lambda: (defaultdict(lambda: 0),), "default_factory"),
    "text of another class": (lambda: Text("x"), "Text"),
    "path that is no text": (lambda: pathlib.PurePosixPath("\udc80"), "no text"),
    "object": (object, "object"),
    "function": (lambda: len, "builtin_function_or_method"),
    "slice of text": (lambda: slice("a"), "slice"),
    "surrogates": (lambda: "\ud800", "surrogates"),
    "object in a list": (lambda: [1, [object()]], "object"),
    "dataclass with a tensor and an attribute": (lambda: noted(Holder(torch.ones(1))), "attribute 'note'"),
    "bytearray": (lambda: bytearray(b"x"), "bytearray"),
}


@pytest.fixture
def never_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a data file was created for a state that cannot be saved")

    monkeypatch.setattr(os, "posix_fallocate", refuse)  # each data file is given its room when it is made


@pytest.mark.usefixtures("never_opened")
def test_a_state_that_can_be_saved_would_be_noticed(path: str) -> None:
    with pytest.raises(holdfast.CheckpointError, match="a data file was created"):
        holdfast.save({"fine": torch.ones(3)}, path)


@pytest.mark.usefixtures("never_opened")
@pytest.mark.parametrize("name", sorted(BAD_LEAVES))
def test_leaves_that_have_no_stored_form_are_named(
    name: str, path: str, assert_nothing_written: Callable[[], None]
) -> None:
    build, message = BAD_LEAVES[name]
    with pytest.raises(holdfast.InvalidStateError, match=message) as caught:
        holdfast.save({"fine": torch.ones(3), "outer": {"bad": build()}}, path)
    assert caught.value.key == "outer.bad"
    assert "'outer.bad'" in caught.value.message
    assert "\n" not in caught.value.message
    assert_nothing_written()


def test_all_keys_that_are_refused_are_in_one_error(path: str, assert_nothing_written: Callable[[], None]) -> None:
    state = {"fine": 1, "a": object(), "b": {"c": [len]}, **{f"k{number}": object() for number in range(7)}}
    with pytest.raises(holdfast.InvalidStateError) as caught:
        holdfast.save(state, path)
    assert caught.value.key == "a"
    assert caught.value.keys == ("a", "b.c", *(f"k{number}" for number in range(7)))
    assert "9 keys" in caught.value.message
    assert "'b.c' at [0]" in caught.value.message
    assert caught.value.message.endswith("and 4 more")
    with pytest.raises(holdfast.InvalidStateError) as tensors:
        holdfast.save({"x": meta(), "y": torch.ones(1), "z": sparse()}, path)
    assert tensors.value.keys == ("x", "z")
    assert_nothing_written()


@pytest.mark.usefixtures("never_opened")
@pytest.mark.parametrize("save", [holdfast.save, lambda *given: holdfast.async_save(*given).result()])
def test_tensors_and_values_that_are_refused_are_in_one_error(
    save: Any, path: str, assert_nothing_written: Callable[[], None]
) -> None:
    state = {
        "a": object(),
        "b": meta(),
        "fine": [1, torch.ones(2)],
        "c": {"d": len, "e": sparse()},
        "large": bytes(1 << 20),
    }
    with pytest.raises(holdfast.InvalidStateError) as caught:
        save(state, path)
    assert caught.value.keys == ("a", "b", "c.d", "c.e")
    assert caught.value.message.startswith(
        "4 keys of the state cannot be saved: (1) the value of 'a' cannot be saved: "
    )
    assert_nothing_written()


def test_values_that_are_no_error_are_not_called_one(path: str) -> None:
    class Texts(holdfast.DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return super().transform_object(write_item, repr(object) if type(object) is complex else object)

    state = {"a": object(), "b": meta()}
    for options in ({"planner": Texts()}, {"options": holdfast.SaveOptions(allow_pickle=True)}):
        with pytest.raises(holdfast.InvalidStateError) as caught:
            holdfast.save(state, path, **options)
        assert caught.value.keys == ("b",)
    with pytest.raises(holdfast.InvalidStateError) as in_torchs_format:
        holdfast.save(state, storage_writer=holdfast.FileSystemWriter(path))
    assert in_torchs_format.value.keys == ("b",)


def test_an_instance_as_a_key_of_a_dict_is_refused(path: str) -> None:
    with pytest.raises(holdfast.InvalidStateError, match=r"dict key of type .*Colour.*its .name or .value"):
        holdfast.save({"by": {Colour.RED: 1}}, path)


def per_channel() -> torch.Tensor:
    scales, zero_points = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2])
    return torch.quantize_per_channel(torch.ones(3, 4), scales, zero_points, 0, torch.qint8)


ODD_QUANTIZERS: dict[str, Callable[[], torch.Tensor]] = {
    "none": lambda: torch.empty(4, dtype=torch.qint8),
    "infinite scale": lambda: torch._empty_affine_quantized([3], scale=math.inf, zero_point=0, dtype=torch.qint8),
    "scale nan": lambda: torch._empty_affine_quantized([3], scale=math.nan, zero_point=0, dtype=torch.qint8),
    "a column": lambda: per_channel()[:, 1],
    "another shape": lambda: per_channel().view(4, 3),
    "no dimensions": lambda: per_channel().reshape(12),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.usefixtures("never_opened")
@pytest.mark.parametrize("name", sorted(ODD_QUANTIZERS))
def test_a_quantizer_that_does_not_fit_is_refused_before_a_file_exists(
    name: str, path: str, assert_nothing_written: Callable[[], None]
) -> None:
    with pytest.raises(holdfast.InvalidStateError, match="'q' is quantised but has no quantizer that fits") as caught:
        holdfast.save({"fine": torch.ones(3), "q": ODD_QUANTIZERS[name]()}, path)
    assert caught.value.key == "q"
    assert_nothing_written()


@pytest.mark.usefixtures("never_opened")
@pytest.mark.parametrize("leaf", [torch.ones(1), 5, {}, [torch.ones(1)]], ids=["tensor", "value", "empty", "list"])
def test_257_steps_are_refused_before_a_file_exists(
    leaf: Any, path: str, assert_nothing_written: Callable[[], None]
) -> None:
    steps = 256 if isinstance(leaf, list) else 257
    state: Any = leaf
    for _ in range(steps):
        state = {"n": state}
    with pytest.raises(holdfast.InvalidStateError, match="nested deeper than 256"):
        holdfast.save(state, path)
    assert_nothing_written()


def test_256_steps_are_saved(path: str) -> None:
    state: Any = torch.ones(1)
    for _ in range(256):
        state = {"n": state}
    holdfast.save(state, path)
    with holdfast.open(path) as checkpoint:
        assert checkpoint[".".join("n" * 256)][...].tolist() == [1]


COLLISIONS: dict[str, tuple[dict[Any, Any], str]] = {
    "int and text": ({0: torch.ones(1), "0": torch.zeros(1)}, "0"),
    "values": ({"v": {1: 2, "1": 3}}, "v.1"),
    "dot and nesting": ({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, "a.b"),
    "dot and list": ({"a.0": 1, "a": [torch.ones(1)]}, "a.0"),
    "bool and text": ({"x": {True: torch.ones(1), "True": 1}}, "x.True"),
    "tensor and value": ({"a": {"b.c": 1, "b": {"c": torch.ones(1)}}}, "a.b.c"),
}


@pytest.mark.usefixtures("never_opened")
@pytest.mark.parametrize("name", sorted(COLLISIONS))
def test_keys_that_collide_are_named(name: str, path: str, assert_nothing_written: Callable[[], None]) -> None:
    state, key = COLLISIONS[name]
    with pytest.raises(holdfast.InvalidStateError, match="rename one") as caught:
        holdfast.save(state, path)
    assert caught.value.key == key
    assert repr(key) in caught.value.message
    assert_nothing_written()


BAD_KEYS: dict[str, Any] = {
    "enum": Colour.RED,
    "object": object(),
    "text of another class": Text("x"),
    "tuple of an enum": (1, Colour.RED),
    "surrogates": "\ud800",
    "too long": "k" * 70_000,
}


@pytest.mark.usefixtures("never_opened")
@pytest.mark.parametrize("name", sorted(BAD_KEYS))
def test_dict_keys_that_have_no_stored_form_are_refused(
    name: str, path: str, assert_nothing_written: Callable[[], None]
) -> None:
    key = BAD_KEYS[name]
    with pytest.raises(holdfast.InvalidStateError) as caught:
        holdfast.save({"fine": torch.ones(3), "bad": {key: torch.ones(1)}}, path)
    assert caught.value.key == f"bad.{key}"
    assert len(caught.value.message) < 600
    assert_nothing_written()


def self_containing() -> dict[str, Any]:
    plain: list[Any] = []
    plain.append(plain)
    twice: list[Any] = []
    twice.extend([twice, twice])
    with_tensor: list[Any] = [torch.ones(1)]
    with_tensor.append((with_tensor, with_tensor))
    mapping: dict[str, Any] = {}
    mapping.update(a=mapping, b=[mapping])
    return {"plain": plain, "twice": twice, "with tensor": with_tensor, "mapping": mapping}


@pytest.mark.usefixtures("never_opened")
@pytest.mark.parametrize("name", sorted(self_containing()))
def test_containers_that_contain_themselves_are_refused_at_once(
    name: str, path: str, assert_nothing_written: Callable[[], None]
) -> None:
    state = {"x": self_containing()[name]}
    with pytest.raises(holdfast.InvalidStateError, match="contain itself") as caught:
        holdfast.save(state, path)
    assert caught.value.key is not None
    assert caught.value.key.startswith("x.")
    assert len(caught.value.message) < 600
    assert_nothing_written()


def test_values_that_nest_too_deep_are_refused(path: str) -> None:
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    with pytest.raises(holdfast.InvalidStateError, match="nests deeper") as caught:
        holdfast.save({"x": deep}, path)
    assert caught.value.key == "x"


def test_deep_but_honest_nesting_is_fine(path: str) -> None:
    state: dict[str, Any] = {"w": torch.ones(1)}
    for _ in range(200):
        state = {"n": state}
    holdfast.save(state, path)
    loaded: Any = holdfast.load(path)
    for _ in range(200):
        loaded = loaded["n"]
    assert torch.equal(loaded["w"], torch.ones(1))


def test_a_refused_save_leaves_the_checkpoint_before_it_alone(path: str) -> None:
    holdfast.save({"w": torch.ones(3)}, path)
    before = sorted(file.name for file in pathlib.Path(path).iterdir())
    for state in ({"w": meta()}, {"w": torch.ones(3), "bad": object()}, {"w": torch.ones(3), "x": {Colour.RED: 1}}):
        with pytest.raises(holdfast.InvalidStateError):
            holdfast.save(state, path)
    assert sorted(file.name for file in pathlib.Path(path).iterdir()) == before
    assert torch.equal(holdfast.load(path)["w"], torch.ones(3))


def test_arguments_that_contradict_each_other(path: str) -> None:
    state = {"w": torch.ones(1)}
    with pytest.raises(ValueError, match="checkpoint_id or a storage_writer"):
        holdfast.save(state)
    pickles = holdfast.SaveOptions(allow_pickle=True)
    for option in ({"overwrite": False}, {"options": pickles}, {"user_metadata": {}}):
        with pytest.raises(ValueError, match="to the storage_writer"):
            holdfast.save(state, storage_writer=holdfast.NativeWriter(path), **option)
    holdfast.save(state, path)
    with pytest.raises(ValueError, match="checkpoint_id or a storage_reader"):
        holdfast.load(state)
    with pytest.raises(ValueError, match="verify is an option of the storage"):
        holdfast.load(state, storage_reader=holdfast.NativeReader(path), options=holdfast.LoadOptions(verify=False))
    with pytest.raises(ValueError, match="strict, mapping and types are options"):
        holdfast.load(state, path, planner=holdfast.DefaultLoadPlanner(), strict=False)
    with pytest.raises(ValueError, match=r"load\(path\) takes no checkpoint_id"):
        holdfast.load(path, path)  # type: ignore[call-overload]


def test_overwrite_false_refuses_before_anything_is_written(path: str) -> None:
    holdfast.save({"w": torch.ones(1)}, path, overwrite=False)
    before = sorted(file.name for file in pathlib.Path(path).iterdir())
    with pytest.raises(holdfast.AlreadyPublishedError, match="overwrite=True"):
        holdfast.save({"w": torch.zeros(1)}, path, overwrite=False)
    assert sorted(file.name for file in pathlib.Path(path).iterdir()) == before
    holdfast.save({"w": torch.zeros(1)}, path)
    assert holdfast.load(path)["w"].tolist() == [0.0]
