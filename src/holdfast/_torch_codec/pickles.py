"""Pickles: values as torch.save bytes, ``.pt`` files, and messages between the ranks of one job.

What comes from a file is looked at before anything interprets it. What is decoded here runs no code but the
constructors of harmless stand-ins, which live as long as the one call: a stream can neither reach the program's classes
nor change them. Never imports a module because a stream names it. Opcodes that no writer of torch's files uses are
refused, and so are memo positions beyond the length of the stream, for which the interpreter would allocate any amount
of memory. A tuple is never used twice: a few dozen of them, each made of the one before twice over, would keep the
interpreter busy for ever as soon as they become a key. Dicts are filled by us, who watch how long their keys take, and
sets are refused.

What torch.load is to read is weighed first: only tables are built, to see how long their keys take, and tuples that
know their hash and size. Loading is restricted to what torch calls weights only, unless the caller trusts the
checkpoint with its life.

Messages are plain pickles: plans carry what planners put into them, objects of the user's own classes included. They go
from one process of a job to another, which runs the same program already, and never to or from a file.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from holdfast._io import posix
from holdfast._state.pieces import is_sharded
from holdfast._values.deadline import KEY_S, Effort, TooMuchEffort
from holdfast.errors import CorruptError, InvalidStateError, NotACheckpointError, NotFoundError, UnsafeError, first_line
from holdfast.metadata import STATE_DICT_TYPE

# Train states have buffers in them, as torchtitan's. To make one from its bytes runs no code of a file.
torch.serialization.add_safe_globals([io.BytesIO])

Globals = Callable[[str, str], object]
"""What stands for a module and a name in a stream; raises KeyError for what is not known."""

# Without an argument: constants, lists, dicts, tuples, NEWOBJ, REDUCE, BUILD, MEMOIZE, STACK_GLOBAL, BINPERSID. With
# one of fixed size: small integers and floats, positions in the memo that take one byte or are only read, PROTO. The
# run ends before a tuple (TUPLE, TUPLE1 to TUPLE3) is put into the memo: that one is the second group; or where a dict
# is filled (SETITEM, SETITEMS): the third.
_FIXED = re.compile(
    rb"((?:[\x94()}\]\x88\x89NRbaeQl\x81\x93]|[t\x85-\x87](?![\x94qr])|[Khq\x80].|M..|[Jj].{4}|G.{8})"
    rb"{0,4096})(?:([t\x85-\x87](?=[\x94qr]))|([su]))?",
    re.DOTALL,
)
# A dict is filled by handing it and what goes there to the unpickler: TUPLE3, or TUPLE and TUPLE2, and BINPERSID.
_FILL = {b"s": b"\x87Q", b"u": b"t\x86Q"}
_PUT_BYTES = {0x94: 1, 0x71: 2, 0x72: 5}
_FRAME = 0x95
_FRAME_BYTES = 9
_STOP = 0x2E
# Opcode -> bytes of the length that comes before the data: (SHORT_)BINUNICODE(8), (SHORT_)BINBYTES(8), LONG1.
_COUNTED = {0x8C: 1, 0x58: 4, 0x8D: 8, 0x43: 1, 0x42: 4, 0x8E: 8, 0x8A: 1}
_LONG_BINPUT = 0x72
_GLOBAL_OPCODE = 0x63
_GLOBAL = re.compile(rb"c[\w.]{1,256}\n[\w.]{1,256}\n", re.ASCII)


def check_opcodes(data: bytes, *, what: str) -> bytes:
    """The stream ``data``, harmless to interpret; CorruptError unless it is one pickle of torch's, to its very end.

    Writers keep every tuple in case that it comes again; none of the tuples of torch's files does. What refers to one
    gets an empty list instead, which is neither a key nor anything that metadata is made of. Frames are left out.
    """
    pieces: list[bytes] = []
    position, end = 0, len(data)
    while position < end:
        run = _FIXED.match(data, position)
        assert run is not None
        if run.end() > position:
            position = run.end()
            if run[3] is not None:
                pieces += (run[1], _FILL[run[3]])
                continue
            pieces.append(run[0])
            if run[2] is None:
                continue
            put = data[position : position + _PUT_BYTES[data[position]]]
            if data[position] == _LONG_BINPUT and int.from_bytes(put[1:], "little") >= end:
                break
            # The list is what is kept; it is taken off the stack again, and the tuple stays.
            pieces += (b"]", put, b"0")
            position += len(put)
            continue
        opcode, start = data[position], position
        if opcode == _STOP and position == end - 1:
            return b"".join((*pieces, b"."))
        counted = _COUNTED.get(opcode)
        if counted is not None:
            position += 1 + counted + int.from_bytes(data[position + 1 : position + 1 + counted], "little")
        elif opcode == _LONG_BINPUT and int.from_bytes(data[position + 1 : position + 5], "little") < end:
            position += 5
        elif opcode == _GLOBAL_OPCODE and (name := _GLOBAL.match(data, position)) is not None:
            position = name.end()
        elif opcode == _FRAME:
            start = position = position + _FRAME_BYTES
        else:
            break
        pieces.append(data[start:position])
    raise CorruptError(f"{what} is damaged: not a pickle of torch (byte {min(position, end)}); use another checkpoint")


class _Restricted(pickle.Unpickler):
    def __init__(
        self, data: bytes, known: Globals, persistent: Callable[[object], object] | None, allow_any: bool
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._effort = Effort()
        self._known = known
        self._persistent = persistent
        self._allow_any = allow_any

    def find_class(self, module: str, name: str) -> object:
        try:
            return self._known(module, name)
        except KeyError:
            if self._allow_any:
                return super().find_class(module, name)
            raise _UnknownName(f"{module}.{name}") from None

    def persistent_load(self, pid: object) -> object:
        """What stands for something that is kept outside of the stream; or a dict, filled as ``check_opcodes`` asks."""
        if isinstance(pid, tuple) and pid and isinstance(pid[0], dict):
            table, entries = pid if len(pid) == 2 else (pid[0], pid[1:])
            keys = entries[::2]
            if all(type(key) is str for key in keys):
                table.update(zip(keys, entries[1::2], strict=True))
            else:
                self._effort.fill(table, list(zip(keys, entries[1::2], strict=True)), keys)
            return table
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to something outside of itself")
        return self._persistent(pid)


class _UnknownName(Exception):
    """A stream names something that is not known; the message is the name."""


def unpickle(
    data: bytes,
    known: Globals,
    *,
    what: str,
    persistent: Callable[[object], object] | None = None,
    allow_any: bool = False,
) -> object:
    """What the stream ``data`` builds of the things that ``known`` gives; UnsafeError when it names another.

    ``allow_any`` lets it name, and so run, everything. ``what`` begins the message of an error.
    """
    if not allow_any:
        data = check_opcodes(data, what=what)
    try:
        return _Restricted(data, known, persistent, allow_any).load()
    except _UnknownName as error:
        raise UnsafeError(
            f"{what} names {str(error)!r}, and loading it would run code; "
            "pass allow_pickle=True if you trust the checkpoint"
        ) from None
    except TooMuchEffort as error:
        raise CorruptError(f"{what} is damaged: {error}; use another checkpoint") from None
    except Exception as error:
        # Anything may come out of a stream that is not what it should be; all of it means the same.
        raise CorruptError(f"{what} is damaged: {type(error).__name__}: {error}; use another checkpoint") from error


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


def _pickles(stream: io.IOBase, what: str) -> Iterator[io.IOBase]:
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
    __slots__ = ("_hash", "_items", "size")
    size: int

    def __init__(self, items: Iterable[object]) -> None:
        self._items = list(items)
        self.size = 1 + sum(item.size if type(item) is _Tuple else 1 for item in self._items)
        try:
            self._hash: int | None = hash(tuple(self._items))
        except TypeError:
            self._hash = None

    def __iter__(self) -> Iterator[object]:
        return iter(self._items)

    def __hash__(self) -> int:
        if self._hash is None:
            raise TypeError("unhashable")
        return self._hash

    def __eq__(self, other: object) -> bool:
        return type(other) is _Tuple and self._items == other._items


class _Table(dict[object, object]):
    """A dict, or what has keys like one: TooMuchEffort when these take too long."""

    def __init__(self, keys: Iterable[object] = ()) -> None:
        super().__init__()
        self._effort = Effort()
        for key in keys:
            self[key] = None

    def __setitem__(self, key: object, value: object) -> None:
        if type(key) is _Tuple and key.size > _LARGEST_KEY:
            raise TooMuchEffort
        self._effort.begin()
        super().__setitem__(key, value)
        self._effort.count(KEY_S)

    def __setstate__(self, state: object) -> None:
        """Attributes have no keys of interest."""


class _Thing:
    """What a pickle calls for by name, and what comes of calling that."""

    def __new__(cls, *arguments: object) -> _Thing:
        return super().__new__(cls)

    def __init__(self, *arguments: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


_NAMED = {
    "builtins.complex": complex,
    "builtins.set": _Table,
    "collections.Counter": _Table,
    "collections.OrderedDict": lambda pairs=(): _Table(next(iter(pair)) for pair in pairs),
    "torch.Size": _Tuple,
}


def _new_tuple(count: int | None) -> Callable[[Any], None]:
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

    def find_class(self, module: str, name: str) -> object:
        return _NAMED.get(f"{module}.{name}", _Thing)

    def persistent_load(self, pid: object) -> object:
        return _Thing()


class _WholeValues:
    """The pickle module for values, of which one rank's is stored: other ranks' parts of a tensor would be lost."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: object) -> Any:
            if isinstance(value, torch.Tensor) and is_sharded(value):
                raise pickle.PicklingError("it has a sharded tensor in it; put that into a dict, to have a key")
            return NotImplemented


def serialize_object(value: object, *, key: str = "") -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer, pickle_module=_WholeValues)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        what = f"the value of {key[:200]!r}, a {type(value).__name__}," if key else f"a {type(value).__name__}"
        raise InvalidStateError(f"{what} cannot be pickled: {error}", key=key or None) from error
    return buffer.getvalue()


def deserialize_object(data: io.BytesIO, *, key: str, allow_pickle: bool) -> object:
    """The value in torch.save bytes; UnsafeError when that needs code to run and ``allow_pickle`` is not set."""
    if not allow_pickle:
        weigh(data, what=f"the value of {key!r}")
    try:
        value: object = torch.load(data, map_location="cpu", weights_only=not allow_pickle)
        return value
    except pickle.UnpicklingError as error:
        if allow_pickle:
            raise CorruptError(f"the value of {key!r} is not a valid pickle: {error}", key=key) from error
        raise UnsafeError(
            f"{key!r} is a pickle of more than plain values, and loading it would run code; "
            "pass allow_pickle=True if you trust the checkpoint",
            key=key,
        ) from error
    except Exception as error:
        if allow_pickle and not isinstance(error, (RuntimeError, EOFError, ValueError, KeyError)):
            raise  # it comes from code of the checkpoint
        # Anything may come out of bytes that are not what they should be; all of it means the same.
        raise CorruptError(f"the value of {key!r} is not what torch.save writes: {error}", key=key) from error


_Path = str | os.PathLike[str]
_ARCHIVE_START = b"PK\x03\x04"
_CHECKED_BYTES = 1 << 20
_DAMAGED = (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, ImportError, struct.error)


def read_pt(path: _Path, *, allow_pickle: bool = False, verify: bool = True) -> STATE_DICT_TYPE:
    """The state that torch.save wrote to ``path``, on the CPU.

    The tensors stay in the file until they are touched; only those of files in the format before torch 1.6, which is no
    archive, are loaded as a whole. ``verify`` checks the checksums that the archive has. Nothing but weights, plain
    containers and plain values is unpickled unless ``allow_pickle`` is set.
    """
    name = os.fspath(path)
    if not posix.exists(name):
        raise NotFoundError(f"there is no file {name!r}")
    is_archive = _check_archive(name, verify=verify)
    if not allow_pickle:
        with posix.open_stream(name, "rb") as stream, posix.reporting("read", name):
            weigh(stream, what=repr(name))
    try:
        state: STATE_DICT_TYPE = torch.load(name, map_location="cpu", weights_only=not allow_pickle, mmap=is_archive)
    except pickle.UnpicklingError as error:
        reason = first_line(error)
        if allow_pickle or (not is_archive and not _is_pickle(name)):
            raise NotACheckpointError(f"{name!r} was not written by torch.save: {reason}") from error
        raise UnsafeError(
            f"{name!r} has more than weights and plain values in it, and loading it would run code; "
            "pass allow_pickle=True if you trust it"
        ) from error
    except _DAMAGED as error:
        reason = first_line(error)
        if is_archive and _has_pickle(name):
            raise CorruptError(f"{name!r} is damaged: {reason}; use another file", path=name) from error
        raise NotACheckpointError(f"{name!r} cannot be read as a file that torch.save wrote: {reason}") from error
    if not isinstance(state, Mapping):
        raise InvalidStateError(
            f"{name!r} holds a {type(state).__name__}, but a state is a dict of names to values; save it in a dict"
        )
    return state


def _check_archive(name: str, *, verify: bool) -> bool:
    """Whether the file is an archive; CorruptError when a record is damaged."""
    with posix.open_stream(name, "rb") as stream, posix.reporting("read", name):
        is_archive = stream.read(len(_ARCHIVE_START)) == _ARCHIVE_START
        try:
            if not zipfile.is_zipfile(stream) and not is_archive:
                return False
            with zipfile.ZipFile(stream) as archive:
                records = archive.infolist()
                if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                    problem = "has compressed records, which torch.save never writes"
                    raise CorruptError(f"{name!r} {problem}; use another file", path=name)
                # torch can be told to compute no checksums; then it writes 0.
                for record in (record for record in records if verify and record.CRC):
                    with archive.open(record) as file:
                        while file.read(_CHECKED_BYTES):
                            pass
        except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, RuntimeError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which is what a mad offset gets
                raise
            raise CorruptError(f"{name!r} is a damaged archive: {error}; use another file", path=name) from error
    return True


def _has_pickle(name: str) -> bool:
    with posix.open_stream(name, "rb") as stream, zipfile.ZipFile(stream) as archive:
        return any(record.endswith("/data.pkl") for record in archive.namelist())


def _is_pickle(name: str) -> bool:
    with posix.open_stream(name, "rb") as stream:
        return stream.read(1) == pickle.PROTO  # type: ignore[no-any-return]


def encode_message(value: object) -> bytes:
    """``value`` as bytes for another rank of this job; whatever pickling raises passes through."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def decode_message(data: bytes) -> Any:
    """The value that another rank of this job encoded."""
    return pickle.loads(data)
