"""Typed values: everything in a state that is not a tensor, as JSON that says of which type it was.

Null, booleans, strings, lists, finite floats and integers below 2**53 are themselves; everything else is an object with
one member, whose name is the type. Each value has exactly one form and nothing else is read back: encoding what
was decoded gives the same JSON. Types count exactly, so a subclass is refused rather than flattened. Never runs code
from a checkpoint, and never nests deeper than MAX_VALUE_DEPTH.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import torch

from holdfast._native.forms import FORMS, BadValue, Json, Trail, UnknownType, decode_form, encode_form
from holdfast._state.nested import check_containers
from holdfast._values.deadline import Effort, TooMuchEffort
from holdfast._values.dtypes import DTYPES, MAX_VALUE_DEPTH
from holdfast._values.records import Record
from holdfast.errors import CorruptError, InvalidStateError, UnsupportedVersionError

Rebuild = Callable[[Record], object]
"""What a Record in a value becomes."""

_EXACT_INTEGERS = 1 << 53  # From here on other JSON readers round.
_HEX_INTEGER = re.compile(r"-?0x[1-9a-f][0-9a-f]*")
_TYPE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_DEVICE = re.compile(r"[a-z][a-z0-9_]{0,31}(?::(?:0|[1-9][0-9]{0,2}))?")

_NUMPY_INTEGERS: dict[str, type[np.integer]] = {
    kind.__name__: kind for kind in (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
}
_NUMPY_FLOATS: dict[str, type[np.floating]] = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
_NUMPY_COMPLEX: dict[str, type[np.complexfloating]] = {"complex64": np.complex64, "complex128": np.complex128}
_NUMPY_NAMES: dict[type, str] = {
    np.bool_: "bool",
    np.str_: "str",
    np.bytes_: "bytes",
    **{kind: name for table in (_NUMPY_INTEGERS, _NUMPY_FLOATS, _NUMPY_COMPLEX) for name, kind in table.items()},
}

_canonical = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder().decode


def _shown(label: object) -> str:
    """A key or index as a message shows it: others than these may be long, or fail to print."""
    if type(label) is str or (type(label) is int and abs(label) < _EXACT_INTEGERS):
        return repr(label)
    return type(label).__name__


def encode_value(value: object, *, key: str) -> Json:
    """The typed JSON of ``value``; InvalidStateError names ``key``, the place inside it and the type that has none."""
    check_containers(value, within=key, is_value=True)
    try:
        return _encode(value, ())
    except BadValue as bad:
        place = "".join(f"[{_shown(label)}]" for label in bad.trail[:8])[:200]
        where = f"{key[:200]!r}" + (f" at {place}" if place else "")
        raise InvalidStateError(f"the value of {where} cannot be saved: {bad.problem}", key=key) from None


def decode_value(json: object, *, key: str, rebuild: Rebuild | None = None) -> object:
    """The value whose typed JSON is ``json``; CorruptError when ``encode_value`` makes no such JSON.

    UnsupportedVersionError when it names a type that only newer versions know, or a device type or dtype that the
    running torch does not have. Instances of classes are Records, or what ``rebuild`` makes of those.
    """
    try:
        return _decode(json, 0, _Reading(rebuild=rebuild))
    except UnknownType as unknown:
        kind = f"a value of the type {str(unknown)!r}"
        message = f"{key[:200]!r} has {kind}, which this version of holdfast does not know; upgrade holdfast"
        raise UnsupportedVersionError(message) from None
    except (BadValue, TooMuchEffort) as bad:
        message = f"the value of {key[:200]!r} is damaged: {bad}; use another checkpoint"
        raise CorruptError(message, key=key) from None


def encode_value_bytes(value: object, *, key: str) -> bytes:
    """The typed JSON of ``value`` as text, for a value that is stored like a tensor."""
    return _canonical(encode_value(value, key=key))


def decode_value_bytes(data: bytes | bytearray | memoryview, *, key: str, rebuild: Rebuild | None = None) -> object:
    """The value that ``encode_value_bytes`` made ``data`` from; CorruptError for anything else."""
    try:
        json = _decode_json(data)
        is_canonical = _canonical(json) == data
    except (msgspec.MsgspecError, ValueError, RecursionError):
        is_canonical = False
    if not is_canonical:
        raise CorruptError(
            f"the value of {key[:200]!r} is damaged: not canonical JSON; use another checkpoint", key=key
        )
    return decode_value(json, key=key, rebuild=rebuild)


@dataclass(slots=True)
class _Reading(Effort):
    """What the keys of one value may still take, and what Records in it become."""

    rebuild: Rebuild | None = None


def _encode(value: object, trail: Trail) -> Json:
    if len(trail) > MAX_VALUE_DEPTH:
        raise BadValue(f"it nests deeper than {MAX_VALUE_DEPTH} levels; flatten it", trail)
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        return value if -_EXACT_INTEGERS < value < _EXACT_INTEGERS else {"int": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is str:
        if not _is_unicode(value):
            raise BadValue("the string has lone surrogates; save it as bytes", trail)
        return value
    if type(value) is list:
        return [_encode(item, (*trail, index)) for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [_encode(item, (*trail, index)) for index, item in enumerate(value)]}
    if type(value) is dict:
        return {"dict": [[_encode(part, (*trail, name)) for part in (name, item)] for name, item in value.items()]}
    if type(value) is set or type(value) is frozenset:
        return {type(value).__name__: sorted((_encode(item, (*trail, item)) for item in value), key=_canonical)}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if type(value) is complex:
        return {"complex": [_encode(value.real, trail), _encode(value.imag, trail)]}
    if isinstance(value, np.generic) and type(value) in _NUMPY_NAMES:
        return _encode_numpy(value, trail)
    return _encode_torch(value, trail)


def _encode_torch(value: object, trail: Trail) -> Json:
    if type(value) is torch.dtype:
        name = str(value).removeprefix("torch.")
        if name not in DTYPES:
            raise BadValue(f"{value} is not a dtype that a checkpoint holds; save its name", trail)
        return {"torch.dtype": name}
    if type(value) is torch.device:
        if _DEVICE.fullmatch(str(value)) is None:
            raise BadValue(f"{value} is not a device that a checkpoint holds; save its name", trail)
        return {"torch.device": str(value)}
    if type(value) is torch.Size:
        if any(type(size) is not int for size in value):
            raise BadValue("the torch.Size has symbolic sizes; make them int", trail)
        return {"torch.Size": [_encode(size, trail) for size in value]}
    return encode_form(value, trail, _encode)


def _encode_numpy(value: np.generic, trail: Trail) -> Json:
    item: object = value.item()
    if isinstance(value, np.str_):
        item = str.__str__(value)  # str(value) and value.item() would drop trailing NULs
    elif isinstance(value, np.bytes_):
        item = bytes(value)
    return {"numpy": [_NUMPY_NAMES[type(value)], _encode(item, trail)]}


def _decode(json: object, depth: int, effort: _Reading) -> object:
    """The value of ``json``, which is ``depth`` levels down; ``effort`` is what its keys may still take."""
    if depth > MAX_VALUE_DEPTH:
        raise BadValue(f"it nests deeper than {MAX_VALUE_DEPTH} levels")
    if json is None or type(json) is bool:
        return json
    if type(json) is str:
        return _decode_str(json)
    if type(json) is int:
        if not -_EXACT_INTEGERS < json < _EXACT_INTEGERS:
            raise BadValue("an integer of 2**53 or more is not written in hexadecimal")
        return json
    if type(json) is float:
        if not math.isfinite(json):
            raise BadValue("a float that is not finite is not written as such")
        return json
    if type(json) is list:
        return [_decode(item, depth + 1, effort) for item in json]
    if type(json) is not dict or len(json) != 1:
        raise BadValue("an object does not have exactly one member")
    [(tag, body)] = json.items()
    if tag in _LEAVES:
        return _LEAVES[tag](body)
    if tag in FORMS:
        decode, decode_pairs = (
            partial(_decode, depth=depth + 1, effort=effort),
            partial(_decode_dict, depth=depth, effort=effort),
        )
        found = decode_form(tag, body, _decode_leaf, decode, decode_pairs, _encode)
        return effort.rebuild(found) if effort.rebuild and isinstance(found, Record) else found
    if tag not in ("tuple", "dict", "set", "frozenset"):
        if type(tag) is str and _TYPE_NAME.fullmatch(tag):
            raise UnknownType(tag)
        raise BadValue(f"it has the unknown type {str(tag)[:80]!r}")
    if type(body) is not list:
        raise BadValue(f"the elements of a {tag} are missing")
    if tag == "tuple":
        return tuple(_decode(item, depth + 1, effort) for item in body)
    return _decode_dict(body, depth, effort) if tag == "dict" else _decode_set(tag, body, depth, effort)


def _decode_dict(body: list[object], depth: int, effort: _Reading) -> dict[object, object]:
    pairs: list[tuple[object, object]] = []
    for pair in body:
        if type(pair) is not list or len(pair) != 2:
            raise BadValue("a dict is not a list of pairs")
        pairs.append((_decode_hashable(pair[0], depth + 1, effort), _decode(pair[1], depth + 1, effort)))
    decoded = effort.fill(dict[object, object](), pairs, [name for name, _ in pairs])
    if len(decoded) != len(pairs):
        raise BadValue("a dict has two equal keys")
    return decoded


def _decode_set(tag: str, body: list[object], depth: int, effort: _Reading) -> set[object] | frozenset[object]:
    elements = [_decode_hashable(item, depth + 1, effort) for item in body]
    decoded = effort.fill(set[object](), elements, elements)
    if len(decoded) != len(body):
        raise BadValue("a set has two equal elements")
    written = [_canonical(item) for item in body]
    if written != sorted(written):
        raise BadValue("the elements of a set are not in order")
    return decoded if tag == "set" else frozenset(decoded)


def _decode_hashable(json: object, depth: int, effort: _Reading) -> Hashable:
    decoded = _decode(json, depth, effort)
    try:
        hash(decoded)
    except TypeError:
        raise BadValue("a key or an element of a set is not hashable") from None
    return decoded


def _decode_str(body: object) -> str:
    if type(body) is not str or not _is_unicode(body):
        raise BadValue("a string is missing or not valid Unicode")
    return body


def _decode_int(body: object) -> int:
    if type(body) is not str or _HEX_INTEGER.fullmatch(body) is None:
        raise BadValue("an integer is not written in hexadecimal")
    decoded = int(body, 16)
    if -_EXACT_INTEGERS < decoded < _EXACT_INTEGERS:
        raise BadValue("an integer below 2**53 is written in hexadecimal")
    return decoded


def _decode_float(body: object) -> float:
    if type(body) is not str or body not in ("nan", "inf", "-inf"):
        raise BadValue("a float is neither nan, inf nor -inf")
    return float(body)


def _decode_bytes(body: object) -> bytes:
    try:
        decoded = base64.b64decode(_decode_str(body), validate=True)
    except (binascii.Error, ValueError):
        raise BadValue("bytes are not base64") from None
    if base64.b64encode(decoded).decode("ascii") != body:
        raise BadValue("bytes are not canonical base64")
    return decoded


def _decode_complex(body: object) -> complex:
    parts = [_decode_leaf(part, {"float"}) for part in body] if type(body) is list else []
    if len(parts) != 2 or type(parts[0]) is not float or type(parts[1]) is not float:
        raise BadValue("a complex number is not two floats")
    return complex(parts[0], parts[1])


def _decode_dtype(body: object) -> torch.dtype:
    name = _decode_str(body)
    if name not in DTYPES:
        raise BadValue(f"it names the unknown dtype {name[:80]!r}")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedVersionError(f"torch {torch.__version__} has no dtype {name}; upgrade torch")
    return dtype


def _decode_device(body: object) -> torch.device:
    text = _decode_str(body)
    if _DEVICE.fullmatch(text) is None:
        raise BadValue("it names an impossible device")
    try:
        device = torch.device(text)
    except RuntimeError:
        message = f"torch {torch.__version__} has no device {text!r}; use a torch build that has it"
        raise UnsupportedVersionError(message) from None
    if str(device) != text:
        raise BadValue("it names an impossible device")
    return device


def _decode_size(body: object) -> torch.Size:
    sizes = [_decode_leaf(size, {"int"}) for size in body] if type(body) is list else [None]
    integers = [size for size in sizes if type(size) is int and -(1 << 63) <= size < 1 << 63]
    if len(integers) != len(sizes):
        raise BadValue("a torch.Size is not a list of 64-bit integers")
    return torch.Size(integers)


def _decode_leaf(json: object, tags: set[str]) -> object:
    """The plain value or one of ``tags``: what is part of a leaf does not nest, and does not count as a level."""
    if type(json) is list or (type(json) is dict and not tags.issuperset(json)):
        raise BadValue("a number or a string is missing")
    return _decode(json, 0, _Reading())


def _decode_numpy(body: object) -> np.generic:
    if type(body) is not list or len(body) != 2 or type(body[0]) is not str:
        raise BadValue("a numpy scalar is not a type and a value")
    name, json = body
    scalar = _numpy_scalar(name, _decode_leaf(json, {"int", "float", "complex", "bytes"}))
    if scalar is None or _canonical(_encode_numpy(scalar, ())) != _canonical({"numpy": body}):
        raise BadValue(f"a numpy scalar has an impossible type or value: {name[:80]!r}")
    return scalar


def _numpy_scalar(name: str, item: object) -> np.generic | None:
    scalar: np.generic | None = None
    if name == "bool" and type(item) is bool:
        scalar = np.bool_(item)
    elif name == "str" and type(item) is str:
        scalar = np.str_(item)
    elif name == "bytes" and type(item) is bytes:
        scalar = np.bytes_(item)
    elif name in _NUMPY_INTEGERS and type(item) is int:
        limits = np.iinfo(_NUMPY_INTEGERS[name])
        scalar = _NUMPY_INTEGERS[name](item) if limits.min <= item <= limits.max else None
    # What does not fit becomes infinite here, and so differs from what was written.
    with np.errstate(all="ignore"):
        if name in _NUMPY_FLOATS and type(item) is float:
            scalar = _NUMPY_FLOATS[name](item)
        elif name in _NUMPY_COMPLEX and type(item) is complex:
            scalar = _NUMPY_COMPLEX[name](item)
    return scalar


_LEAVES: dict[str, Callable[[object], object]] = {
    "int": _decode_int,
    "float": _decode_float,
    "bytes": _decode_bytes,
    "complex": _decode_complex,
    "torch.dtype": _decode_dtype,
    "torch.device": _decode_device,
    "torch.Size": _decode_size,
    "numpy": _decode_numpy,
}


def _is_unicode(text: str) -> bool:
    """Whether ``text`` can be written as UTF-8: it has no lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
