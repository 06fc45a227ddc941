"""Hostile checkpoints in the native format, by name: what to change in an honest one, digests made right afterwards.

Each has to end in an error of the library, whoever looks at it; those in ``VERIFY_ONLY`` concern what only verify (and
other readers of safetensors) look at.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from torture.forge import Change, Forgery, number_of
from torture.hostile_index import index_changes
from torture.hostile_keys import chained_integers, colliding, equal_integers, typed_json

Plant = Callable[[Path], object]

DATA = "data-forged-0-0.safetensors"
BAD_NAMES = {
    "..": "..",
    "of the parent": f"../{DATA}",
    "absolute": "/etc/passwd",
    "absolute and ours": f"/tmp/{DATA}",
    "that climbs": "data-forged-0-0.safetensors/../../../etc/passwd",
    "of NUL": f"{DATA}\x00",
    "with NUL inside": "data-forged-0\x00-0.safetensors",
    "empty": "",
    "of a dot": ".",
    "with a newline": f"{DATA}\n",
    "of another attempt": "data-other-0-0.safetensors",
    "with backslashes": "..\\..\\etc\\passwd",
    "of a URL": "file:///etc/passwd",
    "of the manifest": "manifest.json",
    "with other digits": "data-forged-٠-0.safetensors",
    "of 100 kB": "data-forged-" + "0" * 100_000 + "-0.safetensors",
    "that is a number": 7,
    "that is a list": ["data"],
    "that is null": None,
    "with a lone surrogate": "\udc80",
}
BAD_NUMBERS: dict[str, Any] = {
    "negative": -1,
    "very negative": -(2**63),
    "2**60": 2**60,
    "2**62 + 1": 2**62 + 1,
    "2**63": 2**63,
    "2**64": 2**64,
    "10**30": 10**30,
    "fractional": 1.5,
    "text": "1",
    "null": None,
    "true": True,
    "a list": [1],
}
MANIFEST_NAMES: dict[str, Callable[[Any, dict[str, Any]], object]] = {
    "file name": lambda name, m: m["files"][0].update(name=name),
    "index name": lambda name, m: m["index"].update(name=name),
    "attempt": lambda name, m: m.update(attempt=name),
}
MANIFEST_NUMBERS: dict[str, Callable[[Any, dict[str, Any]], object]] = {
    "bytes of a file": lambda n, m: m["files"][0].update(bytes=n),
    "header of a file": lambda n, m: m["files"][0].update(header=n),
    "bytes of the index": lambda n, m: m["index"].update(bytes=n, keep=True),
    "size in a shape": lambda n, m: m["tensors"][0].update(shape=[n, 6]),
    "world size": lambda n, m: m["writer"].update(world_size=n),
    "position of a value": lambda n, m: m["values"][0].update(position=n),
}
# 2**60 ranks, or a position that no other number tells from the right one, are odd and harmless.
HARMLESS = {
    ("world size", "2**60"),
    ("world size", "2**62 + 1"),
    ("world size", "2**63"),
    ("world size", "2**64"),
    ("world size", "10**30"),
}


def manifest_change(change: Callable[[dict[str, Any]], object]) -> Change:
    """A change of the manifest alone."""
    return lambda forgery: change(forgery.manifest)


def tensor(which: str, /, **changes: Any) -> Change:
    """Changes of the manifest's entry of a tensor."""
    return lambda f: f.manifest["tensors"][number_of(f, which)].update(changes)


def value(json_value: Any) -> Change:
    """Another value, under the key of the first."""
    return manifest_change(lambda m: m["values"][0].update(value=json_value))


def text(old: bytes, new: bytes) -> Change:
    """Other text in the manifest, which need not be canonical."""

    def change(forgery: Forgery) -> None:
        data = msgspec.json.encode(forgery.manifest)
        assert old in data, old
        forgery.raw["manifest"] = data.replace(old, new, 1)
        forgery.seal_files = False

    return change


def header(change: Callable[[dict[str, Any]], object], number: int = 0) -> Change:
    """A change of the header of a data file."""

    def apply(forgery: Forgery) -> None:
        parsed = forgery.header(number)
        change(parsed)
        forgery.set_header(json.dumps(parsed, separators=(",", ":"), ensure_ascii=False).encode(), number)

    return apply


def nested(levels: int, leaf: str = "") -> Any:
    """Lists in lists."""
    return json.loads("[" * levels + leaf + "]" * levels)


def _deep(tag: str, body: Callable[[Any], Any]) -> Any:
    """A value in itself, 100 times."""
    found: Any = None
    for _ in range(100):
        found = {tag: body(found)}
    return found


def _fields(kind: str, **fields: Any) -> Any:
    """A record of the kind, with these fields."""
    return {"record": [kind, "a.B", list(map(list, fields.items()))]}


def _short_record(forgery: Forgery) -> None:
    """The record of a named tuple with one field, and a tensor at the sixth."""
    tensor("weight", path=["pair", {"tuple": 5}])(forgery)
    containers = {"dict": [[{"tuple": ["pair"]}, _fields("namedtuple", first=None)]]}
    _set_metadata({"dict": [["holdfast.containers", containers]]}, forgery.manifest)


def _changes() -> dict[str, Change]:
    cases: dict[str, Change] = {}
    for title, name in BAD_NAMES.items():
        if name != "\udc80":
            for place, set_name in MANIFEST_NAMES.items():
                cases[f"{place} {title}"] = manifest_change(partial(set_name, name))
    for field, change in MANIFEST_NUMBERS.items():
        for title, number in BAD_NUMBERS.items():
            if (field, title) not in HARMLESS:
                cases[f"{field} {title}"] = manifest_change(partial(change, number))
        cases[f"{field} NaN"] = text(*_rawnumber_of(field))
    cases.update(_keys_and_paths())
    cases.update(_values())
    cases.update(index_changes())
    return cases


def _rawnumber_of(field: str) -> tuple[bytes, bytes]:
    return {
        "bytes of a file": (b'"bytes":', b'"bytes":NaN,"x":'),
        "header of a file": (b'"header":4096', b'"header":NaN'),
        "bytes of the index": (b'"index":{"name":"index-forged.safetensors","bytes":', b'"index":{"bytes":NaN,"x":'),
        "size in a shape": (b'"shape":[4,6]', b'"shape":[NaN,6]'),
        "world size": (b'"world_size":1', b'"world_size":NaN'),
        "position of a value": (b'"position":', b'"position":NaN,"x":'),
    }[field]


def _keys_and_paths() -> dict[str, Change]:
    deep = [{"list": 0}] * 300
    return {
        "key twice": tensor("tied", key="weight"),
        "key of a tensor and a value": tensor("tied", key="step"),
        "key of 1 MB": tensor("tied", key="k" * (1 << 20)),
        "key null": tensor("weight", key=None),
        "members twice": text(b'"attempt":"forged",', b'"attempt":"forged","attempt":"forged",'),
        "members twice, other values": text(b'"attempt":"forged",', b'"attempt":"../x","attempt":"forged",'),
        "unknown member": manifest_change(lambda m: m.update(more=1, digest=m.pop("digest"))),
        "unknown member of a tensor": tensor("weight", code="import os"),
        "unknown member of a file": manifest_change(lambda m: m["files"][0].update(url="http://x")),
        "unknown feature": manifest_change(lambda m: m.update(requires=["remote-code"])),
        "feature twice": manifest_change(lambda m: m.update(requires=["pickle", "pickle"])),
        "feature of 1 MB": manifest_change(lambda m: m.update(requires=["x" * (1 << 20)])),
        "100,000 features": manifest_change(lambda m: m.update(requires=[f"f{n:06}" for n in range(100_000)])),
        "newer version": text(b'"version":1', b'"version":2'),
        "version 0": text(b'"version":1', b'"version":0'),
        "version of 5,000 digits": text(b'"version":1', b'"version":' + b"1" * 5000),
        "another format": text(b'"format":"holdfast"', b'"format":"otherfmt"'),
        "a byte order mark": text(b'{"format"', b'\xef\xbb\xbf{"format"'),
        "bytes that are no UTF-8": text(b'"key":"step"', b'"key":"st\xffp"'),
        "a lone surrogate": text(b'"key":"step"', b'"key":"\\udc80tep"'),
        "an escape that JSON does not demand": text(b'"key":"step"', b'"key":"\\u0073tep"'),
        "spaces": text(b'"key":"step"', b'"key": "step"'),
        "no manifest but 1,000,000 brackets": text(b'"requires":[]', b'"requires":' + b"[" * 1_000_000),
        "10,000 nested objects": text(b'"requires":[]', b'"requires":' + b'{"a":' * 10_000),
        "dtype unknown": tensor("weight", dtype="float31"),
        "dtype of a module": tensor("weight", dtype="os.system"),
        "dtype of an attribute of torch": tensor("weight", dtype="load"),
        "shape of 65 dimensions": tensor("weight", shape=[1] * 65),
        "shape of 100,000 dimensions": tensor("weight", shape=[1] * 100_000),
        "shape that overflows": tensor("weight", shape=[2**31, 2**31]),
        "shape that overflows to the right size": tensor("weight", shape=[2**32 + 24, 2**32]),
        "shape empty with absurd strides": tensor("empty", shape=[0, 2**61, 2**61]),
        "kind unknown": tensor("weight", kind="exec"),
        "kind pickle that is not required": tensor("blob", kind="pickle"),
        "kind json of what is no JSON": tensor("blob", kind="json"),
        "kind bytes of two dimensions": tensor("weight", kind="bytes"),
        "kind numpy of bfloat16": tensor("nested.7", kind="numpy"),
        "alias of nothing": tensor("tied", alias_of="nothing"),
        "alias of itself": tensor("tied", alias_of="tied"),
        "alias of what has no chunks": tensor("weight", alias_of="nested.7"),
        "alias of bytes": tensor("tied", alias_of="blob"),
        "alias in a circle": lambda f: (tensor("weight", alias_of="tied")(f), None),
        "gradient of integers": tensor("nested.list.0", requires_grad=True),
        "quantizer missing": lambda f: f.manifest["tensors"][number_of(f, "quantised")].pop("quantizer"),
        "quantizer of a plain tensor": tensor("weight", quantizer={"scheme": "per_tensor_affine", "scale": 1.0}),
        "quantizer of an unknown scheme": _quantizer(scheme="__reduce__"),
        "quantizer with a zero point of 2**63": _quantizer(zero_point=2**63),
        "quantizer with a zero point of 10**30": _quantizer(zero_point=10**30),
        "quantizer with a zero point of 400 digits": _quantizer(zero_point=10**400),
        "quantizer with an infinite scale": text(b'"scale":0.5', b'"scale":1e999'),
        "quantizer with a scale of NaN": text(b'"scale":0.5', b'"scale":NaN'),
        "path empty": tensor("weight", path=[]),
        "path of 300 elements": tensor("weight", path=["x", *deep]),
        "path of 20,000 elements": tensor("weight", path=["x", *[{"list": 0}] * 20_000]),
        "path with position 2**40": tensor("weight", path=["x", {"list": 2**40}]),
        "path with position 2**61": tensor("weight", path=["x", {"tuple": 2**61}]),
        "path with a negative position": tensor("weight", path=["x", {"list": -1}]),
        "path through a leaf": tensor("weight", path=["step", "x"]),
        "path of another leaf": tensor("weight", path=["step"]),
        "path of two kinds of container": tensor("weight", path=["nested", {"list": 0}]),
        "path with an unknown element": tensor("weight", path=["x", {"attribute": "__class__"}]),
        "path with two members": tensor("weight", path=["x", {"list": 0, "tuple": 0}]),
        "path with a key that is no value": tensor("weight", path=["x", {"key": {"exec": 1}}]),
        "path with a key that is not hashable": tensor("weight", path=["x", {"key": [1]}]),
        "path with a key of 5,000 digits": tensor("weight", path=["x", {"key": {"int": hex(10**5000)}}]),
        "path with a deep key": tensor("weight", path=["x", {"key": {"tuple": nested(80)}}]),
    }


def _quantizer(**changes: Any) -> Change:
    return lambda f: f.manifest["tensors"][number_of(f, "quantised")]["quantizer"].update(changes)


def _values() -> dict[str, Change]:
    values: dict[str, Any] = {
        "of an unknown type": {"exec": "import os"},
        "of a class": {"os.system": "true"},
        "with two members": {"int": "0x20000000000000", "float": "nan"},
        "with no member": {},
        "nested 70 deep": nested(70),
        "nested 100,000 deep": None,
        "tuple of a number": {"tuple": 1},
        "dict of no pairs": {"dict": [[1]]},
        "dict with equal keys": {"dict": [[1, 2], [True, 3]]},
        "dict with a list as key": {"dict": [[[1], 2]]},
        "set with equal elements": {"set": [1, {"float": "nan"}, 1]},
        "set out of order": {"set": [2, 1]},
        "set of lists": {"set": [[1]]},
        "integer of 2 MB that is small": {"int": "0x" + "0" * 2_000_000 + "1"},
        "integer in decimal": {"int": "1" * 100},
        "float of text": {"float": "1e5"},
        "bytes that are no base64": {"bytes": "###"},
        "bytes not canonical": {"bytes": "AB=="},
        "complex of text": {"complex": ["a", "b"]},
        "dtype of a function": {"torch.dtype": "load"},
        "dtype with a dot": {"torch.dtype": "hub.load"},
        "device of a path": {"torch.device": "../../etc/passwd"},
        "device with a huge index": {"torch.device": "cuda:99999999999"},
        "device unknown": {"torch.device": "os"},
        "size negative beyond 64 bits": {"torch.Size": [{"int": "-0xffffffffffffffffff"}]},
        "size of 2**63": {"torch.Size": [{"int": "0x8000000000000000"}]},
        "size of text": {"torch.Size": ["1"]},
        "numpy of an object": {"numpy": ["object", 1]},
        "numpy of a function": {"numpy": ["load", "x"]},
        "numpy out of range": {"numpy": ["int8", 300]},
        "numpy of a float that rounds": {"numpy": ["float16", 0.1]},
        "numpy of nested lists": {"numpy": ["str", nested(100)]},
        "path of no system": {"path": ["os.PathLike", "/etc/passwd"]},
        "path of 100 kB": {"path": ["PosixPath", "a" * 100_000]},
        "path that is not canonical": {"path": ["PosixPath", "a//b"]},
        "time without a fold": {"datetime": ["2026-01-02T03:04:05", None, None]},
        "time in a zone of a file": {"datetime": ["2026-01-02T03:04:05", 0, {"zoneinfo": "../../../etc/passwd"}]},
        "time in a zone of a module": {"datetime": ["2026-01-02T03:04:05", 0, {"zoneinfo": "os.path"}]},
        "time in an unknown zone": {"zoneinfo": "No/Such"},
        "time in zones 100 deep": _deep("timezone", lambda inner: [inner]),
        "date of text": {"date": "today"},
        "timedelta beyond all": {"timedelta": [10**10, 0, 0]},
        "uuid of text": {"uuid": "x"},
        "decimal of 10 MB": {"decimal": "1" * 10_000_000},
        "decimal with an absurd exponent": {"decimal": "1E+9999999999999999999999"},
        "range without a step": {"range": [0, 5, 0]},
        "range of text": {"range": ["0", "1", "2"]},
        "slice of lists": {"slice": [[1], None, None]},
        "deque longer than it may be": {"deque": [1, [1, 2]]},
        "deque of 2**60": {"deque": [2**60, []]},
        "deque with a negative length": {"deque": [-1, []]},
        "deques 100 deep": _deep("deque", lambda inner: [None, [inner]]),
        "ordered dict with equal keys": {"OrderedDict": [[1, 2], [True, 3]]},
        "counter of no pairs": {"Counter": [1]},
        "defaultdict of a function": {"defaultdict": ["eval", []]},
        "namespace with a name of Python": {"Namespace": [["__class__", 1]]},
        "namespace with a number as name": {"Namespace": [[1, 1]]},
        "namespaces 100 deep": _deep("Namespace", lambda inner: [["a", inner]]),
        "buffer at 2**60": {"BytesIO": ["YQ==", 2**60]},
        "buffer of no base64": {"BytesIO": ["###", 0]},
        "record of an unknown kind": {"record": ["function", "os.system", [["value", "true"]]]},
        "record without fields": {"record": ["dataclass", "os.system"]},
        "record with a field twice": {"record": ["dataclass", "a.B", [["x", 1], ["x", 2]]]},
        "record with a name of 100 kB": {"record": ["dataclass", "a" * 100_000, []]},
        "record of an enum without a name": {"record": ["enum", "a.B", [["value", 1]]]},
        "record of a generator of text": {"record": ["torch.Generator", "torch.Generator", [["state", "x"]]]},
        "records 100 deep": _deep("record", lambda inner: ["dataclass", "a.B", [["x", inner]]]),
    }
    cases = {f"value {title}": value(found) for title, found in values.items() if found is not None}
    cases["value nested 100,000 deep"] = text(b'"value":5', b'"value":' + b"[" * 100_000 + b"]" * 100_000)
    cases["value NaN"] = text(b'"value":5', b'"value":NaN')
    cases["value Infinity"] = text(b'"value":5', b'"value":1e999')
    cases["value -0"] = text(b'"value":5', b'"value":-0')
    cases["metadata of an unknown type"] = manifest_change(lambda m: m.update(metadata={"eval": "1"}))
    records = {
        "that is full": (["nested"], _fields("dataclass", list=1)),
        "of nothing": (["nested"], _fields("dataclass")),
        "of an enum": (["nested"], _fields("enum", name=None, value=None)),
        "that is registered": (["nested"], _fields("registered", value=None)),
        "of an unknown kind": (["nested"], _fields("function", list=None)),
        "that lacks a field": (["nested"], _fields("dataclass", list=None)),
        "with other keys than text": (["nested"], _fields("dataclass", **{"list": None, "7": None})),
        "that has positions": (["nested"], _fields("namedtuple", list=None, other=None)),
        "in the place of a list": (["nested", "list"], _fields("namedtuple", first=None, second=None)),
        "of text in the place of a list": (["nested", "list"], _fields("dataclass", **{"0": None, "1": None})),
        "of 10,000 fields": (["nested"], _fields("dataclass", **{f"f{number}": None for number in range(10_000)})),
    }
    containers = {
        "of text": "x",
        "of no paths": {"dict": [["x", {"OrderedDict": []}]]},
        "of a negative position": {"dict": [[{"tuple": [-1]}, {"deque": [None, []]}]]},
        "that are full": {"dict": [[{"tuple": ["nested"]}, {"OrderedDict": [["a", 1]]}]]},
        "of a plain class": {"dict": [[{"tuple": ["nested"]}, {"dict": []}]]},
        "of an unknown class": {"dict": [[{"tuple": ["nested"]}, {"os.environ": []}]]},
        "that do not fit": {"dict": [[{"tuple": ["nested"]}, {"deque": [None, []]}]]},
        "that are too short": {"dict": [[{"tuple": ["nested", "list"]}, {"deque": [0, []]}]]},
        **{f"of a record {title}": {"dict": [[{"tuple": path}, record]]} for title, (path, record) in records.items()},
    }
    for title, found in containers.items():
        kept = {"dict": [["holdfast.containers", found]]}
        cases[f"containers {title}"] = manifest_change(partial(_set_metadata, kept))
    cases["containers of a record that is too short"] = _short_record
    cases["metadata nested 200 deep"] = manifest_change(lambda m: m.update(metadata=nested(200)))
    return cases


def slow_changes() -> dict[str, Change]:
    """Keys that take long to tell apart, wherever a checkpoint has keys."""
    found: dict[str, Change] = {}
    for title, keys in colliding().items():
        written = [typed_json(key) for key in keys]
        pairs = [[each, 0] for each in written]
        in_order = sorted(written, key=msgspec.json.encode)
        found[f"value with a dict of {title}"] = value({"dict": pairs})
        if keys is not chained_integers():  # sets probe in another order
            found[f"value with a set of {title}"] = value({"set": in_order})
            found[f"value with a frozen set of {title} as key"] = value({"dict": [[{"frozenset": in_order}, 0]]})
        found[f"value with a dict of {title} in lists"] = value([[{"dict": pairs}]])
        found[f"metadata with a dict of {title}"] = manifest_change(partial(_set_metadata, {"dict": pairs}))
        found[f"paths with {title}"] = partial(_many_paths, written)
    numbers = equal_integers(400)
    sets = [
        {"frozenset": sorted(map(typed_json, [*numbers[:n], *numbers[n + 1 :]]), key=msgspec.json.encode)}
        for n in range(60)
    ]
    found["value with a dict of frozen sets of integers of one hash"] = value({"dict": [[each, 0] for each in sets]})
    return found


def _set_metadata(json_value: Any, manifest: dict[str, Any]) -> None:
    manifest["metadata"] = json_value


def _many_paths(keys: list[Any], forgery: Forgery) -> None:
    first = forgery.manifest["values"][0]
    count = len(forgery.manifest["tensors"])
    forgery.manifest["values"] = [
        {"key": f"k{number}", "value": first["value"], "position": count + number, "path": ["x", {"key": key}]}
        for number, key in enumerate(keys)
    ]


CHANGES: dict[str, Change] = _changes()

VERIFY_ONLY: dict[str, Change] = {
    "header that names another key": header(lambda h: h.update({"../../x": h.pop(next(iter(h)))})),
    "header with another dtype": header(lambda h: next(iter(h.values())).update(dtype="U8")),
    "header with another shape": header(lambda h: next(iter(h.values())).update(shape=[24])),
    "header with notes": header(lambda h: h.update(__metadata__={"code": "import os"})),
    "header with a second name": header(
        lambda h: h.update(more={"dtype": "U8", "shape": [0], "data_offsets": [96, 96]})
    ),
    "header with a negative offset": header(lambda h: next(iter(h.values())).update(data_offsets=[-96, 0])),
    "header with an offset of 2**60": header(lambda h: next(iter(h.values())).update(data_offsets=[0, 2**60])),
    "header of no JSON": lambda f: f.set_header(b"import os; os.system('true')"),
    "header of 4,000 brackets": lambda f: f.set_header(b"[" * 4000),
    "header of nothing": lambda f: f.set_header(b""),
    "header of a list": lambda f: f.set_header(b"[]"),
    "header with NaN": lambda f: f.set_header(b'{"weight":{"dtype":"F32","shape":[NaN],"data_offsets":[0,96]}}'),
}


# --- what is planted in place of files ------------------------------------------------------------------------------


def _replace(name: str, make: Callable[[Path], object]) -> Plant:
    def plant(path: Path) -> None:
        file = path / name
        if os.path.lexists(file):
            file.unlink()
        make(file)

    return plant


def _link_to_itself(file: Path) -> None:
    file.symlink_to(file.name)


def _link_to_a_copy(file: Path) -> None:
    file.symlink_to(file.parent.parent / "outside")


def _socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        # Names of sockets are short.
        here = os.open(file.parent, os.O_RDONLY)
        try:
            listener.bind(f"/proc/self/fd/{here}/{file.name}")
        finally:
            os.close(here)


def sparse(file: Path) -> None:
    """Make ``file`` one of 2**40 bytes that takes no room."""
    file.touch()
    os.truncate(file, 1 << 40)


INSTEAD: dict[str, Callable[[Path], object]] = {
    "a link to a file outside": _link_to_a_copy,
    "a link to /etc/passwd": lambda file: file.symlink_to("/etc/passwd"),
    "a link to /dev/zero": lambda file: file.symlink_to("/dev/zero"),
    "a link to nothing": lambda file: file.symlink_to("nothing"),
    "a link to itself": _link_to_itself,
    "a link to /proc/self/mem": lambda file: file.symlink_to("/proc/self/mem"),
    "a directory": lambda file: file.mkdir(),
    "a pipe": lambda file: os.mkfifo(file),
    "a socket": _socket,
    "an endless device": lambda file: os.mknod(file, 0o020666, os.makedev(1, 5)),
    "a device that blocks": lambda file: os.mknod(file, 0o020666, os.makedev(5, 0)),
    "a sparse file of 2**40 bytes": sparse,
}


def planted(data_file: str) -> dict[str, Plant]:
    """What is planted in place of the manifest, the index and a data file of that name."""
    return {
        f"{what} in place of {title}": _replace(name, make)
        for what, make in INSTEAD.items()
        for title, name in (
            ("the manifest", "manifest.json"),
            ("the index", "index-forged.safetensors"),
            ("a data file", data_file),
        )
    }
