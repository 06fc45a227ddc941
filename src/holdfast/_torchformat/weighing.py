"""What torch.save wrote, gone through before torch.load: would telling its keys apart take for ever?

Nothing is built but tables, to watch how long their keys take, and tuples that know their hash and size: one that
refers to the one before twice, and so on, would be hashed for ever. All else that is wrong is for torch.load to tell.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from holdfast._values.effort import KEY_S, Effort, TooMuchEffort
from holdfast.errors import CorruptError

_LARGEST_KEY = 1000
_NAME_LENGTHS = 26  # Where the header of a record tells how long its name and its extra fields are.
_LEGACY_PICKLES = 5  # A number, a version, a description of the machine, the state, the names of its storages.


def weigh(stream: io.IOBase, *, what: str) -> None:
    """CorruptError when torch.load would take for ever over ``stream``, whose position stays; ``what`` names it."""
    start = stream.tell()
    try:
        for pickled in _pickles(stream, what):
            _Weighing(pickled, encoding="bytes").load()
    except TooMuchEffort as error:
        raise CorruptError(f"{what} is damaged: {error}; use another one") from None
    except zipfile.BadZipFile as error:
        raise CorruptError(f"{what} is a damaged archive: {error}; use another one") from error
    except CorruptError:
        raise
    except Exception:
        return  # torch.load comes no further than this, and says why
    finally:
        stream.seek(start)


def _pickles(stream: Any, what: str) -> Iterator[Any]:
    """The pickles in an archive, or in a file of the time before torch 1.6, which begins with them."""
    start = stream.tell()
    is_archive = stream.read(4) == b"PK\x03\x04"
    stream.seek(start)
    if not is_archive:
        yield from [stream] * _LEGACY_PICKLES
        return
    if not zipfile.is_zipfile(stream):
        return  # for torch.load neither
    with zipfile.ZipFile(stream) as archive:
        records = [record for record in archive.infolist() if record.filename.endswith("data.pkl")]
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED:
            raise CorruptError(f"{what} has compressed records, which torch.save never writes")
        # Not by zipfile, which insists on a checksum that torch.load does not look at.
        stream.seek(record.header_offset + _NAME_LENGTHS)
        stream.seek(sum(struct.unpack("<HH", stream.read(4))), os.SEEK_CUR)
        yield io.BytesIO(stream.read(record.file_size))


class _Tuple:
    """A tuple, or what is hashed like one."""

    __slots__ = ("_hash", "_items", "size")
    size: int

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = list(items)
        self.size = 1 + sum(item.size if type(item) is _Tuple else 1 for item in self._items)
        try:
            self._hash: int | None = hash(tuple(self._items))
        except TypeError:
            self._hash = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __hash__(self) -> int:
        if self._hash is None:
            raise TypeError("unhashable")
        return self._hash

    def __eq__(self, other: object) -> bool:
        return type(other) is _Tuple and self._items == other._items


class _Table(dict[Any, Any]):
    """A dict, or what has keys like one: TooMuchEffort when these take too long."""

    def __init__(self, keys: Iterable[Any] = ()) -> None:
        super().__init__()
        self._effort = Effort()
        for key in keys:
            self[key] = None

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) is _Tuple and key.size > _LARGEST_KEY:
            raise TooMuchEffort
        self._effort.begin()
        super().__setitem__(key, value)
        self._effort.count(KEY_S)

    def __setstate__(self, state: Any) -> None:
        """Attributes have no keys of interest."""


class _Thing:
    """What a pickle calls for by name, and what comes of calling that."""

    def __new__(cls, *arguments: Any) -> _Thing:
        return super().__new__(cls)

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


_NAMED = {
    "builtins.complex": complex,
    "builtins.set": _Table,
    "collections.Counter": _Table,
    "collections.OrderedDict": lambda pairs=(): _Table(next(iter(pair)) for pair in pairs),
    "torch.Size": _Tuple,
}


def _new_tuple(count: int | None) -> Any:
    """TUPLE, for which what it holds is marked, or TUPLE1 to TUPLE3."""

    def make(self: Any) -> None:
        items = self.pop_mark() if count is None else [self.stack.pop() for _ in range(count)][::-1]
        self.append(_Tuple(items))

    return make


class _Weighing(pickle._Unpickler):
    """Python's own unpickler, with its own idea of tuples, dicts and names."""

    dispatch: ClassVar[Any] = {
        **pickle._Unpickler.dispatch,
        pickle.PROTO[0]: lambda self: self.read(1),  # torch.load takes every version
        pickle.EMPTY_DICT[0]: lambda self: self.append(_Table()),
        pickle.EMPTY_TUPLE[0]: _new_tuple(0),
        pickle.TUPLE[0]: _new_tuple(None),
        pickle.TUPLE1[0]: _new_tuple(1),
        pickle.TUPLE2[0]: _new_tuple(2),
        pickle.TUPLE3[0]: _new_tuple(3),
    }

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name."""
        return _NAMED.get(f"{module}.{name}", _Thing)

    def persistent_load(self, pid: Any) -> Any:
        """What stands for a storage."""
        return _Thing()
