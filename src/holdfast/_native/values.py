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
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch

from holdfast._state.nested import check_containers
from holdfast._values.deadline import Effort, TooMuchEffort
from holdfast._values.dtypes import DTYPES, MAX_VALUE_DEPTH
from holdfast.errors import CorruptError, InvalidStateError, UnsupportedVersionError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

# Where inside a value we are; its length is the depth.
_Trail: TypeAlias = tuple[object, ...]

_EXACT_INTEGERS = 1 << 53  # From here on other JSON readers round.
_HEX_INTEGER = re.compile(r"-?0x[1-9a-f][0-9a-f]*")
_DEVICE = re.compile(r"[a-z][a-z0-9_]{0,31}(?::(?:0|[1-9][0-9]{0,2}))?")

_NUMPY_INTEGERS: dict[str, type[np.integer]] = {
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
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


class _Refused(Exception):
    """What is wrong with a value, and where inside it; never leaves this module."""

    def __init__(self, problem: str, trail: _Trail = ()) -> None:
        super().__init__(problem)
        self.problem = problem
        self.place = "".join(f"[{_shown(label)}]" for label in trail[:8])[:200]


def _shown(label: object) -> str:
    """A key or index as a message shows it: others than these may be long, or fail to print."""
    if type(label) is str or (type(label) is int and abs(label) < _EXACT_INTEGERS):
        return repr(label)
    return type(label).__name__


def encode_value(value: object, *, key: str) -> Json:
    """The typed JSON of ``value``; InvalidStateError names ``key``, the place inside it and the type that has none."""
    check_containers(value, within=key)
    try:
        return _encode(value, ())
    except _Refused as refused:
        where = f"{key[:200]!r}" + (f" at {refused.place}" if refused.place else "")
        raise InvalidStateError(f"the value of {where} cannot be saved: {refused.problem}", key=key) from None


def decode_value(json: object, *, key: str) -> object:
    """The value whose typed JSON is ``json``; CorruptError when ``encode_value`` makes no such JSON.

    UnsupportedVersionError when it names a device type or dtype that the running torch does not have.
    """
    try:
        return _decode(json, _Place(0, Effort()))
    except (_Refused, TooMuchEffort) as refused:
        message = f"the value of {key[:200]!r} is damaged: {refused}; use another checkpoint"
        raise CorruptError(message, key=key) from None


def encode_value_bytes(value: object, *, key: str) -> bytes:
    """The typed JSON of ``value`` as text, for a value that is stored like a tensor."""
    return _canonical(encode_value(value, key=key))


def decode_value_bytes(data: bytes | bytearray | memoryview, *, key: str) -> object:
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
    return decode_value(json, key=key)


# --- encoding -------------------------------------------------------------------------------------------------------


def _encode(value: object, trail: _Trail) -> Json:
    encode = _ENCODERS.get(type(value))
    if encode is None:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise _Refused(f"{kind} is not a type that a checkpoint holds; convert it or leave it out", trail)
    if len(trail) > MAX_VALUE_DEPTH:
        raise _Refused(f"it nests deeper than {MAX_VALUE_DEPTH} levels; flatten it", trail)
    return encode(value, trail)


def _encode_as_is(value: bool | None, trail: _Trail) -> Json:
    return value


def _encode_str(value: str, trail: _Trail) -> Json:
    if not _is_unicode(value):
        raise _Refused("the string has lone surrogates; save it as bytes", trail)
    return value


def _encode_int(value: int, trail: _Trail) -> Json:
    return value if -_EXACT_INTEGERS < value < _EXACT_INTEGERS else {"int": hex(value)}


def _encode_float(value: float, trail: _Trail) -> Json:
    return value if math.isfinite(value) else {"float": str(value)}


def _encode_items(values: Iterable[object], trail: _Trail) -> list[Json]:
    return [_encode(item, (*trail, index)) for index, item in enumerate(values)]


def _encode_tuple(value: tuple[object, ...], trail: _Trail) -> Json:
    return {"tuple": _encode_items(value, trail)}


def _encode_dict(value: dict[object, object], trail: _Trail) -> Json:
    return {"dict": [[_encode(name, (*trail, name)), _encode(item, (*trail, name))] for name, item in value.items()]}


def _encode_set(value: set[object] | frozenset[object], trail: _Trail) -> Json:
    items = [_encode(item, (*trail, item)) for item in value]
    return {type(value).__name__: sorted(items, key=_canonical)}


def _encode_bytes(value: bytes, trail: _Trail) -> Json:
    return {"bytes": base64.b64encode(value).decode("ascii")}


def _encode_complex(value: complex, trail: _Trail) -> Json:
    return {"complex": [_encode_float(value.real, trail), _encode_float(value.imag, trail)]}


def _encode_dtype(value: torch.dtype, trail: _Trail) -> Json:
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise _Refused(f"{value} is not a dtype that a checkpoint holds; save its name", trail)
    return {"torch.dtype": name}


def _encode_device(value: torch.device, trail: _Trail) -> Json:
    text = str(value)
    if _DEVICE.fullmatch(text) is None:
        raise _Refused(f"{text} is not a device that a checkpoint holds; save its name", trail)
    return {"torch.device": text}


def _encode_size(value: torch.Size, trail: _Trail) -> Json:
    if any(type(size) is not int for size in value):
        raise _Refused("the torch.Size has symbolic sizes; make them int", trail)
    return {"torch.Size": [_encode_int(size, trail) for size in value]}


def _encode_numpy(value: np.generic, trail: _Trail) -> Json:
    name = _NUMPY_NAMES[type(value)]
    if isinstance(value, np.str_):
        # str(value) and value.item() would drop trailing NULs.
        return {"numpy": [name, _encode_str(str.__str__(value), trail)]}
    if isinstance(value, np.bytes_):
        return {"numpy": [name, _encode_bytes(bytes(value), trail)]}
    return {"numpy": [name, _encode(value.item(), trail)]}


_ENCODERS: dict[type, Callable[..., Json]] = {
    type(None): _encode_as_is,
    bool: _encode_as_is,
    str: _encode_str,
    int: _encode_int,
    float: _encode_float,
    list: _encode_items,
    tuple: _encode_tuple,
    dict: _encode_dict,
    set: _encode_set,
    frozenset: _encode_set,
    bytes: _encode_bytes,
    complex: _encode_complex,
    torch.dtype: _encode_dtype,
    torch.device: _encode_device,
    torch.Size: _encode_size,
    **dict.fromkeys(_NUMPY_NAMES, _encode_numpy),
}


# --- decoding -------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """How deep inside a value we are, and what its keys may still take."""

    depth: int
    effort: Effort


def _inside(place: _Place) -> _Place:
    return _Place(place.depth + 1, place.effort)


def _decode(json: object, place: _Place) -> object:
    if place.depth > MAX_VALUE_DEPTH:
        raise _Refused(f"it nests deeper than {MAX_VALUE_DEPTH} levels")
    if json is None or type(json) is bool:
        return json
    if type(json) is str:
        return _decode_str(json)
    if type(json) is int:
        if not -_EXACT_INTEGERS < json < _EXACT_INTEGERS:
            raise _Refused("an integer of 2**53 or more is not written in hexadecimal")
        return json
    if type(json) is float:
        if not math.isfinite(json):
            raise _Refused("a float that is not finite is not written as such")
        return json
    if type(json) is list:
        return _decode_items(json, place)
    if type(json) is dict and len(json) == 1:
        [(tag, body)] = json.items()
        decode = _DECODERS.get(tag)
        if decode is not None:
            return decode(body, place)
        raise _Refused(f"it has the unknown type {str(tag)[:80]!r}")
    raise _Refused("an object has not exactly one member")


def _decode_items(body: object, place: _Place) -> list[object]:
    if type(body) is not list:
        raise _Refused("a list is missing")
    inside = _inside(place)
    return [_decode(item, inside) for item in body]


def _decode_str(body: object) -> str:
    if type(body) is not str or not _is_unicode(body):
        raise _Refused("a string is missing or not valid Unicode")
    return body


def _decode_tuple(body: object, place: _Place) -> tuple[object, ...]:
    return tuple(_decode_items(body, place))


def _decode_dict(body: object, place: _Place) -> dict[object, object]:
    if type(body) is not list or any(type(pair) is not list or len(pair) != 2 for pair in body):
        raise _Refused("a dict is not a list of pairs")
    inside = _inside(place)
    pairs = [(_decode_hashable(name, inside), _decode(item, inside)) for name, item in body]
    decoded = place.effort.fill(dict[object, object](), pairs, (name for name, _ in pairs))
    if len(decoded) != len(pairs):
        raise _Refused("a dict has two equal keys")
    return decoded


def _decode_frozenset(body: object, place: _Place) -> frozenset[object]:
    if type(body) is not list:
        raise _Refused("the elements of a set are missing")
    inside = _inside(place)
    elements = [_decode_hashable(item, inside) for item in body]
    decoded = frozenset(place.effort.fill(set[object](), elements, elements))
    if len(decoded) != len(body):
        raise _Refused("a set has two equal elements")
    written = [_canonical(item) for item in body]
    if written != sorted(written):
        raise _Refused("the elements of a set are not in order")
    return decoded


def _decode_set(body: object, place: _Place) -> set[object]:
    return set(_decode_frozenset(body, place))


def _decode_hashable(json: object, place: _Place) -> Hashable:
    decoded = _decode(json, place)
    try:
        hash(decoded)
    except TypeError:
        raise _Refused("a key or an element of a set is not hashable") from None
    return decoded


def _decode_int(body: object, place: _Place) -> int:
    if type(body) is not str or _HEX_INTEGER.fullmatch(body) is None:
        raise _Refused("an integer is not written in hexadecimal")
    decoded = int(body, 16)
    if -_EXACT_INTEGERS < decoded < _EXACT_INTEGERS:
        raise _Refused("an integer below 2**53 is written in hexadecimal")
    return decoded


def _decode_float(body: object, place: _Place) -> float:
    if type(body) is not str or body not in ("nan", "inf", "-inf"):
        raise _Refused("a float is neither nan, inf nor -inf")
    return float(body)


def _decode_bytes(body: object, place: _Place) -> bytes:
    try:
        decoded = base64.b64decode(_decode_str(body), validate=True)
    except (binascii.Error, ValueError):
        raise _Refused("bytes are not base64") from None
    if base64.b64encode(decoded).decode("ascii") != body:
        raise _Refused("bytes are not canonical base64")
    return decoded


def _decode_complex(body: object, place: _Place) -> complex:
    parts = [_decode_leaf(part, {"float"}) for part in body] if type(body) is list else []
    if len(parts) != 2 or type(parts[0]) is not float or type(parts[1]) is not float:
        raise _Refused("a complex number is not two floats")
    return complex(parts[0], parts[1])


def _decode_dtype(body: object, place: _Place) -> torch.dtype:
    name = _decode_str(body)
    if name not in DTYPES:
        raise _Refused(f"it names the unknown dtype {name[:80]!r}")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedVersionError(f"torch {torch.__version__} has no dtype {name}; upgrade torch")
    return dtype


def _decode_device(body: object, place: _Place) -> torch.device:
    text = _decode_str(body)
    if _DEVICE.fullmatch(text) is None:
        raise _Refused("it names an impossible device")
    try:
        device = torch.device(text)
    except RuntimeError:
        message = f"torch {torch.__version__} has no device {text!r}; use a torch build that has it"
        raise UnsupportedVersionError(message) from None
    if str(device) != text:
        raise _Refused("it names an impossible device")
    return device


def _decode_size(body: object, place: _Place) -> torch.Size:
    if type(body) is not list:
        raise _Refused("the sizes of a torch.Size are missing")
    sizes = [_decode_leaf(size, {"int"}) for size in body]
    integers = [size for size in sizes if type(size) is int and -(1 << 63) <= size < 1 << 63]
    if len(integers) != len(sizes):
        raise _Refused("a torch.Size is not a list of 64-bit integers")
    return torch.Size(integers)


def _decode_leaf(json: object, tags: set[str]) -> object:
    """The plain value or one of ``tags``: what is part of a leaf does not nest, and does not count as a level."""
    if type(json) is list or (type(json) is dict and not tags.issuperset(json)):
        raise _Refused("a number or a string is missing")
    return _decode(json, _Place(0, Effort()))


def _decode_numpy(body: object, place: _Place) -> np.generic:
    if type(body) is not list or len(body) != 2 or type(body[0]) is not str:
        raise _Refused("a numpy scalar is not a type and a value")
    name, json = body
    scalar = _numpy_scalar(name, _decode_leaf(json, {"int", "float", "complex", "bytes"}))
    if scalar is None or _canonical(_encode_numpy(scalar, ())) != _canonical({"numpy": body}):
        raise _Refused(f"a numpy scalar has an impossible type or value: {name[:80]!r}")
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


_DECODERS: dict[str, Callable[[object, _Place], object]] = {
    "tuple": _decode_tuple,
    "dict": _decode_dict,
    "set": _decode_set,
    "frozenset": _decode_frozenset,
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
