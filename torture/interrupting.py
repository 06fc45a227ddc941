"""An interrupt at a chosen bytecode of the calling thread, just as the interpreter would deliver it.

The interpreter looks for signals where a function begins or goes on, after a call of something that is written in C,
and where a loop goes back. So these are the points. At such an instruction the interrupt is made to be there, by C
alone, and it is the interpreter that raises it: after the call is done and before its result is kept, say, which is
where things are lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType
from typing import Any, NamedTuple

import holdfast

PACKAGE = os.path.join(os.path.dirname(holdfast.__file__), "")
_LIBRARIES = (contextlib.__file__,)
_STARTS = frozenset(
    number
    for name, number in dis.opmap.items()
    if name in ("CALL", "CALL_FUNCTION_EX") or ("JUMP_BACKWARD" in name and "NO_INTERRUPT" not in name)
)


class Point(NamedTuple):
    """An instruction where an interrupt can come; ``offset`` is -1 where a function begins or goes on."""

    file: str
    line: int
    function: str
    offset: int

    @classmethod
    def of(cls, code: CodeType, offset: int) -> Point:
        """The one at ``offset`` of ``code``."""
        return cls(code.co_filename.removeprefix(PACKAGE), code.co_firstlineno, code.co_name, offset)


def _goes_on(frame: FrameType) -> bool:
    """Whether the interpreter looks for signals here: a generator that is closed is told so without."""
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap.get("RESUME")


def _is_watched(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE) or code.co_filename in _LIBRARIES


def points_of(operation: Callable[[], object]) -> dict[Point, int]:
    """The points that the calling thread comes to in ``operation``, and how often."""
    counts: Counter[tuple[CodeType, int]] = Counter()

    def begin(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not _is_watched(code):
            return None
        counts[code, -1] += _goes_on(frame)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    def step(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            code = frame.f_code
            if code.co_code[frame.f_lasti] in _STARTS:
                counts[code, frame.f_lasti] += 1
        return step

    sys.settrace(begin)
    try:
        operation()
    finally:
        sys.settrace(None)
    return {Point.of(code, offset): count for (code, offset), count in counts.items()}


def _ignore(frame: FrameType, event: str, argument: Any) -> None:
    return None


# Of the interpreter itself: from here to where it looks for signals, no Python runs.
_set_interrupt = ctypes.PyDLL(None).PyErr_SetInterrupt
_set_interrupt.argtypes = (ctypes.py_object,) * 3
# What it returns is the frame's next trace function: the default of getattr is not needed.
_set_interrupt.restype = partial(getattr, sys.modules[__name__], "_ignore")


# A trace function that is no Python: one that is would take the interrupt itself where the call begins a function or
# throws into a generator, and what throws into a generator that way skips its ``finally``, as no signal can.
_nothing = ctypes.PyDLL(None).Py_IsInitialized
_nothing.argtypes = (ctypes.py_object,) * 3
_nothing.restype = None


class Interruption:
    """Interrupts the calling thread when it comes to ``point`` for the ``count``-th time."""

    def __init__(self, point: Point, count: int = 1) -> None:
        self._point = point
        self._left = count
        self._before = -1
        self._is_call = False
        self.has_struck = False

    def _begin(self, frame: FrameType, event: str, argument: Any) -> Any:
        point, code = self._point, frame.f_code
        if self.has_struck or code.co_firstlineno != point.line or Point.of(code, point.offset) != point:
            return None
        if point.offset == -1:
            if _goes_on(frame) and self._comes():
                raise KeyboardInterrupt
            return None
        if self._before == -1:
            offsets = [instruction.offset for instruction in dis.get_instructions(code)]
            if point.offset not in offsets:
                return None  # two on one line have one name
            self._is_call = dis.opname[code.co_code[point.offset]].startswith("CALL")
            self._before = offsets[offsets.index(point.offset) - self._is_call]
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and frame.f_lasti == self._before and self._comes():
            if not self._is_call:
                raise KeyboardInterrupt
            sys.settrace(_nothing)
            return _set_interrupt  # which the interpreter calls before the next instruction, the call
        return self._step

    def _comes(self) -> bool:
        self._left -= 1
        self.has_struck = self.has_struck or self._left == 0
        return self._left == 0

    def __enter__(self) -> Interruption:
        sys.settrace(self._begin)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
