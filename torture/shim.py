"""The faults of shim.c, from Python: built with the system's compiler, preloaded into a process, armed after a fork."""

from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import os
import struct
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
EVER = (1 << 62) - 1


class Call(enum.IntEnum):
    """The kinds of calls, as shim.c numbers them; CREATE is an open with O_CREAT, CLOSE_WRITTEN of what was written."""

    OPEN = 0
    CREATE = 1
    WRITE = 2
    PWRITE = 3
    FSYNC = 4
    FTRUNCATE = 5
    FALLOCATE = 6
    LINK = 7
    RENAME = 8
    UNLINK = 9
    MKDIR = 10
    CLOSE_WRITTEN = 11
    CLOSE = 12
    READ = 13
    PREAD = 14
    FSTAT = 15
    STAT = 16
    MMAP = 17
    FLOCK = 18
    OPENDIR = 19
    FCNTL = 20
    RMDIR = 21


class Action(enum.IntEnum):
    """What happens at the chosen call, as shim.c numbers it."""

    NOTHING = 0
    KILL_BEFORE = 1
    KILL_AFTER = 2
    FAIL = 3
    SHORTEN = 4
    CUT_BEFORE = 5
    CUT_AFTER = 6
    ORPHAN_BEFORE = 7
    ORPHAN_AFTER = 8


CHANGING = frozenset(
    {
        Call.CREATE,
        Call.WRITE,
        Call.PWRITE,
        Call.FSYNC,
        Call.FTRUNCATE,
        Call.FALLOCATE,
        Call.LINK,
        Call.RENAME,
        Call.UNLINK,
        Call.MKDIR,
        Call.CLOSE_WRITTEN,
        Call.RMDIR,
    }
)
"""The calls that change a file system, or make a change durable."""

EVERY = frozenset(Call)
TRANSFERS = frozenset({Call.WRITE, Call.PWRITE, Call.READ, Call.PREAD})
SHORT_BY = {"one byte": 1, "half": 2, "all but one byte": 3, "half, whole sectors": 4}
"""How much of a transfer is done, and the parameter of SHORTEN that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What to do at the ``number``-th of the ``counted`` calls, and at the ``times - 1`` after it.

    ``parameter`` is the errno of FAIL or the shortening of SHORTEN. The default only counts.
    """

    counted: Collection[Call] = CHANGING
    action: Action = Action.NOTHING
    number: int = 0
    times: int = 1
    parameter: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many calls were made so far, of each kind too, and how many the fault struck."""

    calls: int
    struck: int
    by_call: dict[Call, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One call: ``error`` is its errno or 0, ``data`` what a write took, ``other`` the new name of a link or rename.

    A write without an offset of its own has -1, a truncation its new size as ``length``.
    """

    call: Call
    error: int
    offset: int
    length: int
    flags: int
    path: str
    other: str
    data: bytes


def built_shim() -> Path:
    """The compiled library; built once for each version of its source."""
    source = SOURCE.read_bytes()
    path = Path(tempfile.gettempdir()) / f"holdfast-shim-{os.getuid()}-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if not path.exists():
        draft = path.with_suffix(f".{os.getpid()}")
        command = ["gcc", "-O2", "-shared", "-fPIC", "-o", str(draft), str(SOURCE), "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
        draft.replace(path)
    return path


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    if not hasattr(library, "torture_arm"):
        raise RuntimeError("the shim is not loaded into this process; start it with LD_PRELOAD")
    library.torture_arm.argtypes = (
        ctypes.c_char_p,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
        ctypes.c_long,
        ctypes.c_int,
    )
    library.torture_arm.restype = None
    for name in ("torture_calls", "torture_struck", "torture_calls_of"):
        getattr(library, name).restype = ctypes.c_long
    return library


@contextmanager
def armed(root: str | os.PathLike[str], fault: Fault, *, trace: int = -1) -> Iterator[None]:
    """Inside of the block calls on files under ``root`` are counted and the fault strikes; ``trace`` gets them all."""
    library = _library()
    library.torture_arm(os.fsencode(root), *_numbers(fault), trace)
    try:
        yield
    finally:
        library.torture_disarm()


@contextmanager
def children_armed(root: str | os.PathLike[str], fault: Fault, *, trace: str | os.PathLike[str]) -> Iterator[None]:
    """As ``armed``, for the programs that are started inside of the block; what they call is in the file ``trace``."""
    numbers = " ".join(str(int(number)) for number in _numbers(fault))
    added = {"TORTURE_ROOT": os.fspath(root), "TORTURE_FAULT": numbers, "TORTURE_TRACE": os.fspath(trace)}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _numbers(fault: Fault) -> tuple[int, Action, int, int, int]:
    """The fault as the shim takes it: a bit for each call, what happens, its parameter, the first and last number."""
    mask = functools.reduce(lambda bits, call: bits | 1 << call, fault.counted, 0)
    last = fault.number + fault.times - 1 if fault.number else 0
    return mask, fault.action, fault.parameter, fault.number, last


def cut_power(root: str | os.PathLike[str]) -> None:
    """Stop the file system of ``root``, whatever it has not written."""
    with armed(root, Fault(action=Action.CUT_BEFORE)):
        _library().torture_cut_power()


def counts() -> Counts:
    """What has been counted since the shim was last armed."""
    library = _library()
    by_call = {call: library.torture_calls_of(int(call)) for call in Call}
    return Counts(
        calls=library.torture_calls(),
        struck=library.torture_struck(),
        by_call={call: count for call, count in by_call.items() if count},
    )


_RECORD = struct.Struct("<iiqqIIII")


def read_trace(path: str | os.PathLike[str]) -> list[Record]:
    """The calls that an armed shim wrote to the file ``path``."""
    data = Path(path).read_bytes()
    records: list[Record] = []
    at = 0
    while at < len(data):
        call, error, offset, length, path_length, other_length, data_length, flags = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        ends = [at + path_length, at + path_length + other_length, at + path_length + other_length + data_length]
        records.append(
            Record(
                call=Call(call),
                error=error,
                offset=offset,
                length=length,
                flags=flags,
                path=os.fsdecode(data[at : ends[0]]),
                other=os.fsdecode(data[ends[0] : ends[1]]),
                data=data[ends[1] : ends[2]],
            )
        )
        at = ends[2]
    return records
