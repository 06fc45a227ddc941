"""The error of torch's protocol and the shape in which torch's code passes errors around, under torch's names.

``CheckpointException`` is this library's base error: an ``Exception``, one line, with ``failures`` (rank to error) and
``tracebacks`` (rank to text). What torch code pairs with a stack is a ``WRAPPED_EXCEPTION``.
"""

from __future__ import annotations

import traceback
from typing import Any

from holdfast.errors import CheckpointException

__all__ = ["CheckpointException"]

WRAPPED_EXCEPTION = tuple[BaseException, traceback.StackSummary]


def _wrap_exception(exc: BaseException) -> WRAPPED_EXCEPTION:
    """``exc`` with the stack that it was raised from, in a form that can be pickled."""
    frames = traceback.extract_tb(exc.__traceback__)
    # Made anew, because newer Pythons keep the code object in a frame, and code cannot be pickled.
    plain = [(frame.filename, frame.lineno or 0, frame.name, frame.line) for frame in frames]
    return exc, traceback.StackSummary.from_list(plain)


def _is_wrapped_exception(obj: Any) -> bool:
    """Whether ``obj`` is a WRAPPED_EXCEPTION."""
    if not isinstance(obj, tuple) or len(obj) != 2:
        return False
    return isinstance(obj[0], BaseException) and isinstance(obj[1], traceback.StackSummary)
