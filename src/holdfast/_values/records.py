"""What a checkpoint keeps of a class: a Record of the name and the fields of an instance, or an empty container.

A Record becomes an instance again only of a class that the program itself hands over: a file names classes, and nothing
is ever imported for a name. Dataclasses and named tuples are made of their fields, without their ``__init__``.
"""

from __future__ import annotations

import dataclasses
import enum
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast

from holdfast.errors import Difference, InvalidStateError, MismatchError

KINDS = frozenset({"dataclass", "enum", "namedtuple", "registered", "torch.Generator"})

KEPT = frozenset({OrderedDict, defaultdict, Counter, deque, Namespace})
"""Classes of containers that come back as such; all other mappings come back as dicts."""

FACTORIES: tuple[type | None, ...] = (None, list, dict, set, int, float)
"""What a defaultdict may make for a missing key, to come back as such."""

_T = TypeVar("_T")
_ADVICE = "Give the class the fields that were saved, or load without it to get a holdfast.Record."


@dataclass(frozen=True, slots=True, repr=False)
class Record:
    """What a checkpoint has of an instance whose class is not at hand: its kind, the name of its class, its fields.

    ``kind`` is one of ``dataclass``, ``enum``, ``namedtuple``, ``registered`` (see ``register_type``) and
    ``torch.Generator``. A Record can be saved again, as what it was.
    """

    kind: str
    name: str
    items: tuple[tuple[str, object], ...]

    @property
    def fields(self) -> dict[str, object]:
        """The fields by name, in order."""
        return dict(self.items)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.items)
        return f"Record({self.kind} {self.name}: {shown})"


class NotStorable(Exception):
    """Why an instance has no Record."""


@dataclass(frozen=True, slots=True)
class _Registration:
    cls: type
    name: str
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


REGISTERED: dict[type, _Registration] = {}
_BY_NAME: dict[str, _Registration] = {}


def checked_types(types: object) -> Collection[type]:
    """``types``; ValueError for what is no list of classes."""
    if not isinstance(types, Collection) or not all(isinstance(each, type) for each in types):
        raise ValueError(f"types is a list of classes, not {types!r}")
    return types


def register_type(
    cls: type[_T], *, encode: Callable[[_T], object], decode: Callable[[Any], _T], name: str | None = None
) -> None:
    """From now on, store instances of just ``cls`` as what ``encode`` makes of them; loading gives that to ``decode``.

    ``encode`` returns a value that a checkpoint can hold. ``name`` stands in the checkpoint, by default that of the
    class with its module. Where nothing is registered under it, loading gives a ``holdfast.Record``. Registering a
    class again, or one that was defined again, replaces what was. A name belongs to one class.
    """
    if not isinstance(cls, type) or cls.__module__ == "builtins":
        raise ValueError(f"register_type takes a class of your own, not {cls!r}")
    registration = _Registration(cls, name or class_name(cls), encode, decode)
    holder = _BY_NAME.get(registration.name)
    if holder is not None and class_name(holder.cls) != class_name(cls):
        raise ValueError(f"the name {registration.name!r} is registered for {class_name(holder.cls)}; choose another")
    for old in (REGISTERED.pop(cls, None), _BY_NAME.pop(registration.name, None)):
        if old is not None:
            REGISTERED.pop(old.cls, None)
            _BY_NAME.pop(old.name, None)
    REGISTERED[cls] = _BY_NAME[registration.name] = registration


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def record_of(value: object) -> Record | None:
    """What is stored of an instance; None where its class is none of those that are stored so, or NotStorable."""
    cls = type(value)
    if isinstance(value, Record):
        return value
    if cls in REGISTERED:
        registration = REGISTERED[cls]
        try:
            return Record("registered", registration.name, (("value", registration.encode(value)),))
        except Exception as error:
            raise NotStorable(f"encode of the registered type {registration.name!r} failed: {error!r}") from error
    if isinstance(value, enum.Enum):
        name = value.name if value.name in cls.__members__ else None  # type: ignore[attr-defined]
        return Record("enum", class_name(cls), (("name", name), ("value", value.value)))
    names = field_names(cls)
    if names is None:
        return None
    kind = _kind_of(value)
    if kind == "dataclass" and cls.__new__ is not object.__new__:
        raise NotStorable(f"the dataclass {class_name(cls)} makes its instances in its own way; use register_type")
    for name in getattr(value, "__dict__", {}).keys() - (names if kind == "dataclass" else {}).keys():
        if not isinstance(getattr(cls, name, None), cached_property):
            raise NotStorable(f"it has the attribute {name!r}, no field of {class_name(cls)}; use register_type")
    missing = [name for name in names if not hasattr(value, name)]
    if missing:
        raise NotStorable(f"its field {missing[0]!r} of {class_name(cls)} has no value; set it")
    return record_like(value, {name: getattr(value, name) for name in names})


def field_names(cls: type) -> dict[str, None] | None:
    """The fields of a dataclass or of a named tuple, in order; None for another class."""
    if dataclasses.is_dataclass(cls) and cls is not Record:
        return dict.fromkeys(field.name for field in dataclasses.fields(cls))
    named = getattr(cls, "_fields", None)
    return dict.fromkeys(named) if issubclass(cls, tuple) and isinstance(named, tuple) else None


def parts_of(value: object) -> dict[str, object] | None:
    """The fields of a dataclass or a named tuple, or of a Record of one, by name; None for all else."""
    if isinstance(value, Record):
        return value.fields if value.kind in ("dataclass", "namedtuple") else None
    names = None if isinstance(value, enum.Enum) or type(value) in REGISTERED else field_names(type(value))
    return None if names is None else {name: getattr(value, name, None) for name in names}


def fields_by_step(value: object) -> dict[str | int, str]:
    """The names of the same fields, by the step of a path that leads to each: its position, or the name itself."""
    names = parts_of(value) or {}
    return dict(enumerate(names)) if _kind_of(value) == "namedtuple" else {name: name for name in names}


def _kind_of(value: object) -> str:
    return value.kind if isinstance(value, Record) else "namedtuple" if isinstance(value, tuple) else "dataclass"


def with_parts(value: object, parts: Mapping[str, object]) -> object:
    """A new instance of the class of ``value``, with these fields; a Record for a Record, or if fields are missing."""
    if isinstance(value, Record) or parts.keys() != (parts_of(value) or {}).keys():
        return record_like(value, parts)
    return _made(type(value), parts)


def record_like(value: object, parts: Mapping[str, object]) -> Record:
    """A Record of the class of ``value``, which may be one, with these fields."""
    name = value.name if isinstance(value, Record) else class_name(type(value))
    return Record(_kind_of(value), name, tuple(parts.items()))


def _made(cls: type, parts: Mapping[str, object]) -> object:
    if issubclass(cls, tuple):
        return tuple.__new__(cast("type[tuple[object, ...]]", cls), parts.values())
    made = object.__new__(cls)
    for name, part in parts.items():
        object.__setattr__(made, name, part)
    return made


def odd_names(names: Iterable[object]) -> list[str]:
    """Those that no attribute of a Namespace should have."""
    return [str(name)[:80] for name in names if type(name) is not str or name.startswith("__")]


def emptied(value: object) -> Any:
    """An empty container of the class of ``value``, one of those that are kept; of an instance, a Record of Nones."""
    if parts := parts_of(value):
        return record_like(value, dict.fromkeys(parts))
    if isinstance(value, deque):
        return deque(maxlen=value.maxlen)
    return defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()


def refilled(made: Any, entries: Mapping[Any, object] | Iterable[object]) -> Any:
    """``made``, an empty container of a class that is kept, with ``entries``."""
    if not isinstance(entries, Mapping):
        made.extend(entries)
        return made
    mapping = vars(made) if isinstance(made, Namespace) else made
    for key, entry in entries.items():
        mapping[key] = entry
    return made


def classes_in(value: object) -> Iterator[type]:
    """The classes of all instances in ``value`` that would be stored as Records."""
    if isinstance(value, enum.Enum) or type(value) in REGISTERED:
        yield type(value)
        return
    parts: Iterable[object] = ()
    names = field_names(type(value))
    if names is not None:
        yield type(value)
        parts = [getattr(value, name, None) for name in names]
    elif isinstance(value, (Mapping, Namespace)):
        entries = vars(value) if isinstance(value, Namespace) else value
        parts = (part for pair in entries.items() for part in pair)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        parts = value
    for part in parts:
        yield from classes_in(part)


def rebuilt(record: Record, classes: Iterable[type] = (), *, key: str = "") -> object:
    """The instance that ``record`` was, of a registered class or of one of ``classes``; the record itself if of none.

    MismatchError, with ``key``, where the class has other fields or members now.
    """
    if record.kind == "registered":
        try:
            return _BY_NAME[record.name].decode(record.fields["value"]) if record.name in _BY_NAME else record
        except Exception as error:
            said = f"{key[:200]!r}: decode of the registered type {record.name[:200]!r} failed: {error!r}; fix it"
            raise InvalidStateError(said, key=key) from error
    cls = next((each for each in classes if _is_meant(each, record)), None)
    if cls is None:
        return record
    if issubclass(cls, enum.Enum):
        return _member(cls, record, key)
    wanted = Record(record.kind, record.name, tuple((name, None) for name in field_names(cls) or ()))
    if difference := class_difference(record, wanted, key):
        raise MismatchError.of([difference], advice=_ADVICE)
    return _made(cls, record.fields)


def class_difference(stored: object, wanted: object, key: str) -> Difference | None:
    """How the Record of an instance in the target differs, in class or in fields, from the one that is stored."""
    if not isinstance(stored, Record) or not isinstance(wanted, Record):
        return None
    if not _is_same_class(stored, wanted):
        return Difference(key=key, kind="type", stored=stored.name, wanted=wanted.name)
    mine, its = list(wanted.fields), list(stored.fields)
    if mine == its if stored.kind == "namedtuple" else set(mine) == set(its):
        return None
    return Difference(key=key, kind="fields", stored=", ".join(its), wanted=", ".join(mine))


def _member(cls: type[enum.Enum], record: Record, key: str) -> object:
    """The member of that name; of a flag, which may be several members at once, that of the value."""
    name, value = record.fields["name"], record.fields["value"]
    try:
        member = cls(value) if issubclass(cls, enum.Flag) else cls[str(name)]
    except (KeyError, ValueError):
        member = None
    if member is None or member.value != value:
        wanted = "no such member" if member is None else repr(member.value)
        stored = f"{name} of {record.name} = {value!r}"
        raise MismatchError.of([Difference(key=key, kind="member", stored=stored, wanted=wanted)], advice=_ADVICE)
    return member


def _is_meant(cls: type, record: Record) -> bool:
    kind = "enum" if issubclass(cls, enum.Enum) else "namedtuple" if issubclass(cls, tuple) else "dataclass"
    has_form = kind == "enum" or field_names(cls) is not None
    return has_form and _is_same_class(record, Record(kind, class_name(cls), ()))


def _is_same_class(record: Record, other: Record) -> bool:
    """Whether both are of one class; a script is ``__main__`` in one run and a module in another."""
    names = record.name, other.name
    tails = [name.removeprefix("__main__") for name in names if name.startswith("__main__.")]
    is_same = len({*names}) == 1 or any(all(name.endswith(tail) for name in names) for tail in tails)
    return record.kind == other.kind and is_same
