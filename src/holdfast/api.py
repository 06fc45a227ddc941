"""The error of torch's protocol and the shape in which torch's code passes errors around, under torch's names.

``CheckpointException`` is this library's base error: an ``Exception``, one line. Its ``failures`` has for each rank the
error and the stack that it was raised from: a ``WRAPPED_EXCEPTION``.
"""

from __future__ import annotations

import traceback
from typing import Any

from holdfast._ranks.ranks import wrapped
from holdfast.errors import WRAPPED_EXCEPTION, CheckpointException

__all__ = ["WRAPPED_EXCEPTION", "CheckpointException"]


_wrap_exception = wrapped


def _is_wrapped_exception(obj: Any) -> bool:
    """Whether ``obj`` is a WRAPPED_EXCEPTION."""
    if not isinstance(obj, tuple) or len(obj) != 2:
        return False
    return isinstance(obj[0], BaseException) and isinstance(obj[1], traceback.StackSummary)
