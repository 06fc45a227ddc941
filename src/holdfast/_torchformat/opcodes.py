"""Pickle streams, looked at before anything interprets them, and an unpickler that knows only the names it is given.

Invariant: what is decoded here runs no code but the constructors of harmless stand-ins, which live as long as the one
call: a stream can neither reach the program's classes nor change them. Opcodes that no writer of torch's files uses are
refused, and so are memo positions beyond the length of the stream, for which the interpreter would allocate any amount
of memory. A tuple is never used twice: a few dozen of them, each made of the one before twice over, would keep the
interpreter busy for ever as soon as they become a key. Dicts are filled by us, who watch how long their keys take, and
sets are refused. Never imports a module because a stream names it.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from typing import Any

from holdfast._values.effort import Effort, TooMuchEffort
from holdfast.errors import CorruptError, UnsafeError

Globals = Callable[[str, str], Any]
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
    raise CorruptError(f"{what} is damaged: no pickle of torch's (byte {min(position, end)}); use another checkpoint")


class _Restricted(pickle.Unpickler):
    def __init__(self, data: bytes, known: Globals, persistent: Callable[[Any], Any] | None, allow_any: bool) -> None:
        super().__init__(io.BytesIO(data))
        self._effort = Effort()
        self._known = known
        self._persistent = persistent
        self._allow_any = allow_any

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name, or, where everything is allowed, what it names."""
        try:
            return self._known(module, name)
        except KeyError:
            if self._allow_any:
                return super().find_class(module, name)
            raise _UnknownName(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
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
    persistent: Callable[[Any], Any] | None = None,
    allow_any: bool = False,
) -> Any:
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
