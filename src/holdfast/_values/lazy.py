"""A list and a dict whose elements are made from columns only when somebody looks at them.

Plans, chunks and write reports live as numpy columns; the protocol speaks of lists of objects. ``LazyList`` is both:
code of this library takes ``columns`` while nobody has touched the elements, everyone else sees a list. Once touched,
the objects are the truth (so that mutations count) and ``columns`` is None. A ``LazyDict`` makes its values one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, KeysView, MutableMapping, MutableSequence
from typing import Any, Generic, Protocol, TypeVar, overload

from holdfast._values.shown import few

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Columns(Protocol[T_co]):
    """A table that can make the object of each of its rows."""

    def __len__(self) -> int: ...

    def item(self, row: int) -> T_co:
        """The object that stands for ``row``."""
        ...


class cached_property(Generic[T]):
    """A property that is found out once; before 3.12 that of functools has a lock, which a fork may catch shut."""

    def __init__(self, find: Callable[[Any], T]) -> None:
        self._find = find
        self.__doc__ = find.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> T | cached_property[T]:
        if instance is None:
            return self
        found = instance.__dict__[self._find.__name__] = self._find(instance)
        return found


class LazyList(MutableSequence[T], Generic[T]):
    """A list over ``columns``, or those that ``make`` makes when asked for; objects are made at the first touch."""

    __slots__ = ("_columns", "_items", "make")

    def __init__(self, columns: Columns[T] | None, *, make: Callable[[], Columns[T]] | None = None) -> None:
        self._columns = columns
        self._items: list[T] = []
        self.make = make

    @property
    def columns(self) -> Columns[T] | None:
        """The columns, or None once an element was touched."""
        if self.make is not None:
            make, self.make = self.make, None
            self._columns = make()
        return self._columns

    def _touched(self) -> list[T]:
        columns = self.columns
        if columns is not None:
            self._columns = None
            self._items = [columns.item(row) for row in range(len(columns))]
        return self._items

    def __len__(self) -> int:
        columns = self.columns
        return len(self._items) if columns is None else len(columns)

    def __iter__(self) -> Iterator[T]:
        return iter(self._touched())

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self._touched()[index]

    @overload
    def __setitem__(self, index: int, value: T) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[T]) -> None: ...
    def __setitem__(self, index: int | slice, value: T | Iterable[T]) -> None:
        self._touched()[index] = value  # type: ignore[index, assignment]

    def __delitem__(self, index: int | slice) -> None:
        del self._touched()[index]

    def insert(self, index: int, value: T) -> None:
        self._touched().insert(index, value)

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self._touched(), *other]

    def __radd__(self, other: Iterable[T]) -> list[T]:
        return [*other, *self._touched()]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (LazyList, list)):
            return self._touched() == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        columns = self.columns
        return few(self._items if columns is None else map(columns.item, range(len(columns))), len(self), "[]")

    def __getstate__(self) -> tuple[Columns[T] | None, list[T]]:
        return self.columns, self._items

    def __setstate__(self, state: tuple[Columns[T] | None, list[T]]) -> None:
        self._columns, self._items = state
        self.make = None


class LazyDict(MutableMapping[str, T]):
    """A dict whose value for the n-th of ``keys`` is made from row n of ``columns`` when it is first asked for."""

    __slots__ = ("_count", "_made", "_rows", "source")

    def __init__(self, keys: Iterable[str], columns: Columns[T]) -> None:
        self.source = columns
        self._rows: dict[str, int] = dict(zip(keys, itertools.count()))
        self._count = len(self._rows)
        self._made: dict[str, T] = {}

    @property
    def is_untouched(self) -> bool:
        """Whether no value was looked at or set, and no key removed."""
        return not self._made and len(self._rows) == self._count

    def __getitem__(self, key: str) -> T:
        if key not in self._made:
            self._made[key] = self.source.item(self._rows[key])
        return self._made[key]

    def __setitem__(self, key: str, value: T) -> None:
        self._rows.setdefault(key, -1)
        self._made[key] = value

    def __delitem__(self, key: str) -> None:
        del self._rows[key]
        self._made.pop(key, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def keys(self) -> KeysView[str]:
        return self._rows.keys()

    def __repr__(self) -> str:
        return few(self, len(self), "{}")
