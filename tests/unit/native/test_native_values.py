"""The value codec: what is encoded decodes to the same, and nothing hostile decodes at all."""

from __future__ import annotations

import datetime
import decimal
import enum
import io
import math
import pathlib
import sys
import uuid
import zoneinfo
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._native.values import decode_value, decode_value_bytes, encode_value, encode_value_bytes
from holdfast._values.dtypes import DTYPES, MAX_VALUE_DEPTH
from holdfast._values.records import Record, rebuilt
from holdfast.errors import CheckpointError, CorruptError, InvalidStateError, UnsupportedVersionError


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


class Ordered(OrderedDict[str, int]):
    pass


class Zone(datetime.tzinfo):
    def utcoffset(self, moment: datetime.datetime | None) -> datetime.timedelta:
        return datetime.timedelta(0)


@dataclass
class Made:
    size: int

    def __new__(cls, size: int) -> Made:
        return super().__new__(cls)


@dataclass
class Extra:
    size: int = 1

    def __post_init__(self) -> None:
        self.more = 2


class Point(NamedTuple):
    x: int
    y: object


@dataclass(frozen=True, slots=True)
class Settings:
    rate: float
    colour: Colour
    inner: object = None


def through_json(value: object) -> object:
    """The value after a round trip, whose JSON is checked to be stable."""
    json = encode_value(value, key="k")
    text = msgspec.json.encode(json)
    decoded = decode_value(msgspec.json.decode(text), key="k")
    assert msgspec.json.encode(encode_value(decoded, key="k")) == text
    return decoded


def same(left: object, right: object) -> bool:
    """Whether both are the same value of the same type, nan and -0.0 included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (decimal.Decimal, datetime.datetime, datetime.time, deque, defaultdict)):
        return repr(left) == repr(right)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, (float, np.floating)):
        return repr(left) == repr(right)
    if isinstance(left, (complex, np.complexfloating)):
        return repr(left) == repr(right)
    return bool(left == right)


VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**53 - 1,
    -(2**53) + 1,
    2**53,
    -(2**53),
    2**63,
    2**64,
    10**5000,
    -(10**5000),
    0.0,
    -0.0,
    1.0,
    0.1,
    1e16,
    1e22,
    -1e-7,
    5e-324,
    sys.float_info.max,
    math.inf,
    -math.inf,
    math.nan,
    "",
    "text",
    'ü\U0001f40e\x00\n"\\',
    b"",
    b"\x00\xff" * 5,
    [],
    [[]],
    [1, [2.0, ["x"]]],
    (),
    (1,),
    ((), [()]),
    {},
    {"b": 1, "a": 2},
    {1: "int", "1": "str", (1, 2): "tuple", None: 0, b"x": 1, 1.5: 2, frozenset({1}): 3},
    {math.nan: 1},
    {True: 1},
    {"dict": {"tuple": {"int": "0x1"}}},
    set(),
    {3, 1, 2, 11},
    {"a", 1, (2, "b"), None},
    frozenset(),
    frozenset({frozenset({1}), frozenset()}),
    1j,
    complex(math.nan, -math.inf),
    complex(-0.0, -0.0),
    torch.Size([]),
    torch.Size([2, 0, 2**62]),
    torch.Size([-1]),
    torch.device("cpu"),
    torch.device("cuda:0"),
    torch.device("cuda"),
    torch.device("meta"),
    {torch.float32: torch.device("cpu")},
    np.bool_(True),
    np.str_("nul at the end\x00"),
    np.bytes_(b"nul at the end\x00"),
    np.float16(0.1),
    np.float32(0.1),
    np.float64(0.1),
    np.float64(-0.0),
    np.float32(math.nan),
    np.float16(math.inf),
    np.complex64(0.1 + 1j),
    np.complex128(complex(math.nan, -0.0)),
    {np.int64(3): np.float32(1)},
    pathlib.Path("/a/b c"),
    pathlib.PurePosixPath("."),
    pathlib.PureWindowsPath("C:\\a\\b"),
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
    datetime.datetime(1, 1, 1, fold=1),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(seconds=-3601), "odd")),
    datetime.datetime(2026, 10, 25, 2, 30, tzinfo=zoneinfo.ZoneInfo("UTC"), fold=1),
    datetime.date(9999, 12, 31),
    datetime.time(1, 2, 3, 4, tzinfo=datetime.timezone.utc),
    datetime.timedelta(days=-1, microseconds=1),
    datetime.timedelta.max,
    uuid.UUID(int=2**127 + 1),
    *map(decimal.Decimal, ["1.10", "-0", "NaN123", "-Infinity", "1E+999999", "0E-10"]),
    range(0),
    range(5, -(10**30), -7),
    slice(None),
    slice(1, None, -(2**60)),
    deque([1, (2, [3])], maxlen=4),
    deque(),
    deque(maxlen=0),
    OrderedDict([("b", 1), (2, OrderedDict())]),
    *(defaultdict(factory, {1: 2}) for factory in (None, list, dict, set, int, float)),
    Counter("abca"),
    Namespace(lr=0.1, **{"a-b": 2}, path=pathlib.Path("x"), inner=Namespace()),
    {datetime.date(2026, 1, 1): 1, uuid.UUID(int=5): 2, pathlib.PurePosixPath("a"): 3, decimal.Decimal(4): 5},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_survive_with_their_types(value: object) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize("name", sorted(name for name in DTYPES if hasattr(torch, name)))
def test_every_dtype_survives(name: str) -> None:
    dtype = getattr(torch, name)
    assert through_json(dtype) is dtype


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_numpy_integers_survive_at_their_limits(name: str) -> None:
    kind = np.dtype(name).type
    for number in (np.iinfo(kind).min, 0, np.iinfo(kind).max):
        assert same(through_json(kind(number)), kind(number))


@pytest.mark.parametrize(
    ("value", "json"),
    [
        (2**53, b'{"int":"0x20000000000000"}'),
        (-(2**53), b'{"int":"-0x20000000000000"}'),
        (2**53 - 1, b"9007199254740991"),
        (1.0, b"1.0"),
        (math.nan, b'{"float":"nan"}'),
        (-math.inf, b'{"float":"-inf"}'),
        ([1, None], b"[1,null]"),
        ((1, True), b'{"tuple":[1,true]}'),
        ({"b": 1, 2: []}, b'{"dict":[["b",1],[2,[]]]}'),
        ({2, 10, 1}, b'{"set":[1,10,2]}'),
        (frozenset({"b", "a"}), b'{"frozenset":["a","b"]}'),
        (b"\xff\xfe", b'{"bytes":"//4="}'),
        (1 - math.inf * 1j, b'{"complex":[{"float":"nan"},{"float":"-inf"}]}'),
        (torch.bfloat16, b'{"torch.dtype":"bfloat16"}'),
        (torch.device("cuda", 1), b'{"torch.device":"cuda:1"}'),
        (torch.Size([2, 3]), b'{"torch.Size":[2,3]}'),
        (np.float32(0.5), b'{"numpy":["float32",0.5]}'),
        (np.uint64(2**63), b'{"numpy":["uint64",{"int":"0x8000000000000000"}]}'),
        (np.bytes_(b"a"), b'{"numpy":["bytes",{"bytes":"YQ=="}]}'),
    ],
    ids=lambda value: "frozenset" if isinstance(value, frozenset) else str(value),  # one order, one id
)
def test_the_written_form(value: object, json: bytes) -> None:
    assert encode_value_bytes(value, key="k") == json


def test_dicts_keep_their_order() -> None:
    decoded = through_json({"z": 1, "a": 2, 0: 3})
    assert isinstance(decoded, dict)
    assert list(decoded) == ["z", "a", 0]


def test_nans_in_a_set_and_as_keys_stay_apart() -> None:
    decoded = through_json({float("nan"), float("nan")})
    assert isinstance(decoded, set)
    assert len(decoded) == 2
    keys = through_json({float("nan"): 1, float("nan"): 2})
    assert isinstance(keys, dict)
    assert list(keys.values()) == [1, 2]


@pytest.mark.parametrize(
    "value",
    [
        object(),
        int,
        Text("x"),
        Ordered(a=1),
        defaultdict(lambda: 0),
        deque([object()]),
        slice("a"),
        pathlib.PurePosixPath("\udc80"),
        datetime.datetime(2026, 1, 1, tzinfo=Zone()),
        Namespace(__odd=1),
        Made(1),
        Extra(),
        Colour,
        decimal.Decimal("1" * 70_000),
        bytearray(b"x"),
        memoryview(b"x"),
        Ellipsis,
        torch.zeros(2),
        torch.nn.Parameter(torch.zeros(2)),
        np.zeros(2),
        np.datetime64("2020-01-01"),
        np.timedelta64(1, "s"),
        np.longdouble(1),
        np.clongdouble(1),
        np.void(b"x"),
        lambda: None,
        torch.strided,
        "\ud800",
        np.str_("\ud800"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_refused_with_key_and_place(value: object) -> None:
    with pytest.raises(InvalidStateError) as caught:
        encode_value({"outer": [1, value]}, key="optimizer.extra")
    assert caught.value.key == "optimizer.extra"
    assert "'optimizer.extra' at ['outer'][1]" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_refused_type_is_named() -> None:
    with pytest.raises(InvalidStateError, match=r"builtins\.bytearray"):
        encode_value(bytearray(), key="k")


def test_refusals_show_odd_keys_without_printing_them() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(InvalidStateError, match=r"\[Silent\]"):
        encode_value({Silent(): 1}, key="k")
    with pytest.raises(InvalidStateError, match=r"\[int\]"):
        encode_value({10**5000: object()}, key="k")


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


def test_nesting_is_bounded_the_same_both_ways() -> None:
    assert through_json(nested(MAX_VALUE_DEPTH)) == nested(MAX_VALUE_DEPTH)
    with pytest.raises(InvalidStateError, match="nests deeper"):
        encode_value(nested(MAX_VALUE_DEPTH + 1), key="k")
    with pytest.raises(CorruptError, match="nests deeper"):
        decode_value(nested(MAX_VALUE_DEPTH + 1), key="k")


@pytest.mark.parametrize("leaf", [1j, np.complex64(1), np.float32(2), torch.Size([2**62]), 2**70, b"x", math.nan])
def test_leaves_survive_at_the_greatest_depth(leaf: object) -> None:
    value = leaf
    for _ in range(MAX_VALUE_DEPTH):
        value = (value,)
    assert through_json(value) == value or leaf != leaf


def test_values_that_contain_themselves_are_refused() -> None:
    circle: list[object] = []
    circle.append(circle)
    loop: dict[str, object] = {}
    loop["loop"] = (loop,)
    for value in (circle, loop):
        with pytest.raises(InvalidStateError, match="contain itself"):
            encode_value(value, key="k")


def repeated(tag: str, depth: int = 10_000) -> object:
    json: object = 1
    whole = {
        "numpy": lambda json: ["float32", json],
        "deque": lambda json: [None, [json]],
        "Namespace": lambda json: [["a", json]],
        "record": lambda json: ["dataclass", "a.B", [["x", json]]],
        "datetime": lambda json: ["2026-01-02T03:04:05", 0, json],
    }.get(tag, lambda json: [json, json])
    for _ in range(depth):
        json = {tag: whole(json)}
    return json


HOSTILE: list[object] = [
    {},
    {"tuple": [], "list": []},
    {"no type": []},
    {"": 1},
    {"int": "0x1"},
    {"int": "0x1fffffffffffff"},
    {"int": "-0x1fffffffffffff"},
    {"int": "0x0020000000000000"},
    {"int": "0x2000000000000A"},
    {"int": "9007199254740993"},
    {"int": 2**53},
    {"int": "0x"},
    {"int": "0x20000000000000\n"},
    {"int": "+0x20000000000000"},
    {"int": "0x2_0000000000000"},
    2**53,
    -(2**53),
    math.inf,
    math.nan,
    {"float": "1.0"},
    {"float": "NaN"},
    {"float": "infinity"},
    {"float": 1.0},
    {"float": None},
    {"tuple": 1},
    {"tuple": None},
    {"tuple": {"tuple": []}},
    {"dict": {}},
    {"dict": {"a": 1}},
    {"dict": [1]},
    {"dict": [["a"]]},
    {"dict": [["a", 1, 2]]},
    {"dict": ["ab"]},
    {"dict": [["a", 1], ["a", 2]]},
    {"dict": [[1, 1], [True, 2]]},
    {"dict": [[1, 1], [1.0, 2]]},
    {"dict": [[0.0, 1], [-0.0, 2]]},
    {"dict": [["a", 1], [{"numpy": ["str", "a"]}, 2]]},
    {"dict": [[[], 1]]},
    {"dict": [[{"dict": []}, 1]]},
    {"dict": [[{"tuple": [[]]}, 1]]},
    {"set": 1},
    {"set": [2, 1]},
    {"set": [1, 1]},
    {"set": [1, True]},
    {"set": [1, 10, 2, 11]},
    {"set": [[]]},
    {"set": [{"set": []}]},
    {"frozenset": ["b", "a"]},
    {"frozenset": {"a": 1}},
    {"bytes": "YQ"},
    {"bytes": "YQ=="[:3]},
    {"bytes": "YR=="},
    {"bytes": "Y Q=="},
    {"bytes": "YQ==\n"},
    {"bytes": "ü"},
    {"bytes": [1]},
    {"bytes": "_-8="},
    {"complex": [1.0]},
    {"complex": [1, 2]},
    {"complex": [1.0, 2.0, 3.0]},
    {"complex": "1j"},
    {"complex": [{"tuple": []}, 1.0]},
    {"complex": {"float": "nan"}},
    {"torch.dtype": "half"},
    {"torch.dtype": "Tensor"},
    {"torch.dtype": "torch.float32"},
    {"torch.dtype": "__class__"},
    {"torch.dtype": 3},
    {"torch.device": "cuda:00"},
    {"torch.device": "cuda:300"},
    {"torch.device": "cuda:-1"},
    {"torch.device": "CUDA"},
    {"torch.device": ""},
    {"torch.device": "cuda:0\n"},
    {"torch.device": 0},
    {"torch.Size": 3},
    {"torch.Size": [1.0]},
    {"torch.Size": [True]},
    {"torch.Size": [{"int": "0x8000000000000000"}]},
    {"torch.Size": [[1]]},
    {"torch.Size": {"int": "0x20000000000000"}},
    {"numpy": "float32"},
    {"numpy": ["float32"]},
    {"numpy": ["float32", 0.1]},
    {"numpy": ["float32", 1e300]},
    {"numpy": ["float16", 65537.0]},
    {"numpy": ["float32", 1]},
    {"numpy": ["int8", 128]},
    {"numpy": ["uint8", -1]},
    {"numpy": ["int8", 1.0]},
    {"numpy": ["int8", True]},
    {"numpy": ["bool", 1]},
    {"numpy": ["longdouble", 1.0]},
    {"numpy": ["object", None]},
    {"numpy": ["datetime64", "2020"]},
    {"numpy": ["str", 1]},
    {"numpy": ["bytes", "x"]},
    {"numpy": ["bytes", {"bytes": "YR=="}]},
    {"numpy": ["complex64", {"complex": [1e300, 0.0]}]},
    {"numpy": ["complex64", {"tuple": [1.0, 1.0]}]},
    {"numpy": [["int8"], 1]},
    {"numpy": [{}, 1]},
    "\ud800",
    {"tuple": ["\udfff"]},
    {"complex": [{"float": "nan"}, {"complex": [1.0, 1.0]}]},
    repeated("complex"),
    repeated("numpy"),
    repeated("torch.Size"),
    repeated("tuple"),
    repeated("frozenset"),
    repeated("dict"),
    nested(10_000),
    (1, 2),
    b"x",
    {1: 2},
    {None: 2},
    object(),
    {"path": "a"},
    {"path": ["PosixPath", "a//b"]},
    {"path": ["Path", "a"]},
    {"path": ["os", "a"]},
    {"path": ["PosixPath", "a" * 100_000]},
    {"path": [["PosixPath"], "a"]},
    {"datetime": ["2026-01-02T03:04:05", 0]},
    {"datetime": ["2026-01-02", 0, None]},
    {"datetime": ["2026-01-02T03:04:05+01:00", 0, None]},
    {"datetime": ["2026-01-02T03:04:05", True, None]},
    {"datetime": ["2026-01-02T03:04:05", 2, None]},
    {"datetime": ["2026-01-02T03:04:05", 0, 5]},
    {"datetime": ["2026-01-02T03:04:05", 0, {"datetime": ["2026-01-02T03:04:05", 0, None]}]},
    {"date": "2026-1-2"},
    {"date": 5},
    {"time": ["25:00:00", 0, None]},
    {"timedelta": [0, 86400, 0]},
    {"timedelta": [1.5, 0, 0]},
    {"timedelta": [10**12, 0, 0]},
    {"timezone": [{"timedelta": [2, 0, 0]}]},
    {"timezone": [5]},
    {"zoneinfo": "../../etc/passwd"},
    {"zoneinfo": "/etc/passwd"},
    {"zoneinfo": "a.b"},
    {"uuid": "{12345678123456781234567812345678}"},
    {"uuid": 1},
    {"decimal": "1_0"},
    {"decimal": "1e5"},
    {"decimal": "1" * 100_000},
    {"decimal": "١"},
    {"range": [0, 1]},
    {"range": [0, 1, 0]},
    {"range": [0, 1.0, 1]},
    {"range": [0, True, 1]},
    {"slice": [0, "a", 1]},
    {"slice": [1]},
    {"deque": [1, [1, 2]]},
    {"deque": [-1, []]},
    {"deque": [{"int": "0xffffffffffffffffffff"}, []]},
    {"deque": [1 << 60, []]},
    {"deque": [True, [1]]},
    {"deque": [None, 5]},
    {"OrderedDict": [["a", 1], ["a", 2]]},
    {"OrderedDict": {"a": 1}},
    {"Counter": [[[], 1]]},
    {"defaultdict": ["eval", []]},
    {"defaultdict": ["list"]},
    {"Namespace": [["__class__", 1]]},
    {"Namespace": [[1, 1]]},
    {"BytesIO": ["YR==", 0]},
    {"BytesIO": ["YQ==", -1]},
    {"BytesIO": ["YQ==", 1 << 60]},
    {"BytesIO": ["YQ==", True]},
    {"record": ["dataclass", "a.B"]},
    {"record": ["dataclass", "", []]},
    {"record": ["dataclass", "a.B", [[1, 2]]]},
    {"record": ["dataclass", "a.B", [["x", 1], ["x", 2]]]},
    {"record": ["dataclass", "a" * 100_000, []]},
    {"record": ["enum", "a.B", [["value", 1], ["name", "A"]]]},
    {"record": ["enum", "a.B", [["name", 1], ["value", 1]]]},
    {"record": ["registered", "a", []]},
    {"record": ["torch.Generator", "torch.Generator", [["device", "cpu"], ["state", {"bytes": ""}]]]},
    {"record": ["torch.Generator", "os.system", [["device", {"torch.device": "cpu"}], ["state", {"bytes": ""}]]]},
    repeated("timezone"),
    repeated("datetime"),
    repeated("deque"),
    repeated("Namespace"),
    repeated("record"),
    repeated("slice"),
]


@pytest.mark.parametrize("json", HOSTILE, ids=range(len(HOSTILE)))
def test_damaged_or_hostile_json_is_refused_with_the_key(json: object) -> None:
    with pytest.raises(CorruptError) as caught:
        decode_value(json, key="extra")
    assert caught.value.key == "extra"
    assert "'extra'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("json", [{"eval": "1"}, {"list": []}, [{"torch.layout": "strided"}]])
def test_a_type_that_is_not_known_asks_for_an_upgrade_by_name(json: object) -> None:
    with pytest.raises(
        UnsupportedVersionError, match=r"'k' has a value of the type '(eval|list|torch.layout)'.*upgrade"
    ):
        decode_value(json, key="k")
    with pytest.raises(UnsupportedVersionError, match="'record of a trait'"):
        decode_value({"record": ["trait", "a.B", []]}, key="k")
    with pytest.raises(UnsupportedVersionError, match=r"does not know the time zone 'No/Such'.*tzdata"):
        decode_value({"zoneinfo": "No/Such"}, key="k")


def test_instances_of_classes_are_records_of_what_they_were() -> None:
    value = Settings(0.5, Colour.RED, {Point(1, ()): [Colour.RED]})
    record = through_json(value)
    assert isinstance(record, Record)
    assert (record.kind, record.name) == ("dataclass", f"{__name__}.Settings")
    assert list(record.fields) == ["rate", "colour", "inner"]
    assert repr(record.fields["colour"]) == f"Record(enum {__name__}.Colour: name='RED', value=1)"
    assert rebuilt_by(value, [Settings, Point, Colour]) == value
    assert isinstance(rebuilt_by(value, [Point]), Record)


def rebuilt_by(value: object, classes: list[type]) -> object:
    return decode_value(encode_value(value, key="k"), key="k", rebuild=lambda record: rebuilt(record, classes))


def test_records_as_keys_of_one_hash_are_given_up() -> None:
    numbers = [{"int": hex(PRIME * number)} for number in range(1 << 10, 2000)]
    sets = [{"frozenset": [*numbers[:gap], *numbers[gap + 1 :]]} for gap in range(60)]
    records = [{"record": ["dataclass", "a.B", [["x", each]]]} for each in sets]
    with pytest.raises(CorruptError, match="slow"):
        decode_value({"dict": [[each, 0] for each in records]}, key="k")


def test_dataclasses_that_lead_back_to_themselves_are_refused() -> None:
    @dataclass
    class Node:
        children: list[object]
        parent: object = None

    root = Node([])
    root.children += [Node([], root), Node([], root)]
    with pytest.raises(InvalidStateError, match="contain itself"):
        encode_value(root, key="k")


def test_a_buffer_keeps_content_and_position() -> None:
    buffer = io.BytesIO(b"abc")
    buffer.seek(7)
    found = through_json(buffer)
    assert isinstance(found, io.BytesIO)
    assert (found.getvalue(), found.tell()) == (b"abc", 7)
    buffer.close()
    with pytest.raises(InvalidStateError, match="closed"):
        encode_value(buffer, key="k")


def test_a_path_of_another_system_is_a_pure_one() -> None:
    assert decode_value({"path": ["WindowsPath", "C:\\a"]}, key="k") == pathlib.PureWindowsPath("C:\\a")


def test_a_device_type_that_torch_lacks_asks_for_another_torch() -> None:
    with pytest.raises(UnsupportedVersionError, match="'zpu:1'"):
        decode_value({"torch.device": "zpu:1"}, key="k")


def test_a_device_index_that_torch_wraps_around_is_refused() -> None:
    odd = torch.device("cuda:200")
    if "-" not in str(odd):
        pytest.skip("this torch has more than 127 devices")
    with pytest.raises(InvalidStateError):
        encode_value(odd, key="k")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" 1",
        b"1 ",
        b"1e0",
        b"NaN",
        b"[1, 2]",
        b'{"dict":[],"dict":[]}',
        b'"\\u0061"',
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b"1" * 5000,
        b"1e999",
        b"0.10",
        b"1\x00",
    ],
    ids=range(16),
)
def test_text_that_is_not_canonical_json_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_value_bytes(data, key="k")


def test_text_is_read_from_any_buffer() -> None:
    data = encode_value_bytes({"a": (1, 2.5)}, key="k")
    for buffer in (data, bytearray(data), memoryview(data)):
        assert decode_value_bytes(buffer, key="k") == {"a": (1, 2.5)}


def test_every_bit_flip_of_text_gives_a_value_or_a_library_error() -> None:
    data = encode_value_bytes({"a": [1, -2.5, {3}, b"xy", 2**60, torch.float32, np.int8(3)], (1,): None}, key="k")
    refused = 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            value = decode_value_bytes(flipped, key="k")
        except CheckpointError:
            refused += 1
        else:
            assert encode_value_bytes(value, key="k") == flipped
    assert refused > 4 * len(data)


PRIME = (1 << 61) - 1  # Python's hash of an integer is its remainder by this
COLLIDING: dict[str, list[object]] = {
    "integers": [{"int": hex(PRIME * number)} for number in range(1 << 10, 12_000)],
    "tuples": [{"tuple": [-1 - (number >> bit & 1) for bit in range(14)]} for number in range(1 << 14)],
    "complex": [{"complex": [1000003.0 * number, float(-number)]} for number in range(1, 12_000)],
}


@pytest.mark.parametrize("name", sorted(COLLIDING))
def test_keys_of_one_hash_are_given_up(name: str) -> None:
    keys = COLLIDING[name]
    in_order = sorted(keys, key=msgspec.json.encode)
    for json in ({"dict": [[key, 0] for key in keys]}, [{"set": in_order}], {"dict": [[{"frozenset": in_order}, 0]]}):
        with pytest.raises(CorruptError, match="keys that were chosen to make reading slow") as caught:
            decode_value(json, key="k")
        assert caught.value.key == "k"


def test_sets_that_are_equal_but_for_one_element_are_given_up() -> None:
    numbers = [{"int": hex(PRIME * number)} for number in range(1 << 10, 2000)]
    sets = [{"frozenset": [*numbers[:gap], *numbers[gap + 1 :]]} for gap in range(60)]
    with pytest.raises(CorruptError, match="slow"):
        decode_value({"dict": [[each, 0] for each in sets]}, key="k")


def test_many_honest_keys_are_fine() -> None:
    value = {
        **{number * number: number for number in range(50_000)},
        **{(number, -number % 7): 0 for number in range(20_000)},
        **{number / 7: 0 for number in range(20_000)},
    }
    assert decode_value(encode_value(value, key="k"), key="k") == value


def test_shared_containers_are_counted_before_they_are_written() -> None:
    shared: object = [1]
    for _ in range(60):
        shared = [shared, shared]
    with pytest.raises(InvalidStateError, match="same containers") as caught:
        encode_value({"a": shared}, key="k")
    assert str(caught.value.key).startswith("k.a.0.0")


# --- at random --------------------------------------------------------------------------------------------------------


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
numpy_scalars = st.one_of(
    st.booleans().map(np.bool_),
    st.integers(-128, 127).map(np.int8),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.floats(width=16).map(np.float16),
    st.floats(width=32).map(np.float32),
    st.floats().map(np.float64),
    st.complex_numbers(width=64).map(np.complex64),
    st.complex_numbers().map(np.complex128),
    texts.map(np.str_),
    st.binary(max_size=8).map(np.bytes_),
)
hashable_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**54), 2**54),
    st.floats(),
    st.complex_numbers(),
    texts,
    st.binary(max_size=8),
    st.lists(st.integers(0, 2**62), max_size=3).map(torch.Size),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")]),
    st.sampled_from(sorted(name for name in DTYPES if hasattr(torch, name))).map(lambda name: getattr(torch, name)),
    numpy_scalars,
)
hashables = st.recursive(
    hashable_leaves,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
values = st.recursive(
    hashables,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(hashables, inner, max_size=4),
        st.sets(hashables, max_size=4),
    ),
    max_leaves=15,
)
json_texts = st.one_of(
    texts,
    st.sampled_from(["nan", "inf", "0x20000000000000", "-0x20000000000000", "0x1", "YQ==", "float32", "int8", "cpu"]),
)
tags = st.sampled_from(
    [
        "tuple",
        "dict",
        "set",
        "frozenset",
        "int",
        "float",
        "bytes",
        "complex",
        "torch.dtype",
        "torch.device",
        "torch.Size",
        "numpy",
        "other",
    ]
)
jsons = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**55), 2**55)
    | st.floats(allow_nan=False, allow_infinity=False)
    | json_texts,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(tags, inner, min_size=1, max_size=2),
        st.lists(st.lists(inner, min_size=2, max_size=2), max_size=3),
    ),
    max_leaves=10,
)


def identical(left: object, right: object) -> bool:
    """Whether both have the same types and contents all the way down, nan and -0.0 included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Size) or isinstance(right, torch.Size):
        return left == right
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(identical, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return identical(list(left.items()), list(right.items()))
    if isinstance(left, (set, frozenset)) and isinstance(right, (set, frozenset)):
        return sorted(map(described, left)) == sorted(map(described, right))
    return described(left) == described(right)


def described(value: object) -> str:
    if isinstance(value, (float, np.floating)) and not math.isnan(value):
        return f"{type(value)} {float(value).hex()}"
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(described, value))}"
    if isinstance(value, tuple):
        return f"{type(value)} {list(map(described, value))}"
    return f"{type(value)} {value!r}"


@given(values)
@settings(max_examples=400)
def test_what_is_encoded_decodes_to_the_same(value: object) -> None:
    data = encode_value_bytes(value, key="k")
    decoded = decode_value_bytes(data, key="k")
    assert identical(decoded, value)
    assert encode_value_bytes(decoded, key="k") == data


@given(jsons)
@settings(max_examples=600)
def test_what_decodes_encodes_to_the_same(json: object) -> None:
    # Through text, so that it is what a file can hold.
    json = msgspec.json.decode(msgspec.json.encode(json))
    try:
        value = decode_value(json, key="k")
    except (CorruptError, UnsupportedVersionError):
        return
    assert msgspec.json.encode(encode_value(value, key="k")) == msgspec.json.encode(json)


@given(st.sets(hashables, max_size=6))
def test_sets_are_written_the_same_whatever_their_order(elements: set[object]) -> None:
    ordered = list(elements)
    assert encode_value_bytes(set(ordered), key="k") == encode_value_bytes(set(ordered[::-1]), key="k")


@given(
    st.binary(max_size=30) | st.text(alphabet='{}[]":,0123456789.-eEtruefalsn dictuplx', max_size=30).map(str.encode)
)
def test_arbitrary_bytes_never_raise_a_foreign_error(data: bytes) -> None:
    try:
        value = decode_value_bytes(data, key="k")
    except (CorruptError, UnsupportedVersionError):
        return
    assert encode_value_bytes(value, key="k") == data
