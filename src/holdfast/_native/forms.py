"""Typed JSON of types that are rarer in a state than numbers and lists: times, paths, containers, classes, and so on.

``values.py`` hands over what it does not know itself, and how parts are encoded and decoded. Each value has one form:
what was decoded is encoded again and compared. Nothing here runs code from a file or imports what a file names.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import decimal
import io
import os
import pathlib
import re
import sys
import uuid
import zoneinfo
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import msgspec
import torch

from holdfast._io import posix
from holdfast._values.records import (
    FACTORIES,
    KEPT,
    KINDS,
    NotStorable,
    Record,
    class_name,
    odd_names,
    record_of,
    refilled,
)
from holdfast.errors import CorruptError, UnsupportedVersionError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Trail: TypeAlias = tuple[object, ...]
"""Where inside a value we are; its length is the depth."""

Encode: TypeAlias = Callable[[object, Trail], Json]
EncodeLeaf: TypeAlias = Callable[[object], Json]
DecodeLeaf: TypeAlias = Callable[[object, set[str]], Any]
"""Decodes what is part of a leaf: a plain value, or one of these types."""

Decode: TypeAlias = Callable[[object], object]
DecodePairs: TypeAlias = Callable[[list[object]], dict[object, object]]

_LONGEST = 1 << 16  # No honest number, time or path is written with so many characters.
_ZONE = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")
_EXACT = decimal.Context(capitals=1)
_canonical = msgspec.json.Encoder().encode

_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")


class BadValue(Exception):
    """What is wrong with a value, and where inside it; never leaves the codec."""

    def __init__(self, problem: str, trail: Trail = ()) -> None:
        super().__init__(problem)
        self.problem = problem
        self.trail = trail


class UnknownType(Exception):
    """The name of a type that only a newer version can have written."""


def encode_form(value: object, trail: Trail, encode: Encode) -> Json:
    """The typed JSON of ``value``, whose parts ``encode`` encodes; BadValue where its type has none."""

    def pairs(entries: Iterable[tuple[object, object]]) -> list[Json]:
        return [[encode(part, (*trail, name)) for part in (name, item)] for name, item in entries]

    try:
        record = _of_generator(value) if type(value) is torch.Generator else record_of(value)
        if record is not None:
            return {"record": [record.kind, _short(record.name), pairs(record.items)]}
        if isinstance(value, deque) and type(value) in KEPT:
            return {"deque": [value.maxlen, [encode(item, (*trail, index)) for index, item in enumerate(value)]]}
        if type(value) in KEPT:
            return _encode_mapping(value, pairs)
        if type(value) in _LEAVES:
            tag, write = _LEAVES[type(value)]
            return {tag: write(value, lambda part: encode(part, trail))}
    except NotStorable as fault:
        raise BadValue(str(fault), trail) from None
    advice = "convert it, leave it out, or say how to store it (holdfast.register_type)"
    raise BadValue(f"{class_name(type(value))} is not a type that a checkpoint holds; {advice}", trail)


def _encode_mapping(value: Any, pairs: Callable[[Iterable[tuple[object, object]]], list[Json]]) -> Json:
    if type(value) is Namespace:
        _check_names(vars(value))
        return {"Namespace": pairs(vars(value).items())}
    if type(value) is not defaultdict:
        return {type(value).__name__: pairs(value.items())}
    for factory in FACTORIES:
        if value.default_factory is factory:
            return {"defaultdict": [None if factory is None else factory.__name__, pairs(value.items())]}
    raise NotStorable("its default_factory is none of list, dict, set, int, float and None; use one, or a dict")


def decode_form(
    tag: str, body: Any, decode_leaf: DecodeLeaf, decode: Decode, decode_pairs: DecodePairs, write: Encode
) -> object:
    """The value whose JSON is ``{tag: body}``, a Record for an instance; BadValue or UnknownType for others."""
    try:
        if tag not in _READERS:
            return _decode_container(tag, body, decode, decode_pairs)
        value = _READERS[tag](body, decode_leaf)
        # A path compares its text itself, because not each system can make each kind.
        if tag != "path" and _canonical(write(value, ())) != _canonical({tag: body}):
            raise ValueError
        return value
    except NotStorable as fault:
        raise BadValue(str(fault)) from None
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
        raise BadValue(f"a {tag} is not written as it should be") from None


def _decode_container(tag: str, body: Any, decode: Decode, decode_pairs: DecodePairs) -> object:
    if tag == "record":
        return _decode_record(body, decode_pairs)
    if tag == "deque":
        maxlen, items = body
        if type(items) is not list or not (maxlen is None or (type(maxlen) is int and len(items) <= maxlen < 1 << 53)):
            raise ValueError
        return deque(map(decode, items), maxlen)
    name, pairs = body if tag == "defaultdict" else (None, body)
    if type(pairs) is not list:
        raise ValueError
    entries = decode_pairs(pairs)
    if tag == "defaultdict":
        [factory] = [each for each in FACTORIES if name == (None if each is None else each.__name__)]
        return defaultdict(factory, entries)
    if tag == "Namespace":
        _check_names(entries)
    return refilled({"Namespace": Namespace, "OrderedDict": OrderedDict, "Counter": Counter}[tag](), entries)


def _check_names(names: Any) -> None:
    if odd := odd_names(names):
        raise NotStorable(f"a Namespace has the name {odd[0]!r}; names are text that begins without __")


def _decode_record(body: Any, decode_pairs: DecodePairs) -> Record:
    kind, name, pairs = body
    if type(kind) is not str or type(name) is not str or type(pairs) is not list:
        raise ValueError
    if kind not in KINDS:
        raise UnknownType(f"record of a {kind[:80]}")
    fields = decode_pairs(pairs)
    if any(type(field) is not str for field in fields) or not name:
        raise ValueError
    record = Record(kind, _short(name), tuple(fields.items()))  # type: ignore[arg-type]
    kinds = [type(value) for value in fields.values()]
    fits = {
        "enum": list(fields) == ["name", "value"] and kinds[0] in (str, type(None)),
        "registered": list(fields) == ["value"],
        "torch.Generator": (name, list(fields), kinds) == (kind, ["device", "state"], [torch.device, bytes]),
    }
    if not fits.get(kind, True):
        raise ValueError
    return record


def _of_generator(generator: torch.Generator) -> Record:
    state = generator.get_state().numpy().tobytes()
    return Record("torch.Generator", "torch.Generator", (("device", generator.device), ("state", state)))


def generator_of(record: Record, key: str) -> torch.Generator | Record:
    """A generator in the recorded state; the record itself where this machine has no such device."""
    device, state = record.fields["device"], record.fields["state"]
    assert isinstance(device, torch.device)
    assert isinstance(state, bytes)
    try:
        generator = torch.Generator(device)
    except (RuntimeError, AssertionError):
        return record
    try:
        return generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except (RuntimeError, TypeError, ValueError):
        message = f"the value of {key[:200]!r} is damaged: no state of a torch.Generator; use another checkpoint"
        raise CorruptError(message, key=key) from None


def _short(text: object) -> str:
    if type(text) is not str or len(text) > _LONGEST:
        raise NotStorable(f"it takes more than {_LONGEST} characters, or no text at all")
    text.encode()  # UnicodeEncodeError is a ValueError
    return text


def _write_path(path: pathlib.PurePath, _: object) -> Json:
    try:
        return [type(path).__name__, _short(str(path))]
    except UnicodeEncodeError:
        raise NotStorable("the path has bytes that are no text; save os.fsencode of it") from None


def _read_path(body: Any, _: object) -> pathlib.PurePath:
    name, text = body
    pure: pathlib.PurePath = getattr(pathlib, f"Pure{_PATHS[_PATHS.index(name)].removeprefix('Pure')}")(_short(text))
    if str(pure) != text:
        raise ValueError
    return pathlib.Path(text) if name == type(pathlib.Path()).__name__ else pure


def _write_time(time: datetime.datetime | datetime.time, encode: EncodeLeaf) -> Json:
    zone = time.tzinfo
    if zone is not None and type(zone) not in (datetime.timezone, zoneinfo.ZoneInfo):
        raise NotStorable(f"its time zone is a {type(zone).__name__}; use datetime.timezone or zoneinfo.ZoneInfo")
    return [time.replace(tzinfo=None).isoformat(), time.fold, encode(zone)]


def _read_time(kind: Any, body: Any, decode: DecodeLeaf) -> object:
    text, fold, zone = body
    found = kind.fromisoformat(_short(text))
    if found.tzinfo is not None:
        raise ValueError
    return found.replace(fold=fold, tzinfo=decode(zone, {"timezone", "zoneinfo"}))


def _write_timezone(zone: datetime.timezone, encode: EncodeLeaf) -> Json:
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
    return [encode(offset), *map(_short, name)]


def _write_zoneinfo(zone: zoneinfo.ZoneInfo, _: object) -> Json:
    if zone.key is None or _ZONE.fullmatch(zone.key) is None:
        raise NotStorable("its time zone has no name under which it could be found again; use datetime.timezone")
    return _short(zone.key)


def _read_zoneinfo(body: Any, _: object) -> zoneinfo.ZoneInfo:
    if _ZONE.fullmatch(_short(body)) is None:
        raise ValueError
    # ZoneInfo would import the package tzdata for a name that the system does not have.
    if "tzdata" in sys.modules or any(posix.exists(os.path.join(root, body)) for root in zoneinfo.TZPATH):
        with contextlib.suppress(zoneinfo.ZoneInfoNotFoundError, OSError, ValueError):
            return zoneinfo.ZoneInfo(body)
    message = f"this system does not know the time zone {body[:80]!r}; install its time zones, or import tzdata first"
    raise UnsupportedVersionError(message)


def _write_slice(found: slice, encode: EncodeLeaf) -> Json:
    parts = found.start, found.stop, found.step
    if not all(part is None or type(part) is int for part in parts):
        raise NotStorable("the slice has other parts than int and None; make them int")
    return [encode(part) for part in parts]


def _write_bytes_io(buffer: io.BytesIO, _: object) -> Json:
    if buffer.closed:
        raise NotStorable("the BytesIO is closed; save it while it is open")
    return [base64.b64encode(buffer.getvalue()).decode("ascii"), buffer.tell()]


def _read_bytes_io(body: Any, _: object) -> io.BytesIO:
    text, position = body
    buffer = io.BytesIO(base64.b64decode(text, validate=True))
    if type(position) is not int or not 0 <= position < 1 << 53:
        raise ValueError
    buffer.seek(position)
    return buffer


_LEAVES: dict[type, tuple[str, Callable[[Any, EncodeLeaf], Json]]] = {
    **{kind: ("path", _write_path) for kind in (getattr(pathlib, name) for name in _PATHS)},
    datetime.datetime: ("datetime", _write_time),
    datetime.date: ("date", lambda date, _: date.isoformat()),
    datetime.time: ("time", _write_time),
    datetime.timedelta: ("timedelta", lambda delta, _: [delta.days, delta.seconds, delta.microseconds]),
    datetime.timezone: ("timezone", _write_timezone),
    zoneinfo.ZoneInfo: ("zoneinfo", _write_zoneinfo),
    uuid.UUID: ("uuid", lambda number, _: str(number)),
    decimal.Decimal: ("decimal", lambda number, _: _short(_EXACT.to_sci_string(number))),
    range: ("range", lambda found, encode: [encode(int(part)) for part in (found.start, found.stop, found.step)]),
    slice: ("slice", _write_slice),
    io.BytesIO: ("BytesIO", _write_bytes_io),
}

_READERS: dict[str, Callable[[Any, DecodeLeaf], object]] = {
    "path": _read_path,
    "datetime": partial(_read_time, datetime.datetime),
    "date": lambda body, _: datetime.date.fromisoformat(_short(body)),
    "time": partial(_read_time, datetime.time),
    "timedelta": lambda body, _: datetime.timedelta(*body),
    "timezone": lambda body, decode: datetime.timezone(decode(body[0], {"timedelta"}), *map(_short, body[1:])),
    "zoneinfo": _read_zoneinfo,
    "uuid": lambda body, _: uuid.UUID(_short(body)),
    "decimal": lambda body, _: decimal.Decimal(_short(body)),
    "range": lambda body, decode: range(*(decode(part, {"int"}) for part in body)),
    "slice": lambda body, decode: slice(*(decode(part, {"int"}) for part in body)),
    "BytesIO": _read_bytes_io,
}

FORMS = frozenset({*_READERS, "record", *(kind.__name__ for kind in KEPT)})
"""The names of all types that are here."""
